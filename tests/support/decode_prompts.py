"""Prompts of unequal lengths for decoding."""

import numpy as np

LENGTHS = np.array([5, 2, 0])  # of the prompts; the last row is padding


def prompts(architecture):
    """Three rows of prompts, or of encoder features."""
    tokens = np.random.default_rng(0).integers(2, 40, (3, 5))
    valid = (np.arange(5)[None] < LENGTHS[:, None]).astype(int)
    if "encoder" in architecture:
        return {"encoder_input_tokens": tokens * valid, "encoder_segment_ids": valid}
    return {
        "decoder_input_tokens": tokens * valid,
        "decoder_segment_ids": valid,
        "decoder_causal_attention": valid,  # the whole prompt is the prefix
    }
