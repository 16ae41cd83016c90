"""Prompts of unequal lengths for decoding."""

import numpy as np

from lm.batch import Batch, Side

LENGTHS = np.array([5, 2, 0])  # of the prompts; the last row is padding


def prompts(architecture):
    """Three rows of prompts, or of encoder features."""
    tokens = np.random.default_rng(0).integers(2, 40, (3, 5))
    valid = (np.arange(5)[None] < LENGTHS[:, None]).astype(int)
    if "encoder" in architecture:
        return Batch(encoder=Side(tokens=tokens * valid, segment_ids=valid))
    # The whole prompt is the prefix.
    return Batch(decoder=Side(tokens=tokens * valid, segment_ids=valid, causal_attention=valid))
