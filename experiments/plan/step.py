"""A training step that is planned: what is compiled for which slice, and what the compiler found."""

from dataclasses import dataclass

from experiments.plan.slices import Slice
from experiments.study.experiment import Experiment
from lm.data.packing import row_length
from lm.nn.electra import generator_of
from lm.objectives.denoising import Lengths
from lm.train.flops import step_flops

Features = dict[str, tuple[list[int], str]]  # of a batch: shape and dtype


@dataclass(frozen=True)
class PlannedStep:
    """The step of pre-training of an experiment on a slice."""

    experiment: Experiment
    slices: Slice
    batch: Features
    lengths: Lengths  # of the rows of the batch [tokens]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of devices along each axis of the mesh."""
        return self.experiment.mesh.sizes(self.slices.devices)

    @property
    def width(self) -> int:
        """Return the size of an activation [bytes]."""
        return {"float32": 4, "bfloat16": 2}[self.experiment.model.dtype]

    @property
    def arrangement(self) -> tuple[str, str]:
        """Return the mesh, and rematerialisation with micro-batches, as they are shown."""
        parts = self.experiment.pretraining.microbatches
        mesh = " ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "1"
        return mesh, self.experiment.model.compile.remat + f", {parts} parts" * (parts > 1)

    def flops(self, batch_size: int, lengths: Lengths, *, is_pretraining: bool = True) -> float:
        """Return the floating-point operations of a step with this batch.

        ELECTRA's generator is trained in pre-training alone.
        """
        model = self.experiment.model
        generator = generator_of(model, self.experiment.generator_share) if is_pretraining else None
        targets = row_length(model.architecture, lengths)
        return step_flops(model, batch_size, lengths.inputs, targets, generator)


@dataclass(frozen=True)
class Compiled:
    """Holds what the compiler found; bytes are per device. If a step does not fit, most fields are 0."""

    parameters: int = 0
    read: int = 0  # parameters that decoding reads for one token, each as often as it is read
    arguments: int = 0
    temporaries: int = 0
    outputs: int = 0  # that do not take the memory of arguments
    host: int = 0  # of tensors that wait in the host's memory
    code: int = 0
    over: float = 0.0  # memory that a step needs which does not fit
    cycles: int = 0
    kernels: int = 0  # that run in a step and whose time is unknown
    kernel_flops: int = 0  # of all other kernels, which are not in the cycles either
    collectives: tuple[tuple, ...] = ()  # (kind, mesh axes, devices, times a step, bytes each time)
    unexpected: tuple[tuple, ...] = ()  # gathers: (elements, mesh axes, times, source)
    lost: int = 0  # tensors that the partitioner makes whole on every device
    failed: str = ""  # how the compiler broke down

    @property
    def needed(self) -> float:
        """Return how much memory of a device the step fills [bytes]."""
        return self.over or self.arguments + self.outputs + self.temporaries + self.code
