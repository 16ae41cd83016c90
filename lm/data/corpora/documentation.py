"""The default corpus and its four tasks: installed documentation as TFDS sets, written once per machine.

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
from tensorflow_datasets.core.writer import ExampleWriter
from tensorflow_datasets.proto import tf_example_pb2

from lm.data.corpora.cleaning import sentences
from lm.data.corpora.harvest import DEFAULT, STDLIB, Document, harvest, share, unfiltered
from lm.data.text import sources
from lm.data.text.tfds import Corrupt, Row, serialized
from lm.settings import SettingError, nearest

# a document is in train if its share is below the first, in validation below the second, else in test
TRAIN, VALIDATION = 0.8, 0.9
EVALUATED = 500  # validation rows of a task, at most: the standard error of an accuracy is then 2 % [rows]
WORDS = 60  # at most in a task's context, to fit the inputs of the small scales [words]

TEXT, ClassLabel = tfds.features.Text(), tfds.features.ClassLabel
FEATURES = {
    "corpus": {"text": TEXT},
    "summarise": {"document": TEXT, "summary": TEXT},
    "acceptability": {"sentence": TEXT, "label": ClassLabel(names=["unacceptable", "acceptable"])},
    "follows": {"sentence1": TEXT, "sentence2": TEXT, "label": ClassLabel(names=["False", "True"])},
    "cloze": {"question": TEXT, "context": TEXT, "answers": tfds.features.Sequence(TEXT)},
    "unfiltered": {"text": TEXT},
}
# Parts of the corpus, as lists of domains are parts of C4: by a module's package, for their topic and style
SCIENCE = """
contourpy einops flax grain jax jaxlib joblib matplotlib ml_dtypes mpl_toolkits numpy opt_einsum optax orbax
scipy sklearn tensorboardX tensorflow_datasets tensorstore treescope
"""
TOPICS = """
docstring_parser fontTools help lxml markdown_it narwhals nltk pygments pyparsing regex rich rouge_score
sacrebleu sentencepiece yaml
"""  # the language's own help topics, and what reads and writes texts
CORPUS_PARTS = {"libraries": STDLIB, "science": SCIENCE.split(), "topics": TOPICS.split()}


Splits = Mapping[str, Iterable[Row]]  # rows by split
Report = Callable[[str], object]  # of a line


class DeterministicWriter(ExampleWriter):
    """Equal rows give equal files, and so an equal fingerprint, in every process."""

    def write(self, path: Any, examples: Iterable[tuple[Any, bytes]]) -> Any:
        parse = tf_example_pb2.Example.FromString
        return super().write(path, ((key, serialized(parse(row))) for key, row in examples))


class PreparedSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes rows, by split, as a TFDS set named like the subclass."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, features: Mapping[str, Any], rows: Splits, config: str | None, **rest: Any):
        self.features, self.rows = tfds.features.FeaturesDict(features), rows
        config = config and tfds.core.BuilderConfig(name=config)
        tfds.disable_progress_bar()
        logging.set_verbosity(logging.ERROR)  # a configuration that TFDS does not know is no news
        super().__init__(config=config, file_format="array_record", **rest)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(builder=self, description=type(self).__doc__, features=self.features)

    def _split_generators(self, _dl_manager: Any) -> dict[str, Iterable[tuple[int, Row]]]:
        return {split: enumerate(rows) for split, rows in self.rows.items()}

    def _example_writer(self) -> ExampleWriter:
        return DeterministicWriter(self.info.file_format)

    def _generate_examples(self) -> None:
        raise NotImplementedError("every split comes with its own rows")


class Documentation(PreparedSet, skip_registration=True):
    """Documentation of the installed Python packages; the texts keep the licences of their packages."""


def prepare_sets(
    cache: Path,
    *,
    name: str = "corpus",
    packages: Iterable[str] = DEFAULT,
    report: Report = lambda line: None,
) -> Path:
    """cache/tfds/documentation, written first if it is missing; every set appears complete or not at all.

    ``unfiltered`` is written when it is named, the other sets all at once.
    """
    home = Path(cache) / "tfds" / "documentation"
    names = [name] if name == "unfiltered" else [key for key in FEATURES if key != "unfiltered"]
    folders = [home / key / str(PreparedSet.VERSION) for key in names]
    if all(folder.exists() for folder in folders):
        return home
    report(f"writing documentation: {', '.join(names)} to {home} (once, under half a minute)")
    sets = {name: by_split(unfiltered(packages))} if name == "unfiltered" else make_sets(harvest(packages))
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".documentation-") as draft:
            for (key, rows), folder in zip(sets.items(), folders, strict=True):
                write_set(key, rows, Path(draft), folder)
    except (OSError, RuntimeError) as error:  # the second is ArrayRecord's, with several lines
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SettingError(
            f"{home / name} cannot be written ({why}): make room, or use other --runs"
        ) from error
    texts = [row["text"] for rows in sets[names[0]].values() for row in rows]
    report(f"{len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB")
    return home


def write_set(name: str, rows: Mapping[str, list[Row]], draft: Path, folder: Path) -> None:
    """One of FEATURES, made in ``draft`` and moved to ``folder`` when it is complete."""
    with contextlib.redirect_stdout(io.StringIO()):
        builder = Documentation({"name": TEXT, **FEATURES[name]}, rows, name, data_dir=draft)
        builder.download_and_prepare()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():  # else another process was faster and wrote the same
        os.replace(builder.data_dir, folder)


def texts(part: str, split: str, cache: Path, corrupt: Corrupt = "stop") -> sources.Texts:
    """The whole corpus (""), "unfiltered", or a view of the modules of one of CORPUS_PARTS."""
    if part in ("", "unfiltered"):
        return sources.tfds_texts(f"documentation/{part or 'corpus'}", split, cache, corrupt)
    if part not in CORPUS_PARTS:
        near = nearest(part, (*CORPUS_PARTS, "unfiltered"))
        raise SettingError(f"documentation has no part {part!r}{near}")
    corpus = sources.tfds_texts("documentation/corpus", split, cache, corrupt)
    chosen = (i for i, row in enumerate(corpus.rows) if row["name"].partition(".")[0] in CORPUS_PARTS[part])
    return dataclasses.replace(corpus, chosen=tuple(chosen))


def make_sets(documents: Iterable[Document]) -> dict[str, dict[str, list[Row]]]:
    """``{set: {split: rows}}`` of the corpus and the four tasks."""
    documents = list(documents)
    corpus = by_split(documents)
    held_out: dict[str, list[Document]] = {"train": [], "validation": []}
    for document in documents:
        if share(document.name, "corpus") >= TRAIN:
            held_out["train" if share(document.name, "task") < TRAIN else "validation"].append(document)
    if not all(corpus.values()) or not all(held_out.values()):
        raise SettingError(f"documentation: {len(documents)} documents are too few to split: add packages")
    sets = {"corpus": corpus}
    for name, make in MAKERS.items():
        sets[name] = {split: list(make(part, random.Random(name))) for split, part in held_out.items()}
        rows = sets[name]["validation"]
        sets[name]["validation"] = random.Random(name).sample(rows, min(len(rows), EVALUATED))
    return sets


def by_split(documents: Iterable[Document]) -> dict[str, list[Row]]:
    """A document's split depends on its name alone: no set trains on what another is evaluated on."""
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        number = share(document.name, "corpus")
        split = "train" if number < TRAIN else "validation" if number < VALIDATION else "test"
        splits[split].append(document._asdict())
    return splits


def docstrings_of(documents: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    """(name of the document, sentences) of each docstring."""
    for name, text in documents:
        for docstring in text.split("\n\n"):
            yield name, sentences(docstring.replace("\n", " "))


def summarise(documents: Iterable[Document], _rng: random.Random) -> Iterator[Row]:
    """The opening sentence of a docstring from what follows it, where the two share a word."""
    for name, (summary, *rest) in docstrings_of(documents):
        body = " ".join(" ".join(rest).split()[:WORDS])
        is_long = len(body.split()) >= 12 and len(summary.split()) <= WORDS // 2
        if is_long and content(summary) & content(body):
            yield {"name": name, "document": body, "summary": summary}


def acceptability(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Every other sentence has words inside moved or doubled, where no capital or full stop gives it away."""
    label = 0
    for name, text in documents:
        for sentence in sentences(text.replace("\n", " ")):
            words = sentence.split()
            if 6 <= len(words) <= 24:
                example = " ".join(words if label else damaged(words, rng))
                yield {"name": name, "sentence": example, "label": label}
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
    """Two neighbouring sentences of a paragraph; in every other pair the second is another document's."""
    pairs = []
    for name, text in documents:
        for line in text.split("\n"):
            parts = [sentence for sentence in sentences(line) if 4 <= len(sentence.split()) <= WORDS // 2]
            pairs += [(name, *parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
    for i, (name, first, second) in enumerate(pairs):
        others = [pairs[rng.randrange(len(pairs))] for _ in range(20)]
        other = next((pair[2] for pair in others if pair[0] != name), None)
        if i % 2 or other:
            yield {"name": name, "sentence1": first, "sentence2": second if i % 2 else other, "label": i % 2}


def cloze(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """A sentence lacks a word that stands behind the same word in other sentences of its docstring."""
    for name, parts in docstrings_of(documents):
        for i, sentence in enumerate(parts):
            context = " ".join(" ".join(parts[max(0, i - 3) : i] + parts[i + 1 : i + 4]).split()[:WORDS])
            words, known = sentence.split(), set(bigrams(context))
            gaps = [j for j, pair in enumerate(bigrams(sentence), 1) if pair in known and content(words[j])]
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
