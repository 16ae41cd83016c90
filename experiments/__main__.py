"""The command ``lm``: calls the command that is named, and turns errors into a message and an exit code."""

import os
import platform
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from textwrap import fill, indent

from experiments.cli import ABSENT_COMMANDS, COMMANDS, GROUPS, HELP_OPTIONS, overview
from experiments.cli.terminal import ignore_broken_pipes, replace_unencodable_characters
from experiments.processes.cluster import is_due_to_lost_process, join_others, leave_others
from experiments.processes.exit_codes import EXIT_CODES
from experiments.processes.memory import collect_garbage_rarely, tune_memory
from experiments.processes.restart import (
    RESUMABLE,
    SIGNALS,
    end_with_parent,
    exit_after_sigterm,
    print_line,
    run_with_restarts,
)
from experiments.study.plugins import pop_study_option, study_files
from lm.config.base import SettingError, did_you_mean
from lm.train.runtime.preemption import is_compiling

_HELP = """\
lm: train Transformer language models and compare their objectives and
architectures.

usage: lm COMMAND [OPTIONS]     details: lm COMMAND --help     lm --version

{commands}

A row is a line of a table of the study, such as t5/6-corruption-rate/15.
Scales: nano (1 to 2 minutes per row on one CPU core), mini (5 to 11 minutes),
mini-real (mini, fine-tuned on real benchmarks), small (a night on a
workstation), medium (an hour on an H100, by estimate), base (the paper's
setup){own_scales}. --study FILE, with any command, adds your own rows, tasks,
objectives and more (docs/extending.md).

Start with:

  lm list 't5/*'                             rows of the T5 paper's tables
  lm show t5/6-corruption-rate/50 --diff     what a row changes
  lm run t5/1-baseline/baseline --model.mlp.d_ff 512 --pretraining.steps 200
  lm sweep t5/6-corruption-rate --scale nano --seeds 1
                                             train a table and print it beside
                                             the paper's
  lm status                                  what is in progress

{codes}"""


def _help() -> str:
    codes = ", ".join(f"{code} {meaning}" for meaning, code in EXIT_CODES.items())
    own = own_scales() if study_files() else ()
    named = f"; yours: {', '.join(own)}" if own else ""
    commands = (fill(line, 78, subsequent_indent=" " * 11) for line in overview().splitlines())
    return _HELP.format(
        commands=indent("\n".join(commands), "  "),
        codes=fill(f"Exit codes: {codes}.", 80),
        own_scales=named,
    )


def own_scales() -> list[str]:
    """Return the scales that a study module has added."""
    from experiments.study.scales import OWN_FROM, SCALES  # with numpy, which the plain help can do without

    return [*SCALES][OWN_FROM:]


def versions() -> str:
    """Return the versions of the package, of jax and of Python, without importing them."""
    jax, python = metadata.version("jax"), platform.python_version()
    return f"lm {metadata.version('lm-study')}, jax {jax}, Python {python}"


def main() -> None:
    """Run the command line in ``sys.argv``; end the process with one of EXIT_CODES."""
    collect_garbage_rarely()
    replace_unencodable_characters()
    without_training = {*HELP_OPTIONS, "--dry-run", "--check"}
    if sys.argv[1:2] and sys.argv[1] in RESUMABLE and without_training.isdisjoint(sys.argv):
        tune_memory()
        ignore_broken_pipes()
    has_joined = False
    try:
        move_study_option_to_environment()
        # With --restart N this process is the parent of others, and does not return from here.
        run_with_restarts(sys.argv[1:])
        end_with_parent()  # a child of such a parent ends when the parent is gone
        signal.signal(signal.SIGTERM, _stop)
        if trains_together(sys.argv[1:]):
            has_joined = join_others()
        if study_files():
            from experiments.study.plugins import load_study

            load_study()
        code: int | str | None = dispatch(sys.argv[1:])
    except SettingError as error:
        print_line(str(error))
        code = EXIT_CODES["bad settings"]
    except KeyboardInterrupt:  # in a study module
        print_line(f"interrupted{how_to_resume()}")
        code = EXIT_CODES["interrupted"]
    except SystemExit as end:
        is_output_closed = isinstance(end.__context__, BrokenPipeError)  # rich turns it into an exit
        code = EXIT_CODES["output closed"] if is_output_closed else end.code
    except MemoryError:
        print_line("the machine, or a limit on this process (ulimit -v), has no more memory")
        code = EXIT_CODES["failed"]
    except Exception as error:
        if has_joined and is_due_to_lost_process(error):
            print_line(f"another process of this run is gone, so this one ends too ({error})")
            os._exit(EXIT_CODES["preempted"])  # jax would wait for it, and then abort this process
        is_output_closed = isinstance(error, BrokenPipeError) and _discard_unread_output()
        code = EXIT_CODES["output closed" if is_output_closed else "failed"]
        if isinstance(error, OSError) and error.filename:  # a disk is full, a file may not be written
            print_line(f"{error}. Fix that and run the same command again")
        elif not is_output_closed:
            traceback.print_exc()
    _discard_unread_output()  # else Python's last flush, at exit, would fail with BrokenPipeError
    if has_joined:
        leave_others(code if isinstance(code, int) else EXIT_CODES["failed" if code else "done"])
    if isinstance(code, int) and is_compiling():
        # Python would stop this thread inside of the compiler, which aborts the process with another code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code == EXIT_CODES["preempted"]:  # a signal that comes again would break into the ending
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def move_study_option_to_environment() -> None:
    """Move ``--study FILE`` from ``sys.argv`` to the environment, which child processes inherit.

    It is also removed from ``sys.orig_argv``, with which ``--restart`` starts the children.
    """
    arguments = pop_study_option(sys.argv[1:])
    first = len(sys.orig_argv) - (len(sys.argv) - 1)  # before it are Python's own options and the program
    sys.orig_argv[first:] = arguments
    sys.argv[1:] = arguments


def trains_together(arguments: Sequence[str]) -> bool:
    """Return whether the command is one run, which several processes may train together."""
    return arguments[:1] == ["run"] and not {*HELP_OPTIONS} & {*arguments}


def _discard_unread_output() -> bool:
    """Return whether nobody reads the output any more, as after `| head`; if so, discard what follows."""
    if not hasattr(select, "poll"):  # as in some Pythons on macOS
        return False
    output = select.poll()
    output.register(1, 0)  # with no event asked for, poll only reports that the reader has closed its end
    is_closed = bool(output.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return is_closed


def _stop(*_) -> None:
    """End on SIGTERM. Training has a handler of its own, which saves first."""
    exit_after_sigterm(f"stopped (SIGTERM){how_to_resume()}")


def how_to_resume() -> str:
    """Return how to go on with this command, if it resumes where it stopped."""
    return "; run the same command to resume" if sys.argv[1:2] and sys.argv[1] in RESUMABLE else ""


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    Errors that a user can fix are printed without a traceback.
    """
    words = [*arguments[1:], "--help"] if arguments[:1] == ["help"] else list(arguments)
    if not words or words[0] in HELP_OPTIONS:
        print(_help())
        return EXIT_CODES["done"]
    if words[0] in ("--version", "-V"):
        print(versions())
        return EXIT_CODES["done"]
    try:
        return run_command(words)
    except SettingError as error:
        print_line(str(error))
        return EXIT_CODES["bad settings"]
    except KeyboardInterrupt:
        print_line(f"interrupted{how_to_resume()}")
        return EXIT_CODES["interrupted"]


def run_command(words: Sequence[str]) -> int:
    """Run the command that the first one or two words name, with the other words as its arguments.

    Return the exit code.
    """
    name, rest = named_command(words)
    if any(word.startswith("@") or "=@" in word for word in rest):
        from experiments.cli.run_names import resolve_names

        rest = resolve_names(rest)
    if name in GROUPS:
        print_group(name)
        return EXIT_CODES["done"]
    if name == "eval harness":  # whose options are those of another program
        from experiments.cli.eval_harness import eval_harness

        eval_harness(rest)
        return EXIT_CODES["done"]
    from experiments.cli.app import parse  # with tyro, which takes a while to import: not for `lm --help`

    try:
        call = parse(name, rest)
    except SystemExit as end:  # tyro has printed help, or what is wrong
        return end.code if isinstance(end.code, int) else EXIT_CODES["done"]
    call()
    return EXIT_CODES["done"]


def named_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a command, or of a group whose help is asked for, and the words behind it."""
    name, *rest = words
    if name.startswith("-"):
        raise SettingError(f"the command comes first, such as: lm run ROW {name} ...")
    if name in GROUPS:
        if not rest or rest[0] in HELP_OPTIONS:
            return name, []
        subcommands = [known.partition(" ")[2] for known in COMMANDS if known.startswith(f"{name} ")]
        if rest[0] not in subcommands:
            raise SettingError(f"lm {name} has no command {rest[0]!r}{did_you_mean(rest[0], subcommands)}")
        return f"{name} {rest[0]}", rest[1:]
    if instead := ABSENT_COMMANDS.get(name):
        raise SettingError(f"there is no command {name!r}: {instead}")
    if name not in COMMANDS:
        raise SettingError(f"there is no command {name!r}{did_you_mean(name, [*COMMANDS, *GROUPS])}")
    return name, rest


def print_group(name: str) -> None:
    """Print the commands that begin with ``name``."""
    if name == "draw":
        from experiments.cli.draw import show_figures

        show_figures()
        return
    commands = {known: each for known, each in COMMANDS.items() if known.startswith(f"{name} ")}
    print(fill(GROUPS[name], 80))
    print(f"\nusage: lm {name} COMMAND [OPTIONS]        details: lm {name} COMMAND --help\n")
    for known, command in commands.items():
        print(fill(f"  {known:<17} {command.about}", 80, subsequent_indent=" " * 20))


if __name__ == "__main__":
    main()
