"""Every benchmark, read from a TFDS set: a prepared one, or a small one with the official features."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lm.data.documentation.corpus import PreparedSet
from lm.data.tasks.benchmarks import TASKS

SHARED = Path(__file__).parents[1].parent / "shared"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="no prepared data")
PREPARED = "cola sst2 mrpc stsb qnli rte boolq cb copa super_glue_rte wic wsc squad scitldr multi30k_ende"
PREPARED += " multi30k_enfr"
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
READS = {
    "qqp": ("qqp question1: A? question2: 0?", "not_duplicate"),
    "mnli": ("mnli hypothesis: H. premise: P.", "contradiction"),
    "wnli": ("wsc: The fish ate the worm. *It* was tasty.", "The worm"),
    "multirc": ("multirc question: Who runs? answer: Ann paragraph: Sent 1: Ann runs. ", "True"),
    "record": ("record query: @placeholder won entities: Ann, Bea passage: Ann ran. Bea sat", "Ann"),
    "dpr": ("wsc: Carl put the book down so that *he* could see it.", "Carl"),
    "cnn_dailymail": ("summarize: Ann ran 1 miles.", "Ann ran .\nBea sat ."),
    "wmt_ende": ("translate English to German: Good morning, Ann.", "eins zwei drei vier fünf"),
    "wmt_enfr": ("translate English to French: Good morning, Ann.", "eins zwei drei vier fünf"),
    "wmt_enro": ("translate English to Romanian: Good morning, Ann.", "eins zwei drei vier fünf"),
}


def prepare(source, folder, given):
    """Write a set of that name as TFDS does."""
    (features, rows, splits), (name, _, config) = given, source.partition("/")
    builder = type(name, (PreparedSet,), {"name": name}, skip_registration=True)
    builder(
        features, dict.fromkeys(splits.split(), rows), config=config or None, data_dir=folder / "tfds"
    ).download_and_prepare()


def right(task, row):
    """What a model writes that knows."""
    wrong_candidate = task.name in ("wsc", "wnli") and row["label"] == 0
    return "someone else" if wrong_candidate else task.to_text(row)[1]


@pytest.mark.parametrize("name", SETS)
def test_a_set_with_the_official_features_reads_as_in_the_paper_and_right_answers_score_100(name, tmp_path):
    task = TASKS[name]
    prepare(task.source, tmp_path, SETS[name])
    rows = task.rows("validation" if task.validation else "train", tmp_path)
    pairs = [task.to_text(row) for row in rows]
    assert pairs[0] == READS[name]
    assert task.evaluate(rows, [right(task, row) for row in rows])["score"] == pytest.approx(100)
    assert task.evaluate(rows, ["nonsense"] * len(rows))["score"] < 60
    if task.training and task.train:
        prepare(task.source, tmp_path / "train", (*SETS[name][:2], "train"))
        assert len(task.rows("train", tmp_path / "train")) == 3  # one for each right answer


def test_the_pronoun_of_wnli_is_the_one_that_the_hypothesis_has_the_words_around():
    row = {"sentence1": "He said that he saw him.", "sentence2": "that Bob saw him"}
    assert TASKS["wnli"].to_text(SETS["wnli"][1][1]) == (
        "wsc: Ann gave Bea *her* book, but it was Ann's.",
        "Bea",
    )
    assert TASKS["wnli"].to_text(row) == ("wsc: He said that *he* saw him.", "Bob")


def test_rows_out_of_the_ordinary_read_as_t5_has_them():
    def wnli(first, second):
        return TASKS["wnli"].to_text({"sentence1": first, "sentence2": second})[0]

    assert wnli("Bob has a worm. Ann ate it.", "Ann ate a worm.") == "wsc: Bob has a worm. Ann ate *it* ."
    assert (
        wnli("Ann said it, and Bob left.", "Ann said a word, and Bob left.")
        == "wsc: Ann said *it* , and Bob left."
    )
    row = {"question": "«Who?»", "context": " (Ann)", "answers": {"text": ["Ann"]}}
    assert TASKS["squad"].to_text(row)[0] == "question: « Who ? » context: ( Ann ) "
    row = {"query": "q", "entities": ["Ann"], "passage": "p", "answers": []}
    assert TASKS["record"].to_text(row)[1] == "<unk>"


@needs_data
@pytest.mark.parametrize("name", [*PREPARED.split(), "xquad_enro"])
def test_all_prepared_rows_read_as_in_the_paper_and_right_answers_score_100(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(SHARED / "data" / "tfds"))
    task = TASKS[name]
    entries = json.loads((SHARED / "t5" / "setup.json").read_text())["downstream_tasks"]
    form = next((e["input"] for e in entries if e["tfds_head"].partition(":")[0] == task.source), "")
    for split in ("train", "validation"):
        rows = task.rows(split, tmp_path)
        rows = [rows[place] for place in range(0, len(rows), max(len(rows) // 5000, 1))]
        pairs = [task.to_text(row) for row in rows]
        assert all(isinstance(part, str) and part.strip() for pair in pairs for part in pair)
        if form and name != "squad" and set(re.findall(r"{(.*?)}", form)) <= rows[0].keys():
            assert [form.format(**row) for row in rows] == [inputs for inputs, _ in pairs]
        found = task.evaluate(rows, [right(task, row) for row in rows])
        assert min(found.values()) > (99.9 if name == "stsb" else 99.999)  # its scores are rounded to fifths


@needs_data
def test_every_task_of_the_paper_is_here_with_its_labels_and_splits():
    for entry in json.loads((SHARED / "t5" / "setup.json").read_text())["downstream_tasks"]:
        (task,) = (one for one in TASKS.values() if one.source == entry["tfds_head"].partition(":")[0])
        assert (task.train is None) == (entry["train_split"] is None)
        assert task.validation or entry["eval_split_in_ablations"] is None
        for number, word in enumerate(entry.get("labels", ())):
            assert task.from_text(word, {}) == number
