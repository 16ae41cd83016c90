"""Roofline estimates from a compiled step: its time, the use of the chips, chip-hours, speed of decoding.

Before anything is compiled, a rough model of memory and time picks the arrangements worth compiling.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import jax
from flax import nnx

from experiments.plan.slices import HOST_BANDWIDTH
from experiments.plan.step import Compiled, PlannedStep
from experiments.runs.stages import stages
from lm import sharding
from lm.config.base import SettingError
from lm.config.layers import CONVOLUTIONS, CompileConfig, Remat
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig
from lm.config.training import OptimizerConfig
from lm.data.packing import row_length
from lm.nn.attention_dispatch import MAX_XLA_LENGTH, fits_short_rows
from lm.nn.layers import num_parameters
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths
from lm.ops.recurrence import CELLS
from lm.train.checks import check_mesh
from lm.train.flops import cache_bytes, expert_parameters
from lm.train.optimizers import optimizer_state_size

BOUNDS = ("compute", "HBM", "network", "host", "compiler")
# What the columns of a plan's tables mean, and what the estimates assume.
COLUMN_MEANINGS = {
    "args": "what a step takes and returns: parameters, the optimizer's state, the batch",
    "temps": "activations and gradients, as many as there are at one time",
    "code": "the compiled program",
    "compute": "FLOPs by formula over the chips' peak; what rematerialisation repeats is not counted",
    "HBM": "the state and temporaries read and written once, parameters read three times per micro-batch",
    "network": (
        "bytes of all collectives over the bandwidth of all links, in both directions, of the slice's "
        "dimensions that a group of devices spans; a dimension without wrap-around links counts half: each "
        "side other than 16, unless the slice is made of cubes of 4 x 4 x 4"
    ),
    "host": "what waits in the hosts' memory, sent there and back once a step, at 16 GB/s for each chip",
    "compiler": (
        "cycles over the clock, by the compiler's own estimate, without collectives; loops count as often as "
        "they run; the attention kernel for short rows, for which the compiler has no estimate, is added at "
        "two thirds of the peak"
    ),
    "*": "the longest of these, which is how long a step lasts",
    "use": "FLOPs over that time at peak",
}
MAX_CANDIDATES = 5  # number of arrangements that a search compiles
MICROBATCHES = (1, 2, 4, 8)
# policies of rematerialisation that are tried, and those tried if nothing fits without the hosts' memory
REMAT_POLICIES: tuple[Remat, ...] = ("none", "dots", "attention", "full")
OFFLOADING_REMAT_POLICIES: tuple[Remat, ...] = ("full-offloaded",)
# Factor by which rematerialisation multiplies the FLOPs of a step, which are those of three forward passes:
# "full" repeats the forward pass once, "dots" only its elementwise part.
RECOMPUTE_FACTOR_DOTS, RECOMPUTE_FACTOR_FULL = 1.1, 4 / 3
MATMUL_EFFICIENCY = 0.6  # share of a chip's peak that matrix products of a common size reach
# Rough numbers of ``memory``, by which arrangements are compared before any is compiled.
LOGIT_BYTES = 10  # of a logit and its gradient: as many as one copy in bfloat16 and two in float32
SCORE_BYTES = 12  # of an attention score, its gradient included, in the block that is being computed
BLOCK_COPIES = 3  # number of times that what a block computes is in memory while its gradients are computed
# Number of times that what a block computes is saved for the backward pass: "dots" saves the results of its
# matrix products, "none" about as many numbers again.
SAVED_COPIES = {"none": 2, "dots": 1}
GATHERED_LAYERS = 4  # number of layers whose parameters are whole on a device at one time, with fsdp
# Share of the peak that lm.ops.kernels.short_rows reaches. libtpu 0.0.42 schedules its two passes for v5e
# without a loop: for two heads of 64 features and 512 x 512 scores they are 3,071 and 7,639 instructions
# long, of which the products alone take 2,048 and 5,120.
KERNEL_EFFICIENCY = 2 / 3


@dataclass(frozen=True)
class Estimate:
    """Holds the lower bounds of a step's time [s], and what follows from the slowest."""

    bounds: dict[str, float]  # one of BOUNDS -> lower bound of a step's time [s]
    chip_hours: tuple[float, float]  # of all pre-training and of all fine-tuning, at least

    @property
    def step_seconds(self) -> float:
        """Return how long a step lasts: the largest of the lower bounds [s]."""
        return max(self.bounds.values())

    @property
    def bottleneck(self) -> str:
        """Return which of BOUNDS is the largest, which limits the speed."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def utilization(self) -> float:
        """Return the share of the chips' peak that is used."""
        return self.bounds["compute"] / self.step_seconds


def estimate(step: PlannedStep, compiled: Compiled) -> Estimate:
    """Return the lower bounds of a compiled step's time, and the chip-hours of the whole run at that rate."""
    phase, slices, chip = step.experiment.pretraining, step.slices, step.slices.chip
    flops = step.flops(phase.batch_size, step.lengths)
    shard = _parameters_of_shard(step.experiment.model, compiled.parameters, step.sizes)
    # the parameters, in each micro-batch read three times
    read = 3 * phase.microbatches * shard * step.width / step.sizes["tensor"]
    moved = 2 * (compiled.arguments + compiled.temporaries) + compiled.outputs + read
    traffic = [(n * received, tuple(axes), size) for _, axes, size, n, received in compiled.collectives]
    network = sum(received / slices.bandwidth(axes, size) for received, axes, size in traffic)
    compute, hbm = flops / (chip.peak * slices.chips), moved * chip.devices / chip.bandwidth
    host = 2 * compiled.host * chip.devices / HOST_BANDWIDTH
    kernels = compiled.kernel_flops * chip.devices / (KERNEL_EFFICIENCY * chip.peak)
    compiler = compiled.cycles / chip.clock + kernels
    bounds = dict(zip(BOUNDS, (compute, hbm, network, host, compiler), strict=True))
    pretraining, finetuning = _run_in_planned_steps(step, flops)
    hours = max(bounds.values()) * slices.chips / 3_600
    return Estimate(bounds, (pretraining * hours, finetuning * hours))


def _run_in_planned_steps(step: PlannedStep, flops: float) -> tuple[float, float]:
    """Return the pre-training and the fine-tuning of a whole run, each as a number of planned steps.

    It is the FLOPs of all their steps divided by ``flops``, those of the planned step.
    """
    pretraining, finetuning = 0.0, 0.0
    for stage in stages(step.experiment):
        if not stage.has_text_model:
            continue
        training, lengths = stage.training, stage.lengths
        if stage.is_pretraining and stage.is_compared:  # the stage whose step is planned
            lengths = step.lengths
        of_stage = step.flops(training.batch_size, lengths, is_pretraining=stage.is_pretraining)
        steps = stage.num_steps * of_stage / flops
        if stage.is_pretraining:
            pretraining += steps
        else:
            finetuning += steps
    return pretraining, finetuning


@dataclass(frozen=True)
class DecodingEstimate:
    """Holds the memory that decoding needs, and the most tokens/s that the bandwidth of HBM allows."""

    cache_bytes: float  # of one sequence [bytes]
    tokens_per_second_at_batch_1: float
    largest_batch: int  # number of sequences that fit [sequences]
    tokens_per_second_at_largest_batch: float


def estimate_decoding(step: PlannedStep, compiled: Compiled) -> DecodingEstimate | None:
    """Return the estimate of decoding with parameters and caches spread evenly over the chips.

    Parameters are in float32, as in training. None for encoders, and for decoders without a cache or state.
    """
    model, slices = step.experiment.model, step.slices
    if not model.has_decoder or not compiled.parameters:
        return None
    targets = row_length(model.architecture, step.lengths)
    cached, read = cache_bytes(model, targets, step.lengths.inputs), 4 * compiled.read
    if not cached:
        return None
    bandwidth = slices.chip.bandwidth * slices.chips
    batch = max(int((slices.chip.usable * slices.chips - 4 * compiled.parameters) / cached), 0)
    return DecodingEstimate(
        cached, bandwidth / (read + cached), batch, batch * bandwidth / (read + batch * cached)
    )


@dataclass(frozen=True)
class RoughEstimate:
    """Holds what a step should take, before it is compiled."""

    plan: PlannedStep
    memory: float  # of a device, that the step fills [bytes]
    seconds: float  # that the step lasts [s]

    @property
    def fits(self) -> bool:
        """Return whether the step should fit the memory of a device."""
        return self.memory < self.plan.slices.room


def candidates(step: PlannedStep) -> list[PlannedStep]:
    """Return at most MAX_CANDIDATES arrangements to compile.

    They are the fastest of those that should fit, by ``seconds``, and the one that needs the least memory,
    since ``memory`` is rough. No two of the fastest differ in micro-batches alone; the one that needs the
    least memory may differ from them in nothing else. The hosts' memory is used only if nothing should fit
    without it. A step that cannot be arranged on the slice at all is returned as it is.
    """
    parameters = num_parameters(_shapes(step.experiment.model))

    def estimates_with(policies: Sequence[Remat]) -> list[RoughEstimate]:
        plans = arrangements(step, policies)
        return [RoughEstimate(plan, memory(plan, parameters), seconds(plan, parameters)) for plan in plans]

    estimates = estimates_with(REMAT_POLICIES)
    if not any(each.fits for each in estimates):
        estimates += estimates_with(OFFLOADING_REMAT_POLICIES)
    if not estimates:
        return [step]
    least_memory = min(estimates, key=lambda each: (each.memory, each.seconds)).plan
    fitting = sorted((each for each in estimates if each.fits), key=lambda each: each.seconds)
    fastest: dict[tuple[MeshConfig, CompileConfig], PlannedStep] = {}
    for each in fitting:
        experiment = each.plan.experiment
        fastest.setdefault((experiment.mesh, experiment.model.compile), each.plan)
    selected = list(fastest.values())[:MAX_CANDIDATES]
    if least_memory in selected:
        return selected
    return [*selected[: MAX_CANDIDATES - 1], least_memory]


def arrangements(step: PlannedStep, policies: Sequence[Remat] = REMAT_POLICIES) -> Iterator[PlannedStep]:
    """Yield every way to spread the step over the slice with these policies of rematerialisation.

    The mesh axes slice and sequence stay those of the row. If the row itself saves tensors by name
    (remat="names"), its own policy is tried too.
    """
    experiment, phase, fixed = step.experiment, step.experiment.pretraining, step.experiment.mesh
    if fixed.sequence == -1:
        fixed = replace(fixed, sequence=step.sizes["sequence"])
    own = experiment.model.compile
    compile_configs = [replace(own, remat=remat, saved=(), offloaded=()) for remat in policies]
    if own.remat == "names":
        compile_configs.append(own)
    devices = step.slices.devices // (fixed.slice * fixed.sequence)
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    experts = experiment.model.experts.count
    expert_axis_sizes = [size for size in divisors if experts and experts % size == 0] or [1]
    for fsdp, tensor, expert, microbatches, compile_config in product(
        divisors, divisors, expert_axis_sizes, MICROBATCHES, compile_configs
    ):
        if devices % (fsdp * tensor * expert):
            continue
        data = devices // (fsdp * tensor * expert)
        mesh = replace(fixed, data=data, fsdp=fsdp, expert=expert, tensor=tensor)
        try:
            check_mesh(experiment.model, mesh.sizes(step.slices.devices), phase.batch_size, microbatches)
        except SettingError:
            continue
        model = replace(experiment.model, compile=compile_config)
        pretraining = replace(phase, microbatches=microbatches)
        yield replace(step, experiment=replace(experiment, mesh=mesh, model=model, pretraining=pretraining))


def memory(step: PlannedStep, parameters: int) -> float:
    """Return about how many bytes of a device's memory a step fills."""
    model, phase, sizes = step.experiment.model, step.experiment.pretraining, step.sizes
    tensor, width = sizes["tensor"], step.width
    rows_per_device = phase.batch_size / phase.microbatches / sharding.batch_shards(sizes) / sizes["sequence"]
    mlp_features = 0.0 if model.mlp.activation == "none" else model.mlp.d_ff * _slots_per_token(model)
    # numbers that the forward pass of a block computes at one position, with d_model each for its input and
    # for the outputs of its mixer and its feed-forward layer
    features = 3 * model.d_model + (_mixer_features(model, width) + mlp_features) / tensor
    saved_features = _named_features(model, tensor)[0]
    if model.compile.remat in SAVED_COPIES:
        saved_features = features * SAVED_COPIES[model.compile.remat]
    is_encoder = not model.has_decoder
    logit_positions = step.lengths.inputs if is_encoder else row_length(model.architecture, step.lengths)
    logit_bytes = LOGIT_BYTES * rows_per_device * logit_positions * model.vocab_size / tensor
    largest_temporary_bytes = logit_bytes / model.compile.loss_chunks
    if model.output.softmaxes > 1:  # the sum of all softmaxes, and one of them
        largest_temporary_bytes *= 2
    saved_bytes, stacks = 0.0, _stacks(model, step.lengths)
    for stack in stacks:
        saved_bytes += stack.layers * rows_per_device * stack.queries * width * saved_features
        block_bytes = BLOCK_COPIES * width * stack.queries * features
        block_bytes += SCORE_BYTES * model.attention.num_heads / tensor * stack.scores
        largest_temporary_bytes = max(largest_temporary_bytes, rows_per_device * block_bytes)
    # a parameter, its gradient, and its share of the optimiser's state
    floats_per_parameter = 2 + _optimizer_state_per_parameter(
        replace(model, compile=CompileConfig()), phase.optimizer
    )
    parameters_per_shard = _parameters_of_shard(model, parameters, sizes)
    state_bytes = 4 * parameters_per_shard * floats_per_parameter / (sizes["fsdp"] * tensor)
    gathered_bytes = 0.0
    if sizes["fsdp"] > 1:
        # A layer is taken to have the parameters of the whole model, embeddings included, over the mean count
        # of layers of a stack.
        mean_layers_per_stack = sum(stack.layers for stack in stacks) / len(stacks)
        gathered_bytes = GATHERED_LAYERS * width * parameters_per_shard / tensor / mean_layers_per_stack
    return state_bytes + saved_bytes + largest_temporary_bytes + gathered_bytes


def _parameters_of_shard(model: ModelConfig, parameters: int, sizes: Mapping[str, int]) -> float:
    """Return how many of the ``parameters`` a device would hold if the mesh had the axis "expert" alone."""
    experts = expert_parameters(model) if model.experts.count else 0
    return parameters - experts + experts / sizes["expert"]


def _slots_per_token(model: ModelConfig) -> float:
    """Return how many feed-forward hidden vectors are computed for a token.

    It is a mean over layers with experts and without.
    """
    experts, layers = model.experts, model.num_encoder_layers if model.has_encoder else 0
    layers += model.num_decoder_layers if model.has_decoder else 0
    slots = experts.capacity_factor or experts.count
    share = model.num_expert_layers / layers
    return 1 + share * (min(slots, experts.count) - 1)


def _named_features(model: ModelConfig, tensor: int) -> tuple[float, float]:
    """Return how many numbers a block saves at one position on the device, and how many on the host.

    They are those of the block's input and of the tensors that the policy names.
    """
    attention, policy = model.attention, model.compile
    gates = 2 if model.mlp.activation.startswith("gated") else 1
    features = {
        "block_input": model.d_model,
        "query_proj": attention.num_heads * attention.d_kv / tensor,
        "key_proj": attention.key_value_heads * attention.d_kv / tensor,
        "value_proj": attention.key_value_heads * attention.value_width / tensor,
        "context": attention.num_heads * attention.value_width / tensor,
        "out_proj": model.d_model,
        "mlp_hidden": gates * model.mlp.d_ff * _slots_per_token(model) / tensor,
        "mlp_out": model.d_model,
    }
    offloaded = sum(features[name] for name in policy.offloaded_tensors)
    on_device = sum(features[name] for name in policy.saved_tensors)
    return on_device + model.d_model * ("block_input" not in policy.offloaded_tensors), offloaded


def _recompute_factor(model: ModelConfig) -> float:
    """Return the factor by which rematerialisation multiplies the FLOPs of a step."""
    policy, attention = model.compile, model.attention
    if policy.remat == "none":
        return 1.0
    if policy.remat == "dots":
        return RECOMPUTE_FACTOR_DOTS
    gates = 2 if model.mlp.activation.startswith("gated") else 1
    products = {  # tensor -> matrix elements that its product reads; "context" is no product with parameters
        "query_proj": model.d_model * attention.num_heads * attention.d_kv,
        "key_proj": model.d_model * attention.key_value_heads * attention.d_kv,
        "value_proj": model.d_model * attention.key_value_heads * attention.value_width,
        "out_proj": model.d_model * attention.num_heads * attention.value_width,
        "mlp_hidden": gates * model.d_model * model.mlp.d_ff,
        "mlp_out": model.d_model * model.mlp.d_ff,
    }
    kept = {*policy.saved_tensors, *policy.offloaded_tensors}
    share = sum(size for name, size in products.items() if name not in kept) / sum(products.values())
    return RECOMPUTE_FACTOR_DOTS + share * (RECOMPUTE_FACTOR_FULL - RECOMPUTE_FACTOR_DOTS)


def _mixer_features(model: ModelConfig, width: int) -> float:
    """Return how many numbers the mixer of a block computes at one position.

    For attention these are queries, keys, values and the weighted sums of values. They are counted in units
    of ``width`` bytes, so that the float32 numbers of a recurrent mixer count more.
    """
    attention = model.attention
    attention_features = 2 * attention.num_heads * (attention.d_kv + attention.value_width)
    if model.has_attention_logits:
        return attention_features
    cross_attention_features = attention_features * (model.has_encoder and model.has_decoder)
    if (cell := CELLS.get(model.mixer.kind)) is not None:
        float32_numbers = (2 * cell.gates + cell.states) * model.state_width
        return cross_attention_features + float32_numbers * 4 / width
    if model.mixer.kind in CONVOLUTIONS:
        # value, gate, their product and its convolution, and the kernels of a dynamic one
        kernels = model.mixer.kernel_size * (model.mixer.kernels or model.d_model)
        is_dynamic = model.mixer.kind == "dynamic-convolution"
        return cross_attention_features + 4 * model.d_model + kernels * is_dynamic
    if model.mixer.kind == "window":
        return cross_attention_features + model.state_width
    return cross_attention_features


def seconds(step: PlannedStep, parameters: int) -> float:
    """Return about how many seconds a step takes: arithmetic, traffic of HBM, and half of what devices send.

    The other half is sent while the devices compute.
    """
    model, phase, slices, sizes = step.experiment.model, step.experiment.pretraining, step.slices, step.sizes
    fsdp, tensor, microbatches = sizes["fsdp"], sizes["tensor"], phase.microbatches
    data, axes = sizes["slice"] * sizes["data"], ("slice",) if sizes["slice"] > 1 else ("data",)
    arithmetic = step.flops(phase.batch_size, step.lengths) / (slices.chip.peak * slices.chips)
    shard, width = _parameters_of_shard(model, parameters, sizes) / tensor, step.width
    positions = sum(stack.layers * stack.queries for stack in _stacks(model, step.lengths))
    expert = sizes["expert"]
    tokens = phase.batch_size / (data * fsdp * expert * sizes["sequence"]) * positions
    # parameters are gathered in the forward and the backward pass, and gradients are scattered
    sent = 3 * microbatches * shard * width * (1 - 1 / fsdp) / slices.bandwidth(("fsdp",), fsdp)
    # gradients in float32, there and back
    sent += 8 * microbatches * shard / fsdp * (1 - 1 / data) / slices.bandwidth(axes, data)
    # four sums over activations in a block, there and back
    sent += 8 * tokens * model.d_model * width * (1 - 1 / tensor) / slices.bandwidth(("tensor",), tensor)
    # slots of experts, there and back, and so are their gradients
    exchanged = 4 * tokens * model.d_model * width * _slots_per_token(model) * (1 - 1 / expert)
    sent += exchanged / slices.bandwidth(("expert",), expert)
    # in each micro-batch all that the step fills is written and read once
    moved = 2 * memory(step, parameters) * microbatches * slices.chip.devices / slices.chip.bandwidth
    waiting = tokens * width * _named_features(model, tensor)[1]
    host = 2 * waiting * slices.chip.devices / HOST_BANDWIDTH
    return max(arithmetic * _recompute_factor(model) / MATMUL_EFFICIENCY + moved + sent / 2, host)


@cache
def _optimizer_state_per_parameter(model: ModelConfig, optimizer: OptimizerConfig) -> float:
    """Return how many numbers of optimiser state there are for each parameter, as a mean."""
    shapes = _shapes(model)
    return optimizer_state_size(optimizer, shapes) / num_parameters(shapes)


def _shapes(model: ModelConfig) -> Transformer:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), key)


@dataclass(frozen=True)
class StackSize:
    """Holds the size of an encoder or a decoder on one row of a batch."""

    layers: int
    queries: int  # positions of the row [tokens]
    scores: int  # of one head, that are in memory at once; attention by a kernel stores none


def _stacks(model: ModelConfig, lengths: Lengths) -> list[StackSize]:
    """Return the size of the encoder and of the decoder, of those that the model has."""
    inputs, targets = lengths.inputs, row_length(model.architecture, lengths)

    def scores(queries: int, keys: int) -> int:
        by_length = max(queries, keys) > MAX_XLA_LENGTH or fits_short_rows(model, queries * keys)
        uses_kernel = {"auto": by_length, "flash": True}.get(model.attention.implementation, False)
        stores_logits = model.sparsity.random_blocks or model.mixer.kind == "synthesizer"
        return 0 if uses_kernel and not stores_logits else queries * keys

    attends = model.has_attention_logits  # if not, only cross-attention has scores
    # Scores of cross-attention as a share of queries x keys for each head: kind "merged" has none of its own,
    # kinds other than "heads" have one set for all heads, additive scores hold a sum over d_model features.
    heads = model.attention.num_heads
    shares = {"heads": 1.0, "merged": 0.0, "none": 0.0, "additive": model.d_model / heads}
    cross_share = shares.get(model.cross_attention.kind, 1 / heads) * model.has_encoder
    stacks = []
    if model.has_encoder:
        encoder_scores = scores(inputs, inputs) if attends else 0
        stacks.append(StackSize(model.num_encoder_layers, inputs, encoder_scores))
    if model.has_decoder:
        cross_scores = round(scores(targets, inputs) * cross_share)
        largest_scores = max(scores(targets, targets) if attends else 0, cross_scores)
        if model.has_merged_attention:
            largest_scores = targets * (targets + inputs)
        stacks.append(StackSize(model.num_decoder_layers, targets, largest_scores))
    return stacks
