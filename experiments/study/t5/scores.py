"""The scores of Raffel et al. 2020, as ``scores.json`` has them, and what its columns measure."""

import json
from pathlib import Path

SCORES = json.loads(Path(__file__).with_name("scores.json").read_text())

COLUMNS = {"GLUE": "average of 8 tasks", "CNNDM": "ROUGE-2", "SQuAD": "exact match"}
COLUMNS |= {"SGLUE": "average of 8 tasks", "EnDe": "BLEU", "EnFr": "BLEU", "EnRo": "BLEU"}

# of ten runs of the baseline (Table 1): the paper's yardstick
BASELINE_STD = SCORES["baseline-std"]["scores"]
