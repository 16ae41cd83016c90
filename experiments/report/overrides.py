"""Runs of a row with settings given on the command line, found by their folders, as rows beside it."""

from dataclasses import replace
from pathlib import Path

from experiments.report.comparison import Warn
from experiments.report.results import Folders, run_roots
from experiments.runs.paths import load_settings
from experiments.study.changes import Overrides, apply
from experiments.study.experiment import Experiment
from experiments.study.overrides import explicit_overrides, overrides_of, setting_values, start_changes
from experiments.study.paths import row_folder, seed_folders
from experiments.study.registry import REGISTRY, build, equal_rows
from experiments.study.table import Published, Row, Table, make_row
from lm.config.base import SettingError


def with_override_rows(tables: list[Table], scale: str, runs: Folders, warn: Warn) -> list[Table]:
    """Return the tables with each row followed by its variants that were run at ``scale``.

    Where the baseline was never run with its own settings, the table's first row with runs takes its place,
    so that the variants are compared with one another.
    """
    extended = []
    for table in tables:
        rows: list[Row] = []
        for row in table.rows:
            rows += [row, *override_rows(row, scale, runs, warn)]
        names = [table.baseline, *(row.name for row in rows)]
        baseline = next((name for name in names if _has_runs(name, scale, runs)), table.baseline)
        extended.append(replace(table, rows=tuple(rows), baseline=baseline))
    return extended


def _has_runs(name: str, scale: str, runs: Folders) -> bool:
    """Return whether row ``name`` has runs, finished or not, with its own settings."""
    if name not in REGISTRY:  # a variant, which was found by its runs
        return True
    if REGISTRY[name].needs:
        return False
    return any(map(seed_folders, _plain_folders(name, scale, runs)))


def _plain_folders(name: str, scale: str, runs: Folders) -> list[Path]:
    """Return where runs of row ``name``, or of an equal row, lie that have its own settings."""
    homes = equal_rows(name, scale)
    folders = []
    for root in run_roots(runs):
        folders += [row_folder(root, scale, home, {}) for home in homes]
    return folders


def override_rows(row: Row, scale: str, runs: Folders, warn: Warn) -> list[Row]:
    """Return a row for each combination of settings that ``row`` was run with, in the order of their folders.

    ``warn`` is called with each that cannot be read, or that is another row of the study.
    """
    if row.needs:
        return []
    folders: list[tuple[Path, str]] = []  # of a run, and the name of the row that it is called by
    for plain in _plain_folders(row.name, scale, runs):
        for changed in sorted(plain.parent.glob(f"{plain.name},*")):
            folders += [(folder, plain.name) for folder in seed_folders(changed)]
    if not folders:  # building all rows takes a second
        return []
    found: dict[str, Row] = {}
    known: dict[Experiment, str] = {}  # experiment -> name of the row or variant
    for name, other in REGISTRY.items():
        if not other.needs:
            known.setdefault(build(name, scale), name)
    for folder, home_name in folders:
        try:
            experiment = load_settings(folder)
            overrides = overrides_of(row.name, scale, experiment)
        except SettingError as error:
            warn(str(error))
            continue
        overrides.pop("seed", None)
        changes = start_changes(experiment) | overrides
        new = override_row(row, changes, folder.parent.name.removeprefix(home_name))
        same = known.setdefault(apply(build(row.name, scale), changes), new.name)
        if same != new.name:
            warn(f"{folder} has the settings of {same}, under which it is not counted")
        else:
            found.setdefault(new.name, new)
    return list(found.values())


def override_row(row: Row, changes: Overrides, suffix: str) -> Row:
    """Return ``row`` with these settings, without published scores.

    ``suffix`` follows the row's name in the name of the folder.
    """
    given = dict(sorted(explicit_overrides(changes).items()))
    published = Published(f"{row.label}, {setting_values(given)}", {})
    return make_row(f"{row.name}{suffix}", row.changes | changes, published, row.setup)


def variant_rows(tables: list[Table], scale: str) -> list[Row]:
    """Return the variants in ``tables``, after the rows by whose names their folders are called."""
    new: list[Row] = []
    for table in tables:
        new += [row for row in table.rows if row.name not in REGISTRY]
    homes = []
    for row in new:
        plain = next(
            other
            for other in REGISTRY.values()
            if other.table == row.table and row.name.startswith(f"{other.name},")
        )
        suffix = row.name.removeprefix(plain.name)
        homes += [replace(row, name=home + suffix) for home in equal_rows(plain.name, scale)]
    return homes + new
