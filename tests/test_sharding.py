"""Placement: 1 device = 8 devices, and what cannot be placed is refused by name before anything compiles."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from jax.sharding import PartitionSpec as P

from lm import sharding
from lm.config import SettingError
from lm.mesh import MeshConfig
from lm.nn.config import ModelConfig
from lm.nn.transformer import Transformer
from lm.train.config import LossConfig, OptimizerConfig
from lm.train.step import build

MODEL = ModelConfig("decoder", 32, 1, 1, d_model=16, d_ff=32, d_kv=4, num_heads=2, dropout=0.0)


def test_a_mesh_takes_the_devices_that_are_left_and_must_multiply_to_all():
    assert dict(sharding.make_mesh(MeshConfig(fsdp=2)).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    for config in (MeshConfig(3), MeshConfig(-1, 3), MeshConfig(-1, -1), MeshConfig(0), MeshConfig(2, 2, 1)):
        with pytest.raises(SettingError, match="mesh.data"):
            config.sizes(8)


@pytest.mark.parametrize(
    "sizes, rows, micro, message",
    [
        ((1, 1, 4), 8, 1, r"model.num_heads of size 2 .* mesh.tensor=4: make it a multiple of 4, or .* one of 1, 2"),
        ((1, 1, 2), 7, 2, "batch_size=7 should be a multiple of microbatches=2"),
        ((2, 2, 1), 6, 1, r"batch_size of size 6 .* mesh.data=2, mesh.fsdp=2"),
        ((2, 2, 1), 4, 2, r"batch_size=4 / microbatches=2 of size 2"),
        ((1, 32, 1), 32, 1, "model.d_model of size 16"),
    ],
)
def test_what_does_not_divide_is_named_before_anything_compiles(sizes, rows, micro, message):
    with pytest.raises(SettingError, match=message):
        sharding.check(MODEL, dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), rows, micro)


def test_an_axis_that_the_tables_lack_is_refused():
    mesh = sharding.make_mesh(MeshConfig())

    class Misspelt(nnx.Module):
        def __init__(self, axes):
            self.kernel = nnx.Param(jnp.zeros((12, 6)), axes=axes)

    with pytest.raises(SettingError, match="parameter kernel has the axis 'embedd'.*did you mean 'embed'"):
        sharding.parameters(Misspelt(("embedd", "mlp")), mesh)
    with pytest.raises(SettingError, match="parameter kernel of shape"):
        sharding.parameters(Misspelt(None), mesh)
    with pytest.raises(SettingError, match="'heats'.*did you mean 'heads'"):
        sharding.constrain(jnp.zeros((2, 2)), "batch", "heats")
    with pytest.raises(SettingError, match="parameter kernel: axis 'embed' of size 12 cannot .* mesh.fsdp=8"):
        sharding.parameters(Misspelt(("embed", "mlp")), sharding.make_mesh(MeshConfig(1, 8)))


def test_constrain_places_by_name_and_does_nothing_without_a_mesh():
    x = jnp.zeros((8, 3, 4))
    assert sharding.constrain(x, "batch", "length", "mlp") is x
    with jax.set_mesh(sharding.make_mesh(MeshConfig(2, 2, 2))):
        placed = jax.jit(lambda x: sharding.constrain(x, "batch", "length", "mlp"))(x)
        with pytest.raises(SettingError, match="axis 'batch' of size 3"):
            sharding.constrain(jnp.zeros((3, 1)), "batch", "length")
    assert placed.sharding.spec == P(("data", "fsdp"), None, "tensor")


def test_the_optimiser_lives_where_its_parameter_lives():
    abstract = toy.steps(2, 2, 2).abstract
    places = {name: leaf.sharding.spec for name, leaf in sharding.named(abstract).items()}
    assert places["params.blocks"] == P(None, "fsdp", "tensor")  # [layers,D,F]
    found = {name.split(".", 3)[-1]: spec for name, spec in places.items() if name.startswith("opt_state.0.2")}
    assert found["0.v_row.blocks"] == P(None, "fsdp") and found["0.v_col.blocks"] == P(None, "tensor")
    assert found["0.v.scale"] == places["params.scale"] == P(None, None)
    moments = toy.steps(2, 2, 2, optimization=OptimizerConfig(name="adamw")).abstract
    places = {name: leaf.sharding.spec for name, leaf in sharding.named(moments).items()}
    assert places["opt_state.0.0.mu.table"] == places["params.table"] == P("tensor", "fsdp")


def test_a_square_matrix_has_its_rows_and_columns_told_apart():
    mesh = sharding.make_mesh(MeshConfig(1, 4, 2))
    place = {"k": jax.NamedSharding(mesh, P("fsdp", "tensor"))}
    tree = {"v_row": {"k": jnp.zeros(8)}, "v_col": {"k": jnp.zeros(8)}, "count": jnp.zeros(())}
    found = sharding.like_parameters(tree, {"k": (8, 8)}, place)
    assert [found[n]["k"].spec for n in ("v_row", "v_col")] == [P("fsdp"), P("tensor")]
    assert found["count"].spec == P()


def test_processes_that_hold_the_same_rows_feed_the_same_part(monkeypatch):
    def feeding(rows):
        place = SimpleNamespace(addressable_devices_indices_map=lambda shape: dict(enumerate(rows)))
        monkeypatch.setattr(sharding, "batches", lambda mesh: place)
        return sharding.shard_of_batch(None, 8)

    assert feeding([(slice(4, 6),), (slice(6, 8),)]) == (1, 2)
    assert feeding([(slice(2, 4),), (slice(2, 4),)]) == (1, 4)
    assert feeding([(slice(None),)]) == (0, 1)
    with pytest.raises(SettingError, match="not one block"):
        feeding([(slice(0, 2),), (slice(4, 6),)])


def transformer_batch(step):
    rng = np.random.default_rng(step)
    weights = (np.arange(6) < rng.integers(0, 7, (8, 1))).astype(np.float32)
    tokens = {name: rng.integers(3, 32, (8, length), np.int32) for name, length in (("encoder_input_tokens", 10),)}
    tokens |= {
        name: rng.integers(3, 32, (8, 6), np.int32) for name in ("decoder_input_tokens", "decoder_target_tokens")
    }
    return tokens | {"decoder_loss_weights": weights, "decoder_segment_ids": (weights > 0).astype(np.int32)}


def test_a_transformer_trains_alike_on_one_device_and_on_every_axis_of_eight():
    def losses(config, devices):
        steps = build(MODEL, OptimizerConfig(factor_from=16), LossConfig(), sharding.make_mesh(config, devices), 1)
        assert isinstance(steps.abstract.model, Transformer)
        state, step = steps.init(0), steps.train_step(0)
        found = []
        for i in range(3):
            state, metrics = step(state, steps.put(transformer_batch(i)))
            found.append([float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
        return found, {name: np.asarray(value) for name, value in state.params.items()}

    (one, params), (eight, others) = losses(MeshConfig(), jax.devices()[:1]), losses(MeshConfig(2, 2, 2), jax.devices())
    np.testing.assert_allclose(eight, one, rtol=2e-5)
    for name, value in params.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 1, 4)])
def test_the_arrangement_of_devices_changes_no_number(sizes):
    def trained(*sizes):
        steps = toy.steps(*sizes)
        state, step = steps.init(3), steps.train_step(3)
        for i in range(3):
            state, metrics = step(state, steps.put(toy.batch(i)))
        return float(metrics["loss"]), {name: np.asarray(value) for name, value in state.params.items()}

    (loss, params), (other, others) = trained(), trained(*sizes)
    assert other == pytest.approx(loss, rel=1e-5)
    for name, value in params.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
