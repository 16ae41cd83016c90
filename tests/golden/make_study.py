"""Writes study.json: what the study is called and where it lies, which a change of its inside may not change.

Of every row the settings at each scale, and of two seeds the name and folder of each stage of training, by
which runs find the pre-training that they share; of every command its options. Run it when one of these is
meant to change:

    python tests/golden/make_study.py
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path

from experiments.__main__ import dispatch
from experiments.cli import COMMANDS
from experiments.runs.stages import stages as stages_of_run
from experiments.study.registry import REGISTRY, build
from experiments.study.scales import DEFAULT_SCALE, PAPER_SCALE, SCALES
from experiments.study.table import BASELINE_SETUP
from lm.config.base import leaves

PLACE = Path(__file__).with_name("study.json")


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def settings(row: str, scale: str) -> str:
    return digest([(path, str(value)) for path, value in leaves(build(row, scale))])


def stages(row: str, scale: str, seed: int) -> str:
    """Names and folders, in order."""
    folder = Path("runs") / scale / row / f"seed-{seed}"
    trained = stages_of_run(build(row, scale, {"seed": seed}), folder, Path("runs") / "cache")
    return digest([(stage.name, os.path.relpath(stage.folder)) for stage in trained])


def options(command: str) -> list[str]:
    """The names that ``lm COMMAND --help-all`` has, sorted."""
    with redirect_stdout(io.StringIO()) as text:
        assert dispatch([*command.split(), "--help-all"]) == 0
    return sorted(set(re.findall(r"--[a-z][\w.-]*", text.getvalue())))


def rows(scales: Collection[str] = SCALES) -> dict[str, dict[str, list[str]]]:
    """Row -> scale -> its settings, and its stages with each of two seeds.

    Rows of a paper with a setup of its own are kept at two scales, since each has the same changes at others.
    """
    return {
        name: {
            scale: [settings(name, scale), *(stages(name, scale, seed) for seed in (0, 1))]
            for scale in sorted(scales)
            if row.setup == BASELINE_SETUP or scale in (PAPER_SCALE, DEFAULT_SCALE)
        }
        for name, row in REGISTRY.items()
        if not row.needs
    }


def written(found: dict) -> str:
    """JSON with a line for each row and command, so that a difference shows whose it is."""
    parts = [
        f'"{name}": {{\n' + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in part.items()) + "\n}"
        for name, part in found.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    PLACE.write_text(
        written({"rows": rows(), "options": {command: options(command) for command in COMMANDS}})
    )
