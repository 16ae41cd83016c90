"""A fixture of tests that register tables and rows."""

import pytest

from experiments.study.registry import REGISTRY, TABLES


@pytest.fixture
def restored_registry():
    """Undo what a test registers."""
    rows, tables = dict(REGISTRY), dict(TABLES)
    yield
    for now, before in ((REGISTRY, rows), (TABLES, tables)):
        now.clear()
        now |= before
