"""From what the compiler came to, to time, use of the chips, hours, and how fast the model can write: by
roofline.
"""

from dataclasses import dataclass

from experiments.plan.compiler import Compiled
from experiments.plan.slices import Slice
from experiments.runs.prepare import tuning_lengths
from experiments.runs.stages import stages
from experiments.study.experiment import Experiment
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.train.throughput import step_flops

BOUNDS = ("compute", "HBM", "network", "compiler")
WIDTH = {"float32": 4, "bfloat16": 2}  # of an activation [bytes]
ASSUMPTIONS = """\
compute: FLOPs by formula, what is computed again not counted, over the chips' peak. HBM: the state and
temporaries read and written once, parameters read three times a micro-batch. network: the bytes of all
collectives over all links, both ways, of the dimensions that a group of devices spans; one without
wrap-around counts half: sides other than 16 or, in three dimensions, all of slices less than 4 thick.
compiler: its estimate of cycles, in which no collective is, loops
counted out, over the clock. A step lasts as long as the longest (*); use is FLOPs over that time at peak."""


@dataclass(frozen=True)
class Estimate:
    """What bounds a step [s], and what follows of the slowest bound."""

    bounds: dict[str, float]
    utilization: float  # of the chips' peak
    chip_hours: tuple[float, float]  # of all pre-training and of all fine-tuning, at least

    @property
    def step(self) -> float:
        return max(self.bounds.values())

    @property
    def bound(self) -> str:
        return max(self.bounds, key=self.bounds.get)


def flops_of(experiment: Experiment, batch_size: int, lengths: Lengths) -> float:
    model = experiment.model
    return step_flops(model, batch_size, lengths.inputs, row_length(model.architecture, lengths))


def needed(compiled: Compiled) -> float:
    """Bytes of a device that the step fills."""
    return compiled.over or compiled.arguments + compiled.outputs + compiled.temporaries + compiled.code


def estimate(experiment: Experiment, lengths: Lengths, place: Slice, compiled: Compiled) -> Estimate:
    phase, chip, sizes = experiment.pretraining, place.chip, experiment.mesh.sizes(place.devices)
    flops = flops_of(experiment, phase.batch_size, lengths)
    read = 3 * phase.microbatches * compiled.parameters * WIDTH[experiment.model.dtype] / sizes["tensor"]
    moved = 2 * (compiled.arguments + compiled.temporaries) + compiled.outputs + read
    sent = (
        n * received / place.bandwidth(tuple(axes), size)
        for _, axes, size, n, received in compiled.collectives
    )
    seconds = (
        flops / (chip.peak * place.chips),
        moved * chip.devices / chip.bandwidth,
        sum(sent),
        compiled.cycles / chip.clock,
    )
    bounds = dict(zip(BOUNDS, seconds, strict=True))
    step = max(bounds.values())
    hours = tuple(steps * step * place.chips / 3_600 for steps in run_steps(experiment, flops))
    return Estimate(bounds, bounds["compute"] / step, hours)


def run_steps(experiment: Experiment, flops: float) -> tuple[float, float]:
    """Steps of pre-training and of fine-tuning a run has, in steps of pre-training, which take so many
    ``flops``.
    """
    tuning, first, second = experiment.tuning, 0.0, 0.0
    for stage in stages(experiment):
        steps, batch_size = stage.training.steps, stage.training.batch_size
        if stage.kind == "pretrain":
            first += steps
            continue
        lengths = Lengths(tuning.inputs_length, tuning.inputs_length, 0)
        lengths = tuning_lengths(experiment, stage.on) if stage.kind == "text" else lengths
        second += steps * flops_of(experiment, batch_size, lengths) / flops
    return first, second


@dataclass(frozen=True)
class Writing:
    """What decoding needs and how fast it can be at most, where reading HBM is all that takes time."""

    cache: float  # of a sequence [bytes]
    single: float  # with batch 1 [tokens/s]
    batch: int  # the largest that fits [sequences]
    full: float  # with that batch [tokens/s]


def writing(experiment: Experiment, lengths: Lengths, place: Slice, compiled: Compiled) -> Writing | None:
    """All is spread evenly over the slice, and parameters are float32, as trained; None for encoders."""
    model, chips = experiment.model, place.chips
    if not model.has_decoder or not compiled.parameters:
        return None
    kept = row_length(model.architecture, lengths) + (lengths.inputs if model.has_encoder else 0)
    cache = 2 * model.num_decoder_layers * model.key_value_heads * model.d_kv * kept * WIDTH[model.dtype]
    read, bandwidth = 4 * compiled.read, place.chip.bandwidth * chips
    batch = max(int((place.chip.usable * chips - 4 * compiled.parameters) / cache), 0)
    return Writing(cache, bandwidth / (read + cache), batch, batch * bandwidth / (read + batch * cache))
