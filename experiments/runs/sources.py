"""Corpora and tasks in a cache, each opened once."""

from collections.abc import Sequence
from pathlib import Path

from lm.data.corpus.files import OnCorrupt, Split
from lm.data.corpus.shards import Shard, corpus_fingerprint
from lm.data.corpus.spec import corpus_parts, corpus_shards, dataset_rows
from lm.data.corpus.tables import TableRows
from lm.data.corpus.tfds import TfdsRows
from lm.data.documentation.corpus import recorded_digest
from lm.data.tasks.task import BaseTask, Row


class Sources:
    """Opens corpora and tasks, each once, however many stages of a run read it.

    ``corrupt`` says what becomes of corrupt records in training. In all other splits they are errors, since
    scores on fewer records would not compare.
    """

    def __init__(self, cache: Path, corrupt: OnCorrupt = "stop"):
        self.cache = cache
        self._corrupt: OnCorrupt = corrupt
        self._corpora: dict[tuple[str, str], tuple[Shard, ...]] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}
        self._stored: dict[tuple[str, str, str], TfdsRows | TableRows] = {}
        self._rows: dict[tuple[str, str, str], Sequence[Row]] = {}

    def corrupt(self, split: str) -> OnCorrupt:
        """Return what becomes of corrupt records of a split."""
        return self._corrupt if split == "train" else "stop"

    def corpus(self, name: str, split: Split) -> tuple[Shard, ...]:
        """Return the shards of a corpus; SettingError if it is missing."""
        if (name, split) not in self._corpora:
            self._corpora[name, split] = corpus_shards(name, split, self.cache, self.corrupt(split))
        return self._corpora[name, split]

    def corpus_fingerprint(self, name: str, split: Split) -> str:
        """Return the fingerprint of all shards of a corpus."""
        if (name, split) not in self._fingerprints:
            self._fingerprints[name, split] = corpus_fingerprint(self.corpus(name, split))
        return self._fingerprints[name, split]

    def documentation_digest(self, name: str) -> str:
        """Return the digest of the built-in text, or "installed"; "" for a corpus that does not read it."""
        kinds = {part.partition("/")[0] for part in corpus_parts(name)}
        return recorded_digest(self.cache) if "documentation" in kinds else ""

    def stored(self, task: BaseTask, split: str) -> TfdsRows | TableRows:
        """Return the rows of a task as its dataset stores them; SettingError if they are missing."""
        key = (task.name, task.source, split)
        if key not in self._stored:
            stored = dataset_rows(task.source, getattr(task, split), self.cache, self.corrupt(split))
            self._stored[key] = stored
        return self._stored[key]

    def rows(self, task: BaseTask, split: str) -> Sequence[Row]:
        """Return the rows of a task as it is trained and scored on them."""
        key = (task.name, task.source, split)
        if key not in self._rows:
            self._rows[key] = task.rows(split, self.cache, self.corrupt(split))
        return self._rows[key]
