"""Published checkpoints as our models, and our models as published checkpoints."""

from lm.convert.checkpoint import load, save, tensor_names

__all__ = ["load", "save", "tensor_names"]
