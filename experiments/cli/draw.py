"""``lm draw`` and ``lm attention``: pictures of masks, positions and costs, and of what a model does."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.cli import EXAMPLES
from experiments.cli.usage.arguments import name_first, parse
from experiments.cli.usage.page import HELP_WORDS
from experiments.console import UNBROKEN
from experiments.figures import FIGURES
from lm.config.base import SettingError, nearest


def draw(arguments: Sequence[str]) -> None:
    """Draw a picture; without a name list what there is."""
    arguments = name_first(FIGURES, arguments)
    if not arguments or arguments[0] in HELP_WORDS:
        show_drawings()
        return
    what, *options = arguments
    if what not in FIGURES:
        raise SettingError(f"lm draw knows no {what!r}{nearest(what, FIGURES)}; `lm draw` lists all")
    write_picture(what, parse(picture_of(what), f"lm draw {what}", options))


def attention(
    run: Path, /, text: str, mixture: str = "", heads: int = 4, out: Path = Path("attention.png")
) -> None:
    """Draw where heads of a run's model attend in a text: ``lm draw attention``.

    Args:
        run: folder of a run.
        text: what the model reads; an encoder-decoder is watched writing its answer.
        mixture: which fine-tuned model; by default the pre-trained one.
        heads: panels to draw, of the heads that look sharpest at other tokens (0: all).
        out: picture to write, .png, .svg or .pdf.
    """
    picture = picture_of("attention")(run=run, text=text, mixture=mixture, heads=heads, out=out)
    write_picture("attention", picture)


def show_drawings() -> None:
    """Print what can be drawn, in the order of a course."""
    examples = "".join(f"  {example}\n" for example in EXAMPLES["draw"])
    text = f"Draw masks, positions, costs, or what a model does with a text.\n\n{examples}\n"
    text += "usage: lm draw WHAT [OPTIONS] [--out PICTURE.png]      details: lm draw WHAT --help\n"
    UNBROKEN.print(text, markup=False, highlight=False)
    for what, drawing in FIGURES.items():
        UNBROKEN.print(f"  {what:<11} {drawing.summary}", markup=False)
        if drawing.arguments:
            UNBROKEN.print(f"  {'':<11} lm draw {what} {drawing.arguments}", markup=False)
    UNBROKEN.print("\nA picture ends in .png, .svg or .pdf.")


def picture_of(what: str) -> Any:
    """The class of a picture, whose fields are its options; with jax, which takes a second."""
    module, _, name = FIGURES[what].target.partition(":")
    return getattr(import_module(module), name)


def write_picture(what: str, picture: Any) -> None:
    """Draw a picture into its ``out``, and print what it shows; a wrong ending is refused at once."""
    from experiments.figures.draw import check_format, save_figure  # with matplotlib

    out = picture.out or Path(f"{what}.png")
    check_format(out)
    save_figure(picture.figure(), out, picture.description())
    UNBROKEN.print(f"{out}: {FIGURES[what].summary}", markup=False)
