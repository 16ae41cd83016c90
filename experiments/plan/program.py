"""Reads a compiled step: the text of an optimised program -> its cycles and collectives."""

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SMALL = 2**18  # a tensor of fewer elements may be whole everywhere [elements]

Computations = Mapping[str, "list[Instruction]"]
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%?[\w.\-]+(?:, )?)+)")
_GROUPS = re.compile(r"replica_groups=\[(\d+),\d+\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S*)\))? \{([^}]*)\}")
_OUTSIDE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PARTS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")  # 'axis', or 'axis':(places before)places, a part of it


class Instruction(NamedTuple):
    shape: str
    opcode: str
    rest: str  # operands and attributes


class Collective(NamedTuple):
    """Describes a collective: what devices send each other at one point of the program."""

    kind: str
    axes: tuple[str, ...]  # of the mesh, along which it goes
    size: int  # devices that take part together
    times: int  # a step
    bytes: float  # that a device receives each time
    elements: tuple[int, ...]  # of each result that holds floating-point numbers
    source: str  # the operation of the traced program that it comes from


class Program(NamedTuple):
    cycles: int  # of a step, as the compiler estimates them, without collectives
    collectives: list[Collective]
    kernels: int  # calls of hand-written kernels of unknown cost: the compiler estimates no cycles for any
    kernel_flops: int  # of the others, by their own account


def read_program(text: str, mesh: Mapping[str, int]) -> Program:
    """Return the program compiled for mesh ``{axis: size}``; loops count from 0, as the compiler's do."""
    computations, entry = _computations(text)
    cycles, kernels, kernel_flops = 0, 0, 0
    collectives: dict[str, Collective] = {}
    todo = [(entry, 1)]
    while todo:
        name, times = todo.pop()
        for instruction in computations[name]:
            cycles += times * sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', instruction.rest)))
            if 'custom_call_target="tpu_custom_call"' in instruction.rest:
                cost = re.search(r'"cost_estimate":\{"flops":"(\d+)"', instruction.rest)
                kernels += times * (cost is None)
                kernel_flops += times * int(cost[1]) if cost else 0
            called = _called(instruction, computations)
            if instruction.opcode == "while":
                todo.append((_name("body", instruction), times * _trips(instruction, computations)))
            elif instruction.opcode in ("call", "conditional"):
                todo += [(computation, times) for computation in called]
            else:
                for inner, owner in [(instruction, name), *_inside(called, computations)]:
                    if collective := _collective(inner, owner, times, mesh):
                        # A collective that runs beside other work is cut into fusions that share its channel;
                        # some of them may be in a loop that it spans: the fewest times count.
                        channel = re.search(r"channel_id=(\d+)", inner.rest)
                        key = channel[1] if channel else f"number {len(collectives)}"
                        parts = (collectives.get(key, collective), collective)
                        collectives[key] = min(parts, key=lambda part: part.times)
    return Program(cycles, list(collectives.values()), kernels, kernel_flops)


def unexpected_gathers(
    program: Program, shapes: Collection[tuple[int, ...]], mesh: Mapping[str, int]
) -> list[Collective]:
    """Return the gathers that a well-placed program does not need, given the shapes of stacked parameters.

    Expected are those of parameters, of one layer or all, over the axes that shard them or the batch (such a
    gather may be the second half of a sum), and those of keys and values over the positions (sequence).
    """
    sizes = {prod(shape[first:]) for shape in shapes for first in (0, 1)}
    sizes |= {size // mesh[axis] for size in sizes for axis in ("tensor", "fsdp")}
    return [
        gather
        for gather in program.collectives
        if gather.kind == "all-gather" and gather.axes != ("sequence",)
        if any(n >= SMALL and (n not in sizes or "tensor" in gather.axes) for n in gather.elements)
    ]


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return name -> instructions of each computation, and the name of the one that the program enters."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif match := _LINE.match(line):
            current.append(Instruction(*match.groups()))
    return computations, entry


def _name(attribute: str, instruction: Instruction) -> str:
    """Return the computation that an instruction names as its "body" or "condition"."""
    match = re.search(rf"{attribute}=%?([\w.\-]+)", instruction.rest)
    return match[1] if match else ""


def _called(instruction: Instruction, computations: Computations) -> list[str]:
    """Return the computations that an instruction runs, except those of a loop."""
    names = [name for match in _CALLS.findall(instruction.rest) for name in re.findall(r"[\w.\-]+", match)]
    return [name for name in names if name in computations]


def _inside(names: list[str], computations: Computations) -> Iterator[tuple[Instruction, str]]:
    """Return the instructions within fusions, and the computation that holds each."""
    for name in names:
        for instruction in computations[name]:
            yield instruction, name
            yield from _inside(_called(instruction, computations), computations)


def _trips(loop: Instruction, computations: Computations) -> int:
    """Return how often a loop runs: the compiler says so, or it is the one number in the loop's condition."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    inside = _inside([_name("condition", loop)], computations)
    bounds = [re.match(r"(\d+)\)", x.rest) for x, _ in inside if x.opcode == "constant"]
    return max((int(bound[1]) for bound in bounds if bound), default=1)


def _collective(
    instruction: Instruction, computation: str, times: int, mesh: Mapping[str, int]
) -> Collective | None:
    """Return what an instruction of a computation sends; None if it sends nothing."""
    kind, outside = instruction.opcode.removesuffix("-start"), _OUTSIDE.search(instruction.rest)
    if kind == "recv" and outside:  # from other slices
        kind = outside[1].lower().replace("_", "-")
    if kind not in COLLECTIVES:
        return None
    results = [(prod(map(int, filter(None, x.split(",")))), t) for t, x in _ARRAY.findall(instruction.shape)]
    group = _first_group(instruction.rest, prod(mesh.values()))
    coordinates = np.unravel_index(group, tuple(mesh.values()))
    axes = tuple(axis for axis, place in zip(mesh, coordinates, strict=True) if np.ptp(place))
    size = len(group)
    if outside:
        size, axes = mesh["slice"], ("slice",)
    received = sum(count * _bytes_of(dtype) for count, dtype in results)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":  # the result holds the operand too
        received *= size / (size + 1) if kind == "all-gather" else 1 / 2
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind, received = "reduce-scatter", received / size
    # of what a device holds in the end: in a ring, an all-reduce is a reduce-scatter and an all-gather
    factors = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1, "collective-permute": 1}
    received *= factors.get(kind, (size - 1) / size)
    source = re.search(r'op_name="([^"]*)"', instruction.rest)
    elements = tuple(count for count, dtype in results if dtype[0] in "bcf")  # bf16, complex, float
    return Collective(kind, axes, size, times, received, elements, source[1] if source else "")


def _bytes_of(dtype: str) -> float:
    """Return the size of an element [bytes]."""
    return 1 if dtype == "pred" else int((re.search(r"\d+", dtype) or "0")[0]) / 8


def _first_group(rest: str, devices: int) -> np.ndarray:
    """Return the first group of devices that take part together, by their flat indices in the mesh."""
    if sent := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        pairs = [pair.split(",") for pair in re.findall(r"\d+,\d+", sent[1])]
        return np.array(next(([int(a), int(b)] for a, b in pairs if a != b), [0, 0]))
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return np.array(match[1].split(","), int)
    if match := _GROUPS.search(rest):
        return _iota(match[2], devices).reshape(int(match[1]), -1)[0]
    if match := _NAMED.search(rest):
        # Each axis of the mesh is split into three: the places before the part that the group spans, this
        # part, and those after it. The first group has place 0 along all but the parts that it spans.
        used = {name: (int(before or 1), int(size or 0)) for name, before, size in _PARTS.findall(match[3])}
        shape, moving = [], []
        for name, size in re.findall(r"'(\w+)'=(\d+)", match[1]):
            before, part = used.get(name, (1, 1))
            part = part or int(size)
            shape += [before, part, int(size) // before // part]
            moving += [0, slice(None) if name in used else 0, 0]
        return _iota(match[2] or f"[{devices}]", devices).reshape(shape)[tuple(moving)].ravel()
    return np.arange(devices)


def _iota(text: str, devices: int) -> np.ndarray:
    """Return the devices 0, 1, ... as "[2,4]T(1,0)" lays them out."""
    shape, _, order = text.strip("()").partition("T(")
    numbers = np.arange(devices).reshape([int(size) for size in shape.strip("[]").split(",")])
    if order:
        numbers = numbers.transpose([int(axis) for axis in order.split(",")])
    return numbers.ravel()
