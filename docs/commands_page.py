"""A hook of mkdocs: the page of all commands and their options, read from ``lm COMMAND --help``."""

import io
import os
import re
from contextlib import redirect_stdout, suppress
from typing import Any
from unittest import mock

from settings_page import escaped

from experiments.cli import COMMANDS
from experiments.cli.app import description, function_of, parse, takes_settings
from experiments.cli.eval_harness import HELP as HARNESS_HELP
from experiments.study.experiment import BASELINE
from lm.config.base import leaves

PAGE = "reference/commands.md"
HARNESS = "eval harness"  # its options are those of another program
WIDE = "400"  # a help text without breaks of lines [columns]
NO_DEFAULT = {"": "none", "None": "none", "''": "none", "()": "none", "False": "off", "True": "on"}
HEAD = """# Commands and options

Every command of `lm` with all of its options, as `lm COMMAND --help` prints them. [The command
line](../command.md) lists the commands by task. You can give options before or after the other arguments. A
command that takes settings takes every option of the page [Settings](settings.md).
"""


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with all files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=commands_page()))
    return files


def commands_page() -> str:
    """Return the page, in Markdown: a list of all commands, and a section for each."""
    lines = ["| command | what it does |", "|:---|:---|"]
    for name, command in COMMANDS.items():
        lines.append(f"| [`lm {name}`](#lm-{name.replace(' ', '-')}) | {escaped(command.about)} |")
    return "\n".join([HEAD, *lines, "", *map(command_section, COMMANDS)])


def command_section(name: str) -> str:
    """Return the section on a command: what it does, examples, its arguments and options."""
    lines = [f"## lm {name}", ""]
    if name == HARNESS:
        return "\n".join([*lines, "```text", HARNESS_HELP, "```", ""])
    function, help_text = function_of(name), help_of(name)
    lines += [description(function), "", f"Usage: `{usage(help_text)}`", ""]
    lines += ["| option | meaning [unit] | default |", "|:---|:---|:---|"]
    settings = set()
    if takes_settings(function):
        settings = {path.replace("_", "-") for path, _ in leaves(BASELINE)}
    for option, meaning, default in options(help_text):
        if option.split()[0].removeprefix("--") not in settings:
            meaning = meaning[:1].upper() + meaning[1:]
            cells = [f"`{option}`", escaped(meaning), default if default == "required" else f"`{default}`"]
            lines.append(f"| {' | '.join(cells)} |")
    if settings:
        lines += ["", "This command also takes [settings](settings.md)."]
    return "\n".join([*lines, ""])


def help_of(name: str) -> str:
    """Return what ``lm NAME --help`` prints on a wide terminal."""
    printed = io.BytesIO()
    terminal = io.TextIOWrapper(printed, "utf-8")  # tyro asks for an encoding before it draws boxes
    with mock.patch.dict(os.environ, COLUMNS=WIDE), redirect_stdout(terminal), suppress(SystemExit):
        parse(name, ["--help"])
    terminal.flush()
    return printed.getvalue().decode()


def usage(help_text: str) -> str:
    """Return the first line of a help text without "usage:"."""
    return help_text.partition("\n")[0].removeprefix("usage: ")


def options(help_text: str) -> list[tuple[str, str, str]]:
    """Return (option with its value, meaning, default) of each argument in a help text.

    Each begins at the left of a box; its meaning follows behind two blanks or in the indented lines below.
    """
    found: list[list[str]] = []
    for line in re.findall(r"(?m)^│ (.*?) *│$", help_text):
        if not line.startswith(" "):
            option, _, meaning = line.partition("  ")
            found.append([option, meaning.strip()])
        elif found:
            found[-1][1] += f" {line.strip()}"
    split = []
    for option, text in found:
        if option == "-h, --help":
            continue
        meaning, default = text.strip(), ""
        if match := re.fullmatch(r"(.*?) ?\((?:default: (.*)|(required))\)", meaning):
            meaning, default = match[1], match[2] or match[3]
        option = option.replace("{None}|", "")  # an option that is left out is None
        split.append((option, meaning, NO_DEFAULT.get(default, default)))
    return split
