"""Experts or width? A mixture of experts beside a dense model of equal FLOP, and one of equal parameters.

All rows are the Transformer of the table history with COMMON_OPTIMIZER, and are scored in bits per byte of
held-out documents. A token passes one of eight experts (Switch, Fedus et al. 2021). So a step has the
FLOP of a dense one's, but for the router's. ``wide`` has one feed-forward layer, with the features of all
eight.
"""

from experiments.study.baselines import COMMON_OPTIMIZER, language_model
from experiments.study.changes import Changes, times
from experiments.study.table import Conclusion, make_table

EXPERTS = 8  # of a layer
DENSE = language_model("transformer") | COMMON_OPTIMIZER
MIXTURE: Changes = DENSE | {"model.experts.count": EXPERTS}

TABLES = (
    make_table(
        "now/5-experts",
        "Experts or width",
        {
            "dense": DENSE,
            "experts": MIXTURE,
            "experts-unbalanced": MIXTURE | {"model.experts.balance_loss": 0.0},
            "wide": DENSE | {"model.mlp.d_ff": times(EXPERTS)},
        },
        scale="mini",
        seeds=5,
        # written down before the rows were trained
        conclusions=(
            # Fedus et al. 2021, Table 1: Switch is ahead of the dense model of equal FLOP.
            Conclusion("experts", "dense", "more parameters help at equal compute"),
            Conclusion("wide", "experts", "as many parameters help more where each token passes all"),
            Conclusion("experts", "experts-unbalanced", "without the balance loss few experts learn"),
        ),
    ),
)
