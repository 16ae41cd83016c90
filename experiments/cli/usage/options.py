"""What a command takes, read from the signature of its function: what stands in a place, and its options."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lm.config.base import comments

NO_DEFAULT = inspect.Parameter.empty  # the default of what has none
NAMED = {  # last part of a name -> what its value is called
    "allow": "WHAT",
    "corpus": "CORPUS",
    "heads": "TASK",
    "mesh": "AXES",
    "mixture": "MIXTURE",
    "mixtures": "MIXTURE",
    "run": "RUN",
    "runs": "FOLDER",
    "scale": "SCALE",
    "size": "SIZE",
    "split": "SPLIT",
    "stage": "STAGE",
    "task": "TASK",
    "tasks": "TASKS",
    "to": "SCALE",
    "topology": "SLICE",
    "vocabulary": "VOCABULARY",
}
WIDEST_CHOICE = 40  # choices that are listed beside the flag [characters]
KINDS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


class Taken(NamedTuple):
    """One argument of a command."""

    name: str  # "row" of what stands in a place, "model.mlp.d_ff" of an option
    kind: Any  # its type
    default: Any  # or NO_DEFAULT
    in_place: bool  # known by its place, not by a flag

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    @property
    def scalar(self) -> Any:
        """The type of a value, of which there may be several, or None."""
        kind = typing.get_args(self.kind)[0] if self.several else self.kind
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(part for part in typing.get_args(kind) if part is not type(None))
        return kind

    @property
    def choices(self) -> tuple[str, ...]:
        """What its value may be; empty if it may be anything of its kind."""
        return (
            tuple(map(str, typing.get_args(self.scalar))) if typing.get_origin(self.scalar) is Literal else ()
        )

    @property
    def value(self) -> str:
        """What its value is called in the help."""
        if self.in_place:
            word = self.name.upper()
        elif (last := self.name.rpartition(".")[2]) in NAMED:
            word = NAMED[last]
        elif self.choices:
            word = f"{{{','.join(self.choices)}}}"
            word = "CHOICE" if len(word) > WIDEST_CHOICE else word
        else:
            word = KINDS.get(self.scalar, "VALUE")
        return f"{word} [{word} ...]" if self.several and len(word) < 20 else word


def options_of(function: Callable) -> list[Taken]:
    """The arguments of a command in the order of its signature; those of nested dataclasses one by one."""
    return [taken for name, parameter in _parameters(function) for taken in _taken(name, parameter)]


def meanings_of(function: Callable) -> dict[str, str]:
    """``{name: meaning}`` of all arguments: from the docstring, and the comments of dataclasses."""
    found = comments(function) if inspect.isclass(function) else documented(inspect.getdoc(function) or "")
    for name, parameter in _parameters(function):
        kind, marks = _unmarked(parameter.annotation)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            prefix = "" if _is_flat(marks) else f"{name}."
            found |= comments(kind, prefix) | _meanings_of_flat(kind, prefix)
    return found


def _meanings_of_flat(cls: type, prefix: str) -> dict[str, str]:
    """Of the fields of a dataclass whose own fields are options beside them."""
    hints = typing.get_type_hints(cls, include_extras=True)
    flat = [kind for kind, marks in map(_unmarked, hints.values()) if _is_flat(marks)]
    return {name: meaning for kind in flat for name, meaning in comments(kind, prefix).items()}


def documented(text: str) -> dict[str, str]:
    """``{name: meaning}`` of the section Args of a docstring."""
    found: dict[str, str] = {}
    name = ""
    for line in text.partition("\nArgs:\n")[2].splitlines():
        depth = len(line) - len(line.lstrip())
        if depth == 4 and ":" in line:
            name, _, meaning = line.strip().partition(": ")
            found[name] = meaning
        elif depth > 4 and name:
            found[name] += f" {line.strip()}"
    return found


def _parameters(function: Callable) -> Iterator[tuple[str, inspect.Parameter]]:
    yield from inspect.signature(function).parameters.items()


def _unmarked(annotation: Any) -> tuple[Any, tuple]:
    """The type, and what Annotated says besides."""
    return getattr(annotation, "__origin__", annotation) if (
        marks := getattr(annotation, "__metadata__", ())
    ) else annotation, marks


def _is_flat(marks: tuple) -> bool:
    return any(getattr(mark, "name", None) == "" for mark in marks)


def _taken(name: str, parameter: inspect.Parameter) -> Iterator[Taken]:
    kind, marks = _unmarked(parameter.annotation)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield from _fields(kind, parameter.default, "" if _is_flat(marks) else f"{name}.")
    else:
        in_place = parameter.kind is parameter.POSITIONAL_ONLY or any("ositional" in str(m) for m in marks)
        yield Taken(name, kind, parameter.default, in_place)


def _fields(cls: type, default: Any, prefix: str) -> Iterator[Taken]:
    """Of a dataclass, whose values are those of ``default``, unless that is NO_DEFAULT."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        value = field.default if default is NO_DEFAULT else getattr(default, field.name)
        value = NO_DEFAULT if value is dataclasses.MISSING else value
        kind, marks = _unmarked(hints[field.name])
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _fields(kind, value, prefix if _is_flat(marks) else f"{prefix}{field.name}.")
        else:
            yield Taken(f"{prefix}{field.name}", kind, value, False)
