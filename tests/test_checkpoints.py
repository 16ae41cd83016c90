"""A checkpoint is restored bit for bit on any mesh, or it is found to be damaged."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from lm.config import SettingError
from lm.train.checkpoints import MANIFEST, CheckpointError, Checkpoints
from lm.train.config import CheckpointConfig, OptimizerConfig


def opened(folder, **settings):
    return Checkpoints(str(folder), CheckpointConfig(**settings))


def at(state, step):
    return replace(state, step=jnp.asarray(step, jnp.int32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints 1 and 2, and the numbers of both."""
    folder, state = tmp_path_factory.mktemp("saved"), toy.steps().init(0)
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


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "add"])
def test_damage_to_any_file_is_found_and_the_step_before_is_taken(copied, capsys, damage):
    folder, numbers = copied
    names = [path.relative_to(folder / "2") for path in files(folder / "2")]
    assert len(names) > 8 and Path(MANIFEST) in names
    with opened(folder) as checkpoints:
        for name in names:
            path = folder / "2" / (name if damage != "add" else f"{name}.more")
            before = path.read_bytes() if path.exists() else None
            if damage == "flip":
                flipped = bytearray(before or b"?")
                flipped[len(flipped) // 2] ^= 4
                path.write_bytes(flipped)
            elif damage == "truncate":
                path.write_bytes(before[:-1] if before else b"?")
            elif damage == "delete":
                path.unlink()
            else:
                path.write_bytes(b"")
            assert checkpoints._good(None) == 1, name
            assert path.name in capsys.readouterr().out
            path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
        assert checkpoints._good(None) == 2


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
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint is good.*/2: manifest.json.*/1: manifest.json"):
        restored(folder)
    with opened(folder) as checkpoints, pytest.raises(CheckpointError):
        checkpoints.restore_model(toy.steps().init(0))


def test_what_a_kill_inside_a_save_left_is_ignored_and_swept(copied):
    folder, numbers = copied
    shutil.copytree(folder / "2", folder / "unfinished-3")
    shutil.copytree(folder / "2", folder / "unfinished-4.orbax-checkpoint-tmp")
    with opened(folder) as checkpoints:
        state = checkpoints.restore(toy.steps().abstract)
        assert toy.numbers(state) == numbers[2]
        checkpoints.save(at(state, 3))
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


def test_nothing_saved_is_none_for_a_run_and_an_error_for_fine_tuning(tmp_path):
    assert restored(tmp_path / "absent") is None
    with opened(tmp_path / "absent") as checkpoints, pytest.raises(CheckpointError, match="there is no checkpoint"):
        checkpoints.restore_model(toy.steps().init(0))


@pytest.mark.parametrize("old, new", [((2, 2, 2), ()), ((), (1, 8, 1)), ((4, 2, 1), (1, 2, 4))])
def test_a_checkpoint_moves_between_meshes_bit_for_bit(tmp_path, old, new):
    with opened(tmp_path) as checkpoints:
        state = toy.steps(*old).init(5)
        checkpoints.save(state)
    other = restored(tmp_path, toy.steps(*new))
    assert toy.numbers(other) == toy.numbers(state)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, other, toy.steps(*new).abstract))


def test_another_shape_name_or_dtype_is_refused(saved):
    folder, _ = saved
    cases = {"wider": toy.steps(model=replace(toy.MODEL, d_ff=64)).abstract}
    cases["other optimiser"] = toy.steps(optimization=OptimizerConfig(name="adamw")).abstract
    half = toy.steps().abstract
    place = half.params["table"].sharding
    table = jax.ShapeDtypeStruct(half.params["table"].shape, jnp.bfloat16, sharding=place)
    cases["dtype"] = replace(half, params=half.params | {"table": table})
    with opened(folder) as checkpoints:
        for abstract in cases.values():
            with pytest.raises(SettingError, match="is of another model or optimiser"):
                checkpoints.restore(abstract)


def test_fine_tuning_takes_the_parameters_alone_under_another_optimiser(saved):
    fresh = toy.steps(2, 2, 2, optimization=OptimizerConfig(name="adamw")).init(9)
    with opened(saved[0]) as checkpoints:
        state = checkpoints.restore_model(fresh, step=1)
    found = {name: value for name, value in toy.numbers(state).items() if name.startswith("params.")}
    assert found.items() <= saved[1][1].items() and len(found) == 3
    assert int(state.step) == 0 and state.params["table"].sharding == fresh.params["table"].sharding


def test_the_newest_and_the_best_are_kept(tmp_path):
    state = toy.steps().init(0)
    with opened(tmp_path, keep=2, best="highest") as checkpoints:
        for step, score in enumerate((0.1, 0.9, float("nan"), None, 0.3), 1):
            checkpoints.save(at(state, step), score)
        checkpoints.wait()
        assert (checkpoints.steps(), checkpoints.best()) == ([2, 4, 5], 2)


def test_training_may_go_on_while_a_state_is_being_written(tmp_path):
    big = toy.steps(model=replace(toy.MODEL, d_model=256, d_ff=4096))
    state, step = big.init(0), big.train_step(0)
    numbers = toy.numbers(state)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(state)
        for i in range(5):  # each consumes the state before
            state, _ = step(state, big.put(toy.batch(i)))
        checkpoints.wait()
        found = checkpoints.restore(big.abstract)
    assert toy.numbers(found) == numbers and np.isfinite(np.asarray(found.params["table"])).all()
