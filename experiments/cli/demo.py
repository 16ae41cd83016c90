"""``lm demo``: a small decoder, and the first table of the study, in a few minutes on a laptop."""

import shlex
import sys
from itertools import accumulate
from pathlib import Path

from experiments.cli.run_names import LAST, check_name, name_run
from experiments.cli.run_options import Options, row_run
from experiments.cli.run_summary import loss_lines
from experiments.cli.settings import GridPoint, Runs
from experiments.cli.sweep import compared_experiments, sweep_argv, wanted_runs
from experiments.cli.train import job_count, train_unfinished
from experiments.console import RUNS, UNBROKEN, print_line
from experiments.runs.result import read_result
from experiments.study.changes import Overrides
from experiments.study.paths import check_runs
from experiments.study.registry import TABLES, build
from lm.config.base import SettingError

SCALE = "nano"
DECODER = "gpt/llama"  # after as many steps it predicts better than gpt/base (docs/first-hour.md)
STEPS = 1_000  # of the decoder, after which phrases hold (docs/text.md)
TABLE = "t5/1-baseline"
SEEDS = 2  # of each row of the table, the fewest that decide a claim
NAME = "demo"  # @demo is the decoder
PICTURE = "attention.png"
PROMPT = "The function returns"  # of the examples, in the built-in text
MAX_PROMPT = 40  # of the examples, so that a command fits in a line [characters]
HEADS = 4  # of the decoder in the picture: those that look sharpest


def demo(*, text: Path | None = None, runs: Runs = RUNS) -> None:
    """Train a small decoder on a text and the first table of the T5 paper, and show what came out.

    The decoder continues a text that it has never seen, before and after its training. The table asks whether
    pre-training helps, with two seeds per row. It takes six minutes on two cores, and resumes.

        lm demo
        lm demo --text book.txt

    Args:
        text: Text for the decoder, a file or a folder in UTF-8; by default the built-in documentation.
    """
    text = text and text.expanduser()
    if text is not None and not text.exists():
        raise SettingError(f"--text {text}: there is no such file or folder; name a text in UTF-8")
    check_runs(runs)
    check_name(runs, NAME)
    options = Options(SCALE, runs)
    decoder = row_run(DECODER, build(DECODER, SCALE, decoder_changes(text)), options)
    rows = wanted_runs(compared_experiments(TABLE, [GridPoint({}, {})], {}, SCALE), SEEDS, options)
    # What takes longest begins first, so that no core waits for the other at the end.
    wanted = [decoder, *sorted(rows, key=lambda run: -run.experiment.pretraining.steps)]
    if text is not None:  # a text that cannot be read costs no training of the table
        from experiments.runs.run import Run

        Run(decoder.experiment, decoder.folder, options.cache).check(print_line, options.allowed)
    failed = train_unfinished(wanted, options, job_count(0, wanted))
    if failed:
        sys.exit(failed)
    for name in (NAME, LAST):
        name_run(runs, name, decoder.folder)
    from experiments.evaluate.samples import held_out_sample  # these open trained models, with jax
    from experiments.figures.draw import save_figure
    from experiments.figures.model_inspection import draw_heads
    from experiments.figures.trained_models import read_text
    from experiments.report.report import print_report
    from experiments.runs.curves import read_curves
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import open_run

    result, sample = read_result(decoder.folder), held_out_sample(decoder.experiment, decoder.folder)
    if result is None or sample is None:
        raise SettingError(f"{decoder.folder} has no scores: was it deleted meanwhile? Run the command again")
    curves = read_curves([result], warn=lambda line: None)
    UNBROKEN.print(f"\n[bold]A decoder of {result.parameters:,} parameters after {STEPS:,} steps[/]")
    for line in (*sample.lines(), *loss_lines(result, decoder.experiment, curves)):
        print_line(line)
    read = read_text(open_run(decoder.folder, stages_of(decoder.folder)), sample.prompt)
    save_figure(draw_heads(read, HEADS), decoder.folder / PICTURE)
    print_line(f"where {HEADS} of its heads look: {decoder.folder / PICTURE}\n")
    if text is not None:
        print_line(f"The table of the T5 paper is of the built-in text, not of {text}:\n")
    command = shlex.join(sweep_argv(TABLE, SEEDS, {}, options))
    print_report([TABLES[TABLE]], SCALE, (str(runs),), command=command)
    UNBROKEN.print("\nTry:")
    prompt = PROMPT if text is None else sample.prompt
    for line in suggestions(decoder.folder, prompt, runs):
        print_line(f"  {line}")


def decoder_changes(text: Path | None) -> Overrides:
    """Return the settings of the decoder that differ from its row."""
    corpus = {} if text is None else {"data.corpus": f"text:{text}"}
    return corpus | {"pretraining.steps": STEPS, "finetuning.steps": 0}


def beginning(text: str) -> str:
    """Return the first words of a text that fit in MAX_PROMPT characters, or its first word.

    >>> beginning("It was a bright cold day in April, and the clocks were striking thirteen.")
    'It was a bright cold day in April, and'
    """
    words = text.split(" ")
    lengths = accumulate(len(word) + 1 for word in words)
    return " ".join(words[: max(1, sum(length - 1 <= MAX_PROMPT for length in lengths))])


def suggestions(decoder: Path, prompt: str, runs: Path) -> list[str]:
    """Return commands to go on with, the first two with the decoder's run and the beginning of ``prompt``."""
    elsewhere = "" if runs == RUNS else f" --runs {shlex.quote(str(runs))}"
    run = f"@{NAME}" if runs == RUNS else shlex.quote(str(decoder))
    text = shlex.quote(beginning(prompt))
    return [
        f"lm generate {run} --prompt {text} --temperature 0.6",
        f"lm draw next {run} --text {text}",
        "lm list 't5/*'",
        f"lm sweep t5/6-corruption-rate --scale nano --seeds 1{elsewhere}",
    ]
