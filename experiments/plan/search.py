"""Which mesh, rematerialisation and micro-batches: a rough model of memory and time picks what is worth
compiling.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import jax
from flax import nnx

from experiments.plan.estimate import WIDTH, flops_of
from experiments.plan.slices import Slice
from experiments.study.experiment import Experiment
from lm import sharding
from lm.data.objectives import Lengths
from lm.data.packing import row_length
from lm.mesh import MeshConfig
from lm.nn.config import ModelConfig
from lm.nn.kernels import SHORT
from lm.nn.layers import count
from lm.nn.transformer import Transformer
from lm.settings import SettingError
from lm.train.config import OptimizerConfig
from lm.train.optimizers import remembered
from lm.train.step import check_mesh

TRIED = 4  # arrangements that are compiled
MICROBATCHES = (1, 2, 4, 8)
AGAIN = {"none": 1.0, "dots": 1.1, "full": 4 / 3}  # what rematerialisation multiplies the arithmetic by
REACHED = 0.6  # share of a chip's peak that products of a common size reach


def candidates(experiment: Experiment, lengths: Lengths, place: Slice) -> list[Experiment]:
    """TRIED arrangements: those that should be fastest of those that should fit, no two alike but in
    micro-batches, and the leanest, for the count is rough. What cannot be shared out at all comes back as it
    is."""
    rough = lengths, place, count(_shapes(experiment.model))
    counted = [(memory(each, *rough), time(each, *rough), each) for each in arrangements(experiment, place)]
    leanest = min(counted, key=lambda one: one[:2], default=(0, 0, experiment))[2]
    fastest = {}
    for _, _, each in sorted((one for one in counted if one[0] < place.room), key=lambda one: one[1]):
        fastest.setdefault((each.mesh, each.model.remat), each)
    tried = list(fastest.values())[:TRIED]
    return tried if leanest in tried else [*tried[: TRIED - 1], leanest]


def arrangements(experiment: Experiment, place: Slice) -> Iterator[Experiment]:
    """Every way to share the step out over the slice; the axes slice and sequence stay as they are."""
    phase, fixed = experiment.pretraining, experiment.mesh
    devices = place.devices // (fixed.slice * fixed.sequence)
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for fsdp, tensor, parts, remat in product(divisors, divisors, MICROBATCHES, AGAIN):
        if devices % (fsdp * tensor):
            continue
        mesh = MeshConfig(fixed.slice, devices // (fsdp * tensor), fsdp, fixed.sequence, tensor)
        try:
            check_mesh(experiment.model, mesh.sizes(place.devices), phase.batch_size, parts)
        except SettingError:
            continue
        model, pretraining = replace(experiment.model, remat=remat), replace(phase, microbatches=parts)
        yield replace(experiment, mesh=mesh, model=model, pretraining=pretraining)


def memory(experiment: Experiment, lengths: Lengths, place: Slice, parameters: int) -> float:
    """About the bytes of a device that a step fills."""
    model, phase, sizes = experiment.model, experiment.pretraining, experiment.mesh.sizes(place.devices)
    tensor, wide = sizes["tensor"], WIDTH[model.dtype]
    rows = phase.batch_size / phase.microbatches / sharding.batch_parts(sizes) / sizes["sequence"]
    # of a block, a position
    products = 3 * model.d_model + (4 * model.num_heads * model.d_kv + model.d_ff) / tensor
    kept = wide * {"full": model.d_model, "dots": products, "none": 2 * products}[model.remat]
    words = row_length(model.architecture, lengths) if model.has_decoder else lengths.inputs
    saved, working = 0.0, 10 * rows * words * model.vocab_size / tensor  # logits
    for layers, queries, scores in _stacks(model, lengths):
        saved += layers * rows * queries * kept
        working = max(
            working, rows * (3 * wide * queries * products + 12 * model.num_heads / tensor * scores)
        )
    states = 2 + _remembered(replace(model, remat="none"), phase.optimizer)  # parameters, gradients
    gathered = (sizes["fsdp"] > 1) * 4 * wide * parameters / tensor / model.num_decoder_layers
    return 4 * parameters * states / (sizes["fsdp"] * tensor) + saved + working + gathered


def time(experiment: Experiment, lengths: Lengths, place: Slice, parameters: int) -> float:
    """About the seconds of a step: arithmetic, HBM written and read, and half of what devices send, which
    hides.
    """
    model, phase, sizes = experiment.model, experiment.pretraining, experiment.mesh.sizes(place.devices)
    fsdp, tensor, parts = sizes["fsdp"], sizes["tensor"], phase.microbatches
    data, axes = sizes["slice"] * sizes["data"], ("slice",) if sizes["slice"] > 1 else ("data",)
    arithmetic = flops_of(experiment, phase.batch_size, lengths) / (place.chip.peak * place.chips)
    held, wide = parameters / tensor, WIDTH[model.dtype]
    positions = sum(layers * queries for layers, queries, _ in _stacks(model, lengths))
    tokens = phase.batch_size / (data * fsdp) * positions
    # there twice, and gradients
    sent = 3 * parts * held * wide * (1 - 1 / fsdp) / place.bandwidth(("fsdp",), fsdp)
    # float32 gradients, there and back
    sent += 8 * parts * held / fsdp * (1 - 1 / data) / place.bandwidth(axes, data)
    # four sums
    sent += 8 * tokens * model.d_model * wide * (1 - 1 / tensor) / place.bandwidth(("tensor",), tensor)
    moved = (
        2 * memory(experiment, lengths, place, parameters) * parts * place.chip.devices / place.chip.bandwidth
    )
    return arithmetic * AGAIN[model.remat] / REACHED + moved + sent / 2


@cache
def _remembered(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    """Numbers that the optimiser remembers, by parameter."""
    shapes = _shapes(model)
    return remembered(optimizer, shapes) / count(shapes)


def _shapes(model: ModelConfig) -> Transformer:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), key)


def _stacks(model: ModelConfig, lengths: Lengths) -> list[tuple[int, int, int]]:
    """(layers, queries, scores of a head that are in memory at a time) of each stack; a kernel keeps none."""
    inputs, targets = lengths.inputs, row_length(model.architecture, lengths)

    def scores(queries, keys):
        kernel = {"auto": max(queries, keys) > SHORT, "flash": True}.get(model.attention, False)
        return 0 if kernel and not model.sparsity.random_blocks else queries * keys

    encoder = [(model.num_encoder_layers, inputs, scores(inputs, inputs))] * model.has_encoder
    most = max(scores(targets, targets), scores(targets, inputs) * model.has_encoder)
    return encoder + [(model.num_decoder_layers, targets, most)] * model.has_decoder
