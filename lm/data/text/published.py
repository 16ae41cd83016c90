"""The tokenizers of published models, used as they are: through ``tokenizers`` or sentencepiece.

They are vocabularies (``lm.data.text.vocabulary.Vocabulary``) with the ids of the special tokens besides.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from lm.data.text import bounds
from lm.data.text.own import BLANK, STOPS, read_sentencepiece
from lm.settings import SettingError, read_object

SPECIAL = {  # what a special token is for, and its usual spellings
    "pad": ("[PAD]", "<pad>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
BYTE_BLANK = "\u0120"  # how GPT-2's pieces of bytes write it
SENTINELS = 100  # of T5, above the pieces of its SentencePiece model [tokens]
PIECES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm")
SETTINGS = "tokenizer_config.json"
FILES = ("tokenizer.json", "vocab.txt", *PIECES, "target.spm", "vocab.json", "merges.txt", SETTINGS)


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Turns whatever a tokenizer's package has against its file into a SettingError."""
    try:
        yield
    except BaseException as error:  # the packages raise nothing narrower, and a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SettingError(f"{path} is not a tokenizer that works: {error}") from error


class Tokenizer:
    """What all published tokenizers have in common, given ``ids``, ``encode_batch`` and ``_text``."""

    path: Path
    ids: dict[str, int]  # of every token

    pad = property(lambda self: self._special["pad"])
    eos = property(lambda self: self._special["eos"])
    mask = property(lambda self: self._special["mask"])
    cls = property(lambda self: self._special["cls"])
    sep = property(lambda self: self._special["sep"])

    @property
    def size(self) -> int:
        return max(self.ids.values(), default=-1) + 1

    @property
    def num_sentinels(self) -> int:
        return sum(f"<extra_id_{k}>" in self.ids for k in range(SENTINELS))

    @functools.cached_property
    def _special(self) -> dict[str, int | None]:
        return {
            use: next(
                (self.ids[token] for token in (*self._named(use), *spellings) if token in self.ids), None
            )
            for use, spellings in SPECIAL.items()
        }

    def _named(self, use: str) -> tuple[str, ...]:
        """The token that the tokenizer's settings name for a use, if they do."""
        return ()

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """bool [size]; BERT marks the pieces that go on with a word, the others those that begin one."""
        if any(token.startswith("##") for token in self.ids):
            return self._marks(lambda token: not token.startswith("##"))
        return self._marks(lambda token: token.startswith((BLANK, BYTE_BLANK)))

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        return self._marks(lambda token: token.endswith(STOPS))

    def _marks(self, holds: Callable[[str], bool]) -> np.ndarray:
        marks = np.zeros(self.size, bool)
        marks[[number for token, number in self.ids.items() if holds(token)]] = True
        return marks

    @functools.cached_property
    def fingerprint(self) -> str:
        files = [self.path.with_name(name) for name in FILES if self.path.with_name(name).exists()]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the first end, without padding and the tokens that frame a text."""
        ids = list(map(int, ids))
        ids = ids[: ids.index(self.eos)] if self.eos in ids else ids
        return self._text(
            [token for token in ids if token not in (self.pad, self.cls, self.sep) and token < self.size]
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name in ("path", "settings", "sentinels")
        }


@dataclass(frozen=True)
class Fast(Tokenizer):
    """A tokenizer.json with all it takes, or the vocab.txt of BERT's word pieces."""

    path: Path
    settings: str  # JSON of tokenizer_config.json

    @functools.cached_property
    def tokenizer(self) -> Any:
        if self.path.suffix == ".json":
            bounds.check(self.path)
        with usable(self.path):
            if self.path.suffix == ".json":
                found = tokenizers.Tokenizer.from_file(str(self.path))
            else:
                lower = json.loads(self.settings).get("do_lower_case", True)
                found = tokenizers.BertWordPieceTokenizer(str(self.path), lowercase=lower)
            found.no_padding()  # some files ask for a fixed length
            found.no_truncation()
            return found

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def _named(self, use: str) -> tuple[str, ...]:
        if use in ("pad", "eos"):  # what ends a text for a model that goes on with it may be called otherwise
            return ()
        token = json.loads(self.settings).get(f"{use}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return (token,) if isinstance(token, str) else ()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with usable(self.path):
            found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoded.ids, np.int32) for encoded in found]

    def framed(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """(ids, token types) of one or two texts with the special tokens that the model expects around
        them.
        """
        with usable(self.path):
            found = self.tokenizer.encode(text, pair)
        return found.ids, found.type_ids

    def _text(self, ids: list[int]) -> str:
        with usable(self.path):
            return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True)
class Pieces(Tokenizer):
    """A SentencePiece model; in a vocab.json beside it, Marian's, pieces have other ids than in the model."""

    path: Path
    sentinels: int  # above the pieces, the first at the top

    @functools.cached_property
    def processors(self) -> tuple[sentencepiece.SentencePieceProcessor, ...]:
        """Those of the source and, in Marian another, of the target language."""
        target = self.path.with_name("target.spm") if self.path.suffix == ".spm" else self.path
        return tuple(map(read_sentencepiece, (self.path, target)))

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        table = self.path.with_name("vocab.json")
        if self.path.suffix == ".spm" and table.exists():
            found = read_object(table)
            if all(type(number) is int and number >= 0 for number in found.values()):
                return found
            raise SettingError(f"{table} should hold the id of each piece")
        pieces, count = self.processors[0], self.processors[0].get_piece_size()
        top = count + self.sentinels - 1
        return {pieces.id_to_piece(k): k for k in range(count)} | {
            f"<extra_id_{k}>": top - k for k in range(self.sentinels)
        }

    @functools.cached_property
    def pieces(self) -> dict[int, str]:
        return {token: piece for piece, token in self.ids.items()}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        unknown = self.ids.get("<unk>", 0)
        found = self.processors[0].encode(list(texts), out_type=str)
        return [np.asarray([self.ids.get(piece, unknown) for piece in pieces], np.int32) for pieces in found]

    def _text(self, ids: list[int]) -> str:
        return self.processors[1].decode([self.pieces[token] for token in ids if token in self.pieces])


def find_tokenizer(folder: Path, vocab_size: int) -> Fast | Pieces:
    """The tokenizer in ``folder`` of a model whose embedding has ``vocab_size`` rows."""
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    if type(settings.get("extra_ids", 0)) is not int:
        raise SettingError(f"{folder / SETTINGS}: extra_ids={settings['extra_ids']!r} should be a number")
    found = next((folder / name for name in FILES[: 2 + len(PIECES)] if (folder / name).exists()), None)
    if found is None:
        raise SettingError(f"{folder} has no tokenizer: none of {', '.join(FILES[: 2 + len(PIECES)])}")
    if found.name not in PIECES:
        tokenizer = Fast(found, json.dumps(settings))
    else:
        tokenizer = Pieces(found, 0)
        # T5's have sentinels that the model file does not know of.
        extra = settings.get("extra_ids", SENTINELS if found.name == PIECES[0] else 0)
        if (
            "<extra_id_0>" not in tokenizer.ids
            and "[CLS]" not in tokenizer.ids
            and tokenizer.size + extra <= vocab_size
        ):
            tokenizer = Pieces(found, extra)
    if tokenizer.size > vocab_size:
        raise SettingError(
            f"{found} has ids up to {tokenizer.size - 1}, the model's embedding {vocab_size} rows: they do "
            "not belong "
            "together"
        )
    return tokenizer
