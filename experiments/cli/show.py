"""``lm list``, ``show``, ``diff`` and ``report``: what only needs settings and finished runs."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.markup import escape

from experiments.cli.usage.arguments import (
    FLAT,
    StartOption,
    first_word,
    named_settings,
    option,
    ordered,
    parse,
    scale_of,
)
from experiments.console import CONSOLE, NARROW, RUNS, listing, print_line
from experiments.report.results import results
from experiments.runs.stages import Stage, saved_steps
from experiments.runs.stages import stages as stages_of_run
from experiments.starts import started_from
from experiments.study.changes import Overrides
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.overrides import overrides_of
from experiments.study.paths import run_folder
from experiments.study.plugins import study_arguments
from experiments.study.registry import baseline_of, build, find, find_one, registered, tables_of
from experiments.study.scales import DEFAULT_SCALE
from experiments.study.settings_diff import relevant_diff
from experiments.study.words import setting_words
from lm.config.base import SettingError, at_least, changes, comments, leaves
from lm.config.model import ModelConfig
from lm.nn.presets import PRESETS

STARTS = {"count": "no counts"}  # kind of a stage without a parent -> what it starts from


def show_rows(
    pattern: str = "*", /, scale: str = DEFAULT_SCALE, runs: Path = RUNS, names: bool = False
) -> None:
    """List the rows of the study, what each changes, and how many seeds of it have finished.

    Args:
        pattern: shell-style pattern over rows and tables, such as 't5/6-*'.
        scale: size of the study.
        runs: folder that holds the runs.
        names: print the names alone, one a line.
    """
    rows = find(pattern)
    if names:
        print("\n".join(row.name for row in rows))
        return
    for table in tables_of(rows):
        prefix = f"{table.name}/" if CONSOLE.width < NARROW else ""
        title = f"{table.name}{'/ROW' * bool(prefix)}: {table.title}"
        label = "in the paper" if any(row.published for row in table.rows) else "label"
        listed = listing("row", label, "changes", "finished", title=title)
        for row in (row for row in table.rows if row in rows):
            changed = relevant_diff(build(baseline_of(row.name), scale), build(row.name, scale))
            new = []
            for path, (_, value) in changed.items():
                number = f"{value:.4g}" if type(value) is float else str(value)
                derivation = row.derivation(path)
                new.append(f"{path}={number} ({derivation})" if derivation else f"{path}={number}")
            text = ", ".join(new) or "(the baseline)"
            finished = len(results(row, scale, runs, complain=lambda line: None))
            listed.add_row(
                row.name.removeprefix(prefix),
                escape(row.label),
                escape(text),
                f"{finished} seed{'s' * (finished != 1)}",
            )
        CONSOLE.print(listed)


@dataclass(frozen=True)
class CostedRows:
    """The rows for which costs are shown."""

    # of a row with --costs, on each side of an encoder-decoder; None: 2,048, or
    # model.positions.max_length where positions are learned and that is less [tokens]
    length: int | None = None
    batch: int = 1  # that are decoded at once, with --costs [rows]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the cache, with --costs
    tokens: float = 0  # that the model is trained on, with --costs, such as 3e11; 0: none [tokens]


def show_command(arguments: Sequence[str]) -> None:
    """Show every setting of a row or a published model, the stages of its run, or what the model costs."""

    def show(
        row: str,
        /,
        settings: Annotated[Experiment, FLAT] = BASELINE,
        scale: str = DEFAULT_SCALE,
        stages: bool = False,
        costs: bool = False,
        runs: Path = RUNS,
        rows: Annotated[CostedRows, FLAT] = CostedRows(),
    ) -> None:
        """Show every setting of a row or a published model, the stages of its run, or what the model costs.

        Settings given here change the row, as for lm run; of a published model those of model.

        Args:
            row: row of the registry, such as t5/6-corruption-rate/15, or published size, such as llama-7b.
            scale: size of the study.
            stages: show the stages of training instead: what each starts from, its steps and its folder.
            costs: show instead the model's parameters, its arithmetic for a token, and its cache's bytes.
            runs: folder that holds the runs, for the steps that are saved.
        """
        given, published = named_settings(arguments, settings), row in PRESETS
        if published and (strange := [path for path in given if not path.startswith("model.")]):
            raise SettingError(f"{row} is a published model, which has no setting {' and no '.join(strange)}")
        if published and stages:
            raise SettingError(f"{row} is a published model: --stages are of rows of the study")
        title = f"{row}, as published" if published else f"{row} at scale {scale}"
        title += f" with {shlex.join(setting_words(given))}" * bool(given)
        if costs:
            show_costs(settings.model, title, rows)
        elif stages:
            folder = run_folder(runs, scale, row, settings.seed, overrides_of(row, scale, settings))
            show_stages(stages_of_run(settings, folder, runs / scale), title)
        else:
            show_settings(settings.model if published else settings, title)

    arguments = ordered(show, arguments)
    row, scale = first_word(arguments), scale_of(arguments)
    default = replace(BASELINE, model=PRESETS[row]) if row in PRESETS else build(row, scale)
    parse(show, "lm show", arguments, default)


def show_settings(settings: Any, title: str) -> None:
    """A line for each setting, with its meaning and unit, below its value if there is little room."""
    meaning, heads = comments(type(settings)), ("value", "meaning [unit]")
    narrow = CONSOLE.width < NARROW
    grid = listing("setting", *[", ".join(heads)] if narrow else heads, title=title)
    for path, value in leaves(settings):
        said = escape(str(value)), escape(meaning.get(path, ""))
        grid.add_row(path, *["\n".join(filter(None, said))] if narrow else said)
    CONSOLE.print(grid)


def show_costs(model: ModelConfig, title: str, rows: CostedRows) -> None:
    """Print the costs of training and decoding, from the settings alone: nothing is compiled."""
    from lm.train.flops import cache_bytes, costs, longest_row  # needs jax, which settings do not

    at_least(rows, "--", length=1, batch=1, tokens=0)
    model = changes(model, {"dtype": rows.dtype, "attention.implementation": "auto"})
    length = longest_row(model, 2_048) if rows.length is None else rows.length
    found = costs(model, length)
    grid = listing("what", "how much", title=f"{title}: rows of {length:,} tokens")
    grid.add_row("parameters N", f"{found.parameters:,}")
    share = f"{found.scores / found.training:.1%} of it attention's scores"
    passes = (found.training - found.scores) / found.parameters
    grid.add_row("training, a token", f"{found.training:.4g} FLOP: {passes:.3g} N, and {share}")
    if rows.tokens:
        total, products = (each * rows.tokens for each in (found.training, found.training - found.scores))
        share = f"{products:.4g} of it {passes:.3g} N D"
        grid.add_row(f"training on {rows.tokens:.4g} tokens D", f"{total:.4g} FLOP, {share}")
    if model.has_decoder:
        token = found.cache - cache_bytes(model, length - 1, length)
        grid.add_row("generating, a token", f"{found.generating:.4g} FLOP")
        grid.add_row("cache of a token", f"{binary(token)} in {rows.dtype}")
        grid.add_row(f"cache of {rows.batch:,} such rows", binary(rows.batch * found.cache))
    CONSOLE.print(grid)


def binary(count: int) -> str:
    """``524288`` as ``512 KiB``."""
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def show_stages(stages: Sequence[Stage], title: str) -> None:
    """A line for each stage: what it is trained on, what it starts from, its steps and its folder."""
    grid = listing("stage", "trained on", "starts from", "steps", "saved", "folder", title=title)
    for stage in stages:
        reads = stage.kind in ("pretrain", "vectors") or (stage.kind == "count" and not stage.on)
        corpus = reads and stage.settings.mixing.pretraining != "tasks"
        data = ", ".join((stage.settings.data.corpus, *stage.on) if corpus else stage.on)
        parent = stage.parent.name if stage.parent else STARTS.get(stage.kind, "random parameters")
        if stage.parent and stage.parent_step != stage.parent.training.steps:
            parent += f", step {stage.parent_step:,}"
        saved = max(saved_steps(stage.folder), default=0)
        counts = (f"{number:,}" for number in (stage.training.steps, saved))
        grid.add_row(stage.name, escape(data), parent, *counts, str(stage.folder))
    CONSOLE.print(grid)


def diff_command(arguments: Sequence[str]) -> None:
    """Show the settings in which a row differs from another, or from itself at another scale."""

    def compare(
        row: str,
        other: str = "",
        /,
        settings: Annotated[Experiment, FLAT] = BASELINE,
        scale: str = DEFAULT_SCALE,
        to: str = "",
    ) -> None:
        """Show the settings in which a row differs from another, or from itself at another scale.

        Settings given here change ROW, as for lm run.

        Args:
            row: row of the registry.
            other: row to compare with; by default the paper's baseline, or the first row of another table.
            scale: size of the study.
            to: scale to compare with: what changes from --scale to this one, of the row or from it to the
                other.
        """
        show_diff(row, other, scale, to, named_settings(arguments, settings))

    arguments = ordered(compare, arguments)
    parse(compare, "lm diff", arguments, build(first_word(arguments), scale_of(arguments)))


def show_diff(row: str, other: str, scale: str, to: str, changes: Overrides) -> None:
    """Print what differs between ``row`` with ``changes``, wherever it stands, and another row or scale."""
    find_one(row)
    if to:
        pair = ((row, scale), (other or row, to))
    else:
        pair = ((other or baseline_of(row), scale), (row, scale))
    is_row = [name == row and (bool(to) or place == 1) for place, (name, _) in enumerate(pair)]
    built = [build(*each, changes if own else {}) for each, own in zip(pair, is_row, strict=True)]
    changed = relevant_diff(*built)
    if not changed:
        (old_row, old_scale), (new_row, new_scale) = pair
        at = f"at scale {scale}" if old_scale == new_scale else f"at scales {old_scale} and {new_scale}"
        CONSOLE.print(f"{new_row} and {old_row} are the same experiment {at}.")
    for path, (old, new) in changed.items():
        derivation = "" if to else find_one(row).derivation(path)
        CONSOLE.print(f"{path}: {old} → {new}{f' ({derivation})' * bool(derivation)}", highlight=False)


@dataclass(frozen=True)
class ReportOptions(StartOption):
    """Options of what lm report shows, and how often."""

    watch: bool = False  # write it again whenever a run makes progress, until interrupted
    # show runs with settings given by hand too, each combination as a row beside its own
    variants: bool = False
    latex: bool = False  # write its tables as report.tex too
    pictures: Literal["png", "svg", "pdf"] = "png"  # write its pictures in this format too


def report_command(arguments: Sequence[str]) -> None:
    """Write the tables of all finished runs beside the paper's: Markdown, a web page, data and pictures."""

    def report(
        pattern: str = "t5/*",
        /,
        settings: Annotated[Experiment, FLAT] = BASELINE,
        scale: str = DEFAULT_SCALE,
        runs: tuple[str, ...] = (str(RUNS),),
        options: Annotated[ReportOptions, FLAT] = ReportOptions(),
    ) -> None:
        """Write the tables of all finished runs beside the paper's: Markdown, a web page, data and pictures.

        Settings given here are those that the runs were swept with.

        Args:
            pattern: shell-style pattern over rows and tables.
            scale: size of the study.
            runs: one or more folders that hold runs, gs:// included; the report goes into the first.
        """
        from experiments.report import report  # whose pictures and page need more than listing rows does
        from experiments.report.variants import homes_of, with_variants

        wanted, changes = tables_of(find(pattern)), started | named_settings(arguments, settings)
        if options.variants and changes:
            raise SettingError(f"--variants shows all settings given by hand: leave out {', '.join(changes)}")
        if options.variants:
            wanted = with_variants(wanted, scale, runs, print_line)
        with registered(homes_of(wanted, scale)):
            if options.watch:
                report.watch(wanted, scale, runs, overrides=changes)
            else:
                said = shlex.join(["lm", *study_arguments(), "report", *arguments])
                written = report.print_report(wanted, scale, runs, changes, said)
                if options.pictures != "png":
                    print_line(f"Pictures: {', '.join(report.write_pictures(written, options.pictures))}")
                if options.latex:
                    print_line(f"LaTeX: {report.write_latex(written)}")

    arguments = ordered(report, arguments)
    started = started_from(option(arguments, "--start", ""), Path(option(arguments, "--runs", str(RUNS))))
    first = find(first_word(arguments, "t5/*"))[0].name
    parse(report, "lm report", arguments, build(first, scale_of(arguments), started))
