"""Causal or masked language modelling for encoders: which of them, in which order, from how many updates on.

The encoder has the parts of Gisserot-Boukhlef et al. 2025 (arXiv 2507.00994) and masks 40 % of its tokens.
Causal steps see the tokens before each one only; fine-tuning reads both ways in all rows. In the first table
all rows take equally many updates, with one schedule. The paper's own mixes of steps are the table
gisserot/10-13-mix. Heads answer the tasks: *reading* has questions that nobody answers without their input;
*language* asks how well a model knows the language of the text.
"""

from experiments.study.changes import Changes, followed_by, times
from experiments.study.experiment import PretrainingPhase
from experiments.study.papers.gisserot import CAUSAL, CLM, ENCODER
from experiments.study.table import Conclusion, make_table

# Fine-tune after the last update only: after a quarter of the updates "causal-25" is at the end of its causal
# phase and "causal-50" in the middle of it, so that their scores would not be comparable.
FINETUNED_AFTER_LAST_STEP: Changes = {"tuning.branches": (1.0,)}
UPDATES = (1, 3, 8)  # of the table of budgets, as multiples of the scale's


MLM: Changes = ENCODER | FINETUNED_AFTER_LAST_STEP


def causal_first(percent: int) -> Changes:
    """Return causal steps, so many percent of all, then masked ones."""
    return MLM | {"pretraining.phases": (PretrainingPhase(percent / 100, CLM, "causal"),)}


def with_updates(changes: Changes, factor: int) -> Changes:
    """Return a row with ``factor`` times the updates."""
    return changes | {"pretraining.steps": times(factor), "pretraining.save_every": times(factor)}


CAUSAL_LM = followed_by(MLM, CAUSAL)

TABLES = (
    make_table(
        "now/1-encoders",
        "Causal or masked language modelling for encoders",
        {
            "mlm": MLM,
            "causal": CAUSAL_LM,
            "causal-25": causal_first(25),
            "causal-50": causal_first(50),
            "causal-75": causal_first(75),
        },
        scale="mini",
        seeds=5,
        # written down before the rows were trained
        conclusions=(
            # Gisserot-Boukhlef et al. 2025, section 3: masks win in classification and questions.
            # Tables 6 to 9: after few updates causal models are ahead, since each token is predicted.
            Conclusion("mlm", "causal", "a masked model looks both ways", tasks="reading"),
            Conclusion("causal", "mlm", "few updates predict every token", tasks="language"),
            # The same, tables 10 to 13: a quarter of causal steps beats masks alone in 11 of 12 averages.
            Conclusion("causal-25", "mlm", "causal steps first help"),
            Conclusion("causal-50", "mlm", "causal steps first help"),
            Conclusion(
                "causal-75", "causal", "masked steps at the end teach to look both ways", tasks="reading"
            ),
        ),
    ),
    make_table(
        "now/1-encoders-budgets",
        "From which budget on an encoder should mask",
        {
            f"{name}-x{factor}": with_updates(changes, factor)
            for factor in UPDATES
            for name, changes in {"mlm": MLM, "causal": CAUSAL_LM, "causal-50": causal_first(50)}.items()
        },
        baseline="mlm-x1",
        scale="mini",
        seeds=3,
        # written down before the rows were trained
        conclusions=(
            # "mlm-x1" and "causal-x1" are the runs of the first table, which has their hypothesis
            Conclusion("mlm-x8", "causal-x8", "after many updates masked models are ahead"),
            *(
                Conclusion(f"causal-50-x{factor}", f"mlm-x{factor}", "causal steps first help")
                for factor in UPDATES
            ),
        ),
    ),
)
