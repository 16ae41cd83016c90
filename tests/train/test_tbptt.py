"""Rows that last several steps, over which a recurrent state is carried: truncated backpropagation."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_training
import small_models
import toy
from flax import nnx
from golden.make_batches import pretraining

from experiments.runs.checks import check_tbptt
from experiments.study.registry import build
from lm.config.base import SettingError, changes
from lm.config.mesh import MeshConfig
from lm.config.training import GuardConfig, LossConfig, OptimizerConfig, TruncatedBPTT
from lm.data.batches import Batches, TBPTTRows, stream
from lm.nn.transformer import Transformer
from lm.objectives.denoising import OBJECTIVES
from lm.sharding import make_mesh
from lm.train import step as training
from lm.train.losses import carried_language_model, language_model, masked_lm
from lm.train.step import StepSpec

PARTS, LENGTH, ROWS = 3, 16, 6
STILL = OptimizerConfig("adamw", learning_rate=1e-30, schedule="constant")
OBJECTIVE = replace(OBJECTIVES["language-model"], eos="between-documents")


@cache
def batches():
    """Of rows that last PARTS steps, and of the whole rows."""
    whole = pretraining(OBJECTIVE, "decoder", PARTS * LENGTH)
    lengths = pretraining(OBJECTIVE, "decoder", LENGTH).lengths
    return Batches(TBPTTRows(whole.row_source, lengths, ROWS, PARTS), ROWS), whole


def test_the_parts_of_a_row_one_after_the_other_are_the_row_whoever_asks_for_which():
    lasting, whole = batches()
    assert lasting.lengths.targets == LENGTH
    for row in range(2):
        parts = [lasting(row * PARTS + part, slice(None)) for part in range(PARTS)]
        features = [part.features() for part in parts]
        for name, values in whole(row, slice(None)).features().items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in features], axis=1), values)
    some = slice(1, 4)
    hosts = stream(lasting, 0, 2 * PARTS, rows=(some,), workers=1)
    for step, batch in enumerate(hosts):
        for name, values in lasting(step, slice(None)).features().items():
            np.testing.assert_array_equal(batch.features()[name], values[some])


def model_of(mixer, **new):
    tiny = {"architecture": "decoder", "positions.kind": "none", "vocab_size": 400, "mixer.kind": mixer}
    return changes(small_models.TINY, tiny | new)


def losses(spec, batches, count):
    """Of the first steps."""
    steps = training.build(spec, make_mesh(MeshConfig(), jax.devices()[:1]))
    state, train = steps.initial_state(0), steps.seeded_train_step(0)
    found = []
    for step in range(count):
        state, metrics = train(state, steps.shard_batch(batches(step, slice(None))))
        found.append((float(metrics["loss"]), float(metrics["tokens"])))
    return np.array(found)


SLOW = [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("gru", "scan"), ("rnn", "unroll"))]


@pytest.mark.slow
@pytest.mark.parametrize("mixer, layers", [("lstm", "unroll"), *SLOW])
def test_a_model_that_does_not_learn_has_over_the_parts_of_a_row_the_loss_of_the_row(mixer, layers):
    lasting, whole = batches()
    spec = StepSpec(model_of(mixer, dropout=0.0, **{"compile.layers": layers}), STILL)
    parts = losses(replace(spec, tbptt=TruncatedBPTT(ROWS, PARTS)), lasting, 2 * PARTS)
    rows = losses(spec, whole, 2)
    sums = (parts[:, 0] * parts[:, 1]).reshape(2, PARTS).sum(1)
    np.testing.assert_allclose(sums / rows[:, 1], rows[:, 0], rtol=1e-6)
    alone = losses(spec, lasting, 2 * PARTS)  # a state that is not carried: only the rows' starts are alike
    starts = np.arange(2 * PARTS) % PARTS == 0
    np.testing.assert_allclose(alone[starts], parts[starts], rtol=1e-6)
    assert (np.abs(alone[~starts, 0] - parts[~starts, 0]) > 1e-4).all()


def test_a_carry_goes_in_as_an_argument_and_comes_out_as_a_result_and_is_no_metric():
    lasting, _ = batches()
    config = model_of("lstm")
    model = jax.jit(lambda: Transformer(config, nnx.Rngs(params=0)))()
    carried = jax.jit(partial(carried_language_model, key=None, config=LossConfig()))
    plain = jax.jit(partial(language_model, key=None, config=LossConfig()))
    batch, zeros = lasting(0, slice(None)), model.decoder.init_carry(ROWS, 0)
    loss, sums, carry = carried(model, batch, zeros)
    alone, alone_sums = plain(model, batch)
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    assert sums.keys() == alone_sums.keys()
    assert jax.tree.map(jnp.shape, carry) == jax.tree.map(jnp.shape, zeros)
    second = lasting(1, slice(None))
    assert abs(float(carried(model, second, carry).loss) - float(plain(model, second)[0])) > 1e-3


@pytest.mark.parametrize("new", [{"loss": masked_lm}, {"microbatches": 2}])
def test_a_loss_that_carries_no_state_is_refused(new):
    with pytest.raises(SettingError, match="tbptt carries the state of a language_model"):
        StepSpec(model_of("lstm"), tbptt=TruncatedBPTT(ROWS, PARTS), **new)


# one step for both of the following, which takes the time to compile
LASTING = {
    "model": model_of("lstm", vocab_size=toy.MODEL.vocab_size, dropout=0.5),
    "module": Transformer,
    "tbptt": TruncatedBPTT(toy.ROWS, PARTS),
}
SKIP = GuardConfig(non_finite="skip")


def test_an_update_that_is_left_out_leaves_the_state_as_it_was():
    steps = toy.steps(guard=SKIP, **LASTING)
    state, train = steps.initial_state(0), steps.seeded_train_step(0)
    state, _ = train(state, steps.shard_batch(toy.batch(0)))
    before = jax.device_get(state.carry)
    assert any(leaf.any() for leaf in jax.tree.leaves(before))
    state, metrics = train(state, steps.shard_batch(toy.batch(1, poison=[1])))
    assert metrics["skipped_updates"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.carry), before)
    state, _ = train(state, steps.shard_batch(toy.batch(PARTS - 1)))
    state, metrics = train(state, steps.shard_batch(toy.batch(PARTS, poison=[PARTS])))
    assert metrics["skipped_updates"] == 1, "the first part of the next row"
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(jax.device_get(state.carry)))


def test_a_run_in_two_sessions_is_the_run_in_one_bit_for_bit_in_the_midst_of_rows_too(tmp_path):
    for total in (4, 8):  # neither begins a row
        resumed = toy.run(tmp_path / "two", total, guarding=SKIP, **LASTING)
    one = toy.numbers(toy.run(tmp_path / "one", 8, guarding=SKIP, **LASTING))
    assert toy.numbers(resumed) == one
    assert any(name.startswith("carry") for name in one)


@pytest.mark.slow
def test_a_carried_state_trains_alike_on_one_device_and_on_eight():
    model = changes(
        sharded_training.MODEL,
        {
            "mixer.kind": "lstm",
            "mixer.width": 12,
            "positions.kind": "none",
            "attention.num_heads": 8,
            "attention.d_kv": 2,
        },
    )
    rows = len(sharded_training.transformer_batch(0).decoder.tokens)
    spec = StepSpec(model, OptimizerConfig(factor_from=16), tbptt=TruncatedBPTT(rows, PARTS))
    meshes = (MeshConfig(), 1), (MeshConfig(data=2, fsdp=2, tensor=2), 8)
    (one, params), (eight, others) = (
        sharded_training.trained(training.build(spec, make_mesh(mesh, jax.devices()[:devices])))
        for mesh, devices in meshes
    )
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    for name, value in params.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "row, new, named",
    [
        ("history/transformer", {}, "model.mixer.kind='attention'"),
        ("history/lstm", {"objective.eos": "each-example"}, "objective.eos='each-example'"),
        ("history/lstm", {"pretraining.microbatches": 2}, "pretraining.microbatches=2"),
        ("seq2seq/dot", {}, "model.architecture='encoder-decoder'"),
    ],
)
def test_what_cannot_last_is_refused_by_the_names_of_both_settings(row, new, named):
    check_tbptt(build("history/lstm", "nano", {"pretraining.steps_per_row": 4}))
    with pytest.raises(SettingError, match=named) as error:
        check_tbptt(build(row, "nano", {"pretraining.steps_per_row": 4} | new))
    assert "pretraining.steps_per_row=4" in str(error.value)
