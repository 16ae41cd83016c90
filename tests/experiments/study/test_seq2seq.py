"""Copying and reversing: the sequences, the tasks, and the table of encoder-decoders that learn them."""

import pytest

from experiments.runs.kinds.finetuning import TextFinetuning
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm import metrics
from lm.config.base import diff
from lm.data.documentation import word_sequences
from lm.data.documentation.word_sequences import MAX_SEQUENCE_LENGTHS, SEQUENCE_WORDS, random_sequences
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.mixtures import mixture

FEW = {"train": 300, "validation": 20, "report": 30}
KINDS = ("none", "dot", "multiplicative", "additive")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(word_sequences, "ROWS_BY_SPLIT", FEW)


@pytest.mark.parametrize("longest", MAX_SEQUENCE_LENGTHS)
def test_sequences_fill_the_upper_half_of_their_lengths_and_none_is_in_two_splits(longest, few):
    splits = random_sequences(longest)
    assert {split: len(rows) for split, rows in splits.items()} == FEW
    texts = [row["text"] for rows in splits.values() for row in rows]
    assert len({*texts}) == len(texts)
    assert {len(text.split()) for text in texts} == {*range(longest // 2 + 1, longest + 1)}
    assert {word for text in texts for word in text.split()} == {*SEQUENCE_WORDS}
    assert splits == random_sequences(longest)


def test_a_set_of_sequences_is_written_when_a_task_first_reads_it_and_no_other(few, tmp_path):
    rows = TASKS["reverse-8"].rows("report", tmp_path)
    assert {row["text"] for row in rows} == {row["text"] for row in random_sequences(8)["report"]}
    assert [path.name for path in (tmp_path / "tfds" / "documentation").iterdir()] == ["sequences-8"]


def test_copy_asks_for_the_words_and_reverse_for_them_backwards():
    row = {"text": "to be or not"}
    assert TASKS["copy-4"].to_text(row) == ("copy: to be or not", "to be or not")
    assert TASKS["reverse-4"].to_text(row) == ("reverse: to be or not", "not or be to")
    found = TASKS["reverse-4"].evaluate([row, row], ["not or be to", "not be or to"])
    assert found == {"word_accuracy": 75.0, "exact_match": 50.0, "score": 75.0}


def test_words_count_in_their_place_and_what_is_written_beyond_the_answer_does_not():
    assert metrics.word_accuracy(["a b c d"], ["a c b d"]) == 50
    assert metrics.word_accuracy(["a b c", "d"], ["a b", "d e f"]) == 75
    assert metrics.word_accuracy(["a b"], [""]) == metrics.word_accuracy(["a b"], ["b a"]) == 0


def test_each_mixture_has_a_task_for_each_length_and_room_for_the_longest():
    for name in ("copy", "reverse"):
        assert mixture(name).tasks == tuple(f"{name}-{longest}" for longest in MAX_SEQUENCE_LENGTHS)
        assert mixture(name).targets_length > max(MAX_SEQUENCE_LENGTHS)


@pytest.mark.parametrize("scale", ["nano", "mini"])
def test_rows_of_encoder_decoders_differ_in_what_reads_the_encoder_and_are_trained_on_tasks_alone(scale):
    rows = {name: build(f"seq2seq/{name}", scale) for name in (*KINDS, "transformer-2017")}
    for name in KINDS[1:]:
        assert diff(rows["none"], rows[name]) == {"model.cross_attention.kind": ("none", name)}
    changed = {"model.mixer.kind", "model.positions.kind", "model.cross_attention.kind"}
    changed |= {
        "model.attention.scores",
        "model.positions.sinusoid",
    }  # which only attention and sinusoids read
    assert diff(rows["none"], rows["transformer-2017"]).keys() == changed
    model = rows["transformer-2017"].model
    assert (model.residual, model.positions.kind, model.attention.scores) == (
        "post-norm",
        "sinusoidal",
        "scaled-dot",
    )
    assert {(type(stage), stage.parent) for row in rows.values() for stage in stages(row)} == {
        (TextFinetuning, None)
    }
