"""Prints the ending of ``lm run``: what the run reached, its picture, and what to try next."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from glob import escape
from math import exp
from pathlib import Path
from typing import Any

from experiments.cli.run_names import shortest_name
from experiments.console import RUNS
from experiments.figures.training import SAME_LINE, training_figure
from experiments.runs.curves import TRAINING_LOSS, Curves, lowest_before_memorising, read_curves
from experiments.runs.paths import find_cache
from experiments.runs.plateau import PLATEAU_MARGIN, plateau_note
from experiments.runs.result import UNDEFINED, Result, read_result
from experiments.runs.sources import Sources
from experiments.runs.task_scores import chance_score
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.overrides import effective_overrides, overrides_of
from experiments.study.paths import row_folder, run_folder, seed_folders
from experiments.study.plugins import plugin_arguments
from experiments.study.registry import REGISTRY, TABLES, build, equal_rows
from experiments.study.scales import DEFAULT_SCALE, SCALES
from experiments.study.words import setting_arguments
from lm.config.base import SettingError
from lm.data.corpus.shards import iter_documents
from lm.data.tasks.names import is_task_file, task_name
from lm.data.tasks.task_files import has_tags

CURVES = "curves"  # name of the picture in the folder of a run
UNIFORM_BITS_PER_BYTE = 8.0
PROMPT_WORDS = 3
MAX_EXPONENT = 700.0  # e to the power of more overflows


def summarize(name: str, experiment: Experiment, folder: Path) -> Iterator[str]:
    """Yield lines about the finished run of row ``name``: losses, scores, its folder, and what to try."""
    result = read_result(folder)
    if result is None:
        return
    curves = read_curves([result], warn=lambda line: None)
    yield from loss_lines(result, experiment, curves)
    splits = scored_splits(folder)
    for task, best in result.tasks.items():
        chance = guess_score(task, best)
        beside = "" if chance is None else f" (chance: {chance:.3g})"
        score = f"{best['score']:z.2f}" if best["score"] is not None else f"– ({best[UNDEFINED]['score']})"
        rows = f" on {best['rows']:,} examples" if best.get("rows") else ""
        if rows and task in splits:
            rows += f" of the split {splits[task]}"
        yield f"{task}: {best['measure'].replace('_', ' ')} {score}{rows}{beside}"
    yield f"run: {folder}"
    if draw_curves(name, result, curves):
        yield f"picture: {folder / CURVES}.png"
    yield "Try:"
    yield from (f"  {command}" for command in suggestions(name, experiment, folder))


def scored_splits(folder: Path) -> dict[str, str]:
    """Return the split of each task that a finished run is scored on; none if a task file cannot be read."""
    from experiments.runs.stages import stages_of  # with jax

    splits: dict[str, str] = {}
    with suppress(SettingError, OSError):
        for stage in stages_of(folder):
            for task in stage.tasks["validation"]:
                splits[task.name] = str(task.report or task.validation)
    return splits


def guess_score(task: str, best: Mapping[str, Any]) -> float | None:
    """Return what guessing scores on a task, for free text by uniform bytes; None where it is unknown."""
    return UNIFORM_BITS_PER_BYTE if best["measure"] == "bits_per_byte" else chance_score(task, best)


def loss_lines(result: Result, experiment: Experiment, curves: Curves) -> Iterator[str]:
    """Yield the held-out loss, and beside that of a unigram model the content loss, if it is another one.

    curves: of this run, from ``read_curves``.
    """
    loss = result.held_out_loss
    if loss is not None:
        line = f"held-out loss {loss:.3f} nats per token"
        if experiment.model.has_decoder and loss < MAX_EXPONENT:
            line += f", perplexity {exp(loss):.1f}"
        yield line
        if note := memorising_note(curves):
            yield note
    if result.denoiser_losses:
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in result.denoiser_losses.items())
        yield f"held-out loss of each denoiser: {losses}"
    if result.content_loss is not None and result.reference_loss is not None:
        note = plateau_note(result.exit_step, experiment)
        is_other = loss is None or abs(result.content_loss - loss) > SAME_LINE
        if note and result.exit_step is None and not is_other:
            note += knows_training_text_note(curves, result.reference_loss)
        content = f"content loss {result.content_loss:.3f}; " * is_other
        yield f"{content}unigram loss {result.reference_loss:.3f}{note}"


def knows_training_text_note(curves: Curves, unigram_loss: float) -> str:
    """Return that the training loss, unlike the held-out loss, is below the unigram loss; "" if it is not."""
    if TRAINING_LOSS not in curves:
        return ""
    _, training_loss = curves[TRAINING_LOSS][0][-1]
    if training_loss > unigram_loss - PLATEAU_MARGIN:
        return ""
    return (
        f",\nbut the training loss, {training_loss:.3f}, is below it: the model knows its training text\n"
        "better than other text of its kind; use more text"
    )


def memorising_note(curves: Curves) -> str:
    """Return how far the held-out loss rose while the training loss fell; "" if it did not rise.

    curves: of one run, from ``read_curves``.
    """
    memorised_from = lowest_before_memorising(curves)
    if memorised_from is None:
        return ""
    step, lowest = memorised_from
    _, now = curves[TRAINING_LOSS][0][-1]
    return (
        f"it was lowest at step {step:,.0f}, {lowest:.3f}, and the training loss is {now:.3f}:\n"
        "the model memorises its text; use more text or fewer steps"
    )


def draw_curves(name: str, result: Result, curves: Curves) -> bool:
    """Draw the run's losses and scores over steps into its folder, unless they are there.

    False if there is nothing to draw, since fewer than two evaluations were recorded.
    """
    folder = Path(result.folder)
    picture, scores = folder / f"{CURVES}.png", folder / "scores.json"
    if picture.exists() and picture.stat().st_mtime >= scores.stat().st_mtime:
        return True
    if not curves:
        return False
    from experiments.figures.draw import draw_plots, save_figure  # with matplotlib, which is slow to import

    save_figure(draw_plots(training_figure({REGISTRY[name].label: curves})), picture)
    return True


def suggestions(name: str, experiment: Experiment, folder: Path) -> list[str]:
    """Return commands to go on with from a finished run: to use it, to draw a picture, and to report it."""
    lm = shlex.join(["lm", *plugin_arguments()])
    prompt = shlex.quote(prompt_of_text(experiment, folder))
    scale_folder, _ = _scale_folder(name, folder)
    run, counts = shlex.quote(shortest_name(folder, scale_folder.parent)), experiment.counts.model
    if counts == "ngram":
        use = f"{lm} generate {run} --prompt {prompt} --temperature 1"
    elif counts != "none":
        use = f"{lm} show {name}"
    elif experiment.finetuning.steps and any(map(is_task_file, experiment.tuning.heads[:1])):
        use = f"echo 'one text per line' | {lm} predict {run}"
        if tags_words(experiment.tuning.heads[0]):  # which are given as lists, and not as lines
            use = f"""echo '["one","word","each"]' > words.jsonl && {lm} predict {run} words.jsonl"""
    elif experiment.tuning.heads and not experiment.pretraining.steps:
        use = f"{lm} eval tasks {run} {shlex.quote(experiment.tuning.heads[0])}"
    elif experiment.model.has_decoder:
        mixtures = experiment.tuning.mixtures if experiment.finetuning.steps else ()
        model = f" --mixture {shlex.quote(task_name(mixtures[0]))}" if mixtures else ""
        use = f"{lm} generate {run}{model} --prompt {prompt}"
    else:
        use = f"{lm} generate {run} --prompt 'Paris is the [MASK] of France.'"
    if counts == "ngram":
        picture = f"{lm} draw next {run} --text {prompt}"
    elif counts == "none" and experiment.model.has_attention_logits and experiment.model.funnel.blocks == 1:
        picture = f"{lm} draw attention {run} --text {prompt}"
    else:
        picture = f"{lm} show {name} --examples 3"
    return [use, picture, f"{lm} {report_command(name, experiment, folder)}"]


def tags_words(task_file: str) -> bool:
    """Return whether the task of a file is to tag words; False if the file cannot be read."""
    with suppress(SettingError):
        return has_tags(task_file)
    return False


def prompt_of_text(experiment: Experiment, folder: Path) -> str:
    """Return words with which held-out text begins, for the model in ``folder`` to go on from.

    Where the text cannot be read any more, it is a word with which any English text may begin.
    """
    if experiment.data.corpus.startswith("documentation"):
        return "The function returns"
    with suppress(SettingError, OSError):
        for text in iter_documents(Sources(find_cache(folder)).corpus(experiment.data.corpus, "validation")):
            if len(words := text.split()) > PROMPT_WORDS:
                return " ".join(words[:PROMPT_WORDS])
    return "The"


def report_command(name: str, experiment: Experiment, folder: Path) -> str:
    """Return the command, without ``lm``, that reports the run of row ``name`` in ``folder`` in its table.

    A run with settings given by hand is reported beside the rows with the same settings, which are compared.
    If there are none, but runs of ``name`` with other settings, ``--variants`` shows these side by side.
    """
    scale_folder, plain = _scale_folder(name, folder)
    runs, scale = scale_folder.parent, scale_folder.name
    words = ["report", REGISTRY[name].table]
    if scale != DEFAULT_SCALE:
        words += ["--scale", scale]
    if folder.parent != plain:
        overrides = overrides_of(name, scale, experiment)
        overrides.pop("seed", None)
        # What a checkpoint decides cannot be told from what was given beside --start.
        is_comparison = not experiment.start.model and (
            _is_run_of_other_row(name, overrides, runs, scale) or not _other_settings(plain, folder)
        )
        words += setting_arguments(overrides) if is_comparison else ["--variants"]
    if runs != RUNS:
        words += ["--runs", str(runs)]
    return shlex.join(words)


def _is_run_of_other_row(name: str, overrides: Overrides, runs: Path, scale: str) -> bool:
    """Return whether another row of the table of row ``name`` has runs with these settings."""
    for row in TABLES[REGISTRY[name].table].rows:
        if row.needs or row.name in equal_rows(name, scale):
            continue
        with suppress(SettingError):  # the settings contradict those of the row
            experiment = build(row.name, scale, effective_overrides(row.name, scale, overrides))
            named = overrides_of(row.name, scale, experiment)
            if seed_folders(run_folder(runs, scale, row.name, 0, named).parent):
                return True
    return False


def _other_settings(plain: Path, folder: Path) -> list[Path]:
    """Return the folders of the same row's runs with other settings than the run in ``folder``.

    plain: the folder of the row's runs without settings given by hand.
    """
    folders = [plain, *plain.parent.glob(f"{escape(plain.name)},*")]
    return [other for other in folders if other != folder.parent and seed_folders(other)]


def _scale_folder(name: str, folder: Path) -> tuple[Path, Path]:
    """Return the folder of the scale of a run of row ``name``, and that of its runs without overrides."""
    for parent in folder.parents:
        if parent.name not in SCALES:
            continue
        for row in equal_rows(name, parent.name):
            plain = row_folder(parent.parent, parent.name, row, {})
            if folder.parent.parent == plain.parent and folder.parent.name.split(",")[0] == plain.name:
                return parent, plain
    raise SettingError(f"{folder} is not a run directory of {name}")
