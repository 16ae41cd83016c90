"""Diffusion or autoregression? Language models of all kinds on one axis: bits per byte of held-out documents.

Decoders, LSTMs and n-grams predict from left to right, and give a text a probability. A masked diffusion
model predicts in any order, and gives an upper bound of the bits (lm/evaluate/likelihood_bound.py). The rows
of the first table read the same text as often as those of the table history; its networks have as many
parameters and updates.
"""

from experiments.study.baselines import (
    COMMON_OPTIMIZER,
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

# Optimisers that the table now/4-diffusion-rates compares. Its rows are named masked-diffusion-KEY.
DIFFUSION_OPTIMIZERS: dict[str, Changes] = {f"{rate:g}": adamw(rate, "decay") for rate in RATES} | {
    f"relative-{rate:g}": relative_adamw(rate) for rate in (0.005, 0.01, 0.02, 0.04)
}
# Key of the optimiser of now/4-diffusion: it has the fewest bits per byte in now/4-diffusion-rates at mini,
# as the mean of seeds 0 and 1 (docs/study.md).
DIFFUSION_TUNED_OPTIMIZER = "relative-0.01"
# Key of the optimiser of now/4-diffusion-budgets, whose runs are older than that comparison: the best of
# three rates at nano, one run each.
DIFFUSION_BUDGETS_OPTIMIZER = "0.003"


def diffusion_model(objective_name: str, optimizer: str = DIFFUSION_TUNED_OPTIMIZER) -> Changes:
    """Return the changes of a diffusion language model: the Transformer of the table history as an encoder.

    objective_name: "masked-diffusion" or "any-order". Sizes and norms are those of the decoder; attention is
    bidirectional, and the optimiser is one of DIFFUSION_OPTIMIZERS.
    """
    transformer = without(TRANSFORMER_LM, "objective") | DIFFUSION_OPTIMIZERS[optimizer]
    return transformer | {"model.architecture": "encoder"} | objective(objective_name)


UPDATE_FACTORS = (0.25, 1, 4)  # of the table of budgets, as multiples of those of the first table

TABLES = (
    make_table(
        "now/4-diffusion",
        "Diffusion or autoregression",
        {
            "causal-lm": tuned("transformer"),
            "masked-diffusion": diffusion_model("masked-diffusion"),
            "any-order": diffusion_model("any-order"),
            "5-gram": ngram(5),
            "lstm": tuned("lstm"),
        },
        scale="mini",
        seeds=5,
        # The first row of each is expected to have fewer bits per byte. Written down before the rows were
        # trained; optimisers were chosen again after the first verdicts. "Less noise" means that the loss of
        # any-order has less variance.
        conclusions=(
            Conclusion("causal-lm", "masked-diffusion", "left to right is ahead at equal text and updates"),
            Conclusion("any-order", "masked-diffusion", "the same bound is learnt better with less noise"),
            Conclusion("causal-lm", "lstm", "attention is ahead of recurrence"),
            Conclusion("5-gram", "masked-diffusion", "so little text teaches diffusion less than counting"),
            Conclusion("causal-lm", "5-gram", "a Transformer is ahead of counting"),
        ),
    ),
    # The table history-rates has the same for the networks that predict from left to right.
    make_table(
        "now/4-diffusion-rates",
        "Optimisers and learning rates of diffusion",
        {
            f"masked-diffusion-{name}": diffusion_model("masked-diffusion", name)
            for name in DIFFUSION_OPTIMIZERS
        }
        # any-order with the optimiser that it had before these were compared
        | {
            f"any-order-{DIFFUSION_BUDGETS_OPTIMIZER}": diffusion_model(
                "any-order", DIFFUSION_BUDGETS_OPTIMIZER
            )
        },
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
            for factor in UPDATE_FACTORS
            for name, changes in {
                "causal-lm": language_model("transformer") | COMMON_OPTIMIZER,
                "masked-diffusion": diffusion_model("masked-diffusion", DIFFUSION_BUDGETS_OPTIMIZER),
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
                for factor in UPDATE_FACTORS
            ),
            Conclusion("5-gram-x0.25", "masked-diffusion-x0.25", "counting is ahead after few updates"),
            Conclusion("masked-diffusion-x4", "5-gram-x4", "diffusion is ahead of counting after many"),
        ),
    ),
)
