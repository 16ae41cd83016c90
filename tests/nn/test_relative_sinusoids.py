"""Laws of relative sinusoids (Transformer-XL, XLNet). What transformers computes is in tests/convert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import TINY

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.nn.attention import Attention
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.positions import RelativeSinusoids
from lm.sharding import named
from lm.train.flops import costs, step_flops

CONFIG = changes(
    TINY,
    {
        "architecture": "encoder",
        "positions.kind": "relative-sinusoids",
        "positions.relative_types": True,
        "attention.scores": "scaled-dot",
        "num_encoder_layers": 1,
    },
)
TOKENS = np.array([[7, 9, 12, 6, 8], [5, 5, 5, 5, 5]])
TYPES = np.array([[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]])
X = jax.random.normal(jax.random.key(1), (2, 5, 16))


def test_a_score_is_the_sum_of_the_terms_of_transformer_xl_and_of_the_token_types_of_xlnet():
    batch = Batch(encoder=Side(tokens=TOKENS, token_types=TYPES))
    inputs = make_attention_inputs(CONFIG, batch, "encoder", RelativeSinusoids(CONFIG))
    attention = Attention(CONFIG, nnx.Rngs(params=jax.random.key(0)))
    # biases start at 0, where they would not show
    leaves = jax.tree.leaves(attention)
    drawn = [jax.random.normal(jax.random.key(i), leaf.shape) * 0.5 for i, leaf in enumerate(leaves)]
    attention = jax.tree.unflatten(jax.tree.structure(attention), drawn)
    p = {name: np.asarray(value, np.float64) for name, value in named(attention).items()}

    def by_head(x, name):
        return (np.asarray(x, np.float64) @ p[f"{name}.kernel"]).reshape(*x.shape[:-1], 4, 8)

    query, key = by_head(X, "query"), by_head(X, "key")
    distance = np.arange(5)[:, None] - np.arange(5)[None, :]  # of a query from a key before it: above 0
    angles = distance[:, :, None] * 10_000.0 ** (-np.arange(8) / 8)
    position_key = by_head(np.concatenate([np.sin(angles), np.cos(angles)], -1), "sinusoids.projection")
    type_key = p["sinusoids.type_keys"][(TYPES[:, :, None] != TYPES[:, None, :]) * 1]
    scores = np.einsum("bind,bjnd->bnij", query + p["sinusoids.content_bias"], key)
    scores += np.einsum("bind,ijnd->bnij", query + p["sinusoids.position_bias"], position_key)
    scores += np.einsum("bind,bijnd->bnij", query + p["sinusoids.type_bias"], type_key)
    found = attention.weights(X, attention.key_value(X, None), inputs)
    np.testing.assert_allclose(found, jax.nn.softmax(jnp.asarray(scores) / 8**0.5), atol=2e-6)


def test_its_vectors_and_products_are_counted():
    none = changes(CONFIG, {"positions.kind": "none", "positions.relative_types": False})
    more, less = costs(CONFIG, 10).parameters, costs(none, 10).parameters
    assert more - less == 16 * 32 + 3 * 32 + 2 * 32  # a matrix, three biases, two keys of types
    # 19 relative positions, two keys of types, and a bias times each key, with the backward pass
    assert step_flops(CONFIG, 1, 10, 10) - step_flops(none, 1, 10, 10) == 3 * 2 * 10 * (19 + 2 + 1) * 32


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ({"architecture": "decoder"}, "model.architecture='decoder' should be 'encoder'"),
        ({"attention.implementation": "flash"}, "model.attention.implementation='flash'"),
        ({"d_model": 15}, "model.d_model=15 should be even"),
    ],
)
def test_what_it_cannot_do_is_refused_by_the_name_of_the_setting(new, named):
    with pytest.raises(SettingError, match=named):
        changes(CONFIG, new)
