"""Skip-gram from its initial tables to the last pass over the text."""

from collections.abc import Sequence

import jax
import numpy as np

from lm.classical.word2vec import Tables, initial_tables, train_epoch
from lm.config.classical import VectorsConfig


def train_skipgram(
    documents: Sequence[np.ndarray], shape: tuple[int, int], config: VectorsConfig, seed: int
) -> Tables:
    """Return tables [V,D] of this ``shape``, trained for all epochs without an interruption."""
    tables = initial_tables(jax.random.key(seed), *shape)
    for epoch in range(config.epochs):
        tables = train_epoch(tables, documents, config, seed, epoch)
    return tables
