"""Heads that were fine-tuned on a labelled task, as the classes of transformers that compute the same."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from lm.config.base import SettingError
from lm.config.model import HeadConfig, ModelConfig
from lm.convert.config_json import config_json, family_of
from lm.convert.schema import SAME, TASK_CLASS_ENDINGS, TRANSPOSE, HFConfig
from lm.convert.tensors import Shape, Tensor
from lm.nn.finetune import ModelWithHead
from lm.nn.transformer import Transformer

# Published modules that are fine-tuned heads.
HEAD_MODULES = ("classifier", "pre_classifier", "qa_outputs", "score", "classification_head")
TOKEN_HEADS = ("tokens", "span")  # heads that read every position, without a pooler
PROBLEM_TYPES = {"classes": "single_label_classification", "regression": "regression"}


def class_of(model: ModelWithHead) -> str:
    """Return the class of transformers that computes what a fine-tuned model does; SettingError if none."""
    return head_class(cast(Transformer, model.body).config, model.settings)


def head_class(config: ModelConfig, head: HeadConfig) -> str:
    """Return the class of transformers with such a head on such a model; SettingError if there is none."""
    family = family_of(config_json(config))
    if head.layers == "mixed-frozen":
        raise SettingError("no class of transformers mixes layers (tuning.layers='mixed-frozen')")
    if head.kind not in family.task_classes:
        raise SettingError(
            f"transformers has no class of a {family.model_type} with one linear layer for {head.kind}"
        )
    task_class, has_pooler = family.task_classes[head.kind], "pooler" in config.heads
    if head.kind not in TOKEN_HEADS and (head.pool != "first" or not has_pooler):
        lacking = "" if has_pooler else ", and the checkpoint has no pooler"
        raise SettingError(
            f"{task_class} reads the first position through a pooler: tuning.pool={head.pool!r} should be "
            f"'first'{lacking}"
        )
    return task_class


def head_json(model: ModelWithHead, labels: Sequence[str]) -> HFConfig:
    """Return the fields of config.json that describe the head: its class, and the names of its labels.

    Without ``labels`` they are named by number, as transformers does.
    """
    kind = model.settings.kind
    fields: HFConfig = {"architectures": [class_of(model)]}
    if kind == "choice":
        return fields
    names = list(labels) or [f"LABEL_{number}" for number in range(model.head.out.kernel.shape[-1])]
    fields["id2label"] = {str(number): name for number, name in enumerate(names)}
    fields["label2id"] = {name: number for number, name in enumerate(names)}
    if kind in PROBLEM_TYPES:
        fields["problem_type"] = PROBLEM_TYPES[kind]
    return fields


def head_tensors(model: ModelWithHead, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the tensors of the head by name; ``shapes`` are those of head.out.kernel and head.out.bias."""
    module = "qa_outputs" if model.settings.kind == "span" else "classifier"
    kernel, bias = "head.out.kernel", "head.out.bias"
    return {
        f"{module}.weight": Tensor(((kernel, None),), (shapes[kernel],), TRANSPOSE),
        f"{module}.bias": Tensor(((bias, None),), (shapes[bias],), SAME),
    }


def body_tensors(model: ModelWithHead, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the body's tensors that the class of a fine-tuned model has: no pre-training head's."""
    modules = ["embed.", "encoder."]
    if model.settings.kind not in TOKEN_HEADS:
        modules.append("pooler.")
    return {
        name: tensor for name, tensor in tensors.items() if tensor.sources[0][0].startswith(tuple(modules))
    }


def has_head(hf_config: HFConfig) -> bool:
    """Return whether a config.json is of a model with a fine-tuned head."""
    endings = tuple(TASK_CLASS_ENDINGS.values())
    return any(str(name).endswith(endings) for name in hf_config.get("architectures") or ())


def is_head_tensor(name: str) -> bool:
    """Return whether a tensor is of a fine-tuned head."""
    return re.match(rf"({'|'.join(HEAD_MODULES)})\.", name) is not None
