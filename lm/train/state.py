"""The train state: everything that a step changes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from lm import sharding
from lm.config.training import GuardConfig, TruncatedBPTT
from lm.train.optimizers import Optimizer

LOSS_HISTORY = 128  # number of last losses that a new loss is compared with [steps]
MIN_LOSS_STD = 0.1  # lower bound of their std: near zero, losses differ by large factors [nats/token]

# in the guard state: updates skipped since the last training record in metrics.jsonl
UNLOGGED = "skipped_since_line"

MakeModel = Callable[[jax.Array], nnx.Module]  # from a key
GuardState = dict[str, jax.Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "opt_state", "guard", "average", "carry"),
    meta_fields=("model_structure",),
)
@dataclass(frozen=True)
class State:
    """The train state, a pytree. The names of its fields are those of its arrays in checkpoints.

    Parameters are held by name, since JAX flattens a dictionary ten times as fast as a module. Steps train
    ``params``. If an exponential moving average of the parameters is kept, it is evaluated, exported and
    fine-tuned in their place.
    """

    # int32 []: steps done, including those whose update was skipped, and those of the phases of pre-training
    # before this one
    step: jax.Array
    params: dict[str, jax.Array]  # by dotted name
    opt_state: optax.OptState
    model_structure: tuple[Any, tuple[str, ...]]  # the model's treedef, and the names of its leaves in order
    guard: GuardState | None = None  # guard state: statistics by which bad updates are recognised
    average: dict[str, jax.Array] | None = None  # EMA of params (optimizer.ema)
    carry: Any = None  # recurrent states [layers,B,h], set if a row spans several steps (tbptt)

    @property
    def eval_params(self) -> dict[str, jax.Array]:
        """Return the average of the parameters if one is kept, else the parameters."""
        return self.params if self.average is None else self.average

    @property
    def eval_model(self) -> nnx.Module:
        """Return the model with ``eval_params``; inside and outside of ``jax.jit``."""
        return self.model_with(self.eval_params)

    def model_with(self, params: dict[str, jax.Array]) -> nnx.Module:
        """Return the model with these parameters."""
        treedef, names = self.model_structure
        return jax.tree.unflatten(treedef, [params[name] for name in names])

    @property
    def unlogged_skips(self) -> int:
        """Return how many updates had been skipped since the last training record when this was saved."""
        return 0 if self.guard is None else int(self.guard[UNLOGGED])

    def with_unlogged_skips(self, count: int) -> "State":
        """Return this state with the number of updates skipped since the last training record of the log.

        Only the host knows when records are written, so a step leaves the number as it is, and the host sets
        it before saving.
        """
        if self.guard is None:
            return self
        array = jax.device_put(np.int32(count), self.guard[UNLOGGED].sharding)
        return replace(self, guard=self.guard | {UNLOGGED: array})

    def warm_start(self, fresh: "State") -> "State":
        """Return a state at the step of ``fresh`` that starts from this state's parameters.

        Its parameters are the ``eval_params`` of this state, its model and its optimiser state are those of
        this state, and all other fields are those of ``fresh``.
        """
        params = self.eval_params
        average = None if fresh.average is None else jax.tree.map(jnp.copy, params)
        return replace(
            self, step=fresh.step, params=params, guard=fresh.guard, average=average, carry=fresh.carry
        )


def create_state(
    make_model: MakeModel,
    optimizer: Optimizer,
    key: jax.Array,
    guard: GuardConfig,
    ema: float,
    tbptt: TruncatedBPTT | None,
) -> State:
    """Return the state before the first step."""
    model: Any = make_model(key)
    params = sharding.named(model)
    return State(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        model_structure=(jax.tree.structure(model), tuple(params)),
        guard=initial_guard(guard),
        average=jax.tree.map(jnp.copy, params) if ema else None,
        carry=None if tbptt is None else model.decoder.init_carry(tbptt.rows, 0),
    )


def abstract_state(create: Callable[[jax.Array], State], optimizer: Optimizer, mesh: Mesh) -> State:
    """Return shapes, dtypes and shardings of the state that ``create(seed)`` would return."""
    state = jax.eval_shape(create, jax.ShapeDtypeStruct((), jnp.uint32))
    model, replicated = state.model_with(state.params), sharding.replicated(mesh)
    params = sharding.parameter_shardings(model, mesh)
    shardings = replace(
        state,
        step=replicated,
        params=params,
        opt_state=sharding.optimizer_state_shardings(optimizer.init, model, params),
        guard=jax.tree.map(lambda _: replicated, state.guard),
        average=None if state.average is None else params,
        carry=jax.tree.map(lambda _: sharding.layered_batch_sharding(mesh), state.carry),
    )

    def with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, state, shardings)


def shardings_of(state: State) -> State:
    """Return the sharding of each array of a state, abstract or not."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def initial_guard(config: GuardConfig) -> GuardState | None:
    """Return the guard state before the first step; None if ``config`` skips no updates."""
    if not config.skips:
        return None
    guard_state = {name: jnp.zeros((), jnp.int32) for name in ("consecutive_skipped", UNLOGGED)}
    if config.spikes is not None:
        guard_state |= {"updates": jnp.zeros((), jnp.int32), "losses": jnp.zeros(LOSS_HISTORY, jnp.float32)}
    return guard_state


def check_update(
    config: GuardConfig, guard_state: GuardState, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, GuardState]:
    """Return whether to apply the update with this loss and gradient norm, bool [], and the new guard state.

    A loss is compared with those of the last LOSS_HISTORY updates that were applied. It is a spike if it
    exceeds their mean by more than ``config.spikes`` times their standard deviation, or times MIN_LOSS_STD if
    that is larger. Until so many updates have been applied, no loss is a spike. The gradient norm is only
    checked to be finite: in ordinary runs with Adafactor it jumps by a hundred standard deviations while the
    loss stays within four.
    """
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    # With "stop" a non-finite update is applied: ``MetricsWriter`` ends the run when it reads these numbers.
    is_good = is_finite | (config.non_finite == "stop")
    new_guard_state = {UNLOGGED: guard_state[UNLOGGED]}
    if config.spikes is not None:
        losses, updates = guard_state["losses"], guard_state["updates"]
        limit = losses.mean() + config.spikes * jnp.maximum(losses.std(), MIN_LOSS_STD)
        is_spike = is_finite & (updates >= LOSS_HISTORY) & (loss > limit)
        is_good &= ~is_spike
        losses = jnp.where(is_good, losses.at[updates % LOSS_HISTORY].set(loss), losses)
        new_guard_state |= {"updates": updates + is_good, "losses": losses}
    consecutive = jnp.where(is_good, 0, guard_state["consecutive_skipped"] + 1)
    return is_good, new_guard_state | {"consecutive_skipped": consecutive}
