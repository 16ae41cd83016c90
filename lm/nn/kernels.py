"""Which implementation computes attention: by the device, the row's length, the mask and the bias."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from lm.nn.cache import KeyValue
from lm.nn.config import ModelConfig
from lm.ops.attention import PLAIN, SCORE_SCALES, Softmax, cudnn_attention, dot_product_attention, lacks
from lm.ops.masks import CAUSAL, AnyMask, Mask
from lm.ops.positions import AnyBias, Bias
from lm.settings import SettingError
from lm.sharding import ACTIVATION_AXES, mesh_axes

SHORT = 1_024  # rows up to which explicit scores are quicker than a kernel that never stores them [tokens]

Kernel = Callable[[Array | None], Any]  # the first query's place -> a function as ``dot_product_attention``


def implementation(
    config: ModelConfig,
    length: int,
    key_length: int,
    mask: AnyMask,
    bias: AnyBias,
    softmax: Softmax = PLAIN,
) -> Literal["xla", "cudnn", "flash", "rows"]:
    """What computes the attention of ``length`` queries to ``key_length`` keys on this program's devices.

    "xla" takes masks and biases that are laid out, "flash" such that are not, "rows" the mask of the one kind
    and the bias of the other. Of the options of ``softmax`` "xla" computes all: another that lacks one in use
    is not taken, and refused where ``model.attention`` names it.
    """
    chosen = _by_shapes(config, length, key_length, mask, bias)
    if not (missing := lacks(chosen, softmax)):
        return chosen
    if config.attention == chosen:
        raise SettingError(
            f"model.attention={chosen!r} does not compute {', '.join(missing)} of attention: choose 'auto' "
            "or 'xla', or compute it there and name it in lm.ops.attention.IMPLEMENTED"
        )
    return "xla"


def _by_shapes(
    config: ModelConfig, length: int, key_length: int, mask: AnyMask, bias: AnyBias
) -> Literal["xla", "cudnn", "flash", "rows"]:
    """As ``implementation``, of attention without options."""
    platform, chosen, mesh = _platform(), config.attention, jax.sharding.get_abstract_mesh()
    spread = mesh.shape.get(ACTIVATION_AXES["length"], 1) > 1
    if chosen == "cudnn" and (platform != "gpu" or spread):
        where = f"on {platform!r}" if platform != "gpu" else "where mesh.sequence > 1"
        raise SettingError(f"model.attention='cudnn' is not available {where}: choose 'auto'")
    if chosen == "cudnn" and length > 1:
        return chosen
    laid_out = mask is not None and not isinstance(mask, Mask)
    if length == 1 or laid_out or isinstance(mask, Mask) and mask.rule.random:
        return "xla"
    if chosen == "auto" and platform == "tpu" and not spread and fit_rows(config, length * key_length):
        return "rows"
    if bias is not None and not isinstance(bias, Bias):
        return "xla"
    if chosen != "auto":
        return chosen
    if platform not in ("gpu", "tpu") or max(length, key_length) <= SHORT:
        return "xla"
    plain = (mask is None or mask == CAUSAL) and bias is None and config.dtype == "bfloat16"
    plain = plain and config.value_width == config.d_kv
    fits_cudnn = platform == "gpu" and plain and not spread and config.d_kv in range(8, 129, 8)
    return "cudnn" if fits_cudnn else "flash"


def fit_rows(config: ModelConfig, scores: int) -> bool:
    """Whether ``WholeRows`` takes so many scores of a head, and the heads that a device has."""
    from lm.ops.flash.rows import MOST_SCORES, side_by_side  # pallas takes a while, and CPUs need none of it

    heads = config.num_heads // jax.sharding.get_abstract_mesh().shape.get(ACTIVATION_AXES["heads"], 1)
    return (
        scores <= MOST_SCORES and config.value_width == config.d_kv and side_by_side(heads, config.d_kv) > 0
    )


def _platform() -> str:
    """That of the mesh, which need not be this machine's: a program may be compiled for a TPU without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def attend(
    config: ModelConfig, query: Array, seen: KeyValue, mask: AnyMask, bias: AnyBias, keep: Array | None
) -> Array:
    """[B,T,N,H] as ``dot_product_attention`` of query [B,T,N,H], by whatever computes it here."""
    softmax = Softmax(SCORE_SCALES[config.scores](config.d_kv), keep)
    chosen = implementation(config, query.shape[1], seen.key.shape[1], mask, bias, softmax)
    if chosen == "xla":
        return dot_product_attention(query, *seen, mask, bias, softmax)
    from lm.ops.flash.grid import BACKENDS
    from lm.ops.flash.kernel import Flash
    from lm.ops.flash.rows import WholeRows

    kernels: dict[str, Kernel] = {
        "cudnn": lambda offset: cudnn_attention,
        "flash": lambda offset: Flash(BACKENDS[_platform()], offset),
        "rows": lambda offset: WholeRows(interpret=_platform() != "tpu"),
    }
    return _sharded(kernels[chosen], query, seen, mask, bias, softmax)


def _sharded(kernel: Kernel, query: Array, seen: KeyValue, mask: Any, bias: Any, softmax: Softmax) -> Array:
    """``kernel(offset)`` of each device's rows, queries and heads: the compiler cannot take a kernel apart.

    ``offset`` int32 [1] is the place of a device's first query in its row.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return kernel(None)(query, *seen, mask, bias, softmax)
    names = ("batch", "length", "heads")
    batch, length, heads = (mesh_axes(ACTIVATION_AXES[name], mesh) for name in names)
    if query.shape[1] % mesh.shape.get(length, 1):
        length = None  # rows that do not divide are whole on each device, as in lm.sharding
    if seen.key.shape[2] % mesh.shape.get(heads, 1):
        seen = KeyValue(*(jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in seen))

    def numbers(axis):
        """Where numbers [B|1,L|1] of a mask live."""
        return lambda x: PartitionSpec(batch if len(x) > 1 else None, axis if x.shape[1] > 1 else None)

    queries, keys = PartitionSpec(batch, length, heads), PartitionSpec(batch, None, heads)
    masks = mask
    if mask is not None:
        query_numbers = jax.tree.map(numbers(length), mask.query)
        masks = replace(mask, query=query_numbers, key=jax.tree.map(numbers(None), mask.key))
    if isinstance(bias, Array):
        biases = PartitionSpec(None, heads)
    else:
        biases = jax.tree.map(lambda x: PartitionSpec(*(None,) * (x.ndim - 1), heads), bias)
    keeps = None if softmax.keep is None else PartitionSpec(batch, heads)

    def part(query, key, value, mask, bias, keep):
        offset = None if length is None else jax.lax.axis_index(length)[None] * query.shape[1]
        return kernel(offset)(query, key, value, mask, bias, softmax._replace(keep=keep))

    specs = (queries, keys, keys, masks, biases, keeps)
    parts = jax.shard_map(part, in_specs=specs, out_specs=queries, check_vma=False)
    return parts(query, *seen, mask, bias, softmax.keep)
