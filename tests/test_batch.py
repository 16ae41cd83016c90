"""A batch: its fields, its names in files, and what goes through jax."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm import sharding
from lm.batch import FEATURES, Batch, Side, concatenate
from lm.config.base import SettingError

TOKENS = np.arange(12).reshape(3, 4)
WHOLE = Batch.from_features({name: TOKENS + number for number, name in enumerate(FEATURES)})
DECODER = Batch(decoder=Side(tokens=TOKENS, loss_weights=TOKENS > 3), labels=np.arange(3))


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="segment_id"):
        Side(tokens=TOKENS, segment_id=TOKENS)
    with pytest.raises(TypeError, match="label"):
        Batch(label=TOKENS)
    with pytest.raises(TypeError, match="tokens"):
        Side(segment_ids=TOKENS)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("decoder_segment_id", "did you mean 'decoder_segment_ids'"),
        ("segment_ids", "did you mean '(en|de)coder_segment_ids'"),
        ("decoder_tokens", "did you mean"),
        ("carry", "feature 'carry' of a batch is unknown"),
    ],
)
def test_a_feature_name_that_does_not_exist_is_refused_with_the_nearest_that_does(name, nearest):
    with pytest.raises(SettingError, match=nearest):
        Batch.from_features(DECODER.features() | {name: TOKENS})


def test_features_of_a_side_without_its_tokens_are_refused_with_the_name_that_is_missing():
    for side, other in (("encoder", "decoder"), ("decoder", "encoder")):
        features = {f"{side}_segment_ids": TOKENS, f"{other}_input_tokens": TOKENS}
        with pytest.raises(SettingError, match=f"{side}_segment_ids needs {side}_input_tokens"):
            Batch.from_features(features)


@pytest.mark.parametrize("batch", [WHOLE, DECODER], ids=["whole", "decoder"])
def test_a_batch_comes_back_from_its_features_and_from_its_leaves_with_what_it_lacks(batch):
    names = [name for name, array in batch.features().items() if array is not None]
    leaves, structure = jax.tree.flatten(batch)
    for again in (Batch.from_features(batch.features()), jax.tree.unflatten(structure, leaves)):
        assert (again.encoder is None, again.decoder is None) == (
            batch.encoder is None,
            batch.decoder is None,
        )
        assert list(again.features()) == names
        jax.tree.map(np.testing.assert_array_equal, again, batch)
    assert len(leaves) == len(names)
    assert jax.jit(lambda batch: batch.encoder is None)(batch) == (batch.encoder is None)


def test_every_field_has_a_feature_name_and_is_a_leaf():
    of_sides = [(side, field.name) for side in ("encoder", "decoder") for field in fields(Side)]
    others = [("", field.name) for field in fields(Batch) if field.name not in ("encoder", "decoder")]
    assert sorted(FEATURES.values()) == sorted([*of_sides, *others])
    assert len(jax.tree.leaves(WHOLE)) == len(FEATURES)


def test_leaves_come_in_the_order_of_feature_names():
    # as those of a dict of features would: programs keep their arguments
    assert [leaf[0, 0] for leaf in jax.tree.leaves(WHOLE)] == [*range(len(FEATURES))]


def test_rows_that_are_cut_and_joined_are_the_batch():
    parts = [DECODER.map(lambda array, rows=rows: array[rows]) for rows in (slice(0, 1), slice(1, None))]
    jax.tree.map(np.testing.assert_array_equal, concatenate(parts), DECODER)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_batches_with_different_arrays_are_not_joined(order):
    without_labels = Batch(decoder=DECODER.decoder)
    with pytest.raises(SettingError, match="labels"):
        concatenate([DECODER, without_labels][order])


def test_a_batch_is_placed_with_all_that_it_has():
    from lm.config.mesh import MeshConfig

    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    placed = sharding.put_batch(DECODER, mesh)
    assert placed.encoder is None and isinstance(placed.decoder.tokens, jnp.ndarray)
    jax.tree.map(np.testing.assert_array_equal, placed, DECODER)
