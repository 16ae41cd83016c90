"""A run's model in Python: its head's predictions, vectors of texts, and the example of docs/notebook.md."""

import io
import json
import re
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import numpy as np
import pytest
from paths import GOLDEN, ROOT
from scored_runs import HEADS, run_of

from experiments.__main__ import dispatch
from experiments.cli.generate import generate
from experiments.cli.predict import read_lines, warnings_in_a_line
from experiments.cli.run_names import name_run
from experiments.figures.trained_models import check_text
from experiments.notebook import load_run
from experiments.runs.checks import report_truncated_examples
from experiments.runs.inputs import Inputs
from experiments.runs.kinds.answers import make_eval_task
from experiments.runs.kinds.network import predictions_path
from experiments.runs.stages import stages_of
from lm import convert
from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.data.tasks.labelled import LABELLED
from lm.evaluate.evaluator import predict
from lm.notebook import text_model
from lm.predictions import Choice, Classification
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer

DOCS = (ROOT / "docs" / "notebook.md").read_text("utf-8")
PAIR = {"sentence1": "It is so.", "sentence2": "It is."}
ROWS = {
    "cola": [{"sentence": "It is so.", "label": 1}, {"sentence": "Is so it, and so on.", "label": 0}],
    "mrpc": [PAIR | {"label": 1}, PAIR | {"sentence1": "So it is not.", "label": 0}],
    "stsb": [PAIR | {"label": 2.5}],
    "next": [{"sentences": ["It is.", "So be it."], "following": "Then it was.", "label": 1}] * 2,
    "roles": [{"tokens": "def f ( x ) :".split(), "tags": [0] * 6, "roles": [0] * 6}],
    "squad": [
        {
            "question": "Who?",
            "context": "It was he, they said.",
            "answers": {"text": ["he"], "answer_start": [7]},
        }
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("work") / "runs"


def as_given(task, row):
    """What the model reads in a row, as ``predict`` takes it."""
    texts = task.texts(row)
    return texts[0] if len(texts) == 1 else texts


@pytest.mark.parametrize(
    "name",
    [name if name in ("cola", "squad") else pytest.param(name, marks=pytest.mark.slow) for name in ROWS],
)
def test_a_head_says_of_texts_in_python_what_it_says_of_rows_in_evaluation(name, runs, capsys):
    task, rows = LABELLED[name], ROWS[name]
    folder, experiment, made = run_of(runs, f"head-{name}", HEADS | {"tuning.heads": (name,)})
    model = load_run(folder)
    assert capsys.readouterr().out == f"{folder} after {name} (its other models: pretraining)\n"
    state, steps = made[name]
    asked = make_eval_task(experiment, ByteTokenizer(100), steps.mesh, task, rows, 0)
    expected = predict(state.eval_model, asked, steps.shard_batch)
    found = model.predict([as_given(task, row) for row in rows])
    for prediction, answer in zip(found, expected, strict=True):
        if isinstance(prediction, Classification):
            assert prediction.label == task.labels[answer]
            assert list(prediction.probabilities) == list(task.labels)
            assert sum(prediction.probabilities.values()) == pytest.approx(1)
            assert max(prediction.probabilities, key=prediction.probabilities.get) == prediction.label
        elif isinstance(prediction, Choice):
            assert prediction.index == answer and sum(prediction.probabilities) == pytest.approx(1)
        elif task.kind == "tokens":
            assert prediction == [task.labels[label] for label in answer]
        elif task.kind == "regression":
            assert prediction == pytest.approx(answer, abs=1e-5)
        else:
            assert prediction == answer


def test_a_model_without_a_head_predicts_nothing_and_what_is_no_text_is_refused(runs):
    folder, *_ = run_of(runs, "head-cola", HEADS | {"tuning.heads": ("cola",)})
    with pytest.raises(SettingError, match="no head that predicts.*tuning.heads"):
        load_run(folder, "pretraining").predict(["It is so."])
    model = load_run(folder)
    for wrong in (3, ("a", "b", "c"), ["a", 1]):
        with pytest.raises(SettingError, match="a text or a pair of texts for each text, not"):
            model.predict(["It is so.", wrong])
    for read in (model.predict, model.embed):
        with pytest.raises(SettingError, match="take a list of texts, not the text 'It is so.'"):
            read("It is so.")
    assert model.predict([]) == [] and model.embed([]).shape == (0, 16)


@pytest.mark.parametrize(
    ("pool", "of_row"),
    [
        ("first", lambda x: x[0]),
        pytest.param("last", lambda x: x[-1], marks=pytest.mark.slow),
        ("mean", lambda x: x.mean(0)),
        (None, lambda x: x[0]),
    ],
)
def test_vectors_of_texts_are_pooled_as_the_run_pools_and_do_not_depend_on_other_texts(pool, of_row, runs):
    given = HEADS | {"tuning.heads": ("cola",), "tuning.pool": pool}
    folder, *_ = run_of(runs, f"pool-{pool}", given)
    model = load_run(folder)
    texts = ["It is so.", "Is so it, and so on.", "It"]
    vectors = model.embed(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (3, 16)
    tokenizer = model.tokenizer
    for text, vector in zip(texts, vectors, strict=True):
        ids = [tokenizer.cls, *tokenizer.encode(text), tokenizer.sep]
        side = Side(tokens=jnp.array([ids]), token_types=jnp.zeros((1, len(ids)), jnp.int32))
        states = np.asarray(model.model.features(Batch(encoder=side)))[0]
        np.testing.assert_allclose(vector, of_row(states), atol=1e-5)
    np.testing.assert_allclose(model.embed(texts[::-1]), vectors[::-1], atol=1e-6)


def test_a_published_decoder_gives_vectors_of_the_end_of_a_text():
    config, published = convert.load(GOLDEN / "gpt2")
    tokenizer = load_pretrained_tokenizer(GOLDEN / "harness" / "gpt2", config.vocab_size)
    vectors = text_model(published, tokenizer).embed(["the cat", ("the cat", "a dog")])
    ids = [*tokenizer.encode("the cat"), tokenizer.eos]
    states = published.features(Batch(decoder=Side(tokens=jnp.array([ids]))))
    np.testing.assert_allclose(vectors[0], states[0, -1], atol=1e-5)


def test_the_example_of_the_docs_opens_a_run_by_its_name(runs, monkeypatch, capsys):
    folder, *_ = run_of(runs, "head-roles", HEADS | {"tuning.heads": ("roles",)})
    name_run(runs, "mine", folder)
    monkeypatch.chdir(runs.parent)
    _, code, network = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    made = {}
    exec(code, made)
    said = capsys.readouterr().out
    exec(network, made)
    config, length = made["model"].model.config, len(made["ids"])
    assert made["logits"].shape == (1, length, config.vocab_size)
    heads = config.num_encoder_layers, config.attention.num_heads
    assert made["weights"].shape == (*heads, length, length)
    assert "head-roles after roles (its other models: pretraining)" in said
    assert made["vectors"].shape == (3, 16)
    assert len(said.splitlines()[1].split("], [")) == 2, "a list of roles for each of two lines of code"
    assert {stage.name for stage in stages_of(Path("runs/mine"))} == {"pretraining", "roles"}


def test_predict_prints_an_object_per_line_of_a_file_and_embed_writes_a_vector(runs, tmp_path, capsys):
    folder, *_ = run_of(runs, "lines", HEADS | {"tuning.heads": ("mrpc",)})
    pairs = [["It is so.", "It is."], ["It is so.", "So be it."]]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    assert dispatch(["predict", str(folder), str(tmp_path / "pairs.jsonl")]) == 0
    printed = capsys.readouterr()
    model = load_run(folder)
    said = [{"text": pair} | asdict(each) for pair, each in zip(pairs, model.predict(pairs), strict=True)]
    assert [json.loads(line) for line in printed.out.splitlines()] == said
    assert "after mrpc" in printed.err
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n\n" for pair in pairs))
    capsys.readouterr()
    assert dispatch(["predict", str(folder), str(tmp_path / "pairs.jsonl")]) == 0
    blank = {"text": "", "label": None, "probabilities": None}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [said[0], blank, said[1]]
    (tmp_path / "texts.txt").write_text("It is so.\nSo be it.\n\n")
    arguments = ["embed", str(folder), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "vectors.npy")]
    assert dispatch(arguments) == 0
    expected = model.embed(["It is so.", "So be it."])
    np.testing.assert_array_equal(np.load(tmp_path / "vectors.npy"), expected)
    assert f"{tmp_path / 'vectors.npy'}: 2 vectors" in capsys.readouterr().out
    assert dispatch([*arguments[:-1], str(tmp_path / "[old].npy")]) == 0
    assert f"{tmp_path / '[old].npy'}: 2 vectors" in capsys.readouterr().out
    (tmp_path / "texts.txt").write_text("It is so.\n\nSo be it.\n")
    assert dispatch(arguments) == 2
    assert "line 2 of" in (said := capsys.readouterr().err) and "is blank: leave it out" in said


def test_a_table_is_no_file_of_texts_and_json_lines_are(tmp_path, capsys):
    (tmp_path / "new.csv").write_text("text,label\nIt is so.,good\n")
    for name in ("new.jsonl", "NEW.JSONL"):
        (tmp_path / name).write_text('{"text": "It is\\nso."}\n"It is."\n')
        assert read_lines(tmp_path / name) == ["It is\nso.", "It is."]
    assert dispatch(["predict", str(tmp_path), str(tmp_path / "new.csv")]) == 2
    assert "new.csv is a table: give a file of one text per line" in capsys.readouterr().err


def test_fields_beside_the_text_of_json_lines_are_ignored_as_in_a_corpus(tmp_path):
    (tmp_path / "new.jsonl").write_text(
        '{"id": 7, "text": "It is."}\n{"text": ["So", "it"], "tags": [0, 0]}\n'
    )
    assert read_lines(tmp_path / "new.jsonl") == ["It is.", ["So", "it"]]


def test_the_mark_of_utf_8_is_no_part_of_a_text(tmp_path, monkeypatch):
    (tmp_path / "new.txt").write_text("It is.\n", "utf-8-sig")
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffIt is.\n"))
    assert read_lines(tmp_path / "new.txt") == read_lines(None) == ["It is."]


def test_warnings_before_an_error_are_printed_too(capsys):
    with pytest.raises(SettingError), warnings_in_a_line():
        warnings.warn("the text was cut", stacklevel=1)
        raise SettingError("no head")
    assert capsys.readouterr().err == "the text was cut\n"


def test_a_head_that_reads_lists_asks_for_json_lines_in_place_of_a_text_per_line(
    runs, tmp_path, monkeypatch, capsys
):
    folder, *_ = run_of(runs, "head-roles", HEADS | {"tuning.heads": ("roles",)})
    (tmp_path / "words.txt").write_text("So be it\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("So be it\n"))
    for file, name in (([str(tmp_path / "words.txt")], "words.txt"), ([], "the standard input")):
        assert dispatch(["predict", str(folder), *file]) == 2
        said = capsys.readouterr().err
        assert f"{name} has one text per line, and this head expects a list of words: give a file" in said
    (tmp_path / "words.jsonl").write_text('["So", "be", "it"]\n')
    assert dispatch(["predict", str(folder), str(tmp_path / "words.jsonl")]) == 0


@pytest.mark.parametrize("name", ["a.jsonl", "-", "--prompt", "--text"])
def test_a_text_with_half_of_a_character_is_refused_with_its_place(name, tmp_path, monkeypatch):
    """As JSON may hold one, and as a terminal gives them that does not write UTF-8."""
    (tmp_path / "a.jsonl").write_text('"good \\ud83d\\ude00"\n{"text": "caf\\udce9"}\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("good\ncaf\udce9\n"))
    reads = {
        "a.jsonl": lambda: read_lines(tmp_path / "a.jsonl"),
        "-": lambda: read_lines(None),
        "--prompt": lambda: generate(tmp_path, prompt=("good \U0001f600", "caf\udce9")),
        "--text": lambda: check_text("caf\udce9"),
    }
    with pytest.raises(
        SettingError, match=r"(line 2|--\w+): character 4 of 'caf.udce9' is '.udce9', half of"
    ):
        reads[name]()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b'"It is so."\nIt is.\n', "line 2 should be JSON"),
        (
            b'"It is so."\n{"body": "It is.", "id": 7}\n',
            "line 2 should be \"...\" or {\"text\": ...}, and has 'body', 'id': rename the field of the text",
        ),
        (
            b'{"ner_tags": [0, 1], "tokens": ["So", "it"]}\n',
            "line 1 should be a JSON list of words, or a text, and has 'ner_tags', 'tokens': write the list "
            "alone, such as with jq -c .tokens in.jsonl > out.jsonl",
        ),
        (b'{"the words": ["So", "it"]}\n', """jq -c '.["the words"]' in.jsonl"""),
        (b"{}\n", "and has no field"),
        (b"null\n", "line 1 has null for a text"),
        (b'"It is so."\n\n{"text": null}\n', "line 3 has null for a text"),
        (b"\xff", "cannot be read as text in UTF-8"),
        (b"\n", "has no text: give one per line"),
    ],
)
def test_a_file_that_holds_no_texts_is_refused_by_line(contents, message, runs, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_bytes(contents)
    assert dispatch(["predict", str(runs), str(tmp_path / "texts.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_texts_that_are_cut_are_counted_before_training_and_by_predict(runs, tmp_path, capsys):
    folder, experiment, _ = run_of(runs, "head-cola", HEADS | {"tuning.heads": ("cola",)})
    room = experiment.tuning.inputs_length
    texts = ["It is so.", "a" * (room - 2), "a" * (room - 1)]  # bytes, and two special tokens
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    assert dispatch(["predict", str(folder), str(tmp_path / "texts.txt")]) == 0
    assert (
        f"1 of 3 texts are longer than the {room} tokens that the model reads, and were cut"
        in capsys.readouterr().err
    )
    for ask in (load_run(folder).predict, load_run(folder).embed):
        with pytest.warns(UserWarning, match=f"1 of 3 texts are longer than the {room} tokens"):
            ask(texts)
    embedded = ["embed", str(folder), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "vectors.npy")]
    assert dispatch(embedded) == 0 and "1 of 3 texts are longer than" in capsys.readouterr().err
    rows = [{"sentence": text, "label": 0} for text in texts]
    sources = SimpleNamespace(rows=lambda task, split: rows)
    said, inputs = [], cast(Inputs, SimpleNamespace(vocabulary=ByteTokenizer(100), sources=sources))
    report_truncated_examples(stages_of(folder), inputs, said.append)
    rows *= 1_000
    (stage,) = (stage for stage in stages_of(folder) if stage.has_head)
    branch = replace(stage, name_without_member="at-0.5/cola")
    report_truncated_examples([stage, branch], inputs, said.append)
    assert len(said) == 2, "a task is reported once"
    assert said[0].startswith("cola: 1 of 3 training rows are longer than") and "inputs_length" in said[0]
    assert 20 < float(re.search(r"cola: ([\d.]+)% of the training rows", said[1])[1]) < 47, "of a sample"


def test_a_score_on_validation_rows_says_how_many_were_answered(runs, monkeypatch):
    folder, *_ = run_of(runs, "head-cola", HEADS | {"tuning.heads": ("cola",)})
    stage = next(stage for stage in stages_of(folder) if stage.name == "cola")
    monkeypatch.setattr("experiments.runs.kinds.network.best_of", lambda task, folder, step: {"step": 3})
    assert stage.scores(None, None) == {"cola": {"step": 3}}, "the answers are gone"
    answers = predictions_path(stage.folder, LABELLED["cola"], 3)
    answers.parent.mkdir(parents=True)
    answers.write_text('{"answer": "a\\u2028b"}\n' * 5)
    assert stage.scores(None, None) == {"cola": {"step": 3, "rows": 5}}
