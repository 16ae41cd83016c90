"""Two kinds of tables, and the console that commands print to.

A *sheet* holds scores, in columns of cells; it is printed in the terminal or written as Markdown. A *listing*
holds texts, in rows; none of them is cut.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text

RUNS = Path("runs")
CONSOLE = Console(emoji=False)  # as wide as the terminal; 80 columns in a pipe, or as COLUMNS says
# for lists of names: a program that reads them from a pipe needs each in one piece
_HAS_WIDTH = CONSOLE.is_terminal or "COLUMNS" in os.environ
NAMES_CONSOLE = Console(emoji=False, width=None if _HAS_WIDTH else max(160, CONSOLE.width))
# In a narrower terminal, names of rows are shown without their table, which the title names, and values have
# their meaning below instead of beside them [characters].
NARROW = 100
UNBROKEN = Console(soft_wrap=True, highlight=False, emoji=False)  # for lines of any length
CELL_PADDING = 3  # around each cell of a listing, its border included [characters]
LEFT_ALIGNED_HEADINGS = (  # of columns of text; columns of numbers are aligned to the right
    "table",
    "row",
    "column",
    "claim",
    "conclusion",
    "task",
    "tasks",
    "answered",
    "metrics",
    "data set",
    "inputs",
    "target",
    "prediction",
)


MISSING = "–"  # a cell without a value
MAX_KEY_COLUMNS = 3  # columns that are repeated in each block of a wide sheet, at most


class Cell(NamedTuple):
    """A cell of a sheet."""

    text: str = MISSING
    bold: bool = False
    value: float | None = None  # the number that the text rounds
    deviation: float | None = None  # over seeds


Sheet = dict[str, list[Cell]]  # heading -> one cell per line


def markdown(sheet: Sheet) -> str:
    """Return a sheet as a table in Markdown."""
    rule = "".join("|:---" if head in LEFT_ALIGNED_HEADINGS else "|---:" for head in sheet)
    lines = [" | ".join(map(_markdown, cells)) for cells in zip(*sheet.values(), strict=True)]
    return "\n".join([f"| {' | '.join(sheet)} |", f"{rule}|", *(f"| {line} |" for line in lines)])


def _markdown(cell: Cell) -> str:
    return f"**{escape_markdown(cell.text)}**" if cell.bold else escape_markdown(cell.text)


def escape_markdown(text: str) -> str:
    """Return ``text`` with the characters escaped that Markdown would interpret."""
    return re.sub(r"([\\`*_|<\[&])", r"\\\1", text)


def binary_size(count: int) -> str:
    """Return a number of bytes with its unit.

    >>> binary_size(524_288)
    '512 KiB'
    """
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def print_line(text: str) -> None:
    """Print a line without markup, cuts or wraps."""
    CONSOLE.print(text, highlight=False, markup=False, soft_wrap=True)


def line_starts(text: str, width: int) -> list[int]:
    """Return where the second and later lines begin if ``text`` is broken into lines of ``width`` characters.

    Lines are broken at spaces. A word that is wider than a line is broken after a sign, as names of settings
    and runs have them, and elsewhere only if that is not enough.

    >>> line_starts("objective.noise=spans, objective.inputs=masks-or-random", 26)
    [23, 49]
    """
    starts: list[int] = []
    begin = position = 0  # of the line, and of what comes next
    for word in re.findall(r"\S+\s*", text):
        is_wide = len(word.rstrip()) > width
        pieces = _pieces(word, width) if is_wide else [word]
        if is_wide and position > begin:
            begin = position
            starts.append(begin)
        for piece in pieces:
            if position > begin and position - begin + len(piece.rstrip()) > width:
                begin = position
                starts.append(begin)
            position += len(piece)
    return starts


def _pieces(word: str, width: int) -> list[str]:
    """Return a word in pieces of up to ``width`` characters, which end after signs where they can."""
    pieces = re.split(r"(?<=[=,./_-])(?=[^\s=,./_-])", word)
    return [part for piece in pieces for part in re.findall(rf".{{1,{width}}}\s*", piece, re.DOTALL)]


class TextCell:
    """A cell of a listing, whose lines ``line_starts`` breaks."""

    def __init__(self, markup: str) -> None:
        self.text = Text.from_markup(markup)

    def __str__(self) -> str:
        return self.text.plain

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for paragraph in self.text.split("\n", allow_blank=True):
            for line in paragraph.divide(line_starts(paragraph.plain, options.max_width)):
                line.rstrip()
                yield line


class Listing(Grid):
    """A table of texts, none of which is cut.

    Its first column, of names, is wrapped only where the others would have no room.
    """

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a line of texts, in the markup of rich."""
        super().add_row(*map(TextCell, cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *others = self.columns
        for_others = sum(len(str(column.header)) + CELL_PADDING for column in others) + 1
        longest = max((cell_len(str(cell)) for cell in first.cells), default=0)
        first.no_wrap = longest + CELL_PADDING + for_others <= options.max_width
        return super().__rich_console__(console, options)


def listing(*heads: str, title: str | None = None) -> Listing:
    """Return a table for texts; no name in the first column is wrapped while the others have room."""
    columns = [Column(escape(head), overflow="fold") for head in heads]
    return Listing(*columns, title=title and escape(title), title_justify="left")


def show_listing(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
    """Print rows of texts as a table or, if it is wider than the terminal, each row as two lines.

    The first of the two lines is the name, from the first column.
    """
    widths = [max(map(cell_len, column)) + CELL_PADDING for column in zip(heads, *rows, strict=True)]
    if sum(widths) + 1 > CONSOLE.width:
        if title is not None:
            print_line(title)
        for first, *others in rows:
            pairs = zip(heads[1:], others, strict=True)
            known = [f"[dim]{head}[/] {escape(text)}" for head, text in pairs if text != MISSING]
            print_line(first)
            CONSOLE.print("  " + ", ".join(known))
        return
    grid = listing(*heads, title=title)
    for row in rows:
        grid.add_row(*map(escape, row))
    CONSOLE.print(grid)


def show_sheet(title: str, sheet: Sheet) -> None:
    """Print a sheet, split into blocks of columns that fit the terminal.

    Each block begins with the first columns, as many as tell the rows apart.
    """
    names = key_columns(sheet)
    repeated = dict([*sheet.items()][:names])
    parts: list[Sheet] = [dict(repeated)]
    for head, cells in [*sheet.items()][names:]:
        if len(parts[-1]) > names and _sheet_width(parts[-1] | {head: cells}) > CONSOLE.width:
            parts.append(dict(repeated))
        parts[-1][head] = cells
    for number, part in enumerate(parts, 1):
        place = f" (columns: part {number} of {len(parts)})" * (len(parts) > 1)
        if shown := (title if number == 1 else "") + place:
            CONSOLE.print(shown.strip(), style="bold", highlight=False, markup=False)
        CONSOLE.print(_grid(part))


def narrowed(sheet: Sheet, heads: Sequence[str]) -> Sheet:
    """Return a sheet that fits the terminal, made by dropping the columns ``heads`` from the last one on.

    The first of ``heads`` is always kept, so the result may still be too wide.
    """
    shown = dict(sheet)
    for head in reversed(heads[1:]):
        if _sheet_width(shown) <= CONSOLE.width:
            break
        shown.pop(head, None)
    return shown


def key_columns(sheet: Sheet) -> int:
    """Return the smallest number of leading columns whose cells tell all rows apart.

    Return 1 if MAX_KEY_COLUMNS columns do not.
    """
    columns = [[cell.text for cell in cells] for cells in sheet.values()]
    for count in range(1, min(MAX_KEY_COLUMNS, len(columns) - 1) + 1):
        rows = [*zip(*columns[:count], strict=True)]
        if len({*rows}) == len(rows):
            return count
    return 1


def _sheet_width(sheet: Sheet) -> int:
    """Return the width of a sheet in the terminal [characters].

    The first column, of names, counts for at most half of the terminal, since names wrap.
    """
    widths = [max(map(cell_len, [head, *(cell.text for cell in cells)])) for head, cells in sheet.items()]
    widths[0] = min(widths[0], CONSOLE.width // 2)
    return 1 + sum(width + 2 for width in widths)


def _grid(sheet: Sheet) -> Grid:
    """Return a sheet as a table of rich."""
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in sheet:
        grid.add_column(
            escape(head), justify="left" if head in LEFT_ALIGNED_HEADINGS else "right", overflow="fold"
        )
    for cells in zip(*sheet.values(), strict=True):
        grid.add_row(*(f"[bold]{escape(cell.text)}[/]" if cell.bold else escape(cell.text) for cell in cells))
    return grid
