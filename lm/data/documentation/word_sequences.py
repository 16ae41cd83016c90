"""Sequences of words drawn at random, to be copied or reversed.

No word says anything about the next, so that a model has to remember them all. The words are so frequent in
English that a small vocabulary has each as one token.
"""

import random
from collections.abc import Mapping

from lm.data.corpus.tfds import Row

SEQUENCE_WORDS = """
    a an and are as at be by can for from if in is it may no not of on one or that the this to use when with
""".split()
MAX_SEQUENCE_LENGTHS = (4, 8, 16, 32)  # longest of each set; the others are longer than half of it [words]
ROWS_BY_SPLIT: Mapping[str, int] = {"train": 20_000, "validation": 500, "report": 2_000}


def random_sequences(longest: int) -> dict[str, list[Row]]:
    """Return ``{split: rows}`` of different sequences of ``longest`` // 2 + 1 to ``longest`` words."""
    rng, seen = random.Random(f"sequences-{longest}"), set()
    splits: dict[str, list[Row]] = {}
    for split, count in ROWS_BY_SPLIT.items():
        splits[split] = []
        while len(splits[split]) < count:
            text = " ".join(rng.choices(SEQUENCE_WORDS, k=rng.randint(longest // 2 + 1, longest)))
            if text not in seen:
                seen.add(text)
                splits[split].append({"name": f"sequences-{longest}", "text": text})
    return splits
