"""The training step: a state and a batch in, the next state and metrics out."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError
from lm.config.model import HeadConfig, ModelConfig
from lm.config.training import EVERY_UPDATE, GuardConfig, LossConfig, OptimizerConfig, TruncatedBPTT
from lm.nn.cache import Carry
from lm.nn.transformer import Transformer
from lm.train.losses import Loss, carried_language_model, language_model
from lm.train.optimizers import (
    Freeze,
    Optimizer,
    average_parameters,
    learning_rate,
    make_optimizer,
    train_all,
)
from lm.train.runtime.preemption import check_preemption
from lm.train.state import State, abstract_state, check_update, create_state, shardings_of

COMPILER_OPTIONS = {  # by platform
    # The partitioner otherwise splits products with fsdp-sharded matrices into up to 240 small permutes, a
    # third slower by the compiler's own estimate.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepSpec:
    """What a training step computes. The model is ``module(model, *parts, rngs)``.

    Equal specs share their compiled functions, so all fields are hashable: settings, classes, functions.
    """

    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: Loss = language_model
    loss_config: LossConfig = LossConfig()
    module: Callable[..., nnx.Module] = Transformer
    parts: tuple[HeadConfig | ModelConfig, ...] = ()  # settings of what surrounds the model
    freeze: Freeze = train_all  # zeroes updates of frozen parameters
    microbatches: int = 1  # parts of a batch, whose gradients are summed
    guard: GuardConfig = EVERY_UPDATE
    # set if a row spans several steps; the loss is then that of ``carried_language_model``
    tbptt: TruncatedBPTT | None = None

    def __post_init__(self) -> None:
        if self.tbptt is not None and (self.loss is not language_model or self.microbatches > 1):
            raise SettingError("tbptt carries the state of a language_model through whole batches only")

    def make_model(self, key: jax.Array) -> nnx.Module:
        """Return the model, initialised at random."""
        return self.module(self.model, *self.parts, nnx.Rngs(params=key))

    def make_optimizer(self) -> Optimizer:
        """Return the optimiser of the model's parameters."""
        abstract_model = jax.eval_shape(self.make_model, jax.random.key(0))
        return make_optimizer(self.optimizer, sharding.axes(abstract_model), self.freeze)


def train_step(
    spec: StepSpec, optimizer: Optimizer, state: State, batch: Batch, seed: jax.Array
) -> tuple[State, Metrics]:
    """Return the state after one update, and metrics float32 []; ``seed`` uint32 [] decides dropout."""
    key = dropout_key(seed, state.step)
    carry = None
    if spec.tbptt is not None:
        carry = reset_carry(state.carry, state.step % spec.tbptt.chunks_per_row == 0)
    gradients, metrics, carry = compute_gradients(spec, state, batch, key, carry)
    # Sharded like the parameters, so that devices exchange only the part of a gradient that they update.
    gradients = sharding.constrain_to_parameters(gradients, sharding.axes(state.model))
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, step=state.step)
    params = optax.apply_updates(state.params, updates)
    metrics |= {
        "grad_norm": optax.tree.norm(gradients),
        "learning_rate": learning_rate(spec.optimizer, state.step),
    }
    average = state.average
    if average is not None:
        average = average_parameters(spec.optimizer.ema, state.step, average, params)
    after = State(state.step + 1, params, opt_state, state.structure, state.guard, average, carry)
    if spec.guard.skips:
        return skip_bad_update(spec.guard, state, after, metrics)
    return after, metrics


def eval_step(spec: StepSpec, state: State, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return (sum, sum of weights) by metric, of the averaged parameters where an average is kept."""
    _, sums = spec.loss(state.model, batch, None, LossConfig(z_loss=0.0))
    return {name: value for name, value in sums.items() if name != "z_loss"}


def initial_state(spec: StepSpec, optimizer: Optimizer, seed: jax.Array) -> State:
    """Return the state before the first step, with parameters drawn by ``seed`` uint32 []."""
    init_key, _ = jax.random.split(jax.random.key(seed))
    return create_state(spec.make_model, optimizer, init_key, spec.guard, spec.optimizer.ema, spec.tbptt)


def dropout_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the key of a step's dropout, which depends on the seed and on the step alone."""
    _, key = jax.random.split(jax.random.key(seed))
    return jax.random.fold_in(key, step)


def reset_carry(carry: Carry, is_start: jax.Array) -> Carry:
    """Return recurrent states, or zeros where rows start."""
    return jax.tree.map(lambda x: jnp.where(is_start, 0.0, x), carry)


class Gradients(NamedTuple):
    """What the backward pass of a batch gives."""

    gradients: dict[str, jax.Array]  # by parameter, of the mean loss over the batch's target tokens
    metrics: Metrics
    carry: Carry | None  # recurrent states after the batch, if a row spans several steps (tbptt)


def compute_gradients(
    spec: StepSpec, state: State, batch: Batch, key: jax.Array, carry: Carry | None = None
) -> Gradients:
    """Return gradients and metrics of the mean loss over a batch, split into micro-batches if asked.

    The weights of targets are divided by their sum over the whole batch first: losses and gradients of
    micro-batches then simply add up. Rows go on from ``carry``, which is never split.
    """
    batch, metrics = normalize_loss_weights(batch)

    def mean_loss(params, batch, key):
        model, after = state.with_params(params), None
        if carry is None:
            loss, sums = spec.loss(model, batch, key, spec.loss_config)
        else:
            loss, sums, after = carried_language_model(model, batch, carry, key, spec.loss_config)
        return loss, ({name: value for name, (value, _) in sums.items()}, after)

    gradient = jax.value_and_grad(mean_loss, has_aux=True)
    if spec.microbatches == 1:
        (_, (means, carry_after)), gradients = gradient(state.params, batch, key)
    else:
        sums = _sum_over_microbatches(gradient, spec.microbatches, state.params, batch, key)
        gradients, (means, carry_after) = sums
    return Gradients(gradients, means | metrics, carry_after)


def normalize_loss_weights(batch: Batch) -> tuple[Batch, Metrics]:
    """Return the batch with loss weights that sum to 1, and how many tokens it trains on.

    For ELECTRA these are the tokens that the discriminator judges.
    """
    weights = batch.loss_weights()
    totals = {name: x.sum(dtype=jnp.float32) for name, x in weights.items()}
    normalized = {name: weights[name] / jnp.maximum(total, 1) for name, total in totals.items()}
    # An encoder's batch also has weights of sentence pairs, which are fewer than its tokens.
    metrics = {"tokens": jnp.stack(list(totals.values())).max()}
    for side in batch.sides.values():
        if side.content is not None:  # labelled tasks have none
            metrics["content_tokens"] = side.content.sum(dtype=jnp.float32)
    return Batch.from_features(batch.features() | normalized), metrics


def _sum_over_microbatches(
    gradient: Callable, count: int, params: dict[str, jax.Array], batch: Batch, key: jax.Array
) -> tuple[dict[str, jax.Array], tuple[Metrics, None]]:
    # Each part takes every count-th row, so that devices exchange no rows.
    parts = batch.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1))

    def add(sums, numbered_part):
        index, part = numbered_part
        (_, metrics), gradients = gradient(params, part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, (gradients, metrics)), None

    first = parts.map(lambda x: x[0])
    (_, metrics), gradients = jax.eval_shape(gradient, params, first, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (gradients, metrics))
    (gradients, metrics), _ = jax.lax.scan(add, zeros, (jnp.arange(count), parts))
    return gradients, metrics


def skip_bad_update(
    config: GuardConfig, before: State, after: State, metrics: Metrics
) -> tuple[State, Metrics]:
    """Return ``after``, or ``before`` with the next step's number if the guard skips the update.

    This is no optax transformation: a recurrent carry and the average of parameters must stay too, and
    changing the guard must not rename the optimiser's state in checkpoints.
    """
    assert before.guard is not None
    is_good, guard = check_update(config, before.guard, metrics["loss"], metrics["grad_norm"])
    before = replace(before, step=after.step)
    chosen = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), after, before)
    counts = {
        "skipped_updates": 1.0 - is_good,
        "consecutive_skipped": guard["consecutive_skipped"].astype(jnp.float32),
    }
    return replace(chosen, guard=guard), metrics | counts


@dataclass(frozen=True)
class Steps:
    """The compiled functions of a run; the seed is an argument, so runs that differ in it share them."""

    mesh: Mesh
    abstract: State  # shapes, dtypes and shardings
    # seed uint32 [] -> initial state, with the shardings of ``abstract``
    create: Callable[[jax.Array], State]
    train: jax.stages.Wrapped  # (state, batch, seed uint32 []) -> (state, metrics); consumes the state
    eval: Callable[[State, Batch], dict[str, tuple[jax.Array, jax.Array]]]  # see ``eval_step``

    def init(self, seed: int) -> State:
        """Return the state before the first step."""
        return self.create(self._on_devices(seed))

    def train_step(self, seed: int) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """Return the compiled step of a seed: (state, batch) -> (state, metrics)."""
        seed_on_devices = self._on_devices(seed)
        return lambda state, batch: self.train(state, batch, seed_on_devices)

    def compile_train(self, batch: Batch) -> None:
        """Compile the training step for batches of this shape: the first call then finds it."""
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(self.mesh))
        self.train.lower(self.abstract, sharding.abstract_arrays(batch), seed).compile()

    def shard_batch(self, batch: sharding.Tree) -> sharding.Tree:
        """Return a batch, or any tree of arrays by row, sharded over the devices.

        Raises if a signal has asked the process to end.
        """
        check_preemption()
        return sharding.put_batch(batch, self.mesh)

    def evaluate(self, state: State, batches: Iterable[Batch]) -> dict[str, float]:
        """Return metrics averaged over ``batches``, and their number of ``tokens``.

        Each process passes its own rows of every batch.
        """
        totals = None
        for batch in batches:
            sums = self.eval(state, self.shard_batch(batch))
            # Waiting keeps at most two programs running: more may deadlock on many CPU devices.
            totals = sums if totals is None else jax.tree.map(jnp.add, jax.block_until_ready(totals), sums)
        if totals is None:
            return {"tokens": 0.0}
        numbers = {name: (float(total), float(weight)) for name, (total, weight) in totals.items()}
        means = {name: total / max(weight, 1.0) for name, (total, weight) in numbers.items()}
        return means | {"tokens": numbers["loss"][1]}

    def _on_devices(self, seed: int) -> jax.Array:
        return jax.device_put(np.uint32(seed), sharding.replicated(self.mesh))


@lru_cache(maxsize=16)
def build(spec: StepSpec, mesh: Mesh) -> Steps:
    """Return the compiled steps of a spec on a mesh; the same objects for equal arguments."""
    optimizer = spec.make_optimizer()
    create = partial(initial_state, spec, optimizer)
    abstract = abstract_state(create, optimizer, mesh)
    state, batch, replicated = (
        shardings_of(abstract),
        sharding.batch_sharding(mesh),
        sharding.replicated(mesh),
    )
    compile_for = partial(jax.jit, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))

    # ``lm.sharding.constrain`` asks for the mesh around it.
    def train(state, batch, seed):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return train_step(spec, optimizer, state, batch, seed)

    def evaluate(state, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return eval_step(spec, state, batch)

    return Steps(
        mesh,
        abstract,
        compile_for(create, in_shardings=replicated, out_shardings=state),
        compile_for(
            train,
            in_shardings=(state, batch, replicated),
            out_shardings=(state, replicated),
            donate_argnums=0,
        ),
        compile_for(evaluate, in_shardings=(state, batch), out_shardings=replicated),
    )


def check_mesh(model: ModelConfig, sizes: Mapping[str, int], batch_size: int, microbatches: int = 1) -> None:
    """Raise SettingError for what cannot be split over mesh ``sizes``; cheap, before anything is compiled."""
    axes = {"vocab_size": "tensor", "attention.num_heads": "tensor", "mlp.d_ff": "tensor", "d_model": "fsdp"}
    for path, axis in axes.items():
        for side in (model, model.encoder_side):
            sharding.check_division(f"model.{path}", attrgetter(path)(side), {axis: sizes[axis]})
    if model.mixer.width is not None:
        sharding.check_division("model.mixer.width", model.mixer.width, {"fsdp": sizes["fsdp"]})
    if microbatches < 1 or batch_size % microbatches:
        raise SettingError(f"batch_size={batch_size} should be a multiple of microbatches={microbatches}")
    what = "batch_size" if microbatches == 1 else f"batch_size={batch_size} / microbatches={microbatches}"
    rows = {axis: sizes[axis] for axis in sharding.BATCH}
    sharding.check_division(what, batch_size // microbatches, rows)


def check_memory(model: ModelConfig, mesh: Mesh) -> None:
    """Raise SettingError if parameters and gradients in float32 alone do not fit on the devices."""
    shapes = jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), jax.random.key(0))
    layouts = sharding.parameter_shardings(shapes, mesh)
    leaves = sharding.named(shapes)
    needed = sum(2 * 4 * prod(layout.shard_shape(leaves[name].shape)) for name, layout in layouts.items())
    available = device_memory()
    if needed > available:
        paths = ("vocab_size", "d_model", "mlp.d_ff", "num_encoder_layers", "num_decoder_layers")
        sizes = ", ".join(f"model.{path}={attrgetter(path)(model)}" for path in paths)
        raise SettingError(
            f"the model needs {needed / 2**30:,.1f} GiB of each device for parameters and gradients, and "
            f"there are {available / 2**30:,.1f}: make it smaller ({sizes}) or use more devices (mesh.fsdp)"
        )


def check_rows(model: ModelConfig, sizes: Mapping[str, int], rows: int, length: int, named: str) -> None:
    """Raise SettingError if the devices of a mesh cannot hold a batch of ``rows`` of ``length`` tokens.

    A lower bound: every position's hidden state plus, if stored, one head's logits of one row. ``named``: the
    settings that the message blames.
    """
    own_rows, own_length = -(-rows // sharding.batch_shards(sizes)), -(-length // sizes["sequence"])
    states = own_rows * own_length * model.d_model * (2 if model.dtype == "bfloat16" else 4)
    stores_logits = jax.default_backend() == "cpu" and model.attention.implementation in ("auto", "xla")
    logits = own_length * length * 4 if stores_logits and model.has_scores else 0
    needed, available = states + logits, device_memory()
    if needed > available:
        batch, gib = f"a batch of {rows:,} rows of {length:,} tokens", 2**30
        mend = f"ask for fewer or shorter rows, or less than model.d_model={model.d_model}"
        raise SettingError(
            f"{named}: {batch} needs at least {needed / gib:,.1f} GiB of each device, and there are "
            f"{available / gib:,.1f}: {mend}"
        )


def device_memory() -> int:
    """Return the memory of a device [bytes]; for a CPU device, its share of the machine's."""
    shared = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", shared)
