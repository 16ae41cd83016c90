"""Printing that does not fail where a terminal lacks a character, or where nobody reads any more."""

import codecs
import io
import os
import sys
from contextlib import suppress
from typing import Any

REPLACEMENTS = {"→": "->", "↓": "(less is better)", "±": "+-", "τ": "tau", "…": "..."}
REPLACEMENTS |= dict(zip("×▲▼–—·•⏎│─━╭╮╰╯‘’“”", "x^v---*/|--++++''\"\"", strict=True))


def replace_unencodable_characters() -> None:
    """Print characters that an encoding lacks as REPLACEMENTS has them, or as question marks, from now on."""
    codecs.register_error("replace-unencodable", _replacement)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace-unencodable")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(REPLACEMENTS.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def ignore_broken_pipes() -> None:
    """Report a missing reader, such as `head` that has ended, once, and go on without one from now on.

    For training: hours of work must not end with a pipe, and what is printed is in the run's files too.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        old.flush()
        raw = io.BufferedWriter(_FileOrNull(number, "w", closefd=False))
        at_once = old.line_buffering or old.write_through  # the second with PYTHONUNBUFFERED
        new = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=at_once)
        setattr(sys, name, new)


class _FileOrNull(io.FileIO):
    """Writes to a file, or nowhere once nobody reads the pipe that it is."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            with suppress(OSError):
                os.write(2, b"lm: nobody reads any more what is printed; the command goes on\n")
            return len(data)
