"""Runs of a row with settings given by hand, found by their folders, as rows of their own."""

import re
from dataclasses import replace
from pathlib import Path

from experiments.report.results import Complain, Folders, roots
from experiments.runs.stages import load_settings
from experiments.study.changes import Overrides, apply
from experiments.study.experiment import Experiment
from experiments.study.overrides import named_changes, overrides_of, start_changes
from experiments.study.paths import row_folder
from experiments.study.registry import REGISTRY, build, equal_rows
from experiments.study.table import Row, Table, make_row
from lm.config.base import SettingError


def with_variants(tables: list[Table], scale: str, runs: Folders, complain: Complain) -> list[Table]:
    """The tables, each row of which is followed by its variants that were run at ``scale``."""
    return [
        replace(
            table,
            rows=tuple(each for row in table.rows for each in (row, *variants(row, scale, runs, complain))),
        )
        for table in tables
    ]


def variants(row: Row, scale: str, runs: Folders, complain: Complain) -> list[Row]:
    """A row for each combination of settings that ``row`` was run with, in the order of their folders.

    ``complain`` is called with each that cannot be read, or that is another row of the study.
    """
    found: dict[str, Row] = {}
    known: dict[Experiment, str] = {}  # what is built -> the name of a variant or row
    for name in REGISTRY:
        known.setdefault(build(name, scale), name)
    homes = equal_rows(row.name, scale)
    for plain in (row_folder(Path(root), scale, home, {}) for root in roots(runs) for home in homes):
        for folder in sorted(plain.parent.glob(f"{plain.name},*/seed-*")):
            if not re.fullmatch(r"seed-\d+", folder.name):
                continue
            try:
                experiment = load_settings(folder)
                given = overrides_of(row.name, scale, experiment)
            except SettingError as error:
                complain(str(error))
                continue
            given = {path: value for path, value in given.items() if path != "seed"}
            changed = start_changes(experiment) | given
            new = variant(row, changed, folder.parent.name.removeprefix(plain.name))
            twin = known.setdefault(apply(build(row.name, scale), changed), new.name)
            if twin != new.name:
                complain(f"{folder} has the settings of {twin}, under which it is not counted")
            else:
                found.setdefault(new.name, new)
    return list(found.values())


def homes_of(tables: list[Table], scale: str) -> list[Row]:
    """Return rows by whose names the folders of the variants in ``tables`` are called, then the variants."""
    new = [row for table in tables for row in table.rows if row.name not in REGISTRY]
    homes = []
    for row in new:
        plain = next(
            x for x in REGISTRY.values() if x.table == row.table and row.name.startswith(f"{x.name},")
        )
        suffix = row.name.removeprefix(plain.name)
        homes += [replace(row, name=home + suffix) for home in equal_rows(plain.name, scale)]
    return homes + new


def variant(row: Row, given: Overrides, suffix: str) -> Row:
    """``row`` with settings given by hand and those of its start, without scores of the paper.

    ``suffix`` is what the name of its folder has behind the row's.
    """
    named = sorted(named_changes(given).items())
    short = [(path.removesuffix(".model").rpartition(".")[2], value) for path, value in named]
    text = ", ".join(f"{name}={value}" for name, value in short)
    return make_row(f"{row.name}{suffix}", f"{row.label}, {text}", row.changes | given, {})
