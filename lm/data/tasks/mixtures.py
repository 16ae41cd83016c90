"""Tasks that are fine-tuned together, and how often each is drawn.

The first mixtures are the paper's (Raffel et al. 2020, section 2.3): GLUE and SuperGLUE as one each, all else
alone, with lengths of targets as in the released code. The others are of what can be had at smaller scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lm.data.tasks.registry import TASKS
from lm.data.tasks.task import Task
from lm.settings import SettingError, nearest


@dataclass(frozen=True)
class Mixture:
    """Names of ``TASKS``, and the length beyond which targets are cut, EOS counted [tokens]."""

    tasks: tuple[str, ...]
    targets_length: int

    def __iter__(self):
        return iter(TASKS[name] for name in self.tasks)

    @property
    def evaluated(self) -> list[Task]:
        """The tasks that are not for training only."""
        return [task for task in self if task.validation]


SUPER_GLUE = ("boolq", "cb", "copa", "multirc", "record", "super_glue_rte", "wic", "wsc", "dpr")
PAPER: Mapping[str, Mixture] = {
    "glue": Mixture(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), 84),
    "super_glue": Mixture(SUPER_GLUE, 62),
    "squad": Mixture(("squad",), 97),
    **{name: Mixture((name,), 512) for name in ("cnn_dailymail", "wmt_ende", "wmt_enfr", "wmt_enro")},
}
DOCUMENTATION = ("summarise", "acceptability", "follows", "cloze")
MIXTURES: Mapping[str, Mixture] = {
    **PAPER,
    "documentation": Mixture(DOCUMENTATION, 32),
    **{name: Mixture((name,), 32) for name in DOCUMENTATION},
    "glue_small": Mixture(("cola", "sst2", "mrpc", "stsb", "qnli", "rte"), 16),
    "super_glue_small": Mixture(("boolq", "cb", "copa", "super_glue_rte", "wic", "wsc"), 16),
    "squad_small": Mixture(("squad",), 32),
    **{name: Mixture((name,), 64) for name in ("scitldr", "multi30k_ende", "multi30k_enfr", "xquad_enro")},
}


def mixture(name: str) -> Mixture:
    """The mixture of that name; SettingError with the nearest name."""
    if name in MIXTURES:
        return MIXTURES[name]
    raise SettingError(f"tuning.mixtures: there is no mixture {name!r}{nearest(name, MIXTURES)}")


TWINS = {"rte", "super_glue_rte"}  # the same data


def rates(
    sizes: Mapping[str, int], *, kind: Literal["proportional", "equal"], limit: int | None, temperature: float
) -> dict[str, float]:
    """Shares of tasks with e examples, of sum 1: min(e, limit) ** (1 / temperature), or the same for each
    (3.5.2).

    Where proportional tasks have the same data each counts half.
    """
    if kind == "equal":
        return dict.fromkeys(sizes, 1 / len(sizes))
    found = {name: min(size, limit or size) ** (1 / temperature) for name, size in sizes.items()}
    found |= {name: found[name] / 2 for name in TWINS if TWINS <= found.keys()}
    return {name: rate / sum(found.values()) for name, rate in found.items()}
