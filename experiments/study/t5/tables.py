"""The tables of Raffel et al. 2020 ("Exploring the limits of transfer learning ..."): a line for each row.

A row's settings are those of ``BASELINE`` (experiments/study/experiment.py) with the changes beside its name.
``times(2)`` doubles what the chosen scale has. ``scores.json`` holds each row's scores in the paper and where
they were read. Choices made where paper and released code differ: docs/choices.md.

The comment above a table says how to train it here, and how long that takes on a core that other jobs share.
"""

from experiments.study.experiment import Changes, objective, table, times
from experiments.study.t5.scores import SCORES

# Of the baseline's 12 + 12 layers. A decoder alone has its own 12, as in the paper.
SIX_LAYERS = {"model.num_encoder_layers": times(1 / 2), "model.num_decoder_layers": times(1 / 2)}
SHARED = {"model.architecture": "shared-encoder-decoder"}
LM, PREFIX_LM = {"model.architecture": "decoder"}, {"model.architecture": "prefix-decoder"}

# 2^19 steps of pre-training and 2^18 of fine-tuning become 3/2 x 2^19 steps on everything at once.
MULTI_TASK = {"mixing.pretraining": "corpus+tasks", "pretraining.steps": times(3 / 2), "finetuning.steps": 0}
STEPS = ("pretraining.steps", "finetuning.steps")
BATCHES = ("pretraining.batch_size", "finetuning.batch_size")


def spans(mean_length: float) -> Changes:
    """Noise in spans of this average length, in place of i.i.d. noise [tokens]."""
    return {"objective.noise": "spans", "objective.mean_span_length": mean_length}


# 1 trillion tokens: 10^6 steps instead of 2^19, of 2,048 rows of 512 instead of 128
LONG = {"pretraining.steps": times(1_000_000 / 2**19), "pretraining.batch_size": times(16)}
FINAL_MIXTURE = {
    "mixing.pretraining": "corpus+tasks",
    # K of 10^6 in place of 2^19: only English to German and to French have more examples.
    "mixing.limit": times(1_000_000 / 2**19),
    "mixing.corpus_share": 2.62,  # of that limit: the corpus counts as 2,620,000 examples (section 3.7)
}

CORPORA = {  # row: (the paper's corpus, the part of the built-in corpus "documentation" that stands for it)
    "unfiltered": ("tfds:c4/en.noclean", "documentation/unfiltered"),
    "realnews-like": ("tfds:c4/realnewslike", "documentation/libraries"),
    "webtext-like": ("tfds:c4/webtextlike", "documentation/science"),
    "wikipedia": ("tfds:wikipedia/20190301.en", "documentation/topics"),
    "wikipedia+books": (
        "tfds:wikipedia/20190301.en + text:books",
        "documentation/topics + documentation/libraries",
    ),
}


def corpus(name: str) -> Changes:
    """Another corpus, the paper's or its stand-in, by what the scale reads; the baseline's vocabulary."""
    # In this order, since the vocabulary names the old corpus, before that changes.
    return {
        "data.vocabulary": lambda old, experiment: f"{old}:{experiment.data.corpus}",
        "data.corpus": lambda old, experiment: CORPORA[name][old == "documentation"],
    }


def limit(exponent: int) -> Changes:
    """The paper's K = 2^exponent, as a multiple of the scale's limit, which stands for K = 2^19."""
    return {"mixing.limit": times(2.0 ** (exponent - 19))}


def temperature(value: float) -> Changes:
    """Mixing with this temperature, and K = 2^21, as the paper has with every temperature."""
    return limit(21) | {"mixing.temperature": value}


def larger(layers: float) -> Changes:
    """The width of BERT-large (4/3 of 768 is 1,024), and so many times the layers."""
    # multiples of 8, so that meshes can divide them
    widths = dict.fromkeys(("model.d_model", "model.mlp.d_ff"), times(4 / 3, 8))
    depths = dict.fromkeys(("model.num_encoder_layers", "model.num_decoder_layers"), times(layers))
    return widths | {"model.attention.num_heads": times(4 / 3)} | depths


# (name of the table, title): {row: changes}. The number in a table's name is the paper's; {}: the baseline.
ROWS: dict[tuple[str, str], dict[str, Changes]] = {
    # lm sweep t5/1-baseline --scale mini --seeds 5: 2 rows, seven minutes each
    ("t5/1-baseline", "Baseline and no pre-training"): {
        "baseline": {},
        "no-pretraining": {"pretraining.steps": 0},
    },
    # lm sweep t5/2-architecture --scale mini --seeds 5: 10 rows, seven minutes each
    ("t5/2-architecture", "Architectures, with a denoising and a language-modelling objective"): {
        "encoder-decoder": {},
        "encoder-decoder-shared": SHARED,
        "encoder-decoder-6-layers": SIX_LAYERS,
        "language-model": LM,
        "prefix-lm": PREFIX_LM,
        "encoder-decoder+lm": objective("prefix-lm"),
        "encoder-decoder-shared+lm": SHARED | objective("prefix-lm"),
        "encoder-decoder-6-layers+lm": SIX_LAYERS | objective("prefix-lm"),
        "language-model+lm": LM | objective("language-model"),
        "prefix-lm+lm": PREFIX_LM | objective("prefix-lm"),
    },
    # lm sweep t5/4-objective --scale mini --seeds 5: 3 rows, seven minutes each
    ("t5/4-objective", "Disparate unsupervised objectives"): {
        "prefix-lm": objective("prefix-lm"),
        "bert-style": objective("bert-style"),
        "deshuffling": objective("deshuffling"),
    },
    # lm sweep t5/5-bert-style --scale nano: 4 rows, one to two minutes each
    ("t5/5-bert-style", "Variants of the BERT-style objective"): {
        "bert-style": objective("bert-style"),
        "mass-style": objective("mass-style"),
        "replace-spans": {},
        "drop-tokens": objective("drop-tokens"),
    },
    # lm sweep t5/6-corruption-rate --scale mini --seeds 5: 4 rows, seven minutes each
    ("t5/6-corruption-rate", "Corruption rate"): {
        "10": {"objective.rate": 0.10},
        "15": {},
        "25": {"objective.rate": 0.25},
        "50": {"objective.rate": 0.50},
    },
    # lm sweep t5/7-span-length --scale nano: 5 rows, one to two minutes each
    ("t5/7-span-length", "Average length of a corrupted span"): {
        "iid": {},  # the baseline draws every token by itself
        **{str(length): spans(length) for length in (2, 3, 5, 10)},
    },
    # lm sweep t5/8-data --scale nano: 6 rows, one to two minutes each
    ("t5/8-data", "Pre-training data sets"): {
        "c4": {},
        **{name: corpus(name) for name in CORPORA},
    },
    # lm sweep t5/9-repeats --scale mini --seeds 3: 5 rows, seven minutes each
    ("t5/9-repeats", "Pre-training data seen again"): {
        "full": {},
        **{str(times_seen): {"data.repeats": times_seen} for times_seen in (64, 256, 1024, 4096)},
    },
    # lm sweep t5/10-fine-tuning --scale mini --seeds 3: 6 rows, five minutes each; one pre-training for all
    ("t5/10-fine-tuning", "Fine-tuning methods"): {
        "all": {},
        # the paper's widths over its d_model of 768, so that they mean the same at every scale
        **{f"adapters-{width}": {"tuning.adapters": width / 768} for width in (32, 128, 512, 2048)},
        "gradual-unfreezing": {"tuning.unfreezing": "gradual"},
    },
    # lm sweep t5/11-mixing --scale nano: 11 rows, one to two minutes each; one pre-training a row
    ("t5/11-mixing", "Multi-task training: how tasks are mixed"): {
        "baseline": {},
        "equal": MULTI_TASK | {"mixing.rates": "equal"},
        "k16": MULTI_TASK | limit(16),
        "k17": MULTI_TASK | limit(17),
        "k18": MULTI_TASK | limit(18),
        "k19": MULTI_TASK,
        "k20": MULTI_TASK | limit(20),
        "k21": MULTI_TASK | limit(21),
        "t2": MULTI_TASK | temperature(2),
        "t4": MULTI_TASK | temperature(4),
        "t8": MULTI_TASK | temperature(8),
    },
    # lm sweep t5/12-multi-task --scale mini --seeds 3: 5 rows, seven to ten minutes each
    ("t5/12-multi-task", "Multi-task pre-training and fine-tuning"): {
        "baseline": {},
        "multi-task": MULTI_TASK,
        "multi-task+fine-tuning": {"mixing.pretraining": "corpus+tasks"},
        "leave-one-out": {"mixing.pretraining": "corpus+other-tasks"},
        "supervised+fine-tuning": {"mixing.pretraining": "tasks"},
    },
    # lm sweep t5/13-scaling --scale nano: 7 rows, each about four times the baseline's minute
    ("t5/13-scaling", "What to do with four times the compute"): {
        "baseline": {},
        "steps": dict.fromkeys(STEPS, times(4)),
        "batch": dict.fromkeys(BATCHES, times(4)),
        # About twice and four times the compute of a step: (4/3)^2 of the widths, times 4/3 or 8/3 of the
        # layers, is 2.4 or 4.7 (16 and 32 layers, from 12).
        "size-2-steps-2": larger(4 / 3) | dict.fromkeys(STEPS, times(2)),
        "size": larger(8 / 3),
        "ensemble": {"ensemble.members": 4},
        "ensemble-fine-tuning": {"ensemble.members": 4, "ensemble.pretraining": "shared"},
    },
    # lm sweep t5/15-t5-base --scale nano: 3 rows, two of them of many times the baseline's minute
    ("t5/15-t5-base", "The final model, and what its scale alone gives"): {
        "baseline": {},
        "baseline-1t": LONG,
        "t5-base": LONG | spans(3) | FINAL_MIXTURE,
    },
}

TABLES = tuple(table(name, title, SCORES[name], rows) for (name, title), rows in ROWS.items())
