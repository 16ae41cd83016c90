"""How the words of a command line become the arguments of a function, whose signature and docstring are its
help.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

NUMBERS = ConstructorRegistry()


def read(function: Callable, program: str, arguments: Sequence[str]) -> Any:
    """What ``function`` gives, called with ``arguments``."""
    return tyro.cli(function, prog=program, args=arguments, registry=NUMBERS)


@NUMBERS.primitive_rule
def _whole(about: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    if about.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole(words[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def whole(text: str) -> int:
    """``"20000"``, ``"20_000"`` and ``"2e4"`` alike."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
        if number.is_integer():
            return int(number)
    except ValueError:
        pass
    raise ValueError(f"{text!r} should be a whole number, such as 20000 or 2e4")
