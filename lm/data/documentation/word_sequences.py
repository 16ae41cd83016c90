"""Sequences of random words, to be copied or reversed.

No word predicts the next, so that a model has to remember them all. The words are so frequent in English that
even a small vocabulary has each of them as one token.
"""

import random
from collections.abc import Mapping

from lm.data.corpus.tfds import Row

SEQUENCE_WORDS = """
    a an and are as at be by can for from if in is it may no not of on one or that the this to use when with
""".split()
MAX_SEQUENCE_LENGTHS = (4, 8, 16, 32)  # of each data set; its sequences are longer than half of that [words]
ROWS_BY_SPLIT: Mapping[str, int] = {"train": 20_000, "validation": 500, "report": 2_000}


def random_sequences(max_length: int) -> dict[str, list[Row]]:
    """Return ``{split: rows}`` of different sequences of max_length // 2 + 1 to max_length words."""
    rng, seen = random.Random(f"sequences-{max_length}"), set()
    splits: dict[str, list[Row]] = {}
    for split, count in ROWS_BY_SPLIT.items():
        splits[split] = []
        while len(splits[split]) < count:
            text = " ".join(rng.choices(SEQUENCE_WORDS, k=rng.randint(max_length // 2 + 1, max_length)))
            if text not in seen:
                seen.add(text)
                splits[split].append({"name": f"sequences-{max_length}", "text": text})
    return splits
