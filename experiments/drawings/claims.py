"""The picture of claims: what came of them table by table, and whether rows stand in the paper's order."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.drawings.panels import Picture
from experiments.report.columns import Frame
from experiments.report.comparison import UNCOMPARED
from experiments.study.claims import standardized
from experiments.study.registry import REGISTRY, TABLES
from experiments.study.table import Row
from lm.config.base import SettingError
from lm.files import parse_with_checksum

WORDS = ("confirmed", "contradicted", "undecided", "not compared")
# told apart with every kind of colour vision, and in gray (Okabe and Ito 2008)
COLORS = {
    "confirmed": "#0072B2",
    "contradicted": "#E69F00",
    "undecided": "#D9D9D9",
    "not compared": "#FFFFFF",
}
INK = {"confirmed": "white", "contradicted": "black", "undecided": "black", "not compared": "black"}
FONT = 33  # of all words: half an inch is read where a page shows the picture 400 pixels wide [points]
INCHES = (17.0, 8.2)
FEWEST = 3  # rows of which an order can be compared


@dataclass(frozen=True)
class TableClaims:
    """What came of a table's claims, and how its rows are ordered."""

    table: str
    counts: Mapping[str, int]  # each of WORDS -> claims
    # Kendall's, of our rows at the end of training with the paper's; None of fewer rows than FEWEST, and
    # where rows are compared before their ends
    tau: float | None


def claims_of(tables: Mapping[str, Any], frame: Frame) -> list[TableClaims]:
    """Return what came of the claims of each table of ``results.json`` that has any."""
    found = []
    for name, table in tables.items():
        verdicts = Counter(_word(claim["equal"][frame]["verdict"]) for claim in table["claims"])
        if verdicts:
            order = tau(table["rows"]) if frame == "updates" else None
            found.append(TableClaims(name, {word: verdicts[word] for word in WORDS}, order))
    return found


def _word(verdict: str) -> str:
    if verdict in UNCOMPARED:
        return "not compared"
    return "undecided" if verdict == "equivalent" else verdict


def tau(rows: Mapping[str, Any]) -> float | None:
    """Return Kendall's tau between the rows' combined scores and their means in the paper."""
    from scipy.stats import kendalltau

    published = [name for name in rows if name in REGISTRY and REGISTRY[name].published]
    compared = [name for name in published if rows[name]["combined"]]
    if len(compared) < FEWEST:
        return None
    ours = [mean(rows[name]["combined"].values()) for name in compared]
    paper = [_published_mean(REGISTRY[name]) for name in compared]
    return float(kendalltau(ours, paper).statistic)


def _published_mean(row: Row) -> float:
    """Return the mean over columns of a row's published scores, in deviations of the paper's baseline."""
    paper = TABLES[row.table].paper
    assert paper is not None
    return float(standardized(row, paper).mean())


def read_tables(path: Path) -> Mapping[str, Any]:
    """Return the tables in ``results.json`` of a report; SettingError for any other file."""
    try:
        tables = parse_with_checksum(path.read_bytes(), path)["tables"]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} should be the results.json of a report: {error}") from error
    return tables


@dataclass(frozen=True, kw_only=True)
class ClaimsPicture(Picture):
    """What came of the paper's claims, a bar a table, and Kendall's tau of its rows with the paper's."""

    results: tyro.conf.Positional[Path]  # results.json of a report
    equal: Frame = "updates"  # what rows have spent as much of when they are compared

    def claims(self) -> list[TableClaims]:
        """What is drawn; SettingError if there are no claims."""
        claims = claims_of(read_tables(self.results), self.equal)
        if not claims:
            raise SettingError(f"{self.results} has no verdicts on claims: its tables are not the paper's")
        return claims

    def description(self) -> str:
        """The numbers, as JSON."""
        return json.dumps({"equal": self.equal, "tables": [asdict(each) for each in self.claims()]})

    def figure(self) -> Figure:
        claims = self.claims()
        figure = Figure(figsize=INCHES)
        figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.2)
        axis = figure.subplots()
        for place, each in enumerate(claims):
            _draw_bar(axis, place, each)
        axis.set_yticks(range(len(claims)), [_label(each) for each in claims], fontsize=FONT)
        axis.set_ylim(len(claims) - 0.5, -0.5)
        axis.set_xlim(0, 1.16)
        axis.set_xticks([])
        axis.tick_params(left=False)
        axis.spines[:].set_visible(False)
        heads = [
            (-0.01, "right", "Table"),
            (0.02, "left", f"claims after equal {self.equal}"),
            (1.16, "right", "τ with paper" if self.equal == "updates" else ""),
        ]
        for x, side, head in heads:
            axis.text(x, -0.55, head, ha=side, va="bottom", fontsize=FONT)
        drawn = [word for word in WORDS if any(each.counts[word] for each in claims)]
        handles = [axis.barh(0, 0, color=COLORS[word], edgecolor="black", label=word) for word in drawn]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            fontsize=FONT,
            frameon=False,
            handlelength=1,
            handletextpad=0.4,
            columnspacing=1.2,
        )
        return figure


def _label(claims: TableClaims) -> str:
    """``"2 architecture"`` of ``t5/2-architecture``."""
    return claims.table.rpartition("/")[2].replace("-", " ", 1)


def _draw_bar(axis: Axes, place: int, claims: TableClaims) -> None:
    """Draw the shares of a table's claims, with their numbers, and its tau behind."""
    total, left = sum(claims.counts.values()), 0.0
    for word, count in claims.counts.items():
        if count:
            share = count / total
            axis.barh(
                place, share, left=left, height=0.74, color=COLORS[word], edgecolor="black", linewidth=1.5
            )
            middle = left + share / 2
            axis.text(middle, place, str(count), ha="center", va="center", color=INK[word], fontsize=FONT)
            left += share
    text = "" if claims.tau is None else f"{claims.tau:.2f}".replace("-", "−")
    axis.text(1.16, place, text, ha="right", va="center", fontsize=FONT)
