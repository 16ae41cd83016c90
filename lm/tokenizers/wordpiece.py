"""WordPiece tokenizers [Schuster and Nakajima 2012]: X begins a word, ##X continues one.

Each word is split greedily into the longest pieces from left to right, as in BERT. A word is everything
between two spaces, punctuation included (BERT's tokenizer also splits at punctuation). So decoding gives the
text back, normalised by NFKC, except that each ``#`` of several in a row comes back as a word. A word of more
than MAX_WORD_LENGTH characters, or with a character that the vocabulary lacks, becomes one [UNK].

A text that spells a special token, such as ``[UNK]``, is split like any other. The spellings are in an
exported vocabulary: there transformers reads the special token, even with ``split_special_tokens=True``.
"""

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lm.config.base import SettingError
from lm.files import write_with_checksum
from lm.tokenizers.sentencepiece import (
    MIN_PIECES_PER_REQUIRED_CHARACTER,
    REQUIRED_CHARACTERS,
    TRAINING_CHARACTERS_PER_TOKEN,
    TrainedTokenizer,
    first_lines,
)
from lm.tokenizers.tokenizer import UNK

VOCAB_FILE = "wordpieces.txt"  # file name of a saved vocabulary: one token per line, in the order of ids
CONTINUATION_PREFIX = "##"
SPECIAL_TOKENS = ("[PAD]", "</s>", "[UNK]")  # ids 0, 1, 2
NO_WORD = " "  # no word is spelled so, since words are what stands between spaces
# share of the text that the characters with tokens make up; as in SentencePiece
CHARACTER_COVERAGE = 0.9995
MAX_WORD_LENGTH = 100  # as in BERT [characters]


@dataclass(frozen=True)
class WordPieceTokenizer(TrainedTokenizer):
    """Tokenize with a file of tokens, X or ##X; sentinels have the ids above them."""

    path: Path
    sentinels: int
    separator = " "

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens in the order of their ids, special ones first.

        SettingError if the file is damaged or of another format.
        """
        try:
            tokens = tuple(self.path.read_bytes().decode().removesuffix("\n").split("\n"))
        except (OSError, ValueError) as error:
            raise SettingError(f"vocabulary {self.path} cannot be read as word pieces: {error}") from error
        has_special_tokens = tokens[: len(SPECIAL_TOKENS)] == SPECIAL_TOKENS
        if not has_special_tokens or len({*tokens}) < len(tokens) or "" in tokens:
            expected = f"a different piece in each line, from {', '.join(SPECIAL_TOKENS)} on"
            raise SettingError(f"vocabulary {self.path} should have {expected}")
        return tokens

    @functools.cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """Return the tokenizer of the package ``tokenizers`` that encodes text as data.

        It has no token that a text could spell and that is special: [PAD] and </s> are left out, and the
        unknown token has a name that no word has.
        """
        regular = {token: token_id for token, token_id in self.vocab.items() if token_id > UNK}
        return _make_backend({NO_WORD: UNK} | regular, unknown=NO_WORD)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens) + self.num_sentinels

    @functools.cached_property
    def vocab(self) -> Mapping[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens) if token_id >= UNK}

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self.token_mask(lambda token: not token.startswith(CONTINUATION_PREFIX))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join([*self.tokens, f"{self.num_sentinels}"]).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_continuation(self, text: str) -> list[int]:
        if text[:1].isspace() or not text:
            return self.encode(text)
        word, space, rest = self.backend.normalizer.normalize_str(text).partition(" ")
        return self._encode_rest_of_word(word) + self.encode(space + rest)

    def _encode_rest_of_word(self, word: str) -> list[int]:
        """Return the ids of text that continues a word, split greedily into the longest ##X; else [UNK]."""
        if len(word) > MAX_WORD_LENGTH:
            return [UNK]
        ids, start = list[int](), 0
        while start < len(word):
            for end in range(len(word), start, -1):
                token_id = self.vocab.get(CONTINUATION_PREFIX + word[start:end])
                if token_id is not None:
                    break
            else:
                return [UNK]
            ids.append(token_id)
            start = end
        return ids

    def _decode_regular(self, ids: list[int]) -> str:
        text = " ".join(self.tokens[token] for token in ids)
        return re.sub(f"(^| ){CONTINUATION_PREFIX}", "", text)

    def files(self) -> Mapping[str, bytes]:
        return {VOCAB_FILE: self.path.read_bytes()}

    def make_backend(self) -> tokenizers.Tokenizer:
        vocab = {token: token_id for token_id, token in enumerate([*self.tokens, *self.sentinel_names])}
        return _make_backend(vocab)


def _make_backend(vocab: Mapping[str, int], *, unknown: str = SPECIAL_TOKENS[UNK]) -> tokenizers.Tokenizer:
    """Return a tokenizer of the package ``tokenizers`` that splits words greedily into ``vocab``.

    ``unknown`` is the token in ``vocab`` of words that cannot be split so. A word that is spelled like it
    becomes it too.
    """
    model = models.WordPiece(
        dict(vocab),
        unk_token=unknown,
        continuing_subword_prefix=CONTINUATION_PREFIX,
        max_input_chars_per_word=MAX_WORD_LENGTH,
    )
    backend = tokenizers.Tokenizer(model)
    # BertNormalizer is left to remove control characters.
    bert = normalizers.BertNormalizer(handle_chinese_chars=False, strip_accents=False, lowercase=False)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), bert])
    # A word must not begin with the prefix ##, which continues one: each # of several in a row is a word.
    hashes = pre_tokenizers.Split(Regex("(?<=#)#|#(?=#)"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), hashes])
    backend.decoder = decoders.WordPiece(CONTINUATION_PREFIX, cleanup=False)
    return backend


def train_wordpiece(texts: Iterable[str], size: int, path: Path) -> Path:
    """Train a WordPiece vocabulary of ``size`` tokens, write it to ``path`` and return ``path``.

    It is trained on the first of ``texts``, deterministically, and written with a checksum. The most frequent
    pair of adjacent tokens is merged first, as in BPE. Each character is a token with and without ##, so that
    every word of known characters can be encoded; those of ASCII are known whatever the text, where ``size``
    leaves room. SettingError if ``size`` does not suit the text.
    """
    backend = _make_backend({SPECIAL_TOKENS[UNK]: UNK})
    sample = first_lines(texts, size * TRAINING_CHARACTERS_PER_TOKEN)
    texts = [backend.normalizer.normalize_str(line) for line in sample]
    # each required character takes two tokens
    has_room = size >= MIN_PIECES_PER_REQUIRED_CHARACTER * 2 * len(REQUIRED_CHARACTERS)
    characters = _alphabet(texts, REQUIRED_CHARACTERS if has_room else "")
    known = {*characters}
    texts = [" ".join(filter(known.issuperset, text.split())) for text in texts]
    # All tokens of one character are given, in order: the trainer would assign their ids, by which it breaks
    # ties between equally frequent pairs, in a different order in every process.
    given = [*SPECIAL_TOKENS, *characters, *(CONTINUATION_PREFIX + character for character in characters)]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=given, show_progress=False)
    backend.train_from_iterator(texts, trainer, length=len(texts))
    vocab = backend.get_vocab()
    if not characters:
        raise SettingError(f"data.vocabulary_size={size} does not suit the text: there is none")
    if len(vocab) != size:
        counts = f"its {len(characters)} characters take {len(given)} pieces, and it has {len(vocab)} in all"
        raise SettingError(f"data.vocabulary_size={size} does not suit the text: {counts}")
    lines = [f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)]
    write_with_checksum(path, "".join(lines).encode())
    return path


def _alphabet(lines: Iterable[str], required: str) -> list[str]:
    """Return ``required`` and the most frequent characters that cover CHARACTER_COVERAGE, sorted."""
    counts = Counter(required)
    for line in lines:
        counts.update(line)
    counts.pop(" ", None)
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet, covered = {*required}, 0
    for character in ranked:
        if covered >= CHARACTER_COVERAGE * counts.total():
            break
        alphabet.add(character)
        covered += counts[character]
    return sorted(alphabet)
