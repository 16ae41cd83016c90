"""A report as one file for a browser: nothing is loaded from elsewhere."""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from markdown_it import MarkdownIt

from experiments.console import Cell, markdown, plain
from experiments.report.columns import leaving
from experiments.report.comparison import Curves
from experiments.runs.result import Result
from experiments.study.experiment import Experiment
from experiments.study.registry import baseline_of, build
from experiments.study.settings_diff import relevant_diff
from experiments.study.table import Row
from lm.config.base import SettingError
from lm.files import parse_lines_with_checksum

REFRESH = '<meta http-equiv="refresh" content="{}">'  # how often a browser loads the page again [s]
PNG = "data:image/png;base64,"
SAMPLES, LETTERS = 3, 400  # predictions of a task, and letters of a text


@dataclass(frozen=True)
class Section:
    """One table of a report."""

    name: str
    markdown: str
    details: Sequence[str]  # HTML, a row each


def page(top: str, sections: Sequence[Section], read_file: Callable[[str], bytes], refresh: float) -> str:
    """The whole page; ``read_file`` gives the bytes of a picture that the Markdown names."""
    links = "".join(f'<a href="#{escape(section.name)}">{escape(section.name)}</a>' for section in sections)
    parts = [_html(top), f"<nav>{links}</nav>"]

    def picture(source: re.Match) -> str:
        return f'src="{PNG}{b64encode(read_file(source[1])).decode()}"'

    for section in sections:
        html = re.sub(r'src="([^":]+\.png)"', picture, _html(section.markdown))
        rows = "\n".join(section.details)
        parts.append(f'<section id="{escape(section.name)}">\n{html}\n{rows}\n</section>')
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    title = escape(top.splitlines()[0].strip("# ").replace("`", ""))
    reload = REFRESH.format(round(refresh)) if refresh else ""
    return template.substitute(title=title, body="\n".join(parts), refresh=reload)


def _html(text: str) -> str:
    """Markdown as HTML; HTML in it is shown as text."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def details(row: Row, runs: Sequence[Result], curves: Curves, scale: str) -> str:
    """What a row changes, its runs, its curves and samples of its predictions, folded."""
    experiment = build(row.name, scale)
    changed = relevant_diff(build(baseline_of(row.name), scale), experiment)
    settings = [f"- {plain(f'{path}: {old} → {new}')}" for path, (old, new) in changed.items()]
    text = ["Settings changed:\n\n" + "\n".join(settings) if settings else "The baseline."]
    text += ["Runs:\n\n" + "\n".join(f"- {plain(str(run.folder))}{learnt(run, experiment)}" for run in runs)]
    text += [samples(task, best["step"], runs[0]) for task, best in runs[0].tasks.items() if "step" in best]
    charts = f'<div class="charts">{"".join(map(chart, curves, curves.values()))}</div>'
    html = _html("\n\n".join(text) + "\n")
    summary = f"<summary>{escape(row.label)} <code>{escape(row.name)}</code></summary>"
    return f"<details>{summary}\n{charts}\n{html}</details>"


def learnt(run: Result, experiment: Experiment) -> str:
    """What pre-training came to on content tokens, behind the name of a run; "" without pre-training."""
    if run.content_loss is None or run.reference_loss is None:
        return ""
    text = f": {run.content_tokens:,} content tokens and {run.flops:.2g} FLOP of pre-training; content loss "
    text += f"{run.content_loss:.3f} nats, {run.reference_loss:.3f} without context"
    text += leaving(run.exit_step, experiment)
    if run.top_ten_share is not None:
        text += f"; {run.top_ten_share:.0%} of its predictions are one of the ten most frequent pieces"
    return text


def samples(task: str, step: int, run: Result) -> str:
    """A few predictions of a run for ``task`` at its best checkpoint, as Markdown."""
    folders = run.phase_folders().values()
    ensembles = [folder.parent / "predictions" / task / "ensemble.jsonl" for folder in folders]
    files = [*ensembles, *(folder / "predictions" / task / f"{step}.jsonl" for folder in folders)]
    head = f"{plain(task)}, seed {run.seed}, step {step}:"
    try:
        file = next((file for file in files if file.exists()), None)
        lines = parse_lines_with_checksum(file.read_bytes(), file, "not shown")[:SAMPLES] if file else []
    except (SettingError, OSError) as error:
        return f"{head} {plain(str(error))}"
    keys = [key for key in ("inputs", "target", "prediction") if any(key in line for line in lines)]
    if not keys:
        return f"{head} no predictions\n\n"
    table = {key: [Cell(_shortened(line.get(key, ""))) for line in lines] for key in keys}
    return f"{head}\n\n{markdown(table)}"


def _shortened(value: object) -> str:
    text = " ".join((" / ".join(map(str, value)) if isinstance(value, list) else str(value)).split())
    return text if len(text) <= LETTERS else text[:LETTERS] + " …"


def chart(name: str, lines: Sequence[Sequence[tuple[float, float]]]) -> str:
    """Lines of (step, value) as an SVG of 240 x 120, with the least and the greatest value beside them."""
    steps, values = zip(*(point for line in lines for point in line), strict=True)
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    # The area of the lines is 180 wide and 90 high, and its lower left corner is at (45, 100).
    wide, tall = 180 / max(right - left, 1e-9), 90 / max(high - low, 1e-9)
    points = [[f"{45 + (x - left) * wide:.1f},{100 - (y - low) * tall:.1f}" for x, y in p] for p in lines]
    drawn = "".join(f'<polyline points="{" ".join(line)}"/>' for line in points)
    words = [(2, 14, f"{high:.4g}"), (2, 100, f"{low:.4g}"), (45, 115, f"{left:,}"), (190, 115, f"{right:,}")]
    texts = "".join(f'<text x="{x}" y="{y}">{text}</text>' for x, y, text in words)
    label = escape(name)
    svg = f'<svg viewBox="0 0 240 120" role="img" aria-label="{label}">{drawn}{texts}</svg>'
    return f"<figure><figcaption>{label}</figcaption>{svg}</figure>"
