"""From finished runs to what a report says of them."""

import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from paths import ROOT
from reported_runs import NAMES, RATES, RECORD
from rich.console import Console

from experiments import console
from experiments.__main__ import dispatch
from experiments.cli import list_rows
from experiments.cli.run_summary import summarize
from experiments.console import Cell
from experiments.figures import draw
from experiments.figures.draw import draw_plots
from experiments.processes import progress
from experiments.report import report, results
from experiments.report.claims_figure import ClaimsFigure
from experiments.report.comparison import Mismatch
from experiments.report.figures import axis_values, published_standardized_difference, table_figures
from experiments.report.latex import bibtex, bibtex_key, escape
from experiments.report.order import scale_prediction
from experiments.report.overrides import with_override_rows
from experiments.report.page import prediction_samples
from experiments.report.prediction import read_combined_scores
from experiments.report.results import Ingredient, find_results
from experiments.report.text import (
    CLAIMS,
    DIFFERENCES,
    GROUP_TITLES,
    brief_conclusions,
    brief_summary_sheet,
    prediction_sheet,
    scores_sheet,
    summary_sheet,
    verdict_sentence,
)
from experiments.runs import provenance
from experiments.runs.curves import read_curves
from experiments.runs.paths import save_settings
from experiments.runs.result import read_result, summary, write_result
from experiments.runs.scores import columns
from experiments.runs.task_scores import best_of, score_values
from experiments.study import claims as paper
from experiments.study.changes import objective
from experiments.study.experiment import BASELINE
from experiments.study.overrides import explicit_overrides, short_name, start_changes
from experiments.study.paths import report_folder, report_name, row_folder, run_folder
from experiments.study.presets import GPT
from experiments.study.registry import (
    REGISTRY,
    TABLES,
    add_rows,
    add_table,
    build,
    find,
    find_buildable,
    tables_of,
)
from experiments.study.scales import SCALES
from experiments.study.table import Column, Conclusion, Paper, Published, make_table
from lm.config.base import SettingError, change, leaves
from lm.data.tasks.benchmarks import TASKS
from lm.files import json_with_checksum, lines_with_checksum, parse_with_checksum
from lm.metrics import Undefined

FIRST = "t5/1-baseline/baseline seed 0"
ATTACK = "<script>document.title = 1</script>"


def finish(runs: Path, name: str, seed: int, score: float, **given) -> Path:
    """A finished run with one task, its metrics and its predictions; ``given`` are settings changed by
    hand.
    """
    folder = run_folder(runs, "nano", name, seed, explicit_overrides(given))
    phase = folder / "finetuning" / "cloze"
    (phase / "predictions" / "cloze").mkdir(parents=True)
    save_settings(folder, build(name, "nano", given | {"seed": seed}))
    provenance.record(phase, RECORD)
    (phase / "metrics.jsonl").write_text(
        lines_with_checksum([{"step": 1, "kind": "eval", "score": 2}]) + '{"step": 2, "ki'
    )
    answer = lines_with_checksum([{"target": ["a"], "prediction": ATTACK}])
    (phase / "predictions" / "cloze" / "2.jsonl").write_text(answer + '{"ta')
    task = {
        "column": "SQuAD",
        "metric": "em",
        "step": 2,
        "score": score,
        "metrics": {"em": score, "loss": 1.5},
    }
    scores = {
        "columns": {"SQuAD": score, "GLUE": 0.0},
        "held_out_loss": 3.0,
        "seconds": 1.0,
        "tokens": 9,
        "tasks": {"cloze": task},
        "phases": {"cloze": str(phase.relative_to(runs / "nano"))},
        "records": {"cloze": 1},
    }
    write_result(folder, scores)
    return folder


def rescore(folder: Path, **changed) -> None:
    """Another result of the run, sealed as its own."""
    scores = parse_with_checksum((folder / "scores.json").read_bytes(), "scores.json")
    (folder / "scores.json").write_text(json_with_checksum(scores | changed))


def study(runs: Path, seeds: int = 2) -> Path:
    """Every row of the table, whose scores fall by ten from row to row, and by one from seed to seed but for
    noise.
    """
    for place, name in enumerate(NAMES):
        for seed in range(seeds):
            finish(runs, name, seed, 90.0 - 10 * place - seed + 0.25 * seed * (1, -1, 0.5, -0.7)[place])
    return runs


@pytest.fixture
def pictures():
    """Asked for by a test that looks at the pictures of its reports."""


@pytest.fixture(autouse=True)
def _undrawn_pictures(request, monkeypatch):
    """Write files without content in place of pictures, which take most of the time of a report."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(draw, "draw_plots", lambda grid: None)
        monkeypatch.setattr(draw, "save_figure", lambda figure, out, dpi: out.write_bytes(b""))


def written(runs, **options) -> tuple[report.Report, str]:
    made = report.write_report(RATES, "nano", runs, **options)
    return made, made.path.read_text()


def test_a_report_marks_the_differences_beyond_noise_and_gives_a_verdict_on_each_claim(tmp_path, pictures):
    made, text = written(study(tmp_path, seeds=4), command="lm report t5/6-corruption-rate")
    sheets = made.tables[RATES[0].name].sheets
    scores, claims, matched = sheets[""], sheets[CLAIMS["updates"]], sheets[CLAIMS["FLOP"]]
    assert [cell.text.replace("\N{NO-BREAK SPACE}", " ")[-1] for cell in scores["SQuAD"]] == [
        "▲",
        "1",
        "▼",
        "▼",
    ]
    verdicts = dict(zip((c.text for c in claims["claim"]), (c.text for c in claims["reading"]), strict=True))
    assert [*verdicts] == ["10 > 50", "15 > 10", "15 > 50", "25 > 50"][: len(verdicts)] or len(verdicts) == 4
    assert verdicts["15 > 50"].startswith("confirmed +")
    assert {cell.text for cell in matched["reading"]} == {"out of range"}, "these runs counted none"
    assert "50 % noise is too much" in text and "simulated replication" in text
    assert "objective.rate: 0.15 → 0.5" in made.path.with_suffix(".html").read_text()
    lines = list(csv.DictReader((made.path.parent / "report.csv").open()))
    assert len(lines) == len(NAMES) * 4 * 2, "SQuAD and held-out loss"
    said = {"row": NAMES[0], "seed": "0", "column": "SQuAD", "score": "90.0", "paper": "80.38"}
    assert lines[0] | said == lines[0]
    shown = list(csv.DictReader((made.path.parent / "t5-6-corruption-rate.csv").open()))
    assert [line["row"] for line in shown] == [cell.text for cell in scores["row"]]
    assert list(shown[0])[:4] == ["row", "SQuAD", "SQuAD ±", "SQuAD ▲▼"] and shown[0]["seeds"] == "4"
    squad = [line for line in lines if line["label"] == shown[0]["row"] and line["column"] == "SQuAD"]
    assert float(shown[0]["SQuAD"]) == pytest.approx(mean(float(line["score"]) for line in squad))
    assert float(shown[0]["SQuAD ±"]) == pytest.approx(stdev(float(line["score"]) for line in squad))
    assert report.write_pictures(made, "svg")[0] == "t5-6-corruption-rate.svg"
    assert b"<svg" in (made.path.parent / "t5-6-corruption-rate.svg").read_bytes()
    data = parse_with_checksum((made.path.parent / "results.json").read_bytes(), "results.json")
    (claim,) = [x for x in data["tables"][RATES[0].name]["claims"] if x["conclusion"]]
    assert data["command"] == "lm report t5/6-corruption-rate"
    verdict = claim["verdicts"]["reading"]["updates"]
    low, high = verdict["interval"]
    assert verdict["verdict"] == "confirmed" and 0 < low < high
    assert set(verdict["by seeds alone"]) == {"t", "bca"}


def test_a_score_that_is_undefined_is_a_dash_with_its_reason_and_never_a_number(tmp_path):
    folder, reason = finish(study(tmp_path), NAMES[1], 2, 50.0), "pearson: all predictions are alike"
    scores = parse_with_checksum((folder / "scores.json").read_bytes(), "scores.json")
    task = scores["tasks"]["cloze"] | {
        "measure": "score",
        "score": None,
        "metrics": {"em": None, "loss": 1.5},
    }
    undefined = {"undefined": {"score": reason, "em": "all predictions are alike"}}
    rescore(folder, columns={"SQuAD": None}, tasks={"cloze": task | undefined})
    assert summary(folder) == f"SQuAD – (cloze: {reason})"
    assert f"cloze: score – ({reason})" in [*summarize(NAMES[1], build(NAMES[1], "nano"), folder)]
    made, text = written(tmp_path)
    row = REGISTRY[NAMES[1]]
    assert f"{row.label}, seed 2: SQuAD is undefined (cloze: {reason})" in text
    lines = list(csv.DictReader((made.path.parent / "report.csv").open()))
    (line,) = [x for x in lines if (x["row"], x["seed"], x["column"]) == (NAMES[1], "2", "SQuAD")]
    assert (line["score"], line["undefined"]) == ("", f"cloze: {reason}")
    assert {other["undefined"] for other in lines if other is not line} == {""}
    data = parse_with_checksum((made.path.parent / "results.json").read_bytes(), "results.json")
    run = data["tables"][RATES[0].name]["rows"][NAMES[1]]["seeds"]["2"]
    assert (run["scores"]["SQuAD"], run["undefined"]) == (None, {"SQuAD": {"cloze": reason}})
    cell = made.tables[RATES[0].name].sheets[""]["SQuAD"][1]
    squad = [x["score"] for x in lines if x["row"] == NAMES[1] and x["column"] == "SQuAD"]
    known = [float(score) for score in squad if score]
    assert cell.value == pytest.approx(mean(known))


def test_a_value_is_missing_only_where_a_reason_is_given(tmp_path):
    folder = finish(tmp_path, NAMES[0], 0, 50.0)
    scores = parse_with_checksum((folder / "scores.json").read_bytes(), "scores.json")
    rescore(folder, tasks={"cloze": scores["tasks"]["cloze"] | {"score": None}})
    with pytest.raises(SettingError, match="score of cloze None should be a number"):
        read_result(folder)


def test_the_records_of_a_task_tell_undefined_metrics_and_its_best_checkpoint_has_a_score(tmp_path):
    task, reason = TASKS["stsb"], "all predictions are alike"
    alike = {"pearson": Undefined(reason), "spearman": 3.0, "score": Undefined(f"pearson: {reason}")}
    known = {"pearson": -9.0, "spearman": -7.0, "score": -8.0}

    def recorded(*evaluations):
        lines = [{"step": k, "kind": "eval", **score_values(task, x)} for k, x in enumerate(evaluations, 1)]
        (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(lines))
        assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
        return best_of(task, tmp_path)

    best = recorded(known, alike)
    assert (best["step"], best["score"], best["metrics"]["pearson"]) == (1, -8.0, -9.0)
    best = recorded(alike, alike)
    assert (best["step"], best["score"], best["metrics"]) == (2, None, {"pearson": None, "spearman": 3.0})
    assert best["undefined"] == {"pearson": reason, "score": f"pearson: {reason}"}
    assert columns({"a": {"column": "GLUE", "score": 1.0}, "b": best}) == {"GLUE": None}


def test_a_report_begins_with_what_came_out(tmp_path):
    made, text = written(study(tmp_path, seeds=4))
    title, first, *_ = (part for part in text.split("\n\n") if part)
    table = made.tables[RATES[0].name]
    assert first == f"- **{RATES[0].name}**: {verdict_sentence(table.comparison, table.verdicts)}"
    assert title.startswith("# ") and "confirmed" in first


def test_rows_that_lack_parts_do_not_hide_that_nothing_has_finished(tmp_path):
    (tmp_path / "nano").mkdir()
    tables = [table for name, table in TABLES.items() if name.startswith("lan/")]
    assert any(row.needs for table in tables for row in table.rows)
    assert report.scales_with_runs(tables, [str(tmp_path)]) == []


def test_rows_that_settings_make_equal_are_not_compared_and_named(tmp_path):
    given = {"pretraining.steps": 50}
    for seed in (0, 1):
        finish(tmp_path, "t5/1-baseline/baseline", seed, 1.0 + seed, **given)
    made = report.write_report(tables_of(find("t5/1-*")), "nano", tmp_path, overrides=given)
    verdicts = made.tables["t5/1-baseline"].verdicts
    assert {verdict.word for each in verdicts.values() for _, verdict in each["updates"]} == {
        "same experiment"
    }
    note = "The same experiment as another row, with the same runs: No pre-training (as Baseline average)."
    assert note in made.path.read_text()


def test_a_single_seed_claims_nothing_and_says_what_would(tmp_path):
    made, text = written(study(tmp_path, seeds=1))
    assert "train more with --seeds" in text
    sheets = made.tables[RATES[0].name].sheets
    ours = sheets[""]["SQuAD"]
    assert not any("▲" in cell.text or "▼" in cell.text for cell in ours)
    assert {cell.text.split()[0] for cell in sheets[CLAIMS["updates"]]["reading"]} == {"undecided"}


def test_tables_of_which_only_the_baseline_has_finished_are_named_not_shown(tmp_path):
    finish(tmp_path, "t5/1-baseline/baseline", 0, 1.0)
    finish(tmp_path, "t5/4-objective/deshuffling", 0, 1.0)
    made = report.write_report(tables_of(find("t5/*")), "nano", tmp_path)
    assert list(made.tables) == ["t5/4-objective"]
    assert "has finished of: t5/1-baseline, t5/2-architecture" in made.path.read_text()


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("t5/*", "t5"),
        ("t5/6-corruption-rate", "t5-6-corruption-rate"),
        ("t5/1*", "t5-1+10+11+12+13+15"),
        ("bert", "bert"),
        ("[bg][ape]*t/*", "bert+gpt+bart"),
    ],
)
def test_every_set_of_tables_has_a_report_of_its_own(tmp_path, pattern, folder):
    wanted = tables_of(find(pattern))
    finish(tmp_path, wanted[0].rows[0].name, 0, 1.0)
    assert report.write_report(wanted, "nano", tmp_path).path.parent.name == folder


def test_no_two_settings_share_the_folder_of_their_report(tmp_path):
    values = ("a/b", "a_b", "a/b/c", "a_b/c", "a/b_c")
    folders = {report_folder(tmp_path, "nano", RATES, {"data.corpus": value}) for value in values}
    assert len(folders) == len(values)
    assert {folder.parent for folder in folders} == {tmp_path / "nano" / "reports"}


def test_no_two_sets_of_tables_share_the_folder_of_their_report(restored_registry):
    own = (
        "abl",
        "abl/depth-1",
        "abl/depth-2",
        "abl/depth-3",
        "1+2",
        "t5-1+2",
        "electra/other",
        "a-b/1",
        "a-b/2",
        "a/b-3",
    )
    for name in own:
        add_table(make_table(name, "", {"base": {}}))
    around = [name for name in TABLES if name in own or name.startswith(("t5/1-", "t5/2-", "electra"))]
    sets = [list(some) for count in range(1, len(around) + 1) for some in combinations(around, count)]
    assert len({report_name(some) for some in sets}) == len(sets)
    assert report_name(["abl/depth-1"]) == "abl-depth-1"


def test_a_row_of_ones_own_lies_on_the_axis_of_the_table_that_it_is_added_to(restored_registry, tmp_path):
    name = "t5/6-corruption-rate"
    add_rows(name, {"30": {"objective.rate": 0.3}, "30-wide": {"objective.rate": 0.3, "model.mlp.d_ff": 512}})
    (table,) = tables_of(find(name))
    at = axis_values(table, {row.name: build(row.name, "nano") for row in table.rows})
    assert {row.rpartition("/")[2]: x for row, x in at.items()} == {
        "10": 0.1,
        "15": 0.15,
        "25": 0.25,
        "30": 0.3,
        "50": 0.5,
    }
    assert [*at.values()] == sorted(at.values())
    for row in table.rows:
        finish(tmp_path, row.name, 0, 50.0)
    made = report.write_report([table], "nano", tmp_path).tables[name]
    axes = draw_plots(made.figures["t5-6-corruption-rate"]).axes[0]
    assert [*axes.lines[0].get_xdata()] == [0.1, 0.15, 0.25, 0.3, 0.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1", "0.15", "0.25", "0.3", "0.5"]


LOSSES = {"base": 4.0, "better": 3.5, "worse": 4.5, "same": 4.0, "masked": 1.0}
NO_TASKS = {"tuning.heads": (), "finetuning.steps": 0}


def without_tasks(runs: Path, seeds: int = 4, **given) -> report.Report:
    """The report on a table of ones own, whose rows have a loss on held-out text alone.

    given: what the table has, such as its paper.
    """
    rows = {name: GPT | NO_TASKS | {"model.mlp.d_ff": 64 + place} for place, name in enumerate(LOSSES)}
    rows["masked"] |= objective("prefix-lm")
    add_table(make_table("own", "", rows, **given))
    for place, (name, loss) in enumerate(LOSSES.items()):
        for seed in range(seeds):
            folder = run_folder(runs, "nano", f"own/{name}", seed, {})
            save_settings(folder, build(f"own/{name}", "nano", {"seed": seed}))
            noise = 0.1 * seed + 0.01 * np.random.default_rng([seed, place]).normal()
            scores = {"columns": {}, "tasks": {}, "held_out_loss": loss + noise, "seconds": 1.0, "tokens": 9}
            write_result(folder, scores)
    return report.write_report(tables_of(find("own")), "nano", runs)


def test_a_table_without_tasks_is_judged_by_its_held_out_loss(restored_registry, tmp_path):
    made = without_tasks(tmp_path)
    sheets = made.tables["own"].sheets
    sheet = sheets[""]
    signs = [cell.text[-1] if cell.text[-1] in "▲▼*" else "" for cell in sheet["held-out loss"]]
    assert signs == ["", "▲", "▼", "", "*"], "a loss of other targets is marked, and not compared"
    latex = report.write_latex(made, "nano")[0].read_text()
    assert latex.count("*") == 2 and "*: measured on other tokens than the baseline's" in latex
    differences = [cell.text for cell in sheets[DIFFERENCES]["held-out loss"]]
    assert [text.rpartition(" ")[2] for text in differences[:2]] == ["better", "worse"]
    assert differences[3] == "different targets"
    for text, between in zip(differences[:3], (-0.5, 0.5, 0.0), strict=True):
        mean, low, high = map(float, re.findall(r"[+-]?\d\.\d+", text))
        assert low < mean < high and abs(mean - between) < 0.05 and low - 0.01 < between < high + 0.01
    data = parse_with_checksum((made.path.parent / "results.json").read_bytes(), "results.json")["tables"][
        "own"
    ]
    better = data["rows"]["own/better"]["less the baseline's"]["held-out loss"]
    assert better["interval"][1] < 0 and better["verdict"] == "better"
    assert "Not comparable in held-out loss with base, whose objective" in made.path.read_text()
    assert "own" in made.tables["own"].figures and "mean z-score" not in sheet
    assert "own.csv" in {file.name for file in made.path.parent.iterdir()}


def test_rows_that_differ_only_in_their_sequence_length_are_told_what_makes_them_incomparable(
    restored_registry, tmp_path
):
    add_table(
        make_table("own", "", {"base": GPT | NO_TASKS, "short": GPT | NO_TASKS | {"data.inputs_length": 32}})
    )
    for key in ("base", "short"):
        folder = run_folder(tmp_path, "nano", f"own/{key}", 0, {})
        save_settings(folder, build(f"own/{key}", "nano", {"seed": 0}))
        write_result(folder, {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9})
    said = report.write_report(tables_of(find("own")), "nano", tmp_path).path.read_text()
    reason = "whose objective, kind of model, text, vocabulary or sequence length is another"
    assert f"Not comparable in held-out loss with base, {reason}: short." in said


@pytest.mark.parametrize("recorded", [("one", "one"), ("one", "other"), ("", ""), ("one", None)])
def test_losses_are_compared_if_runs_record_one_vocabulary_whatever_their_settings_call_it(
    restored_registry, tmp_path, recorded
):
    named = {"base": {}, "named": {"data.vocabulary": "unigram:documentation"}}
    add_table(make_table("own", "", {key: GPT | NO_TASKS | more for key, more in named.items()}))
    for key, fingerprint in zip(named, recorded, strict=True):
        folder = run_folder(tmp_path, "nano", f"own/{key}", 0, {})
        save_settings(folder, build(f"own/{key}", "nano", {"seed": 0}), tmp_path / "cache")
        stage = tmp_path / "nano" / "pretraining" / key
        stage.mkdir(parents=True)
        if fingerprint is not None:
            vocabulary = {"vocabulary": {"fingerprint": fingerprint}}
            provenance.record(stage, dict.fromkeys(provenance.PARTS, {}) | vocabulary)
        values = {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9}
        write_result(folder, values | {"phases": {"pretraining": f"pretraining/{key}"}})
    said = report.write_report(tables_of(find("own")), "nano", tmp_path).path.read_text()
    assert ("Not comparable in held-out loss" in said) == (recorded != ("one", "one"))


PAPERS = ("base", "better", "worse")


def of_a_paper(**column) -> dict:
    """A paper with one column of losses, those of LOSSES; the better row is said to be better."""
    paper = Paper("Own", "Somebody 2026", (Column("PPL", "perplexity", **column),))
    published = {key: Published(key, {"PPL": LOSSES[key]}, second_hand=True) for key in PAPERS}
    said = Conclusion("better", "worse", "better is better")
    return {"paper": paper, "published": published, "conclusions": [said]}


@pytest.mark.parametrize(("column", "contradicts"), [({}, True), ({"held_out": True}, False)])
def test_a_conclusion_that_its_papers_scores_contradict_is_named_on_the_page_and_in_the_terminal(
    restored_registry, tmp_path, capsys, column, contradicts
):
    made = without_tasks(tmp_path, **of_a_paper(std=0.1, **column))
    report.print_report(tables_of(find("own")), "nano", [str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    for shown in (made.path.read_text(), printed):
        assert ('Conclusion "better is better" (better > worse): the published' in shown) == contradicts


@pytest.mark.parametrize("width", [80, 45])
def test_one_column_of_a_paper_without_noise_is_shown_in_the_terminal_or_told_where_it_is(
    restored_registry, tmp_path, capsys, monkeypatch, width
):
    for module in (console, report):
        monkeypatch.setattr(module, "CONSOLE", Console(width=width, file=sys.stdout))
    without_tasks(tmp_path, **of_a_paper(held_out=True))
    report.print_report(tables_of(find("own")), "nano", [str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    heads = next(line.split() for line in lines if "seeds" in line)
    assert ("PPL" in heads) == (width == 80)
    assert any("3.50†" in line for line in lines) == (width == 80)
    legend = "†: published score from a secondary source"
    assert (legend in " ".join(" ".join(lines).split())) == (width == 80), "the legend is wrapped"
    assert any("on the page alone: paper's PPL" in line for line in lines) == (width == 45)


def test_several_columns_of_a_paper_without_noise_are_on_the_page_alone(restored_registry, tmp_path, capsys):
    given = of_a_paper()
    columns = tuple(Column(name, "%") for name in ("A", "B"))
    given["paper"] = Paper("Own", "Somebody 2026", columns)
    given["published"] = {key: Published(key, {"A": 1.0, "B": 2.0}) for key in PAPERS}
    without_tasks(tmp_path, **given)
    report.print_report(tables_of(find("own")), "nano", [str(tmp_path)])
    assert "on the page alone: paper's A, paper's B" in capsys.readouterr().out


def test_the_legend_of_the_terminal_names_the_halves_that_are_shown():
    assert report.brief_legend({"row": [], "reading": []}).startswith("reading: mean distance")
    for score, is_explained in (("5.103*", True), ("5.103", False)):
        legend = report.brief_legend({"row": [Cell("corpus=text:*")], "held-out loss": [Cell(score)]})
        assert ("*: " in legend) == is_explained
    assert report.brief_legend({"row": [], "reading": [], "language": []}).startswith("reading, language: ")


def test_the_legend_of_the_terminal_says_what_is_bold():
    for is_best in (True, False):
        legend = report.brief_legend({"row": [Cell("a", bold=True)], "paper's A": [Cell("1", bold=is_best)]})
        assert ("bold: best published score" in legend) == is_best


def test_the_legend_of_the_terminal_takes_no_sign_of_a_label_or_a_paper_for_one_of_our_scores():
    sheet = {"row": [Cell("±1 ▲")], "paper's A": [Cell("1.0 ± 0.2 ▲")], "held-out loss": [Cell("3.0")]}
    legend = report.brief_legend(sheet)
    assert "over seeds" not in legend and "significantly" not in legend
    assert "± of published scores: the interval that the paper prints" in legend
    legend = report.brief_legend(sheet | {"held-out loss": [Cell("3.0 ± 0.1 ▲")]})
    assert "±: standard deviation over seeds" in legend and "▲ ▼: significantly better" in legend


def test_one_seed_of_a_table_without_claims_decides_nothing_and_that_is_said(restored_registry, tmp_path):
    table = without_tasks(tmp_path, seeds=1).tables["own"]
    sheets = table.sheets
    said = verdict_sentence(table.comparison, table.verdicts)
    assert said == "One seed decides nothing: train more with --seeds."
    assert not any(sign in cell.text for cell in sheets[""]["held-out loss"] for sign in "▲▼")
    assert "(" not in "".join(cell.text for cell in sheets[DIFFERENCES]["held-out loss"])


@pytest.mark.parametrize("seeds", [1, 4])
def test_a_difference_that_no_deviation_divides_is_told_in_its_own_unit(seeds, restored_registry, tmp_path):
    conclusions = (Conclusion("better", "base", "more is better"),)
    table = without_tasks(tmp_path, seeds, conclusions=conclusions).tables["own"]
    (line,) = brief_conclusions(table.comparison, table.verdicts)
    assert ("(nats per token, positive: better): more is better" in line) == (seeds == 1)
    assert line.startswith("- undecided +0.5 (nats") == (seeds == 1)
    assert ("differences are in nats per token" in "".join(table.notes)) == (seeds == 1)


def test_the_page_names_a_row_as_claims_do_behind_its_label_and_the_csv_by_its_label(
    restored_registry, tmp_path
):
    given = of_a_paper() | {"conclusions": (Conclusion("better", "base", "more is better"),)}
    given["published"] = given["published"] | {"better": Published("2^29", {}), "base": Published("Base", {})}
    made = without_tasks(tmp_path, **given)
    page = made.path.read_text()
    assert "2^29 (better)" in page and "better > base" in page
    assert "Base (base)" not in page, "the label says it"
    shown = [line["row"] for line in csv.DictReader((made.path.parent / "own.csv").open())]
    assert "2^29" in shown and "2^29 (better)" not in shown


MODULE = """
from experiments.study.presets import GPT
from experiments.study.registry import add_table
from experiments.study.scales import SCALES
from experiments.study.table import Axis, Conclusion, make_table

SCALES["tiny"] = SCALES["nano"] | {"pretraining.steps": 50}
ALONE = GPT | {"tuning.heads": ()}
WIDTHS = {"base": 256, "narrow": 64, "wide": 512, "wider": 1024}
ROWS = {name: ALONE | {"model.mlp.d_ff": width} for name, width in WIDTHS.items()}
add_table(make_table(
    "width", "How wide a feed-forward layer should be", ROWS, axis=Axis("model.mlp.d_ff", "width [features]"),
    scale="tiny", seeds=4, conclusions=[Conclusion("wide", "narrow", "wider is better")],
))
"""
LOSS_BY_WIDTH = {"narrow": 4.4, "base": 4.0, "wide": 3.6, "wider": 3.6}


def test_four_rows_of_a_newcomer_have_every_right_of_ours(restored_registry, tmp_path, request):
    request.addfinalizer(lambda: SCALES.pop("tiny"))
    exec(MODULE, {})  # as --study does
    (table,) = tables_of(find("width"))
    for place, (name, loss) in enumerate(LOSS_BY_WIDTH.items()):
        for seed in range(4):
            folder = run_folder(tmp_path, "tiny", f"width/{name}", seed, {})
            save_settings(folder, build(f"width/{name}", "tiny", {"seed": seed}))
            noise = 0.1 * seed + 0.01 * np.random.default_rng([seed, place]).normal()
            scores = {"columns": {}, "tasks": {}, "held_out_loss": loss + noise, "seconds": 1.0, "tokens": 9}
            write_result(folder, scores)
    made = report.write_report([table], "tiny", tmp_path)
    assert made.path.read_text().startswith("# How wide a feed-forward layer should be at scale `tiny`")
    sheets = made.tables["width"].sheets
    assert [cell.text for cell in sheets[""]["row"]] == ["base", "narrow", "wide", "wider"]
    verdicts = {
        row.text: cell.text.split()[-1] for row, cell in zip(*sheets[DIFFERENCES].values(), strict=True)
    }
    assert verdicts == {"narrow": "worse", "wide": "better", "wider": "better"}
    claims = sheets[CLAIMS["updates"]]
    (verdict,) = claims["held-out text"]
    assert verdict.text.startswith("confirmed +") and "z" not in claims
    axes = draw_plots(made.tables["width"].figures["width"]).axes[0]
    assert [*axes.lines[0].get_xdata()] == sorted(axes.lines[0].get_xdata()) and axes.get_xscale() == "log"
    assert made.tables["width"].figures["width"].x_label == "width [features]"


def test_a_figure_is_drawn_again_only_if_its_panels_changed(tmp_path, monkeypatch, pictures):
    made, _ = written(study(tmp_path))
    picture = made.path.parent / "t5-6-corruption-rate.png"
    drawn, save = [], draw.save_figure
    monkeypatch.setattr(
        draw, "save_figure", lambda figure, out, dpi: drawn.append(out.name) or save(figure, out, dpi=dpi)
    )
    written(tmp_path)
    assert drawn == []
    picture.unlink()
    written(tmp_path)
    assert drawn == [picture.name], "it is missing"
    finish(tmp_path, NAMES[0], 2, 50.0)
    written(tmp_path)
    assert picture.name in drawn[1:], "it shows other scores"


def test_a_picture_of_an_earlier_report_is_not_left_beside_those_of_other_runs(tmp_path, monkeypatch):
    made, _ = written(study(tmp_path))
    folder, name = made.path.parent, "t5-6-corruption-rate"
    report.write_pictures(made, "svg")
    (folder / "mine.png").write_bytes(b"")
    drawn = made.tables[RATES[0].name].figures
    with monkeypatch.context() as patch:
        patch.setattr(report, "table_figures", lambda *_: drawn | {f"{name}-crossing": drawn[name]})
        written(tmp_path)
    assert {f"{name}.png", f"{name}-crossing.png", f"{name}.svg"} <= {*os.listdir(folder)}
    finish(tmp_path, NAMES[0], 2, 50.0)
    written(tmp_path)
    pictures = {file for file in os.listdir(folder) if file.endswith((".png", ".svg"))}
    assert pictures == {f"{name}.png", "mine.png"}, "another figure, another format, and a file of the user"


def test_a_table_of_an_earlier_report_is_not_left_beside_those_of_other_runs(tmp_path):
    tables = [*RATES, *tables_of(find("t5/8-*"))]
    baseline = finish(tmp_path, FIRST.split()[0], 0, 50.0)
    last = [finish(tmp_path, tables[1].rows[-1].name, 0, 50.0), finish(tmp_path, NAMES[0], 0, 40.0)]
    made = report.write_report(tables, "nano", tmp_path)
    files = {f"{table.name.replace('/', '-')}.csv" for table in tables}
    assert {*made.tables} == {table.name for table in tables}
    assert files < {*os.listdir(made.path.parent)}
    shutil.rmtree(last[0])
    made = report.write_report(tables, "nano", tmp_path)
    assert {*made.tables} == {RATES[0].name} and baseline.exists()
    assert files & {*os.listdir(made.path.parent)} == {"t5-6-corruption-rate.csv"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_sorts_upper_bounds_by_their_numbers():
    page = (Path(report.__file__).parent / "page.html").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("const number =")]
    code = (
        line
        + 'console.log(["≤\N{NO-BREAK SPACE}2.5", "1,024", "+0.5 ▲", "–", "not yet learning"].map(number))'
    )
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[ 2.5, 1024, 0.5, null, null ]"


def test_signs_of_labels_that_latex_does_not_know_are_commands():
    assert escape("x ≥ 2 | −1") == r"x $\geq$ 2 \textbar{} $-$1"


@pytest.mark.parametrize(
    ("citation", "key", "author"),
    [
        ("Smith & Jones 2031", "smithjones2031", "Smith and Jones"),
        ("Ångström et al. 2031", "angstrom2031", "Ångström and others"),
        ("李 2031", "2031", "李"),
        ("李", "paper", "李"),
    ],
)
def test_every_paper_has_a_key_and_authors_that_bibtex_reads(citation, key, author):
    entry = bibtex([Paper("mine", citation, ())])
    assert entry.startswith(f"@misc{{{key},\n") and f"  author = {{{author}}},\n" in entry


def test_papers_of_one_author_and_year_are_cited_by_different_keys(restored_registry):
    first, second = (Paper(name, "Raffel et al. 2020", ()) for name in ("one", "other"))
    t5 = TABLES["t5/1-baseline"].paper
    for work in (first, second):
        add_table(make_table(work.name, "", {"base": {}}, paper=work))
    keys = [bibtex_key(work) for work in (t5, first, second)]
    assert keys == ["raffel2020", "raffel2020b", "raffel2020c"]
    more_columns = replace(second, columns=(Column("SQuAD", "%"),))
    entries = bibtex([second, more_columns, t5])
    assert re.findall(r"@misc\{(.*),", entries) == ["raffel2020c", "raffel2020"], "one work has one entry"


def test_rows_that_are_one_experiment_are_read_once_and_keep_their_names(
    restored_registry, tmp_path, monkeypatch
):
    add_table(
        make_table("mine", "", {"base": {}, "15": {"objective.rate": 0.15}, "50": {"objective.rate": 0.5}})
    )
    for name in ("mine/base", "mine/50"):
        finish(tmp_path, name, 0, 50.0)
    read = []
    monkeypatch.setattr(
        "experiments.report.results.read_result",
        lambda folder, scale: read.append(folder) or read_result(folder, scale),
    )
    made = report.write_report(tables_of(find("mine")), "nano", tmp_path)
    assert len(read) == 2
    assert [cell.text for cell in made.tables["mine"].sheets[""]["row"]] == ["base", "15", "50"]
    assert [cell.text for cell in made.tables["mine"].sheets[""]["seeds"]] == ["1", "1", "1"]


def test_a_report_without_new_figures_imports_neither_jax_nor_matplotlib(tmp_path):
    finish(tmp_path, NAMES[0], 0, 50.0)
    code = "import sys; from experiments.report.report import write_report; "
    code += "from experiments.study.registry import find, tables_of; "
    code += f"write_report(tables_of(find('t5/6-*')), 'nano', {str(tmp_path)!r}); "
    code += "print(*sorted({'jax', 'matplotlib', 'flax'} & set(sys.modules)))"
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert outputs == [["matplotlib"], []]


def test_a_report_is_headed_by_the_tables_that_it_is_on(restored_registry, tmp_path):
    text = without_tasks(tmp_path).path.read_text()
    assert text.startswith("# own at scale `nano`") and "\n## own\n" in text
    add_table(make_table("titled", "What is hidden", {"base": {}}))
    titled, rates = (tables_of(find(name)) for name in ("titled", "t5/6*"))
    assert report.report_title(titled) == "What is hidden"
    assert report.report_title(rates) == "The T5 study"
    assert report.report_title([*titled, *rates]) == "Tables titled and t5/6-corruption-rate"


def test_an_ensemble_shows_a_curve_a_member_and_the_answers_of_all_together(tmp_path):
    folder = finish(tmp_path, NAMES[0], 0, 1.0)
    (folder / "finetuning/cloze/member-0").mkdir()
    points = [{"step": step, "kind": "eval", "score": 2} for step in (1, 2)]
    (folder / "finetuning/cloze/member-0/metrics.jsonl").write_text(lines_with_checksum(points))
    (folder / "finetuning/cloze/predictions/cloze/ensemble.jsonl").write_text(
        lines_with_checksum([{"prediction": "together"}])
    )
    path = f"{folder.relative_to(tmp_path / 'nano')}/finetuning/cloze/member-0"
    rescore(folder, phases={"cloze/member-0": path})
    found = find_results(REGISTRY[NAMES[0]], "nano", tmp_path)
    assert read_curves(found, pytest.fail) == {"cloze: mean of scores": [[(1, 2), (2, 2)]]}
    (folder / "finetuning/cloze/member-0/metrics.jsonl").write_text(lines_with_checksum(points[:1]))
    assert read_curves(found, pytest.fail) == {}, "one point is no line"
    assert "together" in prediction_samples("cloze", 2, found[0])


@pytest.mark.parametrize("watched", [False, True])
def test_a_bucket_that_cannot_be_read_is_said_to_be_one_of_the_runs(watched, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    said = []
    with pytest.raises(SettingError, match="--runs gs://bucket/runs cannot be read: .*gcsfs"):
        if watched:
            report.watch(RATES, "nano", "gs://bucket/runs", said.append)
        written("gs://bucket/runs")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"code": {"lm/config/base.py": "2"}}, "other code than {first}: lm/config/base.py 1 -> 2"),
        ({"packages": {"jax": "0.11"}}, "other packages than {first}: jax 0.10 -> 0.11"),
        ({"vocabulary": {"fingerprint": "w"}}, "other vocabulary than {first}: fingerprint v -> w"),
        (
            {"data": RECORD["data"] | {"cloze validation": "e"}},
            "other data than {first}: cloze validation d -> e",
        ),
        ("edited", "its provenance is unknown: .*origin.json was edited or damaged"),
        (None, "its provenance is unknown: .*origin.json is missing"),
        ("a folder", "its provenance is unknown: .*Is a directory: .*origin.json"),
    ],
)
def test_a_seed_made_of_other_things_than_its_neighbours_is_marked_whatever_folder_it_lies_in(
    tmp_path, other, said
):
    folders = [study(tmp_path / "here"), tmp_path / "there"]
    assert "≠" not in written(folders)[1]
    phase = finish(folders[1], NAMES[2], 7, 60.0) / "finetuning" / "cloze"
    if other in (None, "a folder"):
        (phase / "origin.json").unlink()
        if other:
            (phase / "origin.json").mkdir()
    elif other == "edited":
        (phase / "origin.json").write_text((phase / "origin.json").read_text().replace("0.10", "0.11"))
    else:
        provenance.record(phase, RECORD | other)
    made, text = written(folders)
    label = REGISTRY[NAMES[2]].label
    sheet = made.tables[RATES[0].name].sheets[""]
    assert [cell.text for cell in sheet["row"] if "≠" in cell.text] == [f"{label} ≠"]
    assert re.search(rf"\n- {NAMES[2]} seed 7: {said.format(first=FIRST)}", text)


def test_a_stage_that_was_trained_without_a_study_module_is_no_other_code_and_one_by_another_version_is(
    tmp_path,
):
    """As the start that rows of the module share with those of the study."""
    folders = [study(tmp_path / "here"), tmp_path / "there"]
    code = RECORD["code"] | {"--study mine.py": "1"}
    for seed, version in ((7, "1"), (8, "1"), (9, "2")):
        phase = finish(folders[1], NAMES[2], seed, 60.0) / "finetuning" / "cloze"
        provenance.record(phase, RECORD | {"code": code | {"--study mine.py": version}})
        marked = re.findall(r"seed (\d): other code than (.*)", written(folders)[1])
        assert marked == ([("9", f"{NAMES[2]} seed 7: --study mine.py 1 -> 2")] if version == "2" else [])


def test_a_run_whose_shared_pretraining_was_trained_again_is_marked(tmp_path):
    study(tmp_path)
    folder = run_folder(tmp_path, "nano", NAMES[2], 0, {})
    pretraining = tmp_path / "nano/pretraining/1"
    pretraining.mkdir(parents=True)
    provenance.record(pretraining, RECORD)
    rescore(
        folder,
        phases={
            "pretraining": "pretraining/1",
            "cloze": str(folder.relative_to(tmp_path / "nano") / "finetuning/cloze"),
        },
        records={"pretraining": 1, "cloze": 1},
    )
    for loss, said in ((3.0, ""), (3.125, "held-out loss 3.0000 -> 3.1250")):
        evaluations = [{"step": step, "kind": "eval", "loss": each} for step, each in ((1, 9.0), (2, loss))]
        (pretraining / "metrics.jsonl").write_text(lines_with_checksum(evaluations))
        _, text = written(tmp_path)
        assert ("≠" in text) == bool(said)
        assert not said or f"{NAMES[2]} seed 0: its pre-training was trained again since: {said}" in text


def test_a_baseline_trained_anew_is_marked_and_not_all_the_rows_beside_it(tmp_path):
    study(tmp_path, seeds=1)
    baseline = run_folder(tmp_path, "nano", FIRST.removesuffix(" seed 0"), 0, {})
    provenance.record(baseline / "finetuning" / "cloze", RECORD | {"code": {"lm/config/base.py": "2"}})
    shutil.rmtree(run_folder(tmp_path, "nano", NAMES[3], 0, {}))
    made, text = written(tmp_path)
    rows = [cell.text for cell in made.tables[RATES[0].name].sheets[""]["row"]]
    assert [row for row in rows if "≠" in row] == ["15% ≠"], "which is the baseline, and one run of three"
    runs = f"{FIRST}; t5/6-corruption-rate/15 seed 0"  # one run, by its two names
    assert f"\n- {runs}: other code than {NAMES[0]} seed 0: lm/config/base.py 1 -> 2\n" in text


def test_the_papers_mean_of_columns_is_in_the_order_of_its_claims():
    for table in TABLES.values():
        for claim in (each for each in paper.claims_to_test(table) if (each.z or 0.0) > 0):
            base = REGISTRY[table.baseline]
            better, worse = (
                published_standardized_difference(row, base, table) for row in (claim.better, claim.worse)
            )
            assert better > worse, (claim.better.name, claim.worse.name)


def test_rows_whose_settings_name_other_text_are_not_compared_in_it(tmp_path):
    (table,) = tables_of(find("t5/8-*"))
    for row in table.rows:
        phase = finish(tmp_path, row.name, 0, 1.0) / "finetuning" / "cloze"
        provenance.record(phase, RECORD | {"data": {"corpus train": build(row.name, "nano").data.corpus}})
    assert "≠" not in report.write_report([table], "nano", tmp_path).path.read_text()


def test_a_run_in_several_folders_counts_once_and_what_does_not_count_is_named(tmp_path):
    here, there = study(tmp_path / "here"), study(tmp_path / "there", seeds=3)
    save_settings(
        run_folder(here, "nano", NAMES[0], 0, {}), change(build(NAMES[0], "nano"), "model.mlp.d_ff", 3)
    )
    (run_folder(here, "nano", NAMES[2], 0, {}) / "scores.json").write_text('{"columns": {"GLUE": NaN}, "tas')
    (run_folder(here, "nano", NAMES[3], 1, {}) / "scores.json").unlink()
    made, text = written([here, there, tmp_path / "nowhere"])
    assert made.path.is_relative_to(here)
    for said in (
        "model.mlp.d_ff: 3 -> ",
        "10/seed-0 belongs",
        "is not JSON",
        "seed-1 has not finished",
        "nowhere",
    ):
        assert said in text
    assert [cell.text for cell in made.tables[RATES[0].name].sheets[""]["seeds"]] == ["3"] * 4
    with pytest.raises(SettingError, match="other settings"):
        find_results(REGISTRY[NAMES[0]], "nano", here)
    with pytest.raises(SettingError, match="no run of .* has finished"):
        written(tmp_path / "nowhere")


def test_tables_whose_rows_this_code_cannot_build_are_named_beside_the_others(tmp_path):
    finish(tmp_path, "jo/1-text8/transformer-ar", 0, 90.0)
    finish(tmp_path, "jo/1-text8/mdlm", 0, 80.0)
    made = report.write_report(tables_of(find("jo/*")), "nano", tmp_path)
    text = made.path.read_text()
    assert [*made.tables] == ["jo/1-text8"]
    assert "Nothing but the baseline has finished of: jo/2-lm1b.\n" in text
    assert "This code lacks what the rows need of: jo/5-objective.\n" in text
    with pytest.raises(SettingError, match="row 'jo/5-objective/mse' cannot be built: it needs continuous"):
        report.write_report(tables_of(find("jo/5-*")), "nano", tmp_path)


def test_a_table_of_which_no_row_can_be_built_is_refused_with_where_its_needs_and_scores_are(tmp_path):
    name = "sahoo/3-zero-shot"
    refused = f"none of these 3 rows can be built: .*; lm list {name} says what each needs"
    scores = r"; docs/papers/sahoo\.md has their published scores$"
    assert (ROOT / "docs" / "papers" / "sahoo.md").exists()
    with pytest.raises(SettingError, match=f"^there is nothing to report: {refused}{scores}"):
        report.write_report(tables_of(find(name)), "nano", tmp_path)
    with pytest.raises(SettingError, match=f"^{refused}{scores}"):
        find_buildable(name)
    with pytest.raises(SettingError, match="lacks; a report on its table has its published scores$"):
        find_buildable("sahoo/8-ablation/discrete-time")


HOSTILE = [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"", b"\0" * 9, b"9" * 5000]
WRONG = [  # of what a run came to
    {"held_out_loss": 800.0},
    {"length_losses": {"2": 800.0}},
    {"length_losses": {"x": 1.0}},
    {"held_out_loss": -1.0},
    {"content_loss": -1.0},
    {"reference_loss": 800.0},
    {"exit_step": -1},
    {"top_ten_share": 1.5},
    *(
        {"columns": {"SQuAD": score, "GLUE": 0.0}}
        for score in (np.inf, np.nan, 10**400, "90", None, [1], 1e6, -5)
    ),
    *(
        {name: value}
        for name in ("seconds", "tokens", "tasks", "columns", "phases")
        for value in ("9", [9], -1, None)
    ),
    {"tasks": {"cloze": {"column": "SQuAD", "metric": "em", "step": 2, "score": 1e6, "metrics": {}}}},
    {"tasks": {"cloze": {"column": "SQuAD", "metric": "em", "step": "2", "score": 1.0, "metrics": {}}}},
    {
        "tasks": {
            "cloze": {"column": "SQuAD", "metric": "em", "step": 2, "score": 1.0, "metrics": {"loss": 800.0}}
        }
    },
    {"phases": {"cloze": "/etc"}},
    {"phases": {"cloze": "../.."}},
    {"more": 1},
]


def test_a_run_that_is_damaged_diverged_or_anothers_is_left_out_alone_and_its_file_named(tmp_path):
    study(tmp_path)
    bad = run_folder(tmp_path, "nano", NAMES[1], 0, {})
    whole = {path: path.read_bytes() for path in (bad / "scores.json", bad / "settings.json")}
    damages = [(path, data) for path in whole for data in HOSTILE]
    other = run_folder(tmp_path, "nano", NAMES[0], 0, {})
    damages += [(path, (other / path.name).read_bytes()) for path in whole]
    scores = parse_with_checksum(whole[bad / "scores.json"], "")
    damages += [(bad / "scores.json", json_with_checksum(scores | wrong).encode()) for wrong in WRONG]
    damages += [(bad / "scores.json", whole[bad / "scores.json"].replace(b"80.0", b"90.0"))]
    damages += [(bad / "scores.json", json.dumps(scores).encode())]
    for path, data in damages:
        for name in whole:
            name.write_bytes(whole[name])
        path.write_bytes(data)
        found, left_out = report.collect_runs(RATES, "nano", tmp_path)
        assert {name: len(found[name]) for name in NAMES} == {
            name: 2 - (name == NAMES[1]) for name in NAMES
        }, data[:300]
        (said,) = left_out
        assert str(bad) in said and len(said) < 1000, said


def test_a_report_is_written_whole_whatever_some_of_its_runs_hold(tmp_path):
    runs = study(Path(os.fsdecode(bytes(tmp_path) + b"/\xff")), seeds=3)
    rescore(run_folder(runs, "nano", NAMES[0], 0, {}), length_losses={"2": 800.0})
    cut, swapped, gone = (
        run_folder(runs, "nano", NAMES[i], 1, {}) / "finetuning" / "cloze" for i in (1, 2, 3)
    )
    metrics = cut / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"score": 2', '"score": 3'))
    (swapped / "metrics.jsonl").write_text("")
    answers = (
        run_folder(runs, "nano", NAMES[3], 0, {})
        / "finetuning"
        / "cloze"
        / "predictions"
        / "cloze"
        / "2.jsonl"
    )
    answers.write_text(answers.read_text().replace("document", "dokument"))
    made, text = written(runs)
    assert [cell.text for cell in made.tables[RATES[0].name].sheets[""]["seeds"]] == ["2", "3", "3", "3"]
    due = [
        "seed-0/scores.json does not count: length_losses 2 800.0 should",
        "line 1 of 1",
        "has lost its end: it has 0 of 1 lines",
    ]
    for line, said in zip(made.left_out, due, strict=True):
        assert said in line
        assert said in text.partition("Not counted:")[2]
    html = made.path.with_suffix(".html").read_text()
    assert "edited or damaged" in html and "dokument" not in html
    assert gone.exists()


def test_a_full_disk_leaves_no_half_of_a_picture_and_is_an_error_of_one_line_that_names_the_file(tmp_path):
    study(tmp_path)
    # -B: Python would keep modules that are cut off at that size.
    command = [
        sys.executable,
        "-B",
        "-m",
        "experiments",
        "report",
        "t5/6-corruption-rate",
        "--runs",
        str(tmp_path),
    ]

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small, timeout=300)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "matplotlib" not in line.lower()]
    assert re.fullmatch(r"lm: .*File too large: '.*t5-6-corruption-rate\.png'\. Fix that .*", line)
    assert not [*(tmp_path / "nano" / "reports" / "t5-6-corruption-rate").iterdir()]


def test_many_settings_given_by_hand_still_make_a_file_name(tmp_path):
    given = {f"model.setting_{i}": "é" * 9 for i in range(40)}
    folders = [run_folder(tmp_path, "nano", NAMES[0], 0, given | {"x": x}) for x in (1, 2)]
    for folder in folders:
        folder.mkdir(parents=True)
    assert len(set(folders)) == 2


@pytest.mark.parametrize("name", [table.name for table in TABLES.values() if table.axis])
def test_rows_on_the_axis_of_a_picture_differ_in_its_number_and_in_nothing_else(name):
    (table,) = tables_of(find(name))
    at = axis_values(table, {row.name: build(row.name, "base") for row in table.rows})
    built = [dict(leaves(build(row, "base"))) | {table.axis.setting: None} for row in at]
    assert len(set(at.values())) == len(at) > 3
    assert all(settings == built[0] for settings in built)


def test_the_report_is_written_anew_when_a_run_changes_until_interrupted(tmp_path, monkeypatch):
    said, page, waits = [], study(tmp_path) / "nano/reports/t5-6-corruption-rate/report.html", []

    def sleep(seconds):
        assert '<meta http-equiv="refresh"' in page.read_text()
        waits.append(seconds)
        if len(waits) == 2:
            finish(tmp_path, NAMES[0], 2, 50.0)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    report.watch(RATES, "nano", tmp_path, said.append)
    assert ["wrote" in line for line in said] == [True, True, False]
    assert '<meta http-equiv="refresh"' not in page.read_text()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_needs_no_network_hides_no_markup_and_sorts_its_tables(tmp_path):
    page = written(study(tmp_path))[0].path.with_suffix(".html")
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    twice = "<script>for (const _ of 'ab') document.querySelector('th:nth-child(4)').click()</script></body>"
    page.write_text(text.replace("</body>", twice))
    call = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    done = subprocess.run([*call, str(page)], capture_output=True, text=True, timeout=600)
    assert "CONSOLE" not in done.stderr
    assert ATTACK not in done.stdout
    assert "&lt;script&gt;document" in done.stdout
    rows = re.findall(r"<tr>\n<td[^>]*>(\d+%)", done.stdout.partition("</table>")[0])
    assert rows == ["50%", "25%", "15%", "10%"]


def test_at_80_columns_no_number_and_no_value_that_a_row_changes_is_cut(monkeypatch, capsys):
    monkeypatch.setattr(console, "CONSOLE", Console(width=80, file=sys.stdout))
    monkeypatch.setattr(list_rows, "NAMES_CONSOLE", Console(width=80, file=sys.stdout))
    numbers = {f"column {i}, paper": [Cell(f"{i}{i}.{i:02d} ± 0.12", bold=i == 3)] for i in range(10, 22)}
    console.show_sheet("a table", {"row": [Cell("encoder-decoder-6-layers")], **numbers})
    lines = capsys.readouterr().out.splitlines()
    for head, (cell,) in numbers.items():
        assert any(head in line for line in lines) and any(cell.text in line for line in lines)
    assert max(map(len, lines)) <= 80 and sum("encoder-decoder-6-layers" in line for line in lines) > 1
    list_rows.list_rows("t5/5-bert-style")
    shown = "".join(
        line.split("│")[3].strip() for line in capsys.readouterr().out.splitlines() if "│" in line
    )
    assert "…" not in shown
    assert "objective.inputs=masks-or-random,objective.targets=everything" in shown.replace(" ", "")


def test_at_80_columns_the_sheet_on_all_tables_is_in_one_piece(monkeypatch, capsys):
    monkeypatch.setattr(console, "CONSOLE", Console(width=80, file=sys.stdout))
    summary = {head: [Cell("100")] * len(GROUP_TITLES) for head in summary_sheet([], [])}
    summary["table"] = [Cell(max(TABLES, key=len))] * len(GROUP_TITLES)
    summary["tasks"] = [Cell(title) for title in GROUP_TITLES.values()]
    summary |= {head: [Cell(text)] * len(GROUP_TITLES) for head, text in (("tau", "-0.33"), ("p", "0.0025"))}
    console.show_sheet("all", brief_summary_sheet(summary))
    title, _, heads, _, *lines, _ = capsys.readouterr().out.splitlines()
    assert title == "all" and max(map(len, (heads, *lines))) <= 80
    assert {"tau", "p", "confirmed", "contradicted"} <= {*heads.split()} and len(lines) == len(GROUP_TITLES)
    assert all("-0.33  0.0025  100 of 100" in line for line in lines)


def test_a_report_on_settings_given_by_hand_reads_the_runs_that_had_them(tmp_path):
    overrides = {"model.mlp.d_ff": 200}
    finish(tmp_path, NAMES[0], 0, 12.5)
    finish(tmp_path, NAMES[0], 0, 37.5, **overrides)
    made = report.write_report(RATES, "nano", tmp_path, overrides=overrides)
    text = made.path.read_text("utf-8")
    assert ("37.50" in text, "12.50" in text, "`model.mlp.d_ff=200`" in text) == (True, False, True)
    assert made.path.parent.name == "t5-6-corruption-rate,model.mlp.d_ff=200"


def test_runs_with_settings_given_by_hand_stand_beside_plain_ones_in_one_report(tmp_path, capsys):
    known = dict(REGISTRY)
    for name in (NAMES[0], NAMES[1]):
        for seed in (0, 1):
            finish(tmp_path, name, seed, 40.0 + seed)
            finish(tmp_path, name, seed, 50.0 + seed, **{"model.mlp.d_ff": 64, "tuning.branches": (0.5, 1.0)})
    finish(tmp_path, NAMES[1], 0, 60.0, **{"objective.rate": 0.5})
    command = ["report", "t5/6-corruption-rate", "--runs", str(tmp_path), "--variants"]
    assert dispatch(command) == 0
    said = capsys.readouterr().out
    text = (tmp_path / "nano/reports/t5-6-corruption-rate/report.md").read_text()
    for name in (NAMES[0], NAMES[1]):
        assert f"| {REGISTRY[name].label}, mlp.d\\_ff=64, branches=0.5 1.0 |" in text
    assert "50.50" in text and "40.50" in text and "60.00" not in text
    assert "has the settings of t5/6-corruption-rate/50, under which it is not counted" in said
    assert REGISTRY == known
    assert dispatch([*command, "--model.mlp.d_ff", "64"]) == 2


def test_settings_given_by_hand_are_compared_with_one_another_if_the_baseline_was_not_run(tmp_path):
    table = TABLES["t5/1-baseline"]
    for score, text in ((40.0, "text:a"), (50.0, "text:b")):
        finish(tmp_path, table.baseline, 0, score, **{"data.corpus": text})
    (extended,) = with_override_rows([table], "nano", (str(tmp_path),), pytest.fail)
    assert extended.baseline == extended.rows[1].name != table.baseline
    finish(tmp_path, table.baseline, 0, 30.0)
    (extended,) = with_override_rows([table], "nano", (str(tmp_path),), pytest.fail)
    assert extended.baseline == table.baseline


def test_two_settings_given_by_hand_never_read_alike_in_a_report(tmp_path):
    paths = [path for path, _ in leaves(BASELINE)]
    assert len({short_name(path) for path in paths}) == len(paths)
    finish(tmp_path, NAMES[0], 0, 40.0)
    for score, phase in ((50.0, "pretraining"), (60.0, "finetuning")):
        finish(tmp_path, NAMES[0], 0, score, **{f"{phase}.optimizer.learning_rate": 0.02})
    assert dispatch(["report", "t5/6-corruption-rate", "--runs", str(tmp_path), "--variants"]) == 0
    text = (tmp_path / "nano/reports/t5-6-corruption-rate/report.md").read_text()
    for score, phase in (("50.00", "pretraining"), ("60.00", "finetuning")):
        assert re.search(rf", {phase}\.optimizer\.learning\\_rate=0\.02[ ≠]*\| {score}", text), text


def test_runs_that_started_from_a_checkpoint_are_rows_of_its_name(tmp_path, capsys):
    start = {"start.model": "t5-0123", "model.d_model": 32, "pretraining.steps": 0, "start.steps": 0}
    finish(tmp_path, NAMES[0], 0, 40.0)
    finish(tmp_path, NAMES[0], 0, 50.0, **start_changes(build(NAMES[0], "nano", start)))
    assert dispatch(["report", "t5/6-corruption-rate", "--runs", str(tmp_path), "--variants"]) == 0
    assert "other settings" not in capsys.readouterr().out
    text = (tmp_path / "nano/reports/t5-6-corruption-rate/report.md").read_text()
    assert re.search(r", start=t5-0123[ ≠]*\| 50\.", text)


def test_the_command_that_trains_missing_runs_has_the_settings_given(tmp_path):
    with pytest.raises(
        SettingError, match="sweep t5/6-corruption-rate --scale nano --data.corpus text:book.txt"
    ):
        report.write_report(
            tables_of(find("t5/6-corruption-rate")),
            "nano",
            tmp_path,
            overrides={"data.corpus": "text:book.txt"},
        )


def test_the_tables_of_latex_are_narrow_and_say_their_units_seeds_and_what_is_bold(tmp_path, capsys):
    study(tmp_path, seeds=4)
    assert dispatch(["report", "t5/6-corruption-rate", "--runs", str(tmp_path), "--latex"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "±: standard deviation over seeds" in said and "report.tex" in said and "report.bib" in said
    folder = tmp_path / "nano/reports/t5-6-corruption-rate"
    text = (folder / "report.tex").read_text()
    assert re.fullmatch(r"[\x00-\x7f]*", text), "LaTeX has these signs by their names"
    labels = re.findall(r"\\label\{tab:t5-6-corruption-rate(.*?)\}", text)
    assert labels == ["", "-tasks", "-order", "-claims"], "at equal FLOP no claim is compared"
    tables = dict(zip(labels, text.split(r"\begin{table}")[1:], strict=True))
    for label, table in tables.items():
        heads, *rows = (line for line in table.split("\n") if "&" in line)
        assert {line.count("&") for line in (heads, *rows)} == {
            table.partition("{tabular}{")[2].index("}") - 1
        }
        assert max(map(len, rows)) < 100, label
        assert re.search(r"[^$]-\d", re.sub(r"\\(?:label|texttt)\{.*?\}", "", table)) is None, (
            "a minus is $-$"
        )
    caption = tables[""].partition(r"\label")[0]
    assert "4 seeds per row" in caption and "in standard deviations of a run" in caption
    assert r"\cite{raffel2020}" in caption and r"$\pm$: standard deviation over seeds" in caption
    for table in tables.values():
        assert (r"\textbf" in table) == ("Bold: " in table), "what is bold is said, and nothing else"
    assert r"15\% $>$ 50\% & +" in tables["-claims"] and "& confirmed" in tables["-claims"]
    assert re.search(r"\d\.\d+~\$\\pm\$~\d", tables["-tasks"]), "scores in their own unit, with deviations"
    assert "@misc{raffel2020," in (bib := (folder / "report.bib").read_text())
    assert "author = {Colin Raffel and Noam Shazeer and" in bib
    assert "Exploring the Limits of Transfer Learning" in bib


def test_tables_of_latex_name_rows_by_their_labels_and_print_the_baseline_that_captions_name(tmp_path):
    (table,) = tables_of(find("t5/4-objective"))
    for place, name in enumerate((table.baseline, *(row.name for row in table.rows))):
        for seed in (0, 1):
            finish(tmp_path, name, seed, 90.0 - 10 * place - seed)
    made = report.write_report([table], "nano", tmp_path)
    text = report.write_latex(made, "nano", {"data.seed": 3})[0].read_text()
    scores, _tasks, _order, claims, *_ = text.split(r"\begin{table}")[1:]
    assert "distance from the baseline (Baseline average) over" in scores
    labels = [line.partition(" & ")[0] for line in scores.splitlines() if line.endswith(r"\\")]
    assert labels == ["Baseline average", *(row.label for row in table.rows[:-1])]
    assert r"BERT-style (Devlin et al., 2018) $>$ Deshuffling & +" in claims
    assert not any(row.key in claims for row in table.rows)
    assert all("scale nano; in every row data.seed=3)" in each for each in (scores, claims))


def test_a_table_of_latex_leaves_out_rows_without_runs_and_says_how_many_seeds_the_others_have(tmp_path):
    finish(tmp_path, NAMES[0], 0, 40.0)
    for seed in (0, 1):
        finish(tmp_path, NAMES[1], seed, 41.0 + seed)
    made, _ = written(tmp_path)
    text = report.write_latex(made, "nano")[0].read_text()
    assert r"10\%" in text and r"25\%" not in text
    assert "1 to 2 seeds per row" in text and text.count("& seeds ") == 1


def test_where_no_run_has_finished_those_with_settings_of_ones_own_are_named(tmp_path, capsys):
    command = ["report", "t5/6-corruption-rate", "--runs", str(tmp_path)]
    for finished in (False, True):
        if finished:
            folder = row_folder(tmp_path, "nano", NAMES[0], {"model.dropout": 0.3}) / "seed-0"
            folder.mkdir(parents=True)
            (folder / "scores.json").touch()
        assert dispatch(command) == 2
        assert ("give the same settings" in capsys.readouterr().err) == finished


def test_nobody_is_told_a_time_left_before_there_is_one():
    with progress.reporting(10) as reporter:
        (task,) = reporter._bar.tasks
        reporter.start("pre-training", "preparing data, compiling")
        assert (task.fields["left"], task.fields["detail"]) == ("", "preparing data, compiling")
        reporter.advance(1, "loss 3.2")
        assert task.fields["left"] == ""
        reporter.first_step_done(1.0)
        reporter.advance(1, "loss 3.1")
        assert task.fields["left"].startswith("ETA ") and task.fields["detail"] == "loss 3.1"


def test_the_newest_loss_stays_beside_a_bar_until_the_next_and_startup_words_until_the_first_step():
    with progress.reporting(20) as whole:
        for reporter in (whole, progress.JobReporter(whole, "a run", 20)):
            task = next(task for task in whole._bar.tasks if task.id == reporter._task)
            for phase in ("pre-training", "fine-tuning"):
                reporter.start(phase, "preparing data, compiling")
                reporter.advance(0)  # as a stage reports the steps done before
                assert task.fields["detail"] == "preparing data, compiling"
                reporter.first_step_done(1.0)
                assert task.fields["detail"] == ""
                reporter.advance(0, "loss 3.2")
                reporter.advance(1)
                assert task.fields["detail"] == "loss 3.2"
                reporter.advance(0, "loss 3.1")
                assert task.fields["detail"] == "loss 3.1"


def test_at_80_columns_a_long_name_is_cut_and_no_figure(monkeypatch):
    terminal = partial(progress.Console, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", terminal)
    with progress.reporting(9_000) as reporter:
        run = progress.JobReporter(reporter, "a-row-of-a-table seed 10", 9_000)
        run.start("fine-tuning on documentation-reading")
        run.first_step_done(1.0)
        run._since -= 9.0
        run.advance(1, "held-out loss 3.456")
        with reporter.console.capture() as capture:
            reporter.console.print(reporter._bar.get_renderable())
    (line,) = (line for line in capture.get().splitlines() if "a-row-of-a-table seed 10" in line)
    assert "…" in line and line.count("…") == 1
    assert "0%" in line and "ETA 22 h 2" in line and "held-out loss 3.456" in line


def test_a_log_has_a_line_for_each_tenth_of_a_run_and_none_for_those_of_a_sweep(capsys):
    with progress.reporting(40) as whole:
        for reporter in (whole, progress.JobReporter(whole, "a run", 40)):
            reporter.first_step_done(1.0)
            for _ in range(10):
                reporter.advance(1)
                reporter.advance(0, "loss 3.2")
    first, *lines = capsys.readouterr().out.splitlines()
    assert "first step" in first
    assert lines == ["10 % of all steps: loss 3.2, ETA 0 s", "20 % of all steps: loss 3.2, ETA 0 s"]


def test_of_several_runs_at_once_the_line_on_the_first_step_names_the_run(monkeypatch):
    said = []
    monkeypatch.setattr(progress.Reporter, "say", lambda self, line: said.append(line))
    with progress.reporting(10) as reporter:
        for name in ("base seed 0", "llama seed 1"):
            progress.JobReporter(reporter, name, 5).first_step_done(1.0)
    assert len(said) == 1 and said[0].startswith("base seed 0: first step ")


def test_a_line_says_which_phase_of_which_run_resumed_also_from_another_process(monkeypatch):
    said = []
    monkeypatch.setattr(progress.Reporter, "say", lambda self, line: said.append(line))
    with progress.reporting(9_000) as reporter:
        job = progress.JobReporter(reporter, "base seed 0", 3_000)
        for each in (reporter, job, progress.RemoteReporter(job.repeat)):
            each.resumed("pre-training", 1_167, 3_000)
    line = "pre-training resumed at step 1,167 of 3,000"
    assert said == [line, *[f"base seed 0: {line}"] * 2]


def test_a_report_says_how_far_its_order_predicts_that_of_another(tmp_path, capsys):
    runs = study(tmp_path, seeds=3)
    assert dispatch(["report", "t5/6-corruption-rate", "--runs", str(runs)]) == 0
    results = runs / "nano/reports/t5-6-corruption-rate/results.json"
    other = runs / "other.json"
    other.write_bytes(results.read_bytes())
    command = ["report", "t5/6-corruption-rate", "--runs", str(runs)]
    assert dispatch([*command, "--against", str(other)]) == 0
    assert "decision accuracy" in capsys.readouterr().out
    data = parse_with_checksum(results.read_bytes(), results)
    prediction = data["prediction"]["tables"][RATES[0].name]["reading"]
    assert (prediction["decision accuracy"], prediction["tau"], len(prediction["rows"])) == (1, 1, 4)
    assert "--against" in data["command"]
    assert dispatch([*command, "--against", "nan"]) == 2
    assert "--against nan should be a scale" in capsys.readouterr().err


def test_runs_of_the_other_scale_that_do_not_count_are_named_in_the_report(tmp_path):
    runs = study(tmp_path)
    for name in NAMES[:2]:
        folder = run_folder(runs, "mini", name, 0, {})
        save_settings(folder, build(name, "mini", {"seed": 0}))
        write_result(folder, {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9})
    (folder / "scores.json").write_text("{}")
    made, text = written(runs, against="mini")
    (line,) = made.left_out
    assert str(folder) in line
    assert str(folder) in text.partition("Not counted:")[2].partition("##")[0]
    assert str(folder) in made.path.with_suffix(".html").read_text()


def test_a_scale_without_runs_names_the_scales_that_have_them(tmp_path, capsys):
    finish(tmp_path, NAMES[0], 0, 50.0)
    assert dispatch(["report", "t5/6-corruption-rate", "--scale", "mini", "--runs", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "scale nano has finished runs: add --scale nano" in said


@pytest.mark.parametrize("given", [[], ["--model.dropout", "0.3"]], ids=["plain", "with settings"])
def test_no_scale_is_recommended_at_which_the_same_command_finds_nothing(given, tmp_path, capsys):
    damaged = finish(tmp_path, NAMES[0], 0, 50.0) / "scores.json"
    if not given:
        damaged.write_text(damaged.read_text().replace("50.0", "51.0"))
    for scale in ("nano", "mini"):
        command = ["report", "t5/6-corruption-rate", "--scale", scale, "--runs", str(tmp_path), *given]
        assert dispatch(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert ("add --scale nano" in said) == (scale == "mini" and not given)
        assert ("runs without these settings have finished at scale nano" in said) == bool(given)


def test_the_ending_of_a_run_imports_nothing_of_reports():
    code = "import sys, experiments.cli.run_summary; "
    code += "print(*[name for name in sys.modules if name.startswith('experiments.report')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_setup_of_a_baseline_is_told_with_the_settings_given_by_hand():
    name = "t5/1-baseline/baseline"
    for changed, said in (
        ({"pretraining.steps": 7, "tuning.heads": ()}, "for 7 steps of 32 texts"),
        ({"pretraining.steps": 0}, "width 64, not pre-trained here, then fine-tuned for 150 steps"),
        ({}, "for 300 steps of 32 texts"),
    ):
        assert said in report.baseline_setup(name, build(name, "nano", changed))


def test_the_header_has_the_shape_and_the_steps_of_the_checkpoint_that_runs_started_from(tmp_path):
    start = {"start.model": "t5-0123", "model.d_model": 32, "pretraining.steps": 0, "start.steps": 0}
    overrides = start_changes(build(NAMES[0], "nano", start))
    finish(tmp_path, NAMES[0], 0, 50.0, **overrides)
    header = written(tmp_path, overrides=overrides)[1].partition("\n## ")[0]
    assert "layers of width 32, not pre-trained here" in header and "300 steps" not in header


def test_a_perplexity_that_is_no_float_is_shown_as_infinite_and_its_report_is_written(
    restored_registry, tmp_path
):
    add_table(make_table("own", "", {"base": GPT | NO_TASKS}))
    likelihood = {"step": 9, "seconds": 1.0, "nats": 2e3, "tokens": 600, "words": 2, "bytes": 1800}
    for seed in (0, 1):
        folder = run_folder(tmp_path, "nano", "own/base", seed, {})
        save_settings(folder, build("own/base", "nano", {"seed": seed}))
        values = {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9}
        write_result(folder, values | {"likelihoods": [likelihood]})
    scores = report.write_report(tables_of(find("own")), "nano", tmp_path).tables["own"].sheets[""]
    assert scores["word perplexity"][0].text == "inf"


def test_perplexities_of_longer_texts_are_in_the_order_of_their_lengths(restored_registry, tmp_path):
    rows = {"base": GPT | NO_TASKS, "wide": GPT | NO_TASKS | {"model.mlp.d_ff": 512}}
    add_table(make_table("own", "", rows))
    for key, losses in (("base", {"4": 3.0}), ("wide", {"2": 3.0, "4": 3.0})):
        folder = run_folder(tmp_path, "nano", f"own/{key}", 0, {})
        save_settings(folder, build(f"own/{key}", "nano", {"seed": 0}))
        values = {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9}
        write_result(folder, values | {"length_losses": losses})
    scores = report.write_report(tables_of(find("own")), "nano", tmp_path).tables["own"].sheets[""]
    assert [head for head in scores if head.startswith("perplexity")] == [
        "perplexity at 2 ×",
        "perplexity at 4 ×",
    ]


def test_names_of_files_and_rows_in_notes_are_no_markup_of_the_page(tmp_path):
    study(tmp_path)
    phase = run_folder(tmp_path, "nano", NAMES[2], 1, {}) / "finetuning" / "cloze"
    provenance.record(phase, RECORD | {"code": RECORD["code"] | {"lm/nn/__init__.py": "2"}})
    page = written(tmp_path)[0].path.with_suffix(".html").read_text()
    assert "lm/nn/__init__.py none -&gt; 2" in page


def test_a_score_that_is_undefined_is_named_once_though_rows_share_its_run(tmp_path):
    folder = finish(tmp_path, "t5/1-baseline/baseline", 0, 50.0)  # also t5/6-corruption-rate/15
    finish(tmp_path, NAMES[0], 0, 50.0)
    scores = parse_with_checksum((folder / "scores.json").read_bytes(), "scores.json")
    task = {"score": None, "metrics": {"em": None}, "undefined": {"score": "alike", "em": "alike"}}
    rescore(folder, columns={"SQuAD": None}, tasks={"cloze": scores["tasks"]["cloze"] | task})
    assert written(tmp_path)[1].count("SQuAD is undefined (cloze: alike)") == 1


def test_one_seed_of_a_row_and_of_a_baseline_in_another_table_decides_nothing(restored_registry, tmp_path):
    add_table(make_table("first", "", {"base": GPT | NO_TASKS}))
    wide = GPT | NO_TASKS | {"model.mlp.d_ff": 512}
    add_table(make_table("second", "", {"wide": wide}, baseline="first/base"))
    for name in ("first/base", "second/wide"):
        folder = run_folder(tmp_path, "nano", name, 0, {})
        save_settings(folder, build(name, "nano", {"seed": 0}))
        write_result(folder, {"columns": {}, "tasks": {}, "held_out_loss": 3.0, "seconds": 1.0, "tokens": 9})
    table = report.write_report(tables_of(find("second")), "nano", tmp_path).tables["second"]
    said = verdict_sentence(table.comparison, table.verdicts)
    assert said == "One seed decides nothing: train more with --seeds."


def test_two_rows_of_one_label_are_not_named_by_the_key_or_the_sign_of_one_of_them(
    restored_registry, tmp_path
):
    given = of_a_paper() | {"conclusions": (Conclusion("better", "base", "more is better"),)}
    same = {key: Published("as printed", {"PPL": LOSSES[key]}) for key in ("better", "worse")}
    made = without_tasks(tmp_path, **given | {"published": same})
    assert "| as printed |" in made.path.read_text() and "as printed (better)" not in made.path.read_text()
    comparison = made.tables["own"].comparison
    comparison.mismatches = {"own/worse": [Mismatch("own/worse", 0, "other code")]}
    shown = [cell.text for cell in scores_sheet(comparison)["row"]]
    assert shown == ["base", "as printed", "as printed ≠", "same", "masked"]


def test_rows_of_one_label_each_have_a_curve_and_a_published_score(restored_registry, tmp_path):
    paper = of_a_paper(std=0.1, held_out=True)
    same = {key: Published("as printed", {"PPL": LOSSES[key]}) for key in ("better", "worse")}
    published = {"base": Published("base", {"PPL": LOSSES["base"]})} | same
    comparison = without_tasks(tmp_path, **paper | {"published": published}).tables["own"].comparison
    for runs in comparison.runs.values():
        runs[:] = [replace(run, length_losses={"1": 3.0, "2": 3.5}) for run in runs]
    figures = table_figures(comparison, dict.fromkeys(comparison.canonical_names, {}))
    labels = ["base", "as printed (better)", "as printed (worse)", "same", "masked"]
    assert [*figures["own-lengths"].panels[0].curves] == labels
    scores = figures["own"].panels[-2:]  # the mean z-score and the column of the paper
    assert [[*panel.curves[""].x] for panel in scores] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("score", "sign"), [(2.192, ""), (2.193, "▼")])
def test_a_published_score_has_a_sign_if_it_is_more_than_two_deviations_from_the_baselines(
    restored_registry, tmp_path, score, sign
):
    """2.192 - 2.182 is two deviations, and above 0.01 only by rounding."""
    given = of_a_paper(std=0.005, held_out=True)
    scores = {"base": 2.182, "worse": score}
    published = {key: Published(key, {"PPL": score}) for key, score in scores.items()}
    comparison = without_tasks(tmp_path, **given | {"published": published}).tables["own"].comparison
    cells = scores_sheet(comparison)["paper's PPL"]
    assert [cell.text.split() for cell in cells[:3]] == [["2.182"], ["–"], f"{score} {sign}".split()]
    assert [cell.bold for cell in cells[:3]] == [True, False, not sign]


def test_a_table_of_any_name_and_title_has_its_pictures_in_the_page(restored_registry, tmp_path):
    add_table(make_table("own:50%", "Scores [of 100]", {"base": {}, "50": {"objective.rate": 0.5}}))
    for name in ("own:50%/base", "own:50%/50"):
        finish(tmp_path, name, 0, 50.0)
    made = report.write_report(tables_of(find("own:50%")), "nano", tmp_path)
    page = made.path.with_suffix(".html").read_text()
    assert page.count('<img src="data:image/png;base64,') == len(made.tables["own:50%"].figures) > 0


def test_a_scale_that_is_none_is_refused_before_any_run_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "compare_tables", lambda *given: pytest.fail("runs are read"))
    with pytest.raises(SettingError, match="--against nani should be a scale .*nano"):
        report.write_report(RATES, "nano", tmp_path, against="nani")


@pytest.mark.parametrize(
    "tables", [[], 3, {"t": {}}, {"t": {"rows": 3}}, {"t": {"rows": {"t/a": {"seeds": {}}}}}]
)
def test_a_file_that_is_no_results_json_of_this_version_is_refused_by_its_name(tmp_path, tables):
    path = tmp_path / "other.json"
    path.write_text(json_with_checksum({"tables": tables}))
    for read in (read_combined_scores, lambda path: ClaimsFigure(results=path).claims()):
        with pytest.raises(SettingError, match=r"other\.json should be the results\.json of a report"):
            read(path)


def test_the_command_that_trains_missing_runs_is_said_to_be_of_one_table_of_several(tmp_path):
    with pytest.raises(SettingError, match="train the first table with lm sweep t5/6-corruption-rate -"):
        report.write_report([*RATES, *tables_of(find("t5/8-*"))], "nano", tmp_path)


def test_rows_of_equal_scores_have_no_tau(tmp_path):
    tied = scale_prediction({"a": {0: 1.0}, "b": {0: 1.0}}, {"a": {0: 1.0}, "b": {0: 2.0}})
    assert prediction_sheet({"own": {"reading": tied}})["tau"] == [Cell()]


def test_brackets_in_labels_and_conclusions_are_no_markup_of_the_terminal(
    restored_registry, tmp_path, capsys
):
    conclusions = (Conclusion("better", "base", "a [mask] is better"),)
    labels = {"base": Published("as printed [/x]", {}), "masked": Published("sees [all]", {})}
    given = of_a_paper() | {"conclusions": conclusions, "published": labels, "columns": ()}
    without_tasks(tmp_path, **given)
    report.print_report(tables_of(find("own")), "nano", [str(tmp_path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "a [mask] is better" in printed
    assert "Not comparable in held-out loss with as printed [/x]" in printed and ": sees [all]." in printed


def test_an_interruption_of_a_watched_report_whose_page_was_deleted_ends_it_without_an_error(
    tmp_path, monkeypatch
):
    said, page = [], study(tmp_path) / "nano/reports/t5-6-corruption-rate/report.html"

    def sleep(seconds):
        page.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    report.watch(RATES, "nano", tmp_path, said.append)
    assert said[-1] == "no longer watching"


def test_a_run_of_two_codes_is_not_what_it_is_compared_with():
    def stage(run: str, code: str) -> Ingredient:
        return Ingredient(run, Path(run), ("other code",), {"lm/nn/mlp.py": code})

    mixed = [stage("a", "new"), stage("a", "old")]
    usual = results._most_common([*mixed, stage("b", "new"), stage("c", "new")])["other code",]
    assert (usual.run, usual.value) == ("b", {"lm/nn/mlp.py": "new"})
    assert results._most_common(mixed)["other code",].run == "a"
