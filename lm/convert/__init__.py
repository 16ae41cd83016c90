"""Published checkpoints as our models, and our models as published checkpoints."""

from lm.convert.checkpoint import CheckpointError, load, save, tensor_names

__all__ = ["CheckpointError", "load", "save", "tensor_names"]
