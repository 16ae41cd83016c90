"""Masks as a model has them: printed as matrices, and equal to those written out condition by condition."""

import dense_masks as dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.batch import Batch, Side
from lm.config.attention import SparsityConfig
from lm.config.layers import PositionsConfig
from lm.config.model import ModelConfig
from lm.nn.attention_inputs import make_attention_inputs, make_decode_inputs
from lm.ops.masks import (
    AttentionMask,
    MaskSpec,
    RandomBlocks,
    Window,
    draw_random_blocks,
    key_segments,
    relative_positions,
)

SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 0, 0]])
PREFIX = np.array([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0]])
GLOBAL = np.array([[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]])


def printed(mask):
    """The matrix [T,S] of the first row: # where a query, a line, sees a key."""
    return "/".join("".join("#" if seen else "." for seen in row) for row in np.array(mask[0, 0]))


def mask(rule, length=6, key_length=None, **numbers):
    """The matrix of a rule over rows whose queries and keys have the same numbers."""

    @jax.jit
    def materialized(numbers):
        key = {name: key_segments(x) if name == "segment" else x for name, x in numbers.items()}
        return AttentionMask(numbers, key, rule).materialize(length, key_length or length)

    return np.asarray(materialized(numbers))


@pytest.mark.parametrize(
    ("rule", "length", "numbers", "expected"),
    [
        (MaskSpec(causal=True), 3, {}, "#../##./###"),
        (MaskSpec(), 4, {"segment": [1, 1, 2, 0]}, "##../##../..#./...."),
        (MaskSpec(causal=True), 4, {"prefix": [1, 1, 0, 0]}, "##../##../###./####"),
        (MaskSpec(window=Window(2, 0)), 4, {}, "#.../##../###./.###"),
        (MaskSpec(window=Window(0, 1)), 4, {}, "##../.##./..##/...#"),
        (MaskSpec(window=Window(2, 2, 2)), 6, {}, "#.#.../.#.#../#.#.#./.#.#.#/..#.#./...#.#"),
        (MaskSpec(window=Window(0, 0)), 3, {"global": [0, 1, 0]}, "##./###/.##"),
        (MaskSpec(causal=True, window=Window(1, 1)), 4, {"global": [1, 0, 0, 0]}, "#.../##../###./#.##"),
        (
            MaskSpec(window=Window(0, 0)),
            6,
            {"position": [0, 0, 1, 1, 2, 2], "global": [1, 1, 0, 0, 0, 0]},
            "######/######/####../####../##..##/##..##",
        ),
    ],
)
def test_masks_print_as_they_should(rule, length, numbers, expected):
    numbers = {name: np.array([x]) for name, x in numbers.items()}
    assert printed(mask(rule, length, **numbers)) == expected


def batch(side):
    read = Side(tokens=SEGMENTS, segment_ids=SEGMENTS, causal_attention=PREFIX, global_attention=GLOBAL)
    return Batch(**{side: read})


WINDOW = SparsityConfig(window=1, dilation=2, global_tokens=1)
BLOCKS = SparsityConfig(window=0, block=2, global_tokens=1, random_blocks=1)


@pytest.mark.parametrize("sparsity", [SparsityConfig(), WINDOW, BLOCKS], ids=["all", "window", "blocks"])
@pytest.mark.parametrize("architecture", ["encoder", "decoder", "prefix-decoder"])
def test_what_a_model_sees_is_what_its_conditions_say(architecture, sparsity):
    config = ModelConfig(architecture, sparsity=sparsity, positions=PositionsConfig(max_length=8))
    side = "encoder" if architecture == "encoder" else "decoder"
    expected = dense.same_segment(SEGMENTS, SEGMENTS)
    if side == "decoder":
        before = dense.causal(dense.distances(6, 6))
        expected &= before | dense.prefix(PREFIX) if architecture == "prefix-decoder" else before
    if sparsity.window is not None:
        positions = np.array([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 0, 1]])
        block = positions // sparsity.block
        reach, step = sparsity.window * sparsity.dilation, sparsity.dilation
        away = block[:, None, :] - block[:, :, None]
        seen = dense.sliding_window(away, behind=reach, ahead=reach, step=step)
        first = positions < sparsity.block
        everywhere = first | (GLOBAL > 0) if side == "encoder" else first
        seen |= dense.global_tokens(everywhere, everywhere)
        if sparsity.random_blocks:
            drawn = draw_random_blocks(RandomBlocks(1, 3, window=0, num_global_blocks=1))
            seen |= (drawn | drawn.T)[block[:, :, None], block[:, None, :]]
        expected &= seen
    found = jax.jit(lambda batch: make_attention_inputs(config, batch, side, None).mask)
    np.testing.assert_array_equal(found(batch(side)), expected[:, None])


@pytest.mark.parametrize("sparsity", [SparsityConfig(), WINDOW, BLOCKS], ids=["all", "window", "blocks"])
def test_a_step_of_decoding_sees_what_the_last_token_of_the_whole_row_sees(sparsity):
    config = ModelConfig("decoder", sparsity=sparsity, positions=PositionsConfig(max_length=8))
    batch = Batch(decoder=Side(tokens=np.ones((1, 8), np.int32)))
    whole = jax.jit(lambda batch: make_attention_inputs(config, batch, "decoder", None).mask)(batch)
    step = jax.jit(lambda length: make_decode_inputs(config, length, 8, None).mask)
    for length in range(8):
        found = np.asarray(step(np.array([length], np.int32)))
        np.testing.assert_array_equal(found[0, 0, 0], np.asarray(whole)[0, 0, length])


def test_random_blocks_are_so_many_that_neither_the_window_nor_the_first_blocks_hold():
    blocks = RandomBlocks(per_query_block=3, num_blocks=20, window=2, num_global_blocks=1)
    drawn = draw_random_blocks(blocks)
    np.testing.assert_array_equal(drawn.sum(1), np.clip(np.arange(20) - 2 - 1, 0, 3))
    query, key = np.nonzero(drawn)
    assert ((key >= 1) & (key < query - 2)).all()
    assert len(np.unique(drawn[6:], axis=0)) > 10
    np.testing.assert_array_equal(drawn[:12, :12], draw_random_blocks(blocks._replace(num_blocks=12)))


@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_query_sees_its_random_blocks_and_any_other_also_those_that_drew_its_block(causal):
    blocks = RandomBlocks(per_query_block=2, num_blocks=10, window=1, num_global_blocks=0)
    numbers = {"position": np.arange(40)[None] // 4}
    near = mask(MaskSpec(causal, Window(1, 1)), 40, **numbers)
    drawn = draw_random_blocks(blocks)
    drawn = drawn if causal else drawn | drawn.T
    expected = near | drawn.repeat(4, 0).repeat(4, 1)[None, None]
    np.testing.assert_array_equal(mask(MaskSpec(causal, Window(1, 1), blocks), 40, **numbers), expected)


def test_a_tile_with_a_random_block_is_not_taken_for_masked():
    spec = MaskSpec(False, Window(0, 0), RandomBlocks(1, 6, 0, 0))
    numbers = np.arange(6)[None]
    seen = mask(spec, 6, position=numbers)[0, 0]
    is_visible = jax.jit(spec.tile_is_visible)
    for query, key in np.argwhere(seen):
        tile = [{"position": numbers[:, index : index + 1]} for index in (query, key)]
        assert is_visible(*tile)


def test_a_mask_of_one_query_over_a_cache_goes_by_its_own_distances():
    slots = jnp.arange(6)[None]
    rule = MaskSpec(causal=True, window=Window(1, 1))
    one = AttentionMask({"global": jnp.array([[0]])}, {"global": (slots < 1) * 1}, rule)
    assert printed(one.evaluate(slots[:, None, :] - 4)) == "#..##."
    np.testing.assert_array_equal(relative_positions(2, 3)[0], [[0, 1, 2], [-1, 0, 1]])
