"""Every benchmark, read from a TFDS set: a prepared one, or a small one with the official features."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from lm.data.tasks import TASKS

SHARED = Path(__file__).parents[1].parent / "shared"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="no prepared data")
PREPARED = "cola sst2 mrpc stsb qnli rte boolq cb copa super_glue_rte wic wsc squad scitldr multi30k_ende multi30k_enfr"
TEXT, NUMBER, TEXTS = tfds.features.Text(), tfds.features.Scalar(np.int32), tfds.features.Sequence(tfds.features.Text())
WORM = {"sentence1": "The fish ate the worm. It was tasty.", "label": 1, "idx": 0}
FISH = {"sentence1": "Ann gave Bea her book, but it was Ann's.", "label": 0, "idx": 1}
ASKED = {"paragraph": "<b>Sent 1: </b>Ann runs.<br>", "question": "Who runs?", "label": 1}
READ = {"source": "Daily mail", "query": "@placeholder won", "idx": {"passage": 0, "query": 0}}
PLACE = {"paragraph": 0, "question": 0, "answer": 0}
NEWS = {"publisher": "cnn", "id": "1"}
CANDIDATE = tfds.features.ClassLabel(num_classes=2)
PUT = {"sentence": "Carl put the book down so that he could see it.", "candidates": ["Carl", "the book"]}


def texts(names, *labels, **others):
    """Official features: texts, a class and others."""
    label = {"label": tfds.features.ClassLabel(names=labels)} if labels else {}
    return tfds.features.FeaturesDict(dict.fromkeys(names.split(), TEXT) | label | others)


def languages(other):
    rows = [{"en": "Good morning, Ann.", other: "eins zwei drei vier fünf"}, {"en": "Yes.", other: "a b c d e f"}]
    return tfds.features.Translation(languages=("en", other)), rows, "validation"


# task: official features, two rows, split; and how the first row reads
SETS = {
    "qqp": (
        texts("question1 question2", "not_duplicate", "duplicate", idx=NUMBER),
        [{"question1": "A?", "question2": f"{k}?", "label": k, "idx": k} for k in (0, 1)],
        "validation",
    ),
    "mnli": (
        texts("premise hypothesis", "entailment", "neutral", "contradiction", idx=NUMBER),
        [{"premise": "P.", "hypothesis": "H.", "label": k, "idx": k} for k in (2, 1)],
        "validation_matched validation_mismatched",
    ),
    "wnli": (
        texts("sentence1 sentence2", "not_entailment", "entailment", idx=NUMBER),
        [WORM | {"sentence2": "The worm was tasty."}, FISH | {"sentence2": "Bea's book, but"}],
        "validation",
    ),
    "multirc": (
        texts("paragraph question answer", "False", "True", idx=dict.fromkeys(PLACE, NUMBER)),
        [
            ASKED | {"answer": "Ann", "idx": PLACE},
            ASKED | {"answer": "Bea", "label": 0, "idx": PLACE | {"answer": 1}},
        ],
        "validation",
    ),
    "record": (
        texts("source passage query", entities=TEXTS, answers=TEXTS, idx={"passage": NUMBER, "query": NUMBER}),
        [
            READ | {"passage": "Ann ran\n@highlight\nBea sat", "entities": ["Ann", "Bea"], "answers": ["Ann", "Bea"]},
            READ | {"passage": "Ann ran.\n@highlight\nBea sat", "entities": ["Ann"], "answers": ["Ann"]},
        ],
        "validation",
    ),
    "dpr": (
        texts("sentence pronoun", candidates=tfds.features.Sequence(TEXT, length=2), label=CANDIDATE),
        [PUT | {"pronoun": "he", "label": 0}, PUT | {"pronoun": "it", "label": 1}],
        "train",
    ),
    "cnn_dailymail": (
        texts("article highlights publisher id"),
        [NEWS | {"article": f"Ann ran {k} miles.", "highlights": "Ann ran .\nBea sat ."} for k in (1, 2)],
        "validation",
    ),
    **{f"wmt_en{other}": languages(other) for other in ("de", "fr", "ro")},
}  # fmt: skip
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


class Small(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, features, rows, splits, **settings):
        self.features, self.rows, self.splits = features, rows, splits.split()
        super().__init__(**settings)

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, description="two rows", features=self.features)

    def _split_generators(self, dl_manager):
        return {split: enumerate(self.rows) for split in self.splits}

    def _generate_examples(self):
        raise NotImplementedError


def prepare(source, folder, given):
    """Write a set of that name as TFDS does."""
    name, _, config = source.partition("/")
    made = type(name, (Small,), {"name": name}, skip_registration=True)
    tfds.disable_progress_bar()
    config = tfds.core.BuilderConfig(name=config) if config else None
    made(*given, config=config, data_dir=folder / "tfds", file_format="array_record").download_and_prepare()


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
    text, name = TASKS["wnli"].to_text(SETS["wnli"][1][1])
    assert (text, name) == ("wsc: Ann gave Bea *her* book, but it was Ann's.", "Bea")
    row = {"sentence1": "He said that he saw him.", "sentence2": "that Bob saw him"}
    assert TASKS["wnli"].to_text(row) == ("wsc: He said that *he* saw him.", "Bob")


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
