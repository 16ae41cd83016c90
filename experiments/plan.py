"""``lm plan``: what rows will need on a TPU slice, compiled here, and printed before anything is paid for."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.chips import GIB, Slice, find_slice
from experiments.commands import CONSOLE, grid
from experiments.experiment import BASELINE, Experiment, apply
from experiments.planning.compiler import Compiled, Features, check_compiler, compile_step, features, program_key
from experiments.planning.estimate import ASSUMPTIONS, BOUNDS, Estimate, estimate, flops_of, needed, writing
from experiments.planning.search import candidates, memory
from experiments.registry import build, find_one
from experiments.scales import SCALES
from experiments.sheets import Cell
from lm import sharding
from lm.config import SettingError, change, diff, leaves, nearest
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.mesh import shown
from lm.nn.config import ModelConfig
from lm.nn.sizes import SIZES

AT_ONCE = 4  # programs that are compiled side by side, at up to 3 GB each
SHAPE = ("num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "d_kv", "num_heads")
SMALLER = (  # what to try, in this order, on a step that does not fit
    {"model.remat": "dots"},
    *({"model.remat": "full", "pretraining.microbatches": parts} for parts in (1, 2, 4, 8, 16)),
)


@dataclass(frozen=True)
class Plan:
    """A row on a slice, its batch, what the compiler came to, and what follows."""

    name: str
    experiment: Experiment
    place: Slice
    batch: Features
    lengths: Lengths
    compiled: Compiled = Compiled()

    @property
    def label(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def estimate(self) -> Estimate:
        return estimate(self.experiment, self.lengths, self.place, self.compiled)

    @property
    def fits(self) -> bool:
        return not self.compiled.failed and needed(self.compiled) <= self.place.room

    def compile(self, folder: Path) -> Compiled:
        mesh = shown(self.experiment.mesh.sizes(self.place.devices))
        about = f"  {self.label} ({mesh}, remat {self.experiment.model.remat}): "
        return compile_step(
            self.experiment, self.batch, self.place, folder,
            lambda line: CONSOLE.print(about + line, highlight=False, markup=False),
        )  # fmt: skip


def row_of(name: str, scale: str, size: str, mesh: str) -> Experiment:
    """Row ``name`` at ``scale``, of a published ``size`` if one is named, on a ``mesh`` such as "fsdp=8,tensor=2"."""
    experiment = build(name, scale)
    if size:
        if size not in SIZES:
            raise SettingError(f"--size {size}: no published model is called so{nearest(size, SIZES)}")
        plain = dict(leaves(ModelConfig()))
        new = {f"model.{path}": x for path, x in leaves(SIZES[size]) if path in SHAPE or x != plain[path]}
        experiment = apply(apply(apply(BASELINE, SCALES[scale]), new), find_one(name).changes)
    for part in filter(None, mesh.split(",")):
        axis, _, number = part.partition("=")
        if not number.removeprefix("-").isdigit():
            raise SettingError(f"--mesh {mesh} should read AXIS=SIZE,AXIS=SIZE, such as fsdp=8,tensor=2")
        experiment = change(experiment, f"mesh.{axis.strip()}", int(number))
    return experiment


def show_plans(
    rows: Mapping[str, Experiment], scale: str, topology: str, runs: Path, price: float, search: bool
) -> None:
    """Compile each row, or with ``search`` a few arrangements of each, for the slice, and print what it comes to."""
    check_compiler()
    wanted = []
    for name, experiment in rows.items():
        place = find_slice(topology, experiment.mesh.slice)
        batch, lengths = features(experiment)
        tried = candidates(experiment, lengths, place) if search else [experiment]
        if not tried:
            raise SettingError(f"--topology {topology}: no arrangement of {name} fits, by a rough count; take a larger")
        for each in tried:
            _check(each, place, lengths)
        wanted += [Plan(name, each, place, batch, lengths) for each in tried]
    plans = _compile_all(wanted, runs / "cache" / "plans")
    _show(plans, scale, price)
    for name in rows if search else ():
        CONSOLE.print(_recommended([plan for plan in plans if plan.name == name], scale), soft_wrap=True)
    if any(plan.compiled.failed for plan in plans):
        sys.exit(1)


def _check(experiment: Experiment, place: Slice, lengths: Lengths) -> None:
    phase, sizes = experiment.pretraining, experiment.mesh.sizes(place.devices)
    sharding.check(experiment.model, sizes, phase.batch_size, phase.microbatches)
    sharding.check_rows(max(lengths.inputs, row_length(experiment.model.architecture, lengths)), sizes)


def _compile_all(wanted: Sequence[Plan], folder: Path) -> list[Plan]:
    """Each program once, as many at a time as there are processors, since compiling is mostly one thread's work."""
    keys = [program_key(plan.experiment, plan.batch, plan.place) for plan in wanted]
    first = dict(zip(reversed(keys), reversed(wanted), strict=True))
    CONSOLE.print(f"programs: {len(first)}; each takes a minute or more to compile, and no time if it was before")
    with ThreadPoolExecutor(min(os.cpu_count() or 1, AT_ONCE)) as pool:
        try:
            done = dict(zip(first, pool.map(lambda plan: plan.compile(folder), first.values()), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [replace(plan, compiled=done[key]) for plan, key in zip(wanted, keys, strict=True)]


def _show(plans: Sequence[Plan], scale: str, price: float) -> None:
    place = plans[0].place
    chips = f"{place.name}{f' x {place.count}' * (place.count > 1)}, {place.chips} chips, scale {scale}"
    title = f"{chips}: what training fills of the {place.room / GIB:.2f} GiB of a device"
    _print(title, ["row", "mesh", "remat", "parameters", "args", "temps", "code", "all", "fits"], map(_memory, plans))
    heads = ["row", "tokens", "TFLOP", *BOUNDS, "use", "chip-hours", *["cost"] * (price > 0)]
    fitting = [_time(plan, price) for plan in plans if plan.compiled.cycles]
    _print("What bounds a step [ms], and the whole run", heads, fitting)
    heads = ["row", "kind", "over", "times", "MiB", "ms"]
    _print("What a device receives in a step", heads, [line for plan in plans for line in _traffic(plan)])
    heads = ["row", "a sequence's cache", "batch 1", "largest batch", "with that"]
    lines = [_writing(plan) for plan in {plan.name: plan for plan in plans}.values()]
    _print("Writing: tokens/s of the slice, as far as reading HBM allows", heads, filter(None, lines))
    for plan in plans:
        for line in _remarks(plan):
            CONSOLE.print(f"{plan.label}: {line}", highlight=False, markup=False, soft_wrap=True)
    CONSOLE.print(ASSUMPTIONS, highlight=False, markup=False, style="dim")


def _print(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    if columns := list(zip(*lines, strict=True)):
        CONSOLE.print(grid(title, {head: list(map(Cell, x)) for head, x in zip(heads, columns, strict=True)}))


def _memory(plan: Plan) -> list[str]:
    experiment, compiled, parts = plan.experiment, plan.compiled, plan.experiment.pretraining.microbatches
    sizes = experiment.mesh.sizes(plan.place.devices).items()
    mesh = " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "1"
    line = [plan.label, mesh, experiment.model.remat + f", {parts} parts" * (parts > 1)]
    line.append(f"{compiled.parameters / 1e6:,.{0 if compiled.parameters > 1e7 else 2}f} M")
    filled = (compiled.arguments + compiled.outputs, compiled.temporaries, compiled.code, needed(compiled))
    line += [f"{part / GIB:.2f}" if part else "-" for part in filled]
    return [*line, "failed" if compiled.failed else "yes" if plan.fits else "NO"]


def _time(plan: Plan, price: float) -> list[str]:
    size, lengths, made = plan.experiment.pretraining.batch_size, plan.lengths, plan.estimate
    line = [plan.label, f"{size * (lengths.inputs + lengths.targets):,}"]
    line.append(f"{flops_of(plan.experiment, size, lengths) / 1e12:,.0f}")
    line += [f"{1e3 * made.bounds[name]:,.1f}" + " *" * (name == made.bound) for name in BOUNDS]
    line += [f"{made.utilization:.0%}", f"{made.chip_hours:,.0f}"]
    return line + [f"${made.chip_hours * price:,.0f}"] * (price > 0)


def _traffic(plan: Plan) -> list[list[str]]:
    """A line for each kind of collective over each axis that takes a hundredth of all the time."""
    sums: dict[tuple, list[float]] = {}
    for kind, axes, size, times, received in plan.compiled.collectives:
        found = sums.setdefault((kind, " x ".join(axes)), [0, 0.0, 0.0])
        moved = times * received
        for index, value in enumerate((times, moved / 2**20, 1e3 * moved / plan.place.bandwidth(tuple(axes), size))):
            found[index] += value
    least = sum(found[2] for found in sums.values()) / 100
    return [
        [plan.label, *key, f"{times:,}", f"{mib:,.1f}", f"{ms:,.2f}"]
        for key, (times, mib, ms) in sorted(sums.items(), key=lambda pair: -pair[1][2])
        if ms > least
    ]


def _writing(plan: Plan) -> list[str]:
    found = writing(plan.experiment, plan.lengths, plan.place, plan.compiled)
    if not found:
        return []
    return [
        plan.label,
        f"{found.cache / 2**20:,.2f} MiB",
        f"{found.single:,.0f}",
        f"{found.batch:,}",
        f"{found.full:,.0f}",
    ]


def _remarks(plan: Plan) -> list[str]:
    compiled = plan.compiled
    lines = [compiled.failed] if compiled.failed else []
    for elements, axes, times, source in compiled.unexpected:
        lines.append(f"gathers {max(elements):,} elements over {' x '.join(axes)}, {times} times a step: {source}")
    if compiled.lost:
        lines.append(f"{compiled.lost} tensors are made whole on every device, for want of a way to reshard them")
    if not plan.fits and not compiled.failed:
        lines.append(f"does not fit. {_smaller(plan)}")
    return lines


def _smaller(plan: Plan) -> str:
    """The first of SMALLER that should fit, by the rough model set right by what the compiler found."""
    experiment, rough = plan.experiment, (plan.lengths, plan.place, plan.compiled.parameters)
    right = needed(plan.compiled) / memory(experiment, *rough)
    for mesh in (experiment.mesh, replace(experiment.mesh, fsdp=-1, data=1)):
        for new in SMALLER:
            changed = apply(replace(experiment, mesh=mesh), new)
            try:
                _check(changed, plan.place, plan.lengths)
            except SettingError:
                continue
            if changed != experiment and right * memory(changed, *rough) < plan.place.room:
                return f"Try {_options(experiment, changed)}"
    return "Take a larger slice, or see what --search finds"


def _options(old: Experiment, new: Experiment) -> str:
    """What to add to a command line to come from ``old`` to ``new``."""
    return " ".join(f"--{path} {value}" for path, (_, value) in diff(old, new).items())


def _recommended(plans: Sequence[Plan], scale: str) -> str:
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return f"{plans[0].name}: none of these fits; take a larger slice"
    best = min(fitting, key=lambda plan: plan.estimate.step)
    paste = _options(build(best.name, scale), best.experiment)
    return f"The fastest that fits:\n  lm run {best.name} --scale {scale} {paste}"
