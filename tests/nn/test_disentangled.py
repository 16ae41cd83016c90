"""Laws of disentangled attention. What transformers computes is in tests/convert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import TINY, encode

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.nn.attention import Attention
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.positions import RelativeEmbeddings
from lm.nn.transformer import Transformer
from lm.ops.positions import signed_position_bucket
from lm.train.flops import costs, step_flops

CONFIG = changes(
    TINY,
    {
        "architecture": "encoder",
        "positions.kind": "relative-disentangled",
        "attention.scores": "scaled-dot",
        "num_encoder_layers": 1,
    },
)
TOKENS = np.array([[7, 9, 12, 6, 8, 15, 10]])
X = np.random.default_rng(1).normal(size=(2, 7, 16)).astype(np.float32)


@jax.jit
def weights(attention, x, inputs):
    return attention.weights(x, attention.key_value(x, None), inputs)


def attention_and_inputs(config):
    relative = RelativeEmbeddings(config, nnx.Rngs(params=jax.random.key(2)))
    inputs = make_attention_inputs(config, Batch(encoder=Side(tokens=TOKENS)), "encoder", relative)
    return Attention(config, nnx.Rngs(params=jax.random.key(0))), inputs


def test_buckets_are_one_for_each_near_distance_then_logarithmic_and_grow_towards_the_start_of_the_row():
    # 4 buckets a side: distances 1 and 2, 3 to 7, and before the query all from 8 on share that of 3 to 7
    distances = np.array([-99, -8, -7, -3, -2, -1, 0, 1, 2, 3, 7, 8, 99])
    found = signed_position_bucket(distances, num_buckets=8, max_distance=8)
    assert found.tolist() == [7, 7, 7, 7, 6, 5, 4, 3, 2, 1, 1, 0, 0]
    # of DeBERTa v3, by hand: 128 + ceil(127 log(200 / 128) / log(511 / 128)) = 128 + ceil(40.95)
    assert 256 - signed_position_bucket(np.array([200]), num_buckets=512, max_distance=512)[0] == 128 + 41


@pytest.mark.parametrize("projections", ["shared", "separate"])
def test_a_score_is_the_sum_of_three_products_over_the_root_of_three_times_the_width(projections):
    config = changes(
        CONFIG, {"positions.relative_projections": projections, "attention.num_key_value_heads": 2}
    )
    attention, inputs = attention_and_inputs(config)

    @jax.jit
    def formula(attention, embeddings, x):
        query, kv = attention.queries(x, None), attention.key_value(x, None)
        if projections == "shared":
            key_of, query_of = attention.key, attention.query
        else:
            key_of, query_of = attention.position_key, attention.position_query
        key = jnp.repeat(kv.key, 2, axis=2)
        position_keys = jnp.repeat(key_of(embeddings).reshape(13, 2, 8), 2, axis=1)
        position_queries = query_of(embeddings).reshape(13, 4, 8)
        relative = np.arange(7)[None, :] - np.arange(7)[:, None] + 6  # the row of each query and key
        logits = jnp.einsum("btnh,bsnh->bnts", query, key)
        logits += jnp.einsum("btnh,tsnh->bnts", query, position_keys[relative])
        logits += jnp.einsum("bsnh,tsnh->bnts", key, position_queries[relative])
        return jax.nn.softmax(logits / (3 * 8) ** 0.5, axis=-1)

    expected = formula(attention, inputs.relative_embeddings, X)
    np.testing.assert_allclose(weights(attention, X, inputs), expected, atol=1e-6)


def test_without_embeddings_of_positions_it_is_attention_without_positions_at_a_smaller_scale():
    attention, inputs = attention_and_inputs(CONFIG)
    inputs = inputs._replace(relative_embeddings=0 * inputs.relative_embeddings)
    plain = changes(CONFIG, {"positions.kind": "none", "attention.scale": (3 * 8) ** -0.5})
    other = Attention(plain, nnx.Rngs(params=jax.random.key(0)))
    # operation by operation, since fused they round otherwise
    x = jnp.asarray(X)
    kv = attention.key_value(x, None)
    expected = other.weights(x, kv, inputs._replace(relative_embeddings=None))
    np.testing.assert_allclose(attention.weights(x, kv, inputs), expected)


@pytest.mark.parametrize("convolution", [0, 7])  # which reaches from one text into the next
def test_a_text_that_is_moved_or_packed_with_another_has_the_states_that_it_has_alone(convolution):
    config = changes(CONFIG, {"embedding.convolution": convolution})
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    one, other, gap = TOKENS[0], TOKENS[0, 2:5], [0] * 2
    rows = ([*one, *gap, *gap, 0], [*gap, *one, *gap, 0], [*other, *gap, *one], [*other, *gap, *[0] * 7])
    segments = np.array([[1] * 7 + [0] * 5, [0] * 2 + [1] * 7 + [0] * 3, [1] * 3 + [0] * 2 + [2] * 7])
    segments = np.concatenate([segments, [[1] * 3 + [0] * 9]])
    batch = Batch(encoder=Side(tokens=np.array(rows), segment_ids=segments))
    alone, moved, packed, of_other = np.asarray(encode(model, batch))
    np.testing.assert_allclose(moved[2:9], alone[:7], atol=1e-5)
    np.testing.assert_allclose(packed[5:], alone[:7], atol=1e-5)
    np.testing.assert_allclose(packed[:3], of_other[:3], atol=1e-5)


def test_its_embeddings_are_counted_once_and_its_products_in_each_layer():
    none = changes(CONFIG, {"positions.kind": "none"})
    one_product = changes(CONFIG, {"positions.relative_products": "content-to-position"})
    own = changes(one_product, {"positions.relative_projections": "separate"})
    found, more, less = (costs(config, 10).parameters for config in (CONFIG, own, none))
    assert found - less == 8 * 16 + 16  # a table and a norm
    assert more - found == 16 * 32
    products = 3 * 2 * 10 * 19 * 32  # of one layer, with the backward pass
    flops = [step_flops(config, 1, 10, 10) for config in (none, one_product, own, CONFIG)]
    assert np.subtract(flops, flops[0]).tolist() == [0, products, products, 2 * products]


def test_a_convolution_beside_the_first_layer_is_counted_once():
    config = changes(CONFIG, {"num_encoder_layers": 2})
    convolved = changes(config, {"embedding.convolution": 3})
    kernel = 3 * 16 * 16
    assert costs(convolved, 10).parameters - costs(config, 10).parameters == kernel + 16 + 16
    assert step_flops(convolved, 1, 10, 10) - step_flops(config, 1, 10, 10) == 3 * 2 * 10 * kernel


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ({"architecture": "decoder"}, "model.architecture='decoder' should be 'encoder'"),
        ({"attention.scores": "bilinear"}, "model.attention.scores='bilinear'"),
        ({"attention.implementation": "flash"}, "model.attention.implementation='flash'"),
        ({"positions.relative_buckets": 10}, "model.positions.relative_buckets=10 .* a multiple of 4"),
        ({"positions.relative_max_distance": 3}, "model.positions.relative_max_distance=3"),
        ({"embedding.convolution": 2}, "model.embedding.convolution=2 should be odd"),
        ({"embedding.convolution": 3, "attention.encoder_mask": "causal"}, "model.embedding.convolution=3"),
    ],
)
def test_what_it_cannot_do_is_refused_by_the_name_of_the_setting(new, named):
    with pytest.raises(SettingError, match=named):
        changes(CONFIG, new)
