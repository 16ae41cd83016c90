"""Writes batches.json: hashes of batches, which a change of how they are made may not change.

There are 100 batches of every objective of the registry under every architecture it suits, plain and with
other settings; 100 of every mixture of denoisers; 100 of mixtures of tasks, evaluation and labelled tasks;
and two of every other legal choice of noise, inputs, targets, sentences, pairs and EOS. The corpus and its
vocabulary are synthetic, drawn from a fixed seed. Run it when batches are meant to change:

    python tests/golden/make_batches.py
"""

import hashlib
import itertools
import json
import re
import typing
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lm.batch import Batch, concatenate
from lm.config.base import SettingError
from lm.data.batches import Batches, stream
from lm.data.classification import LabelledRows, Reader, labelled_eval_batches
from lm.data.collocations import Collocations
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import EncodedDocuments
from lm.data.packing import ARCHITECTURES
from lm.data.pretraining import pretraining_rows
from lm.data.seq2seq import CorpusExamples, MixtureRows, eval_batches
from lm.data.tasks.labelled import LABELLED
from lm.objectives.denoising import DENOISER_MIXTURES, OBJECTIVES, Lengths, Objective

PLACE = Path(__file__).with_name("batches.json")
STEPS = (
    0,
    99,
    13,
    50,
    37,
    *(step for step in range(99) if step not in (0, 13, 37, 50)),
)  # the fast ones first
FAST = 2
PAIRS = ("none", "next-sentence", "sentence-order")
# All choices by name but ``loss``, which has cases of its own.
CHOICES = {
    field.name: sorted(typing.get_args(field.type))
    for field in fields(Objective)
    if typing.get_origin(field.type) is typing.Literal and field.name != "loss"
}
CHOICES["eos"] = ["between-documents", "each-example"]  # without EOS: ``variants``


@dataclass(frozen=True)
class Tokenizer:
    """Ids are hashes of up to three characters: a third of them begin words, a tenth end sentences."""

    num_sentinels: int = 20
    vocab_size: int = 300
    pad, eos, sep = 0, 1, 1
    first_regular_id, template = 3, None

    @property
    def mask(self) -> int:
        return self.vocab_size - 1

    @property
    def cls(self) -> int:
        return self.vocab_size - 2

    @property
    def word_starts(self) -> np.ndarray:
        return np.arange(self.vocab_size) % 3 == 0

    @property
    def sentence_ends(self) -> np.ndarray:
        return np.arange(self.vocab_size) % 10 == 1

    def encode(self, text: str) -> list[int]:
        return [3 + zlib.crc32(piece.encode()) % 270 for piece in re.findall(r" ?\w{1,3}| ?[^\w\s]", text)]


class OneWindow:
    """Tokens as a corpus of one window."""

    fingerprint, shards = "", (None,)

    def __init__(self, tokens: EncodedDocuments, tokenizer: Any):
        self.tokens, self.tokenizer = tokens, tokenizer

    def read(self, _shard: int, window: int) -> EncodedDocuments | None:
        return None if window else self.tokens


def corpus() -> EncodedDocuments:
    """Documents of 0 to 299 tokens, some 6,000 in all."""
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum([*random.integers(1, 300, 40), 0, 1, 2])])
    return EncodedDocuments(random.integers(3, 273, offsets[-1]).astype(np.uint16), offsets)


CORPUS, VOCABULARY = corpus(), Tokenizer()
_WORDS = np.flatnonzero(VOCABULARY.word_starts[CORPUS.tokens])  # where they begin
COLLOCATIONS = Collocations(  # two words of the text at every third, and three at every seventh
    CORPUS.tokens[_WORDS[k] : _WORDS[k + size]].tolist()
    for size, stride in ((2, 3), (3, 7))
    for k in range(0, len(_WORDS) - size, stride)
)
ROWS = {
    "acceptability": [
        {"sentence": f"a sentence, {'very ' * i}long", "label": i % 2 - (i == 3)} for i in range(30)
    ],
    "follows": [{"sentence1": f"it {i}" * i, "sentence2": f"follows {i}", "label": i % 2} for i in range(30)],
    "stsb": [{"sentence1": "one" * i, "sentence2": f"other {i}", "label": i / 7} for i in range(30)],
    "pos": [
        {"tokens": ["do", "n't", "\u4e2d", "", "going" * i], "upos": [3, 9, 0, 1, i % 17]} for i in range(30)
    ],
    "extract": [
        {"question": "the", "context": f"{'or ' * i}the (handler): it's", "answers": ["handler"]}
        for i in range(30)
    ],
    "next": [
        {"following": f"s{i}", "sentences": [f"{i} {k}" * k for k in range(4)], "label": i % 4}
        for i in range(30)
    ],
}


def examples(count: int) -> list[tuple[list[int], list[int]]]:
    """Ids of inputs, one to 39, and of targets, one to 24."""
    random = np.random.default_rng(count)
    sizes = zip(random.integers(1, 40, count), random.integers(1, 25, count), strict=True)
    return [tuple(random.integers(3, 273, size).tolist() for size in sides) for sides in sizes]


def pretraining(
    objective: Objective, architecture: str, length: int = 48, vocabulary: Tokenizer = VOCABULARY
):
    streams = CorpusSampler(OneWindow(CORPUS, vocabulary), 1, 7)
    settings = {"architecture": architecture, "inputs_length": length, "batch_size": 6}
    settings |= {"collocations": COLLOCATIONS if objective.needs_collocations else None}
    return Batches(pretraining_rows(streams, objective, **settings), 6)


def mixed(architecture: str, names: tuple[str, ...], corpus: str | None) -> Batches:
    # grain takes milliseconds to draw from a few examples, and microseconds from a hundred
    tasks = {name: examples(100 * i + 60) for i, name in enumerate(names)}
    if corpus:
        tasks["corpus"] = CorpusExamples(pretraining(OBJECTIVES[corpus], architecture).row_source)
    rates = {name: i + 1.0 for i, name in enumerate(tasks)}
    return Batches(MixtureRows(tasks, rates, architecture, Lengths(0, 48, 30), seed=7), 6)


def evaluation(architecture: str) -> Callable[[int, slice], Batch]:
    def batches(step: int, rows: slice) -> Batch:
        made = eval_batches(
            examples(step % 9 + 1), architecture=architecture, lengths=Lengths(0, 20, 15), batch_size=4
        )
        return concatenate(made)

    return batches


def labelled(name: str, architecture: str, trains: bool) -> Callable[[int, slice], Batch]:
    reader = Reader(LABELLED[name], VOCABULARY, architecture, 24)
    if trains:
        return Batches(LabelledRows(reader, ROWS[name], 7), 6)
    return lambda step, rows: labelled_eval_batches(reader, ROWS[name][: step % 8 + 1], 4)[-1]


def streamed(batches: Callable[[int, slice], Batch]) -> Callable[[int, slice], Batch]:
    """Made ahead, of rows that are not one block."""
    made = dict(enumerate(stream(batches, 0, len(STEPS), rows=(slice(0, 2), slice(5, 6)))))
    return lambda step, _: made[step]


def variants(objective: Objective) -> dict[str, tuple[Objective, dict]]:
    """An objective, and with other settings of the amount of noise, of EOS, of lengths and of sentinels."""

    def amount(**settings: float) -> Objective:
        return replace(
            objective, **{k: v for k, v in settings.items() if k not in objective.corruption.ignores}
        )

    return {
        "": (objective, {}),
        "half": (amount(rate=0.5, mean_span_length=2.0), {}),
        "tenth": (amount(rate=0.1, mean_span_length=10.0), {"length": 150}),
        "ends": (replace(objective, eos="each-example"), {}),
        "between": (replace(objective, eos="between-documents"), {"length": 33}),
        "without-eos": (replace(objective, eos="none"), {}),
        "permuted": (replace(objective, sentences="permuted"), {}),
        "few-sentinels": (amount(rate=0.3), {"vocabulary": Tokenizer(num_sentinels=3)}),
        **{pairs: (replace(objective, pairs=pairs), {}) for pairs in PAIRS[1:]},
    }


def registry() -> Iterator[tuple[str, Callable[[], Callable]]]:
    """Of every objective x architecture x variant its name and what makes its batch function."""
    for (name, objective), architecture in itertools.product(OBJECTIVES.items(), ARCHITECTURES):
        for variant, (changed, settings) in variants(objective).items():
            if not variant or changed != objective or settings:
                yield (
                    " ".join([name, architecture, variant]).strip(),
                    lambda c=changed, a=architecture, s=settings: pretraining(c, a, **s),
                )


def mixtures() -> Iterator[tuple[str, Callable[[], Callable]]]:
    """Of every mixture of denoisers, and of every objective with the loss on its targets, by architecture."""
    for architecture in ARCHITECTURES:
        for name in DENOISER_MIXTURES:
            yield (
                f"denoisers {name} {architecture}",
                lambda n=name, a=architecture: pretraining(Objective(mixture=n), a),
            )
        for name, objective in OBJECTIVES.items() if architecture.endswith("decoder") else ():
            yield (
                f"{name} {architecture} loss on targets",
                lambda o=objective, a=architecture: pretraining(replace(o, loss="targets"), a),
            )


def supervised() -> Iterator[tuple[str, Callable[[], Callable]]]:
    for architecture in ARCHITECTURES:
        for name, trains in itertools.product(ROWS, (True, False)):
            yield (
                f"labelled {name} {architecture} {'train' if trains else 'evaluation'}",
                lambda n=name, a=architecture, t=trains: labelled(n, a, t),
            )
        if architecture != "encoder":
            yield f"evaluation {architecture}", lambda a=architecture: evaluation(a)
            for corpus in (None, "baseline", "mass-style", "prefix-lm"):
                yield (
                    f"mixture {architecture} {corpus}",
                    lambda a=architecture, c=corpus: mixed(a, ("one", "two", "three"), c),
                )
    yield "stream", lambda: streamed(pretraining(OBJECTIVES["prefix-lm"], "encoder-decoder"))


def legal() -> Iterator[tuple[str, Callable]]:
    """Every choice of an objective and an architecture that is not refused: its name and its batches."""
    for values in itertools.product(*CHOICES.values()):
        for architecture in ARCHITECTURES:
            objective = Objective(**dict(zip(CHOICES, values, strict=True)))
            try:
                yield " ".join([*values, architecture]), pretraining(objective, architecture)
            except SettingError:
                continue


def add(total: "hashlib._Hash", batch: Batch) -> None:
    for name, values in sorted(batch.features().items()):
        total.update(
            f"{name} {values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes()
        )


def hashes(make: Callable[[], Callable], steps: int) -> list[str] | None:
    """Of the first FAST batches and of all; None if the settings are refused."""
    try:
        batches = make()
        total, found = hashlib.sha256(), []
        for number, step in enumerate(STEPS[:steps], 1):
            add(total, batches(step, slice(None)))
            if number in (FAST, len(STEPS)):
                found.append(total.hexdigest()[:16])
    except SettingError:
        return None
    return found


def cases(steps: int = len(STEPS)) -> dict[str, list[str]]:
    found = {name: hashes(make, steps) for name, make in (*registry(), *mixtures(), *supervised())}
    return {name: value for name, value in found.items() if value is not None}


def combinations() -> dict[str, list[str | int]]:
    """By noise: how many choices are legal, and the hash of their names and of two batches of each."""
    found: dict[str, list] = {}
    for name, batches in legal():
        count, total = found.setdefault(name.split()[0], [0, hashlib.sha256()])
        found[name.split()[0]][0] = count + 1
        total.update(name.encode())
        for step in STEPS[:2]:
            try:
                add(total, batches(step, slice(1, 4)))
            except SettingError:
                total.update(b"refused")
    return {noise: [count, total.hexdigest()[:16]] for noise, (count, total) in found.items()}


def written(found: dict) -> str:
    """JSON with a line for each case, so that a difference shows whose it is."""
    parts = [
        f'"{name}": {{\n' + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in part.items()) + "\n}"
        for name, part in found.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    print(f"{PLACE.name}: one to two minutes", flush=True)
    PLACE.write_text(written({"cases": cases(), "combinations": combinations()}))
