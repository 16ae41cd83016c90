"""The head of a model tuned on a labelled task, in the published format: the class that computes the same."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from lm.convert.config_json import config_json
from lm.convert.families import FAMILIES
from lm.convert.family import Json
from lm.convert.tensors import Tensor
from lm.nn.composed import Tuned
from lm.nn.config import HeadConfig, ModelConfig
from lm.nn.transformer import Transformer
from lm.settings import SettingError

HEAD_CLASSES = {  # kind of head -> the end of the name of their class
    "classes": "ForSequenceClassification",
    "regression": "ForSequenceClassification",
    "choice": "ForMultipleChoice",
    "tokens": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}
HEAD_MODULES = (
    "classifier",
    "pre_classifier",
    "qa_outputs",
    "score",
    "classification_head",
)  # of their heads


def class_of(model: Tuned) -> str:
    """Return the class of transformers that computes what a tuned model does; SettingError for none."""
    return head_class(cast(Transformer, model.body).config, model.settings)


def head_class(config: ModelConfig, head: HeadConfig) -> str:
    """Return the class of transformers of such a head on such a model; SettingError if there is none."""
    table = FAMILIES[family := config_json(config)["model_type"]]
    name, _, kinds = table.heads.partition("=")
    if head.layers == "mixed-frozen":
        raise SettingError("no class of transformers mixes layers (tuning.layers='mixed-frozen')")
    if head.kind not in kinds.split(","):
        raise SettingError(f"transformers has no class of a {family} with one linear layer for {head.kind}")
    if head.kind not in ("tokens", "span") and (head.pool, "pooler" in config.heads) != ("first", True):
        pooler = "" if "pooler" in config.heads else ", and the checkpoint has no pooler"
        raise SettingError(
            f"{name}{HEAD_CLASSES[head.kind]} reads the first position through a pooler: tuning.pool="
            f"{head.pool!r} should be 'first'{pooler}"
        )
    return name + HEAD_CLASSES[head.kind]


def head_json(model: Tuned, labels: Sequence[str]) -> Json:
    """What a config.json says of the head: its class, and the names of ``labels`` (none: of numbers)."""
    kind = model.settings.kind
    theirs: Json = {"architectures": [class_of(model)]}
    if kind == "choice":
        return theirs
    texts = list(labels) or [f"LABEL_{number}" for number in range(model.head.out.kernel.shape[-1])]
    theirs |= {"id2label": {str(number): text for number, text in enumerate(texts)}}
    theirs |= {"label2id": {text: number for number, text in enumerate(texts)}}
    problems = {"classes": "single_label_classification", "regression": "regression"}
    return theirs | ({"problem_type": problems[kind]} if kind in problems else {})


def head_tensors(model: Tuned, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """``{their name: tensor}`` of the head, whose parameters are called ``head.out.*`` here."""
    module = "qa_outputs" if model.settings.kind == "span" else "classifier"
    kernel, bias = shapes["head.out.kernel"], shapes["head.out.bias"]
    return {
        f"{module}.weight": Tensor((("head.out.kernel", None),), kernel[-1:], kernel[::-1], turned=True),
        f"{module}.bias": Tensor((("head.out.bias", None),), bias, bias),
    }


def below_head(model: Tuned, due: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a body's tensors ``due`` that the class of a tuned model has too: no pre-training head's."""
    pooled = model.settings.kind not in ("tokens", "span")
    ours = ("embed.", "encoder.", *(["pooler."] * pooled))
    return {name: tensor for name, tensor in due.items() if tensor.parts[0][0].startswith(ours)}


def has_head(theirs: Json) -> bool:
    """Whether a config.json is of a model that was tuned with a head."""
    ends = tuple(HEAD_CLASSES.values())
    return any(str(name).endswith(ends) for name in theirs.get("architectures") or ())


def is_of_head(name: str) -> bool:
    """Whether a tensor is of a head, which is not read: only the model below it is."""
    return re.match(rf"({'|'.join(HEAD_MODULES)})\.", name) is not None
