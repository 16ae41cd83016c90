"""Settings as values: change, compare, print and store nested frozen dataclasses.

A setting is addressed by its dotted path (``"model.mlp.d_ff"``). A group is a setting that is itself a
dataclass (``model.mlp``). The meaning of a setting, with its unit in square brackets, is the comment behind
its field or above it, which ``setting_descriptions`` reads for ``lm show`` and ``--help``. A field that is
declared with ``setting`` is used only if other settings have certain values, such as ``mixer.window`` only if
``mixer.kind`` is ``window``. A setting that a user gives but that is not used is refused (``check_used``):
two experiments would differ in it and still compute the same.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Default = TypeVar("Default")


class SettingError(ValueError):
    """A setting is unknown or has an invalid value; the message names both and says what to do."""


class DataError(SettingError):
    """Stored data is missing or damaged; the message names the file, the place in it, and what to do."""


# what papers and other libraries call some choices
CHOICE_SYNONYMS = {
    "glu": "gated-sigmoid",
    "bilinear": "gated-linear",
    "reglu": "gated-relu",
    "geglu": "gated-gelu",
    "swiglu": "gated-silu",
    "swish": "silu",
}


def most_like(name: str, choices: Iterable[str]) -> str:
    """Return the choice that papers call ``name``, or else the one most like it; "" if there is none."""
    choices = [*choices]
    if CHOICE_SYNONYMS.get(name.lower()) in choices:
        return CHOICE_SYNONYMS[name.lower()]
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return close[0] if close else ""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: which of ``choices`` may be meant by ``name``.

    It is ``"; did you mean 'x'?"`` for the choice most like it, else ``"; choose from a, b"`` if there are at
    most 20 choices, else ``""``.
    """
    choices = sorted({*choices})
    if close := most_like(name, choices):
        return f"; did you mean {close!r}?"
    return f"; choose from {', '.join(choices)}" if 0 < len(choices) <= 20 else ""


MAX_INT32 = 2**31 - 1  # the largest number of steps, which are counted in int32
MIN_NORMAL_FLOAT32 = 2.0**-126  # the smallest normal float32: smaller numbers are computed as 0
_hints = functools.cache(typing.get_type_hints)  # a table of rows changes settings thousands of times
# (class, field) -> {added choice: settings that it ignores}
_ADDED: dict[tuple[type, str], dict[str, tuple[str, ...]]] = {}


def set_choices(cls: type, field: str, table: Mapping[str, Any]) -> None:
    """Make the names in ``table`` the choices of a field of a dataclass.

    They hold on the command line, in rows of a study's tables, and in files of settings. A name that an
    earlier call added and that ``table`` lacks is removed. A choice that was added is in no ``read_if``, so
    all settings that depend on this field are used with it, except those that the attribute ``ignores`` of
    its entry in ``table`` names.
    """
    literal: Any = typing.Literal
    added, previous = _ADDED.setdefault((cls, field), {}), typing.get_args(_hints(cls)[field])
    for name in added.keys() - table.keys():
        del added[name]
    new = [name for name in table if name in added or name not in previous]
    added |= {name: getattr(table[name], "ignores", ()) for name in new}
    # Replace the whole dictionary: Python 3.14 evaluates annotations again, which would lose a value that was
    # only put into the old one.
    cls.__annotations__ = cls.__annotations__ | {field: literal[tuple(table)]}
    _hints.cache_clear()


def change(config: T, path: str, value: Any) -> T:
    """Return ``config`` with the setting at dotted ``path`` replaced; raise SettingError if there is none."""
    return changes(config, {path: value})


def changes(config: T, new: Mapping[str, Any], prefix: str = "") -> T:
    """Return ``config`` with all settings of ``new`` replaced at once, so that they are checked together.

    prefix: path of ``config`` in a larger one, for errors, such as "model.".
    """
    names = [field.name for field in dataclasses.fields(config)]
    values: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    # A group that is given as a whole replaces what was given for its parts before; parts that are given
    # later change it.
    for path, value in new.items():
        head, _, rest = path.partition(".")
        if head not in names:
            raise SettingError(f"{type(config).__name__} has no setting {head!r}{did_you_mean(head, names)}")
        if rest:
            if not dataclasses.is_dataclass(getattr(config, head)):
                raise SettingError(f"setting {head!r} is a single value and has no part {rest!r}")
            groups.setdefault(head, {})[rest] = value
        else:
            values[head] = _checked(prefix + path, value, _hints(type(config))[head])
            groups.pop(head, None)
    for head, group in groups.items():
        values[head] = changes(values.get(head, getattr(config, head)), group, f"{prefix}{head}.")
    try:
        return dataclasses.replace(config, **values)
    except SettingError as error:
        raise SettingError(_with_whole_path(str(error), prefix)) from error


def _with_whole_path(message: str, prefix: str) -> str:
    """Return a message that begins with the path of a setting in its group, but with the full path instead.

    >>> _with_whole_path("loss.z_loss=-1 should be at least 0", "pretraining.loss.")
    'pretraining.loss.z_loss=-1 should be at least 0'

    The check of a group such as ``loss``, which several others contain, does not know in which one it is.
    """
    outer, inner = "", prefix
    while inner:
        if message.startswith(inner):
            return outer + message
        head, _, inner = inner.partition(".")
        outer += f"{head}."
    return message


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each (dotted path, value) of a nested dataclass, in the order of declaration."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def diff(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Return {path: (old value, new value)} of all settings that differ; None where a config lacks one."""
    return dict(_differences(old, new, ""))


def _differences(old: Any, new: Any, prefix: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield (path, values) of the settings that differ; groups that are one object are not looked into."""
    if type(old) is not type(new):
        before, after = dict(leaves(old, prefix)), dict(leaves(new, prefix))
        pairs = {path: (before.get(path), after.get(path)) for path in before | after}
        yield from ((path, pair) for path, pair in pairs.items() if pair[0] != pair[1])
        return
    for field in dataclasses.fields(old):
        value, other = getattr(old, field.name), getattr(new, field.name)
        if value is other:
            continue
        if dataclasses.is_dataclass(value) and dataclasses.is_dataclass(other):
            yield from _differences(value, other, f"{prefix}{field.name}.")
        elif value != other:
            yield prefix + field.name, (value, other)


def setting_descriptions(cls: type, prefix: str = "") -> dict[str, str]:
    """Return {path: comment} of a nested dataclass: the comments behind or above its fields in the source."""
    hints, comments = _hints(cls), _field_comments(cls)
    by_path: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            by_path |= setting_descriptions(hints[field.name], f"{prefix}{field.name}.")
        elif field.name in comments:
            by_path[prefix + field.name] = " ".join(re.findall(r"# *(.*)", comments[field.name]))
    return by_path


# the comment lines above a field, its name, and the comment behind it
_FIELD = re.compile(r"((?:^ +#.*\n)*)^ +(\w+):[^#\n]*(#.*)?$", re.MULTILINE)


@functools.cache  # of each of the groups of settings, for every command that a process parses
def _field_comments(cls: type) -> dict[str, str]:
    """Return {field: comment} of a dataclass and its bases: the comment behind the field, else that above."""
    source = "".join(_class_source(base) for base in cls.__mro__ if dataclasses.is_dataclass(base))
    comments: dict[str, str] = {}
    for above, name, behind in _FIELD.findall(source):
        comments.setdefault(name, behind or above)  # a class hides the fields of its bases
    return comments


def _class_source(cls: type) -> str:
    file = sys.modules[cls.__module__].__file__
    if file is None or "." in cls.__qualname__:  # in an interactive session, or in a function
        return inspect.getsource(cls)
    return _classes_in(Path(file))[cls.__name__]


@functools.cache  # inspect.getsource would read the whole file for each of its classes, at every command
def _classes_in(file: Path) -> dict[str, str]:
    """Return {name: source} of the classes of a module."""
    text = file.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}


def to_json(config: Any) -> str:
    """Return the settings as indented JSON, which ``from_json`` reads back to the same value."""
    return json.dumps(dataclasses.asdict(config), indent=1)


def from_json(cls: type[T], text: str | bytes) -> T:
    """Return the config that ``to_json`` wrote; settings that it lacks have their defaults.

    Raises SettingError for any other text.
    """
    return _from_dict(cls, parse_json(text, "settings"), "")


def check_at_least(settings: Any, prefix: str, **least: float) -> None:
    """Raise SettingError for a field below its minimum; None passes."""
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise SettingError(f"{prefix}{name}={value} should be at least {bound}")


def check_at_most(settings: Any, prefix: str, **most: float) -> None:
    """Raise SettingError for a field above its maximum; None passes."""
    for name, bound in most.items():
        value = getattr(settings, name)
        if value is not None and not value <= bound:
            raise SettingError(f"{prefix}{name}={value} should be at most {bound}")


def check_above_0(settings: Any, prefix: str, names: str) -> None:
    """Raise SettingError for a field not above 0 as a float32; ``names`` are space-separated, None passes."""
    for name in names.split():
        value = getattr(settings, name)
        if value is not None and not value >= MIN_NORMAL_FLOAT32:
            raise SettingError(f"{prefix}{name}={value} should be above 0")


def check_at_least_0_below_1(settings: Any, prefix: str, names: str) -> None:
    """Raise SettingError for a field outside [0, 1), such as a decay; ``names`` are space-separated."""
    for name in names.split():
        if not 0 <= getattr(settings, name) < 1:
            value = getattr(settings, name)
            raise SettingError(f"{prefix}{name}={value} should be at least 0 and below 1, such as 0.9")


def check_seed(seed: int, name: str, most: int = 2**32 - 1) -> None:
    """Raise SettingError for a seed that jax does not take: seeds are uint32."""
    if not 0 <= seed <= most:
        raise SettingError(f"{name}={seed} should be a whole number from 0 to {most}")


def check_numbers(config: Any, prefix: str = "") -> None:
    """Raise SettingError for a number that none of int32, uint32 and float32 holds.

    ``prefix`` is the path of ``config`` in a larger one, as in ``changes``.
    """
    bounds = {int: (-(2**31), 2**32 - 1), float: (-3.4028235e38, 3.4028235e38)}
    for path, value in leaves(config, prefix):
        for index, number in enumerate(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(number):  # a group in a tuple, such as a phase of pre-training
                check_numbers(number, f"{path}[{index}].")
            if type(number) not in bounds:
                continue
            least, most = bounds[type(number)]
            if not least <= number <= most:
                raise SettingError(f"{path}={value} should be a number between {least:.4g} and {most:.4g}")


def parse_json(text: str | bytes, name: Any) -> Any:
    """Return the value of a JSON text; raise SettingError with ``name`` if it is invalid or too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{name} is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise SettingError if it cannot be read or holds no object."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror or error}") from error
    value = parse_json(text, path)
    if not isinstance(value, dict):
        raise SettingError(f"{path} should hold values by name, not a {type(value).__name__}")
    return value


def _from_dict(cls: type[T], values: Any, prefix: str) -> T:
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(values, dict):
        raise SettingError(f"{prefix or cls.__name__} should be a group of settings, not {values!r}")
    for name in values:
        if name not in names:
            raise SettingError(f"{cls.__name__} has no setting {prefix + name!r}{did_you_mean(name, names)}")
    hints, fields = _hints(cls), {}
    for name, value in values.items():
        path, kind = prefix + name, hints[name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields[name] = _from_dict(kind, value, f"{path}.")
        else:
            fields[name] = _checked(path, value, kind)
    try:
        return cls(**fields)
    except SettingError as error:
        raise SettingError(_with_whole_path(str(error), prefix)) from error
    except (ArithmeticError, TypeError, ValueError) as error:  # of absurd numbers
        raise SettingError(f"{prefix or cls.__name__} has values that make no sense: {error}") from error


def _checked(path: str, value: Any, kind: Any) -> Any:
    """Return ``value`` as type ``kind``; an int may become a float, and a list a tuple.

    Raises SettingError if it does not fit.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _from_dict(kind, value, f"{path}.")  # an element of a tuple, or a group that may be None
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise SettingError(f"{path}={value!r} is not a choice{did_you_mean(str(value), map(str, arguments))}")
    if origin is tuple and isinstance(value, (tuple, list)):
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(value) != len(kinds):
            raise SettingError(f"{path}={value!r} should have {len(kinds)} values, not {len(value)}")
        pairs = enumerate(zip(value, kinds, strict=True))
        return tuple(_checked(f"{path}[{i}]", item, each) for i, (item, each) in pairs)
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


# ---- which settings are used


@dataclasses.dataclass(frozen=True)
class Values:
    """The values that a setting must have for another setting to be used.

    They are the values in ``among``, where a string also stands for itself with an argument (``unigram`` for
    ``unigram:CORPUS``); without ``among``, all values except those in ``exclude``; or, with ``above``, all
    numbers above it.
    """

    among: tuple[Any, ...] = ()
    exclude: tuple[Any, ...] = ()
    above: float | None = None
    # what has such a value, such as "models with an encoder and a decoder"; messages name it in place of them
    description: str = ""

    def has(self, value: Any) -> bool:
        """Return whether ``value`` is one of these values."""
        if self.above is not None:
            return value is not None and value > self.above
        if isinstance(value, str) and value.partition(":")[0] in self.among:
            return True
        return value in self.among if self.among else value not in self.exclude

    def reader_phrase(self, path: str) -> str:
        """Return what reads a setting that depends on the one at ``path``.

        Such as "by lstm and gru", "with model.dropout above 0" or "with model.experts.count".
        """
        if self.description:
            return f"by {self.description}"
        if self.above is not None:
            return f"with {path} above {self.above:g}"
        if self.among and all(isinstance(value, str) and value for value in self.among):
            return f"by {listed(self.among)}"
        if self.among:
            return f"with {path}={listed(map(str, self.among))}"
        named = [repr(value) for value in self.exclude if value not in _ABSENT]
        return f"with {path} other than {listed(named)}" if named else f"with {path}"

    def requirement_phrase(self, path: str) -> str:
        """Return which values the setting at ``path`` should have.

        Such as "mixer.kind=lstm|gru", "dropout above 0" or "experts.count given".
        """
        if self.above is not None:
            return f"{path} above {self.above:g}"
        if self.among:
            return f"{path}={'|'.join(map(str, self.among)) or 'none'}"
        named = "|".join(str(value) for value in self.exclude if value not in _ABSENT)
        return f"{path} not {named}" if named else f"{path} given"

    def suggested_setting(self, path: str) -> str:
        """Return what to set so that the other setting is used.

        It is ``path=value`` with the first choice in ``among``, or ``path`` alone if there is none.
        """
        choices = [value for value in self.among if isinstance(value, str | bool) and value != ""]
        return f"{path}={choices[0]}" if choices else path


_ABSENT = (None, "", ())
ABOVE_0 = Values(above=0)
GIVEN = Values(exclude=_ABSENT)

# Path of another setting -> the values that it should have. All entries must hold; ``a | b`` merges two.
Condition = dict[str, "Values | tuple[Any, ...]"]
Conditions = Condition | tuple[Condition, ...]  # one of several is enough


def setting(
    default: Default, read_if: Conditions = (), overrides: Mapping[str, Conditions] | None = None
) -> Default:
    """Declare a field, or a group of settings, that is used only if other settings have certain values.

    A path in ``read_if`` is first looked up in the dataclass that declares this field and, if that has no
    such setting, from the outermost settings. For a group, ``overrides`` maps the path of a setting in the
    group to conditions that hold for it instead of ``read_if``.
    """
    field: Any = dataclasses.field(
        default=default, metadata={"read_if": _alternatives(read_if), "overrides": overrides or {}}
    )
    return field


def unused_settings(config: Any, paths: Iterable[str]) -> dict[str, str]:
    """Return {path: reason} of the settings at or below ``paths`` that are not used in ``config``."""
    given, reasons = tuple(f"{path}." for path in paths), {}
    for path, _ in leaves(config):
        if f"{path}.".startswith(given):
            reasons[path] = next(filter(None, _reasons(config, path)), "")
    return {path: reason for path, reason in reasons.items() if reason}


def check_used(config: Any, paths: Iterable[str]) -> None:
    """Raise SettingError for settings at or below ``paths`` that are not used in ``config``."""
    if reasons := unused_settings(config, paths):
        raise SettingError("; ".join(reasons.values()))


def conditions(cls: type, prefix: str = "") -> dict[str, str]:
    """Return, for each field or group that is not always used, {path: phrase}: with which settings it is.

    Such as "mixer.kind=rnn|gru and dropout above 0".
    """
    hints, phrases = _hints(cls), {}
    for field in dataclasses.fields(cls):
        declared = {"": field.metadata.get("read_if", ()), **field.metadata.get("overrides", {})}
        for part, alternatives in declared.items():
            clauses = [_condition_phrase(cls, prefix, each) for each in _alternatives(alternatives)]
            if clauses:
                path = f"{prefix}{field.name}.{part}" if part else prefix + field.name
                phrases[path] = "; or ".join(clauses)
        if dataclasses.is_dataclass(hints[field.name]):
            inner = conditions(hints[field.name], f"{prefix}{field.name}.")
            phrases |= {path: text for path, text in inner.items() if path not in phrases}
    return phrases


def _condition_phrase(cls: type, prefix: str, condition: Condition) -> str:
    """Return a condition of a field of ``cls`` as a phrase with full paths."""
    phrases = []
    for path, expected in condition.items():
        full_path = prefix + path if _is_setting(cls, path) else path
        phrases.append(_values(expected).requirement_phrase(full_path))
    return " and ".join(phrases)


def _is_setting(cls: Any, path: str) -> bool:
    """Return whether a dataclass has a setting or group at ``path``."""
    for name in path.split("."):
        if not dataclasses.is_dataclass(cls) or name not in cls.__dataclass_fields__:
            return False
        cls = typing.get_type_hints(cls)[name]
    return True


def listed(names: Iterable[str]) -> str:
    """Return the names in one phrase, such as "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _alternatives(read_if: Conditions) -> tuple[Condition, ...]:
    return (read_if,) if isinstance(read_if, dict) else read_if


def _values(expected: Values | tuple[Any, ...]) -> Values:
    return expected if isinstance(expected, Values) else Values(among=expected)


def _reasons(config: Any, path: str) -> Iterator[str]:
    """Yield why a setting is not used, for each of its groups and for itself; "" where it is used."""
    owner, parts = config, path.split(".")
    for depth, name in enumerate(parts):
        prefix, rest = ".".join(parts[:depth]), ".".join(parts[depth + 1 :])
        metadata = type(owner).__dataclass_fields__[name].metadata
        overrides = metadata.get("overrides", {}).items()
        alternatives = next(
            (each for part, each in overrides if rest == part or rest.startswith(f"{part}.")),
            metadata.get("read_if", ()),
        )
        unmet = [_unmet(config, owner, prefix, path, condition) for condition in _alternatives(alternatives)]
        yield _reason(path, unmet) if unmet and all(unmet) else ""
        owner = getattr(owner, name)


_Unmet = list[tuple[str, Any, Values]]  # path of a setting, its value, and the values that it should have


def _unmet(config: Any, owner: Any, prefix: str, target: str, condition: Condition) -> _Unmet:
    """Return the settings that keep a condition of the setting ``target`` from holding."""
    unmet: _Unmet = []
    for path, expected in condition.items():
        group, field = _owner(owner, path), path.rpartition(".")[2]
        full_path = f"{prefix}.{path}" if group is not None and prefix else path
        group = _owner(config, path) if group is None else group
        # The other setting is missing where a group is checked without the config that it is part of.
        if group is None or full_path == target:
            continue
        value, values = getattr(group, field), _values(expected)
        ignored = _ignored_by_choice(type(group), field, value)
        if ignored is None:
            is_used = values.has(value)
        else:  # an added choice uses all settings but these
            is_used = target.rpartition(".")[2] not in ignored
        if not is_used:
            unmet.append((full_path, value, values))
    return unmet


def _ignored_by_choice(cls: type, field: str, choice: Any) -> tuple[str, ...] | None:
    """Return the settings that an added choice ignores (``set_choices``); None if it was not added."""
    for base in cls.__mro__:
        added = _ADDED.get((base, field))
        if added and choice in added:
            return added[choice]
    return None


def _owner(config: Any, path: str) -> Any:
    """Return the group in ``config`` that has the setting at ``path``; None if there is none."""
    *groups, field = path.split(".")
    for name in groups:
        config = getattr(config, name, None)
    return config if dataclasses.is_dataclass(config) and hasattr(config, field) else None


def _reason(path: str, unmet: list[_Unmet]) -> str:
    """Return a message: what reads the setting at ``path``, why it is not used, and what to change.

    Such as "model.mixer.window is read by window, not by attention: leave it out, or set
    model.mixer.kind=window".
    """
    alternatives = sorted(unmet, key=len)  # the one with the fewest unmet conditions first
    readers = dict.fromkeys(each[0][2].reader_phrase(each[0][0]) for each in alternatives)
    other, value, values = alternatives[0][0]  # the setting that the message tells to change
    preposition = values.reader_phrase(other).partition(" ")[0]  # "by" or "with"
    is_name = preposition == "by" and not values.description and isinstance(value, str)
    actual = value if is_name else f"{other}={value!r}"
    return (
        f"{path} is read {' or '.join(readers)}, not {preposition} {actual}: "
        f"leave it out, or set {values.suggested_setting(other)}"
    )
