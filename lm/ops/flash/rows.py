"""Attention of rows whose scores fit into a TPU's own memory: they never leave it, forward and backward.

A step of the grid makes all scores of one row, in as many heads as lie side by side in a register of 128
lanes: arrays [B,T,N*H] are read as products with parameters leave them. Where a product contracts features,
those of the other heads are zeros; where it makes features, they are left out. Either costs nothing, since a
narrower product would take as long. The backward pass makes the scores again.
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

from lm.ops.attention import PLAIN, Softmax, check_options
from lm.ops.masks import Mask, Rule
from lm.ops.positions import AnyBias, Bias

LANES = 128  # of a register [numbers]
MOST_SCORES = 512 * 512  # of a head: the backward pass takes 9 MiB of the 16 that a kernel may fill


def side_by_side(heads: int, width: int) -> int:
    """How many heads of this width fill registers, or 0 if none do."""
    together = max(1, LANES // width)
    return together if together * width % LANES == 0 and heads % together == 0 else 0


class WholeRows(NamedTuple):
    """``dot_product_attention`` without scores in HBM; a dropout mask has no gradient."""

    interpret: bool = False  # without compiling, on any device: for tests

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask | None = None,
        bias: AnyBias = None,
        softmax: Softmax = PLAIN,
    ) -> Array:
        """[B,T,N,H] from query [B,T,N,H], key and value [B,S,K,H], bias [1,N,T,S]; heads ``side_by_side``."""
        check_options("rows", softmax)
        heads, width = query.shape[2:]
        key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
        scale = softmax.scale_of(width)
        query = query * scale if scale != 1.0 else query
        bias = bias.dense(query.shape[1], key.shape[1]) if isinstance(bias, Bias) else bias
        arrays = {"query": query, "key": key, "value": value}
        arrays = {name: x.reshape(*x.shape[:2], -1) for name, x in arrays.items()}
        arrays |= {} if bias is None else {"bias": bias}
        fixed = {} if softmax.keep is None else {"keep": softmax.keep}
        if mask is not None:
            fixed |= {f"query.{name}": x[:, :, None].astype(jnp.int32) for name, x in mask.query.items()}
            fixed |= {f"key.{name}": x[:, None, :].astype(jnp.int32) for name, x in mask.key.items()}
        plan = RowPlan(None if mask is None else mask.rule, side_by_side(heads, width), width, self.interpret)
        return _attend(plan, arrays, fixed).reshape(query.shape)


class RowPlan(NamedTuple):
    """All of one call that is known when it is compiled, but for shapes."""

    rule: Rule | None
    heads: int  # of a step
    width: int  # of a head [features]
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: RowPlan, arrays: dict[str, Array], fixed: dict[str, Array]) -> Array:
    """[B,T,N*H] of ``arrays`` "query" [B,T,N*H], "key", "value" [B,S,N*H], maybe "bias" float32 [1,N,T,S].

    ``fixed``, without gradients, may have "keep" float32 [B,N,1,S] and the mask's numbers: int32 [B|1,T,1] of
    queries, such as "query.segment", and [B|1,1,S] of keys.
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
    """Forward or backward."""

    kernel: Callable  # (plan, inputs by name, outputs by name) of one row and ``plan.heads`` heads
    products: int  # with all scores of a head


def _call(plan, one, inputs, outputs):
    """A pass over all rows and heads: arrays like ``outputs`` from ``inputs``, both by name."""
    rows, _, features = inputs["query"].shape

    def kernel(*refs):
        named = list(zip([*inputs, *outputs], refs, strict=True))
        one.kernel(plan, dict(named[: len(inputs)]), dict(named[len(inputs) :]))

    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()],
        grid=(features // (plan.heads * plan.width), rows),
        in_specs=[_block(plan, name, x.shape) for name, x in inputs.items()],
        out_specs=[_block(plan, name, x.shape) for name, x in outputs.items()],
        # the gradient of a bias is summed over the rows, which therefore come one after the other
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(plan, one.products, inputs, outputs),
        interpret=plan.interpret,
    )(*inputs.values())


def _cost(plan, products, inputs, outputs):
    """What a pass costs, with the products as a TPU computes them: on squares of 128 x 128 numbers."""
    (rows, length, features), slots = inputs["query"].shape, inputs["key"].shape[1]
    scores = rows * features // plan.width * prod(-(-size // LANES) * LANES for size in (length, slots))
    return pl.CostEstimate(
        flops=2 * products * scores * plan.heads * plan.width,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs.values(), *outputs.values())),
    )


def _block(plan, name, shape):
    """What a step reads or writes of an array of ``_attend``."""
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
        weights, total = _exponentials(plan, inputs, head)
        mean = _product(_kept(weights, inputs, head).astype(ref.dtype), inputs["value"][...], 1, 0) / total
        out = jnp.where(_inside(plan, head, out.shape, 1), mean, out)
    ref[...] = out.astype(ref.dtype)


def _backward_kernel(plan, inputs, outputs):
    query, key, value, gradient = (inputs[name][...] for name in ("query", "key", "value", "gradient"))
    dtype = query.dtype
    d_query = jnp.zeros(query.shape, jnp.float32)
    d_key, d_value = (jnp.zeros(x.shape[::-1], jnp.float32) for x in (key, value))
    for head in range(plan.heads):
        inside = partial(_inside, plan, head)
        weights, total = _exponentials(plan, inputs, head)
        weights /= total
        d_kept = _product(jnp.where(inside(gradient.shape, 1), gradient, 0), value, 1, 1)
        d_weights = _kept(d_kept, inputs, head)
        d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
        if "bias" in outputs:
            _add_row(outputs["bias"], head, d_scores)
        low, kept = d_scores.astype(dtype), _kept(weights, inputs, head).astype(dtype)
        d_query = jnp.where(inside(d_query.shape, 1), _product(low, key, 1, 0), d_query)
        # features by keys: the arrays of scores are not transposed, the smaller ones are
        d_key = jnp.where(inside(d_key.shape, 0), _product(query, low, 0, 0), d_key)
        d_value = jnp.where(inside(d_value.shape, 0), _product(gradient, kept, 0, 0), d_value)
    for name, x in (("query", d_query), ("key", d_key.T), ("value", d_value.T)):
        outputs[name][...] = x.astype(outputs[name].dtype)


FORWARD, BACKWARD = Pass(_forward_kernel, 2), Pass(_backward_kernel, 5)


def _add_row(ref, head, d_scores):
    """Add a row's gradient to that of the bias, which the first row begins."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        ref[head] = d_scores

    @pl.when(pl.program_id(1) > 0)
    def _():
        ref[head] += d_scores


def _exponentials(plan, inputs, head):
    """float32 [T,S], exp(score) over a factor common to a query, and their sums [T,1], or 1 for 0."""
    query = inputs["query"][...]
    query = jnp.where(_inside(plan, head, query.shape, 1), query, 0)
    scores = _product(query, inputs["key"][...], 1, 1)
    scores = scores + inputs["bias"][head] if "bias" in inputs else scores
    if plan.rule is not None:
        scores = jnp.where(_seen(plan.rule, inputs, scores.shape), scores, -jnp.inf)
    highest = scores.max(1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0.0, highest))
    total = weights.sum(1, keepdims=True)
    return weights, jnp.where(total == 0, 1.0, total)


def _seen(rule, inputs, shape):
    """bool [T,S]."""
    distance = jax.lax.broadcasted_iota(jnp.int32, shape, 1) - jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    query, key = (
        {name.removeprefix(side): ref[...] for name, ref in inputs.items() if name.startswith(side)}
        for side in ("query.", "key.")
    )
    return rule.seen(distance, query, key)


def _kept(x, inputs, head):
    """x [T,S] after dropout of weights, or its gradient."""
    return x * inputs["keep"][head] if "keep" in inputs else x


def _inside(plan, head, shape, axis):
    """bool: whether a feature along ``axis`` is one of ``head``."""
    feature = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return jax.lax.div(feature, jnp.int32(plan.width)) == head


def _product(a, b, axis, other):
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
