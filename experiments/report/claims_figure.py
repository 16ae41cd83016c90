"""The figure of claims: each table's verdicts as a bar, and whether its rows are in the paper's order."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.figures.spec import FigureSpec
from experiments.report.comparison import UNCOMPARED
from experiments.report.metrics import GROUP_TITLES, Budget, Group
from experiments.report.prediction import MALFORMED, malformed, read_tables
from experiments.report.text import BUDGET_TITLES
from lm.config.base import SettingError

VERDICTS = ("confirmed", "contradicted", "undecided", "not compared")
# distinguishable with every kind of color vision, and in gray (Okabe and Ito 2008)
COLORS = {
    "confirmed": "#0072B2",
    "contradicted": "#E69F00",
    "undecided": "#D9D9D9",
    "not compared": "#FFFFFF",
}
TEXT_COLORS = {"confirmed": "white"}  # of numbers in bars; others are black
FONT_SIZE = 33  # half an inch, to be readable where a page shows the picture 400 pixels wide [points]
INCHES = (17.0, 8.2)


@dataclass(frozen=True)
class TableClaims:
    """The verdicts on a table's claims, and how its rows are ordered."""

    table: str
    counts: Mapping[str, int]  # each of VERDICTS -> claims
    # Kendall's tau of our rows after training with the paper's; None for two rows and for other budgets
    tau: float | None


def count_claims(tables: Mapping[str, Any], budget: Budget, group: Group) -> list[TableClaims]:
    """Return the verdicts on the claims of each table of ``results.json`` that has any in this group."""
    counted = []
    for name, table in tables.items():
        judged = [claim["verdicts"].get(group) for claim in table["claims"]]
        words = [by_budget[budget]["verdict"] for by_budget in judged if by_budget]
        verdicts = Counter(_verdict(word) for word in words if word != "other tasks")
        if verdicts:
            order = table["order"].get(group) if budget == "updates" else None
            tau = order["tau"] if order else None
            counted.append(TableClaims(name, {word: verdicts[word] for word in VERDICTS}, tau))
    return counted


def _verdict(word: str) -> str:
    if word in UNCOMPARED:
        return "not compared"
    return "undecided" if word == "equivalent" else word


@dataclass(frozen=True, kw_only=True)
class ClaimsFigure(FigureSpec):
    """The verdicts on a paper's claims, one bar per table, and Kendall's tau of its rows with the paper's."""

    results: tyro.conf.Positional[Path]  # results.json of a report
    equal: Literal["updates", "FLOP"] = "updates"  # what rows spent equally when they are compared
    tasks: Group = "reading"  # the tasks that claims are judged on

    def claims(self) -> list[TableClaims]:
        """Return what is drawn; SettingError if there are no claims."""
        tables = read_tables(self.results)
        try:
            claims = count_claims(tables, self.equal, self.tasks)
        except MALFORMED as error:
            raise malformed(self.results, error) from error
        if not claims:
            judged = [repr(group) for group in GROUP_TITLES if count_claims(tables, self.equal, group)]
            raise SettingError(
                f"{self.results} has no verdicts on claims by --tasks {self.tasks!r}; it has some by "
                f"{', '.join(judged) or 'none'}"
            )
        return claims

    def description(self) -> str:
        """Return the numbers as JSON."""
        return json.dumps(
            {"equal": self.equal, "tasks": self.tasks, "tables": [asdict(each) for each in self.claims()]}
        )

    def figure(self) -> Figure:
        claims = self.claims()
        figure = Figure(figsize=INCHES)
        figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.2)
        axes = figure.subplots()
        for y, each in enumerate(claims):
            _draw_bar(axes, y, each)
        axes.set_yticks(range(len(claims)), [_label(each) for each in claims], fontsize=FONT_SIZE)
        axes.set_ylim(len(claims) - 0.5, -0.5)
        axes.set_xlim(0, 1.16)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
        heads = [
            (-0.01, "right", "Table"),
            (0.02, "left", f"claims, {BUDGET_TITLES[self.equal]}, {GROUP_TITLES[self.tasks]}"),
            (1.16, "right", "τ with paper" if self.equal == "updates" else ""),
        ]
        for x, side, head in heads:
            axes.text(x, -0.55, head, ha=side, va="bottom", fontsize=FONT_SIZE)
        drawn = [word for word in VERDICTS if any(each.counts[word] for each in claims)]
        handles = [Patch(facecolor=COLORS[word], edgecolor="black", label=word) for word in drawn]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            fontsize=FONT_SIZE,
            frameon=False,
            handlelength=1,
            handletextpad=0.4,
            columnspacing=1.2,
        )
        return figure


def _label(claims: TableClaims) -> str:
    """Return "2 architecture" for "t5/2-architecture"."""
    return claims.table.rpartition("/")[2].replace("-", " ", 1)


def _draw_bar(axes: Axes, y: int, claims: TableClaims) -> None:
    """Draw the shares of a table's verdicts with their counts, and its tau to the right."""
    total, left = sum(claims.counts.values()), 0.0
    for word, count in claims.counts.items():
        if count:
            share = count / total
            axes.barh(y, share, left=left, height=0.74, color=COLORS[word], edgecolor="black", linewidth=1.5)
            middle = left + share / 2
            color = TEXT_COLORS.get(word, "black")
            axes.text(middle, y, str(count), ha="center", va="center", color=color, fontsize=FONT_SIZE)
            left += share
    text = "" if claims.tau is None else f"{claims.tau:z.2f}".replace("-", "−")
    axes.text(1.16, y, text, ha="right", va="center", fontsize=FONT_SIZE)
