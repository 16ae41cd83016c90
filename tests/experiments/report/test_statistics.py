"""How sure a difference of two rows is: found where there is something, not found where there is nothing."""

from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from variants import with_quick

from experiments.report.statistics import (
    ALPHA,
    POWER,
    PairedDifference,
    PairedTest,
    RowPair,
    bootstrap_ratios,
    compare_pairs,
    holm_adjust,
    moderated_variance,
    outlying_seeds,
    seed_intervals,
    simulate_tests,
)

ROWS, SEEDS, EXAMPLES = 6, 5, 40
MARGIN = 2.0


def standard_error(test: PairedTest) -> float:
    """Of the mean difference, which the test's interval is a multiple of."""
    return (test.high - test.mean) / scipy.stats.t.ppf(1 - ALPHA / 2, test.degrees_of_freedom)


def scores(rng: np.random.Generator, noise: list[float], seeds: int) -> np.ndarray:
    """[R, S]: rows that do not differ, whose seeds share what a seed does to all."""
    return 3 * rng.normal(size=seeds) + np.array(noise)[:, None] * rng.normal(size=(len(noise), seeds))


def simulated(
    rng: np.random.Generator, rows: int, seeds: int, effect: float = 0.0
) -> dict[RowPair, PairedDifference]:
    """Each row less the first; deviation of a repeat: 1."""
    values = scores(rng, [1.0] * rows, seeds)
    values[1] += effect
    return {(str(row), "0"): PairedDifference(values[row] - values[0]) for row in range(1, rows)}


def every_pair(values: np.ndarray) -> dict[RowPair, PairedDifference]:
    numbers = combinations(range(len(values)), 2)
    return {(str(a), str(b)): PairedDifference(values[a] - values[b]) for a, b in numbers}


def compare_alone(difference: PairedDifference, margin: float) -> PairedTest:
    return compare_pairs({("a", "b"): difference}, margin)["a", "b"]


def with_examples(rng: np.random.Generator, seeds: int) -> PairedDifference:
    """Two sets of seeds of one row, scored on the same examples."""
    hard = 5 * rng.normal(size=EXAMPLES)
    values = hard + 3 * rng.normal(size=(2, seeds, 1)) + rng.normal(size=(2, seeds, EXAMPLES))
    flat = values.reshape(2 * seeds, EXAMPLES)
    drawn = bootstrap_ratios(flat, np.ones(EXAMPLES)) - flat.mean(1, keepdims=True)
    return PairedDifference(values.mean(2)[0] - values.mean(2)[1], drawn[:seeds] - drawn[seeds:])


def share_claimed(trials: int, rows: int, seeds: int) -> float:
    """Of simulated tables in which nothing differs, how many claim a difference."""
    rng = np.random.default_rng(rows * 100 + seeds)
    tables = (compare_pairs(simulated(rng, rows, seeds), MARGIN) for _ in range(trials))
    return float(np.mean([any(one.sign for one in table.values()) for table in tables]))


@pytest.mark.parametrize(("rows", "seeds"), [(2, 3), (2, 5), (ROWS, 3), (ROWS, 5)])
def test_sets_of_seeds_of_one_row_are_not_told_apart(rows, seeds):
    trials = 60
    assert share_claimed(trials, rows, seeds) < ALPHA + 3 * (ALPHA * (1 - ALPHA) / trials) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "seeds"), [(2, 2), (2, 3), (2, 5), (4, 3), (11, 3), (11, 5)])
def test_sets_of_seeds_of_one_row_are_told_apart_in_one_table_of_twenty_at_most(rows, seeds):
    trials = 1500
    assert share_claimed(trials, rows, seeds) < ALPHA + 3 * (ALPHA * (1 - ALPHA) / trials) ** 0.5


@pytest.mark.slow
def test_sets_of_seeds_scored_on_shared_examples_are_not_told_apart():
    rng = np.random.default_rng(0)
    claimed = [compare_alone(with_examples(rng, SEEDS), MARGIN).sign != 0 for _ in range(300)]
    assert np.mean(claimed) < ALPHA + 3 * (ALPHA * (1 - ALPHA) / 300) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("noise", [[1.0] * 3, [1.0] * 10, [4.0] * 2 + [1.0] * 8, [4.0] + [1.0] * 3])
def test_all_pairs_of_rows_that_do_not_differ_seldom_claim_something_however_unlike_their_noise_is(
    noise, seeds
):
    """One table in twenty where noise is alike, at most 8 % where it is not."""
    rng, trials = np.random.default_rng(seeds), 400
    tables = (compare_pairs(every_pair(scores(rng, noise, seeds)), MARGIN) for _ in range(trials))
    claimed = np.mean([any(one.sign for one in table.values()) for table in tables])
    level = ALPHA if len({*noise}) == 1 else 0.08
    assert claimed < level + 2 * (level * (1 - level) / trials) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "level", "coverage"), [(2, 0.10, 0.88), (3, 0.06, 0.93), (5, 0.04, 0.94)])
def test_a_noisy_baseline_raises_the_errors_of_few_seeds_as_docs_choices_says(seeds, level, coverage):
    rng, trials, claimed, held = np.random.default_rng(0), 600, 0, []
    for _ in range(trials):
        values = scores(rng, [3.0] + [1.0] * 14, seeds)
        pairs = {(str(row), "0"): PairedDifference(values[row] - values[0]) for row in range(1, 15)}
        tests = compare_pairs(pairs, MARGIN).values()
        claimed += any(test.sign for test in tests)
        held += [test.low < 0 < test.high for test in tests]
    assert abs(claimed / trials - level) < 2 * (level * (1 - level) / trials) ** 0.5 + 0.01
    assert np.mean(held) == pytest.approx(coverage, abs=0.03)


def test_degrees_of_freedom_are_those_of_the_rows_that_are_compared_and_of_their_seeds():
    values = scores(np.random.default_rng(0), [1.0] * 4, 5)
    three, four = every_pair(values[:3]), every_pair(values)
    one_seed = {("3", row): PairedDifference(values[3, :1] - values[int(row), :1]) for row in "012"}
    for family, most in [(three, 2 * 4), (three | one_seed, 2 * 4), (four, 3 * 4)]:
        judged = compare_pairs(family, MARGIN)
        assert max(one.degrees_of_freedom for one in judged.values()) <= most
    assert compare_pairs({("0", "1"): three["0", "1"]} | one_seed, MARGIN)["0", "1"].degrees_of_freedom == 4
    fewer = {pair: PairedDifference(x.by_seed[:2]) for pair, x in four.items() if "0" not in pair}
    judged = compare_pairs({("0", "1"): four["0", "1"]} | fewer, MARGIN)
    assert max(one.degrees_of_freedom for one in judged.values()) <= 4 + 4 + 1 + 1 - 4, (
        "less one of each seed"
    )
    values = scores(np.random.default_rng(1), [1.0] * 8, 5)
    pairs = every_pair(values)
    apart = {pair: pairs[pair] for pair in (("0", "1"), ("2", "3"), ("4", "5"))}
    assert max(one.degrees_of_freedom for one in compare_pairs(apart, MARGIN).values()) <= 3 * 4, (
        "those of the pairs"
    )


def test_rows_that_no_pairs_join_have_degrees_of_freedom_of_their_own():
    values = scores(np.random.default_rng(0), [1.0] * 6, 5)
    apart = every_pair(values[:3]) | {(f"{a}'", f"{b}'"): x for (a, b), x in every_pair(values[3:]).items()}
    judged = compare_pairs(apart, MARGIN)
    assert max(one.degrees_of_freedom for one in judged.values()) <= 2 * 2 * 4, "of two differences each"


def test_the_error_of_a_pair_is_never_below_that_of_its_own_seeds():
    for trial in range(20):
        family = every_pair(scores(np.random.default_rng(trial), [4.0, 4.0] + [1.0] * 8, 3))
        for pair, judged in compare_pairs(family, MARGIN).items():
            assert standard_error(judged) >= np.std(family[pair].by_seed, ddof=1) / 3**0.5 * (1 - 1e-9)


def found(trials: int, effect: float, seeds: int) -> float:
    rng = np.random.default_rng(1)
    judged = (compare_pairs(simulated(rng, 2, seeds, effect), MARGIN)["1", "0"] for _ in range(trials))
    return float(np.mean([one.sign == 1 for one in judged]))


def designed(effect: float, seeds: int) -> float:
    """Power of a two-sided t test, by the noncentral t."""
    shift, critical = effect / (2 / seeds) ** 0.5, scipy.stats.t.ppf(1 - ALPHA / 2, seeds - 1)
    return float(
        scipy.stats.nct.sf(critical, seeds - 1, shift) + scipy.stats.nct.cdf(-critical, seeds - 1, shift)
    )


@pytest.mark.parametrize(("effect", "seeds"), [(2.5, 5), (6.0, 3)])
def test_a_planted_difference_is_found_as_often_as_the_design_says(effect, seeds):
    share, trials = designed(effect, seeds), 80
    assert 0.5 < share < 0.95
    assert abs(found(trials, effect, seeds) - share) < 3 * (share * (1 - share) / trials) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("effect", "seeds"), [(1.5, 5), (2.5, 5), (4.0, 3), (6.0, 3), (1.5, 10)])
def test_a_planted_difference_is_found_as_often_as_the_design_says_in_many_trials(effect, seeds):
    share, trials = designed(effect, seeds), 1500
    assert abs(found(trials, effect, seeds) - share) < 3 * (share * (1 - share) / trials) ** 0.5


HYPOTHESES = (("0", "1"), ("2", "1"), ("3", "2"), ("4", "2"), ("5", "6"))  # of a table of seven rows


@pytest.mark.parametrize("seeds", with_quick((5,), (2, 3, 5)))
def test_simulated_tests_find_what_the_tests_of_a_table_find(seeds):
    rng, trials = np.random.default_rng(seeds), 300
    simulation = simulate_tests(HYPOTHESES, seeds, 0.0)
    effect = np.sqrt(2) * float(
        np.quantile(simulation.detection_thresholds, POWER)
    )  # rows with noise of variance 1
    scale = 0.3  # of rows that are equal, of which about half are then found equivalent
    found = equivalent = 0
    for _ in range(trials):
        table = rng.normal(size=(7, seeds))
        table[0] += effect
        pairs = {(a, b): PairedDifference(table[int(a)] - table[int(b)]) for a, b in HYPOTHESES}
        found += compare_pairs(pairs, MARGIN)["0", "1"].sign == 1
        table[0] -= effect
        pairs = {(a, b): PairedDifference(scale * (table[int(a)] - table[int(b)])) for a, b in HYPOTHESES}
        # the strictest step alone, as if no other pair were equivalent
        test = compare_pairs(pairs, MARGIN)["5", "6"]
        error, freedom = standard_error(test), test.degrees_of_freedom
        equivalent += scipy.stats.t.cdf((abs(test.mean) - MARGIN) / error, freedom) < ALPHA / len(HYPOTHESES)
    assert abs(found / trials - POWER) < 3 * (POWER * (1 - POWER) / trials) ** 0.5 + 0.02, "and Holm's steps"
    share = float(np.mean(simulation.equivalence_thresholds < MARGIN / (scale * np.sqrt(2))))
    assert abs(equivalent / trials - share) < 3 * (share * (1 - share) / trials) ** 0.5 + 0.01


def test_the_noise_of_examples_is_not_lessened_by_seeds():
    few, many = (simulate_tests(HYPOTHESES, seeds, 0.5) for seeds in (50, 1_000))
    effects = [float(np.quantile(each.detection_thresholds, POWER)) for each in (few, many)]
    assert effects[1] < effects[0] < 1.1 * effects[1]


def test_the_noise_of_other_pairs_helps_few_seeds_to_find_a_difference():
    rng, alone, beside = np.random.default_rng(2), 0, 0
    for _ in range(40):
        table = simulated(rng, 10, 3, effect=5.0)
        alone += compare_alone(table["1", "0"], MARGIN).p * 9 < ALPHA
        beside += compare_pairs(table, MARGIN)["1", "0"].sign == 1
    assert beside > alone + 10


def test_rows_of_unlike_noise_are_not_lent_each_others():
    variances = np.array([1e-4, 1e-2, 1.0, 1e2])
    moderated, freedom = moderated_variance(variances, np.full(4, 4))
    np.testing.assert_allclose(np.log(moderated), np.log(variances), atol=1)  # of 14 between the ends
    assert (freedom < 5).all()
    alike, freedom = moderated_variance(np.array([1.0, 1.1, 0.9, 1.0]), np.full(4, 4))
    assert np.ptp(alike) == 0 and np.isinf(freedom).all()


def test_one_seed_and_ties_claim_nothing_and_neither_does_a_pair_whose_seeds_disagree():
    one, tied, alike = (PairedDifference(np.array(x)) for x in ([9.0], [3.0, 3.0, 3.0], [3.0, 3.0 + 1e-12]))
    family = {(name, "d"): x for name, x in zip("abc", (one, tied, alike), strict=True)}
    for judged in compare_pairs(family, MARGIN).values():
        assert (judged.sign, judged.is_equivalent, judged.p) == (0, False, 1.0)
    others = {
        (str(i), "d"): PairedDifference(20 + (5 + i / 100) * np.array([-1.0, 0.0, 1.0])) for i in range(30)
    }
    crossing = compare_pairs(others | {("e", "d"): PairedDifference(np.array([15.0, 1.0, 15.0]))}, MARGIN)[
        "e", "d"
    ]
    assert (crossing.p < ALPHA, crossing.sign) == (True, 0)


def test_a_pair_whose_seeds_agree_exactly_has_the_noise_of_the_others():
    rng = np.random.default_rng(0)
    varied = {(f"row {i}", "base"): PairedDifference(rng.normal(size=3)) for i in range(4)}
    counted = {("far", "near"): np.full(3, 20.0), ("near", "same"): np.full(3, 0.5)}
    judged = compare_pairs(varied | {pair: PairedDifference(x) for pair, x in counted.items()}, MARGIN)
    assert (judged["far", "near"].sign, judged["near", "same"].sign) == (1, 0)
    errors = [standard_error(judged[pair]) for pair in varied]
    assert 0 < standard_error(judged["far", "near"]) <= max(errors) * (1 + 1e-9)
    two = dict([*varied.items()][:2])
    alone = compare_pairs(two | {("far", "near"): PairedDifference(np.full(3, 20.0))}, MARGIN)["far", "near"]
    assert (alone.sign, alone.p) == (0, 1.0), "two variances say too little of a third"


def test_two_rows_are_equivalent_only_if_both_ends_of_their_interval_lie_within_the_margin():
    near, far = np.array([0.1, -0.1, 0.05, -0.02, 0.0]), np.array([1.0, -1.0, 3.0, -2.0, 0.5])
    assert [compare_alone(PairedDifference(x), 1.0).is_equivalent for x in (near, far)] == [True, False]
    for margin in (0.05, 0.1, 0.2):
        wanted = max(
            scipy.stats.ttest_1samp(near, -margin, alternative="greater").pvalue,
            scipy.stats.ttest_1samp(near, margin, alternative="less").pvalue,
        )
        assert compare_alone(PairedDifference(near), margin).p_not_equivalent == pytest.approx(wanted)


def test_a_pair_alone_is_students_paired_test_and_its_draws_spread_as_its_error():
    one, other = np.random.default_rng(3).normal(size=(2, 5))
    difference = PairedDifference(one - other)
    judged = compare_alone(difference, MARGIN)
    assert judged.p == pytest.approx(scipy.stats.ttest_rel(one, other).pvalue)
    assert (judged.low, judged.high) == pytest.approx(scipy.stats.ttest_rel(one, other).confidence_interval())
    assert difference.resampled_means().std() == pytest.approx((one - other).std(ddof=1) / 5**0.5, rel=0.03)
    assert seed_intervals((one - other).tolist())["t"] == pytest.approx((judged.low, judged.high))
    low, high = seed_intervals((one - other).tolist())["bca"]
    assert low < (one - other).mean() < high and high - low < judged.high - judged.low


def test_examples_are_drawn_alike_for_all_rows_and_a_ratio_keeps_each_with_its_denominator():
    rng = np.random.default_rng(4)
    bits, sizes = rng.gamma(2, size=EXAMPLES), rng.integers(1, 50, EXAMPLES).astype(float)
    drawn = bootstrap_ratios(np.stack([bits, bits + sizes, 2 * sizes]), sizes)
    np.testing.assert_allclose(drawn[1] - drawn[0], 1)
    np.testing.assert_allclose(drawn[2], 2)
    means = bootstrap_ratios(bits[None], np.ones(EXAMPLES))
    assert means.std() == pytest.approx(bits.std() / EXAMPLES**0.5, rel=0.03)


def test_examples_add_their_own_noise_to_that_of_seeds():
    quiet = PairedDifference(np.array([1.0, 1.1, 0.9]))
    noise = np.tile(np.random.default_rng(5).normal(size=10_000), (3, 1))
    alone, beside = (compare_alone(PairedDifference(quiet.by_seed, x), MARGIN) for x in (None, noise))
    assert alone.p < ALPHA < 0.3 < beside.p
    assert beside.bootstrap == pytest.approx((1 - 1.96, 1 + 1.96), abs=0.1)


def test_holm_shares_the_level_among_claims():
    np.testing.assert_allclose(holm_adjust(np.array([0.04, 0.01, 0.03])), [0.06, 0.03, 0.06])
    assert holm_adjust(np.array([0.9, 0.8])).max() <= 1


def test_a_seed_far_from_its_rows_others_is_named():
    rows = {name: dict(enumerate([1.0, 1.1, 0.9, 1.05])) for name in "abc"}
    assert outlying_seeds(rows) == []
    assert outlying_seeds(rows | {"b": rows["b"] | {2: 9.0}}) == [("b", 2)]
    assert outlying_seeds({"a": {0: 1.0, 1: 9.0}}) == []


@pytest.mark.parametrize("counted", [0.1, 0.5])  # numpy's deviation of three times 0.1 is not quite 0
def test_rows_whose_seeds_agree_neither_make_seeds_outliers_nor_hide_them(counted):
    rows = {name: dict.fromkeys(range(3), counted) for name in "wxyz"}
    rows |= {name: dict(enumerate([1.0, 1.1, 0.9, 1.05])) for name in "abc"}
    assert outlying_seeds(rows) == []
    assert outlying_seeds(rows | {"b": rows["b"] | {2: 9.0}}) == [("b", 2)]


def test_a_pair_that_differs_by_rounding_alone_says_nothing_of_the_noise_of_others():
    rng = np.random.default_rng(0)
    varied = {(f"row {i}", "base"): PairedDifference(rng.normal(size=3)) for i in range(4)}
    rounded, equal = (PairedDifference(np.array([x, 0.0, 0.0])) for x in (0.1 + 0.2 - 0.3, 0.0))
    first, second = (compare_pairs(varied | {("same", "base"): x}, MARGIN) for x in (rounded, equal))
    for pair, test in first.items():
        assert test.degrees_of_freedom == second[pair].degrees_of_freedom
        assert (test.low, test.high, test.p) == pytest.approx((second[pair].low, second[pair].high, 1.0))
