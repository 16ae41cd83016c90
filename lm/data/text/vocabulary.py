"""Text <-> token ids: what every vocabulary can do, of our own (``own``) or published with a model."""

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

PAD, EOS, UNK = 0, 1, 2  # ids in our own vocabularies, as in T5
MASK = "[MASK]"  # how a user writes the mask, however the vocabulary spells it
BLANK = "\u2581"  # how SentencePiece writes the blank before a word
# kinds that are trained here: the likeliest pieces of a text [Kudo 2018], merged pairs [Sennrich et al. 2016]
# and pieces that begin a word or, as ##X, continue one [Schuster and Nakajima 2012]
TrainedKind = Literal["unigram", "bpe", "wordpiece"]
# how one or two texts are laid out for a head: each with its end, or START text DELIM text EXTRACT
Layout = Literal["ended", "start-delim-extract"]
TRAINED_KINDS: tuple[TrainedKind, ...] = get_args(TrainedKind)
STOPS = (".", "?", "!")  # end a sentence


class TextFrame(NamedTuple):
    """The ids around what a model with a decoder reads and writes; T5's by default."""

    eos: int = EOS  # ends inputs and targets
    start: int = PAD  # what a decoder reads first
    before: tuple[int, ...] = ()  # in front of inputs, and of targets, of an encoder-decoder


T5_FRAME = TextFrame()


class Affixes(NamedTuple):
    """The ids that a published tokenizer puts around one text, or two."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    second_type: int  # token type of the second text


class Vocabulary(abc.ABC):
    """Pieces of text and their ids; sentinel k has the id ``size - 1 - k``."""

    pad = property(lambda self: self.special["pad"])
    eos = property(lambda self: self.special["eos"])
    mask = property(lambda self: self.special["mask"])
    cls = property(lambda self: self.special["cls"])  # begins an encoder's row
    sep = property(lambda self: self.special["sep"])  # ends each text of an encoder's row
    # of a decoder's row in GPT's layout: sentinels other than the mask and [CLS]; a language model has never
    # seen them, as in the paper
    start = property(lambda self: self.sentinel(2))
    delim = property(lambda self: self.sentinel(3))
    extract = property(lambda self: self.sentinel(4))
    first_piece = UNK + 1  # lowest id that a random token may have

    @property
    @abc.abstractmethod
    def ids(self) -> Mapping[str, int]:
        """Of every piece, and in published vocabularies of the special tokens."""

    @property
    @abc.abstractmethod
    def special(self) -> Mapping[str, int | None]:
        """pad, eos, mask, cls and sep; None: the vocabulary has no such token."""

    @property
    def affixes(self) -> Affixes | None:
        """Its own way to frame texts; None: that of models trained here."""
        return None

    @property
    @abc.abstractmethod
    def num_sentinels(self) -> int:
        """How many ids at the top stand for hidden spans."""

    def sentinel(self, number: int) -> int | None:
        """The id of a sentinel, counted from 0 at the top; None: there are fewer."""
        return self.size - 1 - number if number < self.num_sentinels else None

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Pieces and sentinels; the embedding has at least as many rows."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of what the vocabulary is made of: equal only for vocabularies that encode alike."""

    @property
    @abc.abstractmethod
    def word_starts(self) -> np.ndarray:
        """bool [size]: a piece begins a word."""

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        """bool [size]: a piece ends with a full stop, a question mark or an exclamation mark."""
        return self.marks(lambda piece: piece.endswith(STOPS))

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, without EOS."""

    def encode(self, text: str) -> list[int]:
        """Ids without EOS."""
        return self.encode_batch([text])[0].tolist()

    def encode_framed(self, text: str, begin: int | None, end: int | None) -> list[int]:
        """``text``, in which MASK stands for the mask, between the ids ``begin`` and ``end``.

        A published tokenizer that knows how its model frames a text ignores the two.
        """
        ids = self.encode_hidden(text, [self.mask] * text.count(MASK))
        return [token for token in (begin, *ids, end) if token is not None]

    def encode_hidden(self, text: str, hidden: Sequence[int | None]) -> list[int | None]:
        """Ids of ``text``, in which ``hidden[k]`` stands for the MASK number k."""
        *parts, last = text.split(MASK)
        pairs = zip(parts, hidden, strict=True)
        ids = [token for part, instead in pairs for token in (*self.encode(part.rstrip()), instead)]
        return ids + (
            self.encode(last) if last.strip() else []
        )  # the blank before a word belongs to the word

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the first EOS, without padding and the tokens that frame a text."""
        ids = list(map(int, ids))
        ids = ids[: ids.index(self.eos)] if self.eos in ids else ids
        size, silent = self.size, self._silent()
        return self._text([token for token in ids if 0 <= token < size and token not in silent])

    def _silent(self) -> tuple[int | None, ...]:
        """The ids that decoding skips."""
        return (self.pad,)

    @abc.abstractmethod
    def _text(self, ids: list[int]) -> str:
        """The text of ids below ``size``."""

    def files(self) -> Mapping[str, bytes]:
        """``{name: contents}`` of the files that ``published.open_vocabulary`` needs; none for bytes."""
        return {}

    def exported(self, _begin: int | None, _end: int | None) -> Mapping[str, bytes]:
        """``{name: contents}`` for other programs; one of ours puts the two ids around a text."""
        return self.files()

    def marks(self, holds: Callable[[str], bool]) -> np.ndarray:
        """bool [size], True at the pieces for which ``holds``."""
        marks = np.zeros(self.size, bool)
        marks[[token for piece, token in self.ids.items() if holds(piece)]] = True
        return marks

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what was computed from them: another process reads the files again."""
        cached = functools.cached_property
        return {k: v for k, v in vars(self).items() if not isinstance(getattr(type(self), k, None), cached)}
