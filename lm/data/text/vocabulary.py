"""What all vocabularies agree on: T5's special ids, and what noise and objectives need of any vocabulary."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

PAD, EOS, UNK = 0, 1, 2  # ids in every vocabulary, as in T5


class Symbols(Protocol):
    """What noise and objectives need of a vocabulary: sentinel k has the id ``size - 1 - k``."""

    num_sentinels: int
    eos: int | None  # ids of special tokens, None for what there is none of
    mask: int | None
    word_starts: np.ndarray  # bool [size]: a piece begins a word
    # bool [size]: a piece ends with a full stop, a question mark or an exclamation mark
    sentence_ends: np.ndarray

    @property
    def size(self) -> int:
        """Pieces and sentinels; the embedding has at least as many rows."""


class Vocabulary(Symbols, Protocol):
    """What the rest of the project needs of a vocabulary."""

    pad: int | None
    cls: int | None  # begins an encoder's row
    sep: int | None  # ends each text of an encoder's row

    @property
    def fingerprint(self) -> str:
        """Equal for vocabularies that encode alike."""

    def encode(self, text: str) -> list[int]:
        """Ids without EOS."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, without EOS."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the first EOS; padding is dropped."""
