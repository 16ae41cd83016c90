"""Attention with its projections, and what all attention layers of a stack share."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from lm.nn.cache import KeyValue
from lm.nn.config import ModelConfig
from lm.nn.layers import Linear, RelativeBias, normal, param, scaled
from lm.ops.attention import (
    CAUSAL,
    SCALES,
    attention_weights,
    bilinear,
    cudnn_attention,
    dot_product_attention,
)
from lm.ops.biases import Bias
from lm.ops.flash.grid import BACKENDS
from lm.ops.flash.kernel import flash_attention
from lm.ops.masks import Mask
from lm.ops.positions import rotary_frequencies, rotate
from lm.settings import SettingError
from lm.sharding import ACTIVATION_AXES, constrain


class View(NamedTuple):
    """What all blocks of a stack see alike, made once. The default sees everything and tells no position
    apart.
    """

    mask: jax.Array | Mask | None = None  # bool [B|1,T,S]; None: everything is visible
    masks: tuple[jax.Array | Mask | None, ...] = ()  # of each span of blocks, where their windows differ
    bias: jax.Array | Bias | None = None  # float32 [B|1,N,T,S]
    positions: jax.Array | None = None  # int32 [B|1,T] of queries and keys
    # of a block that has a table of its own
    layer_bias: Callable[[RelativeBias], jax.Array | Bias] | None = None
    everywhere: jax.Array | None = None  # bool [B,T]: global positions, with projections of their own
    everything: jax.Array | Mask | None = None  # bool [B|1,T,S]: what they see
    encoded: jax.Array | None = None  # the encoder's output [B,S,D], for cross-attention
    cross_mask: jax.Array | Mask | None = None  # bool [B,T,S] of cross-attention
    slot: jax.Array | None = None  # int32 [B]: the first slot of the cache to write; None: nothing is cached


class Projections(nnx.Module):
    """Queries, keys and values of multi-head, grouped-query and multi-query attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        d_model, heads, groups = (
            config.d_model,
            config.num_heads * config.d_kv,
            config.key_value_heads * config.d_kv,
        )
        # T5 does not scale the scores by H^-0.5 but the initial queries.
        std = (d_model * config.d_kv) ** -0.5 if config.scores == "dot" else d_model**-0.5
        self.query = Linear(config, rngs, (d_model, heads), ("embed", "heads"), std)
        self.key = Linear(config, rngs, (d_model, groups), ("embed", self._key_axis), d_model**-0.5)
        self.value = Linear(config, rngs, (d_model, groups), ("embed", self._key_axis), d_model**-0.5)

    def queries(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        """[B,T,N,H] of x [B,T,D]."""
        return self._turn(self._heads(self.query(x), "length", "heads"), positions)

    def key_value(self, x: jax.Array, positions: jax.Array | None) -> KeyValue:
        """Keys and values [B,S,K,H] of x [B,S,D]; without positions they are not told apart, as in
        cross-attention.
        """
        key, value = (self._heads(layer(x), "key_length", self._key_axis) for layer in (self.key, self.value))
        return KeyValue(self._turn(key, positions), value)

    @property
    def _key_axis(self) -> str:
        # Few heads of keys may not divide over as many devices as there are for heads of queries.
        return "heads" if self.config.num_key_value_heads is None else "kv_heads"

    def _heads(self, x: jax.Array, length: str, axis: str) -> jax.Array:
        return constrain(x.reshape(*x.shape[:-1], -1, self.config.d_kv), "batch", length, axis, "kv")

    def _turn(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        if self.config.positions != "rotary" or positions is None:
            return x
        settings = asdict(self.config.rotary)
        del settings["fraction"]
        frequencies, factor = rotary_frequencies(self.config.rotary_width, **settings)
        return rotate(x, positions, frequencies, factor)


class Attention(Projections):
    """Multi-head attention of a sequence to itself, or of a decoder to the encoder's output."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, crosses: bool):
        super().__init__(config, rngs)
        heads, width = config.num_heads, config.d_kv
        self.out = Linear(
            config, rngs, (heads * width, config.d_model), ("heads", "embed"), (heads * width) ** -0.5
        )
        weight = normal(rngs, (heads, width, width), width**-0.5) if config.scores == "bilinear" else None
        self.bilinear = None if weight is None else param(weight, "bias_heads", "kv", "kv")
        separate = config.sparsity.projections == "separate" and not crosses
        self.globals = Projections(config, rngs) if separate else None

    def __call__(self, x: jax.Array, seen: KeyValue, view: View, keep: jax.Array | None) -> jax.Array:
        """[B,T,D] from x [B,T,D] and the keys and values that it sees."""
        query = self._query(self, x, view)
        keep = None if keep is None else scaled(keep, self.config.dropout)
        out = attend(self.config, query, seen, view.mask, view.bias, keep)
        if self._apart(view):
            query, seen = self._query(self.globals, x, view), self.globals.key_value(x, view.positions)
            found = attend(self.config, query, seen, view.everything, view.bias, keep)
            out = jnp.where(view.everywhere[:, :, None, None], found, out)
        return self.out(out.reshape(*x.shape[:-1], -1))

    def weights(self, x: jax.Array, seen: KeyValue, view: View) -> jax.Array:
        """float32 [B,N,T,S]: how much each head of x [B,T,D] takes from what it sees."""
        local = attention_weights(
            self._query(self, x, view), seen.key, view.mask, view.bias, scale=self._scale
        )
        if not self._apart(view):
            return local
        query, seen = self._query(self.globals, x, view), self.globals.key_value(x, view.positions)
        found = attention_weights(query, seen.key, view.everything, view.bias, scale=self._scale)
        return jnp.where(view.everywhere[:, None, :, None], found, local)

    def _apart(self, view: View) -> bool:
        """Whether there are global positions with projections of their own."""
        return self.globals is not None and view.everywhere is not None

    @property
    def _scale(self) -> float:
        return SCALES[self.config.scores](self.config.d_kv)

    def _query(self, projections: Projections, x: jax.Array, view: View) -> jax.Array:
        query = projections.queries(x, view.positions)
        return query if self.bilinear is None else bilinear(query, self.bilinear[...].astype(x.dtype))


SHORT = 1_024  # rows up to which explicit scores are quicker than a kernel that never keeps them [tokens]


def implementation(
    config: ModelConfig,
    length: int,
    key_length: int,
    mask: jax.Array | Mask | None,
    bias: jax.Array | Bias | None,
) -> Literal["xla", "cudnn", "flash"]:
    """What computes the attention of ``length`` queries to ``key_length`` keys on the devices that are
    compiled for.
    """
    platform, wanted, mesh = _platform(), config.attention, jax.sharding.get_abstract_mesh()
    spread = mesh.shape.get(ACTIVATION_AXES["length"], 1) > 1
    if wanted == "cudnn" and (platform != "gpu" or spread):
        what = f"on {platform!r}" if platform != "gpu" else "where mesh.sequence > 1"
        raise SettingError(f"model.attention='cudnn' is not {what}: take 'auto'")
    if wanted == "cudnn" and length > 1:
        return wanted
    # laid out already
    if length == 1 or any(x is not None and not isinstance(x, Mask | Bias) for x in (mask, bias)):
        return "xla"
    if wanted != "auto":
        return wanted
    if platform not in ("gpu", "tpu") or max(length, key_length) <= SHORT:
        return "xla"
    plain = (mask is None or mask == CAUSAL) and bias is None and config.dtype == "bfloat16"
    return (
        "cudnn" if platform == "gpu" and plain and not spread and config.d_kv in range(8, 129, 8) else "flash"
    )


def _platform() -> str:
    """That of the mesh, which need not be this machine's: a program may be compiled for a TPU without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend(
    config: ModelConfig,
    query: jax.Array,
    seen: KeyValue,
    mask: jax.Array | Mask | None,
    bias: jax.Array | Bias | None,
    keep: jax.Array | None,
) -> jax.Array:
    """[B,T,N,H] as ``dot_product_attention`` of query [B,T,N,H], by whatever computes it here."""
    scale = SCALES[config.scores](config.d_kv)
    how = implementation(config, query.shape[1], seen.key.shape[1], mask, bias)
    if how == "xla":
        return dot_product_attention(query, *seen, mask, bias, scale=scale, keep=keep)
    calls = {
        "cudnn": lambda *inputs, offset, **rest: cudnn_attention(*inputs, **rest),
        "flash": partial(flash_attention, backend=BACKENDS[_platform()]),
    }
    return _sharded(partial(calls[how], scale=scale), query, seen, mask, bias, keep)


def _sharded(call: Callable, query: jax.Array, seen: KeyValue, mask: Any, bias: Any, keep: Any) -> jax.Array:
    """``call(query, key, value, mask, bias, keep=, offset=)`` of each device's rows, queries and heads.

    The compiler cannot take a kernel apart. ``offset`` int32 [1] is the place of a device's first query in
    its row.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return call(query, *seen, mask, bias, keep=keep, offset=None)
    batch, length, heads = (ACTIVATION_AXES[name] for name in ("batch", "length", "heads"))
    if query.shape[1] % mesh.shape[length]:
        length = None  # rows that do not divide are whole on each device, as in lm.sharding
    if seen.key.shape[2] % mesh.shape[heads]:
        seen = KeyValue(*(jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in seen))

    def places(of_length):
        """Of numbers [B|1,L|1]."""
        return lambda x: PartitionSpec(batch if len(x) > 1 else None, of_length if x.shape[1] > 1 else None)

    if mask is not None:
        numbers = {
            "query": jax.tree.map(places(length), mask.query),
            "key": jax.tree.map(places(None), mask.key),
        }
    whole, keep_place = PartitionSpec(batch, None, heads), PartitionSpec(batch, heads)
    bias_places = jax.tree.map(lambda x: PartitionSpec(*(None,) * (x.ndim - 1), heads), bias)

    def part(query, key, value, mask, bias, keep):
        offset = None if length is None else jax.lax.axis_index(length)[None] * query.shape[1]
        return call(query, key, value, mask, bias, keep=keep, offset=offset)

    return jax.shard_map(
        part,
        in_specs=(
            PartitionSpec(batch, length, heads),
            whole,
            whole,
            None if mask is None else replace(mask, **numbers),
            bias_places,
            None if keep is None else keep_place,
        ),
        out_specs=PartitionSpec(batch, length, heads),
        check_vma=False,
    )(query, *seen, mask, bias, keep)
