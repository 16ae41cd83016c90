"""Prepare training: ``lm plan`` compiles rows for a TPU slice, ``lm prepare`` encodes texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.progress import Progress

from experiments.cli.usage.arguments import (
    FLAT,
    NO_START,
    StartOption,
    first_word,
    named_settings,
    option,
    ordered,
    parse,
    scale_of,
)
from experiments.console import RUNS, UNBROKEN
from experiments.processes.jobs import cores
from experiments.runs.prepare import prepare as find_data
from experiments.runs.prepare import training_streams
from experiments.starts import started_from
from experiments.study.changes import apply
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.overrides import check_given
from experiments.study.registry import build, find
from experiments.study.scales import DEFAULT_SCALE
from lm.config.base import at_least
from lm.data.corpus.precompute import estimate_cost, pretokenize


def plan(arguments: Sequence[str]) -> None:
    """Compile rows for a TPU slice that need not exist: memory, time and hours before you pay for them."""
    from experiments.plan.plans import PlanOptions, row_of, show_plans  # with jax

    rows, options = {}, (defaults := PlanOptions())

    def plan(
        pattern: str,
        /,
        settings: Annotated[Experiment, FLAT] = BASELINE,
        options: Annotated[PlanOptions, FLAT] = defaults,
        _start: Annotated[StartOption, FLAT] = NO_START,
    ) -> tuple[Experiment, PlanOptions]:
        """Compile the training step of rows for a TPU slice with libtpu, here, and print what it needs.

        Any setting of the rows can be changed, as for lm run.

        Args:
            pattern: shell-style pattern over rows and tables, such as 't5/2-architecture/*'.
        """
        return settings, options

    arguments = ordered(plan, arguments)
    size, mesh = (option(arguments, flag, "") for flag in ("--size", "--mesh"))
    started = started_from(option(arguments, "--start", ""), Path(option(arguments, "--runs", str(RUNS))))
    for row in find(first_word(arguments)):
        default = apply(row_of(row.name, scale_of(arguments), size, mesh), started)
        rows[row.name], options = parse(plan, "lm plan", arguments, default)
    planned = [*rows.values()]
    check_given(planned, named_settings(arguments, planned[0]))
    show_plans(rows, options)


@dataclass(frozen=True)
class AheadOptions:
    """Options of what is encoded ahead of training, and by how many processes."""

    tokens: float = 0.0  # how many, such as 2e9; 0: as many as the row reads, or all of the corpus [tokens]
    workers: int = 0  # 0: one a core [processes]
    check: bool = False  # only say what it will take

    def __post_init__(self):
        at_least(self, "", tokens=0, workers=0)


def prepare_row(arguments: Sequence[str]) -> None:
    """Encode what a row reads of its corpus, ahead of its training."""

    def prepare(
        row: str,
        /,
        settings: Annotated[Experiment, FLAT] = BASELINE,
        scale: str = DEFAULT_SCALE,
        runs: Path = RUNS,
        ahead: Annotated[AheadOptions, FLAT] = AheadOptions(),
    ) -> None:
        """Encode what a row reads of its corpus, ahead of its training, with all cores.

        Says first what it will take, by a sample. Started again, or on another machine with the same --runs,
        it goes on with what is missing. Any setting can be changed, as for lm run.

        Args:
            row: row of the registry, such as t5/1-baseline/baseline.
            scale: size of the study.
            runs: folder that holds the runs, and the encoded text.
        """
        check_given([settings], named_settings(arguments, settings))
        prepare_corpus(settings, runs / "cache", ahead)

    arguments = ordered(prepare, arguments)
    parse(prepare, "lm prepare", arguments, build(first_word(arguments), scale_of(arguments)))


def without_tasks(experiment: Experiment) -> Experiment:
    """Return the experiment without tasks, unless its vocabulary is trained on their texts too."""
    if experiment.data.vocabulary_texts != "corpus":
        return experiment
    tuning = replace(experiment.tuning, mixtures=(), heads=())
    return replace(experiment, tuning=tuning, mixing=BASELINE.mixing)


def prepare_corpus(experiment: Experiment, cache: Path, ahead: AheadOptions) -> None:
    """Say what it takes to encode what a row reads of its corpus, and encode it."""
    cache.mkdir(parents=True, exist_ok=True)
    prepared = find_data(without_tasks(experiment), cache, UNBROKEN.print)
    streams = training_streams(experiment, prepared)
    phase = experiment.pretraining
    wanted = int(ahead.tokens) or phase.steps * phase.batch_size * experiment.data.inputs_length
    cost, workers = estimate_cost(streams, wanted), ahead.workers or cores()
    hours = cost.core_seconds / workers / 3600
    read, kept = cost.bytes_read / 1e9, cost.bytes_written / 1e9
    UNBROKEN.print(
        f"{cost.tokens:,} tokens: {read:,.2f} GB of text to read, {kept:,.2f} GB to keep in "
        f"{streams.corpus.folder}, {hours:,.2f} hours with {workers} processes"
    )
    if ahead.check:
        return
    with Progress(console=UNBROKEN) as progress:
        bar = progress.add_task("windows", total=None)
        elsewhere = pretokenize(streams, cost.bytes_read, workers, lambda n: progress.update(bar, advance=n))
    if elsewhere:
        UNBROKEN.print(f"{len(elsewhere)} parts are being encoded by other processes or machines")
