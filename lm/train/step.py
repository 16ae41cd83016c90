"""One step: state in, state out. Compiled once for all runs of one shape in a process."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lm import sharding
from lm.nn.config import ModelConfig
from lm.nn.transformer import Transformer
from lm.ops.losses import accuracy, cross_entropy
from lm.train import state as states
from lm.train.config import LossConfig, OptimizerConfig
from lm.train.optimizers import learning_rate, optimizer
from lm.train.state import State

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class Steps:
    """The compiled functions of a run; the seed is an argument, so runs that differ in it share them."""

    mesh: Mesh
    abstract: State  # shapes, dtypes and places
    create: Callable[[jax.Array], State]  # seed uint32 [] -> the state before the first step, sharded as made
    train: Callable[[State, Batch, jax.Array], tuple[State, Metrics]]  # also takes the seed; the state is consumed
    eval: Callable[[State, Batch], Metrics]  # sums over target tokens

    def init(self, seed: int) -> State:
        return self.create(_on(self.mesh, seed))

    def train_step(self, seed: int) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """(state, batch) -> (state, metrics float32 []); dropout depends on ``seed`` and the state's step alone."""
        seed = _on(self.mesh, seed)
        return lambda state, batch: self.train(state, batch, seed)

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        return sharding.put_batch(batch, self.mesh)

    def evaluate(self, state: State, batches: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
        """Means over all target tokens of ``batches``, which are this process's parts of global ones."""
        sums = None
        for batch in batches:
            new = self.eval(state, self.put(batch))
            sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
        found = {name: float(value) for name, value in (sums or {}).items()}
        tokens = found.get("tokens", 0.0)
        return {name: value if name == "tokens" else value / max(tokens, 1.0) for name, value in found.items()}


def same(updates: dict[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
    """Every parameter is trained, always."""
    return updates


@lru_cache(maxsize=16)
def build(
    model: ModelConfig,
    optimization: OptimizerConfig,
    loss: LossConfig,
    mesh: Mesh,
    microbatches: int = 1,
    make: Callable[[ModelConfig, nnx.Rngs], nnx.Module] = Transformer,
    tune: Callable[[dict[str, jax.Array], jax.Array], dict[str, jax.Array]] = same,
) -> Steps:
    """The steps of a model on a mesh; the same arguments give the same compiled functions.

    A batch is cut into ``microbatches``, whose gradients are added up. ``tune(updates, step)`` may zero or scale
    the updates of parameters, by their names.
    """

    def new(key):
        return make(model, nnx.Rngs(params=key))

    transform = optimizer(optimization, sharding.axes(jax.eval_shape(new, jax.random.key(0))))
    abstract = states.abstract(new, transform, mesh)
    places, rows, everywhere = states.shardings(abstract), sharding.batches(mesh), sharding.replicated(mesh)

    def create(seed):
        return states.create(new, transform, jax.random.split(jax.random.key(seed))[0])

    def train(state, batch, seed):
        key = jax.random.fold_in(jax.random.split(jax.random.key(seed))[1], state.step)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            gradients, metrics = _gradients(state, batch, key, loss, microbatches)
        gradients = jax.lax.with_sharding_constraint(gradients, places.params)
        updates, opt_state = transform.update(gradients, state.opt_state, state.params)
        updates, rate = tune(updates, state.step), learning_rate(optimization, state.step)
        params = {name: value - rate * updates[name] for name, value in state.params.items()}
        metrics |= {"grad_norm": optax.tree.norm(gradients), "learning_rate": rate}
        return State(state.step + 1, params, opt_state, state.structure), metrics

    return Steps(
        mesh,
        abstract,
        jax.jit(create, in_shardings=everywhere, out_shardings=places),
        jax.jit(train, in_shardings=(places, rows, everywhere), out_shardings=(places, everywhere), donate_argnums=0),
        jax.jit(partial(_evaluate, mesh), in_shardings=(places, rows), out_shardings=everywhere),
    )


def _evaluate(mesh: Mesh, state: State, batch: Batch) -> Metrics:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = _losses(state.model, batch, None, LossConfig(z_loss=0.0))[1]
    return {"loss": found["loss"], "accuracy": found["accuracy"], "tokens": batch["decoder_loss_weights"].sum()}


def _losses(model: Any, batch: Batch, key: jax.Array | None, config: LossConfig) -> tuple[jax.Array, Metrics]:
    """What is made small, and what is reported: sums over the target tokens of a batch."""
    logits = model(batch) if key is None else model(batch, key)
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
    loss, _, z_loss = cross_entropy(
        logits, targets, weights, z_loss=config.z_loss, label_smoothing=config.label_smoothing
    )
    right, _ = accuracy(logits, targets, weights)
    return loss, {"loss": loss - z_loss, "z_loss": z_loss, "accuracy": right}


def _gradients(
    state: State, batch: Batch, key: jax.Array, loss: LossConfig, microbatches: int
) -> tuple[dict[str, jax.Array], Metrics]:
    """Gradients by name and metrics: sums over the micro-batches, each over the weight of the whole batch."""
    tokens = batch["decoder_loss_weights"].sum(dtype=jnp.float32)

    def mean(params, batch, key):
        model = State(state.step, params, None, state.structure).model
        return jax.tree.map(lambda value: value / jnp.maximum(tokens, 1), _losses(model, batch, key, loss))

    def add(sums, micro):
        index, rows = micro
        (_, metrics), gradients = jax.value_and_grad(mean, has_aux=True)(
            state.params, rows, jax.random.fold_in(key, index)
        )
        return jax.tree.map(jnp.add, sums, (gradients, metrics)), None

    if microbatches == 1:
        (_, metrics), gradients = jax.value_and_grad(mean, has_aux=True)(state.params, batch, key)
        return gradients, metrics | {"tokens": tokens}
    # Every microbatches-th row, so that each device cuts up the rows that it holds and none travels.
    cut = {name: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}
    zeros = jax.tree.map(jnp.zeros_like, state.params), dict.fromkeys(("loss", "z_loss", "accuracy"), jnp.zeros(()))
    (gradients, metrics), _ = jax.lax.scan(add, zeros, (jnp.arange(microbatches), cut))
    return gradients, metrics | {"tokens": tokens}


def _on(mesh: Mesh, seed: int) -> jax.Array:
    return jax.device_put(np.uint32(seed), sharding.replicated(mesh))
