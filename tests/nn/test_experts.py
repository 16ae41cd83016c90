"""Laws of layers with experts inside of models, and of what they add to the loss."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import drawn_state
from flax import nnx
from small_models import CONFIGS, EXPERTS, TINY, example, loss_and_gradients, made, make, run

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes, unused_settings
from lm.config.mesh import MeshConfig
from lm.config.model import HeadConfig, ModelConfig
from lm.config.training import LossConfig
from lm.nn.experts import ExpertMLP
from lm.nn.finetune import ModelWithHead
from lm.nn.mlp import MLP
from lm.sharding import make_mesh, named
from lm.train.losses import language_model, masked_lm, supervised_loss
from lm.train.step import StepSpec, build

KEY = jax.random.key(3)
DECODER = changes(TINY, EXPERTS | {"architecture": "decoder", "dropout": 0.0})


def layer_of(**new):
    config = changes(DECODER, {f"experts.{name}": value for name, value in new.items()})
    return ExpertMLP(config, nnx.Rngs(params=jax.random.key(0)))


X = np.asarray(jax.random.normal(jax.random.key(1), (4, 12, TINY.d_model)))
SEGMENTS = np.ones((4, 12), int)


@partial(jax.jit, static_argnames="keeps_all")
def computed(layer, x, segments, key, keeps_all):
    return layer(x, segments, None, key, keeps_all)


def output(layer, x=X, segments=SEGMENTS, key=None, keeps_all=False):
    return jax.tree.map(np.asarray, computed(layer, x, segments, key, keeps_all))


@pytest.mark.parametrize("activation", ["relu", "gated-silu"])
def test_one_expert_with_room_for_all_is_a_feed_forward_layer(activation):
    new = {"mlp.activation": activation, "mlp.bias": True, "experts.count": 1, "experts.per_token": 1}
    config = changes(DECODER, new)
    layer, dense = (cls(config, nnx.Rngs(params=jax.random.key(0))) for cls in (ExpertMLP, MLP))
    expert = named(layer)
    arrays = [expert[name][0] + ("bias" in name) for name in named(dense)]
    dense = jax.tree.unflatten(jax.tree.structure(dense), arrays)
    for name in ("hidden", "linear", "out"):
        if getattr(layer, name) is not None:
            bias = getattr(layer, name).bias
            bias[...] = bias[...] + 1
    np.testing.assert_allclose(output(layer)[0], jax.jit(MLP.__call__)(dense, X, None), atol=1e-5)


def test_with_a_capacity_that_drops_nothing_experts_compute_what_they_do_without():
    # 3.6 / 4 of 12 tokens: 11 slots for each expert, and no expert is chosen by all tokens
    roomy, unlimited = layer_of(capacity_factor=3.6), layer_of(capacity_factor=None)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradients_and_outputs(layer, x):
        out, router = layer(x, SEGMENTS, None, KEY, False)
        return jnp.sin(out).sum(), (out, router)

    (found, (out, router)), (expected, (due, _)) = (
        gradients_and_outputs(layer, X) for layer in (roomy, unlimited)
    )
    assert (router.dropped == 0).all()
    np.testing.assert_allclose(out, due, atol=1e-5)
    for name, value in named(expected).items():
        np.testing.assert_allclose(named(found)[name], value, atol=1e-4, err_msg=name)


def test_a_dropped_token_adds_nothing_and_is_counted():
    layer = layer_of(capacity_factor=0.5, per_token=1)
    out, router = output(layer, key=KEY)
    is_zero = (out == 0).all(-1)
    np.testing.assert_allclose(router.dropped, is_zero.mean(1))
    assert 0 < router.dropped.mean() < 1
    assert (output(layer)[1].dropped == 0).all()  # evaluation has room for all
    limited = layer_of(capacity_factor=2.0, per_token=1, eval_capacity_factor=0.5)
    np.testing.assert_array_equal(output(limited)[0], out)
    assert (output(limited, keeps_all=True)[1].dropped == 0).all()


@pytest.mark.slow
def test_in_evaluation_an_expert_reads_the_first_tokens_of_each_text_up_to_its_capacity_packed_or_alone():
    layer, free = layer_of(per_token=1, eval_capacity=2, group_rows=4), layer_of(per_token=1)
    chosen = np.asarray(layer.router(jnp.asarray(X))).argmax(-1)
    segments = np.repeat([[1, 2, 0]], [7, 4, 1], axis=1).repeat(4, 0)
    out, router = output(layer, segments=segments)
    is_read = np.zeros((4, 12), bool)
    for text in (slice(0, 7), slice(7, 11)):
        for row in range(4):
            taken = [list(chosen[row, text][: t + 1]).count(e) for t, e in enumerate(chosen[row, text])]
            is_read[row, text] = np.array(taken) <= 2
        alone = output(layer, X[:, text], np.ones((4, text.stop - text.start), int))[0]
        np.testing.assert_allclose(out[:, text], alone, atol=1e-6)
    np.testing.assert_allclose(out, np.where(is_read[..., None], output(free)[0], 0), atol=1e-6)
    np.testing.assert_allclose(router.dropped, 1 - is_read.sum(1) / 11, atol=1e-6)
    np.testing.assert_array_equal(output(layer, keeps_all=True)[0], output(free)[0])
    trained = layer_of(per_token=1, group_rows=4)
    np.testing.assert_array_equal(output(layer, key=KEY)[0], output(trained, key=KEY)[0])


def test_rows_are_alone_in_their_groups_unless_they_share_one():
    alone, shared = layer_of(capacity_factor=0.8), layer_of(capacity_factor=0.8, group_rows=2)
    one = output(alone, X[:1], SEGMENTS[:1], key=KEY)[0]
    np.testing.assert_allclose(output(alone, key=KEY)[0][:1], one, atol=1e-5)
    found, router = output(shared, key=KEY)
    assert (
        np.abs(found[:1] - one).max() > 1e-3 or np.abs(found[1] - output(alone, key=KEY)[0][1]).max() > 1e-3
    )
    assert router.dropped.shape == (4,) and router.dropped[0] == router.dropped[1]
    # A number of rows that the group does not divide is split by what divides both.
    grouped = layer_of(group_rows=4)
    found, _ = jax.eval_shape(lambda x: grouped(x, SEGMENTS[:2], None, None, False), X[:2])
    assert found.shape == X[:2].shape


@pytest.mark.parametrize("exploration", ["jitter", "dropout", "sample"])
def test_a_router_explores_in_training_alone_and_by_its_key(exploration):
    plain, layer = layer_of(), layer_of(exploration=exploration, noise=0.5)
    np.testing.assert_array_equal(output(layer)[0], output(plain)[0])
    one, again, two = (output(layer, key=jax.random.key(k))[0] for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - two).max() > 1e-3
    assert np.abs(one - output(plain, key=KEY)[0]).max() > 1e-3


def test_the_weights_of_drawn_experts_sum_to_1_as_those_of_the_likeliest_do():
    layer = layer_of(exploration="sample", per_token=2, normalized=True)
    logits = jax.random.normal(jax.random.key(1), (3, 7, layer.config.experts.count))
    for key in (None, KEY):
        choices = layer._choose(logits, key)
        np.testing.assert_allclose(choices.weights.sum(-1), 1, rtol=1e-6)
        ratio = jnp.take_along_axis(choices.probabilities, choices.experts, -1)
        np.testing.assert_allclose(choices.weights, ratio / ratio.sum(-1, keepdims=True), rtol=1e-6)


def test_experts_may_have_a_dropout_of_their_own():
    config = changes(DECODER, {"experts.dropout": 0.5})
    model, batch = made(config), example(1, 5, 6)
    assert np.abs(run(model, batch, jax.random.key(1)) - run(model, batch, jax.random.key(2))).max() > 1e-3
    np.testing.assert_array_equal(run(model, batch), run(made(DECODER), batch))
    still = made(changes(TINY, EXPERTS | {"architecture": "decoder", "experts.dropout": 0.0}))
    assert np.abs(run(still, batch, KEY) - run(still, batch)).max() > 1e-3  # the block's own dropout


def test_experts_may_have_a_width_of_their_own():
    half = changes(TINY, EXPERTS | {"mlp.d_ff": 8, "experts.d_ff": 4, "experts.every": 2, "dropout": 0.5})
    shapes = {name: leaf.shape for name, leaf in named(made(half)).items()}
    assert {shape[-1] for name, shape in shapes.items() if name.endswith("experts.hidden.kernel")} == {4}
    assert {shape[-1] for name, shape in shapes.items() if name.endswith("mlp.hidden.kernel")} == {8}
    batch = example(1, 5, 6)
    assert np.abs(run(made(half), batch, KEY) - run(made(half), batch)).max() > 1e-3  # dropout of both widths
    same = changes(half, {"experts.d_ff": 8})
    np.testing.assert_array_equal(
        run(made(same), batch), run(made(changes(half, {"experts.d_ff": None})), batch)
    )


def test_an_expert_drops_features_of_its_own_hidden_layer_at_the_rate_of_the_model():
    layer = ExpertMLP(changes(DECODER, {"experts.d_ff": 40, "dropout": 0.25}), nnx.Rngs(params=KEY))
    mask = np.asarray(layer._own_dropout_mask(KEY, 500))
    assert mask.shape == (500, 1, 40)
    assert abs(mask.mean() - 0.75) < 4 * (0.75 * 0.25 / mask.size) ** 0.5


NAMES = ["experts", "decoder, experts in every second layer", "encoder, one expert per token"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != NAMES[1])) for name in NAMES]
)
def test_scanned_unrolled_and_recomputed_stacks_with_experts_give_the_same_gradients(name):
    batch, key = example(4, 5, 6), jax.random.key(7)
    expected = loss_and_gradients(make(name), batch, key)
    assert all(np.abs(value).max() > 0 for value in expected.values())
    for settings in ({"compile.remat": "full"}, {"compile.remat": "dots", "compile.layers": "unroll"}):
        found = loss_and_gradients(make(name, **settings), batch, key)
        for parameter, value in expected.items():
            np.testing.assert_allclose(found[parameter], value, atol=2e-5, err_msg=f"{settings} {parameter}")


def test_in_training_too_a_decoder_reads_no_later_token():
    model = make("decoder, experts in every second layer", dropout=0.0)
    batch = example(3, 5, 9)
    later = batch.decoder.tokens.copy()
    later[:, 6:] = later[:, :3]
    changed = replace(batch, decoder=replace(batch.decoder, tokens=later))
    before, after = (run(model, each, KEY) for each in (batch, changed))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.abs(before[:, 6:] - after[:, 6:]).max() > 1e-3


def test_every_second_layer_has_experts_and_the_others_a_feed_forward_layer():
    blocks = made(changes(DECODER, {"experts.every": 2, "num_decoder_layers": 5})).decoder.blocks
    assert blocks.mlp.hidden.kernel.shape == (3, 16, 24)
    assert blocks.experts.hidden.kernel.shape == (2, 4, 16, 24)
    assert blocks.attention.query.kernel.shape[0] == blocks.mlp_norm.scale.shape[0] == 5
    whole = made(DECODER).decoder.blocks
    assert whole.mlp is None and whole.experts.router.kernel.shape == (2, 16, 4)


def test_decoding_drops_no_token_that_evaluation_would_drop():
    config = changes(DECODER, {"experts.eval_capacity_factor": 0.3})
    limited, free = made(config), made(DECODER)
    tokens = example(3, 5, 10).decoder.tokens

    @jax.jit
    def cached(model):
        first, cache = model.prefill(Batch(decoder=Side(tokens=tokens[:, :-1])), 11)
        model, cache = model.unstack(cache)
        return first, model.step(tokens[:, -1], cache)[0]

    due, dropping = (np.asarray(run(model, Batch(decoder=Side(tokens=tokens)))) for model in (free, limited))
    assert np.abs(dropping - due)[:, :-1].max() > 1e-3
    for found, expected in zip(cached(limited), (due[:, -2], due[:, -1]), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


ENCODER = changes(TINY, {"architecture": "encoder", "experts.count": 4, "experts.kind": "expert-choice"})


def test_with_expert_choice_an_encoder_trains_and_each_expert_reads_its_capacity():
    batch = example(4, 9, 6)
    gradients = loss_and_gradients(made(ENCODER), batch, KEY)
    assert all(np.abs(value).max() > 0 for name, value in gradients.items() if "experts" in name)
    assert run(made(ENCODER), batch).shape == (1, 9, 40)


# ---- losses and metrics


def batch_of(rows, length=8, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(2, 40, (rows, length)).astype(np.int32)
    side = Side(
        tokens=tokens,
        targets=np.roll(tokens, -1, 1),
        loss_weights=np.ones((rows, length), np.float32),
        segment_ids=np.ones((rows, length), np.int32),
    )
    return Batch(encoder=side, decoder=side)


@pytest.mark.parametrize(
    "name", [pytest.param("experts", marks=pytest.mark.slow), "decoder, experts in every second layer"]
)
def test_the_losses_of_all_routers_are_added_and_logged_without_their_weights(name):
    batch, sums = batch_of(3), []
    for weights in ((0.0, 0.0), (2.0, 0.0), (0.0, 3.0)):
        new = {"experts.balance_loss": weights[0], "experts.z_loss": weights[1], "dropout": 0.0}
        model = made(changes(CONFIGS[name], new))
        sums.append(jax.jit(lambda model: language_model(model, batch, KEY, LossConfig(z_loss=0.0)))(model))
    (plain, metrics), (balanced, _), (small, _) = sums
    layers = CONFIGS[name].num_expert_layers
    assert layers == (4 if name == "experts" else 1)
    assert balanced - plain == pytest.approx(2 * layers * float(metrics["balance_loss"][0]), rel=1e-3)
    assert small - plain == pytest.approx(3 * layers * float(metrics["router_z_loss"][0]), rel=1e-3)
    total = float(metrics["loss"][1])
    assert float(metrics["balance_loss"][0]) / total >= 0.99
    assert 0 <= float(metrics["dropped_tokens"][0]) / total < 1
    assert plain == pytest.approx(float(metrics["loss"][0]), rel=1e-6)


def steps_of(model=CONFIGS["decoder"], **spec):
    return build(StepSpec(model, **spec), make_mesh(MeshConfig(data=1), jax.devices()[:1]))


def trained(steps, count=2):
    state, metrics = drawn_state(steps), []
    for step in range(count):
        state, found = steps.seeded_train_step(0)(state, steps.shard_batch(batch_of(4, seed=step)))
        metrics.append({name: float(value) for name, value in found.items()})
    return state, metrics


@pytest.mark.slow
def test_micro_batches_give_the_gradients_and_metrics_of_the_whole_batch():
    model = changes(DECODER, {"experts.capacity_factor": 0.7})
    for one, other in zip(*(trained(steps_of(model, microbatches=n))[1] for n in (1, 2)), strict=True):
        assert one.keys() == other.keys() >= {"balance_loss", "router_z_loss", "dropped_tokens"}
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_evaluation_reports_the_routers_and_drops_nothing():
    steps = steps_of(DECODER)
    found = steps.evaluate(drawn_state(steps), [batch_of(4), batch_of(4, seed=1)])
    assert found["dropped_tokens"] == 0 and 0.99 <= found["balance_loss"] <= 4


def test_a_model_without_experts_has_no_metric_of_them():
    steps = steps_of()
    _, metrics = jax.eval_shape(steps.seeded_train_step(0), steps.abstract, steps.shard_batch(batch_of(4)))
    assert metrics and not {"balance_loss", "router_z_loss", "dropped_tokens"} & metrics.keys()


@pytest.mark.slow
def test_masked_language_models_and_heads_train_their_routers_too():
    config = changes(TINY, {"architecture": "encoder", "experts.count": 3, "dropout": 0.0})
    loss, sums = masked_lm(made(config), batch_of(2), KEY, LossConfig())
    assert sums["balance_loss"][0] > 0 and jnp.isfinite(loss)
    model = ModelWithHead(config, HeadConfig("classes", classes=3), nnx.Rngs(params=jax.random.key(0)))
    batch = replace(batch_of(2), labels=np.array([0, 2]), label_loss_weights=np.ones(2, np.float32))
    loss, sums = supervised_loss(model, batch, KEY, LossConfig())
    router = 2 * 0.01 * sums["balance_loss"][0]  # two layers
    assert loss == pytest.approx(float(sums["loss"][0] + router), rel=1e-5)
    choice = ModelWithHead(config, HeadConfig("choice"), nnx.Rngs(params=jax.random.key(0)))
    pairs = batch_of(4).map_sides(lambda side: side.map(lambda x: x.reshape(2, 2, -1)))
    pairs = replace(pairs, labels=np.array([0, 1]), label_loss_weights=np.ones(2, np.float32))
    assert supervised_loss(choice, pairs, KEY, LossConfig())[1]["balance_loss"][1] == 2


# ---- what does not fit together


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"experts.per_token": 5}, "per_token=5 should be at most model.experts.count=4"),
        ({"experts.every": 3}, "experts.every=3 leaves model.num_encoder_layers=2 without experts"),
        ({"experts.every": 2, "shared_layers": True}, "every=2 makes layers that differ"),
        ({"experts.kind": "expert-choice"}, "expert-choice.*later ones.*token-choice"),
        ({"mlp.activation": "none"}, "has none"),
        ({"residual": "fixup", "norm.kind": "none"}, "fixup"),
        ({"lora.rank": 2, "lora.matrices": ("mlp",)}, "leave out 'mlp'"),
        ({"heads": ("generator",)}, "leave out generator"),
        ({"experts.capacity_factor": 0.0}, "capacity_factor=0.0 should be above 0"),
        ({"experts.dropout": 1.0}, "dropout=1.0"),
        ({"experts.d_ff": 0}, "d_ff=0 should be at least 1"),
        ({"experts.eval_capacity": 4, "experts.eval_capacity_factor": 1.0}, "one of the two should be None"),
    ],
)
def test_settings_that_do_not_fit_experts_are_refused_with_the_reason(new, message):
    with pytest.raises(SettingError, match=message):
        changes(TINY, EXPERTS | new)


def test_an_encoder_with_a_causal_mask_may_not_have_expert_choice():
    with pytest.raises(SettingError, match="may not read"):
        changes(ENCODER, {"attention.encoder_mask": "causal"})


def test_settings_of_experts_are_read_only_where_there_are_experts():
    assert "experts.every" in unused_settings(ModelConfig(), ["experts"])
    assert not unused_settings(changes(TINY, EXPERTS), ["experts.per_token", "experts.normalized"])
    one = changes(TINY, {"experts.count": 4})
    assert unused_settings(one, ["experts"]).keys() == {
        *("experts.normalized", "experts.noise", "experts.first")
    }
