"""The public table: the entries of each track in their order, the records, and how the best score moved.

The first entry of a track is a record. Another is one if its mean over seeds is better than that of the last
record, by Welch's one-sided t test. The k-th comparison has the level 0.05 / (k (k + 1)); these levels add up
to 0.05. So if no entry were better than the first, a table of any length would show a false record with a
probability of about 5 % at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.console import Cell, Sheet
from experiments.entries import rules
from experiments.entries.archive import SUFFIX, Archive, check_rules, read_archive
from experiments.entries.tracks import TRACKS, Track, TrackName
from experiments.figures.draw import save_figure
from lm.config.base import SettingError

ORDER_FILE = "order.txt"  # in a folder of archives: the names of accepted entries, one per line


@dataclass(frozen=True)
class Compared:
    """An entry, compared with the record of its track before it."""

    archive: Archive
    scores: np.ndarray  # [seeds]: in the unit of the track
    p: float | None  # of no improvement over the last record; None for the first entry
    is_record: bool

    @property
    def half_width(self) -> float:
        """Return half of the 95 % interval of the mean over seeds, by Student's t; 0 for equal seeds."""
        from scipy.special import stdtrit  # slow to import

        count = len(self.scores)
        return float(stdtrit(count - 1, 0.975) * self.scores.std(ddof=1) / np.sqrt(count))


def read_entries(folder: Path) -> list[Archive]:
    """Return the archives of a folder in the order of acceptance; SettingError for one of another version.

    ORDER_FILE has the names of those that were accepted, one per line. The others follow by time of sealing.
    """
    archives = [read_archive(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not archives:
        raise SettingError(f"{folder} has no archives of entries (*{SUFFIX}); lm entry run writes them")
    for archive in archives:
        check_rules(archive)
    accepted = accepted_names(folder)
    if missing := {*accepted} - {archive.name for archive in archives}:
        names = ", ".join(sorted(missing))
        raise SettingError(f"{folder / ORDER_FILE} names {names}, of which there is no archive beside it")
    places = {name: place for place, name in enumerate(accepted)}
    return sorted(
        archives,
        key=lambda each: (places.get(each.name, len(places)), each.summary["date"], each.name),
    )


def accepted_names(folder: Path) -> list[str]:
    """Return the names of the entries that were accepted, in their order; none without ORDER_FILE."""
    file = folder / ORDER_FILE
    return file.read_text().split() if file.exists() else []


def compare_tracks(archives: Sequence[Archive]) -> Mapping[TrackName, list[Compared]]:
    """Return track -> its entries in their order, for the tracks that have some."""
    entries = {
        name: [archive for archive in archives if archive.track is track] for name, track in TRACKS.items()
    }
    return {name: compare_in_order(found) for name, found in entries.items() if found}


def compare_in_order(archives: Sequence[Archive]) -> list[Compared]:
    """Return the entries of a track in their order, each compared with the last record before it."""
    compared: list[Compared] = []
    record: Compared | None = None
    for archive in archives:
        scores = np.array([score.score for _, score in sorted(archive.scores.items())])
        p = None if record is None else improvement_p(record.scores, scores, archive.track)
        is_record = p is None or p < level_of(len(compared))
        compared.append(Compared(archive, scores, p, is_record))
        if is_record:
            record = compared[-1]
    return compared


def level_of(comparison: int) -> float:
    """Return the level of a comparison, counted from 1; all levels add up to that of the rules."""
    return rules.RULES.level / (comparison * (comparison + 1))


def improvement_p(before: np.ndarray, after: np.ndarray, track: Track) -> float:
    """Return the p of Welch's one-sided t test that ``after`` [seeds] has a better mean than ``before``.

    Where neither has variance, as of two counted models, the better is better beyond doubt.
    """
    from scipy.stats import ttest_ind_from_stats  # slow to import

    if np.ptp(before) == np.ptp(after) == 0:
        return 0.0 if is_better(after[0], before[0], track) else 1.0
    samples = [moment for each in (after, before) for moment in (each.mean(), each.std(ddof=1), len(each))]
    alternative = "less" if track.lower_is_better else "greater"
    return float(ttest_ind_from_stats(*samples, equal_var=False, alternative=alternative).pvalue)


def is_better(a: float, b: float, track: Track) -> bool:
    """Return whether the score ``a`` is better than ``b``."""
    return a < b if track.lower_is_better else a > b


def table_sheet(compared: Sequence[Compared], track: Track) -> Sheet:
    """Return the table of a track, the best entry first."""
    ranked = sorted(compared, key=lambda entry: float(entry.scores.mean()), reverse=not track.lower_is_better)
    sheet: Sheet = {}

    def column(head: str, cells: list[str]) -> None:
        sheet[head] = [Cell(text, bold=each.is_record) for text, each in zip(cells, ranked, strict=True)]

    column("entry", [entry.archive.name for entry in ranked])
    digits = track.digits
    scores = [
        f"{_bound(entry)}{entry.scores.mean():.{digits}f} ± {entry.half_width:.{digits}f}" for entry in ranked
    ]
    column(track.heading, scores)
    column("p", ["–" if entry.p is None else f"{entry.p:.2g}" for entry in ranked])
    column("record", ["yes" if entry.is_record else "no" for entry in ranked])
    column("FLOP", [f"{_mean(entry, 'flops'):.2g}" for entry in ranked])
    column("size", [f"{_mean(entry, 'parameters') / 1e6:.2f} M" for entry in ranked])
    column("minutes", [_minutes(_mean(entry, "seconds")) for entry in ranked])
    return sheet


def origin_sheet(compared: Sequence[Compared]) -> Sheet:
    """Return who sent each entry and when, and the commit whose code verifies it."""
    ordered = [entry.archive for entry in compared]
    columns = {
        "entry": [archive.name for archive in ordered],
        "title": [archive.summary["entry"]["title"] for archive in ordered],
        "author": [archive.summary["entry"]["author"] for archive in ordered],
        "date": [archive.summary["date"][:10] for archive in ordered],
        "commit": [archive.summary["commit"][:7] for archive in ordered],
    }
    return {head: [Cell(text) for text in cells] for head, cells in columns.items()}


def _bound(entry: Compared) -> str:
    return "≤ " if any(score.half_width for score in entry.archive.scores.values()) else ""


def _minutes(seconds: float) -> str:
    return "< 0.1" if seconds < 6 else f"{seconds / 60:.1f}"


def _mean(entry: Compared, name: str) -> float:
    return float(np.mean([getattr(score, name) for score in entry.archive.scores.values()]))


def draw_records(tracks: Mapping[TrackName, Sequence[Compared]], out: Path) -> None:
    """Draw the entries of each track in order, and the best score until then as steps."""
    figure = Figure(figsize=(7, 4 * len(tracks)), layout="constrained")
    panels = figure.subplots(len(tracks), squeeze=False)[:, 0]
    for (name, compared), axes in zip(tracks.items(), panels, strict=True):
        _draw_track(compared, TRACKS[name], axes)
    save_figure(figure, out, "Entries of the public table in order, and the records among them")


def _draw_track(compared: Sequence[Compared], track: Track, axes: Axes) -> None:
    places = np.arange(len(compared))
    means = np.array([entry.scores.mean() for entry in compared])
    is_record = np.array([entry.is_record for entry in compared])
    best = means[is_record][np.cumsum(is_record) - 1]  # the last record, at each place
    axes.errorbar(
        places, means, [entry.half_width for entry in compared], fmt="none", ecolor="#888888", capsize=3
    )
    axes.step(places, best, where="post", color="#0072B2", label="record")
    axes.plot(places[is_record], means[is_record], "o", color="#0072B2")
    if not is_record.all():
        axes.plot(places[~is_record], means[~is_record], "o", color="#D55E00", label="no record")
    axes.set_xticks(places, [entry.archive.name for entry in compared], rotation=30, ha="right")
    axes.set_title(track.title, fontsize="medium")
    axes.set_ylabel(track.unit)
    axes.legend(frameon=False)
