"""``lm tasks``, ``lm score`` and which run is asked, on models that know nothing and sets of two rows."""

import itertools
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow_datasets as tfds
from benchmark_files import SETS, TEXT, prepare
from scored_runs import HEADS, SMALL, read, run_of

from experiments.__main__ import dispatch
from experiments.cli.app import function_of
from experiments.cli.convert import export_checkpoint
from experiments.cli.data_tasks import data_tasks
from experiments.cli.draw import write_picture
from experiments.cli.generate import GAP, generate
from experiments.evaluate import generation
from experiments.evaluate.generation import Filling, fill_gaps
from experiments.evaluate.likelihood import (
    Scoring,
    json_line,
    read_texts,
    score_texts,
    show_likelihoods,
    text_rates,
    trained_length,
)
from experiments.evaluate.tasks import (
    RowSelection,
    mean_embeddings,
    prompted_rows,
    score_file,
    score_run,
    write_metrics,
)
from experiments.notebook import load_run
from experiments.runs import provenance
from experiments.runs.init_from import overrides_of_start
from experiments.runs.kinds.answers import make_eval_task
from experiments.runs.paths import model_of_run, save_settings
from experiments.runs.stages import stages_of
from experiments.runs.trained import boundary_ids, generative_stages, language_models, open_run
from experiments.study.experiment import Experiment
from experiments.study.registry import build
from lm.config.base import SettingError, changes
from lm.config.decoding import Decoding
from lm.data.seq2seq import eval_batches
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED
from lm.data.tasks.prompts import find_prompted_task
from lm.evaluate.evaluator import predict
from lm.evaluate.generate import greedy
from lm.evaluate.loglikelihood import Masking, continuation_log_probs
from lm.metrics import Undefined, defined_values, undefined_reasons
from lm.objectives.denoising import OBJECTIVES, Lengths
from lm.special_tokens import boundary_tokens
from lm.tokenizers.sentencepiece import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece
from lm.tokenizers.tokenizer import EOS, MASK, PAD, Tokenizer

TEXTS = {"tuning.mixtures": ("xquad_enro",)}
COLA = [{"sentence": "It is so.", "label": 1}, {"sentence": "Is so it.", "label": 0}]
TRUE_OR_FALSE = {"label": tfds.features.ClassLabel(names=["False", "True"])}
BOOLQ = [
    {"passage": "It is so.", "question": "is it", "label": 1},
    {"passage": "It was not so.", "question": "was it", "label": 0},
    {"passage": "It may be so some day.", "question": "will it be", "label": 1},
]

NOTHING = {"pretraining.steps": 0, "finetuning.steps": 0}


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
    read = tfds.features.FeaturesDict({"passage": TEXT, "question": TEXT, **TRUE_OR_FALSE})
    prepare("super_glue/boolq", folder / "cache", (read, BOOLQ, "train validation"))
    return folder


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)


@pytest.mark.parametrize(
    ("task", "given"),
    [
        (TASKS["xquad_enro"], TEXTS),
        pytest.param(
            TASKS["xquad_enro"], TEXTS | {"model.architecture": "prefix-decoder"}, marks=pytest.mark.slow
        ),
        (LABELLED["cola"], HEADS),
    ],
)
def test_a_run_is_asked_as_in_fine_tuning_by_the_model_tuned_for_the_task(task, given, runs):
    folder, experiment, made = run_of(runs, f"{task.name}-{given.get('model.architecture')}", given)
    score_run(folder, [task.name], "", RowSelection())
    scores, lines = read(folder / "scores" / task.name / task.name / "validation")
    (state, steps), rows = made[task.name], task.rows("validation", runs / "cache")
    expected = predict(
        state.eval_model,
        make_eval_task(experiment, ByteTokenizer(100), steps.mesh, task, rows, 64),
        steps.shard_batch,
    )
    assert [line["prediction"] for line in lines] == expected
    metrics = task.evaluate(rows, expected)
    # a new head gives all rows one class
    known, undefined = defined_values(metrics), undefined_reasons(metrics)
    assert scores["metrics"] == dict.fromkeys(metrics) | known
    assert (scores["rows"], scores.get("undefined", {})) == (2, undefined)
    assert any(map(str, expected))


def test_rows_that_are_others_than_in_training_are_scored_and_said(runs, capsys):
    folder, *_ = run_of(runs, "others", TEXTS)
    place = next(stage.folder for stage in stages_of(folder) if stage.name == "xquad_enro")
    now = TASKS["xquad_enro"].rows("validation", runs / "cache").fingerprint
    for known, count in ((now, 0), ("other", 1)):
        provenance.record(place, provenance.read(place) | {"data": {"xquad_enro validation": known}})
        score_run(folder, ["xquad_enro"], "", RowSelection(limit=1))
        assert capsys.readouterr().out.count("these rows are not those") == count


def test_a_task_that_nothing_was_tuned_for_is_answered_by_pre_training_and_unknown_labels_by_no_score(
    runs, capsys
):
    folder, *_ = run_of(runs, "texts", TEXTS)
    score_run(folder, ["sst2", "xquad_enro"], "pretraining", RowSelection(limit=1))
    scores, lines = read(folder / "scores" / "pretraining" / "sst2" / "validation")
    assert scores == {"rows": 1, "metrics": {}}
    assert lines[0]["inputs"] == "sst2 sentence: It is so."
    out = capsys.readouterr().out
    assert "no labels" in out and re.search(r"│ validation +│ 1 +│", out)


@pytest.mark.parametrize(
    ("given", "names", "settings", "message"),
    [
        (TEXTS, ["xquad_enr"], {}, "'xquad_enro'"),
        (TEXTS, ["record"], {}, "super_glue/record"),
        (TEXTS, ["cola"], {"limit": -1}, "--limit -1"),
        (TEXTS, ["cola"], {"mixture": "xquad"}, "'xquad_enro'"),
        (TEXTS, ["pos"], {}, "'pos'"),
        (HEADS, ["sst2"], {}, "'sst2'.*cola"),
        (HEADS, ["sst2"], {"mixture": "cola"}, "--mixture 'cola'"),
        (TEXTS, ["xquad_enro"], {}, "xquad_enro"),
        (TEXTS | NOTHING, ["xquad_enro"], {}, "untrained"),
        (
            TEXTS | {"objective.eos": "none"},
            ["xquad_enro"],
            {"mixture": "pretraining"},
            "objective.eos='none'.*answer to xquad_enro stops at EOS",
        ),
    ],
)
def test_what_cannot_be_scored_is_named_before_a_model_is_loaded(given, names, settings, message, runs):
    folder = runs / "nano" / "untrained"
    save_settings(folder, changes(Experiment(), SMALL | given), runs / "cache")
    with pytest.raises(SettingError, match=message):
        score_run(folder, names, settings.get("mixture", ""), RowSelection(limit=settings.get("limit", 0)))


@pytest.mark.parametrize("architecture", ["encoder-decoder", "prefix-decoder"])
def test_a_text_ends_with_eos_unless_pre_training_wrote_none(architecture):
    for eos, pretrains in itertools.product(("each-example", "none"), (True, False)):
        given = TEXTS | {"model.architecture": architecture, "objective.eos": eos}
        stage = SimpleNamespace(is_pretraining=pretrains, settings=changes(Experiment(), SMALL | given))
        _, end = boundary_ids(stage, ByteTokenizer(100))
        assert (end is None) == (pretrains and eos == "none")  # examples of tasks always have EOS


@pytest.mark.parametrize("start", [PAD, None])
@pytest.mark.parametrize("architecture", ["decoder", "prefix-decoder"])
def test_a_decoder_is_asked_between_the_special_tokens_that_its_fine_tuning_put_around_inputs(
    architecture, start
):
    given = TEXTS | {"model.architecture": architecture, "model.special.start": start}
    settings, vocabulary = changes(Experiment(), SMALL | given), ByteTokenizer(100)
    inputs, lengths = vocabulary.encode("a"), Lengths(8, 8, 4)
    boundary = boundary_tokens(settings.model, vocabulary)
    (batch,) = eval_batches(
        [(inputs, ())], architecture=architecture, lengths=lengths, batch_size=1, boundary=boundary
    )
    begin, end = boundary_ids(SimpleNamespace(is_pretraining=False, settings=settings), vocabulary)
    asked = vocabulary.encode_with_special_tokens("a", begin, end)
    assert batch.decoder.tokens[0, : len(asked)].tolist() == asked == [PAD, *inputs, EOS]


def test_a_misspelt_task_file_is_answered_with_the_nearest_one_whatever_the_run_answers(
    runs, tmp_path, monkeypatch
):
    folder, *_ = run_of(runs, "head", HEADS | {"tuning.heads": ("cola",)})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tickets.toml").touch()
    with pytest.raises(SettingError, match=r"no task file ticket.toml .*; did you mean tickets.toml\?"):
        score_run(folder.absolute(), ["ticket.toml"], "", RowSelection())


def test_answers_in_a_file_are_scored_if_there_are_as_many_as_references(runs, tmp_path, capsys):
    for name, text in (
        ("a.txt", "acceptable\nunacceptable\n"),
        ("a.jsonl", '{"prediction": "acceptable"}\n"unacceptable"'),
        ("b.JSONL", '{"prediction": "acceptable"}\n"unacceptable"'),
    ):
        (tmp_path / name).write_text(text)
        score_file(tmp_path / name, "cola", RowSelection(runs=runs))
        assert "100.00" in capsys.readouterr().out
    with pytest.raises(SettingError, match="has 2 predictions .* has 1 references"):
        score_file(tmp_path / "a.txt", "cola", RowSelection(limit=1, runs=runs))
    for path, name, message in (
        (tmp_path / "b.txt", "cola", "b.txt"),
        (tmp_path / "a.txt", "cole", "mean 'cola'"),
    ):
        with pytest.raises(SettingError, match=message):
            score_file(path, name, RowSelection(runs=runs))


def test_answers_of_a_file_with_a_byte_order_mark_are_those_without(runs, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfacceptable\nunacceptable\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf"acceptable"\n"unacceptable"')
    for name in ("a.txt", "a.jsonl"):
        score_file(tmp_path / name, "cola", RowSelection(runs=runs))
        assert "100.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prediction": null}', "line 2.*cola"),
        ('{"prediction": ["acceptable"]}', "line 2.*cola"),
        ("true", "line 2.*cola"),
        ('{"answer": "acceptable"}', 'line 2.*"prediction"'),
        ('"acceptable', "line 2"),
    ],
)
def test_what_is_no_answer_is_refused_with_its_line(line, message, runs, tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"prediction": "acceptable"}}\n{line}\n')
    with pytest.raises(SettingError, match=message):
        score_file(tmp_path / "a.jsonl", "cola", RowSelection(runs=runs))


def test_answers_to_rows_without_labels_and_alike_answers_have_no_score(runs, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("garbage\ngarbage\n")
    with pytest.raises(SettingError, match="'sst2': row 1"):
        score_file(tmp_path / "a.txt", "sst2", RowSelection(runs=runs))
    score_file(tmp_path / "a.txt", "cola", RowSelection(runs=runs))
    assert "0.00" in capsys.readouterr().out, "answering every example alike is chance level"


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
    monkeypatch.setattr(RowSelection, "select", lambda *_: rows)
    (tmp_path / name).write_bytes(text.encode())
    score_file(tmp_path / name, "cola", RowSelection(runs=runs))
    assert read == rows


def test_the_list_of_tasks_has_the_rows_of_what_is_prepared_and_the_command_for_the_rest(runs, capsys):
    data_tasks("co*", runs)
    out = capsys.readouterr().out
    assert re.findall(r"glue/cola +(\d+)", out) == ["2", "2"]
    assert out.count("tfds build NAME") == 1
    assert "not prepared" in out
    with pytest.raises(SettingError, match="'cola'"):
        data_tasks("colo", runs)


def test_a_run_reads_the_cache_that_it_recorded_or_is_told_and_says_which(
    runs, tmp_path, monkeypatch, capsys
):
    folder, *_ = run_of(runs, "moved", TEXTS)
    copied = tmp_path / "project" / "moved"
    shutil.copytree(folder, copied)
    score_run(folder, ["xquad_enro"], "", RowSelection(limit=1))
    assert f"prepared for the run: {runs / 'cache'}\n" in capsys.readouterr().out
    monkeypatch.setenv("LM_CACHE", str(runs / "cache"))
    score_run(copied, ["xquad_enro"], "", RowSelection(limit=1))
    assert f"prepared for the run: {runs / 'cache'}\n" in capsys.readouterr().out


TEXT_READ = {"text": "It is."}
PICTURES = {"next": TEXT_READ, "lens": TEXT_READ, "attention": TEXT_READ, "bias": {}}


def asked(folder, place, mixture):
    """``{command: what it prints}`` of all commands that use a model of the run in ``folder``."""
    lines = place / "lines.txt"
    lines.write_text("It is so.\n")
    pictures = {
        what: partial(
            write_picture,
            what,
            function_of(f"draw {what}")(run=folder, mixture=mixture, out=place / "x.png", **more),
        )
        for what, more in PICTURES.items()
    }
    return {
        "generate": partial(generate, folder, ("It is",), mixture, Decoding(4)),
        "likelihood": partial(score_texts, folder, str(lines), None, Scoring(mixture=mixture)),
        "export": partial(export_checkpoint, folder, place / "out", mixture),
        "notebook": partial(load_run, folder, mixture),
        **pictures,
    }


@pytest.mark.parametrize("mixture", ["", pytest.param("xquad_enro", marks=pytest.mark.slow), "pretraining"])
def test_every_command_means_the_fine_tuned_model_of_a_run_unless_another_is_named_and_says_so(
    mixture, runs, tmp_path, capsys
):
    folder, *_ = run_of(runs, "meant", TEXTS)
    meant = mixture or "xquad_enro"
    other = {"pretraining": "xquad_enro", "xquad_enro": "pretraining"}[meant]
    for command, ask in asked(folder, tmp_path, mixture).items():
        ask()
        told, option = capsys.readouterr().out, "" if command == "notebook" else "--mixture "
        assert f"{folder} after {meant} (its other models: {option}{other})" in told, command


def test_of_several_fine_tuned_models_the_first_is_meant_and_without_any_the_pre_trained_one():
    assert model_of_run(["vectors", "pretraining", "at-0.5/cola", "cola", "mrpc"]) == "cola"
    assert model_of_run(["start", "phase-1", "pretraining"]) == "pretraining"
    assert model_of_run(["cola"]) == "cola"


def test_what_needs_probabilities_of_tokens_passes_over_a_head_unless_it_is_named(runs, tmp_path, capsys):
    folder, *_ = run_of(runs, "with-head", HEADS)
    file = tmp_path / "lines.txt"
    file.write_text("It is so.\n")
    for named, meant in (("", "pretraining"), ("cola", "cola")):
        score_texts(folder, str(file), None, Scoring(mixture=named))
        assert f"{folder} after {meant}" in capsys.readouterr().out
    write_picture("attention", function_of("draw attention")(run=folder, **TEXT_READ, out=tmp_path / "x.png"))
    assert f"{folder} after cola" in capsys.readouterr().out


def test_training_starts_from_the_pre_trained_model_of_a_run_unless_a_stage_is_named(runs, capsys):
    folder, *_ = run_of(runs, "meant", TEXTS)
    alone, first, tuned = (
        overrides_of_start(f"{folder}{stage}", runs)["start.model"]
        for stage in ("", ":pretraining", ":xquad_enro")
    )
    assert alone == first != tuned
    assert (
        f"--start {folder}: {folder} after pretraining (its other models: RUN:STAGE"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("allowed", [stages_of, generative_stages])
def test_a_run_that_trains_nothing_has_no_model_to_show(allowed, tmp_path):
    save_settings(tmp_path, changes(Experiment(), SMALL | TEXTS | NOTHING))
    with pytest.raises(SettingError, match="pretraining.steps"):
        open_run(tmp_path, allowed(tmp_path))


def test_a_kind_of_picture_that_cannot_be_drawn_is_refused():
    with pytest.raises(SettingError, match=r"--out x\.foo.*\.png"):
        write_picture("masks", function_of("draw masks")(out=Path("x.foo")))


@pytest.mark.parametrize(
    "given", [pytest.param(TEXTS, marks=pytest.mark.slow), HEADS, TEXTS | {"model.architecture": "decoder"}]
)
def test_lines_are_as_likely_as_the_runs_model_finds_their_bytes(given, runs, tmp_path, capsys):
    folder, _, _ = run_of(runs, f"likelihood-{given.get('model.architecture')}", given)
    file, out = tmp_path / "lines.tsv", tmp_path / "out.jsonl"
    file.write_text("Where?\tHere.\n\n \t \nHere, and nowhere else at all.\n\n")
    score_texts(folder, str(file), out, Scoring(length=12, stride=5))
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["tokens"], second["tokens"]) == (first["bytes"], second["bytes"]) == (5, 30)
    assert first["bits_per_byte"] == pytest.approx(-first["log_prob"] / 5 / math.log(2))
    assert first["perplexity"] == pytest.approx(math.exp(-first["log_prob"] / 5))  # a byte is a token
    assert "all" in capsys.readouterr().out
    trained = open_run(folder, language_models(stages_of(folder), ""))
    question, answer = (trained.vocabulary.encode(text) for text in ("Where?", "Here."))
    question += [EOS] * (given.get("model.architecture") != "encoder")  # which reads [SEP] behind both
    masking = None if trained.config.has_decoder else Masking.of(trained.vocabulary)
    due = continuation_log_probs(trained.model, [(question, answer)], trained.shard_batch, masking)
    assert first["log_prob"] == pytest.approx(due[0], abs=1e-4)


def test_a_length_without_room_and_a_folder_for_results_are_refused_by_name(runs, tmp_path):
    folder, *_ = run_of(runs, "likelihood-encoder", HEADS)
    (tmp_path / "lines.txt").write_text("a text\n")
    with pytest.raises(SettingError, match="--length should be at least 3"):
        score_texts(folder, str(tmp_path / "lines.txt"), None, Scoring(length=2))
    with pytest.raises(SettingError, match=f"--out {tmp_path} is a folder"):
        score_texts(folder, str(tmp_path / "lines.txt"), tmp_path, Scoring())


def test_texts_are_scored_in_rows_as_long_as_in_training_unless_that_was_elsewhere(tmp_path):
    def length(given):
        save_settings(tmp_path, build("gpt/base", "nano", given), tmp_path / "cache")
        return trained_length(stages_of(tmp_path)[0])

    assert length({"data.inputs_length": 48}) == 48
    assert length({"model.published": '{"model_type": "gpt2"}'}) == 512


def test_a_model_without_an_output_matrix_is_refused_before_a_corpus_is_made(tmp_path, capsys):
    bare = {"model.architecture": "encoder", "model.output.logits": "none", "model.output.bias": False}
    save_settings(tmp_path, changes(Experiment(), SMALL | HEADS | bare | {"pretraining.steps": 0}))
    with pytest.raises(SettingError, match="model.output.logits=none"):
        score_texts(tmp_path, "documentation", None, Scoring())
    assert not capsys.readouterr().out


def test_a_corpus_is_as_likely_as_its_texts_and_characters_are_fewer_than_their_bytes(runs, tmp_path, capsys):
    folder, *_ = run_of(runs, "likelihood-corpus", TEXTS | {"model.architecture": "decoder"})
    texts = ["Überall ist Text.", "Here, too."]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    results = {}
    corpora = [f"text:{tmp_path}/0.txt + text:{tmp_path}/1.txt", f"text:{tmp_path}/0.txt"]
    for corpus, limit in ((corpora[0], 0), (corpora[0], 1), (corpora[1], 0)):
        score_texts(folder, corpus, tmp_path / "out.jsonl", Scoring(texts=limit))
        results[corpus, limit] = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    first, second = results[corpora[0], 0]
    assert [first] == results[corpora[0], 1] == results[corpora[1], 0]
    assert (first["bytes"], first["characters"], second["bytes"]) == (18, 17, 10)
    assert first["bits_per_character"] * 17 == pytest.approx(first["bits_per_byte"] * 18)
    both = text_rates([first, second])
    assert both["bits_per_byte"] == pytest.approx(
        (first["bits_per_byte"] * 18 + second["bits_per_byte"] * 10) / 28
    )
    assert both["perplexity"] == pytest.approx(math.exp(-(first["log_prob"] + second["log_prob"]) / 28))
    assert "all 2" in capsys.readouterr().out


def test_the_end_of_a_text_is_not_scored_by_a_model_that_was_trained_without_it(runs, tmp_path):
    (tmp_path / "lines.txt").write_text("a text with some words\n")
    for eos in ("none", "each-example"):
        given = {"model.architecture": "decoder", "objective.eos": eos, "finetuning.steps": 0}
        folder, *_ = run_of(runs, f"likelihood-eos-{eos}", given | {"tuning.mixtures": ()})
        arguments = folder, str(tmp_path / "lines.txt"), tmp_path / "out.jsonl", Scoring(end=True)
        if eos == "each-example":
            score_texts(*arguments)
        else:
            with pytest.raises(SettingError, match="--end: this model was trained without EOS"):
                score_texts(*arguments)


def test_characters_that_a_vocabulary_cannot_write_are_counted_and_a_blank_text_has_no_perplexity(
    tmp_path, capsys
):
    vocabulary = SentencePieceTokenizer(
        train_sentencepiece(["the cat sat on the mat"] * 99, 15, tmp_path / "m"), 4
    )
    results = [
        {"log_prob": -1.0, "tokens": len(ids), "unknown": ids.count(vocabulary.unk)}
        for ids in map(vocabulary.encode, ("the cat", "the \u4e2d", " "))
    ]
    sizes = [{"bytes": 9, "characters": 9}] * 3
    results = [result | size for result, size in zip(results, sizes, strict=True)]
    assert [result["unknown"] for result in results] == [0, 1, 0]
    assert text_rates(results[2:])["perplexity"] is None
    show_likelihoods(["the cat", "the \u4e2d", " "], results)
    out = capsys.readouterr().out
    assert "1 tokens are unknown" in out and "--data.unknown bytes" in out and "– (no token)" in out
    show_likelihoods(["the cat"], results[:1])
    assert "unknown:" not in capsys.readouterr().out


def test_a_perplexity_that_is_no_float_is_infinite_and_null_in_json(capsys):
    result = {"log_prob": -1e4, "tokens": 10, "unknown": 0, "bytes": 30, "characters": 30}
    rates = text_rates([result])
    assert rates["perplexity"] == math.inf and rates["bits_per_byte"] == pytest.approx(480.9, abs=0.1)
    assert json.loads(json_line(result | rates)) == result | rates | {"perplexity": None}
    show_likelihoods(["unlikely"], [result])
    assert "inf" in capsys.readouterr().out


def test_results_are_lines_of_json_with_null_for_infinities_and_nan():
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    result = {"log_prob": -math.inf, "variance": math.nan, "perplexity": math.inf, "tokens": 3}
    expected = {"log_prob": None, "variance": None, "perplexity": None, "tokens": 3}
    assert json.loads(json_line(result), parse_constant=refuse) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "", r"a\.t"),
        ("a.txt", " \n\n", r"a\.t"),
        ("a.tsv", "a\tb\na\t\n", "line 2"),
        ("a.jsonl", "[]", "line 1"),
        ("a.JSONL", '"a\\tb"', "line 1"),
        ("a.jsonl", '{"context": "a\\ud800", "continuation": "b"}', r"line 1: character 2 .*half of a char"),
    ],
)
def test_lines_without_a_continuation_are_named(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=message):
        read_texts(tmp_path / name)


@pytest.mark.parametrize("architecture", ["decoder", pytest.param("encoder-decoder", marks=pytest.mark.slow)])
def test_a_prompt_is_answered_by_the_likeliest_candidate_after_the_examples(architecture, runs):
    folder, *_ = run_of(runs, f"prompts-{architecture}", TEXTS | {"model.architecture": architecture})
    score_run(folder, ["boolq@1"], "", RowSelection(limit=2))  # of three: the last is the example
    scores, lines = read(folder / "scores" / "xquad_enro" / "boolq@1" / "validation")
    trained = open_run(folder, stages_of(folder))
    encode, end = trained.vocabulary.encode, [] if architecture == "decoder" else [EOS]
    *asked, other = [dict(row) for row in TASKS["boolq"].rows("validation", runs / "cache")]
    words = ("no", "yes")
    example = f"{other['passage']}\nQuestion: {other['question']}?\nAnswer: {words[other['label']]}\n\n"
    nats, answers = [], []
    for row, line in zip(asked, lines, strict=True):
        prompt = f"{example}{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        assert (line["inputs"], line["target"]) == (prompt, ("False", "True")[row["label"]])
        texts = words if end else [f" {word}" for word in words]
        question = [*encode(prompt), *([EOS] if ends_questions(trained) else [])]
        pairs = [(question, [*encode(text), *end]) for text in texts]
        found = continuation_log_probs(trained.model, pairs, trained.shard_batch)
        answers.append(("False", "True")[int(found[1] / 3 > found[0] / 2)])
        nats.append(found[row["label"]])
    assert [line["prediction"] for line in lines] == answers
    size = sum(len(words[row["label"]]) for row in asked)
    assert scores["metrics"]["bits_per_byte"] == pytest.approx(-sum(nats) / math.log(2) / size, rel=1e-4)
    right = sum(answer == line["target"] for answer, line in zip(answers, lines, strict=True))
    assert scores["metrics"]["score"] == 50 * right


def test_the_nearest_examples_are_those_whose_mean_embedding_is_most_like_the_question_s(runs):
    folder, *_ = run_of(runs, "prompts-decoder", TEXTS | {"model.architecture": "decoder"})
    score_run(folder, ["boolq@1-nearest"], "", RowSelection(limit=1))
    _, (line,) = read(folder / "scores" / "xquad_enro" / "boolq@1-nearest" / "validation")
    trained = open_run(folder, stages_of(folder))
    table = np.asarray(trained.model.embed.table)
    asked, *others = [dict(row) for row in TASKS["boolq"].rows("validation", runs / "cache")]
    questions = [f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:" for row in (asked, *others)]
    vectors = [table[np.array(trained.vocabulary.encode(text))].mean(0) for text in questions]
    assert mean_embeddings(trained, questions) == pytest.approx(np.array(vectors), abs=1e-6)
    first, *rest = vectors
    cosines = [vector @ first / np.linalg.norm(vector) for vector in rest]
    assert line["inputs"].startswith(questions[1 + int(np.argmax(cosines))])
    assert line["inputs"].endswith(questions[0])


def ends_questions(trained):
    return trained.encode("a")[-1] == EOS


@pytest.mark.parametrize("architecture", [pytest.param("decoder", marks=pytest.mark.slow), "encoder-decoder"])
def test_a_prompt_is_answered_greedily_up_to_a_newline(architecture, runs, monkeypatch):
    folder, *_ = run_of(runs, f"prompts-{architecture}", TEXTS | {"model.architecture": architecture})
    score_run(folder, ["xquad_enro@0"], "", RowSelection())
    _, lines = read(folder / "scores" / "xquad_enro" / "xquad_enro@0" / "validation")
    trained = open_run(folder, stages_of(folder))
    for line in lines:
        batch = trained.batch([trained.encode(line["inputs"])], 64)
        written = trained.vocabulary.decode(np.asarray(greedy(trained.model, batch, max_length=64))[0])
        assert line["inputs"].endswith("\nRomanian:")
        assert line["prediction"] == written.strip().split("\n")[0].split("English:")[0].strip()


def test_prompts_that_leave_no_room_or_no_examples_are_refused(runs):
    folder, *_ = run_of(runs, "prompts-decoder", TEXTS | {"model.architecture": "decoder"})
    with pytest.raises(SettingError, match="boolq@1"):
        score_run(folder, ["boolq@1"], "", RowSelection())
    with pytest.raises(SettingError, match="boolq@0.*--prompt-length"):
        score_run(folder, ["boolq@0"], "", RowSelection(), prompt_length=10)
    score_run(folder, ["boolq@0"], "", RowSelection(), prompt_length=38)
    _, lines = read(folder / "scores" / "xquad_enro" / "boolq@0" / "validation")
    assert "It may\nQuestion: will it be?\nAnswer:" in [line["inputs"] for line in lines]
    with pytest.raises(SettingError, match="'boolq'"):
        score_run(folder, ["bolq@0"], "", RowSelection())


@pytest.mark.parametrize("prompt_length", [0, 90])
def test_a_prompt_leaves_room_for_the_answer_that_is_scored_after_it(prompt_length, runs):
    positions = {"model.positions.kind": "learned", "model.positions.max_length": 100}
    given = TEXTS | {"model.architecture": "decoder"} | positions
    folder, *_ = run_of(runs, f"prompts-long-{prompt_length}", given)
    trained = open_run(folder, stages_of(folder))
    task, words = find_prompted_task("xquad_enro@0"), "word " * 40
    rows = [{"en": words, "ro": "un"}, {"en": words, "ro": "un cuv\u00e2nt " * 6}]
    for row in prompted_rows(trained, task, rows, runs / "cache", prompt_length):
        prompt, answer = trained.encode_continuation(row["prompt"], row["ro"])
        tokens_read = 1 + len(prompt) + len(answer) - 1  # with the start token, without the last
        assert 100 - 64 - len("word ") <= tokens_read <= 100
        assert np.isfinite(
            continuation_log_probs(trained.model, [(prompt, answer)], trained.shard_batch)
        ).all()
    endless = {"en": "A.", "ro": "un cuv\u00e2nt " * 20}
    with pytest.raises(SettingError, match="xquad_enro@0: the question alone exceeds"):
        prompted_rows(trained, task, [endless], runs / "cache", prompt_length)


def test_metrics_are_json_with_null_for_infinities_and_nan(tmp_path):
    metrics = {"score": math.nan, "bits_per_byte": math.inf, "f1": Undefined("no target"), "accuracy": 50.0}
    write_metrics(tmp_path / "scores.json", 2, metrics)
    written = json.loads((tmp_path / "scores.json").read_text())
    assert written["metrics"] == dict.fromkeys(metrics) | {"accuracy": 50.0}
    assert (written["rows"], written["undefined"]) == (2, {"f1": "no target"})


DENOISING = TEXTS | {"objective.inputs": "span-masks", "objective.noise": "poisson-spans"}
DENOISING |= {"objective.targets": "everything"}


def test_gaps_of_t5_are_sentinels_and_of_bart_masks_however_they_are_spelled(runs, capsys):
    texts = ["a [MASK] b [MASK]", "a <mask> b <mask>", "a <extra_id_0> b <extra_id_1>"]
    for name, given in (("gaps-t5", TEXTS), ("gaps-bart", DENOISING)):
        folder, *_ = run_of(runs, name, given)
        trained = open_run(folder, stages_of(folder))
        top, (a, blank, b) = trained.vocabulary.vocab_size - 1, trained.vocabulary.encode("a b")
        first, second = (top, top - 1) if name == "gaps-t5" else (top, top)
        ids, sentinels = trained.encode_gaps(texts[0])
        assert ids == [a, blank, first, blank, b, blank, second, EOS], "blanks are tokens of this vocabulary"
        assert sentinels == ([top, top - 1] if name == "gaps-t5" else [])
        answers = []
        for text in texts:
            fill_gaps(folder, [GAP.sub(MASK, text)], "", Filling(top=2), 0)
            answers.append(capsys.readouterr().out)
        shown = answers[0].count("%")
        assert len({*answers}) == 1 and (shown == 2 or "of the 4 likeliest" in answers[0])
        assert str(folder) in answers[0].splitlines()[0]


def test_a_text_is_shown_once_with_the_probability_of_all_answers_that_read_so(runs, capsys, monkeypatch):
    folder, *_ = run_of(runs, "gaps-alike", DENOISING)
    encode = open_run(folder, stages_of(folder)).vocabulary.encode
    answers = np.array([[encode("a b"), encode("a c"), encode("a b")]])
    monkeypatch.setattr(
        "lm.evaluate.mask_filling.infill", lambda *_, **__: (answers, np.array([[1e-5, 4e-5, 0.0]]))
    )
    fill_gaps(folder, ["a [MASK]"], "", Filling(top=3), 0)
    _, *lines, note = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [["4e-03%", "a c"], ["1e-03%", "a b"]]
    assert note == "2 of 3: of the 3 likeliest answers 1 read like another"


def test_an_answer_that_leaves_a_gap_open_is_no_text_to_show_and_is_counted(runs, capsys, monkeypatch):
    folder, *_ = run_of(runs, "gaps-open", TEXTS)
    vocabulary = open_run(folder, stages_of(folder)).vocabulary
    sentinel, (b, c) = vocabulary.vocab_size - 1, vocabulary.encode("bc")
    answers = np.array([[[sentinel, b, EOS], [c, EOS, EOS], [sentinel, c, EOS]]])
    monkeypatch.setattr(
        "lm.evaluate.mask_filling.infill", lambda *_, **__: (answers, np.array([[0.25, 0.5, 0.125]]))
    )
    fill_gaps(folder, ["a [MASK]"], "", Filling(top=3), 0)
    _, *lines, note = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [["25.0%", "a b"], ["12.5%", "a c"]]
    assert note == "2 of 3: of the 3 likeliest answers 1 left a gap open"


def test_where_every_answer_leaves_a_gap_open_a_sentence_says_so(runs, capsys, monkeypatch):
    folder, *_ = run_of(runs, "gaps-all-open", TEXTS)
    (c,) = open_run(folder, stages_of(folder)).vocabulary.encode("c")
    answers = np.array([[[c, EOS], [EOS, EOS]]])
    monkeypatch.setattr(
        "lm.evaluate.mask_filling.infill", lambda *_, **__: (answers, np.array([[0.5, 0.25]]))
    )
    fill_gaps(folder, ["a [MASK]"], "", Filling(top=3), 0)
    _, note = capsys.readouterr().out.splitlines()
    assert note.startswith("no answer fills every gap: each of the 2 likeliest leaves one open")


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        (["A <extra_id_0> of a"], "leave <extra_id_0> out of --prompt"),
        (["A <extra_id_0> of a <mask>"], "leave <extra_id_0>, <mask> out of --prompt"),
        (["A [MASK] of a", "A [MASK]"], "leave [MASK] out of --prompt"),
        (["A <mask> of a", "A"], "all texts or none should have <mask>"),
    ],
)
def test_a_gap_that_a_decoder_cannot_fill_is_named_as_it_was_typed(runs, capsys, prompts, named):
    folder, *_ = run_of(runs, "gaps-decoder", TEXTS | {"model.architecture": "decoder"})
    assert dispatch(["generate", str(folder), "--prompt", *prompts]) == 2
    assert named in " ".join(capsys.readouterr().err.split())


def test_an_encoder_fills_a_text_in_passes_that_a_seed_repeats(runs, capsys):
    folder, *_ = run_of(runs, "gaps-bert", HEADS)
    answers = []
    for seed in (0, 0, 1):
        for passes in ("gibbs", "metropolis-hastings", "ancestral"):
            fill_gaps(folder, ["a [MASK] b [MASK]"], "", Filling(2, iterations=2, passes=passes), seed)
        fill_gaps(folder, ["[MASK] b"], "", Filling(2, 1, "confidence"), seed, Decoding(temperature=1.0))
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    assert "[MASK]" not in answers[0]
    for filling in (Filling(), Filling(iterations=2)):
        generate(folder, ("a <mask> b",), filling=filling)
        assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("decoding", "filling", "named"),
    [
        (Decoding(beams=4, max_length=3), Filling(), "--max-length, --beams"),
        (Decoding(temperature=2.0), Filling(iterations=2, passes="ancestral"), "--temperature"),
        (Decoding(temperature=2.0, top_p=0.5), Filling(iterations=2, passes="confidence"), "--top-p"),
    ],
)
def test_options_of_answers_that_filling_does_not_read_are_refused(runs, decoding, filling, named):
    folder, *_ = run_of(runs, "gaps-bert", HEADS)
    with pytest.raises(SettingError, match=f"^{named}: not read where masks are filled"):
        generate(folder, ("a [MASK]",), decoding=decoding, filling=filling)


@pytest.mark.parametrize(
    ("given", "text", "filling", "message"),
    [
        (TEXTS | {"model.architecture": "decoder"}, "a [MASK]", {}, "'decoder'"),
        (
            TEXTS | {"objective.inputs": "drop", "objective.targets": "drop"},
            "a [MASK]",
            {},
            "bart/base",
        ),
        (TEXTS, "a [MASK]", {"iterations": 1}, "--iterations"),
        (TEXTS, "a prompt without", {"top": 2}, "--top: for texts with gaps"),
        (TEXTS, "[MASK]" * 101, {}, "101.*100"),
        (HEADS, "a [MASK]", {"passes": "gibbs"}, "passes='gibbs'"),
        (HEADS, "a [MASK]", {"top": 0}, "top=0"),
    ],
)
def test_a_gap_that_no_model_can_fill_is_refused_with_what_to_use(given, text, filling, message, runs):
    folder, *_ = run_of(
        runs, f"gaps-{given.get('model.architecture')}-{given.get('objective.inputs')}", given
    )
    with pytest.raises(SettingError, match=message):
        generate(folder, (text,), filling=Filling(**filling))


def test_an_encoder_that_predicts_the_next_token_neither_fills_nor_scores_a_gap(runs, tmp_path):
    given = {"model.architecture": "encoder", "model.attention.encoder_mask": "causal"}
    given |= {"objective": OBJECTIVES["causal-lm"], "tuning.mixtures": ()}
    folder, *_ = run_of(runs, "causal-encoder", given)
    with pytest.raises(SettingError, match="objective.inputs='drop' never read a gap"):
        generate(folder, ("a [MASK]",))
    (tmp_path / "lines.txt").write_text("a text\n")
    with pytest.raises(SettingError, match="model.attention.encoder_mask='causal'"):
        score_texts(folder, str(tmp_path / "lines.txt"), None, Scoring())


DIFFUSION = TEXTS | {
    "model.architecture": "encoder",
    "objective": OBJECTIVES["masked-diffusion"],
    "tuning.mixtures": (),
    "finetuning.steps": 0,
}


def test_masked_diffusion_has_a_bound_with_an_interval_for_any_text(runs, capsys, tmp_path):
    folder, *_ = run_of(runs, "diffusion", DIFFUSION)
    file, out = tmp_path / "lines.txt", tmp_path / "out.jsonl"
    file.write_text("a text with some words\nand another one\n")
    score_texts(folder, str(file), out, Scoring(draws=32))
    assert "A bound" in capsys.readouterr().out
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(score["variance"] > 0 and score["bits_per_byte_interval"] > 0 for score in scores)


def test_a_text_without_tokens_has_a_bound_of_no_bits_without_error(runs, capsys, tmp_path, monkeypatch):
    folder, *_ = run_of(runs, "diffusion", DIFFUSION)
    # SentencePiece, unlike bytes, has no token for a space of no width.
    monkeypatch.setattr(Tokenizer, "encode_prompt", lambda self, text: self.encode(text.strip("\u200b")))
    file, out = tmp_path / "lines.txt", tmp_path / "out.jsonl"
    file.write_text("the cat\n\u200b\n")
    score_texts(folder, str(file), out, Scoring(draws=2))
    text, empty = [json.loads(line) for line in out.read_text().splitlines()]
    assert text["tokens"] > 0 and text["variance"] > 0
    assert (empty["tokens"], empty["log_prob"], empty["variance"]) == (0, 0, 0)
    assert empty["bits_per_byte_interval"] == 0 and empty["perplexity"] is None
    assert "A bound" in capsys.readouterr().out


def test_masked_diffusion_continues_a_prompt_by_as_many_masks_as_it_may_write(runs, capsys, monkeypatch):
    folder, *_ = run_of(runs, "diffusion", DIFFUSION)
    sampling = Filling(top=1, iterations=2, passes="ancestral")
    written = []
    filled = generation._filled_in_passes
    monkeypatch.setattr(
        generation,
        "_filled_in_passes",
        lambda run, text, *rest: written.append(text) or filled(run, text, *rest),
    )
    generate(folder, ("a text",), decoding=Decoding(max_length=3), filling=sampling)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("a text")  # an untrained model may write what is not shown, such as sentinels
    assert written == ["a text[MASK][MASK][MASK]"]


def test_texts_with_and_without_gaps_are_not_mixed(tmp_path):
    with pytest.raises(SettingError, match=r"\[MASK\]"):
        generate(tmp_path, ("a [MASK]", "a b"))
