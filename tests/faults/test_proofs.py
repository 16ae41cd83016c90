"""Every promise has a test, and every test that is named is there."""

import ast
from pathlib import Path

import pytest
from run import FAULTS, NAMED

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_is_named_is_there(test):
    file, _, name = test.partition("::")
    assert name in {getattr(node, "name", None) for node in ast.parse((TESTS / file).read_text()).body}


def test_every_event_has_a_test():
    marks = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [fault for fault, about in FAULTS.items() if len(about) == 1 and f'fault("{fault}"' not in marks] == []
    assert [*FAULTS] == [f"F{number}" for number in range(1, 25)]
