"""``lm data prepare``: tokenize the text that a row reads, before its training and with all cores."""

from dataclasses import replace
from math import inf
from pathlib import Path

from rich.progress import Progress

from experiments.cli.settings import ConfigFile, Runs, Scale, Settings, given_changes
from experiments.console import RUNS, UNBROKEN, print_line
from experiments.processes.jobs import cores
from experiments.processes.progress import duration
from experiments.runs.phases import tokens_of_text
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.paths import check_runs
from experiments.study.registry import build
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import SettingError
from lm.data.corpus.precompute import estimate_cost, pretokenize


def data_prepare(
    row: str,
    /,
    settings: Settings,
    scale: Scale = DEFAULT_SCALE,
    config: ConfigFile = None,
    runs: Runs = RUNS,
    tokens: float = 0.0,
    workers: int = 0,
    check: bool = False,
) -> None:
    """Tokenize the text that a row reads, before its training and with all cores.

    First it says, from a sample, what that will take. The same command resumes, also on another machine with
    the same --runs.

        lm data prepare t5/1-baseline/baseline --check
        lm data prepare t5/1-baseline/baseline --scale base --tokens 2e9

    Args:
        row: Row of a table, such as t5/1-baseline/baseline.
        tokens: Number of tokens, such as 2e9; 0: as many as the row reads, at most the whole corpus [tokens].
        workers: Number of processes; 0: one per core [processes].
        check: Only estimate what it will take; a vocabulary that is missing is trained for that.
    """
    check_runs(runs)
    for name, value in (("tokens", tokens), ("workers", workers)):
        if value and not 1 <= value < inf:
            raise SettingError(f"--{name} {value} should be 0, or a finite number from 1 on")
    changes = given_changes([row], scale, settings, config, "", runs)
    prepare_corpus(build(row, scale, changes), runs / "cache", tokens, workers or cores(), check)


def without_tasks(experiment: Experiment) -> Experiment:
    """Return the experiment without tasks, unless its vocabulary is trained on their texts too."""
    if experiment.data.vocabulary_texts != "corpus":
        return experiment
    tuning = replace(experiment.tuning, mixtures=(), heads=())
    return replace(experiment, tuning=tuning, mixing=BASELINE.mixing)


def _size(number: float) -> str:
    """Return a number of bytes in GB or, if it is small, in MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def prepare_corpus(experiment: Experiment, cache: Path, tokens: float, workers: int, check: bool) -> None:
    """Print what it takes to tokenize the text that a row reads of its corpus; do it unless ``check``."""
    from experiments.runs.inputs import training_streams, unique_tokens  # with jax
    from experiments.runs.prepare import prepare

    cache.mkdir(parents=True, exist_ok=True)
    prepared = prepare(without_tasks(experiment), cache, print_line)
    streams = training_streams(experiment, prepared)
    of_row = unique_tokens if experiment.data.repeats else tokens_of_text
    cost = estimate_cost(streams, int(tokens) or of_row(experiment))
    read, kept = (_size(number) for number in (cost.bytes_read, cost.bytes_written))
    time = duration(cost.core_seconds / workers)
    processes = f"{workers} process" + "es" * (workers > 1)
    files = f"{read} of files to read, {kept} to keep"
    print_line(f"about {cost.tokens:,} tokens: {files}, {time} with {processes}")
    print_line(f"kept in {streams.corpus.folder}")
    if check:
        return
    with Progress(console=UNBROKEN) as progress:
        bar = progress.add_task("windows", total=None)
        elsewhere = pretokenize(streams, cost.bytes_read, workers, lambda n: progress.update(bar, advance=n))
    if elsewhere:
        print_line(f"{len(elsewhere)} parts are being tokenized by other processes or machines")
