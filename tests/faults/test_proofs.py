"""Every promise has a test, and every test that is named is there."""

import ast
from pathlib import Path

import pytest
from paths import TESTS
from run import FAULTS, NAMED, Recorder, tally


@pytest.mark.parametrize("test", NAMED, ids=NAMED)
def test_a_test_that_is_named_is_there(test):
    file, _, name = test.partition("::")
    assert name in {getattr(node, "name", None) for node in ast.parse((TESTS / file).read_text()).body}


def test_every_event_has_a_test():
    marks = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [
        fault for fault, about in FAULTS.items() if len(about) == 1 and f'fault("{fault}"' not in marks
    ] == []
    assert [*FAULTS] == [f"F{number}" for number in range(1, 25)]


def test_what_was_skipped_is_not_counted_as_a_failure():
    recorder = Recorder()
    known = "known to fail: it is slow"
    for name, outcomes in {
        "a": "passed",
        "b": "passed",
        "c": "passed skipped",
        "d": "skipped",
        "e": "passed failed",
    }.items():
        recorder.results[name] = dict.fromkeys(outcomes.split(), [])
    recorder.results["f"] = {"passed": [], known: []}
    assert tally(recorder) == (
        "2 passed, 1 passed but for cases that were skipped, 1 skipped, 1 failed, 1 known to fail"
    )
