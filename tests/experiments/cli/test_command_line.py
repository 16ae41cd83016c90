"""The command line: mistakes and their mends, help, completion, settings from files, and grids."""

import json
import os
import platform
import re
import shlex
import subprocess
import unicodedata
from inspect import signature
from pathlib import Path

import published
import pytest
from commands import accepted, unboxed
from rich.console import Console

from experiments import __main__ as cli
from experiments.__main__ import dispatch
from experiments.cli import COMMANDS
from experiments.cli.app import description, examples, function_of, parse
from experiments.cli.dry_run import program_key, step_cost
from experiments.cli.run_options import Options, heads_kept
from experiments.cli.settings import (
    CHANGED_OFTEN,
    given_changes,
    grid_points,
    parse_settings,
    read_config,
    settings_among,
    types_of,
)
from experiments.cli.sweep import sweep_argv
from experiments.cli.synonyms import SYNONYMS, hints
from experiments.runs.init_from import import_published
from experiments.runs.paths import save_settings
from experiments.runs.stages import stages
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, TABLES, build
from experiments.study.scales import DEFAULT_SCALE, SCALES
from experiments.study.words import setting_arguments
from lm.config.base import SettingError, changes, diff, leaves, setting_descriptions, to_json
from lm.config.decoding import Decoding
from lm.files import json_with_checksum

ROW, RUN = "t5/1-baseline/baseline", "runs/nano/t5/1-baseline/baseline/seed-0"
FUNCTIONS = [
    name for name in COMMANDS if not name.startswith("draw ") and name not in ("plan", "eval harness")
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_says_what_a_command_does_has_an_example_and_explains_every_option(name, capsys):
    function = function_of(name)
    assert description(function)[0].isupper() and (name == "draw neighbours" or examples(function))
    assert cli.dispatch([*name.split(), "--help"]) == 0
    said = unboxed(capsys.readouterr().out)
    assert said.startswith(f"usage: lm {name}")
    assert "(default: )" not in said
    documented = function.__doc__.partition("Args:")[2]
    for parameter in signature(function).parameters.values():
        marks = getattr(parameter.annotation, "__metadata__", ())
        is_group = any(getattr(mark, "name", None) == "" for mark in marks)
        has_help = any(getattr(mark, "help", None) for mark in marks)
        assert is_group or has_help or f"{parameter.name}: " in documented, parameter


EXAMPLES = {line: name for name in FUNCTIONS for line in examples(function_of(name))}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_help_is_a_command_line_that_is_understood(example, monkeypatch, capsys):
    words = shlex.split(example.partition(" >")[0])
    assert words[0] == "lm" and accepted(words[1:], monkeypatch) == 0, capsys.readouterr()


def test_help_shows_the_settings_that_people_change_with_the_values_of_the_row_and_scale(capsys):
    texts = []
    for words in (["--help"], ["--help-all"], ["--scale", "mini", "--help"]):
        assert cli.dispatch(["run", "t5/6-corruption-rate/50", *words]) == 0
        texts.append(unboxed(capsys.readouterr().out))
    short, whole, mini = texts
    about = setting_descriptions(Experiment)["model.d_model"].capitalize()
    assert f"--model.d-model INT {about} (default: 64)" in short and "(default: 0.5)" in short
    assert f"--model.d-model INT {about} (default: 128)" in mini
    assert "--guard" not in short and "--guard.non-finite" in whole
    flags = set(re.findall(r"--[a-z][\w.-]*", whole))
    assert {f"--{path.replace('_', '-')}" for path, _ in leaves(BASELINE)} <= flags
    assert set(CHANGED_OFTEN) <= {path for path, _ in leaves(BASELINE)}


def test_all_commands_have_one_default_scale_and_list_those_there_are(capsys, monkeypatch):
    monkeypatch.setitem(SCALES, "width", SCALES["nano"] | {"model.d_model": 96})
    with_scale = {name for name in FUNCTIONS if "scale" in signature(function_of(name)).parameters}
    assert with_scale == {"list", "show", "run", "sweep", "report", "power", "ladder", "data prepare"}
    for name in with_scale:
        default = signature(function_of(name)).parameters["scale"].default
        assert default == (None if name == "sweep" else DEFAULT_SCALE)
        assert cli.dispatch([*name.split(), "--help"]) == 0
        said = unboxed(capsys.readouterr().out)
        assert "--scale {nano,mini,mini-real,small,medium,base,width} Size of the study." in said, name


def called(words):
    """What the function of a command would be called with."""
    call = parse(*cli.named_command(words))
    return call.args, call.keywords


@pytest.mark.parametrize(
    "line",
    [
        "list t5/6-* --scale mini --names",
        f"run {ROW} --pretraining.steps 2e2 --scale mini --check",
        f"show {ROW} --runs elsewhere --stages",
        f"eval likelihood {RUN} book.txt --stride 12 --end",
        "convert import bert runs/bert",
    ],
)
def test_options_may_stand_before_what_is_known_by_its_place(line):
    words = line.split()
    name, rest = cli.named_command(words)
    first = next(place for place, word in enumerate([*rest, "--"]) if word.startswith("--"))
    places, options = rest[:first], rest[first:]
    assert called([*name.split(), *options, *places]) == called(words)


@pytest.mark.slow
def test_the_command_that_a_sweep_records_means_the_same_experiment_for_every_row():
    base = build(ROW, "nano")
    tried = set()
    for name in (name for name, row in REGISTRY.items() if not row.needs):
        experiment = build(name, "nano")
        changed = {path: new for path, (_, new) in diff(base, experiment).items()}
        if str(changed) not in tried:
            tried.add(str(changed))
            words = sweep_argv("t5/*", 2, changed, Options())
            assert words[:7] == ["lm", "sweep", "t5/*", "--scale", "nano", "--seeds", "2"]
            assert parse_settings(words[7:], changed) == changed, name


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--model.mlp.d_ff", "200", "--model.no-bias"],
        ["--grid", "model.mlp.d_ff=128,200", "data.held_out_lengths=1,1 2"],
    ],
    ids=str,
)
def test_the_command_that_a_sweep_records_runs_when_pasted(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recorded = []
    monkeypatch.setattr("experiments.cli.sweep.train_unfinished", lambda *_: 0)
    monkeypatch.setattr("experiments.report.report.print_report", lambda *all: recorded.append(all[4]))
    assert cli.dispatch(["sweep", "t5/6-corruption-rate", "--scale", "nano", "--seeds", "1", *given]) == 0
    _, *words = shlex.split(recorded[0])
    first = called([*words, "--dry-run"])[1]["settings"]
    assert first == parse_settings(given if "--grid" not in given else [])
    monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: 1e10)
    assert cli.dispatch([*words, "--dry-run"]) == 0
    count = 4 * (4 if "--grid" in given else 1)
    assert re.search(
        rf"\b{count + bool(given[:1] == ['--grid'])} of \d+ runs to train", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "given",
    [
        {"data.held_out_lengths": (1, 2), "model.shared_layers": True},
        {"tuning.mixtures": (), "model.attention.qkv_bias": True, "model.mlp.bias": False},
        {"model.attention.d_v": 4, "guard.spikes": 5.5, "model.special.eos": None},
        {"pretraining.optimizer.clip_rms": None, "pretraining.optimizer.learning_rate": 1e-5},
        {"data.corpus": "-my book's/*.txt + jsonl:b (1).jsonl", "mesh.fsdp": -1, "mesh.data": 1},
        {"data.corpus": "--scale", "data.vocabulary": ""},
        {"start.objective.rate": 0.5, "model.encoder.num_heads": 2},
    ],
    ids=str,
)
def test_every_kind_of_setting_is_written_as_it_is_read(given):
    base = build(ROW, "nano")
    for before, after in ((base, changes(base, given)), (changes(base, given), base)):
        changed = {path: new for path, (_, new) in diff(before, after).items()}
        assert parse_settings(shlex.split(shlex.join(setting_arguments(changed)))) == changed


def test_without_a_pattern_tables_are_listed_with_their_papers_and_with_one_their_rows(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.dispatch(["list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{table.name} " in listed for table in TABLES.values())
    assert "T5, Raffel et al. 2020" in listed and ROW not in listed
    assert cli.dispatch(["list", "t5/1-*"]) == 0
    assert "pretraining.steps=0" in capsys.readouterr().out


def test_show_takes_settings_as_run_does(capsys):
    assert cli.dispatch(["show", "--start.steps", "100", ROW]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{ROW} at scale nano with --start.steps 100" in said and re.search(r"start.steps . 100 ", said)
    assert cli.dispatch(["show", "t5/6-corruption-rate/50", "--diff", "--start.steps", "100"]) == 0
    sides = f"{ROW} → t5/6-corruption-rate/50 with the settings given\n"
    assert capsys.readouterr().out == f"{sides}objective.rate: 0.15 → 0.5\nstart.steps: 200 → 100\n"
    assert cli.dispatch(["show", ROW, "--to", "mini", "--model.d-model=32"]) == 0
    assert "model.d_model" not in capsys.readouterr().out
    assert cli.dispatch(["show", ROW, "--diff", "--data.corpus", "text:[old].txt"]) == 0
    assert "data.corpus: documentation → text:[old].txt\n" in capsys.readouterr().out


def test_show_gives_the_sizes_of_a_generator_which_its_share_does_not_tell(capsys):
    sizes = "d_model=32 (0.667 of the model's), attention.num_heads=1 of 2, mlp.d_ff=44 of 176"
    row = "clark/1-small/electra-small"  # whose generator_share is 1/4, and whose heads are 32 wide
    for words in ([], ["--costs"]):
        assert cli.dispatch(["show", row, "--scale", "mini", *words]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert sizes in shown
    assert cli.dispatch(["show", "clark/1-small/bert-small", "--scale", "mini"]) == 0
    assert "ELECTRA's generator:" not in capsys.readouterr().out


def test_an_option_that_a_published_model_does_not_take_is_named_as_it_was_typed(capsys):
    assert cli.dispatch(["show", "llama-7b", "--to", "mini"]) == 2
    error = capsys.readouterr().err
    assert "llama-7b is a published model: --to is for rows of the study" in error


def test_show_takes_a_run_and_refuses_to_change_it(tmp_path, capsys):
    settings = build(ROW, "nano", {"model.d_model": 48})
    save_settings(tmp_path / "run", settings, tmp_path / "cache")
    assert cli.dispatch(["show", str(tmp_path / "run")]) == 0
    assert re.search(r"model.d_model . 48 ", " ".join(capsys.readouterr().out.split()))
    assert cli.dispatch(["show", str(tmp_path / "run"), "--stages"]) == 0
    assert "documentation-reading" in capsys.readouterr().out
    for changed in (["--model.d-model", "32"], ["--diff"], ["--diff", ROW], ["--scale", "mini"]):
        assert cli.dispatch(["show", str(tmp_path / "run"), *changed]) == 2
        assert "is a run" in capsys.readouterr().err


def test_the_stage_of_an_imported_model_is_not_shown_as_trained_here(tmp_path, capsys):
    checkpoint = published.write("gpt2", tmp_path / "checkpoint")
    import_published(checkpoint, tmp_path / "model", tmp_path / "cache")
    assert cli.dispatch(["show", str(tmp_path / "model"), "--stages"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the imported model" in shown and "random parameters" not in shown and "524,288" not in shown


def test_two_runs_are_compared_by_their_own_settings(tmp_path, capsys):
    for name, rate in (("one", 0.003), ("other", 0.001)):
        given = {"pretraining.optimizer.learning_rate": rate, "seed": 1}
        save_settings(tmp_path / name, build(ROW, "nano", given), tmp_path / "cache")
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert cli.dispatch(["show", other, "--diff", one]) == 0
    changed = "pretraining.optimizer.learning_rate: 0.003 → 0.001\n"
    assert capsys.readouterr().out == f"{one} → {other}\n{changed}"
    assert cli.dispatch(["show", one, "--diff", one]) == 0
    assert "are the same experiment" in capsys.readouterr().out.replace("\n", " ")
    assert cli.dispatch(["show", one, "--diff", one, other]) == 2
    assert "should name one other run" in capsys.readouterr().err.replace("\n", " ")


def test_two_rows_and_two_scales_are_compared(capsys):
    assert cli.dispatch(["show", "t5/6-corruption-rate/50", "--to", "mini"]) == 0
    told = capsys.readouterr().out
    row = "t5/6-corruption-rate/50"
    assert told.startswith(f"{row} at scale nano → {row} at scale mini\n")
    assert "model.d_model: 64 → 128\n" in told and "objective" not in told
    assert cli.dispatch(["show", ROW, "--diff", "t5/6-corruption-rate/50", "--to", "mini"]) == 0
    assert "objective.rate: 0.15 → 0.5\n" in (told := capsys.readouterr().out) and "64 → 128" in told
    assert cli.dispatch(["show", ROW, "--diff", "t5/6-corruption-rate/15"]) == 0
    assert "are the same experiment" in capsys.readouterr().out


def test_a_file_of_settings_changes_what_it_names_and_options_win(tmp_path, capsys):
    (tmp_path / "a.toml").write_text('"pretraining.steps" = 7\n[model]\nmlp.d_ff = 96\ndropout = 0.1\n')
    row = build(ROW, "nano")
    found = read_config(tmp_path / "a.toml", [row], {})
    assert found == {"pretraining.steps": 7, "model.mlp.d_ff": 96, "model.dropout": 0.1}
    (tmp_path / "marked.toml").write_text((tmp_path / "a.toml").read_text(), "utf-8-sig")
    assert read_config(tmp_path / "marked.toml", [row], {}) == found
    (tmp_path / "a.json").write_text(json.dumps({"data": {"held_out_lengths": [1, 2]}, "seed": 0}))
    assert read_config(tmp_path / "a.json", [row], {}) == {"data.held_out_lengths": (1, 2)}
    words = ["show", ROW, "--diff", "--config", str(tmp_path / "a.toml"), "--model.dropout", "0.2"]
    assert cli.dispatch(words) == 0
    assert "model.dropout: 0.0 → 0.2\nmodel.mlp.d_ff: 256 → 96" in capsys.readouterr().out
    (tmp_path / "a.json").write_text('{"model": {"mlp": {"dff": 1}}}')
    with pytest.raises(SettingError, match="'d_ff'"):
        read_config(tmp_path / "a.json", [row], {})


def test_the_command_that_a_report_of_a_grid_records_has_the_settings_of_all_rows(tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr("experiments.report.report.print_report", lambda *given: recorded.append(given[4]))
    words = ["--model.dropout", "0.1", "--grid", "pretraining.steps=10,20", "--runs", str(tmp_path)]
    parse("report", [ROW, *words])()
    (command,) = recorded
    assert "--model.dropout 0.1 --grid pretraining.steps=10,20 " in command


@pytest.mark.parametrize(("command", "option"), [("generate", "--prompt"), ("draw neighbours", "--words")])
def test_an_option_that_takes_texts_and_has_none_is_named_before_a_run_is_opened(command, option):
    with pytest.raises(SettingError, match=f"{option}: .* one or more"):
        parse(command, ["nowhere", option])()


def test_a_file_of_settings_for_rows_that_cannot_be_built_is_refused(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("model.dropout = 0.1\n")
    with pytest.raises(SettingError, match=r"--config .*a\.toml is read by no row"):
        given_changes([], "nano", {}, path, "", tmp_path / "runs")


def test_a_file_of_settings_and_options_are_checked_together(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("pretraining.save_every = 7\n")  # the row evaluates every 50 steps
    options = {"pretraining.evaluate_every": 7}
    given = given_changes([ROW], "nano", options, path, "", tmp_path / "runs")
    assert given == {"pretraining.save_every": 7, "pretraining.evaluate_every": 7}
    with pytest.raises(SettingError, match=r"--config .*a\.toml: pretraining\.save_every=7"):
        given_changes([ROW], "nano", {}, path, "", tmp_path / "runs")


def test_the_saved_settings_of_a_run_make_the_same_experiment(tmp_path):
    experiment = build("t5/6-corruption-rate/50", "mini", {"model.dropout": 0.1})
    path = tmp_path / "settings.json"
    path.write_text(json_with_checksum(json.loads(to_json(experiment))))
    assert build(ROW, "nano", read_config(path, [build(ROW, "nano")], {})) == experiment


def test_a_grid_has_every_combination_and_values_of_several_elements():
    assert grid_points([]) == [{}]
    assert grid_points(["model.mlp.d-ff=128,2e2", "model.bias=True,False"]) == [
        {"model.mlp.d_ff": d_ff, "model.bias": bias} for d_ff in (128, 200) for bias in (True, False)
    ]
    assert grid_points(["data.held_out_lengths=1,1 2"]) == [
        {"data.held_out_lengths": (1,)},
        {"data.held_out_lengths": (1, 2)},
    ]
    assert grid_points(["data.corpus=text:my book.txt, documentation"]) == [
        {"data.corpus": corpus} for corpus in ("text:my book.txt", "documentation")
    ]
    assert grid_points(["data.corpus='text:a,b',documentation", "guard.spikes=None,5"]) == [
        {"data.corpus": corpus, "guard.spikes": spikes}
        for corpus in ("text:a,b", "documentation")
        for spikes in (None, 5.0)
    ]
    with pytest.raises(SettingError, match=r"model\.dropout is there twice"):
        grid_points(["model.dropout=0", "model.dropout=0.1"])


@pytest.mark.parametrize("text", ["model.dropout", "model.dropout=", "model.dropout=,", "model.dropout=,,"])
def test_a_grid_without_values_is_refused_with_the_form_of_one(text):
    with pytest.raises(SettingError, match=f"--grid '{text}' should be SETTING=VALUE,VALUE, such as"):
        grid_points([text])


@pytest.mark.parametrize("group", ["model", "pretraining.optimizer"])
def test_a_group_of_settings_in_a_grid_is_refused_with_some_of_its_settings(group):
    with pytest.raises(SettingError, match=f"--grid {group} is a group of settings.* such as") as refused:
        grid_points([f"{group}=1"])
    named = str(refused.value).partition("such as ")[2].split(", ")
    assert named and {*named} <= {path for path, _ in leaves(BASELINE) if path.startswith(f"{group}.")}
    with pytest.raises(SettingError, match="no setting|modle"):
        grid_points(["modle=1"])


@pytest.mark.parametrize("values", ["'a", 'a,"b', "it's", "a\\"])
def test_a_quote_in_a_grid_that_does_not_end_is_named(values):
    with pytest.raises(SettingError, match=r"--grid data\.corpus: .* cannot be split .*; close the quote"):
        grid_points([f"data.corpus={values}"])
    assert grid_points([r"data.corpus=text:it\'s"]) == [{"data.corpus": "text:it's"}]


@pytest.mark.parametrize("values", ["0,,0.1", "0,", ",0", "0,0.1,,", "0, ,0.1", "0, "])
def test_a_grid_that_lacks_a_value_beside_a_comma_is_refused(values):
    with pytest.raises(
        SettingError, match=rf"--grid model\.dropout: '{values}' lacks a value beside a comma"
    ):
        grid_points([f"model.dropout={values}"])
    with pytest.raises(SettingError, match="lacks a value beside a comma"):
        grid_points(["data.corpus=a, ,b"])
    assert grid_points(["data.corpus='', a"]) == [{"data.corpus": ""}, {"data.corpus": "a"}]
    assert grid_points(["model.bias=True, False"]) == [{"model.bias": True}, {"model.bias": False}]


def test_a_point_of_a_grid_is_the_run_of_its_settings_and_a_row_of_the_report(monkeypatch, tmp_path):
    wanted, reported = [], []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.sweep.train_unfinished", lambda runs, *_: wanted.extend(runs) or 0)
    monkeypatch.setattr("experiments.report.report.print_report", lambda tables, *_: reported.extend(tables))
    words = ["sweep", ROW, "--scale", "nano", "--seeds", "1", "--grid", "model.mlp.d_ff=128,256"]
    assert cli.dispatch(words) == 0
    assert [str(run.folder) for run in wanted] == [
        f"runs/nano/{ROW},model.mlp.d_ff=128/seed-0",
        f"runs/nano/{ROW}/seed-0",  # 256 is what the scale has
    ]
    (table,) = reported
    assert [row.name for row in table.rows] == [ROW, f"{ROW},model.mlp.d_ff=128"]
    assert (table.baseline, table.axis.setting) == (ROW, "model.mlp.d_ff")
    reported.clear()
    assert cli.dispatch([*words, "--model.dropout", "0.1"]) == 0
    (table,) = reported
    changed = f"{ROW},model.dropout=0.1"  # also in the row that all are compared with
    assert [row.name for row in table.rows] == [changed, f"{changed},model.mlp.d_ff=128"]
    assert table.baseline == changed


def test_a_sweep_says_that_it_trains_nothing_and_which_other_seeds_its_report_has(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.train.is_up_to_date", lambda *_: True)
    monkeypatch.setattr("experiments.report.report.print_report", lambda *_: None)
    command = ["sweep", "t5/1-baseline", "--scale", "nano", "--seeds", "1"]
    for seed, due in (
        (0, []),
        (1, ["beyond --seeds 1, the report has the finished runs of seed 1"]),
        (10, ["beyond --seeds 1, the report has the finished runs of seeds 1 and 10"]),
        ("1-copy", ["beyond --seeds 1, the report has the finished runs of seeds 1 and 10"]),
    ):
        folder = run_folder(Path("runs"), "nano", ROW, seed, {})
        folder.mkdir(parents=True)
        (folder / "scores.json").touch()
        assert cli.dispatch(command) == 0
        said = "".join(capsys.readouterr()).splitlines()
        assert said == [*due, "2 of 2 runs are finished: nothing to train"]


def test_a_sweep_whose_settings_leave_one_row_says_that_it_compares_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["sweep", "t5/1-baseline", "--scale", "nano", "--seeds", "2", "--pretraining.steps", "60"]
    monkeypatch.setattr("experiments.cli.dry_run.print_dry_run", lambda *_: None)
    assert cli.dispatch([*command, "--dry-run"]) == 0
    assert f"only {ROW} is left, and a table of one row compares nothing" in capsys.readouterr().out
    assert cli.dispatch([*command[:-2], "--dry-run"]) == 0
    assert "compares nothing" not in capsys.readouterr().out


def test_settings_of_a_run_that_nothing_reads_are_left_out_and_those_of_other_files_are_refused(tmp_path):
    untuned = build(ROW, "nano", {"pretraining.steps": 20, "finetuning.steps": 10, "tuning.mixtures": ()})
    save_settings(tmp_path, untuned)
    given = given_changes([ROW], "nano", {}, tmp_path / "settings.json", "", tmp_path)
    assert given == {"pretraining.steps": 20, "tuning.mixtures": ()}
    (tmp_path / "mine.toml").write_text("tuning.mixtures = []\nfinetuning.steps = 10")
    with pytest.raises(SettingError, match="finetuning.steps.*tuning.mixtures"):
        given_changes([ROW], "nano", {}, tmp_path / "mine.toml", "", tmp_path)


def test_a_sweep_without_options_is_the_one_that_was_published(tmp_path, monkeypatch):
    wanted = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.print_dry_run", lambda runs, *_: wanted.extend(runs))
    for table in (TABLES["t5/6-corruption-rate"], TABLES["block"]):
        wanted.clear()
        assert cli.dispatch(["sweep", table.name, "--dry-run"]) == 0
        assert {run.folder.parts[1] for run in wanted} == {table.scale}
        assert {run.experiment.seed for run in wanted} == {*range(table.seeds)}


def test_runs_of_a_grid_are_called_by_their_values_and_other_runs_by_their_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = []
    monkeypatch.setattr("experiments.cli.dry_run.print_dry_run", lambda runs, *_: wanted.extend(runs))
    words = ["sweep", ROW, "--scale", "nano", "--seeds", "1", "--dry-run"]
    assert cli.dispatch([*words, "--grid", "model.mlp.d_ff=128,256", "data.held_out_lengths=1,1 2"]) == 0
    values = [(d_ff, lengths) for d_ff in (128, 256) for lengths in ("1", "1 2")]
    assert {run.title for run in wanted} == {f"{ROW}, mlp.d_ff={a}, held_out_lengths={b}" for a, b in values}
    wanted.clear()
    assert cli.dispatch(words) == 0
    assert [run.title for run in wanted] == [ROW]


@pytest.mark.parametrize(
    "setting", [["--objective.rate", "0.5"], ["--grid", "objective.rate=0.15,0.5"]], ids=str
)
def test_rows_that_settings_make_equal_are_trained_once_as_the_baseline_if_it_is_one_of_them(
    tmp_path, monkeypatch, capsys, setting
):
    monkeypatch.chdir(tmp_path)
    wanted = []
    monkeypatch.setattr("experiments.cli.dry_run.print_dry_run", lambda runs, *_: wanted.extend(runs))
    table = ["sweep", "t5/6-corruption-rate", "--scale", "nano", "--seeds", "2", "--dry-run"]
    assert cli.dispatch([*table, "--model.dropout", "0.1"]) == 0
    assert "left out" not in capsys.readouterr().out and len({run.name for run in wanted}) == 4
    wanted.clear()
    assert cli.dispatch([*table, *setting]) == 0
    experiments = [run.experiment for run in wanted]
    assert len(set(experiments)) == len(experiments) and {run.name for run in wanted} == {
        "t5/6-corruption-rate/15"
    }
    said = capsys.readouterr().out
    assert "left out: t5/6-corruption-rate/10" in said
    assert "which these settings make the same as t5/6-corruption-rate/15" in said


def test_a_dry_run_counts_a_shared_pre_training_once_names_missing_data_and_writes_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: 1e10)
    assert cli.dispatch(["run", ROW, "--dry-run", "--data.corpus", "tfds:c4/en"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "1 of 1 runs to train at scale nano: 800 steps" in said
    )  # start 200, pre-training 300, 2 x 150 of fine-tuning
    assert "missing: " in said and "c4/en" in said
    assert (
        cli.dispatch(["sweep", "t5/6-corruption-rate", "--scale", "nano", "--seeds", "1", "--dry-run"]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 runs to train at scale nano: 2,600 steps" in said and "missing" not in said
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_says_that_a_run_whose_stages_were_trained_is_only_to_be_evaluated(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.CONSOLE", Console(width=200))
    monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: 1e10)
    command = ["run", "gpt/base", "--finetuning.steps", "0", "--dry-run"]
    saved = [0]
    monkeypatch.setattr("experiments.cli.dry_run.saved_steps", lambda folder: (100, saved[0]))
    for steps, state, count in (
        (200, "to train", "1 of 1 runs to train at"),
        (300, "to evaluate", "0 of 1 runs"),
    ):
        saved[0] = steps
        assert cli.dispatch(command) == 0
        said = capsys.readouterr().out
        assert f"│ {state} " in said and count in said
    assert "0 of 1 runs to train, 1 to evaluate, at scale nano: 0 steps" in said


def seconds_of_dry_run(words, capsys):
    """The expected time of a row's runs that a dry run adds up, and what it says below its table."""
    assert cli.dispatch([*words, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    hours, minutes, seconds = (
        int(found.group(1)) if (found := re.search(rf"about [^(]*?(\d+) {unit}\b", said)) else 0
        for unit in ("h", "min", "s")
    )
    return 3_600 * hours + 60 * minutes + seconds, said


def test_a_dry_run_adds_the_time_of_compiling_each_program_once(tmp_path, monkeypatch, capsys):
    """The row has four stages but three programs: both fine-tunings have the same. Steps take no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: 1e30)
    one, said = seconds_of_dry_run(["run", ROW], capsys)
    assert one == 3 * 2 * 10 and "compiling takes 20 s of it for each of 3 training steps" in said
    seeds, _ = seconds_of_dry_run(["sweep", ROW, "--scale", "nano", "--seeds", "2", "--jobs", "1"], capsys)
    assert seeds == one
    experiment = build(ROW, "nano")
    for stage in stages(experiment, run_folder(Path("runs"), "nano", ROW, 0, {}), Path("runs/cache")):
        stage.folder.mkdir(parents=True)
        record = {"seconds_compiling": 0.01 if stage.name == "documentation-sentences" else 7.0}
        (stage.folder / "run.json").write_text(json_with_checksum(record))
    measured, said = seconds_of_dry_run(["run", ROW], capsys)
    assert measured == 3 * 2 * 7 and "compiling takes 14 s of it" in said


def test_a_dry_run_counts_adapters_and_low_rank_updates_and_the_programs_that_have_them():
    costs, programs = {}, set()
    for method in ("all", "adapters-32", "lora-8"):
        experiment = build(f"recipe-finetuning/{method}-0.01", "nano")
        stage = stages(experiment, Path("run"), Path("cache"))[-1]
        costs[method] = step_cost(stage)
        programs.add(program_key(stage))
    model, lengths = experiment.model, stage.lengths
    vectors = model.num_encoder_layers * lengths.inputs + model.num_decoder_layers * lengths.targets
    adapter = 2 * model.d_model * round(model.d_model / 24)
    added = 3 * 2 * stage.training.batch_size * vectors * adapter
    assert costs["adapters-32"] == costs["all"] + added
    assert costs["lora-8"] > costs["all"]
    assert len(programs) == 3

    experiment = changes(experiment, {"tuning.lora.rank": 0, "tuning.heads": ("mnli",)})
    with_lora = changes(experiment, {"tuning.lora.rank": 8})
    plain, added = (stages(each, Path("run"), Path("cache"))[-1] for each in (experiment, with_lora))
    assert added.has_head and step_cost(added) > step_cost(plain)


def test_a_dry_run_shows_equal_rows_with_equal_times_and_says_which_are_in_training_or_share_stages(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.CONSOLE", Console(width=120))
    monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: 1e10)
    command = ["sweep", "t5/1-baseline", "--scale", "nano", "--seeds", "2", "--dry-run"]

    def rows():
        assert cli.dispatch(command) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if " seed " in line]
        return {line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:6]] for line in lines}

    found = rows()
    first, second = (found[f"{ROW} seed {seed}"] for seed in (0, 1))
    assert first == second and first[0] == "to train", "programs are compiled once, for all rows together"
    stage = stages(build(ROW, "nano"), run_folder(Path("runs"), "nano", ROW, 0, {}), Path("runs/cache"))[0]
    stage.folder.mkdir(parents=True)
    life = {"status": "running", "host": platform.node(), "pid": os.getpid()}
    (stage.folder / "run.json").write_text(json_with_checksum(life))
    found = rows()
    assert found[f"{ROW} seed 0"][0] == "in training" and found[f"{ROW} seed 1"][0] == "to train"
    command[1] = "t5/10-fine-tuning"
    assert [state for state, *_ in rows().values()].count("in training") == 1, (
        "one run trains what others share"
    )
    command[1] = "t5/1-baseline"
    (stage.folder / "run.json").write_text(json_with_checksum(life | {"status": "finished"}))
    assert rows()[f"{ROW} seed 0"][0] == "to train"
    command[1] = "t5/10-fine-tuning"
    assert "to train *" in {state for state, *_ in rows().values()}, "one pre-training, tuned in several ways"


@pytest.mark.parametrize("command", [["run", ROW], ["sweep", ROW, "--seeds", "1"]])
def test_a_dry_run_of_a_large_scale_says_hours_here_and_on_a_gpu_and_what_prepares_its_data(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.matmul_speed", lambda: 1e12)
    seconds, said = seconds_of_dry_run([*command, "--scale", "medium"], capsys)
    assert seconds > 3_600
    assert "on one NVIDIA H100: about 44 min" in said and "35% of its peak" in said
    assert "tfds build wikipedia/20230601.en --file_format=array_record" in said
    _, said = seconds_of_dry_run([*command, "--scale", "small"], capsys)
    assert "on one NVIDIA H100: about 1 min" in said and "5% with narrower" in said


def test_a_sweep_of_tables_that_differ_says_at_which_scale_and_with_how_many_seeds_it_trains(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("experiments.cli.dry_run.print_dry_run", lambda *_: None)
    first, second = "t5/4-objective", "t5/5-bert-style"
    assert (TABLES[first].scale, TABLES[first].seeds) != (TABLES[second].scale, TABLES[second].seeds)
    assert cli.dispatch(["sweep", "t5/[45]-*", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for table in (TABLES[first], TABLES[second]):
        assert f"{table.name} {table.scale} and {table.seeds}" in said
    assert "--scale is nano" in said and "--seeds is 1" in said
    for given in (["t5/[45]-*", "--scale", "nano", "--seeds", "2"], [first]):
        assert cli.dispatch(["sweep", *given, "--dry-run"]) == 0
        assert "tables differ" not in capsys.readouterr().out


@pytest.mark.parametrize("page", ["--help", "--help-all"])
def test_the_help_of_sweep_lists_seeds_and_not_the_setting_that_a_sweep_refuses(page, capsys):
    assert cli.dispatch(["sweep", page]) == 0
    assert {*re.findall(r"--seeds?\b", unboxed(capsys.readouterr().out))} == {"--seeds"}
    assert cli.dispatch(["run", page]) == 0
    assert "--seed " in unboxed(capsys.readouterr().out)


@pytest.mark.parametrize("switch", [path for path, kind in types_of(Experiment) if kind is bool])
def test_a_switch_is_among_the_settings_of_a_command_line_whether_turned_on_or_off(switch):
    for value in (True, False):
        words = setting_arguments({switch: value})
        assert settings_among(words) == settings_among([word.replace("_", "-") for word in words]) == [switch]


def test_the_help_of_sweep_shows_the_values_of_the_table_and_not_those_of_nano(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")

    def default(words, option):
        assert cli.dispatch(["sweep", *words, "--help"]) == 0
        said = unboxed(capsys.readouterr().out)
        return re.search(rf"--{option} [^(]*.*?\(default: (.*?)\)", said, re.DOTALL).group(1)

    steps = str(build(ROW, "mini").pretraining.steps)
    assert default([], "pretraining.steps") == "the table's"
    assert default(["t5/6-corruption-rate"], "pretraining.steps") == steps
    assert default(["t5/6-corruption-rate", "--scale", "small"], "pretraining.steps") == "12400"
    assert default(["t5/6-corruption-rate"], "finetuning.batch-size") == "16"
    assert default(["t5/2-architecture"], "model.architecture") == "the table's"
    assert {bool(row.needs) for row in TABLES["lan/8-dropout"].rows} == {False, True}
    assert default(["lan/8-dropout"], "model.dropout") == "0.1"


def test_a_dry_run_takes_no_speed_from_counts_that_were_made_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment = build("history/bigram", "nano")
    folder = run_folder(Path("runs"), "nano", "history/bigram", 0, {})
    (stage,) = stages(experiment, folder, Path("runs/cache"))
    stage.folder.mkdir(parents=True)
    record = {"step": 1, "kind": "train", "seconds_per_step": 0.5}
    (stage.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert cli.dispatch(["sweep", "history/*gram", "--scale", "nano", "--seeds", "1", "--dry-run"]) == 0
    assert "4 of 4 runs to train at scale nano: 4 steps" in " ".join(capsys.readouterr().out.split())


OTHERS_CALL = {  # what a user may type -> the first of the settings that it leads to
    "activation model.activation hidden_act act_fn": "--model.mlp.activation",
    "hidden_size model.hidden_size n_embd width embed_dim": "--model.d-model",
    "n_layer num_layers num_hidden_layers model.num_layers depth": "--model.num-encoder-layers",
    "n_head num_attention_heads": "--model.attention.num-heads",
    "d_head head_dim": "--model.attention.d-kv",
    "ffn intermediate_size mlp_dim": "--model.mlp.d-ff",
    "warmup num_warmup_steps": "--pretraining.optimizer.warmup-steps",
    "lr learning_rate pretraining.lr optimizer.lr": "--pretraining.optimizer.learning-rate",
    "finetuning.lr": "--finetuning.optimizer.learning-rate",
    "seq_len max_seq_length block_size context_length": "--data.inputs-length",
    "steps max_steps num_train_steps": "--pretraining.steps",
    "dropout dropout_rate hidden_dropout_prob attn_pdrop": "--model.dropout",
    "rope_theta": "--model.positions.rotary.base",
    "tie_word_embeddings": "--model.output.logits",
    "gradient_checkpointing remat_policy": "--model.compile.remat",
    "cpu_offload": "--model.compile.offloaded",
    "eval_interval": "--pretraining.evaluate-every",
}


@pytest.mark.parametrize(
    ("word", "due"), [(word, due) for words, due in OTHERS_CALL.items() for word in words.split()]
)
def test_a_name_of_other_programs_leads_to_the_setting(word, due):
    (hint,) = hints([f"--{word}", "3"], takes_settings=True)
    assert re.search(rf"did you mean {re.escape(due)}[ ?]", hint), hint


@pytest.mark.parametrize(
    ("line", "due"),
    [
        ("run gpt/base --layers 1", "--model.num-decoder-layers?"),
        ("run bert/base --layers 1", "--model.num-encoder-layers?"),
        (f"run {ROW} --layers 1", "--model.num-encoder-layers or --model.num-decoder-layers?"),
        ("sweep gpt --n-layer=1", "--model.num-decoder-layers?"),
        ("run gpt/base --steps 500", "--pretraining.steps or --finetuning.steps?"),
        ("run gpt/base --dropout 0.1", "--model.dropout?"),
    ],
)
def test_only_settings_that_the_row_reads_are_suggested(line, due, capsys):
    assert cli.dispatch(line.split()) == 2
    unknown = line.split()[2].partition("=")[0]
    assert f"{unknown}: did you mean {due}" in " ".join(capsys.readouterr().err.split())


def test_only_an_unknown_option_gets_a_hint(capsys):
    assert cli.dispatch(["sweep", "gpt", "--seeds", "3", "--nonsense", "0"]) == 2
    assert "did you mean" not in capsys.readouterr().err, "--seeds is an option of a sweep"
    assert cli.dispatch(["sweep", "gpt", "--seeds", "3", "--lr=0.1"]) == 2
    assert "--lr: did you mean --pretraining.optimizer.learning-rate" in capsys.readouterr().err


def test_an_option_whose_meaning_is_known_is_not_also_answered_by_a_similar_spelling(capsys):
    assert cli.dispatch("run bert/base --finetuning.lr 1 --epochs 3 --finetuning.log_evry 3".split()) == 2
    said = capsys.readouterr().err
    assert re.findall(r"similar to (\S+):", said) == ["--finetuning.log_evry"], "for which there is no hint"
    assert "--finetuning.log-every INT" in said and "For full helptext" in said
    assert "vectors.epochs" not in said
    assert re.findall(r"lm: (\S+): did you mean", said) == ["--finetuning.lr", "--epochs"]


@pytest.mark.parametrize(
    ("name", "meant"), [("bert-larg", "bert-large"), ("llama7b", "llama-7b"), ("large", "bert-sizes/large")]
)
def test_a_misspelt_model_leads_to_the_published_one_and_the_name_of_a_row_to_the_row(name, meant, capsys):
    assert cli.dispatch(["show", name]) == 2
    assert re.search(rf"{name!r}; did you mean .*{meant!r}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "due"),
    [
        ("run gpt/llama --model.mlp.activation geluu", "--model.mlp.activation geluu: did you mean gelu?"),
        (
            "run gpt/llama --model.mlp.activation SwiGLU",
            "--model.mlp.activation SwiGLU: did you mean gated-silu?",
        ),
        ("sweep gpt/llama --scale nanoo", "--scale nanoo: did you mean nano?"),
        ("plan gpt/llama v5e:2x2", "v5e:2x2: did you mean --topology v5e:2x2?"),
        (
            "list t5/1 t5/2",
            "t5/2: one word too many: lm list PATTERN [OPTIONS]; for several, run it once for each, or name "
            "a pattern such as 't5/*'",
        ),
    ],
)
def test_a_misspelt_choice_and_a_word_without_its_option_lead_to_what_was_meant(line, due, capsys):
    assert cli.dispatch(line.split()) == 2
    assert due in capsys.readouterr().err


def test_the_value_of_an_unknown_option_is_not_called_a_word_too_many(capsys):
    assert cli.dispatch("list t5/1 --nonsense value".split()) == 2
    assert "too many" not in capsys.readouterr().err


def test_what_other_programs_call_a_setting_leads_to_settings_that_there_are():
    options = {*Decoding.__dataclass_fields__, "run", "runs", "prompt", "wandb", "seeds"}
    known = {path for path, _ in leaves(BASELINE)} | options
    assert {name for names in SYNONYMS for name in names.split()} <= known


@pytest.mark.parametrize("word", ["delete", "rm", "remove", "clean"])
def test_a_command_that_would_delete_runs_is_answered_with_how_to_delete_them(word, capsys):
    assert cli.dispatch([word, RUN]) == 2
    said = capsys.readouterr().err
    assert f"there is no command {word!r}: a run is a folder: delete its seed-N" in said
    assert "launch delete" not in said, "which deletes slices in the cloud"
    (question,) = re.findall(r"docs/questions.md, '(.*?)'", said)
    assert f"**{question}**" in Path("docs/questions.md").read_text()
    assert ("lm data clean cleans" in said) == (word == "clean")


@pytest.mark.parametrize(
    "line",
    [
        f"plan {ROW} --topology h100:8",
        f"launch gce {ROW} --accelerator h100:8 --zones us-east5-a --image x/y:1 --runs gs://mine/runs "
        "--dry-run",
    ],
)
def test_a_gpu_in_place_of_a_tpu_is_answered_with_the_commands_for_gpus(line, capsys):
    assert cli.dispatch(line.split()) == 2
    said = capsys.readouterr().err
    assert "TPU 'h100'" in said
    assert "lm run ROW --dry-run" in said and "lm launch slurm" in said


def test_the_version_is_that_of_the_package_jax_and_python(capsys):
    assert cli.dispatch(["--version"]) == 0
    assert re.fullmatch(r"lm [\d.]+, jax [\d.]+, Python [\d.]+\n", capsys.readouterr().out)


def test_bash_completes_commands_rows_and_options(tmp_path, monkeypatch, capsys):
    kept = {name: COMMANDS[name] for name in ("list", "show", "data tasks", "data prepare", "completion")}
    monkeypatch.setattr("experiments.cli.app.COMMANDS", kept)
    assert cli.dispatch(["completion", "bash"]) == 0
    script = tmp_path / "lm.sh"
    script.write_text(capsys.readouterr().out)

    def completed(*words):
        line = " ".join(map(shlex.quote, words))
        ask = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; "
        ask += "f=$(complete -p lm | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $f; printf '%s\\n' \"${COMPREPLY[@]}\""
        ran = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=tmp_path)
        return set(ran.stdout.split())

    assert completed("lm", "sh") == {"show"}
    assert completed("lm", "data", "pre") == {"prepare"}
    assert "--model.d-model" in completed("lm", "show", ROW, "--model.d")
    assert completed("lm", "show", "--scale", "mi") >= {"mini", "mini-real"}
    assert completed("lm", "list", "t5/6-corruption-rate/") == {r for r in REGISTRY if r.startswith("t5/6-")}


VALUES = {
    "tuning.mixtures": ("glue_small", "squad"),
    "tuning.heads": (),
    "data.corpus": "text:my books/*.txt + jsonl:b (1).jsonl",
    "data.vocabulary": "/home/me/it's mine",
    "tuning.branches": (0.5, 1.0),
    "model.mlp.d_ff": 200,
}


def test_the_name_of_a_runs_folder_needs_no_quoting_in_a_shell():
    folder = run_folder(Path("runs"), "nano", ROW, 0, VALUES)
    assert shlex.quote(str(folder).replace("=", "")) == str(folder).replace("=", "")
    assert ",model.mlp.d_ff=200," in folder.parent.name and ",tuning.branches=0.5:1.0," in folder.parent.name
    others = [run_folder(Path("runs"), "nano", ROW, 0, {"data.corpus": f"text:a{sign}b"}) for sign in " +*("]
    assert len(set(others)) == len(others)


def test_a_run_given_mixtures_alone_names_the_heads_that_it_also_tunes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    heads = build("gpt/base", "nano").tuning.heads
    assert heads
    words = ["run", "gpt/base", "--dry-run", "--tuning.mixtures", "restore"]
    said = []
    for more in ([], ["--tuning.heads"], ["--tuning.heads", heads[0]]):
        assert dispatch([*words, *more]) == 0
        said.append("also fine-tunes the heads of the row" in capsys.readouterr().out)
    assert said == [True, False, False]
    assert heads_kept(build("gpt/base", "nano"), {}) == ""


def test_a_sweep_given_mixtures_alone_names_the_rows_whose_heads_it_also_tunes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "gpt/*", "--seeds", "2", "--dry-run", "--tuning.mixtures", "restore"]
    assert dispatch(words) == 0
    before, _ = capsys.readouterr().out.split("also fine-tunes the heads of the row")
    assert before.count("gpt/base") == 1
    assert dispatch([*words, "--tuning.heads"]) == 0
    assert "heads of the row" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["power", "generate"])
def test_help_that_another_program_reads_has_empty_lines_and_no_invisible_characters(name, capsys):
    assert dispatch([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert not [char for char in text if unicodedata.category(char) == "Cf"]
    assert "\n\n" in text


def test_help_fits_the_terminal_and_its_commands_can_be_copied(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "70")
    assert dispatch(["generate", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    prose = [line for line in lines if line.startswith(" ") and not line.startswith("  ")]
    assert max(map(len, prose)) <= 70 and sum(len(line) > 50 for line in prose) > 4
    commands = [line for line in lines if line.strip().startswith("lm ")]
    assert commands and all(line.isascii() for line in commands)
