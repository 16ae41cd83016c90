"""Transformer language models in JAX: data, training, evaluation and published checkpoints."""

from lm.devices import choose_platform

choose_platform()
