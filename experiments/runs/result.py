"""Whose a run is, and what it scored when it finished. Folders of runs may lie in a bucket (gs://)."""

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.paths import STAGES, find_cache, scale_folder
from experiments.study.experiment import Experiment
from experiments.study.settings_diff import flatten, result_settings, setting_changes
from lm.config.base import DataError, SettingError
from lm.files import checksum, json_with_checksum, parse_with_checksum, write
from lm.metrics import Likelihood

SIGNED = {"matthews", "pearson", "spearman"}  # metrics that may be below 0
# metrics that are no shares -> least and largest value
UNBOUNDED = {"loss": (0, 700), "bits_per_byte": (0, 700), "bits_above_chance": (-1e4, 64)}
COUNTED = ("tokens", "words", "bytes")  # of held-out documents: numbers of ``Likelihood``
DOCUMENTS = "documents/"  # before the names of what records say of held-out documents
DENOISERS = "denoisers/"  # before the names of denoisers, whose held-out losses records say
UNDEFINED = "undefined"  # name of the reasons why metrics of a task have no value
MAX_SAID = 4  # scores in the line that ends a run; more are in its report
LARGEST = 700.0  # loss of which there is a perplexity: e^700 is near the largest number [nats]


@dataclass(frozen=True)
class Result:
    """Holds what a finished run scored and cost; raises SettingError for a value that no run comes to."""

    columns: Mapping[str, float | None]  # the paper's column -> our stand-in's score; None: it is undefined
    tasks: Mapping[str, Mapping[str, Any]]  # task -> {"step", "score", "metrics"} of its best checkpoint
    held_out_loss: float | None  # after pre-training, nats a target token; None without
    seconds: float  # of training, compilation and evaluation left out
    tokens: int  # target tokens learnt from, padding not counted
    folder: Path
    length_losses: Mapping[str, float] = field(default_factory=dict)  # held-out, by length [x inputs_length]
    # of a mixture's denoisers: held-out, after pre-training, nats a target token of each
    denoiser_losses: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)  # stage -> its folder, from that of the scale
    # stage -> lines of metrics that it had in the end
    records: Mapping[str, int] = field(default_factory=dict)
    # task -> updates of pre-training -> as in tasks, of the fine-tuning that started there
    branches: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    content_tokens: int = 0  # of all pre-training: targets that are no sentinel, EOS or aligned copy
    start_tokens: int = 0  # of these, before the counted updates: in the start that rows share
    content_loss: float | None = None  # held-out, after pre-training, on content tokens [nats/token]
    reference_loss: float | None = None  # unigram loss: of a model without context [nats/token]
    exit_step: int | None = None  # pre-training step at which it left the unigram plateau; None: never
    # held-out: share of the predictions of content tokens that are one of the ten most frequent ones
    top_ten_share: float | None = None
    # of whole held-out documents at each evaluation of a language model: the step, the seconds of training up
    # to it, and the numbers of ``Likelihood``
    likelihoods: Sequence[Mapping[str, float]] = ()
    parameters: int = 0  # of the model without its heads; of counts, the numbers that are stored
    flops: float = 0.0  # of all pre-training
    start_flops: float = 0.0  # of these, in the start
    # last update of a phase of pre-training -> "flops" and "content_tokens" of this phase alone
    phase_costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scale: Path | None = None  # the folder of the scale; None: where the run's record of its cache says

    def __post_init__(self):
        for name, best in _items("tasks", self.tasks):
            _check_task(name, best)
        has_signed = any(SIGNED & best["metrics"].keys() for best in self.tasks.values())
        has_bits = any(best.get("measure", "score") != "score" for best in self.tasks.values())
        low, high = -100 * has_signed - 1e4 * has_bits, 100 + 700 * has_bits
        for name, score in _items("columns", self.columns):
            if score is None and self.undefined(name):
                continue
            _check_range(name, score, low, high)
        for times, loss in _items("length_losses", self.length_losses):
            _check_range(f"length_losses {times}", loss, 0, LARGEST)
            if not re.fullmatch("[1-9][0-9]{0,8}", times):
                raise SettingError("a length of rows is no whole number")
        for name, loss in _items("denoiser_losses", self.denoiser_losses):
            _check_range(f"denoiser_losses {name}", loss, 0, LARGEST)
        limits = {"held_out_loss": LARGEST, "content_loss": LARGEST, "reference_loss": LARGEST}
        for name, most in (limits | {"exit_step": 1e300, "top_ten_share": 1}).items():
            if (value := getattr(self, name)) is not None:
                _check_range(name, value, 0, most)
        for task, branches in _items("branches", self.branches):
            for updates, best in _items(f"branches of {task}", branches):
                if not re.fullmatch("[0-9]{1,12}", updates):
                    raise SettingError(f"branches of {task} are not named by a number of updates")
                _check_task(task, best)
        for end, phase in _items("phase_costs", self.phase_costs):
            if not re.fullmatch("[0-9]{1,12}", end) or set(phase) != {"flops", "content_tokens"}:
                raise SettingError("phase_costs should have flops and content_tokens by number of updates")
            for name, amount in phase.items():
                _check_range(f"{name} of a phase", amount, 0, 1e300)
        for each in self.likelihoods:
            _check_likelihood(each)
        names = "seconds parameters tokens content_tokens start_tokens flops start_flops".split()
        costs = {name: getattr(self, name) for name in names}
        for name, amount in [*costs.items(), *_items("records", self.records)]:
            _check_range(name, amount, 0, 1e300)
        for _, path in _items("stages", self.stages):
            if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
                raise SettingError("the folder of a stage lies outside of the runs")

    def undefined(self, column: str) -> dict[str, str]:
        """Return {task: why its score in this column has no value}; {} if all have one."""
        tasks = {name: best for name, best in self.tasks.items() if best["column"] == column}
        reasons = {name: best.get(UNDEFINED, {}).get("score") for name, best in tasks.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def seed(self) -> int:
        return int(self.folder.name.removeprefix("seed-"))

    def likelihood(self, seconds: float = inf) -> Likelihood | None:
        """Return the likelihood of the held-out documents after this much training.

        None before the first evaluation. Between two evaluations the negative log-probability is linear in
        the logarithm of time.
        """
        if not self.likelihoods or seconds < self.likelihoods[0]["seconds"]:
            return None
        last = likelihood_of(self.likelihoods[-1])
        times, nats = (np.array([each[name] for each in self.likelihoods]) for name in ("seconds", "nats"))
        if seconds >= times[-1]:  # also of a run whose only step was compiled, which took 0 s
            return last
        return last._replace(nats=float(np.interp(np.log(seconds), np.log(times), nats)))

    def example_values(self, task: str) -> dict[str, np.ndarray]:
        """Return {name of a value: its value for each report row of a task}; {} if they were not kept.

        DataError if the file does not fit the checksum beside the task's score: it is damaged or another
        run's.
        """
        folders = self.stage_folders().values()
        places = [*folders, *(folder.parent for folder in folders)]  # of an ensemble beside its members
        paths = (place / "report" / f"{task}.npy" for place in places)
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            return {}
        contents = path.read_bytes()
        if hashlib.sha256(contents).hexdigest() != self.tasks.get(task, {}).get("examples"):
            raise DataError(f"{path} is damaged, or of another run; put back a copy that is whole")
        values = np.load(io.BytesIO(contents))  # objects it refuses by default
        return {name: values[name] for name in values.dtype.names}

    def stage_folders(self) -> dict[str, Path]:
        """Return stage -> the folder with its metrics and predictions, if it is there."""
        scale = self.scale or scale_folder(self.folder, find_cache(self.folder))
        folders = {name: scale / path for name, path in self.stages.items()}
        return {name: folder for name, folder in folders.items() if folder.exists()}


def to_log_dict(likelihood: Likelihood) -> dict[str, float]:
    """Return the likelihood of held-out documents as the log of a stage records it: name -> value."""
    return {f"{DOCUMENTS}{name}": float(value) for name, value in likelihood_numbers(likelihood).items()}


def likelihood_numbers(likelihood: Likelihood) -> dict[str, float]:
    """Return the numbers of a likelihood by name; ``variance`` is one of a bound alone."""
    return {name: value for name, value in likelihood._asdict().items() if value is not None}


def likelihood_of(values: Mapping[str, float], prefix: str = "") -> Likelihood:
    """Return the likelihood whose numbers are among ``values``, with ``prefix`` before their names."""
    tokens, words, size = (int(values[f"{prefix}{name}"]) for name in COUNTED)
    variance = values.get(f"{prefix}variance")
    return Likelihood(values[f"{prefix}nats"], tokens, words, size, variance)


def _check_likelihood(each: Any) -> None:
    names = ("step", "seconds", "nats", *COUNTED)
    if set(fields := dict(_items("likelihoods", each))) - {"variance"} != set(names):
        raise SettingError(f"likelihoods should have {', '.join(names)}")
    for name, value in fields.items():
        _check_range(f"likelihoods {name}", value, 0, 1e300)
    _check_range("likelihoods nats", fields["nats"], 0, LARGEST * fields["tokens"])


def _items(name: str, values: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise SettingError(f"{name} should be values by name")
    return values.items()


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    rounding, is_number = 1e-6, isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low - rounding <= value <= high + rounding:
        raise SettingError(f"{name} {value!r:.40} should be a number from {low:g} to {high:g}")


def _check_task(name: str, best: Any) -> None:
    """Raise SettingError unless a task has its column, metric, step, score and metrics."""
    fields = dict(_items(name, best))
    if not all(isinstance(fields.get(text), str) for text in ("column", "metric")):
        raise SettingError(f"{name} lacks its column or its metric")
    _check_range(f"step of {name}", fields.get("step"), 0, 1e300)
    metrics = dict(_items(f"metrics of {name}", fields.get("metrics")))
    low = -100 * bool(SIGNED & metrics.keys())
    measure = fields.get("measure", "score")
    undefined = dict(_items(f"{UNDEFINED} of {name}", fields.get(UNDEFINED, {})))
    for metric, value in (metrics | {"score": fields.get("score")}).items():
        if value is None and isinstance(undefined.get(metric), str):
            continue
        least, most = UNBOUNDED.get(measure if metric == "score" else metric, (low, 100))
        _check_range(f"{metric} of {name}", value, least, most)


def check_settings(
    experiment: Experiment, folder: Path, allowed: Callable[[str], object] | None = None
) -> None:
    """Raise SettingError if ``folder`` holds a run of other settings.

    allowed: if given, it is called with the difference, and nothing is raised.
    """
    path = folder / "settings.json"
    if not path.exists():
        return
    try:
        recorded = _parse_settings(path.read_bytes(), path)
    except SettingError as error:
        advice = f"choose other --runs or delete {folder}"
        raise SettingError(f"{path} cannot be read ({error}): {advice}") from error
    if lines := setting_changes(recorded, result_settings(experiment)):
        text = "".join(f"\n  {line}" for line in lines)
        if allowed is None:
            raise SettingError(
                f"{folder} belongs to a run with other settings: choose other --runs, delete it or, "
                f"unless it is finished, resume it with --allow settings{text}"
            )
        allowed(f"{folder}: allowed:{text}")


@lru_cache(maxsize=1)  # a report asks twice about each run
def _parse_settings(data: bytes, path: Path) -> Mapping[str, Any]:
    return flatten(parse_with_checksum(data, path))


def fingerprint(folder: Path) -> str:
    """Return the checksum of the settings in ``folder``; SettingError if they are damaged or missing."""
    path = folder / "settings.json"
    try:
        return checksum(_parse_settings(path.read_bytes(), path))
    except OSError as error:
        raise SettingError(f"{path}, which tells whose scores these are, cannot be read: {error}") from error


def write_result(folder: Path, values: Mapping[str, Any]) -> None:
    """Write ``scores.json``: what a run scored and cost, with the checksum of the settings in ``folder``."""
    write(folder / "scores.json", json_with_checksum({**values, "settings": fingerprint(folder)}))


def read_result(folder: Path, scale: Path | None = None) -> Result | None:
    """Return the result of a finished run, else None; SettingError if its file is damaged or another run's.

    ``scale``: the folder of the run's scale, in which its stages lie.
    """
    path, mend = folder / "scores.json", "delete it and run the row again"
    if not path.exists():
        return None
    values = parse_with_checksum(path.read_bytes(), path, mend)
    if values.pop("settings", None) != fingerprint(path.parent):
        raise DataError(f"{path} has the scores of a run with other settings; {mend}")
    try:
        stages = values.pop(STAGES, {})
        return Result(folder=path.parent, scale=scale, stages=stages, **values)
    except (SettingError, TypeError) as error:  # a TypeError: more or less than a result has
        cause = "the run diverged, or the file is damaged"
        raise DataError(f"{path} does not count: {error}; {cause}: {mend}") from error


def _said(result: Result, column: str) -> str:
    """Return the score of a column as text; where it is undefined, why."""
    score = result.columns[column]
    if score is not None:
        return f"{column} {score:z.2f}"
    return f"{column} – ({'; '.join(f'{task}: {why}' for task, why in result.undefined(column).items())})"


def summary(folder: Path) -> str:
    """Return the scores of a finished run in a line; only how many, if they are more than MAX_SAID.

    Where only upper bounds of the perplexity and the bits per byte are known, it says so.
    """
    result = read_result(folder)
    if result is None:
        return "not finished"
    said = [_said(result, column) for column in result.columns]
    if len(said) > MAX_SAID:
        unscored = [_said(result, column) for column, score in result.columns.items() if score is None]
        said = [f"{len(said) - len(unscored)} columns of scores", *unscored]
    if said:
        return ", ".join(said)
    if (likelihood := result.likelihood()) is not None:
        words, size = likelihood.word_perplexity, likelihood.bits_per_byte
        at_most, note = ("at most ", " (upper bounds)") if likelihood.is_bound else ("", "")
        return f"perplexity {at_most}{words:.1f} per word, {at_most}{size:.3f} bits per byte{note}"
    return "nothing to score" if result.held_out_loss is None else f"held-out loss {result.held_out_loss:.3f}"
