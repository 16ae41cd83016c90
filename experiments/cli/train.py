"""Training of rows: one, or all that a sweep wants, several at once; each to its end."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments.cli.run_names import LAST, name_run
from experiments.cli.run_options import Options, RowRun, check_data, is_up_to_date, link_shared_run, row_run
from experiments.processes.exit_codes import AGAIN, EXIT_CODES
from experiments.processes.group import broadcast_from_first, cache_compiled
from experiments.processes.jobs import Jobs, cores, handed_out
from experiments.processes.line import Line
from experiments.processes.place import find_place
from experiments.processes.progress import (
    JobReporter,
    Reporter,
    Told,
    duration,
    reporting,
)
from experiments.runs.result import check_settings, read_result, summary
from experiments.study.experiment import Experiment
from experiments.study.paths import check_runs
from experiments.study.plugins import location_in_study
from lm.config.base import SettingError
from lm.devices import has_accelerator
from lm.files import write

ONE_CORE = 1e11  # between the steps of mini-real (3e10) and small (5e11), which all cores share [FLOP]


def fits_one_core(experiment: Experiment) -> bool:
    """Return whether a core to each run trains more than cores that share one, by the FLOPs of a step."""
    from lm.train.flops import step_flops  # with jax

    length, size = experiment.data.inputs_length, experiment.pretraining.batch_size
    return step_flops(experiment.model, size, length, length) < ONE_CORE


def job_count(jobs: int, wanted: Sequence[RowRun]) -> int:
    """Return how many runs to train at once; SettingError where a device, or another process, does that."""
    if jobs < 0:
        raise SettingError(f"--jobs {jobs} should be at least 1, or 0 for as many as is best")
    if jobs == 1:
        return 1
    small = sum(fits_one_core(run.experiment) for run in wanted)
    if not jobs and 2 * small < len(wanted):  # a few large rows among small ones do not count
        return 1
    several = find_place(os.environ) is not None
    if jobs and (several or has_accelerator()):
        why = "of several processes (LM_PROCESSES, Slurm, TPU)" if several else "with a GPU or TPU"
        raise SettingError(f"--jobs {jobs}: a sweep {why} trains one run at a time; leave --jobs out")
    return 1 if several or has_accelerator() else jobs or cores()


def train_unfinished(wanted: Sequence[RowRun], options: Options, jobs: int = 1) -> int:
    """Train those of ``wanted`` that have not finished, up to ``jobs`` at once.

    One that fails is reported and the others are trained; the exit code is that of the first failure.
    """
    if (tasks := handed_out()) is not None:
        _train_as_told(tasks, wanted, options)
    todo = [number for number, run in enumerate(wanted) if not is_up_to_date(run, options)]
    codes: list[int] = []
    if todo:
        with reporting(sum(wanted[number].steps for number in todo)) as reporter:
            at_once = f", {jobs} at once" if (jobs := min(jobs, len(todo))) > 1 else ""
            done = f"{len(wanted) - len(todo)} of {len(wanted)} runs are finished"
            reporter.say(f"{done}; {len(todo)} to go{at_once}")
            if jobs > 1:
                codes = _train_in_jobs(wanted, todo, options, reporter, jobs)
            else:
                cache_compiled(options.cache)
                codes = [train_one(wanted[number], options, reporter) for number in todo]
    return next(filter(None, codes), EXIT_CODES["done"])


def _train_as_told(tasks: Iterator[tuple[int, Line]], wanted: Sequence[RowRun], options: Options) -> NoReturn:
    """In a worker: train the runs with the numbers that come."""
    cache_compiled(options.cache)
    for number, line in tasks:
        line.send({"code": train_one(wanted[number], options, Told(line.send))})
    sys.exit()


def _train_in_jobs(
    wanted: Sequence[RowRun], todo: Sequence[int], options: Options, reporter: Reporter, count: int
) -> list[int]:
    """Train the runs with the numbers ``todo`` in so many processes at once; their exit codes."""
    from experiments.runs.stages import stages  # with jax
    from lm.train.runtime.log import last_start_finished

    several = len({run.experiment.seed for run in wanted}) > 1
    shown: dict[int, JobReporter] = {}

    def hear(number: int, told: Mapping[str, Any]) -> None:
        run = wanted[number]
        name = f"{run.name} seed {run.experiment.seed}" if several else run.name
        if number not in shown:
            shown[number] = JobReporter(reporter, name, run.steps)
        if told.get("killed") and jobs.signal is None:
            reporter.complain(_failure(name, told["killed"], run.folder))
        shown[number].hear(told)

    def untrained(number: int) -> set[Path]:
        run = wanted[number]
        every = stages(run.experiment, run.folder, options.cache)
        return {stage.folder for stage in every if not last_start_finished(stage.folder)}

    jobs = Jobs(count, untrained, hear)
    codes = jobs.do(todo)
    if jobs.signal is not None:
        reporter.say(f"stopped ({signal.Signals(jobs.signal).name}); run the same command to resume")
        sys.exit(AGAIN)
    return [codes[number] for number in todo]


def train_one(run: RowRun, options: Options, reporter: Reporter) -> int:
    """Train one run to its end; its exit code. An interruption ends the process and says how to resume."""
    try:
        return train_or_refuse(run, options, reporter)
    except SettingError as error:
        reporter.complain(_failure(run.name, error, run.folder))
        return EXIT_CODES["bad settings"]


def train_or_refuse(
    run: RowRun, options: Options, reporter: Reporter, begin: Callable[[], object] = lambda: None
) -> int:
    """The same, but for a SettingError, which is raised; ``begin`` is called when all checks have passed."""
    from experiments.runs.run import Run, RunDeleted
    from lm.train.runtime.checkpoints import CheckpointError
    from lm.train.runtime.log import NonFiniteLoss
    from lm.train.runtime.preemption import Interrupted

    began = time.perf_counter()
    try:
        finished = broadcast_from_first(
            lambda: read_result(run.folder) is not None
        )  # SettingError if it is damaged
        allowed = options.allowed - {"settings"} if finished else options.allowed
        Run(run.experiment, run.folder, options.cache).train(reporter, allowed, options.tools, begin)
        scores = broadcast_from_first(lambda: summary(run.folder))
    except Interrupted as stopped:
        reporter.say(f"{run.name}: {stopped}. Run the same command to resume.")
        sys.exit(AGAIN)
    except SettingError:
        raise
    except (CheckpointError, NonFiniteLoss, RunDeleted) as error:
        reporter.complain(_failure(run.name, error, run.folder))
        return EXIT_CODES["loss not finite" if isinstance(error, NonFiniteLoss) else "failed"]
    except Exception as error:  # the other runs of a sweep are trained nevertheless
        trace = traceback.format_exc()
        reason = f"{location_in_study(error)}{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = f"{error}. Fix that and run the same command: it resumes from the newest checkpoint"
        reporter.complain(_failure(run.name, f"{reason}{_saved(trace, run.folder)}", run.folder))
        return EXIT_CODES["failed"]
    seconds = duration(time.perf_counter() - began)
    reporter.say(f"{run.name} seed {run.experiment.seed}: {scores} ({seconds})")
    return EXIT_CODES["done"]


def _failure(name: str, reason: object, folder: Path) -> str:
    """Return the message for a run that failed, with its folder if it had begun."""
    return f"{name} failed: {reason}" + (f"\n  folder: {folder}" if folder.exists() else "")


def _saved(trace: str, folder: Path) -> str:
    """Write an error's trace; a line that says where, empty if the trace cannot be written either."""
    import jax

    path = folder / (f"error-{jax.process_index()}.txt" if jax.process_index() else "error.txt")
    try:
        write(path, trace)
    except OSError:
        return ""
    return f"\n  more in {path}"


def train_row(name: str, experiment: Experiment, options: Options, check: bool, run_name: str = "") -> None:
    """Train one run to its end and say where it lies; with ``check`` only see whether it could be started.

    run_name: by which other commands find the run; "" for none.
    """
    import jax

    from experiments.runs.run import Run

    check_runs(options.runs)
    cache_compiled(options.cache)
    run = row_run(name, experiment, options)
    with reporting(run.steps, quiet=jax.process_index() > 0) as reporter:

        def say_ending() -> None:
            from experiments.cli.run_summary import summarize

            for line in summarize(name, experiment, run.folder):
                reporter.say(line)

        if check:
            from experiments.runs.checks import exported_heads

            Run(experiment, run.folder, options.cache).check(reporter.say, options.allowed)
            for line in exported_heads(experiment):
                reporter.say(line)
            reporter.say(f"ready to train in {run.folder}")
            return
        if shared := link_shared_run(run, options):
            reporter.say(shared)

        def name_it() -> None:
            if jax.process_index() == 0:
                for short in filter(None, (LAST, run_name)):
                    name_run(options.runs, short, run.folder)

        if broadcast_from_first(lambda: read_result(run.folder) is not None):
            name_it()
            broadcast_from_first(lambda: check_settings(experiment, run.folder))
            broadcast_from_first(lambda: check_data(run, options, reporter.say))
            reporter.say(f"already finished: {run.folder}")
            say_ending()
            return
        code = train_or_refuse(run, options, reporter, name_it)
        if code:
            reporter.say(f"run: {run.folder}")
        elif jax.process_index() == 0:
            for line in sample_lines(run):
                reporter.say(line)
            say_ending()
    if code:
        sys.exit(code)


def sample_lines(run: RowRun) -> list[str]:
    """Return lines that show what a model writes of held-out text.

    There are none for the denoisers of the study on the built-in text, whose sample says little.
    """
    experiment = run.experiment
    if not (":" in experiment.data.corpus or experiment.model.architecture == "decoder"):
        return []
    from experiments.evaluate.samples import held_out_sample  # with all that opens trained models

    sample = held_out_sample(experiment, run.folder)
    return [] if sample is None else [*sample.lines()]
