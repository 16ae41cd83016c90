"""All that a step changes: the step's number, the parameters and the optimiser's memory of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from lm import sharding
from lm.train import guard
from lm.train.config import EVERY_UPDATE, GuardConfig
from lm.train.guard import Guard

Make = Callable[[jax.Array], nnx.Module]  # key -> model


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "opt_state", "guard"),
    meta_fields=("structure",),
)
@dataclass(frozen=True)
class State:
    """A pytree. Parameters are held by name, since jax takes apart a dictionary ten times as fast as a
    module.
    """

    step: jax.Array  # int32 []: updates done
    params: dict[str, jax.Array]  # by dotted name
    opt_state: Any
    # the model's tree definition, and the names of its leaves in order
    structure: tuple[Any, tuple[str, ...]]
    guard: Guard | None = None  # what is remembered to leave updates out

    @property
    def model(self) -> nnx.Module:
        """The model with these parameters; inside and outside of ``jax.jit``."""
        definition, names = self.structure
        return jax.tree.unflatten(definition, [self.params[name] for name in names])


def create(
    make: Make, optimizer: optax.GradientTransformation, key: jax.Array, guarding: GuardConfig = EVERY_UPDATE
) -> State:
    """The state before the first step."""
    model = make(key)
    params = sharding.named(model)
    structure = (jax.tree.structure(model), tuple(params))
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), structure, guard.create(guarding))


def abstract(
    make: Make, optimizer: optax.GradientTransformation, mesh: Mesh, guarding: GuardConfig = EVERY_UPDATE
) -> State:
    """Shapes, dtypes and places of the state that ``create`` makes; nothing is computed."""
    state = jax.eval_shape(partial(create, make, optimizer, guarding=guarding), jax.random.key(0))

    def placed(leaf, place):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(placed, state, _places(state, optimizer, mesh))


def shardings(state: State) -> State:
    """Where each array of a state, abstract or not, lives."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def _places(state: State, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    params = sharding.parameters(state.model, mesh)
    opt_state = sharding.like_parameters(optimizer.init, state.model, params)
    everywhere = sharding.replicated(mesh)
    beside = jax.tree.map(lambda _: everywhere, state.guard)
    return replace(state, step=everywhere, params=params, opt_state=opt_state, guard=beside)
