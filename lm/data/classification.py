"""Turn rows of labelled tasks into features and labels for a head, and its outputs into what metrics compare.

A row is [CLS] A [SEP] B [SEP] for an encoder, A <eos> B <eos> for all others, whose head reads the last
token; a published tokenizer puts its own tokens around texts, as RoBERTa's <s> A </s></s> B </s>. Both sides
of an encoder-decoder read the same, unshifted (Lewis et al. 2020, section 3.1). A decoder may read START A
DELIM B EXTRACT instead, and its head EXTRACT (Radford et al. 2018, section 3.3). Words whose labels or places
matter are encoded one by one: for most tokenizers that gives the same tokens as encoding the whole text.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.data.batches import shuffled_indices, split_batches
from lm.data.checks import check_architecture, check_special_tokens
from lm.data.packing import DECODERS
from lm.data.tasks.labelled import LabelledTask
from lm.data.tasks.task import Row
from lm.objectives.corruption import length_mask
from lm.objectives.denoising import Lengths
from lm.tokenizers.tokenizer import PAD, Layout, SpecialTokenTemplate, Tokenizer

WORD = re.compile(r"\w+|[^\w\s]")  # answers in a context begin and end with a word or a punctuation mark
MAX_ANSWER_WORDS = 30  # Devlin et al. 2019 count it in tokens (in their code)
MIN_ROW_LENGTH = 8
GPT_SPECIAL_TOKENS = ("start", "delim", "extract")  # the special tokens of GPT's layout
NO_LABEL = -1  # predicted label of a word that was cut off or has no tokens


class EncodedRow(NamedTuple):
    """A row of tokens and token types, int32 [tokens], and where in it the last text begins and ends."""

    tokens: np.ndarray
    types: np.ndarray
    begin: int
    end: int
    is_cut: bool  # its texts had more tokens than fit


class Words(NamedTuple):
    """The words of the last text of a row, and where the tokens of each begin and end in it, int [words]."""

    row: EncodedRow
    begin: np.ndarray
    end: np.ndarray
    spans: list[tuple[int, int]]  # span of each word in the context, end excluded [characters]

    def visible(self, tokens: np.ndarray) -> np.ndarray:
        """Return which words have tokens and keep the one at index ``tokens`` [words], bool [words]."""
        return (self.end > self.begin) & (tokens < self.row.end)


class LabelledExample(NamedTuple):
    """An example: one row or, for a choice, one for each candidate; its label [...] and loss weight [...]."""

    rows: list[EncodedRow]
    label: Any
    weight: Any


def truncated_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """Return the lengths to which one or two texts are truncated, longest first, to fit ``room`` tokens."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first = min(lengths[0], max(room - lengths[1], (room + 1) // 2))
    return [first, min(lengths[1], room - first)]


@functools.lru_cache(maxsize=100_000)
def encode_word(tokenizer: Tokenizer, preceding: str, word: str) -> tuple[int, ...]:
    """Return the token ids of a word that follows the character ``preceding``.

    A word may have other tokens within a text than alone: it has those after the tokens of ``preceding``.
    After a space, which most tokenizers make a part of the word, all tokens are the word's. Where the tokens
    of ``preceding`` change before the word, the word is encoded alone.
    """
    both, first = tokenizer.encode(preceding + word), []
    if preceding.strip():
        first = tokenizer.encode(preceding)
    if len(both) > len(first) and both[: len(first)] == first:
        return tuple(both[len(first) :])
    return tuple(tokenizer.encode(word))


@dataclass(frozen=True)
class Reader:
    """Turns a task's rows into examples for a head, and the head's outputs into answers."""

    task: LabelledTask
    tokenizer: Tokenizer
    architecture: str
    length: int
    layout: Layout = "ended"

    def __post_init__(self) -> None:
        check_architecture(self.architecture)
        check_special_tokens(
            self.tokenizer, [] if self.layout == "ended" else [*GPT_SPECIAL_TOKENS], self.architecture
        )
        if self.layout != "ended" and self.architecture not in DECODERS:
            needs = f"model.architecture={' or '.join(map(repr, DECODERS))}, not {self.architecture!r}"
            raise SettingError(f"tuning.layout={self.layout!r} needs {needs}")
        if self.length < MIN_ROW_LENGTH:
            due = f"should be at least {MIN_ROW_LENGTH}, such as 128"
            raise SettingError(f"tuning.inputs_length={self.length} {due}")

    def example(self, row: Row) -> LabelledExample:
        if self.task.kind == "tokens":
            return self._labels(self._words(row), self.task.target(row))
        if self.task.kind == "span":
            return self._span(self._words(row), self.task.answer_span(row) if self.task.answer_span else None)
        texts = self.task.texts(row) if self.task.kind == "choice" else (self.task.texts(row),)
        rows = [self._join_texts([self._encoded(text) for text in parts]) for parts in texts]
        target = self.task.target(row)
        known = target is not None  # a row of a test set is read and has no weight
        if self.task.kind == "classes" and known and target >= len(self.task.labels):
            raise SettingError(
                f"task {self.task.name!r} has a row with label {target}; its labels are 0 to "
                f"{len(self.task.labels) - 1}: {', '.join(self.task.labels)}"
            )
        return LabelledExample(rows, target if known else 0, float(known))

    def is_cut(self, row: Row) -> bool:
        """Return whether a row has more tokens than ``length``, so that its longest text is cut."""
        return any(encoded.is_cut for encoded in self.example(row).rows)

    def answer(self, row: Row, output: np.ndarray) -> Any:
        """Return the answer to a row that the output of a head gives, by the kind of the task.

        - classes [classes] or choice [C]: the index of the highest logit.
        - regression []: the number.
        - tokens [L,classes]: the class of each word, NO_LABEL for one that was cut off.
        - span [2,L]: the text of the span of at most MAX_ANSWER_WORDS words with the highest sum of its two
          logits; "" if no word of the context is in the row.
        """
        if self.task.kind == "regression":
            return float(output)
        if self.task.kind in ("classes", "choice"):
            return int(np.argmax(output))
        words = self._words(row)
        if self.task.kind == "tokens":
            visible = words.visible(words.begin)
            labels = np.argmax(output, axis=-1)[np.where(visible, words.begin, 0)]
            return np.where(visible, labels, NO_LABEL).tolist()
        complete = np.flatnonzero(words.visible(words.end - 1))
        if not len(complete):
            return ""
        begin, end = output[0][words.begin[complete]], output[1][words.end[complete] - 1]
        index = np.arange(len(complete))
        words_after_first = index - index[:, None]  # [first word, last word]
        is_allowed = (words_after_first >= 0) & (words_after_first < MAX_ANSWER_WORDS)
        scores = np.where(is_allowed, begin[:, None] + end, -np.inf)
        first, last = complete[np.array(np.unravel_index(np.argmax(scores), scores.shape))]
        return self.task.texts(row)[-1][words.spans[first][0] : words.spans[last][1]]

    def _encoded(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text), np.int32)

    @property
    def template(self) -> SpecialTokenTemplate:
        """Return the special tokens around the texts of a row."""
        tokenizer, template = self.tokenizer, self.tokenizer.template
        if self.layout != "ended":
            start, delim, extract = (getattr(tokenizer, name) for name in GPT_SPECIAL_TOKENS)
            return SpecialTokenTemplate((start,), (delim,), (extract,), second_token_type=1)
        if template is not None and template.suffix:
            return template
        if self.architecture == "encoder":
            cls, sep = (tokenizer.cls,), (tokenizer.sep,)
            return SpecialTokenTemplate(cls, sep, sep, second_token_type=1)
        prefix, eos = template.prefix if template else (), (tokenizer.eos,)  # prefix: <s> of Llama
        return SpecialTokenTemplate(prefix, eos, eos, second_token_type=1)

    def _join_texts(self, texts: Sequence[np.ndarray]) -> EncodedRow:
        """Return the row of one or two encoded texts, truncated, with special tokens around them."""
        prefix, separator, suffix, second_token_type, last_token_type = self.template
        ends = [separator] * (len(texts) - 1) + [suffix]  # the special tokens after each text
        room = self.length - len(prefix) - sum(map(len, ends))
        lengths = truncated_lengths([len(text) for text in texts], room)
        parts = [
            np.append(text[:length], end).astype(np.int32)
            for text, length, end in zip(texts, lengths, ends, strict=True)
        ]
        tokens = np.concatenate([np.array(prefix, np.int32), *parts])
        types = np.repeat(np.arange(len(texts)) * second_token_type, [len(part) for part in parts])
        types = np.concatenate([np.zeros(len(prefix), np.int32), types])
        if last_token_type is not None:
            types[-1] = last_token_type
        is_cut = sum(lengths) < sum(map(len, texts))
        return EncodedRow(tokens, types, len(tokens) - len(parts[-1]), len(tokens) - len(suffix), is_cut)

    def _words(self, row: Row) -> Words:
        """Return the words of the row's last text, which is one text or a list of words."""
        *others, words = self.task.texts(row)
        preceding, spans = [], []  # the character before each word, and the word's place in a text
        if isinstance(words, str):
            text = words
            spans = [match.span() for match in WORD.finditer(text)]
            words = [text[start:end] for start, end in spans]
            for start, _ in spans:
                before = text[max(start - 1, 0) : start]
                preceding.append(" " if before.isspace() else before)
        elif words:  # a list, whose words are separated by spaces
            preceding = [""] + [" "] * (len(words) - 1)
        word_ids = [encode_word(self.tokenizer, *pair) for pair in zip(preceding, words, strict=True)]
        lengths = np.array([len(ids) for ids in word_ids], np.int64)
        last = np.fromiter(chain.from_iterable(word_ids), np.int32)
        encoded = self._join_texts([*map(self._encoded, others), last])
        end = encoded.begin + np.cumsum(lengths)
        return Words(encoded, end - lengths, end, spans)

    def _labels(self, words: Words, target: Sequence[int] | None) -> LabelledExample:
        """Return the example in which the first token of each word has the word's label."""
        labels, weights = np.zeros(self.length, np.int32), np.zeros(self.length, np.float32)
        if target is None:
            return LabelledExample([words.row], labels, weights)
        visible = words.visible(words.begin)
        labels[words.begin[visible]] = np.asarray(target, np.int32)[visible]
        weights[words.begin[visible]] = 1
        return LabelledExample([words.row], labels, weights)

    @staticmethod
    def _span(words: Words, answer: tuple[int, int] | None) -> LabelledExample:
        """Return the example whose label is the first and last token of the words that overlap the answer.

        Its weight is 0 unless all are in the row. ``answer``: its [start, end) in the context [characters].
        """
        start, stop = answer or (0, 0)
        touched = [i for i, (begin, end) in enumerate(words.spans) if begin < stop and end > start]
        touched = [i for i in touched if words.end[i] > words.begin[i]]
        if not touched or words.end[touched[-1]] > words.row.end:
            return LabelledExample([words.row], [0, 0], 0.0)
        return LabelledExample([words.row], [words.begin[touched[0]], words.end[touched[-1]] - 1], 1.0)

    def batch(self, rows: Sequence[Row], size: int) -> Batch:
        """Return a batch of ``size`` examples with their labels; those beyond ``rows`` are padding."""
        examples = [self.example(row) for row in rows]
        choices = len(examples[0].rows)
        tokens, types = (np.full((size * choices, self.length), PAD, np.int32) for _ in range(2))
        counts = np.zeros(size * choices, np.int64)
        for i, row in enumerate(chain.from_iterable(example.rows for example in examples)):
            counts[i] = len(row.tokens)
            tokens[i, : counts[i]], types[i, : counts[i]] = row.tokens, row.types
        text = length_mask(counts, self.length).astype(np.int32)
        shape = (size, choices, self.length) if self.task.kind == "choice" else (size, self.length)
        batch = self._sides(tokens, types, text).map(lambda values: values.reshape(shape))
        number = np.float32 if self.task.kind == "regression" else np.int32
        labels = np.array([example.label for example in examples], number)
        weights = np.array([example.weight for example in examples], np.float32)
        return replace(
            batch, labels=_padded_rows(labels, size), label_loss_weights=_padded_rows(weights, size)
        )

    def _sides(self, tokens: np.ndarray, types: np.ndarray, text: np.ndarray) -> Batch:
        """Return a batch in which each side that the architecture has reads the same tokens [B,L]."""
        positions = np.arange(self.length, dtype=np.int32) * text
        side = Side(tokens=tokens, segment_ids=text, positions=positions)
        if self.architecture == "encoder":
            return Batch(encoder=replace(side, token_types=types))
        if self.architecture == "prefix-decoder":
            side = replace(side, causal_attention=text)  # bidirectional: all of the text is prefix
        return Batch(encoder=None if self.architecture in DECODERS else side, decoder=side)


def _padded_rows(values: np.ndarray, size: int) -> np.ndarray:
    """Return the values [N,...] padded with zeros to [size,...]."""
    padded = np.zeros((size, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a labelled task for training, reshuffled every epoch."""

    reader: Reader
    rows: Sequence[Row]
    seed: int

    def __post_init__(self) -> None:
        check_architecture(self.reader.architecture, self.seed)
        if not len(self.rows):
            raise SettingError(f"task {self.reader.task.name!r} has no examples to train on")

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.reader.length, self.reader.length, self.reader.length)

    def __call__(self, row_numbers: np.ndarray) -> Batch:
        indices = shuffled_indices(row_numbers, len(self.rows), self.seed).tolist()
        rows = [self.rows[index] for index in indices]
        self.reader.task.check_labels(rows, indices)
        return self.reader.batch(rows, len(rows))


def labelled_eval_batches(reader: Reader, rows: Sequence[Row], batch_size: int) -> list[Batch]:
    """Return all rows in order; the last batch is filled up with padding, whose labels have no weight."""
    return [reader.batch(part, batch_size) for part in split_batches(rows, batch_size)]
