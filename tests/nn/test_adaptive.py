"""Laws of adaptive embeddings. Packing and decoding are in test_transformer.py too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import CONFIGS, TINY, made

from lm.config.base import SettingError, changes
from lm.nn.layers import count
from lm.sharding import named
from lm.train.flops import costs, step_flops
from lm.train.optimizers import freeze_embedding

CONFIG = CONFIGS["decoder, adaptive embedding"]  # 5, 15 and 20 tokens, 16, 6 and 2 wide
PLAIN = CONFIGS["decoder"]


def table():
    """The vectors [V,D] of all tokens, of which only the first have 16 features of their own."""
    first, *others = made(CONFIG).embed.clusters
    projected = [cluster.embed.table @ cluster.projection.kernel for cluster in others]
    return np.concatenate([first.embed.table, *projected])


def test_it_is_a_table_whose_rows_lie_in_fewer_dimensions_the_rarer_their_tokens():
    embed, rows = made(CONFIG).embed, table()
    np.testing.assert_allclose(embed(jnp.arange(40)[None])[0], rows, atol=1e-5)
    assert [np.linalg.matrix_rank(rows[part]) for part in (np.s_[:5], np.s_[5:20], np.s_[20:])] == [5, 6, 2]
    x = jax.random.normal(jax.random.key(1), (2, 3, 16))
    np.testing.assert_allclose(embed.logits(x), x @ rows.T, rtol=1e-4, atol=1e-4)
    assert 0.5 < rows[5:].std() < 2  # as the table of one cluster


@pytest.mark.parametrize("outside", [-1, 40])
def test_an_id_that_no_cluster_has_is_nan(outside):
    assert np.isnan(made(CONFIG).embed(jnp.array([[outside, 3]]))).all(-1).tolist() == [[True, False]]


def test_its_tables_and_projections_are_counted_where_they_are_read():
    matrices = 5 * 16 + 15 * 6 + 6 * 16 + 20 * 2 + 2 * 16
    assert count(made(CONFIG).embed) == costs(CONFIG, 10).embedding_parameters == matrices
    found = step_flops(CONFIG, 1, 10, 10) - step_flops(PLAIN, 1, 10, 10)
    assert found == 6 * 10 * (matrices - 40 * 16 + (6 + 2) * 16)


def test_frozen_embeddings_are_those_of_all_clusters():
    updates = {name: jnp.ones(value.shape) for name, value in named(made(CONFIG)).items()}
    kept = {name for name, value in freeze_embedding(updates, 0).items() if value.any()}
    assert kept == {name for name in updates if not name.startswith("embed.")}


@pytest.mark.parametrize(
    "new",
    [
        {"embedding.cluster_widths": (16,)},
        {"embedding.clusters": ()},
        {"embedding.clusters": (20, 20)},
        {"embedding.d_embed": 8, "embedding.projected": "tokens"},
    ],
)
def test_clusters_that_do_not_fit_are_refused(new):
    with pytest.raises(SettingError, match="model.embedding.cluster"):
        changes(TINY, {"embedding.clusters": (5, 15), "embedding.cluster_widths": (16, 6, 2)} | new)
