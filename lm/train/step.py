"""The training step: a state and a batch in, the next state and metrics out."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lm import sharding
from lm.batch import Batch
from lm.config.base import SettingError, did_you_mean
from lm.config.model import HeadConfig, ModelConfig
from lm.config.training import (
    NEVER_SKIP,
    DistillationConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
    TruncatedBPTT,
)
from lm.nn.cache import Carry
from lm.nn.transformer import Transformer
from lm.train.losses import (
    DISTILLED,
    TOKEN_LOSSES,
    Loss,
    Teacher,
    carried_language_model,
    language_model,
)
from lm.train.mup import check_optimizer, learning_rate_multipliers
from lm.train.optimizers import (
    MaskUpdates,
    Optimizer,
    average_parameters,
    learning_rate,
    make_optimizer,
    train_all,
)
from lm.train.runtime.preemption import check_preemption
from lm.train.state import State, abstract_state, check_update, create_state, shardings_of

COMPILER_OPTIONS = {  # by platform
    # Otherwise the SPMD partitioner turns a matmul with an fsdp-sharded matrix into up to 240
    # collective-permutes, which the compiler itself estimates to be a third slower.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StepSpec:
    """What a training step computes. The model is ``module(model, *extra_configs, rngs)``.

    Equal specs share their compiled functions, so all fields are hashable: settings, classes, functions.
    """

    model: ModelConfig  # of the Transformer, which the module may be or contain
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: Loss = language_model
    loss_config: LossConfig = LossConfig()
    module: Callable[..., nnx.Module] = Transformer
    extra_configs: tuple[HeadConfig | ModelConfig, ...] = ()  # of a head, or of ELECTRA's generator
    mask_updates: MaskUpdates = train_all  # zeroes the updates of frozen parameters
    microbatches: int = 1  # into which a batch is split; their gradients are summed
    guard: GuardConfig = NEVER_SKIP  # which bad updates are skipped
    # set if a batch row is one chunk of a longer row; the loss then continues from the recurrent state
    tbptt: TruncatedBPTT | None = None
    # Step of the state at which the optimiser began: its schedule counts from there. It is at most
    # ``Run.first_step``, and less if a phase continues with the optimiser of the phase before it.
    optimizer_start: int = 0
    teacher_config: ModelConfig | None = None  # of the Transformer that teaches the model; None: no teacher
    distillation: DistillationConfig = DistillationConfig()  # weights of the loss's terms with a teacher

    def __post_init__(self) -> None:
        token_losses = ["cross-entropy", *TOKEN_LOSSES]
        if (name := self.loss_config.name) not in token_losses:
            raise SettingError(f"loss.name={name!r} is unknown{did_you_mean(name, token_losses)}")
        if self.tbptt is not None and (self.loss is not language_model or self.microbatches > 1):
            raise SettingError(
                "tbptt carries the state of a language_model through whole batches: set microbatches=1 and "
                "the loss of a language model, or train without tbptt"
            )
        if self.teacher_config is None:
            return
        if self.tbptt is not None:
            raise SettingError("a teacher reads whole rows: train without tbptt, or without the teacher")
        if self.loss not in DISTILLED:
            expected = ", ".join(loss.__name__ for loss in DISTILLED)
            found = getattr(self.loss, "__name__", self.loss)
            raise SettingError(f"a teacher needs one of the losses {expected}, not {found}: train without it")

    def make_model(self, key: jax.Array) -> nnx.Module:
        """Return the model, initialised at random."""
        return self.module(self.model, *self.extra_configs, nnx.Rngs(params=key))

    def make_teacher(self, key: jax.Array) -> nnx.Module:
        """Return the teacher, initialised at random."""
        assert self.teacher_config is not None
        return Transformer(self.teacher_config, nnx.Rngs(params=key))

    def teacher_with(self, params: dict[str, jax.Array]) -> Teacher:
        """Return the teacher with these parameters, by name."""
        abstract = jax.eval_shape(self.make_teacher, jax.random.key(0))
        leaves = [params[name] for name in sharding.named(abstract)]
        return Teacher(jax.tree.unflatten(jax.tree.structure(abstract), leaves), self.distillation)

    def schedule_step(self, step: jax.Array) -> jax.Array:
        """Return the number of steps since the optimiser began, int32 [], for which its schedule is computed.

        ``step`` int32 [] is that of the state. Steps whose update was skipped count too.
        """
        return step - self.optimizer_start

    def make_optimizer(self) -> Optimizer:
        """Return the optimiser of the model's parameters."""
        abstract_model = jax.eval_shape(self.make_model, jax.random.key(0))
        axes = sharding.logical_axes(abstract_model)
        if self.model.mup.base:
            if self.module is not Transformer:
                raise SettingError(
                    f"model.mup.base={self.model.mup.base} has rules for a Transformer alone, not for "
                    f"{getattr(self.module, '__name__', self.module)}: set model.mup.base=0"
                )
            check_optimizer(self.model, self.optimizer)
        return make_optimizer(
            self.optimizer, axes, self.mask_updates, learning_rate_multipliers(self.model, axes)
        )


def train_step(
    spec: StepSpec,
    optimizer: Optimizer,
    state: State,
    batch: Batch,
    seed: jax.Array,
    teacher_params: dict[str, jax.Array] | None = None,
) -> tuple[State, Metrics]:
    """Return the state after one update, and metrics float32 []; ``seed`` uint32 [] decides dropout.

    ``teacher_params`` are those of ``spec.teacher_config``, which do not change. It is pure and not compiled:
    ``build`` compiles it.
    """
    key = dropout_key(seed, state.step)
    if spec.tbptt is not None:
        carry = reset_carry(state.carry, state.step % spec.tbptt.chunks_per_row == 0)
        # The state gets the reset carry too, since a skipped update keeps the state from before this chunk.
        state = replace(state, carry=carry)
    gradients, metrics, carry = compute_gradients(spec, state, batch, key, state.carry, teacher_params)
    # Sharded like the parameters, so that devices exchange only the part of a gradient that they update.
    logical_axes = sharding.logical_axes(state.model_with(state.params))
    gradients = sharding.constrain_to_parameters(gradients, logical_axes)
    schedule_step = spec.schedule_step(state.step)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, step=schedule_step)
    params = optax.apply_updates(state.params, updates)
    metrics |= {
        "grad_norm": optax.tree.norm(spec.mask_updates(gradients, schedule_step)),  # of what is trained
        "learning_rate": learning_rate(spec.optimizer, schedule_step),
    }
    average = state.average
    if average is not None:
        average = average_parameters(spec.optimizer.ema, schedule_step, average, params)
    after = replace(
        state, step=state.step + 1, params=params, opt_state=opt_state, average=average, carry=carry
    )
    if spec.guard.skips:
        return skip_bad_update(spec.guard, state, after, metrics)
    return after, metrics


def eval_step(spec: StepSpec, state: State, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Return (sum, sum of weights) of each metric on a batch, with ``State.eval_params``.

    The loss of a target token is its plain cross-entropy, whatever ``spec.loss_config`` is: without z-loss
    and label smoothing, and instead of another loss that its ``name`` chooses. The teacher is not asked.
    """
    no_dropout = None
    _, sums = spec.loss(state.eval_model, batch, no_dropout, LossConfig(z_loss=0.0))
    return {name: sum_and_weight for name, sum_and_weight in sums.items() if name != "z_loss"}


def initial_state(spec: StepSpec, optimizer: Optimizer, seed: jax.Array) -> State:
    """Return the state before the first step, with parameters drawn by ``seed`` uint32 []."""
    init_key, _ = jax.random.split(jax.random.key(seed))
    return create_state(spec.make_model, optimizer, init_key, spec.guard, spec.optimizer.ema, spec.tbptt)


def dropout_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the key of a step's dropout, which depends on the seed and on the step alone."""
    _, key = jax.random.split(jax.random.key(seed))
    return jax.random.fold_in(key, step)


def reset_carry(carry: Carry, is_start: jax.Array) -> Carry:
    """Return recurrent states, or zeros if ``is_start``, bool []: all rows of a batch start at once."""
    return jax.tree.map(lambda x: jnp.where(is_start, jnp.zeros_like(x), x), carry)


class Gradients(NamedTuple):
    """The results of the forward and backward pass of a batch."""

    gradients: dict[str, jax.Array]  # by parameter, of the mean loss over the batch's target tokens
    metrics: Metrics
    carry: Carry | None  # recurrent states after the batch, if a row spans several steps (tbptt)


def compute_gradients(
    spec: StepSpec,
    state: State,
    batch: Batch,
    key: jax.Array,
    carry: Carry | None = None,
    teacher_params: dict[str, jax.Array] | None = None,
) -> Gradients:
    """Return gradients, metrics and carry of a batch's mean loss, computed in ``spec.microbatches`` parts.

    Loss weights are first normalised over the whole batch (``normalize_loss_weights``), so that losses,
    gradients and other metrics of micro-batches simply add up. ``carry`` is the recurrent state at the end of
    the previous chunk of each row; with a carry there is one micro-batch. ``teacher_params`` are those of
    ``spec.teacher_config``.
    """
    counts, batch = count_tokens(batch), normalize_loss_weights(batch)
    loss_function = spec.loss
    if teacher_params is not None:
        loss_function = partial(spec.loss, teacher=spec.teacher_with(teacher_params))

    def mean_loss(params, batch, key):
        model, new_carry = state.model_with(params), None
        if carry is None:
            loss, sums = loss_function(model, batch, key, spec.loss_config)
        else:
            loss, sums, new_carry = carried_language_model(model, batch, carry, key, spec.loss_config)
        # Loss weights are normalised, so a weighted sum is a mean already. The weights of content tokens are
        # not, but their metrics are computed only for a batch with ``frequent_tokens``, which no training
        # batch has.
        return loss, ({name: value for name, (value, _) in sums.items()}, new_carry)

    loss_and_gradients = jax.value_and_grad(mean_loss, has_aux=True)
    if spec.microbatches == 1:
        (_, (means, new_carry)), gradients = loss_and_gradients(state.params, batch, key)
    else:
        gradients, (means, new_carry) = _sum_over_microbatches(
            loss_and_gradients, spec.microbatches, state.params, batch, key
        )
    return Gradients(gradients, means | counts, new_carry)


def normalize_loss_weights(batch: Batch) -> Batch:
    """Return the batch with each array of loss weights divided by its denominator, unless that is 0."""
    weights = batch.loss_weights()
    if batch.num_loss_tokens is not None:
        weights |= {"num_loss_tokens": batch.num_loss_tokens}
    divisors = {name: jnp.where(total <= 0, 1, total) for name, total in _loss_denominators(batch).items()}
    normalized = {name: array / divisors[name] for name, array in weights.items()}
    return Batch.from_features(batch.features() | normalized)


def count_tokens(batch: Batch) -> Metrics:
    """Return the numbers of tokens that a batch is trained on, as metrics.

    ``tokens`` is the sum of the loss weights, which most objectives set to 0 or 1. For a loss that estimates
    a bound (masked diffusion) it is the number of text tokens, and for ELECTRA the number of tokens that the
    discriminator classifies. ``content_tokens`` are the targets that the model cannot copy: no sentinel, no
    EOS, and none that the inputs show at the same position (``lm.data.content``).
    """
    # A batch of sentence pairs has weights of tokens and weights of rows. Those of tokens have the larger
    # total, since a row has several target tokens.
    metrics = {"tokens": jnp.stack(list(_loss_denominators(batch).values())).max()}
    for side in batch.sides.values():
        if side.content is not None:  # labelled tasks have none
            metrics["content_tokens"] = side.content.sum(dtype=jnp.float32)
    return metrics


def _loss_denominators(batch: Batch) -> dict[str, jax.Array]:
    """Return the denominator of each array of loss weights, float32 []: its sum, except for bounds.

    An encoder's loss that estimates a bound is divided by ``batch.num_loss_tokens`` instead: the sum of its
    weights is random, and dividing by it would bias the estimate.
    """
    denominators = {name: weights.sum(dtype=jnp.float32) for name, weights in batch.loss_weights().items()}
    if batch.num_loss_tokens is not None:
        num_tokens = batch.num_loss_tokens.sum(dtype=jnp.float32)
        denominators["encoder_loss_weights"] = num_tokens
        denominators["num_loss_tokens"] = num_tokens
    return denominators


def _sum_over_microbatches(
    loss_and_gradients: Callable, count: int, params: dict[str, jax.Array], batch: Batch, key: jax.Array
) -> tuple[dict[str, jax.Array], tuple[Metrics, None]]:
    """Return the sums over ``count`` micro-batches: of the gradients, and of (metrics, no carry).

    SettingError for a batch whose rows the micro-batches cannot share evenly.
    """
    rows = len(next(iter(batch.features().values())))
    if rows % count:
        fitting = ", ".join(str(number) for number in range(1, rows + 1) if rows % number == 0)
        raise SettingError(f"microbatches={count} cannot share {rows} rows evenly: ask for one of {fitting}")

    def split(x):  # each micro-batch takes every count-th row, so that devices exchange no rows
        return x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)

    microbatches = batch.map(split)

    def add(sums, index_and_microbatch):
        index, microbatch = index_and_microbatch
        (_, aux), gradients = loss_and_gradients(params, microbatch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, (gradients, aux)), None

    first = microbatches.map(lambda x: x[0])
    (_, aux), gradients = jax.eval_shape(loss_and_gradients, params, first, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (gradients, aux))
    (gradients, aux), _ = jax.lax.scan(add, zeros, (jnp.arange(count), microbatches))
    return gradients, aux


def skip_bad_update(
    config: GuardConfig, before: State, after: State, metrics: Metrics
) -> tuple[State, Metrics]:
    """Return ``after`` or, if its update is bad, ``before`` with its step incremented; and the metrics.

    Either state gets the new guard state: the statistics by which ``check_update`` recognises bad updates.
    This is no optax transformation for two reasons. A recurrent carry and the average of parameters have to
    be restored too. A transformation around the optimiser would also rename the arrays of its state, so that
    a checkpoint could not be restored with other settings of the guard.
    """
    assert before.guard is not None
    is_good, guard_state = check_update(config, before.guard, metrics["loss"], metrics["grad_norm"])
    before = replace(before, step=after.step)
    chosen = jax.tree.map(lambda new, old: jnp.where(is_good, new, old), after, before)
    counts = {
        "skipped_updates": 1.0 - is_good,
        "consecutive_skipped": guard_state["consecutive_skipped"].astype(jnp.float32),
    }
    return replace(chosen, guard=guard_state), metrics | counts


@dataclass(frozen=True)
class Steps:
    """Jitted functions for one spec and mesh (``jit_...``), and methods that call them.

    The seed is an argument of these functions, so runs with different seeds share them.
    """

    mesh: Mesh
    abstract: State  # shapes, dtypes and shardings
    # seed uint32 [] -> initial state, with the shardings of ``abstract``
    jit_initial_state: Callable[[jax.Array], State]
    # ``train_step`` of (state, batch, seed uint32 []) and, with a teacher, its parameters; donates the state,
    # which cannot be used afterwards
    jit_train_step: jax.stages.Wrapped
    # ``eval_step`` of (state, batch)
    jit_eval_step: Callable[[State, Batch], dict[str, tuple[jax.Array, jax.Array]]]
    # shapes, dtypes and shardings of the teacher's parameters; None without a teacher
    abstract_teacher: dict[str, jax.ShapeDtypeStruct] | None = None

    def initial_state(self, seed: int) -> State:
        """Return the state before the first step."""
        return self.jit_initial_state(self._on_devices(seed))

    def seeded_train_step(
        self, seed: int, teacher_params: dict[str, jax.Array] | None = None
    ) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """Return the jitted training step with this seed: (state, batch) -> (state, metrics).

        ``teacher_params`` are those of the teacher, if the spec has one.
        """
        constants: list[Any] = [self._on_devices(seed)]
        if teacher_params is not None:
            constants.append(teacher_params)
        return lambda state, batch: self.jit_train_step(state, batch, *constants)

    def compile_train_step(self, batch: Batch) -> None:
        """Compile the training step ahead of time for batches of this shape.

        JAX keeps the executable in memory, by shapes and shardings. So the first training step with such a
        batch neither traces nor compiles.
        """
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(self.mesh))
        arguments = [self.abstract, sharding.abstract_arrays(batch), seed]
        if self.abstract_teacher is not None:
            arguments.append(self.abstract_teacher)
        self.jit_train_step.lower(*arguments).compile()

    def shard_batch(self, batch: sharding.Tree) -> sharding.Tree:
        """Return a batch, or any tree of arrays whose first axis is the row, sharded over the devices.

        Evaluations call it; the training loop shards its batches ahead of time (``loop.Prefetched``). Side
        effects: it tells the watchdog that there is progress and, with several processes, ends the current
        evaluation in all of them after a stop signal (``check_preemption``).
        """
        check_preemption()
        return sharding.put_batch(batch, self.mesh)

    def evaluate(self, state: State, batches: Iterable[Batch]) -> dict[str, float]:
        """Return metrics averaged over ``batches`` with ``State.eval_params``, and the number of ``tokens``.

        An average over weights whose sum is 0 is 0. ``tokens`` is the sum of the weights of the loss. Each
        process passes its own rows of every batch.
        """
        totals = None
        for batch in batches:
            sums = self.jit_eval_step(state, self.shard_batch(batch))
            # Waiting keeps at most two programs running: more may deadlock on many CPU devices.
            if totals is None:
                totals = sums
            else:
                totals = jax.tree.map(jnp.add, jax.block_until_ready(totals), sums)
        if totals is None:
            return {"tokens": 0.0}
        means = {}
        for name, (total, weight) in totals.items():
            divisor = 1.0 if weight <= 0 else float(weight)
            means[name] = float(total) / divisor
        return means | {"tokens": float(totals["loss"][1])}

    def _on_devices(self, seed: int) -> jax.Array:
        return jax.device_put(np.uint32(seed), sharding.replicated(self.mesh))


@lru_cache(maxsize=16)
def build(spec: StepSpec, mesh: Mesh) -> Steps:
    """Return the jitted steps of a spec on a mesh; the same objects for equal arguments."""
    optimizer = spec.make_optimizer()
    create = partial(initial_state, spec, optimizer)
    abstract = abstract_state(create, optimizer, mesh)
    state_shardings, batch_sharding = shardings_of(abstract), sharding.batch_sharding(mesh)
    replicated = sharding.replicated(mesh)
    jit = partial(jax.jit, compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform))

    train_shardings: list[Any] = [state_shardings, batch_sharding, replicated]
    abstract_teacher = abstract_teacher_params(spec, mesh)
    if abstract_teacher is not None:
        train_shardings.append({name: leaf.sharding for name, leaf in abstract_teacher.items()})

    # ``lm.sharding.constrain`` reads the mesh from its context.
    def train(state, batch, seed, teacher_params=None):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return train_step(spec, optimizer, state, batch, seed, teacher_params)

    def evaluate(state, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return eval_step(spec, state, batch)

    return Steps(
        mesh,
        abstract,
        jit(create, in_shardings=replicated, out_shardings=state_shardings),
        jit(
            train,
            in_shardings=tuple(train_shardings),
            out_shardings=(state_shardings, replicated),
            donate_argnums=0,
        ),
        jit(evaluate, in_shardings=(state_shardings, batch_sharding), out_shardings=replicated),
        abstract_teacher,
    )


def abstract_teacher_params(spec: StepSpec, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Return shapes, dtypes and shardings of the teacher's parameters by name; None without a teacher."""
    if spec.teacher_config is None:
        return None
    model = jax.eval_shape(spec.make_teacher, jax.random.key(0))
    shardings = sharding.parameter_shardings(model, mesh)
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
        for name, leaf in sharding.named(model).items()
    }
