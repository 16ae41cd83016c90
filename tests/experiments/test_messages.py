"""What errors say: a table of causes, the settings or files that the message names, and the mend it offers.

Other tests assert the class of an error and the setting or file in it, so that a sentence is written once in
the code and at most once here.
"""

import gc
import time
from importlib import import_module

import pytest
import small_runs
from commands import unboxed

from experiments import __main__ as cli
from experiments.processes.exit_codes import EXIT_CODES
from experiments.runs.run import Run
from experiments.study.changes import apply
from experiments.study.registry import REGISTRY, build
from lm.config.base import SettingError

runs = small_runs.runs
ROW, RUN = "t5/1-baseline/baseline", "runs/nano/t5/1-baseline/baseline/seed-0"
COMMAND_LINES = [  # cause -> what the message names, and the mend
    # commands and rows
    ("swep t5", "'swep'", "'sweep'"),
    ("trian", "'trian'", ""),
    ("launch slrum t5/1-baseline", "'slrum'", "'slurm'"),
    ("help rnu", "'rnu'", "'run'"),
    ("--scale mini run", "--scale", "lm run ROW --scale ..."),
    ("run", "ROW", ""),
    ("run t5/1-baseline", "2 rows", "'t5/1-baseline/baseline', or train all with lm sweep t5/1-baseline"),
    ("run baseline", "'baseline'", "'t5/1-baseline/baseline' or 't5/11-mixing/baseline'"),
    ("list baseline", "'baseline'", "'t5/1-baseline/baseline' or"),
    ("run t5/1-baseline/basline", "'t5/1-baseline/basline'", "'t5/1-baseline/baseline'"),
    ("run t5/*", "'t5/*'", ""),
    ("sweep t5/7-coruption", "'t5/7-coruption'", "'t5/"),
    (f"run {ROW} again", "again", ""),
    (f"run {ROW} --scale tiny", "'--scale'", "('nano',"),
    (f"show {ROW} --to minni", "'minni'", "'mini'"),
    (f"show {ROW} --stages --costs", "--stages", "--costs"),
    (f"run {ROW} --check --dry-run", "--check", "--dry-run prepares nothing: choose one"),
    ("show t5-111b", "'t5-111b'", ""),
    # options
    (
        f"run {ROW} --lr 3",
        "--lr",
        "--pretraining.optimizer.learning-rate or --finetuning.optimizer.learning-rate",
    ),
    (f"run {ROW} --pretraining.step 3", "--pretraining.step", "--pretraining.steps"),
    (f"run {ROW} --resume", "--resume", "the same command resumes where it stopped"),
    (f"run {ROW} --pretraining.steps", "'--pretraining.steps'", ""),
    # values
    (f"run {ROW} --pretraining.steps many", "'many'", "such as 20000 or 2e4"),
    (f"run {ROW} --pretraining.steps 1.5", "'1.5'", "such as 20000 or 2e4"),
    (f"run {ROW} --pretraining.steps -10", "pretraining.steps=-10", "at least 0"),
    (
        f"run {ROW} --finetuning.optimizer.learning-rate -1",
        "finetuning.optimizer.learning_rate=-1.0",
        "above 0",
    ),
    (f"run {ROW} --model.dropout half", "--model.dropout", ""),
    (f"run {ROW} --objective.rate 1.5", "objective.rate=1.5", "between"),
    (f"run {ROW} --seed -1", "seed=-1", "from 0 to 4294967295"),
    (f"generate {RUN} --prompt a --beams 0", "beams=0", "at least 1"),
    (f"draw neighbours {RUN} --words a --count 0", "--count 0", "at least 1"),
    (f"draw neighbours {RUN} --words a --count -1", "--count -1", "at least 1"),
    (f"data prepare {ROW} --tokens 0.5", "--tokens 0.5", "from 1 on"),
    ("ladder ladder --out file.gif", "--out file.gif", ".png"),
    ("entry table . --out file.gif", "--out file.gif", ".png"),
    ("draw masks --out .png", "--out .png", "picture.png"),
    (f"embed {RUN} file.txt --out .npy", "--out .npy", "vectors.npy"),
    ("entry run file.txt --out file.zip", "--out file.zip", ".tar.xz"),
    (f"run {ROW} --model.positions.kind rotery", "'rotery'", "rotary"),
    (f"run {ROW} --check=yes", "yes", ""),
    (f"run {ROW} --tuning.mixtures glu", "'glu'", "'glue'"),
    (f"sweep {ROW} --seeds 0", "--seeds 0", "at least 1"),
    (f"sweep {ROW} --seed 3", "seed", "--seeds N"),
    (f"sweep {ROW} --grid model.mlp.dff=1,2", "'model.mlp.dff'", "'model.mlp.d_ff'"),
    (f"sweep {ROW} --grid model.mlp.d_ff", "--grid 'model.mlp.d_ff'", "SETTING=VALUE,VALUE"),
    (f"sweep {ROW} --grid model.mlp.d_ff=1,x", "--grid model.mlp.d_ff: 'x'", ""),
    (
        f"sweep {ROW} --grid objective.mean_span_length=2,3",
        "objective.mean_span_length",
        "objective.noise=spans",
    ),
    # settings that nothing reads
    (
        f"run {ROW} --pretraining.optimizer.beta1 0.9",
        "pretraining.optimizer.beta1",
        "leave it out, or set pretraining.optimizer.name=adamw",
    ),
    (
        "run gpt/base --model.num_encoder_layers 1",
        "model.num_encoder_layers",
        "that of decoders is model.num_decoder_layers",
    ),
    ("run bert/base --model.num_decoder_layers 1", "", "that of encoders is model.num_encoder_layers"),
    ("run bert/base --start.steps 100", "start.steps", "leave it out"),
    # files and folders
    (f"run {ROW} --runs gs://bucket/runs", "--runs gs://bucket/runs", "mount the bucket"),
    (f"run {ROW} --runs file.txt", "file.txt", ""),
    (f"run {ROW} --config file.txt", "--config file.txt", "TOML or JSON"),
    (f"run {ROW} --data.corpus text:none.txt", "none.txt", ""),
    (f"run {ROW} --data.corpus documentatoin", "documentatoin", ""),
    (f"run {ROW} --data.vocabulary none.model", "none.model", ".model file"),
    ("report t5/6-corruption-rate", "", "lm sweep t5/6-corruption-rate --scale nano"),
    ("status --runs none", "none", "`lm run ROW`"),
    (f"generate {RUN} --prompt a", RUN, "settings.json"),
    ("generate file.txt --prompt a", "file.txt", "settings.json"),
    (f"generate {RUN} --prompt a --seed -5", "--seed=-5", "from 0 to 4294967295"),
    (f"generate {RUN}", "--prompt", ""),
    (f"eval tasks {RUN}", "lm eval tasks", "lm data tasks"),
    ("convert imprt bert runs/bert", "'imprt'", "'import'"),
    ("convert import none runs/none", "none", ""),
    ("convert import file.txt runs/none", "file.txt", ""),
    ("convert push none mine/model", "none lacks config.json", "lm convert export"),
    ("draw mask", "'mask'", "'masks'"),
    ("data clean none --name mine", "none", ""),
    ("data clean file.txt --name Mine!", "Mine!", "small letters"),
    ("doctor --verify none", "none", ""),
    ("doctor --verify", "--verify", "name one or more folders"),
    ("completion tcsh", "tcsh", "fish"),
]
TEXT = {"tuning.mixtures": ("documentation",), "tuning.heads": ()}
BERT, NO_NSP, ELECTRA, GPT = (
    REGISTRY[name].changes for name in ("bert/base", "bert/no-nsp", "electra/base", "gpt/base")
)
SETTINGS = [  # changes of the baseline -> what the message names, and the mend
    ({"data.corpus": "text:/nowhere/*.txt"}, ["/nowhere"], ""),
    ({"data.corpus": "tfds:no_such_set"}, ["no_such_set"], "tfds build no_such_set"),
    ({"data.vocabulary": "/nowhere/a.model"}, ["a.model"], ".model file"),
    ({"data.vocabulary_size": 30}, ["data.vocabulary_size=30"], ""),
    ({"data.sentinels": 400}, ["model.vocab_size=512"], "set it to 768"),
    ({"mesh.data": 3}, ["mesh.data=3", "8"], ""),
    (
        {"mesh.data": 1, "mesh.tensor": 8},
        ["model.attention.num_heads of size 2"],
        "make it a multiple of 8",
    ),
    ({"pretraining.batch_size": 12}, ["batch_size of size 12"], "make it a multiple of 8"),
    ({"tuning.mixtures": ("gleu",)}, ["'gleu'"], "'glue'"),
    ({"tuning.mixtures": ("glue",)}, ["'glue/"], "tfds build"),
    ({"data.inputs_length": 1}, ["data.inputs_length=1"], ""),
    ({"data.vocabulary": "words"}, ["data.vocabulary=words", "model.special.eos=1"], ""),
    ({"model.special.start": None}, ["model.special=", "start=None"], "pad 0 and start 0"),
    (BERT | TEXT, ["model.architecture='encoder'"], ""),
    (BERT | {"tuning.inputs_length": 4}, ["tuning.inputs_length=4"], "at least 8"),
    ({"model.attention.mask": "none"}, ["model.attention.mask='none'"], ""),
    (
        BERT | {"tuning.layout": "start-delim-extract"},
        ["tuning.layout="],
        "model.architecture='decoder'",
    ),
    (GPT | {"tuning.layout": "start-delim-extract", "data.sentinels": 4}, ["extract"], ""),
    (NO_NSP | {"objective.pairs": "next-sentence"}, ["objective.pairs='next-sentence'", "model.heads="], ""),
    (ELECTRA | {"model.heads": ()}, ["objective.targets='replaced'", "model.heads="], ""),
    (ELECTRA | {"objective.targets": "in-place"}, ["model.heads="], "objective.targets='replaced'"),
    (GPT | TEXT | {"model.positions.max_length": 30}, ["model.positions.max_length=30"], ""),
    ({"seed": -1}, ["seed=-1"], "from 0 to 4294967295"),
    ({"seed": 10**20}, [f"seed={10**20}"], "from 0 to 4294967295"),
    ({"ensemble.members": 2, "seed": 2**31}, ["seed=2147483648"], "from 0 to 2147483647"),
    ({"model.vocab_size": 10**12}, ["model.vocab_size=1000000000000"], "between"),
    ({"model.vocab_size": 2**32 - 1}, ["GiB", "model.vocab_size=4294967295"], ""),
    (
        {"model.d_model": 2**32 - 2, "model.vocab_size": 2**32 - 1},
        ["GiB", "model.d_model=4294967294"],
        "",
    ),
    (
        {"pretraining.optimizer.learning_rate": 1e308},
        ["pretraining.optimizer.learning_rate=1e+308"],
        "between",
    ),
    ({"finetuning.steps": -10}, ["finetuning.steps=-10"], "at least 0"),
    (
        {"pretraining.microbatches": 3},
        ["pretraining.batch_size=8", "pretraining.microbatches=3"],
        "",
    ),
]


def not_refused(*_):
    raise AssertionError("data should not be prepared for what is refused")


@pytest.fixture(scope="module")
def imported():
    """Modules that a command imports are not part of what a mistake costs."""
    for name in ("cli.data_clean", "cli.generate", "report.report", "runs.run", "figures.trained_models"):
        import_module(f"experiments.{name}")
    import_module("lm.convert")


@pytest.fixture
def uncollected():
    """Garbage of earlier tests, whose collection takes 2 s in a long run, is not part of it either."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("words", "named", "mend"), COMMAND_LINES, ids=[line[0] for line in COMMAND_LINES])
def test_a_mistake_ends_with_an_error_that_names_the_mend_and_leaves_nothing(
    words, named, mend, tmp_path, monkeypatch, capsys, imported, uncollected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("A text.\n")
    monkeypatch.setattr("experiments.runs.run.prepare_inputs", not_refused)
    began = time.process_time()
    assert cli.dispatch(words.split()) == EXIT_CODES["bad settings"]
    spent = time.process_time() - began
    told = unboxed(capsys.readouterr().err)
    assert named in told and mend in told and "Traceback" not in told, told
    assert spent < 2, spent
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert {path for path in left if not path.startswith("runs/cache")} <= {"file.txt", "runs"}


@pytest.mark.parametrize(("changes", "named", "mend"), SETTINGS)
def test_bad_settings_are_refused_by_name_before_anything_compiles_and_leave_nothing(
    runs, changes, named, mend, monkeypatch
):
    monkeypatch.chdir(runs)
    folder = runs / "tiny" / "refused"
    with pytest.raises(SettingError) as refused:
        Run(apply(build(ROW, "tiny"), changes), folder, runs / "cache").check(print)
    told = str(refused.value)
    assert all(name in told for name in named) and mend in told, told
    assert not folder.exists()
