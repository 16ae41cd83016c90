"""``lm tasks``, ``lm score`` and which run is asked, on models that know nothing and sets of two rows."""

import json
import math
from pathlib import Path

import pytest
import tensorflow_datasets as tfds
from test_benchmarks import SETS, TEXT, prepare
from tiny import TINY

from experiments.cli.doctor import show_tasks
from experiments.cli.draw import attention
from experiments.cli.likelihood import Scoring, likelihood, masking_of, texts_of
from experiments.cli.score import Rows, score_file, score_run
from experiments.runs import origin
from experiments.runs.recipes import questions, steps_of
from experiments.runs.stages import save_settings, stages_of
from experiments.runs.trained import answering, newest_masked, open_run
from experiments.study.experiment import Experiment
from lm import sharding
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED
from lm.data.text.own import Bytes
from lm.data.text.vocabulary import EOS
from lm.evaluate.likelihood import continuation_log_probs
from lm.evaluate.questions import predict
from lm.settings import SettingError, changes
from lm.train.checkpoints import Checkpoints
from lm.train.config import CheckpointConfig

SMALL = TINY | {
    "data.vocabulary": "bytes",
    "model.logits": "separate",  # tied ones of a new model repeat what was read: padding
    "tuning.inputs_length": 36,  # cuts the first translation, not the second
}
TEXTS = {"tuning.mixtures": ("xquad_enro",)}
HEADS = {"tuning.mixtures": (), "tuning.heads": ("cola",), "model.architecture": "encoder"}
NOTHING = {"pretraining.steps": 0, "finetuning.steps": 0}
COLA = [{"sentence": "It is so.", "label": 1}, {"sentence": "Is so it.", "label": 0}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs whose cache holds sets of two rows."""
    folder = tmp_path_factory.mktemp("runs")
    label = {"label": tfds.features.ClassLabel(names=["unacceptable", "acceptable"])}
    features = tfds.features.FeaturesDict({"sentence": TEXT} | label)
    prepare("xquad_translation/en-ro", folder / "cache", (*SETS["wmt_enro"][:2], "train validation"))
    prepare("glue/cola", folder / "cache", (features, COLA, "train validation"))
    unknown = [row | {"label": -1} for row in COLA]
    prepare("glue/sst2", folder / "cache", (features, unknown, "validation test"))
    return folder


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)


def run_of(runs, name, given):
    """The folder of a run whose phases are all done, its settings, and {phase: (state, steps)}."""
    folder, experiment, made = runs / "nano" / name, changes(Experiment(), SMALL | given), {}
    save_settings(folder, experiment)
    mesh = sharding.make_mesh(experiment.mesh)
    for seed, stage in enumerate(stages_of(folder)):
        steps = steps_of(stage, mesh)
        made[stage.name] = steps.init(seed), steps
        with Checkpoints(str(stage.folder / "checkpoints"), CheckpointConfig()) as checkpoints:
            checkpoints.save(made[stage.name][0])
        record = dict.fromkeys(origin.ORIGINS, {}) | {"vocabulary": {"fingerprint": Bytes(100).fingerprint}}
        origin.record(stage.folder, record)
    return folder, experiment, made


def read(place):
    lines = (place / "predictions.jsonl").read_text().splitlines()
    return json.loads((place / "scores.json").read_text()), list(map(json.loads, lines))


@pytest.mark.parametrize(
    ("task", "given"),
    [
        (TASKS["xquad_enro"], TEXTS),
        (TASKS["xquad_enro"], TEXTS | {"model.architecture": "prefix-decoder"}),
        (LABELLED["cola"], HEADS),
    ],
)
def test_a_run_is_asked_as_in_fine_tuning_by_the_model_tuned_for_the_task(task, given, runs):
    folder, experiment, made = run_of(runs, f"{task.name}-{given.get('model.architecture')}", given)
    score_run(folder, [task.name], "", Rows())
    scores, lines = read(folder / "scores" / task.name / task.name / "validation")
    (state, steps), rows = made[task.name], task.rows("validation", runs / "cache")
    expected = predict(state.model, questions(experiment, Bytes(100), steps.mesh, task, rows, 64), steps.put)
    assert [line["prediction"] for line in lines] == expected
    assert scores == {"rows": 2, "metrics": task.evaluate(rows, expected)}
    assert any(map(str, expected))


def test_rows_that_are_others_than_in_training_are_scored_and_said(runs, capsys):
    folder, *_ = run_of(runs, "others", TEXTS)
    place = next(stage.folder for stage in stages_of(folder) if stage.name == "xquad_enro")
    now = TASKS["xquad_enro"].rows("validation", runs / "cache").fingerprint
    for known, count in ((now, 0), ("other", 1)):
        origin.record(place, origin.read(place) | {"data": {"xquad_enro validation": known}})
        score_run(folder, ["xquad_enro"], "", Rows(limit=1))
        assert capsys.readouterr().out.count("these rows are not those") == count


def test_a_task_that_nothing_was_tuned_for_is_answered_by_pre_training_and_unknown_labels_by_no_score(
    runs, capsys
):
    folder, *_ = run_of(runs, "texts", TEXTS)
    score_run(folder, ["sst2", "xquad_enro"], "pretraining", Rows(limit=1))
    scores, lines = read(folder / "scores" / "pretraining" / "sst2" / "validation")
    assert scores == {"rows": 1, "metrics": {}}
    assert lines[0]["inputs"] == "sst2 sentence: It is so."
    assert "no labels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "names", "settings", "message"),
    [
        (TEXTS, ["xquad_enr"], {}, "did you mean 'xquad_enro'"),
        (TEXTS, ["record"], {}, "tfds build super_glue/record"),
        (TEXTS, ["cola"], {"limit": -1}, "--limit -1"),
        (TEXTS, ["cola"], {"mixture": "xquad"}, "did you mean 'xquad_enro'"),
        (TEXTS, ["pos"], {}, "its heads are none"),
        (HEADS, ["sst2"], {}, "its heads are cola, and an encoder writes no text"),
        (TEXTS, ["xquad_enro"], {}, "no checkpoint yet"),
        (TEXTS | NOTHING, ["xquad_enro"], {}, "untrained has no model for this"),
    ],
)
def test_what_cannot_be_scored_is_named_before_a_model_is_loaded(given, names, settings, message, runs):
    folder = runs / "nano" / "untrained"
    save_settings(folder, changes(Experiment(), SMALL | given))
    with pytest.raises(SettingError, match=message):
        score_run(folder, names, settings.get("mixture", ""), Rows(limit=settings.get("limit", 0)))


def test_answers_in_a_file_are_scored_if_there_are_as_many_as_references(runs, tmp_path, capsys):
    for name, text in (
        ("a.txt", "acceptable\nunacceptable\n"),
        ("a.jsonl", '{"prediction": "acceptable"}\n"unacceptable"'),
    ):
        (tmp_path / name).write_text(text)
        score_file(tmp_path / name, "cola", Rows(runs=runs))
        assert "100.00" in capsys.readouterr().out
    with pytest.raises(SettingError, match="has 2 predictions .* has 1 references"):
        score_file(tmp_path / "a.txt", "cola", Rows(limit=1, runs=runs))
    for path, name, message in (
        (tmp_path / "b.txt", "cola", "b.txt"),
        (tmp_path / "a.txt", "cole", "mean 'cola'"),
    ):
        with pytest.raises(SettingError, match=message):
            score_file(path, name, Rows(runs=runs))


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.txt", "a\fb\nc\u2028d\n", ["a\fb", "c\u2028d"]),
        ("a.txt", "a\r\n\r\nb", ["a", "", "b"]),
        ("a.jsonl", '"a\u2028b"\n{"prediction": "c\x85d"}\n', ["a\u2028b", "c\x85d"]),
    ],
)
def test_answers_end_at_newlines_alone(name, text, rows, runs, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        type(TASKS["cola"]), "evaluate", lambda task, rows, found: read.extend(found) or {"score": 0}
    )
    monkeypatch.setattr(Rows, "of", lambda *_: rows)
    (tmp_path / name).write_bytes(text.encode())
    score_file(tmp_path / name, "cola", Rows(runs=runs))
    assert read == rows


def test_the_list_of_tasks_has_the_rows_of_what_is_prepared_and_the_command_for_the_rest(runs, capsys):
    show_tasks("co*", runs)
    out = capsys.readouterr().out
    assert [line.split("│")[6].strip() for line in out.splitlines() if "glue/cola" in line] == ["2", "2"]
    assert out.count("tfds build NAME") == 1
    assert "not prepared" in out
    with pytest.raises(SettingError, match="did you mean 'cola'"):
        show_tasks("colo", runs)


def test_of_masked_models_the_one_trained_last_is_asked_and_a_damaged_one_is_said(runs, capsys):
    first, *_ = run_of(runs, "masked-1", HEADS)
    last, *_ = run_of(runs, "masked-2", HEADS | {"seed": 1})
    (first / "settings.json").write_text((first / "settings.json").read_text())
    assert newest_masked(runs) == last and not capsys.readouterr().err
    settings = (last / "settings.json").read_text()
    (last / "settings.json").write_text(settings.replace('"seed": 1', '"seed": 2'))
    assert newest_masked(runs) != last  # but another
    assert f"left out: {last}/settings.json" in capsys.readouterr().err
    (last / "settings.json").write_text(settings)
    with pytest.raises(SettingError, match="holds no trained masked LM yet"):
        newest_masked(runs / "cache")


@pytest.mark.parametrize("allowed", [stages_of, answering])
def test_a_run_that_trains_nothing_has_no_model_to_show(allowed, tmp_path):
    save_settings(tmp_path, changes(Experiment(), SMALL | TEXTS | NOTHING))
    with pytest.raises(SettingError, match="has no model for this"):
        open_run(tmp_path, allowed(tmp_path))


def test_a_kind_of_picture_that_cannot_be_drawn_is_refused_before_the_run_is_looked_at(tmp_path):
    with pytest.raises(
        SettingError, match=r"--out x\.foo should be a picture that ends in \.png, \.svg or \.pdf"
    ):
        attention(tmp_path / "nowhere", "a text", "", Path("x.foo"))


@pytest.mark.parametrize("given", [TEXTS, HEADS, TEXTS | {"model.architecture": "decoder"}])
def test_lines_are_as_likely_as_the_runs_model_finds_their_bytes(given, runs, tmp_path, capsys):
    folder, _, _ = run_of(runs, f"likelihood-{given.get('model.architecture')}", given)
    file, out = tmp_path / "lines.tsv", tmp_path / "out.jsonl"
    file.write_text("Where?\tHere.\nHere, and nowhere else at all.\n")
    likelihood(folder, file, out, Scoring(length=12, stride=5))
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["tokens"], second["tokens"]) == (first["bytes"], second["bytes"]) == (5, 30)
    assert first["bits_per_byte"] == pytest.approx(-first["log_prob"] / 5 / math.log(2))
    assert "all" in capsys.readouterr().out
    trained = open_run(folder, stages_of(folder))
    question, answer = (trained.vocabulary.encode(text) for text in ("Where?", "Here."))
    question += [EOS] * (given.get("model.architecture") != "encoder")  # which reads [SEP] behind both
    due = continuation_log_probs(trained.model, [(question, answer)], trained.put, masking_of(trained))
    assert first["log_prob"] == pytest.approx(due[0], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.tsv", "", "no lines"), ("a.tsv", "a\tb\na\t\n", "line 2, has no cont"), ("a.jsonl", "[]", "line 1")],
)
def test_lines_without_a_continuation_are_named(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=message):
        texts_of(tmp_path / name)
