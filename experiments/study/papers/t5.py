"""The tables of Raffel et al. 2020 ("Exploring the limits of transfer learning ..."): a line for each row.

A row's settings are those of ``BASELINE`` (experiments/study/experiment.py) with the changes beside its name.
``times(2)`` doubles what the chosen scale has. ``t5_scores.json`` holds each row's scores in the paper and
where they were read. Choices made where paper and released code differ: docs/choices.md.

``lm sweep TABLE`` trains the scale and seeds that the table names. The comment above a table says how long
each run takes then, on one core that other jobs share.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.study.changes import Changes, objective, times
from experiments.study.experiment import Experiment
from experiments.study.table import (
    Axis,
    Conclusion,
    NoiseEstimate,
    Paper,
    PublishedScores,
    make_table,
)

BASELINE_ROW = "t5/1-baseline/baseline"  # of all tables, some of whose rows build the same experiment
_SCORES = PublishedScores(Path(__file__).with_name("t5_scores.json"))

PAPER = Paper(
    name="T5",
    citation="Raffel et al. 2020",
    authors=(
        "Colin Raffel, Noam Shazeer, Adam Roberts, Katherine Lee, Sharan Narang, Michael Matena, "
        "Yanqi Zhou, Wei Li, Peter J. Liu"
    ),
    title="Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
    question="Which architecture, objective, data, fine-tuning and size are best for a text-to-text model?",
    source="arXiv 1910.10683",
    noise=NoiseEstimate(10, "the baseline, pre-trained and fine-tuned with other seeds"),
    columns=_SCORES.columns,
)

# Of the baseline's 12 + 12 layers. A decoder alone has its own 12, as in the paper.
SIX_LAYERS: Changes = {"model.num_encoder_layers": times(1 / 2), "model.num_decoder_layers": times(1 / 2)}
SHARED: Changes = {"model.architecture": "shared-encoder-decoder"}
LM: Changes = {"model.architecture": "decoder"}
PREFIX_LM: Changes = {"model.architecture": "prefix-decoder"}

# 2^19 steps of pre-training and 2^18 of fine-tuning become 3/2 x 2^19 steps on everything at once.
MULTI_TASK: Changes = {
    "mixing.pretraining": "corpus+tasks",
    "pretraining.steps": times(3 / 2),
    "finetuning.steps": 0,
}


def spans(mean_length: float) -> Changes:
    """Return the change from i.i.d. noise to noise in spans of this average length [tokens]."""
    return {"objective.noise": "spans", "objective.mean_span_length": mean_length}


# 1 trillion tokens: 10^6 steps instead of 2^19, with batches of 2,048 rows instead of 128, each of 512 tokens
LONG: Changes = {"pretraining.steps": times(1_000_000 / 2**19), "pretraining.batch_size": times(16)}
FINAL_MIXTURE: Changes = {
    "mixing.pretraining": "corpus+tasks",
    # K of 10^6 in place of 2^19: only English to German and to French have more examples.
    "mixing.limit": times(1_000_000 / 2**19),
    "mixing.corpus_share": 2.62,  # of that limit: the corpus counts as 2,620,000 examples (section 3.7)
}


@dataclass(frozen=True)
class Corpus:
    """A change to a corpus of the paper, or to its stand-in where the scale reads the documentation."""

    published: str
    stand_in: str  # a part of the built-in corpus "documentation"

    def __call__(self, old: str, _experiment: Experiment) -> str:
        """Return the corpus that replaces ``old``."""
        return self.stand_in if old == "documentation" else self.published

    def __str__(self) -> str:
        return f"{self.published} (or {self.stand_in})"


@dataclass(frozen=True)
class KeepVocabulary:
    """A change that trains the vocabulary on the corpus of the scale, whatever corpus the row reads."""

    def __call__(self, old: str, experiment: Experiment) -> str:
        """Return the kind of vocabulary ``old`` with the name of its corpus."""
        return f"{old}:{experiment.data.corpus}"

    def __str__(self) -> str:
        return "trained on the baseline's corpus"


def corpus(published: str, stand_in: str) -> Changes:
    """Return the change to another corpus, with the vocabulary of the baseline."""
    # In this order, since the vocabulary names the old corpus, before that changes.
    return {"data.vocabulary": KeepVocabulary(), "data.corpus": Corpus(published, stand_in)}


WIKIPEDIA_AND_BOOKS = "tfds:wikipedia/20190301.en + text:books"


def limit(exponent: int) -> Changes:
    """Return the change to the paper's K = 2^exponent; the scale's limit stands for K = 2^19."""
    return {"mixing.limit": times(2.0 ** (exponent - 19))}


def temperature(value: float) -> Changes:
    """Return the change to this temperature, and to K = 2^21, which the paper has with every temperature."""
    return limit(21) | {"mixing.temperature": value}


def steps(factor: float) -> Changes:
    """Return the change to ``factor`` times the steps of both phases of training."""
    return {"pretraining.steps": times(factor), "finetuning.steps": times(factor)}


def larger(layers: float) -> Changes:
    """Return the change to the width of BERT-large (4/3 of 768 is 1,024) and ``layers`` times the layers."""
    return {
        "model.d_model": times(4 / 3, 8),  # multiples of 8, so that meshes can divide them
        "model.mlp.d_ff": times(4 / 3, 8),
        "model.attention.num_heads": times(4 / 3),
        "model.num_encoder_layers": times(layers),
        "model.num_decoder_layers": times(layers),
    }


_table = partial(make_table, baseline=BASELINE_ROW, paper=PAPER, published=_SCORES)

# The number in a table's name is the paper's; {} is the baseline.
TABLES = (
    # seven minutes each
    _table(
        "t5/1-baseline",
        "Baseline and no pre-training",
        {
            "baseline": {},
            "no-pretraining": {"pretraining.steps": 0},
        },
        scale="mini",
        seeds=5,
        conclusions=(Conclusion("baseline", "no-pretraining", "pre-training helps"),),
    ),
    # seven minutes each
    _table(
        "t5/2-architecture",
        "Architectures, with a denoising and a language-modelling objective",
        {
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
        scale="mini",
        seeds=5,
        conclusions=(
            Conclusion("encoder-decoder", "encoder-decoder-6-layers", "half the layers hurt"),
            Conclusion("encoder-decoder-shared", "prefix-lm", "sharing costs less than no encoder"),
            Conclusion("encoder-decoder", "language-model", "causal decoders are worse"),
            Conclusion("prefix-lm+lm", "language-model+lm", "a visible prefix helps"),
            Conclusion("encoder-decoder", "encoder-decoder+lm", "denoising beats LM"),
        ),
    ),
    # seven minutes each
    _table(
        "t5/4-objective",
        "Disparate unsupervised objectives",
        {
            "prefix-lm": objective("prefix-lm"),
            "bert-style": objective("bert-style"),
            "deshuffling": objective("deshuffling"),
        },
        scale="mini",
        seeds=5,
        conclusions=(
            Conclusion("bert-style", "deshuffling", "deshuffling is worse"),
            Conclusion("bert-style", "prefix-lm", "denoising beats prefix LM"),
        ),
    ),
    # one to two minutes each
    _table(
        "t5/5-bert-style",
        "Variants of the BERT-style objective",
        {
            "bert-style": objective("bert-style"),
            "mass-style": objective("mass-style"),
            "replace-spans": {},
            "drop-tokens": objective("drop-tokens"),
        },
    ),
    # seven minutes each
    _table(
        "t5/6-corruption-rate",
        "Corruption rate",
        {
            "10": {"objective.rate": 0.10},
            "15": {},
            "25": {"objective.rate": 0.25},
            "50": {"objective.rate": 0.50},
        },
        axis=Axis("objective.rate", "corruption rate"),
        scale="mini",
        seeds=5,
        conclusions=(Conclusion("15", "50", "50 % noise is too much"),),
    ),
    # one to two minutes each
    _table(
        "t5/7-span-length",
        "Average length of a corrupted span",
        {
            "iid": {},  # the baseline draws every token by itself
            **{str(length): spans(length) for length in (2, 3, 5, 10)},
        },
        axis=Axis("objective.mean_span_length", "mean length of a span [tokens]"),
    ),
    # one to two minutes each
    _table(
        "t5/8-data",
        "Pre-training data sets",
        {
            "c4": {},
            "unfiltered": corpus("tfds:c4/en.noclean", "documentation/unfiltered"),
            "realnews-like": corpus("tfds:c4/realnewslike", "documentation/services"),
            "webtext-like": corpus("tfds:c4/webtextlike", "documentation/science"),
            "wikipedia": corpus("tfds:wikipedia/20190301.en", "documentation/operations"),
            "wikipedia+books": corpus(
                WIKIPEDIA_AND_BOOKS, "documentation/operations + documentation/learning"
            ),
        },
        surrogate_data=True,
    ),
    # seven minutes each
    _table(
        "t5/9-repeats",
        "Pre-training data seen again",
        {
            "full": {},
            **{str(times_seen): {"data.repeats": times_seen} for times_seen in (64, 256, 1024, 4096)},
        },
        axis=Axis("data.repeats", "times that the same data are seen"),
        scale="mini",
        seeds=3,
        conclusions=(Conclusion("full", "4096", "many repeats hurt"),),
    ),
    # five minutes each; one pre-training for all
    _table(
        "t5/10-fine-tuning",
        "Fine-tuning methods",
        {
            "all": {},
            # the paper's widths over its d_model of 768, so that they mean the same at every scale
            **{f"adapters-{width}": {"tuning.adapters": width / 768} for width in (32, 128, 512, 2048)},
            "gradual-unfreezing": {"tuning.unfreezing": "gradual"},
        },
        axis=Axis("tuning.adapters", "width of adapters, over that of the model"),
        scale="mini",
        seeds=3,
        conclusions=(
            Conclusion("adapters-2048", "adapters-32", "adapters need width"),
            Conclusion("all", "gradual-unfreezing", "tuning everything is best"),
        ),
    ),
    # one to two minutes each; one pre-training a row
    _table(
        "t5/11-mixing",
        "Multi-task training: how tasks are mixed",
        {
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
        axis=Axis("mixing.limit", "limit K [examples]"),
        conclusions=(Conclusion("baseline", "equal", "equal mixing is worst"),),
    ),
    # seven to ten minutes each
    _table(
        "t5/12-multi-task",
        "Multi-task pre-training and fine-tuning",
        {
            "baseline": {},
            "multi-task": MULTI_TASK,
            "multi-task+fine-tuning": {"mixing.pretraining": "corpus+tasks"},
            "leave-one-out": {"mixing.pretraining": "corpus+other-tasks"},
            "supervised+fine-tuning": {"mixing.pretraining": "tasks"},
        },
        scale="mini",
        seeds=3,
        conclusions=(
            Conclusion("baseline", "supervised+fine-tuning", "supervised alone is worse"),
            Conclusion("baseline", "multi-task", "fine-tuning is needed"),
        ),
    ),
    # each about four times the baseline's minute
    _table(
        "t5/13-scaling",
        "What to do with four times the compute",
        {
            "baseline": {},
            "steps": steps(4),
            "batch": {"pretraining.batch_size": times(4), "finetuning.batch_size": times(4)},
            # About twice and four times the compute of a step: (4/3)^2 of the widths, times 4/3 or 8/3 of the
            # layers, is 2.4 or 4.7 (16 and 32 layers, from 12).
            "size-2-steps-2": larger(4 / 3) | steps(2),
            "size": larger(8 / 3),
            "ensemble": {"ensemble.members": 4},
            "ensemble-fine-tuning": {"ensemble.members": 4, "ensemble.pretraining": "shared"},
        },
        conclusions=(
            Conclusion("steps", "baseline", "more steps help"),
            Conclusion("size", "baseline", "more parameters help"),
            Conclusion("ensemble", "baseline", "ensembles help"),
        ),
    ),
    # two of them of many times the baseline's minute
    _table(
        "t5/15-t5-base",
        "The final model, and what its scale alone gives",
        {
            "baseline": {},
            "baseline-1t": LONG,
            "t5-base": LONG | spans(3) | FINAL_MIXTURE,
        },
    ),
)
