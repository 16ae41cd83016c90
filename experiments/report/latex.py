"""Writes a report as tables that a paper can print, with the entries of BibTeX that they cite.

These tables are narrow: the mean scores of the rows beside the paper's, the score in each task, and the
verdict on each claim. A caption says what its columns mean, in which units, from how many seeds, and what is
bold. Every difference and counter is in the report's other files.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from string import ascii_lowercase

from experiments.console import LEFT_ALIGNED_HEADINGS, Cell, Sheet
from experiments.report.comparison import EQUIVALENCE_MARGIN, Comparison, Verdict, Verdicts, VerdictWord
from experiments.report.metrics import BITS_PER_BYTE, HELD_OUT_LOSS, Budget, Group
from experiments.report.statistics import ALPHA
from experiments.report.text import (
    BUDGET_TITLES,
    GROUP_TITLES,
    MISMATCH,
    OTHER_TARGETS,
    add_line,
    brief_sheet,
    denoisers_sheet,
    interval_text,
    order_sheet,
    trained_cells,
)
from experiments.study.claims import Claim, compared_columns, has_noise
from experiments.study.registry import TABLES
from experiments.study.table import Paper, pair_text

VERDICTS = ("verdict", "by ")  # beginnings of the headings of columns with verdicts
MAX_ONE_LINE = 40  # a column with a longer text is wrapped [characters]
WRAPPED = r"p{.4\linewidth}"
MAX_PAPER_COLUMNS = 3  # columns of a paper that are printed one by one
SIGNS = {  # sign -> its command in LaTeX without packages
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "τ": r"$\tau$",
    "×": r"$\times$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "−": "$-$",
    "|": r"\textbar{}",
    ">": "$>$",
    "<": "$<$",
    "[": "{[}",  # at the start of a line it would be an option of the end of the line before
    "→": r"$\to$",
    "↓": r"$\downarrow$",
    "▲": r"$\bigtriangleup$",
    "▼": r"$\bigtriangledown$",
    "†": r"$\dagger$",
    "–": "--",
    "’": "'",
    "\N{NO-BREAK SPACE}": "~",
}
LATEX_SIGNS = str.maketrans(SIGNS)
MINUS = re.compile(r"(?<![\w.])-(?=\d)")  # of a number, unlike the hyphen of a name
GROUP_MEANINGS: dict[Group, str] = {
    "reading": r"\emph{reading}: tasks that cannot be answered without their input",
    "language": r"\emph{language}: tasks on the language of a text",
}
MEANINGS: dict[VerdictWord, str] = {
    "not yet learning": "Not yet learning: a row had not left the unigram plateau.",
    "out of range": "Out of range: a row was never scored after so little training.",
    "no common seed": "No common seed: the rows were trained with different seeds.",
    "different targets": "Different targets: the rows predict other tokens.",
    "same experiment": "Same experiment: the settings given make the rows equal.",
    "other tasks": "Other tasks: the claim is not about these.",
}
HELD_OUT_UNITS = {
    HELD_OUT_LOSS: "nats per target token",
    BITS_PER_BYTE: "bits per byte of held-out documents",
}


@dataclass(frozen=True)
class LatexTable:
    """A table of LaTeX: what it shows, and its caption in LaTeX."""

    suffix: str  # of its label, such as "-claims"
    caption: str
    sheet: Sheet

    def text(self, label: str) -> str:
        """Return the table with the label ``label`` and its suffix."""
        kinds = "".join(_column_kind(head, cells) for head, cells in self.sheet.items())
        heads = " & ".join(map(escape, self.sheet))
        lines = zip(*self.sheet.values(), strict=True)
        body = "\n".join(" & ".join(map(_cell, cells)) + r" \\" for cells in lines)
        return (
            rf"\begin{{table}}\centering\caption{{{self.caption}}}\label{{{label}{self.suffix}}}" + "\n"
            rf"\begin{{tabular}}{{{kinds}}}\hline" + f"\n{heads} \\\\ \\hline\n{body} \\hline\n"
            r"\end{tabular}\end{table}" + "\n"
        )


def escape(text: str) -> str:
    """Return LaTeX that prints ``text`` as it is, with the minus sign of mathematics before numbers.

    >>> escape("15 > 50: -1.5 by t5-base")
    '15 $>$ 50: $-$1.5 by t5-base'
    """
    return "$-$".join(part.translate(LATEX_SIGNS) for part in MINUS.split(text))


def _column_kind(head: str, cells: Sequence[Cell]) -> str:
    """Return how LaTeX sets a column: texts at the left, in several lines where they are long."""
    if head not in LEFT_ALIGNED_HEADINGS and not head.startswith(VERDICTS):
        return "r"
    return WRAPPED if max(len(cell.text) for cell in cells) > MAX_ONE_LINE else "l"


def _cell(cell: Cell) -> str:
    return rf"\textbf{{{escape(cell.text)}}}" if cell.bold else escape(cell.text)


# ---- the tables of a report


def latex_tables(comparison: Comparison, verdicts: Verdicts, scores: Sheet, setup: str) -> list[LatexTable]:
    """Return the tables of one table of a report.

    scores: the sheet of ``text.scores_sheet``, with the baseline (``Comparison.including_baseline``).
    setup: the scale and the settings of every row, in words, for the captions.
    """
    tables = [scores_table(comparison, scores, setup), task_scores_table(comparison, scores, setup)]
    tables.append(order_table(comparison, setup))
    tables += [claims_table(comparison, verdicts, budget, setup) for budget in BUDGET_TITLES]
    if (denoisers := denoisers_sheet(comparison)) is not None:
        caption = f"{_title(comparison, setup)}. Held-out loss of each denoiser [nats per target token]."
        tables.append(LatexTable("-denoisers", caption, denoisers))
    return [table for table in tables if table is not None]


def scores_table(comparison: Comparison, scores: Sheet, setup: str) -> LatexTable:
    """Return the rows that were trained, and the baseline, with their mean scores beside the paper's."""
    comparison = comparison.including_baseline()
    sheet = brief_sheet(comparison, scores)
    seeds = sheet.pop("seeds")
    counts = {cell.text for cell in seeds}
    if len(counts) > 1:
        sheet["seeds"] = seeds
    sentences = [f"{_title(comparison, setup)}, {_seeds_text(counts)}."]
    baseline = f"the baseline ({escape(comparison.baseline_row.label)})"
    halves = [meaning for group, meaning in GROUP_MEANINGS.items() if group in sheet]
    if halves:
        sentences.append(
            f"Mean distance from {baseline} over tasks, in standard deviations of a run; {'; '.join(halves)}."
        )
    sentences += _unit_sentences(sheet)
    if "paper" in sheet:
        sentences.append(
            rf"\emph{{paper}}: mean distance from {baseline} of the scores of {_cite(comparison)}, in "
            "standard deviations of a run of its baseline; higher is better."
        )
    else:
        _add_paper_columns(comparison, scores, sheet, sentences)
    sentences += _sign_sentences(comparison, sheet)
    return LatexTable("", " ".join(sentences), sheet)


def _unit_sentences(metrics: Collection[str]) -> list[str]:
    """Return a sentence on the units of those of the metrics that are measured on held-out text."""
    units = [rf"\emph{{{escape(name)}}}: {unit}" for name, unit in HELD_OUT_UNITS.items() if name in metrics]
    return [f"{'; '.join(units)}; lower is better."] if units else []


def _sign_sentences(comparison: Comparison, sheet: Sheet) -> list[str]:
    """Return a sentence on each sign in the cells of a sheet of scores."""
    shown = "".join(cell.text for cell in chain.from_iterable(sheet.values()))
    sentences = []
    if "±" in shown:
        sentences.append(r"$\pm$: standard deviation over seeds.")
    if "▲" in shown or "▼" in shown:
        sentences.append(
            r"$\bigtriangleup$, $\bigtriangledown$: significantly better, worse than the baseline "
            f"({escape(comparison.baseline_row.label)}; family-wise error rate {ALPHA:g})."
        )
    if MISMATCH in shown:
        sentences.append(r"$\neq$: trained with different data, code or packages than most rows.")
    if OTHER_TARGETS in shown:
        sentences.append("*: measured on other tokens than the baseline's, with which it is not comparable.")
    if "≤" in shown:
        sentences.append(r"$\leq$: an upper bound.")
    return sentences


def _add_paper_columns(comparison: Comparison, scores: Sheet, sheet: Sheet, sentences: list[str]) -> None:
    """Add the columns by which the paper compares rows to ``sheet``, if they are few, and explain them."""
    columns = compared_columns(comparison.table)
    known = [column for column in columns if f"paper's {column.name}" in scores]
    if not known or len(known) > MAX_PAPER_COLUMNS:
        return
    has_bold = False
    for column in known:
        head = f"paper's {column.name}"
        sheet[head] = trained_cells(comparison, scores[head])
        has_bold |= any(cell.bold for cell in sheet[head])
    units = "; ".join(f"{escape(column.name)}: {escape(column.unit)}" for column in known if column.unit)
    what = rf"\emph{{paper's}}: the scores of {_cite(comparison)}"
    sentences.append(f"{what} ({units})." if units else f"{what}.")
    if has_bold:
        best = "within two standard deviations of the best score" if has_noise(comparison.table) else "best"
        sentences.append(f"Bold: {best} of the paper's column.")


def task_scores_table(comparison: Comparison, scores: Sheet, setup: str) -> LatexTable | None:
    """Return the score of each trained row in each task, in the task's own unit; None without tasks.

    scores: as in ``scores_table``. Tasks are lines, unless there are fewer of them than rows.
    """
    if not comparison.has_tasks:
        return None
    comparison = comparison.including_baseline()
    labels = [row.label for row in comparison.trained_rows]
    titles = [metric.title for metric in comparison.metrics]
    by_task = {title: trained_cells(comparison, scores[title]) for title in titles}
    if len(labels) > len(titles) or len({*labels}) < len(labels):
        sheet = {"row": [*map(Cell, labels)]} | by_task
    else:
        sheet = {"task": [*map(Cell, titles)]}
        for label, cells in zip(labels, zip(*by_task.values(), strict=True), strict=True):
            sheet[label] = [*cells]
    counts = {cell.text for cell in trained_cells(comparison, scores["seeds"])}
    sentences = [f"{_title(comparison, setup)}, {_seeds_text(counts)}. Score in each task."]
    sentences += _unit_sentences(titles)
    sentences += _sign_sentences(comparison, sheet)
    return LatexTable("-tasks", " ".join(sentences), sheet)


def order_table(comparison: Comparison, setup: str) -> LatexTable | None:
    """Return Kendall's tau of our order of rows with the paper's; None without an order."""
    sheet = order_sheet(comparison)
    if sheet is None:
        return None
    caption = (
        f"{_title(comparison, setup)}: Kendall's $\\tau$ of the order of our rows with that of "
        f"{_cite(comparison)}, with its 95\\,\\% interval over seeds and examples. "
        r"\emph{p}: the probability of a $\tau$ as far from 0 if all orders were equally likely. "
        r"\emph{a repeat of the paper}: the mean $\tau$ of a simulated rerun of it, with its own noise."
    )
    heads = {"tau": "τ"}
    return LatexTable("-order", caption, {heads.get(head, head): cells for head, cells in sheet.items()})


def claims_table(comparison: Comparison, verdicts: Verdicts, budget: Budget, setup: str) -> LatexTable | None:
    """Return each claim with the paper's difference of its rows, ours, and our verdicts.

    None without claims and, compute-matched, where none of them could be compared.
    """
    group = next(iter(verdicts))
    claims = [claim for claim, _ in verdicts[group][budget]]
    has_z = any(claim.z is not None for claim in claims)
    others: list[Group] = [other for other in verdicts if other not in (group, "both")]
    sheet: Sheet = {}
    is_compared = budget == "updates"
    words = set[VerdictWord]()
    for index, claim in enumerate(claims):
        # A claim is judged by the tasks that it is about or, if it names none that are scored, by the first
        # group.
        judge: Group = claim.tasks or group
        if judge not in verdicts:
            judge = group
        verdict = verdicts[judge][budget][index][1]
        line = {"claim": Cell(_labels_text(claim))}
        if has_z:
            line["paper"] = Cell() if claim.z is None else Cell(f"{claim.z:+z.1f}")
        line["ours"] = _difference_cell(verdict)
        line["verdict"] = _verdict_cell(verdict, "" if judge == group else f", by {GROUP_TITLES[judge]}")
        is_compared |= verdict.test is not None
        words.add(verdict.word)
        for other in others:
            by_other = verdicts[other][budget][index][1]
            line[f"by {GROUP_TITLES[other]}"] = _verdict_cell(by_other)
            words.add(by_other.word)
        add_line(sheet, line)
    if not claims or not is_compared:
        return None
    caption = _claims_caption(comparison, claims, group, others, budget, setup, has_z)
    caption += "".join(f" {meaning}" for word, meaning in MEANINGS.items() if word in words)
    if any(cell.bold for cell in chain.from_iterable(sheet.values())):
        caption += " Bold: contradicted."
    return LatexTable("-claims" if budget == "updates" else "-claims-compute-matched", caption, sheet)


def _claims_caption(
    comparison: Comparison,
    claims: Sequence[Claim],
    group: Group,
    others: Sequence[Group],
    budget: Budget,
    setup: str,
    has_z: bool,
) -> str:
    """Return what a table of claims shows, its units, its seeds, and what the verdicts mean."""
    names = set[str]().union(*(claim.names for claim in claims))
    counts = {str(len(comparison.runs[name])) for name in names}
    judges = GROUP_TITLES[group] if group == "held-out text" else f"the {GROUP_TITLES[group]} tasks"
    is_mixed = any(claim.tasks in others for claim in claims)
    of_paper = f" of {_cite(comparison)}" if comparison.table.paper else ""
    sentences = [
        f"{_title(comparison, setup)}: claims{of_paper}, {BUDGET_TITLES[budget]}, {_seeds_text(counts)}, "
        f"judged by {judges}" + (" unless another half is named." if is_mixed else ".")
    ]
    if has_z:
        sentences.append(r"\emph{paper}: difference of the published means in its standard errors.")
    sentences.append(
        r"\emph{ours}: the first row less the second, in standard deviations of a run, with the 95\,\% "
        "interval of this difference alone."
    )
    sentences += [rf"\emph{{by {GROUP_TITLES[other]}}}: the verdict by these tasks." for other in others]
    sentences.append(
        "A claim is confirmed (contradicted) if the difference is significant in its direction (in the "
        f"opposite one), with a family-wise error rate of {ALPHA:g} over all claims. Its rows are equivalent "
        f"if they differ by significantly less than {EQUIVALENCE_MARGIN:.2f}."
    )
    if any(claim.relation == "equivalent" for claim in claims):
        sentences.append(r"$\approx$: a claim that is confirmed if its rows are equivalent.")
    return " ".join(sentences)


def _labels_text(claim: Claim) -> str:
    """Return the rows of a claim by the labels that the table of scores has, such as "15% > 50%"."""
    return pair_text(claim.better.label, claim.worse.label, claim.relation)


def _difference_cell(verdict: Verdict) -> Cell:
    if verdict.test is None:
        return Cell()
    return Cell(f"{verdict.test.mean:+z.1f}{interval_text(verdict.test.low, verdict.test.high, 1)}")


def _verdict_cell(verdict: Verdict, judge: str = "") -> Cell:
    return Cell(verdict.word + judge, bold=verdict.word == "contradicted")


def _title(comparison: Comparison, setup: str) -> str:
    table = comparison.table
    return f"{escape(table.title or table.name)} (\\texttt{{{escape(table.name)}}}, {escape(setup)})"


def _seeds_text(counts: Iterable[str]) -> str:
    """Return "3 seeds per row" of the numbers of seeds that rows have."""
    known = sorted(map(int, counts))
    number = str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"
    return f"{number} {'seed' if number == '1' else 'seeds'} per row"


# ---- BibTeX


def _cite(comparison: Comparison) -> str:
    assert comparison.table.paper is not None, "rows with published scores have a paper"
    return rf"\cite{{{bibtex_key(comparison.table.paper)}}}"


def bibtex_key(paper: Paper) -> str:
    """Return the key of a paper: its first author and year, and a letter if an earlier paper has this key.

    Earlier is the paper of an earlier table, so that a key is the same in all reports.

    >>> bibtex_key(Paper("Mine", "Ångström et al. 2031", ()))
    'angstrom2031'
    """
    keys: dict[tuple[str, ...], str] = {}  # identity of a paper -> its key
    known = (table.paper for table in TABLES.values() if table.paper)
    for each in (*known, paper):
        if _identity(each) not in keys:
            keys[_identity(each)] = next(key for key in _possible_keys(each) if key not in keys.values())
    return keys[_identity(paper)]


def _identity(paper: Paper) -> tuple[str, ...]:
    """Return what tells one paper from another: all but the columns of scores, of which tables add some."""
    return paper.name, paper.citation, paper.title, paper.authors, paper.source


def _possible_keys(paper: Paper) -> Iterator[str]:
    """Yield "wang2022", "wang2022b", "wang2022c" and so on, without accents."""
    author, year = _author_and_year(paper)
    plain = unicodedata.normalize("NFKD", author.lower().partition(" et al")[0])
    key = re.sub(r"[^a-z0-9]", "", plain) + year or "paper"
    yield key
    yield from (key + letter for letter in ascii_lowercase[1:])


def _author_and_year(paper: Paper) -> tuple[str, str]:
    match = re.fullmatch(r"(.*?),?\s*(\d{4})", paper.citation)
    return (match[1], match[2]) if match else (paper.citation, "")


def bibtex(papers: Iterable[Paper]) -> str:
    """Return an entry for each paper, with what is known of it: authors, title, year and place."""
    by_key = {bibtex_key(paper): paper for paper in papers}
    return "\n".join(_entry(key, paper) for key, paper in by_key.items())


def _entry(key: str, paper: Paper) -> str:
    first, year = _author_and_year(paper)
    authors = paper.authors.replace(", ", " and ")
    if not authors:
        authors = first.replace(" et al.", " and others").replace(" & ", " and ")
    # braces within keep the capitals of the title
    title = f"{{{escape(paper.title)}}}" if paper.title else ""
    fields = {"author": authors, "title": title, "year": year}
    if match := re.fullmatch(r"arXiv (\S+)", paper.source):
        fields |= {"eprint": match[1], "archivePrefix": "arXiv", "url": f"https://arxiv.org/abs/{match[1]}"}
    elif paper.source:
        fields["howpublished"] = escape(paper.source)
    lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items() if value)
    return f"@misc{{{key},\n{lines}}}\n"
