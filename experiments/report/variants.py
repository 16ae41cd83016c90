"""Runs of a row with settings given by hand, found by their folders, as rows of their own."""

import re
from dataclasses import replace
from pathlib import Path

from experiments.report.results import Complain, Folders, roots
from experiments.runs.stages import load_settings
from experiments.study.experiment import Changes, Row, Table
from experiments.study.registry import REGISTRY, by_hand, named_changes, run_folder, start_changes, twin
from lm.settings import SettingError


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
    for root in roots(runs):
        plain = run_folder(Path(root), scale, row.name, 0, {}).parent
        for folder in sorted(plain.parent.glob(f"{plain.name},*/seed-*")):
            if not re.fullmatch(r"seed-\d+", folder.name):
                continue
            try:
                experiment = load_settings(folder)
                given = by_hand(row.name, scale, experiment)
            except SettingError as error:
                complain(str(error))
                continue
            given = {path: value for path, value in given.items() if path != "seed"}
            changed = start_changes(experiment) | given
            new = variant(row, changed, folder.parent.name.removeprefix(plain.name))
            twins = [other.name for other in REGISTRY.values() if other.changes == new.changes]
            twins += [other for other, x in found.items() if other != new.name and x.changes == new.changes]
            if twins:
                complain(f"{folder} has the settings of {twins[0]}, under which it is not counted")
            else:
                found.setdefault(new.name, new)
    return list(found.values())


def homes_of(tables: list[Table]) -> list[Row]:
    """Rows by whose names the folders of the variants in ``tables`` are called, then the variants."""
    new = [row for table in tables for row in table.rows if row.name not in REGISTRY]
    homes = []
    for row in new:
        plain = next(
            x for x in REGISTRY.values() if x.table == row.table and row.name.startswith(f"{x.name},")
        )
        home = REGISTRY[twin(plain.name)]
        suffix = row.name.removeprefix(plain.name)
        homes.append(replace(row, name=home.name + suffix))
    return homes + new


def variant(row: Row, given: Changes, suffix: str) -> Row:
    """``row`` with settings given by hand and those of its start, without scores of the paper.

    ``suffix`` is what its folder is called behind the row's, also by an earlier release.
    """
    named = sorted(named_changes(given).items())
    short = [(path.removesuffix(".model").rpartition(".")[2], value) for path, value in named]
    text = ", ".join(f"{name}={value}" for name, value in short)
    return Row(f"{row.name}{suffix}", f"{row.label}, {text}", row.changes | given, {})
