"""Compare the order of rows at one scale with that at another, for `lm report --against`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report.comparison import Comparison
from experiments.report.metrics import Group
from experiments.report.order import ScalePrediction, SeedScores, scale_prediction
from lm.config.base import SettingError
from lm.files import parse_with_checksum

# what looking up values raises in a file of another form
MALFORMED = (AttributeError, KeyError, TypeError, ValueError)
GroupScores = Mapping[Group, SeedScores]  # group of metrics -> row -> seed -> combined score


def predictions(
    comparisons: Sequence[Comparison], others: Mapping[str, GroupScores]
) -> dict[str, dict[Group, ScalePrediction]]:
    """Return table -> group of metrics -> how far its order predicts that of ``others`` (table -> scores).

    Only rows that both have are compared; tables with fewer than two of them are left out.
    """
    found: dict[str, dict[Group, ScalePrediction]] = {}
    for comparison in comparisons:
        other = others.get(comparison.table.name, {})
        for group, scores in combined_scores(comparison).items():
            prediction = scale_prediction(scores, other[group]) if group in other else None
            if prediction is not None:
                found.setdefault(comparison.table.name, {})[group] = prediction
    return found


def combined_scores(comparison: Comparison) -> dict[Group, dict[str, dict[int, float]]]:
    """Return group of metrics -> row -> seed -> combined score, of rows that have left the plateau."""
    scores: dict[Group, dict[str, dict[int, float]]] = {group: {} for group in comparison.groups}
    for row in comparison.trained_rows:
        name = comparison.canonical_name(row)
        if comparison.has_left_plateau(name):
            for group, by_row in scores.items():
                by_row[row.name] = comparison.combined_scores(name, group)
    return scores


def read_combined_scores(path: Path) -> dict[str, dict[Group, dict[str, dict[int, float]]]]:
    """Return table -> the combined scores in ``results.json`` of a report; SettingError for another file.

    As in ``combined_scores``, rows on the unigram plateau are left out.
    """
    scores: dict[str, dict[Group, dict[str, dict[int, float]]]] = {}
    tables = read_tables(path)
    try:
        for name, table in tables.items():
            by_group = scores.setdefault(name, {})
            for row, values in table["rows"].items():
                if not has_left_plateau(values):
                    continue
                for group, seeds in values["combined"].items():
                    by_seed = {int(seed): score for seed, score in seeds.items()}
                    by_group.setdefault(group, {})[row] = by_seed
    except MALFORMED as error:
        raise malformed(path, error) from error
    return scores


def has_left_plateau(row: Mapping[str, Any]) -> bool:
    """Return whether a row of ``results.json`` has left the unigram plateau, as ``Comparison`` has it."""
    runs = row["seeds"].values()
    num_stuck = sum(run["content_loss"] is not None and run["exit_step"] is None for run in runs)
    return not row["has plateau"] or 2 * num_stuck < len(runs) or not runs


def malformed(path: Path, error: Exception) -> SettingError:
    """Return the error for a results.json whose tables lack what this version writes."""
    return SettingError(
        f"{path} should be the results.json of a report by this version; make it anew: {error!r}"
    )


def read_tables(path: Path) -> Mapping[str, Any]:
    """Return the tables in ``results.json`` of a report; SettingError for any other file."""
    try:
        tables = parse_with_checksum(path.read_bytes(), path)["tables"]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} should be the results.json of a report: {error}") from error
    return tables
