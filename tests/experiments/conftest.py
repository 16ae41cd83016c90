"""The width of tables in tests, and a fixture of tests that register tables and rows."""

import pytest

from experiments.console import CONSOLE
from experiments.study.registry import REGISTRY, TABLES

CONSOLE.width = 160  # so that no cell is wrapped where a test looks for it


@pytest.fixture
def restored_registry():
    """Undo what a test registers."""
    rows, tables = dict(REGISTRY), dict(TABLES)
    yield
    for now, before in ((REGISTRY, rows), (TABLES, tables)):
        now.clear()
        now |= before
