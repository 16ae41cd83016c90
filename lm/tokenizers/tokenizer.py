"""Convert text to token ids and back: the interface that all tokenizers share.

A tokenizer is trained here (``sentencepiece``, ``wordpiece``) or published with a model (``huggingface``).

Text is data or a prompt. In data, such as a corpus or the rows of a task, there are no special tokens: where
data spell one, such as ``</s>``, the spelling is encoded as ordinary text. A prompt may name the tokens that
stand for hidden text, ``[MASK]`` and ``<extra_id_0>``, but neither EOS nor padding.
"""

import abc
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from lm.config.base import SettingError

PAD, EOS, UNK = 0, 1, 2  # ids of the tokenizers trained here, as in T5
MASK = "[MASK]"  # how a user writes the mask, however the tokenizer spells it
CLS = "[CLS]"  # how the first token of an encoder's row is shown
METASPACE = "\u2581"  # how SentencePiece writes the space before a word
# the algorithms that can be trained here: unigram language model [Kudo 2018], byte-pair encoding [Sennrich et
# al. 2016], and WordPiece, whose ##X continues a word [Schuster and Nakajima 2012]
TokenizerAlgorithm = Literal["unigram", "bpe", "wordpiece"]
# how one or two texts are joined for a head: each ends with EOS or SEP, or START text DELIM text EXTRACT
Layout = Literal["ended", "start-delim-extract"]
# whose spelling the special tokens get: BERT's for encoders; with a decoder T5's sentinels or BART's masks
SpecialTokenStyle = Literal["bert", "t5", "bart"]
TOKENIZER_ALGORITHMS: tuple[TokenizerAlgorithm, ...] = get_args(TokenizerAlgorithm)
SENTENCE_ENDINGS = (".", "?", "!")
# the special tokens that a prompt may name
PROMPT_TOKEN = re.compile(r"\[MASK\]|<extra_id_(0|[1-9][0-9]{0,8})>")


def check_unicode(prompt: str) -> None:
    """Raise SettingError for half a character, as a command line in another encoding than UTF-8 has."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise SettingError(
            f"the prompt has {prompt[error.start]!r} as character {error.start + 1}, which is half a "
            "character: give the text in UTF-8"
        ) from error


class BoundaryTokens(NamedTuple):
    """Hold the special ids around inputs and targets: EOS, decoder start, prefix. The defaults are T5's."""

    eos: int = EOS  # ends inputs and targets
    decoder_start: int = PAD  # the first token that the decoder reads
    prefix: tuple[int, ...] = ()  # begins the inputs and the targets of an encoder-decoder


T5_BOUNDARY_TOKENS = BoundaryTokens()


class SpecialTokenTemplate(NamedTuple):
    """Hold the special ids that a published tokenizer puts around one text or a pair of texts."""

    prefix: tuple[int, ...]
    separator: tuple[int, ...]  # between the texts of a pair
    suffix: tuple[int, ...]
    second_token_type: int  # token type of the second text
    # token type of the last special token, if other than that of the text before it (XLNet)
    last_token_type: int | None = None


class Tokenizer(abc.ABC):
    """Convert text to token ids and back; sentinel k has the id ``vocab_size - 1 - k``."""

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
    # lowest id of the random tokens by which BERT replaces some of the masked ones
    first_regular_id = UNK + 1
    spaces_are_tokens = False  # otherwise the space before a word is part of the word's first token

    @property
    @abc.abstractmethod
    def vocab(self) -> Mapping[str, int]:
        """Return the id of every token.

        Of tokenizers trained here it leaves out the sentinels, and of bytes all special tokens.
        """

    @property
    @abc.abstractmethod
    def special(self) -> Mapping[str, int | None]:
        """Return ``{name: id}`` of pad, eos, mask, cls and sep; None where there is no such token."""

    @property
    def template(self) -> SpecialTokenTemplate | None:
        """Return the special tokens that a published tokenizer puts around text; None if trained here."""
        return None

    @property
    def unk(self) -> int | None:
        """Return the id of the unknown token, or None if the tokens can spell any text."""
        return UNK

    @property
    @abc.abstractmethod
    def num_sentinels(self) -> int:
        """Return the number of sentinels, the highest ids, which stand for hidden spans."""

    def sentinel(self, number: int) -> int | None:
        """Return the id of sentinel ``number``, or None if there are fewer."""
        return self.vocab_size - 1 - number if number < self.num_sentinels else None

    @property
    def unusable_sentinels(self) -> str:
        """Return why the tokens ``<extra_id_k>`` cannot serve as sentinels; "" if they can, or are none."""
        return ""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Return the number of ids, sentinels included; the embedding has at least as many rows."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Return a SHA-256 digest that is equal only for tokenizers that encode text identically."""

    @property
    @abc.abstractmethod
    def word_starts(self) -> np.ndarray:
        """Return which tokens begin a word, bool [vocab_size]."""

    @functools.cached_property
    def sentence_ends(self) -> np.ndarray:
        """Return which tokens end with a full stop, ``?`` or ``!``, bool [vocab_size]."""
        return self.token_mask(lambda token: token.endswith(SENTENCE_ENDINGS))

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text as data, without special tokens; each int32 [length]."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as data, without special tokens."""
        return self.encode_batch([text])[0].tolist()

    def encode_with_special_tokens(self, text: str, begin: int | None, end: int | None) -> list[int]:
        """Return the ids of a prompt, preceded by ``begin`` and followed by ``end`` unless they are None.

        A published tokenizer with a template of its own (``HFTokenizer``) uses that instead.
        """
        return [token for token in (begin, *self.encode_prompt(text), end) if token is not None]

    def add_special_tokens(self, ids: Sequence[int], begin: int | None, end: int | None) -> list[int]:
        """Return encoded text with the same special ids around it as ``encode_with_special_tokens``."""
        return [token for token in (begin, *ids, end) if token is not None]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, in which ``[MASK]`` and ``<extra_id_k>`` are special tokens.

        A tokenizer without a mask leaves ``[MASK]`` out (``HFTokenizer`` encodes it as text); an
        ``<extra_id_k>`` that it lacks is encoded as text.
        """
        return self.encode_replacing_masks(text, [self.mask] * text.count(MASK))

    def encode_replacing_masks(self, text: str, replacements: Sequence[int | None]) -> list[int]:
        """Return the ids of a prompt in which ``replacements[k]`` stands for the k-th ``[MASK]``.

        A ``[MASK]`` whose replacement is None is left out. SettingError for a prompt with half a character.
        """
        check_unicode(text)
        ids: list[int] = []
        position, remaining = 0, iter(replacements)
        for match in PROMPT_TOKEN.finditer(text):
            number = match[1]  # of the sentinel; None for [MASK]
            if number is not None and int(number) >= self.num_sentinels:
                continue  # there is no such sentinel: its name is encoded as text
            before = text[position : match.start()]
            if not self.spaces_are_tokens:
                before = before.rstrip()
            ids += self.encode_continuation(before) if position else self.encode(before)
            token = next(remaining) if number is None else self.sentinel(int(number))
            if token is not None:
                ids.append(token)
            position = match.end()
        rest = text[position:]
        if not position:
            return self.encode(rest)
        if rest.strip() or self.spaces_are_tokens:
            ids += self.encode_continuation(rest)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Return the ids of text after a special token; without a leading space it continues a word."""
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids`` up to the first EOS, without the special ids that this tokenizer skips.

        These are padding and, for tokenizers of published models, [CLS] and [SEP] too.
        """
        ids = list(map(int, ids))
        ids = ids[: ids.index(self.eos)] if self.eos in ids else ids
        size, skipped = self.vocab_size, self._skipped_ids()
        return self._decode_ids([token for token in ids if 0 <= token < size and token not in skipped])

    def _skipped_ids(self) -> tuple[int | None, ...]:
        """Return the special ids that decoding skips."""
        return (self.pad,)

    @abc.abstractmethod
    def _decode_ids(self, ids: list[int]) -> str:
        """Return the text of ``ids``, all of them in 0 to ``vocab_size`` - 1."""

    def files(self) -> Mapping[str, bytes]:
        """Return ``{name: contents}`` of the files that ``load_tokenizer`` reads; none for bytes."""
        return {}

    def export_files(self, _begin: int | None, _end: int | None) -> Mapping[str, bytes]:
        """Return ``{name: contents}`` of tokenizer files for other programs, such as transformers.

        The files of a tokenizer trained here have a template that puts ``_begin`` and ``_end`` around a text.
        """
        return self.files()

    @abc.abstractmethod
    def export_files_with(self, template: SpecialTokenTemplate) -> Mapping[str, bytes]:
        """Return the files of ``export_files`` with a template that puts these special tokens around texts.

        SettingError if the files of this tokenizer cannot hold a template.
        """

    def special_token_names(self, _style: SpecialTokenStyle) -> Mapping[int, str]:
        """Return the spelling of each special id for display; a published tokenizer uses its own."""
        special = {*self.special.values(), *map(self.sentinel, range(self.num_sentinels))}
        return {token_id: token for token, token_id in self.vocab.items() if token_id in special}

    def token_mask(self, predicate: Callable[[str], bool]) -> np.ndarray:
        """Return for which tokens of ``vocab`` the predicate is true, bool [vocab_size]."""
        mask = np.zeros(self.vocab_size, bool)
        mask[[token_id for token, token_id in self.vocab.items() if predicate(token)]] = True
        return mask

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without cached properties: another process reads the files again."""
        cached = functools.cached_property
        return {k: v for k, v in vars(self).items() if not isinstance(getattr(type(self), k, None), cached)}
