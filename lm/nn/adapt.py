"""Start a model from the weights of one with another architecture, or with more layers.

* A decoder starts both stacks of an encoder-decoder. Cross-attention starts as the decoder's self-attention
  (T5Gemma, Zhang et al. 2025b, section 3), or is part of it (merged: T5Gemma 2).
* An encoder starts both stacks of an encoder-decoder, whose cross-attention is random (Rothe et al. 2020,
  section 3: BERT2BERT; with one stack for both BERTShare).
* A decoder starts an encoder, and an encoder a decoder: the same blocks with another mask.
* A model starts one of fewer layers, which are some of its own (DistilBERT, Sanh et al. 2019, section 3).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from lm.config.base import SettingError, changes
from lm.config.model import ModelConfig
from lm.nn.transformer import Transformer
from lm.ops.positions import BucketedBias
from lm.sharding import named

ONE_STACK = ("decoder", "prefix-decoder", "encoder")  # architectures whose weights others start from
# Parts of cross-attention, and those of self-attention that they start from.
CROSS_PARTS = {
    "cross": "attention",
    "cross_norm": "attention_norm",
    "cross_scale": "attention_scale",
    "cross_output_norm": "attention_output_norm",
    "cross_gate": "attention_gate",
}


@dataclass(frozen=True)
class Origin:
    """Where a parameter of the new model comes from."""

    part: str  # of the new model: "embedding and output", "encoder", "decoder" or "cross-attention"
    source: str | None  # name of the parameter of the old model; None: random
    description: str  # of the source, as ``describe`` prints it


def adapted_config(config: ModelConfig, new: Mapping[str, Any]) -> ModelConfig:
    """Return the settings of a model that starts from one of ``config``: its settings, changed by ``new``.

    ``new`` always has "architecture", and may have more settings. Unless it says otherwise, each stack has as
    many layers as the old one, and there are no pre-training heads. If the old model has no output matrix
    (``output.logits`` "none"), a new decoder's is tied to its embedding. Raises SettingError if the old model
    has two stacks, or vectors of relative positions.
    """
    architecture = new["architecture"]
    if config.positions.kind == "relative-keys":
        raise SettingError(
            "model.positions.kind='relative-keys' has vectors of relative positions on one side or on both, "
            f"which a model of model.architecture={architecture!r} cannot take over: start from a model with "
            "other positions, such as 'relative'"
        )
    if config.architecture not in ONE_STACK:
        raise SettingError(
            f"model.architecture={architecture!r} cannot start from a model of {config.architecture!r}: its "
            f"weights should be those of one stack, {', '.join(ONE_STACK[:-1])} or {ONE_STACK[-1]}"
        )
    layers = config.num_decoder_layers if config.has_decoder else config.num_encoder_layers
    overrides = {"heads": (), "published": "", "num_encoder_layers": layers, "num_decoder_layers": layers}
    if config.output.logits == "none" and architecture != "encoder":
        overrides["output.logits"] = "tied"
    # Back to their defaults: only decoders read the first setting, and only encoders the second.
    if architecture == "encoder":
        overrides["attention.mask"] = "causal"
    else:
        overrides["attention.encoder_mask"] = "none"
    return changes(config, {**overrides, **new})


def origins(config: ModelConfig, new_config: ModelConfig) -> dict[str, Origin]:
    """Return the origin of each parameter of the model of ``new_config``, by name.

    Raises SettingError if a parameter and its source differ in shape; the message names the first of them.
    """
    old, new = (_shapes(each) for each in (config, new_config))
    stack = "decoder" if config.has_decoder else "encoder"
    found = {name: _origin(name, old, stack) for name in new}
    for name, origin in found.items():
        if origin.source is not None and old[origin.source] != new[name]:
            raise SettingError(
                f"{name} has shape {list(new[name])}, {origin.source} of the checkpoint "
                f"{list(old[origin.source])}: they should be equal for the one to start as the other"
            )
    return found


def adapt(
    config: ModelConfig, params: Mapping[str, Array], new_config: ModelConfig, key: Array
) -> dict[str, Array]:
    """Return the parameters of a model of ``new_config`` that starts from ``params``, those of ``config``.

    Parameters without a source are drawn with ``key``, such as an output matrix that only the new model has.

    T5's buckets differ between stacks that attend to both sides and causal ones. If the old stack is of one
    kind and the new one of the other, the table of biases is converted, so that the bias at each distance
    behind the query stays about the same.
    """
    sources = origins(config, new_config)
    random = [name for name, origin in sources.items() if origin.source is None]

    def draw(key: Array) -> dict[str, Array]:
        params = named(Transformer(new_config, nnx.Rngs(params=key)))
        return {name: params[name] for name in random}

    fresh = jax.jit(draw)(key)  # the compiler leaves the others out
    stack = "decoder" if config.has_decoder else "encoder"
    was_bidirectional = config.is_bidirectional(stack == "decoder")
    adapted = {}
    for name, origin in sources.items():
        value = fresh[name] if origin.source is None else params[origin.source]
        if origin.source is not None and name.endswith("relative.table"):
            bidirectional = new_config.is_bidirectional(name.startswith("decoder"))
            value = _convert_biases(value, was_bidirectional, bidirectional, config)
        adapted[name] = value
    return adapted


def spread_layers(layers: int, count: int) -> list[int]:
    """Return the numbers of ``count`` of the layers, evenly spread from the first to the last.

    >>> spread_layers(12, 6)
    [0, 2, 4, 7, 9, 11]

    These are the layers of BERT from which DistilBERT starts in its authors' code.
    """
    return [round(float(layer)) for layer in np.linspace(0, layers - 1, count)]


def drop_layers(
    config: ModelConfig, params: Mapping[str, Array], counts: Mapping[str, int]
) -> tuple[ModelConfig, dict[str, Array]]:
    """Return the settings and the parameters of a model with fewer layers, some of those of ``config``.

    ``counts`` is the number of layers by setting, such as {"num_encoder_layers": 6}. Layers that share their
    parameters keep them. Raises SettingError if a stack has fewer layers than its count, or if its layers do
    not all have the same parts and windows.
    """
    for path, count in counts.items():
        if count > getattr(config, path):
            raise SettingError(
                f"model.{path}={count} is more than {getattr(config, path)}, the layers of the model"
            )
    for group, windows in (
        ("sparsity", config.sparsity.layer_windows),
        ("encoder", config.encoder.layer_windows),
    ):
        if windows:
            raise SettingError(
                f"model.{group}.layer_windows={windows} makes layers that differ: all of them are needed"
            )
    smaller = changes(config, {**counts, "published": ""})
    kept = {path.split("_")[1]: spread_layers(getattr(config, path), count) for path, count in counts.items()}
    shapes, found = _shapes(smaller), {}
    for name, value in params.items():
        stack, _, rest = name.partition(".")
        if rest.startswith("blocks.") and stack in kept and value.shape != shapes[name]:
            value = value[np.array(kept[stack])]
        if value.shape != shapes[name]:
            raise SettingError(
                f"{name} has shape {list(value.shape)}, in a model of {counts} {list(shapes[name])}: layers "
                "that differ from each other cannot be left out"
            )
        found[name] = value
    return smaller, found


def describe(config: ModelConfig, new_config: ModelConfig) -> Iterator[str]:
    """Yield a line for each part of the new model, which says where its parameters come from.

    The last line names what the new model does not use of the old one, if there is anything.
    """
    found = origins(config, new_config)
    parts: dict[str, dict[str, None]] = {}
    for origin in found.values():
        parts.setdefault(origin.part, {})[origin.description] = None
    if new_config.has_merged_attention:
        parts["cross-attention"] = {"none of its own: the decoder's self-attention reads the encoder": None}
    for part, sources in parts.items():
        yield f"{part}: {', '.join(sources)}"
    used = {origin.source for origin in found.values()}
    left = {name.partition(".")[0] for name in _shapes(config) if name not in used}
    if left:
        yield f"left behind: {', '.join(sorted(left))}"


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    model = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    return {name: leaf.shape for name, leaf in named(model).items()}


def _origin(name: str, old: Mapping[str, Any], stack: str) -> Origin:
    """Return the origin of the parameter ``name``; ``stack`` is that of the old model."""
    module, _, rest = name.partition(".")
    if module not in ("encoder", "decoder"):
        part = "embedding and output"
        source = f"embed.{rest}" if module == "encoder_embed" else name
        if source not in old:
            return Origin(part, None, f"random {module}")
        return Origin(part, source, "the checkpoint's")
    part, _, inner = rest.removeprefix("blocks.").partition(".")
    if rest.startswith("blocks.") and part in CROSS_PARTS:
        source = f"{stack}.blocks.{CROSS_PARTS[part]}.{inner}"
        if stack == "encoder" or source not in old:
            return Origin("cross-attention", None, "random")
        return Origin("cross-attention", source, "the checkpoint's self-attention")
    source = f"{stack}.{rest}"
    if source not in old:
        return Origin(module, None, f"random {part}")
    return Origin(module, source, f"the checkpoint's {stack}")


def _convert_biases(table: Array, was_bidirectional: bool, bidirectional: bool, config: ModelConfig) -> Array:
    """Return a table [buckets,N], or one of each layer, for the other kind of stack."""
    if was_bidirectional == bidirectional:
        return table

    def convert(table: Array) -> Array:
        bias = BucketedBias(table, was_bidirectional, config.positions.relative_max_distance)
        return bias.converted(bidirectional).table

    return jnp.stack([convert(each) for each in table]) if table.ndim == 3 else convert(table)
