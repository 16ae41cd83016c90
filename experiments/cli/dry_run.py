"""``--dry-run``: what a run or a sweep would train, in what time here, and which data are missing."""

import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from rich.markup import escape

from experiments.cli.run_options import Options, RowRun
from experiments.cli.status import last_record
from experiments.console import CONSOLE, listing
from experiments.processes.progress import duration
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.stage import Stage
from experiments.runs.kinds.vectors import SkipGram
from experiments.runs.result import read_result
from experiments.runs.stages import stages
from experiments.runs.status import saved_steps
from experiments.study.experiment import Experiment
from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.data.corpus import tfds
from lm.data.corpus.spec import corpus_shards
from lm.data.packing import row_length
from lm.data.tasks.labelled import find_labelled
from lm.data.tasks.mixtures import mixture

SIMILAR = 4.0  # a measured speed counts for stages whose steps have up to so many times more or fewer FLOP
MEASURED_STAGES = 40  # stages whose speed is read, at most
MATMUL_SHARE = 0.35  # FLOP/s of training as a share of those of a large matrix product, on CPUs
MATMUL_SIZE = 1_024


def print_dry_run(wanted: Sequence[RowRun], options: Options, jobs: int) -> None:
    """Print the steps, FLOP and expected time that are left of each run, and which data are missing."""
    grid = listing("run", "state", "steps", "FLOP", "expected time")
    planned = [stages(run.experiment, run.folder, options.cache) for run in wanted]
    speeds = measured_speeds(stage for of_run in planned for stage in of_run)
    measured = True
    seen: set[Path] = set()
    unfinished, total_steps, total_flops, total_seconds = 0, 0, 0.0, 0.0
    for run, of_run in zip(wanted, planned, strict=True):
        done = is_finished(run)
        left = [] if done else stages_left(of_run, seen)
        steps = sum(count for _, count in left)
        flops = seconds = 0.0
        for stage, count in left:
            cost = step_cost(stage)
            if not cost:  # counts and skip-gram take seconds
                continue
            speed = speed_of(cost, speeds)
            if speed is None:
                measured, speed = False, MATMUL_SHARE * matmul_speed()
            flops += cost * count
            seconds += cost * count / speed
        state, expected = ("finished", "–") if done else ("to train", duration(seconds))
        grid.add_row(title_of(run), state, f"{steps:,}", f"{flops:.3g}", expected)
        unfinished += not done
        total_steps += steps
        total_flops += flops
        total_seconds += seconds
    CONSOLE.print(grid)
    at_once = max(min(jobs, unfinished), 1)
    expected = duration(total_seconds / at_once) + f" with {at_once} at once" * (at_once > 1)
    source = "speeds measured in runs here" if measured else "a matrix product timed here, roughly"
    CONSOLE.print(
        f"{unfinished} of {len(wanted)} runs to train at scale {options.scale}: {total_steps:,} steps, "
        f"{total_flops:.3g} FLOP, about {expected} (by {source}; compiling and evaluating come on top)",
        highlight=False,
    )
    for line in missing_data(wanted, options.cache):
        CONSOLE.print(f"missing: {escape(line)}", highlight=False)


def title_of(run: RowRun) -> str:
    """Return the row, the settings given by hand, and the seed of a run."""
    last, comma, given = run.folder.parent.name.partition(",")
    return f"{run.name}{comma}{given} seed {run.experiment.seed}"


def is_finished(run: RowRun) -> bool:
    """Return whether a run has scores; False if they are damaged: training reports that."""
    try:
        return read_result(run.folder) is not None
    except SettingError:
        return False


def stages_left(of_run: Iterable[Stage], seen: set[Path]) -> list[tuple[Stage, int]]:
    """Return (stage, steps left) of what a run would train, without stages that an earlier run trains.

    ``seen``: the folders of stages that earlier runs train, to which this run's are added.
    """
    found = []
    for stage in of_run:
        left = stage.training.steps - max(saved_steps(stage.folder), default=0)
        if left > 0 and stage.folder not in seen:
            seen.add(stage.folder)
            found.append((stage, left))
    return found


def step_cost(stage: Stage) -> float:
    """Return the FLOPs of a training step of a stage; 0 for counts and vectors."""
    if not isinstance(stage, NetworkStage) or isinstance(stage, SkipGram):
        return 0.0
    model, lengths = stage.model_of_flops, stage.lengths
    targets = row_length(model.architecture, lengths)
    return _step_flops(model, stage.training.batch_size, lengths.inputs, targets)


@cache  # a sweep asks this of thousands of stages, and of few models
def _step_flops(model: ModelConfig, rows: int, inputs: int, targets: int) -> float:
    from lm.train.flops import step_flops  # with jax

    return step_flops(model, rows, inputs, targets)


def measured_speeds(planned: Iterable[Stage]) -> list[tuple[float, float]]:
    """Return (FLOPs of a step, FLOP/s) of those of these stages that were trained before."""
    found: list[tuple[float, float]] = []
    for folder, stage in {stage.folder: stage for stage in planned}.items():
        if len(found) == MEASURED_STAGES:
            break
        seconds, cost = last_record(folder).get("seconds_per_step", 0.0), step_cost(stage)
        if seconds and cost:
            found.append((cost, cost / seconds))
    return found


def speed_of(cost: float, speeds: Sequence[tuple[float, float]]) -> float | None:
    """Return the median FLOP/s of measured stages with steps of similar size; None without any."""
    alike = [speed for other, speed in speeds if cost / SIMILAR <= other <= cost * SIMILAR]
    return median(alike) if alike else None


@cache
def matmul_speed() -> float:
    """Return the FLOP/s of a large matrix product on the default device."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE))
    product = jax.jit(lambda x: x @ x)
    product(matrix).block_until_ready()  # compiles
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.3:
        product(matrix).block_until_ready()
        count += 1
    return count * 2 * MATMUL_SIZE**3 / (time.perf_counter() - began)


def missing_data(wanted: Sequence[RowRun], folder: Path) -> list[str]:
    """Return a line for each corpus and each data set of a task that a run reads and that is not here."""
    lines: dict[str, None] = {}
    for run in wanted:
        for name in _corpora(run.experiment):
            try:
                corpus_shards(name, "train", folder, run.experiment.data.corrupt_records)
            except SettingError as error:
                lines[str(error)] = None
        for name, source in _task_sources(run.experiment):
            if tfds.newest_version(source, "*.*.*", folder) is None:
                lines[f"task {name} reads tfds:{source}, which is not prepared here"] = None
    return list(lines)


def _corpora(experiment: Experiment) -> list[str]:
    """Return the corpora that are read, but for the built-in documentation, which a run writes itself."""
    if experiment.mixing.pretraining == "tasks" or not experiment.pretraining.steps:
        return []
    parts = [part.strip() for part in experiment.data.corpus.split(" + ")]
    return [part for part in parts if part.removeprefix("tfds:").partition("/")[0] != "documentation"]


def _task_sources(experiment: Experiment) -> list[tuple[str, str]]:
    """Return (task, data set) of each task that is tuned on and that a run does not write itself."""
    tuning = experiment.tuning
    if not experiment.finetuning.steps:
        return []
    tasks = [*(task for name in tuning.mixtures for task in mixture(name)), *map(find_labelled, tuning.heads)]
    pairs = [(task.name, task.source) for task in tasks if not task.file]
    return [(name, source) for name, source in pairs if not source.startswith("documentation/")]
