"""Laws of the Universal Transformer. Packing and decoding are in test_transformer.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import CONFIGS, TINY, UNIVERSAL, example, loss_and_gradients, made, make, run

from lm.config.base import SettingError, changes
from lm.nn.transformer import Transformer
from lm.nn.universal import GRUGate, Halting
from lm.train.flops import step_flops

NAME, SHARED = "universal", {"shared_layers": True}
BATCH = example(4, 5, 6)
X, H = jax.random.normal(jax.random.key(1), (2, 1, 4, 16))


@pytest.mark.slow
def test_steps_without_embeddings_share_their_layer_and_each_embedding_learns():
    config = changes(TINY, SHARED | {"universal.embedding": "step"})
    model, plain = made(config), made(changes(TINY, SHARED))
    learned = jax.grad(lambda model: model(BATCH).sum())(model)
    for stack in (learned.encoder, learned.decoder):
        vectors = stack.blocks.step_embedding.vector[...]
        assert vectors.shape == (2, 16) and np.abs(vectors).min() > 0
    found = jax.tree.map(lambda leaf: leaf, plain)
    for name in ("encoder", "decoder"):
        step_embedding = getattr(model, name).blocks.step_embedding
        getattr(found, name).blocks.step_embedding = jax.tree.map(jnp.zeros_like, step_embedding)
    np.testing.assert_allclose(run(found, BATCH), run(plain, BATCH), atol=1e-6)


def test_a_gate_is_that_of_a_gru_but_for_the_sigmoid_of_the_candidate():
    gate = GRUGate(changes(TINY, {"norm.kind": "none"}), nnx.Rngs(params=jax.random.key(0)))
    kernel, bias = (np.asarray(gate.gates.kernel[...]), np.asarray(gate.gates.bias[...]))

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    x, h = np.asarray(X), np.asarray(H)
    update, reset = np.split(sigmoid(np.concatenate([x, h], -1) @ kernel + bias), 2, -1)
    candidate = sigmoid(np.concatenate([reset * x, h], -1) @ np.asarray(gate.candidate.kernel[...]))
    np.testing.assert_allclose(gate(X, H), (1 - update) * h + update * candidate, atol=1e-5)


def test_a_position_halts_where_its_probabilities_reach_the_threshold_with_the_remainder_as_weight():
    halting = Halting(changes(TINY, {"universal.threshold": 0.9}), nnx.Rngs(params=jax.random.key(0)))
    # the first feature is the logit of the probability: 0.5, 0.28 and 0.95
    halting.probability.kernel[...] = jnp.zeros((16, 1)).at[0].set(1.0)
    logits = np.log(np.array([0.5, 0.28, 0.95]) / np.array([0.5, 0.72, 0.05]))
    x = jnp.zeros((1, 3, 16)).at[0, :, 0].set(logits)
    state, outputs, halted = halting.start(x), [], []
    for value in (1.0, 2.0, 3.0, 4.0):
        state = halting.step(state, x, jnp.full((1, 3, 16), value))
        outputs.append(np.asarray(halting.end(state))[0, :, 1])
        halted.append(np.asarray(state.halted)[0, :, 0])
    expected = [[0.5, 0.28, 1.0], [1.0, 0.56, 1.0], [1.0, 0.84, 1.0], [1.0, 1.0, 1.0]]
    np.testing.assert_allclose(halted, expected, atol=1e-6)
    first, second, third = np.transpose(outputs)
    assert len(set(first[1:])) == len(set(third)) == 1 and len(set(second)) == 4
    np.testing.assert_allclose(first[1], 0.5 * 2 + 0.5 * (0.5 * 1), atol=1e-6)
    assert third[0] == 1.0


def test_a_model_whose_positions_halt_at_once_is_one_step_long():
    def halting_at_once(layers):
        sizes = {"num_encoder_layers": layers, "num_decoder_layers": layers}
        new = SHARED | {"universal.halting": "adaptive"} | sizes
        model = Transformer(changes(TINY, new), nnx.Rngs(params=jax.random.key(0)))
        for stack in (model.encoder, model.decoder):
            stack.halting.probability.bias[...] = jnp.full((1,), 50.0)
        return run(model, BATCH)

    np.testing.assert_allclose(halting_at_once(2), halting_at_once(3), atol=1e-6)


@pytest.mark.slow
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients():
    key = jax.random.key(7)
    expected = loss_and_gradients(make(NAME), BATCH, key)
    assert np.abs(expected["decoder.halting.probability.kernel"]).min() > 0
    found = loss_and_gradients(
        make(NAME, **{"compile.layers": "unroll", "compile.remat": "full"}), BATCH, key
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_gates_and_halting_are_counted():
    more = step_flops(CONFIGS[NAME], 1, 10, 6) - step_flops(changes(TINY, SHARED), 1, 10, 6)
    gate = 2 * 3 * 2 * 16 * 16
    assert more == 3 * 2 * (10 * (2 * gate + 2 * 16) + 6 * (3 * gate + 2 * 16))


@pytest.mark.parametrize(
    "new",
    [
        {"positions.kind": "sinusoidal"},
        {"residual": "none"},
        {"universal.threshold": 0.0},
        {"mup.base": 8},
    ],
)
def test_what_does_not_go_with_its_parts_is_refused(new):
    with pytest.raises(SettingError, match=r"model\.universal"):
        changes(TINY, UNIVERSAL | new)
