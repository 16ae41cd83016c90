"""Published checkpoints as our models, and our models as published checkpoints."""

from lm.convert.checkpoint import load, save

__all__ = ["load", "save"]
