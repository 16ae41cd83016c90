"""``lm plan``: what rows will need on a TPU slice, compiled here, and printed before anything is paid for."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from rich.table import Table

from experiments.console import CONSOLE, RUNS, Cell, print_line, show_sheet
from experiments.plan.compiler import (
    check_compiler,
    compile_step,
    libtpu_init_args,
    planned_step,
    program_key,
)
from experiments.plan.estimate import (
    BOUNDS,
    COLUMN_MEANINGS,
    Estimate,
    candidates,
    estimate,
    estimate_decoding,
    memory,
)
from experiments.plan.slices import GIB, find_slice
from experiments.plan.step import Compiled, PlannedStep
from experiments.runs.checks import check_heads
from experiments.study.changes import Overrides, apply
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.overrides import effective_overrides
from experiments.study.papers.setups import SENTINELS, SPECIAL
from experiments.study.plugins import plugin_arguments
from experiments.study.registry import build, find_one
from experiments.study.scales import DEFAULT_SCALE, PAPER_SCALE, SCALES
from experiments.study.table import Row
from experiments.study.words import setting_arguments
from lm import sharding
from lm.config.base import SettingError, change, did_you_mean, diff, leaves
from lm.config.model import ModelConfig
from lm.data.packing import row_length
from lm.nn.presets import PRESETS
from lm.train.checks import check_mesh

PROGRAMS_AT_ONCE = 4  # programs that are compiled side by side, at up to 3 GB each
# Settings of a model that a published size always sets. Its other settings are taken only where they differ
# from the defaults, so that those of the scale stay.
SIZE_SETTINGS = """num_encoder_layers num_decoder_layers d_model mlp.d_ff attention.d_kv attention.num_heads
    vocab_size compile.layers""".split()
MEMORY_SAVING_CHANGES: tuple[Overrides, ...] = (  # advised in this order if a step does not fit
    {"model.compile.loss_chunks": 4},
    {"model.compile.remat": "dots"},
    {"model.compile.remat": "attention"},
    *({"model.compile.remat": "full", "pretraining.microbatches": parts} for parts in (1, 2, 4, 8, 16)),
)


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``lm plan`` beside the settings of its rows."""

    topology: str = "v5e:4x4"  # generation and shape of the slice: v4, v5e, v5p, v6e, tpu7x; as v5p:4x4x8
    # sizes of the mesh's axes, such as fsdp=8,tensor=2 or slice=2; data gets the remaining devices
    mesh: str = ""
    scale: str = DEFAULT_SCALE  # size of the study
    # published model whose layers, widths and vocabulary replace the scale's, and at scale base the paper's,
    # such as t5-11b; the row's own changes come after it
    size: str = ""
    # compile the row's own mesh, rematerialisation and micro-batches and five likely others, and recommend
    # the fastest of them
    search: bool = False
    price: float = 0.0  # price of a chip-hour; 0: unknown [dollars]
    runs: Path = RUNS  # folder of the runs, whose cache keeps what was compiled

    def __post_init__(self) -> None:
        if not 0 <= self.price < inf:
            raise SettingError(f"--price {self.price:g} should be a number of dollars, or 0 for none")


@dataclass(frozen=True)
class Plan:
    """A row on a slice: its step, and what the compiler found."""

    name: str  # full name of the row, such as "t5/6-corruption-rate/15"
    short_name: str  # the part behind the last "/"; the full name if another planned row has the same part
    label: str  # the short name, with mesh and rematerialisation if arrangements of a row are compared
    step: PlannedStep
    compiled: Compiled = field(default_factory=Compiled)

    @property
    def estimate(self) -> Estimate:
        """Return the lower bounds of the step's time."""
        return estimate(self.step, self.compiled)

    @property
    def fits(self) -> bool:
        """Return whether the step was compiled and fits the memory of a device."""
        compiled = self.compiled
        return compiled.cycles > 0 and not compiled.over and compiled.needed <= self.step.slices.room

    def compile(self, folder: Path) -> Compiled:
        """Return the compiled step, which is cached in ``folder``, and print its progress."""
        mesh, remat = self.step.arrangement
        prefix = f"  {self.short_name} ({mesh}, remat {remat}): "
        return compile_step(self.step, folder, lambda line: print_line(prefix + line))


def row_of(name: str, scale: str, size: str, mesh: str) -> Experiment:
    """Return row ``name`` at ``scale`` on a ``mesh`` such as "fsdp=8,tensor=2".

    size: name of a published model whose layers, widths and vocabulary replace those of the scale before the
    changes of the row are applied; "" keeps those of the scale.
    """
    experiment = build(name, scale)
    if size:
        experiment = _of_published_size(find_one(name), scale, size)
    for part in filter(None, mesh.split(",")):
        axis, _, number = part.partition("=")
        if not number.removeprefix("-").isdecimal():
            raise SettingError(f"--mesh {mesh} should read AXIS=SIZE,AXIS=SIZE, such as fsdp=8,tensor=2")
        experiment = change(experiment, f"mesh.{axis.strip()}", int(number))
    return experiment


def _of_published_size(row: Row, scale: str, size: str) -> Experiment:
    """Return ``row`` as ``build`` does, but with the model of PRESETS named ``size`` in place of the scale's.

    At scale base the row's paper gives batch, lengths, rates and data as ever, but not the size of the model.
    """
    if size not in PRESETS:
        raise SettingError(f"--size {size}: unknown model size{did_you_mean(size, PRESETS)}")
    plain = dict(leaves(ModelConfig()))
    new = {
        f"model.{path}": x for path, x in leaves(PRESETS[size]) if path in SIZE_SETTINGS or x != plain[path]
    }
    at_base = row.setup.at_base if scale == PAPER_SCALE else {}
    training = {path: x for path, x in at_base.items() if path.partition(".")[0] != "model"}
    experiment = apply(apply(BASELINE, SCALES[scale]), new)
    pieces = PRESETS[size].vocab_size - SENTINELS - SPECIAL
    if "data.vocabulary_size" in training:
        training["data.vocabulary_size"] = pieces
    elif experiment.data.vocabulary_size > pieces:
        experiment = change(experiment, "data.vocabulary_size", pieces)
    experiment = apply(experiment, {**row.setup.changes, **training})
    # on their own, as in ``build``: a factor multiplies the setup's value, a whole group replaces its parts
    return apply(experiment, row.changes)


def show_plans(rows: Mapping[str, Experiment], options: PlanOptions) -> None:
    """Compile each row, or with ``search`` a few arrangements of each, and print what they need."""
    rows = _of_networks(rows)
    slices = {name: find_slice(options.topology, row.mesh.slice) for name, row in rows.items()}
    check_compiler()
    plans, last_parts = [], [name.rpartition("/")[2] for name in rows]
    for (name, experiment), last_part in zip(rows.items(), last_parts, strict=True):
        short_name = last_part if last_parts.count(last_part) == 1 else name
        step = planned_step(experiment, slices[name])
        for tried in _searched(step, options) if options.search else [step]:
            _check(tried)
            label = f"{short_name} {', '.join(tried.arrangement)}" if options.search else short_name
            plans.append(Plan(name, short_name, label, tried))
    plans = _compile_all(plans, options.runs / "cache" / "plans")
    _show(plans, options)
    for name in rows if options.search else ():
        print_line(_recommended([plan for plan in plans if plan.name == name], options.scale))
    if options.size and not options.search:
        for plan in plans:
            print_line(f"To train it:\n  {_run_line(plan, options.scale)}")
    if any(plan.compiled.failed for plan in plans):
        sys.exit(1)


def _searched(step: PlannedStep, options: PlanOptions) -> list[PlannedStep]:
    """Return what a search compiles: the row's own arrangement, on --mesh if given, and likely others."""
    try:
        _check(step)
    except SettingError as error:
        if options.mesh:
            raise
        print_line(f"not tried: the row's own arrangement, since {error}")
        return candidates(step)
    own = step.arrangement, step.experiment.model.compile
    others = [each for each in candidates(step) if (each.arrangement, each.experiment.model.compile) != own]
    return [step, *others]


def _of_networks(rows: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Return the rows that train a network, and print those of counts; SettingError if no row is left."""
    counted = [name for name, experiment in rows.items() if experiment.counts.model != "none"]
    text = f"{', '.join(counted)}: models of counts, for which nothing is compiled"
    if len(counted) == len(rows):
        raise SettingError(text)
    if counted:
        print_line(text)
    return {name: experiment for name, experiment in rows.items() if name not in counted}


def _check(step: PlannedStep) -> None:
    """Raise SettingError if the model has no such step, or the step cannot be spread over the slice."""
    model, phase, lengths = step.experiment.model, step.experiment.pretraining, step.lengths
    check_heads(step.experiment)
    if teacher := step.experiment.distillation.teacher:
        raise SettingError(
            f"distillation.teacher={teacher!r}: what is planned is a step without a teacher, whose "
            "parameters and forward pass come on top; leave distillation.* out to plan the student alone"
        )
    if not model.has_decoder and model.output.logits == "none" and "replaced-token" not in model.heads:
        what = "planned is the step of pre-training, by which an encoder predicts hidden tokens"
        raise SettingError(f"{what}: this one has no output matrix (model.output.logits='none')")
    check_mesh(model, step.sizes, phase.batch_size, phase.microbatches)
    sharding.check_length(max(lengths.inputs, row_length(model.architecture, lengths)), step.sizes)


def _compile_all(plans: Sequence[Plan], folder: Path) -> list[Plan]:
    """Compile each distinct program once, several at a time: compiling one takes mostly a single thread."""
    keys = [program_key(plan.step) for plan in plans]
    plan_of_program: dict[str, Plan] = {}
    for key, plan in zip(keys, plans, strict=True):
        plan_of_program.setdefault(key, plan)
    CONSOLE.print(
        f"programs: {len(plan_of_program)}; each takes a minute or more to compile, unless it is cached"
    )
    with ThreadPoolExecutor(min(os.cpu_count() or 1, PROGRAMS_AT_ONCE)) as pool:
        try:
            compiled = pool.map(lambda plan: plan.compile(folder), plan_of_program.values())
            programs = dict(zip(plan_of_program, compiled, strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [replace(plan, compiled=programs[key]) for plan, key in zip(plans, keys, strict=True)]


def _show(plans: Sequence[Plan], options: PlanOptions) -> None:
    """Print all tables, remarks, and what their columns mean."""
    slices, room = [plan.step.slices for plan in plans], plans[0].step.slices.room
    batches = sorted({plan.step.experiment.pretraining.batch_size for plan in plans})
    scale_batch_size = apply(BASELINE, SCALES[options.scale]).pretraining.batch_size
    names = []
    for each in slices:
        times = f" x {each.count}" if each.count > 1 else ""
        names.append(f"{each.name}{times}, {each.chips} chips")
    title = f"{' or '.join(dict.fromkeys(names))}, scale {options.scale}"
    if options.size:
        title += f", size {options.size}"
    if batches != [scale_batch_size]:
        title += f", batch {' or '.join(map(str, batches))}"
    title += f": what a step fills of each device's {room / GIB:.2f} GiB, in GiB"
    uses_host = any(plan.compiled.host for plan in plans)
    memory_column_names = "row, mesh, remat, parameters, args, temps, code, all"
    if uses_host:
        memory_column_names += ", host"
    memory_column_names += ", fits"
    _print_table(title, memory_column_names, [_memory_cells(plan, uses_host) for plan in plans])
    compiled_plans, price = [plan for plan in plans if plan.compiled.cycles], options.price
    title = "What bounds a step [ms]; its tokens and TFLOP are the whole slice's, padding too"
    bounds = [name for name in BOUNDS if name != "host" or any(plan.compiled.host for plan in plans)]
    lines = [_time_cells(plan, bounds) for plan in compiled_plans]
    _print_table(title, f"row, tokens, TFLOP, {', '.join(bounds)}, use", lines)
    lines = [_chip_hours_cells(plan, price) for plan in compiled_plans]
    column_names = "row, pre-training, fine-tuning, hours here"
    if price > 0:
        column_names += ", cost"
    title = "The whole run, at least: chip-hours, and hours on the row's slices"
    _print_table(title, column_names, lines)
    title = "What each device receives in a step, without what takes less than 1 % of the time"
    lines = [line for plan in plans for line in _collective_lines(plan)]
    _print_table(title, "row, kind, over, times, MiB, ms", lines)
    title = "Decoding: upper bound on tokens/s of all chips by the bandwidth of HBM, parameters in float32"
    last_plans = {plan.name: plan for plan in plans if plan.compiled.parameters}.values()
    column_names = "row, cache per sequence, tokens/s at batch 1, largest batch, tokens/s at that batch"
    _print_table(title, column_names, filter(None, map(_decoding_cells, last_plans)))
    for plan in plans:
        for line in _remarks(plan):
            print_line(f"{plan.label}: {line}")
    legend = Table.grid(padding=(0, 2))
    for column, meaning in COLUMN_MEANINGS.items():
        if column in (*memory_column_names.split(", "), *bounds, "*", "use"):
            legend.add_row(column, meaning)
    CONSOLE.print(legend, style="dim")
    for line in _libtpu_flag_lines(plans):
        CONSOLE.print(line, highlight=False, markup=False, style="dim")


def _libtpu_flag_lines(plans: Sequence[Plan]) -> list[str]:
    """Return a line for each set of libtpu flags with which the plans are compiled."""
    source = "from LIBTPU_INIT_ARGS" if "LIBTPU_INIT_ARGS" in os.environ else "as lm launch sets them"
    each = dict.fromkeys(libtpu_init_args(plan.step.slices) for plan in plans)
    return [f"libtpu flags ({source}): {flags or 'none'}" for flags in each]


def _print_table(title: str, column_names: str, lines: Iterable[Sequence[str]]) -> None:
    """Print a table with these columns, or nothing if it has no lines."""
    if columns := list(zip(*lines, strict=True)):
        cells = [list(map(Cell, column)) for column in columns]
        show_sheet(title, dict(zip(column_names.split(", "), cells, strict=True)))


def _memory_cells(plan: Plan, shows_host: bool) -> list[str]:
    """Return the cells of a plan's line in the table of memory."""
    compiled = plan.compiled
    parts = [compiled.arguments + compiled.outputs, compiled.temporaries, compiled.code, compiled.needed]
    if shows_host:
        parts.append(compiled.host)
    filled = [_digits(part / GIB) if part else "-" for part in parts]
    verdict = "yes" if plan.fits else "NO"
    if compiled.failed:
        verdict = "failed"
    return [
        plan.short_name,
        *plan.step.arrangement,
        f"{_digits(compiled.parameters / 1e6)} M",
        *filled,
        verdict,
    ]


def _time_cells(plan: Plan, names: Sequence[str]) -> list[str]:
    """Return the cells of a plan's line in the table of what bounds a step, whose columns are ``names``."""
    size, lengths, of_step = plan.step.experiment.pretraining.batch_size, plan.step.lengths, plan.estimate
    tokens, flops = size * (lengths.inputs + lengths.targets), plan.step.flops(size, lengths)
    bounds = []
    for name in names:
        milliseconds = "-"
        if seconds := of_step.bounds[name]:
            milliseconds = _digits(1e3 * seconds)
            if name == of_step.bottleneck:
                milliseconds += " *"
        bounds.append(milliseconds)
    return [plan.label, f"{tokens:,}", _digits(flops / 1e12), *bounds, f"{of_step.utilization:.0%}"]


def _chip_hours_cells(plan: Plan, price: float) -> list[str]:
    """Return the cells of a plan's line in the table of chip-hours, and of hours on its slice."""
    hours = plan.estimate.chip_hours
    cells = [plan.label, *map(_digits, (*hours, sum(hours) / plan.step.slices.chips))]
    if price > 0:
        cells.append(f"${_digits(sum(hours) * price)}")
    return cells


def _digits(number: float) -> str:
    """Return three significant digits, or all of a larger whole number."""
    return f"{number:,.0f}" if number >= 99.95 or not number else f"{number:#.3g}"


@dataclass
class Traffic:
    """Sums what a device receives in a step by collectives of one kind."""

    times: int = 0
    bytes: float = 0.0
    seconds: float = 0.0  # that it takes at least


def _collective_lines(plan: Plan) -> list[list[str]]:
    """Return a line for each kind of collective over each axis that takes more than 1 % of all their time."""
    traffic: dict[tuple[str, str], Traffic] = {}  # by kind and axes
    for kind, axes, size, times, received in plan.compiled.collectives:
        of_kind = traffic.setdefault((kind, " x ".join(axes)), Traffic())
        of_kind.times += times
        of_kind.bytes += times * received
        of_kind.seconds += times * received / plan.step.slices.bandwidth(tuple(axes), size)
    least = sum(each.seconds for each in traffic.values()) / 100
    lines = []
    for names, each in sorted(traffic.items(), key=lambda item: -item[1].seconds):
        if each.seconds > least:
            numbers = f"{each.times:,}", _digits(each.bytes / 2**20), _digits(1e3 * each.seconds)
            lines.append([plan.label, *names, *numbers])
    return lines


def _decoding_cells(plan: Plan) -> list[str]:
    """Return the cells of a plan's line in the table of decoding; none if there is no estimate for it."""
    decoding = estimate_decoding(plan.step, plan.compiled)
    if not decoding:
        return []
    cache = f"{_digits(decoding.cache_bytes / 2**20)} MiB of {plan.step.experiment.model.dtype}"
    at_batch_1 = _digits(decoding.tokens_per_second_at_batch_1)
    at_largest_batch = _digits(decoding.tokens_per_second_at_largest_batch)
    return [plan.short_name, cache, at_batch_1, f"{decoding.largest_batch:,}", at_largest_batch]


def _remarks(plan: Plan) -> list[str]:
    compiled = plan.compiled
    lines = [compiled.failed] if compiled.failed else []
    for elements, axes, times, source in compiled.unexpected:
        over = " x ".join(axes)
        lines.append(f"gathers {max(elements):,} elements over {over}, {times} times a step: {source}")
    if kernels := compiled.kernels:
        lines.append(f"{kernels} calls of attention's kernel a step, whose time is not counted")
    if lost := compiled.lost:
        lines.append(f"{lost} tensors are made whole on every device, as there is no way to reshard them")
    if not plan.fits and not compiled.failed:
        lines.append(f"does not fit. {_advice_to_fit(plan)}")
    return lines


def _advice_to_fit(plan: Plan) -> str:
    """Return advice: the first of MEMORY_SAVING_CHANGES with which the step should fit, or a larger slice.

    The rough estimate ``memory`` is scaled by its error on the step that was compiled.
    """
    step, parameters = plan.step, plan.compiled.parameters
    correction = plan.compiled.needed / memory(step, parameters)
    for mesh in (step.experiment.mesh, replace(step.experiment.mesh, fsdp=-1, data=1)):
        for new in MEMORY_SAVING_CHANGES:
            try:
                changed = replace(step, experiment=apply(replace(step.experiment, mesh=mesh), new))
                _check(changed)
            except SettingError:
                continue
            if changed != step and correction * memory(changed, parameters) < step.slices.room:
                return f"Try {options_between(step.experiment, changed.experiment)}"
    return "Take a larger slice, or see what --search finds"


def options_between(old: Experiment, new: Experiment) -> str:
    """Return what to add to a command line to get from ``old`` to ``new``."""
    return shlex.join(setting_arguments({path: value for path, (_, value) in diff(old, new).items()}))


def _recommended(plans: Sequence[Plan], scale: str) -> str:
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return f"{plans[0].name}: none of these fits; take a larger slice"
    best = min(fitting, key=lambda plan: plan.estimate.step_seconds)
    return f"The fastest of these arrangements that fits:\n  {_run_line(best, scale)}"


def _run_line(plan: Plan, scale: str) -> str:
    """Return the command that trains what was planned, with the special tokens of the row itself."""
    own, planned = build(plan.name, scale), plan.step.experiment
    planned = replace(planned, model=replace(planned.model, special=own.model.special))
    changed = {path: value for path, (_, value) in diff(own, planned).items()}
    options = setting_arguments(effective_overrides(plan.name, scale, changed))
    return shlex.join(["lm", *plugin_arguments(), "run", plan.name, "--scale", scale, *options])
