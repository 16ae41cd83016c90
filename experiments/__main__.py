"""The command ``lm``: finds the command, calls it, and turns what went wrong into a message and an exit code."""

import sys
from collections.abc import Callable, Sequence

from experiments.cli import COMMANDS, clean, convert, run
from experiments.exit_codes import EXIT_CODES
from lm.config import SettingError, nearest

_HELP = """lm: train Transformer language models and compare their objectives and architectures.

usage: lm COMMAND [OPTIONS]        lm COMMAND --help tells more

{commands}

A row is one line of a table of the study, such as t5/6-corruption-rate/15. Scales: nano (about a minute a row on two
CPU cores), mini (about ten minutes), base (the paper's setup). Start with:

  lm list 't5/*'                              what there is
  lm diff t5/6-corruption-rate/50             what a row changes
  lm sweep t5/6-corruption-rate               train a table and print it beside the paper's
  lm run t5/1-baseline/baseline --model.d_ff 512 --pretraining.steps 200

Exit codes: {codes}."""


def _help() -> str:
    lines = [f"  {name:<10} {(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items()]
    codes = ", ".join(f"{code} {meaning}" for meaning, code in EXIT_CODES.items())
    return _HELP.format(commands="\n".join(lines), codes=codes)


def main() -> None:
    """Run the command line in ``sys.argv``; end the process with one of EXIT_CODES."""
    sys.exit(dispatch(sys.argv[1:]))


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command; the exit code. Errors a user can mend are printed without a traceback."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return EXIT_CODES["done"]
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise SettingError(f"there is no command {name!r}{nearest(name, COMMANDS)}")
        _call(COMMANDS[name], name, rest)
    except SettingError as error:
        print(f"lm: {error}", file=sys.stderr)
        return EXIT_CODES["bad settings"]
    except KeyboardInterrupt:
        print("lm: interrupted; to go on, give the same command again", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    return EXIT_CODES["done"]


def _call(command: Callable, name: str, arguments: Sequence[str]) -> None:
    if command in (run, convert, clean):  # which read their arguments themselves
        command(arguments)
    else:
        import tyro  # takes a third of a second, which `lm --help` need not wait for

        tyro.cli(command, prog=f"lm {name}", args=arguments)


if __name__ == "__main__":
    main()
