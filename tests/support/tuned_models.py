"""Models with a head or parameters that fine-tuning moves, built and trained for a few steps."""

import jax
import numpy as np
from flax import nnx
from small_models import TINY

from lm import sharding
from lm.config.base import changes
from lm.config.mesh import MeshConfig
from lm.config.training import OptimizerConfig
from lm.nn.transformer import Transformer
from lm.train.step import StepSpec, build

MODEL = changes(TINY, {"num_encoder_layers": 3, "mlp.adapter_width": 4, "dropout": 0.0})
DECAYING = OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.1, weight_decay=0.5)


def built(model, **settings):
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    return build(StepSpec(model, DECAYING, **settings), mesh)


def trained(tune, step, make=lambda rngs: Transformer(MODEL, rngs)):
    """``{parameter: whether each of its layers is trained}``; one answer where it is not of layers."""
    model = jax.eval_shape(lambda: make(nnx.Rngs(0)))
    # One number of a layer stands for all of it, so that parameters of many shapes share a few operations.
    ones = {
        name: np.ones(one_of_each_layer(name, x), np.float32) for name, x in sharding.named(model).items()
    }
    updates = tune(ones, np.int32(step))
    return {name: layers(name, value) for name, value in updates.items()}


def one_of_each_layer(name, value):
    """The shape of a parameter with one number for each of its layers."""
    count = value.shape[0] if ".blocks." in name else 1
    return (count, *[1] * (value.ndim - 1))


def layers(name, value):
    rows = np.asarray(value).reshape(value.shape[0] if ".blocks." in name else 1, -1)
    return [bool(row.any()) for row in rows]
