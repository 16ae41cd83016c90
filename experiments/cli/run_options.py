"""The options of training, and the run of one row with one seed: its folder, and whether it has finished."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from experiments.console import RUNS
from experiments.processes.progress import NO_TOOLS, Tools
from experiments.runs import provenance
from experiments.runs.result import check_settings, read_result
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import overrides_of
from experiments.study.paths import link_to, row_folder, run_folder
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError
from lm.data.tasks.names import task_name


@dataclass(frozen=True)
class Options:
    """Options of lm run and lm sweep, other than the settings of the experiment."""

    scale: str = DEFAULT_SCALE
    runs: Path = RUNS
    allow: str = ""  # what may differ from when the run began, such as "data,code"
    start: str = ""  # the checkpoint to start from, as it was typed
    tools: Tools = NO_TOOLS

    @property
    def cache(self) -> Path:
        return self.runs / "cache"

    @property
    def allowed(self) -> frozenset[str]:
        return provenance.allowed(self.allow)


class RowRun(NamedTuple):
    """A row with a seed, and where its run lies."""

    name: str
    experiment: Experiment
    folder: Path
    label: str = ""  # shown in place of the name if several runs of a sweep have the same name

    @property
    def title(self) -> str:
        """Return the name of the run in messages of a sweep, without its seed."""
        return self.label or self.name

    @property
    def steps(self) -> int:
        """Return the training steps of all its stages."""
        from experiments.runs.stages import stages  # with jax

        return sum(stage.num_steps for stage in stages(self.experiment))


def row_run(name: str, experiment: Experiment, options: Options) -> RowRun:
    """Return the run of a row with these settings."""
    changed = overrides_of(name, options.scale, experiment)
    return RowRun(name, experiment, run_folder(options.runs, options.scale, name, experiment.seed, changed))


def link_shared_run(run: RowRun, options: Options) -> str:
    """Link the row's folder to the run that it shares with an equal row; return a line about it.

    Return "" if the run is in the row's own folder.
    """
    changed = overrides_of(run.name, options.scale, run.experiment)
    own = row_folder(options.runs, options.scale, run.name, changed)
    if own == run.folder.parent:
        return ""
    link_to(own, run.folder.parent)
    same = f"{run.name} is the same experiment as another row at scale {options.scale}"
    return f"{same}; their run is in {run.folder.parent}"


def heads_kept(experiment: Experiment, changes: Overrides) -> str:
    """Return a line that names the heads of the row if mixtures are given but no heads; else ""."""
    if not experiment.tuning.heads or not changes.get("tuning.mixtures") or "tuning.heads" in changes:
        return ""
    names = ", ".join(map(task_name, experiment.tuning.heads))
    return f"also fine-tunes the heads of the row: {names}; --tuning.heads without a value leaves them out"


def is_up_to_date(run: RowRun, options: Options) -> bool:
    """Return whether the run has finished with these settings and data.

    False if its folder is damaged: training reports that.
    """
    try:
        check_settings(run.experiment, run.folder)
        if read_result(run.folder) is None:
            return False
        check_data(run, options, lambda line: None)
    except SettingError:
        return False
    return True


def check_data(run: RowRun, options: Options, say: Callable[[str], object]) -> None:
    """Raise SettingError if the finished run was trained or scored on other data than there are now."""
    from experiments.runs.sources import Sources
    from experiments.runs.stages import stages

    sources = Sources(options.cache, run.experiment.data.corrupt_records)
    for stage in stages(run.experiment, run.folder, options.cache):
        data = {"data": stage.fingerprints(sources)}
        provenance.check(stage.folder, data, "finished", options.allowed, say)
