"""Laws of the denoising objectives."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import GOLDEN

from lm.config.base import SettingError, setting_descriptions
from lm.data.batches import uniforms
from lm.data.collocations import Collocations
from lm.data.packing import PaddedTexts
from lm.data.pretraining import denoise, noise_mask
from lm.objectives.corruption import (
    NOISES,
    CorruptionInputs,
    Noise,
    NoiseName,
    length_mask,
    prefix_lengths,
    run_starts,
)
from lm.objectives.denoising import OBJECTIVES, Objective, compute_lengths, corrupted_lengths
from lm.objectives.formatting import INPUTS, InputsName, random_tokens, sentence_starts
from lm.tokenizers.tokenizer import EOS, UNK


def symbols(size=1000, num_sentinels=100):
    """A vocabulary in which every fifth id begins a word and every seventh ends a sentence."""
    ids = np.arange(size)
    marks = {"word_starts": ids % 5 == 0, "sentence_ends": ids % 7 == 0}
    ids = {"eos": EOS, "mask": size - 1, "first_regular_id": UNK + 1}
    return SimpleNamespace(vocab_size=size, num_sentinels=num_sentinels, **ids, **marks)


VOCABULARY = symbols()
# of decoders, with the text of the corpus
OF_TEXT = [name for name, one in OBJECTIVES.items() if not one.is_mlm and not one.corruption.replaces_text]
COPYING = ("copy", "copy-random")


def text(rng, counts, width=None):
    counts = np.asarray(counts, np.int32)
    # no sentinels, some 0
    tokens = rng.integers(0, 880, (len(counts), width or max(counts.max(), 1))).astype(np.int32)
    return whole(tokens * length_mask(counts, tokens.shape[1]), counts)


def whole(tokens, counts):
    return PaddedTexts(tokens, counts, tokens != EOS)


def rows(side):
    return [row[:count].tolist() for row, count in zip(side.tokens, side.lengths, strict=True)]


def restore(inputs, targets, first_sentinel):
    """The text, from inputs and targets whose sentinels stand for each other's runs."""

    def runs(ids):
        found = [[]]
        for token in ids:
            if token >= first_sentinel:
                found.append([])
            else:
                found[-1].append(token)
        return found

    shown, said = runs(inputs), runs(targets)
    turns = [shown[1:], said] if not shown[0] and said[0] else [shown, said[1:]]
    order = [said, shown[1:]] if not shown[0] and said[0] else turns
    text = []
    for i in range(max(map(len, order))):
        for part in order:
            text += part[i] if i < len(part) else []
    return text


@pytest.mark.parametrize(
    ("mean", "raw", "targets"), [(2, 552, 126), (3, 568, 114), (5, 581, 105), (10, 591, 99)]
)
def test_span_corruption_fills_inputs_and_targets_exactly(mean, raw, targets):
    objective = Objective(noise="spans", mean_span_length=mean)
    limits = compute_lengths(objective, 512)
    assert limits == (raw, 512, targets)
    given_text = text(np.random.default_rng(0), [raw] * 20)
    inputs, said = denoise(
        objective, given_text, uniforms(1, np.arange(20), 1, raw), VOCABULARY, limits.targets
    )
    assert (inputs.lengths == 512).all()
    assert (said.lengths == targets).all()


def test_span_lengths_are_uniform_compositions():
    """Of 4 noise tokens in 2 spans each of (1,3), (2,2), (3,1) has probability 1/3; likewise the 6 that
    stay.
    """
    objective = Objective(noise="spans", rate=0.4, mean_span_length=2.0)
    mask = noise_mask(
        objective, CorruptionInputs(np.full(6000, 10), uniforms(5, np.arange(6000), 1, 10), 100), 100
    )
    _, counts = np.unique(mask, axis=0, return_counts=True)
    assert len(counts) == 3 * 5
    assert abs(counts - 400).max() < 5 * np.sqrt(400)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(OF_TEXT)),
    counts=st.lists(st.integers(1, 62), min_size=1, max_size=6),
    rate=st.sampled_from([0.05, 0.15, 0.5, 0.9]),
    sentinels=st.sampled_from([1, 2, 5, 100]),
    seed=st.integers(0, 2**32 - 1),
    room=st.integers(3, 64),
    has_eos=st.booleans(),
)
def test_inputs_and_targets_together_give_back_the_text_and_nothing_is_cut(
    name, counts, rate, sentinels, seed, room, has_eos
):
    eos = OBJECTIVES[name].eos if has_eos else "none"
    objective = Objective(**{**vars(OBJECTIVES[name]), "rate": rate, "eos": eos})
    limits = compute_lengths(objective, room)
    counts = np.minimum(counts, limits.raw)
    given_text = text(np.random.default_rng(seed), counts, limits.raw)
    vocabulary = symbols(num_sentinels=sentinels)
    u = uniforms(seed, np.arange(len(counts)), objective.uniforms_per_token, limits.raw)
    inputs, targets = denoise(objective, given_text, u, vocabulary, limits.targets)
    assert (inputs.lengths <= limits.inputs).all()
    assert (targets.lengths <= limits.targets).all()
    for original, shown, said in zip(rows(given_text), rows(inputs), rows(targets), strict=True):
        if objective.eos_after_each_example:  # else EOS is part of the text, or nowhere
            assert said.pop() == EOS
            assert not objective.has_inputs or shown.pop() == EOS
        assert all(token < 880 or token >= 1000 - sentinels for token in said)
        if objective.targets == "everything":
            assert said == original
        elif objective.inputs == objective.targets == "sentinels":
            assert restore(shown, said, 1000 - sentinels) == original
        elif name == "prefix-lm":
            assert shown + said == original
        elif name == "mass":
            where = shown.index(VOCABULARY.mask) if said else 0
            assert shown[where : where + len(said)] == [VOCABULARY.mask] * len(said)
            assert shown[:where] + said + shown[where + len(said) :] == original
        elif name == "fill-in-the-middle":
            where = shown.index(999) if said else 0
            assert shown[:where] + said + shown[where + bool(said) :] == original
        else:
            assert sorted(shown + said) == sorted(original)
        if name == "deshuffling":
            assert sorted(shown) == sorted(original)
        if objective.inputs == "sentinels":
            found = [token for token in shown if token >= 1000 - sentinels]
            assert found == list(range(999, 999 - len(found), -1))


def test_with_too_few_sentinels_iid_noise_stays_uniform_and_spans_are_fewer_and_longer():
    counts, u = np.full(4000, 64), uniforms(0, np.arange(4000), 1, 64)
    mask = noise_mask(Objective(rate=0.5), CorruptionInputs(counts, u, 8), 1000)
    runs = (np.diff(mask.astype(int), axis=1, prepend=0) == 1).sum(1)
    assert runs.max() == 7  # and at most 8 runs of text
    assert mask[:, :32].mean() == pytest.approx(mask[:, 32:].mean(), rel=0.05)
    objective = Objective(noise="spans", rate=0.5, mean_span_length=1.0)
    mask = noise_mask(objective, CorruptionInputs(counts, u, 8), 1000).astype(int)
    assert (mask.sum(1) == 32).all()
    assert ((np.diff(mask, axis=1, prepend=0) == 1).sum(1) == 8).all()


@pytest.mark.parametrize("rate", [0.1, 0.15, 0.25, 0.5])
def test_iid_noise_has_its_rate_and_its_targets_their_room(rate):
    objective = Objective(rate=rate)
    limits = compute_lengths(objective, 512)
    u = uniforms(0, np.arange(2000), 1, limits.raw)
    given_text = text(np.random.default_rng(0), [limits.raw] * 2000)
    plenty = symbols(num_sentinels=300)
    mask = noise_mask(objective, CorruptionInputs(given_text.lengths, u, 300), limits.targets)
    assert mask.mean() == pytest.approx(rate, rel=0.01)
    free = denoise(objective, given_text, u, plenty, 10_000)[1].lengths
    assert (free > limits.targets).sum() <= 1  # a draw in 30,000
    assert free.mean() + 3 * free.std() < limits.targets < free.mean() + 5 * free.std()


def test_a_draw_that_does_not_fit_loses_noise_and_no_text():
    objective = Objective(rate=0.5)
    given_text = text(np.random.default_rng(0), [40] * 30)
    u = uniforms(0, np.arange(30), 1, 40)
    inputs, targets = denoise(objective, given_text, u, VOCABULARY, 20)
    assert targets.lengths.max() <= 20
    for original, shown, said in zip(rows(given_text), rows(inputs), rows(targets), strict=True):
        assert restore(shown[:-1], said[:-1], 900) == original


def test_a_last_span_that_is_cut_to_fit_leaves_no_more_runs_than_sentinels():
    """Text and noise alternate; where targets have no room for the last span, its end is visible."""
    is_noise = np.array([[*[False, True] * 5, True, True]])
    uniform = np.where(is_noise, 0, 0.99).astype(np.float32)
    texts = CorruptionInputs(np.array([12]), uniform[:, None], num_sentinels=5)
    assert (noise_mask(Objective(), texts, 13) == is_noise).all()  # five spans and five runs of text
    mask = noise_mask(Objective(), texts, 12)
    assert mask.any() and run_starts(~mask).sum() <= 5


def test_bert_style_shows_the_mask_nine_times_in_ten_and_else_any_token():
    objective, limits = OBJECTIVES["bert-style"], compute_lengths(OBJECTIVES["bert-style"], 512)
    given_text = whole(np.full((400, limits.raw), 5, np.int32), np.full(400, limits.raw, np.int32))
    shown = denoise(
        objective, given_text, uniforms(0, np.arange(400), 2, limits.raw), VOCABULARY, limits.targets
    )[0].tokens
    replaced = shown[(shown != 5) & (shown != EOS)]
    assert len(replaced) / shown.size == pytest.approx(0.15, rel=0.03)
    assert (replaced == 999).mean() == pytest.approx(0.9, rel=0.01)
    assert replaced.min() == 3
    assert len(np.unique(replaced)) > 950


def copied(name, given_text, seed=0, first_row=0):
    """Inputs and targets of an objective that copies."""
    objective, width = OBJECTIVES[name], given_text.tokens.shape[1]
    u = uniforms(seed, np.arange(len(given_text.lengths)) + first_row, objective.uniforms_per_token, width)
    return denoise(objective, given_text, u, VOCABULARY, compute_lengths(objective, width + 1).targets)


@pytest.mark.parametrize("name", COPYING)
def test_copying_has_equal_inputs_and_targets_as_long_as_the_text_and_no_content(name):
    given_text = text(np.random.default_rng(0), [63, 1, 2, 40])
    inputs, targets = copied(name, given_text)
    assert rows(inputs) == rows(targets)
    assert inputs.lengths.tolist() == (given_text.lengths + 1).tolist()
    assert (inputs.tokens[np.arange(4), given_text.lengths] == EOS).all()
    assert not targets.content.any()
    assert inputs.content.any() == (name == "copy")  # what a causal decoder learns to predict
    assert compute_lengths(OBJECTIVES[name], 64) == (63, 64, 64)


def test_copying_a_text_shows_it_and_copying_random_tokens_shows_nothing_of_it():
    texts = [text(np.random.default_rng(seed), [63, 5, 40]) for seed in (0, 1)]
    for given_text in texts:
        assert [row[:-1] for row in rows(copied("copy", given_text)[1])] == rows(given_text)
    first, second = (rows(copied("copy-random", given_text)[0]) for given_text in texts)
    assert first == second != rows(copied("copy", texts[0])[0])


def test_random_tokens_are_a_function_of_seed_and_row():
    given_text = text(np.random.default_rng(0), [40] * 6)
    whole_batch = rows(copied("copy-random", given_text)[0])
    later = PaddedTexts(*(values[2:4] for values in given_text))
    assert rows(copied("copy-random", later, first_row=2)[0]) == whole_batch[2:4]
    assert len({tuple(row) for row in whole_batch}) == 6
    other = rows(copied("copy-random", given_text, seed=1)[0])
    assert all(a != b for a, b in zip(whole_batch, other, strict=True))


def test_random_tokens_are_ordinary_ones_by_the_law_of_zipf():
    given_text = text(np.random.default_rng(0), [100] * 2000)
    tokens = copied("copy-random", given_text)[0].tokens[:, :100]
    first, end = VOCABULARY.first_regular_id, VOCABULARY.vocab_size - VOCABULARY.num_sentinels
    assert (tokens.min(), tokens.max()) == (first, end - 1)
    number = np.arange(end - first)
    expected = tokens.size * np.log((number + 2) / (number + 1)) / np.log(end - first + 1)
    counts = np.bincount(tokens.ravel(), minlength=end)[first:]
    assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()
    highest = np.array([[1 - 2.0**-24]], np.float32)
    for size in (104, 900, 32_100, 2**18 + 103):  # a product in float32 might be rounded up
        last = size - VOCABULARY.num_sentinels - 1
        assert random_tokens(highest, symbols(size=size)).item() == last


def test_prefixes_are_uniform_and_leave_at_least_one_token():
    u = uniforms(0, np.arange(3000), 1, 1)[:, 0, 0]
    assert np.bincount(prefix_lengths(np.full(3000, 4), u), minlength=4)[1:].min() > 900
    assert prefix_lengths(np.full(3000, 4), u).max() == 3
    assert prefix_lengths(np.array([1, 2]), np.array([0.99, 0.99])).tolist() == [1, 1]


def test_an_example_depends_on_seed_and_row_alone():
    alone = uniforms(7, np.array([41]), 2, 30)
    assert (uniforms(7, np.arange(40, 45), 2, 30)[1] == alone[0]).all()
    expected = np.random.Generator(np.random.Philox(key=[7, 41])).random((2, 30), dtype=np.float32)
    assert (alone[0] == expected).all()
    assert (uniforms(8, np.array([41]), 2, 30) != alone).any()


def test_a_single_token_is_never_span_noise_and_two_have_one():
    objective = OBJECTIVES["span-corruption"]
    for width in (1, 5):
        text = CorruptionInputs(np.array([1, 1]), uniforms(0, np.arange(2), 1, width), 100)
        assert not noise_mask(objective, text, 100).any()
    text = CorruptionInputs(np.array([2]), uniforms(0, np.arange(1), 1, 2), 100)
    assert noise_mask(objective, text, 100).tolist() == [[False, True]]


@pytest.mark.parametrize("targets", ["sentinels", "drop"])
def test_targets_without_eos_get_the_room_that_eos_would_take(targets):
    texts = CorruptionInputs(np.full(50, 20), uniforms(3, np.arange(50), 1, 20), 100)
    ends = Objective(inputs="drop", targets=targets, rate=0.9)
    with_eos, without = noise_mask(ends, texts, 7), noise_mask(replace(ends, eos="none"), texts, 6)
    assert with_eos.sum() < 0.9 * 50 * 20 / 2  # cut in nearly all texts
    assert (with_eos == without).all()


def test_sizes_are_those_of_the_examples_with_room_for_eos_where_it_only_separates_documents():
    counts = np.array([1, 2, 3, 20, 60], np.int32)
    objectives = [
        *OBJECTIVES.values(),
        Objective(noise="suffix", inputs="sentinels", targets="sentinels"),
        Objective("middle", "prefix-suffix-middle", "drop"),
        Objective("spans", "drop", "sentinels"),
        Objective("spans", "drop", "everything"),
    ]
    for objective in [*objectives, *(replace(each, eos="none") for each in objectives if not each.is_mlm)]:
        if not objective.corruption.counts:
            continue
        limits = compute_lengths(objective, 64)
        u = uniforms(2, np.arange(5), objective.uniforms_per_token, limits.raw)
        made = denoise(
            objective, text(np.random.default_rng(0), counts, limits.raw), u, VOCABULARY, limits.targets
        )
        inputs, targets = corrupted_lengths(objective, counts, u[:, 0, 0])
        unused = int(objective.eos_between_documents)  # counted for EOS, which then ends no example
        assert (inputs - unused * objective.has_inputs).tolist() == made[0].lengths.tolist()
        assert (targets - unused).tolist() == made[1].lengths.tolist()


@pytest.mark.parametrize("name", [name for name, noise in NOISES.items() if noise.counts])
def test_an_empty_text_has_no_noise(name):
    counts = NOISES[name].counts(Objective(), np.array([0, 0, 0]), np.array([0.0, 0.5, 0.99]))
    assert counts.num_noise_tokens.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", [name for name, noise in NOISES.items() if not noise.infill])
def test_noise_lies_in_the_text_fits_its_targets_and_is_the_same_whatever_the_other_rows(name):
    objective, room, counts = Objective(noise=name, rate=0.5), 20, np.array([1, 2, 7, 30, 40])
    if objective.corruption.fits_without_trimming or name == "none":
        room = 42
    u = uniforms(0, np.arange(5), objective.uniforms_per_token, 40)
    words, sentences = (np.arange(200).reshape(5, 40) % every == 0 for every in (3, 7))
    mask = noise_mask(objective, CorruptionInputs(counts, u, 100, words, sentences), room)
    assert not mask[~length_mask(counts, 40)].any()
    assert mask.any() == (name not in ("none", "random-text"))
    tokens = whole(np.full((5, 40), 5, np.int32), counts)
    pairs = Collocations([(5, 5)])
    _, targets = denoise(objective, tokens, u, VOCABULARY, room, collocations=pairs)
    assert targets.lengths.max() <= room
    fourth = CorruptionInputs(counts[3:4], u[3:4], 100, words[3:4], sentences[3:4])
    assert (noise_mask(objective, fourth, room) == mask[3:4]).all()


@pytest.mark.parametrize("name", NOISES)
def test_noise_follows_every_setting_but_those_that_it_is_said_to_ignore(name):
    noise, lengths = NOISES[name], np.full(20, 100)
    everywhere = np.ones((20, 100), bool)  # each token begins a word and a sentence
    text = CorruptionInputs(
        lengths, uniforms(0, np.arange(20), noise.uniforms_per_token, 100), 100, everywhere, everywhere
    )
    usual = noise.mask(Objective(rate=0.3), text)
    for field, value in {"rate": 0.4, "mean_span_length": 5.0}.items():
        other = noise.mask(replace(Objective(rate=0.3), **{field: value}), text)
        assert (other == usual).all() == (field in noise.ignores), field


def test_noise_whose_targets_have_room_for_the_rate_reads_the_rate():
    by_rate = {name for name, noise in NOISES.items() if noise.target_room_follows_rate}
    assert by_rate and not [name for name in by_rate if "rate" in NOISES[name].ignores]


def test_the_help_of_the_rate_names_all_noise_that_ignores_it():
    (listed,) = re.findall(r"ignored with noise (.*)\)", setting_descriptions(Objective)["rate"])
    ignoring = [name for name in get_args(NoiseName) if "rate" in NOISES[name].ignores]
    assert sorted(re.split(", | and ", listed)) == sorted(ignoring)


def test_every_name_of_a_choice_has_its_entry_and_every_entry_its_name():
    assert sorted(NOISES) == sorted(get_args(NoiseName))
    assert list(INPUTS) == list(get_args(InputsName))


def test_only_objectives_that_split_or_hide_documents_as_wholes_keep_them_apart():
    apart = {name for name, objective in OBJECTIVES.items() if not objective.concatenates}
    assert {"prefix-lm", "deshuffling", "fill-in-the-middle"} <= apart
    assert all(
        OBJECTIVES[name].noise in ("suffix", "everything", "middle") and OBJECTIVES[name].has_inputs
        for name in apart
    )
    assert not any(replace(objective, documents="apart").concatenates for objective in OBJECTIVES.values())


def masks(objective, length, count=2000):
    """The corruption masks of many texts of one length, bool [count,L]."""
    u = uniforms(3, np.arange(count), objective.uniforms_per_token, length)
    return noise_mask(objective, CorruptionInputs(np.full(count, length), u, 100), length + 1)


def test_a_single_span_has_its_share_of_the_tokens_inside_the_text_and_is_equally_likely_everywhere():
    mask = masks(OBJECTIVES["mass"], 20)
    starts = mask.argmax(1)
    assert (mask.sum(1) == 10).all() and (run_starts(mask).sum(1) == 1).all()
    _, counts = np.unique(starts, return_counts=True)
    assert starts.min() == 1 and starts.max() == 9 and abs(counts - 2000 / 9).max() < 5 * np.sqrt(2000 / 9)
    assert masks(OBJECTIVES["mass"], 1, 5).sum() == 0 and masks(OBJECTIVES["mass"], 2, 5).sum() == 5


def test_every_part_of_a_text_is_equally_likely_to_be_its_middle():
    """A text of 5 tokens has 5 parts of one token, 4 of two, 3 of three and 2 of four."""
    mask = masks(OBJECTIVES["fill-in-the-middle"], 5, 7000)
    assert (run_starts(mask).sum(1) == 1).all()
    parts, counts = np.unique(mask, axis=0, return_counts=True)
    assert len(parts) == 14 and abs(counts - 500).max() < 5 * np.sqrt(500)
    assert masks(OBJECTIVES["fill-in-the-middle"], 1, 5).sum() == 0


def test_a_rotated_text_begins_at_any_token_and_goes_round_while_targets_keep_its_order():
    objective, count, length = OBJECTIVES["document-rotation"], 3000, 6
    limits = compute_lengths(objective, 9)
    tokens = np.tile(np.arange(10, 19, dtype=np.int32), (count, 1))
    given_text = whole(tokens, np.full(count, length, np.int32))
    u = uniforms(1, np.arange(count), objective.uniforms_per_token, 9)
    inputs, targets = denoise(objective, given_text, u, VOCABULARY, limits.targets)
    starts = np.array(rows(inputs))[:, 0] - 10
    for row, start in zip(rows(inputs), starts, strict=True):
        assert row == [*range(10 + start, 16), *range(10, 10 + start)]
    assert all(row == [*range(10, 16)] for row in rows(targets))
    assert abs(np.bincount(starts, minlength=6) - count / 6).max() < 5 * np.sqrt(count / 6)


def test_without_noise_sentences_change_places_and_nothing_is_hidden():
    objective, counts = OBJECTIVES["sentence-permutation"], np.array([1, 40, 62], np.int32)
    limits = compute_lengths(objective, 64)
    given_text = text(np.random.default_rng(0), counts, limits.raw)
    u = uniforms(1, np.arange(3), objective.uniforms_per_token, limits.raw)
    inputs, targets = denoise(objective, given_text, u, VOCABULARY, limits.targets)
    assert rows(targets) == rows(given_text) != rows(inputs)
    assert list(map(sorted, rows(inputs))) == list(map(sorted, rows(targets)))
    assert targets.content.sum(1).tolist() == counts.tolist() and not inputs.content.any()


@pytest.mark.parametrize(("random_share", "same_share"), [(0.1, 0.1), (0.0, 0.2), (0.3, 0.0), (0.0, 0.0)])
def test_corrupted_tokens_become_any_token_or_stay_with_the_shares_of_the_settings(random_share, same_share):
    objective = Objective(
        inputs="masks-random-or-same", rate=0.5, random_share=random_share, same_share=same_share
    )
    tokens = np.full((1, 20_000), 5, np.int32)
    u = np.random.default_rng(0).random(tokens.shape, np.float32)
    noise = np.ones(tokens.shape, bool)
    shown = INPUTS[objective.inputs].apply(objective, tokens, noise, u, VOCABULARY).tokens
    masked, same = (shown == VOCABULARY.mask).mean(), (shown == 5).mean()
    expected = [1 - random_share - same_share, same_share]
    assert [masked, same] == pytest.approx(expected, abs=5 * 0.5 / np.sqrt(20_000) + 0.001)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Objective(rate=0.0), "objective.rate"),
        (lambda: Objective(rate=1.0), "objective.rate"),
        (lambda: Objective(random_share=-0.1), "objective.random_share"),
        (
            lambda: Objective(inputs="masks-random-or-same", random_share=0.6, same_share=0.6),
            "random_share=0.6 and objective.same",
        ),
        (lambda: Objective(mean_span_length=0.5), "objective.mean_span_length"),
        (lambda: compute_lengths(Objective(), 2), "data.inputs_length"),
        (lambda: compute_lengths(Objective(noise="rolled-spans"), 3), "data.inputs_length=3 has no room"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(make, field):
    with pytest.raises(SettingError, match=field):
        make()


def test_the_batches_of_every_objective_and_noise_are_recorded():
    recorded = json.loads((GOLDEN / "batches.json").read_text())
    missing = {*OBJECTIVES} - {name.split()[0] for name in recorded["cases"]}
    missing |= {*NOISES} - recorded["combinations"].keys()
    assert not missing, f"{missing} are not recorded: run tests/golden/make_batches.py, and commit its file"


def test_a_noise_that_needs_starts_of_sentences_hides_whole_sentences(monkeypatch):
    noise = Noise(
        lambda _, texts: np.cumsum(texts.sentence_starts, axis=1) % 2 == 1, needs_sentence_starts=True
    )
    monkeypatch.setitem(NOISES, "iid", noise)
    objective = Objective(noise="iid", inputs="drop", targets="drop", eos="none")
    given = text(np.random.default_rng(0), [60, 1, 33])
    numbers = np.random.default_rng(1).random((3, objective.uniforms_per_token, 60), np.float32)
    inputs, targets = denoise(objective, given, numbers, VOCABULARY, 1000)
    starts = sentence_starts(given.tokens, VOCABULARY)
    for row, length in enumerate(given.lengths):
        number = np.cumsum(starts[row, :length])
        assert number.max() >= (length > 1)
        tokens = given.tokens[row, :length]
        assert rows(inputs)[row] == tokens[number % 2 == 0].tolist()
        assert rows(targets)[row] == tokens[number % 2 == 1].tolist()


@pytest.mark.parametrize(
    ("name", "field", "meant"),
    [("sufix", "noise", "suffix"), ("maskz", "inputs", "masks"), ("dorp", "targets", "drop")],
)
def test_a_name_that_a_module_misspells_is_refused_before_anything_is_prepared(name, field, meant):
    with pytest.raises(SettingError, match=f"objective.{field}='{name}' is unknown; did you mean '{meant}'"):
        Objective(**{field: name})


@pytest.mark.parametrize("mask", [np.zeros(7, bool), np.zeros((2, 8), bool), np.zeros((2, 7))])
def test_a_noise_that_returns_no_mask_of_the_texts_is_named_with_what_it_should_return(mask, monkeypatch):
    monkeypatch.setitem(NOISES, "iid", NOISES["iid"]._replace(mask=lambda *_: mask))
    texts = CorruptionInputs(np.array([7, 5]), np.full((2, 1, 7), 0.5), 0, None)
    with pytest.raises(
        SettingError, match=r"NOISES\['iid'\] returned .*it should return bool \[B,L\], here \[2, 7\]"
    ):
        OBJECTIVES["baseline"].draw_noise(texts)
