"""Tasks that are fine-tuned together, and how often each is drawn.

The mixtures are the paper's (Raffel et al. 2020, section 2.3): GLUE and SuperGLUE as one each, all else alone. Lengths
of targets are those of the released code.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lm.config import SettingError, nearest
from lm.data.tasks import TASKS


@dataclass(frozen=True)
class Mixture:
    """Names of ``TASKS``, and the length beyond which targets are cut, EOS counted [tokens]."""

    tasks: tuple[str, ...]
    targets_length: int

    def __iter__(self):
        return iter(TASKS[name] for name in self.tasks)


MIXTURES: Mapping[str, Mixture] = {
    "documentation": Mixture(("summarise", "acceptability", "follows", "cloze"), 32),
    "glue": Mixture(("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"), 84),
    "super_glue": Mixture(("boolq", "cb", "copa", "multirc", "record", "super_glue_rte", "wic", "wsc"), 62),
    "squad": Mixture(("squad",), 97),
    "cnn_dailymail": Mixture(("cnn_dailymail",), 512),
    "wmt_ende": Mixture(("wmt_ende",), 512),
    "wmt_enfr": Mixture(("wmt_enfr",), 512),
    "wmt_enro": Mixture(("wmt_enro",), 512),
}


def mixture(name: str) -> Mixture:
    """The mixture of that name; SettingError with the nearest name."""
    if name in MIXTURES:
        return MIXTURES[name]
    raise SettingError(f"tuning.mixtures: there is no mixture {name!r}{nearest(name, MIXTURES)}")


def proportional(sizes: Mapping[str, int], limit: int | None) -> dict[str, float]:
    """Rates r = min(e, limit) / their sum, for e examples of each task: "examples-proportional", section 3.5.2."""
    capped = {name: size if limit is None else min(size, limit) for name, size in sizes.items()}
    return {name: size / sum(capped.values()) for name, size in capped.items()}
