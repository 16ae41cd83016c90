"""The registry: every row at every scale is buildable, is the diff it claims to be, and carries the paper's
scores.
"""

import json
import os
import pickle
import re
import subprocess
import sys
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
from golden import make_setting_paths, make_study
from paths import SHARED
from rich.console import Console
from variants import with_quick

from experiments import __main__ as cli
from experiments.cli import COMMANDS
from experiments.cli.list_rows import finished_text, list_rows
from experiments.cli.run_options import Options, link_shared_run, row_run
from experiments.cli.sweep import train_rows
from experiments.processes.progress import duration, reporting
from experiments.runs.checks import check_agreement
from experiments.runs.kinds.network import model_parameters
from experiments.runs.stages import stages
from experiments.study import classic, registry
from experiments.study.changes import after_pretraining, apply, at_least, followed_by, share_of, times
from experiments.study.experiment import BASELINE, Experiment, PretrainingPhase
from experiments.study.papers.t5 import PAPER, TABLES
from experiments.study.paths import run_folder
from experiments.study.registry import (
    REGISTRY,
    baseline_of,
    build,
    canonical_row,
    check_row,
    equal_rows_among,
    find,
    find_one,
    own_changes,
)
from experiments.study.scales import SCALES
from experiments.study.settings_diff import relevant_diff
from experiments.study.table import Row, make_table, missing
from lm.config.base import SettingError, change, diff, from_json, leaves, setting_descriptions, to_json
from lm.nn.presets import PRESETS
from lm.objectives.denoising import OBJECTIVES

PRINTED = SHARED / "t5" / "tables.json"


def test_at_scale_base_the_baseline_is_the_papers_setup():
    e = build("t5/1-baseline/baseline", "base")
    assert e == change(BASELINE, "model.dtype", "bfloat16")
    assert (e.pretraining.steps, e.finetuning.steps) == (2**19, 2**18)
    assert e.pretraining.batch_size * e.data.inputs_length == 2**16
    assert (e.objective.noise, e.objective.rate, e.data.vocabulary_size, e.data.sentinels) == (
        "iid",
        0.15,
        32_000,
        100,
    )
    assert (e.finetuning.optimizer.learning_rate, len(e.tuning.mixtures)) == (0.001, 7)


@cache
def rows_at(scale):
    """``{row: its experiment}`` of all rows that can be built."""
    return {name: build(name, scale) for name, row in REGISTRY.items() if not row.needs}


@pytest.mark.parametrize("scale", SCALES)
def test_no_two_rows_of_a_table_are_equal(scale):
    """Shapes of one paper are equal where their shares of few layers are (test_papers)."""
    for table in registry.TABLES.values():
        built = [rows_at(scale)[row.name] for row in table.rows if not row.needs]
        assert len(set(built)) == len(built) or table.name == "tay/released-shapes", table.name


@pytest.mark.parametrize("scale", with_quick(("nano", "mini", "base"), SCALES))
def test_the_settings_of_every_row_agree(scale):
    """The corpus is prepared only after this check, which takes minutes the first time."""
    for experiment in rows_at(scale).values():
        check_agreement(experiment)


BERT_SIZES = ("tiny", "mini", "small", "medium", "base", "large")


@pytest.mark.parametrize("row", BERT_SIZES)
def test_at_scale_base_the_sizes_of_bert_are_the_published_ones(row):
    found, due = build(f"bert-sizes/{row}", "base").model, PRESETS[f"bert-{row}"]
    for size in ("num_encoder_layers", "d_model", "mlp.d_ff", "attention.num_heads", "attention.d_kv"):
        assert attrgetter(size)(found) == attrgetter(size)(due), size


@pytest.mark.parametrize("scale", SCALES)
def test_each_size_of_bert_has_more_parameters_than_the_smaller_ones_at_every_scale(scale):
    parameters = [model_parameters(build(f"bert-sizes/{row}", scale).model) for row in BERT_SIZES]
    assert parameters == sorted(set(parameters))


def test_changes_that_follow_replace_a_whole_group():
    masked = {"objective": OBJECTIVES["masked-lm"], "objective.rate": 0.4, "model.mlp.d_ff": 64}
    causal = {"objective": OBJECTIVES["causal-lm"]}
    assert apply(BASELINE, followed_by(masked, causal)).objective == OBJECTIVES["causal-lm"]
    assert followed_by(masked, causal)["model.mlp.d_ff"] == 64
    assert followed_by(masked, {"objective.rate": 0.2}) == masked | {"objective.rate": 0.2}


@pytest.mark.parametrize("table", classic.TABLES, ids=lambda table: table.name)
def test_a_row_of_a_classic_table_differs_from_the_first_in_a_handful_of_settings(table):
    built = [build(row.name, "nano") for row in table.rows]
    for row, experiment in zip(table.rows[1:], built[1:], strict=True):
        assert baseline_of(row.name) == table.rows[0].name
        assert 1 <= len(diff(built[0], experiment)) <= 9, row.name


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_differs_from_the_baseline_in_what_its_line_names_and_in_nothing_else(scale):
    for row in (row for table in TABLES for row in table.rows):
        changed = diff(build("t5/1-baseline/baseline", scale), build(row.name, scale))
        for path in changed:
            assert any(path == named or path.startswith(f"{named}.") for named in row.changes), (
                row.name,
                path,
            )
        assert bool(changed) == bool(row.changes)


def test_every_row_has_the_papers_seven_scores():
    for row in (row for table in TABLES for row in table.rows):
        assert set(row.published) == {column.name for column in PAPER.columns}
        assert all(0 < score < 100 for score in row.published.values())


@pytest.mark.skipif(not PRINTED.exists(), reason="needs ../shared")
def test_scores_equal_the_papers_tables():
    tables = json.loads(PRINTED.read_text())["tables"]
    for table in TABLES:
        number = table.name.split("/")[1].split("-")[0]
        theirs = [
            row["scores"] for row in tables[f"table_{number}"]["rows"] if not row["id"].endswith("_std")
        ]
        assert [dict(row.published) for row in table.rows] == theirs


def test_settings_survive_json_and_each_has_a_meaning():
    for experiment in rows_at("nano").values():
        assert from_json(Experiment, to_json(experiment)) == experiment
    assert {path for path, _ in leaves(BASELINE)} == set(setting_descriptions(Experiment))


def test_a_type_checker_knows_every_setting_of_a_row_with_its_type():
    """Else: python tests/golden/make_setting_paths.py."""
    assert make_setting_paths.outdated() == []


def test_equal_rows_of_different_tables_share_one_run():
    shared = {
        canonical_row(name, "nano")
        for name in (
            "t5/6-corruption-rate/15",
            "t5/5-bert-style/replace-spans",
            "t5/2-architecture/encoder-decoder",
        )
    }
    assert shared == {"t5/1-baseline/baseline"}
    assert canonical_row("t5/6-corruption-rate/10", "nano") == "t5/6-corruption-rate/10"


def test_a_multiple_of_what_the_scale_has_compares_hashes_and_prints():
    assert times(2) == times(2) != times(3) and len({times(2), times(2), times(2, 8)}) == 2
    assert (str(times(2)), str(times(1 / 3, 8))) == ("x 2", "x 0.3333, up to a multiple of 8")
    assert times(2 / 3, rounding="down")(256, BASELINE) == 170 and times(2 / 3)(256, BASELINE) == 171


def test_a_least_number_raises_what_is_below_it_and_leaves_what_is_above():
    assert [at_least(2_400)(steps, BASELINE) for steps in (300, 2_400, 12_400)] == [2_400, 2_400, 12_400]
    assert at_least(2) == at_least(2) != at_least(3) and str(at_least(2_400)) == "at least 2,400"


def test_a_change_by_the_scale_is_listed_with_how_it_is_derived(capsys):
    assert cli.dispatch(["show", "t5/13-scaling/size-2-steps-2", "--diff"]) == 0
    assert "pretraining.steps: 300 → 600 (x 2)" in capsys.readouterr().out
    assert cli.dispatch(["show", "t5/8-data/wikipedia", "--diff"]) == 0
    shown = capsys.readouterr().out
    assert "data.vocabulary: unigram → unigram:documentation (trained on the baseline's corpus)" in shown


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_row_changes_compares_hashes_and_prints(name):
    changes = REGISTRY[name].changes
    again = pickle.loads(pickle.dumps({path: value for path, value in changes.items() if callable(value)}))
    assert all(changes[path] == value and hash(changes[path]) == hash(value) for path, value in again.items())
    assert " at 0x" not in f"{REGISTRY[name]}"


OWN = {
    "written-again": {"pretraining.steps": times(4), "finetuning.steps": lambda steps, experiment: 4 * steps},
    "numbers-of-nano": {"pretraining.steps": 1200, "finetuning.steps": 600},
    "other": {"pretraining.steps": times(4)},
}


@pytest.fixture
def own_rows(restored_registry):
    registry.add_table(make_table("own", "", OWN))


def test_rows_are_one_experiment_if_what_they_build_at_a_scale_is(own_rows):
    steps = "t5/13-scaling/steps"
    twins = {row: {scale: canonical_row(f"own/{row}", scale) for scale in ("nano", "mini")} for row in OWN}
    assert twins == {
        "written-again": {"nano": steps, "mini": steps},
        "numbers-of-nano": {"nano": steps, "mini": "own/numbers-of-nano"},
        "other": {"nano": "own/other", "mini": "own/other"},
    }


@pytest.mark.parametrize("published", [{}, {"PPL": 20.1}])
def test_a_row_that_cannot_be_built_says_that_its_scores_are_reported_only_if_there_are_some(published):
    row = Row("lacking/lacks", "lacks", {}, published, needs=("a part",))
    assert ("published scores" in registry.needs_text(row)) == bool(published)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.d_modle": 32}, "there is no setting 'model.d_modle'; did you mean 'model.d_model'?"),
        ({"model.d_model": share_of("model.d_fff", 1 / 4)}, "there is no setting 'model.d_fff'; did"),
        ({"pretraining.batch_size": 0}, "pretraining.batch_size=0 should be at least 1"),
    ],
)
def test_what_is_wrong_with_a_row_is_told_with_its_name_and_what_is_wrong_with_an_option_without(
    restored_registry, changes, message
):
    registry.add_table(make_table("own", "", {"first": {}, "wrong": changes}))
    with pytest.raises(SettingError, match=re.escape(f"row 'own/wrong': {message}")):
        build("own/wrong", "nano")
    build("own/first", "nano")
    if not any(map(callable, changes.values())):
        with pytest.raises(SettingError, match=f"^{re.escape(message)}"):
            build("own/first", "nano", changes)


def test_a_row_that_changes_what_nothing_reads_is_refused_by_its_name(restored_registry):
    registry.add_table(make_table("own", "", {"first": {}, "unread": {"model.mixer.window": 7}}))
    with pytest.raises(SettingError, match="^row 'own/unread': .*model.mixer.window"):
        check_row("own/unread", "nano")


def test_a_row_that_needs_what_is_lacking_equals_no_other(restored_registry):
    registry.add_table(make_table("lacking", "", {"first": {}, "lacks": missing("a part")}))
    rows = ["lacking/lacks", "lacking/first"]
    assert [*equal_rows_among("lacking/first", rows, "nano")] == ["lacking/first"]
    assert [*equal_rows_among("lacking/lacks", rows, "nano")] == []


def test_a_row_is_checked_whatever_the_rows_of_other_tables_are(restored_registry):
    registry.add_table(make_table("broken", "", {"first": {"model.mlp.d_ff": -1}}))
    failing = {"model.mlp.d_ff": lambda number, experiment: number // 0}
    registry.add_table(make_table("failing", "", {"first": failing}))
    registry.add_table(make_table("sound", "", {"base": {}, "wide": {"model.mlp.d_ff": times(2)}}))
    assert own_changes("sound/wide", "nano") == ["model.mlp.d_ff"]


def test_steps_that_come_first_are_no_change_of_pretraining_that_has_phases():
    first = {"pretraining.phases": (PretrainingPhase(0.5, OBJECTIVES["causal-lm"], "causal"),)}
    with pytest.raises(SettingError, match=r"pretraining\.phases=.* should be \(\)"):
        apply(apply(BASELINE, first), after_pretraining(2, None, None, "continue"))


def test_a_run_is_found_under_whichever_of_its_equal_rows_it_lies(own_rows, tmp_path):
    def folder():
        return run_folder(tmp_path, "nano", "own/written-again", 0, {}).relative_to(tmp_path / "nano")

    assert folder() == Path("t5/13-scaling/steps/seed-0"), "where it will lie"
    (tmp_path / "nano/own/numbers-of-nano/seed-0").mkdir(parents=True)
    assert folder() == Path("own/numbers-of-nano/seed-0")
    (tmp_path / "nano/t5/13-scaling/steps/seed-0").mkdir(parents=True)
    assert folder() == Path("t5/13-scaling/steps/seed-0")


def test_the_folder_called_as_a_row_leads_to_the_run_that_it_shares(own_rows, tmp_path):
    name, options = "own/written-again", Options(runs=tmp_path)
    run = row_run(name, build(name, "nano"), options)
    said = link_shared_run(run, options)
    assert str(tmp_path / "nano/t5/13-scaling/steps") in said
    folder = run_folder(tmp_path, "nano", name, 0, {})
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text("{}")
    assert (tmp_path / "nano/own/written-again/seed-0/settings.json").read_text() == "{}"
    assert link_shared_run(run, options) == said, "a link that is there stays"
    assert link_shared_run(row_run("t5/13-scaling/steps", build(name, "nano"), options), options) == ""
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    tmp_path.rename(moved)
    assert (moved / "nano/own/written-again/seed-0/settings.json").exists(), "it is relative"


def test_a_row_that_shares_a_run_has_its_link_although_the_sweep_is_interrupted(
    own_rows, tmp_path, monkeypatch
):
    def interrupt(*_: object) -> int:
        (tmp_path / "nano/t5/13-scaling/steps/seed-0").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.cli.sweep.train_unfinished", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_rows("own/written-again", 1, {}, Options(runs=tmp_path))
    assert (tmp_path / "nano/own/written-again/seed-0").is_dir()


def test_a_network_is_listed_without_settings_of_models_made_of_counts():
    listed = {
        row.name: relevant_diff(build("history/bigram", "nano"), build(row.name, "nano"))
        for row in find("history")
    }
    assert list(listed["history/transformer"]) == [
        "pretraining.optimizer.name",
        "pretraining.optimizer.learning_rate",
        "counts.model",
    ]
    assert list(listed["history/trigram"]) == ["counts.order"]
    named = {path for changed in listed.values() for path in changed}
    assert "counts.order" not in {path for name in listed if "gram" not in name for path in listed[name]}
    assert (
        "model.mixer.window" in listed["history/window"]
        and "model.mixer.window" not in listed["history/lstm"]
    )
    assert named <= {path for path, _ in leaves(BASELINE)}


def test_an_unknown_row_table_or_scale_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="'t5/6-corruption-rate/15'"):
        find_one("t5/6-corruption-rate/16")
    with pytest.raises(SettingError, match="'t5/6-corruption-rate'"):
        find("t5/6-coruption-rate")
    for name in ("t5", "t5/"):
        with pytest.raises(SettingError, match=r"did you mean 't5/\*'"):
            find(name)
    with pytest.raises(SettingError, match="'nano'"):
        build("t5/1-baseline/baseline", "nanno")


@pytest.mark.parametrize("text", ["10000", "10_000", "1e4"])
def test_whole_numbers_may_be_written_with_an_exponent(text, monkeypatch):
    asked = []
    monkeypatch.setattr("experiments.cli.run.train_row", lambda *all: asked.append(all[1]))
    given = [
        "--pretraining.steps",
        text,
        "--tuning.examples-limit",
        text,
        "--data.held-out-lengths",
        "1",
        "2e0",
    ]
    assert cli.dispatch(["run", "t5/1-baseline/baseline", *given]) == 0
    found = asked[0]
    assert (found.pretraining.steps, found.tuning.examples_limit, found.data.held_out_lengths) == (
        10_000,
        10_000,
        (1, 2),
    )


def test_a_sweep_takes_the_settings_that_a_run_takes_for_every_row_and_reports_those_runs(monkeypatch):
    wanted, reported = [], []
    monkeypatch.setattr("experiments.cli.sweep.train_unfinished", lambda runs, *_: wanted.extend(runs) or 0)
    monkeypatch.setattr("experiments.report.report.print_report", lambda *all: reported.append(all[3]))
    given = {"model.dropout": 0.1, "model.mlp.d_ff": 200}
    words = ["sweep", "t5/6-corruption-rate/10", "--scale", "nano", "--seeds", "1"]
    assert cli.dispatch([*words, "--model.dropout", "0.1", "--model.mlp.d-ff=2e2"]) == 0
    assert reported == [given]
    row, baseline = "t5/6-corruption-rate/10", "t5/1-baseline/baseline"
    assert {str(run.folder): run.experiment for run in wanted} == {
        f"runs/nano/{name},model.dropout=0.1,model.mlp.d_ff=200/seed-0": build(name, "nano", given)
        for name in (row, baseline)
    }
    assert cli.dispatch(["sweep", "t5/6-corruption-rate/10", "--seed", "3"]) == 2


@pytest.mark.parametrize(
    "given", [["--scale", "base", "--scale", "nano"], ["--scale=mini", "--scale", "nano"]]
)
def test_of_an_option_given_twice_the_last_counts_for_every_setting(given, monkeypatch):
    name, asked = "t5/6-corruption-rate/50", []
    monkeypatch.setattr("experiments.cli.run.train_row", lambda *all: asked.append(all))
    assert cli.dispatch(["run", name, *given]) == 0
    assert (asked[0][2].scale, asked[0][1]) == ("nano", build(name, "nano"))


def test_the_stages_of_a_run_are_listed_with_what_each_starts_from_and_what_is_saved(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("experiments.console.CONSOLE", Console(width=300))
    (stage,) = {
        stage for stage in stages(build("t5/1-baseline/baseline", "nano")) if stage.name == "pretraining"
    }
    (tmp_path / "nano" / stage.folder / "checkpoints" / "50").mkdir(parents=True)
    command = ["show", "t5/1-baseline/baseline", "--stages", "--runs", str(tmp_path)]
    assert cli.dispatch(command) == 0
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    assert [line[3:6] for line in lines if "pretraining" in line[1:2]] == [["start", "300", "50"]]
    assert [line[3:5] for line in lines if "start" in line[1:2]] == [["random parameters", "200"]]
    assert [line[1] for line in lines if "pretraining" in line[3:4]][:2] == [
        "documentation-reading",
        "documentation-language",
    ]


def test_settings_that_depend_on_each_other_change_in_any_order():
    pair = {"pretraining.save_every": 20, "pretraining.evaluate_every": 10}
    for new in (pair, dict(reversed(pair.items()))):
        training = build("t5/1-baseline/baseline", "nano", new).pretraining
        assert (training.save_every, training.evaluate_every) == (20, 10)
    with pytest.raises(SettingError, match="save_every=20.*evaluate_every=50"):
        build("t5/1-baseline/baseline", "nano", {"pretraining.save_every": 20})
    whole = {"objective.rate": 0.3, "objective": OBJECTIVES["prefix-lm"]}
    assert build("t5/1-baseline/baseline", "nano", whole).objective == OBJECTIVES["prefix-lm"]
    part = {"objective": OBJECTIVES["bert-style"], "objective.rate": 0.3}
    assert build("t5/1-baseline/baseline", "nano", part).objective.rate == 0.3


def test_the_help_names_every_scale(capsys):
    assert cli.dispatch([]) == 0
    told = capsys.readouterr().out
    assert all(f" {scale} (" in told.replace("\n", " ") for scale in SCALES)


def test_the_help_names_scales_of_a_study_module(monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "width", SCALES["nano"] | {"model.d_model": 96})
    monkeypatch.setenv("LM_STUDY", "my_rows.py")
    assert cli.dispatch([]) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert "base (the paper's setup); yours: width." in told


@pytest.mark.parametrize("encoding", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}])
def test_a_terminal_that_knows_ascii_alone_is_shown_ascii(encoding):
    command = [sys.executable, "-m", "experiments", "show", "t5/6-corruption-rate/50", "--diff"]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | encoding | {"PYTHONCOERCECLOCALE": "0"}
    )
    told = "t5/1-baseline/baseline -> t5/6-corruption-rate/50\nobjective.rate: 0.15 -> 0.5\n"
    assert (ran.stdout, ran.returncode) == (told, 0), ran.stderr


def test_the_time_left_is_told_from_steps_made_here_after_compiling():
    with reporting(1000) as reporter:
        (task,) = reporter._bar.tasks
        reporter.advance(500)  # done before
        reporter.advance(1)  # a batch that is ready while the step is compiled
        assert task.fields["left"] == ""
        reporter.first_step_done(60.0)
        assert task.fields["left"] == ""
        reporter._since -= 10.0
        reporter.advance(1)
        assert task.fields["left"] == "ETA " + duration(10 * 498)


@pytest.mark.parametrize("scales", [["nano"], pytest.param([*SCALES], marks=pytest.mark.slow)], ids=len)
def test_rows_their_settings_and_the_folders_of_their_stages_are_those_that_runs_lie_in(scales):
    """A change of the code's inside may not send a user's runs to other folders; else
    tests/golden/make_study.py.
    """
    golden, found = json.loads(make_study.PLACE.read_text())["rows"], make_study.rows(scales)
    assert golden.keys() == found.keys()
    changed = {"settings": set(), "stages and folders": set()}
    for row, by_scale in found.items():
        for scale, digests in by_scale.items():
            if digests[0] != golden[row][scale][0]:
                changed["settings"].add(row)
            if digests[1:] != golden[row][scale][1:]:
                changed["stages and folders"].add(row)
    said = ", ".join(
        f"{what} of {len(rows)} rows (such as {min(rows, default='-')})" for what, rows in changed.items()
    )
    assert not any(changed.values()), (
        f"changed: {said}; a new setting alters settings alone (CONTRIBUTING.md)"
    )


@pytest.mark.parametrize(
    "command",
    [name if name in ("run", "sweep") else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS],
)
def test_a_command_has_the_options_that_scripts_give_it(command):
    assert make_study.options(command) == json.loads(make_study.PLACE.read_text())["options"][command]


@pytest.mark.parametrize(
    ("width", "name"), [(80, "encoder-decoder"), (160, "t5/2-architecture/encoder-decoder")]
)
def test_a_narrow_terminal_lists_rows_without_what_the_title_says(width, name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("experiments.cli.list_rows.NAMES_CONSOLE", Console(width=width))
    list_rows("t5/2-architecture", runs=tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and any(line.startswith(f"│ {name} ") for line in lines)
    assert lines[0].startswith("t5/2-architecture")


def test_a_list_names_the_other_scales_at_which_rows_have_finished(capsys, tmp_path):
    for scale, seed in (("mini", 0), ("mini", 1), ("nano", 0)):
        folder = run_folder(tmp_path, scale, "t5/6-corruption-rate/50", seed, {})
        folder.mkdir(parents=True)
        (folder / "scores.json").write_text("{}")
    list_rows("t5/6-*", runs=tmp_path)
    assert "1 row of these finished at scale mini: lm list 't5/6-*' --scale mini" in capsys.readouterr().out
    list_rows(runs=tmp_path)
    command = f"lm list --scale mini --runs {tmp_path}"
    assert f"finished at scale mini: {command} shows which" in capsys.readouterr().out
    list_rows("t5/4-*", runs=tmp_path)
    assert "--scale" not in capsys.readouterr().out


def test_a_list_counts_seeds_and_runs_with_changed_settings(tmp_path):
    def finish(*folders):
        for folder in folders:
            (tmp_path / "nano/gpt" / folder).mkdir(parents=True)
            (tmp_path / "nano/gpt" / folder / "scores.json").write_text("{}")

    def listed():
        return finished_text("gpt/base", "nano", tmp_path, ["gpt/base"])

    assert listed() == "0 seeds"
    finish("base,model.dropout=0.2/seed-0", "base,model.dropout=0.2/seed-1")
    assert listed() == "2 changed"
    finish("base/seed-0")
    assert listed() == "1 seed, 2 changed"
