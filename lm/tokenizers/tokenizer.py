"""Convert text to token ids and back: the interface that all tokenizers share.

A tokenizer is trained here (``sentencepiece``, ``wordpiece``) or published with a model (``huggingface``).

Text is data or a prompt. Data, such as a corpus or the rows of a task, has no special tokens: where it spells
one, such as ``</s>``, the spelling is encoded as ordinary text. A prompt may name the tokens that stand for
hidden text, ``[MASK]`` or ``<extra_id_0>``, but neither EOS nor padding.
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
# the algorithms that can be trained here: unigram language model [Kudo 2018], byte-pair encoding [Sennrich et
# al. 2016], and WordPiece, whose ##X continues a word [Schuster and Nakajima 2012]
TrainedKind = Literal["unigram", "bpe", "wordpiece"]
# the layout of one or two texts for a head: each with its end token, or START text DELIM text EXTRACT
Layout = Literal["ended", "start-delim-extract"]
# whose names the special tokens get: BERT's for encoders; with a decoder T5's sentinels or BART's masks
Family = Literal["bert", "t5", "bart"]
TRAINED_KINDS: tuple[TrainedKind, ...] = get_args(TrainedKind)
STOPS = (".", "?", "!")  # end a sentence
NAMED = re.compile(r"\[MASK\]|<extra_id_(\d{1,9})>")  # the special tokens of a prompt


class TextFrame(NamedTuple):
    """Hold the special ids that frame the inputs and targets of a model with a decoder; defaults are T5's."""

    eos: int = EOS  # ends inputs and targets
    start: int = PAD  # what a decoder reads first
    before: tuple[int, ...] = ()  # precedes the inputs and the targets of an encoder-decoder


T5_FRAME = TextFrame()


class Affixes(NamedTuple):
    """Hold the template of a published tokenizer: the special ids that it puts around one text or a pair."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    second_type: int  # token type of the second text


class Vocabulary(abc.ABC):
    """Map pieces of text to token ids and back; sentinel k has the id ``size - 1 - k``."""

    pad = property(lambda self: self.special["pad"])
    eos = property(lambda self: self.special["eos"])
    mask = property(lambda self: self.special["mask"])
    cls = property(lambda self: self.special["cls"])  # begins an encoder's row
    sep = property(lambda self: self.special["sep"])  # ends each text of an encoder's row
    # special tokens of GPT's layout for fine-tuning: sentinels other than the mask and [CLS]; as in the
    # paper, a language model has not seen them in pre-training
    start = property(lambda self: self.sentinel(2))
    delim = property(lambda self: self.sentinel(3))
    extract = property(lambda self: self.sentinel(4))
    first_piece = UNK + 1  # lowest id that a random token may have
    blanks_are_tokens = False  # otherwise the blank before a word is part of its piece

    @property
    @abc.abstractmethod
    def ids(self) -> Mapping[str, int]:
        """Return the id of every piece; published vocabularies also include their special tokens."""

    @property
    @abc.abstractmethod
    def special(self) -> Mapping[str, int | None]:
        """Return the ids of pad, eos, mask, cls and sep; None where the vocabulary has no such token."""

    @property
    def affixes(self) -> Affixes | None:
        """Return the tokenizer's own template of special tokens; None: use that of models trained here."""
        return None

    @property
    def unk(self) -> int | None:
        """Return the id of the unknown token, or None if the pieces can write any text."""
        return UNK

    @property
    @abc.abstractmethod
    def num_sentinels(self) -> int:
        """Return the number of sentinels, the ids at the top that stand for hidden spans."""

    def sentinel(self, number: int) -> int | None:
        """Return the id of sentinel ``number``, counted down from the top, or None if there are fewer."""
        return self.size - 1 - number if number < self.num_sentinels else None

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Return the number of pieces and sentinels; the embedding has at least as many rows."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Return a SHA-256 digest that is equal only for vocabularies that encode text identically."""

    @property
    @abc.abstractmethod
    def word_starts(self) -> np.ndarray:
        """Return a mask of the pieces that begin a word, bool [size]."""

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        """Return a mask of the pieces that end with a full stop, ``?`` or ``!``, bool [size]."""
        return self.marks(lambda piece: piece.endswith(STOPS))

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text without EOS, each int32 [length]."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text`` without EOS."""
        return self.encode_batch([text])[0].tolist()

    def encode_framed(self, text: str, begin: int | None, end: int | None) -> list[int]:
        """Return the ids of a prompt, preceded by ``begin`` and followed by ``end`` unless they are None.

        A published tokenizer with a template of its own (``huggingface.Fast``) uses that instead.
        """
        return [token for token in (begin, *self.encode_prompt(text), end) if token is not None]

    def framed_ids(self, ids: Sequence[int], begin: int | None, end: int | None) -> list[int]:
        """Return encoded text with special ids around it; ``begin`` and ``end`` as in ``encode_framed``."""
        return [token for token in (begin, *ids, end) if token is not None]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, in which ``[MASK]`` and ``<extra_id_k>`` are special tokens."""
        ids = self.encode_hidden(text, [self.mask] * text.count(MASK))
        return [token for token in ids if token is not None]

    def encode_hidden(self, text: str, hidden: Sequence[int | None]) -> list[int | None]:
        """Return the ids of a prompt in which occurrence k of ``[MASK]`` is replaced by ``hidden[k]``."""
        ids: list[int | None] = []
        for number, (part, name) in enumerate(self._parts(text, hidden)):
            ids += self.encode_behind(part) if number else self.encode(part)
            ids += [] if name is None else [name]
        return ids

    def _parts(self, text: str, hidden: Sequence[int | None]) -> Iterator[tuple[str, int | None]]:
        """Yield the text before each special token and its id, then the text after the last one and None."""
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
        """Return the ids of text after a special token; without a leading blank it continues a word."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` up to the first EOS, without padding and template tokens."""
        ids = list(map(int, ids))
        ids = ids[: ids.index(self.eos)] if self.eos in ids else ids
        size, silent = self.size, self._silent()
        return self._text([token for token in ids if 0 <= token < size and token not in silent])

    def _silent(self) -> tuple[int | None, ...]:
        """Return the special ids that decoding skips."""
        return (self.pad,)

    @abc.abstractmethod
    def _text(self, ids: list[int]) -> str:
        """Return the text of ``ids``, all of them in 0 to ``size`` - 1."""

    def files(self) -> Mapping[str, bytes]:
        """Return ``{name: contents}`` of the files for ``huggingface.open_vocabulary``; none for bytes."""
        return {}

    def exported(self, _begin: int | None, _end: int | None) -> Mapping[str, bytes]:
        """Return ``{name: contents}`` of tokenizer files for other programs, such as transformers.

        The template of a vocabulary trained here puts the ids ``_begin`` and ``_end`` around a text.
        """
        return self.files()

    def special_names(self, _family: Family) -> Mapping[int, str]:
        """Return the spelling of each special id for display; a published tokenizer uses its own names."""
        known = {*self.special.values(), *map(self.sentinel, range(self.num_sentinels))}
        return {token: piece for piece, token in self.ids.items() if token in known}

    def marks(self, holds: Callable[[str], bool]) -> np.ndarray:
        """Return a mask of the pieces for which ``holds`` is true, bool [size]."""
        marks = np.zeros(self.size, bool)
        marks[[token for piece, token in self.ids.items() if holds(piece)]] = True
        return marks

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without cached properties: another process reads the files again."""
        cached = functools.cached_property
        return {k: v for k, v in vars(self).items() if not isinstance(getattr(type(self), k, None), cached)}
