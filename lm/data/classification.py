"""Turn rows of labelled tasks into features and labels for a head, and its outputs into what metrics compare.

A row is [CLS] A [SEP] B [SEP] for an encoder, A <eos> B <eos> for all others, whose head reads the last
token; a published tokenizer puts its own tokens around texts, as RoBERTa's <s> A </s></s> B </s>. Encoder and
decoder of an encoder-decoder read the same row, unshifted (Lewis et al. 2020, section 3.1). A decoder may
read START A DELIM B EXTRACT instead, and its head the last of them, EXTRACT (Radford et al. 2018, section
3.3). For labels of words, and for answers in a context, words are encoded one by one: for most tokenizers
that gives the same tokens as encoding the whole text.
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
from lm.data.batches import shuffled_indices, split_into_batches
from lm.data.checks import check_architecture, check_symbols
from lm.data.packing import DECODERS
from lm.data.tasks.labelled import LabelledTask
from lm.data.tasks.task import Row
from lm.objectives.corruption import length_mask
from lm.objectives.denoising import Lengths
from lm.tokenizers.tokenizer import PAD, Layout, Vocabulary

WORD = re.compile(r"\w+|[^\w\s]")  # a word or a punctuation mark, at which answers may begin and end
ANSWER_WORDS = 30  # longest answer [words]; Devlin et al. 2019 count it in tokens (in their code)
SHORTEST_ROW = 8  # [tokens]
GPT_TOKENS = ("start", "delim", "extract")  # the special tokens of GPT's layout
NO_LABEL = -1  # predicted for a word that was cut off or has no tokens


class RowFrame(NamedTuple):
    """The special tokens, as ids, around the texts of a row."""

    begin: tuple[int, ...]
    between: tuple[int, ...]  # after each text but the last
    end: tuple[int, ...]  # after the last text
    second_type: int = 1  # token type of the second text


class FramedRow(NamedTuple):
    """A row of texts with special tokens around them."""

    tokens: np.ndarray  # int32 [tokens]
    types: np.ndarray  # int32 [tokens]: token types
    begin: int  # where the last text begins
    end: int  # and where it ends


class RowWords(NamedTuple):
    """The words of the last text of a row."""

    row: FramedRow
    begin: np.ndarray  # int [words]: position in the row of each word's first token
    end: np.ndarray  # int [words]: the position after its last token, which may have been cut off
    spans: list[tuple[int, int]]  # span of each word in the context, end excluded [characters]

    def has_position(self, positions: np.ndarray) -> np.ndarray:
        """Return bool [words]: whether a word has tokens, and its one of ``positions`` is in the row."""
        return (self.end > self.begin) & (positions < self.row.end)


class LabelledExample(NamedTuple):
    """The rows of an example: a single one or, for multiple choice, one for each candidate."""

    rows: list[FramedRow]
    label: Any  # a class, a number, a class per position, or the span's first and last position
    weight: Any  # in the loss, of each label


def truncated_lengths(sizes: Sequence[int], room: int) -> list[int]:
    """Return the lengths to which one or two texts are truncated, longest first, to fit ``room`` tokens."""
    if len(sizes) == 1:
        return [min(sizes[0], room)]
    first = min(sizes[0], max(room - sizes[1], (room + 1) // 2))
    return [first, min(sizes[1], room - first)]


@functools.lru_cache(maxsize=100_000)
def encode_word(vocabulary: Vocabulary, before: str, word: str) -> tuple[int, ...]:
    """Return the token ids of a word that comes after the character ``before`` in its text.

    A word may have other tokens within a text than alone: both are encoded together, and the word's tokens
    are those after the tokens of ``before``. After a blank, which most tokenizers make a part of the word,
    all tokens are the word's. If ``before`` alone has other tokens than together with the word, the word is
    encoded alone.
    """
    both, prefix = vocabulary.encode(before + word), vocabulary.encode(before) if before.strip() else []
    is_prefix = len(both) > len(prefix) and both[: len(prefix)] == prefix
    return tuple(both[len(prefix) :] if is_prefix else vocabulary.encode(word))


@dataclass(frozen=True)
class Reader:
    """Turns a task's rows into examples for a head, and the head's outputs into answers."""

    task: LabelledTask
    vocabulary: Vocabulary
    architecture: str
    length: int
    layout: Layout = "ended"

    def __post_init__(self) -> None:
        check_architecture(self.architecture)
        check_symbols(self.vocabulary, [] if self.layout == "ended" else [*GPT_TOKENS], self.architecture)
        if self.layout != "ended" and self.architecture not in DECODERS:
            raise SettingError(
                f"tuning.layout={self.layout!r} needs model.architecture={' or '.join(map(repr, DECODERS))}, "
                f"not {self.architecture!r}"
            )
        if self.length < SHORTEST_ROW:
            raise SettingError(
                f"tuning.inputs_length={self.length} should be at least {SHORTEST_ROW}, such as 128"
            )

    def example(self, row: Row) -> LabelledExample:
        """Return the example of a row of the task."""
        if self.task.kind == "tokens":
            return self._word_label_example(self._words(row), self.task.target(row))
        if self.task.kind == "span":
            answer = self.task.answer_span(row) if self.task.answer_span else None
            return self._span_example(self._words(row), answer)
        candidates = self.task.texts(row) if self.task.kind == "choice" else (self.task.texts(row),)
        rows = [self._framed([self._encode(text) for text in texts]) for texts in candidates]
        target = self.task.target(row)
        is_known = target is not None  # a row of a test set is read and has no weight
        if self.task.kind == "classes" and is_known and target >= len(self.task.labels):
            raise SettingError(
                f"task {self.task.name!r} has a row with label {target}; its labels are 0 to "
                f"{len(self.task.labels) - 1}: {', '.join(self.task.labels)}"
            )
        return LabelledExample(rows, target if is_known else 0, float(is_known))

    def answer(self, row: Row, output: np.ndarray) -> Any:
        """Return the answer to a row that the output of a head means, by the kind of the task.

        - classes [classes] or choice [C]: the index of the highest logit.
        - regression []: the number.
        - tokens [L,classes]: the class of each word, NO_LABEL for one that was cut off.
        - span [2,L]: the text of the span of at most ANSWER_WORDS words with the highest sum of its two
          logits; "" if no word of the context is in the row.
        """
        if self.task.kind == "regression":
            return float(output)
        if self.task.kind in ("classes", "choice"):
            return int(np.argmax(output))
        words = self._words(row)
        if self.task.kind == "tokens":
            in_row = words.has_position(words.begin)
            labels = np.argmax(output, axis=-1)[np.where(in_row, words.begin, 0)]
            return np.where(in_row, labels, NO_LABEL).tolist()
        complete = np.flatnonzero(words.has_position(words.end - 1))
        if not len(complete):
            return ""
        begin_logits, end_logits = output[0][words.begin[complete]], output[1][words.end[complete] - 1]
        count = len(complete)
        # [first word,last word]: the last not before the first, and at most ANSWER_WORDS words in all
        is_span = np.tri(count, k=ANSWER_WORDS - 1) * np.tri(count).T > 0
        best = np.argmax(np.where(is_span, begin_logits[:, None] + end_logits, -np.inf))
        first, last = complete[best // count], complete[best % count]
        return self.task.texts(row)[-1][words.spans[first][0] : words.spans[last][1]]

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.vocabulary.encode(text), np.int32)

    @property
    def _frame(self) -> RowFrame:
        if self.layout != "ended":
            start, delim, extract = (getattr(self.vocabulary, name) for name in GPT_TOKENS)
            return RowFrame((start,), (delim,), (extract,))
        affixes, eos, sep = self.vocabulary.affixes, (self.vocabulary.eos,), (self.vocabulary.sep,)
        if affixes is not None and affixes.behind:
            return RowFrame(*affixes)
        if self.architecture == "encoder":
            return RowFrame((self.vocabulary.cls,), sep, sep)
        return RowFrame(affixes.before if affixes else (), eos, eos)  # before: <s> for Llama

    def _framed(self, texts: Sequence[np.ndarray]) -> FramedRow:
        """Return the row of one or two texts of token ids, truncated to fit."""
        begin, between, end, second_type = self._frame
        ends = [between] * (len(texts) - 1) + [end]
        room = self.length - len(begin) - sum(map(len, ends))
        lengths = truncated_lengths([len(text) for text in texts], room)
        ended = [
            np.append(text[:length], special).astype(np.int32)
            for text, length, special in zip(texts, lengths, ends, strict=True)
        ]
        tokens = np.concatenate([np.array(begin, np.int32), *ended])
        types = np.repeat(np.arange(len(texts)) * second_type, [len(text) for text in ended])
        types = np.concatenate([np.zeros(len(begin), np.int32), types])
        return FramedRow(tokens, types, len(tokens) - len(ended[-1]), len(tokens) - len(end))

    def _words(self, row: Row) -> RowWords:
        """Return the words of the row's last text, which is one text or a list of words."""
        *other_texts, words = self.task.texts(row)
        if isinstance(words, str):
            text, spans = words, [match.span() for match in WORD.finditer(words)]
            words = [text[start:end] for start, end in spans]
            before = [re.sub(r"\s", " ", text[max(start - 1, 0) : start]) for start, _ in spans]
        else:
            spans, before = [], ["", *[" "] * (len(words) - 1)]
        ids = [encode_word(self.vocabulary, *pair) for pair in zip(before, words, strict=True)]
        counts = np.array([len(word) for word in ids], np.int64)
        last_text = np.fromiter(chain.from_iterable(ids), np.int32)
        framed = self._framed([*map(self._encode, other_texts), last_text])
        end = framed.begin + np.cumsum(counts)
        return RowWords(framed, end - counts, end, spans)

    def _word_label_example(self, words: RowWords, target: Sequence[int] | None) -> LabelledExample:
        """Return the example in which the first token of each word has the word's label."""
        labels, weights = np.zeros(self.length, np.int32), np.zeros(self.length, np.float32)
        if target is None:
            return LabelledExample([words.row], labels, weights)
        in_row = words.has_position(words.begin)
        labels[words.begin[in_row]] = np.asarray(target, np.int32)[in_row]
        weights[words.begin[in_row]] = 1
        return LabelledExample([words.row], labels, weights)

    @staticmethod
    def _span_example(words: RowWords, answer: tuple[int, int] | None) -> LabelledExample:
        """Return the example whose label is the first and last token of the words that overlap the answer.

        Its weight is 0 unless all are in the row. ``answer``: its [start, end) in the context [characters].
        """
        start, stop = answer or (0, 0)
        overlapping = [i for i, (begin, end) in enumerate(words.spans) if begin < stop and end > start]
        overlapping = [i for i in overlapping if words.end[i] > words.begin[i]]
        if not overlapping or words.end[overlapping[-1]] > words.row.end:
            return LabelledExample([words.row], [0, 0], 0.0)
        return LabelledExample(
            [words.row], [words.begin[overlapping[0]], words.end[overlapping[-1]] - 1], 1.0
        )

    def batch(self, rows: Sequence[Row], size: int) -> Batch:
        """Return a batch of ``size`` examples with their labels; those beyond ``rows`` are padding."""
        examples = [self.example(row) for row in rows]
        candidates = len(examples[0].rows)
        tokens, types = (np.full((size * candidates, self.length), PAD, np.int32) for _ in range(2))
        counts = np.zeros(size * candidates, np.int64)
        for i, row in enumerate(chain.from_iterable(example.rows for example in examples)):
            counts[i] = len(row.tokens)
            tokens[i, : counts[i]], types[i, : counts[i]] = row.tokens, row.types
        is_token = length_mask(counts, self.length).astype(np.int32)
        shape = (size, candidates, self.length) if self.task.kind == "choice" else (size, self.length)
        batch = self._unlabelled_batch(tokens, types, is_token).map(lambda values: values.reshape(shape))
        label_type = np.float32 if self.task.kind == "regression" else np.int32
        labels = np.array([example.label for example in examples], label_type)
        weights = np.array([example.weight for example in examples], np.float32)
        return replace(
            batch, labels=_padded_rows(labels, size), label_loss_weights=_padded_rows(weights, size)
        )

    def _unlabelled_batch(self, tokens: np.ndarray, types: np.ndarray, is_token: np.ndarray) -> Batch:
        """Return the batch in which all stacks of the architecture read the same tokens [B,L]."""
        positions = np.arange(self.length, dtype=np.int32) * is_token
        side = Side(tokens=tokens, segment_ids=is_token, positions=positions)
        if self.architecture == "encoder":
            return Batch(encoder=replace(side, token_types=types))
        if self.architecture == "prefix-decoder":
            side = replace(side, causal_attention=is_token)  # bidirectional: all of the text is prefix
        return Batch(encoder=None if self.architecture in DECODERS else side, decoder=side)


def _padded_rows(values: np.ndarray, size: int) -> np.ndarray:
    """Return the values [N,...] padded with zeros to [size,...]."""
    padded = np.zeros((size, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


@dataclass(frozen=True)
class LabelledRows:
    """Rows of a labelled task for training: each once per epoch, in a new order in each epoch."""

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

    def __call__(self, numbers: np.ndarray) -> Batch:
        indices = shuffled_indices(numbers, len(self.rows), self.seed).tolist()
        rows = [self.rows[index] for index in indices]
        self.reader.task.check_labels(rows, indices)
        return self.reader.batch(rows, len(rows))


def labelled_eval_batches(reader: Reader, rows: Sequence[Row], batch_size: int) -> list[Batch]:
    """Return all rows in order; the last batch is filled up with padding, whose labels have no weight."""
    return [reader.batch(some, batch_size) for some in split_into_batches(rows, batch_size)]
