"""The road of models: rows of equal size on equal text."""

import json
from dataclasses import replace
from math import exp, log, sqrt
from statistics import mean

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.__main__ import dispatch
from experiments.figures.draw import draw_plots
from experiments.figures.language_models import (
    HistoryFigure,
    ModelScore,
    first_better,
    half_interval,
    history_plots,
)
from experiments.report import report
from experiments.report.figures import perplexity_figure
from experiments.report.results import find_results
from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.runs.paths import save_settings
from experiments.runs.result import write_result
from experiments.study.baselines import RATES, RELATIVE_RATES, TABLES, TUNED_OPTIMIZERS, UPDATE_FACTORS
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, build
from lm.nn.transformer import Transformer

HISTORY = [row.name for row in TABLES[0].rows]
BOTH = ("bits per byte", "bits per byte in 10 s")
NETWORKS = [name for name in HISTORY if build(name, "nano").counts.model == "none"]


def numbers(name, scale):
    """All parameters of a row's network, and those that are no embedding."""
    model = build(name, scale).model
    shapes = jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return total, total - model.vocab_size * model.d_model


@pytest.mark.parametrize("scale", ["nano", "mini", "small"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_road_are_as_large_as_the_transformer_with_and_without_embedding(name, scale):
    for ours, its in zip(numbers(name, scale), numbers("history/transformer", scale), strict=True):
        assert ours == pytest.approx(its, rel=0.02)


@pytest.mark.parametrize("scale", ["nano", "mini", "small"])
def test_all_rows_of_the_road_read_and_score_the_same_text(scale):
    same = {
        (e.data, e.objective, e.pretraining.steps, e.pretraining.batch_size, e.model.vocab_size)
        for e in (build(name, scale) for name in HISTORY)
    }
    assert len(same) == 1 and next(iter(same))[0].held_out_documents


BY_NAME = {table.name: table for table in TABLES}


def test_the_curve_of_ngrams_goes_to_order_five_and_is_run_with_five_seeds():
    orders = [build(name, "mini").counts.order for name in HISTORY if name not in NETWORKS]
    assert orders == [2, 3, 4, 5] and BY_NAME["history"].seeds == 5


def test_rates_has_every_kind_with_every_optimiser_rate_and_schedule():
    rows = [build(row.name, "mini") for row in BY_NAME["history-rates"].rows]
    settings = [(e.model.mixer.kind, e.pretraining.optimizer) for e in rows]
    found = {(kind, x.name, x.learning_rate, x.schedule) for kind, x in settings}
    assert found == {
        (kind, name, rate, schedule)
        for kind in ("window", "rnn", "gru", "lstm", "attention")
        for name, rates, schedules in (
            ("adamw", RATES, ("constant", "linear")),
            ("adamw-relative", RELATIVE_RATES, ("linear",)),
        )
        for rate in rates
        for schedule in schedules
    }
    assert len(rows) == len(found) == 65


@pytest.mark.parametrize("kind", TUNED_OPTIMIZERS)
def test_a_network_of_history_is_a_row_of_the_grid_that_it_is_to_be_chosen_from(kind):
    assert build(f"history/{kind}", "mini") == build(f"history-rates/{kind}-{TUNED_OPTIMIZERS[kind]}", "mini")


@pytest.mark.parametrize("scale", ["nano", "mini"])
def test_at_each_budget_the_ngram_and_the_networks_read_the_same_text_and_rates_decay_to_zero(scale):
    for factor in UPDATE_FACTORS:
        five, *networks = (
            build(f"history-budgets/{kind}-x{factor}", scale) for kind in ("5-gram", "lstm", "transformer")
        )
        steps = build("history/transformer", scale).pretraining.steps * factor
        assert five.counts.order == 5 and five.data.repeats == 4
        for e in networks:
            assert e.data == five.data and e.pretraining.steps == five.pretraining.steps == steps
            assert e.pretraining.batch_size == five.pretraining.batch_size
            assert pretraining_spec(e).optimizer.decay_end == steps


def finish(runs, name, seed, evaluations):
    """A finished run whose evaluations are (seconds, bits per byte) of two documents."""
    folder = run_folder(runs, "nano", name, seed, {})
    save_settings(folder, build(name, "nano", {"seed": seed}))
    text = {"tokens": 100, "words": 50, "bytes": 200}
    likelihoods = [
        {"step": step, "seconds": seconds, "nats": bits * log(2) * text["bytes"]} | text
        for step, (seconds, bits) in enumerate(evaluations, 1)
    ]
    cost = {"seconds": evaluations[-1][0], "tokens": 9, "parameters": 1_234}
    write_result(
        folder, {"columns": {}, "tasks": {}, "held_out_loss": None, "likelihoods": likelihoods} | cost
    )


@pytest.fixture
def sheet(tmp_path):
    """The scoreboard of counts, a quick network and a slow one, two seeds each, and the report."""
    for seed, noise in enumerate((0.0, 0.02)):
        finish(tmp_path, "history/bigram", seed, [(0.5, 2.0 + noise)])
        finish(tmp_path, "history/window", seed, [(5.0, 3.0 + noise), (10.0, 1.9 + noise)])
        finish(tmp_path, "history/lstm", seed, [(8.0, 2.5 + noise), (16.0, 1.5 + noise), (24.0, 1.0 + noise)])
    made = report.write_report(list(TABLES[:1]), "nano", tmp_path)
    columns = made.tables["history"].sheets[""]
    rows = dict(
        zip([cell.text for cell in columns.pop("row")], zip(*columns.values(), strict=True), strict=True)
    )
    return columns, rows, made


def test_equal_time_is_that_of_the_quickest_network_and_counts_are_the_same_in_both_frames(sheet):
    columns, rows, _ = sheet
    at = {name: place for place, name in enumerate(columns)}
    shown = {
        name: [cells[at[c]].text.split("\N{NO-BREAK SPACE}")[0] for c in BOTH] for name, cells in rows.items()
    }
    assert shown["bigram"] == ["2.010", "2.010"]
    assert shown["window"] == ["1.910", "1.910"]
    assert shown["lstm"] == ["1.010", f"{2.51 - log(10 / 8, 2):.3f}"]  # between those after 8 and 16 s
    assert shown["gru"] == ["–", "–"] and rows["lstm"][at["parameters"]].text == "1,234"
    perplexity = mean(exp(bits * log(2) * 200 / 50) for bits in (1.0, 1.02))
    assert rows["lstm"][at["word perplexity"]].text.startswith(f"{perplexity:.1f}")


def test_the_report_draws_the_road_and_says_of_which_text(sheet):
    *_, made = sheet
    assert "(history-road.png)" in made.path.read_text() and (made.path.parent / "history-road.png").exists()
    assert "100 tokens (ends included), 50 words and 200 bytes" in "".join(made.tables["history"].notes)


@pytest.mark.parametrize("asked", [["bigram"], ["bigram", "lstm"]])
def test_no_panel_of_the_road_is_empty(sheet, tmp_path, asked):
    runs = {name: find_results(REGISTRY[f"history/{name}"], "nano", tmp_path) for name in asked}
    figure = draw_plots(perplexity_figure(runs))
    assert len(figure.axes) == len(asked)
    for axis in figure.axes:
        named = axis.get_xlabel() and (axis.get_ylabel() or axis.get_yticklabels())
        assert axis.lines and named and all(len(line.get_xdata()) for line in axis.lines)


@pytest.fixture
def history(tmp_path):
    """Runs of n-grams and networks at nano, five seeds each, and of two budgets."""
    rows = {"bigram": 2.0, "trigram": 1.8, "4-gram": 1.7, "5-gram": 1.65, "window": 1.9, "lstm": 1.75}
    for name, bits in rows.items():
        for seed in range(5):
            noise = 0.01 * (seed - 2) * (name in ("window", "lstm"))
            finish(tmp_path, f"history/{name}", seed, [(5.0, 3.0), (10.0, bits + noise)])
    for factor, (five, lstm) in {1: (1.7, 1.8), 4: (1.6, 1.5), 16: (1.5, 1.3)}.items():
        for seed in range(5):
            finish(tmp_path, f"history-budgets/5-gram-x{factor}", seed, [(1.0, five)])
            finish(tmp_path, f"history-budgets/lstm-x{factor}", seed, [(9.0, lstm + 0.01 * seed)])
    return tmp_path


def test_the_picture_has_ngrams_to_order_five_networks_with_intervals_sizes_and_budgets(history):
    models, budgets = HistoryFigure(runs=history, scale="nano").scores()
    by_model, by_size, by_budget = history_plots(models, budgets).panels
    assert by_model.curves["n-grams"].y == pytest.approx([2.0, 1.8, 1.7, 1.65])
    assert list(by_model.x_ticks.values()) == [*("bigram", "trigram", "4-gram", "5-gram", "window", "lstm")]
    assert by_model.reference == pytest.approx(1.65) and not any(by_model.curves["n-grams"].deviations)
    interval = 2.776 * 0.01 * np.std([-2, -1, 0, 1, 2], ddof=1) / sqrt(5)
    assert by_model.curves["lstm"].y == pytest.approx([1.75])
    assert by_model.curves["lstm"].deviations == pytest.approx([interval], rel=1e-3)
    assert by_size.curves["lstm"].x == [1_234] and by_size.log == "x"
    assert list(by_budget.curves) == ["5-gram", "lstm"]
    assert by_budget.curves["lstm"].x == [1_200, 4_800, 19_200]


def test_lm_draw_history_writes_the_picture_with_its_numbers_from_runs_alone(history, capsys):
    out = history / "history.png"
    assert dispatch(["draw", "history", str(history), "--scale", "nano", "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    said = json.loads(HistoryFigure(runs=history, scale="nano").description())
    assert [score["order"] for score in said["history"]] == [2, 3, 4, 5, 0, 0]
    assert said["better from"] == {"lstm": 4_800}
    assert dispatch(["draw", "history", str(history / "none"), "--scale", "nano"]) == 2
    assert "has no finished run of history at scale nano" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("lstm", "due"),
    [
        ([1.8, 1.5, 1.3], 4),
        ([1.6, 1.5, 1.3], 1),
        ([1.8, 1.7, 1.6], None),
        ([1.6, 1.7, 1.3], 16),  # lost again in between
        ([1.8, 1.595, 1.3], 16),  # its interval holds the 5-gram
    ],
)
def test_a_network_passes_where_it_is_better_by_its_interval_and_stays_so(lstm, due):
    budgets = []
    for updates, five, bits in zip((1, 4, 16), (1.7, 1.6, 1.5), lstm, strict=True):
        budgets.append(ModelScore(f"5-gram-x{updates}", 5, 10, updates, five, 0.0, 5))
        budgets.append(ModelScore(f"lstm-x{updates}", 0, 10, updates, bits, 0.01, 5))
    assert first_better(budgets) == {"lstm": due}
    assert first_better([replace(score, seeds=1) for score in budgets]) == {"lstm": None}, "no interval"


def test_one_seed_has_no_interval():
    assert half_interval([1.5]) == 0
