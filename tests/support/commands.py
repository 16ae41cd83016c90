"""How a command in the documentation is checked: it is accepted as it stands."""

import functools

import tyro

from experiments.__main__ import dispatch


class Accepted(Exception):
    """The command would begin now."""


def accepted(arguments, monkeypatch):
    """The exit code of a command line that is parsed as ``lm`` does, and not carried out."""

    def stopped(function):
        def begin(*_, **__):
            raise Accepted

        return functools.wraps(function)(begin)

    cli, from_dict = tyro.cli, tyro.extras.subcommand_cli_from_dict
    monkeypatch.setattr(tyro, "cli", lambda function, **options: cli(stopped(function), **options))
    monkeypatch.setattr(
        tyro.extras,
        "subcommand_cli_from_dict",
        lambda functions, **options: from_dict({k: stopped(f) for k, f in functions.items()}, **options),
    )
    try:
        return dispatch(arguments)
    except Accepted:
        return 0
    except SystemExit as end:
        return end.code
