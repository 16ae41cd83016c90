"""Mixtures: rates, names, and that every target fits."""

import pytest

from lm.config import SettingError
from lm.data.mixtures import MIXTURES, mixture, proportional
from lm.data.tasks import TASKS


def test_rates_are_proportional_to_the_examples_up_to_the_limit():
    assert proportional({"a": 300, "b": 100}, None) == {"a": 0.75, "b": 0.25}
    assert proportional({"a": 300, "b": 100}, 100) == {"a": 0.5, "b": 0.5}


def test_every_task_is_in_one_mixture_and_every_mixture_has_known_tasks():
    named = [name for mix in MIXTURES.values() for name in mix.tasks]
    assert sorted(named) == sorted(TASKS)


def test_an_unknown_mixture_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="did you mean 'super_glue'"):
        mixture("superglue")
