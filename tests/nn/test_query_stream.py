"""Laws of the query stream (XLNet). What transformers computes is in tests/convert."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from small_models import TINY, encode, hidden_states, run

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.training import LossConfig
from lm.evaluate.mask_filling import fill_masks
from lm.nn.transformer import Transformer
from lm.train.flops import step_flops
from lm.train.losses import masked_lm

CONFIG = changes(
    TINY,
    {
        "architecture": "encoder",
        "num_encoder_layers": 2,
        "positions.kind": "relative-sinusoids",
        "attention.scores": "scaled-dot",
        "output.logits": "tied",
        "heads": ("query-stream",),
        "dropout": 0.0,
    },
)
TOKENS = np.array([[7, 9, 12, 6, 8, 15, 10], [8, 8, 5, 4, 9, 11, 0]])
ORDER = np.array([[0, 3, 1, 0, 2, 0, 4], [2, 0, 0, 1, 3, 0, 0]])
SIDE = Side(
    tokens=TOKENS,
    segment_ids=np.array([[1] * 7, [1] * 6 + [0]]),
    prediction_order=ORDER,
    targets=TOKENS,
    loss_weights=(ORDER > 0).astype(np.float32),
)


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, nnx.Rngs(params=jax.random.key(0)))


def test_hidden_states_have_the_rows_of_both_streams_and_the_output_those_of_the_query_stream(model):
    batch = Batch(encoder=SIDE)
    mixer_inputs = jax.eval_shape(lambda: model.mixer_inputs(batch)["encoder"])
    weights = jax.eval_shape(lambda: model.attention_weights(batch)["encoder"])
    states = hidden_states(model, batch)["encoder"]
    assert states.shape == (3, 4, 7, CONFIG.d_model) and mixer_inputs.shape == (2, 4, 7, CONFIG.d_model)
    assert weights.shape == (2, 4, CONFIG.attention.num_heads, 7, 7)
    query_stream = model.encoder.norm(states[-1])[1::2]
    np.testing.assert_allclose(query_stream, encode(model, batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("positions", ["relative-sinusoids", "rotary"])
def test_a_target_depends_on_the_context_and_earlier_targets_and_on_neither_itself_nor_later_ones(positions):
    config = changes(CONFIG, {"positions.kind": positions})
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))

    def logits(tokens):
        return np.asarray(run(model, Batch(encoder=replace(SIDE, tokens=tokens))))

    before = logits(TOKENS)
    for row, position in np.argwhere(ORDER > 0):
        step = ORDER[row, position]
        own_or_later = np.where(ORDER[row] >= step, (TOKENS[row] + 1) % 16, TOKENS[row])
        same = logits(np.where(np.arange(2)[:, None] == row, own_or_later, TOKENS))
        np.testing.assert_array_equal(same[row, position], before[row, position])
        for other in np.flatnonzero((ORDER[row] < step) & (SIDE.segment_ids[row] > 0)):
            changed = TOKENS.copy()
            changed[row, other] = (changed[row, other] + 1) % 16
            assert np.abs(logits(changed)[row, position] - before[row, position]).max() > 1e-6


def test_without_an_order_there_is_one_stream_which_the_vector_of_queries_does_not_change(model):
    batch = Batch(encoder=replace(SIDE, prediction_order=None))
    other = jax.tree.map(lambda leaf: leaf, model)
    other.query_embedding[...] = other.query_embedding[...] + 1.0
    np.testing.assert_array_equal(run(model, batch), run(other, batch))


def test_a_few_steps_lower_the_loss_and_train_the_vector_of_queries(model):
    batch = Batch(encoder=replace(SIDE, loss_weights=SIDE.loss_weights / SIDE.loss_weights.sum()))
    leaves, structure = jax.tree.flatten(model)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(leaves, state):
        def loss(leaves):
            return masked_lm(jax.tree.unflatten(structure, leaves), batch, None, LossConfig())[0]

        value, gradient = jax.value_and_grad(loss)(leaves)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(leaves, updates), state, value

    state, losses = optimizer.init(leaves), []
    for _ in range(8):
        leaves, state, value = step(leaves, state)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]
    trained = jax.tree.unflatten(structure, leaves)
    assert np.abs(trained.query_embedding[...] - model.query_embedding[...]).max() > 1e-3


def test_masks_are_filled_by_the_query_stream_which_reads_none_of_them(model):
    side = replace(SIDE, prediction_order=None)
    found = []
    for mask in (2, 3):
        tokens = np.where(ORDER > 0, mask, TOKENS)
        found.append(fill_masks(model, Batch(encoder=replace(side, tokens=tokens)), mask=mask, k=3))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_the_second_stream_costs_what_the_first_does_but_for_keys_and_values():
    one, two = (step_flops(changes(CONFIG, {"heads": heads}), 1, 7, 7) for heads in ((), CONFIG.heads))
    output = 3 * 2 * 7 * 16 * CONFIG.vocab_size
    keys_and_values = 3 * 2 * 7 * 2 * 16 * 32 * CONFIG.num_encoder_layers
    assert two == 2 * one - output - keys_and_values


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ({"positions.kind": "none"}, "model.positions.kind='none'"),
        ({"mixer.kind": "window", "positions.kind": "learned"}, "model.mixer.kind='attention', not 'window'"),
        ({"experts.count": 2}, "model.experts.count=0, not 2"),
        ({"sparsity.window": 2}, r"model.sparsity=.*, not SparsityConfig\(window=2"),
        ({"block": "evolved"}, "model.block='transformer'"),
        ({"embedding.convolution": 3}, "model.embedding.convolution=0"),
    ],
)
def test_what_has_no_second_stream_is_refused_by_the_name_of_the_setting(new, named):
    with pytest.raises(SettingError, match=named):
        changes(CONFIG, new)


def test_an_order_needs_a_model_with_a_query_stream():
    model = Transformer(changes(CONFIG, {"heads": ()}), nnx.Rngs(params=jax.random.key(0)))
    with pytest.raises(SettingError, match="prediction_order needs 'query-stream'"):
        jax.eval_shape(lambda: model(Batch(encoder=SIDE)))
