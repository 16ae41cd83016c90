"""Published checkpoints as our models, and our models as published checkpoints."""

from lm.convert.checkpoint import check_new_folder, describe, load, save
from lm.convert.config_json import config_json
from lm.convert.heads import SENTENCE_TRANSFORMER, class_name_of_model, head_class_name
from lm.convert.sentence_transformers import module_files, pooling_of

__all__ = [
    "SENTENCE_TRANSFORMER",
    "check_new_folder",
    "class_name_of_model",
    "config_json",
    "describe",
    "head_class_name",
    "load",
    "module_files",
    "pooling_of",
    "save",
]
