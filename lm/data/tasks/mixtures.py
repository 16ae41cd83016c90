"""Mixtures: tasks that a model is fine-tuned on together, and the rate at which each is drawn."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lm.config.base import SettingError, did_you_mean
from lm.data.tasks.benchmarks import MINIMAL_PAIRS, TASKS, find_task
from lm.data.tasks.names import is_task_file
from lm.data.tasks.sequences import COPY, REVERSE, TARGETS_LENGTH
from lm.data.tasks.task import Task


@dataclass(frozen=True)
class Mixture:
    """Tasks that a model is fine-tuned on together."""

    tasks: tuple[str, ...]  # names, or one task file
    targets_length: int  # to which targets are truncated, EOS included [tokens]

    def __iter__(self) -> Iterator[Task]:
        return map(find_task, self.tasks)

    def has(self, task: str) -> bool:
        """Return whether a task with this name is in the mixture."""
        return any(member.name == task for member in self)

    @property
    def evaluated(self) -> list[Task]:
        """Return the tasks that have a validation split; the others are for training only."""
        return [task for task in self if task.validation]


def single_task_mixtures() -> dict[str, Mixture]:
    """Return a mixture of the same name for each task that has a ``targets_length``."""
    return {
        name: Mixture((name,), task.targets_length) for name, task in TASKS.items() if task.targets_length
    }


SUPER_GLUE = ("boolq", "cb", "copa", "multirc", "record", "super_glue_rte", "wic", "wsc", "dpr")
DOCUMENTATION_READING = (
    "extract",
    "restore",
    "next",
    "summary",
    "modality",
    "order",
)
MIXTURES: dict[str, Mixture] = {
    # the paper's (Raffel et al. 2020, section 2.3), with the lengths of the released code; its other tasks
    # are trained on alone
    "glue": Mixture(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), 84),
    "super_glue": Mixture(SUPER_GLUE, 62),
    # for smaller scales
    # the two halves of the tasks on the documentation; equal lengths share compiled programs
    "documentation": Mixture((*DOCUMENTATION_READING, *MINIMAL_PAIRS), 40),
    "documentation-reading": Mixture(DOCUMENTATION_READING, 40),
    "documentation-language": Mixture(MINIMAL_PAIRS, 40),
    # for accuracy by length of the sequence
    "copy": Mixture(tuple(task.name for task in COPY), TARGETS_LENGTH),
    "reverse": Mixture(tuple(task.name for task in REVERSE), TARGETS_LENGTH),
    "glue_small": Mixture(("cola", "sst2", "mrpc", "stsb", "qnli", "rte"), 16),
    "super_glue_small": Mixture(("boolq", "cb", "copa", "super_glue_rte", "wic", "wsc"), 16),
    "squad_small": Mixture(("squad",), 32),
    **single_task_mixtures(),
}


def mixture(name: str) -> Mixture:
    """Return the mixture with this name, or that of a task file; SettingError names the nearest."""
    if is_task_file(name):
        return Mixture((name,), find_task(name).targets_length or 0)
    if name not in MIXTURES:
        raise SettingError(f"tuning.mixtures: there is no mixture {name!r}{did_you_mean(name, MIXTURES)}")
    return MIXTURES[name]


SAME_DATA = {"rte", "super_glue_rte"}  # two names of one data set


def mixing_rates(
    sizes: Mapping[str, int], *, kind: Literal["proportional", "equal"], limit: int | None, temperature: float
) -> dict[str, float]:
    """Return the rate at which each task is drawn, summing to 1, from its number of examples in ``sizes``.

    "equal" rates are the same for all tasks. "proportional" rates are min(e, limit) ** (1 / temperature) for
    e examples (Raffel et al. 2020, section 3.5.2); tasks with the same data get half of that each.
    """
    if kind == "equal":
        return dict.fromkeys(sizes, 1 / len(sizes))
    weights = {name: min(size, limit or size) ** (1 / temperature) for name, size in sizes.items()}
    weights |= {name: weights[name] / 2 for name in SAME_DATA if SAME_DATA <= weights.keys()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}
