"""Reads finished runs from one or several folders of runs: results and provenance."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from experiments.report.comparison import Mismatch, Warn
from experiments.runs import provenance
from experiments.runs.curves import read_records
from experiments.runs.paths import PRETRAINING
from experiments.runs.result import Result, check_settings, read_result
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import effective_overrides, overrides_of
from experiments.study.paths import run_folder, seed_folders
from experiments.study.plugins import STUDY_OPTION
from experiments.study.registry import build
from experiments.study.table import Row
from lm.config.base import SettingError
from lm.tokenizers.tokenizer import TOKENIZER_ALGORITHMS

Folders = str | os.PathLike | Sequence[str | os.PathLike]  # one folder of runs, or several
MAX_SHOWN_VALUE = 60  # a longer difference in provenance is shown without its values [characters]


def run_roots(runs: Folders) -> list[Path]:
    """Return the folders of runs as paths, which may be in a bucket; SettingError if one cannot be read."""
    if isinstance(runs, str | os.PathLike):
        runs = [runs]
    paths = [_path(root) for root in runs]
    for path in paths:
        try:
            path.exists()
        except (ImportError, OSError) as error:  # no package for this kind of bucket, or no permission
            raise SettingError(f"--runs {path} cannot be read: {error}") from error
    return paths


def _path(root: str | os.PathLike) -> Path:
    """Return a path that also opens buckets; for local folders a plain one, which is several times faster."""
    return epath.Path(root) if "://" in os.fspath(root) else Path(root)


def find_results(
    row: Row, scale: str, runs: Folders, warn: Warn | None = None, overrides: Overrides | None = None
) -> list[Result]:
    """Return every finished seed of ``row`` at ``scale``; a seed in several folders of runs counts once.

    overrides: settings that the runs were given on the command line.
    warn: called with a line on each run that is left out; without it the first such run is an error.
    """
    results: dict[int, Result] = {}
    experiment = build(row.name, scale, effective_overrides(row.name, scale, overrides or {}))
    named = overrides_of(row.name, scale, experiment) if overrides else {}
    for root in run_roots(runs):
        for folder in seed_folders(run_folder(root, scale, row.name, 0, named).parent):
            try:
                check_settings(replace(experiment, seed=int(folder.name.removeprefix("seed-"))), folder)
                result = read_result(folder, root / scale)
            except (SettingError, OSError) as error:
                if warn is None:
                    raise
                warn(str(error))
                continue
            if result is not None:
                results.setdefault(result.seed, result)
            elif warn is not None:
                warn(f"{folder} has not finished")
    return [results[seed] for seed in sorted(results)]


# ---- provenance


class Ingredient(NamedTuple):
    """One thing that a stage was trained with, such as its code."""

    run: str  # row and seed
    folder: Path  # folder of the run, which several rows may share
    kind: tuple[Any, ...]  # its name, and the settings that it depends on
    value: Mapping[str, Any]


def provenance_mismatches(
    runs: Mapping[str, Sequence[Result]], experiments: Mapping[str, Experiment]
) -> dict[str, list[Mismatch]]:
    """Return row -> each difference of its runs' provenance from that of most other runs.

    runs: row -> its finished seeds, the baseline first. The majority is taken as the norm and, in a tie, the
    first run. Rows whose settings choose other data or another vocabulary are compared only with runs of the
    same settings. Rows without differences are left out. Unknown provenance counts as a difference, and so
    does pre-training that was trained again after the run was scored, which other rows may have started from.
    """
    ingredients: list[tuple[str, int, Ingredient]] = []  # row, seed, ingredient
    found: dict[str, list[Mismatch]] = {}
    read_record = lru_cache(maxsize=None)(provenance.read)  # runs may share their pre-training
    known: dict[Path, list[Ingredient]] = {}  # folder of a run, which rows may share -> its ingredients
    for row, seeds in runs.items():
        for run in seeds:
            try:
                if run.folder not in known:
                    name = f"{row} seed {run.seed}"
                    known[run.folder] = [*_ingredients(name, run, experiments[row], read_record)]
                ingredients += [(row, run.seed, each) for each in known[run.folder]]
                reasons = _trained_again(run)
            except (SettingError, OSError) as error:
                reasons = [f"its provenance is unknown: {error}"]
            found.setdefault(row, []).extend(Mismatch(row, run.seed, reason) for reason in reasons)
    expected = _most_common(each for _, _, each in ingredients)
    for row, seed, each in ingredients:
        usual = expected[each.kind]
        if each.value != usual.value:
            reason = f"{each.kind[0]} than {usual.run}: {_difference(usual.value, each.value)}"
            found[row].append(Mismatch(row, seed, reason))
    return {row: list(dict.fromkeys(of_row)) for row, of_row in found.items() if of_row}


def _trained_again(run: Result) -> list[str]:
    """Return a reason if a run's held-out loss is not the last one in the record of its pre-training.

    Rows share pre-training. Where its checkpoint is missing it is trained again, and on another machine the
    rounding, and so the loss, may differ.
    """
    folder = run.stage_folders().get(PRETRAINING)
    if folder is None or run.held_out_loss is None:
        return []
    with suppress(SettingError, OSError):  # which the curves report
        losses = [line.get("loss") for line in read_records(folder, 0) if line.get("kind") == "eval"]
        if losses and losses[-1] not in (None, run.held_out_loss):
            return [
                f"its pre-training was trained again since: held-out loss {run.held_out_loss:.4f} "
                f"-> {losses[-1]:.4f}"
            ]
    return []


def _most_common(ingredients: Iterable[Ingredient]) -> dict[Any, Ingredient]:
    """Return kind -> an ingredient with the value that most runs have."""
    values: dict[Any, list[dict[Path, Ingredient]]] = {}  # kind -> for each value, the runs that have it
    for each in ingredients:
        groups = values.setdefault(each.kind, [])
        for group in groups:
            if next(iter(group.values())).value == each.value:
                group.setdefault(each.folder, each)
                break
        else:
            groups.append({each.folder: each})
    return {kind: _example_of_largest(groups) for kind, groups in values.items()}


def _example_of_largest(groups: Sequence[Mapping[Path, Ingredient]]) -> Ingredient:
    """Return an ingredient of the largest group: the first whose run is in no other group, else the first.

    A run whose stages were trained by different code is in several groups.
    """
    largest = max(groups, key=len)
    elsewhere = set[Path]().union(*(group for group in groups if group is not largest))
    of_one = (each for folder, each in largest.items() if folder not in elsewhere)
    return next(of_one, next(iter(largest.values())))


def _ingredients(
    name: str, run: Result, experiment: Experiment, read_record: Callable[[Path], Mapping[str, Any]]
) -> Iterator[Ingredient]:
    """Yield everything that the stages of a run were trained with, from the record in each one's folder."""
    data = experiment.data
    algorithm, _, corpus = data.vocabulary.partition(":")
    vocabulary: tuple[Any, ...] = (data.vocabulary, data.sentinels, experiment.start.model)
    if algorithm in TOKENIZER_ALGORITHMS:
        tasks = experiment.tuning.mixtures if data.vocabulary_texts == "corpus+tasks" else ()
        texts = (corpus or data.corpus, data.corrupt_records, tasks)
        vocabulary = (algorithm, *texts, data.vocabulary_size, data.sentinels)
    folders = run.stage_folders()
    for stage in run.stages:
        if stage not in folders:
            raise SettingError(f"the folder of {stage} is missing")
        record = read_record(folders[stage])
        for split, fingerprint in record["data"].items():
            source = {"corpus": data.corpus, "vocabulary": data.vocabulary}.get(split.split()[0])
            kind = ("other data", split, source, data.corrupt_records)
            yield Ingredient(name, run.folder, kind, {split: fingerprint})
        yield Ingredient(name, run.folder, ("other vocabulary", *vocabulary), record["vocabulary"])
        code = dict(record["code"])
        modules = {file: code.pop(file) for file in record["code"] if file.startswith(STUDY_OPTION)}
        yield Ingredient(name, run.folder, ("other code",), code)
        for file, digest in modules.items():  # stages that were trained without it are not compared in it
            yield Ingredient(name, run.folder, ("other code", file), {file: digest})
        yield Ingredient(name, run.folder, ("other packages",), record["packages"])
        allowed = {"allowed": [each["changed"] for each in record["allowed"]]}
        yield Ingredient(name, run.folder, ("another history",), allowed)


def _difference(usual: Mapping[str, Any], value: Mapping[str, Any]) -> str:
    """Return the names in which two records differ, with short values such as versions of packages."""
    names = [name for name in {**usual, **value} if usual.get(name) != value.get(name)]
    texts = []
    for name in names[:3]:
        text = f"{name} {usual.get(name, 'none')} -> {value.get(name, 'none')}"
        texts.append(text if len(text) < MAX_SHOWN_VALUE else name)
    if len(names) > 3:
        texts.append(f"{len(names) - 3} more")
    return ", ".join(texts)
