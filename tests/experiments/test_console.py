"""Tables in a terminal: nothing is cut, and no column vanishes."""

import os
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console

from experiments import console
from experiments.console import Cell, TextCell, key_columns, line_starts, listing, narrowed, show_sheet

NAME = "t5/6-corruption-rate/15," + ",".join(f"pretraining.optimizer.beta{i}=0.5" for i in range(4))


def printed(width, capsys):
    grid = listing("run", "state", "expected time")
    grid.add_row(NAME, "to train", "3 min 20 s")
    Console(width=width).print(grid)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [60, 80, 240])
def test_a_long_name_takes_no_column_from_a_table(width, capsys):
    lines = printed(width, capsys)
    assert max(map(len, lines)) <= width
    cells = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    assert ["run", "state", "expected time"] in cells
    assert "".join(row[0] for row in cells[3:-1]) == NAME
    assert [row[1:] for row in cells if row[0] and NAME.startswith(row[0])] == [["to train", "3 min 20 s"]]


def test_a_title_is_printed_as_it_is(capsys):
    Console(width=80).print(listing("setting", title="[old]"))
    assert "[old]" in capsys.readouterr().out


def test_a_name_is_whole_where_the_other_columns_have_room(capsys):
    assert sum(NAME in line for line in printed(240, capsys)) == 1


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("no line is needed", 20, ["no line is needed"]),
        ("dropout=0.1, bias=True", 12, ["dropout=0.1,", "bias=True"]),
        ("a model.attention.implementation=xla", 20, ["a", "model.attention.", "implementation=xla"]),
        ("targets=everything", 10, ["targets=", "everything"]),
        ("unbreakable", 4, ["unbr", "eaka", "ble"]),
        ("a, b, c", 2, ["a,", "b,", "c"]),
    ],
)
def test_lines_break_at_spaces_else_after_signs_and_elsewhere_only_where_they_must(
    text, width, lines, capsys
):
    starts = line_starts(text, width)
    parts = [text[a:b].strip() for a, b in zip([0, *starts], [*starts, len(text)], strict=True)]
    assert parts == lines and max(map(len, parts)) <= width
    Console(width=width).print(TextCell(text))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == lines


def test_no_character_of_a_cell_is_lost_at_any_width():
    text = 'pretraining.phases=({"share":0.25,"mask":"causal"},)  two spaces/and-signs.=,'
    for width in range(1, len(text) + 2):
        starts = line_starts(text, width)
        assert starts == sorted({*starts}) and all(0 < start < len(text) for start in starts)
        ends = zip([0, *starts], [*starts, len(text)], strict=True)
        assert all(len(text[a:b].rstrip()) <= width for a, b in ends)


@pytest.mark.parametrize(("columns", "width"), [("", 80), ("120", 120)])
def test_without_a_terminal_tables_are_80_columns_wide_or_as_wide_as_columns_says(columns, width):
    code = "from experiments.console import CONSOLE; print(CONSOLE.width)"
    environment = os.environ | {"COLUMNS": columns}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert int(done.stdout) == width, done.stderr


def test_rows_of_a_wide_table_can_be_told_apart_in_each_of_its_parts(monkeypatch, capsys):
    tasks = [("t5/1-baseline", half) for half in ("reading", "language")] + [("t5/4-objective", "reading")]
    keys = {"table": [Cell(table) for table, _ in tasks], "tasks": [Cell(half) for _, half in tasks]}
    numbers = {f"a column of number {i}": [Cell("0")] * 3 for i in range(6)}
    assert key_columns(keys | numbers) == 2 and key_columns({"row": keys["tasks"][:2]} | numbers) == 1
    monkeypatch.setattr(console, "CONSOLE", Console(width=80, file=sys.stdout))
    show_sheet("a table", keys | numbers)
    parts = capsys.readouterr().out.split("(columns: part")[1:]
    assert len(parts) > 1
    for part in parts:
        assert all(any(table in x and half in x for x in part.splitlines()) for table, half in tasks)


def test_a_sheet_is_narrowed_to_the_terminal_by_its_last_metrics_and_keeps_the_first(monkeypatch):
    heads = [f"metric {number}" for number in range(20)]
    sheet = {head: [Cell("1.0 ± 0.1")] for head in ("row", *heads, "seeds")}
    monkeypatch.setattr("experiments.console.CONSOLE", Console(width=80))
    assert [*narrowed(sheet, heads)] == ["row", *heads[:5], "seeds"]
    monkeypatch.setattr("experiments.console.CONSOLE", Console(width=8))
    assert [*narrowed(sheet, heads)] == ["row", heads[0], "seeds"]
    monkeypatch.setattr("experiments.console.CONSOLE", Console(width=800))
    assert narrowed(sheet, heads) == sheet


def test_a_sheet_of_wide_characters_is_split_so_that_each_part_fits(monkeypatch, capsys):
    sheet = {"row": [Cell("a"), Cell("b")]} | {f"列{i}": [Cell("語" * 9)] * 2 for i in range(6)}
    monkeypatch.setattr(console, "CONSOLE", Console(width=60, file=sys.stdout))
    show_sheet("a table", sheet)
    said = capsys.readouterr().out
    assert said.count("語" * 9) == 2 * 6 and max(map(cell_len, said.splitlines())) <= 60
