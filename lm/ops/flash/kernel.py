"""Attention without scores in memory: a Pallas kernel goes through them tile by tile (Dao et al. 2022).

The mask is a rule and the bias a few numbers, from which each tile is made anew, forward and backward. All
tiles are transposed, keys by queries: what is remembered of each query is then a row, and arrays [B,N,H,T]
fill a TPU's registers whatever H is.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lm.ops.attention import PLAIN, Softmax, check_options, drop_values
from lm.ops.flash.grid import Backend, Fold, Input, Outputs, Sweep, Tiles, power_of_two, sweep_tiles
from lm.ops.masks import Mask, Numbers, Rule
from lm.ops.positions import Bias, Buckets, Distances, Slope


class TilePlan(NamedTuple):
    """All of one call that is known when it is compiled."""

    backend: Backend
    rule: Rule | None
    form: Buckets | Slope | None
    key_length: int  # keys without padding [places]
    tile: int  # queries of a tile [places]
    key_tile: int  # keys of a tile [places]


class Places(NamedTuple):
    """What the kernels read of queries and keys besides their features."""

    offset: Array  # int32 [1]: the first query's place among the keys
    query_numbers: Numbers  # int32 [B|1,T], of the mask
    key_numbers: Numbers  # int32 [B|1,S]


class Flash(NamedTuple):
    """``dot_product_attention`` with memory linear in T and S; a dropout mask has no gradient."""

    backend: Backend
    offset: Array | None = None  # int32 [1]: place of the first query, of rows whose others are elsewhere

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: Mask | None = None,
        bias: Bias | None = None,
        softmax: Softmax = PLAIN,
    ) -> Array:
        """[B,T,N,H] from query [B,T,N,H], key and value [B,S,K,H], whose width the result has."""
        check_options("flash", softmax)
        length, heads, value_width = *query.shape[1:3], value.shape[3]
        width = self.backend.width(max(query.shape[3], value_width))  # zeros change no score
        key, value = drop_values(key, value, softmax.keep)
        scale = softmax.scale_of(query.shape[3])
        query = query * scale if scale != 1.0 else query
        tiles = self.backend.tiles(length), self.backend.tiles(key.shape[1])
        rule, form = None if mask is None else mask.rule, None if bias is None else bias.form
        plan = TilePlan(self.backend, rule, form, key.shape[1], *tiles)
        turned = [
            _padded(x.transpose(0, 2, 3, 1), {2: width, 3: -(-x.shape[1] // tile) * tile})
            for x, tile in ((query, tiles[0]), (key, tiles[1]), (value, tiles[1]))
        ]
        numbers = jnp.zeros((heads, 1)) if bias is None else bias.numbers
        places = Places(
            jnp.zeros(1, jnp.int32) if self.offset is None else self.offset,
            _numbers(mask and mask.query, length, turned[0].shape[3], 0),
            _numbers(mask and mask.key, key.shape[1], turned[1].shape[3], -1),
        )
        out = _attend(plan, *turned, numbers.astype(jnp.float32), places)
        return out[:, :, :value_width, :length].transpose(0, 3, 1, 2)


def _padded(x, sizes, value=0):
    """x, longer by ``value`` at the end of the axes {axis: size}."""
    margins = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)]
    return jnp.pad(x, margins, constant_values=value)


def _numbers(numbers, length, size, value):
    """int32 [B|1,L] of as many rows each, padded by ``value`` to ``size``."""
    numbers = numbers or {}
    rows = max(map(len, numbers.values()), default=1)
    alike = {name: jnp.broadcast_to(x, (rows, length)).astype(jnp.int32) for name, x in numbers.items()}
    return {name: _padded(x, {1: size}, value) for name, x in alike.items()}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: TilePlan, query, key, value, numbers, places: Places) -> Array:
    """[B,N,H,T] from query [B,N,H,T], key and value [B,K,H,S] and the bias's numbers float32 [N,R]."""
    return _forward(plan, query, key, value, numbers, places)[0]


def _forward(plan, query, key, value, numbers, places):
    rows, heads, width, length = query.shape

    def start():
        row = (1, plan.tile)
        return jnp.full(row, -jnp.inf), jnp.zeros(row), jnp.zeros((width, plan.tile))

    def step(carry, tiles):
        highest, total, out = carry
        scores = _tile_scores(plan, tiles)
        new = jnp.maximum(highest, scores.max(0, keepdims=True))
        finite = jnp.where(new == -jnp.inf, 0.0, new)  # of queries that have seen nothing yet
        weights, old = jnp.exp(scores - finite), jnp.exp(highest - finite)
        out = out * old + _product(tiles.arrays["value"], weights.astype(value.dtype), 1, 0)
        return new, total * old + weights.sum(0, keepdims=True), out

    def finish(carry):
        highest, total, out = carry
        seen = total > 0
        divisor = jnp.where(seen, total, 1.0)
        # Where nothing is seen the backward pass takes exp(score - infinity): no weight there either.
        return out / divisor, jnp.where(seen, highest + jnp.log(divisor), jnp.inf)

    row = jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32)
    outputs = jax.ShapeDtypeStruct(query.shape, query.dtype), row
    scan = Scan(plan, {"query": query}, {"key": key, "value": value}, numbers, places)
    out, normaliser = scan.fold("query", outputs, Fold(start, step, finish))
    return out, (query, key, value, numbers, places, out, normaliser)


def _backward(plan, residuals, gradient):
    query, key, value, numbers, places, out, normaliser = residuals
    carried = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(2, keepdims=True)
    queries = {"query": query, "gradient": gradient, "normaliser": normaliser, "carried": carried}
    scan = Scan(plan, queries, {"key": key, "value": value}, numbers, places)
    d_query, d_numbers = _query_gradient(scan)
    d_key, d_value = _key_gradient(scan)
    return d_query, d_key, d_value, d_numbers, None


_attend.defvjp(_forward, _backward)


class Scan(NamedTuple):
    """One pass over all scores: the arrays it reads, tile by tile."""

    plan: TilePlan
    queries: dict[str, Array]  # [B,N,H|1,T]
    keys: dict[str, Array]  # [B,K,H,S]
    numbers: Array  # float32 [N,R] of the bias
    places: Places

    def fold(self, by: Literal["query", "key"], outputs: Outputs, fold: Fold) -> list[Array]:
        """``fold`` for each tile of queries over the tiles of keys that it sees, or the other way round."""
        plan, places = self.plan, self.places
        queries = _side("query", self.queries, places.query_numbers, plan.tile, 3)
        keys = _side("key", self.keys, places.key_numbers, plan.key_tile, 2)
        reach = (None, None) if plan.rule is None else plan.rule.reach(places.key_numbers)
        # Keys that a query reaches so far behind are reached by queries as far ahead: hence the reversal.
        sides = (
            (queries, keys, outputs, reach, (1, 0))
            if by == "query"
            else (keys, queries, outputs, reach[::-1], (0, 1))
        )
        job = Sweep(plan.backend, *sides, fold._replace(step=_guarded(plan, fold.step)))
        return sweep_tiles(job, places.offset, self.numbers)


def _query_gradient(scan: Scan):
    """The gradients of queries [B,N,H,T] and of the bias's numbers [N,R]."""
    plan, query = scan.plan, scan.queries["query"]
    rows, heads, width, length = query.shape
    count = scan.numbers.shape[1]
    count_padded = power_of_two(count)  # Triton's tiles are powers of two

    def start():
        return jnp.zeros((width, plan.tile)), jnp.zeros((count_padded, 1))

    def step(carry, tiles):
        out, d_numbers = carry
        _, d_scores = _score_gradient(plan, tiles)
        out += _product(tiles.arrays["key"], d_scores.astype(tiles.arrays["key"].dtype), 1, 0)
        if plan.form is not None:
            index = jax.lax.broadcasted_iota(jnp.int32, d_numbers.shape, 0)
            d_numbers += plan.form.gradient(d_scores, _distances(plan, tiles), index)
        return out, d_numbers

    by_tile = jax.ShapeDtypeStruct((rows, heads, length // plan.tile, count_padded, 1), jnp.float32)
    outputs = jax.ShapeDtypeStruct(query.shape, query.dtype), by_tile
    d_query, d_numbers = scan.fold("query", outputs, Fold(start, step, lambda carry: carry))
    return d_query, d_numbers.sum((0, 2, 4))[:, :count]


def _key_gradient(scan: Scan):
    """The gradients of keys and values [B,K,H,S]: of each query head, summed over heads that share one."""
    rows, heads, width, _ = scan.queries["query"].shape
    groups, size, dtype = scan.keys["key"].shape[1], scan.keys["key"].shape[3], scan.keys["key"].dtype

    def start():
        return (jnp.zeros((width, scan.plan.key_tile)),) * 2

    def step(carry, tiles):
        d_key, d_value = carry
        weights, d_scores = _score_gradient(scan.plan, tiles)
        d_key += _product(tiles.arrays["query"], d_scores.astype(dtype), 1, 1)
        return d_key, d_value + _product(tiles.arrays["gradient"], weights.astype(dtype), 1, 1)

    output = jax.ShapeDtypeStruct((rows, heads, width, size), dtype if groups == heads else jnp.float32)
    by_head = scan.fold("key", (output, output), Fold(start, step, lambda carry: carry))
    return [x.reshape(rows, groups, -1, width, size).sum(2).astype(dtype) for x in by_head]


def _side(side, arrays, numbers, tile, axis):
    """Arrays [B,N,H,L]; numbers as [B,1,1,T] of queries, ``axis`` 3, and as [B,1,S,1] of keys, ``axis`` 2."""
    shaped = {name: x[:, None, None, :] if axis == 3 else x[:, None, :, None] for name, x in numbers.items()}
    inputs = {name: Input(x, 3, tile) for name, x in arrays.items()}
    return inputs | {f"{side}.{name}": Input(x, axis, tile) for name, x in shaped.items()}


def _guarded(plan, step):
    """``step``, skipped where the mask's numbers show that no query of a tile sees any key of it."""

    def guarded(carry, tiles):
        query, key = _numbers_of(tiles, "query."), _numbers_of(tiles, "key.")
        if not key:
            return step(carry, tiles)
        return jax.lax.cond(plan.rule.meets(query, key), lambda: step(carry, tiles), lambda: carry)

    return guarded


def _numbers_of(tiles, side):
    return {name.removeprefix(side): x for name, x in tiles.arrays.items() if name.startswith(side)}


def _distances(plan: TilePlan, tiles: Tiles) -> Distances:
    shape, (query, key) = (plan.key_tile, plan.tile), tiles.places
    apart = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return Distances(apart + (key - query), key - query - (plan.tile - 1), key - query + (plan.key_tile - 1))


def _tile_scores(plan, tiles):
    """float32 [S,T] of a tile; minus infinity where a query does not see a key."""
    scores = _product(tiles.arrays["key"], tiles.arrays["query"], 0, 0)
    distances = _distances(plan, tiles)
    if plan.form is not None:
        scores += plan.form.tile(distances, tiles.number)
    conditions = []
    if plan.rule is not None:
        numbers = _numbers_of(tiles, "query."), _numbers_of(tiles, "key.")
        conditions.append(plan.rule.seen(distances.each, *numbers))
    if plan.key_length % plan.key_tile:
        place = tiles.places[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        conditions.append(place < plan.key_length)
    for seen in conditions:
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _score_gradient(plan, tiles):
    """float32 [S,T]: the weights of a tile, and the gradient of its scores."""
    weights = jnp.exp(_tile_scores(plan, tiles) - tiles.arrays["normaliser"])
    d_weights = _product(tiles.arrays["value"], tiles.arrays["gradient"], 0, 0)
    return weights, weights * (d_weights - tiles.arrays["carried"])


def _product(a, b, axis, other):
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
