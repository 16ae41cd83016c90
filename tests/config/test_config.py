"""Settings: changing, comparing, storing, and errors that name the mend."""

from dataclasses import dataclass
from typing import Literal

import pytest

from lm.config.attention import RotaryConfig
from lm.config.base import (
    SettingError,
    change,
    changes,
    diff,
    from_json,
    leaves,
    nearest,
    setting_descriptions,
    to_json,
)
from lm.config.classical import CountsConfig


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


def test_a_setting_that_is_newer_than_the_file_has_its_default():
    assert from_json(Outer, '{"size": 1}') == change(Outer(), "size", 1)


def test_every_leaf_has_its_comment():
    assert set(setting_descriptions(Outer)) == {path for path, _ in leaves(Outer())}
    assert setting_descriptions(Outer)["size"] == "how many [tokens]"


def test_nearest_names_the_closest_spelling_or_all_of_few():
    assert nearest("nanno", ["nano", "mini"]) == "; did you mean 'nano'?"
    assert nearest("zzz", ["nano", "mini", "nano"]) == "; choose from mini, nano", "each of them once"
