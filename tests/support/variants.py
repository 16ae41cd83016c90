"""Which variants of a law run with all tests, and which with the slow ones alone."""

import pytest


def with_quick(quick, names):
    """The names as parameters of a test, of which those that are not in ``quick`` are slow."""
    names = [*names]
    assert {*quick} <= {*names}, "a misspelt name would make a law slow"
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


def but_for(slow, names):
    """The names as parameters of a test, of which those in ``slow`` are slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else []) for name in names]
