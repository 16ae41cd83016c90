"""Parameters that numpy draws: programs that draw those of a model take seconds to compile."""

import jax
import jax.numpy as jnp
import numpy as np
from small_models import shapes

from lm.sharding import named


def drawn(parameters, seed=0):
    """An array for each ``{name: shape and dtype}``: scales are 1, biases 0, all others random."""
    rng = np.random.default_rng([seed, 2])  # with which untrained models write bytes, and few sentinels

    def array(name, like):
        if name.endswith(("scale", "bias")):
            return np.full(like.shape, name.endswith("scale"), like.dtype)
        return (rng.normal(size=like.shape) / like.shape[-1] ** 0.5).astype(like.dtype)

    return {name: array(name, like) for name, like in parameters.items()}


def drawn_model(config, seed=0):
    """A Transformer of such parameters."""
    abstract = shapes(config)
    arrays = drawn(named(abstract), seed).values()
    return jax.tree.unflatten(jax.tree.structure(abstract), list(map(jnp.asarray, arrays)))


def drawn_state(steps, seed=0):
    """The state before the first step, with such parameters."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), steps.abstract)
    zeros.params.update(drawn(zeros.params, seed))
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), zeros, steps.abstract)
