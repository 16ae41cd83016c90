"""Laws of vectors of relative positions. Packing and decoding are in test_transformer.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import TINY

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.nn.adapt import adapted_config
from lm.nn.attention import Attention
from lm.nn.attention_inputs import make_attention_inputs
from lm.train.flops import costs, step_flops

CONFIG = changes(TINY, {"architecture": "encoder", "positions.kind": "relative-keys"})
X = jax.random.normal(jax.random.key(1), (2, 9, 16))
INPUTS = make_attention_inputs(CONFIG, Batch(encoder=Side(tokens=np.zeros((2, 9), int))), "encoder", None)


@pytest.mark.parametrize("scores", ["dot", "scaled-dot"])
def test_a_score_is_the_product_of_the_query_and_the_key_plus_the_vector_of_their_distance(scores):
    attention = Attention(changes(CONFIG, {"attention.scores": scores}), nnx.Rngs(params=jax.random.key(0)))
    query, kv = attention.queries(X, None), attention.key_value(X, None)
    vectors = attention.relative_keys[...]
    keys = kv.key[:, None] + jnp.moveaxis(vectors[:, :, INPUTS.buckets[0]], (0, 1), (2, 3))[None]
    scale = 8**-0.5 if scores == "scaled-dot" else 1.0
    logits = jnp.einsum("btnh,btsnh->bnts", query, keys) * scale
    found = attention.weights(X, kv, INPUTS)
    np.testing.assert_allclose(found, jax.nn.softmax(logits, axis=-1), atol=1e-5)
    out = jnp.einsum("bnts,bsnh->btnh", found, kv.value).reshape(2, 9, -1)
    np.testing.assert_allclose(attention(X, INPUTS, None, {})[0], attention.out(out), atol=1e-5)


def test_far_positions_share_a_vector_and_near_ones_have_their_own():
    buckets = np.asarray(INPUTS.buckets[0])
    assert (
        buckets[0, 1] != buckets[1, 0] and buckets[0, 1] != buckets[0, 2] and buckets[0, 7] == buckets[0, 8]
    )


def test_its_vectors_are_counted_for_each_layer():
    none = changes(CONFIG, {"positions.kind": "none"})
    assert costs(CONFIG, 10).parameters - costs(none, 10).parameters == 2 * 4 * 8 * 8
    assert step_flops(CONFIG, 1, 10, 10) - step_flops(none, 1, 10, 10) == 6 * 2 * 10 * 4 * 8 * 8


@pytest.mark.parametrize("new", [{"attention.implementation": "flash"}, {"sparsity.projections": "separate"}])
def test_kernels_and_projections_that_lack_it_are_refused(new):
    with pytest.raises(SettingError, match="model.positions.kind='relative-keys'"):
        changes(CONFIG, new)


def test_its_vectors_do_not_become_those_of_another_architecture():
    with pytest.raises(SettingError, match="vectors of relative positions"):
        adapted_config(CONFIG, {"architecture": "decoder"})
