"""A checkpoint is restored bit for bit on any mesh, or it is found to be damaged."""

import json
import logging
import os
import random
import resource
import shutil
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.cli.doctor import find_damage
from experiments.runs.paths import save_settings
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm.config.base import SettingError, changes
from lm.config.training import CheckpointConfig, GuardConfig, OptimizerConfig
from lm.files import json_with_checksum
from lm.train.loop import _scores_and_losses
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import CheckpointError, Checkpoints, SaveError
from lm.train.runtime.manifest import MANIFEST


def opened(folder, **settings):
    guard = GuardConfig(failed_save=settings.pop("failed_save", "stop"))
    return Checkpoints(str(folder), CheckpointConfig(**settings), guard)


def at(state, step):
    return replace(state, step=jnp.asarray(step, jnp.int32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints 1 and 2, and the numbers of both."""
    folder, state = tmp_path_factory.mktemp("saved"), toy.steps().initial_state(0)
    with opened(folder, keep=5) as checkpoints:
        for step in (1, 2):
            checkpoints.save(at(state, step))
    return folder, {step: toy.numbers(at(state, step)) for step in (1, 2)}


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy", saved[1]


def restored(folder, steps=None):
    with opened(folder) as checkpoints:
        return checkpoints.restore((steps or toy.steps()).abstract)


def files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def test_damage_to_any_file_is_found_and_the_step_before_is_taken(copied, capsys):
    folder, _ = copied
    paths, rng = files(folder / "2"), random.Random(0)
    assert len(paths) > 8 and folder / "2" / MANIFEST in paths
    with opened(folder) as checkpoints:
        for path in paths:
            whole, more = path.read_bytes(), path.with_name(f"{path.name}.more")
            for damaged in toy.damages(whole, rng, 0):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                assert checkpoints._good_step(None) == 1, (path, damaged)
                assert path.name in capsys.readouterr().out
            path.write_bytes(whole)
            more.touch()
            assert checkpoints._good_step(None) == 1 and more.name in capsys.readouterr().out
            more.unlink()
        assert checkpoints._good_step(None) == 2


def test_a_damaged_step_is_passed_over_and_its_numbers_are_never_used(copied):
    folder, numbers = copied
    largest = max(files(folder / "2"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert toy.numbers(restored(folder)) == numbers[1]
    shutil.rmtree(folder / "2")
    (folder / "2").mkdir()  # empty
    assert toy.numbers(restored(folder)) == numbers[1]


def test_a_step_saved_after_going_on_from_before_a_damaged_one_is_the_newest(copied):
    folder, numbers = copied
    (folder / "2").rename(folder / "9")
    (folder / "9" / MANIFEST).unlink()
    with opened(folder, keep=1) as checkpoints:
        state = checkpoints.restore(toy.steps().abstract)
        checkpoints.save(at(state, 5))
        checkpoints.wait()
        assert checkpoints.steps() == [5]


def test_when_every_checkpoint_is_bad_nothing_starts_from_scratch(copied):
    folder, _ = copied
    for step in "12":
        (folder / step / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError, match=r"(?s)no checkpoint is good.*/2: manifest.json.*/1: manifest.json"
    ):
        restored(folder)
    with opened(folder) as checkpoints, pytest.raises(CheckpointError):
        checkpoints.restore_model(toy.steps().initial_state(0))


def test_what_a_kill_inside_a_save_left_is_ignored_and_swept(copied):
    folder, numbers = copied
    shutil.copytree(folder / "2", folder / "unfinished-3")
    shutil.copytree(folder / "2", folder / "unfinished-4.orbax-checkpoint-tmp")
    with opened(folder) as checkpoints:
        state = checkpoints.restore(toy.steps().abstract)
        assert toy.numbers(state) == numbers[2]
        checkpoints.save(at(state, 3))
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]


def test_nothing_saved_is_none_for_a_run_and_an_error_for_fine_tuning(tmp_path):
    assert restored(tmp_path / "absent") is None
    with (
        opened(tmp_path / "absent") as checkpoints,
        pytest.raises(CheckpointError, match="there is no checkpoint"),
    ):
        checkpoints.restore_model(toy.steps().initial_state(0))


def test_a_step_that_was_not_saved_is_missing_and_not_damaged(saved, capsys):
    with opened(saved[0]) as checkpoints:
        for restore, like in (
            (checkpoints.restore, toy.steps().abstract),
            (checkpoints.restore_model, toy.steps().initial_state(0)),
        ):
            with pytest.raises(CheckpointError, match=r"there is no checkpoint 7 in .*, only \[1, 2\]"):
                restore(like, 7)
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize("old, new", [((2, 2, 2), ()), ((), (1, 8, 1)), ((4, 2, 1), (1, 2, 4))])
def test_a_checkpoint_moves_between_meshes_bit_for_bit(tmp_path, old, new):
    with opened(tmp_path) as checkpoints:
        state = toy.drawn(toy.steps(*old).abstract)
        checkpoints.save(state)
    other = restored(tmp_path, toy.steps(*new))
    assert toy.numbers(other) == toy.numbers(state)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, other, toy.steps(*new).abstract))


def test_another_shape_name_or_dtype_is_refused(saved):
    folder, _ = saved
    cases = {"wider": toy.steps(model=changes(toy.MODEL, {"mlp.d_ff": 64})).abstract}
    cases["other optimiser"] = toy.steps(optimizer=OptimizerConfig(name="adamw")).abstract
    half = toy.steps().abstract
    place = half.params["table"].sharding
    table = jax.ShapeDtypeStruct(half.params["table"].shape, jnp.bfloat16, sharding=place)
    cases["dtype"] = replace(half, params=half.params | {"table": table})
    with opened(folder) as checkpoints:
        for abstract in cases.values():
            with pytest.raises(SettingError, match="is of another model or optimiser"):
                checkpoints.restore(abstract)


def test_fine_tuning_takes_the_parameters_alone_under_another_optimiser(saved):
    fresh = at(toy.drawn(toy.steps(2, 2, 2, optimizer=OptimizerConfig(name="adamw")).abstract), 0)
    with opened(saved[0]) as checkpoints:
        state = checkpoints.restore_model(fresh, step=1)
    found = {name: value for name, value in toy.numbers(state).items() if name.startswith("params.")}
    assert found.items() <= saved[1][1].items() and len(found) == 3
    assert int(state.step) == 0 and state.params["table"].sharding == fresh.params["table"].sharding


def test_the_newest_and_the_best_by_each_score_are_kept(tmp_path):
    state = toy.steps().initial_state(0)
    with opened(tmp_path, keep=2, best="highest") as checkpoints:
        for step, score in enumerate((0.1, 0.9, float("nan"), None, 0.9, 0.3), 1):
            checkpoints.save(at(state, step))
            checkpoints.write_scores(step, {"score": score, "cola/score": -abs(step - 3.0)})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 5, 6]
        assert [checkpoints.best(), checkpoints.best("cola/score"), checkpoints.best("absent")] == [
            5,
            3,
            None,
        ]


@pytest.mark.parametrize("kind", ["highest", "lowest"])
def test_of_checkpoints_with_the_same_score_the_one_with_the_lowest_loss_is_the_best_and_else_the_last(kind):
    ranks = [(0.0, 3.0), (0.0, 2.0), (0.0, 2.0), (0.0, None), (-1.0 if kind == "highest" else 1.0, 0.1)]
    found = {
        step: {"scores": {"score": score}, "losses": {} if loss is None else {"score": loss}}
        for step, (score, loss) in enumerate(ranks, 1)
    }
    assert manifest.best(found, "score", kind) == 3
    assert manifest.best({step: each | {"losses": {}} for step, each in found.items()}, "score", kind) == 4


def test_what_scores_and_losses_a_checkpoint_is_each_score_with_the_loss_of_what_it_is_about():
    values = {"a/score": 1.0, "a/loss": 2.0, "a/f1": 9.0, "b/score": 0.0, "b/loss": 4.0, "score": 0.5}
    scores, losses = _scores_and_losses(values, "score")
    assert scores == {"a/score": 1.0, "b/score": 0.0, "score": 0.5}
    assert losses == {"a/score": 2.0, "b/score": 4.0, "score": 3.0}
    assert _scores_and_losses({"score": 1.0}, "score")[1] == {}


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_a_kill_while_a_checkpoint_gets_its_scores_leaves_it_good_and_it_gets_them_later(
    copied, monkeypatch, moment
):
    folder, numbers = copied

    def dying(*_):
        raise Killed

    with opened(folder) as checkpoints, monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(*{"write": (os, "fsync"), "rename": (Path, "replace")}[moment], dying)
        checkpoints.write_scores(2, {"score": 1.0})
    with opened(folder) as checkpoints:
        assert (
            checkpoints.best() is None
            and toy.numbers(checkpoints.restore(toy.steps().abstract)) == numbers[2]
        )
        checkpoints.write_scores(2, {"score": 1.0})
        assert checkpoints.best() == 2 and manifest.find_damage(folder / "2", 2) is None
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_scores_that_cannot_be_written_are_an_error_that_names_the_checkpoint(copied, monkeypatch):
    folder, _ = copied
    with opened(folder) as checkpoints, failing("file", monkeypatch, folder):
        with pytest.raises(
            SaveError, match=f"the scores of {folder}/2 could not be written: .*File too large"
        ):
            checkpoints.write_scores(2, {f"score {i}": 1.0 for i in range(100)})
        assert checkpoints._good_step(None) == 2


def kept_of(times, **settings):
    """The places in ``times`` [minutes] of the checkpoints that are there in the end."""
    config, there = CheckpointConfig(**{"keep": 1} | settings), {}
    for step, minutes in enumerate(times):
        saved = 60.0 * minutes
        there[step] = {"saved": saved, "hour": manifest.hour_start(there, saved, config), "scores": {}}
        there = {step: there[step] for step in manifest.steps_to_keep(there, config)}
    return sorted(there)


def test_one_checkpoint_an_hour_is_kept_also_by_a_clock_that_jumps():
    steady = [20 * i for i in range(10)]
    assert kept_of(steady) == [3, 6, 9]
    assert kept_of(steady, hours=2) == [6, 9] and kept_of(steady, hours=0) == [9]
    assert kept_of([0, 59, 61, 120, 122, 130]) == [2, 4, 5]
    assert kept_of([0, 20, 40, 9000, 9020, 9040, 9060, 9080]) == [3, 6, 7]
    assert kept_of([9000, 9020, 9040, 0, 20, 40, 60, 80]) == [3, 6, 7]
    assert kept_of([100, 120, 70, 90, 110, 130, 150, 170, 190]) == [7, 8]  # put back by less than an hour


def test_training_may_go_on_while_a_state_is_being_written(tmp_path):
    big = toy.steps(model=changes(toy.MODEL, {"d_model": 256, "mlp.d_ff": 4096}))
    state, step = big.initial_state(0), big.seeded_train_step(0)
    numbers = toy.numbers(state)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(state)
        for i in range(5):  # each consumes the state before
            state, _ = step(state, big.shard_batch(toy.batch(i)))
        checkpoints.wait()
        found = checkpoints.restore(big.abstract)
    assert toy.numbers(found) == numbers and np.isfinite(np.asarray(found.params["table"])).all()


FAILURES = {
    "file": "(File too large|NOT_FOUND)",  # of the thread that writes, or of one that reads what it wrote
    "room": "GB are free",
    "rename": "Operation not permitted",
    "read-only": "Permission denied",
}


@contextmanager
def failing(how, monkeypatch, folder):
    """Nothing is saved in here."""
    if how == "read-only" and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep modules cut off at that size
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500 if how == "file" else soft, hard))
    folder.chmod(0o500 if how == "read-only" else 0o700)
    with monkeypatch.context() as patch:
        if how == "room":
            patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=9, free=9))
        elif how == "rename":
            patch.setattr(Path, "rename", Mock(side_effect=PermissionError(1, "Operation not permitted")))
        yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.chmod(0o700)


@pytest.mark.parametrize("how", FAILURES)
def test_a_save_that_fails_is_one_error_and_leaves_what_was_saved_before(
    tmp_path, monkeypatch, capfd, caplog, how
):
    state = toy.steps().initial_state(0)
    said = (
        rf"step 2 could not be saved in {tmp_path}: .*{FAILURES[how]}.* good checkpoint is 1. .* start again"
    )
    with opened(tmp_path, keep=3) as checkpoints:
        checkpoints.save(at(state, 1))
        checkpoints.wait()
        with failing(how, monkeypatch, tmp_path), pytest.raises(SaveError, match=said):
            checkpoints.save(at(state, 2))
            checkpoints.save(at(state, 3))
        assert checkpoints.steps() == [1] and manifest.find_damage(tmp_path / "1", 1) is None
        checkpoints.save(at(state, 2))
    with opened(tmp_path, keep=3, failed_save="retry") as checkpoints:
        with failing(how, monkeypatch, tmp_path):
            checkpoints.save(at(state, 4))
            checkpoints.save(at(state, 5))  # this one tells of the one before
            assert "warning: step 4 could not be saved" in capfd.readouterr().out
            checkpoints.write_scores(5, {"score": 1.0})  # of what is not there: nothing is to be ranked
            assert "warning: step 5 could not be saved" in capfd.readouterr().out
            with pytest.raises(SaveError, match="step 5"):  # nobody tries again
                checkpoints.wait()
        checkpoints.save(at(state, 6))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["1", "2", "6"]
    assert not caplog.records and not capfd.readouterr().err  # of the threads that wrote


@pytest.mark.parametrize("good", [None, 1])
def test_a_failed_save_asks_for_a_new_start_only_if_no_other_save_will_be_tried(
    tmp_path, monkeypatch, capsys, good
):
    state = toy.steps().initial_state(0)
    is_good = "no checkpoint is good" if good is None else f"the newest good checkpoint is {good}"
    resumes = "" if good is None else f": training resumes from step {good}"
    with opened(tmp_path, failed_save="retry") as checkpoints:
        if good is not None:
            checkpoints.save(at(state, good))
            checkpoints.wait()
        with failing("rename", monkeypatch, tmp_path):
            checkpoints.save(at(state, 4))
            checkpoints.wait_until_finished()
            assert capsys.readouterr().out.endswith(
                f"; {is_good}. Training goes on, and the next save tries again\n"
            )
            with pytest.raises(SaveError) as error:
                checkpoints.wait()
            assert str(error.value).endswith(f"; {is_good}. Mend this and start again{resumes}")


def test_a_save_that_fails_does_not_hide_what_ended_the_run(tmp_path, monkeypatch, capsys):
    with (
        pytest.raises(ZeroDivisionError),
        failing("rename", monkeypatch, tmp_path),
        opened(tmp_path) as checkpoints,
    ):
        checkpoints.save(toy.steps().initial_state(0))
        raise ZeroDivisionError
    assert "Operation not permitted; no checkpoint is good" in capsys.readouterr().out


class Killed(BaseException):
    """What a kill does, as far as one process can tell of its own."""


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_while_a_step_is_replaced_or_deleted_loses_none_and_halves_none(copied, monkeypatch, moment):
    folder, numbers = copied
    moments, rename, rmtree = iter(range(99)), Path.rename, shutil.rmtree

    def dying_rename(path, target):
        if next(moments) == moment:
            raise Killed
        return rename(path, target)

    def dying_rmtree(path, **options):
        if next(moments) == moment:
            next(file for file in files(path) if file.name != MANIFEST).unlink()
            raise Killed
        return rmtree(path, **options)

    with opened(folder, keep=1) as checkpoints, monkeypatch.context() as patch, suppress(Killed):
        state = checkpoints.restore(toy.steps().abstract)
        patch.setattr(Path, "rename", dying_rename)
        patch.setattr(shutil, "rmtree", dying_rmtree)
        checkpoints.save(state)
        checkpoints.wait()
    assert next(moments) == moment + 1
    with opened(folder, keep=1) as checkpoints:
        assert all(manifest.find_damage(path, step) is None for step, path in manifest.steps(folder).items())
        assert toy.numbers(checkpoints.restore(toy.steps().abstract)) == numbers[2]
        checkpoints.save(at(state, 3))
    assert [path.name for path in folder.iterdir()] == ["3"]


def written(folder, text=None, **changed):
    """A checkpoint of step 5 by hand, whose manifest is ``text`` or sealed with what was ``changed``."""
    about = {"step": 5, "saved": 1.0, "hour": 1.0, "scores": {}, "arrays": {}} | changed
    folder.mkdir(exist_ok=True)
    (folder / "data").write_bytes(b"numbers")
    about = {"files": manifest.checksums(folder)} | about
    text = json_with_checksum(about).encode() if text is None else text
    (folder / MANIFEST).write_bytes(text)
    return manifest.find_damage(folder, 5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["step", "saved", "hour", "scores", "arrays", "files"]), JSON, st.binary(max_size=50))
def test_a_manifest_of_any_kind_is_a_fault_in_words_and_never_a_crash(tmp_path_factory, name, value, junk):
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    assert written(folder) is None
    for fault in (
        written(folder, json.dumps(value).encode()),
        written(folder, junk),
        written(folder, **{name: value}),
    ):
        assert fault is None or fault.isprintable()
    assert written(folder, json.dumps(value).encode()) and written(folder, junk)
    assert manifest.manifests(folder.parent) is not None


def test_every_step_that_int32_counts_is_found(tmp_path):
    for name in ("0", "999999999", "1000000000", "2147483647", "2147483648", "01"):
        (tmp_path / name).mkdir()
    assert [*manifest.steps(tmp_path)] == [0, 999_999_999, 1_000_000_000, 2**31 - 1]


def test_what_is_no_step_or_not_all_there_is_told(tmp_path):
    at_five = tmp_path / "5"
    for name in ("/etc/hosts", "../6/data", "\x1b[2J\ud800"):
        assert written(at_five, files={name: "0"}) == f"file {name!r} is missing"
    assert written(at_five, files={}) == "file 'data' is unknown"
    assert written(at_five, step=6) == "manifest.json is of step 6"
    assert written(at_five, b"[" * 10**5).startswith("manifest.json cannot be read")
    assert written(at_five) is None
    (tmp_path / "elsewhere").write_bytes(b"numbers")
    for link in (at_five / "data", at_five / MANIFEST):
        moved = link.rename(tmp_path / "moved")
        link.symlink_to(moved)
        assert manifest.find_damage(at_five, 5)
        moved.rename(link)
    assert manifest.find_damage(at_five, 5) is None
    for name in ("007", "-1", "1e3", "²", "5.0", "unfinished-4", "99999999999999"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").write_text("a file")
    assert manifest.steps(tmp_path) == {5: at_five}


def test_verify_names_every_checkpoint_of_a_run_and_counts_the_bad_ones(copied, tmp_path, capsys):
    run = tmp_path / "runs" / "nano" / "seed-0"
    for folder in (run / "finetuning" / "cloze", tmp_path / "runs" / "cache"):
        folder.mkdir(parents=True)
    experiment = build("t5/1-baseline/baseline", "nano", {})
    save_settings(run, experiment, tmp_path / "runs" / "cache")
    shared = stages(experiment, run, tmp_path / "runs" / "cache")[0].folder
    shutil.copytree(copied[0], shared / "checkpoints")
    copied[0].rename(run / "finetuning" / "cloze" / "checkpoints")
    assert find_damage([run, tmp_path / "runs"]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    own, others = f"{run}/finetuning/cloze/checkpoints/", f"{shared}/checkpoints/"
    assert [line[::2] for line in lines] == [
        [f"{place}{step}", "good"] for place in (own, others) for step in (1, 2)
    ]
    (shared / "checkpoints" / "1" / "_METADATA").unlink()
    for folder in (run, shared, shared / "checkpoints", tmp_path):
        assert find_damage([folder]) == 1
        assert f"{others}1  0.0 MB  file '_METADATA' is missing\n" in capsys.readouterr().out
    with pytest.raises(SettingError, match="cache holds no checkpoint"):
        find_damage([run, tmp_path / "runs" / "cache"])
    capsys.readouterr()
    with pytest.raises(SettingError, match="there is no folder .*none"):
        find_damage([run, tmp_path / "none"])
    assert not capsys.readouterr().out, "it is said before checkpoints are read"


def test_verify_follows_the_runs_of_a_row_to_the_pretrainings_that_they_share(copied, tmp_path, capsys):
    row, cache = tmp_path / "runs" / "nano" / "t5" / "row", tmp_path / "runs" / "cache"
    experiment = build("t5/1-baseline/baseline", "nano", {})
    for seed in range(2):
        save_settings(row / f"seed-{seed}", experiment, cache)
    shared = stages(experiment, row / "seed-0", cache)[0].folder / "checkpoints"
    shared.parent.mkdir(parents=True)
    copied[0].rename(shared)
    assert find_damage([row]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        f"{shared}/1",
        f"{shared}/2",
    ]
    (shared / "2" / "_METADATA").unlink()
    (row / "seed-0" / "settings.json").write_text("{")
    assert find_damage([row]) == 2
    assert f"{row}/seed-0/settings.json cannot be read" in capsys.readouterr().out
    assert find_damage([row.parent.parent]) == 1  # the whole scale, where settings are not needed


def test_the_checkpoint_of_an_earlier_release_is_good_and_training_goes_on_from_it(tmp_path):
    for file in files(make_checkpoint.HERE):  # as git keeps it: without empty folders
        copy = tmp_path / file.relative_to(make_checkpoint.HERE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    due, made = json.loads(make_checkpoint.HERE.with_suffix(".json").read_text()), make_checkpoint.steps()
    with opened(tmp_path) as checkpoints:
        state = checkpoints.restore(made.abstract)
        assert make_checkpoint.hashes(state) == due["arrays"] and checkpoints.best("cola/score") == 3
        state, loss = make_checkpoint.next_step(made, state)
        assert loss == pytest.approx(due["next_loss"], rel=1e-4)
        checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]


def test_a_folder_that_is_deleted_while_a_step_is_saved_is_said_to_be(tmp_path, monkeypatch):
    state, folder, publish = toy.steps().initial_state(0), tmp_path / "run", manifest.publish

    def too_late(*args):
        shutil.rmtree(folder)
        publish(*args)

    with opened(folder) as checkpoints:
        checkpoints.save(at(state, 1))
        checkpoints.wait()
        monkeypatch.setattr(manifest, "publish", too_late)
        checkpoints.save(at(state, 2))
        with pytest.raises(SaveError, match="step 2 could not be saved in .*: the folder was deleted"):
            checkpoints.wait()


def test_checkpoints_opened_thousands_of_times_in_a_process_hook_into_it_once(tmp_path):
    def hooks():
        return sys.unraisablehook, *(len(logging.getLogger(name).filters) for name in ("absl", "asyncio"))

    with opened(tmp_path):
        once = hooks()
    for _ in range(2_000):
        with opened(tmp_path):
            pass
    assert hooks() == once
