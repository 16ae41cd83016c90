"""Batches of every objective, architecture and task are the recorded ones, byte for byte."""

import json

import pytest
from golden import make_batches

RECORDED = json.loads(make_batches.PLACE.read_text())


def test_the_first_batches_of_every_case_are_the_recorded_ones():
    """Training repeats exactly only while its batches do, across versions too."""
    first = {name: hashes[:1] for name, hashes in RECORDED["cases"].items()}
    assert make_batches.cases(make_batches.FAST) == first, "see tests/golden/make_batches.py"


@pytest.mark.slow
def test_the_same_choices_are_legal_and_their_batches_are_the_recorded_ones():
    assert make_batches.combinations() == RECORDED["combinations"]


@pytest.mark.slow
def test_a_hundred_batches_of_every_case_are_the_recorded_ones():
    assert make_batches.cases() == RECORDED["cases"]
