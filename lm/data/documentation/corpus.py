"""The default corpus and its tasks: installed documentation as TFDS sets, written once per machine.

``corpus`` holds a document per module, ``unfiltered`` the same modules without C4's rules. The tasks of
``lm.data.documentation.tasks`` are made of the corpus's validation and test documents only, and are split by
document themselves: nothing is seen twice. ``validation`` is the part of their held-out rows by which a
checkpoint is chosen, ``report`` the part on which it is then scored. ``roles`` is made of the standard
library's code, ``sequences-4`` and those of longer sequences of words drawn at random.
"""

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core.writer import ExampleWriter
from tensorflow_datasets.proto import tf_example_pb2

from lm.c4.filters import hash_fraction
from lm.config.base import SettingError, nearest
from lm.data.corpus.files import Split
from lm.data.corpus.shards import TfdsShard, select_records, tfds_shards
from lm.data.corpus.tfds import OnCorrupt, Row, serialize_example
from lm.data.documentation.code_tags import role_rows
from lm.data.documentation.docstrings import DEFAULT, STDLIB, Document, harvest, unfiltered
from lm.data.documentation.drawn_words import LONGEST_SEQUENCES, random_sequences
from lm.data.documentation.tasks import makers, word_groups

# a document is in train if its hash is below the first, in validation if below the second, else in test
TRAIN, VALIDATION = 0.8, 0.9
# likewise for the others, which tasks are made of: train, validation (to choose a checkpoint), report
TASK_TRAIN, TASK_VALIDATION = 0.5, 0.6
# most rows of a task: the standard error of an accuracy is about 2 % (validation) and 1 % (report)
EVALUATED = {"validation": 500, "report": 2_000}

TEXT = tfds.features.Text()
TEXTS = tfds.features.Sequence(TEXT)
FEATURES = {
    "corpus": {"text": TEXT},
    "cloze": {"question": TEXT, "context": TEXT, "answers": TEXTS, "candidates": TEXTS},
    "extract": {"question": TEXT, "context": TEXT, "answers": TEXTS},
    "acceptability": {"context": TEXT, "sentence": TEXT, "damaged": TEXT},
    "first-sentence": {"document": TEXT, "summary": TEXT},
    "next": {"sentences": TEXTS, "following": TEXT, "label": tfds.features.Scalar(np.int64)},
    "restore": {"document": TEXT, "summary": TEXT},
    "unfiltered": {"text": TEXT},
    "roles": {"tokens": TEXTS, "roles": tfds.features.Sequence(np.int64)},
    **{f"sequences-{longest}": {"text": TEXT} for longest in LONGEST_SEQUENCES},
}
# Parts of the corpus by package, as parts of C4 are by domain, for their topic and style
SCIENCE = """
contourpy einops flax grain jax jaxlib joblib matplotlib ml_dtypes mpl_toolkits numpy opt_einsum optax orbax
scipy sklearn tensorboardX tensorflow_datasets tensorstore treescope
"""
TOPICS = """
docstring_parser fontTools help lxml markdown_it narwhals nltk pygments pyparsing regex rich rouge_score
sacrebleu sentencepiece yaml
"""  # the help topics of Python itself, and packages that process text
CORPUS_PARTS = {"libraries": STDLIB, "science": SCIENCE.split(), "topics": TOPICS.split()}


Splits = Mapping[str, Iterable[Row]]  # rows by split
Report = Callable[[str], object]  # shows a line


def _sequences(longest: int, _packages: Iterable[str]) -> dict[str, list[Row]]:
    return random_sequences(longest)


# makers of the sets that are written alone, when they are named; the other sets are written all at once
ALONE: Mapping[str, Callable[[Iterable[str]], Mapping[str, list[Row]]]] = {
    "unfiltered": lambda packages: by_split(unfiltered(packages)),
    "roles": lambda packages: at_most(EVALUATED, role_rows({*packages} & {*STDLIB}), "roles"),
    **{f"sequences-{longest}": partial(_sequences, longest) for longest in LONGEST_SEQUENCES},
}


class DeterministicWriter(ExampleWriter):
    """Writes equal rows as equal files, and so with an equal fingerprint, in every process."""

    def write(self, path: Any, examples: Iterable[tuple[Any, bytes]]) -> Any:
        parse = tf_example_pb2.Example.FromString
        return super().write(path, ((key, serialize_example(parse(row))) for key, row in examples))


class PreparedSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes rows, by split, as a TFDS set named like the subclass."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, features: Mapping[str, Any], rows: Splits, config: str | None, **rest: Any):
        self.features, self.rows = tfds.features.FeaturesDict(features), rows
        config = config and tfds.core.BuilderConfig(name=config)
        tfds.disable_progress_bar()
        logging.set_verbosity(logging.ERROR)  # TFDS warns about a configuration that it does not know
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

    VERSION = tfds.core.Version("2.2.0")  # 1.0.0 had other tasks


def prepare_sets(
    cache: Path,
    *,
    name: str = "corpus",
    packages: Iterable[str] = DEFAULT,
    report: Report = lambda line: None,
) -> Path:
    """Return the folder cache/tfds/documentation, after writing the set ``name`` if it is missing.

    The sets of ALONE are written when they are named, the other sets all at once; a set appears complete or
    not at all. SettingError if the folder cannot be written.
    """
    home = Path(cache) / "tfds" / "documentation"
    names = [name] if name in ALONE else [key for key in FEATURES if key not in ALONE]
    folders = [home / key / str(Documentation.VERSION) for key in names]
    if all(folder.exists() for folder in folders):
        return home
    report(f"writing documentation: {', '.join(names)} to {home} (once, under half a minute)")
    sets = {name: ALONE[name](packages)} if name in ALONE else make_sets(harvest(packages))
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
    """Write one of the sets of FEATURES in ``draft``, and move it to ``folder`` when it is complete."""
    with contextlib.redirect_stdout(io.StringIO()):
        builder = Documentation({"name": TEXT, **FEATURES[name]}, rows, name, data_dir=draft)
        builder.download_and_prepare()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():  # else another process was faster and wrote the same
        os.replace(builder.data_dir, folder)


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
    """Return ``{set: {split: rows}}`` of the corpus and the tasks; SettingError for too few documents."""
    documents = list(documents)
    corpus = by_split(documents)
    parts: dict[str, list[Document]] = {"train": [], "validation": [], "report": []}
    for document in documents:
        if hash_fraction(document.name, "corpus") >= TRAIN:
            number = hash_fraction(document.name, "task")
            split = "train" if number < TASK_TRAIN else "validation" if number < TASK_VALIDATION else "report"
            parts[split].append(document)
    if not all(corpus.values()) or not all(parts.values()):
        raise SettingError(f"documentation: {len(documents)} documents are too few to split: add packages")
    groups = word_groups(row["text"] for row in corpus["train"])
    sets = {"corpus": corpus}
    for name, make in makers(groups).items():
        rows = {split: [*make(part, random.Random(name))] for split, part in parts.items()}
        sets[name] = at_most(EVALUATED, rows, name)
    return sets


def at_most(most: Mapping[str, int], splits: Mapping[str, list[Row]], name: str) -> dict[str, list[Row]]:
    """Return the splits, those that ``most`` names sampled down to that many rows; ``name`` is the seed."""
    return {
        split: random.Random(name).sample(rows, min(len(rows), most[split])) if split in most else rows
        for split, rows in splits.items()
    }


def by_split(documents: Iterable[Document]) -> dict[str, list[Row]]:
    """Return the rows of documents by split.

    The split of a document depends on its name alone: no set trains on what another is evaluated on.
    """
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        number = hash_fraction(document.name, "corpus")
        split = "train" if number < TRAIN else "validation" if number < VALIDATION else "test"
        splits[split].append(document._asdict())
    return splits
