"""The end of a finished run: what it came to, and what a reader wants to see and do next."""

import shlex
from collections.abc import Iterator, Mapping
from math import exp
from pathlib import Path
from typing import Any

from experiments.console import RUNS
from experiments.report.columns import leaving
from experiments.runs.result import UNDEFINED, Result, read_result
from experiments.study.experiment import Experiment
from experiments.study.paths import row_folder
from experiments.study.plugins import study_arguments
from experiments.study.registry import REGISTRY, equal_rows
from experiments.study.scales import SCALES
from lm.config.base import SettingError
from lm.data.tasks.benchmarks import TASKS
from lm.data.tasks.labelled import LABELLED
from lm.data.tasks.names import task_name

CURVES = "curves"  # picture in the folder of a run
UNIFORM_BYTE = 8.0  # of 256 bytes [bits]
CORRELATIONS = {"matthews", "pearson", "spearman"}  # which guessing leaves at 0
LARGEST_EXPONENT = 700.0  # e to the power of more is no number


def ending(name: str, experiment: Experiment, folder: Path) -> Iterator[str]:
    """Lines on the finished run of row ``name``: losses and scores beside chance, its folder, what to try."""
    result = read_result(folder)
    if result is None:
        return
    yield from losses(result, experiment)
    for task, best in result.tasks.items():
        chance = chance_of(task, best)
        beside = "" if chance is None else f" (chance: {chance:.3g})"
        score = f"{best['score']:.2f}" if best["score"] is not None else f"– ({best[UNDEFINED]['score']})"
        yield f"{task}: {best['measure'].replace('_', ' ')} {score}{beside}"
    yield f"run: {folder}"
    if drawn(name, result):
        yield f"picture: {folder / CURVES}.png"
    yield "Try:"
    yield from (f"  {command}" for command in to_try(name, experiment, folder))


def chance_of(task: str, best: Mapping[str, Any]) -> float | None:
    """What guessing comes to in the measure of a task; None where answers are texts of any kind.

    Bits a byte: by bytes drawn uniformly. Accuracy: by a class drawn uniformly; correlations are 0 then.
    """
    if best.get("chance") is not None or best["measure"] == "bits_per_byte":
        return best["chance"] if best.get("chance") is not None else UNIFORM_BYTE
    known = LABELLED.get(task) or TASKS.get(task)
    if best["measure"] != "score" or known is None:
        return None
    metrics = {name for name in known.metrics if name not in known.beside}
    if metrics <= CORRELATIONS:
        return 0.0
    return 100 / len(known.labels) if known.labels and metrics == {"accuracy"} else None


def losses(result: Result, experiment: Experiment) -> Iterator[str]:
    """The loss on held-out text, with what a model would have that does not look at its context."""
    if (loss := result.held_out_loss) is not None:
        whole = f"held-out loss {loss:.3f} nats a token"
        writes = experiment.model.has_decoder and loss < LARGEST_EXPONENT
        yield whole + f", perplexity {exp(loss):.1f}" * writes
    if result.content_loss is not None and result.reference_loss is not None:
        left = leaving(result.exit_step, experiment)
        lost, guessed = f"{result.content_loss:.3f}", f"{result.reference_loss:.3f}"
        yield f"of content tokens {lost}; without context {guessed}{left}"


def drawn(name: str, result: Result) -> bool:
    """Draw the run's losses and scores over steps into its folder; False if fewer than two were recorded."""
    from experiments.report.plots import save_figures, training  # with matplotlib
    from experiments.report.results import curves

    lines = curves([result], lambda line: None)
    if not any(lines.values()):
        return False
    save_figures({CURVES: training([REGISTRY[name]], {name: lines})}, Path(result.folder), "png")
    return True


def to_try(name: str, experiment: Experiment, folder: Path) -> tuple[str, str, str]:
    """Three commands that go on from a finished run."""
    lm = shlex.join(["lm", *study_arguments()])
    documented = experiment.data.corpus.startswith("documentation")
    sentence = "The function returns" if documented else "It was a"
    if experiment.counts.model != "none":
        look = f"{lm} show {name}"
    elif experiment.tuning.heads and not experiment.pretraining.steps:
        look = f"{lm} eval tasks {folder} {experiment.tuning.heads[0]}"
    elif experiment.model.has_decoder:
        tuned = experiment.tuning.mixtures if experiment.finetuning.steps else ()
        model = f" --mixture {shlex.quote(task_name(tuned[0]))}" if tuned else ""
        look = f"{lm} generate {folder}{model} --prompt {shlex.quote(sentence)}"
    else:
        look = f"{lm} generate {folder} --prompt 'Paris is the [MASK] of France.'"
    attends = experiment.counts.model == "none" and experiment.model.has_scores
    picture = f"{lm} draw attention {folder} --text {shlex.quote(sentence)}"
    return look, picture if attends else f"{lm} show {name} --examples 3", f"{lm} {report_of(name, folder)}"


def report_of(name: str, folder: Path) -> str:
    """The command, without ``lm``, whose table has the run of row ``name`` in ``folder``."""
    place, is_plain = _place(name, folder)
    words = ["report", REGISTRY[name].table]
    words += ["--scale", place.name] * (place.name != "nano")
    words += ["--runs", str(place.parent)] * (place.parent != RUNS)
    return shlex.join(words) + " --variants" * (not is_plain)


def _place(name: str, folder: Path) -> tuple[Path, bool]:
    """The folder of the scale of a run of row ``name``, and whether no settings were given by hand."""
    for place in (up for up in folder.parents if up.name in SCALES):
        for row in equal_rows(name, place.name):
            plain = row_folder(place.parent, place.name, row, {})
            if folder.parent.parent == plain.parent and folder.parent.name.split(",")[0] == plain.name:
                return place, folder.parent == plain
    raise SettingError(f"{folder} is no folder of a run of {name}")
