"""Settings: changing, comparing, storing, and errors that name the mend."""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from experiments.study.experiment import Experiment
from lm.config.attention import RotaryConfig
from lm.config.base import (
    SettingError,
    change,
    changes,
    check_numbers,
    did_you_mean,
    diff,
    from_json,
    leaves,
    read_object,
    setting_descriptions,
    to_json,
)
from lm.config.classical import CountsConfig
from lm.config.model import ModelConfig
from lm.config.training import LoopConfig


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1  # share of tokens
    kind: Literal["a", "b"] = "a"  # which one


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    names: tuple[str, ...] = ("x",)  # of things
    size: int = 3  # how many [tokens]
    flag: bool = False  # whether


@dataclass(frozen=True)
class Pair:
    pair: tuple[int, float] | None = None  # of two kinds


@pytest.mark.parametrize("value", [(5,), [5, 6, 7], ()])
def test_a_tuple_of_a_fixed_length_has_that_length(value):
    with pytest.raises(SettingError, match="should have 2 values, not"):
        changes(Pair(), {"pair": value})
    assert changes(Pair(), {"pair": [5, 6]}).pair == (5, 6.0)
    with pytest.raises(SettingError, match=r"pair\[0\]=0.5 should be of type int"):
        changes(Pair(), {"pair": (0.5, 6)})


def test_a_wrong_setting_of_a_markov_model_is_named_by_its_path():
    with pytest.raises(SettingError, match="^counts.markov.smoothing=-1.0 should be at least 0"):
        changes(CountsConfig(), {"markov.smoothing": -1.0}, "counts.")


@pytest.mark.parametrize("name", ["base", "window_base"])
def test_a_base_without_wavelengths_is_refused_with_yarn(name):
    with pytest.raises(SettingError, match=f"rotary.{name}=1.0 should be above 1"):
        RotaryConfig(**{name: 1.0}, scaling="yarn", factor=2.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", -1, "steps=-1 should be at least 0"),
        ("log_every", 0, "log_every=0 should be at least 1"),
        ("evaluate_every", 0, "evaluate_every=0 should be at least 1"),
        ("patience", -1.0, "patience=-1.0 should be at least 0"),
        ("prefetch", -1, "prefetch=-1 should be at least 0"),
        ("profile", (3, 2), r"profile=\(3, 2\) should be the first and the last of one or more steps"),
    ],
)
def test_a_loop_that_could_not_count_its_steps_is_refused_by_the_setting(name, value, message):
    with pytest.raises(SettingError, match=message):
        LoopConfig(**{name: value})


@pytest.mark.parametrize("fraction", [float("inf"), 1.5, -0.5, 1e300])
def test_a_share_of_rotated_features_beyond_all_or_none_is_refused(fraction):
    with pytest.raises(SettingError, match="model.positions.rotary.fraction=.* should be at "):
        changes(ModelConfig(), {"positions.rotary.fraction": fraction})


def test_a_vocabulary_has_two_tokens_at_least_since_one_leaves_nothing_to_predict():
    with pytest.raises(SettingError, match="model.vocab_size=1 should be at least 2"):
        ModelConfig(vocab_size=1)


def test_a_change_touches_one_leaf_and_leaves_the_original_alone():
    before = Outer()
    after = change(before, "inner.rate", 0.5)
    assert diff(before, after) == {"inner.rate": (0.1, 0.5)}
    assert before.inner.rate == 0.1


def test_json_gives_the_same_value_back():
    config = changes(Outer(), {"names": ("p", "q"), "inner.kind": "b", "flag": True})
    assert from_json(Outer, to_json(config)) == config


def test_an_integer_stands_for_a_float_but_no_bool_for_an_int():
    assert change(Outer(), "inner.rate", 1).inner.rate == 1.0
    with pytest.raises(SettingError, match="size=True"):
        change(Outer(), "size", True)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("inner.rats", 1.0, r"no setting 'rats'; did you mean 'rate'\?"),
        ("siez", 1, "did you mean 'size'"),
        ("inner.kind", "c", "inner.kind='c' is not a choice|kind='c' is not a choice"),
        ("size", "many", "size='many' should be of type int"),
        ("size.more", 1, "single value"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_the_mend(path, value, message):
    with pytest.raises(SettingError, match=message):
        change(Outer(), path, value)


@pytest.mark.parametrize(
    "text",
    ['{"inner": 3, "names": [], "size": 1, "flag": false}', '{"size": "1"}', '{"zise": 1}'],
)
def test_a_damaged_settings_file_is_refused(text):
    with pytest.raises(SettingError):
        from_json(Outer, text)


@pytest.mark.parametrize(
    "group", [{"loss": {"z_loss": -1}}, {"phases": [{"share": 0.5, "optimizer": {"beta1": -1}}]}]
)
def test_a_wrong_setting_has_the_same_path_in_a_file_as_in_a_change(group):
    with pytest.raises(SettingError, match="^pretraining") as changed:
        changes(Experiment(), {f"pretraining.{name}": value for name, value in group.items()})
    with pytest.raises(SettingError) as read:
        from_json(Experiment, json.dumps({"pretraining": group}))
    assert str(read.value) == str(changed.value)


@pytest.mark.parametrize("content", [None, b"{", b"[]"])
def test_a_file_that_holds_no_object_is_named_once(content, tmp_path):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=f"^{path} ") as error:
        read_object(path)
    assert str(error.value).count("some.json") == 1


@pytest.mark.parametrize("size", [-(2**31) - 1, -(2**31), 2**32 - 1, 2**32])
def test_a_whole_number_is_refused_if_neither_int32_nor_uint32_holds_it(size):
    fits = any(np.iinfo(kind).min <= size <= np.iinfo(kind).max for kind in (np.int32, np.uint32))
    with nullcontext() if fits else pytest.raises(SettingError, match=f"size={size} should be"):
        check_numbers(Outer(size=size))


def test_a_setting_that_is_newer_than_the_file_has_its_default():
    assert from_json(Outer, '{"size": 1}') == change(Outer(), "size", 1)


def test_every_leaf_has_its_comment():
    assert set(setting_descriptions(Outer)) == {path for path, _ in leaves(Outer())}
    assert setting_descriptions(Outer)["size"] == "how many [tokens]"


def test_did_you_mean_names_the_closest_spelling_or_all_of_few():
    assert did_you_mean("nanno", ["nano", "mini"]) == "; did you mean 'nano'?"
    assert did_you_mean("zzz", ["nano", "mini", "nano"]) == "; choose from mini, nano", "each of them once"
