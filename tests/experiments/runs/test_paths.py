"""Where a run finds its cache and the stages that runs share: by what it records, wherever it was copied."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import TINY

from experiments.runs.paths import (
    base_name,
    describe_model,
    find_cache,
    is_compared,
    is_pretraining,
    load_settings,
    save_settings,
    scale_folder,
)
from experiments.runs.stages import stages, stages_of
from experiments.runs.trained import open_run
from experiments.study.registry import build
from lm.config.base import DataError, SettingError, changes

EXPERIMENT = build("t5/1-baseline/baseline", "nano", TINY)
RUN = Path("nano") / "t5" / "1-baseline" / "baseline" / "seed-0"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder of runs with one run, called from elsewhere."""
    monkeypatch.delenv("LM_CACHE", raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save_settings(tmp_path / "runs" / RUN, EXPERIMENT, tmp_path / "runs" / "cache")
    return tmp_path / "runs"


def folders(run):
    return [stage.folder for stage in stages_of(run)]


def test_a_run_knows_its_cache_wherever_it_is_opened_from(runs):
    assert find_cache(runs / RUN) == runs / "cache"
    assert folders(runs / RUN) == [x.folder for x in stages(EXPERIMENT, runs / RUN, runs / "cache")]


@pytest.mark.parametrize(
    ("saved", "after"),
    [
        ((), "pretraining"),
        ((0,), "pretraining"),
        ((100, 1_167), "step 1,167 of 3,000 of pretraining, which has not finished"),
        ((1_167, 3_000), "pretraining"),
    ],
)
def test_a_model_is_called_by_its_step_until_its_stage_has_trained_to_the_end(tmp_path, saved, after):
    stage, *others = stages(changes(EXPERIMENT, {"pretraining.steps": 3_000}), tmp_path / "run", tmp_path)
    assert others and stage.name == "pretraining"
    for step in saved:
        (stage.folder / "checkpoints" / str(step)).mkdir(parents=True)
    which = describe_model(tmp_path, stage.name, (), unfinished=stage.progress_if_unfinished)
    assert which == f"{tmp_path} after {after}"


def test_a_run_whose_cache_is_a_link_to_another_disk_finds_its_stages_beside_the_link(runs):
    (runs.parent / "disk").mkdir()
    (runs / "cache").symlink_to(runs.parent / "disk")
    save_settings(runs / RUN, EXPERIMENT, runs / "cache")
    assert find_cache(runs / RUN) == runs / "cache"
    assert folders(runs / RUN) == [x.folder for x in stages(EXPERIMENT, runs / RUN, runs / "cache")]


def test_a_folder_of_runs_that_is_moved_takes_its_caches_along(runs):
    moved = runs.parent / "other" / "place"
    shutil.move(runs, moved)
    assert find_cache(moved / RUN) == moved / "cache"
    assert all(moved in folder.parents for folder in folders(moved / RUN))


def test_folders_above_a_run_that_are_only_called_so_are_never_searched(runs):
    for folder in (runs / RUN).parents[:3]:
        (folder / "cache" / "tokens").mkdir(parents=True)
        (folder / "pretraining" / folders(runs / RUN)[0].name).mkdir(parents=True)
    assert find_cache(runs / RUN) == runs / "cache"
    assert runs / "nano" / "pretraining" in folders(runs / RUN)[0].parents


def test_a_run_that_is_copied_alone_says_which_stage_is_missing_and_finds_it_by_the_cache(
    runs, tmp_path, monkeypatch
):
    alone = tmp_path / "alone" / "seed-0"
    shutil.copytree(runs / RUN, alone)
    with pytest.raises(SettingError, match="'pretraining'.*LM_CACHE=FOLDER"):
        open_run(alone, stages_of(alone)[:1])
    monkeypatch.setenv("LM_CACHE", str(runs / "cache"))
    assert find_cache(alone) == runs / "cache"
    shared = [stage.folder for stage in stages_of(alone) if stage.is_shared]
    assert shared == [stage.folder for stage in stages_of(runs / RUN) if stage.is_shared]


def test_a_run_outside_of_the_folder_of_runs_has_all_of_its_stages(runs, tmp_path):
    run = tmp_path / "own"
    save_settings(run, EXPERIMENT, runs / "cache")
    assert find_cache(run) == runs / "cache" and scale_folder(run, runs / "cache") == run
    assert all(run in folder.parents for folder in folders(run))


def test_a_run_without_a_record_has_the_default_cache(tmp_path):
    save_settings(tmp_path, EXPERIMENT)
    assert find_cache(tmp_path) == Path("runs/cache") and load_settings(tmp_path) == EXPERIMENT


def test_a_damaged_record_is_an_error(runs):
    path = runs / RUN / "paths.json"
    path.write_text(path.read_text().replace("cache", "coche", 1))
    with pytest.raises(DataError):
        find_cache(runs / RUN)


@pytest.mark.parametrize(
    ("name", "base", "pretrains", "main"),
    [
        ("pretraining/without-squad", "pretraining", True, True),
        ("start/member-1", "start", True, False),
        ("phase-1/member-0", "phase-1", True, False),
        ("vectors", "vectors", False, False),
        ("squad/member-0", "squad", False, True),
        ("at-0.5/squad/member-1", "at-0.5/squad", False, False),
        ("at-1e-05/squad", "at-1e-05/squad", False, False),
        ("at-risk.toml/member-1", "at-risk.toml", False, True),
        ("at-0.5/at-risk.toml/member-1", "at-0.5/at-risk.toml", False, False),
        ("phase-2.toml", "phase-2.toml", False, True),
    ],
)
def test_the_name_of_a_stage_tells_its_members_and_whether_runs_are_compared_by_it(
    name, base, pretrains, main
):
    assert (base_name(name), is_pretraining(name), is_compared(name)) == (base, pretrains, main)


def test_settings_are_written_with_a_checksum_each(runs):
    for name in ("settings.json", "paths.json"):
        assert "sha256" in json.loads((runs / RUN / name).read_text())
