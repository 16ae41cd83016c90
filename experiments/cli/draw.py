"""``lm draw``: pictures of masks, positions and costs, and of what a model does; nearest neighbours."""

from pathlib import Path
from textwrap import fill
from typing import Any

from rich.markup import escape

from experiments.console import UNBROKEN, print_line
from experiments.figures import FIGURES
from lm.config.base import SettingError
from lm.tokenizers.tokenizer import METASPACE


def show_figures() -> None:
    """Print what can be drawn, in the order of a course."""
    print(
        "Draw masks, positions, costs, or what a model does with a text.\n\n"
        "usage: lm draw WHAT [OPTIONS] [--out PICTURE.png]   details: lm draw WHAT --help\n"
    )
    for what, drawing in FIGURES.items():
        show_figure(what, drawing.summary, drawing.arguments)
    show_figure(
        "neighbours",
        "The tokens whose vectors are nearest to a word's, as text.",
        "RUN --words WORD [WORD ...]",
    )
    print("\nA picture ends in .png, .svg or .pdf.")


def show_figure(what: str, summary: str, arguments: str) -> None:
    """Print what a figure shows and how it is drawn, in lines of 80 characters."""
    print(fill(f"  {what:<11} {summary}", 80, subsequent_indent=" " * 14))
    if arguments:
        command = f"{'':<14}lm draw {what} {arguments}"
        print(fill(command, 80, subsequent_indent=" " * 18, break_on_hyphens=False, break_long_words=False))


def write_picture(what: str, picture: Any) -> None:
    """Draw a picture into its ``out``, and print what it shows; another ending is refused before drawing.

    Pictures of one kind have the same default name. The line says so where one takes the place of another.
    """
    from experiments.figures.draw import check_format, save_figure  # with matplotlib

    out = picture.out or Path(f"{what}.png")
    check_format(out)
    replaces = picture.out is None and out.exists()
    save_figure(picture.figure(), out, picture.description())
    print_line(f"{out}: {FIGURES[what].summary}")
    if replaces:
        print_line(f"It takes the place of the {out} that was here; --out NAME.png keeps both.")


def neighbours(run: Path, /, words: tuple[str, ...], count: int = 8, stage: str = "") -> None:
    """Print the tokens whose vectors are nearest to a word's: skip-gram vectors, or a model's embedding.

        lm draw neighbours runs/nano/vectors/negative/seed-0 --words file --count 3

    Args:
        run: Folder of a run, @NAME or @last.
        words: Words that are single tokens of the run's vocabulary.
        count: Neighbours to print for each word, the nearest by cosine first.
        stage: Stage whose embedding is used; by default skip-gram's if the run has it, else that of
            the run's model.
    """
    from experiments.runs.stages import stages_of  # with jax
    from experiments.runs.trained import embedding_of, networks

    if count < 1:
        raise SettingError(f"--count {count} should be at least 1")
    if not words:
        raise SettingError("--words: name one or more words of the run's vocabulary")
    stages = {each.name: each for each in networks(stages_of(run))}
    vectors, which = embedding_of(run, stages, stage)
    UNBROKEN.print(f"[dim]{escape(which)}[/]")
    for word in words:
        piece = next((name for name in (METASPACE + word, word) if name in vectors.ids), word)
        nearest = "  ".join(f"{name} {cosine:.2f}" for name, cosine in vectors.neighbours(piece, count))
        UNBROKEN.print(f"[cyan]{escape(piece)}[/]  {escape(nearest)}", highlight=False)
