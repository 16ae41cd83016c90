"""How command lines become arguments of a function, whose signature and docstring are the help."""

import functools
import inspect
import io
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from experiments.cli import EXAMPLES
from experiments.cli.usage.mistakes import (
    as_line,
    as_typed,
    check_words,
    is_option,
    lacking,
    places_first,
    required,
    whole_number,
)
from experiments.cli.usage.options import options_of
from experiments.cli.usage.page import HELP_WORDS, help_page
from experiments.study.changes import Overrides
from experiments.study.experiment import Experiment
from experiments.study.registry import BASELINE_ROW
from experiments.study.scales import DEFAULT_SCALE, SCALES
from lm.config.base import SettingError, leaves, nearest

NUMBERS = ConstructorRegistry()
FLAT = tyro.conf.arg(name="")  # Annotated[Options, FLAT]: the fields of Options are options of their own


@dataclass(frozen=True)
class StartOption:
    """What is read before the others are parsed, as their defaults depend on it."""

    start: str = ""  # that rows have: a folder in the published format, a run, RUN:STAGE, or hf:NAME


NO_START = StartOption()


def ordered(function: Callable, arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with the words that stand in a place before all options of ``function``.

    SettingError for an option that the function has not, unless the help is asked for.
    """
    taken = options_of(function)
    words = places_first(taken, arguments)
    if not {*HELP_WORDS} & {*words}:
        check_words(taken, words)
    return words


def parse(
    function: Callable, program: str, arguments: Sequence[str], settings: Experiment | None = None
) -> Any:
    """Call ``function`` with ``arguments`` and return its value; SettingError for what it cannot take.

    ``settings``: the default of the parameter of that name, where it depends on the arguments. If the help is
    asked for, it is printed, and the process ends.
    """
    if settings is not None:
        function = _with_default(function, "settings", settings)
    taken = options_of(function)
    arguments = places_first(taken, arguments)
    if asked := [word for word in arguments if word in HELP_WORDS]:
        examples = EXAMPLES.get(program.removeprefix("lm "), ())
        defaults_of = f"{first_word(arguments)} at scale {scale_of(arguments)}"
        print(help_page(program, function, examples, defaults_of, "--help-all" in asked))
        sys.exit()
    try:
        return carry_out(understood(function, program, arguments))
    except SettingError as error:
        raise type(error)(as_typed(str(error), [each.name for each in taken if not each.in_place])) from error


def _with_default(function: Callable, name: str, value: Any) -> Callable:
    """Return ``function`` with another default of a parameter."""

    @functools.wraps(function)
    def same(*given: Any, **named: Any) -> Any:
        return function(*given, **named)

    signature = inspect.signature(function)
    changed = signature.parameters | {name: signature.parameters[name].replace(default=value)}
    same.__dict__["__signature__"] = signature.replace(parameters=[*changed.values()])
    return same


def carry_out(later: Callable[[], Any]) -> Any:
    """The value of a command whose arguments were understood."""
    return later()


def understood(function: Callable, program: str, arguments: Sequence[str]) -> Callable[[], Any]:
    """``function`` with ``arguments``, to be called; SettingError for what it cannot take."""

    @functools.wraps(function)
    def later(*given: Any, **named: Any) -> Callable[[], Any]:
        return functools.partial(function, *given, **named)

    taken = options_of(function)
    check_words(taken, arguments)
    places = [*takewhile(lambda word: not is_option(word), arguments)]
    if "--" not in arguments and len(places) < len(required(taken)):
        raise SettingError(lacking(taken, program))  # the parser would take the value of an option
    with redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(later, prog=program, args=arguments, registry=NUMBERS, add_help=False)
        except SystemExit:
            pass
    raise SettingError(as_line(said.getvalue(), taken, program))


def first_word(arguments: Sequence[str], default: str = BASELINE_ROW) -> str:
    """The row or pattern, first of the ``ordered`` words, on which the defaults of settings depend."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else default


def name_first(names: Collection[str], arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with the first that is one of ``names`` before options that stand before it."""
    found = next((place for place, word in enumerate(arguments) if word in names), 0)
    if not arguments or not is_option(arguments[0]):
        return [*arguments]
    return [arguments[found], *arguments[:found], *arguments[found + 1 :]]


def scale_of(arguments: Sequence[str], flag: str = "--scale") -> str:
    """Return the scale that the arguments name, or the default; SettingError if there is none such."""
    scale = option(arguments, flag, DEFAULT_SCALE)
    if scale not in SCALES:
        raise SettingError(f"{flag} {scale!r} is unknown{nearest(scale, SCALES)}")
    return scale


def named_settings(arguments: Sequence[str], settings: Experiment) -> Overrides:
    """``{path: value}`` of the settings that the command line names, be they the row's or not."""
    words = {word.partition("=")[0][2:].replace("-", "_") for word in arguments if word[:2] == "--"}
    words |= {word.replace(".no_", ".") for word in words}
    return {path: value for path, value in leaves(settings) if path in words}


def option(arguments: Sequence[str], flag: str, default: str) -> str:
    """The value of ``flag``, before the arguments are parsed; of several the last, as the parser takes it."""
    value = default
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            value = arguments[place + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


@NUMBERS.primitive_rule
def _whole_rule(about: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if about.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )
