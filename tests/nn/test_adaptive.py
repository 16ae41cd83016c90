"""Laws of adaptive embeddings and of the adaptive softmax. test_transformer.py packs them and decodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import CONFIGS, TINY, example, made, run, shapes

from lm.config.base import SettingError, changes
from lm.nn.adaptive import adaptive_log_softmax
from lm.nn.layers import num_parameters
from lm.sharding import named
from lm.train.flops import costs, step_flops
from lm.train.optimizers import freeze_embedding

CONFIG = CONFIGS["decoder, adaptive embedding"]  # 5, 15 and 20 tokens, 16, 6 and 2 wide
SOFTMAX = CONFIGS["decoder, adaptive softmax"]  # with the same clusters
SIZES = (5, 15, 20)
PLAIN = CONFIGS["decoder"]


def drawn(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def table():
    """The vectors [V,D] of all tokens, of which only the first have 16 features of their own."""
    first, *others = jax.tree.map(np.asarray, made(CONFIG).embed).clusters
    projected = [cluster.embed.table[...] @ cluster.projection.kernel[...] for cluster in others]
    return np.concatenate([first.embed.table[...], *projected])


def test_it_is_a_table_whose_rows_lie_in_fewer_dimensions_the_rarer_their_tokens():
    embed, rows = made(CONFIG).embed, table()
    x = drawn(2, 3, 16, seed=1)
    both = jax.jit(lambda embed, ids, x: (embed(ids)[0], embed.logits(x)))
    found, logits = both(embed, np.arange(40)[None], x)
    np.testing.assert_allclose(found, rows, atol=1e-5)
    assert [np.linalg.matrix_rank(rows[part]) for part in (np.s_[:5], np.s_[5:20], np.s_[20:])] == [5, 6, 2]
    np.testing.assert_allclose(logits, x @ rows.T, rtol=1e-4, atol=1e-4)
    assert 0.5 < rows[5:].std() < 2  # as the table of one cluster


@pytest.mark.parametrize("outside", [-1, 40])
def test_an_id_that_no_cluster_has_is_nan(outside):
    assert np.isnan(made(CONFIG).embed(jnp.array([[outside, 3]]))).all(-1).tolist() == [[True, False]]


def test_its_tables_and_projections_are_counted_where_they_are_read():
    matrices = 5 * 16 + 15 * 6 + 6 * 16 + 20 * 2 + 2 * 16
    assert num_parameters(shapes(CONFIG).embed) == costs(CONFIG, 10).embedding_parameters == matrices
    found = step_flops(CONFIG, 1, 10, 10) - step_flops(PLAIN, 1, 10, 10)
    assert found == 6 * 10 * (matrices - 40 * 16 + (6 + 2) * 16)


def test_frozen_embeddings_are_those_of_all_clusters():
    updates = {name: np.ones(value.shape) for name, value in named(shapes(CONFIG)).items()}
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


# ---- adaptive softmax


def test_a_token_is_as_likely_as_its_cluster_times_the_token_in_it():
    logits, names = drawn(3, 40, seed=0), drawn(3, 2, seed=1)
    found = np.exp(adaptive_log_softmax(logits, names, SIZES))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    shared = np.exp(logits[:, :5]).sum(-1) + np.exp(names).sum(-1)
    np.testing.assert_allclose(found[:, 3], np.exp(logits[:, 3]) / shared, rtol=1e-5)
    last = np.exp(names[:, 1]) / shared * np.exp(logits[:, 25]) / np.exp(logits[:, 20:]).sum(-1)
    np.testing.assert_allclose(found[:, 25], last, rtol=1e-5)


def test_it_is_the_full_softmax_where_a_name_weighs_as_much_as_its_tokens():
    logits = drawn(3, 40, seed=0)
    weights = [np.log(np.exp(logits[:, part]).sum(-1)) for part in (np.s_[5:20], np.s_[20:])]
    found = adaptive_log_softmax(logits, np.stack(weights, -1), SIZES)
    np.testing.assert_allclose(found, jax.nn.log_softmax(logits), atol=1e-5)


def test_a_model_gives_probabilities_and_its_only_new_parameters_are_the_names():
    np.testing.assert_allclose(np.exp(run(made(SOFTMAX), example(1, 5, 7))).sum(-1), 1, rtol=1e-5)
    assert (
        num_parameters(shapes(SOFTMAX))
        == costs(SOFTMAX, 10).parameters
        == num_parameters(shapes(CONFIG)) + 2 * 16
    )
    assert step_flops(SOFTMAX, 1, 10, 10) == step_flops(CONFIG, 1, 10, 10) + 6 * 10 * 2 * 16


@pytest.mark.parametrize(
    "new",
    [
        {"output.softmax": "adaptive"},
        {"output.softmax": "adaptive", "output.softmaxes": 2, "embedding": SOFTMAX.embedding},
        {"output.softmax": "adaptive", "output.logits": "none", "embedding": SOFTMAX.embedding},
    ],
    ids=["no clusters", "a mixture", "no output"],
)
def test_a_softmax_of_clusters_that_are_not_there_or_of_no_single_output_is_refused(new):
    with pytest.raises(SettingError, match=r"model.output.softmax='adaptive' needs"):
        changes(TINY, new)
