"""Short names of runs: @NAME means the run that ``runs/NAME`` links to."""

from pathlib import Path

import pytest

from experiments.__main__ import dispatch
from experiments.cli.run_names import check_name, name_run, other_run_with_name, resolve_names, shortest_name
from experiments.cli.settings import grid_points
from lm.config.base import SettingError

RUN = Path("runs/nano/gpt/base/seed-0")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RUN.mkdir(parents=True)
    (RUN.parent / "seed-1").mkdir()
    return Path("runs")


def test_a_name_means_the_run_that_it_was_given_last(runs):
    name_run(runs, "mine", RUN)
    assert resolve_names(["@mine", "--start", "@mine:pretraining"]) == [
        str(RUN),
        "--start",
        f"{RUN}:pretraining",
    ]
    name_run(runs, "mine", RUN.parent / "seed-1")
    assert resolve_names(["@mine"]) == [str(RUN.parent / "seed-1")]
    assert sorted(path.name for path in runs.iterdir()) == ["mine", "nano"], "nothing else is left behind"


def test_a_name_is_lost_by_a_run_that_has_it_and_is_there(runs):
    other = RUN.parent / "seed-1"
    assert other_run_with_name("mine", runs, RUN) is None
    name_run(runs, "mine", other)
    assert other_run_with_name("mine", runs, RUN) == other
    assert other_run_with_name("mine", runs, other) is None
    other.rmdir()
    assert other_run_with_name("mine", runs, RUN) is None


def test_a_dry_run_says_that_a_name_would_leave_another_run(runs, capsys):
    other = RUN.parent / "seed-1"
    name_run(runs, "mine", other)
    assert dispatch(["run", "gpt/base", "--dry-run", "--name", "mine"]) == 0
    assert f"@mine would name this run; now: {other}\n" in capsys.readouterr().out


def test_a_name_is_looked_up_in_the_folder_of_runs_of_the_command(runs, tmp_path):
    other = tmp_path / "other"
    (other / "nano/run").mkdir(parents=True)
    name_run(other, "mine", other / "nano/run")
    for words in (["@mine", "--runs", "other"], ["--runs=other", "@mine"]):
        assert "other/nano/run" in resolve_names(words)


def test_prompts_that_begin_with_an_at_sign_are_text(runs):
    name_run(runs, "mine", RUN)
    for texts in (
        ["--prompt", "@mine", "--text", "@mine", "--other", "@mine"],
        ["--prompt", "one", "@two", "@three"],
        ["--words", "@mine", "--commit-message", "@mine", "--commit_message", "@mine"],
    ):
        assert resolve_names(texts) == texts
        assert resolve_names(["@mine", *texts, "--run", "@mine"]) == [str(RUN), *texts, "--run", str(RUN)]


def test_a_name_behind_an_equals_sign_means_the_same_as_behind_a_blank(runs):
    name_run(runs, "mine", RUN)
    assert resolve_names(["row", "--start=@mine:pretraining", "--steps=3"]) == [
        "row",
        f"--start={RUN}:pretraining",
        "--steps=3",
    ]
    assert resolve_names(["--prompt=@mine", "@mine"]) == ["--prompt=@mine", str(RUN)]
    with pytest.raises(SettingError, match="'mein'.*'mine'"):
        resolve_names(["--start=@mein"])


def test_a_command_line_with_a_name_behind_an_equals_sign_is_resolved(runs, capsys):
    assert dispatch(["show", "gpt/base", "--start=@nobody"]) == 2
    assert "no run in runs is called 'nobody'" in capsys.readouterr().err


def test_a_name_in_a_grid_means_what_it_means_as_an_option(runs):
    folder = runs / "nano/gpt/base,model.dropout=0.1/seed-0"  # as a run with settings given by hand is called
    folder.mkdir(parents=True)
    name_run(runs, "mine", folder)
    name_run(runs, "other", RUN)
    *words, seeds = resolve_names(
        ["--grid", "distillation.teacher=@mine,@other:pretraining,hf:a", "seed=1,2"]
    )
    assert seeds == "seed=1,2"
    for given in (words, resolve_names(["--grid=distillation.teacher=@mine,@other:pretraining,hf:a"])):
        points = grid_points([given[-1].removeprefix("--grid=")])
        teachers = [point["distillation.teacher"] for point in points]
        assert teachers == [str(folder), f"{RUN}:pretraining", "hf:a"]


@pytest.mark.parametrize("words", [["--runs", "@mine"], ["--runs=@mine"]])
def test_a_name_in_place_of_the_folder_of_runs_is_looked_up_in_the_usual_one(runs, words):
    name_run(runs, "mine", RUN)
    assert resolve_names(words) == " ".join(words).replace("@mine", str(RUN)).split()


def test_a_name_of_no_run_is_an_error_with_the_names_there_are(runs):
    with pytest.raises(SettingError, match="--name NAME"):
        resolve_names(["@mine"])
    name_run(runs, "mine", RUN)
    with pytest.raises(SettingError, match="mine"):
        resolve_names(["@mein"])


def test_a_run_that_lies_in_the_folder_of_runs_itself_has_the_name_of_its_folder(runs):
    (runs / "imported").mkdir()
    with pytest.raises(SettingError, match="--name NAME"):
        resolve_names(["@imported"])
    (runs / "imported" / "settings.json").touch()
    assert resolve_names(["@imported", "@imported:pretraining"]) == [
        "runs/imported",
        "runs/imported:pretraining",
    ]
    with pytest.raises(SettingError, match="did you mean 'imported'"):
        resolve_names(["@import"])


@pytest.mark.parametrize("runs_option", [[], ["--runs", "runs"]])
@pytest.mark.parametrize("word", ["@mine", "@mine:pretraining"])
def test_a_name_of_a_run_that_is_gone_names_its_folder_and_the_link_to_remove(runs, word, runs_option):
    name_run(runs, "mine", RUN)
    RUN.rmdir()
    gone = f"@mine names a run that is gone: {RUN}; remove the link runs/mine"
    with pytest.raises(SettingError, match=gone):
        resolve_names([word, *runs_option])
    name_run(runs, "mine", RUN.parent / "seed-1")
    assert resolve_names(["@mine"]) == [str(RUN.parent / "seed-1")]


@pytest.mark.parametrize("name", ["last", "nano", "cache", "starts", "verified", "a/b", "..", "-x", "a b"])
def test_a_name_that_is_taken_or_leads_elsewhere_is_refused(runs, name):
    with pytest.raises(SettingError, match="--name"):
        check_name(runs, name)


def test_a_name_never_replaces_a_folder(runs):
    (runs / "data").mkdir()
    with pytest.raises(SettingError, match="folder of its own"):
        check_name(runs, "data")
    name_run(runs, "data", RUN)
    assert not (runs / "data").is_symlink()


def test_commands_to_try_name_the_last_run_shortly_if_it_is_this_one(runs):
    assert shortest_name(RUN) == str(RUN)
    name_run(runs, "last", RUN)
    assert shortest_name(RUN) == "@last"
    name_run(runs, "mine", RUN)
    assert shortest_name(RUN) == "@mine"
    name_run(Path("elsewhere"), "far", RUN)
    assert shortest_name(RUN, Path("elsewhere")) == "elsewhere/far"
    assert shortest_name(RUN.parent / "seed-1") == str(RUN.parent / "seed-1")


def test_the_first_run_of_all_gets_its_name_before_there_is_a_folder_of_runs(tmp_path):
    name_run(tmp_path / "new", "mine", tmp_path / "new" / "nano" / "run")
    assert (tmp_path / "new" / "mine").is_symlink()
