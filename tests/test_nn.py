"""Laws of the Transformer, for all four architectures."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm.nn.config import SIZES, ModelConfig
from lm.nn.layers import RelativeBias, count, draw_keep, dropout
from lm.nn.transformer import Transformer
from lm.ops.losses import cross_entropy
from lm.sharding import named

ARCHITECTURES = ["encoder-decoder", "shared-encoder-decoder", "decoder", "prefix-decoder"]
TINY = ModelConfig(
    vocab_size=40, num_encoder_layers=2, num_decoder_layers=2, d_model=16, d_ff=24, d_kv=8, num_heads=4, dropout=0.1,
    relative_buckets=8, relative_max_distance=6,
)  # fmt: skip
BASE = SIZES["t5-base"]


@cache
def made(architecture):
    config = replace(TINY, architecture=architecture)
    return jax.jit(lambda: Transformer(config, nnx.Rngs(params=jax.random.key(0))))()


def make(architecture, **settings):
    """The same parameters for all ``settings``, none of which changes their shapes."""
    config = replace(TINY, architecture=architecture, **settings)
    structure = jax.tree.structure(jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
    return jax.tree.unflatten(structure, jax.tree.leaves(made(architecture)))


def example(seed, source, target, prefix=0):
    """One sequence pair alone in a batch; ``prefix`` positions of the target see one another."""
    random = np.random.default_rng(seed)
    return {
        "encoder_input_tokens": random.integers(2, 40, (1, source)),
        "encoder_segment_ids": np.ones((1, source), int),
        "decoder_input_tokens": random.integers(2, 40, (1, target)),
        "decoder_segment_ids": np.ones((1, target), int),
        "decoder_causal_attention": (np.arange(target) < prefix)[None].astype(int),
    }


def joined(examples):
    """The examples packed into one row."""
    numbered = [b | {n: v * (k + 1) for n, v in b.items() if "segment" in n} for k, b in enumerate(examples)]
    return {name: np.concatenate([b[name] for b in numbered], axis=1) for name in numbered[0]}


def padded(batch, length):
    return {name: np.pad(value, ((0, 0), (0, length - value.shape[1]))) for name, value in batch.items()}


run = jax.jit(lambda model, batch, key=None: model(batch, key))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_example_sees_only_itself_and_padding_changes_nothing(architecture):
    model = make(architecture)
    examples = [example(1, 5, 7, prefix=3), example(2, 6, 4, prefix=2)]
    packed = run(model, padded(joined(examples), 12))[0]
    first, second = (run(model, padded(b, 12))[0] for b in examples)
    np.testing.assert_allclose(packed[:11], np.concatenate([first[:7], second[:4]]), atol=1e-5)
    without = {name: value for name, value in examples[0].items() if "segment" not in name}
    np.testing.assert_allclose(run(model, without)[0], first[:7], atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_position_depends_on_what_it_may_see_and_on_nothing_else(architecture):
    model, batch, prefix = make(architecture), example(3, 5, 6, prefix=3), 3

    def influence(embedded):  # which input positions move each position's logits, through the embedding of each
        class Given(nnx.Module):
            dtype = "float32"

            def __call__(self, tokens):
                return embedded

            def logits(self, x):
                return x

        changed = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model))
        changed.embed, changed.encoder = Given(), None
        return changed(batch)[0]

    if model.config.has_encoder:
        batch["encoder_input_tokens"] = batch["decoder_input_tokens"]
        batch["encoder_segment_ids"] = np.zeros((1, 6), int)  # the encoder is not under test: nobody sees its output
    jacobian = jax.jit(jax.jacobian(influence))(model.embed(batch["decoder_input_tokens"]))
    seen = np.abs(jacobian[:, :, 0]).max((1, 3)) > 0
    expected = np.tri(6, dtype=bool)
    if architecture == "prefix-decoder":
        expected[:prefix, :prefix] = True
    np.testing.assert_array_equal(seen, expected)


def loss_and_gradients(model, batch, key):
    def loss(model):
        logits = model(batch, key)
        targets = np.roll(batch["decoder_input_tokens"], -1, axis=1)
        return cross_entropy(logits, targets, batch["decoder_segment_ids"] > 0, z_loss=1e-4, label_smoothing=0.0)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss))(model)
    return {"loss": value} | named(gradients)


@pytest.mark.parametrize("architecture", ["encoder-decoder"])
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients(architecture):
    batch, key = example(4, 5, 6, prefix=2), jax.random.key(7)
    expected = loss_and_gradients(make(architecture), batch, key)
    for settings in ({"layers": "unroll"}, {"remat": "full"}, {"remat": "dots", "layers": "unroll"}):
        found = loss_and_gradients(make(architecture, **settings), batch, key)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{settings} {name}")


def test_remat_recomputes():
    batch = example(4, 5, 6)
    text = {
        r: str(jax.make_jaxpr(jax.grad(lambda m: m(batch).sum()))(make("decoder", remat=r))) for r in ("none", "full")
    }
    assert [name for name, program in text.items() if "remat" in program or "checkpoint" in program] == ["full"]


def test_a_key_means_training_and_the_same_key_the_same_masks():
    model, batch = make("encoder-decoder"), example(5, 5, 6)
    plain, one, again, two = (
        run(model, batch, *k) for k in ((), (jax.random.key(1),), (jax.random.key(1),), (jax.random.key(2),))
    )
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - plain).max() > 1e-2
    assert np.abs(one - two).max() > 1e-2
    still = make("encoder-decoder", dropout=0.0)
    np.testing.assert_array_equal(run(still, batch, jax.random.key(1)), run(still, batch))


def test_dropout_keeps_the_mean_and_one_mask_for_the_whole_length():
    keep = draw_keep(jax.random.key(0), 0.25, 4, {"one": (1, 1000), "two": (2, 3)})
    assert keep["two"].shape == (4, 2, 3)
    x = dropout(jnp.ones((4, 50, 1000)), keep["one"], 0.25)
    assert (x == x[:, :1]).all()
    assert not (x[0] == x[1]).all()
    np.testing.assert_allclose(np.unique(x), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(x.mean(), 1, atol=0.02)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (BASE, 222_903_552),
        (replace(BASE, architecture="shared-encoder-decoder"), 137_949_312),
        (replace(BASE, num_encoder_layers=6, num_decoder_layers=6), 123_790_080),
        (replace(BASE, architecture="decoder"), 109_628_544),
        (replace(BASE, architecture="prefix-decoder"), 109_628_544),
        (SIZES["t5-small"], 60_506_624),
        (SIZES["t5-large"], 737_668_096),
        (SIZES["t5-3b"], 2_851_598_336),
        (SIZES["t5-11b"], 11_307_321_344),
        (SIZES["t5-1.1-base"], 247_577_856),
    ],
)
def test_parameter_counts_are_the_published_ones(config, parameters):
    assert count(jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))) == parameters


def test_each_parameter_starts_with_the_standard_deviation_of_its_formula():
    config = replace(
        TINY, vocab_size=2_000, d_model=64, d_ff=128, d_kv=16, relative_buckets=64, mlp="gated-gelu", logits="separate"
    )
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    attention = {"query": (64 * 16) ** -0.5, "key": 64**-0.5, "value": 64**-0.5, "out": (4 * 16) ** -0.5}
    mlp = {"hidden": 64**-0.5, "linear": 64**-0.5, "out": 128**-0.5}
    for name, value in named(model).items():
        *_, module, layer, _ = ["", *name.split(".")]
        if name.endswith("scale"):
            assert (value == 1).all()
            continue
        tops = {"embed": 1.0, "head": 64**-0.5, "relative": 64**-0.5}
        std = tops[layer] if layer in tops else (mlp if module == "mlp" else attention)[layer]
        np.testing.assert_allclose(value.std(), std, rtol=0.15 if layer == "relative" else 0.03, err_msg=name)
    for name, value in named(model).items():  # no two layers, and no two parameters, start alike
        if "blocks" in name and name.endswith("kernel"):
            assert np.abs(value[0] - value[1]).max() > 0.01


def test_a_shared_model_has_one_stack_and_both_uses_move_it():
    model, batch = make("shared-encoder-decoder"), example(6, 5, 6)
    assert {name.split(".")[0] for name in named(model)} == {"embed", "decoder"}
    encoder_only = jax.jit(jax.grad(lambda m: m.encode(batch).sum()))(model)
    moved = {name for name, value in named(encoder_only).items() if np.abs(value).max() > 0}
    assert moved == {name for name in named(model) if "cross" not in name}


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_laid_out_along_diagonals_is_the_bias_of_each_distance(bidirectional):
    bias = RelativeBias(TINY, nnx.Rngs(params=0))
    distance = jnp.arange(9)[None, :] - jnp.arange(9)[:, None]
    np.testing.assert_array_equal(bias.full(9, bidirectional)[0], bias(distance, bidirectional))


def test_bfloat16_activations_leave_parameters_and_logits_in_float32():
    model, batch = make("encoder-decoder", dtype="bfloat16"), example(7, 5, 6)
    assert {value.dtype for value in named(model).values()} == {jnp.dtype("float32")}
    assert run(model, batch, jax.random.key(0)).dtype == jnp.float32
    assert jax.eval_shape(lambda: model.encode(batch)).dtype == jnp.bfloat16
    exact = run(make("encoder-decoder"), batch)
    np.testing.assert_allclose(run(model, batch), exact, atol=0.2)


def test_a_token_outside_the_vocabulary_is_not_trained_on_silently():
    batch = example(8, 5, 6) | {"decoder_input_tokens": np.full((1, 6), 40)}
    assert np.isnan(run(make("decoder"), batch)).all()
