"""The tables of Raffel et al. 2020 ("Exploring the limits of transfer learning ..."): every row is one line.

A row's settings are those of ``experiments.experiment.BASELINE`` with its changes. ``scores.json`` holds what each row
scored in the paper and where that was read. Choices made where paper and released code differ: README.md beside this.
"""

import json
from pathlib import Path

from experiments.experiment import half, objective, table

SCORES = json.loads(Path(__file__).with_name("scores.json").read_text())

COLUMNS = {
    "GLUE": "average of 8 tasks",
    "CNNDM": "ROUGE-2",
    "SQuAD": "exact match",
    "SGLUE": "average of 8 tasks",
    "EnDe": "BLEU",
    "EnFr": "BLEU",
    "EnRo": "BLEU",
}

BASELINE_STD = SCORES["baseline-std"]["scores"]  # of ten runs of the baseline (Table 1): the paper's yardstick

SIX_LAYERS = {"model.num_encoder_layers": half, "model.num_decoder_layers": half}
SHARED = {"model.architecture": "shared-encoder-decoder"}
LM, PREFIX_LM = {"model.architecture": "decoder"}, {"model.architecture": "prefix-decoder"}


def spans(mean_length: float) -> dict:
    return {"objective.noise": "spans", "objective.mean_span_length": mean_length}


ROWS = {
    ("t5/1-baseline", "Baseline and no pre-training"): {
        "baseline": {},
        "no-pretraining": {"pretraining.steps": 0},
    },
    ("t5/2-architecture", "Architectures, with a denoising and a language-modelling objective"): {
        "encoder-decoder": {},
        "encoder-decoder-shared": SHARED,
        "encoder-decoder-6-layers": SIX_LAYERS,
        "language-model": LM,
        "prefix-lm": PREFIX_LM,
        "encoder-decoder+lm": objective("prefix-lm"),
        "encoder-decoder-shared+lm": SHARED | objective("prefix-lm"),
        "encoder-decoder-6-layers+lm": SIX_LAYERS | objective("prefix-lm"),
        "language-model+lm": LM | objective("causal-lm"),
        "prefix-lm+lm": PREFIX_LM | objective("prefix-lm"),
    },
    ("t5/4-objective", "Disparate unsupervised objectives"): {
        "prefix-lm": objective("prefix-lm"),
        "bert-style": objective("bert-style"),
        "deshuffling": objective("deshuffling"),
    },
    ("t5/5-bert-style", "Variants of the BERT-style objective"): {
        "bert-style": objective("bert-style"),
        "mass-style": objective("mass-style"),
        "replace-spans": {},
        "drop-tokens": objective("drop-tokens"),
    },
    ("t5/6-corruption-rate", "Corruption rate"): {
        "10": {"objective.rate": 0.10},
        "15": {},
        "25": {"objective.rate": 0.25},
        "50": {"objective.rate": 0.50},
    },
    ("t5/7-span-length", "Average length of a corrupted span"): {
        "iid": {},
        "2": spans(2),
        "3": spans(3),
        "5": spans(5),
        "10": spans(10),
    },
}

TABLES = tuple(table(name, title, SCORES[name], rows) for (name, title), rows in ROWS.items())
