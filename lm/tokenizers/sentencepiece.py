"""Train and use SentencePiece and byte vocabularies, with T5's special ids and with sentinels at the top.

Id 0 is padding, 1 is EOS and 2 is the unknown token. Sentinel k is decoded as ``<extra_id_k>``, as in T5.
Where the noise uses no sentinels, the first sentinel is the mask and the second is ``[CLS]``, which begins an
encoder's input.
"""

import abc
import functools
import hashlib
import io
import itertools
import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lm.config.base import SettingError
from lm.files import write_with_checksum
from lm.tokenizers.tokenizer import BLANK, EOS, PAD, UNK, Family, Vocabulary

TRAINED_ON = 750  # text; twice as much saves under 1 % of the tokens [characters per piece]
# seed pieces per piece of the result; the trainer's default, a million in all, is slower and no better
CANDIDATES_PER_PIECE = 5
REQUIRED = string.digits + string.ascii_letters + string.punctuation  # pieces, however rare in the text
ROOM = 10  # a smaller vocabulary has no room for characters that the text lacks [pieces per required one]
LONGEST_LINE = 1_000  # the trainer drops lines of more than 4,192 bytes [characters]
PieceKind = Literal["unigram", "bpe"]  # of a SentencePiece model
Unknown = Literal["unk", "bytes"]  # how a character without a piece is encoded: as <unk> or as its bytes
# types of a piece in sentencepiece_model.proto: NORMAL and BYTE
TEXT_PIECE, BYTE_PIECE = 1, 6
MODEL = "vocabulary.model"  # file name of a saved vocabulary
TOKENIZER_CONFIG = "tokenizer_config.json"


class Own(Vocabulary):
    """Implement what the vocabularies trained here share: special ids, sentinels and export."""

    sentinels: int
    joint: ClassVar[str]  # separates texts and sentinels when decoded

    def __post_init__(self) -> None:
        if self.sentinels < 0:
            raise SettingError(f"data.sentinels={self.sentinels} should be 0 or more, such as 100")

    @property
    def num_sentinels(self) -> int:
        return self.sentinels

    @functools.cached_property
    def special(self) -> Mapping[str, int | None]:
        mask, cls = (self.size - k if self.num_sentinels >= k else None for k in (1, 2))
        return {"pad": PAD, "eos": EOS, "sep": EOS, "mask": mask, "cls": cls}

    def _text(self, ids: list[int]) -> str:
        size, parts = self.size, []
        if not ids or max(ids) < size - self.sentinels:  # most texts
            return self._plain(ids)
        for is_sentinel, run in itertools.groupby(ids, lambda token: token >= size - self.sentinels):
            tokens = [*run]
            shown = [f"<extra_id_{size - 1 - k}>" for k in tokens] if is_sentinel else [self._plain(tokens)]
            goes_on = not is_sentinel and not self.word_starts[tokens[0]]  # continues the hidden word
            parts += [("" if goes_on else self.joint) + part for part in shown if part]
        return "".join(parts).removeprefix(self.joint)

    @abc.abstractmethod
    def _plain(self, ids: list[int]) -> str:
        """Return the text of ``ids``, none of which is a sentinel."""

    def special_names(self, family: Family) -> Mapping[int, str]:
        """Return the spelling of each special id, as the tokenizers of ``family`` spell it.

        T5's sentinels and BERT's ``[MASK]`` and ``[CLS]`` share their ids here.
        """
        names = {self.size - 1 - k: f"<extra_id_{k}>" for k in range(self.num_sentinels)}
        names |= {PAD: "[PAD]", EOS: "[SEP]"} if family == "bert" else {PAD: "<pad>", EOS: "</s>"}
        marks = {} if family == "t5" else {self.mask: "[MASK]"}
        marks |= {self.cls: "[CLS]"} if family == "bert" else {}
        return names | {token: name for token, name in marks.items() if token is not None}

    @property
    def sentinel_names(self) -> list[str]:
        """Return the names of the sentinels in the order of their ids."""
        return [f"<extra_id_{k}>" for k in reversed(range(self.num_sentinels))]

    def tokenizer_files(
        self, tokenizer: tokenizers.Tokenizer, begin: int | None, end: int | None
    ) -> Mapping[str, bytes]:
        """Return ``{name: contents}`` of tokenizer.json and tokenizer_config.json for transformers.

        ``tokenizer`` has our ids; it is changed in place: special tokens are added, and a template that puts
        ``begin`` and ``end`` around a text.
        """
        order = ("pad", "eos", "unk", "mask", "cls", "sep", "bos")
        special = {**self.special, "unk": UNK, "bos": begin}
        named = {
            f"{use}_token": tokenizer.id_to_token(token)
            for use in order
            if (token := special[use]) is not None
        }
        added = dict.fromkeys([*named.values(), *self.sentinel_names])
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added])
        frame = {token: tokenizer.id_to_token(token) for token in (begin, end) if token is not None}
        before, after = ([] if token is None else [frame[token]] for token in (begin, end))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)],
            special_tokens=[(spelling, token) for token, spelling in frame.items()],
        )
        has_types = begin is not None and begin == self.cls  # else the model has no token types
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **named,
            "extra_special_tokens": self.sentinel_names[::-1],
            "model_input_names": ["input_ids", *["token_type_ids"] * has_types, "attention_mask"],
        }
        settings = json.dumps(config, indent=1).encode()
        return {"tokenizer.json": tokenizer.to_str().encode(), TOKENIZER_CONFIG: settings}


@dataclass(frozen=True)
class SentencePiece(Own):
    """Tokenize with a trained SentencePiece model; sentinels have the ids above its pieces."""

    path: Path
    sentinels: int
    joint = " "

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = [self.processor.pad_id(), self.processor.eos_id(), self.processor.unk_id()]
        if ids != [PAD, EOS, UNK]:
            raise SettingError(f"data.vocabulary={self.path} should have pad, eos, unk = 0, 1, 2, not {ids}")

    @functools.cached_property
    def processor(self) -> sentencepiece.SentencePieceProcessor:
        return read_sentencepiece(Path(self.path))

    @property
    def size(self) -> int:
        return self.processor.get_piece_size() + self.num_sentinels

    @functools.cached_property
    def ids(self) -> Mapping[str, int]:
        return {self.processor.id_to_piece(token): token for token in range(self.processor.get_piece_size())}

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self.marks(lambda piece: piece.startswith(BLANK))

    @functools.cached_property
    def fingerprint(self) -> str:
        model = self.processor.serialized_model_proto()
        return hashlib.sha256(model + b"%d" % self.num_sentinels).hexdigest()

    def encode(self, text: str) -> list[int]:  # for one text, faster than with threads
        return self.processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids, np.int32) for ids in self.processor.encode(list(texts), num_threads=1)]

    def encode_behind(self, text: str) -> list[int]:
        return self.encode(text) if text[:1].isspace() else self._within_words.encode(text)

    @functools.cached_property
    def _within_words(self) -> sentencepiece.SentencePieceProcessor:
        """Return the same model without the dummy prefix, so that text may begin within a word."""
        model = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        model.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def _plain(self, ids: list[int]) -> str:
        return self.processor.decode(ids)

    def files(self) -> Mapping[str, bytes]:
        return {MODEL: Path(self.path).read_bytes()}

    def exported(self, begin: int | None, end: int | None) -> Mapping[str, bytes]:
        """Return tokenizer.json with the same ids, its settings, and the model file, to be read here."""
        model = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        pieces = [(piece.piece, piece.score) for piece in model.pieces]
        pieces += [(name, 0.0) for name in self.sentinel_names]
        has_bytes = any(piece.type == BYTE_PIECE for piece in model.pieces)
        table: models.Model = models.Unigram(pieces, unk_id=UNK, byte_fallback=has_bytes)
        if model.trainer_spec.model_type == model.trainer_spec.BPE:
            ids, unk = {piece: token for token, (piece, _) in enumerate(pieces)}, pieces[UNK][0]
            table = models.BPE(ids, _merges(model), unk_token=unk, fuse_unk=True, byte_fallback=has_bytes)
        tokenizer = tokenizers.Tokenizer(table)
        # Blanks as in sentencepiece: stripped at the ends, one between words, then one before the text.
        steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if charsmap := model.normalizer_spec.precompiled_charsmap:
            steps.insert(0, normalizers.Precompiled(charsmap))
        tokenizer.normalizer = normalizers.Sequence(steps)
        words = pre_tokenizers.Metaspace(prepend_scheme="always")
        # A text that spells the name of a byte's piece must not become that byte.
        names = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, names]) if has_bytes else words
        joined = decoders.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), joined]) if has_bytes else joined
        return {**self.tokenizer_files(tokenizer, begin, end), **self.files()}


@dataclass(frozen=True)
class Bytes(Own):
    """Tokenize text as UTF-8 bytes: byte b has the id b + 3."""

    sentinels: int
    joint = ""
    blanks_are_tokens = True
    unk = None

    @functools.cached_property
    def ids(self) -> Mapping[str, int]:
        return {chr(byte): byte + UNK + 1 for byte in range(256)}

    @property
    def size(self) -> int:
        return UNK + 1 + len(self.ids) + self.num_sentinels

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self.marks(lambda byte: byte in " \n\t")  # a blank begins the word after it

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes %d" % self.num_sentinels).hexdigest()

    def encode(self, text: str) -> list[int]:  # for one text, faster than through numpy
        return [byte + UNK + 1 for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + UNK + 1 for text in texts]

    def _plain(self, ids: list[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8, EOS and the unknown token are dropped."""
        return bytes(token - UNK - 1 for token in ids if token > UNK).decode(errors="ignore")


def read_sentencepiece(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Return the SentencePiece model in a file; raise SettingError if it is damaged or of another format."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        for token in range(processor.get_piece_size()):
            processor.id_to_piece(token)  # fails where damage left a piece that is not text
        processor.encode("")  # fails where there is no model at all
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingError(f"vocabulary {path} cannot be read as a SentencePiece model: {error}") from error
    return processor


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return the merges of a BPE model: the pairs that form each piece, in descending order of its score."""
    ranked = sorted(
        (piece for piece in model.pieces if piece.type == TEXT_PIECE), key=lambda piece: -piece.score
    )
    known = {piece.piece for piece in ranked}
    texts = [piece.piece for piece in ranked]
    splits = ((text[:cut], text[cut:]) for text in texts for cut in range(1, len(text)))
    return [pair for pair in splits if known.issuperset(pair)]


def train_sentencepiece(
    texts: Iterable[str], size: int, path: Path, unknown: Unknown = "unk", kind: PieceKind = "unigram"
) -> Path:
    """Train a SentencePiece model of ``size`` pieces, write it to ``path`` and return ``path``.

    It is trained on the first of ``texts``, deterministically, and written with a checksum. As in T5,
    normalisation is nmt_nfkc and unknown characters have id 2; 94 required characters cover all of ASCII.
    With ``unknown="bytes"`` (byte fallback) 256 of the pieces are bytes, so that any other character can be
    encoded and decoded, and id 2 never occurs. SettingError if ``size`` does not suit the text.
    """
    model, bytes_ = io.BytesIO(), 256 if unknown == "bytes" else 0
    settings: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": size,
        "num_threads": 1,
        "minloglevel": 2,
    }
    settings |= {"pad_id": PAD, "eos_id": EOS, "unk_id": UNK, "bos_id": -1}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sampled_lines(texts, size * TRAINED_ON),
            model_writer=model,
            required_chars=REQUIRED if size - bytes_ >= ROOM * len(REQUIRED) else "",
            byte_fallback=bytes_ > 0,
            seed_sentencepiece_size=max(size * CANDIDATES_PER_PIECE, 10_000),
            **settings,
        )
    except RuntimeError as error:
        # the trainer's message without the line of its source; for an empty text it is empty
        reason = str(error).rpartition("] ")[2].strip() or "there is none"
        raise SettingError(f"data.vocabulary_size={size} does not suit the text: {reason}") from error
    write_with_checksum(Path(path), model.getvalue())
    return Path(path)


def sampled_lines(texts: Iterable[str], count: int) -> Iterator[str]:
    """Yield the lines of the first texts, at most ``count`` characters in all; long lines are split."""
    for text in texts:
        for line in text[:count].splitlines():
            yield from (line[start : start + LONGEST_LINE] for start in range(0, len(line), LONGEST_LINE))
        count -= len(text)
        if count <= 0:
            return
