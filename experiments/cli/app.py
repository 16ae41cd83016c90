"""Parses command lines with tyro.

A function's signature gives the options of its command. Its docstring, and the comments beside the fields of
settings, give their help.
"""

import functools
import inspect
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from itertools import pairwise, takewhile
from textwrap import TextWrapper, dedent
from typing import Any

import tyro
from tyro.extras import SubcommandApp

from experiments.cli import COMMANDS, HELP_OPTIONS
from experiments.cli.settings import HELP_DEFAULTS, OPTION_PATHS, TYPES, help_defaults, settings_among
from experiments.cli.synonyms import hints, rows_among
from experiments.processes.restart import print_line
from experiments.study.registry import REGISTRY, TABLES
from lm.config.base import most_like

MARKERS = (tyro.conf.PositionalMetavarFromFieldName,)
# in an error of tyro's: the word, the option, and what it may be
INVALID_CHOICE = re.compile(r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)")
SIMILAR = re.compile(r"Arguments similar to (\S+?):")  # the head of a part of an error's box
TOPOLOGY = re.compile(r"(?:v\d+[a-z]?|tpu\w+):\d+(?:x\d+)+")  # such as v5e:4x4


def parse(name: str, words: Sequence[str]) -> Callable[[], Any]:
    """Return the call that ``lm NAME WORDS`` asks for.

    SystemExit, once tyro has printed: with code 0 after help, and with code 2 if the words are not a valid
    command line.
    """
    function = function_of(name)
    help_options = [word for word in words if word in HELP_OPTIONS]
    defaults = None
    if help_options:
        defaults = help_defaults(words, "--help-all" in help_options, name == "sweep")
        words = ["--help"]
    is_short_help = bool(help_options) and "--help-all" not in help_options
    run_tyro = functools.partial(
        tyro.cli,
        function if inspect.isclass(function) else _deferred(function),
        prog=f"lm {name}",
        description=wrapped(description(function, is_short_help)),
        args=list(words),
        registry=TYPES,
        config=MARKERS,
    )
    token = HELP_DEFAULTS.set(defaults)
    try:
        with _empty_lines_without_breaks():
            parsed: Any = _parse_or_print_hints(words, run_tyro, name)
    finally:
        HELP_DEFAULTS.reset(token)
    if inspect.isclass(function):  # a figure of lm draw: a dataclass whose fields are its options
        from experiments.cli.draw import write_picture

        return functools.partial(write_picture, name.removeprefix("draw "), parsed)
    call: Callable[[], Any] = parsed
    return call


def _parse_or_print_hints(words: Sequence[str], run_tyro: Callable[[], Any], name: str) -> Any:
    """Return what tyro parses ``words`` into. If it fails, print its error with hints about what was meant.

    tyro is first offered only the settings that are among the words, which suffice for every valid command
    line and are a third of a second faster. It is then offered all settings, so that its error can suggest
    any of them.
    """
    error = io.StringIO()
    token = OPTION_PATHS.set(settings_among(words))
    try:
        with redirect_stderr(io.StringIO()):
            return run_tyro()
    except SystemExit as end:
        if not end.code:
            raise
    finally:
        OPTION_PATHS.reset(token)
    try:
        with redirect_stderr(error):
            return run_tyro()
    finally:
        lines = [*error_hints(error.getvalue(), words, name)]
        print(without_similar(error.getvalue(), lines), end="", file=sys.stderr)
        for line in lines:
            print_line(line)


def without_similar(error: str, lines: Sequence[str]) -> str:
    """Return an error of tyro's without the options that it finds similar to those that ``lines`` explain.

    It compares spellings alone: --finetuning.lr is like --finetuning.log-every.
    """
    explained = {line.partition(":")[0] for line in lines}
    parts = list[list[str]]([[]])  # of the box; each begins with the line above it
    for line in error.splitlines(keepends=True):
        text = line.strip("│ \n")
        if text and set(text) <= set("─-╰╯"):
            parts.append([])
        parts[-1].append(line)
    kept = ""
    for part in map("".join, parts):
        found = SIMILAR.search(part)
        if found is None or found[1].replace("_", "-") not in explained:
            kept += part
    return kept


def error_hints(error: str, words: Sequence[str], name: str) -> Iterator[str]:
    """Yield lines that say what may have been meant, given what tyro printed about ``lm NAME WORDS``."""
    text = " ".join(line.strip("│ ") for line in error.splitlines())
    for word, argument, choices in INVALID_CHOICE.findall(text):
        if close := most_like(word, re.findall("'(.*?)'", choices)):
            yield f"{argument} {word}: did you mean {close}?"
    if "Unrecognized options" not in error:
        return
    unknown = unrecognized(error)
    unrecognized_words = [word for word in words if word.partition("=")[0].replace("_", "-") in unknown]
    yield from hints(unrecognized_words, takes_settings(function_of(name)), rows_among(words))
    values_of_unrecognized = {  # the word behind an unrecognized option is taken for its value
        value for option, value in pairwise(words) if option.startswith("-") and option in unrecognized_words
    }
    for word in unrecognized_words:
        if not word.startswith("-") and word not in values_of_unrecognized:
            if TOPOLOGY.fullmatch(word):
                yield f"{word}: did you mean --topology {word}?"
            else:
                usage = positional_names(function_of(name))
                hint = ""
                if "PATTERN" in usage:
                    hint = "; for several, run it once for each, or name a pattern such as 't5/*'"
                yield f"{word}: one word too many: lm {name}{usage} [OPTIONS]{hint}"


def positional_names(function: Callable[..., Any]) -> str:
    """Return " NAME ..." for the positional arguments of a command."""
    parameters = inspect.signature(function).parameters.values()
    return "".join(f" {each.name.upper()}" for each in parameters if each.kind is each.POSITIONAL_ONLY)


def unrecognized(error: str) -> set[str]:
    """Return the words that tyro names as unrecognized in the box of its error."""
    lines = [line.strip("│ ") for line in error.partition("Unrecognized options:")[2].splitlines()]
    inside = takewhile(lambda line: set(line) - {"─", "-"}, lines)  # up to the line below them
    return {word.strip(",").partition("=")[0].replace("_", "-") for word in " ".join(inside).split()}


def function_of(name: str) -> Callable[..., Any]:
    """Import and return the function of a command, or the class of a figure of ``lm draw``."""
    module, _, function = COMMANDS[name].place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _deferred(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """Return a function of the same signature that returns the call instead of making it."""

    def later(*given: Any, **named: Any) -> Callable[[], Any]:
        return functools.partial(function, *given, **named)

    later.__dict__["__signature__"] = inspect.signature(function)
    later.__annotations__ = function.__annotations__
    later.__doc__ = re.sub(r"\n {8,}", " ", inspect.getdoc(function) or "")  # tyro keeps breaks of lines
    return later


def description(function: Callable[..., Any], is_short: bool = False) -> str:
    """Return a docstring without its section of arguments."""
    text = (inspect.getdoc(function) or "").partition("\nArgs:\n")[0].strip()
    return text + "\n\n--help-all lists all settings." * (is_short and takes_settings(function))


# tyro joins a line that begins with a letter to the line before it, so prose is indented by a blank. It
# doubles empty lines, so an empty line holds this character.
ZERO_WIDTH_SPACE = "\u200b"
WIDEST = 100  # lines of prose in a wide terminal [characters]


def wrapped(text: str) -> str:
    """Return help with its prose wrapped to the terminal, in lines that tyro prints as they are."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    prose = TextWrapper(width, initial_indent=" ", subsequent_indent=" ", break_on_hyphens=False)
    paragraphs = [
        paragraph if paragraph.startswith(" ") else prose.fill(paragraph) for paragraph in text.split("\n\n")
    ]
    return f"\n{ZERO_WIDTH_SPACE}\n".join(paragraphs)


class _Printed(io.StringIO):
    """Holds what is printed, and has the encoding of the output, by which tyro chooses how to draw boxes."""

    encoding = ""

    def __init__(self):
        super().__init__()
        self.encoding = getattr(sys.stdout, "encoding", None) or "ascii"


@contextmanager
def _empty_lines_without_breaks() -> Iterator[None]:
    """Print what is printed inside without ZERO_WIDTH_SPACE, so that other programs read empty lines.

    On a terminal nothing is changed: there it cannot be seen, and tyro colours only what it prints itself.
    """
    if sys.stdout.isatty():
        yield
        return
    printed = _Printed()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        print(re.sub(f" *{ZERO_WIDTH_SPACE} *", "", printed.getvalue()), end="")


def takes_settings(function: Callable[..., Any]) -> bool:
    """Return whether the settings of a row are options of a command."""
    return "settings" in inspect.signature(function).parameters


def examples(function: Callable[..., Any]) -> list[str]:
    """Return the command lines in a docstring, whole: its indented lines that begin with ``lm``."""
    lines = re.sub(r" \\\n +", " ", inspect.getdoc(function) or "").splitlines()
    return [dedent(line) for line in lines if line.startswith("    lm ")]


def print_completion(shell: str) -> None:
    """Print tyro's completion script of the whole command line; it completes names of rows and files too."""
    script = io.StringIO()
    with redirect_stdout(script), suppress(SystemExit):
        application().cli(prog="lm", args=["--tyro-print-completion", shell], registry=TYPES, config=MARKERS)
    code = positional_completion_code([*REGISTRY, *TABLES])
    print(script.getvalue().replace(BEFORE_PRINTING, code + BEFORE_PRINTING), end="")


# The line of tyro's script before which our completions are inserted. The script itself completes options and
# commands, but no positional arguments.
BEFORE_PRINTING = "    # Output one completion per line.\n"


def positional_completion_code(names: Sequence[str]) -> str:
    """Return code for tyro's script that completes a positional argument.

    It is completed from ``names``, or from files if no name begins like it.
    """
    return f"""\
    begun = words[current_index] if current_index < len(words) else ""
    if not begun.startswith("-"):
        completions += [name for name in {" ".join(names)!r}.split() if begun and name.startswith(begun)]
        completions = completions or ["__TYRO_COMPLETE_FILES__"]
"""


def application() -> SubcommandApp:
    """Return all commands as one application, for completion."""
    whole, groups = SubcommandApp(), dict[str, SubcommandApp]()
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = SubcommandApp()
            whole.command(groups[group], name=group)
        app = groups[group] if group else whole
        app.command(name=last, help=command.about)(function_of(name))
    return whole
