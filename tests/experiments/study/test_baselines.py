"""The road of models: rows of equal size on equal text."""

from math import exp, log
from statistics import mean

import jax
import pytest
from flax import nnx

from experiments.report import plots, report
from experiments.report.results import results
from experiments.runs.result import write_result
from experiments.runs.stages import save_settings
from experiments.study.baselines import TABLES
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, build
from lm.nn.transformer import Transformer

HISTORY = [row.name for row in TABLES[0].rows]
BOTH = ("bits a byte", "bits a byte in 10 s")
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


def finish(runs, name, seed, evaluations):
    """A finished run whose evaluations are (seconds, bits a byte) of two documents."""
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
    columns = made.sheets["history"][""]
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
    assert rows["lstm"][at["perplexity a word"]].text.startswith(f"{perplexity:.1f}")


def test_the_report_draws_the_road_and_says_of_which_text(sheet):
    *_, made = sheet
    assert "(history-road.png)" in made.path.read_text() and (made.path.parent / "history-road.png").exists()
    assert "100 tokens (ends included), 50 words and 200 bytes" in "".join(made.notes["history"])


@pytest.mark.parametrize("asked", [["bigram"], ["bigram", "lstm"]])
def test_no_panel_of_the_road_is_empty(sheet, tmp_path, asked):
    runs = {name: results(REGISTRY[f"history/{name}"], "nano", tmp_path) for name in asked}
    figure = plots.road(runs)
    assert len(figure.axes) == len(asked)
    for axis in figure.axes:
        assert axis.lines and axis.get_ylabel() and all(len(line.get_xdata()) for line in axis.lines)
