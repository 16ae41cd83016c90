"""Short names of runs: links beside the folders of the scales, which any command reads as @NAME.

``lm run ROW --name mine`` makes ``runs/mine`` a link to the run's folder, and every ``lm run`` makes
``runs/last`` one. ``lm generate @mine`` and ``lm generate runs/mine`` mean the same, also where ``runs/mine``
is the folder of a run itself, as after ``lm convert import FOLDER runs/mine``.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from experiments.console import RUNS
from experiments.runs.paths import SETTINGS
from experiments.study.names import RESERVED_SCALES
from experiments.study.scales import SCALES
from lm.config.base import SettingError, did_you_mean

LAST = "last"  # the run that `lm run` trained or looked up last
# options whose values are texts, in which @ may begin a word
TEXT_OPTIONS = ("--prompt", "--text", "--other", "--words", "--commit-message")
_NAME = re.compile(r"@(\w[\w.+-]*)", re.ASCII)
_NAME_IN_GRID = re.compile(r"(?<=[=,])@\w[\w.+:-]*", re.ASCII)  # a value of SETTING=VALUE,VALUE, or its stage


def check_name(runs: Path, name: str) -> None:
    """Raise SettingError unless ``runs/NAME`` can be a link to a run."""
    if not name:
        return
    if not _NAME.fullmatch(f"@{name}"):
        raise SettingError(f"--name {name!r} should be one word of letters, digits and . + -, such as mine")
    if name == LAST or name in SCALES or name in RESERVED_SCALES:
        raise SettingError(f"--name {name!r} is taken, by a scale or a folder of the program; choose another")
    if (runs / name).exists() and not (runs / name).is_symlink():
        raise SettingError(f"--name {name!r}: {runs / name} is a folder of its own; choose another name")


def name_run(runs: Path, name: str, folder: Path) -> None:
    """Make ``runs/NAME`` a link to the run in ``folder``, in place of the run that it led to before.

    Nothing happens where the file system has no links: a name is a convenience.
    """
    new = runs / f".{name}-{os.getpid()}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        new.symlink_to(os.path.relpath(folder, runs), target_is_directory=True)
        new.replace(runs / name)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def other_run_with_name(name: str, runs: Path, folder: Path) -> Path | None:
    """Return the folder of the run that ``runs/NAME`` names now, if that is not ``folder``.

    None if there is no such name, or if its run is gone.
    """
    link = runs / name
    if not name or not link.is_symlink() or not link.exists() or link.resolve() == folder.resolve():
        return None
    return Path(os.path.relpath(link.resolve()))


def shortest_name(folder: Path, runs: Path = RUNS) -> str:
    """Return what names the run in ``folder`` on a command line: ``@NAME`` if it has a name, else its path.

    ``@last`` is the name of the last run if it has no other. @NAME is looked up in RUNS, so for other
    ``runs`` the path of the link is returned instead, such as ``elsewhere/mine``.
    """
    names = names_of(folder, runs) or [LAST] * ((runs / LAST).resolve() == folder.resolve())
    if not names:
        return str(folder)
    return f"@{names[0]}" if runs == RUNS else str(runs / names[0])


def names_of(folder: Path, runs: Path) -> list[str]:
    """Return the names, but for @last, of the run in ``folder``: of the links in ``runs`` that lead to it."""
    links = (path for path in runs.glob("*") if path.is_symlink() and path.name != LAST)
    return sorted(link.name for link in links if link.resolve() == folder.resolve())


def resolve_names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the folder of a run in place of each ``@NAME``.

    ``--option=@NAME`` means the same as ``--option @NAME``, and ``--grid SETTING=@NAME,@NAME`` has a name for
    each value. The folder of runs is that of ``--runs`` if it is among the words, and no name itself. The
    texts behind TEXT_OPTIONS stay as they are. SettingError for a name of no run, or of a run that was
    deleted.
    """
    runs = _folder_of_runs(words)
    resolved: list[str] = []
    option = ""  # the one before a word
    for word in words:
        if not word.startswith("--"):
            resolved.append(_resolve_value(option, word, runs))
            continue
        option, equals, value = word.partition("=")
        if equals:
            word = f"{option}={_resolve_value(option, value, runs)}"
            option = ""  # behind "=" an option has one value, and no more
        resolved.append(word)
    return resolved


def _resolve_value(option: str, value: str, runs: Path) -> str:
    """Return a value of ``option``, "" for a positional argument, with the folder of a run for each name."""
    if option.replace("_", "-") in TEXT_OPTIONS:
        return value
    if option == "--grid":
        return _NAME_IN_GRID.sub(lambda found: _quoted(_resolve(found[0], runs)), value)
    return _resolve(value, runs)


def _quoted(value: str) -> str:
    """Return a value of a grid in quotes, since commas in it separate no values."""
    inside = value.replace("'", "'\"'\"'")
    return f"'{inside}'"


def _folder_of_runs(words: Sequence[str]) -> Path:
    """Return the folder of runs that the words of a command line name, by default RUNS."""
    runs = RUNS
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        folder = value if equals else following
        if option == "--runs" and not folder.startswith("@"):
            runs = Path(folder)
    return runs


def _is_named_run(path: Path) -> bool:
    """Return whether a path in the folder of runs is a link that is not broken, or a run's own folder."""
    return (path.is_symlink() and path.exists()) or (path / SETTINGS).exists()


def _resolve(word: str, runs: Path) -> str:
    """Return the folder that ``@NAME`` or ``@NAME:STAGE`` means, with the stage; other words unchanged."""
    named, colon, stage = word.partition(":")
    if (found := _NAME.fullmatch(named)) is None:
        return word
    link = runs / found[1]
    if not link.is_symlink() and not (link / SETTINGS).exists():
        known = sorted(path.name for path in runs.glob("*") if _is_named_run(path))
        hint = "; `lm run ROW --name NAME` gives a name; a run in another folder of runs is FOLDER/NAME"
        if known:
            hint = did_you_mean(found[1], known)
        raise SettingError(f"no run in {runs} is called {found[1]!r}{hint}")
    folder = Path(os.path.relpath(link.resolve()))
    if not folder.exists():
        raise SettingError(f"{named} names a run that is gone: {folder}; remove the link {link}")
    return f"{folder}{colon}{stage}"
