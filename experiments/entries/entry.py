"""An entry of the public table: one Python file that says what it changes, and the rules that it keeps.

The file builds an ``Entry`` of the name ``ENTRY``. It may also add objectives, mixers and more, as any study
module does (docs/extending.md). It reads nothing but the text of the rules (``source``), so that an archive
with the file repeats the entry anywhere.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.entries import rules
from experiments.entries.source import check_source
from experiments.entries.tracks import TRACKS, Track, TrackName
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.plugins import STUDY_VARIABLE, load_study
from experiments.study.registry import build
from lm.config.base import SettingError, leaves

NAME = "ENTRY"  # what a file calls its entry


@dataclass(frozen=True)
class Entry:
    """Holds what somebody changes, and expects.

    >>> Entry("Squared ReLU", "A. Student", "It is ahead of GELU.", "history/transformer").changes
    {}
    """

    title: str
    author: str
    hypothesis: str  # written before the runs
    row: str  # row of the study that it starts from
    changes: Overrides = field(default_factory=dict)  # path of a setting -> its new value
    track: TrackName = "text"  # what it is measured by

    def experiment(self, seed: int) -> Experiment:
        """Return the experiment of one of its runs."""
        changed = build(self.row, rules.RULES.scale, self.changes)
        return replace(TRACKS[self.track].fixed(changed), seed=seed)


# Settings of data that an entry may change: they change neither which text is learnt nor what is scored.
FREE_DATA = frozenset("repeats inputs_length workers streams encoders cache_size held_out_lengths".split())
# Other settings, and groups of settings, that are the same for all entries. A checkpoint to start from, or a
# teacher, has learnt from another text and at a cost that no budget counts.
FIXED = ("seed", "start.model", "distillation", "vectors", "tuning", "finetuning", "ensemble")


def load_entry(file: Path) -> Entry:
    """Read a file, run it in this process and in those that are started from now on; return its entry.

    Raise SettingError, with file and line, if the file does what no entry may, and if it has no entry.
    """
    file = file.absolute()
    if not file.is_file():
        raise SettingError(f"{file} is no file; an entry is a Python file such as my_entry.py")
    check_source(file.read_bytes(), file.name)
    os.environ[STUDY_VARIABLE] = str(file)
    load_study()
    entry = getattr(sys.modules[file.stem], NAME, None)
    if type(entry) is not Entry:  # a subclass could build another experiment
        raise SettingError(f"{file.name} should define {NAME} = Entry(...), and has {entry!r}")
    for name in ("title", "author", "hypothesis", "row"):
        if not str(getattr(entry, name)).strip():
            raise SettingError(f"{file.name}: {NAME} has no {name}")
    if entry.track not in TRACKS:
        raise SettingError(f"{file.name}: track={entry.track!r} should be one of {', '.join(TRACKS)}")
    for path in entry.changes:
        if is_fixed(path):
            raise SettingError(f"{file.name}: {path} is the same for all entries; leave it out")
    check_experiment(entry.experiment(0), TRACKS[entry.track])
    return entry


# ---- what the settings of an entry may be


def is_fixed(path: str) -> bool:
    """Return whether a setting, or a group of settings, is the same for all entries."""
    group, _, name = path.partition(".")
    if group == "data":
        return name not in FREE_DATA
    return any(path == fixed or path.startswith(f"{fixed}.") for fixed in FIXED)


def check_experiment(experiment: Experiment, track: Track) -> None:
    """Raise SettingError if an experiment learns or is scored on something else than the rules say."""
    reference = build(track.reference, rules.RULES.scale)
    lawful = replace(track.fixed(reference), seed=experiment.seed)
    found = dict(leaves(experiment))
    for path, value in leaves(lawful):
        if is_fixed(path) and found[path] != value:
            raise SettingError(f"{path}={found[path]!r}: in an entry it is {value!r}, the same for all")
    if experiment.mixing.pretraining != "corpus":
        raise SettingError(f"mixing.pretraining={experiment.mixing.pretraining!r}: an entry learns no tasks")


def check_budget(experiment: Experiment, flops: float, parameters: int) -> None:
    """Raise SettingError if a run takes more arithmetic, or a model more numbers, than the rules allow."""
    is_counted = experiment.counts.model != "none"
    most = rules.RULES.counts if is_counted else rules.RULES.parameters
    if flops > rules.RULES.flops:
        raise SettingError(f"a run takes {flops:.3g} FLOP; an entry has {rules.RULES.flops:.3g}")
    if parameters > most:
        kind = "numbers that are stored" if is_counted else "parameters"
        raise SettingError(f"the model has {parameters:,} {kind}; an entry has at most {most:,}")


def described(entry: Entry) -> Mapping[str, Any]:
    """Return what an archive says of an entry: its words, and its changes as Python writes them."""
    return asdict(entry) | {"changes": {path: repr(value) for path, value in entry.changes.items()}}
