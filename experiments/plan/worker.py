"""The process that compiles one step: ``python -m experiments.plan.worker FILE``.

It reads a request from FILE, prints its progress, and writes what it found in the place of the request.
"""

import json
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from jax.experimental import topologies

from experiments.plan.program import read_program, unexpected_gathers
from experiments.plan.slices import Slice, find_slice
from experiments.plan.step import Compiled, Features
from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.study.experiment import Experiment
from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError, from_json
from lm.config.model import ModelConfig
from lm.files import write
from lm.train.step import build


def compile_here(experiment: Experiment, batch: Features, slices: Slice) -> Compiled:
    """Compile the step of pre-training in this process."""
    options: dict[str, Any] = dict(slices.chip.options)
    if slices.count > 1:
        options["num_slices"] = slices.count
    if max(slices.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=slices.name, **options).devices
    steps = build(pretraining_spec(experiment), sharding.make_mesh(experiment.mesh, list(devices)))
    shapes_of_features = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in batch.items()}
    arrays = Batch.from_features(shapes_of_features)
    began = perf_counter()
    lowered = steps.jit_train_step.lower(steps.abstract, arrays, jax.ShapeDtypeStruct((), "uint32"))
    print(f"traced in {perf_counter() - began:.0f} s; the compiler is at work", flush=True)
    shapes = {name: leaf.shape for name, leaf in steps.abstract.params.items()}
    parameters = sum(map(prod, shapes.values()))
    counts = Compiled(parameters=parameters, read=parameters_read_per_token(experiment.model, shapes))
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if needed := overflow(str(error)):
            return replace(counts, over=needed)
        return replace(counts, failed=f"the compiler gave up: {str(error).splitlines()[0][:200]}")
    print(f"compiled in {perf_counter() - began:.0f} s", flush=True)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    if memory is None or text is None:
        return replace(counts, failed="the compiler does not describe what it compiled")
    program = read_program(text, steps.mesh.shape)
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    gathers = unexpected_gathers(program, shapes.values(), steps.mesh.shape)
    return replace(
        counts,
        arguments=memory.argument_size_in_bytes,
        # What the compiler compares with the chip's memory. Its temp_size_in_bytes is up to a quarter more:
        # a program with temporaries of 18.5 GiB by that number is compiled for a chip that has 15.75. It may
        # count what waits in the host's memory at the peak, so that this is an upper bound.
        temporaries=max(memory.peak_memory_in_bytes - memory.argument_size_in_bytes - outputs, 0),
        outputs=outputs,
        host=memory.host_temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        cycles=program.cycles,
        kernels=program.kernels,
        kernel_flops=program.kernel_flops,
        collectives=tuple(collective[:5] for collective in program.collectives),
        unexpected=tuple((x.elements, x.axes, x.times, x.source) for x in gathers),
    )


def parameters_read_per_token(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many parameters a decoder reads to write a token; ALBERT's block counts at each use."""
    # the encoder has run, its keys and values are cached or its last state has made the first of the decoder,
    # and of a separate embedding one row is read
    skipped = ["encoder.", "encoder_embed."]
    skipped += [f"decoder.blocks.{name}." for name in ("cross.key", "cross.value", "attention.first")]
    skipped += ["embed."] if model.output.logits.startswith("separate") else []
    layers = model.num_decoder_layers
    # arrays of blocks are [layers,...], or [1,...] if all layers share them
    return sum(
        prod(shape) * (layers // shape[0] if name.startswith("decoder.blocks.") else 1)
        for name, shape in shapes.items()
        if not name.startswith(tuple(skipped))
    )


def overflow(error: str) -> float:
    """Return the bytes of HBM that a program needs, by the error that it does not fit; 0 for other errors."""
    amount = re.search(r"memory space hbm\b.*?([\d.]+)([KMGT])\b", error)
    return float(amount[1]) * 2 ** (10 + 10 * "KMGT".index(amount[2])) if amount else 0.0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the compiler too, which would not listen
    file = Path(sys.argv[1])
    settings, features, name, count = json.loads(file.read_text())
    try:
        answer = asdict(compile_here(from_json(Experiment, settings), features, find_slice(name, count)))
    except SettingError as error:
        answer = {"refused": str(error)}
    write(file, json.dumps(answer))
