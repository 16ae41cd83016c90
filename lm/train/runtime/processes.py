"""Identifies a process by its number and its start, since numbers of ended processes are used again.

In containers that happens soon.
"""

import os
from contextlib import suppress
from pathlib import Path


def process_start(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since the machine did; None if unknown."""
    return _start(_stat(pid))


def _start(fields: list[str]) -> int | None:
    return int(fields[19]) if len(fields) > 19 else None  # the 22nd field


def _stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) behind the name of the program; [] if they are unknown."""
    with suppress(OSError):  # it has ended, or there is no /proc, as on macOS
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def is_alive(pid: int, start: int | None = None) -> bool:
    """Return whether a process of this machine runs; with ``start`` the one that began then, if known.

    A process that was killed stays as a zombie where none waits for it, as in containers without an init.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    fields = _stat(pid)
    now = _start(fields)
    return fields[:1] != ["Z"] and (start is None or now is None or now == start)
