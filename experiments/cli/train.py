"""``lm run`` and ``lm sweep``: one row, or every row of a pattern and every seed, each trained to its end."""

import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from experiments.cli.arguments import FLAT, check_first, first_word, named_settings, option, parse
from experiments.console import RUNS
from experiments.processes.exit_codes import AGAIN, EXIT_CODES
from experiments.processes.group import agreed, cache_compiled
from experiments.processes.jobs import Jobs, cores, handed_out
from experiments.processes.line import Line
from experiments.processes.place import find_place, has_accelerator
from experiments.report.ending import ending, summary
from experiments.runs import origin
from experiments.runs.progress import JobReporter, Reporter, Told, duration, reporting
from experiments.runs.result import check_settings, read_result
from experiments.runs.stages import check_runs, home_of, stages
from experiments.study.experiment import Changes, Experiment
from experiments.study.registry import baseline_of, build, by_hand, find, run_folder, tables, twin
from experiments.study.scales import ONE_CORE
from lm.files import write
from lm.settings import SettingError


@dataclass(frozen=True)
class Options:
    """What lm run and lm sweep take besides settings."""

    scale: str = "nano"  # size of the study: nano, mini, mini-real, small, medium or base
    runs: Path = RUNS  # folder that holds the runs
    # resume although these changed since a run was started: settings,vocabulary,data,code,packages
    allow: str = ""
    # restart up to N times after a crash or exit code 42; not after bad settings, a loss of NaN, or a signal
    restart: int = 0

    @property
    def cache(self) -> Path:
        return self.runs / "cache"

    @property
    def allowed(self) -> frozenset[str]:
        return origin.allowed(self.allow)


class RowRun(NamedTuple):
    """A row with a seed, and where its run lies."""

    name: str
    experiment: Experiment
    folder: Path

    @property
    def steps(self) -> int:
        """Of all its stages, for the progress."""
        return sum(stage.training.steps for stage in stages(self.experiment))


def run_command(arguments: Sequence[str]) -> None:
    """Train, fine-tune and evaluate one row; any of its settings can be changed on the command line."""
    default = build(first_word(arguments), option(arguments, "--scale", "nano"))

    def run(
        row: str,
        /,
        settings: Annotated[Experiment, FLAT] = default,
        options: Annotated[Options, FLAT] = Options(),
        check: bool = False,
    ) -> None:
        """Train, fine-tune and evaluate one row; any of its settings can be changed.

        Started again, it resumes from its newest checkpoint, as after a crash or a preemption. Settings
        given here become part of the run's folder name.

        Args:
            row: row of the registry, such as t5/6-corruption-rate/15.
            check: only check settings, data, vocabulary and folder; train nothing.
        """
        check_first(row, arguments, "run")
        train_row(row, settings, options, check)

    parse(run, "lm run", arguments)


def sweep_command(arguments: Sequence[str]) -> None:
    """Train and evaluate every row that matches and has not finished, then write the report."""
    default = build(find(first_word(arguments))[0].name, option(arguments, "--scale", "nano"))

    def sweep(
        pattern: str,
        /,
        settings: Annotated[Experiment, FLAT] = default,
        options: Annotated[Options, FLAT] = Options(),
        seeds: int = 1,
        jobs: int = 0,
    ) -> None:
        """Train and evaluate every row that matches and has not finished, then write the report.

        Started again, it resumes from the newest checkpoints. Settings given here hold for every row.

        Args:
            pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
            seeds: runs of each row, with seeds 0, 1, ...
            jobs: runs at once, each a process with one thread; 0: as many as cores at scales nano, mini and
                mini-real on CPUs, else 1
        """
        check_first(pattern, arguments, "sweep")
        changes = named_settings(arguments, settings)
        train_rows(pattern, seeds, changes, options, _job_count(jobs, options.scale))

    parse(sweep, "lm sweep", arguments)


def _job_count(jobs: int, scale: str) -> int:
    """How many runs are trained at once; SettingError where one device, or another process, does that."""
    if jobs < 0:
        raise SettingError(f"--jobs {jobs} should be at least 1, or 0 for as many as is best")
    if jobs == 1 or not jobs and scale not in ONE_CORE:
        return 1
    several = find_place(os.environ) is not None
    if jobs and (several or has_accelerator()):
        why = "of several processes (LM_PROCESSES, Slurm, TPU)" if several else "with a GPU or TPU"
        raise SettingError(f"--jobs {jobs}: a sweep {why} trains one run at a time; leave --jobs out")
    return 1 if several or has_accelerator() else jobs or cores()


def train_rows(pattern: str, seeds: int, changes: Changes, options: Options, jobs: int = 1) -> None:
    """Train every row that matches and has not finished, with ``changes``, then write the report."""
    if seeds < 1:
        raise SettingError(f"--seeds {seeds} should be at least 1")
    if "seed" in changes:
        raise SettingError(f"--seed {changes['seed']}: a sweep takes --seeds N, and trains seeds 0 to N - 1")
    check_runs(options.runs)
    rows = find(pattern)
    compared = [row.name for row in rows] + [baseline_of(row.name) for row in rows]
    wanted = [
        _row_run(name, build(name, options.scale, {**changes, "seed": seed}), options)
        for seed in range(seeds)
        for name in dict.fromkeys(map(twin, compared))
    ]
    failed = train_unfinished(wanted, options, jobs)
    from experiments.report.report import print_report  # whose pictures take a while to import

    try:
        said = ["lm", "sweep", pattern, "--scale", options.scale, "--seeds", str(seeds)]
        command = shlex.join([*said, *(f"--{path}={value}" for path, value in changes.items())])
        print_report(tables(rows), options.scale, (str(options.runs),), changes, command)
    except SettingError:
        if not failed:
            raise
    if failed:
        sys.exit(failed)


def _row_run(name: str, experiment: Experiment, options: Options) -> RowRun:
    changed = by_hand(name, options.scale, experiment)
    return RowRun(name, experiment, run_folder(options.runs, options.scale, name, experiment.seed, changed))


def train_unfinished(wanted: Sequence[RowRun], options: Options, jobs: int = 1) -> int:
    """Train those of ``wanted`` that have not finished, up to ``jobs`` at once.

    One that fails is reported and the others are trained; the exit code is that of the first failure.
    """
    if (tasks := handed_out()) is not None:
        _train_as_told(tasks, wanted, options)
    todo = [number for number, run in enumerate(wanted) if not is_finished(run, options)]
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
    from lm.train.log import came_to_its_end

    several = len({run.experiment.seed for run in wanted}) > 1
    shown: dict[int, JobReporter] = {}

    def hear(number: int, told: Mapping[str, Any]) -> None:
        run = wanted[number]
        name = f"{run.name} seed {run.experiment.seed}" if several else run.name
        if number not in shown:
            shown[number] = JobReporter(reporter, name, run.steps)
        if told.get("killed") and jobs.signal is None:
            reporter.complain(f"{name} failed: {told['killed']}\n  folder: {run.folder}")
        shown[number].hear(told)

    def untrained(number: int) -> set[Path]:
        run = wanted[number]
        every = stages(run.experiment, run.folder, home_of(run.folder, options.cache))
        return {stage.folder for stage in every if not came_to_its_end(stage.folder)}

    jobs = Jobs(count, untrained, hear)
    codes = jobs.do(todo)
    if jobs.signal is not None:
        reporter.say(f"stopped ({signal.Signals(jobs.signal).name}); run the same command to resume")
        sys.exit(AGAIN)
    return [codes[number] for number in todo]


def is_finished(run: RowRun, options: Options) -> bool:
    """Whether this run has finished; what is wrong with its folder is reported when it is trained."""
    try:
        check_settings(run.experiment, run.folder)
        if read_result(run.folder) is None:
            return False
        check_data(run, options, lambda line: None)
    except SettingError:
        return False
    return True


def check_data(run: RowRun, options: Options, say: Callable[[str], object]) -> None:
    """SettingError if the finished run was trained or scored on other data than there are now."""
    from experiments.runs.prepare import fingerprints

    for stage in stages(run.experiment, run.folder, home_of(run.folder, options.cache)):
        data = {"data": fingerprints(stage, options.cache)}
        origin.check(stage.folder, data, "finished", options.allowed, say)


def train_one(run: RowRun, options: Options, reporter: Reporter) -> int:
    """Train one run to its end; its exit code. An interruption ends the process and says how to resume."""
    try:
        return train_or_refuse(run, options, reporter)
    except SettingError as error:
        reporter.complain(f"{run.name} failed: {error}\n  folder: {run.folder}")
        return EXIT_CODES["bad settings"]


def train_or_refuse(run: RowRun, options: Options, reporter: Reporter) -> int:
    """The same, but for a SettingError, which is raised."""
    from experiments.runs.run import run as train
    from lm.train.checkpoints import CheckpointError
    from lm.train.log import NonFiniteLoss
    from lm.train.stopping import Interrupted

    began = time.perf_counter()
    try:
        finished = agreed(lambda: read_result(run.folder) is not None)  # SettingError if it is damaged
        allowed = options.allowed - {"settings"} if finished else options.allowed
        train(run.experiment, run.folder, options.cache, reporter, allowed)
        scores = agreed(lambda: summary(run.folder))
    except Interrupted as stopped:
        reporter.say(f"{run.name}: {stopped}. Run the same command to resume.")
        sys.exit(AGAIN)
    except SettingError:
        raise
    except (CheckpointError, NonFiniteLoss) as error:
        reporter.complain(f"{run.name} failed: {error}\n  folder: {run.folder}")
        return EXIT_CODES["loss not finite" if isinstance(error, NonFiniteLoss) else "failed"]
    except Exception as error:  # the other runs of a sweep are trained nevertheless
        trace, reason = traceback.format_exc(), f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            reason = f"{error}. Fix that and run the same command: it resumes from the newest checkpoint"
        reporter.complain(f"{run.name} failed: {reason}\n  folder: {run.folder}{_saved(trace, run.folder)}")
        return EXIT_CODES["failed"]
    seconds = duration(time.perf_counter() - began)
    reporter.say(f"{run.name} seed {run.experiment.seed}: {scores} ({seconds})")
    return EXIT_CODES["done"]


def _saved(trace: str, folder: Path) -> str:
    """Write an error's trace; a line that says where, empty if the trace cannot be written either."""
    import jax

    path = folder / (f"error-{jax.process_index()}.txt" if jax.process_index() else "error.txt")
    try:
        write(path, trace)
    except OSError:
        return ""
    return f"\n  more in {path}"


def train_row(name: str, experiment: Experiment, options: Options, check: bool) -> None:
    """Train one run to its end and say where it lies; with ``check`` only see whether it could be started."""
    import jax

    from experiments.runs.run import check as check_run

    check_runs(options.runs)
    cache_compiled(options.cache)
    run = _row_run(name, experiment, options)
    with reporting(run.steps, quiet=jax.process_index() > 0) as reporter:

        def say_ending() -> None:
            for line in ending(name, experiment, run.folder):
                reporter.say(line)

        if check:
            check_run(experiment, run.folder, options.cache, reporter.say, options.allowed)
            reporter.say(f"ready to train in {run.folder}")
            return
        if agreed(lambda: read_result(run.folder) is not None):
            agreed(lambda: check_settings(experiment, run.folder))
            agreed(lambda: check_data(run, options, reporter.say))
            reporter.say(f"already finished: {run.folder}")
            say_ending()
            return
        code = train_or_refuse(run, options, reporter)
        if code:
            reporter.say(f"run: {run.folder}")
        elif jax.process_index() == 0:
            say_ending()
    if code:
        sys.exit(code)
