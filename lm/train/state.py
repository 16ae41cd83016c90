"""All that a step changes: its number, the parameters, and what optimiser and guard remember."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from lm import sharding
from lm.train.config import EVERY_UPDATE, GuardConfig, Lasting
from lm.train.optimizers import Optimizer

WINDOW = 128  # losses of the last updates, which say what is usual [steps]
LEAST = 0.1  # smaller deviations count as this: losses near zero jump by factors all the time [nats/token]

MakeModel = Callable[[jax.Array], nnx.Module]  # from a key
Guard = dict[str, jax.Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "opt_state", "guard", "average", "carry"),
    meta_fields=("structure",),
)
@dataclass(frozen=True)
class State:
    """A pytree. Parameters are held by name: jax takes apart a dictionary ten times as fast as a module."""

    step: jax.Array  # int32 []: updates done
    params: dict[str, jax.Array]  # by dotted name
    opt_state: optax.OptState
    structure: tuple[Any, tuple[str, ...]]  # the model's tree definition, and its leaves' names in order
    guard: Guard | None = None  # what decides which updates are skipped
    average: dict[str, jax.Array] | None = None  # the mean of params over the steps; None: none is kept
    carry: Any = None  # recurrent states [layers,B,h] after the last step, where rows last several; else None

    @property
    def model(self) -> nnx.Module:
        """The model, with the mean parameters where these are kept; inside and outside of ``jax.jit``."""
        definition, names = self.structure
        params = self.params if self.average is None else self.average
        return jax.tree.unflatten(definition, [params[name] for name in names])

    def restarted(self, fresh: "State") -> "State":
        """A state before the first step, with ``model`` and the optimiser's memory, else as ``fresh``."""
        params = self.params if self.average is None else self.average
        average = None if fresh.average is None else jax.tree.map(jnp.copy, params)
        state = replace(self, step=fresh.step, params=params, guard=fresh.guard, average=average)
        return replace(state, carry=fresh.carry)


class Kept(NamedTuple):
    """What a state has besides parameters and the optimiser's memory."""

    guard: GuardConfig = EVERY_UPDATE
    ema: float = 0.0  # decay of a mean of the parameters; 0: none
    lasting: Lasting | None = None  # rows whose recurrent state is carried


def create(make: MakeModel, optimizer: Optimizer, key: jax.Array, kept: Kept) -> State:
    """The state before the first step."""
    model: Any = make(key)
    params = sharding.named(model)
    state = State(
        jnp.zeros((), jnp.int32),
        params,
        optimizer.init(params),
        structure=(jax.tree.structure(model), tuple(params)),
        guard=new_guard(kept.guard),
        average=jax.tree.map(jnp.copy, params) if kept.ema else None,
    )
    if kept.lasting is None:
        return state
    return replace(state, carry=model.decoder.empty(kept.lasting.rows, 0))


def abstract(make: MakeModel, optimizer: Optimizer, mesh: Mesh, kept: Kept) -> State:
    """Shapes, dtypes and shardings of the state that ``create`` makes; nothing is computed."""
    state = jax.eval_shape(partial(create, make, optimizer, kept=kept), jax.random.key(0))
    params, everywhere = sharding.parameters(state.model, mesh), sharding.replicated(mesh)
    memory = sharding.like_parameters(optimizer.init, state.model, params)
    guard_places = jax.tree.map(lambda _: everywhere, state.guard)
    places = replace(state, step=everywhere, params=params, opt_state=memory, guard=guard_places)
    carried = jax.tree.map(lambda _: sharding.layers_of_batches(mesh), state.carry)
    places = replace(places, average=params if kept.ema else None, carry=carried)

    def placed(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(placed, state, places)


def shardings(state: State) -> State:
    """Where each array of a state, abstract or not, lives."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def new_guard(config: GuardConfig) -> Guard | None:
    """What is remembered of the first steps to come; None where no update is ever skipped."""
    if not config.skips:
        return None
    guard = {"in_a_row": jnp.zeros((), jnp.int32)}
    if config.spikes is not None:
        guard |= {"made": jnp.zeros((), jnp.int32), "losses": jnp.zeros(WINDOW, jnp.float32)}
    return guard


def judge(config: GuardConfig, guard: Guard, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, Guard]:
    """bool []: whether to make the update with this loss and gradient norm, float32 []; and the next guard.

    A spike is a loss further above the mean of the last WINDOW updates than ``config.spikes`` times their
    standard deviation; before there were so many updates, nothing is. The norm of the gradient need only be
    finite: in ordinary runs with Adafactor it jumps to a hundred deviations while the loss stays within four.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    good = finite | (config.non_finite == "stop")  # the loop stops when it reads these numbers
    after = {}
    if config.spikes is not None:
        limit = guard["losses"].mean() + config.spikes * jnp.maximum(guard["losses"].std(), LEAST)
        good &= ~(finite & (guard["made"] >= WINDOW) & (loss > limit))
        losses = jnp.where(good, guard["losses"].at[guard["made"] % WINDOW].set(loss), guard["losses"])
        after = {"made": guard["made"] + good, "losses": losses}
    return good, after | {"in_a_row": jnp.where(good, 0, guard["in_a_row"] + 1)}
