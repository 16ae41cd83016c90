"""Choose the implementation of attention by device, row length, mask, bias and options."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Float

from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.nn.cache import KeyValue
from lm.ops.attention import AttentionOptions, repeat_heads
from lm.ops.kernels import cudnn, xla
from lm.ops.masks import CAUSAL, AnyMask, AttentionMask
from lm.ops.positions import AnyBias, PositionBias
from lm.sharding import ACTIVATION_AXES, mesh_axes

MAX_XLA_LENGTH = 1_024  # longest row for which storing the logits is faster than a tiled kernel [tokens]


@dataclass(frozen=True)
class Implementation:
    """An implementation of ``scaled_dot_product_attention``, and the options that it supports.

    "auto" skips one that lacks an option in use. If the setting names it, SettingError is raised.
    """

    options: frozenset[str]  # names of ``AttentionOptions``
    # Returns a function like ``xla_attention``. Its argument is the index of a device's first query, int32
    # [1], if the queries of a row are spread over devices.
    make: Callable[[Array | None], Any]


def _make_flash(query_offset: Array | None) -> Any:
    # Importing Pallas takes a while, and CPUs need none of it.
    from lm.ops.kernels.flash import FlashAttention
    from lm.ops.kernels.tile_sweep import BACKENDS

    return FlashAttention(BACKENDS[_platform()], query_offset)


def _make_short_rows(_query_offset: Array | None) -> Any:
    from lm.ops.kernels.short_rows import ShortRowsAttention

    return ShortRowsAttention(interpret=_platform() != "tpu")


# What the Pallas kernels support, written here since Pallas is slow to import; a test compares.
PALLAS_OPTIONS = frozenset({"scale", "logit_cap", "dropout_factors"})

IMPLEMENTATIONS = {
    "xla": Implementation(xla.SUPPORTED, lambda _query_offset: xla.xla_attention),
    "cudnn": Implementation(cudnn.SUPPORTED, lambda _query_offset: cudnn.cudnn_attention),
    "flash": Implementation(PALLAS_OPTIONS, _make_flash),
    "short-rows": Implementation(PALLAS_OPTIONS, _make_short_rows),
}


def choose_implementation(
    config: ModelConfig,
    length: int,
    key_length: int,
    mask: AnyMask,
    bias: AnyBias,
    options: AttentionOptions,
) -> str:
    """Return the implementation, by name, for attention of ``length`` queries to ``key_length`` keys here.

    The implementations take masks and biases in different forms:

    - "xla" takes arrays, and objects that it materialises;
    - "cudnn" takes a mask in either form, and no bias;
    - "flash" takes only objects, which it evaluates tile by tile;
    - "short-rows" takes a mask object, and a bias object or an array [1,N,T,S] that all rows share.

    ``model.attention.implementation`` cannot name "short-rows", which only "auto" chooses. A single query
    always goes to "xla". So do, unless the setting is "cudnn", a mask that is an array or has random blocks,
    and an array as bias that "short-rows" does not take. Raises SettingError if the setting names an
    implementation that lacks an option in use, or "cudnn" where it is not available.
    """
    requested = config.attention.implementation
    if requested != "auto" and (lacking := options.in_use - IMPLEMENTATIONS[requested].options):
        names = " and ".join(sorted(lacking))
        raise SettingError(
            f"model.attention.implementation={requested!r} does not implement {names}: choose 'auto'"
        )
    if requested == "cudnn" and (_platform() != "gpu" or _is_length_sharded()):
        where = "where mesh.sequence > 1" if _is_length_sharded() else f"on {_platform()!r}"
        raise SettingError(f"model.attention.implementation='cudnn' is not available {where}: choose 'auto'")
    candidates = _candidates(config, length, key_length, mask, bias)
    chosen = [name for name in candidates if options.in_use <= IMPLEMENTATIONS[name].options]
    if not chosen:
        names = " and ".join(sorted(options.in_use))
        raise SettingError(f"none of {', '.join(candidates)} implements {names} of attention")
    return chosen[0]


def _candidates(config: ModelConfig, length: int, key_length: int, mask: AnyMask, bias: AnyBias) -> list[str]:
    """Return the implementations that take this mask and bias here, the fastest first."""
    requested, platform = config.attention.implementation, _platform()
    if requested == "cudnn" and length > 1:
        return ["cudnn"]
    # No kernel evaluates random blocks tile by tile.
    has_random_blocks = isinstance(mask, AttentionMask) and mask.spec.random_blocks is not None
    if length == 1 or isinstance(mask, Array) or has_random_blocks:
        return ["xla"]
    bias_array = None if isinstance(bias, PositionBias) else bias
    # "short-rows" reads an array in blocks of heads, so no axis of it may be left to broadcasting.
    whole_shape = (1, config.attention.num_heads, length, key_length)
    can_use_short_rows = (
        platform == "tpu"
        and (bias_array is None or bias_array.shape == whole_shape)
        and not _is_length_sharded()
        and fits_short_rows(config, length * key_length)
    )
    candidates = ["short-rows"] if requested == "auto" and can_use_short_rows else []
    if bias_array is not None:
        return [*candidates, "xla"]
    if requested != "auto":
        return [requested]
    if platform not in ("gpu", "tpu") or max(length, key_length) <= MAX_XLA_LENGTH:
        return [*candidates, "xla"]
    is_plain = (mask is None or mask == CAUSAL) and bias is None and config.dtype == "bfloat16"
    cudnn_takes_widths = (
        config.attention.value_width == config.attention.d_kv and config.attention.d_kv in range(8, 129, 8)
    )
    if platform == "gpu" and not _is_length_sharded() and is_plain and cudnn_takes_widths:
        candidates.append("cudnn")
    return [*candidates, "flash", "xla"]


def _is_length_sharded() -> bool:
    """Return whether the queries of a row are spread over devices."""
    return jax.sharding.get_abstract_mesh().shape.get(ACTIVATION_AXES["length"], 1) > 1


def fits_short_rows(config: ModelConfig, num_logits: int) -> bool:
    """Return whether the short-rows kernel takes so many logits per head, and the heads of one device."""
    from lm.ops.kernels.short_rows import MAX_LOGITS, heads_per_register

    devices = jax.sharding.get_abstract_mesh().shape.get(ACTIVATION_AXES["heads"], 1)
    fills_registers = heads_per_register(config.attention.num_heads // devices, config.attention.d_kv) > 0
    return (
        num_logits <= MAX_LOGITS and config.attention.value_width == config.attention.d_kv and fills_registers
    )


def _platform() -> str:
    """Return the mesh's platform, not this machine's: a program may be compiled for a TPU without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend(
    config: ModelConfig,
    query: Float[Array, "B T N H"],
    kv: KeyValue,
    mask: AnyMask,
    bias: AnyBias,
    options: AttentionOptions,
) -> Float[Array, "B T N Hv"]:
    """Return ``scaled_dot_product_attention``, [B,T,N,Hv], by the implementation that suits its inputs.

    Policies of rematerialisation know the output as "context".
    """
    name = choose_implementation(config, query.shape[1], kv.key.shape[1], mask, bias, options)
    if name == "xla":  # the compiler shards it
        out = xla.xla_attention(query, kv.key, kv.value, mask, bias, options)
    else:
        out = _shard_mapped(IMPLEMENTATIONS[name], query, kv, mask, bias, options)
    # The kernel "flash" names its own output, which its backward pass reads in another layout.
    return out if name == "flash" else checkpoint_name(out, "context")


def _shard_mapped(
    implementation: Implementation,
    query: Array,
    kv: KeyValue,
    mask: Any,
    bias: Any,
    options: AttentionOptions,
) -> Array:
    """Run a kernel on each device's rows, queries and heads: the compiler cannot partition a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return implementation.make(None)(query, kv.key, kv.value, mask, bias, options)
    names = ("batch", "length", "heads")
    batch_axis, length_axis, heads_axis = (mesh_axes(ACTIVATION_AXES[name], mesh) for name in names)
    if query.shape[1] % mesh.shape.get(length_axis, 1):
        length_axis = None  # a length that is not divisible is not sharded, as in ``lm.sharding``
    if kv.key.shape[2] % mesh.shape.get(heads_axis, 1):
        kv = KeyValue(*(repeat_heads(x, query.shape[2]) for x in kv))

    def ids_spec(ids, length_axis):
        """Return the spec of a mask's ids [B|1,L|1]."""
        return PartitionSpec(
            batch_axis if ids.shape[0] > 1 else None, length_axis if ids.shape[1] > 1 else None
        )

    def coefficients_spec(coefficients):
        """Return the spec of a bias object's array [...,N], whose heads are spread."""
        return PartitionSpec(*(None,) * (coefficients.ndim - 1), heads_axis)

    query_spec = PartitionSpec(batch_axis, length_axis, heads_axis)
    key_spec = PartitionSpec(batch_axis, None, heads_axis)
    mask_spec = None
    if isinstance(mask, Array):  # only for "cudnn", which is not available where queries are spread
        mask_spec = PartitionSpec(
            batch_axis if mask.shape[0] > 1 else None, heads_axis if mask.shape[1] > 1 else None
        )
    elif mask is not None:
        query_ids = jax.tree.map(lambda ids: ids_spec(ids, length_axis), mask.query)
        key_ids = jax.tree.map(lambda ids: ids_spec(ids, None), mask.key)
        mask_spec = replace(mask, query=query_ids, key=key_ids)
    if isinstance(bias, Array):
        bias_spec = PartitionSpec(None, heads_axis)
    else:
        bias_spec = jax.tree.map(coefficients_spec, bias)
    dropout_spec = None if options.dropout_factors is None else PartitionSpec(batch_axis, heads_axis)

    def local(query, key, value, mask, bias, dropout_factors):
        query_offset = None
        if length_axis is not None:
            query_offset = jax.lax.axis_index(length_axis)[None] * query.shape[1]
        local_options = options._replace(dropout_factors=dropout_factors)
        return implementation.make(query_offset)(query, key, value, mask, bias, local_options)

    specs = (query_spec, key_spec, key_spec, mask_spec, bias_spec, dropout_spec)
    # A Pallas call has no rule by which JAX could check how its results vary over the mesh.
    sharded = jax.shard_map(local, in_specs=specs, out_specs=query_spec, check_vma=False)
    return sharded(query, kv.key, kv.value, mask, bias, options.dropout_factors)
