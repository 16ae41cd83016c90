"""``--dry-run``: what a run or a sweep would train, in what time here, and which data are missing."""

import heapq
import time
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.markup import escape

from experiments.cli.run_options import Options, RowRun
from experiments.cli.status import is_in_training, last_record
from experiments.console import CONSOLE, MISSING, show_listing
from experiments.processes.progress import duration
from experiments.runs.checks import check_agreement
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
from lm.data.corpus.spec import corpus_parts, corpus_shards, is_documentation
from lm.data.packing import row_length
from lm.data.tasks.labelled import find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import LabelledTask, Task
from lm.files import parse_with_checksum

MAX_FLOPS_RATIO = 4.0  # stages whose FLOPs per step differ by at most this factor train at the same FLOP/s
MEASURED_STAGES = 40  # stages whose speed is read, at most
MATMUL_SHARE = 0.35  # FLOP/s of training as a share of those of a large matrix product, on CPUs
MATMUL_SIZE = 1_024
# Compiling a training step, where no run here has recorded it: one of nano or mini on one core, with nothing
# else at work [seconds]
COMPILE_SECONDS = 10.0
PROGRAMS_PER_STAGE = 2  # the training step and the evaluation, which take about the same time to compile
CACHED_SECONDS = 2.0  # a program that was there so quickly came out of the cache
MIN_SECONDS_FOR_H100_LINE = 3_600.0  # a total from which the time on an H100 is shown too [seconds]
MIN_H100_SECONDS = 60.0  # a shorter time on an H100 is not shown, since it says nothing [seconds]
H100 = "NVIDIA H100"
SHORTEST_STEP = 2e-3  # of a GPU, which starts hundreds of kernels for it: supposed, not measured [seconds]
# FLOP/s of training as a share of an H100's peak for bfloat16: supposed, not measured
WIDE_SHARE = 0.35
NARROW_SHARE = 0.05
# states of a run; to evaluate: all its stages were trained, by a row that shares them or before it stopped
TO_TRAIN, SHARES_STAGES, IN_TRAINING, TO_EVALUATE = "to train", "to train *", "in training", "to evaluate"
FINISHED = "finished"
COLUMN_HEADINGS = ("run", "state", "steps", "FLOP", "time of steps")
WIDE_D_MODEL = 512  # width from which matrix products keep a large GPU busy [features]


@dataclass(frozen=True)
class RunPlan:
    """Holds what is left to train of a run, without stages that a run before it trains."""

    run: RowRun
    state: str
    steps: int
    estimate: "Estimate"  # of these steps
    new_programs: int  # training steps to compile, without those that a run before it compiles

    @property
    def cells(self) -> tuple[str, ...]:
        """Return what is printed of the run under each of COLUMN_HEADINGS."""
        time_of_steps = MISSING if self.state == FINISHED else duration(self.estimate.seconds)
        return title_of(self.run), self.state, f"{self.steps:,}", f"{self.estimate.flops:.3g}", time_of_steps


def print_dry_run(wanted: Sequence[RowRun], options: Options, jobs: int) -> None:
    """Print the steps, FLOP and expected time that are left of each run, and which data are missing.

    The time of a run is that of its training steps. That of all runs adds compiling each program once:
    programs are cached on disk, so that another seed of a row compiles nothing. SettingError for settings
    that contradict each other.
    """
    for run in wanted:
        check_agreement(run.experiment)
    stages_of_runs = [stages(run.experiment, run.folder, options.cache) for run in wanted]
    every_stage = [stage for of_run in stages_of_runs for stage in of_run]
    compile_seconds = PROGRAMS_PER_STAGE * measured_compile_seconds(every_stage)
    plans = plan_runs(wanted, stages_of_runs, measured_speeds(every_stage))
    states = [plan.state for plan in plans]
    show_listing(COLUMN_HEADINGS, [plan.cells for plan in plans])
    if SHARES_STAGES in states:
        CONSOLE.print(f"{SHARES_STAGES}: without the stages that a run above trains", highlight=False)
    # of each unfinished run, with compiling what no run before it compiles
    seconds = [
        plan.estimate.seconds + compile_seconds * plan.new_programs
        for plan in plans
        if plan.state != FINISHED
    ]
    at_once = max(min(jobs, len(seconds)), 1)
    expected = duration(makespan(seconds, at_once)) + f" with {at_once} at once" * (at_once > 1)
    num_programs = sum(plan.new_programs for plan in plans)
    source = ""
    if num_programs:  # of networks, whose time is estimated by speeds
        source = "by speeds measured in runs here"
        if not all(plan.estimate.is_measured for plan in plans):
            source = "by a matrix product timed here, roughly"
        source += f"; compiling takes {compile_seconds:.0f} s of it"
        if num_programs > 1:
            source += f" for each of {num_programs} training steps that differ"
        source += "; "
    num_to_evaluate = states.count(TO_EVALUATE)
    to_train = f"{len(seconds) - num_to_evaluate} of {len(wanted)} runs to train"
    if num_to_evaluate:
        to_train += f", {num_to_evaluate} to evaluate,"
    total_steps = sum(plan.steps for plan in plans)
    total_flops = sum(plan.estimate.flops for plan in plans)
    CONSOLE.print(
        f"{to_train} at scale {options.scale}: {total_steps:,} steps, "
        f"{total_flops:.3g} FLOP, about {expected} ({source}evaluating comes on top)",
        highlight=False,
    )
    h100_seconds = sum(plan.estimate.h100_seconds for plan in plans)
    if sum(seconds) > MIN_SECONDS_FOR_H100_LINE and h100_seconds > MIN_H100_SECONDS:
        CONSOLE.print(
            f"on one {H100}: about {duration(h100_seconds)} for all runs, if it reaches {WIDE_SHARE:.0%} of "
            f"its peak with models of width {WIDE_D_MODEL} or more and {NARROW_SHARE:.0%} with narrower "
            f"ones, and takes {1e3 * SHORTEST_STEP:.0f} ms per step at least",
            highlight=False,
        )
    for line in missing_data(wanted, options.cache):
        CONSOLE.print(f"missing: {escape(line)}", highlight=False)


def plan_runs(
    wanted: Sequence[RowRun],
    stages_of_runs: Iterable[Sequence[Stage]],
    speeds: Sequence[tuple[float, float]],
) -> list[RunPlan]:
    """Return what is left of each run. A stage or a program that runs share counts for the first of them.

    speeds: those of ``measured_speeds``.
    """
    plans = []
    seen: set[Path] = set()  # folders of stages that the runs so far train
    compiled: set[Hashable] = set()
    for run, of_run in zip(wanted, stages_of_runs, strict=True):
        state, remaining = FINISHED, []
        if not has_scores(run):
            state = state_of_run(of_run, seen)
            remaining = stages_left(of_run, seen)
        programs_before = len(compiled)
        for stage, _ in remaining:
            if isinstance(stage, NetworkStage) and step_cost(stage):
                compiled.add(program_key(stage))
        steps = sum(count for _, count in remaining)
        new_programs = len(compiled) - programs_before
        plans.append(RunPlan(run, state, steps, estimate_steps(remaining, speeds), new_programs))
    return plans


class Estimate(NamedTuple):
    """Holds what training steps cost, without compiling."""

    flops: float
    seconds: float  # on this machine
    h100_seconds: float  # on one H100
    is_measured: bool  # whether ``seconds`` follows from speeds of runs here alone, not from a matrix product


def estimate_steps(remaining: Iterable[tuple[Stage, int]], speeds: Sequence[tuple[float, float]]) -> Estimate:
    """Return what so many steps of each stage cost, given the ``measured_speeds``."""
    flops = seconds = h100_seconds = 0.0
    is_measured = True
    for stage, steps in remaining:
        cost = step_cost(stage)
        if not cost:
            continue
        speed = speed_of(cost, speeds)
        if speed is None:
            is_measured, speed = False, MATMUL_SHARE * matmul_speed()
        flops += cost * steps
        seconds += cost * steps / speed
        h100_seconds += steps * max(cost / h100_speed(stage), SHORTEST_STEP)
    return Estimate(flops, seconds, h100_seconds, is_measured)


def makespan(seconds: Iterable[float], jobs: int) -> float:
    """Return the time at which the last of several runs ends, with ``jobs`` of them at once [seconds].

    seconds: what each run takes; they are begun in this order.

    >>> makespan([5.0, 5.0, 5.0], 2)
    10.0
    """
    free_at = [0.0] * jobs  # a heap: when each of the jobs is free for the next run
    for each in seconds:
        heapq.heapreplace(free_at, free_at[0] + each)
    return max(free_at)


def title_of(run: RowRun) -> str:
    """Return the row, the settings given by hand, and the seed of a run."""
    last, comma, given = run.folder.parent.name.partition(",")
    return f"{run.name}{comma}{given} seed {run.experiment.seed}"


def has_scores(run: RowRun) -> bool:
    """Return whether a run has scores; False if they are damaged, which training reports.

    Training also compares the run's settings and data with those of now (``is_up_to_date``). That would write
    the built-in data that are missing, and a dry run writes nothing.
    """
    try:
        return read_result(run.folder) is not None
    except SettingError:
        return False


def state_of_run(of_run: Iterable[Stage], seen: set[Path]) -> str:
    """Return whether an unfinished run is to be trained, wholly or in part, or scored, or is in training.

    A shared stage that is in training counts for the first run that has it.

    Args:
        seen: the folders of stages that earlier runs train.
    """
    stages_of_run = list(of_run)
    own = [stage for stage in stages_of_run if stage.folder not in seen]
    if any(map(is_in_training, own)):
        return IN_TRAINING
    if stages_of_run and all(steps_left(stage) <= 0 for stage in stages_of_run):
        return TO_EVALUATE
    return TO_TRAIN if len(own) == len(stages_of_run) else SHARES_STAGES


def steps_left(stage: Stage) -> int:
    """Return the number of steps of a stage after its newest checkpoint."""
    return stage.training.steps - max(saved_steps(stage.folder), default=stage.first_step)


def stages_left(of_run: Iterable[Stage], seen: set[Path]) -> list[tuple[Stage, int]]:
    """Return (stage, steps left) of what a run would train, without stages that an earlier run trains.

    ``seen``: the folders of stages that earlier runs train, to which this run's are added.
    """
    found = []
    for stage in of_run:
        steps = steps_left(stage)
        if steps > 0 and stage.folder not in seen:
            seen.add(stage.folder)
            found.append((stage, steps))
    return found


def program_key(stage: NetworkStage) -> Hashable:
    """Return what the compiled training step of a stage depends on; its seed is an argument."""
    return stage.training_spec(), stage.training.batch_size, stage.lengths


def h100_speed(stage: Stage) -> float:
    """Return the FLOP/s at which an H100 is supposed to train a stage."""
    from lm.train.flops import PEAK_FLOPS  # with jax

    return PEAK_FLOPS[H100] * (WIDE_SHARE if stage.settings.model.d_model >= WIDE_D_MODEL else NARROW_SHARE)


def measured_compile_seconds(planned: Iterable[Stage]) -> float:
    """Return the median time that compiling a step took in stages that were trained before.

    Without any it is COMPILE_SECONDS. What the cache of programs had took no time and does not count.
    """
    found: list[float] = []
    for folder in {stage.folder for stage in planned}:
        if len(found) == MEASURED_STAGES:
            break
        with suppress(OSError, SettingError):
            record = parse_with_checksum((folder / "run.json").read_bytes(), folder / "run.json")
            seconds = record.get("seconds_compiling", 0.0)
            if seconds > CACHED_SECONDS:
                found.append(seconds)
    return median(found) if found else COMPILE_SECONDS


def step_cost(stage: Stage) -> float:
    """Return the FLOPs of a training step of a stage.

    They are 0 for count-based models and skip-gram vectors, whose training takes seconds.
    """
    if not isinstance(stage, NetworkStage) or isinstance(stage, SkipGram):
        return 0.0
    model, lengths = stage.model_of_flops, stage.lengths
    targets = row_length(model.architecture, lengths)
    return _step_flops(model, stage.training.batch_size, lengths.inputs, targets, stage.generator)


@cache  # a sweep asks this of thousands of stages, and of few models
def _step_flops(
    model: ModelConfig, rows: int, inputs: int, targets: int, generator: ModelConfig | None
) -> float:
    from lm.train.flops import step_flops  # with jax

    return step_flops(model, rows, inputs, targets, generator)


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
    alike = [speed for other, speed in speeds if cost / MAX_FLOPS_RATIO <= other <= cost * MAX_FLOPS_RATIO]
    return median(alike) if alike else None


@cache
def matmul_speed() -> float:
    """Return the FLOP/s of a large matrix product on the default device.

    It is repeated for 0.3 s and the fastest time counts, so that other programs disturb it less.
    """
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE))
    product = jax.jit(lambda x: x @ x)
    product(matrix).block_until_ready()  # compiles
    times, end = [], time.perf_counter() + 0.3
    while time.perf_counter() < end:
        began = time.perf_counter()
        product(matrix).block_until_ready()
        times.append(time.perf_counter() - began)
    return 2 * MATMUL_SIZE**3 / min(times)


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
    return [part for part in corpus_parts(experiment.data.corpus) if not is_documentation(part)]


def _task_sources(experiment: Experiment) -> list[tuple[str, str]]:
    """Return (task, data set) of each task that is tuned on and that a run does not write itself."""
    if not experiment.finetuning.steps:
        return []
    tasks: list[Task | LabelledTask] = []
    for name in experiment.tuning.mixtures:
        tasks += mixture(name)
    tasks += map(find_labelled, experiment.tuning.heads)
    prepared = [task for task in tasks if not task.file and not task.source.startswith("documentation/")]
    return [(task.name, task.source) for task in prepared]
