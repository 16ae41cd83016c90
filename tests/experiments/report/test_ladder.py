"""Power laws of loss in compute: what they recover, how sure they are, and the command that shows them."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
from reported_runs import RECORD

from experiments.__main__ import dispatch
from experiments.cli.ladder import ladder
from experiments.report.ladder import (
    DECISIONS_TITLE,
    LAWS_TITLE,
    RUNGS_TITLE,
    kind_and_size,
    ladder_sheets,
    ladders,
    prediction_of,
)
from experiments.report.ladder_figure import ladder_figure
from experiments.report.report import compare_tables
from experiments.report.scaling import Ladder, Rung, fit_power_laws
from experiments.runs import provenance
from experiments.runs.paths import save_settings
from experiments.runs.result import write_result
from experiments.study.ladder import SIZES, at_size
from experiments.study.paths import run_folder
from experiments.study.registry import TABLES, build, equal_rows_among
from experiments.study.table import Published, make_row
from lm.config.base import SettingError

FLOPS = np.array([7e11, 1.8e12, 3.7e12, 1e13, 2.1e13])


def law(flops, floor=1.0, factor=0.45, exponent=0.3):
    return floor + factor * (flops / FLOPS[-1]) ** -exponent


def rungs(seeds=3, deviation=0.0, rng=None, flops=FLOPS):
    noise = rng.normal(size=(len(flops), seeds)) if rng else np.zeros((len(flops), seeds))
    losses = law(flops)[:, None] + deviation * noise
    return [Rung(f"{i}", each, 1, tuple(losses[i])) for i, each in enumerate(flops)]


def test_a_law_is_recovered_from_losses_that_follow_it():
    found = fit_power_laws(FLOPS, law(FLOPS), np.ones(5))
    assert float(found.exponent) == pytest.approx(0.3, rel=0.02)
    assert float(found.floor) == pytest.approx(1.0, abs=0.02)
    np.testing.assert_allclose([found(each) for each in FLOPS], law(FLOPS), atol=3e-4)
    assert float(found(1e14)) == pytest.approx(law(1e14), abs=0.01)


def test_three_sizes_are_met_exactly_where_they_flatten_and_nothing_falls_below_0():
    found = fit_power_laws(FLOPS[:3], law(FLOPS[:3]), np.ones(3))
    np.testing.assert_allclose([found(each) for each in FLOPS[:3]], law(FLOPS[:3]), atol=3e-4)
    assert float(fit_power_laws(FLOPS, law(FLOPS, floor=-0.2), np.ones(5)).floor) == 0
    rising = fit_power_laws(FLOPS, np.arange(5.0), np.ones(5))
    assert float(rising.factor) == 0 and float(rising.floor) == 2.0


def test_a_rung_counts_by_its_seeds():
    losses = law(FLOPS)
    losses[0] += 0.1
    even, uneven = (fit_power_laws(FLOPS, losses, np.array([w, 9, 9, 9, 9])) for w in (9.0, 0.01))
    assert abs(uneven(1e14) - law(1e14)) < abs(even(1e14) - law(1e14))


@pytest.mark.slow
def test_intervals_hold_the_truth_in_95_of_100_draws():
    rng, draws, of_law, of_mean = np.random.default_rng(0), 120, 0, 0
    for _ in range(draws):
        *smaller, largest = rungs(3, 0.01, rng)
        found = Ladder(smaller)
        sure, mean = found.predicted(FLOPS[-1]), found.predicted(FLOPS[-1], seeds=3)
        of_law += sure.low <= law(FLOPS[-1]) <= sure.high
        of_mean += mean.low <= largest.mean <= mean.high
        assert mean.high - mean.low > sure.high - sure.low
    error = 2.6 * np.sqrt(0.95 * 0.05 / draws)
    assert abs(of_law / draws - 0.95) < error and abs(of_mean / draws - 0.95) < error


def test_with_one_seed_per_rung_chance_is_not_known_and_intervals_are_points():
    value, low, high = Ladder(rungs(seeds=1)).predicted(1e14)
    assert value == pytest.approx(low) == pytest.approx(high)


@pytest.mark.parametrize("kind", ["window", "lstm", "transformer"])
def test_the_largest_rung_is_of_the_size_of_history_and_the_others_are_narrower_and_shorter(kind):
    row = f"history-rates/{kind}-0.01-decay"
    assert [*equal_rows_among(f"ladder/{kind}-x1", [row], "mini")] == [row]
    whole = build(f"ladder/{kind}-x1", "mini")
    for size in SIZES[:-1]:
        part = build(f"ladder/{kind}-x{size:g}", "mini")
        assert part.model.d_model == size * whole.model.d_model
        assert part.pretraining.steps == size * whole.pretraining.steps
        assert part.pretraining.optimizer == whole.pretraining.optimizer
        if whole.model.mixer.width:  # as large as the Transformer of its size
            assert part.model.mixer.width == pytest.approx(size * whole.model.mixer.width, rel=0.03)
    assert at_size(kind, 1)["pretraining.steps"].factor == 4


def finish(runs, row, seed, flops, bits):
    """Write a finished run with bits per byte of 1,000 bytes of held-out documents."""
    folder = run_folder(runs, "mini", row, seed, {})
    stage = folder / "pretraining"
    stage.mkdir(parents=True)
    save_settings(folder, build(row, "mini", {"seed": seed}))
    provenance.record(stage, RECORD)
    (stage / "metrics.jsonl").write_text("")
    counted = {"tokens": 300, "words": 200, "bytes": 1000}
    likelihoods = [{"step": 1, "seconds": 1.0, "nats": bits * 1000 * log(2), **counted}]
    result = {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9}
    stages = {"phases": {"pretraining": str(stage.relative_to(runs / "mini"))}, "records": {}}
    costs = {"flops": flops, "parameters": 1000, "likelihoods": likelihoods}
    write_result(folder, result | stages | costs)


@pytest.fixture
def runs(tmp_path):
    """Two kinds at five sizes, of which the transformer is better at the largest two alone."""
    chance = np.random.default_rng(0)
    for size, flops in zip(SIZES, FLOPS, strict=True):
        for seed in range(2):
            loss = law(flops) + 0.002 * chance.normal()
            finish(tmp_path, f"ladder/lstm-x{size:g}", seed, flops, loss)
            finish(tmp_path, f"ladder/transformer-x{size:g}", seed, flops, loss + 0.05 - 0.01 * flops / 1e12)
    return tmp_path


def test_the_command_shows_rungs_laws_and_decisions_and_draws_them(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dispatch(["ladder", "ladder", "--scale", "mini", "--runs", str(runs)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:-2])) <= 80
    assert "lstm-x0.375" in out and "2.1e+13" in out and "4.4e+13" in out  # (2.1e13)^2 / 1e13 FLOP
    sizes = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()[:1] == "0"}
    assert sizes["0.25"][:3] == ["0", "of", "1"] and sizes["0.75"][:3] == ["1", "of", "1"]
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_a_rung_is_predicted_by_the_smaller_ones_alone(runs):
    (comparison,) = compare_tables([TABLES["ladder"]], "mini", (str(runs),), {}, print)
    found = ladders(comparison)["lstm"]
    assert [rung.name for rung in found.rungs] == [f"{size:g}" for size in SIZES]
    value, low, high = prediction_of(found, 4)
    assert low < law(FLOPS[-1]) < high and value == pytest.approx(law(FLOPS[-1]), abs=0.02)
    *smaller, largest = found.rungs
    surprising = Ladder([*smaller, replace(largest, losses=(0.9, 0.9))])
    assert prediction_of(surprising, 4).value == value and prediction_of(found, 2) is None


def test_one_seed_gives_values_without_intervals_and_a_bound_is_marked():
    sizes = [replace(rung, relation="≤") for rung in rungs(seeds=1)]
    sheets = ladder_sheets({"lstm": Ladder(sizes)})
    shown = [
        cell.text for sheet in sheets.values() for cell in (*sheet["predicted"], *sheet.get("floor", []))
    ]
    assert (
        "1.450" in shown and "1.00" in shown and not [text for text in shown if "to" in text or "[" in text]
    )
    losses = [cell.text.split() for cell in sheets[RUNGS_TITLE]["bits per byte"]]
    assert all(relation == "≤" for relation, _ in losses)


def test_a_picture_of_one_seed_per_size_has_predictions_without_bars():
    """Of many losses, since the law and the drawn ones differ by rounding in some of them alone."""
    for seed in range(5):
        losses = law(FLOPS) + 0.01 * np.random.default_rng(seed).normal(size=5)
        sizes = [replace(rung, losses=(loss,)) for rung, loss in zip(rungs(), losses, strict=True)]
        (axes,) = ladder_figure({"lstm": Ladder(sizes)}).axes
        (predicted,) = axes.containers
        assert not predicted.has_yerr
        (axes,) = ladder_figure(
            {"lstm": Ladder([replace(rung, losses=rung.losses * 2) for rung in sizes])}
        ).axes
        assert axes.containers[0].has_yerr, "seeds that agree exactly"


def test_smaller_sizes_with_one_seed_predict_a_larger_one_without_an_interval():
    *smaller, largest = rungs(seeds=1)
    sheets = ladder_sheets({"lstm": Ladder([*smaller, replace(largest, losses=(1.44, 1.45, 1.46))])})
    assert [cell.text for cell in sheets[RUNGS_TITLE]["predicted"]] == ["–", "–", "–", "1.563", "1.450"]
    assert " to " in sheets[LAWS_TITLE]["predicted"][0].text, "all sizes together have seeds that differ"


def test_kinds_of_the_same_sizes_are_compared_though_the_first_kind_lacks_some():
    whole, part = Ladder(rungs()), Ladder(rungs(flops=FLOPS[:3]))
    sheets = ladder_sheets({"window": part, "lstm": whole, "transformer": whole})
    assert [cell.text for cell in sheets[DECISIONS_TITLE]["size"]] == ["0", "1", "2", "3"]
    assert DECISIONS_TITLE not in ladder_sheets({"window": part, "lstm": whole})


@pytest.mark.parametrize(
    ("name", "found"),
    [("gpt-x1", ("gpt", 1.0)), ("gpt-x0.25", ("gpt", 0.25)), ("gpt-x1.0.2", None), ("gpt-x.", None)],
)
def test_a_row_has_a_size_if_its_name_ends_in_a_number(name, found):
    assert kind_and_size(make_row(f"own/{name}", {}, Published(name, {}))) == found


def test_a_table_without_sizes_and_one_without_runs_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"no kind of model at 3 sizes.* history-budgets, ladder"):
        ladder("t5/4-objective", "mini", (str(tmp_path),))
    finish(tmp_path, "ladder/lstm-x0.25", 0, 1e12, 1.5)
    with pytest.raises(SettingError, match="no kind of model has finished 3 sizes"):
        ladder("ladder", "mini", (str(tmp_path),))
