"""A terminal that lacks a sign is shown another: no command fails because of how it is to be printed."""

import codecs
import sys

SPELT = {"→": "->", "±": "+-", "τ": "tau", "…": "..."}
SPELT |= dict(zip("×▲▼–—·•⏎│─━╭╮╰╯‘’“”", "x^v---*/|--++++''\"\"", strict=True))


def speak_any_encoding() -> None:
    """From now on what an encoding lacks, such as ASCII's, is printed as SPELT has it, or as a question mark."""
    codecs.register_error("spelt", _spell)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="spelt")


def _spell(error: UnicodeError) -> tuple[str, int]:
    return "".join(SPELT.get(sign, "?") for sign in error.object[error.start : error.end]), error.end
