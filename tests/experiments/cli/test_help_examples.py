"""The examples of ``lm COMMAND --help`` do what they say, with a run that has the name they give it."""

import shlex
import shutil

import pytest
import small_corpus
from scored_runs import HEADS, run_of

from experiments import __main__ as cli
from experiments.cli import COMMANDS
from experiments.cli.app import examples, function_of
from experiments.cli.run_names import name_run
from lm.data.documentation import corpus
from lm.objectives.denoising import OBJECTIVES

RUN, VECTORS = "t5/1-baseline/baseline/seed-0", "vectors/negative/seed-0"
GPT, DIFFUSION = "gpt/base/seed-0", "now/4-diffusion/masked-diffusion/seed-0"
MINE = "bert/base/seed-0"  # @mine, with heads
MIXTURES = {"tuning.mixtures": ("documentation-reading", "documentation-language")}
# They train, compile for a TPU, need lm-evaluation-harness, a crawl, C4, words that are pieces (here are
# bytes), or a data set that is not here.
ELSEWHERE = (
    "demo",
    "run",
    "sweep",
    "report",
    "power",
    "ladder",
    "plan",
    "eval harness",
    "data clean",
    "status",
    "launch delete",
    "entry run",
    "entry verify",
    "entry table",
)
NEEDS_DATA = ("--scale base", " squad", "lm convert import", "lm convert push", "--verify", "[MASK]", VECTORS)
HERE = [
    line
    for name in COMMANDS
    if name not in ELSEWHERE and not name.startswith("draw ")
    for line in examples(function_of(name))
    if not any(part in line for part in NEEDS_DATA)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a book, and ``runs`` with the documentation's data and three runs, never trained."""
    folder = tmp_path_factory.mktemp("home")
    home = small_corpus.prepare(folder / "runs" / "cache")
    corpus.record_text(
        home, corpus.TEXT_DIGEST, []
    )  # as if it were the built-in text, which has to be fetched
    run_of(folder / "runs", RUN, MIXTURES)
    run_of(folder / "runs", GPT, MIXTURES | {"model.architecture": "decoder"})
    masked = {"model.architecture": "encoder", "objective": OBJECTIVES["masked-diffusion"]}
    run_of(folder / "runs", DIFFUSION, masked | {"tuning.mixtures": ()})
    run_of(folder / "runs", MINE, HEADS | {"tuning.heads": ("cola", "mrpc")})
    name_run(folder / "runs", "mine", folder / "runs" / "nano" / MINE)
    (folder / "new.txt").write_text("It is so.\nSo be it.\n")
    (folder / "pairs.jsonl").write_text('["It is so.", "So it is."]\n')
    (folder / "Containerfile").touch()  # as in a clone
    (folder / "book.txt").write_text("A first paragraph.\n\nA second one.\n")
    return folder


# tyro writes the script of another shell from the same commands, which takes seconds.
SLOW = "lm completion zsh"


@pytest.mark.parametrize(
    "example",
    [pytest.param(x, marks=[pytest.mark.slow] * x.startswith(SLOW), id=x) for x in dict.fromkeys(HERE)],
)
def test_an_example_of_the_help_runs_as_it_stands(example, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    shutil.rmtree("my-t5", ignore_errors=True)
    assert cli.dispatch(shlex.split(example.partition(" >")[0])[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
