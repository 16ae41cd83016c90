"""``lm plan``: what rows will need on a TPU slice, compiled here, and printed before anything is paid for."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.console import CONSOLE, Cell, show_sheet
from experiments.plan.compiler import Compiled, Features, check_compiler, compile_step, features, program_key
from experiments.plan.estimate import ASSUMPTIONS, BOUNDS, Estimate, estimate, flops_of, needed, writing
from experiments.plan.search import candidates, memory
from experiments.plan.slices import GIB, Slice, find_slice
from experiments.study.experiment import BASELINE, Experiment, apply
from experiments.study.registry import build, find_one
from experiments.study.scales import SCALES
from lm import sharding
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.nn.config import ModelConfig
from lm.nn.sizes import SIZES
from lm.settings import SettingError, change, diff, leaves, nearest
from lm.train.step import check_mesh

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
    row: str  # its name, short where that will do
    label: str  # what it is called where arrangements of one row are compared
    experiment: Experiment
    place: Slice
    batch: Features
    lengths: Lengths
    compiled: Compiled = Compiled()

    @property
    def estimate(self) -> Estimate:
        return estimate(self.experiment, self.lengths, self.place, self.compiled)

    @property
    def fits(self) -> bool:
        return (
            self.compiled.cycles > 0 and not self.compiled.over and needed(self.compiled) <= self.place.room
        )

    def compile(self, folder: Path) -> Compiled:
        mesh, remat = _arrangement(self.experiment, self.place)
        about = f"  {self.row} ({mesh}, remat {remat}): "
        return compile_step(
            self.experiment,
            self.batch,
            self.place,
            folder,
            lambda line: CONSOLE.print(about + line, highlight=False, markup=False),
        )


def row_of(name: str, scale: str, size: str, mesh: str) -> Experiment:
    """Row ``name`` at ``scale``, of a published ``size`` if one is named, on a ``mesh`` such as
    "fsdp=8,tensor=2".
    """
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
    rows: Mapping[str, Experiment],
    scale: str,
    size: str,
    topology: str,
    runs: Path,
    price: float,
    search: bool,
) -> None:
    """Compile each row, or with ``search`` a few arrangements of each, for the slice, and print what it comes
    to.
    """
    check_compiler()
    wanted, last = [], [name.rpartition("/")[2] for name in rows]
    for name, experiment in rows.items():
        row = short if last.count(short := name.rpartition("/")[2]) == 1 else name
        place = find_slice(topology, experiment.mesh.slice)
        batch, lengths = features(experiment)
        tried = candidates(experiment, lengths, place) if search else [experiment]
        for each in tried:
            _check(each, place, lengths)
            label = f"{row} {', '.join(_arrangement(each, place))}" if search else row
            wanted.append(Plan(name, row, label, each, place, batch, lengths))
    plans = _compile_all(wanted, runs / "cache" / "plans")
    _show(plans, scale, size, price)
    for name in rows if search else ():
        text = _recommended([plan for plan in plans if plan.name == name], scale)
        CONSOLE.print(text, highlight=False, markup=False, soft_wrap=True)
    if any(plan.compiled.failed for plan in plans):
        sys.exit(1)


def _check(experiment: Experiment, place: Slice, lengths: Lengths) -> None:
    phase, sizes = experiment.pretraining, experiment.mesh.sizes(place.devices)
    check_mesh(experiment.model, sizes, phase.batch_size, phase.microbatches)
    sharding.check_rows(max(lengths.inputs, row_length(experiment.model.architecture, lengths)), sizes)


def _compile_all(wanted: Sequence[Plan], folder: Path) -> list[Plan]:
    """Each program once, as many at a time as there are processors, since compiling is mostly one thread's
    work.
    """
    keys = [program_key(plan.experiment, plan.batch, plan.place) for plan in wanted]
    first = dict(zip(reversed(keys), reversed(wanted), strict=True))
    CONSOLE.print(
        f"programs: {len(first)}; each takes a minute or more to compile, and no time if it was before"
    )
    with ThreadPoolExecutor(min(os.cpu_count() or 1, AT_ONCE)) as pool:
        try:
            done = dict(zip(first, pool.map(lambda plan: plan.compile(folder), first.values()), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [replace(plan, compiled=done[key]) for plan, key in zip(wanted, keys, strict=True)]


def _arrangement(experiment: Experiment, place: Slice) -> tuple[str, str]:
    """Mesh, and rematerialisation with micro-batches, as they are shown."""
    parts, sizes = experiment.pretraining.microbatches, experiment.mesh.sizes(place.devices).items()
    mesh = " ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "1"
    return mesh, experiment.model.remat + f", {parts} parts" * (parts > 1)


def _show(plans: Sequence[Plan], scale: str, size: str, price: float) -> None:
    place, batches = plans[0].place, sorted({plan.experiment.pretraining.batch_size for plan in plans})
    about = f"{place.name}{f' x {place.count}' * (place.count > 1)}, {place.chips} chips, scale {scale}"
    about += f", size {size}" * bool(size)
    if batches != [apply(BASELINE, SCALES[scale]).pretraining.batch_size]:
        about += f", batch {' or '.join(map(str, batches))}"
    title = f"{about}: what a step fills of the {place.room / GIB:.2f} GiB of each device [GiB]"
    _print(
        title,
        ["row", "mesh", "remat", "parameters", "args", "temps", "code", "all", "fits"],
        map(_memory, plans),
    )
    known, heads = (
        [plan for plan in plans if plan.compiled.cycles],
        ["row", "tokens", "TFLOP", *BOUNDS, "use"],
    )
    title = "What bounds a step [ms]; its tokens and TFLOP are the whole slice's, padding too"
    _print(title, heads, map(_time, known))
    heads = ["row", "pre-training", "fine-tuning", *["cost"] * (price > 0)]
    _print("The whole run: chip-hours, at least", heads, [_run(plan, price) for plan in known])
    heads = ["row", "kind", "over", "times", "MiB", "ms"]
    title = "What each device receives in a step, without what takes less than 1 % of the time"
    _print(title, heads, [line for plan in plans for line in _traffic(plan)])
    heads = ["row", "a sequence's cache", "batch 1", "largest batch", "with that"]
    lines = [
        _writing(plan) for plan in {plan.name: plan for plan in plans if plan.compiled.parameters}.values()
    ]
    title = "Writing: the ceiling on tokens/s over all chips that reading HBM sets, parameters in float32"
    _print(title, heads, filter(None, lines))
    for plan in plans:
        for line in _remarks(plan):
            CONSOLE.print(f"{plan.label}: {line}", highlight=False, markup=False, soft_wrap=True)
    CONSOLE.print(ASSUMPTIONS, highlight=False, markup=False, style="dim")


def _print(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    if columns := list(zip(*lines, strict=True)):
        show_sheet(title, {head: list(map(Cell, x)) for head, x in zip(heads, columns, strict=True)})


def _memory(plan: Plan) -> list[str]:
    compiled = plan.compiled
    line = [plan.row, *_arrangement(plan.experiment, plan.place), f"{_digits(compiled.parameters / 1e6)} M"]
    filled = (compiled.arguments + compiled.outputs, compiled.temporaries, compiled.code, needed(compiled))
    line += [_digits(part / GIB) if part else "-" for part in filled]
    return [*line, "failed" if compiled.failed else "yes" if plan.fits else "NO"]


def _time(plan: Plan) -> list[str]:
    size, lengths, made = plan.experiment.pretraining.batch_size, plan.lengths, plan.estimate
    flops = flops_of(plan.experiment, size, lengths)
    line = [plan.label, f"{size * (lengths.inputs + lengths.targets):,}", _digits(flops / 1e12)]
    line += [_digits(1e3 * made.bounds[name]) + " *" * (name == made.bound) for name in BOUNDS]
    return [*line, f"{made.utilization:.0%}"]


def _run(plan: Plan, price: float) -> list[str]:
    hours = plan.estimate.chip_hours
    return [plan.label, *map(_digits, hours), *[f"${_digits(sum(hours) * price)}"] * (price > 0)]


def _digits(number: float) -> str:
    """Three digits that count, or all of a larger whole number."""
    return f"{number:,.0f}" if number >= 99.95 or not number else f"{number:#.3g}"


def _traffic(plan: Plan) -> list[list[str]]:
    """A line for each kind of collective over each axis that takes a hundredth of all the time."""
    sums: dict[tuple, list[float]] = {}
    for kind, axes, size, times, received in plan.compiled.collectives:
        found = sums.setdefault((kind, " x ".join(axes)), [0, 0.0, 0.0])
        moved = times * received
        for index, value in enumerate(
            (times, moved / 2**20, 1e3 * moved / plan.place.bandwidth(tuple(axes), size))
        ):
            found[index] += value
    least = sum(found[2] for found in sums.values()) / 100
    return [
        [plan.label, *key, f"{times:,}", _digits(mib), _digits(ms)]
        for key, (times, mib, ms) in sorted(sums.items(), key=lambda pair: -pair[1][2])
        if ms > least
    ]


def _writing(plan: Plan) -> list[str]:
    found = writing(plan.experiment, plan.lengths, plan.place, plan.compiled)
    if not found:
        return []
    cache = f"{_digits(found.cache / 2**20)} MiB of {plan.experiment.model.dtype}"
    return [plan.row, cache, _digits(found.single), f"{found.batch:,}", _digits(found.full)]


def _remarks(plan: Plan) -> list[str]:
    compiled = plan.compiled
    lines = [compiled.failed] if compiled.failed else []
    for elements, axes, times, source in compiled.unexpected:
        lines.append(
            f"gathers {max(elements):,} elements over {' x '.join(axes)}, {times} times a step: {source}"
        )
    if compiled.kernels:
        lines.append(
            f"{compiled.kernels} calls of attention's kernel a step, whose time the compiler does not count"
        )
    if compiled.lost:
        lines.append(
            f"{compiled.lost} tensors are made whole on every device, for want of a way to reshard them"
        )
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
                return f"Try {options(experiment, changed)}"
    return "Take a larger slice, or see what --search finds"


def options(old: Experiment, new: Experiment) -> str:
    """What to add to a command line to come from ``old`` to ``new``."""
    words = []
    for path, (_, value) in diff(old, new).items():
        group, dot, last = path.rpartition(".")
        values = () if isinstance(value, bool) else value if isinstance(value, tuple) else (value,)
        words += [f"--{group}{dot}{'no-' * (value is False)}{last}", *map(str, values)]
    return shlex.join(words)


def _recommended(plans: Sequence[Plan], scale: str) -> str:
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return f"{plans[0].name}: none of these fits; take a larger slice"
    best = min(fitting, key=lambda plan: plan.estimate.step)
    paste = options(build(best.name, scale), best.experiment)
    return f"The fastest that fits:\n  lm run {best.name} --scale {scale} {paste}"
