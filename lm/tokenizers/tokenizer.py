"""Text <-> token ids: what every vocabulary can do, of our own (``own``) or published with a model.

Text is data or a prompt. Data, such as a corpus or the rows of a task, holds no special tokens: where it
spells one, as in ``</s>``, that is text like any other. A prompt may name what stands for hidden text, as
``[MASK]`` or ``<extra_id_0>``; what ends or pads a text it cannot name either.
"""

import abc
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
# whose special tokens those of our vocabularies are: an encoder's, and with a decoder, sentinels or masks
Family = Literal["bert", "t5", "bart"]
TRAINED_KINDS: tuple[TrainedKind, ...] = get_args(TrainedKind)
STOPS = (".", "?", "!")  # end a sentence
NAMED = re.compile(r"\[MASK\]|<extra_id_(\d{1,9})>")  # the special tokens of a prompt


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
    blanks_are_tokens = False  # else the blank before a word is a part of it

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
    def unk(self) -> int | None:
        """The id of what the pieces cannot write; None: they write all."""
        return UNK

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
        """The ids of a prompt between the ids ``begin`` and ``end``.

        A published tokenizer that knows how its model frames a text ignores the two.
        """
        return [token for token in (begin, *self.encode_prompt(text), end) if token is not None]

    def framed_ids(self, ids: Sequence[int], begin: int | None, end: int | None) -> list[int]:
        """The ids of a text between ``begin`` and ``end``, which a published tokenizer ignores likewise."""
        return [token for token in (begin, *ids, end) if token is not None]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that may name masks and sentinels."""
        ids = self.encode_hidden(text, [self.mask] * text.count(MASK))
        return [token for token in ids if token is not None]

    def encode_hidden(self, text: str, hidden: Sequence[int | None]) -> list[int | None]:
        """Ids of a prompt, in which ``hidden[k]`` stands for the MASK number k."""
        ids: list[int | None] = []
        for number, (part, name) in enumerate(self._parts(text, hidden)):
            ids += self.encode_behind(part) if number else self.encode(part)
            ids += [] if name is None else [name]
        return ids

    def _parts(self, text: str, hidden: Sequence[int | None]) -> Iterator[tuple[str, int | None]]:
        """The text in front of each special token, and its id; at last the text behind them, and None."""
        begin, masks = 0, iter(hidden)
        for match in NAMED.finditer(text):
            number = match[1]
            if number is not None and int(number) >= self.num_sentinels:
                continue  # there is no such token
            part = text[begin : match.start()]
            name = next(masks) if number is None else self.sentinel(int(number))
            yield part if self.blanks_are_tokens else part.rstrip(), name
            begin = match.end()
        last = text[begin:]
        yield last if last.strip() or self.blanks_are_tokens or not begin else "", None

    def encode_behind(self, text: str) -> list[int]:
        """Ids of a text right behind a special token; what begins without a blank goes on with its word."""
        return self.encode(text)

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

    def special_names(self, _family: Family) -> Mapping[int, str]:
        """How special tokens are spelt where pieces are shown: a published tokenizer has its own names."""
        known = {*self.special.values(), *map(self.sentinel, range(self.num_sentinels))}
        return {token: piece for piece, token in self.ids.items() if token in known}

    def marks(self, holds: Callable[[str], bool]) -> np.ndarray:
        """bool [size], True at the pieces for which ``holds``."""
        marks = np.zeros(self.size, bool)
        marks[[token for piece, token in self.ids.items() if holds(piece)]] = True
        return marks

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what was computed from them: another process reads the files again."""
        cached = functools.cached_property
        return {k: v for k, v in vars(self).items() if not isinstance(getattr(type(self), k, None), cached)}
