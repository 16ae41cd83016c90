"""The built-in corpus and its tasks: installed documentation as TFDS data sets, written once per machine.

- ``corpus`` has a document for each module, ``unfiltered`` the same modules without C4's filters.
- The tasks of ``lm.data.documentation.tasks`` are made of the validation and test documents of the corpus
  only, and are split by document again: no text is in two splits. ``validation`` rows choose a checkpoint,
  ``report`` rows score it.
- ``roles`` is made of the code of the standard library, ``sequences-4`` and longer ones of random words.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lm.c4.filters import hash_fraction
from lm.config.base import SettingError, nearest
from lm.data.corpus.files import Split
from lm.data.corpus.shards import TfdsShard, select_records, tfds_shards
from lm.data.corpus.tfds import OnCorrupt, Row
from lm.data.documentation.code_tags import code_tag_rows
from lm.data.documentation.docstrings import DEFAULT, STDLIB, Document, extract_docstrings, unfiltered
from lm.data.documentation.tasks import task_generators
from lm.data.documentation.word_sequences import MAX_SEQUENCE_LENGTHS, random_sequences

# a document is in train if its hash is below the first, in validation if below the second, else in test
TRAIN_BELOW, VALIDATION_BELOW = 0.8, 0.9
# a document that is not in train is in a task's train, validation or report split by a second hash
TASK_TRAIN_BELOW, TASK_VALIDATION_BELOW = 0.5, 0.6
# most rows of a task: the standard error of an accuracy is then about 2 % (validation) and 1 % (report)
EVALUATION_ROWS = {"validation": 500, "report": 2_000}
TASK_ROWS = {"train": 8_000} | EVALUATION_ROWS
# Tasks are made of as many of their documents as have so many characters together, which gives enough rows.
TASK_CHARACTERS = {"train": 5_000_000, "validation": 500_000, "report": 2_000_000}
COUNTED_CHARACTERS = 10_000_000  # of the training text, in which tasks count words

VERSION = "3.0.0"  # of the data sets; those before had other tasks
# data set -> column -> type, in the notation of ``lm.data.documentation.builder``
FEATURES: Mapping[str, Mapping[str, str]] = {
    "corpus": {"text": "text"},
    "cloze": {"question": "text", "context": "text", "answers": "texts", "candidates": "texts"},
    "extract": {"question": "text", "context": "text", "answers": "texts"},
    "restore": {"document": "text", "summary": "text"},
    "next": {"sentences": "texts", "following": "text", "label": "integer"},
    "summary": {"documents": "texts", "summary": "text", "label": "integer"},
    "modality": {"sentence": "text", "answers": "texts", "candidates": "texts"},
    "order": {"context": "text", "answers": "texts", "candidates": "texts"},
    "acceptability": {"context": "text", "sentence": "text", "damaged": "text"},
    "agreement": {"context": "text", "sentence": "text", "damaged": "text"},
    "determiners": {"context": "text", "sentence": "text", "damaged": "text"},
    "verb-forms": {"context": "text", "sentence": "text", "damaged": "text"},
    "unfiltered": {"text": "text"},
    "roles": {"tokens": "texts", "roles": "integers"},
    **{f"sequences-{length}": {"text": "text"} for length in MAX_SEQUENCE_LENGTHS},
}
# Parts of the corpus by package, which differ in topic and style, as parts of C4 by domain do
SCIENCE = """
contourpy einops flax grain jax jaxlib joblib matplotlib ml_dtypes mpl_toolkits numpy opt_einsum optax orbax
scipy sklearn tensorboardX tensorflow_datasets tensorstore treescope
"""
TOPICS = """
docstring_parser fontTools help lxml markdown_it narwhals nltk pygments pyparsing regex rich rouge_score
sacrebleu sentencepiece yaml
"""  # the help topics of Python itself, and packages that process text
CORPUS_PARTS = {"libraries": STDLIB, "science": SCIENCE.split(), "topics": TOPICS.split()}


def _sequence_rows(max_length: int, _packages: Iterable[str]) -> dict[str, list[Row]]:
    return random_sequences(max_length)


# generators of the data sets that are written alone, when they are named; all others are written together
SEPARATE_SETS: Mapping[str, Callable[[Iterable[str]], Mapping[str, list[Row]]]] = {
    "unfiltered": lambda packages: by_split(unfiltered(packages)),
    "roles": lambda packages: limit_rows(code_tag_rows({*packages} & {*STDLIB}), EVALUATION_ROWS, "roles"),
    **{f"sequences-{length}": partial(_sequence_rows, length) for length in MAX_SEQUENCE_LENGTHS},
}


def prepare_sets(
    cache: Path,
    *,
    name: str = "corpus",
    packages: Iterable[str] = DEFAULT,
    report: Callable[[str], object] = lambda line: None,
) -> Path:
    """Return the folder cache/tfds/documentation, after writing the data set ``name`` if it is missing.

    A set of SEPARATE_SETS is written alone, the other sets together. Every set is complete or absent. Raises
    SettingError if the folder cannot be written.
    """
    home = Path(cache) / "tfds" / "documentation"
    names = [name] if name in SEPARATE_SETS else [key for key in FEATURES if key not in SEPARATE_SETS]
    folders = [home / key / VERSION for key in names]
    if all(folder.exists() for folder in folders):
        return home
    report(f"writing documentation: {', '.join(names)} to {home} (once, under half a minute)")
    sets = (
        {name: SEPARATE_SETS[name](packages)}
        if name in SEPARATE_SETS
        else make_sets(extract_docstrings(packages))
    )
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
    report(f"{sum(map(len, sets[names[0]].values())):,} rows of {names[0]}")
    return home


def write_set(name: str, rows: Mapping[str, list[Row]], draft: Path, folder: Path) -> None:
    """Write a data set of FEATURES in ``draft``, and move it to ``folder`` when it is complete."""
    from lm.data.documentation.builder import build_set  # imports TFDS, which takes a second

    written = build_set(name, VERSION, {"name": "text", **FEATURES[name]}, rows, draft)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():  # else another process has written the same
        os.replace(written, folder)


def documentation_shards(
    part: str, split: Split, cache: Path, corrupt: OnCorrupt = "stop"
) -> tuple[TfdsShard, ...]:
    """Return the shards of a part of the corpus: "" (all of it), "unfiltered", or one of CORPUS_PARTS.

    SettingError with the nearest name if there is no such part.
    """
    if part in ("", "unfiltered"):
        return tfds_shards(f"documentation/{part or 'corpus'}", split, cache, corrupt)
    if part not in CORPUS_PARTS:
        near = nearest(part, (*CORPUS_PARTS, "unfiltered"))
        raise SettingError(f"documentation has no part {part!r}{near}")
    shards = tfds_shards("documentation/corpus", split, cache, corrupt)
    return select_records(shards, lambda row: row["name"].partition(".")[0] in CORPUS_PARTS[part])


def make_sets(documents: Iterable[Document]) -> dict[str, dict[str, list[Row]]]:
    """Return ``{set: {split: rows}}`` for the corpus and the tasks; SettingError for too few documents."""
    documents = list(documents)
    corpus = by_split(documents)
    task_documents: dict[str, list[Document]] = {"train": [], "validation": [], "report": []}
    for document in documents:
        if hash_fraction(document.name, "corpus") >= TRAIN_BELOW:
            fraction = hash_fraction(document.name, "task")
            if fraction < TASK_TRAIN_BELOW:
                split = "train"
            elif fraction < TASK_VALIDATION_BELOW:
                split = "validation"
            else:
                split = "report"
            task_documents[split].append(document)
    if not all(corpus.values()) or not all(task_documents.values()):
        raise SettingError(f"documentation: {len(documents)} documents are too few to split: add packages")
    train = [document for document in documents if hash_fraction(document.name, "corpus") < TRAIN_BELOW]
    counted = sample_up_to(train, COUNTED_CHARACTERS)
    sampled = {split: sample_up_to(part, TASK_CHARACTERS[split]) for split, part in task_documents.items()}
    sets = {"corpus": corpus}
    for name, generate in task_generators(text for _, text in counted).items():
        rows = {split: [*generate(part, random.Random(name))] for split, part in sampled.items()}
        if not all(rows.values()):
            raise SettingError(
                f"documentation: {len(documents)} documents are too few for {name!r}: add packages"
            )
        sets[name] = limit_rows(rows, TASK_ROWS, name)
    return sets


def sample_up_to(documents: Sequence[Document], characters: int) -> list[Document]:
    """Return documents in a random order, as many as have so many characters together; else all."""
    sampled: list[Document] = []
    for document in random.Random("sample").sample(documents, len(documents)):
        if characters <= 0:
            break
        sampled.append(document)
        characters -= len(document.text)
    return sampled


def limit_rows(splits: Mapping[str, list[Row]], limits: Mapping[str, int], name: str) -> dict[str, list[Row]]:
    """Return the splits; those with a limit are sampled down to that many rows. ``name`` is the seed."""
    limited = dict(splits)
    for split in limits.keys() & splits.keys():
        rows = splits[split]
        limited[split] = random.Random(name).sample(rows, min(len(rows), limits[split]))
    return limited


def by_split(documents: Iterable[Document]) -> dict[str, list[Row]]:
    """Return the rows of documents by split.

    The split of a document depends on its name alone: no set trains on what another is evaluated on.
    """
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        fraction = hash_fraction(document.name, "corpus")
        if fraction < TRAIN_BELOW:
            split = "train"
        elif fraction < VALIDATION_BELOW:
            split = "validation"
        else:
            split = "test"
        splits[split].append(document._asdict())
    return splits
