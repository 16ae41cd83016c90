"""A report as one HTML file that loads nothing from elsewhere."""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import unquote

from markdown_it import MarkdownIt

from experiments.console import Cell, Sheet, escape_markdown, markdown
from experiments.runs.plateau import plateau_note
from experiments.runs.result import Result
from experiments.study.experiment import Experiment
from experiments.study.settings_diff import relevant_diff
from experiments.study.table import Row
from lm.config.base import SettingError
from lm.files import parse_lines_with_checksum

REFRESH = '<meta http-equiv="refresh" content="{}">'  # how often a browser reloads the page [s]
PNG = "data:image/png;base64,"
MAX_RUNS = 20  # of a row that are listed
MAX_SAMPLES, MAX_TEXT = 3, 400  # predictions per task, and characters per text


@dataclass(frozen=True)
class Section:
    """One table of a report."""

    name: str
    markdown: str
    details: Sequence[str]  # HTML, one per row


def html_page(
    header: str, sections: Sequence[Section], read_file: Callable[[str], bytes], refresh: float
) -> str:
    """Return the whole page; ``read_file`` returns the bytes of a picture that the Markdown names."""
    links = "".join(f'<a href="#{escape(section.name)}">{escape(section.name)}</a>' for section in sections)
    parts = [_html(header), f"<nav>{links}</nav>"]

    def inline_picture(source: re.Match) -> str:
        return f'src="{PNG}{b64encode(read_file(unquote(source[1]))).decode()}"'

    for section in sections:
        html = re.sub(r'src="([^":]+\.png)"', inline_picture, _html(section.markdown))
        rows = "\n".join(section.details)
        parts.append(f'<section id="{escape(section.name)}">\n{html}\n{rows}\n</section>')
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    title = escape(header.splitlines()[0].strip("# ").replace("`", ""))
    reload = REFRESH.format(round(refresh)) if refresh else ""
    return template.substitute(title=title, body="\n".join(parts), refresh=reload)


def _html(text: str) -> str:
    """Return Markdown as HTML; HTML in it is shown as text."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return html.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")


def row_details(row: Row, runs: Sequence[Result], experiment: Experiment, baseline: Experiment) -> str:
    """Return what a row changes, its runs, and samples of their predictions, folded."""
    changed = relevant_diff(baseline, experiment)
    settings = [f"- {escape_markdown(f'{path}: {old} → {new}')}" for path, (old, new) in changed.items()]
    text = ["Settings changed:\n\n" + "\n".join(settings) if settings else "The baseline."]
    listed = [
        f"- {escape_markdown(str(run.folder))}{pretraining_note(run, experiment)}" for run in runs[:MAX_RUNS]
    ]
    if len(runs) > MAX_RUNS:
        listed.append(f"- and {len(runs) - MAX_RUNS} more")
    text.append("Runs:\n\n" + "\n".join(listed))
    for task, best in runs[0].tasks.items():
        if "step" in best:
            text.append(prediction_samples(task, best["step"], runs[0]))
    body = "\n\n".join(text) + "\n"
    summary = f"<summary>{escape(row.label)} <code>{escape(row.name)}</code></summary>"
    return f"<details>{summary}\n{_html(body)}</details>"


def pretraining_note(run: Result, experiment: Experiment) -> str:
    """Return what pre-training reached on content tokens, to follow the name of a run; "" without it."""
    if run.content_loss is None or run.reference_loss is None:
        return ""
    text = f": {run.content_tokens:,} content tokens and {run.flops:.2g} FLOP of pre-training; content loss "
    text += f"{run.content_loss:.3f} nats, unigram loss {run.reference_loss:.3f}"
    text += plateau_note(run.exit_step, experiment)
    if run.top_ten_share is not None:
        text += f"; {run.top_ten_share:.0%} of its predictions are one of the ten most frequent tokens"
    return text


def prediction_samples(task: str, step: int, run: Result) -> str:
    """Return a few predictions of a run for ``task`` at its best checkpoint, as Markdown."""
    folders = run.stage_folders().values()
    ensembles = [folder.parent / "predictions" / task / "ensemble.jsonl" for folder in folders]
    files = [*ensembles, *(folder / "predictions" / task / f"{step}.jsonl" for folder in folders)]
    head = f"{escape_markdown(task)}, seed {run.seed}, step {step}:"
    try:
        file = next((file for file in files if file.exists()), None)
        lines = parse_lines_with_checksum(file.read_bytes(), file, "not shown")[:MAX_SAMPLES] if file else []
    except (SettingError, OSError) as error:
        return f"{head} {escape_markdown(str(error))}\n"
    known = set[str]().union(*lines)
    table: Sheet = {}
    for key in ("inputs", "target", "prediction"):
        if key in known:
            table[key] = [Cell(_shortened(line.get(key, ""))) for line in lines]
    return f"{head}\n\n{markdown(table)}\n" if table else f"{head} no predictions\n"


def _shortened(value: object) -> str:
    text = " / ".join(map(str, value)) if isinstance(value, list) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"
