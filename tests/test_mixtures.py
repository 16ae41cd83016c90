"""Mixtures: rates, names, and that every target fits."""

import pytest

from lm.config import SettingError
from lm.data.mixtures import MIXTURES, mixture, rates
from lm.data.tasks import TASKS

PLAIN = {"kind": "proportional", "limit": None, "temperature": 1.0}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"a": 0.75, "b": 0.25}),
        ({"limit": 100}, {"a": 0.5, "b": 0.5}),
        ({"limit": 200}, {"a": 2 / 3, "b": 1 / 3}),
        ({"temperature": 2.0}, {"a": 3**0.5 / (1 + 3**0.5), "b": 1 / (1 + 3**0.5)}),
        ({"temperature": 2.0, "limit": 200}, {"a": 2**0.5 / (1 + 2**0.5), "b": 1 / (1 + 2**0.5)}),
        ({"temperature": 1e9}, {"a": 0.5, "b": 0.5}),
        ({"kind": "equal"}, {"a": 0.5, "b": 0.5}),
    ],
)
def test_rates_follow_the_examples_up_to_the_limit_and_the_temperature_makes_them_equal(settings, expected):
    assert rates({"a": 300, "b": 100}, **PLAIN | settings) == pytest.approx(expected)


def test_the_same_data_in_two_tasks_counts_half_in_each():
    sizes = {"rte": 100, "super_glue_rte": 100, "cb": 100}
    assert rates(sizes, **PLAIN) == {"rte": 0.25, "super_glue_rte": 0.25, "cb": 0.5}
    assert set(rates(sizes, **PLAIN | {"kind": "equal"}).values()) == {1 / 3}
    assert rates({"rte": 100, "cb": 100}, **PLAIN) == {"rte": 0.5, "cb": 0.5}


def test_every_task_but_one_for_tests_only_is_in_a_mixture_and_every_mixture_has_known_tasks():
    named = {name for mix in MIXTURES.values() for name in mix.tasks}
    assert named == TASKS.keys() - {"wnli"}
    assert all(task.train for mix in MIXTURES.values() for task in mix)


def test_an_unknown_mixture_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="did you mean 'super_glue'"):
        mixture("superglue")
