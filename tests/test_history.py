"""The road of models: rows of equal size on equal text."""

import jax
import pytest
from flax import nnx

from experiments.study.history import TABLES
from experiments.study.registry import build
from lm.nn.transformer import Transformer

HISTORY = [row.name for row in TABLES[0].rows]
NETWORKS = [name for name in HISTORY if build(name, "nano").counts.model == "none"]


def numbers(name, scale):
    """All parameters of a row's network, and those that are no embedding."""
    model = build(name, scale).model
    shapes = jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return total, total - model.vocab_size * model.d_model


@pytest.mark.parametrize("scale", ["nano", "mini", "small"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_the_road_are_as_large_as_the_transformer_with_and_without_embedding(name, scale):
    for ours, its in zip(numbers(name, scale), numbers("history/transformer", scale), strict=True):
        assert ours == pytest.approx(its, rel=0.02)


@pytest.mark.parametrize("scale", ["nano", "mini", "small"])
def test_all_rows_of_the_road_read_and_score_the_same_text(scale):
    same = {
        (e.data, e.objective, e.pretraining.steps, e.pretraining.batch_size, e.model.vocab_size)
        for e in (build(name, scale) for name in HISTORY)
    }
    assert len(same) == 1 and next(iter(same))[0].held_out_documents
