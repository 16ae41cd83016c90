"""Use the tokenizers of published models unchanged, through ``tokenizers`` or ``sentencepiece``."""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import Regex, pre_tokenizers

from lm.config.base import SettingError, did_you_mean, parse_json, read_object
from lm.tokenizers.sentencepiece import (
    MODEL_FILE,
    TOKENIZER_CONFIG,
    ByteTokenizer,
    SentencePieceTokenizer,
    read_sentencepiece,
    template_processing,
)
from lm.tokenizers.tokenizer import (
    MASK,
    METASPACE,
    TOKENIZER_ALGORITHMS,
    SpecialTokenTemplate,
    Tokenizer,
    check_unicode,
)
from lm.tokenizers.wordpiece import VOCAB_FILE, WordPieceTokenizer

SPECIAL_TOKEN_SPELLINGS = {  # the usual spellings of each special token
    "pad": ("[PAD]", "<pad>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
# fields of tokenizer_config.json by which classes of transformers ignore the template of tokenizer.json
OWN_TEMPLATE = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "auto_map")
PROBE = "a"  # a text that is encoded to find the special tokens around it
BYTE_LEVEL_SPACE = "\u0120"  # how GPT-2's byte-level BPE writes the space before a word
T5_SENTINELS = 100  # ids above the pieces of T5's SentencePiece model [tokens]
DEBERTA_FILE = "spm.model"  # begins with [PAD], [CLS], [SEP] and [UNK], and lacks the mask
SENTENCEPIECE_FILES = (
    *("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm"),
    DEBERTA_FILE,
)
# model types whose Hugging Face tokenizer gives pieces other ids than their SentencePiece file does
RENUMBERING_MODEL_TYPES = ("xlm-roberta", "camembert", "mbart", "pegasus")
RENUMBERED_FILE = "sentencepiece.bpe.model"  # how all of them but Pegasus name their SentencePiece file
MAIN_FILES = ("tokenizer.json", "vocab.txt", *SENTENCEPIECE_FILES)  # the first that exists is used
TRAINED_FILES = (MODEL_FILE, VOCAB_FILE)  # of tokenizers trained here, the first that exists is used
TOKENIZER_FILES = (
    *MAIN_FILES,
    "target.spm",
    "vocab.json",
    "merges.txt",
    TOKENIZER_CONFIG,
    *TRAINED_FILES,
)
UNPROMPTABLE = ("bos", "eos", "unk", "sep", "pad", "cls")  # special tokens that a prompt cannot name

# Limits of a tokenizer.json, which is not trusted
MAX_FILE_BYTES = 1 << 28  # the largest published ones have 40 MB [bytes]
# factor by which all `Replace` and `TemplateProcessing` components together may lengthen a text; published: 3
MAX_GROWTH = 100
MAX_MAPPED_GROWTH = 1_000  # factor with maps of characters (`Precompiled`) too; a map of NFKC alone: 18
# what may be added before a text or replace a match [characters], or be put around a text [ids]
MAX_ADDED = 1_000


class PretrainedTokenizer(Tokenizer):
    """The base of published tokenizers, whose special tokens are found by their spelling."""

    path: Path
    # Special tokens have no common range of ids: random tokens are drawn from all ids, as in BERT's code.
    first_regular_id = 0

    @functools.cached_property
    def vocab_size(self) -> int:
        return max(self.vocab.values(), default=-1) + 1

    @functools.cached_property
    def unk(self) -> int | None:
        return self.vocab.get("<unk>", self.vocab.get("[UNK]"))

    @functools.cached_property
    def num_sentinels(self) -> int:
        numbered = (self.vocab.get(f"<extra_id_{k}>") == self.vocab_size - 1 - k for k in range(T5_SENTINELS))
        return sum(itertools.takewhile(bool, numbered))

    @property
    def unusable_sentinels(self) -> str:
        first = self.vocab.get("<extra_id_0>")
        if first is None or self.num_sentinels:
            return ""
        return (
            f"<extra_id_0> should have the last id, {self.vocab_size - 1}, <extra_id_1> the id before it, "
            f"and so on; found <extra_id_0> at {first}"
        )

    @functools.cached_property
    def special(self) -> Mapping[str, int | None]:
        def first_id(spellings: tuple[str, ...]) -> int | None:
            return next((self.vocab[token] for token in spellings if token in self.vocab), None)

        return {
            role: first_id((*self._preferred_spellings(role), *spellings, *self._fallback_spellings(role)))
            for role, spellings in SPECIAL_TOKEN_SPELLINGS.items()
        }

    def _preferred_spellings(self, _role: str) -> tuple[str, ...]:
        """Return the spelling of a role, such as "mask", that is tried before the usual ones, or ()."""
        return ()

    def _fallback_spellings(self, _role: str) -> tuple[str, ...]:
        """Return the spelling of a role that is tried after the usual ones, or ()."""
        return ()

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """Return which tokens begin a word, bool [vocab_size].

        BERT's tokenizer marks the tokens that continue a word, all others mark those that begin one. Either
        mark may also be text: GPT-2 and Llama have a token "##", a multilingual BERT the letter Ġ.
        """
        begins = self.token_mask(lambda token: token.startswith((METASPACE, BYTE_LEVEL_SPACE)))
        continues = self.token_mask(lambda token: token.startswith("##"))
        if continues.sum() <= begins.sum():
            return begins
        return self.token_mask(lambda token: not token.startswith("##"))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(self.files().values())).hexdigest()

    def _skipped_ids(self) -> tuple[int | None, ...]:
        return self.pad, self.cls, self.sep

    def files(self) -> Mapping[str, bytes]:
        paths = map(self.path.with_name, TOKENIZER_FILES)
        return {path.name: path.read_bytes() for path in paths if path.exists()}


@dataclass(frozen=True)
class HFTokenizer(PretrainedTokenizer):
    """Tokenize with a tokenizer.json or with BERT's vocab.txt, through the package ``tokenizers``.

    Data that spell a special token, such as ``[UNK]`` or ``</s>``, are encoded as text, which transformers
    does with ``split_special_tokens=True``; by default, with False, it reads the special token there. In a
    prompt they stand for the token, as there by default, except those of UNPROMPTABLE, such as EOS.
    """

    path: Path
    config: str  # JSON of tokenizer_config.json

    @functools.cached_property
    def backend(self) -> Any:
        """Return the tokenizer of the package ``tokenizers``."""
        is_json = self.path.suffix == ".json"
        if is_json:
            check_tokenizer_json(self.path)
        with as_setting_error(self.path):
            if is_json:
                backend = tokenizers.Tokenizer.from_file(str(self.path))
            else:
                config = json.loads(self.config)
                backend = tokenizers.BertWordPieceTokenizer(
                    str(self.path),
                    lowercase=config.get("do_lower_case", True),
                    strip_accents=config.get("strip_accents"),  # None: where it is lowercased
                    handle_chinese_chars=config.get("tokenize_chinese_chars", True),
                )
            backend.no_padding()  # some files ask for a fixed length
            backend.no_truncation()
            return backend

    @functools.cached_property
    def vocab(self) -> Mapping[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def _preferred_spellings(self, role: str) -> tuple[str, ...]:
        # tokenizer_config.json of a causal model may name other tokens than pre-training had: another EOS,
        # or an EOS as pad.
        if role in ("pad", "eos"):
            return ()
        return self._spelling_in_config(role)

    def _fallback_spellings(self, role: str) -> tuple[str, ...]:
        return self._spelling_in_config(role) if role == "eos" else ()

    def _spelling_in_config(self, role: str) -> tuple[str, ...]:
        """Return the spelling that tokenizer_config.json names for a role, or ()."""
        token = _token_content(json.loads(self.config).get(f"{role}_token"))
        return (token,) if isinstance(token, str) else ()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with as_setting_error(self.path):
            encodings = self._literal_backend.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    @functools.cached_property
    def _special_tokens(self) -> frozenset[str]:
        """Return the spellings of the special tokens that have more than one character."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special and len(token.content) > 1)

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer, but one that encodes the spelling of a special token as text."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        if not self._special_tokens:
            return backend
        # The spelling must not match a token either: split it after its first character, once the text is
        # normalised, since that may give the spelling.
        first_characters = (
            f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(self._special_tokens)
        )
        split = pre_tokenizers.Split(Regex("|".join(first_characters)), "merged_with_previous")
        steps = [backend.pre_tokenizer] if backend.pre_tokenizer else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, split])
        return backend

    def encode_with_special_tokens(self, text: str, _begin: int | None, _end: int | None) -> list[int]:
        """Return the ids of a prompt with the special tokens of the file's template around it.

        ``_begin`` and ``_end`` are not used: the template decides.
        """
        check_unicode(text)
        text = self._spell_mask(text)
        if self._spells_unpromptable(text):
            return self.add_special_tokens(self.encode_prompt(text), None, None)
        return self.encode_with_template(text)[0]

    def _spells_unpromptable(self, text: str) -> bool:
        """Return whether a text, as it is or normalised, spells a token that no prompt may name."""
        pattern = self._unpromptable_pattern
        if pattern is None:
            return False
        if pattern.search(text):
            return True
        normalizer = self.backend.normalizer
        if normalizer is None:
            return False
        with as_setting_error(self.path):
            return bool(pattern.search(normalizer.normalize_str(text)))

    def add_special_tokens(self, ids: Sequence[int], _begin: int | None, _end: int | None) -> list[int]:
        """Return ``ids`` with the special tokens of the file's template around them."""
        prefix, suffix = self.prefix_and_suffix
        return [*prefix, *ids, *suffix]

    @functools.cached_property
    def prefix_and_suffix(self) -> tuple[list[int], list[int]]:
        """Return the special ids that the file's template puts before and after a single text."""
        text, whole = self.encode(PROBE), self.encode_with_template(PROBE)[0]
        ends = range(len(text), len(whole) + 1)
        end = next((end for end in ends if whole[end - len(text) : end] == text), len(whole))
        return whole[: end - len(text)], whole[end:]

    def encode_prompt(self, text: str) -> list[int]:
        check_unicode(text)
        text = self._spell_mask(text)
        special = _match_any(self._special_tokens - self._unpromptable_tokens)
        if special is None:
            return self.encode(text)
        parts, names = special.split(text), special.findall(text)
        for index, name in enumerate(names):  # a token may take the blanks beside it, as RoBERTa's mask does
            if name in self._strips_left:
                parts[index] = parts[index].rstrip()
            if name in self._strips_right:
                parts[index + 1] = parts[index + 1].lstrip()
        ids = self.encode(parts[0])
        for name, following in zip(names, parts[1:], strict=True):
            ids += [self.vocab[name], *self.encode(following)]
        return ids

    @functools.cached_property
    def _strips_left(self) -> frozenset[str]:
        """Return the added tokens that take the blanks before them."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.lstrip)

    @functools.cached_property
    def _strips_right(self) -> frozenset[str]:
        """Return the added tokens that take the blanks after them."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.rstrip)

    def _spell_mask(self, text: str) -> str:
        """Return ``text`` with MASK replaced by the tokenizer's own spelling of the mask."""
        spelling = next((token for token, token_id in self.vocab.items() if token_id == self.mask), MASK)
        return text.replace(MASK, spelling)

    @functools.cached_property
    def _unpromptable_tokens(self) -> frozenset[str]:
        """Return the spellings of special tokens that are encoded as text even in a prompt."""
        config, tokens = json.loads(self.config), {"<unk>", "[UNK]"}
        for role, spellings in SPECIAL_TOKEN_SPELLINGS.items():
            if role != "mask":
                tokens.update(spellings)
        tokens.update(str(_token_content(config.get(f"{role}_token"))) for role in UNPROMPTABLE)
        return self._special_tokens & tokens

    @functools.cached_property
    def _unpromptable_pattern(self) -> re.Pattern[str] | None:
        return _match_any(self._unpromptable_tokens)

    def encode_with_template(self, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Return ids and token types of one or two texts with the special tokens of the file's template."""
        with as_setting_error(self.path):
            encoding = self.backend.encode(first, second)
        return encoding.ids, encoding.type_ids

    @functools.cached_property
    def template(self) -> SpecialTokenTemplate | None:
        """Return the special tokens around one text or a pair, found by encoding PROBE; None if unclear.

        They are unclear if PROBE is not found twice in the pair, or if the pair does not begin and end with
        the same special tokens as a single text.
        """
        text = self.encode(PROBE)
        single, _ = self.encode_with_template(PROBE)
        pair, types = self.encode_with_template(PROBE, PROBE)
        starts = [k for k in range(len(pair)) if pair[k : k + len(text)] == text]
        if len(starts) != 2:
            return None
        first, second = starts
        prefix, separator = pair[:first], pair[first + len(text) : second]
        suffix = pair[second + len(text) :]
        if single != [*prefix, *text, *suffix]:
            return None
        last_type = types[-1] if suffix and types[-1] != types[second] else None
        return SpecialTokenTemplate(tuple(prefix), tuple(separator), tuple(suffix), types[second], last_type)

    def _decode_ids(self, ids: list[int]) -> str:
        with as_setting_error(self.path):
            return self.backend.decode(ids, skip_special_tokens=False)

    def export_files_with(self, template: SpecialTokenTemplate) -> Mapping[str, bytes]:
        """Return the tokenizer's files, changed so that ``template`` is put around texts.

        If it is the tokenizer's own template, they are the original files. Otherwise tokenizer.json has the
        new template, and tokenizer_config.json lacks the options (OWN_TEMPLATE) by which a class of
        transformers would make another.
        """
        if self.template == template:
            return self.files()
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.post_processor = template_processing(backend, template)
        config = json.loads(self.config)
        config = {name: value for name, value in config.items() if name not in OWN_TEMPLATE}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        for role in ("pad", "eos"):
            token_id = self.special[role]
            if f"{role}_token" not in config and token_id is not None:
                config[f"{role}_token"] = backend.id_to_token(token_id)
        # Else transformers passes token types to GPT-2, which would add token embeddings for them.
        config.setdefault("model_input_names", ["input_ids", "attention_mask"])
        settings = json.dumps(config, indent=1).encode()
        return {**self.files(), "tokenizer.json": backend.to_str().encode(), TOKENIZER_CONFIG: settings}


@dataclass(frozen=True)
class PretrainedSentencePieceTokenizer(PretrainedTokenizer):
    """Tokenize with a published SentencePiece model.

    Marian has a vocab.json beside it, in which pieces have other ids than in the model.
    """

    path: Path
    sentinels: int  # number of ids above the pieces; sentinel 0 is the last id

    @functools.cached_property
    def processors(self) -> tuple[sentencepiece.SentencePieceProcessor, ...]:
        """Return the models of the source and the target language, which differ only in Marian."""
        target = self.path.with_name("target.spm") if self.path.suffix == ".spm" else self.path
        return tuple(map(read_sentencepiece, (self.path, target)))

    @functools.cached_property
    def vocab(self) -> Mapping[str, int]:
        vocab_file = self.path.with_name("vocab.json")
        if self.path.suffix == ".spm" and vocab_file.exists():
            vocab = read_object(vocab_file)
            if all(type(token_id) is int and token_id >= 0 for token_id in vocab.values()):
                return vocab
            raise SettingError(f"{vocab_file} should hold the id of each piece")
        source, _ = self.processors
        count = source.get_piece_size()
        last_id = count + self.sentinels - 1
        added = {f"<extra_id_{k}>": last_id - k for k in range(self.sentinels)}
        if self.path.name == DEBERTA_FILE:
            added["[MASK]"] = count
        return {source.id_to_piece(token_id): token_id for token_id in range(count)} | added

    @functools.cached_property
    def id_to_piece(self) -> Mapping[int, str]:
        return {token_id: piece for piece, token_id in self.vocab.items()}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        source, _ = self.processors
        unknown = self.unk or 0
        encodings = source.encode(list(texts), out_type=str)
        return [
            np.asarray([self.vocab.get(piece, unknown) for piece in pieces], np.int32) for pieces in encodings
        ]

    def export_files_with(self, template: SpecialTokenTemplate) -> Mapping[str, bytes]:
        if self.cls is not None and template.prefix == (self.cls,):
            return self.files()  # transformers' class for this encoder puts the same tokens around a text
        raise SettingError(
            f"{self.path.name} cannot say which special tokens the head has read around a text: put a "
            "tokenizer.json beside it"
        )

    def _decode_ids(self, ids: list[int]) -> str:
        _, target = self.processors
        return target.decode([self.id_to_piece[token] for token in ids if token in self.id_to_piece])


def load_tokenizer(source: str | Path, sentinels: int, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that ``source`` names: ``bytes``, a file or a folder.

    A file is a SentencePiece model or, as .txt, a list of word pieces. A folder holds a tokenizer trained
    here or that of a published model. A tokenizer trained here gets ``sentinels`` sentinels; that of a
    published model must fit an embedding of ``vocab_size`` rows. SettingError if there is no such tokenizer.
    """
    path = Path(source)
    if source == "bytes":
        return ByteTokenizer(sentinels)
    if path.is_dir():
        return _load_trained(path, sentinels) or load_pretrained_tokenizer(path, vocab_size)
    kind = str(source).partition(":")[0]
    if not path.exists() and kind.isalpha():  # not a path but a misspelt kind
        raise SettingError(
            f"data.vocabulary={source!s} is unknown{did_you_mean(kind, (*TOKENIZER_ALGORITHMS, 'bytes'))}"
        )
    return (
        WordPieceTokenizer(path, sentinels)
        if path.suffix == ".txt"
        else SentencePieceTokenizer(path, sentinels)
    )


def _load_trained(folder: Path, sentinels: int) -> Tokenizer | None:
    """Return the tokenizer trained here that ``folder`` holds, or None.

    If it was exported, its tokenizer_config.json lists its sentinels; else it has ``sentinels`` of them.
    """
    path = next((folder / name for name in TRAINED_FILES if (folder / name).exists()), None)
    if path is None:
        return None
    settings = folder / TOKENIZER_CONFIG
    names = read_object(settings).get("extra_special_tokens") if settings.exists() else None
    count = len(names) if isinstance(names, list) else sentinels
    return WordPieceTokenizer(path, count) if path.name == VOCAB_FILE else SentencePieceTokenizer(path, count)


def _token_content(token: Any) -> Any:
    """Return the spelling of a token of tokenizer_config.json, which may be an object with ``content``."""
    return token.get("content") if isinstance(token, dict) else token


def _match_any(spellings: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of ``spellings``, longest first, or None if there are none."""
    longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, longest_first))) if spellings else None


def load_pretrained_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Return the tokenizer in ``folder`` of a model whose embedding has ``vocab_size`` rows.

    SettingError if there is none, or if it has ids beyond those rows.
    """
    if (trained := _load_trained(folder, 0)) is not None:
        if trained.vocab_size > vocab_size:
            ids, rows = f"ids up to {trained.vocab_size - 1}", f"the model's embedding {vocab_size} rows"
            raise SettingError(f"{folder} has a vocabulary with {ids}, {rows}: they do not belong together")
        return trained
    config = read_object(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    if type(config.get("extra_ids", 0)) is not int:
        extra_ids = config["extra_ids"]
        raise SettingError(f"{folder / TOKENIZER_CONFIG}: extra_ids={extra_ids!r} should be a number")
    path = next((folder / name for name in MAIN_FILES if (folder / name).exists()), None)
    if path is None:
        raise SettingError(f"{folder} has no tokenizer: none of {', '.join(MAIN_FILES)}")
    if path.name not in SENTENCEPIECE_FILES:
        tokenizer: PretrainedTokenizer = HFTokenizer(path, json.dumps(config))
    else:
        _check_numbering(path)
        tokenizer = PretrainedSentencePieceTokenizer(path, 0)
        # T5's tokenizer has sentinels that are not in the model file
        sentinels = config.get("extra_ids", T5_SENTINELS if path.name == "spiece.model" else 0)
        has_room = tokenizer.vocab_size + sentinels <= vocab_size
        if has_room and "<extra_id_0>" not in tokenizer.vocab and "[CLS]" not in tokenizer.vocab:
            tokenizer = PretrainedSentencePieceTokenizer(path, sentinels)
    if tokenizer.vocab_size > vocab_size:
        ids, rows = f"ids up to {tokenizer.vocab_size - 1}", f"the model's embedding {vocab_size} rows"
        raise SettingError(f"{path} has {ids}, {rows}: they do not belong together")
    return tokenizer


def exported_boundary_ids(folder: Path) -> tuple[int | None, int | None] | None:
    """Return the ids that begin and end a text as the exported model in ``folder`` reads it.

    Each is None if there is no such token. The result is None for a folder without a tokenizer that was
    trained here and exported: beside that lies a tokenizer.json, whose template has these ids.
    """
    path = folder / "tokenizer.json"
    was_trained_here = any((folder / name).exists() for name in TRAINED_FILES)
    if not was_trained_here or not path.exists():
        return None
    prefix, suffix = HFTokenizer(path, "{}").prefix_and_suffix
    return prefix[0] if prefix else None, suffix[-1] if suffix else None


def _check_numbering(path: Path) -> None:
    """Raise SettingError for a SentencePiece file of RENUMBERING_MODEL_TYPES, which use other ids."""
    config = path.with_name("config.json")
    model_type = read_object(config).get("model_type") if config.exists() else None
    if path.name == RENUMBERED_FILE or model_type in RENUMBERING_MODEL_TYPES:
        raise SettingError(
            f"{path} numbers its pieces otherwise than the models of "
            f"{', '.join(RENUMBERING_MODEL_TYPES)} do: put a tokenizer.json beside it, as transformers "
            "writes with AutoTokenizer and save_pretrained"
        )


@contextlib.contextmanager
def as_setting_error(path: Path) -> Iterator[None]:
    """Raise any error of a tokenizer's package, panics in Rust included, as a SettingError with ``path``."""
    try:
        yield
    except BaseException as error:  # no narrower class is raised, and a panic in Rust is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SettingError(f"{path} is not a tokenizer that works: {error}") from error


def check_tokenizer_json(path: Path) -> None:
    """Raise SettingError for a tokenizer.json that could take unbounded time or memory, before it is loaded.

    Checks the size of the file, the factor by which all replacements and templates together may lengthen a
    text (at most MAX_GROWTH, or MAX_MAPPED_GROWTH with maps of characters), and how many characters or ids
    each component adds (at most MAX_ADDED).
    """
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise SettingError(f"{path} has {size} bytes; a tokenizer has {MAX_FILE_BYTES} at most")
    growth, mapped_growth, added = 1.0, 1.0, 0
    for component in _components(parse_json(path.read_bytes(), path)):
        try:
            growth *= _growth_bound(component)
            mapped_growth *= _mapped_growth_bound(component)
            added = max(added, _addition_bound(component))
        except (AttributeError, TypeError, ValueError, OverflowError, KeyError) as error:
            raise SettingError(f"{path} has a malformed {component.get('type')!r}: {error!r:.200}") from error
    for factor, limit in ((growth, MAX_GROWTH), (growth * mapped_growth, MAX_MAPPED_GROWTH)):
        if factor > limit:
            times = f"up to {factor:.3g} times longer; at most {limit}"
            raise SettingError(f"{path}: its replacements and templates make a text {times}")
    if added > MAX_ADDED:
        raise SettingError(f"{path}: it adds {added} characters or ids to a text; at most {MAX_ADDED}")


def _components(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object with a ``type``, at any depth, in a tokenizer.json outside of its vocabulary."""
    sections = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    pending = [value[key] for key in sections if key in value] if isinstance(value, dict) else []
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            if isinstance(item.get("type"), str):
                yield item
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def _growth_bound(component: dict[str, Any]) -> float:
    """Return by which factor a template or a ``Replace`` may lengthen a text at most; 1 for any other."""
    if component["type"] == "TemplateProcessing":
        # a template may repeat the text; one of a pair holds both texts at least once
        single, pair = (sum("Sequence" in item for item in component[key]) for key in ("single", "pair"))
        return max(1.0, single, pair - 1)
    if component["type"] != "Replace":
        return 1.0
    pattern, content = component["pattern"], component["content"]
    if pattern.get("String"):
        return max(1.0, len(content) / len(pattern["String"]))
    return len(content) + 1.0  # a regular expression may match between all characters


def _mapped_growth_bound(component: dict[str, Any]) -> float:
    """Return by which factor a component may lengthen a text at most, if it is a map of characters; else 1.

    A ``Precompiled`` map replaces one or more characters by at most its longest replacement.
    """
    if component["type"] != "Precompiled" or not component["precompiled_charsmap"]:
        return 1.0
    charsmap = base64.b64decode(component["precompiled_charsmap"])
    trie_bytes = int.from_bytes(charsmap[:4], "little")
    replacements = charsmap[4 + trie_bytes :].split(b"\0")
    return max(1.0, *(len(text.decode(errors="replace")) for text in replacements))


def _addition_bound(component: dict[str, Any]) -> int:
    """Return how many characters or ids a component may add to a text at most."""
    if component["type"] == "TemplateProcessing":
        counts = {name: len(token["ids"]) for name, token in component["special_tokens"].items()}
        items = [*component["single"], *component["pair"]]
        return sum(counts.get(item["SpecialToken"]["id"], 0) for item in items if "SpecialToken" in item)
    texts = (component.get(key) for key in ("prepend", "content"))
    return max((len(text) for text in texts if isinstance(text, str)), default=0)
