"""The start as a table: how much of a score it gives alone, and how much the pre-training after it adds.

At the small scales a start precedes every row's own pre-training: a few hundred updates whose targets copy
the inputs, after which the decoder knows where to look (docs/study.md). It is part of the set-up of all other
tables. These rows have a start, pre-training, both or neither, and the start that was used before this one.
"""

from dataclasses import dataclass

from experiments.study.changes import Changes
from experiments.study.experiment import Experiment
from experiments.study.table import Conclusion, make_table
from lm.objectives.denoising import OBJECTIVES

# The control of other tables: what a row's own objective has to add to.
START_ONLY_ROW = "start/start-only"
STEPS_WITHOUT_START = 200  # updates of the start where the scale has none


@dataclass(frozen=True)
class StartSteps:
    """A change of a number of updates to that of the scale's start."""

    def __call__(self, _old: int, experiment: Experiment) -> int:
        """Return the number of updates of the start."""
        return experiment.start.steps or STEPS_WITHOUT_START

    def __str__(self) -> str:
        return f"the scale's start.steps, or {STEPS_WITHOUT_START}"


COPYING = OBJECTIVES["copy"]
START: Changes = {"start.steps": StartSteps(), "start.objective": COPYING}
# A start is a pre-training by its own objective. So one that nothing follows is a pre-training of as many
# updates, and shares the checkpoint of the start of all rows with the same model, corpus and seed.
START_ONLY: Changes = {
    "pretraining.steps": StartSteps(),  # reads start.steps, so it comes before the line that sets them to 0
    "start.steps": 0,
    "objective": COPYING,
    "tuning.branches": (1.0,),
}

TABLES = (
    # seven minutes each, two of those without pre-training of their own
    make_table(
        "start",
        "What the start alone does",
        {
            "baseline": START,
            "start-only": START_ONLY,
            "no-start": {"start.steps": 0},
            "no-pretraining": {"pretraining.steps": 0},
            "bert-style": START | {"start.objective": OBJECTIVES["bert-style"]},
        },
        scale="mini",
        seeds=5,
        # written down before the rows were trained
        conclusions=(
            Conclusion("baseline", "start-only", "pre-training adds to its start"),
            Conclusion("baseline", "no-start", "without a start little is learnt in this time"),
            Conclusion("start-only", "no-pretraining", "copying is of use to tasks by itself"),
            Conclusion("no-start", "no-pretraining", "pre-training is of use without a start"),
            Conclusion("bert-style", "baseline", "a start by a row of Table 4 teaches more than looking"),
        ),
    ),
)
