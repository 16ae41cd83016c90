"""Recomputes the statistics of a report from the scores of its runs, with numpy and scipy (1.15) alone.

    python docs/results/check.py docs/results/mini.json docs/results/mini*.tar.xz

The first argument is a report's ``results.json``; the others are the archives or folders with its runs. The
script imports nothing of this project and is written from the definitions that docs/choices.md gives, so that
it finds faults of the report's own code. It prints each figure that does not follow from the runs and returns
1 if there is one. Random resamples are its own; what they decide is compared within their error. Only the
bootstrap over seeds alone (BCa) is that of scipy.stats.bootstrap with the report's random seed.

RECOMPUTED, RECORDED and UNCHECKED say what is computed anew, what is compared with the record that training
wrote, and what is taken from the report as it stands.
"""

import argparse
import functools
import hashlib
import io
import json
import math
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import integrate, optimize, special, stats

ALPHA = 0.05
MARGIN = 2 * math.sqrt(2 / 7)  # of equivalence [noise deviations]
RESAMPLES = 10_000
SEED = 20261125
CHUNK = 500  # resamples at a time
SIGNIFICANT_Z = 2.0
UNCOMPARED = ("not yet learning", "out of range", "no common seed", "different targets", "same experiment")
BUDGETS = ("updates", "FLOP")
HELD_OUT = ("held-out loss", "bits per byte")
TARGET_SETTINGS = ("corpus", "sentinels", "inputs_length")  # of the data, beside the objective
EXACT = 1e-6  # relative error of what needs no resamples
ORDERS = 100_000  # random orders of rows that p of tau is estimated from
# share of resamples below which the ends of a 95 % interval lie, of two draws of RESAMPLES
ENDS = ((0.015, 0.036), (0.964, 0.985))
# relative errors of a variance over resamples: of all of it, and of what examples add to it, since columns of
# as many examples share the draws of the report, and do not share those of this script
RESAMPLED_ERROR, EXAMPLES_ERROR = 0.08, 0.25
# what scores.json of a run holds beside scores, and the report repeats -> its value if it is not there
COUNTERS: dict[str, Any] = {
    "content_tokens": 0,
    "content_loss": None,
    "reference_loss": None,
    "top_ten_share": None,
    "exit_step": None,
    "flops": 0.0,
    "held_out_loss": None,
    "parameters": 0,
    "seconds": 0.0,
    "tokens": 0,
    "likelihoods": [],
}
RECOMPUTED = (
    "scores, units, deviations, signal-to-noise, rows above chance, differences, p, intervals (t, "
    "multi-bootstrap, BCa), verdicts, orders, counts, and that no seed of a row is left out"
)
RECORDED = "FLOP, parameters, seconds, tokens, losses, exit steps"
UNCHECKED = (
    "the paper's scores, labels and conclusions, which rows and columns there are (their tasks, measure, "
    "chance, and whether they are judged), how many updates a row has and whether it has a plateau, "
    "which rows are compared with the start, why a score is undefined, provenance, the .csv, intervals of a "
    "prediction and the scores of --other (without it, all of a prediction)"
)


# ---- files


@dataclass
class Archive:
    """The files of the runs that are needed."""

    scores: dict[str, dict] = field(default_factory=dict)  # path of scores.json -> its contents
    settings: dict[str, dict] = field(default_factory=dict)  # path of settings.json -> its contents
    examples: dict[str, np.ndarray] = field(default_factory=dict)  # SHA-256 of a file -> values of examples

    def add(self, path: str, read: Callable[[], bytes]) -> None:
        """Keep a file if it holds scores or settings of a run, or values of examples."""
        if path.endswith("/scores.json"):
            self.scores[path] = json.loads(read())
        elif path.endswith("/settings.json"):
            self.settings[path] = json.loads(read())
        elif path.endswith(".npy") and "/report/" in path:
            contents = read()
            self.examples[hashlib.sha256(contents).hexdigest()] = np.load(io.BytesIO(contents))

    def run(self, folder: str) -> dict:
        """Return the scores of the run in ``folder``, which is given from the folder of its scale."""
        found = [path for path in self.scores if f"/{path}".endswith(f"/{folder}/scores.json")]
        if len({json.dumps(self.scores[path]) for path in found}) != 1:
            raise SystemExit(f"there are {len(found)} runs in {folder}; one is needed")
        return self.scores[found[0]]

    def seeds(self, folder: str) -> list[list[int]]:
        """Return the seeds of the runs in ``folder``, apart for each archive that has some."""
        found: dict[str, list[int]] = {}
        for path in self.scores:
            place, _, seed = f"/{path}".removesuffix("/scores.json").rpartition("/seed-")
            if place.endswith(f"/{folder}") and seed.isdigit():  # not the scores of one of its phases
                found.setdefault(place, []).append(int(seed))
        return [sorted(seeds) for seeds in found.values()] or [[]]

    def targets(self, folder: str) -> list:
        """Return the settings of the run in ``folder`` that decide which held-out tokens it predicts."""
        ending = f"/{folder}/settings.json"
        settings = next((found for path, found in self.settings.items() if f"/{path}".endswith(ending)), None)
        if settings is None:
            raise SystemExit(
                f"{folder} has no settings.json; it should be in the archive, beside scores.json"
            )
        architecture = settings["model"]["architecture"].removeprefix("shared-")
        return [settings["objective"], architecture, *(settings["data"][name] for name in TARGET_SETTINGS)]


def read_archives(paths: Iterable[Path]) -> Archive:
    """Return the files in archives (.tar.xz and others) and folders."""
    archive = Archive()
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                archive.add(str(file), file.read_bytes)
            continue
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isfile():
                    place = f"{path}/{member.name}"
                    archive.add(place, lambda tar=tar, member=member: tar.extractfile(member).read())
    return archive


# ---- one run


@dataclass
class Run:
    """Holds the scores of one seed of a row."""

    scores: Mapping[str, float]  # column -> value
    file: Mapping[str, Any]  # scores.json
    updates: int  # of pre-training
    errors: dict[str, np.ndarray] = field(default_factory=dict)  # column -> error by resample


def column_value(column: Mapping[str, Any], tasks: Mapping[str, Any]) -> float | None:
    """Return the mean over a column's tasks of the metric that counts; None if one is missing."""
    values = []
    for task in column["tasks"]:
        if task not in tasks:
            return None
        values.append(tasks[task]["metrics"].get(column["measure"], tasks[task]["score"]))
    return None if None in values else float(np.mean(values))


def run_scores(columns: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, float]:
    """Return the value of each column that a run has."""
    values: dict[str, float | None] = {}
    for name, column in columns.items():
        if column["measure"] == "held-out loss":
            values[name] = file.get("held_out_loss")
        elif column["measure"] == "bits per byte":
            last = file["likelihoods"][-1] if file.get("likelihoods") else None
            values[name] = last["nats"] / last["bytes"] / math.log(2) if last else None
        else:
            values[name] = column_value(column, file["tasks"])
    return {name: value for name, value in values.items() if value is not None}


def influence(column: Mapping[str, Any], file: Mapping[str, Any], archive: Archive) -> np.ndarray | None:
    """Return by how much each example, drawn once more, changes a column's value: [N]; None if unknown.

    For a ratio r = sum(a) / sum(b) it is (a_i - r b_i) / sum(b) to the first order; a mean has b = 1.
    """
    if column["measure"] in HELD_OUT or len(column["tasks"]) != 1:
        return None
    values = archive.examples.get(file["tasks"].get(column["tasks"][0], {}).get("examples"))
    name = "score" if column["measure"] == "score" else "bits"
    if values is None or not len(values) or name not in values.dtype.names:
        return None
    a = values[name]
    has_bytes = column["measure"] == "bits_per_byte" and "bytes" in values.dtype.names
    b = values["bytes"] if has_bytes else np.ones(len(a))
    return (a - a.sum() / b.sum() * b) / b.sum()


@functools.cache
def draw_examples(column: str, count: int) -> np.ndarray:
    """Return how often each of N examples, drawn with replacement, is in each resample: uint8 [RESAMPLES, N].

    A column has the same draws in all runs, tables and reports.
    """
    rng = np.random.default_rng([SEED, count, *column.encode()])
    counts = np.empty((RESAMPLES, count), np.uint8)
    for row in counts:
        row[:] = np.bincount(rng.integers(count, size=count), minlength=count)
    return counts


def resampling_errors(column: str, influences: Mapping[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Return run -> the error of its value in each resample of the examples."""
    if not influences:
        return {}
    matrix = np.stack([*influences.values()], axis=1)  # [N, runs]
    counts = draw_examples(column, len(matrix))
    chunks = [counts[i : i + CHUNK] - 1.0 for i in range(0, RESAMPLES, CHUNK)]
    return dict(zip(influences, np.concatenate([chunk @ matrix for chunk in chunks]).T, strict=True))


# ---- tests of differences


@dataclass
class Test:
    """A test of a mean difference of zero."""

    mean: float
    half_width: float = math.inf
    boot: tuple[float, float] = (-math.inf, math.inf)
    p: float = 1.0
    p_not_equivalent: float = 1.0
    by_seed: tuple[float, ...] = ()
    # between which another draw of resamples may put the half width, the ends of ``boot`` and the two p
    half_width_range: tuple[float, float] = (math.inf, math.inf)
    boot_ranges: tuple[tuple[float, float], ...] = ((-math.inf, -math.inf), (math.inf, math.inf))
    p_range: tuple[float, float] = (1.0, 1.0)
    p_not_equivalent_range: tuple[float, float] = (1.0, 1.0)

    @property
    def sign(self) -> int:
        """1 or -1 if the difference is significant by the t test and by the bootstrap."""
        excludes_zero = self.boot[0] > 0 or self.boot[1] < 0
        return int(np.sign(self.mean)) if self.p < ALPHA and excludes_zero else 0

    def others(self) -> list["Test"]:
        """Return the test as other draws of resamples may have it: at all ends of its ranges."""
        found = product(product(*self.boot_ranges), self.p_range, self.p_not_equivalent_range)
        return [replace(self, boot=boot, p=p, p_not_equivalent=other) for boot, p, other in found]


Difference = tuple[np.ndarray, np.ndarray]  # by seed [S]; by seed and resample of examples [S, RESAMPLES]


def moderate(variances: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return variances shrunk towards their common value, and their degrees of freedom (Smyth 2004).

    The prior's degrees of freedom d0 solve trigamma(d0 / 2) = var(e) - mean(trigamma(d / 2)) and its variance
    is exp(mean(e) + digamma(d0 / 2) - log(d0 / 2)), with e = log(s^2) - digamma(d / 2) + log(d / 2).
    Variances of zero, of rows that depend on no seed, are shrunk and say nothing of the prior.
    """
    known = variances > 0
    if known.sum() < 3:
        return variances, freedom
    d = freedom[known]
    e = np.log(variances[known]) - special.digamma(d / 2) + np.log(d / 2)
    excess = e.var(ddof=1) - special.polygamma(1, d / 2).mean()
    if excess < 1e-4:
        return np.full(len(variances), np.exp(e.mean())), np.full(len(variances), np.inf)
    d0 = 2 * optimize.brentq(lambda half: special.polygamma(1, half) - excess, 1e-3, 1e5)
    prior = np.exp(e.mean() + special.digamma(d0 / 2) - np.log(d0 / 2))
    return (d0 * prior + freedom * variances) / (d0 + freedom), d0 + freedom


def holm(p: np.ndarray) -> np.ndarray:
    """Return p-values adjusted by Holm (1979): the k-th smallest of m times m - k + 1, made monotone."""
    adjusted = np.empty(len(p))
    largest = 0.0
    for k, i in enumerate(np.argsort(p)):
        largest = max(largest, float(p[i]) * (len(p) - k))
        adjusted[i] = min(largest, 1.0)
    return adjusted


def seed_draws(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return weights of seeds in resamples, [RESAMPLES, S], spread so that their variance is unbiased."""
    weights = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    return 1 / count + (weights - 1 / count) * math.sqrt(count / (count - 1))


def test_all(
    differences: Mapping[tuple[str, str], Difference], rng: np.random.Generator
) -> dict[tuple[str, str], Test]:
    """Return a paired t test of each pair of rows, with Holm's correction over all of them."""
    tests = {
        pair: Test(float(by_seed.mean()), by_seed=tuple(by_seed.tolist()))
        for pair, (by_seed, _) in differences.items()
    }
    rounding = {pair: 1e-9 * np.abs(by_seed).max() for pair, (by_seed, _) in differences.items()}
    usable = [pair for pair, (by_seed, _) in differences.items() if len(by_seed) > 1]
    varied = [pair for pair in usable if differences[pair][0].std(ddof=1) > rounding[pair]]
    if not varied:
        return tests
    if len(varied) < 3:  # too few to give a pair without variance one
        usable = varied
    counts = np.array([len(differences[pair][0]) for pair in usable])
    own = np.array([differences[pair][0].var(ddof=1) if pair in varied else 0.0 for pair in usable])
    shrunk, freedom = moderate(own, counts - 1.0)
    # each seed after the first adds as many degrees of freedom as its pairs have independent differences
    limit, rows = 0, {row for pair in varied for row in pair}
    for seed in range(1, max(len(differences[pair][0]) for pair in varied)):
        having = [pair for pair in varied if len(differences[pair][0]) > seed]
        limit += int(np.linalg.matrix_rank([[(row == a) - (row == b) for row in rows] for a, b in having]))
    freedom = np.minimum(freedom, np.maximum(counts - 1, limit))
    by_examples = np.array([differences[pair][1].mean(0).var() for pair in usable])
    error = np.sqrt(np.maximum(own, shrunk) / counts + by_examples)
    means = np.array([tests[pair].mean for pair in usable])
    quantiles = stats.t.ppf(1 - ALPHA / 2, freedom)

    def p_values(error: np.ndarray) -> np.ndarray:
        """Return p of no difference and p of no equivalence, [2, pairs]."""
        different = holm(2 * stats.t.sf(np.abs(means) / error, freedom))
        return np.array([different, holm(stats.t.cdf((np.abs(means) - MARGIN) / error, freedom))])

    p, p_not_equivalent = p_values(error)
    spread = np.minimum(EXAMPLES_ERROR * by_examples, RESAMPLED_ERROR * error**2)
    errors_between = [np.sqrt(error**2 + sign * spread) * (1 + sign * EXACT) for sign in (-1, 1)]
    others = np.array([p_values(each) for each in errors_between])
    lowest, highest = others.min(0), others.max(0)
    narrowest, widest = (quantiles * each for each in errors_between)
    for i, pair in enumerate(usable):
        by_seed, errors = differences[pair]
        weights = seed_draws(len(by_seed), rng)
        resampled = weights @ by_seed + (weights.T * errors).sum(0)
        low, high, *ends = np.quantile(resampled, [ALPHA / 2, 1 - ALPHA / 2, *ENDS[0], *ENDS[1]]).tolist()
        tests[pair] = replace(
            tests[pair],
            half_width=float(quantiles[i] * error[i]),
            half_width_range=(float(narrowest[i]), float(widest[i])),
            boot=(low, high),
            p=float(p[i]),
            p_not_equivalent=float(p_not_equivalent[i]),
            boot_ranges=((ends[0], ends[1]), (ends[2], ends[3])),
            p_range=(float(lowest[0, i]), float(highest[0, i])),
            p_not_equivalent_range=(float(lowest[1, i]), float(highest[1, i])),
        )
    return tests


# ---- a table


class Table:
    """The runs of a table of the report, and what follows from them."""

    def __init__(self, name: str, data: Mapping[str, Any], archive: Archive, rng: np.random.Generator):
        """Read the runs that ``data``, the table in the report, names."""
        self.name, self.data, self.rng = name, data, rng
        self.columns = data["columns"]
        self.runs: dict[str, dict[int, Run]] = {}  # experiment -> seed -> run
        self.experiment = {row: values["same experiment as"] for row, values in data["rows"].items()}
        self.has_plateau: dict[str, bool] = {}
        self.folders: dict[str, str] = {}  # experiment -> folder of its seeds
        self.archived = archive.seeds
        # group -> budget -> how many claims have each verdict by the runs; ``check_claims`` fills it
        self.claim_counts: dict[str, dict[str, dict[str, Any]]] = {}
        for values in data["rows"].values():
            folders = {int(seed): each["folder"] for seed, each in values["seeds"].items()}
            self._add(
                values["same experiment as"], folders, values["updates"], values["has plateau"], archive
            )
        base = data["baseline run"]
        folders = {int(seed): folder for seed, folder in base["seeds"].items()}
        self.baseline = base["row"]
        self._add(self.baseline, folders, base["updates"], base["has plateau"], archive)
        control = data["over the start alone"]
        folders = {int(seed): folder for seed, folder in control["seeds"].items()}
        self.control = control["row"]
        if folders:
            self._add(self.control, folders, 1, False, archive)
        self.targets = {experiment: self._targets(experiment, archive) for experiment in self.runs}
        self._resample(archive)

    def _targets(self, experiment: str, archive: Archive) -> list | None:
        """Return what decides which held-out tokens the runs of an experiment predict; None without runs."""
        if not self.runs[experiment]:
            return None
        return archive.targets(f"{self.folders[experiment]}/seed-{next(iter(self.runs[experiment]))}")

    def _add(
        self, experiment: str, folders: Mapping[int, str], updates: int, has_plateau: bool, archive: Archive
    ) -> None:
        if experiment in self.runs:
            return
        self.has_plateau[experiment] = has_plateau
        self.runs[experiment] = {}
        self.folders[experiment] = str(Path(next(iter(folders.values()), f"{experiment}/seed-0")).parent)
        for seed, folder in folders.items():
            file = archive.run(folder)
            self.runs[experiment][seed] = Run(run_scores(self.columns, file), file, updates)

    def _resample(self, archive: Archive) -> None:
        """Draw the errors of all runs that are due to the choice of examples."""
        for name, column in self.columns.items():
            influences = {}
            for experiment, seeds in self.runs.items():
                for seed, run in seeds.items():
                    values = influence(column, run.file, archive)
                    if values is not None:
                        influences[experiment, seed] = values
            for (experiment, seed), errors in resampling_errors(name, influences).items():
                self.runs[experiment][seed].errors[name] = errors

    def sign(self, column: str) -> int:
        """Return 1 if higher is better in a column, else -1."""
        return 1 if self.columns[column]["higher is better"] else -1

    def weights(self, group: str) -> dict[str, float]:
        """Return column -> its weight in a group's mean over its unit, negative if lower is better."""
        return {
            name: weight * self.sign(name) / self.columns[name]["unit"]
            for name, weight in self.data["weights"][group].items()
        }

    def average(self, scores: Mapping[str, float], group: str) -> float:
        """Return the mean over a group's columns in noise deviations."""
        return sum(weight * scores[name] for name, weight in self.weights(group).items())

    def scored(self, experiment: str) -> dict[int, Run]:
        """Return seed -> run, of the runs that have all columns of all groups."""
        needed = {name for weights in self.data["weights"].values() for name in weights}
        return {seed: run for seed, run in self.runs[experiment].items() if needed <= run.scores.keys()}

    def is_comparable(self, a: str, b: str, columns: Iterable[str]) -> bool:
        """Return whether two experiments predict the same tokens, or no column is a loss on held-out text."""
        measures = {self.columns[name]["measure"] for name in columns}
        return "held-out loss" not in measures or self.targets[a] == self.targets[b]

    def combined(self, experiment: str, group: str) -> dict[int, float]:
        """Return seed -> average less the baseline's mean over common seeds."""
        if not self.is_comparable(experiment, self.baseline, self.data["weights"][group]):
            return {}
        own, base = self.scored(experiment), self.scored(self.baseline)
        if not base:
            return {}
        shared = own.keys() & base.keys() or base.keys()
        zero = np.mean([self.average(base[seed].scores, group) for seed in shared])
        return {seed: self.average(run.scores, group) - zero for seed, run in own.items()}

    def left_plateau(self, experiment: str, updates: Mapping[int, float] | None = None) -> bool:
        """Return whether fewer than half of an experiment's seeds are on the unigram plateau."""
        if not self.has_plateau[experiment]:
            return True
        runs = [
            (seed, run) for seed, run in self.runs[experiment].items() if updates is None or seed in updates
        ]
        stuck = 0
        for seed, run in runs:
            exit_step = run.file.get("exit_step")
            limit = math.inf if updates is None else updates[seed] * (1 + 1e-9)
            has_left = exit_step is not None and exit_step <= limit
            stuck += run.file.get("content_loss") is not None and not has_left
        return 2 * stuck < len(runs) or not runs

    def errors(self, experiment: str, seed: int, column: str) -> np.ndarray | None:
        """Return the errors of a run's column by resample; of the mean of other seeds if it has none."""
        runs = self.runs[experiment]
        if column in runs[seed].errors:
            return runs[seed].errors[column]
        known = [run.errors[column] for run in runs.values() if column in run.errors]
        return np.mean(known, axis=0) if known else None

    def difference(self, a: str, b: str, weights: Mapping[str, float], seeds: Sequence[int]) -> np.ndarray:
        """Return the errors of a weighted difference due to examples, [S, RESAMPLES]."""
        total = np.zeros((len(seeds), RESAMPLES))
        for column, weight in weights.items():
            for i, seed in enumerate(seeds):
                first, second = (self.errors(row, seed, column) for row in (a, b))
                if first is not None and second is not None:
                    total[i] += weight * (first - second)
        return total

    def at_equal_flops(self, run: Run, flops: float, group: str) -> tuple[float, float] | None:
        """Return a run's average and its updates when it had spent so many FLOP; None outside its range."""
        needed = {name: column for name, column in self.columns.items() if column["measure"] not in HELD_OUT}
        needed = {name: column for name, column in needed.items() if column["judged"]}
        early: dict[int, dict[str, Any]] = {}
        for task, branches in run.file.get("branches", {}).items():
            for updates, best in branches.items():
                early.setdefault(int(updates), {})[task] = best
        if self.data["weights"][group].keys() - needed.keys():  # held-out text, which counts at the end alone
            needed, early = {name: self.columns[name] for name in self.data["weights"][group]}, {}
        points = {}
        for updates, tasks in sorted(early.items()):
            values = {name: column_value(column, tasks) for name, column in needed.items()}
            if updates < run.updates and None not in values.values():
                points[updates] = values
        points[run.updates] = {name: run.scores[name] for name in needed}
        spent_after = {0: run.file.get("start_flops", 0.0)}
        for phase in sorted(map(int, run.file.get("phase_costs", {}))):
            spent_after[phase] = spent_after[max(spent_after)] + run.file["phase_costs"][str(phase)]["flops"]
        spent_after[run.updates] = run.file.get("flops", 0.0)
        spent = np.interp([*points], [*spent_after], [*spent_after.values()])
        if spent[0] <= 0 or not spent[0] * 0.99 <= flops <= spent[-1] * 1.01:  # 1 % more or less is equal
            return None
        scores = {
            name: float(np.interp(math.log(flops), np.log(spent), [each[name] for each in points.values()]))
            for name in self.data["weights"][group]
        }
        updates = float(np.interp(flops, spent, [*points]))
        return self.average(scores, group), updates

    def pair(self, a: str, b: str, budget: str, group: str) -> Difference | str:
        """Return the difference of two experiments at an equal budget or, as a word, why there is none."""
        if not self.is_comparable(a, b, self.data["weights"][group]):
            return "different targets"
        runs_a, runs_b = self.scored(a), self.scored(b)
        seeds = sorted(runs_a.keys() & runs_b.keys())
        if not seeds:
            return "no common seed"
        sides = []
        for row, own, other in ((a, runs_a, runs_b), (b, runs_b, runs_a)):
            if budget == "updates":
                if not self.left_plateau(row, dict.fromkeys(seeds, math.inf)):
                    return "not yet learning"
                sides.append(np.array([self.average(own[seed].scores, group) for seed in seeds]))
                continue
            flops = {seed: min(own[seed].file["flops"], other[seed].file["flops"]) for seed in seeds}
            found = [self.at_equal_flops(own[seed], flops[seed], group) for seed in seeds]
            if None in found:
                return "out of range"
            if not self.left_plateau(row, {seed: each[1] for seed, each in zip(seeds, found, strict=True)}):
                return "not yet learning"
            sides.append(np.array([each[0] for each in found]))
        errors = self.difference(a, b, self.weights(group), seeds)
        return sides[0] - sides[1], errors


# ---- the paper


def published_means(data: Mapping[str, Any]) -> dict[str, float]:
    """Return row -> its published mean over columns, in deviations of a run or, if unknown, over rows."""
    paper = data["paper"] or {}
    rows = {row: values["published"] for row, values in data["rows"].items()}
    rows = {row: published for row, published in rows.items() if paper and paper.keys() <= published.keys()}
    if not rows:
        return {}
    signs = np.array([1 if column["higher is better"] else -1 for column in paper.values()])
    scores = signs * np.array([[published[name] for name in paper] for published in rows.values()])
    if all(column["deviation"] is not None for column in paper.values()):
        scores = scores / np.array([column["deviation"] for column in paper.values()])
    else:
        spread = scores.std(0)
        scores = (scores - scores.mean(0)) / np.where(spread > 0, spread, 1)
    return dict(zip(rows, scores.mean(1).tolist(), strict=True))


def published_z(data: Mapping[str, Any], a: str, b: str) -> float:
    """Return the z of the difference of two rows' published means: each is a mean over runs and columns."""
    means = published_means(data)
    runs = [data["rows"][row]["published runs"] for row in (a, b)]
    return (means[a] - means[b]) / math.sqrt((1 / runs[0] + 1 / runs[1]) / len(data["paper"]))


# ---- checks


class Check:
    """Collects what does not follow from the runs."""

    def __init__(self) -> None:
        """Begin with nothing found."""
        self.faults: list[str] = []
        self.borderline: list[str] = []
        self.verdicts: list[str] = []  # a line per verdict on a claim, as it was recomputed
        self.count = 0

    def equal(self, what: str, published: Any, due: Any) -> None:
        """Compare words and whole numbers."""
        self.count += 1
        if published != due:
            self.faults.append(f"{what}: {published!r} in the report, {due!r} from the runs")

    def close(self, what: str, published: float | None, due: float | None, tolerance: float = EXACT) -> None:
        """Compare numbers, with a tolerance relative to their size and at least absolute."""
        self.count += 1
        if published is None or due is None:
            if published is not due:
                self.faults.append(f"{what}: {published} in the report, {due} from the runs")
        elif not abs(published - due) <= tolerance * max(1.0, abs(due)):  # NaN differs from all
            self.faults.append(f"{what}: {published:.6g} in the report, {due:.6g} from the runs")

    def within(self, what: str, published: float | None, low: float, high: float) -> None:
        """Compare a number with the range that resampling leaves for it."""
        self.count += 1
        if published is None or not low - 1e-9 <= published <= high + 1e-9:
            self.faults.append(f"{what}: {published} in the report, {low:.4g} to {high:.4g} from the runs")

    def word(self, what: str, published: str, due: str, others: Iterable[str] = ()) -> None:
        """Compare verdicts; ``others``, which another draw of resamples might give, are counted apart."""
        self.count += 1
        if published != due:
            line = f"{what}: {published} in the report, {due} from the runs"
            (self.borderline if published in others else self.faults).append(line)

    def test(self, what: str, published: Mapping[str, Any], test: Test) -> None:
        """Compare the 95 % interval of a difference and its two p; ``published`` is in noise deviations."""
        interval = published.get("interval")
        if interval is None or not math.isfinite(test.half_width):
            self.equal(f"{what}: interval is unknown", interval is None, not math.isfinite(test.half_width))
        else:
            self.count += 1
            slack = EXACT * abs(test.mean) + 1e-9
            narrow, wide = test.half_width_range
            halves = (test.mean - interval[0], interval[1] - test.mean)
            if not all(narrow - slack <= half <= wide + slack for half in halves):
                due = f"{test.mean:.4g} ± {narrow:.4g} to {wide:.4g}"
                self.faults.append(f"{what}: interval {interval} in the report, {due} from the runs")
        self.within(f"{what}: p", published.get("p"), *test.p_range)
        name = "p that not equivalent"
        self.within(f"{what}: {name}", published.get(name), *test.p_not_equivalent_range)


@functools.cache
def median_of_variances(freedom: tuple[int, ...]) -> float:
    """Return the expected median of the variances of rows of standard normal runs."""
    ranks = [(len(freedom) - 1) // 2, len(freedom) // 2]

    def above(x: float) -> float:
        chances = [stats.chi2.cdf(k * x, k) for k in freedom]
        return sum(stats.poisson_binom.cdf(rank, chances) for rank in ranks) / 2

    return integrate.quad(above, 0, math.inf, limit=200)[0]


def check_units(check: Check, tables: Sequence[Table]) -> None:
    """Check the unit of each column: noise of seeds of the median row of all tables, and of examples.

    Rows on the unigram plateau do not count, unless all are.
    """
    is_any_learning = any(
        table.runs[row] and table.left_plateau(row) for table in tables for row in table.experiment.values()
    )
    names = dict.fromkeys(name for table in tables for name in table.columns)
    for name in names:
        values: dict[str, list[float]] = {}
        by_examples: dict[str, list[float]] = {}
        for table in tables:
            for experiment, seeds in table.runs.items():
                if experiment == table.control and experiment not in table.experiment.values():
                    continue
                if is_any_learning and not table.left_plateau(experiment):
                    continue
                folder = table.folders[experiment]  # tables that share an experiment share it
                values[folder] = [run.scores[name] for run in seeds.values() if name in run.scores]
                by_examples[folder] = [run.errors[name].var() for run in seeds.values() if name in run.errors]
        repeated = [np.array(each) for each in values.values() if len(each) > 1]
        varied = [each for each in repeated if np.ptp(each) > 1e-9 * np.abs(each).max()]
        by_seeds = 0.0
        if varied:
            by_seeds = np.median([each.var(ddof=1) for each in varied])
            by_seeds /= median_of_variances(tuple(sorted(len(each) - 1 for each in varied)))
        known = [x for each in by_examples.values() for x in each]
        variance = np.mean(known) if known else 0.0
        unit = math.sqrt(by_seeds + variance) or 1.0
        tolerance = EXACT + 0.02 * variance / unit**2
        for table in tables:
            if name in table.columns:
                published = table.columns[name]["unit"]
                check.close(f"{table.name}: unit of {name}", published / unit, 1.0, tolerance)


def check_weights(check: Check, table: Table) -> None:
    """Check that columns have equal weight in a half, and the halves in both."""
    halves: dict[str, list[str]] = {"reading": [], "language": []}
    for name, column in table.columns.items():
        if column["measure"] not in HELD_OUT and column["judged"]:
            halves[column["half"]].append(name)
    due = {half: {name: 1 / len(names) for name in names} for half, names in halves.items() if names}
    if len(due) == 2:
        due["both"] = {name: weight / 2 for weights in due.values() for name, weight in weights.items()}
    if due:
        check.equal(f"{table.name}: columns that are judged", table.data["weights"], due)


def check_rows(check: Check, table: Table) -> None:
    """Check each run's scores and combined scores, and the differences from the baseline."""
    for row, values in table.data["rows"].items():
        experiment = table.experiment[row]
        archived = table.archived(table.folders[experiment])
        seeds = sorted(map(int, values["seeds"]))
        check.equal(f"{row}: seeds", seeds, seeds if seeds in archived else archived[0])
        for seed, published in values["seeds"].items():
            run = table.runs[experiment][int(seed)]
            for name in table.columns:
                check.close(f"{row} seed {seed}: {name}", published["scores"].get(name), run.scores.get(name))
            for name, absent in COUNTERS.items():
                check.equal(f"{row} seed {seed}: {name}", published[name], run.file.get(name, absent))
        for group in table.data["weights"]:
            combined, due = values["combined"].get(group, {}), table.combined(experiment, group)
            check.equal(f"{row}: seeds with a combined score", sorted(map(int, combined)), sorted(due))
            for seed, z in combined.items():
                check.close(f"{row} seed {seed}: combined score, {group}", z, due.get(int(seed)))
    for name, column in table.columns.items():
        noise = table.sign(name) / column["unit"]
        differences, published = {}, {}
        for row, values in table.data["rows"].items():
            experiment = table.experiment[row]
            own, base = table.runs[experiment], table.runs[table.baseline]
            seeds = [s for s in sorted(own.keys() & base.keys()) if name in own[s].scores]
            seeds = [s for s in seeds if name in base[s].scores]
            is_compared = table.is_comparable(experiment, table.baseline, [name])
            has_difference = bool(seeds) and is_compared and experiment != table.baseline
            said = values["less the baseline's"].get(name)
            check.equal(f"{row} less the baseline, {name}: is there", said is not None, has_difference)
            if said is not None and has_difference:
                by_seed = np.array([own[s].scores[name] - base[s].scores[name] for s in seeds]) * noise
                errors = table.difference(experiment, table.baseline, {name: noise}, seeds)
                differences[experiment, table.baseline] = (by_seed, errors)
                published[experiment, table.baseline] = (row, said)
        for pair, test in test_all(differences, table.rng).items():
            row, said = published[pair]
            what = f"{row} less the baseline, {name}"
            check.word(what, said["verdict"], row_word(test), map(row_word, test.others()))
            check.close(what, said["difference"], test.mean / noise)
            scaled = said["interval"]
            if scaled is not None:
                scaled = sorted(end * noise for end in scaled)
            check.test(what, {**said, "interval": scaled}, test)
            check.equal(f"{what}: seeds", said["seeds"], len(test.by_seed))


def check_columns(check: Check, table: Table) -> None:
    """Check a column's deviation over seeds, pooled over rows, and how far its rows' means are apart."""
    experiments = dict.fromkeys([*table.experiment.values(), table.baseline])
    for name, column in table.columns.items():
        rows = [
            np.array([run.scores[name] for run in table.runs[experiment].values() if name in run.scores])
            for experiment in experiments
        ]
        rows = [row for row in rows if len(row) > 1]
        freedom = sum(len(row) - 1 for row in rows)
        variance = sum(row.var(ddof=1) * (len(row) - 1) for row in rows) / freedom if freedom else 0.0
        check.close(f"{table.name}: deviation of {name}", column["deviation"], math.sqrt(variance))
        signal = None
        if len(rows) > 1 and variance:
            signal = float(np.ptp([row.mean() for row in rows])) / column["unit"]
        check.close(f"{table.name}: signal-to-noise of {name}", column["signal-to-noise"], signal)


def check_chance(check: Check, table: Table) -> None:
    """Check how many rows of a column are above chance by three standard errors."""
    for name, column in table.columns.items():
        if column["rows above chance"] is None:
            continue
        above, least, known = 0, 0, 0
        for experiment in dict.fromkeys(table.experiment.values()):
            runs = [run for run in table.runs[experiment].values() if name in run.scores]
            values = np.array([run.scores[name] for run in runs])
            errors = [run.errors[name] for run in runs if name in run.errors]
            variance = np.mean(errors, axis=0).var() if errors else 0.0
            variance += values.var(ddof=1) / len(values) if len(values) > 1 else 0.0
            if variance:
                z = table.sign(name) * (values.mean() - column["chance"]) / math.sqrt(variance)
                known += 1
                above += z >= 2.85
                least += z >= 3.15
        published_above, published_known = column["rows above chance"]
        check.equal(f"{table.name}: rows with an error in {name}", published_known, known)
        check.within(f"{table.name}: rows above chance in {name}", published_above, least, above)


def tied_mean(scores: Iterable[float]) -> float:
    """Return the mean of scores, rounded so that means which agree up to rounding are tied."""
    return round(float(np.mean([*scores])), 9)


def check_order(check: Check, table: Table) -> None:
    """Check Kendall's tau with the paper: its value, p, interval, and that of a repeat of the paper."""
    means = published_means(table.data)
    for group in table.data["weights"]:
        ours = {}
        for row in means:
            combined = table.combined(table.experiment[row], group) if row in table.experiment else {}
            if combined and table.left_plateau(table.experiment[row]):
                ours[row] = tied_mean(combined.values())
        order = table.data["order"].get(group)
        what = f"{table.name}: order, {group}"
        if len(ours) < 3:
            check.equal(what, order, None)
            continue
        if order is None:
            check.equal(what, None, "a tau")
            continue
        check.equal(f"{what}, rows", order["rows"], [*ours])
        theirs = [means[row] for row in ours]
        result = stats.kendalltau([*ours.values()], theirs)
        check.close(f"{what}, tau", order["tau"], float(result.statistic))
        check_tau_p(check, f"{what}, p", order["p"], [*ours.values()], theirs)
        check_order_interval(check, table, group, [*ours], theirs, order["interval"])
        paper = table.data["paper"]
        if all(column["deviation"] is not None for column in paper.values()):
            runs = np.array([table.data["rows"][row]["published runs"] for row in ours])
            noise = table.rng.normal(size=(4000, len(ours))) / np.sqrt(runs * len(paper))
            repeats = kendall_tau(theirs + noise, np.array(theirs))
            check.close(
                f"{what}, a repeat of the paper",
                order["a repeat of the paper"],
                float(np.mean(repeats)),
                0.01,
            )


def kendall_tau(scores: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return Kendall's tau-b of each row of scores [R,N] with a reference [N]; scipy takes one row a call."""
    first, second = np.triu_indices(len(reference), 1)
    signs = np.sign(scores[:, first] - scores[:, second])
    due = np.sign(reference[first] - reference[second])
    return signs @ due / np.sqrt(np.square(signs).sum(1) * np.square(due).sum())


def check_tau_p(
    check: Check, what: str, published: float, scores: Sequence[float], reference: Sequence[float]
) -> None:
    """Check p of tau, within the error of random orders if it is estimated from them."""
    p, is_exact = tau_p_value(np.array(scores), np.array(reference))
    of_orders = 4 * math.sqrt(2 * (p * (1 - p) + 1 / ORDERS) / ORDERS)  # of two draws of ORDERS
    check.close(what, published, p, EXACT if is_exact else of_orders)


def tau_p_value(scores: np.ndarray, reference: np.ndarray) -> tuple[float, bool]:
    """Return the two-sided p of tau-b, and whether it is exact: with ties and many rows it is estimated."""
    if len(set(scores)) == len(set(reference)) == len(scores):
        return float(stats.kendalltau(scores, reference, method="exact").pvalue), True
    is_exact = len(scores) <= 8
    if is_exact:
        orders = np.array([*permutations(scores)])
    else:
        orders = np.random.default_rng(SEED).permuted(np.tile(scores, (ORDERS, 1)), axis=1)
    observed = abs(kendall_tau(scores[None], reference)[0])
    return float(np.mean(np.abs(kendall_tau(orders, reference)) >= observed - 1e-9)), is_exact


def check_order_interval(
    check: Check, table: Table, group: str, rows: Sequence[str], theirs: Sequence[float], published: Any
) -> None:
    """Check the interval of tau over resampled seeds and examples, within the error of resampling."""
    experiments = [table.experiment[row] for row in rows]
    seeds = sorted(set.intersection(*(set(table.scored(experiment)) for experiment in experiments)))
    what = f"{table.name}: order, {group}, interval"
    if len(seeds) < 2:
        check.equal(what, published, None)
        return
    weights = seed_draws(len(seeds), table.rng)
    resampled = []
    for experiment in experiments:
        runs = table.scored(experiment)
        means = weights @ np.array([table.average(runs[seed].scores, group) for seed in seeds])
        for column, weight in table.weights(group).items():
            for i, seed in enumerate(seeds):
                errors = table.errors(experiment, seed, column)
                if errors is not None:
                    means = means + weight * weights[:, i] * errors
        resampled.append(means)
    matrix = np.array(resampled).T
    taus = kendall_tau(matrix, np.array(theirs))
    for end, (low, high) in zip(published, ((0.012, 0.04), (0.96, 0.988)), strict=True):
        check.within(what, end, *np.quantile(taus, [low, high]))


def check_claims(check: Check, table: Table) -> None:
    """Check which claims there are, their z, and the verdict on each."""
    data = table.data
    paper, means = data["paper"], published_means(data)
    has_noise = bool(paper) and all(column["deviation"] is not None for column in paper.values())
    trained = [row for row in means if table.runs[table.experiment[row]]]
    due: set[tuple[str, str]] = set()
    if has_noise and data["claims"]:
        for a, b in combinations(trained, 2):
            if data.get("pairs") == "with-baseline" and table.baseline not in (
                table.experiment[a],
                table.experiment[b],
            ):
                continue
            better, worse = (a, b) if means[a] >= means[b] else (b, a)
            if published_z(data, better, worse) >= SIGNIFICANT_Z:
                due.add((better, worse))
        stated = {(claim["better"], claim["worse"]) for claim in data["claims"] if claim["conclusion"]}
        found = {(claim["better"], claim["worse"]) for claim in data["claims"]}
        check.equal(f"{table.name}: claims", sorted(found), sorted(due | stated))
    for claim in data["claims"]:
        a, b = claim["better"], claim["worse"]
        has_z = claim["z"] is not None or ((a, b) in due and claim.get("relation", "better") == "better")
        check.close(f"{a} > {b}: z", claim["z"], published_z(data, a, b) if has_z else None)
    check.equal(f"{table.name}: groups of claims", sorted(data["claim counts"]), sorted(data["weights"]))
    for group, by_budget in data["claim counts"].items():
        check.equal(f"{table.name}: budgets of claims, {group}", sorted(by_budget), sorted(BUDGETS))
        for budget, published in by_budget.items():
            counts = count_words(check_verdicts(check, table, group, budget))
            table.claim_counts.setdefault(group, {})[budget] = counts
            for name, value in counts.items():
                check.close(f"{table.name}: counts, {group}, {budget}, {name}", published[name], value)


def check_verdicts(check: Check, table: Table, group: str, budget: str) -> list[str]:
    """Check the verdict on each claim of a table, and return the words that follow from the runs.

    Of a verdict that is borderline it is the published word, so that the counts follow it.
    """
    pairs: dict[tuple[str, str], Difference | str] = {}
    for claim in table.data["claims"]:
        a, b = (table.experiment[claim[side]] for side in ("better", "worse"))
        if claim.get("tasks", group) != group:
            continue
        if not (table.left_plateau(a) and table.left_plateau(b)):
            pairs[a, b] = "not yet learning"
        elif group not in table.data["weights"]:
            pairs[a, b] = "undecided"
        else:
            pairs[a, b] = table.pair(a, b, budget, group)
    tests = test_all({pair: x for pair, x in pairs.items() if not isinstance(x, str)}, table.rng)
    words = []
    for claim in table.data["claims"]:
        said = claim["verdicts"][group][budget]
        pair = (table.experiment[claim["better"]], table.experiment[claim["worse"]])
        what = f"{claim['better']} > {claim['worse']}, {group}, {budget}"
        if claim.get("tasks", group) != group:
            check.word(what, said["verdict"], "other tasks")
            continue
        test = tests.get(pair)
        due, others = str(pairs[pair]), []
        if test is not None:
            due, *others = (
                claim_word(each, claim.get("relation", "better")) for each in [test, *test.others()]
            )
        words.append(said["verdict"] if said["verdict"] in others else due)
        check.word(what, said["verdict"], due, others)
        beside = "as in the report" if said["verdict"] == due else f"{said['verdict']} in the report"
        check.verdicts.append(f"{what}: {due}{describe(test)}; {beside}")
        if test is None:
            continue
        check.close(what, said["difference"], test.mean)
        if math.isfinite(test.half_width):
            check.test(what, said, test)
            for end, due_range in zip(
                said.get("multi-bootstrap", (None, None)), test.boot_ranges, strict=True
            ):
                check.within(f"{what}: multi-bootstrap", end, *due_range)
            check_seeds_alone(check, what, said, test)
    return words


def describe(test: Test | None) -> str:
    """Return a test's difference, interval and p as text; "" for none."""
    if test is None:
        return ""
    if not math.isfinite(test.half_width):
        return f", {test.mean:+.2f}, untested"
    low, high = test.mean - test.half_width, test.mean + test.half_width
    p = f"p = {test.p:.2g}, p of no equivalence = {test.p_not_equivalent:.2g}"
    return f", {test.mean:+.2f} ({low:.2f} to {high:.2f}), {p}"


def check_seeds_alone(check: Check, what: str, said: Mapping[str, Any], test: Test) -> None:
    """Check the difference of each seed, and the intervals that leave the examples out."""
    check.equal(f"{what}: number of seeds", len(said["seeds"]), len(test.by_seed))
    for published, due in zip(said["seeds"], test.by_seed, strict=False):
        check.close(f"{what}: difference of a seed", published, due)
    # of the published differences, since the bootstrap counts ties, which rounding may break
    for name, ends in seeds_alone(tuple(said["seeds"])).items():
        published_ends = said["by seeds alone"][name]
        if published_ends is None or ends is None:
            check.equal(f"{what}: by seeds alone, {name}", published_ends, ends)
            continue
        for published, due in zip(published_ends, ends, strict=True):
            check.close(f"{what}: by seeds alone, {name}", published, due)


@functools.cache
def seeds_alone(by_seed: tuple[float, ...]) -> dict[str, tuple[float, float] | None]:
    """Return 95 % intervals of the mean over seeds: t, and BCa of three seeds or more."""
    values = np.array(by_seed)
    if len(values) < 2 or np.ptp(values) <= 1e-9 * np.abs(values).max():
        return {"t": None, "bca": None}
    t = stats.t.interval(1 - ALPHA, len(values) - 1, values.mean(), stats.sem(values))
    bca = (math.nan, math.nan)
    if len(values) > 2:
        with warnings.catch_warnings():  # of data without an interval, which the report leaves out
            warnings.simplefilter("ignore")
            rng = np.random.default_rng(0)
            bca = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, rng=rng).confidence_interval
    return {"t": tuple(map(float, t)), "bca": tuple(map(float, bca)) if np.isfinite(bca).all() else None}


def claim_word(test: Test, relation: str) -> str:
    """Return the verdict on a claim that one row is better than another, or that the two are equivalent."""
    equivalent = test.p_not_equivalent < ALPHA
    if relation == "equivalent" and test.sign:
        return "contradicted"
    if relation == "equivalent":
        return "confirmed" if equivalent else "undecided"
    word = "equivalent" if equivalent else "undecided"
    return {1: "confirmed", -1: "contradicted"}.get(test.sign, word)


def row_word(test: Test) -> str:
    """Return the verdict on a row from its test against another."""
    word = "equivalent" if test.p_not_equivalent < ALPHA else "undecided"
    return {1: "better", -1: "worse"}.get(test.sign, word)


def count_words(words: Sequence[str]) -> dict[str, Any]:
    """Return how many claims have each verdict."""
    uncompared = sum(word in UNCOMPARED for word in words)
    confirmed, contradicted = words.count("confirmed"), words.count("contradicted")
    return {
        "claims": len(words),
        "confirmed": confirmed,
        "contradicted": contradicted,
        "undecided": len(words) - confirmed - contradicted - uncompared,
        "not compared": uncompared,
        "share confirmed": confirmed / len(words) if words else None,
    }


def check_all_claims(check: Check, report: Mapping[str, Any], tables: Sequence[Table]) -> None:
    """Check the mean share of confirmed claims over tables, by the verdicts that follow from the runs."""
    groups = {group for table in tables if table.data["claims"] for group in table.claim_counts}
    published_budgets = {group: sorted(by) for group, by in report["claims of all tables"].items()}
    check.equal("all tables: groups of claims", published_budgets, dict.fromkeys(groups, sorted(BUDGETS)))
    for group, by_budget in report["claims of all tables"].items():
        for budget, published in by_budget.items():
            counts = [
                table.claim_counts[group][budget]
                for table in tables
                if budget in table.claim_counts.get(group, {})
            ]
            counts = [each for each in counts if each["claims"]]
            shares = [each["share confirmed"] for each in counts]
            what = f"all tables, {group}, {budget}"
            check.equal(f"{what}, tables", published["tables"], len(counts))
            check.close(
                f"{what}, mean share confirmed", published["mean share confirmed"], float(np.mean(shares))
            )
            for word in ("claims", "confirmed", "contradicted", "undecided", "not compared"):
                check.close(f"{what}, {word}", published[word], sum(each[word] for each in counts))


def check_start(check: Check, table: Table) -> None:
    """Check what each row adds to the start alone."""
    for group, rows in table.data["over the start alone"]["rows"].items():
        pairs = {(row, table.control): table.pair(row, table.control, "updates", group) for row in rows}
        for (row, _), test in test_all(pairs, table.rng).items():
            said = rows[row]
            what = f"{row} over the start alone, {group}"
            check.word(what, said["verdict"], row_word(test), map(row_word, test.others()))
            check.close(what, said["difference"], test.mean)
            check.test(what, said, test)


def check_prediction(check: Check, report: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check decision accuracy and tau between the rows of two reports."""
    for name, by_group in report["prediction"]["tables"].items():
        for group, said in by_group.items():
            x, y = (
                [
                    tied_mean(each["tables"][name]["rows"][row]["combined"][group].values())
                    for row in said["rows"]
                ]
                for each in (report, other)
            )
            agree = [
                (1 + np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])) / 2
                for i, j in combinations(range(len(x)), 2)
            ]
            check.close(
                f"{name}: decision accuracy, {group}", said["decision accuracy"], float(np.mean(agree))
            )
            result = stats.kendalltau(x, y)
            check.close(f"{name}: tau between scales, {group}", said["tau"], float(result.statistic))
            check_tau_p(check, f"{name}: p between scales, {group}", said["p"], x, y)


def check_report(report: Mapping[str, Any], archive: Archive) -> Check:
    """Return what was found by all checks of a report that need no other report."""
    check, rng = Check(), np.random.default_rng(SEED)
    tables = [Table(name, data, archive, rng) for name, data in report["tables"].items()]
    check_units(check, tables)
    for table in tables:
        for checks in (check_weights, check_rows, check_columns, check_chance):
            checks(check, table)
        for checks in (check_order, check_claims, check_start):
            checks(check, table)
    check_all_claims(check, report, tables)
    return check


def check_checksum(check: Check, report: Mapping[str, Any], path: Path) -> None:
    """Check that a report is as it was written: its ``sha256`` is that of all else, as sorted JSON."""
    contents = {name: value for name, value in report.items() if name != "sha256"}
    due = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    check.count += 1
    if report.get("sha256") != due:
        check.faults.append(f"{path} was edited or damaged: its sha256 is not that of its contents")


def main() -> int:
    """Check a report and print what does not follow from its runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="results.json of a report")
    parser.add_argument("runs", type=Path, nargs="+", help="archives or folders with its runs")
    parser.add_argument("--other", type=Path, help="results.json of the report that this one predicts")
    parser.add_argument("--verdicts", action="store_true", help="print each claim as it was recomputed")
    arguments = parser.parse_args()
    for path in (arguments.report, *arguments.runs, *filter(None, [arguments.other])):
        if not path.exists():
            parser.error(f"{path} is not there")
    report = json.loads(arguments.report.read_text())
    check = check_report(report, read_archives(arguments.runs))
    if arguments.other:
        check_prediction(check, report, json.loads(arguments.other.read_text()))
    check_checksum(check, report, arguments.report)
    for line in check.verdicts if arguments.verdicts else ():
        print(line)
    for line in check.borderline:
        print(f"borderline: {line}")
    for line in check.faults:
        print(line)
    found = f"{len(check.faults)} differ, {len(check.borderline)} are borderline"
    print(f"{check.count:,} figures compared: {found}")
    print(f"recomputed: {RECOMPUTED}")
    print(f"compared with the runs' own records: {RECORDED}")
    print(f"not checked: {UNCHECKED}")
    if check.borderline:
        print("borderline: so near its limit that another draw of the bootstrap may decide otherwise")
    return 1 if check.faults else 0


if __name__ == "__main__":
    sys.exit(main())
