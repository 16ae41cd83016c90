"""Diffusion or autoregression? Language models of all kinds on one axis: bits per byte of held-out documents.

Decoders, LSTMs and n-grams predict from left to right, and give a text a probability. A masked diffusion
model predicts in any order, and gives an upper bound of the bits (lm/evaluate/likelihood_bound.py). The rows
of the first table read the same text as often as those of the table history; its networks have as many
parameters and updates.
"""

from experiments.study.baselines import (
    COMMON,
    RATES,
    TRANSFORMER_LM,
    adamw,
    language_model,
    ngram,
    relative_adamw,
    tuned,
    with_updates,
)
from experiments.study.changes import Changes, objective, without
from experiments.study.table import Conclusion, make_table

# The optimisers of the table of rates, by the ends of its rows' names: AdamW, and that with relative updates.
DIFFUSION_OPTIMIZERS: dict[str, Changes] = {f"{rate:g}": adamw(rate, "decay") for rate in RATES} | {
    f"relative-{rate:g}": relative_adamw(rate) for rate in (0.005, 0.01, 0.02, 0.04)
}
# The one with the fewest bits per byte at mini, as the mean of seeds 0 and 1 (docs/study.md).
DIFFUSION_TUNED = "relative-0.01"
# That of the table of budgets, which was trained before: the best of three at nano, one run each.
DIFFUSION_COMMON = "0.003"


def masked_diffusion(name: str, optimizer: str = DIFFUSION_TUNED) -> Changes:
    """Return the changes that make the Transformer of the table history an encoder, trained by an objective.

    Its sizes and norms stay. It sees the tokens on both sides of a position, and has its own optimiser.
    """
    transformer = without(TRANSFORMER_LM, "objective") | DIFFUSION_OPTIMIZERS[optimizer]
    return transformer | {"model.architecture": "encoder"} | objective(name)


CAUSAL_LM = tuned("transformer")
UPDATES = (0.25, 1, 4)  # of the table of budgets, as multiples of those of the first table

TABLES = (
    make_table(
        "now/4-diffusion",
        "Diffusion or autoregression",
        {
            "causal-lm": CAUSAL_LM,
            "masked-diffusion": masked_diffusion("masked-diffusion"),
            "any-order": masked_diffusion("any-order"),
            "5-gram": ngram(5),
            "lstm": tuned("lstm"),
        },
        scale="mini",
        seeds=5,
        # written down before the rows were trained; optimisers were chosen again after the first verdicts
        conclusions=(
            Conclusion("causal-lm", "masked-diffusion", "left to right is ahead at equal text and updates"),
            Conclusion("any-order", "masked-diffusion", "the same bound is learnt better with less noise"),
            Conclusion("causal-lm", "lstm", "attention is ahead of recurrence"),
            Conclusion("5-gram", "masked-diffusion", "so little text teaches diffusion less than counting"),
            Conclusion("causal-lm", "5-gram", "a Transformer is ahead of counting"),
        ),
    ),
    # as history-rates tries them for the networks that predict from left to right
    make_table(
        "now/4-diffusion-rates",
        "Optimisers and learning rates of diffusion",
        {
            f"masked-diffusion-{name}": masked_diffusion("masked-diffusion", name)
            for name in DIFFUSION_OPTIMIZERS
        }
        | {f"any-order-{DIFFUSION_COMMON}": masked_diffusion("any-order", DIFFUSION_COMMON)},
        baseline="now/4-diffusion/causal-lm",
        scale="mini",
        seeds=2,
    ),
    # More updates read more text: at mini the rows read 0.3, 1.2 and 4.9 M tokens of text, each four times.
    make_table(
        "now/4-diffusion-budgets",
        "From which budget on diffusion passes counting or autoregression",
        {
            f"{name}-x{factor:g}": with_updates(changes, factor)
            for factor in UPDATES
            for name, changes in {
                "causal-lm": language_model("transformer") | COMMON,
                "masked-diffusion": masked_diffusion("masked-diffusion", DIFFUSION_COMMON),
                "5-gram": ngram(5),
            }.items()
        },
        baseline="causal-lm-x1",
        scale="mini",
        seeds=3,
        # written down before the rows were trained
        conclusions=(
            *(
                Conclusion(
                    f"causal-lm-x{factor:g}", f"masked-diffusion-x{factor:g}", "left to right is ahead"
                )
                for factor in UPDATES
            ),
            Conclusion("5-gram-x0.25", "masked-diffusion-x0.25", "counting is ahead after few updates"),
            Conclusion("masked-diffusion-x4", "5-gram-x4", "diffusion is ahead of counting after many"),
        ),
    ),
)
