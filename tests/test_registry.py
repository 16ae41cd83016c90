"""The registry: every row at every scale is buildable, is the diff it claims to be, and carries the paper's scores."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import __main__ as cli
from experiments import classic, registry
from experiments.experiment import BASELINE, Experiment
from experiments.registry import REGISTRY, baseline_of, build, find, find_one, twin
from experiments.scales import SCALES
from experiments.t5.tables import COLUMNS, TABLES
from lm.config import SettingError, change, comments, diff, from_json, leaves, to_json

PAPER = Path(__file__).parents[1].parent / "shared" / "t5" / "tables.json"


def test_at_scale_base_the_baseline_is_the_papers_setup():
    e = build("t5/1-baseline/baseline", "base")
    assert e == change(BASELINE, "model.dtype", "bfloat16")
    assert (e.pretraining.steps, e.finetuning.steps) == (2**19, 2**18)
    assert e.pretraining.batch_size * e.data.inputs_length == 2**16
    assert (e.objective.noise, e.objective.rate, e.data.vocabulary_size, e.data.sentinels) == ("iid", 0.15, 32_000, 100)
    assert (e.finetuning.optimizer.learning_rate, len(e.tuning.mixtures)) == (0.001, 7)


@pytest.mark.parametrize("scale", SCALES)
def test_no_two_rows_of_a_table_are_equal(scale):
    for table in registry.TABLES:
        built = [build(row.name, scale) for row in table.rows]
        assert len(set(built)) == len(built), table.name


@pytest.mark.parametrize("table", classic.TABLES, ids=lambda table: table.name)
def test_a_row_of_a_classic_table_differs_from_the_first_in_a_handful_of_settings(table):
    built = [build(row.name, "nano") for row in table.rows]
    for row, experiment in zip(table.rows[1:], built[1:], strict=True):
        assert baseline_of(row.name) == table.rows[0].name
        assert 1 <= len(diff(built[0], experiment)) <= 8, row.name


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_differs_from_the_baseline_in_what_its_line_names_and_in_nothing_else(scale):
    for row in (row for table in TABLES for row in table.rows):
        changed = diff(build("t5/1-baseline/baseline", scale), build(row.name, scale))
        for path in changed:
            assert any(path == named or path.startswith(f"{named}.") for named in row.changes), (row.name, path)
        assert bool(changed) == bool(row.changes)


def test_every_row_has_the_papers_seven_scores():
    for row in (row for table in TABLES for row in table.rows):
        assert set(row.paper) == set(COLUMNS)
        assert all(0 < score < 100 for score in row.paper.values())


@pytest.mark.skipif(not PAPER.exists(), reason="needs ../shared")
def test_scores_equal_the_papers_tables():
    tables = json.loads(PAPER.read_text())["tables"]
    for table in TABLES:
        number = table.name.split("/")[1].split("-")[0]
        theirs = [row["scores"] for row in tables[f"table_{number}"]["rows"] if not row["id"].endswith("_std")]
        assert [dict(row.paper) for row in table.rows] == theirs


def test_settings_survive_json_and_each_has_a_meaning():
    for row in REGISTRY.values():
        experiment = build(row.name, "nano")
        assert from_json(Experiment, to_json(experiment)) == experiment
    assert {path for path, _ in leaves(BASELINE)} == set(comments(Experiment))


def test_equal_rows_of_different_tables_share_one_run():
    assert twin("t5/6-corruption-rate/15") == twin("t5/5-bert-style/replace-spans") == "t5/1-baseline/baseline"
    assert twin("t5/6-corruption-rate/10") == "t5/6-corruption-rate/10"


def test_an_unknown_row_table_or_scale_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="did you mean 't5/6-corruption-rate/15'"):
        find_one("t5/6-corruption-rate/16")
    with pytest.raises(SettingError, match="did you mean 't5/6-corruption-rate'"):
        find("t5/6-coruption-rate")
    with pytest.raises(SettingError, match="did you mean 'nano'"):
        build("t5/1-baseline/baseline", "nanno")


@pytest.mark.parametrize("given", [["--scale", "base", "--scale", "nano"], ["--scale=mini", "--scale", "nano"]])
def test_of_an_option_given_twice_the_last_counts_for_every_setting(given, monkeypatch):
    name, asked = "t5/6-corruption-rate/50", []
    monkeypatch.setattr("experiments.sweep.run_row", lambda *all: asked.append(all))
    assert cli.dispatch(["run", name, *given]) == 0
    assert asked[0][1:3] == ("nano", build(name, "nano"))


@pytest.mark.parametrize("arguments", [["run"], ["run", "--scale"], ["run", "t5/1-baseline/baseline", "--scale"]])
def test_what_is_missing_on_the_command_line_is_said(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.dispatch(arguments)
    assert stopped.value.code == 2 and "lm run --help" in capsys.readouterr().err


def test_the_help_names_every_scale(capsys):
    assert cli.dispatch([]) == 0
    told = capsys.readouterr().out
    assert all(f" {scale} (" in told for scale in SCALES)


@pytest.mark.parametrize("encoding", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}])
def test_a_terminal_that_knows_ascii_alone_is_shown_ascii(encoding):
    command = [sys.executable, "-m", "experiments", "diff", "t5/6-corruption-rate/50"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | encoding | {"PYTHONCOERCECLOCALE": "0"}
    )
    assert (ran.stdout, ran.returncode) == ("objective.rate: 0.15 -> 0.5\n", 0), ran.stderr
