"""What the entry of a published family is made of: settings, read in both directions, and tensors."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from lm.nn.config import ModelConfig
from lm.settings import SettingError, nearest

# what many families share: names of their sizes, and values of ours
SIZE_NAMES = "vocab_size hidden_size=d_model num_attention_heads=num_heads intermediate_size=d_ff"
CLASSIC = "scores=scaled-dot norm=layer bias=true"

Json = dict[str, Any]
REQUIRED, OPTIONAL = object(), object()  # defaults of settings that must, or need not, be there


def unchanged(value: Any, _: Any) -> Any:
    return value


class Key(NamedTuple):
    """One setting of theirs and the one of ours that it becomes."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    read: Callable[[Any, Json], Any] = unchanged  # (their value, their settings) -> ours
    write: Callable[[Any, ModelConfig], Any] = unchanged  # (our value, our settings) -> theirs


@dataclass(frozen=True, kw_only=True)
class Family:
    """Settings and tensors of one family.

    In names of tensors "#" is the number of the layer, the first axis of one of our arrays, and "?" is "_0"
    where the feed-forward layer is gated, else nothing.
    """

    classes: str  # their classes, the fullest first, with the parts that each has: "Class=part,part Class"
    heads: str = ""  # their name before ForTokenClassification ..., and the kinds of head that are one layer
    keys: tuple[Key, ...]
    # of ours, in every model of the family; a function of the others where it depends on them
    fixed: dict[str, Any]
    only: dict[str, Any] = field(default_factory=dict)  # of theirs: the one value that is implemented
    aliases: str = ""  # their other names of settings, "other=usual"
    idle: str = ""  # of theirs: without effect on what is computed, but for dropout in training
    # their names of the base and the fraction of rotary positions, and the usual fraction; None: the only one
    rotary: tuple[str, str | None, float] | None = None
    says_tied: bool = False  # its files may say that the output matrix is the embedding where it is not
    prefix: str = ""  # of tensors that a model without its output layers has too, and is saved without
    base: dict[str, str]  # our module -> theirs; "a.b+c" are a.b and a.c, fused into one of theirs
    # the same of output layers, parameters that are no module's being named in full; None: of one matrix
    top: dict[str, str] | None = None
    output: str = "lm_head"  # their output layer, whose weight may repeat the embedding
    embeddings: tuple[str, ...] = ()  # other modules of theirs that repeat it
    conv1d: bool = False  # linear layers keep [in,out], as we do; elsewhere [out,in]
    per_head: bool = False  # fused q, k, v: of head 0, of head 1, ...; elsewhere all q, all k, all v

    @property
    def parts(self) -> dict[str, frozenset[str]]:
        """Their class -> the parts that it has."""
        words = (word.partition("=") for word in self.classes.split())
        return {name: frozenset(filter(None, parts.split(","))) for name, _, parts in words}

    @property
    def usual_names(self) -> dict[str, str]:
        return values(self.aliases)

    @property
    def modules(self) -> dict[str, str]:
        """Our module -> theirs, of all modules; several become one where they are fused."""
        modules: dict[str, str] = {}
        for ours, theirs in [*((o, self.prefix + t) for o, t in self.base.items()), *self.above.items()]:
            first, *others = ours.split("+")
            path = first.rpartition(".")[0]
            modules |= dict.fromkeys((first, *(f"{path}.{other}" for other in others)), theirs)
        return modules

    @property
    def above(self) -> dict[str, str]:
        """Our module -> theirs, of output layers."""
        return {"head": self.output} if self.top is None else self.top

    @property
    def copies(self) -> dict[str, str]:
        """Their tensor -> our parameter that it repeats."""
        weights = {f"{module}.weight": "embed.table" for module in (*self.embeddings, self.output)}
        return weights | {f"{self.output}.bias": "logits_bias"}


def values(text: str) -> dict[str, Any]:
    """ "a=1 b=name" -> {"a": 1, "b": "name"}."""
    return {name: _value(value) for name, _, value in (word.partition("=") for word in text.split())}


def _value(text: str) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def names(table: str) -> dict[str, str]:
    """Our module -> theirs, of lines "ours theirs" as ``families`` describes them."""
    modules: dict[str, str] = {}
    prefixes, depth = ("", ""), 0
    for line in filter(str.strip, table.splitlines()):
        ours, theirs = line.split()
        indent = len(line) - len(line.lstrip())
        prefixes = prefixes if indent > depth else ("", "")
        if ours.endswith("."):
            prefixes, depth = (ours, theirs), indent
        else:
            modules |= zip(_expand(prefixes[0] + ours), _expand(prefixes[1] + theirs), strict=True)
    return modules


def _expand(pattern: str) -> list[str]:
    """ "a{b,c}" -> ["ab", "ac"]."""
    return list(map("".join, product(*(part.split(",") for part in re.split("[{}]", pattern)))))


# --- settings


def keys(table: str, *others: Key) -> tuple[Key, ...]:
    """Of words "theirs=ours:default", or of a name that both have; required where there is no default."""
    return (*map(_key, table.split()), *others)


def _key(word: str) -> Key:
    pair, _, default = word.partition(":")
    theirs, _, ours = pair.partition("=")
    ours, value = ours or theirs, _value(default) if default else REQUIRED
    if ours in _CHOICES:
        return choice(theirs, ours, _CHOICES[ours], value)
    return Key(theirs, ours, value, _READERS.get(ours, unchanged))


def revised(old: tuple[Key, ...], *new: Key) -> tuple[Key, ...]:
    """``old``, with ``new`` in place of those of the same settings of ours."""
    return (*(row for row in old if row.ours not in {row.ours for row in new}), *new)


def choice(theirs: str, ours: str, table: Mapping[Any, Any], default: Any = REQUIRED) -> Key:
    """A setting that is one of ``table``, theirs -> ours; of several for one of ours the first is written."""

    def read(value: Any, _: Json) -> Any:
        if value not in table:
            near = nearest(str(value), map(str, table))
            raise SettingError(f"config.json: {theirs}={value!r} is not supported{near}")
        return table[value]

    def write(value: Any, _: ModelConfig) -> Any:
        # What has no name becomes the first: read again, it is seen to differ.
        return next((name for name, become in table.items() if become == value), [*table][0])

    return Key(theirs, ours, default, read, write)


# GELU is that of the error function in BERT and GPT-NeoX, its tanh form in GPT-2, ALBERT, BLOOM and T5 1.1.
_ACTIVATIONS = "gelu=gelu gelu_new=gelu-tanh gelu_pytorch_tanh=gelu-tanh gelu_fast=gelu-tanh relu=relu"
_CHOICES: dict[str, dict[Any, Any]] = {  # of our settings, what each value of theirs means
    "mlp": values(f"{_ACTIVATIONS} silu=silu swish=silu"),
    "logits": {True: "tied", False: "separate"},
    "positions": {False: "learned", True: "sinusoidal"},
    "embed_scale": {False: "none", True: "sqrt"},
    "residual": {True: "parallel", False: "pre-norm"},
}
_READERS: dict[str, Callable[[Any, Json], Any]] = {
    "special.pad": lambda value, _: value or 0,  # null where nothing was padded
    # The first of several: the others end turns of a conversation.
    "special.eos": lambda value, _: value[0] if isinstance(value, list) else value,
}


def unless(other: str, default: Any = None) -> Callable[[Any, Json], Any]:
    """Reads None, "as large", where the value is that of their setting ``other``."""

    def read(value: Any, theirs: Json) -> Any:
        usual = theirs.get(other, default)
        return None if value == usual and type(value) is type(usual) else value

    return read


def of_encoder(theirs: str, ours: str, decoders: str) -> Key:
    """A size of the encoder's blocks, None where the decoder's are as large."""
    return Key(
        theirs,
        f"encoder.{ours}",
        read=unless(decoders),
        write=lambda value, config: value or getattr(config, ours),
    )


def four_times(ours: Json) -> int:
    return 4 * ours["d_model"]


# The first token stands at the id of padding plus one: rows before it are for padding, and unused.
after_padding = Key(
    "max_position_embeddings",
    "max_length",
    REQUIRED,
    lambda value, theirs: value - (theirs.get("pad_token_id", 1) or 0) - 1,
    lambda value, config: value + config.position_offset,
)


def _max_distance(value: Any, theirs: Json) -> int:
    """T5's farthest distance; the reference's buckets are out of order if it has a bucket of its own."""
    exact = theirs["relative_attention_num_buckets"] // 2
    if value <= exact:
        beyond = f"half of relative_attention_num_buckets, {exact}"
        raise SettingError(
            f"config.json: relative_attention_max_distance={value} should be more than {beyond}"
        )
    return value


def _t5_logits(_: Any, theirs: Json) -> str:
    """Return how logits are made: of the embedding or a matrix of its own, and whether states are scaled.

    The scale is d_model^-0.5. It stands in a setting of its own since transformers 5 (UMT5: 5.24), where a
    matrix of its own is known by its tensor; before, states before the embedding (T5 1.0) were scaled, those
    before another matrix (1.1) not.
    """
    tied = theirs.get("tie_word_embeddings", True)
    scaled = theirs.get("scale_decoder_outputs", tied)
    for name, value in (("tie_word_embeddings", tied), ("scale_decoder_outputs", scaled)):
        if not isinstance(value, bool):
            raise SettingError(f"config.json: {name}={value!r} should be true or false")
    return ("tied" if tied else "separate") + ("-scaled" if scaled else "")


def t5_keys(table: str) -> tuple[Key, ...]:
    """``keys``, and the decoder's layers and output, the feed-forward layer and what files repeat of it."""
    # The gated GELU of T5 1.1 is the tanh form, the plain one would be that of the error function.
    kinds = {kind: kind for kind in ("relu", "gated-gelu", "gated-silu", "gated-relu", "gelu", "silu")}
    mlp = choice("feed_forward_proj", "mlp", kinds, "relu")

    def gated(kind: str) -> bool:
        return kind.startswith("gated-")

    def activation(kind: str) -> str:
        return "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")

    def repeated(name: str, of: Callable[[str], Any]) -> Key:
        def read(value: Any, theirs: Json) -> str:
            kind = mlp.read(theirs.get("feed_forward_proj", "relu"), theirs)
            if value != of(kind):
                raise SettingError(f"config.json: {name}={value!r} contradicts feed_forward_proj={kind!r}")
            return kind

        return Key(name, "mlp", OPTIONAL, read, lambda kind, config: of(mlp.write(kind, config)))

    return keys(
        table,
        Key("num_decoder_layers", "num_decoder_layers", None, lambda n, theirs: n or theirs["num_layers"]),
        Key("relative_attention_max_distance", "relative_max_distance", 128, _max_distance),
        mlp,
        repeated("is_gated_act", gated),
        repeated("dense_act_fn", activation),
        # Where both are true and there is a matrix of its own, it is that which is scaled.
        Key("tie_word_embeddings", "logits", True, _t5_logits, lambda value, _: value != "separate"),
        Key("scale_decoder_outputs", "logits", OPTIONAL, _t5_logits, lambda v, _: v.endswith("scaled")),
    )
