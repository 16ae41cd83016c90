"""Training with a teacher: what its terms are worth, and that nothing else changes."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from drawn import drawn_state
from flax import nnx

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.mesh import MeshConfig
from lm.config.training import DistillationConfig, LossConfig, OptimizerConfig
from lm.nn.transformer import Transformer
from lm.sharding import make_mesh, named
from lm.train import step as training
from lm.train.losses import Teacher, language_model, masked_lm, replaced_token_detection
from lm.train.step import StepSpec

SMALL = {"vocab_size": 50, "d_model": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
MODELS = {
    "encoder": changes(small_models.tiny("bert-base"), SMALL | {"heads": (), "dropout": 0.1}),
    "decoder": changes(small_models.CONFIGS["decoder"], SMALL),
}
LOSSES = {"encoder": masked_lm, "decoder": language_model}
SIDES = pytest.mark.parametrize("side", MODELS)
ADAM = OptimizerConfig("adamw", schedule="constant", learning_rate=0.01)


def batch_of(side, rows=2, length=8):
    """Tokens, other tokens as targets, and weights that select some of them."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(5, SMALL["vocab_size"], (2, rows, length), np.int32)
    weights = np.zeros((rows, length), np.float32)
    weights[:, 1:3] = 1
    filled = Side(
        tokens=tokens, targets=targets, loss_weights=weights, segment_ids=np.ones((rows, length), np.int32)
    )
    return Batch(**{side: filled})


def random_teacher(side, seed=7, **new):
    config, rng = changes(MODELS[side], new), np.random.default_rng(seed)
    abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    return config, jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32), abstract
    )


@cache
def plain(side):
    """The step without a teacher, and what is trained by it."""
    spec = StepSpec(MODELS[side], ADAM, LOSSES[side])
    return spec, trained(spec, side)[0]


def trained(spec, side, teacher=None, count=2, seed=0):
    """The parameters after some steps, and the metrics of the last one; ``seed`` is that of dropout."""
    steps = training.build(spec, make_mesh(MeshConfig(), jax.devices()[:1]))
    state, step = drawn_state(steps), steps.seeded_train_step(seed, teacher and named(teacher))
    for _ in range(count):
        state, metrics = step(state, steps.shard_batch(batch_of(side)))
    return jax.device_get(state.params), metrics


@pytest.mark.slow
@SIDES
def test_with_no_weight_of_the_teacher_training_is_that_without_one_bit_for_bit(side):
    spec, expected = plain(side)
    config, teacher = random_teacher(side)
    alone = DistillationConfig("teacher", soft=0, hard=1, cosine=0)
    found, metrics = trained(replace(spec, teacher_config=config, distillation=alone), side, teacher)
    assert metrics.keys().isdisjoint({"soft_loss", "cosine_distance"})
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_teacher_teaches_does_not_change_and_its_dropout_is_off():
    student = changes(MODELS["encoder"], {"dropout": 0.0})
    config, teacher = random_teacher("encoder", num_encoder_layers=2)
    _, another = random_teacher("encoder", seed=8, num_encoder_layers=2)
    before = jax.device_get(named(teacher))
    spec = StepSpec(
        student, ADAM, masked_lm, teacher_config=config, distillation=DistillationConfig("teacher")
    )
    params, _ = trained(spec, "encoder", teacher)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(named(teacher)), before)
    assert not np.array_equal(params["embed.table"], trained(spec, "encoder", another)[0]["embed.table"])
    # a student without dropout learns the same whatever the seed, though the teacher has a rate
    assert config.dropout > 0
    jax.tree.map(np.testing.assert_array_equal, trained(spec, "encoder", teacher, seed=1)[0], params)


@SIDES
def test_a_student_that_is_its_teacher_gets_no_gradient_from_its_predictions(side):
    _, teacher = random_teacher(side, dropout=0.0)

    configs = [
        DistillationConfig("teacher", **weights)
        for weights in ({"soft": 1, "hard": 0, "cosine": 1}, {"soft": 0, "hard": 1, "cosine": 0})
    ]

    def gradients(student, config):
        taught = Teacher(teacher, config)
        return jax.grad(lambda model: LOSSES[side](model, batch_of(side), None, LossConfig(), taught)[0])(
            student
        )

    of_predictions, of_targets = (
        max(np.abs(leaf).max() for leaf in named(found).values())
        for found in jax.jit(lambda student: [gradients(student, config) for config in configs])(teacher)
    )
    assert of_predictions < 1e-5
    assert of_targets > 1e-2


def test_a_loss_without_predictions_of_tokens_takes_no_teacher():
    with pytest.raises(
        SettingError, match="language_model, masked_lm, causal_encoder.*not replaced_token_detection"
    ):
        StepSpec(MODELS["encoder"], loss=replaced_token_detection, teacher_config=MODELS["encoder"])
