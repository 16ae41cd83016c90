"""The schema of a published family: how its config.json and its tensors correspond to our models.

Everything here works in both directions, since checkpoints are read and written. A path, a setting and the
argument ``module`` of the functions that map parameters are names of ours. Fields, tensors and classes are
named as in Hugging Face transformers, as are the modules in ``TaskClass`` and ``Family``. ``families`` holds
the data.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal

import numpy as np

from lm.config.base import SettingError, leaves
from lm.config.model import HeadDense, HeadKind, ModelConfig, Pool

HFConfig = dict[str, Any]  # the contents of a config.json: field -> value
Settings = dict[str, Any]  # dotted path of a setting of ModelConfig -> value
SETTINGS = frozenset(path for path, _ in leaves(ModelConfig()))

# What a checkpoint can hold beside the blocks; "logits": the bias of each token in the output layer.
PretrainingHead = Literal[
    "logits", "pooler", "next-sentence", "sentence-order", "replaced-token", "query-stream"
]


# --- fields of config.json


class Absent(enum.Enum):
    """The meaning of a field without a default value where config.json lacks it."""

    REQUIRED = enum.auto()  # an error
    OPTIONAL = enum.auto()  # nothing: it repeats what another field says


REQUIRED, OPTIONAL = Absent.REQUIRED, Absent.OPTIONAL


def unchanged(value: Any, _: Any) -> Any:
    """Return the value itself."""
    return value


@dataclass(frozen=True)
class Field:
    """A field of config.json that corresponds to one of our settings.

    ``default`` is its value where config.json lacks it. With REQUIRED it has to be there, as a whole number;
    with OPTIONAL it is read only if it is there. ``to_setting(value, hf_config)`` converts the value that is
    read or the default, ``to_field(value, config)`` the value that is written.
    """

    name: str
    setting: str
    default: Any = REQUIRED
    to_setting: Callable[[Any, HFConfig], Any] = unchanged
    to_field: Callable[[Any, ModelConfig], Any] = unchanged
    superseded: ClassVar[tuple[str, ...]] = ()  # as in FieldGroup

    def __post_init__(self):
        if self.setting not in SETTINGS:
            raise ValueError(f"{self.name}: ModelConfig has no setting {self.setting!r}")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def settings(self) -> tuple[str, ...]:
        return (self.setting,)

    def read(self, hf_config: HFConfig) -> Settings:
        """Return ``{setting: value}``, or ``{}`` if an optional field is absent.

        SettingError if a required field is absent or not a whole number.
        """
        value = hf_config.get(self.name, self.default)
        if value is OPTIONAL:
            return {}
        if self.default is REQUIRED and not isinstance(value, int):
            problem = " is missing" if value is REQUIRED else f"={value!r} should be a whole number"
            raise SettingError(f"config.json: {self.name}{problem}")
        return {self.setting: self.to_setting(value, hf_config)}

    def write(self, config: ModelConfig) -> HFConfig:
        """Return the field as it describes ``config``."""
        return {self.name: self.to_field(attrgetter(self.setting)(config), config)}


@dataclass(frozen=True)
class FieldGroup:
    """Fields of config.json that determine one or more of our settings only together."""

    names: tuple[str, ...]
    settings: tuple[str, ...]
    read: Callable[[HFConfig], Settings]
    write: Callable[[ModelConfig], HFConfig]
    superseded: tuple[str, ...] = ()  # other spellings of these fields, removed where the group is rewritten

    def __post_init__(self):
        if unknown := set(self.settings) - SETTINGS:
            raise ValueError(f"{self.names}: ModelConfig has no settings {sorted(unknown)}")


Fields = tuple[Field | FieldGroup, ...]


def override(fields: Fields, *new: Field | FieldGroup) -> Fields:
    """Return ``fields`` with ``new`` instead of those that determine the same settings."""
    return without(fields, *(setting for entry in new for setting in entry.settings)) + new


def without(fields: Fields, *settings: str) -> Fields:
    """Return ``fields`` but for those that determine one of ``settings``."""
    return tuple(entry for entry in fields if set(settings).isdisjoint(entry.settings))


# --- tensors

# Placeholder in the name of a tensor that every expert has; it is replaced by the number of the expert.
EXPERT = "{expert}"


@dataclass(frozen=True)
class Transform:
    """A change of layout from one of our arrays to a published tensor, and back."""

    publish: Callable[[np.ndarray], np.ndarray]
    restore: Callable[[np.ndarray], np.ndarray]


SAME = Transform(lambda array: array, lambda tensor: tensor)
TRANSPOSE = Transform(np.transpose, np.transpose)
LEADING_AXIS = Transform(lambda array: array[None], lambda tensor: tensor[0])
TWO_LEADING_AXES = Transform(lambda array: array[None, None], lambda tensor: tensor[0, 0])


def split_heads(transform: Transform, num_heads: int) -> Transform:
    """Return the transform to tensors whose last axis is split in two, [..., heads, features]."""

    def publish(array: np.ndarray) -> np.ndarray:
        tensor = transform.publish(array)
        return tensor.reshape(*tensor.shape[:-1], num_heads, -1)

    def restore(tensor: np.ndarray) -> np.ndarray:
        return transform.restore(tensor.reshape(*tensor.shape[:-2], -1))

    return Transform(publish, restore)


def is_gated(config: ModelConfig) -> bool:
    """Return whether a model's feed-forward layer is gated."""
    return config.mlp.activation.startswith("gated")


@dataclass(frozen=True)
class Parameter:
    """A published tensor, and the parameter of ours that it holds, or several fused along their last axis."""

    paths: tuple[str, ...]  # of our parameters
    name: str  # of the tensor; in a stack of layers, the part after the number of the layer
    transform: Transform = SAME
    other_name: str | None = None  # replaces ``name`` in models of which ``has_other_name`` is true
    has_other_name: Callable[[ModelConfig], bool] = is_gated
    per_head: bool = False  # fused head by head, as in ``fused_qkv``
    has_heads_axis: bool = False  # whether its last axis is split, [..., heads, features], as in ``by_head``
    stack: str | None = None  # in a stack of layers, the part of the name before the number of the layer
    # Returns the numbers of the layers that have it; None: all
    layers: Callable[[ModelConfig], Sequence[int]] | None = None
    prefix: str = ""  # how the whole name begins

    def tensor_name(self, layer_index: int | None, config: ModelConfig | None) -> str:
        """Return the name of the tensor, in a stack with the number of the layer in the checkpoint.

        ``layer_index`` is the index of the layer among those that have the tensor, which is that of the row
        in our stacked array; None outside of a stack. Without ``config`` it is the name in most models, never
        ``other_name``.
        """
        name = self.name
        if self.other_name is not None and config is not None and self.has_other_name(config):
            name = self.other_name
        if self.stack is not None and layer_index is not None:
            number = layer_index
            if self.layers is not None and config is not None:
                number = self.layers(config)[layer_index]
            name = f"{self.stack}.{number}.{name}"
        return self.prefix + name


Parameters = tuple[Parameter, ...]  # of one module, or of several


def array(path: str, name: str, transform: Transform = SAME) -> Parameters:
    """Map one array."""
    return (Parameter((path,), name, transform),)


def embedding(module: str, published: str) -> Parameters:
    """Map a table of embeddings [rows, features]."""
    return array(f"{module}.table", f"{published}.weight")


def norm(module: str, published: str) -> Parameters:
    """Map the scale and bias of a layer norm or RMS norm [features]."""
    return array(f"{module}.scale", f"{published}.weight") + array(f"{module}.bias", f"{published}.bias")


def linear(
    module: str, published: str, *, gated: str | None = None, transform: Transform = TRANSPOSE
) -> Parameters:
    """Map a linear layer: our kernel [in, out] is the transpose of torch's weight.

    Conv1D of GPT-2 keeps [in, out]: ``transform=SAME``. ``gated`` is the published name in models whose
    feed-forward layer is gated.
    """
    kernel = Parameter((f"{module}.kernel",), f"{published}.weight", transform)
    bias = Parameter((f"{module}.bias",), f"{published}.bias")
    if gated is None:
        return kernel, bias
    return renamed(is_gated, (kernel, bias), linear(module, gated, transform=transform))


def by_head(module: str, published: str, transform: Transform = SAME) -> Parameters:
    """Map the kernel of a linear layer without a bias, whose tensor has an axis of heads: [in, heads, out].

    ``transform`` makes [in, heads * out] of our kernel.
    """
    return (Parameter((f"{module}.kernel",), published, transform, has_heads_axis=True),)


def renamed(condition: Callable[[ModelConfig], bool], usual: Parameters, other: Parameters) -> Parameters:
    """Map parameters to ``usual`` tensors, or in models of which ``condition`` is true to the ``other`` ones.

    The two differ in the names of tensors alone.
    """
    pairs = zip(usual, other, strict=True)
    return tuple(replace(one, other_name=two.name, has_other_name=condition) for one, two in pairs)


def linears(module: str, published: str, **layers: str) -> Parameters:
    """Map linear layers within a module; ``layers`` are our name = published name."""
    return tuple(
        parameter
        for name, published_name in layers.items()
        for parameter in linear(f"{module}.{name}", f"{published}.{published_name}")
    )


def fused_qkv(published: str, *, per_head: bool = False, transform: Transform = TRANSPOSE) -> Parameters:
    """Map attention's projections to queries, keys and values, which are one published linear layer.

    Its outputs are all queries, then all keys, then all values. With ``per_head`` they are grouped by
    key/value head: the query heads that share head 0, key head 0, value head 0, then those of head 1, and so
    on.
    """
    projections = tuple(f"attention.{name}" for name in ("query", "key", "value"))
    parameters = fused_linears(projections, published, transform=transform)
    return tuple(replace(parameter, per_head=per_head) for parameter in parameters)


def fused_linears(
    modules: tuple[str, ...], published: str, *, transform: Transform = TRANSPOSE
) -> Parameters:
    """Map linear layers of one input whose outputs, one after the other, are one published linear layer."""
    kernels = tuple(f"{module}.kernel" for module in modules)
    biases = tuple(f"{module}.bias" for module in modules)
    return Parameter(kernels, f"{published}.weight", transform), Parameter(biases, f"{published}.bias")


def stack(module: str, published: str, *modules: Parameters) -> Parameters:
    """Map a stack of layers, each of which has these modules.

    Our arrays have the layers as their first axis. A checkpoint has a tensor for each layer, whose name is
    ``published``, the number of the layer and the name of the module: layers.3.mlp.up_proj.weight.
    """
    return tuple(
        replace(parameter, paths=tuple(f"{module}.{path}" for path in parameter.paths), stack=published)
        for parameters in modules
        for parameter in parameters
    )


def in_layers(layers: Callable[[ModelConfig], Sequence[int]], parameters: Parameters) -> Parameters:
    """Map parameters of a stack that only these layers have."""
    return tuple(replace(parameter, layers=layers) for parameter in parameters)


# --- families

TASK_CLASS_ENDINGS: dict[HeadKind, str] = {
    "classes": "ForSequenceClassification",
    "regression": "ForSequenceClassification",
    "choice": "ForMultipleChoice",
    "tokens": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}


@dataclass(frozen=True)
class TaskClass:
    """A class of transformers for a kind of fine-tuned head: what it computes above the base model."""

    name: str
    output: str = "classifier"  # module of the linear layer
    has_bias: bool = True  # of the linear layer
    pool: Pool | None = None  # position whose state is read for a whole text; None: all positions are read
    dense: str | None = None  # module of a dense layer between that state and the linear layer
    activation: HeadDense = "none"  # of the dense layer
    # Whether the base model's tensors are written without Family.base_model_prefix, because this class has
    # another name for the base model (LlamaForQuestionAnswering: transformer instead of model); transformers'
    # from_pretrained adds the prefix of its class.
    omits_base_prefix: bool = False


TaskClasses = Mapping[HeadKind, TaskClass]


def task_classes(
    name: str, *kinds: HeadKind, output: str | None = None, **settings: Any
) -> dict[HeadKind, TaskClass]:
    """Return the classes of transformers for kinds of fine-tuned heads; ``name`` is how they all begin.

    ``output`` and ``settings`` are those of each ``TaskClass``.
    """
    found = {}
    for kind in kinds:
        module = output or ("qa_outputs" if kind == "span" else "classifier")
        found[kind] = TaskClass(name + TASK_CLASS_ENDINGS[kind], module, **settings)
    return found


def decoder_task_classes(
    name: str, *kinds: HeadKind, tokens: str = "classifier", omits_base_prefix: bool = False
) -> TaskClasses:
    """Return the classes for heads on a decoder: of texts by the last token, without a bias, and ``kinds``.

    ``tokens`` is the module of the linear layer on every token; ``omits_base_prefix`` is of the span class.
    """
    of_texts = task_classes(name, "classes", "regression", output="score", has_bias=False, pool="last")
    of_positions = task_classes(name, "tokens", output=tokens)
    of_positions |= task_classes(name, "span", omits_base_prefix=omits_base_prefix)
    return of_texts | {kind: of_positions[kind] for kind in kinds}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type of transformers: its config.json and its tensors."""

    model_type: str
    # Classes of transformers -> the pre-training heads of each. A new config.json names the first class whose
    # heads the model has, so those with more heads come first.
    architectures: Mapping[str, tuple[PretrainingHead, ...]]
    # Kinds of fine-tuned heads, and their classes.
    task_classes: TaskClasses = field(default_factory=dict)

    template: ModelConfig  # what all models of the family share; ``fields`` replace its other settings
    fields: Fields
    # Settings that follow from others: setting -> function of the settings read.
    derived: Mapping[str, Callable[[Settings], Any]] = field(default_factory=dict)
    # Fields of which only one value is implemented here: field -> that value.
    supported_values: Mapping[str, Any] = field(default_factory=dict)
    attribute_map: Mapping[str, str] = field(default_factory=dict)  # other name of a field -> its name
    ignored: tuple[str, ...] = ()  # fields that do not change the outputs
    # Fields that are always written with these values, whatever was read, because the tensors are written
    # under the names that they select (DeBERTa: legacy=False).
    written_values: Mapping[str, Any] = field(default_factory=dict)
    # Fields that hold those of one stack each, which are named as in "encoder.hidden_size" here.
    sections: tuple[str, ...] = ()
    # Whether tie_word_embeddings may be true although the output matrix differs from the embedding.
    tie_flag_unreliable: bool = False

    base_model_prefix: str = ""  # module that holds the base model in a class with heads; "": none does
    base_model: tuple[Parameters, ...]
    output_layers: tuple[Parameters, ...] = (linear("head", "lm_head"),)
    output_matrix: str = "lm_head"  # module whose weight repeats the embedding in models that tie the two
    tied_modules: tuple[str, ...] = ()  # other modules whose weight repeats the embedding
    # Other names of modules in some files -> their names here, "" where the names begin with those of the
    # modules within; of two that fit, the first is taken.
    other_modules: Mapping[str, str] = field(default_factory=dict)
    unread_modules: tuple[str, ...] = ()  # modules of some files that transformers leaves out too

    @property
    def tensor_prefix(self) -> str:
        """Return how names of the base model's tensors begin in a class with heads."""
        return f"{self.base_model_prefix}." if self.base_model_prefix else ""

    @cached_property  # many settings are read by it
    def parameters(self) -> dict[str, Parameter]:
        """Return ``{path of our parameter: published tensor that holds it}``, in a class with heads."""
        base = (replace(p, prefix=self.tensor_prefix) for module in self.base_model for p in module)
        outputs = (p for module in self.output_layers for p in module)
        return {path: parameter for parameter in (*base, *outputs) for path in parameter.paths}

    @property
    def copies(self) -> dict[str, str]:
        """Return ``{tensor: path of our parameter}`` for tensors that repeat another one in some files."""
        modules = (*self.tied_modules, self.output_matrix)
        weights = {f"{module}.weight": "embed.table" for module in modules}
        return weights | {f"{self.output_matrix}.bias": "logits_bias"}

    @property
    def has_masked_lm_head(self) -> bool:
        """Return whether a dense layer and a norm come before the masked LM's logits, as in BERT."""
        return "transform.dense.kernel" in self.parameters
