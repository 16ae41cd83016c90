"""``--dry-run``: what a run or a sweep would train, in what time here, and which data are missing.

The time is that of training steps and evaluations, at the speed of earlier runs here, and of compiling. Of an
evaluation it is known how many rows it reads, but for how many answers a task compares: that is supposed.
"""

import heapq
import time
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from rich.markup import escape

from experiments.cli.run_options import Options, RowRun
from experiments.cli.status import is_in_training, last_record
from experiments.console import CONSOLE, MISSING, show_listing
from experiments.processes.progress import duration
from experiments.runs.checks import check_agreement
from experiments.runs.inputs import run_reads_corpus
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.pretraining import NUM_VALIDATION_SEQUENCES
from experiments.runs.kinds.stage import Stage
from experiments.runs.kinds.vectors import SkipGram
from experiments.runs.result import read_result
from experiments.runs.stages import stages
from experiments.runs.status import saved_steps
from experiments.runs.task_scores import read_report_scores
from experiments.runs.vocabulary import vocabulary_corpus
from experiments.study.experiment import Experiment
from lm.config.base import SettingError
from lm.data.corpus import tfds
from lm.data.corpus.spec import corpus_parts, corpus_shards, is_documentation
from lm.data.documentation.corpus import UNFILTERED, VERSION
from lm.data.tasks.mixtures import mixture
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
# of a task that is scored on all of its rows; supposed, since a dry run reads no data
ROWS_OF_TASK = 2_000
# forward passes per row of a task that is answered by text: in the tasks of the documentation the likelihoods
# of 1 to 4 answers are compared, of 2.3 on average, and for some rows an answer is generated too
ANSWERS_PER_ROW = 3
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
COLUMN_HEADINGS = ("run", "state", "steps", "FLOP", "time")
WIDE_D_MODEL = 512  # width from which matrix products keep a large GPU busy [features]


@dataclass(frozen=True)
class RunPlan:
    """Holds what is left to train of a run, without stages that a run before it trains."""

    run: RowRun
    state: str
    steps: int
    estimate: "Estimate"  # of these steps, of evaluations and of scoring
    new_programs: int  # training steps to compile, without those that a run before it compiles

    @property
    def cells(self) -> tuple[str, ...]:
        """Return what is printed of the run under each of COLUMN_HEADINGS."""
        seconds = MISSING if self.state == FINISHED else duration(self.estimate.seconds)
        return title_of(self.run), self.state, f"{self.steps:,}", f"{self.estimate.flops:.3g}", seconds


def print_dry_run(wanted: Sequence[RowRun], options: Options, jobs: int) -> None:
    """Print the steps, FLOP and expected time that are left of each run, and which data are missing.

    The time of a run is that of its training steps and evaluations. That of all runs adds compiling each
    program once: programs are cached on disk, so that another seed of a row compiles nothing. SettingError
    for settings that contradict each other.
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
    evaluation_seconds = sum(plan.estimate.evaluation_seconds for plan in plans)
    notes = []
    if num_programs or evaluation_seconds:  # of networks, whose time is estimated by speeds
        is_measured = all(plan.estimate.is_measured for plan in plans)
        rough = "by a matrix product timed here, roughly"
        notes.append("by speeds measured in runs here" if is_measured else rough)
    if num_programs:
        note = f"compiling takes {compile_seconds:.0f} s of it"
        if num_programs > 1:
            note += f" for each of {num_programs} training steps that differ"
        notes.append(note)
    if evaluation_seconds >= 1:
        notes.append(f"evaluating takes {duration(evaluation_seconds)} in all")
    num_to_evaluate = states.count(TO_EVALUATE)
    to_train = f"{len(seconds) - num_to_evaluate} of {len(wanted)} runs to train"
    if num_to_evaluate:
        to_train += f", {num_to_evaluate} to evaluate,"
    total_steps = sum(plan.steps for plan in plans)
    total_flops = sum(plan.estimate.flops for plan in plans)
    total = f"{total_steps:,} steps, {total_flops:.3g} FLOP, about {expected}"
    if notes:
        total += f" ({'; '.join(notes)})"
    CONSOLE.print(f"{to_train} at scale {options.scale}: {total}", highlight=False)
    h100_seconds = sum(plan.estimate.h100_seconds for plan in plans)
    if sum(seconds) > MIN_SECONDS_FOR_H100_LINE and h100_seconds > MIN_H100_SECONDS:
        CONSOLE.print(
            f"on one {H100}: about {duration(h100_seconds)} for all runs, if it reaches {WIDE_SHARE:.0%} of "
            f"its peak with models of width {WIDE_D_MODEL} or more and {NARROW_SHARE:.0%} with narrower "
            f"ones, and takes {1e3 * SHORTEST_STEP:.0f} ms per step at least",
            highlight=False,
        )
    for line in missing_data(wanted, stages_of_runs, options.cache):
        CONSOLE.print(f"missing: {escape(line)}", highlight=False)
    if sets := documentation_to_make(wanted, stages_of_runs, options.cache):
        CONSOLE.print(
            f"still to be made, in a minute or two before the first run: {', '.join(sets)}, and vocabularies",
            highlight=False,
        )


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
        for stage, steps_of_stage in remaining:
            if steps_of_stage and isinstance(stage, NetworkStage) and step_cost(stage):
                compiled.add(program_key(stage))
        steps = sum(count for _, count in remaining)
        new_programs = len(compiled) - programs_before
        plans.append(RunPlan(run, state, steps, estimate_costs(remaining, speeds), new_programs))
    return plans


@dataclass(frozen=True)
class Estimate:
    """Holds what training and evaluating cost, without compiling."""

    flops: float  # of training steps
    seconds: float  # of training steps and evaluations, on this machine
    evaluation_seconds: float  # of evaluations alone, on this machine
    h100_seconds: float  # of training steps, on one H100
    is_measured: bool  # whether ``seconds`` follows from speeds of runs here alone, not from a matrix product


def estimate_costs(remaining: Iterable[tuple[Stage, int]], speeds: Sequence[tuple[float, float]]) -> Estimate:
    """Return what so many steps of each stage and its evaluations cost, given the ``measured_speeds``."""
    flops = seconds = evaluation_seconds = h100_seconds = 0.0
    is_measured = True
    for stage, steps in remaining:
        cost = step_cost(stage)
        if not cost or not isinstance(stage, NetworkStage):
            continue
        speed = speed_of(cost, speeds)
        if speed is None:
            is_measured, speed = False, MATMUL_SHARE * matmul_speed()
        flops += cost * steps
        seconds += cost * steps / speed
        # a forward pass is a third of a training step
        cost_per_row = cost / stage.training.batch_size / 3
        evaluation_seconds += evaluated_rows(stage, steps) * cost_per_row / speed
        h100_seconds += steps * max(cost / h100_speed(stage), SHORTEST_STEP)
    return Estimate(flops, seconds + evaluation_seconds, evaluation_seconds, h100_seconds, is_measured)


def evaluated_rows(stage: NetworkStage, steps: int) -> int:
    """Return about how many rows a stage still evaluates: during its last ``steps``, and to be scored.

    A row of a task that is answered by text counts ANSWERS_PER_ROW times.
    """
    tuning = stage.settings.tuning
    answers = 1 if stage.has_head else ANSWERS_PER_ROW
    validation_rows = tuning.evaluation_examples or ROWS_OF_TASK
    checkpoints = num_evaluations(stage, steps, stage.training.save_every)
    tasks = stage.tasks
    rows = len(tasks["validation"]) * checkpoints * validation_rows * answers
    if stage.is_pretraining:
        # the denoisers of a mixture are also evaluated one by one
        passes = 2 if stage.settings.objective.mixture else 1
        rows += num_evaluations(stage, steps, stage.evaluate_every) * passes * NUM_VALIDATION_SEQUENCES
    if awaits_scoring(stage):
        report_rows = tuning.report_examples or ROWS_OF_TASK
        if not stage.has_head:
            # also the validation rows, for calibration, and rows with the inputs of others
            report_rows += validation_rows + tuning.shuffled_inputs
        rows += len(tasks["report"]) * report_rows * answers
    return rows


def num_evaluations(stage: Stage, steps: int, every: int) -> int:
    """Return how often a stage is evaluated in its last ``steps``, if it is after each ``every`` steps.

    It is also evaluated after its last step, and where fine-tuning starts from it.
    """
    last = stage.training.steps
    first = last - steps
    others = {step for step in (*stage.branch_steps, last) if step > first and step % every}
    return last // every - first // every + len(others)


def awaits_scoring(stage: Stage) -> bool:
    """Return whether the report rows of a stage's tasks are still to be scored.

    True if its scores are damaged, which training reports.
    """
    if not stage.tasks["report"]:
        return False
    with suppress(SettingError, OSError):
        return not read_report_scores(stage.folder)
    return True


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
    """Return (stage, steps left) of what a run would train or score, without what an earlier run does.

    ``seen``: the folders of stages that earlier runs train or score, to which this run's are added.
    """
    found = []
    for stage in of_run:
        steps = max(steps_left(stage), 0)
        if stage.folder not in seen and (steps or awaits_scoring(stage)):
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
    """Return the FLOPs of a training step of a stage, a teacher's forward pass included.

    They are 0 for count-based models and skip-gram vectors, whose training takes seconds.
    """
    if not isinstance(stage, NetworkStage) or isinstance(stage, SkipGram):
        return 0.0
    return stage.flops_of_lengths(stage.lengths)


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


def missing_data(
    wanted: Sequence[RowRun], stages_of_runs: Sequence[Sequence[Stage]], folder: Path
) -> list[str]:
    """Return a line for each corpus and each data set of a task that is not in the cache ``folder``.

    The built-in documentation is left out, which a run makes itself.

    Args:
        stages_of_runs: the stages of each run of ``wanted``.
    """
    lines: dict[str, None] = {}
    for run, of_run in zip(wanted, stages_of_runs, strict=True):
        for name in corpora_of(run.experiment):
            if is_documentation(name):
                continue
            try:
                corpus_shards(name, "train", folder, run.experiment.data.corrupt_records)
            except SettingError as error:
                lines[str(error)] = None
        for name, source in task_sources(run.experiment, of_run).items():
            if not is_documentation(source) and tfds.newest_version(source, "*.*.*", folder) is None:
                lines[f"task {name} reads tfds:{source}, which is not prepared here"] = None
    return list(lines)


def documentation_to_make(
    wanted: Sequence[RowRun], stages_of_runs: Sequence[Sequence[Stage]], folder: Path
) -> list[str]:
    """Return the data sets of the documentation that runs will make, since the cache ``folder`` lacks them.

    Args:
        stages_of_runs: the stages of each run of ``wanted``.
    """
    sets: set[str] = set()
    for run, of_run in zip(wanted, stages_of_runs, strict=True):
        for part in filter(is_documentation, corpora_of(run.experiment)):
            is_corpus = not part.startswith("tfds:") and not part.endswith(f"/{UNFILTERED}")
            sets.add("documentation/corpus" if is_corpus else part.removeprefix("tfds:"))
        sets.update(filter(is_documentation, task_sources(run.experiment, of_run).values()))
    names = sorted(name.partition(":")[0] for name in sets)
    return [name for name in names if tfds.newest_version(name, VERSION, folder) is None]


def corpora_of(experiment: Experiment) -> list[str]:
    """Return the parts of the corpus that a run reads, and of the corpus of its vocabulary."""
    parts = corpus_parts(experiment.data.corpus) if run_reads_corpus(experiment) else []
    if not experiment.start.model and (corpus := vocabulary_corpus(experiment)):
        parts += corpus_parts(corpus)
    return parts


def task_sources(experiment: Experiment, of_run: Iterable[Stage]) -> dict[str, str]:
    """Return task -> data set of each task that a run reads, but for tasks from files."""
    tasks = [task for stage in of_run for of_split in stage.tasks.values() for task in of_split]
    if experiment.data.vocabulary_texts == "corpus+tasks" and not experiment.start.model:
        tasks += [task for name in experiment.tuning.mixtures for task in mixture(name)]
    return {task.name: task.source for task in tasks if not task.file}
