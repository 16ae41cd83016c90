"""Sequences of words drawn at random, to be written again: as they are, or backwards.

No word tells anything of the next, so that a model has to remember them all. The words are so frequent in
English that a small vocabulary has each as one piece.
"""

import random
from collections.abc import Mapping

from lm.data.corpus.tfds import Row

DRAWN_WORDS = """
    a an and are as at be by can for from if in is it may no not of on one or that the this to use when with
""".split()
LONGEST_SEQUENCES = (4, 8, 16, 32)  # of each set; all are longer than half of it [words]
ROWS_BY_SPLIT: Mapping[str, int] = {"train": 20_000, "validation": 500, "report": 2_000}


def random_sequences(longest: int) -> dict[str, list[Row]]:
    """``{split: rows}`` of sequences of at most ``longest`` words, of which no two are alike."""
    rng, seen = random.Random(f"sequences-{longest}"), set()
    splits: dict[str, list[Row]] = {}
    for split, count in ROWS_BY_SPLIT.items():
        splits[split] = []
        while len(splits[split]) < count:
            text = " ".join(rng.choices(DRAWN_WORDS, k=rng.randint(longest // 2 + 1, longest)))
            if text not in seen:
                seen.add(text)
                splits[split].append({"name": f"sequences-{longest}", "text": text})
    return splits
