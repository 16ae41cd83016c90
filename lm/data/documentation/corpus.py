"""The built-in corpus and its tasks: documentation of packages as TFDS data sets, written once per machine.

- ``corpus`` has a document for each module, ``unfiltered`` the docstrings without C4's filters. Their text
  is that of ``pinned``, the same on every machine, or that of the installed packages, which differs.
- The tasks of ``lm.data.documentation.tasks`` are made of the validation and test documents of the corpus
  only, and are split by document again: no text is in two splits. ``validation`` rows choose a checkpoint,
  ``report`` rows score it.
- ``roles`` is made of the code of the standard library, ``sequences-4`` and longer ones of random words.
- ``entities`` is made of unfiltered docstrings of some packages of the corpus, the same on every machine.
"""

import os
import random
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lm.c4.filters import hash_fraction
from lm.config.base import SettingError
from lm.data.corpus.files import Split
from lm.data.corpus.process_pool import process_pool
from lm.data.corpus.shards import TfdsShard, select_records, tfds_shards
from lm.data.corpus.tfds import OnCorrupt, Row, named_file_digest
from lm.data.documentation.code_tags import code_tag_rows
from lm.data.documentation.docstrings import (
    DEFAULT,
    STDLIB,
    Document,
    extract_docstrings,
    module_docstrings,
    split_of,
    unfiltered,
)
from lm.data.documentation.object_names import marked_modules, object_name_rows
from lm.data.documentation.packages import (
    INSTALLED,
    PACKAGES,
    PARTS,
    TEXT_DIGEST,
    UNFILTERED,
    check_part,
)
from lm.data.documentation.pinned import OFFLINE, pinned_documents, unfiltered_documents
from lm.data.documentation.tasks import task_generators
from lm.data.documentation.word_sequences import MAX_SEQUENCE_LENGTHS, random_sequences
from lm.files import json_with_checksum, parse_with_checksum, write

# a document that is not in train is in a task's train, validation or report split by a second hash
TASK_TRAIN_BELOW, TASK_VALIDATION_BELOW = 0.5, 0.6
# most rows of a task: the standard error of an accuracy is then about 2 % (validation) and 1 % (report)
EVALUATION_ROWS = {"validation": 500, "report": 2_000}
TASK_ROWS = {"train": 8_000} | EVALUATION_ROWS
# Tasks are made of as many of their documents as have so many characters together, which gives enough rows.
TASK_CHARACTERS = {"train": 5_000_000, "validation": 500_000, "report": 2_000_000}
COUNTED_CHARACTERS = 10_000_000  # of the training text, in which tasks count words

VERSION = "3.0.0"  # of the data sets; earlier versions had other tasks and the text of installed packages
# data set -> column -> type, in the notation of ``lm.data.documentation.builder``; each has ``name`` too,
# that of the document
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
    UNFILTERED: {"text": "text"},
    "roles": {"tokens": "texts", "roles": "integers"},
    "entities": {"tokens": "texts", "entities": "integers"},
    **{f"sequences-{length}": {"text": "text"} for length in MAX_SEQUENCE_LENGTHS},
}
# Parts of the corpus by package, which differ in topic and style, as parts of C4 by domain do
CORPUS_PARTS = {
    part: frozenset(name for package in PACKAGES if package.part == part for name in package.imports)
    for part in PARTS
}
TEXT_FILE = "text.json"  # says which text the data sets of a folder are made of


def _role_rows(packages: Iterable[str] | None, _wheels: Path) -> dict[str, list[Row]]:
    installed = DEFAULT if packages is None else packages
    return limit_rows(code_tag_rows({*installed} & {*STDLIB}), EVALUATION_ROWS, "roles")


def _entity_rows(packages: Iterable[str] | None, wheels: Path) -> dict[str, list[Row]]:
    modules = marked_modules(wheels) if packages is None else module_docstrings(packages)
    return limit_rows(object_name_rows(modules), EVALUATION_ROWS, "entities")


def _sequence_rows(max_length: int, _packages: Iterable[str] | None, _wheels: Path) -> dict[str, list[Row]]:
    return random_sequences(max_length)


# Generators of the data sets that are written alone, and do not belong to the text. They get the packages of
# ``prepare_sets`` and the folder of wheels.
SEPARATE_SETS: Mapping[str, Callable[[Iterable[str] | None, Path], Mapping[str, list[Row]]]] = {
    "roles": _role_rows,
    "entities": _entity_rows,
    **{f"sequences-{length}": partial(_sequence_rows, length) for length in MAX_SEQUENCE_LENGTHS},
}


def prepare_sets(
    cache: Path,
    *,
    name: str = "corpus",
    packages: Iterable[str] | None = None,
    report: Callable[[str], object] = lambda line: None,
) -> Path:
    """Return the folder cache/tfds/documentation, after writing the data set ``name`` if it is missing.

    A set of SEPARATE_SETS and ``unfiltered`` are written alone, the other sets together. Every set is
    complete or absent; one that exists is left as it is, whatever text it is made of (``require_text``).
    ``packages``: installed packages whose text replaces the built-in one. Raises SettingError if the folder
    cannot be written, or a package cannot be read.
    """
    home = Path(cache) / "tfds" / "documentation"
    is_alone = name in SEPARATE_SETS or name == UNFILTERED
    names = [name] if is_alone else [key for key in FEATURES if key not in (*SEPARATE_SETS, UNFILTERED)]
    folders = [home / key / VERSION for key in names]
    if name not in SEPARATE_SETS:
        check_files_of_text(home)
    if all(folder.exists() for folder in folders):
        return home
    try:
        home.mkdir(parents=True, exist_ok=True)  # before a minute of work that could not be kept
    except OSError as error:
        raise _cannot_write(home / name, error) from error
    share = f"to give a new one this cache: ln -s {shlex.quote(str(Path(cache).resolve()))} NEW/cache"
    report(f"writing documentation: {', '.join(names)} to {home} (once per folder of runs; {share})")
    wheels = Path(cache) / "wheels"
    digest = INSTALLED if packages is not None else TEXT_DIGEST
    # of the text that is in the cache already
    if name == UNFILTERED and packages is None and recorded_digest(cache) == INSTALLED:
        packages, digest = DEFAULT, INSTALLED
    sets: Iterable[tuple[str, Mapping[str, list[Row]]]]
    if name in SEPARATE_SETS:
        sets = [(name, SEPARATE_SETS[name](packages, wheels))]
    elif name == UNFILTERED:
        raw = unfiltered_documents(wheels, report) if packages is None else unfiltered(packages)
        sets = [(name, by_split(raw))]
    elif packages is None:
        sets = make_sets(pinned_documents(wheels, report))
    else:
        sets = make_sets(extract_docstrings(packages))
    try:
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".documentation-") as draft:
            if is_alone:  # nothing is made meanwhile, so it takes no second process
                written = {name: write_set(name, rows, Path(draft)) for name, rows in sets}
            else:
                written = write_sets(sets, Path(draft))
            move_sets(written, home)
        if name not in SEPARATE_SETS:
            record_text(home, digest, folders)
    except (OSError, RuntimeError) as error:  # the second is ArrayRecord's, with several lines
        raise _cannot_write(home / name, error) from error
    report(f"{written[names[0]].num_rows:,} rows of {names[0]}")
    return home


def _cannot_write(place: Path, error: Exception) -> SettingError:
    """Return the error of a folder that cannot be written."""
    why = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)
    return SettingError(f"{place} cannot be written ({why}): make room, or use other --runs")


def record_text(home: Path, digest: str, folders: Iterable[Path]) -> None:
    """Write which text the sets are made of, and the digests of their files, to ``home/TEXT_FILE``."""
    files = _recorded(home).get("files", {})
    for folder in folders:
        for path in sorted(folder.glob("*array_record*")):
            files[str(path.relative_to(home))] = named_file_digest(path)
    write(home / TEXT_FILE, json_with_checksum({"version": VERSION, "digest": digest, "files": files}))


def _recorded(home: Path) -> dict[str, Any]:
    """Return what ``record_text`` wrote for this version; empty if there is nothing."""
    path = home / TEXT_FILE
    if not path.exists():
        return {}
    recorded = parse_with_checksum(path.read_bytes(), path)
    return recorded if recorded.get("version") == VERSION else {}


def recorded_digest(cache: Path) -> str:
    """Return the digest of the text that the data sets in a cache are made of, INSTALLED, or "" for none."""
    return _recorded(Path(cache) / "tfds" / "documentation").get("digest", "")


def check_files_of_text(home: Path) -> None:
    """Raise SettingError if the sets below ``home`` are of another text, or their files were changed."""
    recorded = _recorded(home)
    mend = f"delete {home}, so that it is written again"
    if not recorded:
        if (home / "corpus" / VERSION).exists():
            raise SettingError(f"{home / TEXT_FILE} is missing, which names the text: {mend}")
        return
    if recorded["digest"] not in (TEXT_DIGEST, INSTALLED):
        raise SettingError(
            f"{home} has the text {recorded['digest'][:12]} and not {TEXT_DIGEST[:12]}: {mend}"
        )
    for name, digest in recorded["files"].items():
        path = home / name
        if path.parent.exists() and (not path.is_file() or named_file_digest(path) != digest):
            raise SettingError(f"{path} is not what was written there: {mend}")


def require_text(cache: Path, part: str) -> None:
    """Raise SettingError if the sets in the cache are made of another text than ``part`` needs."""
    found = recorded_digest(cache)
    if found and (found == INSTALLED) != (part == INSTALLED):
        kind = "the installed packages" if found == INSTALLED else "the built-in text"
        other = OFFLINE if found == INSTALLED else "documentation"
        raise SettingError(
            f"{Path(cache) / 'tfds' / 'documentation'} holds data sets of {kind}: use other --runs, delete "
            f"that folder, or take --data.corpus {other}"
        )


class WrittenSet(NamedTuple):
    """A data set is complete in its folder."""

    folder: Path
    num_rows: int  # of all splits


def write_sets(sets: Iterable[tuple[str, Mapping[str, list[Row]]]], draft: Path) -> dict[str, WrittenSet]:
    """Write data sets below ``draft``, each in a second process while the next one is made."""
    with process_pool(1) as writer:
        jobs = {name: writer.submit(write_set, name, rows, draft) for name, rows in sets}
        return {name: job.result() for name, job in jobs.items()}


def write_set(name: str, rows: Mapping[str, list[Row]], folder: Path) -> WrittenSet:
    """Write a data set of FEATURES below ``folder``."""
    from lm.data.documentation.builder import build_set  # imports TFDS, which takes a second

    own = build_set(name, VERSION, {"name": "text", **FEATURES[name]}, rows, folder)
    return WrittenSet(own, sum(map(len, rows.values())))


def move_sets(written: Mapping[str, WrittenSet], home: Path) -> None:
    """Move complete data sets to ``home/NAME/VERSION``; one that another process wrote first is kept."""
    for name, (folder, _) in written.items():
        place = home / name / VERSION
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.replace(folder, place)
        except OSError:
            if not place.exists():
                raise


def documentation_shards(
    part: str, split: Split, cache: Path, corrupt: OnCorrupt = "stop"
) -> tuple[TfdsShard, ...]:
    """Return the shards of a part of the corpus, one that ``check_part`` accepts."""
    check_part(part)
    if part == UNFILTERED:
        return tfds_shards(f"documentation/{UNFILTERED}", split, cache, corrupt)
    shards = tfds_shards("documentation/corpus", split, cache, corrupt)
    if part not in CORPUS_PARTS:  # all of it
        return shards
    return select_records(shards, lambda row: row["name"].partition(".")[0] in CORPUS_PARTS[part])


def make_sets(documents: Iterable[Document]) -> Iterator[tuple[str, dict[str, list[Row]]]]:
    """Yield (set, {split: rows}) for the corpus and the tasks; SettingError for too few documents."""
    documents = list(documents)
    corpus = by_split(documents)
    task_documents: dict[str, list[Document]] = {"train": [], "validation": [], "report": []}
    for document in documents:
        if split_of(document.name) != "train":
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
    train = [document for document in documents if split_of(document.name) == "train"]
    counted = sample_up_to(train, COUNTED_CHARACTERS)
    sampled = {split: sample_up_to(part, TASK_CHARACTERS[split]) for split, part in task_documents.items()}
    yield "corpus", corpus
    for name, generate in task_generators(text for _, text in counted).items():
        rows = {split: [*generate(part, random.Random(name))] for split, part in sampled.items()}
        if not all(rows.values()):
            raise SettingError(
                f"documentation: {len(documents)} documents are too few for {name!r}: add packages"
            )
        yield name, limit_rows(rows, TASK_ROWS, name)


def sample_up_to(documents: Sequence[Document], characters: int) -> list[Document]:
    """Return random documents until their texts have so many characters together, or all."""
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
    """Return the rows of documents by split."""
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        splits[split_of(document.name)].append(document._asdict())
    return splits
