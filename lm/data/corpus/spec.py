"""Open a corpus or a dataset by its name. The documentation corpus is written when it is first needed.

The name of a corpus is one of these, or several joined by " + ":

- ``documentation`` (the built-in text) or ``documentation/PART``; ``documentation/installed`` is that of the
  packages installed here, which differs from machine to machine
- ``text:PATH``, ``jsonl:PATH`` or ``parquet:PATH``: a file, a folder or a glob; the last two have the text in
  their field "text"
- ``tfds:NAME[:VERSION]``: a TFDS set prepared as array_record, such as ``tfds:c4/en``
"""

import os
import shlex
import sys
from pathlib import Path

from lm.config.base import SettingError, did_you_mean
from lm.data.corpus import tfds
from lm.data.corpus.files import Split, describe_files, file_shards, other_files
from lm.data.corpus.readers import WINDOW_READERS
from lm.data.corpus.shards import Shard, tfds_shards
from lm.data.corpus.tables import TableRows, read_hub, read_table
from lm.data.corpus.tfds import OnCorrupt, TfdsRows
from lm.data.documentation.packages import INSTALLED, UNFILTERED, check_part


def corpus_shards(spec: str, split: Split, cache: Path, on_corrupt: OnCorrupt = "stop") -> tuple[Shard, ...]:
    """Return the shards of the ``train`` or ``validation`` split of a corpus, reading almost nothing of them.

    ``on_corrupt="skip"`` skips records that cannot be read. SettingError for an unknown corpus or split.
    """
    if split not in ("train", "validation"):
        raise SettingError(f"split={split!r} of a corpus should be 'train' or 'validation'")
    names = corpus_parts(spec)
    for each in names:  # before the text of one is made
        check_corpus_name(each)
    if len(names) > 1:
        return sum((corpus_shards(each, split, cache, on_corrupt) for each in names), ())
    kind, _, name = spec.partition(":")
    if kind.partition("/")[0] == "documentation" and not name:
        from lm.data.documentation import corpus  # imports TFDS, which takes seconds

        part = kind.partition("/")[2]
        corpus.require_text(cache, part)
        if part == INSTALLED:
            _report("documentation/installed differs from machine to machine: its results do not compare")
            corpus.prepare_sets(cache, packages=corpus.DEFAULT, report=_report)
        else:
            write_documentation(f"documentation/{part if part == UNFILTERED else 'corpus'}", cache)
        return corpus.documentation_shards(part, split, cache, on_corrupt)
    if kind == "tfds" and name:
        write_documentation(name, cache)
        return tfds_shards(name, split, cache, on_corrupt)
    return file_shards(kind, name, split, on_corrupt)


def check_corpus_name(spec: str, setting: str = "data.corpus") -> None:
    """Raise SettingError unless a corpus, one of ``corpus_parts``, has the name of a text or a known kind.

    setting: what names it, for the error.
    """
    kind, _, name = spec.partition(":")
    if kind.partition("/")[0] == "documentation" and not name:
        check_part(kind.partition("/")[2], setting)
        return
    if kind in ("tfds", *WINDOW_READERS) and name:
        return
    kinds = ("documentation", "documentation/PART", *(f"{kind}:PATH" for kind in WINDOW_READERS), "tfds:NAME")
    if ":" not in spec and (spec.startswith(("~", "/", ".")) or "*" in spec or os.path.exists(spec)):
        raise SettingError(f"{setting}={spec!r} should be 'text:{spec}'")
    raise SettingError(f"{setting}={spec!r} is unknown{did_you_mean(kind, kinds)}")


def describe_corpus(spec: str) -> str:
    """Return a line on the user's own files in a corpus, and on those in its folders that are not read.

    It is "" for a corpus without files of the user's own. Nothing is read of the files.
    """
    parts = corpus_parts(spec)
    named = [part.partition(":") for part in parts]
    own = [(kind, name) for kind, _, name in named if kind in WINDOW_READERS]
    line = "; ".join(f"{kind}:{name} has {describe_files(kind, name)}" for kind, name in own)
    found = {corpus: count for kind, name in own for corpus, count in other_files(kind, name).items()}
    if unread := {corpus: count for corpus, count in found.items() if corpus not in parts}:
        counts = ", ".join(f"{count} of {corpus}" for corpus, count in unread.items())
        whole = shlex.quote(" + ".join([*parts, *unread]))
        line += f"; not read: {counts} (to read them too: --data.corpus {whole})"
    return line


def corpus_parts(spec: str) -> list[str]:
    """Return the names that the name of a corpus joins by " + "."""
    return [part.strip() for part in spec.split(" + ")]


def is_documentation(part: str) -> bool:
    """Return whether a corpus, one of ``corpus_parts``, is documentation, which a run writes itself."""
    return part.removeprefix("tfds:").partition("/")[0] == "documentation"


def dataset_rows(name: str, split: str, cache: Path, on_corrupt: OnCorrupt = "stop") -> TfdsRows | TableRows:
    """Return the rows of one split of a dataset.

    ``file:FOLDER`` has a file for each split, and ``hf:NAME`` is a dataset of the Hugging Face Hub. Any other
    name is a TFDS set (``tfds.prepared_rows``); those of the documentation are written first if missing.
    """
    kind, _, source = name.partition(":")
    if kind == "file":
        return read_table(Path(source) / split)
    if kind == "hf":
        return read_hub(source, split)
    write_documentation(name, cache)
    return tfds.prepared_rows(name, split, cache, on_corrupt)


def write_documentation(name: str, cache: Path) -> None:
    """Write the dataset ``documentation/SET`` unless it exists; do nothing for any other name."""
    kind, _, part = name.partition(":")[0].partition("/")
    if kind == "documentation" and part:
        from lm.data.documentation import corpus

        corpus.prepare_sets(cache, name=part, report=_report)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
