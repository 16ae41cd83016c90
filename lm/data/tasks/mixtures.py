"""Mixtures: tasks that a model is fine-tuned on together, and the rate at which each is drawn."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lm.config.base import SettingError, nearest
from lm.data.tasks.benchmarks import TASKS, find_task
from lm.data.tasks.names import is_task_file
from lm.data.tasks.sequences import COPY, REVERSE, TARGETS_LENGTH
from lm.data.tasks.task import Task


@dataclass(frozen=True)
class Mixture:
    """Names of tasks, or a task file, and the length to which targets are cut, EOS included [tokens]."""

    tasks: tuple[str, ...]
    targets_length: int

    def __iter__(self) -> Iterator[Task]:
        return map(find_task, self.tasks)

    def has(self, task: str) -> bool:
        """Return whether a task of this name is in the mixture."""
        return task in [each.name for each in self]

    @property
    def evaluated(self) -> list[Task]:
        """Return the tasks that have a validation split, and so are not for training only."""
        return [task for task in self if task.validation]


def alone() -> dict[str, Mixture]:
    """Return mixtures of a single task, by name: of each task with a ``targets_length`` of its own."""
    return {
        name: Mixture((name,), task.targets_length) for name, task in TASKS.items() if task.targets_length
    }


SUPER_GLUE = ("boolq", "cb", "copa", "multirc", "record", "super_glue_rte", "wic", "wsc", "dpr")
MIXTURES: dict[str, Mixture] = {
    # the paper's (Raffel et al. 2020, section 2.3), with the lengths of the released code; all else is alone
    "glue": Mixture(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), 84),
    "super_glue": Mixture(SUPER_GLUE, 62),
    # those of smaller scales
    "documentation": Mixture(("cloze", "extract", "acceptability", "first-sentence", "next", "restore"), 40),
    # its two halves, so that pre-training on tasks can hold one out; of the same shape, to compile once
    "documentation-words": Mixture(("cloze", "extract", "acceptability"), 40),
    "documentation-sentences": Mixture(("first-sentence", "next", "restore"), 40),
    # for accuracy by length
    "copy": Mixture(tuple(task.name for task in COPY), TARGETS_LENGTH),
    "reverse": Mixture(tuple(task.name for task in REVERSE), TARGETS_LENGTH),
    "glue_small": Mixture(("cola", "sst2", "mrpc", "stsb", "qnli", "rte"), 16),
    "super_glue_small": Mixture(("boolq", "cb", "copa", "super_glue_rte", "wic", "wsc"), 16),
    "squad_small": Mixture(("squad",), 32),
    **alone(),
}


def mixture(name: str) -> Mixture:
    """Return the mixture of that name, or of a task file alone; SettingError names the nearest."""
    if is_task_file(name):
        return Mixture((name,), find_task(name).targets_length or 0)
    if name not in MIXTURES:
        raise SettingError(f"tuning.mixtures: there is no mixture {name!r}{nearest(name, MIXTURES)}")
    return MIXTURES[name]


SHARED_DATA = {"rte", "super_glue_rte"}  # the same data


def rates(
    sizes: Mapping[str, int], *, kind: Literal["proportional", "equal"], limit: int | None, temperature: float
) -> dict[str, float]:
    """Return the mixing rates of tasks, of sum 1, by their numbers of examples ``sizes``.

    Equal rates are the same for all tasks. Proportional ones are min(e, limit) ** (1 / temperature) for e
    examples (section 3.5.2 of the paper), where tasks with the same data count half each.
    """
    if kind == "equal":
        return dict.fromkeys(sizes, 1 / len(sizes))
    weights = {name: min(size, limit or size) ** (1 / temperature) for name, size in sizes.items()}
    weights |= {name: weights[name] / 2 for name in SHARED_DATA if SHARED_DATA <= weights.keys()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}
