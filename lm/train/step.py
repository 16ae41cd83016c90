"""One step: state in, state out. Compiled once for all runs of one shape in a process."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lm import sharding
from lm.nn.cache import Carry
from lm.nn.config import HeadConfig, ModelConfig
from lm.nn.transformer import Transformer
from lm.nn.view import Batch
from lm.settings import SettingError
from lm.train import state as states
from lm.train.config import EVERY_UPDATE, GuardConfig, Lasting, LossConfig, OptimizerConfig
from lm.train.losses import Loss, language_model
from lm.train.optimizers import Tune, every_parameter, learning_rate, mean_parameters, optimizer
from lm.train.state import State
from lm.train.stopping import alive

COMPILER_OPTIONS = {  # by platform
    # Else the partitioner turns products with fsdp-sharded matrices into chains of small permutes, here up to
    # 240 of them and a third of the speed, by the compiler's own estimate.
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
    tune: Tune = every_parameter
    microbatches: int = 1  # parts of a batch, whose gradients are added up
    guard: GuardConfig = EVERY_UPDATE
    lasting: Lasting | None = None  # rows that several steps read, a part each; None: each step has its own

    def make(self, key: jax.Array) -> nnx.Module:
        """The model, initialised at random."""
        return self.module(self.model, *self.parts, nnx.Rngs(params=key))


@dataclass(frozen=True)
class Steps:
    """The compiled functions of a run; the seed is an argument, so runs that differ in it share them."""

    mesh: Mesh
    abstract: State  # shapes, dtypes and shardings
    create: Callable[[jax.Array], State]  # seed uint32 [] -> the state before the first step, sharded as made
    train: jax.stages.Wrapped  # (state, batch, seed uint32 []) -> (state, metrics); consumes the state
    eval: Callable[[State, Batch], dict[str, tuple[jax.Array, jax.Array]]]  # (sum, sum of weights) by metric

    def init(self, seed: int) -> State:
        """The state before the first step, at random by the seed."""
        return self.create(self._on_devices(seed))

    def train_step(self, seed: int) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """(state, batch) -> (state, metrics float32 []); dropout depends on seed and step alone."""
        on_devices = self._on_devices(seed)
        return lambda state, batch: self.train(state, batch, on_devices)

    def compile_train(self, batch: Batch) -> None:
        """Compile the training step for batches of this shape: the first call then finds it."""
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(self.mesh))
        self.train.lower(self.abstract, sharding.described(batch), seed).compile()

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        """A batch of an evaluation on the devices; a signal may end the evaluation here."""
        alive()
        return sharding.put_batch(batch, self.mesh)

    def evaluate(self, state: State, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
        """Means over ``batches``, this process's parts of global ones; ``tokens``: how many had a loss."""
        totals = None
        for batch in batches:
            sums = self.eval(state, self.put(batch))
            # The sum before must be there, so that two programs at most are at work: more of them, each on
            # many CPU devices, may wait for each other's threads until XLA ends the process.
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
    """The compiled steps of a spec on a mesh; the same objects for equal arguments."""
    transform = optimizer(spec.optimizer, sharding.axes(jax.eval_shape(spec.make, jax.random.key(0))))
    kept = states.Kept(spec.guard, spec.optimizer.ema, spec.lasting)
    abstract = states.abstract(spec.make, transform, mesh, kept)
    places, rows, everywhere = states.shardings(abstract), sharding.batches(mesh), sharding.replicated(mesh)
    compiled = partial(jax.jit, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))

    def create(seed):
        # One half of the seed's key makes parameters, the other (in ``train``) dropout.
        return states.create(spec.make, transform, jax.random.split(jax.random.key(seed))[0], kept)

    def train(state, batch, seed):
        key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[1], state.step)
        if spec.lasting is not None:
            batch |= {"carry": _gone_on(state.carry, state.step % spec.lasting.steps > 0)}
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            gradients, metrics = _gradients(spec, state, batch, key)
        carry = metrics.pop("carry", None)
        # Sharded like the parameters, so that devices exchange only the part of a gradient that they update.
        gradients = jax.lax.with_sharding_constraint(gradients, places.params)
        updates, opt_state = transform.update(gradients, state.opt_state, state.params)
        updates, rate = spec.tune(updates, state.step), learning_rate(spec.optimizer, state.step)
        params = {name: value - rate * updates[name] for name, value in state.params.items()}
        metrics |= {"grad_norm": optax.tree.norm(gradients), "learning_rate": rate}
        average = state.average and mean_parameters(spec.optimizer.ema, state.step, state.average, params)
        after = State(state.step + 1, params, opt_state, state.structure, state.guard, average, carry)
        return _skip_bad_update(spec.guard, state, after, metrics) if spec.guard.skips else (after, metrics)

    def evaluate(state, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            sums = spec.loss(state.model, batch, None, LossConfig(z_loss=0.0))[1]
        return {name: value for name, value in sums.items() if name != "z_loss"}

    inputs = (places, rows, everywhere)
    return Steps(
        mesh,
        abstract,
        compiled(create, in_shardings=everywhere, out_shardings=places),
        compiled(train, in_shardings=inputs, out_shardings=(places, everywhere), donate_argnums=0),
        compiled(evaluate, in_shardings=(places, rows), out_shardings=everywhere),
    )


def check_mesh(model: ModelConfig, sizes: Mapping[str, int], batch_size: int, microbatches: int = 1) -> None:
    """SettingError for what cannot be split over mesh ``sizes``; cheap, before anything is compiled."""
    axes = {"vocab_size": "tensor", "num_heads": "tensor", "d_ff": "tensor", "d_model": "fsdp"}
    for field, axis in axes.items():
        for side in (model, model.encoder_side):
            sharding.check_division(f"model.{field}", getattr(side, field), {axis: sizes[axis]})
    if model.mixer_width is not None:
        sharding.check_division("model.mixer_width", model.mixer_width, {"fsdp": sizes["fsdp"]})
    if microbatches < 1 or batch_size % microbatches:
        raise SettingError(f"batch_size={batch_size} should be a multiple of microbatches={microbatches}")
    what = "batch_size" if microbatches == 1 else f"batch_size={batch_size} / microbatches={microbatches}"
    rows = {axis: sizes[axis] for axis in sharding.BATCH}
    sharding.check_division(what, batch_size // microbatches, rows)


def _skip_bad_update(
    config: GuardConfig, before: State, after: State, metrics: Metrics
) -> tuple[State, Metrics]:
    """``after``, or ``before`` with the next step's number if the update is skipped; and how many were."""
    assert before.guard is not None
    good, guard = states.judge(config, before.guard, metrics["loss"], metrics["grad_norm"])
    choose = partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    counts = {"left_out": 1.0 - good, "left_out_in_a_row": guard["in_a_row"].astype(jnp.float32)}
    return replace(choose(after, replace(before, step=after.step)), guard=guard), metrics | counts


def _gone_on(carry: Carry, goes_on: jax.Array) -> Carry:
    """Recurrent states, or zeros where rows begin anew."""
    return jax.tree.map(lambda x: jnp.where(goes_on, x, 0.0), carry)


def _gradients(
    spec: StepSpec, state: State, batch: Batch, key: jax.Array
) -> tuple[dict[str, jax.Array], Metrics]:
    """Gradients by name, and metrics, of the mean loss over the batch's target tokens.

    The weights of targets are divided by their sum over the batch first: losses and gradients of
    micro-batches then simply add up to those of the whole batch.
    """
    totals = {name: x.sum(dtype=jnp.float32) for name, x in batch.items() if name.endswith("_loss_weights")}
    batch = batch | {name: batch[name] / jnp.maximum(total, 1) for name, total in totals.items()}
    # encoders also have weights of sentence pairs: fewer
    counts = {"tokens": jnp.stack(list(totals.values())).max()}
    for content in [x for name, x in batch.items() if name.endswith("_content")]:  # none of labelled tasks
        counts["content_tokens"] = content.sum(dtype=jnp.float32)

    def mean(params, batch, key):
        model = State(state.step, params, None, state.structure).model
        loss, sums = spec.loss(model, batch, key, spec.loss_config)
        return loss, {name: value for name, (value, _) in sums.items()}

    gradient = jax.value_and_grad(mean, has_aux=True)
    if spec.microbatches == 1:
        (_, metrics), gradients = gradient(state.params, batch, key)
        return gradients, metrics | counts

    def add(sums, numbered):
        index, part = numbered
        (_, metrics), gradients = gradient(state.params, part, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, (gradients, metrics)), None

    # Every microbatches-th row, so that each device cuts up the rows that it holds and none travels.
    count = spec.microbatches
    parts = {name: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}
    first = {name: x[0] for name, x in parts.items()}
    zeros = jax.tree.map(jnp.zeros_like, (state.params, jax.eval_shape(mean, state.params, first, key)[1]))
    (gradients, metrics), _ = jax.lax.scan(add, zeros, (jnp.arange(count), parts))
    return gradients, metrics | counts


def check_memory(model: ModelConfig, mesh: Mesh) -> None:
    """SettingError if the parameters and their gradients in float32 alone do not fit on the devices."""
    shapes = jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), jax.random.key(0))
    layouts = sharding.parameters(shapes, mesh)
    leaves = sharding.named(shapes)
    needed = sum(2 * 4 * prod(layout.shard_shape(leaves[name].shape)) for name, layout in layouts.items())
    available = device_memory()
    if needed > available:
        names = ("vocab_size", "d_model", "d_ff", "num_encoder_layers", "num_decoder_layers")
        sizes = ", ".join(f"model.{name}={getattr(model, name)}" for name in names)
        raise SettingError(
            f"the model needs {needed / 2**30:,.1f} GiB of each device for parameters and gradients, and "
            f"there are {available / 2**30:,.1f}: make it smaller ({sizes}) or use more devices (mesh.fsdp)"
        )


def check_rows(model: ModelConfig, sizes: Mapping[str, int], rows: int, length: int, named: str) -> None:
    """SettingError if a batch of ``rows`` of ``length`` tokens cannot be held by the devices of a mesh.

    A lower bound: one hidden state of each position on a mesh of these ``sizes`` and, where attention holds
    scores, those of one head in one row. ``named``: the settings that ask for it.
    """
    own_rows, own_length = -(-rows // sharding.batch_parts(sizes)), -(-length // sizes["sequence"])
    states = own_rows * own_length * model.d_model * (2 if model.dtype == "bfloat16" else 4)
    explicit = jax.default_backend() == "cpu" and model.attention in ("auto", "xla")
    scores = own_length * length * 4 if explicit and model.mixer == "attention" else 0
    if (needed := states + scores) > (available := device_memory()):
        batch, gib = f"a batch of {rows:,} rows of {length:,} tokens", 2**30
        mend = f"ask for fewer or shorter rows, or less than model.d_model={model.d_model}"
        raise SettingError(
            f"{named}: {batch} needs at least {needed / gib:,.1f} GiB of each device, and there are "
            f"{available / gib:,.1f}: {mend}"
        )


def device_memory() -> int:
    """What a device has [bytes]: of a CPU, its share of the machine's."""
    shared = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", shared)
