"""How command lines are tested: what they would do, and what they say."""

import inspect
import re
import sys

from experiments.__main__ import named_command
from experiments.cli.app import parse
from lm.config.base import SettingError


class Accepted(Exception):
    """The command would begin now."""


def accepted(arguments, monkeypatch):
    """The exit code of a command line that is parsed, whose rows and settings are checked, and no more."""
    try:
        call = parse(*named_command(arguments))
        takes_settings = "settings" in inspect.signature(call.func).parameters
        if not takes_settings or any(word.startswith("@") for word in arguments):  # a run may not be there
            return 0
        module = sys.modules[call.func.__module__]
        check = module.given_changes

        def checked(*given):
            check(*given)
            raise Accepted

        monkeypatch.setattr(module, "given_changes", checked)
        call()
    except Accepted:
        return 0
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code
    return 0


def unboxed(text):
    """What tyro says in a box, in one line."""
    return " ".join(re.sub(r"[╭╮╰╯│─]|-{3,}", " ", text).split())
