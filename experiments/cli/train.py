"""Trains runs to their end: one, or all runs of a sweep, several of them at once."""

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

from experiments.cli.run_names import LAST, name_run, other_run_with_name
from experiments.cli.run_options import Options, RowRun, check_data, is_up_to_date, link_shared_run, row_run
from experiments.cli.terminal import ignore_broken_pipes, replace_unencodable_characters
from experiments.console import print_line
from experiments.processes.cluster import broadcast_from_first, is_due_to_lost_process, process_count
from experiments.processes.exit_codes import EXIT_CODES, PREEMPTED
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
from lm.train.runtime.records import last_start_finished

# share of a GPU's memory that the runs on it divide among themselves; the rest is what CUDA itself needs
GPU_MEMORY_FRACTION = 0.9
MAX_ONE_CORE_STEP_FLOPS = 1e11  # between the steps of mini-real (3e10) and small (5e11)


def fits_one_core(experiment: Experiment) -> bool:
    """Return whether runs train faster with one core each than one after another with all cores.

    It is judged by the FLOPs of a step.
    """
    from lm.nn.electra import generator_of  # with jax
    from lm.train.flops import step_flops

    length, size = experiment.data.inputs_length, experiment.pretraining.batch_size
    generator = generator_of(experiment.model, experiment.generator_share)
    return step_flops(experiment.model, size, length, length, generator) < MAX_ONE_CORE_STEP_FLOPS


def job_count(jobs: int, wanted: Sequence[RowRun]) -> int:
    """Return how many runs to train at once: ``jobs``, if it is not 0.

    For 0 it is one run per core if a CPU trains and at least half of the runs are small, else 1.

    SettingError if ``jobs`` asks for several where an accelerator other than a CUDA GPU trains, or where the
    environment says that there are several processes.
    """
    if jobs < 0:
        raise SettingError(f"--jobs {jobs} should be at least 1, or 0 for as many as is best")
    if jobs == 1:
        return 1
    has_several_processes = (process_count(os.environ) or 1) > 1
    if jobs == 0:
        num_small = sum(fits_one_core(run.experiment) for run in wanted)
        is_one_per_core = 2 * num_small >= len(wanted) and not has_several_processes and _trains_on_cpu()
        return cores() if is_one_per_core else 1
    refusal = ""
    if has_several_processes:
        refusal = "of several processes (LM_PROCESSES, Slurm, Open MPI)"
    elif not _trains_on_cpu() and not visible_gpus():
        refusal = "on accelerators other than CUDA GPUs"
    if refusal:
        raise SettingError(f"--jobs {jobs}: a sweep {refusal} trains one run at a time; leave --jobs out")
    return jobs


def _trains_on_cpu() -> bool:
    """Return whether a CPU trains: there is no accelerator, or JAX_PLATFORMS=cpu leaves it unused."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not has_accelerator()


def share_of_gpus(count: int, slot: int) -> dict[str, str]:
    """Return the environment variables that give process ``slot`` of ``count`` its GPU and share of memory.

    They are {} without GPUs. A share of memory that the user has set in the environment is kept.
    """
    if not (gpus := visible_gpus()):
        return {}
    share = GPU_MEMORY_FRACTION / ceil(count / len(gpus))
    memory = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{share:.3f}")
    return {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)], "XLA_PYTHON_CLIENT_MEM_FRACTION": memory}


def train_unfinished(
    wanted: Sequence[RowRun], options: Options, jobs: int = 1, in_children: bool = False
) -> int:
    """Train those of ``wanted`` that have not finished, up to ``jobs`` at once; return the exit code.

    If one fails, this is reported and the others are trained; the exit code is that of the first failure.
    in_children: train in processes with one thread each, also if there is only one, so that a run is the same
    to the last bit however many others are trained beside it.
    """
    todo = [run for run in wanted if not is_up_to_date(run, options)]
    finished = {run.folder for run in wanted} - {run.folder for run in todo}
    if note := other_modules_note(map(read_result, sorted(finished))):
        print_line(note)
    codes: list[int] = []
    done = f"{len(wanted) - len(todo)} of {len(wanted)} runs are finished"
    if not todo:
        print_line(f"{done}: nothing to train")
    else:
        with reporting(sum(run.steps for run in todo)) as reporter:
            jobs = min(jobs, len(todo))
            at_once = f", {jobs} at once" if jobs > 1 else ""
            reporter.say(f"{done}; {len(todo)} to go{at_once}")
            if jobs > 1 or in_children:
                codes = _train_in_jobs(todo, options, reporter, jobs)
            else:
                cache_compiled(options.cache)
                codes = [train_one(run, options, reporter) for run in todo]
    return next(filter(None, codes), EXIT_CODES["done"])


def _train_in_jobs(todo: Sequence[RowRun], options: Options, reporter: Reporter, count: int) -> list[int]:
    """Train the runs in up to ``count`` processes at once, and return their exit codes."""
    from experiments.runs.stages import stages  # with jax

    reporter.describe("all runs")
    has_seeds = len({run.experiment.seed for run in todo}) > 1
    tables = {run.name.rpartition("/")[0] for run in todo}
    reporters: dict[Path, JobReporter] = {}  # of the runs in training, by their folders

    def bar_name(run: RowRun) -> str:
        name = run.title
        if len(tables) == 1:
            name = name.removeprefix(f"{run.name.rpartition('/')[0]}/")
        if has_seeds:
            name += f" seed {run.experiment.seed}"
        return name

    def unfinished_stage_folders(run: RowRun) -> set[Path]:
        every = stages(run.experiment, run.folder, options.cache)
        return {stage.folder for stage in every if not last_start_finished(stage.folder)}

    def show_progress(run: RowRun, call: Any) -> None:
        if run.folder not in reporters:
            reporters[run.folder] = JobReporter(reporter, bar_name(run), run.steps)
        reporters[run.folder].repeat(call)

    def report_end(run: RowRun, cause: str | None) -> None:
        if cause is not None:
            reporter.complain(_failure(run, cause))
        if run.folder in reporters:
            reporters.pop(run.folder).close()

    work, gpu_variables = partial(_train_in_child, options), partial(share_of_gpus, count)
    # importing the last of them takes two seconds in every run that is scored by ROUGE
    preload = (__name__, "experiments.runs.run", "grain", "rouge_score.rouge_scorer")
    outputs = unfinished_stage_folders
    jobs = Jobs(count, work, outputs, show_progress, report_end, gpu_variables, preload=preload)
    codes = jobs.run(todo)
    if jobs.received_signal is not None:
        name = signal.Signals(jobs.received_signal).name
        reporter.say(f"stopped ({name}); run the same command to resume")
        sys.exit(PREEMPTED)
    # The code of a run that was not begun is None, which comes only with a signal, handled above.
    return [code or 0 for code in codes]


def _train_in_child(options: Options, run: RowRun, send: Callable[[Any], None]) -> int:
    """In a child process: train one run to its end, and show its progress in the parent.

    First set up the process as ``lm`` does for a command.
    """
    collect_garbage_rarely()
    replace_unencodable_characters()
    ignore_broken_pipes()
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
        # SettingError if the result is damaged
        finished = broadcast_from_first(lambda: read_result(run.folder) is not None)
        allowed = options.allowed - {"settings"} if finished else options.allowed
        Run(run.experiment, run.folder, options.cache).train(reporter, allowed, options.tools, begin)
        scores = broadcast_from_first(lambda: summary(run.folder) + _overfitting_note(run.folder))
    except Interrupted as stopped:
        # The message names no signal, since a parent may have passed on another signal as SIGTERM.
        reporter.say(f"{_name_and_seed(run)}: {stopped.saved}. Run the same command to resume.")
        sys.exit(PREEMPTED)
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


def _overfitting_note(folder: Path) -> str:
    """Return a note with the step at which a finished run's held-out loss was lowest; "" without overfitting.

    It overfits if the held-out loss rose after that step while the training loss did not
    (``lowest_before_memorising``).
    """
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
    """Train one run to its end and name its folder; with ``check``, only check whether it could be started.

    run_name: the name by which other commands find the run; "" for none.
    """
    import jax

    from experiments.runs.run import Run

    check_runs(options.runs)
    cache_compiled(options.cache)
    run = row_run(name, experiment, options)
    with reporting(run.steps, quiet=jax.process_index() > 0) as reporter:

        def print_summary() -> None:
            from experiments.cli.run_summary import summarize

            for line in summarize(name, experiment, run.folder):
                reporter.say(line)

        if check:
            from experiments.runs.checks import exported_heads

            Run(experiment, run.folder, options.cache).check(reporter.say, options.allowed)
            for line in exported_heads(experiment):
                reporter.say(line)
            if other := other_run_with_name(run_name, options.runs, run.folder):
                reporter.say(f"@{run_name} will name this run; now: {other}")
            reporter.say(f"ready to train in {run.folder}")
            return
        if shared := link_shared_run(run, options):
            reporter.say(shared)

        def set_names() -> None:
            if jax.process_index() == 0:
                if other := other_run_with_name(run_name, options.runs, run.folder):
                    reporter.say(f"@{run_name} names this run from now on; before: {other}")
                for short in filter(None, (LAST, run_name)):
                    name_run(options.runs, short, run.folder)

        if broadcast_from_first(lambda: read_result(run.folder) is not None):
            broadcast_from_first(lambda: check_settings(experiment, run.folder))
            broadcast_from_first(lambda: check_data(run, options, reporter.say))
            set_names()
            reporter.say(f"already finished: {run.folder}")
            if note := other_modules_note(map(read_result, [run.folder])):
                reporter.say(note)
            print_summary()
            return
        code = train_or_raise(run, options, reporter, set_names)
        if code:
            reporter.say(f"run: {run.folder}")
        elif jax.process_index() == 0:
            for line in sample_lines(run):
                reporter.say(line)
            print_summary()
    if code:
        sys.exit(code)


def sample_lines(run: RowRun) -> list[str]:
    """Return lines that show what the trained model generates for a held-out text.

    Return [] on a built-in corpus unless the model is a decoder: the sample of another would say little.
    """
    experiment = run.experiment
    is_builtin_corpus = ":" not in experiment.data.corpus  # others have a prefix, such as text:book.txt
    if is_builtin_corpus and experiment.model.architecture != "decoder":
        return []
    from experiments.evaluate.samples import held_out_sample  # with all that opens trained models

    sample = held_out_sample(experiment, run.folder)
    return [] if sample is None else [*sample.lines()]
