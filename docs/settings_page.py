"""A hook of mkdocs: the page of all settings, made from their dataclasses whenever the site is built."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from experiments.cli.settings import types_of
from experiments.study.experiment import Experiment
from experiments.study.registry import BASELINE_ROW, build
from lm.config.base import conditions, leaves, setting_descriptions

PAGE = "reference/settings.md"
SCALES = ("nano", "base")
HEAD = f"""# Settings

You can give each of these settings to `lm run ROW --SETTING VALUE`, and a row of a table can change it.
`lm show ROW` prints their values for a row; `lm show ROW --diff` shows what the row changes. The two columns
of values are those of `{BASELINE_ROW}` at the scales `nano` and `base` (the paper's setup).

The column *read with* gives the values of other settings with which this one has an effect. A line above a
table holds for all settings of the table that have no entry there. If you give a setting that nothing reads,
`lm` refuses it: it would make another experiment, in another folder, with the same numbers.
A scale may set it, because a scale is for all rows.
"""


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with all files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=settings_page()))
    return files


def settings_page() -> str:
    """Return the page, in Markdown: a table for each group of settings."""
    values = [dict(leaves(build(BASELINE_ROW, scale))) for scale in SCALES]
    kinds = dict(types_of(Experiment))
    meanings, reads, groups = setting_descriptions(Experiment), conditions(Experiment), dict[str, list[str]]()
    for name in values[0]:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    about = dict(_groups(Experiment, ""))
    parts = [HEAD]
    for group, names in groups.items():
        heads = ["setting", "takes", *(f"`{scale}`" for scale in SCALES), "meaning [unit]", "read with"]
        lines = [f"## {group or 'Others'}", "", about.get(group, ""), ""] if group else ["## Others", ""]
        lines += [f"Read with {escaped(reads[group])}.", ""] if group in reads else []
        lines += [f"| {' | '.join(heads)} |", "|:---" * len(heads) + "|"]
        for name in names:
            cells = [f"`{name}`", _takes(kinds[name]), *(f"`{shown(each[name])}`" for each in values)]
            cells += [escaped(meanings[name]), escaped(reads.get(name, ""))]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _groups(cls: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each group of settings and the first paragraph on it."""
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield prefix + name, (inspect.getdoc(kind) or "").partition("\n\n")[0]
            yield from _groups(kind, f"{prefix}{name}.")


def _takes(kind: Any) -> str:
    """Return the kind of a setting's values, or all of them."""
    several = typing.get_origin(kind) is tuple
    if several:
        kind = typing.get_args(kind)[0]
    may_lack = typing.get_origin(kind) in (typing.Union, types.UnionType)
    if may_lack:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        text = ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    else:
        names = {int: "whole number", float: "number", str: "text", bool: "on or off"}
        text = names.get(kind, "JSON object")
    return f"{text}, several" if several else text + " or none" * may_lack


def escaped(text: str) -> str:
    """Return a text in which Markdown and HTML change nothing, for the cell of a table."""
    for sign, entity in {"&": "&amp;", "<": "&lt;", "|": "&#124;"}.items():
        text = text.replace(sign, entity)
    return re.sub(r"([\\*_\[\]`])", r"\\\1", text)


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value) or '""'
