"""One row with one seed, trained to its end: where it lies, whether it has finished, what became of it."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from experiments.cli.usage.arguments import FLAT
from experiments.console import RUNS
from experiments.processes.exit_codes import AGAIN, EXIT_CODES
from experiments.processes.group import agreed
from experiments.processes.progress import NO_TOOLS, Reporter, Tools, duration
from experiments.runs import origin
from experiments.runs.result import check_settings, read_result, summary
from experiments.runs.stages import stages
from experiments.study.experiment import Experiment
from experiments.study.folders import home_of
from experiments.study.registry import by_hand, run_folder
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
    start: str = ""  # train from this model: a folder in the published format, a run, RUN:STAGE, or hf:NAME
    tools: Annotated[Tools, FLAT] = NO_TOOLS

    @property
    def cache(self) -> Path:
        return self.runs / "cache"

    @property
    def allowed(self) -> frozenset[str]:
        return origin.allowed(self.allow)


NO_OPTIONS = Options()


class RowRun(NamedTuple):
    """A row with a seed, and where its run lies."""

    name: str
    experiment: Experiment
    folder: Path

    @property
    def steps(self) -> int:
        """Of all its stages, for the progress."""
        return sum(stage.training.steps for stage in stages(self.experiment))


def row_run(name: str, experiment: Experiment, options: Options) -> RowRun:
    changed = by_hand(name, options.scale, experiment)
    return RowRun(name, experiment, run_folder(options.runs, options.scale, name, experiment.seed, changed))


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
        train(run.experiment, run.folder, options.cache, reporter, allowed, options.tools)
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
