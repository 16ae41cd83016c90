"""Attention without scores in memory: a Pallas kernel goes through them tile by tile (Dao et al. 2022).

The mask is a rule and the bias a few numbers, of which each tile is made anew, forward and backward. All
tiles are transposed, keys by queries: what is kept of each query is then a row, and arrays [B,N,H,T] fill a
TPU's registers whatever H is.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm.ops.attention import dropped
from lm.ops.biases import Bias, Slope, Steps
from lm.ops.flash.grid import Backend, Input, Sweep, Tiles, power_of_two, sweep
from lm.ops.masks import Mask, Numbers, Rule


class Plan(NamedTuple):
    """All of one call that is known when it is compiled."""

    backend: Backend
    rule: Rule | None
    form: Steps | Slope | None
    key_length: int  # keys without padding [places]
    tile: int  # queries of a tile [places]
    key_tile: int  # keys of a tile [places]


class Inputs(NamedTuple):
    """What the kernels read besides queries, keys and values."""

    offset: jax.Array  # int32 [1]: the first query's place among the keys
    query_numbers: Numbers  # int32 [B|1,T], of the mask
    key_numbers: Numbers  # int32 [B|1,S]


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask | None = None,
    bias: Bias | None = None,
    *,
    scale: float = 1.0,
    keep: jax.Array | None = None,
    offset: jax.Array | None = None,
    backend: Backend,
) -> jax.Array:
    """[B,T,N,H] as ``dot_product_attention``, with memory linear in T and S; ``keep`` has no gradient.

    ``offset`` int32 [1] is the place of the first query, of rows of which the others are elsewhere.
    """
    length, width = query.shape[1], query.shape[3]
    heads = query.shape[2]
    key, value = dropped(key, value, keep)
    query = query * scale if scale != 1.0 else query
    tiles = backend.tiles(length), backend.tiles(key.shape[1])
    plan = Plan(backend, mask and mask.rule, bias and bias.form, key.shape[1], *tiles)
    turned = [
        _padded(x.transpose(0, 2, 3, 1), {2: backend.width(width), 3: _multiple(x.shape[1], tile)})
        for x, tile in ((query, tiles[0]), (key, tiles[1]), (value, tiles[1]))
    ]
    numbers = jnp.zeros((heads, 1)) if bias is None else bias.numbers
    inputs = Inputs(
        jnp.zeros(1, jnp.int32) if offset is None else offset,
        _numbers(mask and mask.query, length, turned[0].shape[3], 0),
        _numbers(mask and mask.key, key.shape[1], turned[1].shape[3], -1),
    )
    out = _attend(plan, *turned, numbers.astype(jnp.float32), inputs)
    return out[:, :, :width, :length].transpose(0, 3, 1, 2)


def _multiple(size, of):
    return -(-size // of) * of


def _padded(x, sizes, value=0):
    """x, longer by ``value`` at the end of the axes {axis: size}."""
    return jnp.pad(
        x, [(0, sizes.get(axis, size) - size) for axis, size in enumerate(x.shape)], constant_values=value
    )


def _numbers(known, length, size, value):
    """Numbers [B|1,L] of as many rows each, padded to ``size``."""
    known = known or {}
    rows = max((len(x) for x in known.values()), default=1)
    return {
        name: _padded(jnp.broadcast_to(x, (rows, length)).astype(jnp.int32), {1: size}, value)
        for name, x in known.items()
    }


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, query, key, value, numbers, inputs: Inputs) -> jax.Array:
    """[B,N,H,T] from query [B,N,H,T], key and value [B,K,H,S]."""
    return _forward(plan, query, key, value, numbers, inputs)[0]


def _forward(plan, query, key, value, numbers, inputs):
    rows, heads, width, length = query.shape

    def start():
        row = (1, plan.tile)
        return jnp.full(row, -jnp.inf), jnp.zeros(row), jnp.zeros((width, plan.tile))

    def step(carry, tiles):
        highest, total, out = carry
        scores = _scores(plan, tiles)
        new = jnp.maximum(highest, scores.max(0, keepdims=True))
        finite = jnp.where(new == -jnp.inf, 0.0, new)  # of queries that have seen nothing yet
        weights, old = jnp.exp(scores - finite), jnp.exp(highest - finite)
        out = out * old + _product(tiles["value"], weights.astype(value.dtype), 1, 0)
        return new, total * old + weights.sum(0, keepdims=True), out

    def finish(carry):
        highest, total, out = carry
        seen = total > 0
        whole = jnp.where(seen, total, 1.0)
        # Where nothing is seen the backward pass takes exp(score - infinity): no weight there either.
        return out / whole, jnp.where(seen, highest + jnp.log(whole), jnp.inf)

    outputs = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32),
    )
    given = {"query": query}, {"key": key, "value": value}
    out, normaliser = _by_query(plan, given, outputs, numbers, inputs, start, step, finish)
    return out, (query, key, value, numbers, inputs, out, normaliser)


def _backward(plan, kept, gradient):
    query, key, value, numbers, inputs, out, normaliser = kept
    carried = (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(2, keepdims=True)
    given = {"query": query, "gradient": gradient, "normaliser": normaliser, "carried": carried}
    d_query, d_numbers = _query_gradient(plan, given, {"key": key, "value": value}, numbers, inputs)
    d_key, d_value = _key_gradient(plan, given, {"key": key, "value": value}, numbers, inputs)
    return d_query, d_key, d_value, d_numbers, None


_attend.defvjp(_forward, _backward)


def _query_gradient(plan, queries, keys, numbers, inputs):
    """The gradients of queries [B,N,H,T] and of the bias's numbers [N,R]."""
    rows, heads, width, length = queries["query"].shape
    count = numbers.shape[1]

    def start():
        return jnp.zeros((width, plan.tile)), jnp.zeros((count_padded, 1))

    def step(carry, tiles):
        out, found = carry
        _, d_scores = _score_gradient(plan, tiles)
        out += _product(tiles["key"], d_scores.astype(tiles["key"].dtype), 1, 0)
        if plan.form is not None:
            place = jax.lax.broadcasted_iota(jnp.int32, found.shape, 0)
            found += plan.form.gradient(d_scores, *_distances(plan, tiles), place)
        return out, found

    count_padded = power_of_two(count)  # Triton's tiles are powers of two
    blocks = length // plan.tile
    outputs = (
        jax.ShapeDtypeStruct(queries["query"].shape, queries["query"].dtype),
        jax.ShapeDtypeStruct((rows, heads, blocks, count_padded, 1), jnp.float32),
    )
    d_query, found = _by_query(
        plan, (queries, keys), outputs, numbers, inputs, start, step, lambda carry: carry
    )
    return d_query, found.sum((0, 2, 4))[:, :count]


def _key_gradient(plan, queries, keys, numbers, inputs):
    """The gradients of keys and values [B,K,H,S]: those of each head of queries, summed over heads that share
    one.
    """
    rows, heads, width, _ = queries["query"].shape
    groups, size, dtype = keys["key"].shape[1], keys["key"].shape[3], keys["key"].dtype

    def start():
        return (jnp.zeros((width, plan.key_tile)),) * 2

    def step(carry, tiles):
        d_key, d_value = carry
        weights, d_scores = _score_gradient(plan, tiles)
        d_key += _product(tiles["query"], d_scores.astype(dtype), 1, 1)
        return d_key, d_value + _product(tiles["gradient"], weights.astype(dtype), 1, 1)

    output = jax.ShapeDtypeStruct((rows, heads, width, size), dtype if groups == heads else jnp.float32)
    found = _by_key(
        plan, (queries, keys), (output, output), numbers, inputs, start, step, lambda carry: carry
    )
    return [x.reshape(rows, groups, -1, width, size).sum(2).astype(dtype) for x in found]


def _by_query(plan, given, outputs, numbers, inputs, *steps):
    """What is found of queries, tile by tile, from the keys that each sees."""
    queries, keys = _sides(plan, given, inputs)
    return _swept(plan, queries, keys, outputs, _reach(plan, inputs), (1, 0), numbers, inputs, *steps)


def _by_key(plan, given, outputs, numbers, inputs, *steps):
    """What is found of keys, tile by tile, from the queries that see each."""
    queries, keys = _sides(plan, given, inputs)
    return _swept(plan, keys, queries, outputs, _reach(plan, inputs)[::-1], (0, 1), numbers, inputs, *steps)


def _swept(plan, still, moving, outputs, reach, origins, numbers, inputs, start, step, finish):
    job = Sweep(plan.backend, still, moving, outputs, reach, origins, start, _guarded(plan, step), finish)
    return sweep(job, inputs.offset, numbers)


def _sides(plan, given, inputs):
    """What is read of queries and of keys."""
    queries, keys = given
    return (
        _inputs(queries, inputs.query_numbers, plan.tile, 3),
        _inputs(keys, inputs.key_numbers, plan.key_tile, 2),
    )


def _inputs(arrays, numbers, tile, axis):
    """Arrays [B,N,H,L], and numbers as [B,1,1,T] of queries, ``axis`` 3, and as [B,1,S,1] of keys, ``axis``
    2.
    """
    found = {name: Input(x, 3, tile) for name, x in arrays.items()}
    side = {3: "query", 2: "key"}[axis]
    shaped = {name: x[:, None, None, :] if axis == 3 else x[:, None, :, None] for name, x in numbers.items()}
    return found | {f"{side}.{name}": Input(x, axis, tile) for name, x in shaped.items()}


def _reach(plan, inputs):
    return (None, None) if plan.rule is None else plan.rule.reach(inputs.key_numbers)


def _guarded(plan, step):
    """``step``, left out where the mask's numbers say that a tile sees nothing."""

    def guarded(carry, tiles):
        query, key = _known(tiles, "query."), _known(tiles, "key.")
        if not key:
            return step(carry, tiles)
        return jax.lax.cond(plan.rule.meets(query, key), lambda: step(carry, tiles), lambda: carry)

    return guarded


def _known(tiles, side):
    return {name.removeprefix(side): x for name, x in tiles.arrays.items() if name.startswith(side)}


def _distances(plan: Plan, tiles: Tiles):
    """int32 [S,T] of a tile: a key's place minus its query's; the least and the greatest of them."""
    shape, (query, key) = (plan.key_tile, plan.tile), tiles.places
    apart = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return apart + (key - query), key - query - (plan.tile - 1), key - query + (plan.key_tile - 1)


def _scores(plan, tiles):
    """float32 [S,T] of a tile; minus infinity where a query does not see a key."""
    scores = _product(tiles["key"], tiles["query"], 0, 0)
    distance, low, high = _distances(plan, tiles)
    if plan.form is not None:
        scores += plan.form.tile(distance, tiles.number, low, high)
    hidden = []
    if plan.rule is not None:
        hidden.append(plan.rule.seen(distance, _known(tiles, "query."), _known(tiles, "key.")))
    if plan.key_length % plan.key_tile:
        place = tiles.places[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        hidden.append(place < plan.key_length)
    for seen in hidden:
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _score_gradient(plan, tiles):
    """float32 [S,T]: the weights of a tile, and the gradient of its scores."""
    weights = jnp.exp(_scores(plan, tiles) - tiles["normaliser"])
    d_weights = _product(tiles["value"], tiles["gradient"], 0, 0)
    return weights, weights * (d_weights - tiles["carried"])


def _product(a, b, axis, other):
    return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)
