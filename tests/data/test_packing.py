"""Laws of packing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import from_lists, packed

from lm.config.base import SettingError
from lm.data.packing import PaddedTexts, concatenate_sides, pack_examples
from lm.objectives.denoising import Lengths


def test_padding_is_told_by_length_and_not_by_id():
    """A text may hold id 0; it is a token like any other."""
    inputs, targets = (
        PaddedTexts(np.array([[0, 7, 1]], np.int32), np.array([3]), np.ones((1, 3), bool)),
        PaddedTexts(np.array([[0, 1]]), np.array([2]), np.ones((1, 2), bool)),
    )
    found = packed(inputs, targets, "encoder-decoder", Lengths(0, 4, 3))
    assert found.encoder.segment_ids.tolist() == [[1, 1, 1, 0]]
    assert found.decoder.loss_weights.tolist() == [[1, 1, 0]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=20),
    st.sampled_from(["encoder-decoder", "prefix-decoder"]),
)
def test_packing_keeps_every_token_in_order_and_never_overfills(sizes, architecture):
    rng = np.random.default_rng(0)
    inputs, targets = (
        from_lists([rng.integers(2, 99, size) for size in side]) for side in zip(*sizes, strict=True)
    )
    found = packed(inputs, targets, architecture, Lengths(0, 12, 8))
    whole = targets if architecture == "encoder-decoder" else concatenate_sides(inputs, targets)
    expected = np.concatenate([row[:n] for row, n in zip(whole.tokens, whole.lengths, strict=True)])
    text = found.decoder.segment_ids > 0
    assert found.decoder.targets[text].tolist() == expected.tolist()
    assert (found.decoder.targets[~text] == 0).all()
    begins = (found.decoder.positions == 0) & text
    assert begins.sum() == len(sizes)
    assert (np.cumsum(begins, axis=1)[text] == found.decoder.segment_ids[text]).all()
    assert (found.decoder.tokens[begins] == 0).all()


def test_an_example_longer_than_a_row_is_an_error_and_not_cut():
    with pytest.raises(SettingError, match="does not fit"):
        pack_examples(np.array([[3, 9]]), np.array([8, 8]))


def test_two_examples_without_eos_are_told_apart_by_segments_and_positions_alone():
    """The row that docs/objectives.md prints: a b c -> p q, and d e -> r s t."""
    found = packed(
        from_lists([[10, 11, 12], [13, 14]]),
        from_lists([[20, 21], [22, 23, 24]]),
        "encoder-decoder",
        Lengths(0, 6, 6),
    )
    encoder, decoder = found.encoder, found.decoder
    assert encoder.tokens.tolist() == [[10, 11, 12, 13, 14, 0]]
    assert encoder.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert encoder.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert decoder.tokens.tolist() == [[0, 20, 0, 22, 23, 0]]
    assert decoder.targets.tolist() == [[20, 21, 22, 23, 24, 0]]
    assert decoder.segment_ids.tolist() == [[1, 1, 2, 2, 2, 0]]
    assert decoder.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert decoder.loss_weights.tolist() == [[1, 1, 1, 1, 1, 0]]
