"""Published checkpoints as our models, and our models as published checkpoints."""

from lm.convert.checkpoint import load, save
from lm.convert.heads import class_of, head_class

__all__ = ["class_of", "head_class", "load", "save"]
