"""SentencePiece and byte tokenizers, with T5's special ids, and with sentinels as the highest ids.

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
from lm.tokenizers.tokenizer import (
    EOS,
    METASPACE,
    PAD,
    UNK,
    SpecialTokenStyle,
    SpecialTokenTemplate,
    Tokenizer,
)

# text to train on; twice as much saves under 1 % of the tokens [characters per token of the vocabulary]
TRAINING_CHARACTERS_PER_TOKEN = 750
# the trainer's default, a million seed pieces in all, is slower and no better
SEED_PIECES_PER_PIECE = 5
# become pieces, however rare they are in the text
REQUIRED_CHARACTERS = string.digits + string.ascii_letters + string.punctuation
# a smaller vocabulary has no room for required characters that the text lacks
MIN_PIECES_PER_REQUIRED_CHARACTER = 10
MAX_LINE_LENGTH = 1_000  # the trainer drops lines of more than 4,192 bytes [characters]
SentencePieceAlgorithm = Literal["unigram", "bpe"]
# how a character without a piece is encoded: as <unk> or as its bytes
UnknownCharacters = Literal["unk", "bytes"]
# types of pieces in sentencepiece_model.proto
NORMAL_PIECE, BYTE_PIECE = 1, 6
MODEL_FILE = "vocabulary.model"  # file name of a saved vocabulary
TOKENIZER_CONFIG = "tokenizer_config.json"


class TrainedTokenizer(Tokenizer):
    """The base of tokenizers trained here: special ids, sentinels and export."""

    sentinels: int
    separator: ClassVar[str]  # between text and sentinels when decoded

    def __post_init__(self) -> None:
        if self.sentinels < 0:
            raise SettingError(f"data.sentinels={self.sentinels} should be 0 or more, such as 100")

    @property
    def num_sentinels(self) -> int:
        return self.sentinels

    @functools.cached_property
    def special(self) -> Mapping[str, int | None]:
        mask, cls = (self.vocab_size - k if self.num_sentinels >= k else None for k in (1, 2))
        return {"pad": PAD, "eos": EOS, "sep": EOS, "mask": mask, "cls": cls}

    def _decode_ids(self, ids: list[int]) -> str:
        first_sentinel = self.vocab_size - self.sentinels
        if not ids or max(ids) < first_sentinel:  # most texts
            return self._decode_regular(ids)
        text = ""
        for is_sentinel, run in itertools.groupby(ids, lambda token: token >= first_sentinel):
            tokens = [*run]
            if is_sentinel:
                for token in tokens:
                    text += f"{self.separator}<extra_id_{self.vocab_size - 1 - token}>"
            elif regular := self._decode_regular(tokens):
                if self.word_starts[tokens[0]]:  # else the sentinel hides the beginning of this word
                    text += self.separator
                text += regular
        return text.removeprefix(self.separator)

    @abc.abstractmethod
    def _decode_regular(self, ids: list[int]) -> str:
        """Return the text of ``ids``, none of which is a sentinel."""

    def special_token_names(self, style: SpecialTokenStyle) -> Mapping[int, str]:
        """Return the spelling of each special id in the style of BERT, T5 or BART.

        T5's sentinels and BERT's ``[MASK]`` and ``[CLS]`` share their ids here.
        """
        names = {self.vocab_size - 1 - k: f"<extra_id_{k}>" for k in range(self.num_sentinels)}
        names |= {PAD: "[PAD]", EOS: "[SEP]"} if style == "bert" else {PAD: "<pad>", EOS: "</s>"}
        if style != "t5" and self.mask is not None:
            names[self.mask] = "[MASK]"
        if style == "bert" and self.cls is not None:
            names[self.cls] = "[CLS]"
        return names

    @property
    def sentinel_names(self) -> list[str]:
        """Return the names of the sentinels in the order of their ids."""
        return [f"<extra_id_{k}>" for k in reversed(range(self.num_sentinels))]

    def export_files(self, begin: int | None, end: int | None) -> Mapping[str, bytes]:
        ends = () if end is None else (end,)
        prefix = () if begin is None else (begin,)
        return self.export_files_with(SpecialTokenTemplate(prefix, ends, ends, second_token_type=1))

    def export_files_with(self, template: SpecialTokenTemplate) -> Mapping[str, bytes]:
        """Return tokenizer.json with the same ids, tokenizer_config.json and the tokenizer's own file."""
        backend = self.make_backend()
        return {**self.huggingface_files(backend, template), **self.files()}

    @abc.abstractmethod
    def make_backend(self) -> tokenizers.Tokenizer:
        """Return a tokenizer of the package ``tokenizers`` with the same ids, without special tokens."""

    def huggingface_files(
        self, backend: tokenizers.Tokenizer, template: SpecialTokenTemplate
    ) -> Mapping[str, bytes]:
        """Return ``{name: contents}`` of tokenizer.json and tokenizer_config.json for transformers.

        ``backend`` has our ids; it is changed in place: special tokens are added, and the template.
        """
        begin = template.prefix[0] if template.prefix else None
        special = {**self.special, "unk": UNK, "bos": begin}
        named = {}
        for role in ("pad", "eos", "unk", "mask", "cls", "sep", "bos"):
            token_id = special[role]
            if token_id is not None:
                named[f"{role}_token"] = backend.id_to_token(token_id)
        added = dict.fromkeys([*named.values(), *self.sentinel_names])
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in added])
        backend.post_processor = template_processing(backend, template)
        inputs = ["input_ids", "attention_mask"]
        if begin is not None and begin == self.cls:
            inputs.insert(1, "token_type_ids")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **named,
            "extra_special_tokens": self.sentinel_names[::-1],
            "model_input_names": inputs,
        }
        settings = json.dumps(config, indent=1).encode()
        return {"tokenizer.json": backend.to_str().encode(), TOKENIZER_CONFIG: settings}


@dataclass(frozen=True)
class SentencePieceTokenizer(TrainedTokenizer):
    """Tokenize with a trained SentencePiece model; sentinels have the ids above its pieces."""

    path: Path
    sentinels: int
    separator = " "

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = [self.processor.pad_id(), self.processor.eos_id(), self.processor.unk_id()]
        if ids != [PAD, EOS, UNK]:
            raise SettingError(f"data.vocabulary={self.path} should have pad, eos, unk = 0, 1, 2, not {ids}")

    @functools.cached_property
    def processor(self) -> sentencepiece.SentencePieceProcessor:
        return read_sentencepiece(self.path)

    @property
    def vocab_size(self) -> int:
        return self.processor.get_piece_size() + self.num_sentinels

    @functools.cached_property
    def vocab(self) -> Mapping[str, int]:
        return {self.processor.id_to_piece(token): token for token in range(self.processor.get_piece_size())}

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self.token_mask(lambda piece: piece.startswith(METASPACE))

    @functools.cached_property
    def fingerprint(self) -> str:
        model = self.processor.serialized_model_proto()
        return hashlib.sha256(model + b"%d" % self.num_sentinels).hexdigest()

    def encode(self, text: str) -> list[int]:  # for one text, faster than with threads
        return self.processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids, np.int32) for ids in self.processor.encode(list(texts), num_threads=1)]

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text) if text[:1].isspace() else self._processor_without_dummy_prefix.encode(text)

    @functools.cached_property
    def _processor_without_dummy_prefix(self) -> sentencepiece.SentencePieceProcessor:
        """Return the same model without the dummy prefix, so that text may begin within a word."""
        model = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        model.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def _decode_regular(self, ids: list[int]) -> str:
        return self.processor.decode(ids)

    def files(self) -> Mapping[str, bytes]:
        return {MODEL_FILE: self.path.read_bytes()}

    def make_backend(self) -> tokenizers.Tokenizer:
        proto = sentencepiece_model_pb2.ModelProto.FromString(self.processor.serialized_model_proto())
        has_bytes = any(piece.type == BYTE_PIECE for piece in proto.pieces)
        backend = tokenizers.Tokenizer(self._backend_model(proto, has_bytes))
        # Spaces as in sentencepiece: stripped at the ends, one between words, then one before the text.
        steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
        if charsmap := proto.normalizer_spec.precompiled_charsmap:
            steps.insert(0, normalizers.Precompiled(charsmap))
        backend.normalizer = normalizers.Sequence(steps)
        words = pre_tokenizers.Metaspace(prepend_scheme="always")
        spaces = decoders.Metaspace(prepend_scheme="always")
        if has_bytes:
            # A text that spells the name of a byte's piece must not become that byte.
            byte_names = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
            backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_names])
            backend.decoder = decoders.Sequence([decoders.ByteFallback(), spaces])
        else:
            backend.pre_tokenizer, backend.decoder = words, spaces
        return backend

    def _backend_model(self, proto: Any, has_bytes: bool) -> models.Model:
        """Return the pieces and sentinels as a model of the package ``tokenizers``."""
        pieces = [(piece.piece, piece.score) for piece in proto.pieces]
        pieces += [(name, 0.0) for name in self.sentinel_names]
        if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
            return models.Unigram(pieces, unk_id=UNK, byte_fallback=has_bytes)
        vocab = {piece: token_id for token_id, (piece, _) in enumerate(pieces)}
        unk, _ = pieces[UNK]
        return models.BPE(vocab, _merges(proto), unk_token=unk, fuse_unk=True, byte_fallback=has_bytes)


@dataclass(frozen=True)
class ByteTokenizer(TrainedTokenizer):
    """Tokenize text as UTF-8 bytes: byte b has the id b + 3."""

    sentinels: int
    separator = ""
    spaces_are_tokens = True
    unk = None

    @functools.cached_property
    def vocab(self) -> Mapping[str, int]:
        return {chr(byte): byte + UNK + 1 for byte in range(256)}

    @property
    def vocab_size(self) -> int:
        return UNK + 1 + len(self.vocab) + self.num_sentinels

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        return self.token_mask(lambda byte: byte in " \n\t")  # a space begins the word after it

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes %d" % self.num_sentinels).hexdigest()

    def encode(self, text: str) -> list[int]:  # for one text, faster than through numpy
        return [byte + UNK + 1 for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + UNK + 1 for text in texts]

    def _decode_regular(self, ids: list[int]) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8, EOS and the unknown token are dropped."""
        return bytes(token - UNK - 1 for token in ids if token > UNK).decode(errors="ignore")

    def make_backend(self) -> tokenizers.Tokenizer:
        names = ["<pad>", "</s>", "<unk>", *byte_characters(), *self.sentinel_names]
        backend = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return backend


def byte_characters() -> list[str]:
    """Return the character by which byte-level tokenizers name each byte: itself if it can be printed.

    The others are the characters from 256 on [Radford et al. 2019].
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    further = itertools.count(256)
    return [chr(byte if byte in printable else next(further)) for byte in range(256)]


def template_processing(
    backend: tokenizers.Tokenizer, template: SpecialTokenTemplate
) -> processors.PostProcessor:
    """Return what puts the special tokens of a template around one text, and around a pair."""

    def spelled(ids: Sequence[int], token_type: int = 0) -> list[str]:
        return [f"{backend.id_to_token(token_id)}:{token_type}" for token_id in ids]

    def spelled_suffix(token_type: int) -> list[str]:
        last_token_type = token_type if template.last_token_type is None else template.last_token_type
        return [*spelled(template.suffix[:-1], token_type), *spelled(template.suffix[-1:], last_token_type)]

    second = template.second_token_type
    first = [*spelled(template.prefix), "$A:0"]
    last = [f"$B:{second}", *spelled_suffix(second)]
    ids = dict.fromkeys((*template.prefix, *template.separator, *template.suffix))
    return processors.TemplateProcessing(
        single=[*first, *spelled_suffix(0)],
        pair=[*first, *spelled(template.separator), *last],
        special_tokens=[(backend.id_to_token(token_id), token_id) for token_id in ids],
    )


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


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return the merges of a BPE model: the pairs that form each piece, in descending order of its score."""
    normal = [piece for piece in proto.pieces if piece.type == NORMAL_PIECE]
    pieces = [piece.piece for piece in sorted(normal, key=lambda piece: -piece.score)]
    known = {*pieces}
    pairs = ((piece[:end], piece[end:]) for piece in pieces for end in range(1, len(piece)))
    return [pair for pair in pairs if known.issuperset(pair)]


def train_sentencepiece(
    texts: Iterable[str],
    size: int,
    path: Path,
    unknown: UnknownCharacters = "unk",
    kind: SentencePieceAlgorithm = "unigram",
) -> Path:
    """Train a SentencePiece model of ``size`` pieces, write it to ``path`` and return ``path``.

    It is trained on the first ``size`` * TRAINING_CHARACTERS_PER_TOKEN characters of ``texts``,
    deterministically, and written with a checksum. As in T5, normalisation is nmt_nfkc and unknown characters
    have id 2. Unless the vocabulary is too small (MIN_PIECES_PER_REQUIRED_CHARACTER), the letters, digits and
    punctuation of ASCII become pieces even if the text lacks them.
    With ``unknown="bytes"`` (byte fallback) 256 of the pieces are bytes, so that any other character that
    normalisation leaves can be encoded and decoded, and id 2 never occurs. SettingError if ``size`` does not
    suit the text.
    """
    model = io.BytesIO()
    # read before training: the trainer would report any error of the texts as one of its own
    lines = [*first_lines(texts, size * TRAINING_CHARACTERS_PER_TOKEN)]
    num_bytes = 256 if unknown == "bytes" else 0
    has_room = size - num_bytes >= MIN_PIECES_PER_REQUIRED_CHARACTER * len(REQUIRED_CHARACTERS)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=kind,
            vocab_size=size,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=-1,
            required_chars=REQUIRED_CHARACTERS if has_room else "",
            byte_fallback=num_bytes > 0,
            seed_sentencepiece_size=max(size * SEED_PIECES_PER_PIECE, 10_000),
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # the trainer's message without the line of its source; for an empty text it is empty
        reason = str(error).rpartition("] ")[2].strip().rstrip(".") or "there is none"
        raise SettingError(
            f"data.vocabulary_size={size} does not suit the text: {reason}. Try a smaller "
            "--data.vocabulary-size, and a smaller one again if it fails, or --data.vocabulary bytes"
        ) from error
    write_with_checksum(path, model.getvalue())
    return path


def first_lines(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    """Yield the lines of the first ``num_characters`` characters of the texts; long lines are split."""
    for text in texts:
        for line in text[:num_characters].splitlines():
            for start in range(0, len(line), MAX_LINE_LENGTH):
                yield line[start : start + MAX_LINE_LENGTH]
        num_characters -= len(text)
        if num_characters <= 0:
            return
