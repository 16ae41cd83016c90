"""Compiles steps for TPU slices that need not be there, each in a process of its own, and caches the results.

The compiler logs to standard error and may end its process: ``experiments.plan.worker`` is that process.
"""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from experiments.plan.slices import Slice
from experiments.plan.step import Compiled, PlannedStep
from experiments.runs import provenance
from experiments.runs.inputs import Inputs, mixture_lengths
from experiments.runs.kinds.pretraining import pretraining_batches
from experiments.runs.sources import Sources
from experiments.study.experiment import BASELINE, Experiment
from launch.accelerators import libtpu_flags
from lm.config.base import SettingError, to_json
from lm.data.collocations import Collocations
from lm.data.corpus.token_cache import in_memory_corpus
from lm.data.seq2seq import eval_batches
from lm.files import write
from lm.objectives.denoising import Lengths
from lm.tokenizers.sentencepiece import ByteTokenizer

WORKER = "experiments.plan.worker"  # started by name: only its process imports what trains
# libtpu compiles without a TPU, asks no cloud machine what it is, and logs to standard error alone
SETUP = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
SETUP |= {"TPU_LOG_DIR": "disabled", "TPU_STDERR_LOG_LEVEL": "1", "TPU_MIN_LOG_LEVEL": "1"}
# the partitioner's word for a tensor that it makes whole because it knows no way to reshard it
MADE_WHOLE = "Involuntary full rematerialization"


def check_compiler() -> None:
    """Raise SettingError if nothing here compiles for TPUs."""
    if importlib.util.find_spec("libtpu") is None:
        raise SettingError(
            "lm plan needs libtpu, which is not installed: make .venv/tpu, or pip install 'lm-study[tpu]'"
        )


def libtpu_init_args(slices: Slice) -> str:
    """Return the flags of libtpu that a step is compiled with.

    They are those of the environment, an empty LIBTPU_INIT_ARGS included, or else those that ``lm launch``
    sets for a run on such slices.
    """
    return os.environ.get("LIBTPU_INIT_ARGS", libtpu_flags(slices.count))


def planned_step(experiment: Experiment, slices: Slice) -> PlannedStep:
    """Return the step with its batch of pre-training, made of a few words instead of the corpus."""
    vocabulary = ByteTokenizer(max(experiment.data.sentinels, 2))
    with tempfile.TemporaryDirectory() as folder:
        tokens = in_memory_corpus(["words and words. " * 400] * 4, vocabulary, Path(folder))
        sources, none = Sources(Path(folder)), Collocations(())
        inputs = Inputs(vocabulary, tokens, tokens, sources, collocations=none)
        batches = pretraining_batches(experiment, inputs, "train", batch_size=1)
        lengths, batch = batches.lengths, batches(0, slice(None))
    if experiment.mixing.pretraining != "corpus":
        tuned = mixture_lengths(experiment, experiment.tuning.mixtures)
        lengths = Lengths(lengths.raw, *map(max, lengths[1:], tuned[1:]))
        architecture = experiment.model.architecture
        (batch,) = eval_batches([([3], [3])], architecture=architecture, lengths=lengths, batch_size=1)
    rows = experiment.pretraining.batch_size
    features = {name: ([rows, *x.shape[1:]], x.dtype.name) for name, x in batch.features().items()}
    return PlannedStep(experiment, slices, features, lengths)


def program_key(step: PlannedStep) -> str:
    """Return a key that steps share if this code and these versions compile them to the same program."""
    experiment, slices = step.experiment, step.slices
    training = replace(experiment.pretraining, steps=1, save_every=1, log_every=1, evaluate_every=0)
    decisive = replace(BASELINE, model=experiment.model, mesh=experiment.mesh, pretraining=training)
    decisive = replace(decisive, generator_share=experiment.generator_share)
    versions = [metadata.version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")]
    versions += [libtpu_init_args(slices), os.environ.get("XLA_FLAGS", "")]
    target = [slices.name, slices.count, dict(slices.chip.options)]
    digest = hashlib.sha256(json.dumps([to_json(decisive), step.batch, target, versions]).encode())
    digest.update(json.dumps(provenance.code()).encode())
    for name in ("worker.py", "program.py", "step.py"):
        digest.update(provenance.parse_module(Path(__file__).with_name(name).read_bytes()).digest.encode())
    return digest.hexdigest()[:16]


def _read_cached(path: Path) -> Compiled | None:
    """Return what an earlier plan compiled; None if there is nothing, or a damaged file."""
    try:
        return Compiled(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError):
        return None


def compile_step(step: PlannedStep, folder: Path, say: Callable[[str], None]) -> Compiled:
    """Return the step, compiled by a process that may break down, or as it is cached in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program_key(step)}.json"
    if (cached := _read_cached(path)) is not None:
        return cached
    # The worker puts its answer in the place of the request.
    request, log = path.with_suffix(f".{os.getpid()}"), path.with_suffix(".log")
    slices = step.slices
    request.write_text(json.dumps([to_json(step.experiment), step.batch, slices.name, slices.count]))
    say("started; it is traced first")
    command = [sys.executable, "-m", WORKER, str(request)]
    environment = os.environ | SETUP | {"LIBTPU_INIT_ARGS": libtpu_init_args(slices)}
    with log.open("w") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    with worker:
        for line in worker.stdout or ():
            say(line.strip())
    answer = json.loads(request.read_text())
    request.unlink()
    if isinstance(answer, list):  # still the request
        return Compiled(failed=f"the compiler broke down, exit code {worker.returncode}; more in {log}")
    if "refused" in answer:
        raise SettingError(answer["refused"])
    answer["lost"] = log.read_text(errors="replace").count(MADE_WHOLE)
    if not answer["failed"]:
        write(path, json.dumps(answer))
    return Compiled(**answer)
