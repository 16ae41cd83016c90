"""Flash attention (Dao et al. 2022) as a Pallas kernel: logits are computed tile by tile and never stored.

The mask is evaluated from ids and the position bias from a few coefficients, for each tile anew, forward and
backward. All tiles are transposed, keys by queries: what is accumulated per query is then a row, and arrays
[B,N,H,T] fill a TPU's registers whatever H is.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from lm.ops.attention import NO_OPTIONS, AttentionOptions, apply_dropout_to_values, attention_logits
from lm.ops.kernels.tile_sweep import Backend, Fold, Input, Outputs, Sweep, Tiles, power_of_two, sweep_tiles
from lm.ops.masks import NO_BOUNDS, AttentionMask, MaskSpec, PositionIds
from lm.ops.positions import LinearDecay, PiecewiseConstant, PositionBias, TilePositions

SUPPORTED = frozenset({"scale", "logit_cap", "dropout_factors"})


class TilePlan(NamedTuple):
    """The static part of a call: everything that is known when it is compiled."""

    backend: Backend
    mask: MaskSpec | None
    bias: PiecewiseConstant | LinearDecay | None
    logit_cap: float | None
    key_length: int  # keys without padding [positions]
    query_tile: int  # queries of a tile [positions]
    key_tile: int  # keys of a tile [positions]


class Indices(NamedTuple):
    """What the kernels read of queries and keys besides their features."""

    query_offset: Array  # int32 [1]: the index of the first query among the keys
    query_ids: PositionIds  # int32 [B|1,T], for the mask
    key_ids: PositionIds  # int32 [B|1,S]


class FlashAttention(NamedTuple):
    """``scaled_dot_product_attention`` with memory linear in T and S; a dropout mask has no gradient."""

    backend: Backend
    query_offset: Array | None = (
        None  # int32 [1]: index of the first query, where a row's queries are sharded
    )

    def __call__(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K Hv"],
        mask: AttentionMask | None = None,
        bias: PositionBias | None = None,
        options: AttentionOptions = NO_OPTIONS,
    ) -> Float[Array, "B T N Hv"]:
        """Return [B,T,N,Hv] from query [B,T,N,H], key [B,S,K,H] and value [B,S,K,Hv]."""
        options.check_supported("flash", SUPPORTED)
        length, key_length, heads = query.shape[1], key.shape[1], query.shape[2]
        width, value_width = query.shape[3], value.shape[3]
        scale = width**-0.5 if options.scale is None else options.scale
        query = query if scale == 1.0 else query * scale
        if options.dropout_factors is not None:
            key, value = apply_dropout_to_values(key, value, options.dropout_factors)
        plan = TilePlan(
            self.backend,
            mask=None if mask is None else mask.spec,
            bias=None if bias is None else bias.function,
            logit_cap=options.logit_cap,
            key_length=key_length,
            query_tile=self.backend.tile_size(length),
            key_tile=self.backend.tile_size(key_length),
        )
        padded_width = self.backend.padded_width(max(width, value_width))  # zeros change no logit
        query, key, value = (
            _pad(x.transpose(0, 2, 3, 1), {2: padded_width, 3: -(-x.shape[1] // tile) * tile})
            for x, tile in ((query, plan.query_tile), (key, plan.key_tile), (value, plan.key_tile))
        )
        coefficients = jnp.zeros((heads, 1)) if bias is None else bias.coefficients
        indices = Indices(
            jnp.zeros(1, jnp.int32) if self.query_offset is None else self.query_offset,
            _padded_ids({} if mask is None else mask.query, length, query.shape[3], padding=0),
            _padded_ids({} if mask is None else mask.key, key_length, key.shape[3], padding=-1),
        )
        out = _attend(plan, query, key, value, coefficients.astype(jnp.float32), indices)
        return out[:, :, :value_width, :length].transpose(0, 3, 1, 2)


def _pad(x: Array, sizes: dict[int, int], value: int = 0) -> Array:
    """Return x, padded at the end of the axes {axis: size}."""
    margins = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, margins, constant_values=value)


def _padded_ids(ids: PositionIds, length: int, size: int, padding: int) -> PositionIds:
    """Return ids int32 [B|1,size], all of the same number of rows."""
    rows = max(map(len, ids.values()), default=1)
    alike = {name: jnp.broadcast_to(x, (rows, length)).astype(jnp.int32) for name, x in ids.items()}
    return {name: _pad(x, {1: size}, padding) for name, x in alike.items()}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: TilePlan, query, key, value, coefficients, indices: Indices) -> Array:
    """Return [B,N,H,T] from query [B,N,H,T], key and value [B,K,H,S], and the bias's coefficients [N,R]."""
    return _forward(plan, query, key, value, coefficients, indices)[0]


def _forward(plan, query, key, value, coefficients, indices):
    rows, heads, width, length = query.shape

    def start():
        row = (1, plan.query_tile)
        return jnp.full(row, -jnp.inf), jnp.zeros(row), jnp.zeros((width, plan.query_tile))

    def step(carry, tiles):
        """Add a tile of keys by the online softmax: rescale what was summed if the maximum grows."""
        highest, total, out = carry
        logits, _ = _tile_logits(plan, tiles)
        new = jnp.maximum(highest, logits.max(0, keepdims=True))
        finite = jnp.where(new == -jnp.inf, 0.0, new)  # of queries that have seen no key yet
        weights, rescale = jnp.exp(logits - finite), jnp.exp(highest - finite)
        out = out * rescale + tile_product(tiles.arrays["value"], weights.astype(value.dtype), 1, 0)
        return new, total * rescale + weights.sum(0, keepdims=True), out

    def finish(carry):
        highest, total, out = carry
        sees_any = total > 0
        total = jnp.where(sees_any, total, 1.0)
        # exp(logit - infinity) is 0: in the backward pass too, a query that sees no key has no weights.
        return out / total, jnp.where(sees_any, highest + jnp.log(total), jnp.inf)

    per_query = jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32)
    outputs = jax.ShapeDtypeStruct(query.shape, query.dtype), per_query
    scan = Scan(plan, {"query": query}, {"key": key, "value": value}, coefficients, indices)
    out, log_sum = scan.fold("query", outputs, Fold(start, step, finish))
    # Where a policy of rematerialisation saves the context, the backward pass need not run this kernel again.
    out, log_sum = checkpoint_name(out, "context"), checkpoint_name(log_sum, "context")
    return out, (query, key, value, coefficients, indices, out, log_sum)


def _backward(plan, residuals, gradient):
    query, key, value, coefficients, indices, out, log_sum = residuals
    # The sum over keys of weight * gradient of the weight, which the gradient of a softmax subtracts.
    mean_gradient = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(2, keepdims=True)
    queries = {"query": query, "gradient": gradient, "log_sum": log_sum, "mean_gradient": mean_gradient}
    scan = Scan(plan, queries, {"key": key, "value": value}, coefficients, indices)
    d_query, d_coefficients = _query_gradient(scan)
    d_key, d_value = _key_gradient(scan)
    return d_query, d_key, d_value, d_coefficients, None


_attend.defvjp(_forward, _backward)


class Scan(NamedTuple):
    """One pass over all logits: the arrays that it reads, tile by tile."""

    plan: TilePlan
    queries: dict[str, Array]  # [B,N,H|1,T]
    keys: dict[str, Array]  # [B,K,H,S]
    coefficients: Array  # float32 [N,R] of the bias
    indices: Indices

    def fold(self, by: Literal["query", "key"], outputs: Outputs, fold: Fold) -> list[Array]:
        """Run ``fold`` for each tile of queries over the visible tiles of keys, or the other way round."""
        plan, indices = self.plan, self.indices
        queries = _side_inputs("query", self.queries, indices.query_ids, plan.query_tile, axis=3)
        keys = _side_inputs("key", self.keys, indices.key_ids, plan.key_tile, axis=2)
        behind, ahead = NO_BOUNDS if plan.mask is None else plan.mask.window_bounds(indices.key_ids)
        fold = fold._replace(step=_skip_masked_tiles(plan, fold.step))
        if by == "query":
            job = Sweep(plan.backend, queries, keys, outputs, (behind, ahead), "outer", fold)
        else:  # keys that a query sees so far behind it see that query as far ahead
            job = Sweep(plan.backend, keys, queries, outputs, (ahead, behind), "inner", fold)
        return sweep_tiles(job, indices.query_offset, self.coefficients)


def _query_gradient(scan: Scan) -> list[Array]:
    """Return the gradients of queries [B,N,H,T] and of the bias's coefficients [N,R]."""
    plan, query = scan.plan, scan.queries["query"]
    rows, heads, width, length = query.shape
    count = scan.coefficients.shape[1]
    padded_count = power_of_two(count)  # the sizes of Triton's tiles are powers of two

    def start():
        return jnp.zeros((width, plan.query_tile)), jnp.zeros((padded_count, 1))

    def step(carry, tiles):
        out, d_coefficients = carry
        gradients = _tile_gradients(plan, tiles)
        key = tiles.arrays["key"]
        out += tile_product(key, gradients.products.astype(key.dtype), 1, 0)
        if plan.bias is not None:
            index = jax.lax.broadcasted_iota(jnp.int32, d_coefficients.shape, 0)
            positions = _tile_positions(plan, tiles)
            d_coefficients += plan.bias.coefficient_gradient(gradients.logits, positions, index)
        return out, d_coefficients

    tiles_of_queries = length // plan.query_tile
    by_tile = jax.ShapeDtypeStruct((rows, heads, tiles_of_queries, padded_count, 1), jnp.float32)
    outputs = jax.ShapeDtypeStruct(query.shape, query.dtype), by_tile
    d_query, d_coefficients = scan.fold("query", outputs, Fold(start, step, lambda carry: carry))
    return [d_query, d_coefficients.sum((0, 2, 4))[:, :count]]


def _key_gradient(scan: Scan) -> list[Array]:
    """Return the gradients of keys and values [B,K,H,S], summed over the query heads that share them."""
    rows, heads, width, _ = scan.queries["query"].shape
    key = scan.keys["key"]
    groups, key_length = key.shape[1], key.shape[3]

    def start():
        return (jnp.zeros((width, scan.plan.key_tile)),) * 2

    def step(carry, tiles):
        d_key, d_value = carry
        gradients = _tile_gradients(scan.plan, tiles)
        d_key += tile_product(tiles.arrays["query"], gradients.products.astype(key.dtype), 1, 1)
        weights = gradients.weights.astype(key.dtype)
        return d_key, d_value + tile_product(tiles.arrays["gradient"], weights, 1, 1)

    dtype = key.dtype if groups == heads else jnp.float32
    output = jax.ShapeDtypeStruct((rows, heads, width, key_length), dtype)
    by_head = scan.fold("key", (output, output), Fold(start, step, lambda carry: carry))
    return [x.reshape(rows, groups, -1, width, key_length).sum(2).astype(key.dtype) for x in by_head]


def _side_inputs(
    side: str, arrays: dict[str, Array], ids: PositionIds, tile: int, axis: int
) -> dict[str, Input]:
    """Return arrays [B,N,H,L] of one side, and ids as [B,1,1,T] (``axis`` 3) or [B,1,S,1] (``axis`` 2)."""
    inputs = {name: Input(x, 3, tile) for name, x in arrays.items()}
    for name, x in ids.items():
        shaped = x[:, None, None, :] if axis == 3 else x[:, None, :, None]
        inputs[f"{side}.{name}"] = Input(shaped, axis, tile)
    return inputs


def _skip_masked_tiles(plan, step):
    """Return ``step``, skipped where the ids show that no query of a tile sees any key of it."""

    def step_if_visible(carry, tiles):
        query, key = _ids(tiles, "query."), _ids(tiles, "key.")
        if not key:
            return step(carry, tiles)
        return jax.lax.cond(plan.mask.tile_is_visible(query, key), lambda: step(carry, tiles), lambda: carry)

    return step_if_visible


def _ids(tiles: Tiles, side: str) -> PositionIds:
    return {name.removeprefix(side): x for name, x in tiles.arrays.items() if name.startswith(side)}


def _tile_positions(plan: TilePlan, tiles: Tiles) -> TilePositions:
    shape, first = (plan.key_tile, plan.query_tile), tiles.first_key - tiles.first_query
    within = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return TilePositions(within + first, first - (plan.query_tile - 1), first + (plan.key_tile - 1))


def _tile_logits(plan: TilePlan, tiles: Tiles):
    """Return the logits float32 [S,T] of a tile, -inf where masked, and their pullback to the products."""
    positions = _tile_positions(plan, tiles)
    bias = None if plan.bias is None else plan.bias.tile(positions, tiles.coefficient)
    products = tile_product(tiles.arrays["key"], tiles.arrays["query"], 0, 0)
    logits, pullback = jax.vjp(
        lambda products: attention_logits(products, bias, logit_cap=plan.logit_cap), products
    )
    if plan.mask is not None:
        visible = plan.mask.evaluate(positions.each, _ids(tiles, "query."), _ids(tiles, "key."))
        logits = jnp.where(visible, logits, -jnp.inf)
    if plan.key_length % plan.key_tile:
        index = tiles.first_key + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        logits = jnp.where(index < plan.key_length, logits, -jnp.inf)
    return logits, pullback


class TileGradients(NamedTuple):
    """The weights of a tile, and the gradients of its logits and of its products, all float32 [S,T]."""

    weights: Array
    logits: Array
    products: Array


def _tile_gradients(plan: TilePlan, tiles: Tiles) -> TileGradients:
    logits, pullback = _tile_logits(plan, tiles)
    weights = jnp.exp(logits - tiles.arrays["log_sum"])
    d_weights = tile_product(tiles.arrays["value"], tiles.arrays["gradient"], 0, 0)
    d_logits = weights * (d_weights - tiles.arrays["mean_gradient"])
    (d_products,) = pullback(d_logits)
    return TileGradients(weights, d_logits, d_products)


def tile_product(a, b, axis, other):
    """Return the float32 product of two tiles, summed over ``axis`` of ``a`` and ``other`` of ``b``."""
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
