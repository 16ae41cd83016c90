"""A small language model that compiles fast, its batches, and a run of it that a test may kill."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.batch import Batch, Side
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig
from lm.config.training import NEVER_SKIP, CheckpointConfig, LoopConfig, OptimizerConfig
from lm.nn.layers import param
from lm.sharding import constrain, make_mesh, named, process_rows
from lm.train.loop import Run, train
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.runtime.log import Log
from lm.train.step import StepSpec, build

MODEL = ModelConfig(
    architecture="decoder",
    vocab_size=32,
    d_model=16,
    mlp=MlpConfig(d_ff=32),
    attention=AttentionConfig(d_kv=4, num_heads=4),
    dropout=0.5,
)
OPTIMIZER = OptimizerConfig(factor_from=8)
ROWS, LENGTH = 16, 6


class Toy(nnx.Module):
    """Two stacked feed-forward blocks between a table and its transpose, with dropout."""

    def __init__(self, config, rngs):
        keys = jax.random.split(rngs.params(), 3)
        self.rate = config.dropout
        self.table = param(jax.random.normal(keys[0], (config.vocab_size, config.d_model)), "vocab", "embed")
        stack = 0.1 * jax.random.normal(keys[1], (2, config.d_model, config.mlp.d_ff))
        self.blocks = nnx.Param(stack, axes=("embed", "mlp"))
        self.scale = nnx.Param(jnp.ones((2, config.mlp.d_ff)), axes=("norm",))

    def __call__(self, batch, key=None):
        x = constrain(self.table[...][batch.decoder.tokens], "batch", "length", "embed")
        if key is not None and self.rate:
            x *= jax.random.bernoulli(key, 1 - self.rate, x.shape) / (1 - self.rate)
        for kernel, scale in zip(self.blocks[...], self.scale[...], strict=True):
            x += (jnp.tanh(x @ kernel) * scale[None, None]) @ kernel.T
        return x @ self.table[...].T


def batch(step, poison=()):
    """Batch number ``step``; every row has another number of targets. ``poison``: batches whose loss is no
    number.
    """
    rng = np.random.default_rng(step)
    tokens = rng.integers(3, MODEL.vocab_size, (ROWS, LENGTH), np.int32)
    weights = (np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (ROWS, 1))).astype(np.float32)
    if step in poison:
        weights[0] = np.nan
    inputs = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    return Batch(decoder=Side(tokens=inputs, targets=tokens, loss_weights=weights))


def steps(data=1, fsdp=1, tensor=1, model=MODEL, **settings):
    """The compiled steps on a mesh of these sizes; on one device if none are given."""
    mesh, devices = MeshConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor]
    spec = StepSpec(model, **{"optimizer": OPTIMIZER, "module": Toy, **settings})
    return build(spec, make_mesh(mesh, devices))


def run(
    folder,
    total,
    *,
    every=4,
    log_every=1,
    evaluate=None,
    poison=(),
    seed=0,
    on_batch=None,
    guarding=NEVER_SKIP,
    patience=0.0,
    sizes=(),
    keep=3,
    looks=None,
    profile=None,
    **spec,
):
    """Train ``total`` steps in ``folder``, going on from what is there; on a mesh of these sizes, of all
    processes. ``spec``: what else is given to ``steps``.
    """
    made = steps(*sizes, guard=guarding, **spec)
    rows = process_rows(made.mesh, ROWS)

    def part(step):
        return batch(step, poison).map(lambda x: np.concatenate([x[each] for each in rows]))

    def data(start):
        for step in range(start, total):
            if on_batch:
                on_batch(step)
            yield part(step)

    config = LoopConfig(
        total, log_every, evaluate_every=looks or every, guard=guarding, patience=patience, profile=profile
    )
    with (
        Log(folder, {"seed": seed}) as log,
        Checkpoints(
            str(Path(folder) / "checkpoints"), CheckpointConfig(every=every, keep=keep)
        ) as checkpoints,
    ):
        evaluate = evaluate or (lambda state: made.evaluate(state, [part(10_000)]))
        return train(made, Run(seed, data, checkpoints, log, evaluate), config)


def drawn(abstract, lowest=1):
    """A state with the shapes and shardings of ``Steps.abstract``, of numbers in [lowest, lowest + 1).

    Drawn without a program, which each optimiser and mesh would have to compile.
    """
    rng = np.random.default_rng(0)

    def numbers(leaf):
        return jax.device_put((lowest + rng.random(leaf.shape)).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(numbers, abstract)


def numbers(state):
    """Every array of a state as bytes, by name."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in named(state).items()}


def damages(whole, rng, count):
    """Ways in which a file may be damaged; None: it is gone."""
    yield from (None, whole + b"\0")
    if whole:
        yield from (b"", whole[:-1], whole[: len(whole) // 2])
    for place in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(count))} if whole else ():
        yield whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :]


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
