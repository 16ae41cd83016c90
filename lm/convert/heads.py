"""Export heads that were fine-tuned on a labelled task.

A head is exported as a class of transformers, such as BertForSequenceClassification, if one computes the same
outputs. Otherwise a head on whole texts is exported as modules of sentence-transformers: the model, a
pooling, dense layers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from lm.config.base import SettingError, changes
from lm.config.model import HeadConfig, HeadDense, ModelConfig
from lm.convert.config_json import config_json, family_of
from lm.convert.schema import SAME, TASK_CLASS_ENDINGS, TRANSPOSE, Family, HFConfig, TaskClass
from lm.convert.tensors import Shape, Tensor
from lm.nn.finetune import ModelWithHead
from lm.nn.layers import Linear
from lm.nn.transformer import Transformer
from lm.sharding import named

# Published modules that are fine-tuned heads.
HEAD_MODULES = (
    "classifier",
    "pre_classifier",
    "qa_outputs",
    "score",
    "classification_head",
    "sequence_summary",
    "logits_proj",
    "pooler",
    "head",  # the dense layer and norm of ModernBERT, where no masked LM follows
    "dense",  # EuroBERT's
)
HEAD_FIELDS = ("id2label", "label2id", "problem_type", "num_labels")  # of config.json
PROBLEM_TYPES = {"classes": "single_label_classification", "regression": "regression"}
SENTENCE_TRANSFORMER = "SentenceTransformer"  # takes the place of a class of transformers
POOLER, DENSE, OUT = "pooler", "head.dense", "head.out"  # modules of ours that a published head holds
LAST_NORM_BIAS = "decoder.norm.bias"
FOLD_TOLERANCE = 1e-5  # largest error of an output whose bias moves into the norm below

Arrays = dict[str, Any]  # path of a parameter -> its numbers


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer between the pooled state of a text and the linear layer of the outputs."""

    module: str  # of ours
    activation: HeadDense


@dataclass(frozen=True)
class PublishedHead:
    """Holds how a head is written: as a class of transformers or, without one, as modules."""

    family: Family
    head: HeadConfig
    dense_layers: tuple[DenseLayer, ...]
    task_class: TaskClass | None  # None: modules of sentence-transformers

    @property
    def class_name(self) -> str:
        return SENTENCE_TRANSFORMER if self.task_class is None else self.task_class.name

    def needs_null_pad_token(self, config: ModelConfig) -> bool:
        """Return whether pad_token_id has to be null in config.json.

        The class reads the last token of a text that is not padding, and our head the token that ends the
        text. Where both have the same id, the class would pass over the token that ends the text.
        """
        reads_last = self.task_class is not None and self.task_class.pool == "last"
        return reads_last and config.special.pad == config.special.eos


def class_name_of_model(model: ModelWithHead) -> str:
    """Return the name of the class that computes what a fine-tuned model does.

    It is "SentenceTransformer" or a class of transformers; SettingError if no class does.
    """
    return head_class_name(cast(Transformer, model.body).config, model.settings)


def head_class_name(config: ModelConfig, head: HeadConfig) -> str:
    """Return the name of the class that computes such a head on such a model; SettingError if none does."""
    return published_head(config, head).class_name


def published_head(config: ModelConfig, head: HeadConfig) -> PublishedHead:
    """Return how such a head on such a model is written; SettingError if it cannot be exported."""
    family = family_of(config_json(with_tied_output(config)))
    if head.layers == "mixed-frozen":
        raise SettingError(
            "tuning.layers='mixed-frozen' reads a mixture of all layers, as no class of transformers does; "
            "with 'last' or 'last-frozen' a head can be exported"
        )
    if config.has_encoder and config.has_decoder:
        raise SettingError(
            "the classes of transformers for encoder-decoders shift the decoder's inputs by one position and "
            "this head does not; train with tuning.mixtures instead, where the model writes its answers as "
            "text and can be exported"
        )
    layers = dense_layers(config, head)
    task_class = family.task_classes.get(head.kind)
    if task_class is not None and _computes(task_class, config, head, layers):
        return PublishedHead(family, head, layers, task_class)
    if not head.is_pooled:
        raise SettingError(f"transformers has no class of {family.model_type} for {head.kind}")
    if config.has_decoder and config.embed_width != config.d_model:
        raise SettingError(
            f"the classes of {family.model_type} read {config.embed_width} features behind its last "
            f"projection, and this head {config.d_model} before it"
        )
    return PublishedHead(family, head, layers, None)


def dense_layers(config: ModelConfig, head: HeadConfig) -> tuple[DenseLayer, ...]:
    """Return the dense layers between the pooled state of a text and the outputs, in order."""
    layers = []
    if head.is_pooled and head.pool == "first" and "pooler" in config.heads:
        layers.append(DenseLayer(POOLER, "tanh"))
    if head.dense != "none":
        layers.append(DenseLayer(DENSE, head.dense))
    return tuple(layers)


def _computes(
    task_class: TaskClass, config: ModelConfig, head: HeadConfig, layers: Sequence[DenseLayer]
) -> bool:
    """Return whether a class computes what these layers do."""
    if config.has_decoder and config.embed_width != config.d_model:
        return False
    if head.is_pooled and head.pool != task_class.pool:
        return False
    expected = [] if task_class.dense is None else [task_class.activation]
    if [layer.activation for layer in layers] != expected:
        return False
    # A bias that the class lacks goes into the norm below, if there is one with a bias.
    has_last_norm = config.residual != "post-norm" and config.norm.kind == "layer"
    return task_class.has_bias or not config.bias or has_last_norm


def with_tied_output(config: ModelConfig) -> ModelConfig:
    """Return settings that a config.json can describe: a decoder without an output matrix gets tied logits.

    config.json has no field that says that the matrix is missing: only the class in ``architectures`` does,
    such as GPT2Model or GPT2ForSequenceClassification.
    """
    if config.has_decoder and config.output.logits == "none":
        return changes(config, {"output.logits": "tied"})
    return config


def head_json(published: PublishedHead, labels: Sequence[str], num_outputs: int) -> HFConfig:
    """Return the fields of config.json that describe the head: its class, and the names of its labels.

    Without ``labels`` they are named by number, as transformers does.
    """
    kind, task_class = published.head.kind, published.task_class
    name = base_class(published.family) if task_class is None else task_class.name
    fields: HFConfig = {"architectures": [name]}
    if kind == "choice":
        return fields
    names = list(labels) or [f"LABEL_{number}" for number in range(num_outputs)]
    fields["id2label"] = {str(number): label for number, label in enumerate(names)}
    fields["label2id"] = {label: number for number, label in enumerate(names)}
    if kind in PROBLEM_TYPES:
        fields["problem_type"] = PROBLEM_TYPES[kind]
    return fields


def base_class(family: Family) -> str:
    """Return the class of transformers of a family's model without any head, such as BertModel."""
    *_, last = family.architectures  # the base class itself, if it is listed
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|MTModel|Model)$", "", last) + "Model"


def head_arrays(published: PublishedHead, model: ModelWithHead, body: Arrays) -> Arrays:
    """Return the parameters ``body`` and those of the head, as its class of transformers has them.

    Biases that the class has and the head lacks are 0. One that the class lacks goes into the bias of the
    last norm: W (x + s) = W x + b, where s is the least solution of W s = b. SettingError if there is none.
    """
    arrays = body | {path: x for path, x in named(model).items() if path.startswith("head.")}
    task_class = published.task_class
    assert task_class is not None, "modules of sentence-transformers have the head's own layers"
    kernel, bias = np.asarray(arrays[f"{OUT}.kernel"], np.float64), arrays.get(f"{OUT}.bias")
    if task_class.has_bias and bias is None:
        arrays[f"{OUT}.bias"] = np.zeros(kernel.shape[-1], np.float32)
    if f"{DENSE}.kernel" in arrays and f"{DENSE}.bias" not in arrays:
        arrays[f"{DENSE}.bias"] = np.zeros(arrays[f"{DENSE}.kernel"].shape[-1], np.float32)
    if not task_class.has_bias and bias is not None:
        expected = np.asarray(bias, np.float64)
        shift = np.linalg.lstsq(kernel.T, expected)[0]
        if not np.allclose(kernel.T @ shift, expected, atol=FOLD_TOLERANCE):
            raise SettingError(
                f"{task_class.name} has no bias, and that of this head cannot move into the norm below: its "
                "classes depend on each other"
            )
        arrays[LAST_NORM_BIAS] = np.asarray(arrays[LAST_NORM_BIAS] + shift, np.float32)
        del arrays[f"{OUT}.bias"]
    return arrays


def head_tensors(published: PublishedHead, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the tensors of the head's own layers by name; ``shapes`` are those of ``head_arrays``."""
    task_class = published.task_class
    assert task_class is not None, "modules of sentence-transformers have files of their own"
    modules = {OUT: task_class.output}
    for layer in published.dense_layers:
        if task_class.dense is not None:
            modules[layer.module] = task_class.dense
    tensors = {}
    for module, name in modules.items():
        for leaf, transform in (("kernel", TRANSPOSE), ("bias", SAME)):
            path = f"{module}.{leaf}"
            if path in shapes:
                end = "weight" if leaf == "kernel" else "bias"
                tensors[f"{name}.{end}"] = Tensor(((path, None),), (shapes[path],), transform)
    return tensors


def body_tensors(published: PublishedHead, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the body's tensors that the class of a fine-tuned model has, without pre-training heads.

    The pooler is among them only in a folder of sentence-transformers: a class has it as its dense layer.
    """
    prefix = published.family.tensor_prefix
    modules = ["embed.", "encoder.", "decoder.", "query_embedding"]
    task_class = published.task_class
    if task_class is None:
        modules.append(f"{POOLER}.")
    kept = {name: x for name, x in tensors.items() if x.sources[0][0].startswith(tuple(modules))}
    if task_class is not None and not task_class.omits_base_prefix:
        return kept
    return {name.removeprefix(prefix): tensor for name, tensor in kept.items()}


def has_head(hf_config: HFConfig) -> bool:
    """Return whether a config.json is of a model with a fine-tuned head."""
    endings = (*TASK_CLASS_ENDINGS.values(), "ForQuestionAnsweringSimple")  # so called in XLNet
    return any(str(name).endswith(endings) for name in hf_config.get("architectures") or ())


def is_base_model(hf_config: HFConfig, family: Family) -> bool:
    """Return whether a config.json is of a family's model without any head."""
    return base_class(family) in (hf_config.get("architectures") or ())


def is_head_tensor(name: str) -> bool:
    """Return whether a tensor is of a fine-tuned head."""
    return re.match(rf"({'|'.join(HEAD_MODULES)})\.", name) is not None


def dense_arrays(model: ModelWithHead, module: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the kernel and the bias, or None, of a dense layer of the head or of the output, by module."""
    pooler = cast(Transformer, model.body).pooler
    layer = cast(Linear, {POOLER: pooler, DENSE: model.head.dense, OUT: model.head.out}[module])
    bias = None if layer.bias is None else np.asarray(jax.device_get(layer.bias[...]), np.float32)
    return np.asarray(jax.device_get(layer.kernel[...]), np.float32), bias
