"""Training of rows: one, or all that a sweep wants, several at once; each to its end."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from experiments.cli.run_names import LAST, name_run
from experiments.cli.run_options import Options, RowRun, check_data, is_up_to_date, link_shared_run, row_run
from experiments.cli.terminal import outlive_the_reader, speak_any_encoding
from experiments.console import print_line
from experiments.processes.cluster import (
    broadcast_from_first,
    is_due_to_lost_process,
    process_count,
)
from experiments.processes.exit_codes import AGAIN, EXIT_CODES
from experiments.processes.jobs import Jobs, cores
from experiments.processes.memory import collect_garbage_rarely
from experiments.processes.progress import JobReporter, RemoteReporter, Reporter, duration, reporting
from experiments.runs.curves import lowest_before_memorising, read_curves
from experiments.runs.paths import cache_compiled
from experiments.runs.provenance import other_modules_note
from experiments.runs.result import check_settings, read_result, summary
from experiments.study.experiment import Experiment
from experiments.study.paths import check_runs
from experiments.study.plugins import load_study, location_in_study
from lm.config.base import SettingError
from lm.devices import has_accelerator, visible_gpus
from lm.files import write

GPU_MEMORY_FRACTION = 0.9  # share of a GPU's memory, less what CUDA itself needs for each process
MAX_ONE_CORE_STEP_FLOPS = 1e11  # between the steps of mini-real (3e10) and small (5e11)


def fits_one_core(experiment: Experiment) -> bool:
    """Return whether one run per core trains faster than each run with all cores, by the FLOPs of a step."""
    from lm.nn.electra import generator_of  # with jax
    from lm.train.flops import step_flops

    length, size = experiment.data.inputs_length, experiment.pretraining.batch_size
    generator = generator_of(experiment.model, experiment.generator_share)
    return step_flops(experiment.model, size, length, length, generator) < MAX_ONE_CORE_STEP_FLOPS


def job_count(jobs: int, wanted: Sequence[RowRun]) -> int:
    """Return how many runs to train at once.

    Raises SettingError if ``jobs`` asks for several where an accelerator other than a CUDA GPU trains, or
    where there are several processes. With JAX_PLATFORMS=cpu no accelerator trains.
    """
    if jobs < 0:
        raise SettingError(f"--jobs {jobs} should be at least 1, or 0 for as many as is best")
    if jobs == 1:
        return 1
    small = sum(fits_one_core(run.experiment) for run in wanted)
    if not jobs and 2 * small < len(wanted):  # all cores to each run, unless half of the runs are small
        return 1
    several = (process_count(os.environ) or 1) > 1
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu" or not has_accelerator()
    if not several and (on_cpu or jobs and visible_gpus()):
        return jobs or cores()
    if jobs:
        where = "on accelerators other than CUDA GPUs"
        if several:
            where = "of several processes (LM_PROCESSES, Slurm, Open MPI)"
        raise SettingError(f"--jobs {jobs}: a sweep {where} trains one run at a time; leave --jobs out")
    return 1


def share_of_gpus(count: int, slot: int) -> dict[str, str]:
    """Return the variables that give one of ``count`` processes a GPU, or its part of the memory of one.

    Without GPUs there are none. A share of memory that the user has set stays.
    """
    if not (gpus := visible_gpus()):
        return {}
    share = GPU_MEMORY_FRACTION / ceil(count / len(gpus))
    memory = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.3f}")
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)], "XLA_PYTHON_CLIENT_MEM_FRACTION": memory}


def train_unfinished(
    wanted: Sequence[RowRun], options: Options, jobs: int = 1, in_children: bool = False
) -> int:
    """Train those of ``wanted`` that have not finished, up to ``jobs`` at once.

    One that fails is reported and the others are trained; the exit code is that of the first failure.
    in_children: train in processes with one thread each, also if there is only one, so that a run is the same
    to the last bit however many others are trained beside it.
    """
    todo = [run for run in wanted if not is_up_to_date(run, options)]
    finished = {run.folder for run in wanted} - {run.folder for run in todo}
    if note := other_modules_note(map(read_result, sorted(finished))):
        print_line(note)
    codes: list[int] = []
    if not todo:
        print_line(f"{len(wanted)} of {len(wanted)} runs are finished: nothing to train")
    if todo:
        with reporting(sum(run.steps for run in todo)) as reporter:
            at_once = f", {jobs} at once" if (jobs := min(jobs, len(todo))) > 1 else ""
            done = f"{len(wanted) - len(todo)} of {len(wanted)} runs are finished"
            reporter.say(f"{done}; {len(todo)} to go{at_once}")
            if jobs > 1 or in_children:
                codes = _train_in_jobs(todo, options, reporter, jobs)
            else:
                cache_compiled(options.cache)
                codes = [train_one(run, options, reporter) for run in todo]
    return next(filter(None, codes), EXIT_CODES["done"])


def _train_in_jobs(todo: Sequence[RowRun], options: Options, reporter: Reporter, count: int) -> list[int]:
    """Train the runs in so many processes at once, and return their exit codes."""
    from experiments.runs.stages import stages  # with jax
    from lm.train.runtime.log import last_start_finished

    reporter.describe("all runs")
    has_seeds = len({run.experiment.seed for run in todo}) > 1
    tables = {run.name.rpartition("/")[0] for run in todo}
    bars: dict[Path, JobReporter] = {}  # of the runs that have begun, by their folders

    def name(run: RowRun) -> str:
        short = run.title.removeprefix(f"{run.name.rpartition('/')[0]}/") if len(tables) == 1 else run.title
        return f"{short} seed {run.experiment.seed}" if has_seeds else short

    def unfinished_stage_folders(run: RowRun) -> set[Path]:
        every = stages(run.experiment, run.folder, options.cache)
        return {stage.folder for stage in every if not last_start_finished(stage.folder)}

    def show(run: RowRun, call: Any) -> None:
        if run.folder not in bars:
            bars[run.folder] = JobReporter(reporter, name(run), run.steps)
        bars[run.folder].repeat(call)

    def end(run: RowRun, killed: str | None) -> None:
        if killed is not None:
            reporter.complain(_failure(run, killed))
        if run.folder in bars:
            bars.pop(run.folder).close()

    work, gpu_variables = partial(_train_in_child, options), partial(share_of_gpus, count)
    # the last takes two seconds of every run that is scored by ROUGE
    preload = (__name__, "experiments.runs.run", "grain", "rouge_score.rouge_scorer")
    jobs = Jobs(count, work, unfinished_stage_folders, show, end, gpu_variables, preload=preload)
    codes = jobs.run(todo)
    if jobs.signal is not None:
        reporter.say(f"stopped ({signal.Signals(jobs.signal).name}); run the same command to resume")
        sys.exit(AGAIN)
    return [code or 0 for code in codes]


def _train_in_child(options: Options, run: RowRun, send: Callable[[Any], None]) -> int:
    """In a process of its own: train one run to its end, showing its progress in the parent.

    It begins with what ``lm`` does for a command.
    """
    collect_garbage_rarely()
    speak_any_encoding()
    outlive_the_reader()
    load_study()
    cache_compiled(options.cache)
    return train_one(run, options, RemoteReporter(send))


def train_one(run: RowRun, options: Options, reporter: Reporter) -> int:
    """Train one run to its end and return its exit code.

    An interruption ends the process and says how to resume.
    """
    try:
        return train_or_raise(run, options, reporter)
    except SettingError as error:
        reporter.complain(_failure(run, error))
        return EXIT_CODES["bad settings"]


def train_or_raise(
    run: RowRun, options: Options, reporter: Reporter, begin: Callable[[], object] = lambda: None
) -> int:
    """Do as ``train_one`` does, but raise a SettingError; ``begin`` is called when all checks have passed."""
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
        scores = broadcast_from_first(lambda: summary(run.folder) + _memorising(run.folder))
    except Interrupted as stopped:  # by a signal that a parent may have sent in place of another
        reporter.say(f"{_name_and_seed(run)}: {stopped.saved}. Run the same command to resume.")
        sys.exit(AGAIN)
    except SettingError:
        raise
    except (CheckpointError, NonFiniteLoss, RunDeleted) as error:
        reporter.complain(_failure(run, error))
        return EXIT_CODES["loss not finite" if isinstance(error, NonFiniteLoss) else "failed"]
    except Exception as error:  # the other runs of a sweep are trained nevertheless
        if is_due_to_lost_process(error):
            raise
        trace = traceback.format_exc()
        reason = f"{location_in_study(error)}{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = f"{error}. Fix that and run the same command: it resumes from the newest checkpoint"
        reporter.complain(_failure(run, f"{reason}{_write_traceback(trace, run.folder)}"))
        return EXIT_CODES["failed"]
    seconds = duration(time.perf_counter() - began)
    reporter.say(f"{_name_and_seed(run)}: {scores} ({seconds})")
    return EXIT_CODES["done"]


def _memorising(folder: Path) -> str:
    """Return when a finished run's held-out loss was lowest, if the model memorised its text since."""
    result = read_result(folder)
    lowest = lowest_before_memorising(read_curves([result], warn=lambda line: None)) if result else None
    if lowest is None:
        return ""
    step, loss = lowest
    return f"; lowest held-out loss {loss:.3f}, at step {step:,.0f}: the model memorises its text"


def _failure(run: RowRun, reason: object) -> str:
    """Return the message for a run that failed, with its folder if it had begun."""
    where = f"\n  folder: {run.folder}" if run.folder.exists() else ""
    return f"{_name_and_seed(run)} failed: {reason}{where}"


def _name_and_seed(run: RowRun) -> str:
    return f"{run.title} seed {run.experiment.seed}"


def _write_traceback(trace: str, folder: Path) -> str:
    """Write the traceback to a file; return a line that names the file, or "" if it cannot be written."""
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
            broadcast_from_first(lambda: check_settings(experiment, run.folder))
            broadcast_from_first(lambda: check_data(run, options, reporter.say))
            name_it()
            reporter.say(f"already finished: {run.folder}")
            if note := other_modules_note(map(read_result, [run.folder])):
                reporter.say(note)
            say_ending()
            return
        code = train_or_raise(run, options, reporter, name_it)
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
