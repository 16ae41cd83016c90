"""Reads where the model of a start comes from: its name on the hub, or the training of the run it copies."""

from pathlib import Path

from lm.files import write

HUB_NAME_FILE = "hub.txt"  # in the folder of a start: its name on the hub, if it is known
# in the folder of a start that was made from a run: how that run was trained, with a line for each stage
TRAINING_FILE = "training.txt"


def hub_name(start: Path) -> str | None:
    """Return what the hub calls the checkpoint of a start; None if it did not come from there."""
    path = start / HUB_NAME_FILE
    if not path.exists():
        return None
    return path.read_text("utf-8").strip() or None


def training_of_start(start: Path) -> list[str]:
    """Return how the run that a start copies was trained, a line per stage; [] if unknown."""
    path = start / TRAINING_FILE
    return path.read_text("utf-8").splitlines() if path.exists() else []


def copy_origin(start: Path, made: Path) -> None:
    """Copy what is known of a start's origin to another start, which was made of its weights."""
    for name in (HUB_NAME_FILE, TRAINING_FILE):
        if (start / name).exists():
            write(made / name, (start / name).read_text("utf-8"))
