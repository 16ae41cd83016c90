"""Attention over short rows, whose logits fit into a TPU core's own memory (VMEM) and never leave it.

One step of the grid computes all logits of one row, in as many heads as lie side by side in a register of 128
lanes: arrays [B,T,N*H] are read in the layout that products with parameters leave. Where a product contracts
features, those of the other heads are zeros; where it yields features, those are masked out. Neither costs
anything, since a narrower product would take as long. The backward pass computes the logits again.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from lm.ops.attention import NO_OPTIONS, AttentionOptions, attention_logits, repeat_heads
from lm.ops.kernels.flash import tile_product
from lm.ops.masks import AttentionMask, MaskSpec
from lm.ops.positions import AnyBias, materialize_bias

SUPPORTED = frozenset({"scale", "logit_cap", "dropout_factors"})
LANES = 128  # of a register [numbers]
MAX_LOGITS = 512 * 512  # of a head: the backward pass takes 9 MiB of the 16 that a kernel may fill


def heads_per_register(heads: int, width: int) -> int:
    """Return how many heads of this width fill registers, or 0 if none do."""
    together = max(1, LANES // width)
    fills = together * width % LANES == 0 and heads % together == 0
    return together if fills else 0


class ShortRowsAttention(NamedTuple):
    """``scaled_dot_product_attention`` without logits in HBM; a dropout mask has no gradient."""

    interpret: bool = False  # without compiling, on any device: for tests

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K H"],
        mask: AttentionMask | None = None,
        bias: AnyBias = None,
        options: AttentionOptions = NO_OPTIONS,
    ) -> Float[Array, "B T N H"]:
        """Return [B,T,N,H] from query [B,T,N,H], key and value [B,S,K,H], and a bias [1,N,T,S].

        The heads should fill registers, as ``heads_per_register`` says.
        """
        options.check_supported("short-rows", SUPPORTED)
        heads, width = query.shape[2:]
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        scale = width**-0.5 if options.scale is None else options.scale
        query = query if scale == 1.0 else query * scale
        bias = materialize_bias(bias, query.shape[1], key.shape[1])
        arrays = {"query": query, "key": key, "value": value}
        arrays = {name: x.reshape(*x.shape[:2], -1) for name, x in arrays.items()}
        arrays |= {} if bias is None else {"bias": bias}
        fixed = {} if options.dropout_factors is None else {"dropout_factors": options.dropout_factors}
        if mask is not None:
            fixed |= {f"query.{name}": x[:, :, None].astype(jnp.int32) for name, x in mask.query.items()}
            fixed |= {f"key.{name}": x[:, None, :].astype(jnp.int32) for name, x in mask.key.items()}
        spec = None if mask is None else mask.spec
        together = heads_per_register(heads, width)
        plan = RowPlan(spec, options.logit_cap, together, width, self.interpret)
        return _attend(plan, arrays, fixed).reshape(query.shape)


class RowPlan(NamedTuple):
    """The static part of a call, but for shapes."""

    mask: MaskSpec | None
    logit_cap: float | None
    heads: int  # of a step of the grid
    width: int  # of a head [features]
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: RowPlan, arrays: dict[str, Array], fixed: dict[str, Array]) -> Array:
    """Return [B,T,N*H].

    ``arrays``: "query" [B,T,N*H], "key" and "value" [B,S,N*H], and perhaps "bias" float32 [1,N,T,S].
    ``fixed``, which has no gradients: perhaps "dropout_factors" float32 [B,N,1,S], and the mask's ids, int32
    [B|1,T,1] of queries (such as "query.segment") and [B|1,1,S] of keys.
    """
    return _forward(plan, arrays, fixed)[0]


def _forward(plan, arrays, fixed):
    (out,) = _call(plan, FORWARD, arrays | fixed, {"out": arrays["query"]})
    return out, (arrays, fixed)


def _backward(plan, saved, gradient):
    arrays, fixed = saved
    gradients = _call(plan, BACKWARD, arrays | fixed | {"gradient": gradient}, arrays)
    return dict(zip(arrays, gradients, strict=True)), None


_attend.defvjp(_forward, _backward)


class Pass(NamedTuple):
    """The forward or the backward pass."""

    kernel: Callable  # (plan, inputs by name, outputs by name) of one row and ``plan.heads`` heads
    products: int  # matrix products over all logits of a head, for the estimate of costs


def _call(plan, direction, inputs, outputs):
    """Run FORWARD or BACKWARD over all rows and heads: return arrays like ``outputs``, from ``inputs``."""
    rows, _, features = inputs["query"].shape

    def kernel(*refs):
        named = list(zip([*inputs, *outputs], refs, strict=True))
        direction.kernel(plan, dict(named[: len(inputs)]), dict(named[len(inputs) :]))

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
        grid=(features // (plan.heads * plan.width), rows),
        in_specs=[_block(plan, name, x.shape) for name, x in inputs.items()],
        out_specs=[_block(plan, name, x.shape) for name, x in outputs.items()],
        # the gradient of a bias is summed over the rows, which therefore come one after the other
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(plan, direction.products, inputs, outputs),
        interpret=plan.interpret,
    )(*inputs.values())


def _cost(plan, products, inputs, outputs):
    """Return what a pass costs, with products as a TPU computes them: on squares of 128 x 128 numbers."""
    (rows, length, features), slots = inputs["query"].shape, inputs["key"].shape[1]
    logits = rows * features // plan.width * prod(-(-size // LANES) * LANES for size in (length, slots))
    return pl.CostEstimate(
        flops=2 * products * logits * plan.heads * plan.width,
        transcendentals=logits,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs.values(), *outputs.values())),
    )


def _block(plan, name, shape):
    """Return which block of an array a step of the grid reads or writes."""
    rows, *inner = shape
    if len(inner) == 3:  # of a bias or a dropout mask by heads
        shape = (None, plan.heads, *inner[1:])
        return pl.BlockSpec(shape, lambda heads, row: (row if rows > 1 else 0, heads, 0, 0))
    if "." in name:
        return pl.BlockSpec((None, *inner), lambda _, row: (row if rows > 1 else 0, 0, 0))
    return pl.BlockSpec((None, inner[0], plan.heads * plan.width), lambda heads, row: (row, 0, heads))


def _forward_kernel(plan, inputs, outputs):
    ref = outputs["out"]
    out = jnp.zeros(ref.shape, jnp.float32)
    for head in range(plan.heads):
        weights, total, _ = _unnormalized_softmax(plan, inputs, head)
        dropped = _drop_out(weights, inputs, head).astype(ref.dtype)
        mean = tile_product(dropped, inputs["value"][...], 1, 0) / total
        out = jnp.where(_is_of_head(plan, head, out.shape, 1), mean, out)
    ref[...] = out.astype(ref.dtype)


def _backward_kernel(plan, inputs, outputs):
    query, key, value, gradient = (inputs[name][...] for name in ("query", "key", "value", "gradient"))
    dtype = query.dtype
    d_query = jnp.zeros(query.shape, jnp.float32)
    d_key, d_value = (jnp.zeros(x.shape[::-1], jnp.float32) for x in (key, value))
    for head in range(plan.heads):
        is_of_head = partial(_is_of_head, plan, head)
        weights, total, pullback = _unnormalized_softmax(plan, inputs, head)
        weights /= total
        d_dropped = tile_product(jnp.where(is_of_head(gradient.shape, 1), gradient, 0), value, 1, 1)
        d_weights = _drop_out(d_dropped, inputs, head)
        d_logits = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
        if "bias" in outputs:
            _add_row(outputs["bias"], head, d_logits)
        (d_products,) = pullback(d_logits)
        d_products = d_products.astype(dtype)
        dropped = _drop_out(weights, inputs, head).astype(dtype)
        d_query = jnp.where(is_of_head(d_query.shape, 1), tile_product(d_products, key, 1, 0), d_query)
        # features by keys: the arrays of logits are not transposed, the smaller ones are
        d_key = jnp.where(is_of_head(d_key.shape, 0), tile_product(query, d_products, 0, 0), d_key)
        d_value = jnp.where(is_of_head(d_value.shape, 0), tile_product(gradient, dropped, 0, 0), d_value)
    for name, x in (("query", d_query), ("key", d_key.T), ("value", d_value.T)):
        outputs[name][...] = x.astype(outputs[name].dtype)


FORWARD, BACKWARD = Pass(_forward_kernel, 2), Pass(_backward_kernel, 5)


def _add_row(ref, head, d_logits):
    """Add a row's gradient to that of the bias, which the first row begins."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        ref[head] = d_logits

    @pl.when(pl.program_id(1) > 0)
    def _():
        ref[head] += d_logits


def _unnormalized_softmax(plan, inputs, head):
    """Return exp(logits - max) float32 [T,S], its sums [T,1] (1 in place of 0), and the logits' pullback."""
    query = inputs["query"][...]
    query = jnp.where(_is_of_head(plan, head, query.shape, 1), query, 0)
    products = tile_product(query, inputs["key"][...], 1, 1)
    bias = inputs["bias"][head] if "bias" in inputs else None
    logits, pullback = jax.vjp(
        lambda products: attention_logits(products, bias, logit_cap=plan.logit_cap), products
    )
    if plan.mask is not None:
        logits = jnp.where(_evaluate_mask(plan.mask, inputs, logits.shape), logits, -jnp.inf)
    highest = logits.max(1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(highest == -jnp.inf, 0.0, highest))
    total = weights.sum(1, keepdims=True)
    return weights, jnp.where(total == 0, 1.0, total), pullback


def _evaluate_mask(mask, inputs, shape):
    """Return bool [T,S]: whether each query attends to each key."""
    query_index, key_index = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    query_ids = {name.removeprefix("query."): x[...] for name, x in inputs.items() if "query." in name}
    key_ids = {name.removeprefix("key."): x[...] for name, x in inputs.items() if "key." in name}
    return mask.evaluate(key_index - query_index, query_ids, key_ids)


def _drop_out(x, inputs, head):
    """Return weights or their gradient [T,S], times the dropout mask."""
    return x * inputs["dropout_factors"][head] if "dropout_factors" in inputs else x


def _is_of_head(plan, head, shape, axis):
    """Return bool: whether a feature along ``axis`` is one of ``head``."""
    feature = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return jax.lax.div(feature, jnp.int32(plan.width)) == head
