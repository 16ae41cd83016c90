"""How far our rows are in the paper's order, and how far one scale predicts another."""

from itertools import permutations

import numpy as np
import pytest
import scipy.stats

from experiments.report.order import (
    decision_accuracy,
    kendall_tau,
    paper_order,
    scale_prediction,
    tau_p_value,
)
from experiments.study.claims import (
    claims_to_test,
    is_tested,
    published_means,
    published_rows,
    published_z,
    simulate_published_means,
    simulate_replication,
)
from experiments.study.registry import TABLES
from experiments.study.table import Column, Conclusion, Paper, Published, make_table


@pytest.mark.parametrize("values", [8, 3], ids=["without ties", "with ties"])
def test_tau_is_kendalls_tau_b(values):
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.permutation(8) if values == 8 else rng.integers(values, size=8)
        y = rng.permutation(8) if values == 8 else rng.integers(values, size=8)
        assert kendall_tau(x, y) == pytest.approx(scipy.stats.kendalltau(x, y).statistic)
    assert np.isnan(kendall_tau(np.zeros(4), np.arange(4))), "rows that are all tied have no order"


@pytest.mark.parametrize("count", [3, 4, 7, 10])
def test_without_ties_p_is_that_of_all_orders(count):
    rng = np.random.default_rng(count)
    x, y = rng.permutation(count), rng.permutation(count)
    assert tau_p_value(x, y) == pytest.approx(scipy.stats.kendalltau(x, y, method="exact").pvalue)
    if count < 8:
        taus = [abs(kendall_tau(x, np.array(order))) for order in permutations(y)]
        assert tau_p_value(x, y) == pytest.approx(np.mean(np.array(taus) >= abs(kendall_tau(x, y)) - 1e-9))


def test_with_ties_p_is_the_share_of_orders_with_as_large_a_tau():
    x, y = np.array([1, 1, 2, 3, 4]), np.array([1, 2, 2, 3, 5])
    taus = [abs(scipy.stats.kendalltau(x, order).statistic) for order in permutations(y)]
    due = np.mean(np.array(taus) >= abs(scipy.stats.kendalltau(x, y).statistic) - 1e-9)
    assert tau_p_value(x, y) == pytest.approx(due)


def test_the_p_of_an_order_that_no_drawn_one_reaches_is_not_0():
    assert 0 < tau_p_value(np.array([1, 1, *range(2, 10)]), np.arange(10)) < 1e-4


def test_a_repeat_of_the_paper_reaches_the_tau_that_its_noise_allows():
    """By an independent simulation that takes the baseline for one run, so that most are a little lower."""
    due = {2: 0.97, 4: 1.0, 5: 0.82, 6: 0.84, 7: 0.77, 9: 0.96, 10: 1.0, 12: 0.91, 13: 0.96}
    for name, table in TABLES.items():
        number = int(name.split("/")[1].split("-")[0]) if name.startswith("t5/") else 0
        if number in due:
            order = paper_order(table, published_means(table), None)
            assert order.tau == 1 and order.interval is None
            assert order.replication == pytest.approx(due[number], abs=0.025), name


def test_tau_of_a_repeat_falls_with_noise_in_the_printed_scores_too_by_as_much_as_docs_choices_says():
    falls = {
        "t5/5-bert-style": (0.82, 0.77),
        "t5/7-span-length": (0.79, 0.73),
        "glu/2-glue": (0.74, 0.64),
        "glu/4-squad": (0.68, 0.59),
    }
    for name, due in falls.items():
        table = TABLES[name]
        means = np.array([*published_means(table).values()])
        for variance, tau in zip((1.0, 2.0), due, strict=True):
            repeats = simulate_published_means(published_rows(table), table, variance)
            assert kendall_tau(repeats.T, means).mean() == pytest.approx(tau, abs=0.006), (name, variance)
        assert paper_order(table, published_means(table), None).replication == pytest.approx(
            due[0], abs=0.006
        )


def noisy_table(runs: int):
    """A table of three rows; the first is the mean of so many runs, and columns have a deviation of 1."""
    paper = Paper("P", "P 2026", (Column("a", "", 1.0), Column("b", "", 1.0, higher_is_better=False)))
    scores = {"base": {"a": 5.0, "b": 5.0}, "up": {"a": 6.5, "b": 3.5}, "same": {"a": 5.0, "b": 5.0}}
    published = {key: Published(key, each, runs=runs if key == "base" else 1) for key, each in scores.items()}
    rows = {"base": {}, "up": {"objective.rate": 0.3}, "same": {"objective.rate": 0.2}}
    conclusions = [Conclusion("same", "base", "as good")]
    return make_table("noisy", "", rows, paper=paper, published=published, conclusions=conclusions)


def test_a_mean_of_ten_runs_has_a_tenth_of_the_variance_of_one():
    one, ten = noisy_table(1), noisy_table(10)
    for table, runs in ((one, 1), (ten, 10)):
        base, up, _ = table.rows
        assert published_z(up, base, table) == pytest.approx(1.5 / np.sqrt((1 / runs + 1) / 2))
    assert [claim.better.key for claim in claims_to_test(one)] == ["same"], "1.5 deviations: z is 1.5"
    assert [claim.better.key for claim in claims_to_test(ten)] == ["up", "same"]
    assert simulate_replication(ten).total == 2


def test_a_conclusion_is_judged_whatever_the_paper_published():
    (claim,) = [claim for claim in claims_to_test(noisy_table(10)) if claim.conclusion]
    assert (claim.better.key, claim.conclusion, claim.z) == ("same", "as good", 0.0)
    for table in TABLES.values():
        judged = {(c.better.key, c.worse.key, c.conclusion) for c in claims_to_test(table) if c.conclusion}
        tested = [each for each in table.conclusions if is_tested(each, table)]
        stated = {(each.better, each.worse, each.text) for each in tested}
        assert judged == (set() if table.surrogate_data else stated)


def test_a_paper_without_noise_has_an_order_and_no_repeat():
    paper = Paper("P", "P 2026", (Column("a", ""), Column("loss", "", higher_is_better=False)))
    scores = {"x": (1.0, 0.9), "y": (2.0, 0.8), "z": (3.0, 0.7)}
    published = {key: Published(key, {"a": a, "loss": loss}) for key, (a, loss) in scores.items()}
    table = make_table("quiet", "", {key: {} for key in scores}, paper=paper, published=published)
    order = paper_order(
        table, {f"quiet/{key}": value for key, value in zip("xyz", (1, 3, 2), strict=True)}, None
    )
    assert order.tau == pytest.approx(1 / 3) and order.replication is None


@pytest.mark.parametrize(("published_scores", "scores"), [((1, 1, 1), (1, 3, 2)), ((1, 2, 3), (0, 0, 0))])
def test_rows_that_are_all_tied_have_no_order(published_scores, scores):
    paper = Paper("P", "P 2026", (Column("a", ""),))
    published = {key: Published(key, {"a": a}) for key, a in zip("xyz", published_scores, strict=True)}
    table = make_table("tied", "", {key: {} for key in "xyz"}, paper=paper, published=published)
    ours = {f"tied/{key}": float(score) for key, score in zip("xyz", scores, strict=True)}
    assert paper_order(table, ours, None) is None


def test_scores_that_are_equal_up_to_rounding_are_tied():
    paper = Paper("P", "P 2026", (Column("a", ""),))
    published = {key: Published(key, {"a": a}) for key, a in zip("xyz", (1, 2, 3), strict=True)}
    table = make_table("nearly", "", {key: {} for key in "xyz"}, paper=paper, published=published)
    ours = dict(zip(("nearly/x", "nearly/y", "nearly/z"), (0.1 + 0.2, 0.3, 0.5), strict=True))
    assert paper_order(table, ours, None).tau == pytest.approx(2 / 6**0.5)  # 2 of 3 pairs; one is tied


def test_decision_accuracy_is_the_share_of_pairs_in_the_same_order_and_a_tie_counts_half():
    assert decision_accuracy(np.array([1, 2, 3]), np.array([1, 3, 2])) == pytest.approx(2 / 3)
    assert decision_accuracy(np.array([1, 1, 3]), np.array([1, 2, 3])) == pytest.approx(2.5 / 3)


def test_rows_with_the_same_scores_in_other_seeds_are_tied():
    tied = {"a": {0: 0.1, 1: 0.2, 2: 0.3}, "b": {0: 0.3, 1: 0.2, 2: 0.1}}
    assert scale_prediction(tied, {"a": {0: 1.0}, "b": {0: 2.0}}).accuracy == 0.5


def test_the_interval_of_a_prediction_is_wide_where_seeds_disagree():
    clear = {f"row{i}": {seed: 10.0 * i + 0.1 * seed for seed in range(5)} for i in range(4)}
    rng = np.random.default_rng(0)
    unclear = {row: {seed: float(rng.normal()) for seed in range(5)} for row in clear}
    exact, vague = scale_prediction(clear, clear), scale_prediction(clear, unclear)
    assert (exact.accuracy, exact.accuracy_interval, exact.tau) == (1, (1, 1), 1)
    low, high = vague.accuracy_interval
    assert low < vague.accuracy < high or low < high
    single = {row: {0: value[0]} for row, value in clear.items()}
    assert scale_prediction(single, clear).accuracy_interval is None
