"""Reads the records of a run, metrics.jsonl and run.json, which ``lm.train.runtime.log`` writes.

It also names the commit and the packages that they record. It does not import jax.
"""

import subprocess
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from lm.config.base import DataError, SettingError
from lm.files import parse_lines_with_checksum, parse_with_checksum

PACKAGES = """jax jaxlib flax optax orbax-checkpoint grain numpy scipy scikit-learn sentencepiece tokenizers
    sacrebleu rouge-score""".split()  # the packages that results depend on


def records(folder: str | Path) -> list[dict[str, Any]]:
    """Return all records of a run; a last line that is incomplete, since the process was killed, is left out.

    Raises DataError if a record was changed or lost.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        return []
    mend = f"put back a copy that is whole, or delete {folder} to train it anew"
    lines = parse_lines_with_checksum(path.read_bytes(), path, mend)
    if all(isinstance(line.get("step"), int) and isinstance(line.get("kind"), str) for line in lines):
        return lines
    raise DataError(f"{path} has a line that is no record of a run; {mend}")


def status(folder: Path) -> str:
    """Return the status of the last start: "running", "finished" or an error; "not begun" without one.

    Raises DataError if run.json is damaged.
    """
    path = folder / "run.json"
    if not path.exists():
        return "not begun"
    return str(parse_with_checksum(path.read_bytes(), path).get("status"))


def num_records_when_finished(folder: Path, step: int) -> int | None:
    """Return how many records the run had written when it finished at ``step``.

    Return None if its last start has not finished, finished at another step, or left a damaged run.json, of
    which the next start warns.
    """
    path = folder / "run.json"
    try:
        run = parse_with_checksum(path.read_bytes(), path)
    except (SettingError, OSError):
        return None
    if (run.get("status"), run.get("step")) != ("finished", step):
        return None
    count = run.get("records")
    return count if isinstance(count, int) else None


def last_start_finished(folder: Path) -> bool:
    """Return whether the last start finished; False if run.json is damaged, of which the next start warns."""
    try:
        return status(folder) == "finished"
    except (SettingError, OSError):
        return False


def packages() -> dict[str, str]:
    """Return the version of each package that results depend on."""
    return {name: metadata.version(name) for name in PACKAGES}


def now() -> str:
    """Return date, time and zone in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def current_commit() -> str | None:
    """Return the commit of this code, with "-dirty" if files differ; None if git does not track it."""
    file = Path(__file__)
    git = partial(subprocess.run, cwd=file.parent, capture_output=True, text=True, timeout=10)
    try:
        git(["git", "ls-files", "--error-unmatch", file.name], check=True)
        described = git(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
