"""Compiles the training step of an experiment for a TPU slice that need not be there, each in a process of
its own.

``python -m experiments.plan.compiler FILE`` reads a request from FILE, says on standard output how far it is,
and puts what it came to in the request's place: the compiler logs to standard error and may end the process.
"""

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from jax.experimental import topologies

import lm
from experiments.plan import program
from experiments.plan.slices import Slice, find_slice
from experiments.runs import run
from experiments.runs.prepare import Prepared, pretraining_batches, tuning_lengths
from experiments.study.experiment import BASELINE, Experiment
from lm import sharding
from lm.data.objectives import Lengths
from lm.data.supervised import eval_batches
from lm.data.text.own import Bytes
from lm.data.text.tokens import encode_corpus
from lm.files import write
from lm.nn.config import ModelConfig
from lm.settings import SettingError, from_json, to_json

Features = dict[str, tuple[list[int], str]]  # shape and dtype
SETUP = {  # libtpu compiles without a TPU, asks no cloud machine what it is, and logs to standard error alone
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
}
# the partitioner's word for a tensor that it makes whole for want of a way
LOST = "Involuntary full rematerialization"


@dataclass(frozen=True)
class Compiled:
    """What the compiler came to; bytes are a device's. Of a step that does not fit, only what it needs is
    known.
    """

    parameters: int = 0
    read: int = 0  # by writing a token, as often as it is
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0  # that do not take the place of arguments
    code: int = 0
    over: float = 0.0  # what a step needs that does not fit
    cycles: int = 0
    kernels: int = 0  # that run in a step without being in its cycles
    collectives: tuple[tuple, ...] = ()  # (kind, mesh axes, devices, times a step, bytes each time)
    unexpected: tuple[tuple, ...] = ()  # gathers: (elements, mesh axes, times, source)
    lost: int = 0  # tensors that the partitioner makes whole
    failed: str = ""  # how the compiler broke down


def features(experiment: Experiment) -> tuple[Features, Lengths]:
    """The batch of pre-training, made of a few words in place of the corpus, and the lengths of its rows."""
    vocabulary = Bytes(max(experiment.data.sentinels, 2))
    with tempfile.TemporaryDirectory() as folder:
        tokens = encode_corpus(["words and words. " * 400] * 4, vocabulary, Path(folder))
        batches = pretraining_batches(experiment, Prepared(vocabulary, tokens, tokens), "train", rows=1)
        lengths, batch = batches.lengths, batches(0, slice(None))
    if experiment.mixing.pretraining != "corpus":
        tuned, architecture = (
            tuning_lengths(experiment, experiment.tuning.mixtures),
            experiment.model.architecture,
        )
        lengths = Lengths(lengths.raw, *map(max, lengths[1:], tuned[1:]))
        (batch,) = eval_batches([([3], [3])], architecture=architecture, lengths=lengths, batch_size=1)
    rows = experiment.pretraining.batch_size
    return {name: ([rows, *x.shape[1:]], x.dtype.name) for name, x in batch.items()}, lengths


def program_key(experiment: Experiment, batch: Features, place: Slice) -> str:
    """The same for experiments whose steps compile to the same program, as long as code and versions stay."""
    decides = replace(
        BASELINE,
        model=experiment.model,
        mesh=experiment.mesh,
        generator_share=experiment.generator_share,
        pretraining=replace(experiment.pretraining, steps=1, save_every=1, log_every=1),
    )
    versions = [metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")]
    versions += [os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
    files = [
        *sorted(Path(lm.__file__).parent.rglob("*.py")),
        *map(Path, (program.__file__, run.__file__, __file__)),
    ]
    slices = [place.name, place.count, dict(place.chip.options)]
    digest = hashlib.sha256(json.dumps([to_json(decides), batch, slices, versions]).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def check_compiler() -> None:
    """SettingError if nothing here compiles for TPUs."""
    if importlib.util.find_spec("libtpu") is None:
        raise SettingError(
            "lm plan compiles with libtpu, which is not installed: pip install 'lm-study[tpu]'"
        )


def compile_step(
    experiment: Experiment, batch: Features, place: Slice, folder: Path, say: Callable[[str], None]
) -> Compiled:
    """The step, compiled by a process that may break down, or as ``folder`` remembers it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program_key(experiment, batch, place)}.json"
    if path.exists():
        return Compiled(**json.loads(path.read_text()))
    draft, log = path.with_suffix(f".{os.getpid()}"), path.with_suffix(".log")
    draft.write_text(json.dumps([to_json(experiment), batch, place.name, place.count]))
    command = [sys.executable, "-m", "experiments.plan.compiler", str(draft)]
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | SETUP
        )
    with child:
        for line in child.stdout:
            say(line.strip())
    found = json.loads(draft.read_text())
    draft.unlink()
    if isinstance(found, list):  # still the request
        return Compiled(failed=f"the compiler broke down, exit code {child.returncode}; more in {log}")
    if "refused" in found:
        raise SettingError(found["refused"])
    found["lost"] = log.read_text(errors="replace").count(LOST)
    if not found["failed"]:
        write(path, json.dumps(found))
    return Compiled(**found)


def _compile(experiment: Experiment, batch: Features, place: Slice) -> Compiled:
    """Compile here and now."""
    options = dict(place.chip.options) | ({"num_slices": place.count} if place.count > 1 else {})
    if max(place.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=place.name, **options).devices
    steps = run.steps_of(experiment, sharding.make_mesh(experiment.mesh, list(devices)))
    arrays = {feature: jax.ShapeDtypeStruct(shape, dtype) for feature, (shape, dtype) in batch.items()}
    begin = perf_counter()
    lowered = steps.train.lower(steps.abstract, arrays, jax.ShapeDtypeStruct((), "uint32"))
    print(f"traced in {perf_counter() - begin:.0f} s; the compiler is at work", flush=True)
    shapes = {name: leaf.shape for name, leaf in steps.abstract.params.items()}
    known = Compiled(
        parameters=sum(map(prod, shapes.values())), read=read_by_writing(experiment.model, shapes)
    )
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if needs := overflow(str(error)):
            return replace(known, over=needs)
        return replace(known, failed=f"the compiler gave up: {str(error).splitlines()[0][:200]}")
    print(f"compiled in {perf_counter() - begin:.0f} s", flush=True)
    return _read(known, compiled, shapes, steps.mesh.shape)


def _read(
    known: Compiled, compiled: Any, shapes: Mapping[str, tuple[int, ...]], mesh: Mapping[str, int]
) -> Compiled:
    memory, found = compiled.memory_analysis(), program.read(compiled.as_text(), mesh)
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # What the compiler holds against the chip's memory. Its temp_size_in_bytes is more, by up to a quarter: a
    # program whose temporaries come to 18.5 GiB by that is compiled for a chip that has 15.75.
    temporaries = max(memory.peak_memory_in_bytes - memory.argument_size_in_bytes - outputs, 0)
    unexpected = program.unexpected(found, shapes.values(), mesh)
    return replace(
        known,
        arguments=memory.argument_size_in_bytes,
        temporaries=temporaries,
        outputs=outputs,
        code=memory.generated_code_size_in_bytes,
        cycles=found.cycles,
        kernels=found.kernels,
        collectives=tuple(one[:5] for one in found.collectives),
        unexpected=tuple((one.elements, one.axes, one.times, one.source) for one in unexpected),
    )


def read_by_writing(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Parameters that a decoder reads to write a token; what is used twice, as ALBERT's block, is read
    twice.
    """
    # these are in the cache
    skipped = ["encoder.", "decoder.blocks.cross.key.", "decoder.blocks.cross.value."]
    skipped += ["embed."] if model.logits.startswith("separate") else []  # but for a row
    layers = model.num_decoder_layers if model.shared_layers else 1
    return sum(
        prod(shape) * (layers if name.startswith("decoder.blocks.") else 1)
        for name, shape in shapes.items()
        if not name.startswith(tuple(skipped))
    )


def overflow(error: str) -> float:
    """Bytes of HBM that a program needs by the message that it does not fit; 0 of any other message."""
    amount = re.search(r"memory space hbm\b.*?([\d.]+)([KMGT])\b", error)
    return float(amount[1]) * 2 ** (10 + 10 * "KMGT".index(amount[2])) if amount else 0.0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the compiler too, which would not listen
    file = Path(sys.argv[1])
    asked, described, name, count = json.loads(file.read_text())
    try:
        answer = asdict(_compile(from_json(Experiment, asked), described, find_slice(name, count)))
    except SettingError as problem:
        answer = {"refused": str(problem)}
    write(file, json.dumps(answer))
