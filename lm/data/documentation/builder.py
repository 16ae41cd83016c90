"""Write rows in memory as TFDS data sets of array_record files, without TensorFlow."""

import contextlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.core.writer import ExampleWriter
from tensorflow_datasets.proto import tf_example_pb2

from lm.data.corpus.tfds import Row, serialize_example

TYPES = {  # type of a column -> its feature in TFDS
    "text": tfds.features.Text(),
    "texts": tfds.features.Sequence(tfds.features.Text()),
    "integer": tfds.features.Scalar(np.int64),
    "integers": tfds.features.Sequence(np.int64),
}

DESCRIPTION = "Documentation of the installed Python packages; the texts keep the licences of their packages."


class DeterministicWriter(ExampleWriter):
    """Writes equal rows as equal bytes in every process, so that they have equal fingerprints."""

    def write(self, path: Any, examples: Iterable[tuple[Any, bytes]]) -> Any:
        parse = tf_example_pb2.Example.FromString
        return super().write(path, ((key, serialize_example(parse(row))) for key, row in examples))


class InMemoryBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builds a TFDS data set, named like the subclass, from rows in memory."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(
        self,
        features: Mapping[str, Any],
        rows: Mapping[str, Iterable[Row]],
        config: str | None,
        **rest: Any,
    ):
        """Take ``rows`` by split, with ``features`` by column; ``rest`` goes to TFDS's builder."""
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


def build_set(
    name: str, version: str, columns: Mapping[str, str], rows: Mapping[str, list[Row]], folder: Path
) -> Path:
    """Write the set ``documentation/NAME`` of this version below ``folder``; return its own folder.

    ``columns``: column -> type, one of TYPES; ``rows``: by split.
    """
    attributes = {"VERSION": tfds.core.Version(version), "__doc__": DESCRIPTION}
    builder_class = type("Documentation", (InMemoryBuilder,), attributes, skip_registration=True)
    features = {column: TYPES[kind] for column, kind in columns.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        builder = builder_class(features, rows, name, data_dir=folder)
        builder.download_and_prepare()
    return Path(builder.data_dir)
