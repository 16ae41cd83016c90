"""Writes a page for each paper, and one on all claims, from the tables, their scores and published reports.

    python docs/paper_pages.py

It also draws docs/pictures/claims.png. Run it when a row, a score or a choice changes, or when docs/results
has new runs: results.json of a report at scale mini, as ``mini.json`` for the T5 tables,
``mini-PAPER.json`` for others, and ``mini-PAPER-TABLE.json`` for tables reported by themselves; tables that
lack runs at mini show those at nano, ``nano-PAPER.json``. Choices that the papers leave open are rows of a
table in docs/choices.md.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.cli.list_rows import changes_text
from experiments.figures.draw import save_figure
from experiments.report.claims_figure import COLORS, TEXT_COLORS
from experiments.report.comparison import UNCOMPARED
from experiments.report.prediction import has_left_plateau
from experiments.study.claims import claims_to_test, compared_columns
from experiments.study.registry import REGISTRY, papers, tables_of_paper
from experiments.study.scales import PAPER_SCALE
from experiments.study.table import SECOND_HAND, UNSURE, Conclusion, Paper, Row, Table, pair_text
from lm.files import parse_with_checksum

DOCS = Path(__file__).parent
FOLDER, CHOICES, RESULTS = DOCS / "papers", DOCS / "choices.md", DOCS / "results"
MADE = "<!-- Made by docs/paper_pages.py; not to be edited. -->\n\n"
CHOICES_HEAD = "## Choices in other papers' rows"
CLAIMS_PAGE = "claims.md"
SCALE, SMALLER_SCALE = "mini", "nano"
TESTED = ("confirmed", "contradicted", "undecided")
VERDICTS = (*TESTED, "not run")
OPEN = ("equivalent", *UNCOMPARED)  # verdicts that settle nothing either
UNTESTABLE = "cannot be tested"
NOT_RUN_COLOR = "#F2F2F2"
PICTURE = DOCS / "pictures" / "claims.png"
MARKS = {SECOND_HAND: "†", UNSURE: "?"}
HEAD = """## Tables

The column *changes* shows the settings at scale `base`; all others are those of the paper's setup. At
`mini`, a factor such as (x 2) multiplies the value of that scale. In the paper's scores, † marks those
that we read second hand and ? those that we may have misread; ± is the half width of an interval that
the paper prints. z is the mean z-score of our runs: the difference from the baseline in [standard
deviations of a run](../words.md#words-of-this-project), ± its deviation over seeds. For tables judged by
tasks, z and the verdicts are of the tasks that need their input; [the
study](../study.md#what-came-out-at-mini) has those on language. Tables without published runs at `mini`
show those at `nano`, with one seed. These runs show that the rows train, and decide no conclusion. Their z is
too large, since one seed does not show the noise between seeds. Both columns are empty until runs are
published."""
CLAIMS_HEAD = """# Which claims hold at 10^13 FLOP

This page compares the conclusions of the papers with our runs at scale `mini`: about 10^13 FLOP of
pre-training each (FLOP_RANGE), on one core, with one to five seeds. A conclusion is *confirmed* if its
two rows differ significantly, over seeds and examples, in the paper's direction, *contradicted* if they
differ in the opposite one, and otherwise *undecided*; *equivalent* rows, which differ by less than the
paper could distinguish, count among the undecided, and so do rows that have learned no more than how
often tokens occur, *not yet learning* ([how claims are judged](../choices.md#how-claims-are-judged)).
Those of T5 are judged here by the tasks that need their input; [the
study](../study.md#what-came-out-at-mini) has the other half. We list a conclusion before we test it. A
conclusion cannot be tested if it needs a part that this code lacks, or scores that this code does not
measure."""

Results = Mapping[str, Mapping[str, Any]]  # table -> its rows and claims, as in results.json


@cache
def results_of(group: str, scale: str = SCALE) -> Results:
    """Return the published results of a paper's tables at a scale; {} before any."""
    first = RESULTS / (f"{SCALE}.json" if (group, scale) == ("t5", SCALE) else f"{scale}-{group}.json")
    tables: dict[str, Mapping[str, Any]] = {}
    for path in (first, *sorted(RESULTS.glob(f"{scale}-{group}-*.json"))):
        if path.exists():
            tables = parse_with_checksum(path.read_bytes(), path)["tables"] | tables
    return {name: table for name, table in tables.items() if "order" in table}


def grid(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    heads = [*heads]
    rows = [" | ".join(cell.replace("|", "/") for cell in cells) for cells in lines]
    line = "|:---" * len(heads) + "|"
    return "\n".join([f"| {' | '.join(heads)} |", line, *(f"| {row} |" for row in rows)])


# ---- the page of a paper


def paper_page(group: str, paper: Paper) -> str:
    """Return the page of a paper, in Markdown."""
    tables = tables_of_paper(group)
    rows = [row for table in tables for row in table.rows]
    buildable = sum(not row.needs for row in rows)
    noise = "The paper does not print the noise of its scores."
    if paper.noise:
        noise = f"Noise of the paper's scores: {paper.noise.num_runs} runs of {paper.noise.description}."
    parts = [
        f"# {paper.name}",
        f"{paper.citation}, {paper.source}. {paper.question}",
        noise,
        f"Tables: {len(tables)}. Rows: {len(rows)}; you can run {buildable} of them. List and plan them:",
        f"    lm list '{group}/*'\n    lm sweep '{group}/*' --dry-run",
        choices_of(paper),
        HEAD,
        *(table_part(table, scale_shown(group, table)) for table in tables),
    ]
    return MADE + "\n\n".join(filter(None, parts)) + "\n"


def choices_of(paper: Paper) -> str:
    """Return the choices in docs/choices.md that concern a paper; "" without any."""
    found = []
    section = CHOICES.read_text("utf-8").partition(CHOICES_HEAD)[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 4 and paper.name in re.split(r", ", cells[0]):
            found.append(cells[1:])
    if not found:
        return ""
    return "## What differs from the paper, and why\n\n" + grid(["question", "here", "why"], found)


def scale_shown(group: str, table: Table) -> str:
    """Return the scale of the runs that a page shows: the larger that a table has published runs of."""
    is_smaller = table.name not in results_of(group) and table.name in results_of(group, SMALLER_SCALE)
    return SMALLER_SCALE if is_smaller else SCALE


def table_part(table: Table, scale: str) -> str:
    """Return a table: its rows with what they change, the paper's scores and ours, and its conclusions."""
    assert table.paper is not None
    results = results_of(table.name.partition("/")[0], scale).get(table.name)
    printed = {column for row in table.rows for column in row.published}
    named = [column for column in table.paper.columns if column.name in printed]
    compared = {column.name for column in compared_columns(table)}
    heads = ["row", "in the paper", "changes"]
    heads += [f"**{column.name}**" if column.name in compared else column.name for column in named]
    heads.append(f"z at `{scale}`")
    lines = [
        [
            f"`{row.key}`",
            row.label,
            changes_text(row, PAPER_SCALE),
            *(score_text(row, column.name) for column in named),
            our_text(row, results),
        ]
        for row in table.rows
    ]
    units = "; ".join(f"{column.name}: {column.unit}" for column in named)
    parts = [f"### {table.name}: {table.title}", grid(heads, lines)]
    if units:
        parts.append(f"Units of the columns: {units}. Rows are compared by the columns in bold.")
    if table.conclusions:
        verdicts = verdicts_of(table, results)
        lines = [[each.text, code_pair(each), verdicts[each]] for each in table.conclusions]
        parts.append(grid(["conclusion", "rows", f"at `{scale}`"], lines))
    return "\n\n".join(parts)


def score_text(row: Row, column: str) -> str:
    """Return a published score with its marks."""
    if column not in row.published:
        return ""
    interval = f" ± {row.intervals[column]:g}" if column in row.intervals else ""
    return f"{row.published[column]:.6g}{interval}{MARKS.get(row.doubts.get(column, ''), '')}"


def our_text(row: Row, results: Mapping[str, Any] | None) -> str:
    """Return the mean z-score of our runs of a row on the metrics that claims are judged on first."""
    if row.needs or results is None or row.name not in results["rows"]:
        return ""
    ours = results["rows"][row.name]
    if not has_left_plateau(ours):
        return "not yet learning"
    groups = ours["combined"].values()
    values = [*next(iter(groups), {}).values()]
    if not values:
        return ""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    center = f"{mean(values):+z.2f}"
    return f"{'0.00' if center == '+0.00' else center}{spread}"


# ---- claims


def code_pair(conclusion: Conclusion) -> str:
    """Return the rows of a conclusion in Markdown, such as "`15` > `50`"."""
    return pair_text(f"`{conclusion.better}`", f"`{conclusion.worse}`", conclusion.relation)


def verdicts_of(table: Table, results: Mapping[str, Any] | None) -> dict[Conclusion, str]:
    """Return the verdict on each conclusion of a table, after training."""
    tested = {claim.pair for claim in claims_to_test(table)}
    found = {}
    for claim in results["claims"] if results else ():
        better, worse = (claim[side].rpartition("/")[2] for side in ("better", "worse"))
        by_group = claim["verdicts"].values()
        pair = pair_text(better, worse, claim.get("relation", "better"))
        found[pair] = next(iter(by_group))["updates"]["verdict"]
    verdicts = {}
    for each in table.conclusions:
        keys = each.better, each.worse
        needs = [need for key in keys for need in REGISTRY[f"{table.name}/{key}"].needs]
        if needs:
            verdicts[each] = f"needs {', '.join(dict.fromkeys(needs))}"
        elif each.pair not in tested:
            verdicts[each] = UNTESTABLE
        else:
            verdicts[each] = found.get(each.pair, "not run")
    return verdicts


def count_verdicts(group: str) -> Counter[str]:
    """Return how many conclusions of a paper have each verdict: one of VERDICTS, or UNTESTABLE."""
    words: Counter[str] = Counter()
    results = results_of(group)
    for table in tables_of_paper(group):
        for verdict in verdicts_of(table, results.get(table.name)).values():
            word = "undecided" if verdict in OPEN else verdict
            words[word if word in VERDICTS else UNTESTABLE] += 1
    return words


def claims_page() -> str:
    """Return the page on the claims of all papers, in Markdown."""
    counts, sections = [], []
    for group, paper in papers().items():
        results, words = results_of(group), count_verdicts(group)
        lines = []
        for table in tables_of_paper(group):
            verdicts = verdicts_of(table, results.get(table.name))
            for each in table.conclusions:
                printed = ", ".join(printed_pair(table, each.better, each.worse, each.column))
                lines.append([f"`{table.name}`", each.text, code_pair(each), printed, verdicts[each]])
        if lines:
            page = f"[{paper.name}]({group}.md)"
            counts.append([page, str(len(lines)), *(str(words[word]) for word in (*VERDICTS, UNTESTABLE))])
            heads = ["table", "conclusion", "rows", "printed", f"at `{SCALE}`"]
            sections.append(f"## {paper.name} ({paper.citation})\n\n{grid(heads, lines)}")
    heads = ["paper", "conclusions", *VERDICTS, UNTESTABLE]
    head = CLAIMS_HEAD.replace("FLOP_RANGE", flop_range())
    return MADE + "\n\n".join([head, grid(heads, counts), *sections]) + "\n"


def flop_range() -> str:
    """Return the least and the most FLOP of pre-training of the published runs of papers [10^13 FLOP]."""
    flops = [
        run["flops"]
        for group in papers()
        for table in results_of(group).values()
        for row in table["rows"].values()
        for run in row["seeds"].values()
        if run["flops"]  # none of a row without pre-training
    ]
    return f"{min(flops) / 1e13:.1f} to {max(flops) / 1e13:.1f}"


def printed_pair(table: Table, better: str, worse: str, column: str) -> Iterable[str]:
    """Yield "COLUMN 84.5 and 84.2" for the column of a conclusion, or those by which rows are compared."""
    for name in [column] if column else table.columns:
        scores = [REGISTRY[f"{table.name}/{key}"].published.get(name) for key in (better, worse)]
        if None not in scores:
            yield f"{name} {scores[0]:.6g} and {scores[1]:.6g}"


def claims_figure() -> Figure:
    """Draw how many conclusions have each verdict, for each paper of which at least one was tested."""
    counts = {paper.name: count_verdicts(group) for group, paper in papers().items()}
    counts = {name: words for name, words in counts.items() if any(words[word] for word in TESTED)}
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(counts)), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(counts, 0)
    shown = [verdict for verdict in VERDICTS if any(words[verdict] for words in counts.values())]
    for verdict in shown:
        widths = [words[verdict] for words in counts.values()]
        bars = axes.barh(
            [*counts], widths, left=[*left.values()], color=COLORS.get(verdict, NOT_RUN_COLOR), label=verdict
        )
        labels = [str(width) if width and verdict != "not run" else "" for width in widths]
        color = TEXT_COLORS.get(verdict, "black")
        axes.bar_label(bars, labels, label_type="center", color=color, fontsize="small")
        left = {name: left[name] + width for name, width in zip(left, widths, strict=True)}
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("conclusions of the paper that can be tested here")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(shown), fontsize="small", frameon=False)
    return figure


# ---- all pages


def pages() -> dict[Path, str]:
    """Return the path of each page and what it should hold."""
    made = {FOLDER / f"{group}.md": paper_page(group, paper) for group, paper in papers().items()}
    return made | {FOLDER / CLAIMS_PAGE: claims_page()}


def outdated() -> list[Path]:
    """Return the pages that are not as they should be, those of papers that are gone included."""
    due = pages()
    there = {path: path.read_text("utf-8") for path in FOLDER.glob("*.md")}
    return sorted(path for path in due.keys() | there.keys() if due.get(path) != there.get(path))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in outdated():
        path.unlink(missing_ok=True)
    for path, text in pages().items():
        path.write_text(text, "utf-8")
    save_figure(claims_figure(), PICTURE)
