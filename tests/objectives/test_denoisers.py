"""Laws of mixtures of denoisers and of their formats, and examples of them worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lm.config.base import SettingError
from lm.data.batches import uniforms
from lm.data.checks import check_has_tokens, check_mixture, check_objective
from lm.data.packing import DECODERS, PaddedTexts, make_packed_batch, row_capacity, row_length
from lm.data.pretraining import denoise, lengths_of_denoisers, mode_tokens, noise_mask, pretraining_lengths
from lm.objectives.corruption import CorruptionInputs, run_starts
from lm.objectives.denoising import (
    DENOISER_MIXTURES,
    OBJECTIVES,
    Denoiser,
    Objective,
    compute_lengths,
    corrupted_lengths,
)

EOS, X, Y, Z = 1, 999, 998, 997  # and the first three sentinels
VOCABULARY = SimpleNamespace(
    vocab_size=1000, num_sentinels=100, eos=EOS, mask=X, word_starts=np.ones(1000, bool), first_regular_id=3
)
UL2 = {denoiser.name: denoiser for denoiser in DENOISER_MIXTURES["ul2"]}
NO_LIMIT = 10_000  # of targets [tokens]


def text(length: int, rows: int = 1) -> PaddedTexts:
    """The tokens 10, 11, 12, ..."""
    tokens = np.tile(np.arange(10, 10 + length, dtype=np.int32), (rows, 1))
    return PaddedTexts(tokens, np.full(rows, length, np.int32), np.ones(tokens.shape, bool))


def sides(objective: Objective, length: int, rows: int = 1) -> list[tuple[list[int], list[int]]]:
    """The inputs and targets of so many texts, EOS included."""
    u = uniforms(0, np.arange(rows), objective.uniforms_per_token, length)
    inputs, targets = denoise(objective, text(length, rows), u, VOCABULARY, NO_LIMIT)
    return [
        (shown[:n].tolist(), said[:m].tolist())
        for shown, n, said, m in zip(
            inputs.tokens, inputs.lengths, targets.tokens, targets.lengths, strict=True
        )
    ]


def masks(objective: Objective, length: int, rows: int) -> np.ndarray:
    u = uniforms(3, np.arange(rows), objective.uniforms_per_token, length)
    return noise_mask(objective, CorruptionInputs(np.full(rows, length), u, 100), length + 1)


# --- UL2 (Tay et al. 2022, table 1): mean span, share of the text, number of spans


@pytest.mark.parametrize(
    ("name", "length", "noise", "spans"),
    [
        ("r-3", 100, 15, 5),  # 100 x 0.15 / 3
        ("r-8", 100, 15, 2),
        ("s", 100, 25, 1),  # mean span L/4, one span
        ("x-3", 100, 50, 17),
        ("x-8", 100, 50, 6),
        ("x-64-15", 500, 75, 1),
        ("x-64-50", 500, 250, 4),
    ],
)
def test_denoisers_of_ul2_hide_the_share_of_the_text_and_have_the_number_of_spans_of_the_paper(
    name, length, noise, spans
):
    mask = masks(UL2[name].objective, length, 50)
    assert (mask.sum(1) == noise).all() and (run_starts(mask).sum(1) == spans).all()
    assert mask[:, -1].all() and not mask[:, 0].any()


def test_the_sequential_denoiser_shows_three_quarters_and_asks_for_the_rest():
    """Of 8 tokens the last 2 are one span, behind whose sentinel the targets have them."""
    assert sides(UL2["s"].objective, 8) == [([10, 11, 12, 13, 14, 15, X, EOS], [X, 16, 17, EOS])]


def test_a_regular_denoiser_has_one_short_gap_in_a_short_text():
    """15 % of 10 tokens are 1.5, rounded half to even to 2, which are one span of 3 on average."""
    ((inputs, targets),) = sides(UL2["r-3"].objective, 10)
    assert inputs == [*range(10, 18), X, EOS] and targets == [X, 18, 19, EOS]


def test_an_extreme_denoiser_hides_half_of_the_text():
    """50 % of 12 tokens in spans of 3 on average are 2 spans: two sentinels on either side."""
    ((inputs, targets),) = sides(UL2["x-3"].objective, 12)
    assert [token for token in inputs if token > 900] == [X, Y]
    assert [token for token in targets if token > 900] == [X, Y]
    assert sorted(token for token in inputs + targets if 10 <= token < 22) == [*range(10, 22)]
    assert len(inputs) == len(targets) == 6 + 2 + 1


def test_modes_are_the_last_sentinels_in_the_order_of_the_denoisers_and_noise_leaves_them_out():
    assert mode_tokens(DENOISER_MIXTURES["ul2"], VOCABULARY) == {"[R]": 900, "[S]": 901, "[X]": 902}
    assert mode_tokens(DENOISER_MIXTURES["ul2-without-modes"], VOCABULARY) == {}
    objective, few = Objective("spans", rate=0.5, mean_span_length=1.0), SimpleNamespace(**vars(VOCABULARY))
    few.num_sentinels = 10
    u = uniforms(0, np.arange(20), 1, 100)
    made = denoise(objective, text(100, 20), u, few, NO_LIMIT, reserved_sentinels=3)
    assert min(side.tokens[side.tokens >= 990].min() for side in made) == 1000 - 7


# --- noise


def test_rolled_spans_are_spans_that_begin_anywhere():
    """A cyclic shift keeps the number of tokens; all positions are noise equally often, also the first."""
    objective = Objective("rolled-spans", rate=0.25)
    mask = masks(objective, 24, 6000)
    assert (mask.sum(1) == 6).all()
    assert abs(mask.sum(0) - 1500).max() < 5 * np.sqrt(1500)
    assert (run_starts(np.concatenate([mask, mask], axis=1)).sum(1) >= 4).all()  # two spans in a circle
    spans = masks(replace(objective, noise="spans"), 24, 6000)
    assert spans[:, -1].all() and not spans[:, 0].any()


def test_a_lone_span_lies_at_the_end_or_anywhere_by_the_kind_of_noise():
    lone = {"rate": 0.25, "mean_span_length": 100.0}
    starts = {name: masks(Objective(name, **lone), 20, 400).argmax(1) for name in ("spans", "single-span")}
    assert set(starts["spans"]) == {15} and set(starts["single-span"]) == {*range(1, 15)}
    (before, _), *_ = sides(Objective("single-span", rate=0.25), 8)
    assert before.count(X) == 1 and before.index(X) not in (0, len(before) - 2)


@pytest.mark.parametrize(("rate", "max_rate"), [(0.25, None), (0.75, None), (0.5, 1.0), (0.01, 0.99)])
def test_shares_of_suffixes_are_fixed_or_uniform_over_their_range(rate, max_rate):
    objective = Objective("suffix-share", rate=rate, max_rate=max_rate)
    mask = masks(objective, 100, 4000)
    assert mask[:, -1].all() and (run_starts(mask).sum(1) == 1).all() and not mask[:, 0].any()
    share = mask.mean(1)
    if max_rate is None:
        assert set(share) == {rate}
    else:
        bins = np.histogram(share, bins=4, range=(rate, max_rate))[0]
        assert abs(bins - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.parametrize("rate", [0.15, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("max_rate", [None, 1.0])
def test_the_longest_inputs_and_targets_of_a_suffix_fit(rate, max_rate):
    objective = Objective("suffix-share", rate=rate, max_rate=max_rate)
    limits = compute_lengths(objective, 64)
    made = sides(objective, limits.raw, 500)
    assert max(len(inputs) for inputs, _ in made) <= limits.inputs <= 64
    assert max(len(targets) for _, targets in made) <= limits.targets <= 64
    longer = corrupted_lengths(objective, np.array([limits.raw + 1]), np.ones(1))
    shorter = corrupted_lengths(objective, np.array([limits.raw + 1]), np.zeros(1))
    assert max(*longer, *shorter) > 64  # one more token of text would not


def test_highest_shares_below_the_lowest_are_refused():
    with pytest.raises(SettingError, match="max_rate=0.2.*rate=0.5"):
        Objective("suffix-share", rate=0.5, max_rate=0.2)


# --- formats


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("prefix-suffix-middle", lambda a, b, c: [X, *a, Y, *c, Z]),
        ("suffix-prefix-middle", lambda a, b, c: [X, Y, *c, Z, *a]),
    ],
)
def test_fill_in_the_middle_shows_prefix_and_suffix_in_either_order_and_asks_for_the_middle(inputs, expected):
    objective = Objective("middle", inputs, "drop")
    for shown, said in sides(objective, 9, 100):
        middle = said[:-1]
        assert said[-1] == EOS and middle == [*range(middle[0], middle[-1] + 1)]
        prefix, suffix = [*range(10, middle[0])], [*range(middle[-1] + 1, 19)]
        assert shown == expected(prefix, middle, suffix)


def test_fill_in_the_middle_keeps_padding_out_of_its_suffix():
    objective = Objective("single-span", "suffix-prefix-middle", "drop", 0.5)
    one = text(9)._replace(lengths=np.array([4], np.int32))
    shown, said = denoise(objective, one, uniforms(0, np.arange(1), 1, 9), VOCABULARY, NO_LIMIT)
    assert shown.tokens[0, : shown.lengths[0]].tolist() == [X, Y, 13, Z, 10]
    assert said.tokens[0, : said.lengths[0]].tolist() == [11, 12, EOS]
    assert shown.content[0].tolist() == [False, False, True, False, True]


def test_shuffled_sentinels_are_the_spans_of_sentinels_in_any_order():
    ordered = Objective("spans", rate=0.3, mean_span_length=2.0)
    shuffled = replace(ordered, targets="shuffled-sentinels")

    def spans(targets: list[int]) -> list[tuple[int, ...]]:
        starts = [i for i, token in enumerate(targets) if token > 900]
        ends = [*starts[1:], len(targets) - 1]
        return [tuple(targets[a:b]) for a, b in zip(starts, ends, strict=True)]

    orders = []
    for row in range(600):
        u = uniforms(0, np.array([row]), 2, 20)
        first = denoise(ordered, text(20), u[:, :1], VOCABULARY, NO_LIMIT)
        second = denoise(shuffled, text(20), u, VOCABULARY, NO_LIMIT)
        assert first[0].tokens.tolist() == second[0].tokens.tolist()  # inputs are the same
        there, here = spans(first[1].tokens[0].tolist()), spans(second[1].tokens[0].tolist())
        assert len(there) == 3 and sorted(here) == sorted(there)
        assert second[1].content.sum() == first[1].content.sum() == 6
        orders.append(tuple(there.index(span) for span in here))
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6 and abs(counts - 100).max() < 5 * np.sqrt(100)


# --- lengths


@pytest.mark.parametrize("name", DENOISER_MIXTURES)
@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "prefix-decoder"])
def test_rows_of_a_decoder_are_filled_by_every_denoiser_and_those_of_an_encoder_have_its_length(
    name, architecture
):
    if name == "fill-in-the-middle-lm" and architecture == "encoder-decoder":
        return
    denoisers = DENOISER_MIXTURES[name]
    whole = pretraining_lengths(Objective(mixture=name), architecture, 128)
    parts = lengths_of_denoisers(denoisers, architecture, 128)
    room = [row_length(architecture, x) + bool(d.mode) for x, d in zip(parts, denoisers, strict=True)]
    if architecture in DECODERS:
        assert max(room) == row_length(architecture, whole)
        assert min(room) > max(room) - 4  # or another token of text would fit
    else:
        assert whole.inputs == 128
        assert all(x.inputs + bool(d.mode) <= 128 for x, d in zip(parts, denoisers, strict=True))
        assert whole.targets == max(x.targets for x in parts) <= 128


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_alone_has_the_lengths_that_it_computes(name):
    objective = OBJECTIVES[name]
    architecture = "encoder" if objective.is_mlm else "encoder-decoder"
    assert pretraining_lengths(objective, architecture, 64) == compute_lengths(objective, 64)


@pytest.mark.parametrize(
    ("objective", "architecture", "length"),
    [
        # 0.45 x 230 and 0.35 x 530 tokens lie halfway between two integers, in float64 alone
        (Objective("suffix-share", rate=0.45), "encoder-decoder", 128),
        (Objective("suffix-share", rate=0.35), "encoder-decoder", 346),
        # inputs and targets together have more tokens the more noise there is, or the less
        (Objective("suffix-share", "masks", rate=0.5, max_rate=1.0), "decoder", 64),
        (Objective("suffix-share", targets="everything", rate=0.5, max_rate=1.0), "decoder", 64),
        # at 50 % a text of one token less may have as many noise tokens
        (Objective("spans", "drop", rate=0.5), "encoder-decoder", 65),
        (Objective("single-span", rate=0.5), "encoder-decoder", 64),
        (Objective("rolled-spans", "drop", rate=0.5), "encoder-decoder", 65),
        (Objective("rolled-spans", "masks", rate=0.5, mean_span_length=1.0), "encoder-decoder", 5),
    ],
)
def test_texts_of_all_lengths_fit_in_rows_and_so_do_the_lengths_by_which_they_are_packed(
    objective, architecture, length
):
    (limits,) = lengths_of_denoisers(objective.denoisers, architecture, length)
    u = uniforms(0, np.arange(50), objective.uniforms_per_token, limits.raw)
    made = denoise(objective, text(limits.raw, 50), u, VOCABULARY, limits.targets)
    make_packed_batch(*made, np.arange(50), architecture, limits, 50)  # an error if an example is too long
    counts = np.arange(1, limits.raw + 1)
    for number in (0, 0.5, 1 - 2**-24):
        uniform = np.full(len(counts), number, np.float32)
        sizes = np.stack(corrupted_lengths(objective, counts, uniform), axis=1)
        if architecture in DECODERS:
            sizes = sizes.sum(axis=1, keepdims=True)
        assert (sizes <= row_capacity(architecture, limits)).all()


# --- what cannot be


@pytest.mark.parametrize("inputs", ["prefix-suffix-middle", "suffix-prefix-middle"])
@pytest.mark.parametrize(("eos", "shortest"), [("each-example", 5), ("none", 4)])
def test_inputs_around_a_middle_have_room_for_two_tokens_since_one_has_no_middle(inputs, eos, shortest):
    """PRE, SUF and MID stand beside the token that is visible; the hidden one and EOS are targets."""
    objective = Objective("middle", inputs, "drop", eos=eos)
    with pytest.raises(SettingError, match=f"inputs_length={shortest - 1} has no room for a text of two"):
        compute_lengths(objective, shortest - 1)
    limits = compute_lengths(objective, shortest)
    ((shown, said),) = sides(objective, limits.raw)
    assert limits.raw == 2 and len(shown) == 4 <= limits.inputs and said[0] in (10, 11)


@pytest.mark.parametrize(
    ("denoisers", "message"),
    [
        ((), "should have names"),
        ((Denoiser("a", Objective()), Denoiser("a", Objective())), "each its own"),
        ((Denoiser("a", Objective(), weight=0.0),), "weight=0.0 should be above 0"),
        ((Denoiser("a", Objective(mixture="ul2")),), "not a mixture"),
        ((Denoiser("a", Objective()), Denoiser("b", OBJECTIVES["masked-lm"])), "suit an encoder"),
        ((Denoiser("a", OBJECTIVES["masked-lm"], mode="[R]"),), "begin inputs of a decoder"),
        (
            (Denoiser("a", OBJECTIVES["masked-lm"]), Denoiser("b", OBJECTIVES["masked-diffusion"])),
            r"bound the likelihood, not only \['b'\]",
        ),
    ],
)
def test_denoisers_that_do_not_go_together_are_refused(denoisers, message):
    with pytest.raises(SettingError, match=message):
        check_mixture(denoisers)


def test_modes_need_sentinels_and_an_unknown_mixture_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="has 4 sentinels, and the modes .* data.sentinels"):
        check_has_tokens(Objective(mixture="ul2"), "encoder-decoder", SimpleNamespace(num_sentinels=4, eos=1))
    with pytest.raises(SettingError, match="did you mean 'ul2'"):
        Objective(mixture="ul-2")


@pytest.mark.parametrize(
    "objective", [Objective("single-span", "masks"), Objective("rolled-spans", targets="drop"), Objective()]
)
def test_noise_in_the_middle_of_a_text_needs_two_sentinels(objective):
    one, two = (SimpleNamespace(num_sentinels=count, eos=1, mask=9) for count in (1, 2))
    check_has_tokens(objective, "encoder-decoder", two)
    with pytest.raises(SettingError, match="only 1 sentinels"):
        check_has_tokens(objective, "encoder-decoder", one)


@pytest.mark.parametrize(
    ("objective", "architecture", "message"),
    [
        (Objective("middle", "prefix-suffix-middle", "drop"), "encoder-decoder", "model.architecture"),
        (Objective("middle", "prefix-suffix-middle", "everything"), "decoder", "objective.targets"),
        (Objective("spans", "suffix-prefix-middle", "drop"), "decoder", "objective.noise"),
        (Objective("rolled-spans", targets="shuffled-sentinels"), "decoder", "objective.noise"),
    ],
)
def test_formats_that_do_not_suit_are_refused_by_name(objective, architecture, message):
    with pytest.raises(SettingError, match=message):
        check_objective(objective, architecture)
