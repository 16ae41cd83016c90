"""Trained models in one small file each, which come along with the package."""

import re
import shlex

import numpy as np
import pytest
import scored_runs
from paths import ROOT

from experiments.__main__ import dispatch
from experiments.cli.data_course import COURSE_MODELS
from experiments.runs.packed import pack_model, unpack_model
from experiments.runs.paths import load_settings, save_settings
from experiments.runs.stages import stages_of
from experiments.runs.trained import open_run
from experiments.study.registry import build
from lm.config.base import SettingError, changes
from lm.sharding import named

LARGEST = 5_000_000  # all models together, in the package [bytes]
DRAWN = re.compile(r"(?m)^    lm (draw \w+ runs/course/.*)$")


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The folder that has ``runs/course``."""
    folder = tmp_path_factory.mktemp("course")
    assert dispatch(["data", "course", "--runs", str(folder / "runs")]) == 0
    return folder


def test_an_unpacked_model_is_the_packed_one_to_half_precision_without_what_was_tuned_from_it(tmp_path):
    run, experiment, _ = scored_runs.run_of(tmp_path, "encoder", scored_runs.HEADS)
    pack_model(run, tmp_path / "model.npz")
    unpack_model(tmp_path / "model.npz", tmp_path / "elsewhere" / "model", tmp_path / "cache")
    (stage,) = stages_of(tmp_path / "elsewhere" / "model")
    left_out = {"tuning.mixtures": (), "tuning.heads": (), "start.steps": 0}
    assert load_settings(tmp_path / "elsewhere" / "model") == changes(experiment, left_out)
    before = named(open_run(run, stages_of(run), "pretraining").model)
    after = named(open_run(tmp_path / "elsewhere" / "model", [stage]).model)
    assert before.keys() == after.keys()
    for name, parameter in before.items():
        np.testing.assert_allclose(after[name], parameter, rtol=2**-11, atol=1e-7, err_msg=name)


def test_a_run_without_a_pretrained_network_is_not_packed(tmp_path):
    given = scored_runs.HEADS | {"pretraining.steps": 0}
    run, *_ = scored_runs.run_of(tmp_path, "untrained", given)
    with pytest.raises(SettingError, match="no pre-trained model to pack"):
        pack_model(run, tmp_path / "model.npz")
    assert not (tmp_path / "model.npz").exists()


def test_a_run_with_several_pretrained_networks_is_not_packed_and_they_are_named(tmp_path):
    experiment = build("t5/1-baseline/baseline", "nano", {"ensemble.members": 2})
    save_settings(tmp_path / "run", experiment, tmp_path / "cache")
    with pytest.raises(
        SettingError, match="2 pre-trained models .pretraining/member-0, pretraining/member-1"
    ):
        pack_model(tmp_path / "run", tmp_path / "model.npz")


def test_the_models_of_the_course_are_runs_that_stay_as_they_are_when_asked_for_again(course, capsys):
    shipped = sorted((ROOT / "experiments" / "course").iterdir())
    assert [file.stem for file in shipped] == sorted(COURSE_MODELS)
    assert sum(file.stat().st_size for file in shipped) < LARGEST
    there = {path: path.stat().st_mtime_ns for path in course.rglob("*") if path.is_file()}
    assert dispatch(["data", "course", "--runs", str(course / "runs")]) == 0
    assert there == {path: path.stat().st_mtime_ns for path in course.rglob("*") if path.is_file()}
    printed = capsys.readouterr().out.replace("\n", "")
    for name in COURSE_MODELS:
        assert str(course / "runs" / "course" / name) in printed


def test_the_page_gives_the_size_of_each_model_of_the_course(course):
    page = (ROOT / "docs" / "course.md").read_text("utf-8")
    for name in COURSE_MODELS:
        (stage,) = stages_of(course / "runs" / "course" / name)
        (line,) = re.findall(rf"(?m)^\| `runs/course/{name}` .*$", page)
        assert f" {stage.parameters():,} " in line


@pytest.mark.slow
def test_every_picture_of_a_trained_model_on_the_page_is_drawn_from_what_comes_along(course, monkeypatch):
    monkeypatch.chdir(course)
    commands = DRAWN.findall((ROOT / "docs" / "course.md").read_text("utf-8"))
    assert len(commands) > 7
    for number, command in enumerate(commands):
        out = [] if command.startswith("draw neighbours") else ["--out", f"{number}.png"]  # which prints
        assert dispatch([*shlex.split(command), *out]) == 0, command
        assert not out or (course / f"{number}.png").exists()
