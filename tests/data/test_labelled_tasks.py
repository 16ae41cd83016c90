"""Laws of labelled tasks: what a head reads, the labels it learns, and its outputs as answers."""

import pickle

import numpy as np
import pytest
from paths import SHARED

from lm.config.base import SettingError
from lm.data.batches import Batches
from lm.data.classification import (
    GPT_SPECIAL_TOKENS,
    LabelledRows,
    Reader,
    labelled_eval_batches,
    truncated_lengths,
)
from lm.data.tasks.labelled import (
    LABELLED,
    find_labelled,
    race_questions,
    sentence_pairs,
    single_sentences,
    span_after_cue,
)
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import EOS

TFDS = SHARED / "data" / "tfds"
VOCABULARY = ByteTokenizer(100)
CLS = VOCABULARY.cls
ARCHITECTURES = ("encoder", "decoder", "prefix-decoder", "encoder-decoder")
CUE = {"question": "the"}
DOCUMENTATION = {
    "acceptability": [{"sentence": f"sentence {i}", "label": i % 2} for i in range(5)],
    "follows": [{"sentence1": f"first {i}", "sentence2": f"second {i}", "label": i % 2} for i in range(5)],
    "extract": [
        CUE | {"context": f"a handler, {'or ' * i}the (handler): it's new", "answers": ["handler"]}
        for i in range(5)
    ],
    "next": [
        {"sentences": [f"s{i} {k}" for k in range(4)], "following": f"t{i}", "label": i % 4} for i in range(8)
    ],
    "stsb": [{"sentence1": "a", "sentence2": "b", "label": i / 2} for i in range(5)],
    "qqp": [{"question1": "a", "question2": "b", "label": i % 2} for i in range(5)],
    "mnli": [{"premise": "a", "hypothesis": "b", "label": i % 3} for i in range(5)],
    "race-high": race_questions(
        [
            {
                "article": f"the passage {i}",
                "questions": ["it is _ .", "what is it?"],
                "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
                "answers": ["ABCD"[i % 4], "D"],
            }
            for i in range(4)
        ]
    ),
    "pos": [{"tokens": ["do", "n't", "\\u4e2d", "go" * i], "upos": [3, 9, 0, i]} for i in range(5)],
    "roles": [{"tokens": ["go" * i, "(", ")"], "roles": [9 + i % 2, 3, 3]} for i in range(1, 6)],
}


def exact(kind, label, length):
    """What a head gives that is right."""
    if kind == "regression":
        return label
    if kind == "span":
        return np.eye(length)[label]
    return np.eye(20)[label]


def unframed(tokens):
    return VOCABULARY.decode([token for token in tokens.tolist() if token > EOS])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", DOCUMENTATION)
def test_right_outputs_are_read_as_right_answers(name, architecture):
    task, rows = LABELLED[name], DOCUMENTATION[name]
    reader = Reader(task, VOCABULARY, architecture, 100)
    found = labelled_eval_batches(reader, rows, 3)
    labels = np.concatenate([batch.labels for batch in found])
    weights = np.concatenate([batch.label_loss_weights for batch in found])
    answers = [
        reader.answer(row, exact(task.kind, label, 100)) for row, label in zip(rows, labels, strict=False)
    ]
    assert task.evaluate(rows, answers)["score"] == pytest.approx(100)
    assert weights[: len(rows)].reshape(len(rows), -1).any(1).all()
    assert not weights[len(rows) :].any()
    assert len(found[-1].labels) == 3
    for batch in found:
        assert batch.sides
        assert all(len(values) == 3 for values in batch.features().values())


@pytest.mark.parametrize("name", ("acceptability", "follows", "extract", "next", "mnli", "race-high"))
def test_the_mean_of_the_scores_of_single_rows_is_the_score_of_all(name):
    task, rows = LABELLED[name], DOCUMENTATION[name]
    answers = ["handler", "", "other", "handler", ""] if task.kind == "span" else [1] * len(rows)
    scores = task.example_scores(rows, answers)
    assert {*scores} == {0, 100}
    assert scores.mean() == pytest.approx(task.evaluate(rows, answers)["score"])


@pytest.mark.parametrize("name", ("stsb", "qqp", "roles"))
def test_a_score_that_is_no_mean_over_rows_has_none_of_single_rows(name):
    rows = DOCUMENTATION[name]
    assert LABELLED[name].example_scores(rows, [LABELLED[name].target(row) for row in rows]) is None


@pytest.mark.parametrize("name", [name for name, task in LABELLED.items() if task.kind == "choice"])
def test_a_choice_has_as_many_candidates_as_its_chance_says(name):
    task = LABELLED[name]
    if name in DOCUMENTATION:
        assert {len(task.texts(row)) for row in DOCUMENTATION[name]} == {task.num_candidates}
    assert task.chance == pytest.approx(100 / task.num_candidates)


def test_a_row_is_framed_as_each_architecture_reads_it():
    row, a, b = DOCUMENTATION["follows"][:1], VOCABULARY.encode("first 0"), VOCABULARY.encode("second 0")
    batches = {
        one: labelled_eval_batches(Reader(LABELLED["follows"], VOCABULARY, one, 20), row, 1)[0]
        for one in ARCHITECTURES
    }
    assert batches["encoder"].encoder.tokens[0].tolist() == [CLS, *a, EOS, *b, EOS, 0, 0]
    assert batches["encoder"].encoder.token_types[0].tolist() == [0] * 9 + [1] * 9 + [0, 0]
    for side in ("encoder", "decoder"):
        assert batches["encoder-decoder"].side(side).tokens[0].tolist() == [*a, EOS, *b, EOS, 0, 0, 0]
        assert batches["encoder-decoder"].side(side).segment_ids[0].tolist() == [1] * 17 + [0] * 3
    assert set(batches["prefix-decoder"].features()) - set(batches["decoder"].features()) == {
        "decoder_causal_attention"
    }


@pytest.mark.parametrize("architecture", ["decoder", "prefix-decoder"])
def test_in_gpts_layout_a_row_starts_is_divided_and_ends_with_the_token_that_the_head_reads(architecture):
    start, delim, extract = VOCABULARY.start, VOCABULARY.delim, VOCABULARY.extract
    assert len({start, delim, extract, VOCABULARY.mask, CLS}) == 5
    for name, texts in (("follows", ["first 0", "second 0"]), ("acceptability", ["sentence 0"])):
        reader = Reader(LABELLED[name], VOCABULARY, architecture, 24, "start-delim-extract")
        (batch,) = labelled_eval_batches(reader, DOCUMENTATION[name][:1], 1)
        tokens = batch.decoder.tokens[0].tolist()
        inner = sum(([delim, *VOCABULARY.encode(text)] for text in texts), [])[1:]
        count = len(inner) + 2
        assert tokens == [start, *inner, extract, *[0] * (24 - count)]
        assert batch.decoder.segment_ids[0].tolist() == [1] * count + [0] * (24 - count)


@pytest.mark.parametrize("name", DOCUMENTATION)
def test_in_gpts_layout_right_outputs_are_read_as_right_answers(name):
    task, rows = LABELLED[name], DOCUMENTATION[name]
    reader = Reader(task, VOCABULARY, "decoder", 100, "start-delim-extract")
    labels = np.concatenate([batch.labels for batch in labelled_eval_batches(reader, rows, 3)])
    pairs = zip(rows, labels, strict=False)
    answers = [reader.answer(row, exact(task.kind, label, 100)) for row, label in pairs]
    assert task.evaluate(rows, answers)["score"] == pytest.approx(100)


def test_in_gpts_layout_a_choice_has_a_row_for_each_candidate_and_what_is_too_long_keeps_its_frame():
    reader = Reader(LABELLED["next"], VOCABULARY, "decoder", 8, "start-delim-extract")
    (batch,) = labelled_eval_batches(
        reader, [{"sentences": ["s" * 9, "u"], "following": "t" * 9, "label": 0}], 1
    )
    rows = batch.decoder.tokens[0]
    for row in rows:
        ends = row[:1], row[row == VOCABULARY.delim], row[row > 0][-1:]
        assert [end.tolist() for end in ends] == [[getattr(VOCABULARY, name)] for name in GPT_SPECIAL_TOKENS]
    assert (rows > 0).sum(-1).tolist() == [8, 8]


@pytest.mark.parametrize(
    ("sizes", "kept"), [((9, 2), (4, 2)), ((2, 9), (2, 4)), ((9, 9), (3, 3)), ((2, 2), (2, 2)), ((9,), (6,))]
)
def test_the_longest_part_is_cut(sizes, kept):
    assert tuple(truncated_lengths(sizes, 6)) == kept


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_too_long_keeps_its_frame_and_what_is_cut_off_has_no_weight(architecture):
    long = {"sentence1": "a" * 50, "sentence2": "b" * 50, "label": -1}

    def read(name, row):
        return labelled_eval_batches(Reader(LABELLED[name], VOCABULARY, architecture, 16), [row], 1)[0]

    batch = read("follows", long)
    tokens = next(side.tokens[0] for side in batch.sides.values())
    assert (tokens == EOS).sum() == 2
    assert tokens[-1] == EOS
    assert abs((tokens == 100).sum() - (tokens == 101).sum()) <= 1  # a and b are bytes 97 and 98
    assert batch.label_loss_weights.tolist() == [0]  # an unknown label
    batch = read("extract", DOCUMENTATION["extract"][0])
    assert batch.label_loss_weights.tolist() == [0]
    row = {"tokens": ["one", "two", "three", "four", "five"], "upos": [1, 2, 3, 4, 5]}
    batch = read("pos", row)
    seen = batch.label_loss_weights[0] > 0
    assert batch.labels[0][seen].tolist() == [1, 2, 3, 4]
    answer = Reader(LABELLED["pos"], VOCABULARY, architecture, 16).answer(row, np.eye(20)[batch.labels[0]])
    assert answer == [1, 2, 3, 4, -1]


def test_a_context_read_word_by_word_has_the_pieces_of_the_whole_and_all_words_of_all_texts_count():
    row = DOCUMENTATION["extract"][2]
    tokens = Reader(LABELLED["extract"], VOCABULARY, "decoder", 100).example(row).rows[0].tokens
    assert tokens.tolist() == [
        *VOCABULARY.encode(row["question"]),
        EOS,
        *VOCABULARY.encode(row["context"]),
        EOS,
    ]
    found = LABELLED["pos"].evaluate([{"upos": [1, 2]}, {"upos": [3]}], [[1, 0], [3]])
    assert found["accuracy"] == pytest.approx(200 / 3)


def test_a_span_starts_before_it_ends_lies_in_the_context_and_is_not_long():
    row = {"question": "what _", "context": " ".join(f"w{i}" for i in range(60)), "answers": ["w1"]}
    reader, rng = Reader(LABELLED["extract"], VOCABULARY, "encoder", 200), np.random.default_rng(0)
    for _ in range(50):
        answer = reader.answer(row, rng.normal(size=(2, 200)))
        assert answer in row["context"]
        assert 1 <= len(answer.split()) <= 30


def test_the_place_of_an_answer_is_behind_its_cue():
    row = DOCUMENTATION["extract"][0]
    start, end = span_after_cue(row)
    assert (start, row["context"][start:end]) == (16, "handler")
    assert span_after_cue(row | {"question": "a"}) == (2, 9)
    assert span_after_cue(row | {"answers": ["hand"]}) is None


def test_every_other_pair_of_sentences_follows():
    found = sentence_pairs(DOCUMENTATION["next"])
    assert [row["label"] for row in found] == [1, 0] * 4
    assert [row["sentence2"] for row in found] == [f"t{i}" for i in range(8)]
    firsts = [row["sentence1"] for row in found]
    assert firsts == ["s0 0", "s1 2", "s2 2", "s3 0", "s4 0", "s5 2", "s6 2", "s7 0"]


def test_both_halves_of_a_minimal_pair_are_asked_in_turn():
    found = single_sentences([{"sentence": f"good {i}", "damaged": f"{i} good"} for i in range(2)])
    assert [(row["sentence"], row["label"]) for row in found] == [
        ("good 0", 1),
        ("0 good", 0),
        ("1 good", 0),
        ("good 1", 1),
    ]


def test_training_sees_every_row_once_an_epoch_and_a_batch_is_the_same_in_parts():
    rows = [{"sentence": f"s{i}", "label": 0} for i in range(12)]
    made = Batches(LabelledRows(Reader(LABELLED["acceptability"], VOCABULARY, "encoder", 8), rows, seed=1), 4)
    epochs = [[made(step, slice(None)).encoder.tokens for step in steps] for steps in (range(3), range(3, 6))]
    texts = [[unframed(row) for batch in epoch for row in batch[:, 1:]] for epoch in epochs]
    assert [sorted(epoch) for epoch in texts] == [sorted(row["sentence"] for row in rows)] * 2
    assert texts[0] != texts[1]
    other = pickle.loads(pickle.dumps(made))
    halves = [other(4, slice(start, start + 2)) for start in (0, 2)]
    for key, values in made(4, slice(None)).features().items():
        assert (np.concatenate([half.features()[key] for half in halves]) == values).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda pos: find_labelled("squat"), "did you mean 'squad'"),
        (lambda pos: Reader(pos, VOCABULARY, "encoder", 7), "tuning.inputs_length=7"),
        (lambda pos: Reader(pos, ByteTokenizer(0), "encoder", 8), "no token for cls"),
        (lambda pos: LabelledRows(Reader(pos, VOCABULARY, "encoder", 8), [], seed=0), "no examples"),
        (
            lambda pos: Reader(pos, ByteTokenizer(4), "decoder", 8, "start-delim-extract"),
            "no token for extract; ours need data.sentinels of at least 5",
        ),
        (
            lambda pos: Reader(pos, VOCABULARY, "encoder-decoder", 8, "start-delim-extract"),
            "tuning.layout='start-delim-extract' needs model.architecture='decoder' or 'prefix-decoder'",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(make, message):
    with pytest.raises(SettingError, match=message):
        make(LABELLED["pos"])


def test_a_question_of_race_is_read_with_each_option_in_its_gap_or_after_it():
    passage = {"article": "p", "answers": ["B", "A"], "questions": ["it is ____ .", "a_b?"]}
    rows = race_questions([passage | {"options": [["so", "not"], ["yes", "no"]]}])
    texts = [LABELLED["race-high"].texts(row) for row in rows]
    assert texts[0] == (("p", "it is so ."), ("p", "it is not ."))
    assert texts[1] == (("p", "a_b? yes"), ("p", "a_b? no"))
    assert [LABELLED["race-high"].target(row) for row in rows] == [1, 0]
    with pytest.raises(KeyError):
        race_questions([passage | {"answers": ["", "A"], "options": [["so", "not"], ["yes", "no"]]}])


def test_a_labelled_task_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(LABELLED["pos"])) is LABELLED["pos"]
    assert all(
        name == task.name and set(task.unscored_metrics) < set(task.metrics)
        for name, task in LABELLED.items()
    )


@pytest.mark.skipif(not TFDS.exists(), reason="no prepared data")
@pytest.mark.parametrize(
    "name", ["cola", "sst2", "mrpc", "qnli", "rte", "stsb", "squad", "copa", "piqa", "codah", "pos"]
)
def test_prepared_rows_have_labels_and_right_outputs_score_full_marks(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(TFDS))
    task = LABELLED[name]
    for split in ("train", "validation"):
        rows = [row for row, _ in zip(task.rows(split, tmp_path), range(50), strict=False)]
        reader = Reader(task, VOCABULARY, "encoder", 3000)
        examples = [reader.example(row) for row in rows]
        exactly = (exact(task.kind, example.label, 3000) for example in examples)
        answers = [reader.answer(row, right) for row, right in zip(rows, exactly, strict=True)]
        lowest = 97 if name == "squad" else 99.9  # some answers are longer, or part of a word
        assert task.evaluate(rows, answers)["score"] >= lowest
        assert all(np.any(example.weight) for example in examples)
