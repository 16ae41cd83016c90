"""The recipe of the small scales as tables: optimisers and rates of pre-training, and rates of fine-tuning.

All rows of a scale share one recipe. It should suit two extremes, between which the other rows lie: an
encoder-decoder that denoises, and a decoder that is a language model. The encoder of BERT, a masked language
model, has a recipe of its own. These tables measure each of the three under each optimiser by held-out loss,
and each method of fine-tuning at each rate by the tasks.
"""

from experiments.study.changes import Changes, objective
from experiments.study.presets import family
from experiments.study.table import Table, make_table

_KINDS: dict[str, Changes] = {
    "denoising": {},
    "language-model": {"model.architecture": "decoder"} | objective("language-model"),
    "masked-lm": family("bert-base")
    | objective("masked-lm")
    | {
        "model.heads": (),
        "model.embedding.type_vocab_size": 0,
        # as all encoders of the study have them: post-norm stacks may diverge without
        "pretraining.optimizer.warmup_steps": 50,
        "pretraining.optimizer.clip_norm": 1.0,
    },
}
_CONSTANT: Changes = {"pretraining.optimizer.schedule": "constant"}
# Schedule and learning rates to try: the rate of Adafactor multiplies its schedule, the others are constant.
_OPTIMIZERS: dict[str, tuple[Changes, tuple[float, ...]]] = {
    "adafactor": (
        {"pretraining.optimizer.name": "adafactor", "pretraining.optimizer.schedule": "inverse-sqrt"},
        (0.5, 1.0, 2.0),
    ),
    "adamw-relative": ({"pretraining.optimizer.name": "adamw-relative"} | _CONSTANT, (0.01, 0.02, 0.04)),
    "muon": ({"pretraining.optimizer.name": "muon"} | _CONSTANT, (0.003, 0.01, 0.03)),
    "adamw": ({"pretraining.optimizer.name": "adamw"} | _CONSTANT, (0.001, 0.003, 0.01)),
}
CHOSEN = "adafactor-1"  # the row whose optimiser and rate the scales nano, mini and small have

_METHODS: dict[str, Changes] = {
    "all": {},
    # T5, Table 10, as shares of d_model
    **{f"adapters-{width}": {"tuning.adapters": width / 768} for width in (32, 2048)},
    "lora-8": {"tuning.lora.rank": 8},
}
FINETUNING_RATES = (0.003, 0.01, 0.03, 0.1)


def _pretraining_table(kind: str) -> Table:
    rows: dict[str, Changes] = {}
    for name, (optimizer, rates) in _OPTIMIZERS.items():
        for rate in rates:
            changes = _KINDS[kind] | optimizer | {"pretraining.optimizer.learning_rate": rate}
            rows[f"{name}-{rate:g}"] = changes | {"tuning.mixtures": ()}
    return make_table(
        f"recipe-{kind}",
        f"Optimisers and learning rates of pre-training: {kind.replace('-', ' ')}",
        rows,
        baseline=CHOSEN,
        scale="mini",
        seeds=5,
    )


TABLES = (
    _pretraining_table("denoising"),  # two to three minutes each
    _pretraining_table("language-model"),
    _pretraining_table("masked-lm"),  # a minute each
    # three minutes each; the baseline's pre-training, which these rows share, takes three more per seed
    make_table(
        "recipe-finetuning",
        "Learning rates of fine-tuning all parameters, adapters and low-rank updates",
        {
            f"{method}-{rate:g}": changes
            | {"tuning.branches": (1.0,), "finetuning.optimizer.learning_rate": rate}
            for method, changes in _METHODS.items()
            for rate in FINETUNING_RATES
        },
        baseline="all-0.01",
        scale="mini",
        seeds=5,
    ),
)
