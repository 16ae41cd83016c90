"""Answers to lm-evaluation-harness are those of its own ``hf`` model: golden numbers, and side by side."""

import json
import math
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from paths import GOLDEN

from experiments.cli.convert import export_checkpoint, import_checkpoint
from experiments.cli.eval_harness import eval_harness
from experiments.runs.stages import stages_of
from experiments.runs.trained import open_run, texts_of_run
from lm import convert
from lm.config.base import SettingError
from lm.config.decoding import Decoding
from lm.evaluate.loglikelihood import without_start
from lm.evaluate.text_model import cut_at_stops, decoding_from_kwargs, rolling_windows
from lm.notebook import text_model
from lm.tokenizers.huggingface import load_pretrained_tokenizer

KNOWN = json.loads((GOLDEN / "harness" / "answers.json").read_text())
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
doc_to_text: "{{{{text}}}}"
{how}
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: [" a bird", " the dog ran", " tree"]
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITTEN = """
output_type: generate_until
doc_to_target: "{{reply}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama_gqa")]


@pytest.fixture(scope="module", params=[*SLOW, "t5_v1_0"])
def asked(request):
    """A small published model with its tokenizer, and what the harness's own class answers with it."""
    folder = GOLDEN / "harness" / request.param
    config, model = convert.load(GOLDEN / request.param)
    tokens = load_pretrained_tokenizer(folder, config.vocab_size)
    model = text_model(model, tokens, max_length=KNOWN["max_length"])
    return model, KNOWN["answers"][request.param]


def test_likelihoods_of_continuations_and_of_whole_texts_are_the_harnesss(asked):
    model, known = asked
    found = model.log_likelihoods(KNOWN["pairs"])
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in known["pairs"]], rtol=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in known["pairs"]]
    np.testing.assert_allclose(model.rolling_log_likelihoods(KNOWN["texts"]), known["texts"], rtol=1e-5)


@pytest.mark.slow
def test_what_is_written_behind_prompts_is_the_harnesss_and_would_have_been_guessed(asked):
    model, known = asked
    found = model.generate(KNOWN["prompts"])
    for mine, theirs in zip(found, known["prompts"], strict=True):
        if model.model.config.has_encoder:  # to which the harness allows more tokens: those of its prompt
            assert theirs.startswith(mine) and bool(mine) == bool(theirs)
        else:
            assert mine.strip() == theirs.strip()
    start = model.encode_prompt("a bird")
    first = int(model._generate_batch([start], Decoding(1), jax.random.key(0))[0, 0])
    context = without_start(start, model.model.config)
    likeliest, other = model._score([(context, [first]), (context, [first ^ 1])])
    assert likeliest[1] and not other[1]


def test_windows_score_every_token_once_in_rows_that_are_full():
    ids = list(range(1, 11))
    pairs = list(rolling_windows(ids, [0], 4))
    assert pairs == [([0], [1, 2, 3, 4]), ([4], [5, 6, 7, 8]), ([6, 7, 8], [9, 10])]
    assert list(rolling_windows([], [0], 4)) == []


def test_settings_of_a_request_are_the_harnesss_and_unknown_ones_are_refused():
    assert decoding_from_kwargs(
        {"max_new_tokens": 3, "until": ["x"], "do_sample": False, "temperature": 0.7}
    ) == (
        Decoding(3, length_penalty=1.0),
        0,
    )
    assert decoding_from_kwargs({"do_sample": True, "top_k": 5}) == (
        Decoding(256, temperature=1.0, top_k=5),
        0,
    )
    with pytest.raises(SettingError, match="'max_gen_tok'.*'max_gen_toks'"):
        decoding_from_kwargs({"max_gen_tok": 1})


def test_an_answer_ends_at_the_first_of_its_stops_in_whatever_order_they_are_given():
    assert cut_at_stops("one. two", [".", "e"]) == cut_at_stops("one. two", ["e", "."]) == "on"
    assert cut_at_stops("abXY", ["XY", "bX"]) == cut_at_stops("abXY", ["bX", "XY"]) == "a"
    assert cut_at_stops("one", "") == cut_at_stops("one", None) == cut_at_stops("one", ["x"]) == "one"


def test_a_prompt_without_settings_is_answered_as_one_with_none(asked):
    model = asked[0]

    def answers(prompts):
        try:
            return model.generate(prompts)
        except SettingError as error:  # small decoders have no room for the default of 256 tokens
            return str(error)

    assert answers(["the", ("a cat", {})]) == answers([("the", {}), ("a cat", {})])
    with pytest.raises(SettingError, match="expects a list of prompts, not the text 'the'"):
        model.generate("the")


def test_a_continuation_or_an_answer_without_room_is_refused(asked):
    model = replace(asked[0], max_length=4)
    with pytest.raises(SettingError, match="4"):
        model.log_likelihoods([("the", " cat sat on the mat and the dog")])
    if not model.model.config.has_encoder:
        with pytest.raises(SettingError, match="max_gen_toks=4"):
            model.generate([("the", {"max_gen_toks": 4})])


def test_the_harness_is_needed_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(SettingError, match=r"lm eval harness.*'lm-study\[harness\]'"):
        eval_harness(["--tasks", "piqa"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_the_harness_gives_a_run_the_numbers_of_its_exported_copy(name, tmp_path, monkeypatch):
    """Needs lm-eval, torch and transformers in the same environment: ``pip install '.[harness]'``."""
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    published = tmp_path / "published"
    shutil.copytree(GOLDEN / "harness" / name, published)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name / file, published)
    import_checkpoint(published, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "copy")
    rows = [
        {"text": text, "answer": i % 3, "reply": "tr"}
        for i, text in enumerate(["the cat", "where a", "in a"])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"choice": CHOICE, "rolling": ROLLING, "written": WRITTEN}
    (tmp_path / "tasks").mkdir()
    for task, how in tasks.items():
        text = TASK.format(name=task, data=tmp_path / "rows.jsonl", how=how)
        (tmp_path / "tasks" / f"{task}.yaml").write_text(text)

    from lm_eval.tasks import TaskManager

    from experiments.harness import StudyModel

    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    theirs = {"pretrained": str(tmp_path / "copy"), "device": "cpu", "dtype": "float32", "max_length": 64}
    ours = StudyModel(str(tmp_path / "run"), max_length=64, batch_size=1)
    found = [
        lm_eval.simple_evaluate(model, model_args=given, tasks=list(tasks), task_manager=manager)
        for model, given in ((ours, None), ("hf", theirs))
    ]
    results = [{task: one["results"][task] for task in tasks} for one in found]
    for task in tasks:
        for metric, value in results[1][task].items():
            if isinstance(value, float) and not math.isnan(value):
                assert results[0][task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
        for mine, other in zip(found[0]["samples"][task], found[1]["samples"][task], strict=True):
            for answer, right in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
                assert answer == (pytest.approx(right, rel=1e-5) if task != "written" else right)


@pytest.mark.slow
def test_a_run_is_asked_in_texts_as_its_model_reads_them(tmp_path):
    published = tmp_path / "published"
    shutil.copytree(GOLDEN / "harness" / "gpt2", published)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "gpt2" / file, published)
    import_checkpoint(published, tmp_path / "run")
    model = texts_of_run(open_run(tmp_path / "run", stages_of(tmp_path / "run")), KNOWN["max_length"])
    found = [number for number, _ in model.log_likelihoods(KNOWN["pairs"][:4])]
    known = [number for number, _ in KNOWN["answers"]["gpt2"]["pairs"][:4]]
    np.testing.assert_allclose(found, known, rtol=1e-5)
