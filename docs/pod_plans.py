"""Compile published T5 sizes for slices and pods of TPUs, and write the table of docs/hardware.md.

    python docs/pod_plans.py

It needs libtpu and no TPU. It compiles one step after the other, each in two to four minutes of a core, and
keeps in docs/pod_plans.json what the compiler found. A step of that file is not compiled again: remove the
file to compile all. With ``--table`` it compiles nothing and writes the table from that file.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.plan.compiler import check_compiler, compile_step, planned_step
from experiments.plan.estimate import estimate
from experiments.plan.plans import row_of
from experiments.plan.slices import GIB, Slice, find_slice
from experiments.plan.step import Compiled, PlannedStep
from experiments.study.experiment import Experiment
from lm.config.base import changes
from lm.files import write
from lm.objectives.denoising import Lengths

DOCS = Path(__file__).parent
PAGE, FOUND = DOCS / "hardware.md", DOCS / "pod_plans.json"
MARKS = "<!-- Made by docs/pod_plans.py; not to be edited. -->", "<!-- The end of what it made. -->"
ROW = "t5/1-baseline/baseline"
HEADS = (
    "size | slices | chips | inside a slice | remat | batch | HBM filled | step, at least | bound by | use "
    "| received inside | from other slices"
)


@dataclass(frozen=True)
class Cell:
    """One line of the table: a published size on several slices."""

    size: str
    topology: str
    slices: int
    mesh: str  # inside of a slice; data parallelism is over the slices
    remat: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.slices} x {self.topology}, {self.mesh}, {self.remat}, batch {self.batch}"

    @property
    def experiment(self) -> Experiment:
        """Return the settings: the size's with span corruption of 512 tokens, on this mesh."""
        new = {
            "objective.noise": "spans",
            "pretraining.batch_size": self.batch,
            "model.compile.remat": self.remat,
        }
        return changes(row_of(ROW, "base", self.size, f"slice={self.slices},{self.mesh}"), new)

    @property
    def target(self) -> Slice:
        return find_slice(self.topology, self.slices)


CELLS = (
    Cell("t5-base", "v5p:2x2x4", 2, "fsdp=16", "dots", 512),
    Cell("t5-base", "v6e:4x4", 4, "fsdp=16", "dots", 1_024),
    Cell("t5-large", "v6e:4x4", 2, "fsdp=16", "attention", 512),
    Cell("t5-large", "tpu7x:2x2x4", 2, "fsdp=32", "dots", 1_024),
    Cell("t5-3b", "v5p:4x4x4", 2, "fsdp=16,tensor=4", "dots", 1_024),
    Cell("t5-3b", "v6e:8x8", 4, "fsdp=16,tensor=4", "attention", 2_048),
    Cell("t5-3b", "tpu7x:2x4x4", 2, "fsdp=32,tensor=2", "dots", 1_024),
    Cell("t5-11b", "v5p:4x4x8", 2, "fsdp=32,tensor=4", "dots", 2_048),
    Cell("t5-11b", "v6e:16x16", 2, "fsdp=64,tensor=4", "attention", 4_096),
    Cell("t5-11b", "tpu7x:4x4x4", 4, "fsdp=32,tensor=4", "dots", 4_096),
)


def compile_cells(folder: Path) -> None:
    """Compile the steps that FOUND lacks, and write it after each; ``folder`` is a cache of programs."""
    check_compiler()
    for cell in CELLS:
        found = read_found()
        if cell.name in found:
            continue
        step = planned_step(cell.experiment, cell.target)
        compiled = compile_step(step, folder, lambda line, name=cell.name: print(f"{name}: {line}"))
        if compiled.failed:
            sys.exit(f"{cell.name}: {compiled.failed}")
        compiled = replace(compiled, collectives=summed(compiled.collectives))
        found[cell.name] = {"lengths": list(step.lengths), "compiled": asdict(compiled)}
        write(FOUND, json.dumps(found, indent=1) + "\n")


def summed(collectives: Iterable[tuple]) -> tuple[tuple, ...]:
    """Return one collective per kind, mesh axes and number of devices, with the bytes of all of a step."""
    totals: dict[tuple, float] = {}
    for kind, axes, size, times, received in collectives:
        key = kind, tuple(axes), size
        totals[key] = totals.get(key, 0) + times * received
    return tuple((*key, 1, total) for key, total in totals.items())


def read_found() -> dict[str, Any]:
    """Return what the compiler found, by the names of cells."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def table(found: Mapping[str, Any]) -> str:
    """Return the table of the cells that are compiled, in Markdown."""
    lines = [f"| {HEADS} |", "|" + "---|" * len(HEADS.split("|"))]
    for cell in (cell for cell in CELLS if cell.name in found):
        lengths, compiled = Lengths(*found[cell.name]["lengths"]), Compiled(**found[cell.name]["compiled"])
        lines.append(table_line(cell, PlannedStep(cell.experiment, cell.target, {}, lengths), compiled))
    return "\n".join(lines)


def table_line(cell: Cell, step: PlannedStep, compiled: Compiled) -> str:
    """Return a cell's line: memory and traffic of a device, and the step that they allow."""
    made, room = estimate(step, compiled), step.slices.room
    inside = sum(x[3] * x[4] for x in compiled.collectives if "slice" not in x[1])
    outside = [(x[3] * x[4], tuple(x[1]), x[2]) for x in compiled.collectives if "slice" in x[1]]
    seconds = sum(received / step.slices.bandwidth(axes, size) for received, axes, size in outside)
    columns = [
        cell.size.removeprefix("t5-"),
        f"{cell.slices} × {cell.topology}",
        f"{step.slices.chips:,}",
        cell.mesh.replace("=", " ").replace(",", ", "),
        cell.remat,
        f"{cell.batch:,}",
        f"{compiled.needed / GIB:.1f} of {room / GIB:.1f} GiB",
        f"{1e3 * made.step_seconds:.0f} ms",
        made.bottleneck,
        f"{made.utilization:.0%}".replace("%", " %"),
        f"{inside / GIB:.1f} GiB",
        f"{sum(x[0] for x in outside) / 2**20:.0f} MiB, {1e3 * seconds:.0f} ms",
    ]
    return f"| {' | '.join(columns)} |"


def page(text: str, made: str) -> str:
    """Return the page with this table between MARKS."""
    start, end = map(re.escape, MARKS)
    return re.sub(rf"(?s)({start}\n\n).*?(\n\n{end})", lambda found: found[1] + made + found[2], text)


def outdated() -> bool:
    """Return whether the page's table is not the one that FOUND gives."""
    text = PAGE.read_text("utf-8")
    return page(text, table(read_found())) != text


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        # the lines that FOUND has are of libtpu's own flags, and lines of one table are compiled alike
        os.environ["LIBTPU_INIT_ARGS"] = ""
        compile_cells(Path("runs") / "cache" / "plans")
    write(PAGE, page(PAGE.read_text("utf-8"), table(read_found())))
