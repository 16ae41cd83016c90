"""Examples in docstrings give what they say."""

import doctest
from importlib import import_module

import pytest

MODULES = (
    "experiments.cli.dry_run",
    "experiments.console",
    "experiments.runs.phases",
    "experiments.study.experiment",
    "experiments.study.overrides",
    "lm.data.packing",
    "lm.objectives.corruption",
    "lm.objectives.denoising",
    "lm.ops.masks",
    "lm.ops.positions",
    "lm.nn.attention_inputs",
    "lm.train.optimizers",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_docstring_give_what_they_say(name):
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0 and found.failed == 0
