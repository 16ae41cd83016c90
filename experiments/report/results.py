"""Finished runs, in one folder of runs or several: their results, curves, and what they were made of."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from experiments.report.comparison import Curves, Finished
from experiments.runs import origin
from experiments.runs.result import Result, check_settings, read_result
from experiments.runs.stages import group_of, is_main
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import overrides_of, used_changes
from experiments.study.paths import run_folder
from experiments.study.registry import build
from experiments.study.table import Row
from lm.config.base import DataError, SettingError
from lm.files import parse_lines_with_checksum
from lm.tokenizers.tokenizer import TRAINED_KINDS

Folders = str | os.PathLike | Sequence[str | os.PathLike]  # one folder of runs, or several
Complain = Callable[[str], object]  # is called with each thing that does not count, and why
PLOTTED = 1e30  # larger values, and what is not a number, are left out of a curve
LONGEST_VALUE = 60  # of a difference in what runs were made of that is shown with its values [letters]


def roots(runs: Folders) -> list[epath.Path]:
    """The folders of runs, as paths that may lie in a bucket; SettingError if they cannot be read."""
    paths = [epath.Path(root) for root in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    for path in paths:
        try:
            path.exists()
        except (ImportError, OSError) as error:  # no package for this kind of bucket, or no right to read it
            raise SettingError(f"--runs {path} cannot be read: {error}") from error
    return paths


def results(
    row: Row, scale: str, runs: Folders, complain: Complain | None = None, overrides: Overrides | None = None
) -> list[Result]:
    """Every finished seed of ``row`` at ``scale``; a seed that lies in several folders of runs counts once.

    ``overrides``: settings changed on the command line. ``complain`` is called with each run that does not
    count; without it the first such run is an error.
    """
    results: dict[int, Result] = {}
    experiment = build(row.name, scale, used_changes(row.name, scale, overrides or {}))
    changed = overrides_of(row.name, scale, experiment) if overrides else {}
    for root in roots(runs):
        parent = run_folder(root, scale, row.name, 0, changed).parent
        folders = parent.iterdir() if parent.exists() else ()
        for folder in sorted(f for f in folders if re.fullmatch(r"seed-\d+", f.name)):
            try:
                check_settings(replace(experiment, seed=int(folder.name.removeprefix("seed-"))), folder)
                result = read_result(folder)
            except (SettingError, OSError) as error:
                if complain is None:
                    raise
                complain(str(error))
                continue
            if result is not None:
                results.setdefault(result.seed, result)
            elif complain is not None:
                complain(f"{folder} has not finished")
    return [results[seed] for seed in sorted(results)]


def curves(runs: Iterable[Result], complain: Complain) -> Curves:
    """The losses of pre-training and the scores of fine-tuning, a line for each seed and ensemble member.

    What was recorded once only has no line.
    ``complain`` is called with each file that is damaged, which gives no line.
    """
    drawn: dict[str, list] = {}
    for result in runs:
        for stage, folder in result.phase_folders().items():
            try:
                records = stage_records(folder, result.records.get(stage, 0))
            except (SettingError, OSError) as error:
                complain(f"{error}; its curves are not shown")
                continue
            for title, (kind, *values) in watched(stage).items():
                lines = [line for line in records if line.get("kind") == kind]
                for value in values:
                    points = [(line.get("step"), line.get(value)) for line in lines]
                    points = [point for point in points if all(map(_is_plotted, point))]
                    drawn.setdefault(title, []).extend([points] if len(points) > 1 else [])
    return {title: lines for title, lines in drawn.items() if lines}


def watched(stage: str) -> Mapping[str, tuple[str, ...]]:
    """What is drawn of a stage -> the kind of its records, and the values in them; of main ones alone."""
    if not is_main(stage):
        return {}
    group, pretrains = group_of(stage)
    if not pretrains:
        return {f"{group}: mean of scores": ("eval", "score")}
    train, held_out = "pre-training loss [nats/token]", "held-out loss [nats/token]"
    content, frequent = "content loss, and without context [nats]", "predictions that are a frequent piece"
    losses = {train: ("train", "loss"), held_out: ("eval", "loss")}
    return losses | {content: ("eval", "content_loss", "reference_loss"), frequent: ("eval", "top_ten_share")}


def stage_records(folder: Path, count: int) -> list[dict[str, Any]]:
    """What a stage of a finished run recorded: ``count`` lines or more; DataError if it is damaged."""
    path, mend = folder / "metrics.jsonl", "put back an undamaged copy"
    lines = parse_lines_with_checksum(path.read_bytes(), path, mend) if path.exists() else []
    if len(lines) < count:
        raise DataError(f"{path} has lost its end: it has {len(lines)} of {count} lines; {mend}")
    return lines


def _is_plotted(value: Any) -> bool:
    return isinstance(value, int | float) and -PLOTTED < value < PLOTTED


def unlike(finished: Finished, scale: str) -> dict[str, list[str]]:
    """Row -> a line for each thing that its runs were made of and most others were not.

    What most runs were made of is expected; of as many, what the first was, which is the baseline's if there
    is one. Rows whose settings choose other data or another vocabulary are compared with the runs that have
    the same such settings. A row is in the result if anything of it differs, or is unknown.
    """
    made: list[tuple[str, Made]] = []  # row, what one of its runs was made of
    lines: dict[str, list[str]] = {}
    for row in dict.fromkeys(row.name for row in (finished.baseline, *finished.table.rows)):
        experiment = build(row, scale)
        for run in finished.runs[row]:
            name = f"{row} seed {run.seed}"
            try:
                made.extend((row, Made(run.folder, name, *each)) for each in ingredients(run, experiment))
            except (SettingError, OSError) as error:
                lines.setdefault(row, []).append(f"{name}: it is not known: {error}")
    expected = _expected(one for _, one in made)
    for row, one in made:
        usual = expected[one.key]
        if one.value != usual.value:
            other = f"{one.key[0]} than {usual.name}: {_difference(usual.value, one.value)}"
            lines.setdefault(row, []).append(f"{one.name}: {other}")
    return {row: [*dict.fromkeys(of_row)] for row, of_row in lines.items()}


class Made(NamedTuple):
    """One thing that a run was made of."""

    folder: Path  # of the run, which may stand under the names of several rows
    name: str
    key: tuple[Any, ...]  # what it is, and the settings it depends on
    value: Any


def _expected(made: Iterable[Made]) -> dict[Any, Made]:
    """Key -> that with the value which most runs have, of the first of them."""
    seen: dict[Any, list[dict[Path, Made]]] = {}  # key -> for each value the runs that have it
    for each in made:
        values = seen.setdefault(each.key, [])
        same = next((runs for runs in values if next(iter(runs.values())).value == each.value), None)
        if same is None:
            values.append({each.folder: each})
        else:
            same.setdefault(each.folder, each)
    return {key: next(iter(max(values, key=len).values())) for key, values in seen.items()}


def ingredients(run: Result, experiment: Experiment) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(what, and the settings it depends on; value) of all that the stages of a run were made of."""
    data = experiment.data
    kind, _, corpus = data.vocabulary.partition(":")
    vocabulary: tuple[Any, ...] = (data.vocabulary, data.sentinels, experiment.start.model)
    if kind in TRAINED_KINDS:
        tasks = experiment.tuning.mixtures if data.vocabulary_texts == "corpus+tasks" else ()
        texts = (corpus or data.corpus, data.corrupt_records, tasks)
        vocabulary = (kind, *texts, data.vocabulary_size, data.sentinels)
    folders = run.phase_folders()
    for stage in run.phases:
        if stage not in folders:
            raise SettingError(f"the folder of {stage} is missing")
        record = origin.read(folders[stage])
        for split, fingerprint in record["data"].items():
            setting = {"corpus": data.corpus, "vocabulary": data.vocabulary}.get(split.split()[0])
            yield ("other data", split, setting, data.corrupt_records), {split: fingerprint}
        yield ("other vocabulary", *vocabulary), record["vocabulary"]
        yield ("other code",), record["code"]
        yield ("other packages",), record["packages"]
        yield ("another history",), {"allowed": [each["changed"] for each in record["allowed"]]}


def _difference(usual: Mapping[str, Any], value: Mapping[str, Any]) -> str:
    """The names in which two records differ, with short values beside them, such as versions of packages."""
    names = [name for name in {**usual, **value} if usual.get(name) != value.get(name)]
    texts = [f"{name} {usual.get(name, 'none')} -> {value.get(name, 'none')}" for name in names]
    listed = [text if len(text) < LONGEST_VALUE else name for name, text in zip(names, texts, strict=True)]
    return ", ".join([*listed[:3], f"{len(names) - 3} more"] if len(names) > 3 else listed)
