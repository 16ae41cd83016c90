"""How command lines become arguments of a function, whose signature and docstring are the help."""

import functools
import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from experiments.cli import EXAMPLES
from experiments.cli.usage.mistakes import as_line, check_words, whole_number
from experiments.cli.usage.options import options_of
from experiments.cli.usage.page import HELP_WORDS, help_page
from experiments.study.experiment import Changes, Experiment
from experiments.study.registry import BASELINE_ROW
from lm.settings import SettingError, leaves

NUMBERS = ConstructorRegistry()
FLAT = tyro.conf.arg(name="")  # Annotated[Options, FLAT]: the fields of Options are options of their own


@dataclass(frozen=True)
class StartOption:
    """What is read before the others are parsed, as their defaults depend on it."""

    start: str = ""  # that rows have: a folder in the published format, a run, RUN:STAGE, or hf:NAME


NO_START = StartOption()


def parse(function: Callable, program: str, arguments: Sequence[str]) -> Any:
    """The value of ``function``, called with ``arguments``; SettingError for what it cannot take.

    If the help is asked for, it is printed, and the process ends.
    """
    if asked := [word for word in arguments if word in HELP_WORDS]:
        examples = EXAMPLES.get(program.removeprefix("lm "), ())
        scale = next((each.default for each in options_of(function) if each.name == "scale"), "nano")
        defaults_of = f"{first_word(arguments)} at scale {option(arguments, '--scale', scale)}"
        print(help_page(program, function, examples, defaults_of, "--help-all" in asked))
        sys.exit()
    return carry_out(understood(function, program, arguments))


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
    with redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(later, prog=program, args=arguments, registry=NUMBERS, add_help=False)
        except SystemExit:
            pass
    raise SettingError(as_line(said.getvalue(), taken, program))


def first_word(arguments: Sequence[str], default: str = BASELINE_ROW) -> str:
    """The row or pattern that stands first, on which the defaults of the options behind it depend."""
    return arguments[0] if arguments and not arguments[0].startswith("-") else default


def named_settings(arguments: Sequence[str], settings: Experiment) -> Changes:
    """``{path: value}`` of the settings that the command line names, be they the row's or not."""
    words = {word.partition("=")[0][2:].replace("-", "_") for word in arguments if word[:2] == "--"}
    words |= {word.replace(".no_", ".") for word in words}
    return {path: value for path, value in leaves(settings) if path in words}


def check_first(word: str, arguments: Sequence[str], command: str) -> None:
    """SettingError unless ``word``, which the parser took for the row or pattern, stands first."""
    if word != first_word(arguments):
        raise SettingError(f"{word!r} should stand first: lm {command} {word} [OPTIONS]")


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
