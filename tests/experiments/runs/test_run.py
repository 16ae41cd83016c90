"""From settings to a report, as a user gets there."""

import json
import math
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import small_runs
from flax import nnx
from small_runs import SMALL

from experiments import __main__ as cli
from experiments.cli import COMMANDS, demo
from experiments.cli.generate import generate
from experiments.cli.run_options import Options, RowRun
from experiments.cli.run_summary import (
    guess_score,
    loss_lines,
    memorising_note,
    report_command,
    suggestions,
    summarize,
)
from experiments.cli.sweep import train_rows
from experiments.cli.train import train_one
from experiments.evaluate.generation import count_written
from experiments.processes.progress import reporting
from experiments.runs.curves import HELD_OUT_LOSS, TRAINING_LOSS
from experiments.runs.kinds.stage import Stage
from experiments.runs.paths import save_settings
from experiments.runs.result import Result, read_result, summary, write_result
from experiments.runs.run import Run
from experiments.runs.scores import columns, cost
from experiments.runs.stages import stages_of
from experiments.runs.status import StageLog
from experiments.runs.task_scores import best_of
from experiments.study import registry
from experiments.study.paths import run_folder
from experiments.study.registry import TABLES, build
from experiments.study.scales import SCALES
from lm import sharding
from lm.config.base import SettingError, change
from lm.config.decoding import Decoding
from lm.config.mesh import MeshConfig
from lm.config.training import CheckpointConfig
from lm.data.tasks.task import BaseTask
from lm.files import json_with_checksum, lines_with_checksum, parse_with_checksum, write
from lm.metrics import Likelihood
from lm.nn.transformer import Transformer
from lm.objectives.denoising import compute_lengths
from lm.train.checks import check_mesh
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.runtime.preemption import Interrupted
from lm.train.runtime.records import records
from lm.train.step import StepSpec
from lm.train.step import build as build_steps

runs = small_runs.runs
BASELINE, RATE = "t5/1-baseline/baseline", "t5/6-corruption-rate/50"
ALL_TOKENS = {
    "objective.targets": "restored",
    "model.heads": ("generator", "copy"),
    "model.output.logits": "tied",
    "model.output.transform": True,
    "model.output.bias": True,
    "tuning.heads": ("next",),
}
ROTATION = {"objective.noise": "none", "objective.sentences": "rotated", "tuning.heads": ("next",)}


@pytest.fixture(scope="module")
def swept(runs):
    train_rows(RATE, 1, {}, Options("tiny", runs))
    return runs


def folder_of(runs: Path, name: str) -> Path:
    return run_folder(runs, "tiny", name, 0, {})


def pretraining_of(folder: Path) -> Stage:
    """The run's pre-training."""
    return stages_of(folder)[0]


# The first rows of each table, of which the others are small changes; and all rows at every scale.
ROWS = {name: [row.name for row in table.rows if not row.needs] for name, table in TABLES.items()}
FIRST_ROWS = [name for names in ROWS.values() for name in names[:2]]
ALL_ROWS = [name for names in ROWS.values() for name in names]
SLOW = [pytest.param(scale, ALL_ROWS, marks=pytest.mark.slow) for scale in SCALES]


@pytest.mark.parametrize(("scale", "names"), [("nano", FIRST_ROWS), *SLOW], ids=["first rows", *SCALES])
def test_every_row_builds_at_every_scale_without_allocating(scale, names):
    shapes = {}
    for name in names:
        e = build(name, scale)
        # Embeddings narrower than the model, as of ALBERT, have any width at the smaller scales.
        fsdp = 1 if (e.model.embedding.d_embed or 0) % 2 else 2
        for phase in (e.pretraining, e.finetuning):
            check_mesh(e.model, MeshConfig(fsdp=fsdp).sizes(8), phase.batch_size)
        if e.model.has_decoder:
            assert 0 < compute_lengths(e.objective, e.data.inputs_length).targets <= e.data.inputs_length, (
                name
            )
        if e.model not in shapes:
            shapes[e.model] = jax.eval_shape(
                lambda key, m=e.model: Transformer(m, nnx.Rngs(params=key)), jax.random.key(0)
            )
        assert len(jax.tree.leaves(shapes[e.model])) > 10


def test_a_sweep_ends_with_scores_a_report_and_a_plot(swept, capsys):
    for name in (BASELINE, RATE):
        result = read_result(folder_of(swept, name))
        assert set(result.columns) == {
            "extract",
            "restore",
            "next",
            "summary",
            "modality",
            "order",
            "acceptability",
            "agreement",
            "determiners",
            "verb-forms",
        }
        for task in result.tasks.values():  # beside the score, and no metric of the task
            assert task["shuffled"].keys() == {"score", "rows"} and 0 < task["shuffled"]["rows"] <= 60
            assert "shuffled" not in task["metrics"] and task["half"] in ("reading", "language")
        assert result.tokens > result.content_tokens > 0 == result.start_flops < result.flops
        (costs,) = result.phase_costs.values()
        assert costs == {"flops": result.flops, "content_tokens": result.content_tokens}
        assert 0 < result.content_loss != result.reference_loss
    folder = swept / "tiny" / "reports" / "t5-6-corruption-rate"
    text = (folder / "report.md").read_text()
    assert "it has not left the unigram plateau" in (folder / "report.html").read_text()
    assert "83.28" in text
    assert "objective.rate" in (folder / "report.html").read_text()
    assert (folder / "t5-6-corruption-rate.png").read_bytes().startswith(b"\x89PNG")
    shared = pretraining_of(folder_of(swept, BASELINE)).folder
    # called by its row in TensorBoard, not by a hash
    assert list(shared.glob("tensorboard/t5.*.seed-0/events*"))


def test_the_demo_ends_with_a_sample_a_picture_and_a_table(swept, monkeypatch, capsys):
    text = Path(__file__).parents[3] / "docs" / "study.md"
    monkeypatch.setattr(demo, "SCALE", "tiny")
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "SEEDS", 1)
    monkeypatch.setattr(demo, "job_count", lambda jobs, wanted: 1)  # a worker would be another pytest
    demo.demo(text=text, runs=swept)
    shown = capsys.readouterr().out
    for words in ("held-out text: ", "before training: ", "perplexity", "No pre-training"):
        assert words in shown
    assert (swept / demo.NAME / demo.PICTURE).read_bytes().startswith(b"\x89PNG")
    for line in shown.partition("Try:")[2].split("\n"):
        if line.strip():
            assert cli.named_command(shlex.split(line)[1:])[0] in COMMANDS


def test_the_demo_suggests_a_prompt_of_whole_words_that_the_decoder_reads():
    long = "A decoder of the text reads a prompt whose words go on and on until the margin is far behind."
    for line in demo.suggestions(Path("runs/demo"), long, demo.RUNS)[:2]:
        (prompt,) = re.findall("'(.*)'", line)
        assert long.startswith(f"{prompt} ") and 30 < len(prompt) <= 40
    for short in ("The function returns", "x" * 60):
        assert short in demo.suggestions(Path("runs/demo"), short, demo.RUNS)[0]


def test_the_demo_refuses_a_text_that_is_missing_or_empty_before_anything_is_trained(tmp_path):
    with pytest.raises(SettingError, match="no such file"):
        demo.demo(text=tmp_path / "missing.txt", runs=tmp_path)
    empty = tmp_path / "test.txt"
    empty.touch()
    with pytest.raises(SettingError, match="no text for"):
        demo.demo(text=empty, runs=tmp_path)
    assert not [*tmp_path.rglob("seed-*")]


def test_what_is_finished_is_not_trained_again(swept, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in (swept / "tiny").rglob("metrics.jsonl")}
    train_rows(RATE, 1, {}, Options("tiny", swept))
    assert before == {path: path.stat().st_mtime_ns for path in (swept / "tiny").rglob("metrics.jsonl")}


def test_an_evaluation_whose_record_was_lost_is_made_anew(swept):
    folder = folder_of(swept, RATE)
    path = pretraining_of(folder).folder / "metrics.jsonl"
    whole, loss = path.read_text(), read_result(folder).held_out_loss
    path.write_text(whole[:-9])
    (folder / "scores.json").unlink()
    train_rows("t5/6-corruption-rate/50", 1, {}, Options("tiny", swept))
    assert read_result(folder).held_out_loss == loss == records(path.parent)[-1]["loss"]


def test_a_stage_that_is_trained_again_is_scored_again(swept):
    folder = folder_of(swept, RATE)
    (path, *_) = sorted((folder / "finetuning").rglob("report/scores.json"))
    known = parse_with_checksum(path.read_bytes(), path)
    tasks = {name: score | {"score": 12.5} for name, score in known["tasks"].items()}
    write(path, json_with_checksum(known | {"tasks": tasks}))
    for stage in stages_of(folder):
        if path.is_relative_to(stage.folder):
            shutil.rmtree(stage.folder / "checkpoints")
    whole = (folder / "scores.json").read_bytes()
    (folder / "scores.json").unlink()
    train_rows(RATE, 1, {}, Options("tiny", swept))
    again = parse_with_checksum(path.read_bytes(), path)
    assert again["tasks"] == known["tasks"] and again["trained"] != known["trained"]
    assert [*read_result(folder).tasks] == [*json.loads(whole)["tasks"]]


def test_run_json_and_metrics_tell_what_ran(swept):
    folder = pretraining_of(folder_of(swept, RATE)).folder
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["settings"]["objective"]["rate"] == 0.5
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4]


def test_the_best_checkpoint_of_each_task_counts(tmp_path):
    lines = [
        {"step": 1, "kind": "eval", "a/score": 3.0, "a/em": 3.0, "b/score": 1.0, "b/em": 1.0},
        {"step": 2, "kind": "eval", "a/score": 2.0, "a/em": 2.0, "b/score": 5.0, "b/em": 5.0},
    ]
    (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(lines))

    task = BaseTask("", "", "GLUE", None, {"em": None})
    best = {name: best_of(replace(task, name=name), tmp_path) for name in "ab"}
    assert {name: found["step"] for name, found in best.items()} == {"a": 1, "b": 2}
    assert columns(best) == {"GLUE": 4.0}


def test_steps_whose_speed_was_not_measured_count_as_the_mean_of_the_others_and_no_token_is_lost(tmp_path):
    """As every step after saving, where each is logged; 49 x (1 / 49) is less than 1 in floating point."""
    lines = [{"step": 49 * n, "kind": "train", "tokens": 1 / 49} for n in range(1, 4)]
    for line, seconds in zip(lines[1:], (1.0, 3.0), strict=True):
        line["seconds_per_step"] = seconds
    (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(lines))
    assert cost({tmp_path: 0}) == {"seconds": 49 * 6.0, "tokens": 3}
    (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(lines[:1]))
    assert cost({tmp_path: 0}) == {"seconds": 0.0, "tokens": 1}


def test_of_checkpoints_that_score_alike_the_one_with_the_likeliest_answers_is_the_best_else_the_last(
    tmp_path,
):
    task = BaseTask("a", "", "GLUE", None, {"em": None})
    losses = [4.0, 3.0, 2.0, 2.0, 5.0]
    lines = [
        {"step": n, "kind": "eval", "a/score": 0.0, "a/bits_per_byte": loss}
        for n, loss in enumerate(losses, 1)
    ]
    (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(lines))
    assert best_of(task, tmp_path)["step"] == 4
    for line in lines:
        del line["a/bits_per_byte"]
    (tmp_path / "metrics.jsonl").write_text(lines_with_checksum(lines))
    assert best_of(task, tmp_path)["step"] == 5


def test_a_folder_of_other_settings_is_refused_with_the_difference(swept):
    other = change(build(RATE, "tiny"), "model.mlp.d_ff", 64)
    with pytest.raises(SettingError, match=r"model\.mlp\.d_ff: 32 -> 64"):
        Run(other, folder_of(swept, RATE), swept / "cache").check(print)
    assert read_result(folder_of(swept, RATE)) is not None


def test_fine_tuning_starts_from_the_last_pretrained_state(swept):
    experiment, folder = build(BASELINE, "tiny"), folder_of(swept, BASELINE)
    mesh, stage = sharding.make_mesh(experiment.mesh), pretraining_of(folder)
    steps = build_steps(StepSpec(experiment.model, experiment.finetuning.optimizer), mesh)
    with Checkpoints(stage.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        saved, start = checkpoints.restore(steps.abstract, 4), stage.initial_state_from_checkpoint(steps)
    assert (int(saved.step), int(start.step)) == (4, 0)
    for name, value in saved.params.items():
        np.testing.assert_array_equal(value, start.params[name])
    moved = [
        name
        for name, value in steps.initial_state(0).params.items()
        if not np.array_equal(value, start.params[name])
    ]
    assert len(moved) == len(saved.params)


@pytest.mark.slow
def test_how_far_fine_tuning_moved_each_layer_is_drawn(swept, tmp_path):
    out = tmp_path / "a.png"
    assert cli.dispatch(["draw", "tuning", str(folder_of(swept, RATE)), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "new"),
    [
        pytest.param("bert/mixed-layers", {"tuning.heads": ("next",)}, marks=pytest.mark.slow),
        pytest.param("electra/base", {"tuning.heads": ("extract",)}, marks=pytest.mark.slow),
        pytest.param("electra/base", ALL_TOKENS, marks=pytest.mark.slow),
        pytest.param("bart/base", ROTATION, marks=pytest.mark.slow),
        pytest.param("positions/alibi", {"data.inputs_length": 12}, marks=pytest.mark.slow),
    ],
)
def test_a_classic_row_trains_tunes_its_heads_from_what_it_learnt_and_is_scored(name, new, runs, tmp_path):
    experiment = build(name, "tiny", new)
    with reporting(0) as reporter:
        Run(experiment, tmp_path / "run", runs / "cache").train(reporter)
        result = read_result(tmp_path / "run")
        tuned = experiment.tuning.heads if experiment.finetuning.steps else ()
        assert set(result.tasks) == set(tuned)
        assert list(result.length_losses) == [
            str(n) for n in experiment.data.held_out_lengths if len(experiment.data.held_out_lengths) > 1
        ]
        if not tuned:
            return
    mesh, (stage, tuned, *_) = sharding.make_mesh(experiment.mesh), stages_of(tmp_path / "run")
    state = stage.initial_state_from_checkpoint(tuned.steps(mesh))
    with Checkpoints(stage.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        saved = checkpoints.restore(stage.steps(mesh).abstract).params
    came = [path for path in state.params if path.startswith("body.")]
    for path in came:
        bare = path.removeprefix("body.")
        np.testing.assert_array_equal(state.params[path], saved.get(bare, saved.get(f"discriminator.{bare}")))
    assert len(came) > 10


def test_generate_answers_from_a_run_and_names_what_is_none(swept, capsys):
    generate(
        folder_of(swept, RATE), ("cloze question: a context: b", "summarize: a b c."), decoding=Decoding(8)
    )
    assert capsys.readouterr().out.count("\n") >= 4
    assert count_written(np.array([[5, 0, 1, 0], [3, 3, 0, 0]]), 1) == 3 + 4
    with pytest.raises(SettingError, match="nowhere"):
        generate(swept / "nowhere", ("a",))
    with pytest.raises(SettingError, match="--mixture 'documentation-readin'.*'documentation-reading'"):
        generate(folder_of(swept, RATE), ("a",), "documentation-readin")


def test_a_check_leaves_no_folder_that_looks_like_a_run(runs):
    Run(build(BASELINE, "tiny"), runs / "tiny" / "checked", runs / "cache").check(print)
    assert not (runs / "tiny" / "checked").exists()


def test_a_run_says_which_files_of_ones_own_it_reads_before_it_prepares_them(tmp_path, monkeypatch):
    def stop(run, sources, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_prepare", stop)
    for name in ("a.txt", "b.txt", "chat.jsonl"):
        (tmp_path / name).write_text(name)
    experiment = build(DECODER, "nano", {"data.corpus": f"text:{tmp_path}", "finetuning.steps": 0})
    said = list[str]()
    with pytest.raises(KeyboardInterrupt):
        Run(experiment, tmp_path / "run", tmp_path / "cache").check(said.append)
    (line,) = said
    assert line.startswith(f"text:{tmp_path} has 2 files of 10 bytes; not read: 1 file of jsonl:{tmp_path}")


def test_a_held_out_loss_is_told_in_as_many_digits_as_it_has_meaning(tmp_path, monkeypatch):
    result = SimpleNamespace(columns={}, held_out_loss=3.4716239999999997, likelihood=lambda: None)
    monkeypatch.setattr("experiments.runs.result.read_result", lambda folder: result)
    assert summary(tmp_path) == "held-out loss 3.472"


@pytest.mark.parametrize(
    ("variance", "line"),
    [
        (None, "perplexity 8.0 per word, 1.500 bits per byte"),
        (0.1, "perplexity at most 8.0 per word, at most 1.500 bits per byte (upper bounds)"),
    ],
)
def test_a_bound_of_the_likelihood_is_told_as_a_bound(variance, line, tmp_path, monkeypatch):
    likelihood = Likelihood(nats=30 * math.log(2), tokens=12, words=10, bytes=20, variance=variance)
    result = SimpleNamespace(columns={}, held_out_loss=3.0, likelihood=lambda: likelihood)
    monkeypatch.setattr("experiments.runs.result.read_result", lambda folder: result)
    assert summary(tmp_path) == line


def test_a_finished_run_ends_with_its_loss_folder_picture_and_three_commands(swept):
    folder = folder_of(swept, RATE)
    lines = list(summarize(RATE, build(RATE, "tiny"), folder))
    assert lines[0].startswith("held-out loss ") and "nats per token" in lines[0]
    scored = [line for line in lines if re.search(r" on [\d,]+ examples", line)]
    assert scored and all(re.search(r" examples of the split report( |$)", line) for line in scored)
    assert f"run: {folder}" in lines and f"picture: {folder / 'curves.png'}" in lines
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    commands = lines[lines.index("Try:") + 1 :]
    assert len(commands) == 3 and all(line.startswith("  lm ") for line in commands)
    assert commands[2] == f"  lm report t5/6-corruption-rate --scale tiny --runs {swept}"


@pytest.mark.parametrize(
    ("row", "changes", "command"),
    [
        ("gpt/base", {}, "lm generate runs/a --prompt 'The function returns'"),
        (
            "t5/1-baseline/baseline",
            {},
            "lm generate runs/a --mixture documentation-reading --prompt 'The function returns'",
        ),
        ("gpt/base", {"data.corpus": "text:novel.txt"}, "lm generate runs/a --prompt 'Call me Ishmael.'"),
        ("gpt/base", {"data.corpus": "text:gone.txt"}, "lm generate runs/a --prompt The"),
        ("bert/base", {}, "lm generate runs/a --prompt 'Paris is the [MASK] of France.'"),
        ("bert/base", {"pretraining.steps": 0, "tuning.heads": ("mrpc",)}, "lm eval tasks runs/a mrpc"),
        ("bert/base", {"tuning.heads": ("a.toml",)}, "echo 'one text per line' | lm predict runs/a"),
        (
            "bert/base",
            {"tuning.heads": ("tags.toml",)},
            """echo '["one","word","each"]' > words.jsonl && lm predict runs/a words.jsonl""",
        ),
    ],
)
def test_what_to_try_first_suits_what_the_model_was_trained_for(row, changes, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text("\n\n".join(f"Call me Ishmael. Some {n} years" for n in range(999)))
    Path("tags.toml").write_text(
        'words = "w"\ntags = "t"\nlabels = ["O", "B-X"]\nsplits = {train = "a.jsonl"}'
    )
    folder = Path("runs/nano") / row / "seed-0"
    assert suggestions(row, build(row, "nano", changes), folder)[0] == command.replace("runs/a", str(folder))


@pytest.mark.parametrize("row", ["gpt/base", "bert/base", "history/5-gram"])
def test_what_to_try_is_read_by_a_shell_as_it_is_meant(row):
    folder = Path("it's my runs/nano") / row / "seed-0"
    changes = {"tuning.heads": ("my tasks/a.tsv",), "pretraining.steps": 0} if row == "bert/base" else {}
    look, picture, report = map(shlex.split, suggestions(row, build(row, "nano", changes), folder))
    assert str(folder) in look and str(folder) in picture and "it's my runs" in report
    assert not changes or "my tasks/a.tsv" in look or "predict" in look


@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [
        ("bert/base", "runs/nano/bert/base/seed-0", "report bert"),
        ("bert/base", "runs/mini/bert/base/seed-3", "--scale mini"),
        ("bert/base", "a b/nano/bert/base,seed=1/seed-1", "--runs 'a b'"),
        ("t5/6-corruption-rate/15", "runs/nano/t5/1-baseline/baseline/seed-0", "report t5/6-corruption-rate"),
    ],
)
def test_the_report_that_is_told_of_has_the_run(name, folder, words):
    scale = Path(folder).parts[1]
    assert re.search(words, report_command(name, build(name, scale), Path(folder)))


DECODER, DIFFUSION = "now/4-diffusion/causal-lm", "now/4-diffusion/masked-diffusion"
OWN_TEXT = {"data.corpus": "text:own", "pretraining.steps": 300}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "--data.corpus text:own --pretraining.steps 300"),
        ([(DECODER, OWN_TEXT)], "--data.corpus text:own --pretraining.steps 300"),
        ([(DECODER, OWN_TEXT), (DIFFUSION, {})], "--data.corpus text:own --pretraining.steps 300"),
        ([(DECODER, {})], "--data.corpus text:own --pretraining.steps 300"),
        ([(DIFFUSION, {})], "--variants"),
        ([(DIFFUSION, OWN_TEXT | {"pretraining.steps": 400})], "--variants"),
    ],
)
def test_the_report_that_is_told_of_compares_the_run_with_what_has_been_run(others, words, tmp_path):
    for name, changes in others:
        run_folder(tmp_path, "nano", name, 0, changes).mkdir(parents=True)
    folder = run_folder(tmp_path, "nano", DIFFUSION, 0, OWN_TEXT)
    command = report_command(DIFFUSION, build(DIFFUSION, "nano", OWN_TEXT), folder)
    assert command == f"report now/4-diffusion {words} --runs {tmp_path}"


@pytest.mark.parametrize(
    ("task", "measure", "chance"),
    [
        ("acceptability", "bits_above_chance", 0.0),
        ("restore", "bits_per_byte", 8.0),
        ("follows", "score", 50.0),
        ("mnli", "score", 100 / 3),
        ("cola", "score", 0.0),
        ("stsb", "score", 0.0),
        ("next", "score", 25.0),
        ("mrpc", "score", None),
        ("roles", "score", None),
        ("squad", "score", None),
        ("gone", "score", None),
    ],
)
def test_a_score_is_told_beside_what_guessing_comes_to(task, measure, chance):
    known = 0.0 if measure == "bits_above_chance" else None
    assert guess_score(task, {"measure": measure, "chance": known}) == chance


def test_an_unwritable_folder_is_refused(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="--runs"):
        Run(build(BASELINE, "tiny"), tmp_path / "file" / "run", tmp_path / "file" / "cache").check(print)


def test_the_command_line_gives_an_exit_code_and_the_nearest_name(capsys):
    assert cli.dispatch([]) == 0
    assert cli.dispatch(["swep"]) == 2
    assert "did you mean 'sweep'" in capsys.readouterr().err
    assert cli.dispatch(["show", "t5/6-corruption-rate/50", "--diff"]) == 0
    assert "objective.rate: 0.15 → 0.5" in capsys.readouterr().out
    assert cli.dispatch(["show", "t5/6-corruption-rate/5"]) == 2


def test_a_row_that_fails_is_left_and_the_others_go_on(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(
        "experiments.cli.train.train_one",
        lambda run, *_: tried.append(run.name) or (3 if len(tried) == 1 else 0),
    )
    with pytest.raises(SystemExit) as stopped:
        train_rows("t5/4-objective", 1, {}, Options(runs=tmp_path))
    assert stopped.value.code == 3
    assert tried == [*(row.name for row in registry.find("t5/4-objective")), BASELINE]


def test_a_full_disk_is_told_in_a_line_even_if_nothing_more_can_be_written(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("experiments.runs.run.Run.train", fails)
    (tmp_path / "file").write_text("")
    told = []
    for folder in (tmp_path / "run", tmp_path / "file" / "run"):  # of which the second cannot be made
        run, reporter = RowRun("a", build(BASELINE, "nano"), folder), SimpleNamespace(complain=told.append)
        assert train_one(run, Options(runs=tmp_path), reporter) == 1
    assert all("No space left on device: 'metrics.jsonl'. Fix that and run" in line for line in told)
    assert "error.txt" in told[0] and "error.txt" not in told[1] and (tmp_path / "run" / "error.txt").exists()


def test_a_run_that_diverged_fails_by_itself_with_the_loss(tmp_path, monkeypatch):
    def diverges(run, *_):
        run.folder.mkdir()
        save_settings(run.folder, run.experiment)
        write_result(
            run.folder, {"columns": {}, "tasks": {}, "held_out_loss": 800.0, "seconds": 1.0, "tokens": 1}
        )

    monkeypatch.setattr("experiments.runs.run.Run.train", diverges)
    told = []
    run, reporter = (
        RowRun("a", build(BASELINE, "nano"), tmp_path / "run"),
        SimpleNamespace(complain=told.append),
    )
    assert train_one(run, Options(runs=tmp_path), reporter) == 2
    assert "held_out_loss 800.0 should be a number from 0 to 700; the run diverged" in told[0]


def test_a_finished_run_of_other_settings_is_not_counted_and_not_touched(swept, monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "tiny", SMALL | {"model.mlp.d_ff": 64})
    with pytest.raises(SystemExit) as stopped:
        train_rows("t5/6-corruption-rate/50", 1, {}, Options("tiny", swept))
    assert stopped.value.code == 2
    assert "belongs to a run with other settings" in (said := capsys.readouterr().out)
    assert "\n  model.mlp.d_ff: 32 -> 64" in said
    assert read_result(folder_of(swept, RATE)) is not None


def test_examples_of_an_encoder_show_what_it_must_tell(runs, capsys):
    assert cli.dispatch(["show", "bert/base", "--examples", "1", "--scale", "tiny", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert {"inputs", "hidden", "label", "text"} <= set(out.split())
    assert "[MASK]" in out and "<extra_id_0>" not in out
    assert re.search(r"rows of step 0: \d+ tokens of text, room for 24 of inputs\n", out)


def test_examples_are_of_the_row_as_it_would_be_trained_with_settings_given_by_hand(runs, capsys):
    words = ["show", "--scale", "tiny", "--examples", "1", "--runs", str(runs), "--data.inputs-length", "30"]
    assert cli.dispatch([*words, "--objective.rate", "0.5", RATE]) == 0
    assert re.search(
        r": \d+ tokens of text, room for 30 of inputs and \d+ of targets\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (7, "stopped after step 7, which is saved (pre-training)"),
        (0, "stopped before the first step of pre-training; nothing to save"),
    ],
)
def test_a_run_that_is_stopped_says_in_which_stage(runs, monkeypatch, capsys, step, where):
    def stopped(*_):
        raise Interrupted("SIGTERM", step)

    experiment = build(BASELINE, "tiny", {"model.mlp.d_ff": 16, "pretraining.steps": 2})
    monkeypatch.setattr("experiments.runs.kinds.network.NetworkStage.train", stopped)
    with reporting(2) as reporter, pytest.raises(SystemExit) as ending:
        train_one(RowRun(BASELINE, experiment, runs / "stopped"), Options("tiny", runs), reporter)
    said = " ".join(capsys.readouterr().out.split())
    assert ending.value.code == 42
    assert f"seed 0: {where}. Run the same command to resume." in said


@pytest.mark.parametrize(("step", "lines"), [(4, []), (5, ["pre-training resumed at step 5 of 9"])])
def test_a_stage_that_goes_on_after_steps_of_its_own_says_that_it_resumed(tmp_path, capsys, step, lines):
    with reporting(5) as reporter, StageLog(tmp_path, {}, reporter, "", "", "pre-training", 4, 9) as log:
        log.resume_after(step)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("method", ["_train_stage", "_scores", "_costs"])
def test_a_run_whose_folder_is_deleted_while_it_trains_or_scores_says_so(runs, monkeypatch, capsys, method):
    def deleted(*_):
        shutil.rmtree(folder)
        raise ValueError("No ArrayMetadata found")

    experiment = build(BASELINE, "tiny", {"model.mlp.d_ff": 16, "pretraining.steps": 2})
    folder = runs / "deleted"
    monkeypatch.setattr(Run, "_train_stage", lambda *_: None)
    monkeypatch.setattr(Run, "_scores", lambda *_: {})
    monkeypatch.setattr(Run, method, deleted)
    with reporting(2) as reporter:
        assert train_one(RowRun(BASELINE, experiment, folder), Options("tiny", runs), reporter) == 1
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"the run's folder {folder} was deleted or moved while it trained" in said
    assert "ArrayMetadata" not in said and not folder.exists()


def test_a_model_that_memorises_its_text_is_said_to():
    def note(held_out, training):
        steps = [(100 * i, value) for i, value in enumerate(held_out, 1)]
        return memorising_note(
            {HELD_OUT_LOSS: [steps], TRAINING_LOSS: [[*zip((99, 199, 299), training, strict=True)]]}
        )

    assert "lowest at step 200, 4.000, and the training loss is 2.500" in note([5, 4, 4.5], [5, 4, 2.5])
    assert note([5, 4, 3.9], [5, 4, 2.5]) == "", "still falling"
    assert note([5, 4, 4.04], [5, 4, 3]) == "", "no more than two evaluations differ by chance"
    assert note([5, 4, 6], [5, 4, 6]) == "", "diverged, which is not memorising"
    assert memorising_note({}) == "", "counted models have no curves"


def test_a_model_that_knows_its_training_text_alone_is_not_said_to_know_word_frequencies_alone():
    """On a short text the training loss falls far below the unigram loss, and the held-out loss does not."""

    def said(training_loss):
        losses = {"held_out_loss": 5.9, "content_loss": 5.9, "reference_loss": 5.48}
        result = Result({}, {}, seconds=1.0, tokens=1, folder=Path("run"), **losses)
        curves = {TRAINING_LOSS: [[(100, 7.0), (150, training_loss)]]}
        return " ".join("\n".join(loss_lines(result, build("gpt/base", "nano"), curves)).split())

    assert "but the training loss, 4.780, is below it" in said(4.78)
    assert said(5.4).endswith("it has not left the unigram plateau")
