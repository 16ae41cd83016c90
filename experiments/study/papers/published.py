"""Reads the published scores of a paper from a JSON file, which lies beside its module.

A file has ``columns`` (name -> what a Column has) and ``tables`` (name of a table -> row -> what a Published
has). It holds facts and figures only; what a row changes is in the module.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.study.table import Column, Published


class PublishedScores:
    """The columns of a paper, and the scores of the rows of its tables."""

    def __init__(self, path: Path):
        """Read a file such as ``Path(__file__).with_name("glu_scores.json")``."""
        file = json.loads(path.read_text("utf-8"))
        self.columns = tuple(Column(name, **column) for name, column in file["columns"].items())
        self._tables: Mapping[str, Mapping[str, Any]] = file["tables"]

    def table(self, name: str) -> dict[str, Published]:
        """Return row -> its published scores, in the order of the paper."""
        return {key: _published(row) for key, row in self._tables[name].items()}


def _published(row: Mapping[str, Any]) -> Published:
    return Published(**{**row, "unsure": tuple(row.get("unsure", ()))})
