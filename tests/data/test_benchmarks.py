"""Every benchmark, read from a TFDS set: a prepared one, or a small one with the official features."""

import json
import re

import pytest
from benchmark_files import SETS, prepare
from paths import SHARED

from lm.data.tasks.benchmarks import TASKS

needs_data = pytest.mark.skipif(not SHARED.exists(), reason="no prepared data")
PREPARED = "cola sst2 mrpc stsb qnli rte boolq cb copa super_glue_rte wic wsc squad scitldr multi30k_ende"
PREPARED += " multi30k_enfr"


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
    if task.training_rows and task.train:
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
            assert task.postprocess(word, {}) == number
