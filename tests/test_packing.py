"""Laws of packing, and the peers' cases for it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.config import SettingError
from lm.data.objectives import EOS, Lengths, Ragged
from lm.data.packing import features, fill_rows, join, ragged, row_room, shift_right

CASES = Path(__file__).parents[1].parent / "shared" / "parity" / "peer_cases.json"
ARCHITECTURE = {
    "seqio.EncDecFeatureConverter": "encoder-decoder",
    "seqio.LMFeatureConverter": "decoder",
    "seqio.PrefixLMFeatureConverter": "prefix-decoder",
}
LEFT_OUT = {
    "seqio.EncoderFeatureConverter": "no encoder is trained alone",
    "seqio.PrePackedEncDecFeatureConverter": "examples are packed here, never before",
    "seqio.PrefixSuffixLMFeatureConverter": "no task has a third part",
    "seqio.utils.trim_and_pad_dataset": "features of any rank: all of ours are token ids",
    "seqio.utils.truncate_inputs_left": "inputs are cut at their end",
    "t5.preprocessors.pack_prefix_lm_decoder_only": "splits a row anywhere; ours are documents with EOS",
    "t5.preprocessors.pack_prefix_lm_encoder_decoder": "as above",
    "seqio.LMFeatureConverter#a6e6f5": "begins a sequence with an id of its own, where T5's is padding",
    "seqio.PrefixLMFeatureConverter#aa0e37": "as above",
}


def cases(*functions):
    if not CASES.exists():
        return []
    found = [c for c in json.loads(CASES.read_text())["cases"] if c["fn"] in functions and c["id"] not in LEFT_OUT]
    return [pytest.param(c, id=c["id"]) for c in found]


def from_lists(lists):
    """As the peers strip it: without padding at the end."""
    lists = [np.trim_zeros(np.array(ids, np.int32), "b") for ids in lists]
    tokens = np.zeros((len(lists), max(map(len, lists), default=0)), np.int32)
    for row, ids in zip(tokens, lists, strict=True):
        row[: len(ids)] = ids
    return Ragged(tokens, np.array([len(ids) for ids in lists], np.int32))


def packed(inputs, targets, architecture, limits, pack=True):
    sides = np.stack([inputs.lengths, targets.lengths], axis=1)
    sides = sides if architecture == "encoder-decoder" else sides.sum(1, keepdims=True)
    starts = fill_rows(sides, row_room(architecture, limits)) if pack else np.arange(len(sides) + 1)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return features(inputs, targets, rows, architecture=architecture, lengths=limits, batch_size=len(starts) - 1)


@pytest.mark.parametrize("case", cases(*ARCHITECTURE))
def test_features_are_the_peers(case):
    args, architecture = case["args"], ARCHITECTURE[case["fn"]]
    room = args["task_feature_lengths"]
    limits = Lengths(0, room.get("inputs", 0), room["targets"])
    inputs = from_lists([example.get("inputs", []) for example in args["examples"]])
    targets = from_lists([example["targets"] for example in args["examples"]])
    pack = args["config"]["pack"]
    found = packed(inputs, targets, architecture, limits, pack)
    text = found["decoder_segment_ids"] > 0
    for name in case["expected"][0]:
        expected = np.array([row[name] for row in case["expected"]])
        if name == "decoder_loss_weights" and args["config"].get("loss_on_targets_only"):
            assert (found[name] == text).all()  # ours covers the inputs of a decoder too, as the paper's does
        elif name == "decoder_input_tokens" and not pack:  # where padding is read, theirs has a last EOS, ours padding
            assert (found[name] == expected * text).all()
        elif name in found:
            assert (found[name] == expected * (text if name == "decoder_causal_attention" else 1)).all(), name


@pytest.mark.parametrize("case", cases("seqio.utils.trim_and_pack_dataset"))
def test_rows_are_filled_as_the_peers_fill_them(case):
    rows, room = case["args"]["dataset"], case["args"]["feature_lengths"]
    inputs, targets = (from_lists([row[name][: room[name]] for row in rows]) for name in ("inputs", "targets"))
    found = packed(inputs, targets, "encoder-decoder", Lengths(0, room["inputs"], room["targets"]))
    names = {"inputs": "encoder_input_tokens", "targets": "decoder_target_tokens"}
    for side, prefix in (("inputs", "encoder"), ("targets", "decoder")):
        names |= {f"{side}_segment_ids": f"{prefix}_segment_ids", f"{side}_positions": f"{prefix}_positions"}
    for theirs, ours in names.items():
        assert found[ours].tolist() == [row[theirs] for row in case["expected"]]


@pytest.mark.parametrize("case", cases("seqio.utils.make_autoregressive_inputs", "seqio.utils._shift_right_by_one"))
def test_targets_are_shifted_as_the_peers_shift_them(case):
    args = case["args"]
    if args.get("bos_id", 0) != 0:
        pytest.skip("T5 begins with padding")
    targets = np.array([args.get("targets", args.get("tensor"))])
    segments = np.array([args["sequence_id"]]) if args.get("sequence_id") else np.ones(targets.shape, int)
    assert shift_right(targets, segments).tolist() == [case["expected"]]


@pytest.mark.parametrize("case", cases("seqio.preprocessors.append_eos_after_trim"))
def test_a_cut_example_keeps_its_eos_as_the_peers_does(case):
    before, after = case["args"]["dataset"][0], case["expected"][0]
    for name in ("targets", "arrows"):
        room = case["args"]["sequence_length"][name] or 99
        assert ragged([before[name]], room).tokens.tolist() == [after[name]]
    assert ragged([[5, 6, 7, 8]], 3).tokens.tolist() == [[5, 6, EOS]]


def test_padding_is_told_by_length_and_not_by_id():
    """A text may hold id 0; it is a token like any other."""
    inputs, targets = Ragged(np.array([[0, 7, 1]], np.int32), np.array([3])), Ragged(np.array([[0, 1]]), np.array([2]))
    found = packed(inputs, targets, "encoder-decoder", Lengths(0, 4, 3))
    assert found["encoder_segment_ids"].tolist() == [[1, 1, 1, 0]]
    assert found["decoder_loss_weights"].tolist() == [[1, 1, 0]]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=20),
    st.sampled_from(["encoder-decoder", "prefix-decoder"]),
)
def test_packing_keeps_every_token_in_order_and_never_overfills(sizes, architecture):
    rng = np.random.default_rng(0)
    inputs, targets = (from_lists([rng.integers(2, 99, size) for size in side]) for side in zip(*sizes, strict=True))
    found = packed(inputs, targets, architecture, Lengths(0, 12, 8))
    whole = targets if architecture == "encoder-decoder" else join(inputs, targets)
    expected = np.concatenate([row[:n] for row, n in zip(*whole, strict=True)])
    text = found["decoder_segment_ids"] > 0
    assert found["decoder_target_tokens"][text].tolist() == expected.tolist()
    assert (found["decoder_target_tokens"][~text] == 0).all()
    begins = (found["decoder_positions"] == 0) & text
    assert begins.sum() == len(sizes)
    assert (np.cumsum(begins, axis=1)[text] == found["decoder_segment_ids"][text]).all()
    assert (found["decoder_input_tokens"][begins] == 0).all()


def test_an_example_longer_than_a_row_is_an_error_and_not_cut():
    with pytest.raises(SettingError, match="does not fit"):
        fill_rows(np.array([[3, 9]]), np.array([8, 8]))
