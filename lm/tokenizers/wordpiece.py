"""Train and use WordPiece vocabularies [Schuster and Nakajima 2012]: X begins a word, ##X continues one.

Each word is split greedily into the longest pieces from left to right, as in BERT. A word is everything
between two blanks, punctuation included (BERT's tokenizer also splits at punctuation), so that decoding
gives the text back. A word with a character that the vocabulary lacks becomes one [UNK].
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
from lm.tokenizers.sentencepiece import REQUIRED, ROOM, TRAINED_ON, Own, sampled_lines
from lm.tokenizers.tokenizer import UNK

PIECES = "wordpieces.txt"  # file name of a saved vocabulary: a piece per line, in the order of ids
CONTINUES = "##"
SPECIAL = ("[PAD]", "</s>", "[UNK]")  # ids 0, 1, 2
COVERED = 0.9995  # share of a text's characters, the most frequent, that get pieces; as in SentencePiece
LONGEST_WORD = 100  # a longer one is [UNK], as in BERT [characters]


@dataclass(frozen=True)
class WordPiece(Own):
    """Tokenize with a file of word pieces; sentinels have the ids above them."""

    path: Path
    sentinels: int
    joint = " "

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """Return the pieces in the order of their ids, special ones first.

        SettingError if the file is damaged or of another format.
        """
        try:
            pieces = tuple(self.path.read_bytes().decode().removesuffix("\n").split("\n"))
        except (OSError, ValueError) as error:
            raise SettingError(f"vocabulary {self.path} cannot be read as word pieces: {error}") from error
        if pieces[: len(SPECIAL)] != SPECIAL or len({*pieces}) < len(pieces) or not all(pieces):
            expected = f"a different piece in each line, from {', '.join(SPECIAL)} on"
            raise SettingError(f"vocabulary {self.path} should have {expected}")
        return pieces

    @functools.cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        # without [PAD] and </s>: a text that spells them must not become special tokens
        return _tokenizer(self.ids)

    @property
    def size(self) -> int:
        return len(self.pieces) + self.num_sentinels

    @functools.cached_property
    def ids(self) -> Mapping[str, int]:
        return {piece: token for token, piece in enumerate(self.pieces) if token >= UNK}

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self.marks(lambda piece: not piece.startswith(CONTINUES))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join([*self.pieces, f"{self.num_sentinels}"]).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_behind(self, text: str) -> list[int]:
        if text[:1].isspace() or not text:
            return self.encode(text)
        word, blank, rest = self.tokenizer.normalizer.normalize_str(text).partition(" ")
        return self._continued(word) + self.encode(blank + rest)

    def _continued(self, word: str) -> list[int]:
        """Return the ids of text that continues a word, split greedily into the longest ##pieces."""
        ids, begin = list[int](), 0
        while begin < len(word):
            ends = range(len(word), begin, -1)
            found = ((self.ids.get(CONTINUES + word[begin:end]), end) for end in ends)
            token, begin = next(((x, end) for x, end in found if x is not None), (UNK, len(word)))
            ids = [*ids, token] if token != UNK else [UNK]
        return ids

    def _plain(self, ids: list[int]) -> str:
        text = " ".join(self.pieces[token] for token in ids)
        return re.sub(f"(^| ){CONTINUES}", "", text)

    def files(self) -> Mapping[str, bytes]:
        return {PIECES: Path(self.path).read_bytes()}

    def exported(self, begin: int | None, end: int | None) -> Mapping[str, bytes]:
        """Return tokenizer.json with the same ids, its settings, and the file of pieces, to be read here."""
        ids = {piece: token for token, piece in enumerate([*self.pieces, *self.sentinel_names])}
        return {**self.tokenizer_files(_tokenizer(ids), begin, end), **self.files()}


def _tokenizer(ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    """Return a ``tokenizers`` tokenizer that splits words greedily into the pieces in ``ids``."""
    model = models.WordPiece(
        dict(ids),
        unk_token=SPECIAL[UNK],
        continuing_subword_prefix=CONTINUES,
        max_input_chars_per_word=LONGEST_WORD,
    )
    tokenizer = tokenizers.Tokenizer(model)
    clean = normalizers.BertNormalizer(handle_chinese_chars=False, strip_accents=False, lowercase=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), clean])  # clean: no control characters
    # A word must not begin with the prefix ##, which continues one: each # of several in a row is a word.
    marks = pre_tokenizers.Split(Regex("(?<=#)#|#(?=#)"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    tokenizer.decoder = decoders.WordPiece(CONTINUES, cleanup=False)
    return tokenizer


def train_wordpieces(texts: Iterable[str], size: int, path: Path) -> Path:
    """Train ``size`` word pieces on the first of ``texts``, write them to ``path`` and return ``path``.

    Training is deterministic, and the file has a checksum. The most frequent pair of adjacent pieces is
    merged first, as in BPE. Each character is a piece with and without ##, so that every word of known
    characters can be encoded; those of ASCII are known whatever the text, where ``size`` leaves room.
    SettingError if ``size`` does not suit the text.
    """
    tokenizer = _tokenizer({SPECIAL[UNK]: UNK})
    lines = [tokenizer.normalizer.normalize_str(line) for line in sampled_lines(texts, size * TRAINED_ON)]
    characters = _alphabet(lines, REQUIRED if size >= ROOM * 2 * len(REQUIRED) else "")
    known = {*characters}
    lines = [" ".join(filter(known.issuperset, line.split())) for line in lines]
    # All pieces of one character are given, in order: the trainer would assign their ids, by which it breaks
    # ties between equally frequent pairs, in a different order in every process.
    first = [*SPECIAL, *characters, *(CONTINUES + character for character in characters)]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    ids = tokenizer.get_vocab()
    if len(ids) != size or not characters:
        room = f"its {len(characters)} characters take {len(first)} pieces, and it has {len(ids)} in all"
        reason = room if characters else "there is none"
        raise SettingError(f"data.vocabulary_size={size} does not suit the text: {reason}")
    write_with_checksum(
        Path(path), "".join(f"{piece}\n" for piece in sorted(ids, key=ids.__getitem__)).encode()
    )
    return Path(path)


def _alphabet(lines: Iterable[str], required: str) -> list[str]:
    """Return the characters, sorted, that cover a share COVERED of the text, and those in ``required``."""
    counts = Counter(required)
    for line in lines:
        counts.update(line)
    counts.pop(" ", None)
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    before = np.cumsum([0, *(counts[character] for character in ranked)])[:-1]
    frequent = [c for c, covered in zip(ranked, before, strict=True) if covered < COVERED * counts.total()]
    return sorted({*frequent, *required})
