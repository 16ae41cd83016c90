"""An entry of the public table: one Python file that says what it changes, and the rules that it keeps.

The file builds an ``Entry`` of the name ``ENTRY``. It may also add objectives, mixers and more, as any study
module does (docs/extending.md). Everything it may do is in its own text: it imports only what computes, and
neither opens files nor replaces what others define. So an archive with the file repeats the entry anywhere.
"""

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.entries import rules
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.plugins import STUDY, load_study
from experiments.study.registry import build
from lm.config.base import SettingError, leaves

NAME = "ENTRY"  # what a file calls its entry


@dataclass(frozen=True)
class Entry:
    """What somebody changes, and expects.

    >>> Entry("Squared ReLU", "A. Student", "It is ahead of GELU.", "history/transformer").changes
    {}
    """

    title: str
    author: str
    hypothesis: str  # written before the runs
    row: str  # row of the study that it starts from
    changes: Overrides = field(default_factory=dict)  # path of a setting -> its new value

    def experiment(self, seed: int) -> Experiment:
        """Return the experiment of one of its runs."""
        measured = {"data.held_out_documents": rules.RULES.held_out_documents, "tuning.mixtures": ()}
        return replace(build(self.row, rules.RULES.scale, {**self.changes, **measured}), seed=seed)


# Settings of data that an entry may change: they do not change which text is learnt, or what is scored.
FREE_DATA = frozenset("repeats inputs_length workers streams encoders cache_size held_out_lengths".split())
FIXED = ("seed", "start.model", "tuning", "finetuning", "ensemble")  # settings, or groups, of no entry


def load_entry(file: Path) -> Entry:
    """Read a file, run it in this process and in those that are started from now on; return its entry.

    Raise SettingError, with file and line, if the file does what no entry may, and if it has no entry.
    """
    file = file.absolute()
    if not file.is_file():
        raise SettingError(f"{file} is no file; an entry is a Python file such as my_entry.py")
    check_source(file.read_text("utf-8", errors="replace"), file.name)
    os.environ[STUDY] = str(file)
    load_study()
    entry = getattr(sys.modules[file.stem], NAME, None)
    if not isinstance(entry, Entry):
        raise SettingError(f"{file.name} should define {NAME} = Entry(...), and has {entry!r}")
    for name in ("title", "author", "hypothesis", "row"):
        if not str(getattr(entry, name)).strip():
            raise SettingError(f"{file.name}: {NAME} has no {name}")
    for path in entry.changes:
        if is_fixed(path):
            raise SettingError(f"{file.name}: {path} is the same for all entries, and not for one to change")
    check_experiment(entry.experiment(0))
    return entry


# ---- what the text of a file may do

ALLOWED_IMPORTS = frozenset(
    "collections dataclasses enum experiments flax functools itertools jax jaxtyping lm math numpy optax "
    "operator typing".split()
)
REFUSED_CALLS = frozenset(
    "__import__ breakpoint compile delattr eval exec getattr globals input locals open setattr vars".split()
)


def check_source(source: str, name: str) -> None:
    """Raise SettingError, with the line, for what the file of an entry may not do."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise SettingError(f"{name}:{error.lineno}: {error.msg}") from error
    for node in ast.walk(tree):
        for fault in faults(node):
            raise SettingError(f"{name}:{getattr(node, 'lineno', 1)}: {fault}")


def faults(node: ast.AST) -> Iterator[str]:
    """Yield what a node of the syntax tree does that no entry may."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or "."]
    for module in modules:
        if module.partition(".")[0] not in ALLOWED_IMPORTS:
            yield (
                f"an entry may not import {module}: it reads no files and no network; it may import "
                f"{', '.join(sorted(ALLOWED_IMPORTS))}"
            )
    if isinstance(node, ast.Name) and node.id in REFUSED_CALLS:
        yield f"an entry may not use {node.id}, which reads files or replaces what others define"
    if isinstance(node, ast.Attribute):
        if node.attr.startswith("__") and node.attr not in ("__init__", "__post_init__", "__call__"):
            yield f"an entry may not use {node.attr}, which replaces what others define"
        if not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) != "self":
            yield f"an entry may not set {ast.unparse(node)}: what others define stays as it is"


# ---- what the settings of an entry may be


def is_fixed(path: str) -> bool:
    """Return whether a setting, or a group of settings, is the same for all entries."""
    group, _, name = path.partition(".")
    if group == "data":
        return name not in FREE_DATA
    return any(path == fixed or path.startswith(f"{fixed}.") for fixed in FIXED)


def check_experiment(experiment: Experiment) -> None:
    """Raise SettingError if an experiment learns or is scored on something else than the rules say."""
    usual = Entry("", "", "", "history/transformer").experiment(experiment.seed)
    found, due = dict(leaves(experiment)), dict(leaves(usual))
    for path, value in due.items():
        if is_fixed(path) and found[path] != value:
            raise SettingError(f"{path}={found[path]!r}: in an entry it is {value!r}, the same for all")
    if experiment.mixing.pretraining != "corpus":
        raise SettingError(f"mixing.pretraining={experiment.mixing.pretraining!r}: an entry learns no tasks")


def check_budget(flops: float, parameters: int, is_counted: bool) -> None:
    """Raise SettingError if a run takes more arithmetic, or a model more numbers, than the rules allow."""
    most = rules.RULES.counts if is_counted else rules.RULES.parameters
    if flops > rules.RULES.flops:
        raise SettingError(f"a run takes {flops:.3g} FLOP; an entry has {rules.RULES.flops:.3g}")
    if parameters > most:
        kind = "numbers that are stored" if is_counted else "parameters"
        raise SettingError(f"the model has {parameters:,} {kind}; an entry has at most {most:,}")


def as_json(entry: Entry) -> Mapping[str, Any]:
    """Return what an archive says of an entry, without its settings."""
    return {name: value for name, value in asdict(entry).items() if name != "changes"}
