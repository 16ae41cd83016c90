"""The default corpus and its four tasks: installed documentation as TFDS sets, written once, on the user's
machine.

``corpus`` holds a document per module, ``unfiltered`` what it would be without C4's rules. The tasks
(``summarise``, ``acceptability``, ``follows``, ``cloze``) are made of the corpus's validation and test
documents only, and are split by document themselves: nothing is seen twice.
"""

import contextlib
import dataclasses
import io
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging

from lm.data.corpora.cleaning import sentences
from lm.data.corpora.harvest import PACKAGES, STDLIB, Document, harvest, share, unfiltered
from lm.data.text import sources
from lm.data.text.tfds import Corrupt, Row
from lm.settings import SettingError, nearest

# a document's share below the first: train; below the second: validation; else test
TRAIN, VALIDATION = 0.8, 0.9
# at most so many validation rows per task: the standard error of an accuracy is then 2 % [rows]
EVALUATED = 500
WORDS = 60  # a task's context has at most so many words, to fit the inputs of the small scales [words]

TEXT = tfds.features.Text()
FEATURES = {
    "corpus": {"text": TEXT},
    "summarise": {"document": TEXT, "summary": TEXT},
    "acceptability": {
        "sentence": TEXT,
        "label": tfds.features.ClassLabel(names=["unacceptable", "acceptable"]),
    },
    "follows": {
        "sentence1": TEXT,
        "sentence2": TEXT,
        "label": tfds.features.ClassLabel(names=["False", "True"]),
    },
    "cloze": {"question": TEXT, "context": TEXT, "answers": tfds.features.Sequence(TEXT)},
    "unfiltered": {"text": TEXT},
}
# Parts of the corpus as lists of domains are of C4, by a module's package: of what they speak, and in what
# style.
SCIENCE = """
contourpy einops flax grain jax jaxlib joblib matplotlib ml_dtypes mpl_toolkits numpy opt_einsum optax orbax
scipy sklearn tensorboardX tensorflow_datasets tensorstore treescope
"""
TOPICS = """
docstring_parser fontTools help lxml markdown_it narwhals nltk pygments pyparsing regex rich rouge_score
sacrebleu sentencepiece yaml
"""  # the language's own help topics, and what reads and writes texts
PARTS = {"libraries": STDLIB, "science": SCIENCE.split(), "topics": TOPICS.split()}


class Prepared(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes rows that are there, by split, as a TFDS set; a class of its own names the set."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(
        self,
        features: Mapping[str, Any],
        rows: Mapping[str, Iterable[Row]],
        *,
        config: str | None,
        **rest: Any,
    ):
        self.features, self.rows = tfds.features.FeaturesDict(features), rows
        config = config and tfds.core.BuilderConfig(name=config)
        tfds.disable_progress_bar()
        logging.set_verbosity(logging.ERROR)  # that a configuration is not one of TFDS's own is no news
        super().__init__(config=config, file_format="array_record", **rest)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(builder=self, description=type(self).__doc__, features=self.features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterable[tuple[int, Row]]]:
        return {split: enumerate(rows) for split, rows in self.rows.items()}

    def _generate_examples(self) -> None:
        raise NotImplementedError("every split comes with its own rows")


class Documentation(Prepared, skip_registration=True):
    """Documentation of the installed Python packages; the texts keep the licences of their packages."""


def prepare(
    cache: Path,
    *,
    name: str = "corpus",
    packages: Iterable[str] = STDLIB + PACKAGES,
    report: Callable[[str], object] = lambda line: None,
) -> Path:
    """cache/tfds/documentation, written first if it is not there; every set appears complete or not at all.

    ``unfiltered`` is written when it is asked for, the other sets all at once.
    """
    home = Path(cache) / "tfds" / "documentation"
    names = [name] if name == "unfiltered" else [key for key in FEATURES if key != "unfiltered"]
    parts = [Path(key, str(Prepared.VERSION)) for key in names]
    if all((home / part).exists() for part in parts):
        return home
    report(f"writing documentation: {', '.join(names)} to {home} (once, under half a minute)")
    sets = {name: by_split(unfiltered(packages))} if name == "unfiltered" else build(harvest(packages))
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".documentation-") as folder:
            for (name, rows), part in zip(sets.items(), parts, strict=True):
                write_set(name, rows, Path(folder), home / part)
    except (OSError, RuntimeError) as error:  # the second is ArrayRecord's, with several lines
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SettingError(
            f"{home / name} cannot be written ({why}): make room, or choose other --runs"
        ) from error
    texts = [row["text"] for rows in sets[names[0]].values() for row in rows]
    report(f"{len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB")
    return home


def write_set(name: str, rows: Mapping[str, list[Row]], draft: Path, place: Path) -> None:
    """One of FEATURES, made in ``draft``, at ``place`` when it is whole."""
    with contextlib.redirect_stdout(io.StringIO()):
        builder = Documentation({"name": TEXT, **FEATURES[name]}, rows, config=name, data_dir=draft)
        builder.download_and_prepare()
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():  # else another process was faster and wrote the same
        os.replace(builder.data_dir, place)


def texts(part: str, split: str, cache: Path, corrupt: Corrupt = "stop") -> sources.Texts:
    """The whole corpus (""), "unfiltered", or the modules of one of PARTS: a view, nothing is written for
    it.
    """
    if part in ("", "unfiltered"):
        return sources.tfds_texts(f"documentation/{part or 'corpus'}", split, cache, corrupt)
    if part not in PARTS:
        raise SettingError(f"documentation has no part {part!r}{nearest(part, (*PARTS, 'unfiltered'))}")
    whole = sources.tfds_texts("documentation/corpus", split, cache, corrupt)
    chosen = (i for i, row in enumerate(whole.rows) if row["name"].partition(".")[0] in PARTS[part])
    return dataclasses.replace(whole, chosen=tuple(chosen))


def build(documents: Iterable[Document]) -> dict[str, dict[str, list[Row]]]:
    """``{set: {split: rows}}`` of the corpus and the four tasks."""
    documents = list(documents)
    corpus = by_split(documents)
    held_out: dict[str, list[Document]] = {"train": [], "validation": []}
    for document in documents:
        if share(document.name, "corpus") >= TRAIN:
            held_out["train" if share(document.name, "task") < TRAIN else "validation"].append(document)
    if not all(corpus.values()) or not all(held_out.values()):
        found = sum(map(len, corpus.values()))
        raise SettingError(f"documentation: {found} documents found; too few to split. Name more packages")
    sets = {"corpus": corpus}
    for name, make in MAKERS.items():
        sets[name] = {
            split: list(make(documents, random.Random(name))) for split, documents in held_out.items()
        }
        rows = sets[name]["validation"]
        sets[name]["validation"] = random.Random(name).sample(rows, min(len(rows), EVALUATED))
    return sets


def by_split(documents: Iterable[Document]) -> dict[str, list[Row]]:
    """Where a document belongs depends on its name alone, so that no set trains on what another is evaluated
    on.
    """
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        place = share(document.name, "corpus")
        splits["train" if place < TRAIN else "validation" if place < VALIDATION else "test"].append(
            document._asdict()
        )
    return splits


def summarise(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """The opening sentence of a docstring from what follows it, where the two share a word."""
    for name, text in documents:
        for docstring in text.split("\n\n"):
            summary, *rest = sentences(docstring.replace("\n", " "))
            body = " ".join(" ".join(rest).split()[:WORDS])
            if (
                len(body.split()) >= 12
                and len(summary.split()) <= WORDS // 2
                and content(summary) & content(body)
            ):
                yield {"name": name, "document": body, "summary": summary}


def acceptability(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Every other sentence has its order of words damaged inside, where no capital or full stop gives it
    away.
    """
    label = 0
    for name, text in documents:
        for sentence in sentences(text.replace("\n", " ")):
            words = sentence.split()
            if 6 <= len(words) <= 24:
                yield {
                    "name": name,
                    "sentence": " ".join(words if label else damaged(words, rng)),
                    "label": label,
                }
                label = 1 - label


def damaged(words: list[str], rng: random.Random) -> list[str]:
    """A word doubled, two neighbours exchanged, or four words in another order."""
    length = rng.choice((1, 2, 4))
    start = rng.randrange(1, len(words) - length)
    part = words[start : start + length]
    other = part * 2 if length == 1 or len(set(part)) == 1 else part
    while other == part:
        other = rng.sample(part, length)
    return words[:start] + other + words[start + length :]


def follows(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Two neighbouring sentences of a paragraph; in every other pair the second comes from another
    document.
    """
    pairs = []
    for name, text in documents:
        for line in text.split("\n"):
            found = [sentence for sentence in sentences(line) if 4 <= len(sentence.split()) <= WORDS // 2]
            pairs += [(name, *found[i : i + 2]) for i in range(0, len(found) - 1, 2)]
    for i, (name, first, second) in enumerate(pairs):
        others = [pairs[rng.randrange(len(pairs))] for _ in range(20)]
        other = next((pair[2] for pair in others if pair[0] != name), None)
        if i % 2 or other:
            yield {"name": name, "sentence1": first, "sentence2": second if i % 2 else other, "label": i % 2}


def cloze(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """A sentence lacks a word which stands in its docstring's other sentences behind the same word as
    here.
    """
    for name, text in documents:
        for docstring in text.split("\n\n"):
            found = sentences(docstring.replace("\n", " "))
            for i, sentence in enumerate(found):
                context = " ".join(" ".join(found[max(0, i - 3) : i] + found[i + 1 : i + 4]).split()[:WORDS])
                words, known = sentence.split(), set(bigrams(context))
                gaps = [
                    j for j, pair in enumerate(bigrams(sentence), 1) if pair in known and content(words[j])
                ]
                if gaps and len(words) <= WORDS // 2:
                    gap = rng.choice(gaps)
                    answer = bare(words[gap])
                    question = " ".join([*words[:gap], words[gap].replace(answer, "_"), *words[gap + 1 :]])
                    yield {"name": name, "question": question, "context": context, "answers": [answer]}


MAKERS: dict[str, Callable[[Iterable[Document], random.Random], Iterator[Row]]] = {
    make.__name__: make for make in (summarise, acceptability, follows, cloze)
}


def bare(word: str) -> str:
    return word.strip(".,;:!?()[]\"'")


def bigrams(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return [(first, bare(second)) for first, second in zip(words, words[1:], strict=False)]


def content(text: str) -> set[str]:
    """The words of a text that say what it is about: five letters or more."""
    return set(re.findall(r"[a-z]{5,}", text.lower()))
