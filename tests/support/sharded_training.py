"""A small decoder, its batches, and a few steps of training it on a mesh."""

import numpy as np
from drawn import drawn_state

from lm.batch import Batch, Side
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.model import ModelConfig
from lm.nn.transformer import Transformer

# only V is 40
MODEL = ModelConfig(
    "decoder",
    40,
    1,
    1,
    d_model=16,
    mlp=MlpConfig(d_ff=32),
    attention=AttentionConfig(d_kv=4, num_heads=2),
    dropout=0.0,
)


def transformer_batch(step):
    rng = np.random.default_rng(step)
    weights = (np.arange(6) < rng.integers(0, 7, (8, 1))).astype(np.float32)
    source, tokens, targets = (rng.integers(3, 32, (8, length), np.int32) for length in (10, 6, 6))
    segments = (weights > 0).astype(np.int32)
    decoder = Side(tokens=tokens, segment_ids=segments, targets=targets, loss_weights=weights)
    return Batch(encoder=Side(tokens=source), decoder=decoder)


def trained(steps):
    assert isinstance(steps.abstract.eval_model, Transformer)
    state, step = drawn_state(steps), steps.seeded_train_step(0)
    found = []
    for i in range(3):
        state, metrics = step(state, steps.shard_batch(transformer_batch(i)))
        found.append([float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    return found, {name: np.asarray(value) for name, value in state.params.items()}
