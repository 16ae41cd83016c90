"""Placement: 1 device = 8 devices, and what cannot be placed is refused by name before anything compiles."""

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from drawn import drawn_state
from flax import nnx
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded_training import MODEL, trained, transformer_batch

from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.mesh import MeshConfig
from lm.config.training import OptimizerConfig
from lm.evaluate.generate import greedy
from lm.nn.layers import param
from lm.train.checks import check_mesh
from lm.train.optimizers import update_direction
from lm.train.step import StepSpec, build


def mesh_of(data, fsdp, tensor):
    return MeshConfig(data=data, fsdp=fsdp, tensor=tensor)


def test_a_mesh_takes_the_devices_that_are_left_and_must_multiply_to_all():
    sizes = {"slice": 1, "data": 4, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 1}
    assert dict(sharding.make_mesh(MeshConfig(fsdp=2)).shape) == sizes
    for config in (
        MeshConfig(data=3),
        MeshConfig(fsdp=3),
        MeshConfig(fsdp=-1),
        MeshConfig(data=0),
        MeshConfig(data=2, fsdp=2),
    ):
        with pytest.raises(SettingError, match="mesh.(data|fsdp)"):
            config.sizes(8)


@pytest.mark.parametrize(
    "sizes, rows, micro, message",
    [
        (
            (1, 1, 4),
            8,
            1,
            r"model.attention.num_heads of size 2 .* mesh.tensor=4: make it a multiple of 4, or .* one of 1, "
            "2",
        ),
        ((1, 1, 2), 7, 2, "batch_size=7 should be a multiple of microbatches=2"),
        ((2, 2, 1), 6, 1, r"batch_size of size 6 .* mesh.data=2, mesh.fsdp=2"),
        ((2, 2, 1), 4, 2, r"batch_size=4 / microbatches=2 of size 2"),
        ((1, 32, 1), 32, 1, "model.d_model of size 16"),
    ],
)
def test_what_does_not_divide_is_named_before_anything_compiles(sizes, rows, micro, message):
    with pytest.raises(SettingError, match=message):
        check_mesh(MODEL, mesh_of(*sizes).sizes(prod(sizes)), rows, micro)


@pytest.mark.parametrize(
    ("new", "axis", "message"),
    [
        ({"mixer.kind": "window", "mixer.width": 13}, "tensor", "model.mixer.width of size 13"),
        ({"mixer.kind": "window", "mixer.width": 13}, "fsdp", None),
        ({"mixer.kind": "gru", "mixer.width": 13}, "fsdp", "model.mixer.width of size 13"),
        ({"mixer.kind": "gru", "mixer.width": 13}, "tensor", None),
        ({"mixer.kind": "gru", "attention.num_heads": 3}, "tensor", None),
        ({"mlp.activation": "none", "mlp.d_ff": 7}, "tensor", None),
        ({"mlp.d_ff": 7}, "tensor", "model.mlp.d_ff of size 7"),
        ({"experts.count": 2, "experts.d_ff": 7}, "tensor", "model.experts.d_ff of size 7"),
        ({"embedding.d_embed": 9, "output.logits": "separate"}, "fsdp", "model.embedding.d_embed of size 9"),
        (
            {"architecture": "encoder-decoder", "cross_attention.num_heads": 3},
            "tensor",
            "model.cross_attention.num_heads of size 3",
        ),
    ],
)
def test_a_size_is_refused_exactly_where_a_part_that_the_model_has_is_split(new, axis, message):
    model = changes(MODEL, {"positions.kind": "none", **new})
    sizes = MeshConfig(**{"data": 1, axis: 2}).sizes(2)
    with nullcontext() if message is None else pytest.raises(SettingError, match=message):
        check_mesh(model, sizes, 8)


def test_a_size_of_the_encoder_alone_is_named_as_its_setting():
    model = changes(MODEL, {"architecture": "encoder-decoder", "encoder.num_heads": 3})
    with pytest.raises(SettingError, match=r"model\.encoder\.num_heads of size 3 .* mesh\.tensor=2"):
        check_mesh(model, mesh_of(1, 1, 2).sizes(2), 8)


def test_an_axis_that_the_tables_lack_is_refused():
    mesh = sharding.make_mesh(MeshConfig())

    class Misspelt(nnx.Module):
        def __init__(self, axes):
            self.kernel = nnx.Param(jnp.zeros((12, 6)), axes=axes)

    with pytest.raises(SettingError, match="parameter kernel has the axis 'embedd'.*did you mean 'embed'"):
        sharding.parameter_shardings(Misspelt(("embedd", "mlp")), mesh)
    with pytest.raises(SettingError, match="parameter kernel of shape"):
        sharding.parameter_shardings(Misspelt(None), mesh)
    with pytest.raises(SettingError, match="'heats'.*did you mean 'heads'"):
        sharding.constrain(jnp.zeros((2, 2)), "batch", "heats")
    with pytest.raises(SettingError, match="parameter kernel: axis 'embed' of size 12 cannot .* mesh.fsdp=8"):
        sharding.parameter_shardings(
            Misspelt(("embed", "mlp")), sharding.make_mesh(MeshConfig(fsdp=8, data=1))
        )


@pytest.mark.parametrize(
    "names",
    [
        "sequence mine",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("data", "mine", "fsdp tensor", "tensor")),
    ],
)
def test_an_axis_that_a_mesh_lacks_is_one_device(names):
    names = names.split()
    mesh = jax.make_mesh((2,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
    whole = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    batch, results = transformer_batch(0), []
    for each in (mesh, whole):
        steps = build(StepSpec(MODEL), each)
        state, metrics = steps.seeded_train_step(0)(drawn_state(steps), sharding.put_batch(batch, each))
        with jax.set_mesh(each):
            logits = jax.jit(lambda model, batch: model(batch))(state.eval_model, batch)
        results.append((float(metrics["loss"]), float(metrics["grad_norm"]), np.asarray(logits)))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_explicit_axes_are_refused_in_one_sentence_that_says_what_to_pass():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit, AxisType.Auto))
    message = r"mesh axes data are Explicit.*pass axis_types=\(jax.sharding.AxisType.Auto,\) \* 2"
    with pytest.raises(SettingError, match=message):
        build(StepSpec(MODEL), mesh)
    with pytest.raises(SettingError, match=message):
        sharding.put_batch(transformer_batch(0), mesh)
    model = StepSpec(MODEL).make_model(jax.random.key(0))
    with jax.set_mesh(mesh), pytest.raises(SettingError, match=message):
        model(transformer_batch(0))


def test_constrain_places_by_name_and_does_nothing_without_a_mesh():
    x = jnp.zeros((8, 3, 4))
    assert sharding.constrain(x, "batch", "length", "mlp") is x
    with jax.set_mesh(sharding.make_mesh(mesh_of(2, 2, 2))):
        placed = jax.jit(lambda x: sharding.constrain(x, "batch", "length", "mlp"))(x)
        with pytest.raises(SettingError, match="axis 'batch' of size 3"):
            sharding.constrain(jnp.zeros((3, 1)), "batch", "length")
    assert placed.sharding.spec == P(("data", "fsdp"), None, "tensor")


def test_the_optimiser_lives_where_its_parameter_lives():
    abstract = toy.steps(2, 2, 2).abstract
    places = {name: leaf.sharding.spec for name, leaf in sharding.named(abstract).items()}
    assert places["params.blocks"] == P(None, "fsdp", "tensor")  # [layers,D,F]
    found = {
        name.split(".", 3)[-1]: spec for name, spec in places.items() if name.startswith("opt_state.0.2")
    }
    assert found["0.v_row.blocks"] == P(None, "fsdp") and found["0.v_col.blocks"] == P(None, "tensor")
    assert found["0.v.scale"] == places["params.scale"] == P(None, None)
    moments = toy.steps(2, 2, 2, optimizer=OptimizerConfig(name="adamw")).abstract
    places = {name: leaf.sharding.spec for name, leaf in sharding.named(moments).items()}
    assert places["opt_state.0.0.mu.table"] == places["params.table"] == P("tensor", "fsdp")


class Square(nnx.Module):
    """Matrices whose rows and columns only their order tells apart, by themselves and stacked."""

    def __init__(self, rngs):
        self.one = param(jnp.zeros((8, 8)), "embed", "mlp")
        self.stack = nnx.Param(jnp.zeros((8, 8, 8)), axes=("embed", "mlp"))


def places_of(init):
    """{name: spec} of what an optimiser remembers of the squares."""
    model, mesh = Square(nnx.Rngs(0)), sharding.make_mesh(mesh_of(1, 4, 2))
    found = sharding.optimizer_state_shardings(init, model, sharding.parameter_shardings(model, mesh))
    return {name: place.spec for name, place in sharding.named(found).items()}


def test_a_square_matrix_has_its_rows_and_columns_told_apart():
    config = OptimizerConfig(factor_from=8, momentum=0.9, clip_rms=None, relative="none")
    init = update_direction(config, sharding.logical_axes(Square(nnx.Rngs(0)))).init
    found = {name.split(".", 1)[1]: spec for name, spec in places_of(init).items()}
    assert (found["0.0.v_row.one"], found["0.0.v_col.one"]) == (P("fsdp"), P("tensor"))
    assert (found["8.0.v_row.stack"], found["8.0.v_col.stack"]) == (P(None, "fsdp"), P(None, "tensor"))
    assert (found["0.1.ema.one"], found["8.1.ema.stack"]) == (P("fsdp", "tensor"), P(None, "fsdp", "tensor"))
    assert (found["0.0.v.one"], found["8.0.v.stack"], found["0.0.count"]) == (P(None), P(None, None), P())


def test_gradients_are_laid_out_as_their_parameters():
    spec, mesh = StepSpec(MODEL), sharding.make_mesh(mesh_of(1, 4, 2))
    steps, seed = build(spec, mesh), jax.ShapeDtypeStruct((), np.uint32)
    tokens = jax.ShapeDtypeStruct((8, 4), np.int32)
    weights = jax.ShapeDtypeStruct((8, 4), np.float32)
    batch = Batch(decoder=Side(tokens=tokens, targets=tokens, loss_weights=weights))
    program = str(steps.jit_train_step.trace(steps.abstract, batch, seed).jaxpr)
    constrained = re.findall(r":(f32\[[\d,]+\]) = sharding_constraint\[", program)
    shapes = [f"f32[{','.join(map(str, x.shape))}]" for x in steps.abstract.params.values()]
    assert not Counter(shapes) - Counter(constrained)


def test_an_optimiser_nobody_thought_of_lives_where_its_parameters_do_and_is_never_held_everywhere_unasked():
    assert places_of(optax.scale_by_lion().init)["mu.one"] == P("fsdp", "tensor")
    columns = places_of(lambda params: {"of": {name: jnp.zeros(x.shape[-1:]) for name, x in params.items()}})
    assert columns == {"of.one": P("tensor"), "of.stack": P("tensor")}
    with pytest.raises(SettingError, match=r"\['one'\] of shape \(8, 8\) has other axes than the parameter"):
        places_of(lambda params: {"one": jnp.zeros((8, 8))})  # covariances of rows


def test_a_process_feeds_each_row_that_its_devices_hold_once(monkeypatch):
    def feeding(rows):
        place = SimpleNamespace(addressable_devices_indices_map=lambda shape: dict(enumerate(rows)))
        monkeypatch.setattr(sharding, "batch_sharding", lambda mesh: place)
        return [row for rows in sharding.process_rows(None, 8) for row in range(8)[rows]]

    assert feeding([(slice(4, 6),), (slice(6, 8),)]) == [4, 5, 6, 7]
    assert feeding([(slice(2, 4),), (slice(2, 4),)]) == [2, 3]
    assert feeding([(slice(None),)]) == [*range(8)]
    assert feeding([(slice(4, 6),), (slice(0, 2),)]) == [0, 1, 4, 5]


def arrangements(devices, axes):
    """Every way to multiply ``axes`` sizes to so many devices."""
    if axes == 1:
        return [(devices,)]
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return [(n, *rest) for n in sizes for rest in arrangements(devices // n, axes - 1)]


QUICK = [(2, 1, 2, 1, 1, 2)]  # an axis of sequences is tried above
AXES = [f.name for f in fields(MeshConfig)]
EVERY = [
    pytest.param(sizes, marks=[] if sizes in QUICK else pytest.mark.slow)
    for sizes in arrangements(8, len(AXES))
]


def steps_on(config, devices, loss_chunks=1, **optimizer):
    model = changes(
        MODEL,
        {
            "architecture": "encoder-decoder",
            "attention.num_heads": 8,
            "attention.d_kv": 2,
            "compile.layers": "unroll",
            "compile.loss_chunks": loss_chunks,
        },
    )
    optimizer = OptimizerConfig(**{"factor_from": 16} | optimizer)
    return build(StepSpec(model, optimizer), sharding.make_mesh(config, devices))


@pytest.fixture(scope="module")
def alone():
    return trained(steps_on(MeshConfig(), jax.devices()[:1]))


def test_the_first_parameters_on_eight_devices_are_those_on_one():
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    one = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    whole, split = (build(StepSpec(MODEL), each).initial_state(0).params for each in (one, mesh))
    for name, value in whole.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("sizes", EVERY, ids=lambda sizes: "x".join(map(str, sizes)))
def test_a_transformer_trains_alike_on_one_device_and_in_every_arrangement_of_eight(sizes, alone):
    assert_trains_alike(trained(steps_on(MeshConfig(*sizes), jax.devices())), alone)


def assert_trains_alike(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_losses_in_chunks_on_eight_devices_are_those_of_whole_rows_on_one(alone):
    eight = steps_on(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices(), loss_chunks=2)
    assert_trains_alike(trained(eight), alone)


# ---- experts, each on one of the devices of an axis

EXPERTS = changes(
    MODEL,
    {
        "architecture": "encoder-decoder",
        "attention.num_heads": 8,
        "attention.d_kv": 2,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "experts.count": 4,
        "experts.per_token": 2,
        "experts.every": 2,
        "experts.capacity_factor": 1.0,
        "experts.z_loss": 0.001,
    },
)


def steps_with_experts(config, devices, **new):
    # Adafactor's first updates of parameters with hardly any gradient are rounding errors of full size.
    optimizer = OptimizerConfig(name="adamw", learning_rate=0.01, epsilon=1e-3)
    return build(StepSpec(changes(EXPERTS, new), optimizer), sharding.make_mesh(config, devices))


@pytest.mark.parametrize(
    ("mesh", "new"),
    [
        (MeshConfig(data=2, expert=4), {"architecture": "decoder"}),
        pytest.param(MeshConfig(data=2, expert=4), {}, marks=pytest.mark.slow),
        pytest.param(
            MeshConfig(data=1, fsdp=2, expert=2, tensor=2),
            {"experts.exploration": "jitter"},
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshConfig(data=1, expert=4, sequence=2), {}, marks=pytest.mark.slow),
        pytest.param(MeshConfig(slice=2, fsdp=2, data=1, expert=2), {}, marks=pytest.mark.slow),
        pytest.param(MeshConfig(data=2, fsdp=2, tensor=2), {}, marks=pytest.mark.slow),
        pytest.param(MeshConfig(data=2, expert=4), {"experts.capacity_factor": None}, marks=pytest.mark.slow),
        pytest.param(
            MeshConfig(data=2, expert=2, tensor=2), {"experts.group_rows": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_experts_train_alike_on_one_device_and_spread_over_eight(mesh, new):
    one, params = trained(steps_with_experts(MeshConfig(), jax.devices()[:1], **new))
    steps = steps_with_experts(mesh, jax.devices(), **new)
    kernel = steps.abstract.params["decoder.blocks.experts.hidden.kernel"]
    shard = 1, 4 // mesh.expert, 16 // mesh.fsdp, 32 // mesh.tensor  # one layer, experts, D, F
    assert kernel.sharding.shard_shape(kernel.shape) == shard
    eight, others = trained(steps)
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    for name, value in params.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_devices_exchange_tokens_twice_in_a_layer_with_experts_and_never_its_matrices():
    steps = steps_with_experts(MeshConfig(data=2, expert=4), jax.devices(), architecture="decoder")
    batch = jax.eval_shape(lambda: steps.shard_batch(transformer_batch(0)))
    batch = batch.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.batch_sharding(steps.mesh))
    )
    seed = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(steps.mesh))
    program = steps.jit_train_step.lower(steps.abstract, batch, seed).compile().as_text()
    assert len(re.findall(r"= .* all-to-all(-start)?\(", program)) == 4  # there and back, and their gradients
    matrices = [line for line in program.splitlines() if "all-gather" in line and "16,32]" in line]
    assert not matrices


@pytest.mark.parametrize(
    ("sizes", "new", "message"),
    [
        ({"expert": 8}, {}, r"model.experts.count of size 4 cannot be split over mesh.expert=8"),
        ({"expert": 2}, {"experts.group_rows": 8}, "model.experts.group_rows=8 does not divide"),
    ],
)
def test_experts_and_groups_that_do_not_divide_are_refused_before_anything_compiles(sizes, new, message):
    mesh = MeshConfig(data=1, **sizes).sizes(sizes["expert"])
    with pytest.raises(SettingError, match=message):
        check_mesh(changes(EXPERTS, new), mesh, 8)


@pytest.mark.slow
def test_muon_with_a_mean_of_the_parameters_trains_alike_on_one_device_and_on_eight():
    # Adam's first step on a gradient that is zero but for rounding is anything up to the rate: so that is 0
    new = {"name": "muon", "learning_rate": 0.01, "schedule": "constant", "warmup_steps": 1, "ema": 0.9}
    sizes = [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)]
    one, eight = (
        steps_on(mesh, jax.devices()[:count], **new) for mesh, count in zip(sizes, (1, 8), strict=True)
    )
    places = {name: leaf.sharding.spec for name, leaf in sharding.named(eight.abstract).items()}
    kernel = "encoder.blocks.mlp.hidden.kernel"
    (momentum,) = (name for name in places if name.endswith(f"trace.{kernel}"))
    assert (
        places[momentum]
        == places[f"average.{kernel}"]
        == places[f"params.{kernel}"]
        == P(None, "fsdp", "tensor")
    )
    (found, params), (others, split) = trained(one), trained(eight)
    np.testing.assert_allclose(others, found, rtol=1e-4)
    for name, value in params.items():
        np.testing.assert_allclose(split[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_training_step_and_decoding_lower_for_a_gpu():
    steps = steps_on(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())
    batch, seed = steps.shard_batch(transformer_batch(0)), jax.ShapeDtypeStruct((), np.uint32)
    writing = jax.jit(partial(greedy, max_length=3))
    for traced in (
        steps.jit_train_step.trace(steps.abstract, batch, seed),
        writing.trace(steps.abstract.eval_model, batch),
    ):
        assert "dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_no_device_ever_holds_the_logits_of_the_whole_vocabulary():
    def program(fsdp, tensor):
        steps = steps_on(MeshConfig(data=1, fsdp=fsdp, tensor=tensor), jax.devices()[: fsdp * tensor])
        batch = jax.eval_shape(lambda: steps.shard_batch(transformer_batch(0)))
        batch = batch.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.batch_sharding(steps.mesh))
        )
        seed = jax.ShapeDtypeStruct((), np.uint32, sharding=sharding.replicated(steps.mesh))
        return steps.jit_train_step.lower(steps.abstract, batch, seed).compile().as_text()

    logits = rf"f32\[[0-9]+,6,{MODEL.vocab_size}\]"  # [rows,T,V]
    assert re.search(logits, program(2, 1))
    assert not re.search(logits, program(2, 4))


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:4x4", "v5p:2x2x4"])
def test_every_arrangement_of_a_slice_of_a_tpu_can_be_made(name):
    devices = list(get_topology_desc(platform="tpu", topology_name=name).devices)
    for sizes in arrangements(len(devices), 3):
        assert sharding.make_mesh(mesh_of(*sizes), devices).size == len(devices)
