"""The command line: help, mistakes and their mends, completion, and names of folders."""

import re
import shlex
import subprocess
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated

import pytest
from experiments.cli.usage.arguments import FLAT, parse
from experiments.cli.usage.completion import flags_of, script_of
from experiments.cli.usage.mistakes import MEANT, as_typed
from experiments.cli.usage.page import CHANGED_OFTEN

from experiments import __main__ as cli
from experiments.cli import COMMANDS, EXAMPLES
from experiments.cli.run_options import Options
from experiments.cli.train import sweep_words
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.paths import run_folder
from experiments.study.registry import REGISTRY, build
from experiments.study.scales import DEFAULT_SCALE, SCALES
from experiments.study.words import setting_words
from lm.config.base import SettingError, changes, diff, leaves
from lm.config.decoding import Decoding

ROW, RUN = "t5/1-baseline/baseline", "runs/nano/t5/1-baseline/baseline/seed-0"
MISTAKES = [  # a command line, and what its one line of error names
    # commands and rows
    ("swep t5", "did you mean 'sweep'?"),
    ("trian", "there is no command 'trian'"),
    ("help rnu", "did you mean 'run'?"),
    ("--scale mini run", "should stand behind a command"),
    ("run", "lm run needs ROW"),
    ("run t5/1-baseline", "lm sweep t5/1-baseline"),
    ("run baseline", "did you mean 't5/1-baseline/baseline'"),
    ("run t5/1-baseline/basline", "did you mean 't5/1-baseline/baseline'?"),
    ("run t5/*", "no row is called 't5/*'"),
    ("sweep t5/7-coruption", "no row or table is called"),
    ("run --tuning.mixtures squad", "lm run needs ROW: lm run ROW [OPTIONS]"),
    ("run --scale mini --lr 3 bert/base", "there is no option --lr; did you mean"),
    (f"run {ROW} again", "'again' is one word too many"),
    (f"run {ROW} --scale tiny", "--scale 'tiny' is unknown"),
    (f"diff {ROW} --to minni", "did you mean 'mini'?"),
    ("show t5-111b", "no row is called"),
    # options that other programs have
    (f"run {ROW} --lr 3", "--pretraining.optimizer.learning-rate or --finetuning.optimizer.learning-rate?"),
    (f"run {ROW} --learning_rate=3", "--pretraining.optimizer.learning-rate"),
    (f"run {ROW} --batch-size 8", "did you mean --pretraining.batch-size or --finetuning.batch-size?"),
    (f"run {ROW} --steps 8", "did you mean --pretraining.steps or --finetuning.steps"),
    (f"run {ROW} --epochs 3", "--pretraining.steps or --finetuning.steps or --data.repeats?"),
    (f"run {ROW} --dropout 0.1", "did you mean --model.dropout?"),
    (f"run {ROW} --layers 3", "--model.num-encoder-layers or --model.num-decoder-layers?"),
    (f"run {ROW} --heads 3", "did you mean --model.attention.num-heads or --tuning.heads?"),
    (f"run {ROW} --resume", "the same command resumes where it stopped"),
    (f"sweep {ROW} --output-dir x", "did you mean --runs?"),
    (f"run {ROW} --pretraining.step 3", "did you mean --pretraining.steps"),
    (f"run {ROW} -lr 3", "there is no option -lr; did you mean"),
    # values
    (f"run {ROW} --pretraining.steps", "--pretraining.steps lacks its value"),
    (f"run {ROW} --pretraining.steps many", "'many' should be a whole number, such as 20000 or 2e4"),
    (f"run {ROW} --pretraining.steps -10", "lm: --pretraining.steps=-10 should be at least 0"),
    (f"run {ROW} --pretraining.batch-size 0", "lm: --pretraining.batch_size=0 should be at least 1"),
    (f"run {ROW} --model.dropout half", "'half' should be a number"),
    (f"run {ROW} --model.dropout 1.5", "lm: --model.dropout=1.5"),
    (f"run {ROW} --objective.rate 1.5", "lm: --objective.rate=1.5 should lie"),
    (f"run {ROW} --seed -1", "lm: --seed=-1 should be a whole number"),
    (f"generate {RUN} --prompt a --beams 0", "lm: --beams=0 should be at least 1"),
    (f"run {ROW} --model.positions.kind rotery", "did you mean 'rotary'?"),
    (f"run {ROW} --data.held-out-lengths 1 two", "'two' should be a whole number"),
    (
        f"run {ROW} --finetuning.optimizer.learning-rate -1",
        "lm: --finetuning.optimizer.learning_rate=-1.0 should",
    ),
    (f"run {ROW} --check=yes", "--check takes no value; its opposite is --no-check"),
    (f"run {ROW} --tuning.mixtures glu", "did you mean"),
    (f"sweep {ROW} --seeds 0", "--seeds 0 should be at least 1"),
    (f"sweep {ROW} --seed 3", "a sweep takes --seeds N"),
    # files and folders
    (f"run {ROW} --runs gs://bucket/runs", "should be a folder: mount the bucket"),
    (f"run {ROW} --runs file.txt", "file.txt"),
    (f"run {ROW} --data.corpus text:none.txt", "none.txt"),
    (f"run {ROW} --data.corpus documentatoin", "documentatoin"),
    (f"run {ROW} --data.vocabulary none.model", "none.model"),
    ("report t5/6-corruption-rate", "lm sweep 't5/6-corruption-rate' --scale nano"),
    (f"generate {RUN} --prompt a", "is no run: it has no settings.json"),
    ("generate file.txt --prompt a", "file.txt is no run"),
    (f"generate {RUN} --prompt a --seed -5", "--seed=-5 should be a whole number from 0 to 4294967295"),
    (f"generate {RUN}", "needs RUN and --prompt TEXT [TEXT ...]"),
    (f"score {RUN}", "lm score takes RUN --tasks NAME,NAME"),
    ("convert imprt bert runs/bert", "did you mean 'import'?"),
    ("convert import none runs/none", "none"),
    ("convert import file.txt runs/none", "file.txt"),
    ("draw mask", "did you mean 'masks'?"),
    ("clean none --name mine", "none"),
    ("clean file.txt --name Mine!", "should be small letters"),
    ("verify none", "none holds no checkpoint"),
    ("completion tcsh", "tcsh"),
]


def not_refused(*_):
    raise AssertionError("data should not be prepared for what is refused")


@pytest.fixture(scope="module")
def imported():
    """Modules that a command imports are not part of what a mistake costs."""
    for name in ("cli.clean", "cli.models", "report.report", "runs.run", "drawings.with_run"):
        import_module(f"experiments.{name}")
    import_module("lm.convert")


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_ends_with_one_line_that_names_the_mend_and_leaves_nothing(
    words, said, tmp_path, monkeypatch, capsys, imported
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("A text.\n")
    monkeypatch.setattr("experiments.runs.checks.prepare", not_refused)
    began = time.process_time()
    assert cli.dispatch(words.split()) == 2
    spent = time.process_time() - began
    told = capsys.readouterr()
    assert told.err.startswith("lm: ") and told.err.count("\n") == 1 and said in told.err, told
    assert spent < 2, spent
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {path for path in left if not path.startswith("runs/cache")} <= {"file.txt", "runs"}


def pages():
    """A command line for the help of each command, with a row where defaults depend on it."""
    rows = {name: [ROW] for name in ("run", "sweep", "plan", "prepare")}
    return {name: [name, *rows.get(name, [])] for name in COMMANDS}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("plan", "harness")])
def test_help_begins_with_what_a_command_does_and_two_examples_and_knows_no_str(name, capsys):
    with suppress(SystemExit):
        cli.dispatch(["help", *pages()[name]])
    said = capsys.readouterr().out
    first, *others = said.split("\n\n")
    assert first[0].isupper() and not first.startswith("usage")
    for example in EXAMPLES[name]:
        assert said.index(f"  {example}\n") < said.index("usage:")
    assert not re.search(r"^  (--\S+ )?(STR|PATH|INT|FLOAT)\b", said, re.MULTILINE)


@pytest.mark.parametrize(
    "example", [line for name, both in EXAMPLES.items() for line in both if name not in ("plan", "harness")]
)
def test_every_example_of_the_help_is_a_command_line_that_is_understood(example, monkeypatch):
    called = []
    monkeypatch.setattr("experiments.cli.usage.arguments.carry_out", lambda later: called.append(later))
    monkeypatch.setattr("experiments.cli.draw.write_picture", lambda *_: called.append(1))
    words = shlex.split(example.partition(" >")[0])
    assert words[0] == "lm" and cli.dispatch(words[1:]) == 0 and called


def test_help_shows_the_settings_that_people_change_with_the_values_of_the_row_and_scale(capsys):
    texts = []
    for words in (["--help"], ["--help-all"], ["--scale", "mini", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            cli.dispatch(["run", "t5/6-corruption-rate/50", *words])
        assert not stopped.value.code
        texts.append(" ".join(capsys.readouterr().out.split()))
    short, whole, mini = texts
    assert "share of tokens that are noise" in short and '"everything" (default: 0.5)' in short
    assert "--model.d-model N width of the residual stream [features] (default: 64)" in short
    assert "--model.d-model N width of the residual stream [features] (default: 128)" in mini
    assert "--guard" not in short and "--guard.non-finite" in whole
    assert {f"--{path.replace('_', '-')}" for path, _ in leaves(BASELINE)} <= set(
        whole.replace(",", " ").split()
    )
    assert set(CHANGED_OFTEN) <= {path for path, _ in leaves(BASELINE)} and 18 <= len(CHANGED_OFTEN) <= 25


def test_all_commands_have_one_default_scale_and_list_those_there_are(capsys, monkeypatch):
    assert DEFAULT_SCALE == "nano"
    monkeypatch.setitem(SCALES, "width", SCALES["nano"] | {"model.d_model": 96})
    names = [name for name in COMMANDS if name != "harness" and "--scale" in flags_of(name)]
    assert {"list", "run", "sweep", "report", "show", "diff", "plan", "prepare", "examples"} == {*names}
    for name in names:
        with pytest.raises(SystemExit):
            cli.dispatch([name, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        listed = "nano, mini, mini-real, small, medium, base, width (default: nano)"
        assert f"--scale SCALE size of the study: {listed}" in said, name
        if "Settings that people change" in said:
            assert f"with the values of {ROW} at scale nano:" in said, name


def understood_as(words, monkeypatch):
    """What the function of a command would be called with."""
    called = []
    monkeypatch.setattr("experiments.cli.usage.arguments.carry_out", called.append)
    assert cli.dispatch(words) == 0
    return [(later.args, later.keywords) for later in called]


PLACED = [line for name, both in EXAMPLES.items() for line in both if name not in ("plan", "harness", "draw")]


@pytest.mark.parametrize("example", dict.fromkeys(PLACED))
def test_options_may_stand_before_what_stands_in_a_place(example, monkeypatch):
    _, command, *words = shlex.split(example.partition(" >")[0])
    way = [words.pop(0)] if command == "convert" else []
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    places, options = words[:first], words[first:]
    last_takes_several = (
        options and not options[-1].startswith("--") and "--runs" in options and command == "report"
    )
    if last_takes_several:  # of folders; what comes last is one more
        options = [*options, "--watch"]
        words = [*words, "--watch"]
    due = understood_as([command, *way, *words], monkeypatch)
    assert understood_as([command, *way, *options, *places], monkeypatch) == due
    assert understood_as([command, *options, *way, *places], monkeypatch) == due


def test_a_picture_may_be_named_behind_its_options(monkeypatch):
    drawn = []
    monkeypatch.setattr("experiments.cli.draw.write_picture", lambda *picture: drawn.append(picture))
    assert cli.dispatch(["draw", "attention", "runs/a", "--text", "The cat sat."]) == 0
    assert cli.dispatch(["draw", "--text", "The cat sat.", "attention", "runs/a"]) == 0
    assert drawn[0] == drawn[1]


def parsed_back(words, default):
    """The settings that a command line means."""

    def settings_of(row: str, /, settings: Annotated[Experiment, FLAT] = default) -> Experiment:
        return settings

    return parse(settings_of, "lm run", [ROW, *shlex.split(shlex.join(words))])


def test_the_command_that_a_sweep_records_means_the_same_experiment_for_every_row():
    base = build(ROW, "nano")
    tried = set()
    for name in REGISTRY:
        experiment = build(name, "nano")
        changed = {path: new for path, (_, new) in diff(base, experiment).items()}
        if str(changed) not in tried:
            tried.add(str(changed))
            words = sweep_words("t5/*", 2, changed, Options())
            assert words[:7] == ["lm", "sweep", "t5/*", "--scale", "nano", "--seeds", "2"]
            assert parsed_back(words[7:], base) == experiment, name


@pytest.mark.parametrize(
    "given",
    [
        {"data.held_out_lengths": (1, 2), "model.shared_layers": True},
        {"tuning.mixtures": (), "model.attention.qkv_bias": True, "model.mlp.bias": False},
        {"model.attention.d_v": 4, "guard.spikes": 5.5, "model.special.eos": None},
        {"pretraining.optimizer.clip_rms": None, "pretraining.optimizer.learning_rate": 1e-5},
        {"data.corpus": "-my book's/*.txt + jsonl:b (1).jsonl", "mesh.fsdp": -1, "mesh.data": 1},
        {"data.corpus": "--scale", "data.vocabulary": ""},
        {"start.objective.rate": 0.5, "model.encoder.num_heads": 2},
    ],
    ids=str,
)
def test_every_kind_of_setting_is_written_as_it_is_read(given):
    base = build(ROW, "nano")
    for before, after in ((base, changes(base, given)), (changes(base, given), base)):
        changed = {path: new for path, (_, new) in diff(before, after).items()}
        assert parsed_back(setting_words(changed), before) == after


def test_an_error_names_a_setting_as_it_is_typed():
    numbers = [path for path, value in leaves(BASELINE) if type(value) in (int, float)]
    base, refused = build(ROW, "nano"), 0
    for path in numbers:
        try:
            parsed_back([f"--{path}=-7"], base)
        except SettingError as error:
            refused += 1
            assert re.search(rf"(^|[ (])--{re.escape(path)}\b", str(error)), (path, str(error))
            unnamed = r"(^|[ (])\.?(model|data|objective|pretraining|tuning)\.[a-z]"
            assert not re.search(unnamed, str(error)), str(error)
    assert refused > len(numbers) / 2


def test_settings_in_an_errors_message_are_named_as_they_are_typed_and_folders_stay():
    names = ["model.mlp.d_ff", "model.d_ff_x", "beams", "runs"]
    told = "model.mlp.d_ff=3, beams=0 (model.mlp.d_ff) of runs/a,model.mlp.d_ff=3/beams; "
    told += "'model.mlp.d_ff' --model.mlp.d_ff=1"
    due = told.replace("model.mlp.d_ff=3, beams=0 (", "--model.mlp.d_ff=3, --beams=0 (--", 1)
    assert as_typed(told, names) == due
    assert as_typed("\n  model.mlp.d_ff: 32 -> 64", names) == "\n  model.mlp.d_ff: 32 -> 64"


def test_show_and_diff_take_settings_as_run_does(capsys):
    assert cli.dispatch(["show", "--start.steps", "100", ROW]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{ROW} at scale nano with --start.steps 100" in said and re.search(r"start.steps . 100 ", said)
    assert cli.dispatch(["diff", "t5/6-corruption-rate/50", "--start.steps", "100"]) == 0
    assert capsys.readouterr().out == "objective.rate: 0.15 → 0.5\nstart.steps: 200 → 100\n"
    assert cli.dispatch(["diff", ROW, "--to", "mini", "--model.d-model=32"]) == 0
    assert "model.d_model" not in capsys.readouterr().out


OTHERS_CALL = {  # what a user may type -> the first of the settings that it leads to
    "activation model.activation hidden_act act_fn": "--model.mlp.activation",
    "hidden_size model.hidden_size n_embd width embed_dim": "--model.d-model",
    "n_layer num_layers num_hidden_layers model.num_layers depth": "--model.num-encoder-layers",
    "n_head num_attention_heads": "--model.attention.num-heads",
    "d_head head_dim": "--model.attention.d-kv",
    "ffn intermediate_size mlp_dim": "--model.mlp.d-ff",
    "warmup num_warmup_steps": "--pretraining.optimizer.warmup-steps",
    "lr learning_rate pretraining.lr optimizer.lr": "--pretraining.optimizer.learning-rate",
    "finetuning.lr": "--finetuning.optimizer.learning-rate",
    "weight_decay wd": "--pretraining.optimizer.weight-decay",
    "max_grad_norm grad_clip": "--pretraining.optimizer.clip-norm",
    "seq_len max_seq_length block_size context_length": "--data.inputs-length",
    "max_position_embeddings n_positions": "--model.positions.max-length",
    "max_steps num_train_steps": "--pretraining.steps",
    "dropout_rate hidden_dropout_prob attn_pdrop": "--model.dropout",
    "vocab tokenizer": "--data.vocabulary",
    "vocab_size": "--data.vocabulary-size",
    "num_kv_heads": "--model.attention.num-key-value-heads",
    "rope_theta": "--model.positions.rotary.base",
    "tie_word_embeddings": "--model.output.logits",
    "gradient_checkpointing": "--model.compile.remat",
    "eval_interval": "--pretraining.evaluate-every",
}


@pytest.mark.parametrize(
    ("word", "due"), [(word, due) for words, due in OTHERS_CALL.items() for word in words.split()]
)
def test_a_name_of_other_programs_leads_to_the_setting(word, due, capsys):
    assert cli.dispatch(["run", ROW, f"--{word}", "3"]) == 2
    said = capsys.readouterr().err
    assert re.search(rf"did you mean {re.escape(due)}[ ?]", said), said


@pytest.mark.parametrize("word", ["label-smoothing", "z-loss", "init-std", "num-experts"])
def test_a_name_of_nothing_here_leads_nowhere(word, capsys):
    assert cli.dispatch(["run", ROW, f"--{word}", "3"]) == 2
    assert capsys.readouterr().err == f"lm: there is no option --{word}; --help lists all\n"


def test_the_version_is_that_of_the_package_jax_and_python(capsys):
    assert cli.dispatch(["--version"]) == 0
    assert re.fullmatch(r"lm [\d.]+, jax [\d.]+, Python [\d.]+\n", capsys.readouterr().out)


def test_what_other_programs_call_a_setting_leads_to_settings_that_there_are():
    options = {field for command in (Options, Decoding) for field in command.__dataclass_fields__}
    known = {path for path, _ in leaves(BASELINE)} | options | {"run", "prompt", "wandb", "seeds"}
    assert {name for names in MEANT.values() for name in names} <= known


def test_two_scales_of_a_row_are_compared(capsys):
    assert cli.dispatch(["diff", "t5/6-corruption-rate/50", "--scale", "nano", "--to", "mini"]) == 0
    told = capsys.readouterr().out
    assert "model.d_model: 64 → 128\n" in told and "objective" not in told
    assert cli.dispatch(["diff", ROW, "t5/6-corruption-rate/50", "--to", "mini"]) == 0
    assert "objective.rate: 0.15 → 0.5\n" in (told := capsys.readouterr().out) and "64 → 128" in told


def test_bash_completes_commands_rows_options_and_runs_from_the_script_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "experiments.cli.usage.completion.COMMANDS", {k: COMMANDS[k] for k in ("diff", "list", "run")}
    )
    script = script_of("bash")
    (tmp_path / RUN).mkdir(parents=True)

    def completed(*words):
        line = " ".join(map(shlex.quote, words))
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _lm; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        ran = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, cwd=tmp_path)
        assert not ran.stderr, ran.stderr
        return set(ran.stdout.split())

    assert completed("lm", "di") == {"diff"}
    assert completed("lm", "run", "t5/6-corruption-rate/") == {r for r in REGISTRY if r.startswith("t5/6-")}
    assert "--to" in completed("lm", "diff", ROW, "--t")
    assert completed("lm", "run", ROW, "--scale", "mi") == {"mini", "mini-real"}
    assert "--model.d-model" in completed("lm", "run", ROW, "--model.d")
    assert completed("lm", "generate", "runs/nano/t5") == {RUN}
    assert "complete -c lm -n '__fish_seen_subcommand_from diff' -l to\n" in script_of("fish")
    assert "compdef _lm lm" in script_of("zsh")


VALUES = {
    "tuning.mixtures": ("glue_small", "squad"),
    "tuning.heads": (),
    "data.corpus": "text:my books/*.txt + jsonl:b (1).jsonl",
    "data.vocabulary": "/home/me/it's mine",
    "tuning.branches": (0.5, 1.0),
    "model.mlp.d_ff": 200,
}


def test_the_name_of_a_runs_folder_needs_no_quoting_in_a_shell():
    folder = run_folder(Path("runs"), "nano", ROW, 0, VALUES)
    assert shlex.quote(str(folder).replace("=", "")) == str(folder).replace("=", "")
    assert ",model.mlp.d_ff=200," in folder.parent.name and ",tuning.branches=0.5:1.0," in folder.parent.name
    others = [run_folder(Path("runs"), "nano", ROW, 0, {"data.corpus": f"text:a{sign}b"}) for sign in " +*("]
    assert len(set(others)) == len(others)


def test_a_run_whose_folder_an_earlier_release_named_is_found(tmp_path):
    given = {"tuning.mixtures": ("glue", "squad")}
    old = tmp_path / "nano" / f"{ROW},tuning.mixtures=('glue', 'squad')" / "seed-0"
    new = run_folder(tmp_path, "nano", ROW, 0, given)
    assert new.parent.name == "baseline,tuning.mixtures=glue:squad"
    old.mkdir(parents=True)
    assert run_folder(tmp_path, "nano", ROW, 0, given) == old
    new.mkdir(parents=True)
    assert run_folder(tmp_path, "nano", ROW, 0, given) == new
