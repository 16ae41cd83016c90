"""Settings as values: change, compare, print and store nested frozen dataclasses.

A setting is addressed by its dotted path (``"model.d_ff"``). Its meaning, with its unit in square brackets,
stands once, in the comment behind its field or above it: ``comments`` reads it for ``lm show``, and tyro for
``--help``.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class SettingError(ValueError):
    """A setting is unknown or has a value it cannot take; the message names both and the mend."""


class DataError(SettingError):
    """Stored data is missing or damaged; the message names the file, the place in it, and the mend."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the choice spelt most like ``name``, or all choices when they are few."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose from {', '.join(choices)}" if 0 < len(choices) <= 20 else ""


_hints = functools.cache(typing.get_type_hints)  # a table of rows is built of thousands of changes


def set_choices(cls: type, field: str, names: Iterable[str]) -> None:
    """From now on a field of a dataclass takes these ``names``, on the command line, in rows and in files."""
    literal: Any = typing.Literal
    # Assigned whole: what is put into the dictionary is lost where Python 3.14 evaluates annotations anew.
    cls.__annotations__ = cls.__annotations__ | {field: literal[tuple(names)]}
    _hints.cache_clear()


def change(config: T, path: str, value: Any) -> T:
    """A copy of ``config`` with the setting at dotted ``path`` replaced; SettingError if there is none."""
    return changes(config, {path: value})


def changes(config: T, new: Mapping[str, Any]) -> T:
    """A copy with all settings of ``new`` replaced at once: those that depend on each other may change."""
    names = [field.name for field in dataclasses.fields(config)]
    values: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for path, value in new.items():
        head, _, rest = path.partition(".")
        if head not in names:
            raise SettingError(f"{type(config).__name__} has no setting {head!r}{nearest(head, names)}")
        if rest:
            if not dataclasses.is_dataclass(getattr(config, head)):
                raise SettingError(f"setting {head!r} is a single value and has no part {rest!r}")
            parts.setdefault(head, {})[rest] = value
        else:
            values[head] = _checked(path, value, _hints(type(config))[head])
            parts.pop(head, None)
    values |= {head: changes(values.get(head, getattr(config, head)), part) for head, part in parts.items()}
    return dataclasses.replace(config, **values)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted path, value) of a nested dataclass, in the order of declaration."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """``{path: (old value, new value)}`` of all settings that differ; None where one config lacks it."""
    before, after = dict(leaves(old)), dict(leaves(new))
    pairs = {path: (before.get(path), after.get(path)) for path in before | after}
    return {path: (value, other) for path, (value, other) in pairs.items() if value != other}


def comments(cls: type, prefix: str = "") -> dict[str, str]:
    """``{path: comment}``: the comment behind or above each field of a nested dataclass, from its source."""
    hints = typing.get_type_hints(cls)
    by_path: dict[str, str] = {}
    source = "".join(inspect.getsource(base) for base in cls.__mro__ if dataclasses.is_dataclass(base))
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            by_path |= comments(hints[field.name], f"{prefix}{field.name}.")
        elif match := re.search(rf"((?:^ +#.*\n)*)^ +{field.name}:[^#\n]*(#.*)?$", source, re.MULTILINE):
            by_path[prefix + field.name] = " ".join(re.findall(r"# *(.*)", match[2] or match[1]))
    return by_path


def to_json(config: Any) -> str:
    """The settings as indented JSON; ``from_json`` gives the same value back."""
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(cls: type[T], text: str | bytes) -> T:
    """The config that ``to_json`` wrote; newer settings have their defaults. SettingError on any other."""
    return _from_dict(cls, parse_json(text, "settings"), "")


def at_least(settings: Any, prefix: str, **least: float) -> None:
    """SettingError for a field below its least value; None passes."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise SettingError(f"{prefix}{name}={value} should be at least {bound}")


def check_numbers(config: Any) -> None:
    """SettingError for a number beyond 32 bits, in which everything is computed: there it would overflow."""
    for path, value in leaves(config):
        for number in value if isinstance(value, tuple) else (value,):
            most = {int: 2**32 - 1, float: 3.4028235e38}.get(type(number))
            if most is not None and not -most <= number <= most:
                raise SettingError(f"{path}={value} should be a number between -{most:.4g} and {most:.4g}")


def parse_json(text: str | bytes, name: Any) -> Any:
    """The value of a JSON text; SettingError with its ``name`` if it is none, or too deep or long."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{name} is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; SettingError if it cannot be read or holds anything else."""
    try:
        value = parse_json(path.read_bytes(), path)
    except (OSError, SettingError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise SettingError(f"{path} should hold values by name, not a {type(value).__name__}")
    return value


def _from_dict(cls: type[T], values: Any, prefix: str) -> T:
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(values, dict):
        raise SettingError(f"{prefix or cls.__name__} should be a group of settings, not {values!r}")
    for name in values:
        if name not in names:
            raise SettingError(f"{cls.__name__} has no setting {prefix + name!r}{nearest(name, names)}")
    hints, fields = typing.get_type_hints(cls), {}
    for name, value in values.items():
        path, kind = prefix + name, hints[name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields[name] = _from_dict(kind, value, f"{path}.")
        else:
            fields[name] = _checked(path, value, kind)
    try:
        return cls(**fields)
    except SettingError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:  # of absurd numbers
        raise SettingError(f"{prefix or cls.__name__} has values that make no sense: {error}") from error


def _checked(path: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``, an int as a float and a list as a tuple where needed; or SettingError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise SettingError(f"{path}={value!r} is not a choice{nearest(str(value), map(str, arguments))}")
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_checked(f"{path}[{i}]", item, arguments[0]) for i, item in enumerate(value))
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _checked(path, value, next(a for a in arguments if a is not type(None)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023:
        return float(value)
    fits = isinstance(kind, type) and isinstance(value, kind)
    if fits and isinstance(value, bool) == (kind is bool) and value == value:  # not NaN
        return value
    raise SettingError(f"{path}={value!r} should be of type {getattr(kind, '__name__', kind)}")
