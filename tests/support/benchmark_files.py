"""Benchmarks as files in the format of TFDS, with a few rows each."""

import numpy as np
import tensorflow_datasets as tfds

from lm.data.documentation.builder import InMemoryBuilder

TEXT = tfds.features.Text()
PUT = {"sentence": "Carl put the book down so that he could see it.", "candidates": ["Carl", "the book"]}
ASKED = {"paragraph": "<b>Sent 1: </b>Ann runs.<br>", "question": "Who runs?"}
READ = {"source": "Daily mail", "query": "@placeholder won", "idx": {"passage": 0, "query": 0}}


def feature(name, value):
    """The official feature of a value like this one."""
    if isinstance(value, dict):
        return {key: feature(key, inner) for key, inner in value.items()}
    if isinstance(value, list):
        return tfds.features.Sequence(feature(name, value[0]))
    if isinstance(value, str):
        return TEXT
    return tfds.features.ClassLabel(num_classes=3) if name == "label" else tfds.features.Scalar(np.int32)


def made(*rows, splits="validation"):
    return tfds.features.FeaturesDict(feature("", rows[0])), rows, splits


def languages(other):
    return made(
        {"en": "Good morning, Ann.", other: "eins zwei drei vier fünf"}, {"en": "Yes.", other: "a b c d e f"}
    )


# task: official features, two rows, splits; and how the first row reads
SETS = {
    "qqp": made(*({"question1": "A?", "question2": f"{k}?", "label": k, "idx": k} for k in (0, 1))),
    "mnli": made(
        *({"premise": "P.", "hypothesis": "H.", "label": k, "idx": k} for k in (2, 1)),
        splits="validation_matched validation_mismatched",
    ),
    "wnli": made(
        {
            "sentence1": "The fish ate the worm. It was tasty.",
            "sentence2": "The worm was tasty.",
            "label": 1,
            "idx": 0,
        },
        {
            "sentence1": "Ann gave Bea her book, but it was Ann's.",
            "sentence2": "Bea's book, but",
            "label": 0,
            "idx": 1,
        },
    ),
    "multirc": made(
        ASKED | {"answer": "Ann", "label": 1, "idx": {"paragraph": 0, "question": 0, "answer": 0}},
        ASKED | {"answer": "Bea", "label": 0, "idx": {"paragraph": 0, "question": 0, "answer": 1}},
    ),
    "record": made(
        READ
        | {"passage": "Ann ran\n@highlight\nBea sat", "entities": ["Ann", "Bea"], "answers": ["Ann", "Bea"]},
        READ | {"passage": "Ann ran.\n@highlight\nBea sat", "entities": ["Ann"], "answers": ["Ann"]},
    ),
    "dpr": made(PUT | {"pronoun": "he", "label": 0}, PUT | {"pronoun": "it", "label": 1}, splits="train"),
    "cnn_dailymail": made(
        *(
            {"article": f"Ann ran {k} miles.", "highlights": "Ann ran .\nBea sat .", "id": str(k)}
            for k in (1, 2)
        )
    ),
    **{f"wmt_en{other}": languages(other) for other in ("de", "fr", "ro")},
}


def prepare(source, folder, given):
    """Write a set of that name as TFDS does."""
    (features, rows, splits), (name, _, config) = given, source.partition("/")
    builder = type(name, (InMemoryBuilder,), {"name": name}, skip_registration=True)
    builder(
        features, dict.fromkeys(splits.split(), rows), config=config or None, data_dir=folder / "tfds"
    ).download_and_prepare()
