"""Text <-> token ids: SentencePiece and bytes, both with T5's special ids and with sentinels at the top.

0 pads, 1 ends a sequence, 2 is unknown. Sentinel k has the id ``size - 1 - k`` and is written
``<extra_id_k>`` when decoded, as in the T5 code; where they are not told apart the first is the mask and the
second begins an encoder's row.
"""

import functools
import hashlib
import io
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece

from lm.data.text.vocabulary import EOS, PAD, UNK
from lm.files import write_sealed
from lm.settings import SettingError

# text that a vocabulary is trained on; twice as much saves under 1 % of tokens [characters per piece]
SAMPLE = 750
# pieces to begin with, of which training leaves one; the default, a million, is slower and no better
SEEDS = 5
REQUIRED = string.digits + string.ascii_letters + string.punctuation  # pieces, however rare in the sample
# pieces for each of them that a vocabulary should have, else it is too small for characters it does not meet
ROOM = 10
# longest piece of text given to the trainer, which drops lines of more than 4,192 bytes [characters]
LINE = 1_000
THREADS = 2  # of encoding; the trainer is faster with one
BYTES = 256
STOPS = (".", "?", "!")  # end a sentence
BLANK = "\u2581"  # how SentencePiece writes it


def _parts(ids: Iterable[int], size: int, num_sentinels: int) -> Iterator[list[int] | str]:
    """The ids before EOS, without padding, as runs of plain ids with the sentinels' names between them."""
    run: list[int] = []
    for token in map(int, ids):
        if token == EOS:
            break
        if size - num_sentinels <= token < size:
            yield run
            yield f"<extra_id_{size - 1 - token}>"
            run = []
        elif PAD < token < size:
            run.append(token)
    yield run


def _check_sentinels(num_sentinels: int) -> None:
    if num_sentinels < 0:
        raise SettingError(f"data.sentinels={num_sentinels} should be 0 or more, such as 100")


class Special:
    """The special tokens of our own vocabularies."""

    pad, eos, sep = PAD, EOS, EOS
    num_sentinels: int
    size: int

    @property
    def mask(self) -> int | None:
        return self.size - 1 if self.num_sentinels > 0 else None

    @property
    def cls(self) -> int | None:
        return self.size - 2 if self.num_sentinels > 1 else None

    def _marks(self, tokens: Iterable[int]) -> np.ndarray:
        """bool [size], True at ``tokens``."""
        marks = np.zeros(self.size, bool)
        marks[list(tokens)] = True
        return marks


def read_sentencepiece(path: Path) -> sentencepiece.SentencePieceProcessor:
    """The model in a file; SettingError if it is none."""
    try:
        found = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        for token in range(found.get_piece_size()):
            found.id_to_piece(token)  # of a damaged file it may be no text
        found.encode("")  # or have no model at all
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingError(
            f"the vocabulary {path} cannot be read as a SentencePiece model: {error}"
        ) from error
    return found


@dataclass(frozen=True)
class SentencePiece(Special):
    """A trained model file, and sentinels above its pieces."""

    path: Path
    num_sentinels: int

    def __post_init__(self):
        _check_sentinels(self.num_sentinels)
        ids = [self.processor.pad_id(), self.processor.eos_id(), self.processor.unk_id()]
        if ids != [PAD, EOS, UNK]:
            raise SettingError(
                f"data.vocabulary={self.path} has pad, eos, unk = {ids} where 0, 1, 2 are expected"
            )

    @functools.cached_property
    def processor(self) -> sentencepiece.SentencePieceProcessor:
        return read_sentencepiece(Path(self.path))

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "num_sentinels": self.num_sentinels}

    @property
    def size(self) -> int:
        return self.processor.get_piece_size() + self.num_sentinels

    @property
    def _pieces(self) -> list[str]:
        return [self.processor.id_to_piece(token) for token in range(self.processor.get_piece_size())]

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self._marks(token for token, piece in enumerate(self._pieces) if piece.startswith(BLANK))

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        return self._marks(token for token, piece in enumerate(self._pieces) if piece.endswith(STOPS))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(
            self.processor.serialized_model_proto() + b"%d" % self.num_sentinels
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids, np.int32) for ids in self.processor.encode(list(texts), num_threads=THREADS)]

    def decode(self, ids: Iterable[int]) -> str:
        parts = _parts(ids, self.size, self.num_sentinels)
        return " ".join(
            text for part in parts if (text := part if isinstance(part, str) else self.processor.decode(part))
        )


@dataclass(frozen=True)
class Bytes(Special):
    """UTF-8: byte b has the id b + 3."""

    num_sentinels: int

    def __post_init__(self):
        _check_sentinels(self.num_sentinels)

    @property
    def size(self) -> int:
        return UNK + 1 + BYTES + self.num_sentinels

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """A blank begins the word after it."""
        return self._marks(self.encode(" \n\t"))

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        return self._marks(self.encode("".join(STOPS)))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes %d" % self.num_sentinels).hexdigest()

    def encode(self, text: str) -> list[int]:
        return [byte + UNK + 1 for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + UNK + 1 for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are not UTF-8 are dropped, as are other ids."""
        parts = _parts(ids, self.size, self.num_sentinels)
        return "".join(part if isinstance(part, str) else self._text(part) for part in parts)

    @staticmethod
    def _text(ids: list[int]) -> str:
        return bytes(token - UNK - 1 for token in ids if token > UNK).decode(errors="ignore")


def train_sentencepiece(texts: Iterable[str], size: int, path: Path) -> Path:
    """Train a unigram model of ``size`` pieces on a sample of ``texts`` and ``write_sealed`` it.

    The same texts give the same model. As T5's: normalisation nmt_nfkc, unknown characters are id 2 (no byte
    fallback). Those of ASCII are none of these: bytes would take 256 pieces of a small vocabulary, they take
    what is rare of 94.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample(texts, size * SAMPLE),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
            seed_sentencepiece_size=max(size * SEEDS, 10_000),
            required_chars=REQUIRED if size >= ROOM * len(REQUIRED) else "",
        )
    except RuntimeError as error:
        raise SettingError(f"data.vocabulary_size={size} does not suit the text: {_reason(error)}") from error
    write_sealed(Path(path), model.getvalue())
    return Path(path)


def _sample(texts: Iterable[str], left: int) -> Iterator[str]:
    """Lines of ``left`` characters: documents of a sequence drawn at random, the beginning of another
    iterable.
    """
    chosen = texts
    if isinstance(texts, Sequence):
        order = np.random.Generator(np.random.Philox(key=[0, 0])).permutation(len(texts))
        chosen = (texts[int(index)] for index in order)
    for text in chosen:
        for line in text[:left].splitlines():
            yield from (line[start : start + LINE] for start in range(0, len(line), LINE))
        left -= len(text)
        if left <= 0:
            return


def _reason(error: RuntimeError) -> str:
    """The trainer's own words, without the place in its source; it has none for a text that is empty."""
    return str(error).rpartition("] ")[2].strip() or "there is none"
