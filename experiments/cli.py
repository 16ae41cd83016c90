"""The commands of ``lm``: each is one function, whose signature is its options and whose docstring its help."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.exit_codes import EXIT_CODES
from experiments.rows import RUNS, plan, run
from lm.config import SettingError


def list_rows(pattern: str = "*", /, scale: str = "nano", runs: Path = RUNS, names: bool = False) -> None:
    """List the rows of the study, what each changes, and how many seeds of it have finished.

    Args:
        pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
        scale: size of the study: nano, mini, mini-real or base.
        runs: folder that holds the runs.
        names: print the names alone, one a line.
    """
    from experiments.commands import show_rows
    from experiments.registry import find

    if names:
        print("\n".join(row.name for row in find(pattern)))
    else:
        show_rows(pattern, scale, runs)


def show(name: str, /, scale: str = "nano") -> None:
    """Show every setting of a row, with its meaning and unit.

    Args:
        name: row of the registry, such as t5/6-corruption-rate/15.
        scale: size of the study: nano, mini, mini-real or base.
    """
    from experiments.commands import show_settings

    show_settings(name, scale)


def diff(name: str, other: str = "", /, scale: str = "nano") -> None:
    """Show the settings in which a row differs from another.

    Args:
        name: row of the registry.
        other: row to compare with; by default the paper's baseline, or the first row of another table.
        scale: size of the study: nano, mini, mini-real or base.
    """
    from experiments.commands import show_diff

    show_diff(name, other, scale)


def sweep(
    pattern: str,
    /,
    scale: str = "nano",
    seeds: int = 1,
    runs: Path = RUNS,
    together: bool = False,
    allow: str = "",
    restart: int = 0,
) -> None:
    """Train and evaluate every row that matches and has not finished, then write the report.

    Killed or interrupted, it goes on where it stopped when started again.

    Args:
        pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
        scale: size of the study: nano, mini, mini-real or base.
        seeds: runs of each row, with seeds 0, 1, ...
        runs: folder that holds the runs.
        together: pre-train the seeds of a row at once on one device: for small models on an accelerator; not on a CPU.
        allow: go on although these changed since a run was begun: settings,vocabulary,data,code,packages.
        restart: start the command again, so many times at most, when it crashes or ends with exit code 42; after bad
            settings, a loss that is not finite, or a signal to this command it is not.
    """
    from experiments.origin import allowed
    from experiments.sweep import sweep as train

    train(pattern, scale, seeds, runs, together, allowed(allow))


def report(
    pattern: str = "t5/*", /, scale: str = "nano", runs: tuple[str, ...] = (str(RUNS),), watch: bool = False
) -> None:
    """Write the tables of all finished runs beside the paper's: Markdown, a page for the browser, CSV and pictures.

    Args:
        pattern: shell-style pattern over rows and tables.
        scale: size of the study: nano, mini, mini-real or base.
        runs: one or more folders that hold runs, gs:// included; the report goes into the first.
        watch: write it again whenever a run goes on, until interrupted.
    """
    from experiments.commands import show_report

    show_report(pattern, scale, runs, watch)


def verify(run: tuple[Path, ...], /) -> None:
    """Check every file of the checkpoints of runs against the checksums that were saved with them.

    The exit code is 1 if one is bad.

    Args:
        run: folders of runs, of phases, or of many runs, such as runs.
    """
    from experiments.verify import verify as bad

    if not run:
        raise SettingError("lm verify takes one or more folders, such as runs")
    if bad(run):
        sys.exit(EXIT_CODES["failed"])


def clean(arguments: Sequence[str]) -> None:
    """Turn a folder of texts, JSON lines or WET files into a corpus by the rules that made C4."""
    import tyro

    from experiments.cleaning import clean as make

    tyro.cli(make, prog="lm clean", args=arguments)


def tasks(pattern: str = "*", /, runs: Path = RUNS) -> None:
    """List the tasks: how each is answered and scored, and the rows of what is prepared here.

    Args:
        pattern: shell-style pattern over the names of tasks, such as 'multi30k*'.
        runs: folder that holds the runs and their data.
    """
    from experiments.task_list import show_tasks

    show_tasks(pattern, runs / "cache")


def score(
    run: Path | None = None,
    /,
    tasks: str = "",
    split: str = "validation",
    mixture: str = "",
    limit: int = 0,
    predictions: Path | None = None,
    task: str = "",
    runs: Path = RUNS,
) -> None:
    """Score a run or an imported checkpoint on tasks, or predictions that were made elsewhere.

    Answers and scores go to RUN/scores/PHASE/TASK/SPLIT.

    Args:
        run: folder of a run.
        tasks: names of tasks or mixtures, with commas between them, such as glue_small,squad.
        split: split of the data sets; may be one of TFDS's expressions, such as 'validation[:10%]'.
        mixture: which fine-tuned model answers; by default one tuned for the task, else the pre-trained one.
        limit: rows of each task, from its start; 0 takes all.
        predictions: file of predictions to score: a text a line, or .jsonl with {"prediction": ...} lines.
        task: the task that the predictions are for.
        runs: folder that holds the prepared data; of a run it is found beside it.
    """
    from experiments.scoring import score_file, score_run

    if run is not None and tasks and predictions is None:
        score_run(run, tasks.split(","), split, mixture, limit)
    elif predictions is not None and task and run is None:
        score_file(predictions, task, split, limit, runs)
    else:
        raise SettingError("lm score takes RUN --tasks NAME,NAME or --predictions FILE --task NAME")


def generate(
    run: Path,
    /,
    prompt: tuple[str, ...],
    mixture: str = "",
    max_length: int = 64,
    beams: int = 1,
    length_penalty: float = 0.6,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> None:
    """Show what a run's model writes after prompts: the likeliest words, drawn ones, or the best of a beam search.

    Args:
        run: folder of a run, such as runs/nano/t5/1-baseline/baseline/seed-0.
        prompt: one or more texts to answer or to go on from.
        mixture: which fine-tuned model answers; the first by default, 'pretraining' for the pre-trained model.
        max_length: longest answer [tokens].
        beams: answers searched side by side; 1 takes the likeliest token each time.
        length_penalty: of beam search; 0 compares log-probabilities, more favours long answers.
        temperature: of drawing; below 1 likely tokens get likelier, 0 draws nothing.
        top_k: draw from this many of the likeliest tokens; 0 draws from all.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: of drawing.
    """
    from experiments.inspection import Writing, answer

    answer(run, prompt, mixture, max_length, Writing(beams, length_penalty, temperature, top_k, top_p, seed))


def fill(text: str, /, run: Path | None = None, top: int = 5, iterations: int = 0, runs: Path = RUNS) -> None:
    """Show what a masked language model puts for each [MASK] of a text: "Paris is the [MASK] of France."

    Args:
        text: a text with one or more [MASK].
        run: folder of a run; by default the masked language model that was trained last.
        top: candidates shown for each mask.
        iterations: fill the whole text in this many passes, each of which thinks the least sure places over.
        runs: folder that holds the runs.
    """
    from experiments.inspection import fill_in

    fill_in(text, run, runs, top, iterations)


def attention(run: Path, /, text: str, mixture: str = "", out: Path = Path("attention.png")) -> None:
    """Draw where each head of a run's model looks in a text, a row a layer.

    Args:
        run: folder of a run.
        text: what the model reads; an encoder-decoder is watched writing its answer.
        mixture: which fine-tuned model; by default the pre-trained one.
        out: picture to write, .png, .svg or .pdf.
    """
    from experiments.attention_maps import show_attention

    show_attention(run, text, mixture, out)


def convert(arguments: Sequence[str]) -> None:
    """Import a published checkpoint as a run, or export a run's model in the published format."""
    import tyro

    def take(folder: Path, run: Path, /) -> None:
        """Make a run of a published checkpoint.

        Args:
            folder: holds config.json, safetensors and the tokenizer.
            run: folder of the run to make.
        """
        from experiments.conversion import import_checkpoint

        import_checkpoint(folder, run)

    def give(run: Path, folder: Path, /, mixture: str = "") -> None:
        """Write a run's model as a checkpoint that other programs read.

        Args:
            run: folder of a run.
            folder: where config.json and safetensors go.
            mixture: which fine-tuned model; by default the pre-trained one.
        """
        from experiments.conversion import export_checkpoint

        export_checkpoint(run, folder, mixture)

    tyro.extras.subcommand_cli_from_dict({"import": take, "export": give}, prog="lm convert", args=arguments)


def examples(name: str, /, scale: str = "nano", count: int = 3, runs: Path = RUNS) -> None:
    """Print pre-training and fine-tuning examples of a row, decoded: inputs and targets as the model sees them.

    Args:
        name: row of the registry.
        scale: size of the study: nano, mini, mini-real or base.
        count: examples of each kind.
        runs: folder that holds the prepared data and vocabulary.
    """
    from experiments.inspection import show_examples

    show_examples(name, scale, count, runs)


def doctor(runs: Path = RUNS) -> None:
    """Show devices, versions, data found and free disk space.

    Args:
        runs: folder that holds the runs.
    """
    from experiments.doctor import examine

    examine(runs)


COMMANDS: dict[str, Callable] = {
    "list": list_rows,
    "show": show,
    "diff": diff,
    "run": run,
    "plan": plan,
    "sweep": sweep,
    "report": report,
    "verify": verify,
    "clean": clean,
    "tasks": tasks,
    "score": score,
    "generate": generate,
    "fill": fill,
    "attention": attention,
    "convert": convert,
    "examples": examples,
    "doctor": doctor,
}
