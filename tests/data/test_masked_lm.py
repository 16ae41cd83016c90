"""Laws of an encoder's rows (text in frames, noise told in its place, pairs whose labels are true) and of
infilling.
"""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from golden.make_batches import OneWindow
from scipy.stats import poisson

from lm.config.base import SettingError
from lm.data.batches import Batches, uniforms
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import EncodedDocuments
from lm.data.packing import PaddedTexts
from lm.data.pretraining import denoise, pretraining_rows
from lm.objectives.corruption import NOISES, Noise, geometric_lengths
from lm.objectives.denoising import OBJECTIVES, compute_lengths
from lm.objectives.formatting import sentence_permutation, sentence_starts
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import EOS

MASK, CLS = 19_999, 19_998
IDS = np.arange(20_000)
VOCABULARY = SimpleNamespace(
    vocab_size=20_000,
    num_sentinels=2,
    eos=EOS,
    sep=EOS,
    mask=MASK,
    cls=CLS,
    first_regular_id=3,
    word_starts=(IDS % 3 == 0) | (IDS % 40 == 1),
    sentence_ends=IDS % 40 == 0,
)
PRESETS = np.random.default_rng(0).integers(1, 300, 100)
OFFSETS = np.concatenate([[0], np.cumsum(PRESETS)])
CORPUS = EncodedDocuments(np.arange(OFFSETS[-1]) + 10, OFFSETS)  # every token is its own place


WHOLE = OneWindow(CORPUS, VOCABULARY)
NAMES = ("masked-lm", "whole-word-masked-lm", "span-masked-lm", "electra")
PAIRS = ("none", "next-sentence", "sentence-order")


def batches(name="masked-lm", pairs="none", **settings):
    settings = {"architecture": "encoder", "inputs_length": 64, "batch_size": 16, "seed": 3} | settings
    streams, objective = CorpusSampler(WHOLE, 1, settings.pop("seed")), replace(OBJECTIVES[name], pairs=pairs)
    return Batches(pretraining_rows(streams, objective, **settings), settings["batch_size"])


def pieces(batch):
    """The texts of each row, as its targets have them, without the frame."""
    for row, segments in zip(batch.encoder.targets, batch.encoder.segment_ids, strict=True):
        text = row[segments > 0]
        assert text[0] == CLS
        assert text[-1] == EOS
        yield np.split(text[1:-1], np.flatnonzero(text[1:-1] == EOS))


def test_permuted_targets_are_shown_and_each_has_its_place_in_an_order_that_seed_and_step_decide():
    made = batches("permutation-lm")
    side = made(5, slice(None)).encoder
    is_target = side.loss_weights > 0
    np.testing.assert_array_equal(side.tokens, side.targets)  # the model hides what it may not read
    np.testing.assert_array_equal(side.prediction_order > 0, is_target)
    for order in side.prediction_order:
        assert sorted(order[order > 0]) == [*range(1, (order > 0).sum() + 1)]
    share = is_target.sum() / (side.segment_ids.sum() - 2 * len(side.tokens))
    assert 0.1 < share < 0.25  # 1/6, but for spans of whole words
    rows, positions = np.nonzero(is_target)
    neighbours = np.diff(rows) == 0
    ascending = (np.diff(side.prediction_order[rows, positions]) > 0)[neighbours]
    assert 0.35 < ascending.mean() < 0.65  # an order by chance, not that of the text
    again = batches("permutation-lm")(5, slice(3, 7)).encoder
    np.testing.assert_array_equal(again.prediction_order, side.prediction_order[3:7])
    for other in (made(6, slice(None)), batches("permutation-lm", seed=4)(5, slice(None))):
        assert (other.encoder.prediction_order != side.prediction_order).any()


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_targets_in_place_are_the_framed_text_and_no_part_of_the_frame_is_noise(name, pairs):
    batch = batches(name, pairs)(5, slice(None))
    tokens, targets, segments = (getattr(batch.encoder, key) for key in ("tokens", "targets", "segment_ids"))
    noise = batch.encoder.loss_weights > 0
    assert not noise[np.isin(targets, (CLS, EOS)) | (segments == 0)].any()
    assert (tokens[~noise] == targets[~noise]).all()
    assert (targets[segments == 0] == 0).all()
    for row in pieces(batch):
        assert pairs == "none" or len(row) == 2
        for piece in row:
            assert (np.diff(piece[piece != EOS]) == 1).all()
        if pairs == "none":  # the text runs on, with one [SEP] between two documents and none elsewhere
            stream = np.concatenate(row)
            begins = np.isin(stream - 10, OFFSETS)
            assert (np.diff(stream[stream != EOS]) == 1).all()
            assert (begins[1:] == (stream[:-1] == EOS)).all()
    if pairs == "none":
        assert batch.encoder.token_types is None
        assert segments.all()
    else:
        types = np.cumsum(np.pad(targets == EOS, ((0, 0), (1, 0)))[:, :-1], axis=1) * segments
        assert (batch.encoder.token_types == types).all()
    assert (batch.discriminator_loss_weights is not None) == (name == "electra")


@pytest.mark.parametrize(
    ("name", "room"), [("masked-lm", 0), ("whole-word-masked-lm", 0), ("span-masked-lm", 2)]
)
def test_noise_has_its_rate_and_that_on_words_hides_them_whole(name, room):
    batch = batches(name, inputs_length=256, batch_size=60)(0, slice(None))
    noise, text = batch.encoder.loss_weights[:, 1:-1] > 0, batch.encoder.targets[:, 1:-1]
    rate = noise.mean()
    # words of up to 3 tokens
    assert abs(rate - 0.15) < 5 * np.sqrt(0.15 * 0.85 * 3 / noise.size) + room / 254
    split = (noise[:, 1:] != noise[:, :-1]) & ~VOCABULARY.word_starts[text[:, 1:]]
    split &= (text[:, 1:] != EOS) & (text[:, :-1] != EOS)  # between documents, and never noise
    assert split.any() == (name == "masked-lm")
    if name == "span-masked-lm":
        whole = (text > 0).all(1)
        counts, between = noise[whole].sum(1), (text[whole] == EOS).sum(1)
        assert (counts >= round(0.15 * 254) - between).all()
        assert (counts <= round(0.15 * 254) + room).all()
        runs = noise.sum() / (np.diff(noise, axis=1, prepend=False) & noise).sum()
        assert 3 * 3.8 * 0.8 < runs < 3 * 3.8 * 1.3  # words of 3 tokens; spans merge, and the last one is cut


def test_noise_on_sentences_hides_every_other_one_whole(monkeypatch):
    """A sentence of a row begins behind the end of another one, where a word does, and behind [SEP]."""
    noise = Noise(
        lambda _, texts: np.cumsum(texts.sentence_starts, axis=1) % 2 == 1, needs_sentence_starts=True
    )
    monkeypatch.setitem(NOISES, "iid", noise)
    batch = batches("masked-lm", inputs_length=256, batch_size=20)(0, slice(None))
    hidden, text = batch.encoder.loss_weights[:, 1:-1] > 0, batch.encoder.targets[:, 1:-1]
    starts = VOCABULARY.sentence_ends[text[:, :-1]] & VOCABULARY.word_starts[text[:, 1:]]
    starts = np.pad(starts | (text[:, :-1] == EOS), ((0, 0), (1, 0)))
    is_odd = np.cumsum(starts, axis=1) % 2 == 1
    np.testing.assert_array_equal(hidden, is_odd & (text != EOS) & (text > 0))
    assert 0.3 < hidden.mean() < 0.7


def test_of_a_masked_lms_noise_80_percent_is_masked_10_any_token_10_unchanged_and_electra_masks_all():
    batch = batches(inputs_length=512, batch_size=48)(0, slice(None))
    noise = batch.encoder.loss_weights > 0
    shown, targets = batch.encoder.tokens[noise], batch.encoder.targets[noise]
    masked, same = (shown == MASK).mean(), (shown == targets).mean()
    assert [masked, same, 1 - masked - same] == pytest.approx(
        [0.8, 0.1, 0.1], abs=5 * 0.4 / np.sqrt(noise.sum())
    )
    for name in ("electra", "all-tokens-mlm"):
        batch = batches(name)(0, slice(None))
        assert (batch.discriminator_loss_weights == batch.encoder.segment_ids).all()
    for name in ("electra-15", "replace-mlm"):
        batch = batches(name)(0, slice(None))
        assert (batch.discriminator_loss_weights == batch.encoder.loss_weights).all()
    batch = batches("electra")(0, slice(None))
    assert ((batch.encoder.tokens == MASK) == (batch.encoder.loss_weights > 0)).all()


@pytest.mark.parametrize("pairs", PAIRS[1:])
def test_half_of_the_pairs_are_changed_and_labels_lengths_and_beginnings_are_honest(pairs):
    batch = batches(pairs=pairs, batch_size=2000)(0, slice(None))
    labels = batch.sentence_labels
    assert abs(labels.mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    assert batch.sentence_loss_weights.tolist() == [1] * 2000
    begins = 0
    for (first, second), label in zip(pieces(batch), labels, strict=True):
        second = second[1:]  # behind [SEP]
        documents = np.searchsorted(OFFSETS, np.concatenate([first, second]) - 10, side="right")
        assert len(set(documents)) == 1 + (pairs == "next-sentence" and label)
        follows = second[0] == first[-1] + 1
        assert follows == (label == 0)
        assert follows or pairs == "next-sentence" or first[0] == second[-1] + 1
        begins += VOCABULARY.sentence_ends[(first if pairs == "sentence-order" and label else second)[0] - 1]
    assert begins > 1200  # where there is but one sentence, a word does
    size = batch.encoder.segment_ids.sum(1)
    error = size.std() * np.sqrt(2 / 1000)
    assert abs(size[labels == 0].mean() - size[labels == 1].mean()) < 4 * error


def document_of(tokens):
    return np.searchsorted(OFFSETS, tokens - 10, side="right")


def test_pairs_of_single_sentences_are_whole_sentences_of_one_document_or_of_two():
    batch = batches(pairs="next-single-sentence", batch_size=2000, inputs_length=256)(0, slice(None))
    starts = np.zeros(OFFSETS[-1] + 1, bool)
    starts[OFFSETS] = True
    starts[1:-1] |= VOCABULARY.sentence_ends[CORPUS.tokens[:-1]] & VOCABULARY.word_starts[CORPUS.tokens[1:]]
    boundaries = set((np.flatnonzero(starts) + 10).tolist())
    for (first, second), label in zip(pieces(batch), batch.sentence_labels, strict=True):
        second = second[1:]  # behind [SEP]
        for sentence in (first, second):
            assert {sentence[0], sentence[-1] + 1} <= boundaries
            assert not boundaries & set(sentence[1:].tolist())
        assert (second[0] == first[-1] + 1) == (label == 0)
        assert (document_of(first[0]) == document_of(second[0])) == (label == 0)
    assert abs(batch.sentence_labels.mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    lengths = batch.encoder.token_types.sum(1)  # of second sentences
    changed, kept = (lengths[batch.sentence_labels == label] for label in (1, 0))
    assert abs(changed.mean() - kept.mean()) < 5 * lengths.std() * np.sqrt(2 / 1000)


def test_pairs_of_long_sentences_lose_tokens_at_both_ends_and_stay_adjacent():
    batch = batches(pairs="next-single-sentence", batch_size=500, inputs_length=24)(0, slice(None))
    for (first, second), label in zip(pieces(batch), batch.sentence_labels, strict=True):
        assert len(first) > 0 and len(second) > 1
        assert (second[1] == first[-1] + 1) == (label == 0)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_documents_apart_hold_text_of_one_document_and_an_epoch_has_it_all(name):
    streams = CorpusSampler(WHOLE, 1, 3)
    objective = replace(OBJECTIVES[name], documents="apart")
    made = Batches(
        pretraining_rows(streams, objective, architecture="encoder", inputs_length=64, batch_size=8), 8
    )
    count = made.row_source.count_epoch_rows(10_000)
    lengths = np.diff(OFFSETS)
    assert count == (-(-lengths // 62)).sum()
    found = []
    for step in range(count // 8):
        batch = made(step, slice(None))
        for (row,) in pieces(batch):
            assert len(np.unique(document_of(row))) == 1
            found.append(row)
    found = np.concatenate(found)
    assert len(np.unique(found)) == len(found) >= OFFSETS[-1] - 8 * 62


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_spans_of_documents_apart_are_packed_and_random_amounts_of_noise_are_refused(architecture):
    streams = CorpusSampler(WHOLE, 1, 3)
    settings = {"architecture": architecture, "inputs_length": 512, "batch_size": 8}
    spans = replace(OBJECTIVES["span-corruption"], documents="apart")
    batch = Batches(pretraining_rows(streams, spans, **settings), 8)(0, slice(None))
    assert batch.decoder.segment_ids.max() > 1
    iid = replace(OBJECTIVES["baseline"], documents="apart")
    with pytest.raises(SettingError, match="objective.noise='iid' hides a random number of tokens"):
        pretraining_rows(streams, iid, **settings)
    with pytest.raises(SettingError, match="each-example' with objective.documents='apart'"):
        pretraining_rows(streams, replace(spans, eos="between-documents"), **settings)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("noise", ["spans", "rolled-spans"])
@pytest.mark.parametrize("targets", ["sentinels", "drop", "everything"])
def test_documents_of_one_token_are_packed_as_long_as_they_are(architecture, noise, targets):
    lengths = np.array([1] * 120 + [2, 3, 5, 8, 13] * 5)
    offsets = np.concatenate([[0], np.cumsum(np.random.default_rng(0).permutation(lengths))])
    corpus = OneWindow(EncodedDocuments(np.arange(offsets[-1]) + 10, offsets), VOCABULARY)
    objective = replace(
        OBJECTIVES["span-corruption"], noise=noise, inputs="drop", targets=targets, documents="apart"
    )
    rows = pretraining_rows(
        CorpusSampler(corpus, 1, 3), objective, architecture=architecture, inputs_length=16, batch_size=4
    )
    for step in range(20):  # SettingError if an example does not fit into its room
        assert (Batches(rows, 4)(step, slice(None)).decoder.loss_weights > 0).any()


@pytest.mark.parametrize("pairs", ["none", "sentence-order"])
def test_an_epoch_has_all_text_once_and_the_next_has_it_in_another_order(pairs):
    made = batches(pairs=pairs, batch_size=1)
    count = made.row_source.count_epoch_rows(10_000)
    epochs = [[made(e * count + i, slice(None)).encoder.targets for i in range(count)] for e in (0, 1)]
    text = (
        CORPUS.tokens
        if pairs == "none"
        else CORPUS.tokens[~np.isin(CORPUS.tokens - 10, OFFSETS[:-1][PRESETS == 1])]
    )
    for epoch in epochs:
        ids = np.concatenate(epoch, axis=None)
        assert np.sort(ids[(ids >= 10) & (ids < CLS)]).tolist() == text.tolist()
    assert [row[0, 1] for row in epochs[0]] != [row[0, 1] for row in epochs[1]]


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_the_same_whole_in_parts_and_in_another_process(name, pairs):
    made, step = batches(name, pairs), 200
    whole, other = made(step, slice(None)), pickle.loads(pickle.dumps(made))
    hosts = [other(step, slice(start, start + 4)) for start in (0, 4, 8, 12)]
    for key, values in whole.features().items():
        assert (np.concatenate([host.features()[key] for host in hosts]) == values).all()
        kinds = {"weights": np.float32, "content": bool}
        assert values.dtype == kinds.get(key.rpartition("_")[2], np.int32)
    changed = batches(name, pairs, seed=4)(step, slice(None))
    assert (changed.encoder.tokens != whole.encoder.tokens).any()


def test_permuted_sentences_stay_whole_and_change_places():
    vocabulary = SimpleNamespace(word_starts=IDS % 5 == 0, sentence_ends=IDS % 3 == 0, eos=EOS)
    text = np.random.default_rng(0).integers(10, 900, (40, 60))
    order = sentence_permutation(text, np.full(40, 60), uniforms(0, np.arange(40), 1, 60)[:, 0], vocabulary)
    moved = np.take_along_axis(text, order, axis=1)
    assert (moved != text).any(1).mean() > 0.5

    starts = sentence_starts(text, vocabulary)
    for before, after, begin in zip(text, moved, starts, strict=True):
        assert sorted(before) == sorted(after)
        parts = [str(part.tolist())[1:-1] for part in np.split(before, np.flatnonzero(begin))]
        assert all(part in str(after.tolist()) for part in parts)


def test_infilling_hides_its_share_in_poisson_spans_each_shown_as_one_mask():
    """Of a text of ascending tokens every gap in the inputs must be where a mask is; some masks hide
    nothing.
    """
    objective, vocabulary = replace(OBJECTIVES["text-infilling"], sentences="in-order"), ByteTokenizer(100)
    count, limits = 300, compute_lengths(objective, 300)
    tokens = np.tile(np.arange(1000, 1300, dtype=np.int32), (200, 1))
    text = PaddedTexts(tokens, np.full(200, count, np.int32), np.ones_like(tokens, bool))
    inputs, targets = denoise(
        objective, text, uniforms(0, np.arange(200), 2, count), vocabulary, limits.targets
    )
    assert (targets.tokens == text.tokens).all()
    hidden = []
    for row, length in zip(inputs.tokens, inputs.lengths, strict=True):
        masks = np.flatnonzero(row[:length] == vocabulary.mask)
        kept = np.array([999, *row[row >= 1000], 1300])
        assert len(kept) - 2 == count - 90
        assert (np.diff(masks) > 1).all()
        spans = np.diff(kept)[masks - np.arange(len(masks))] - 1
        assert spans.sum() == 90
        hidden += spans.tolist()
    shares = np.bincount(hidden, minlength=6)[:5] / len(hidden)
    assert shares == pytest.approx([0.050, 0.149, 0.224, 0.224, 0.168], abs=0.02)  # Poisson, mean 3


@pytest.mark.parametrize("rate", [0.05, 0.15, 0.3, 0.5, 0.75, 0.85])
@pytest.mark.parametrize("length", [2, 3, 8, 16, 64, 200])
def test_infilled_spans_hide_exactly_their_share_and_all_but_the_last_are_as_drawn(rate, length):
    amount = replace(OBJECTIVES["text-infilling"], rate=rate)
    u = uniforms(0, np.arange(300), 2, length)
    source, keep, noise = amount.corruption.infill(amount, np.full(300, length), u)
    share = np.clip(np.round(length * rate), 1, length - 1)
    assert (noise.sum(1) == share).all()
    drawn = poisson(3.0).ppf(u[:, 1].astype(np.float64)).astype(int)
    for row in range(300):
        shown = source[row][keep[row]]
        edges = np.concatenate([[-1], shown, [length]])  # a mask is -1
        masks = np.flatnonzero(shown < 0)
        spans = edges[masks + 2] - edges[masks] - 1
        assert spans[:-1].tolist() == drawn[row, : len(spans) - 1].tolist()
        longer = spans[-1] > drawn[row, len(spans) - 1]
        no_room = len(spans) == min(share, length - share + 1)
        assert no_room or not longer


@pytest.mark.parametrize("ends", ["each-example", "between-documents"])
def test_a_causal_encoder_predicts_the_next_token_of_the_text_that_a_masked_one_reads(ends):
    streams = CorpusSampler(WHOLE, 1, 3)
    settings = {"architecture": "encoder", "inputs_length": 64, "batch_size": 16}
    masked, causal = (
        pretraining_rows(streams, replace(OBJECTIVES[name], eos=ends), **settings)(np.arange(80))
        for name in ("masked-lm", "causal-lm")
    )
    side = causal.encoder
    np.testing.assert_array_equal(side.tokens, masked.encoder.targets)
    np.testing.assert_array_equal(side.segment_ids, masked.encoder.segment_ids)
    lengths = side.segment_ids.sum(1)
    for row, length in enumerate(lengths):
        # all behind [CLS], and the closing [SEP] only where each example ends
        predicted = length - 1 - (ends == "between-documents")
        assert side.loss_weights[row].tolist() == [1] * predicted + [0] * (64 - predicted)
        assert (side.targets[row, :predicted] == side.tokens[row, 1 : predicted + 1]).all()
        assert (side.targets[row, predicted:] == 0).all()
        is_text = side.targets[row, : length - 2] != EOS
        assert (side.content[row, : length - 2] == is_text).all() and not side.content[
            row, length - 2 :
        ].any()
    assert (side.tokens[:, 1:] == EOS).sum() > 80 * (ends == "between-documents")


def test_geometric_spans_have_spanberts_lengths():
    found = geometric_lengths(np.linspace(0, 1, 100_000, endpoint=False, dtype=np.float32))
    assert found.mean() == pytest.approx(3.8, abs=0.01)
    assert np.bincount(found)[1:3] / len(found) == pytest.approx([0.224, 0.179], abs=0.001)
    assert found.max() == 10


@pytest.mark.parametrize(
    ("objective", "settings", "words"),
    [
        (
            OBJECTIVES["baseline"],
            {},
            "objective.targets='sentinels' does not suit model.architecture='encoder'",
        ),
        (OBJECTIVES["masked-lm"], {"architecture": "encoder-decoder"}, "only|in their places"),
        (replace(OBJECTIVES["masked-lm"], noise="spans"), {}, "objective.noise='spans' should be 'iid' or"),
        (replace(OBJECTIVES["electra"], inputs="drop"), {}, "objective.inputs='drop' should be 'masks'"),
        (
            replace(OBJECTIVES["text-infilling"], inputs="masks"),
            {"architecture": "decoder"},
            "'span-masks' with obj",
        ),
        (
            replace(OBJECTIVES["causal-lm"], pairs="sentence-order"),
            {"architecture": "decoder"},
            "objective.targets=",
        ),
        (OBJECTIVES["masked-lm"], {"vocabulary": ByteTokenizer(1)}, "no token for cls"),
        (OBJECTIVES["masked-lm"], {"inputs_length": 6}, "data.inputs_length=6"),
        (replace(OBJECTIVES["masked-lm"], noise="none"), {}, "should be 'iid' or|should be 'everything'"),
        (
            replace(OBJECTIVES["masked-lm"], pairs="next-sentence"),
            {"offsets": OFFSETS[[0, -1]]},
            "data.corpus",
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused_by_name(objective, settings, words):
    settings = {"architecture": "encoder", "inputs_length": 64, "batch_size": 1} | settings
    tokens = CORPUS._replace(offsets=settings.pop("offsets", OFFSETS))
    streams = CorpusSampler(OneWindow(tokens, settings.pop("vocabulary", VOCABULARY)), 1, 0)
    with pytest.raises(SettingError, match=words):
        pretraining_rows(streams, objective, **settings)(np.arange(1))
