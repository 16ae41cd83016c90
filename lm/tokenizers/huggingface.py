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

from lm.config.base import SettingError, nearest, parse_json, read_object
from lm.tokenizers.sentencepiece import MODEL, TOKENIZER_CONFIG, Bytes, SentencePiece, read_sentencepiece
from lm.tokenizers.tokenizer import BLANK, MASK, TRAINED_KINDS, Affixes, Vocabulary
from lm.tokenizers.wordpiece import PIECES, WordPiece

SPELLINGS = {  # the usual spellings of each special token
    "pad": ("[PAD]", "<pad>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
PROBE = "a"  # is encoded to find the special tokens of the template
BYTE_BLANK = "\u0120"  # how GPT-2's byte-level BPE writes the blank before a word
SENTINELS = 100  # T5's, above the pieces of its SentencePiece model [tokens]
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "source.spm")
MAIN_FILES = ("tokenizer.json", "vocab.txt", *SENTENCEPIECE_FILES)  # the first that exists is used
FILES = (*MAIN_FILES, "target.spm", "vocab.json", "merges.txt", TOKENIZER_CONFIG, MODEL, PIECES)
UNNAMED = ("bos", "eos", "unk", "sep", "pad", "cls")  # special tokens that no prompt can name

# Limits of a tokenizer.json, which is not trusted
LARGEST_FILE = 1 << 28  # the largest published ones have 40 MB [bytes]
LARGEST_GROWTH = 100  # factor by which all replacements together may lengthen a text; published ones: 3
# what may be added before a text or replace one character [characters], or be put around a text [ids]
LONGEST_ADDED = 1_000


class Published(Vocabulary):
    """Implement what all published tokenizers share: special tokens by their spelling, and their files."""

    path: Path
    first_piece = 0  # as in BERT's code: special tokens have no common range of ids

    @property
    def size(self) -> int:
        return max(self.ids.values(), default=-1) + 1

    @functools.cached_property
    def unk(self) -> int | None:
        return self.ids.get("<unk>", self.ids.get("[UNK]"))

    @functools.cached_property
    def num_sentinels(self) -> int:
        numbered = (self.ids.get(f"<extra_id_{k}>") == self.size - 1 - k for k in range(SENTINELS))
        return sum(itertools.takewhile(bool, numbered))

    @functools.cached_property
    def special(self) -> Mapping[str, int | None]:
        def first(spellings: tuple[str, ...]) -> int | None:
            return next((self.ids[token] for token in spellings if token in self.ids), None)

        return {use: first((*self._configured(use), *names)) for use, names in SPELLINGS.items()}

    def _configured(self, _use: str) -> tuple[str, ...]:
        """Return the token that tokenizer_config.json names for ``_use`` as a tuple, empty if none."""
        return ()

    @functools.cached_property
    def word_starts(self) -> np.ndarray:
        """Return a mask of the pieces that begin a word, bool [size].

        BERT's vocabulary marks the pieces that continue a word, the others mark those that begin one.
        """
        if any(token.startswith("##") for token in self.ids):
            return self.marks(lambda token: not token.startswith("##"))
        return self.marks(lambda token: token.startswith((BLANK, BYTE_BLANK)))

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(self.files().values())).hexdigest()

    def _silent(self) -> tuple[int | None, ...]:
        return self.pad, self.cls, self.sep

    def files(self) -> Mapping[str, bytes]:
        paths = map(self.path.with_name, FILES)
        return {path.name: path.read_bytes() for path in paths if path.exists()}


@dataclass(frozen=True)
class Fast(Published):
    """Tokenize with a tokenizer.json or with BERT's vocab.txt, through the package ``tokenizers``."""

    path: Path
    config: str  # JSON of tokenizer_config.json

    @functools.cached_property
    def tokenizer(self) -> Any:
        is_json = self.path.suffix == ".json"
        if is_json:
            check_tokenizer_json(self.path)
        with usable(self.path):
            if is_json:
                tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
            else:
                lower = json.loads(self.config).get("do_lower_case", True)
                tokenizer = tokenizers.BertWordPieceTokenizer(str(self.path), lowercase=lower)
            tokenizer.no_padding()  # some files ask for a fixed length
            tokenizer.no_truncation()
            return tokenizer

    @functools.cached_property
    def ids(self) -> Mapping[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=True)

    def _configured(self, use: str) -> tuple[str, ...]:
        if use in ("pad", "eos"):  # a causal model may be given another EOS
            return ()
        token = json.loads(self.config).get(f"{use}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return (token,) if isinstance(token, str) else ()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with usable(self.path):
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        for number, text in enumerate(texts):
            if self._spellings and self._spellings.search(text):
                with usable(self.path):
                    literal = self._literal.encode(text, add_special_tokens=False)
                ids[number] = np.asarray(literal.ids, np.int32)
        return ids

    @functools.cached_property
    def _special_tokens(self) -> frozenset[str]:
        """Return the spellings of the special tokens that have more than one character."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special and len(token.content) > 1)

    @functools.cached_property
    def _spellings(self) -> re.Pattern[str] | None:
        return _any_of(self._special_tokens)

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer, but one that encodes the spelling of a special token as text."""
        tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        # the spelling must not match a piece either: split it after its first character
        names = (f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in sorted(self._special_tokens))
        cut = pre_tokenizers.Split(Regex("|".join(names)), "merged_with_previous")
        before = [tokenizer.pre_tokenizer] if tokenizer.pre_tokenizer else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])
        return tokenizer

    def encode_framed(self, text: str, _begin: int | None, _end: int | None) -> list[int]:
        """Return the ids of a prompt with the special tokens of the file's template around it."""
        text = self._with_its_mask(text)
        if self._unnamed is None or not self._unnamed.search(text):
            return self.framed(text)[0]
        return self.framed_ids(self.encode_prompt(text), None, None)

    def framed_ids(self, ids: Sequence[int], _begin: int | None, _end: int | None) -> list[int]:
        before, behind = self._around
        return [*before, *ids, *behind]

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Return the special ids that the file's template puts before and after a single text."""
        text, whole = self.encode(PROBE), self.framed(PROBE)[0]
        ends = range(len(text), len(whole) + 1)
        end = next((end for end in ends if whole[end - len(text) : end] == text), len(whole))
        return whole[: end - len(text)], whole[end:]

    def encode_prompt(self, text: str) -> list[int]:
        text = self._with_its_mask(text)
        named = _any_of(self._special_tokens - self._unnamed_tokens)
        if named is None:
            return self.encode(text)
        first, *parts = named.split(text)
        ids = self.encode(first)
        for name, part in zip(named.findall(text), parts, strict=True):
            ids += [self.ids[name], *self.encode(part)]
        return ids

    def _with_its_mask(self, text: str) -> str:
        """Return ``text`` with MASK replaced by the tokenizer's own spelling of the mask."""
        spelling = next((token for token, number in self.ids.items() if number == self.mask), MASK)
        return text.replace(MASK, spelling)

    @functools.cached_property
    def _unnamed_tokens(self) -> frozenset[str]:
        """Return the spellings of special tokens that are encoded as text even in a prompt."""
        config, usual = json.loads(self.config), ("<unk>", "[UNK]")
        found = [token for use, names in SPELLINGS.items() if use != "mask" for token in names]
        for use in UNNAMED:
            token = config.get(f"{use}_token")
            found.append(str(token.get("content") if isinstance(token, dict) else token))
        return self._special_tokens & {*found, *usual}

    @functools.cached_property
    def _unnamed(self) -> re.Pattern[str] | None:
        return _any_of(self._unnamed_tokens)

    def framed(self, first: str, second: str | None = None) -> tuple[list[int], list[int]]:
        """Return ids and token types of one or two texts with the special tokens of the file's template."""
        with usable(self.path):
            encoding = self.tokenizer.encode(first, second)
        return encoding.ids, encoding.type_ids

    @property
    def affixes(self) -> Affixes | None:
        return self._affixes

    @functools.cached_property
    def _affixes(self) -> Affixes | None:
        text = self.encode(PROBE)
        one, (two, types) = self.framed(PROBE)[0], self.framed(PROBE, PROBE)
        places = [k for k in range(len(two)) if two[k : k + len(text)] == text]
        if len(places) != 2 or one[: places[0]] != two[: places[0]]:
            return None
        first, second = places
        end = first + len(text)
        return Affixes(tuple(one[:first]), tuple(two[end:second]), tuple(one[end:]), types[second])

    def _text(self, ids: list[int]) -> str:
        with usable(self.path):
            return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True)
class PublishedPieces(Published):
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
    def ids(self) -> Mapping[str, int]:
        table = self.path.with_name("vocab.json")
        if self.path.suffix == ".spm" and table.exists():
            ids = read_object(table)
            if all(type(number) is int and number >= 0 for number in ids.values()):
                return ids
            raise SettingError(f"{table} should hold the id of each piece")
        model, count = self.processors[0], self.processors[0].get_piece_size()
        top = count + self.sentinels - 1
        sentinels = {f"<extra_id_{k}>": top - k for k in range(self.sentinels)}
        return {model.id_to_piece(token): token for token in range(count)} | sentinels

    @functools.cached_property
    def pieces(self) -> Mapping[int, str]:
        return {token: piece for piece, token in self.ids.items()}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        unknown = self.ids.get("<unk>", 0)
        encodings = self.processors[0].encode(list(texts), out_type=str)
        return [np.asarray([self.ids.get(piece, unknown) for piece in e], np.int32) for e in encodings]

    def _text(self, ids: list[int]) -> str:
        return self.processors[1].decode([self.pieces[token] for token in ids if token in self.pieces])


def open_vocabulary(source: str | Path, sentinels: int, vocab_size: int) -> Vocabulary:
    """Return the vocabulary that ``source`` names: ``bytes``, a file or a folder.

    A file is a SentencePiece model or, as .txt, a list of word pieces. A folder holds a vocabulary trained
    here or a published model's tokenizer. ``sentinels`` is how many are added to one trained here; one of a
    published model must fit an embedding of ``vocab_size`` rows. SettingError if there is no such vocabulary.
    """
    path = Path(source)
    if source == "bytes":
        return Bytes(sentinels)
    if path.is_dir():
        return _own(path, sentinels) or find_tokenizer(path, vocab_size)
    kind = str(source).partition(":")[0]
    if not path.exists() and kind.isalpha():  # not a path but a misspelt kind
        raise SettingError(f"data.vocabulary={source!s} is unknown{nearest(kind, (*TRAINED_KINDS, 'bytes'))}")
    return WordPiece(path, sentinels) if path.suffix == ".txt" else SentencePiece(path, sentinels)


def _own(folder: Path, sentinels: int) -> Vocabulary | None:
    """Return the vocabulary trained here that ``folder`` holds, or None.

    It has as many sentinels as its tokenizer_config.json lists, if it was exported, else ``sentinels``.
    """
    path = next((folder / name for name in (MODEL, PIECES) if (folder / name).exists()), None)
    if path is None:
        return None
    settings = folder / TOKENIZER_CONFIG
    names = read_object(settings).get("extra_special_tokens") if settings.exists() else None
    count = len(names) if isinstance(names, list) else sentinels
    return WordPiece(path, count) if path.name == PIECES else SentencePiece(path, count)


def _any_of(spellings: Collection[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of ``spellings``, longest first, or None if there are none."""
    longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
    return re.compile("|".join(map(re.escape, longest_first))) if spellings else None


def find_tokenizer(folder: Path, vocab_size: int) -> Vocabulary:
    """Return the tokenizer in ``folder`` of a model whose embedding has ``vocab_size`` rows.

    SettingError if there is none, or if it has ids beyond those rows.
    """
    if (own := _own(folder, 0)) is not None:
        if own.size > vocab_size:
            ids, rows = f"ids up to {own.size - 1}", f"the model's embedding {vocab_size} rows"
            raise SettingError(f"{folder} has a vocabulary with {ids}, {rows}: they do not belong together")
        return own
    config = read_object(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    if type(config.get("extra_ids", 0)) is not int:
        wrong = f"extra_ids={config['extra_ids']!r} should be a number"
        raise SettingError(f"{folder / TOKENIZER_CONFIG}: {wrong}")
    path = next((folder / name for name in MAIN_FILES if (folder / name).exists()), None)
    if path is None:
        raise SettingError(f"{folder} has no tokenizer: none of {', '.join(MAIN_FILES)}")
    if path.name not in SENTENCEPIECE_FILES:
        tokenizer: Published = Fast(path, json.dumps(config))
    else:
        tokenizer = PublishedPieces(path, 0)
        # T5's tokenizer has sentinels that are not in the model file
        extra = config.get("extra_ids", SENTINELS if path.name == SENTENCEPIECE_FILES[0] else 0)
        has_room = tokenizer.size + extra <= vocab_size
        if has_room and "<extra_id_0>" not in tokenizer.ids and "[CLS]" not in tokenizer.ids:
            tokenizer = PublishedPieces(path, extra)
    if tokenizer.size > vocab_size:
        ids, rows = f"ids up to {tokenizer.size - 1}", f"the model's embedding {vocab_size} rows"
        raise SettingError(f"{path} has {ids}, {rows}: they do not belong together")
    return tokenizer


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raise any error of a tokenizer's package, panics in Rust included, as a SettingError with ``path``."""
    try:
        yield
    except BaseException as error:  # no narrower class is raised, and a panic in Rust is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SettingError(f"{path} is not a tokenizer that works: {error}") from error


def check_tokenizer_json(path: Path) -> None:
    """Raise SettingError for a tokenizer.json that could take unbounded time or memory, before it is loaded.

    Checked are the size of the file, how much its replacements may lengthen a text, and how many characters
    or ids it adds: a text may not become a thousand times longer, nor get a million ids around it.
    """
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise SettingError(f"{path} has {size} bytes; a tokenizer has {LARGEST_FILE} at most")
    growth, added = 1.0, 0
    for step in _typed_steps(parse_json(path.read_bytes(), path)):
        try:
            growth, added = growth * _growth(step), max(added, _added(step))
        except (AttributeError, TypeError, ValueError, OverflowError, KeyError) as error:
            raise SettingError(f"{path} has a malformed {step.get('type')!r}: {error!r:.200}") from error
    if growth > LARGEST_GROWTH:
        longer = f"up to {growth:.3g} times longer; at most {LARGEST_GROWTH}"
        raise SettingError(f"{path}: its replacements make a text {longer}")
    if added > LONGEST_ADDED:
        raise SettingError(f"{path}: it adds {added} characters or ids to a text; at most {LONGEST_ADDED}")


def _typed_steps(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object with a ``type``, at any depth, in a tokenizer.json outside of its vocabulary."""
    sections = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    todo = [value[key] for key in sections if key in value] if isinstance(value, dict) else []
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if isinstance(item.get("type"), str):
                yield item
            todo += item.values()
        elif isinstance(item, list):
            todo += item


def _growth(step: dict[str, Any]) -> float:
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"], step["content"]
    # a regular expression may match between all characters
    return max(1.0, len(content) / len(pattern["String"]) if pattern.get("String") else len(content) + 1.0)


def _added(step: dict[str, Any]) -> int:
    if step["type"] == "TemplateProcessing":
        ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        both = [*step["single"], *step["pair"]]
        return sum(ids.get(piece["SpecialToken"]["id"], 0) for piece in both if "SpecialToken" in piece)
    if step["type"] == "Precompiled" and step["precompiled_charsmap"]:
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        contents = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]  # after a trie of that many bytes
        return max(map(len, contents.split(b"\0")), default=0)
    texts = (step.get(key) for key in ("prepend", "content"))
    return max((len(text) for text in texts if isinstance(text, str)), default=0)
