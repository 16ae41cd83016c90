"""Laws of models that start from the weights of another architecture."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from flax import nnx

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.mesh import MeshConfig
from lm.config.training import OptimizerConfig
from lm.convert import load, save
from lm.nn import adapt
from lm.nn.transformer import Transformer
from lm.ops.positions import BucketedBias
from lm.sharding import make_mesh, named
from lm.train.step import StepSpec, build

LLAMA = replace(small_models.CONFIGS["llama-3.1-8b"], dropout=0.0)
LLAMA_TIED = changes(LLAMA, {"output.logits": "tied"})
T5_SHAPE = replace(small_models.CONFIGS["decoder"], dropout=0.0)
BERT = replace(small_models.CONFIGS["bert-base"], dropout=0.0)
BOTH = {"architecture": "encoder-decoder"}


def adapted(config, new, params=None):
    """The model that starts from one of ``config``, and that one."""
    old = small_models.made(config)
    model_config = adapt.adapted_config(config, new)
    params = adapt.adapt(config, named(old) if params is None else params, model_config, jax.random.key(1))
    return with_params(model_config, params), old


def with_params(config, params):
    model = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    leaves = [params[name] for name in named(model)]
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in named(model).values()]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


@pytest.mark.parametrize(
    "config", [LLAMA, pytest.param(T5_SHAPE, marks=pytest.mark.slow)], ids=["llama", "t5"]
)
def test_a_decoder_that_became_one_of_two_stacks_reads_its_own_side_as_before(config):
    model, old = adapted(config, BOTH)
    batch = small_models.example(1, 5, 4)
    nothing = small_models.with_side(batch, "encoder", segment_ids=np.zeros((1, 5), int))
    expected = small_models.features(old, replace(batch, encoder=None))
    np.testing.assert_allclose(small_models.features(model, nothing), expected, atol=1e-5)
    assert np.abs(small_models.features(model, batch) - expected).max() > 1e-2


def test_an_encoder_made_of_a_decoder_is_that_decoder_without_its_mask():
    model, old = adapted(LLAMA, BOTH)
    unmasked = with_params(changes(LLAMA, {"attention.mask": "none"}), named(old))
    batch = small_models.example(1, 5, 4)
    expected = small_models.features(unmasked, Batch(decoder=batch.encoder))
    np.testing.assert_allclose(small_models.encode(model, batch), expected, atol=1e-5)
    alone, _ = adapted(LLAMA, {"architecture": "encoder"})
    np.testing.assert_allclose(small_models.features(alone, batch), expected, atol=1e-5)


def test_cross_attention_starts_as_self_attention_does_and_may_be_it():
    params = named(adapted(LLAMA, BOTH)[0])
    for part in ("query", "key", "value", "out"):
        own, cross = (params[f"decoder.blocks.{each}.{part}.kernel"] for each in ("attention", "cross"))
        np.testing.assert_array_equal(own, cross)
    cross_key = params["decoder.blocks.cross.key.kernel"]
    merged, _ = adapted(LLAMA, BOTH | {"cross_attention.kind": "merged"})
    assert not [name for name in named(merged) if "cross" in name]
    continued = BOTH | {"cross_attention.positions": "continued"}
    params = named(adapted(LLAMA, continued)[0])
    np.testing.assert_array_equal(params["decoder.blocks.cross.key.kernel"], cross_key)


@pytest.mark.parametrize(
    "architecture", ["encoder-decoder", pytest.param("shared-encoder-decoder", marks=pytest.mark.slow)]
)
def test_an_encoders_weights_are_those_of_both_stacks_and_cross_attention_is_random(architecture):
    """BERT2BERT, and BERTShare where one stack is both (Rothe et al. 2020)."""
    model, old = adapted(BERT, {"architecture": architecture})
    batch = small_models.example(1, 5, 4)
    expected = small_models.features(old, Batch(encoder=batch.encoder))
    np.testing.assert_allclose(small_models.encode(model, batch), expected, atol=1e-5)
    params, before = named(model), named(old)
    np.testing.assert_array_equal(
        params["decoder.blocks.attention.query.kernel"], before["encoder.blocks.attention.query.kernel"]
    )
    own, cross = (params[f"decoder.blocks.{part}.query.kernel"] for part in ("attention", "cross"))
    assert np.abs(own - cross).max() > 0.01
    said = list(adapt.describe(BERT, model.config))
    assert "cross-attention: random" in said and "decoder: the checkpoint's encoder" in said
    assert said[-1] == "left behind: next_sentence, pooler"


@pytest.mark.parametrize("architecture", ["decoder", "prefix-decoder", "encoder-decoder", "encoder"])
def test_an_encoder_with_a_causal_mask_starts_models_of_all_architectures(architecture):
    causal = changes(BERT, {"attention.encoder_mask": "causal"})
    config = adapt.adapted_config(causal, {"architecture": architecture})
    assert config.attention.encoder_mask == ("causal" if architecture == "encoder" else "none")


def test_the_gate_of_cross_attention_starts_as_that_of_self_attention():
    gated = changes(T5_SHAPE, {"universal.gate": "gru"})
    params = named(adapted(gated, BOTH)[0])
    own, cross = (params[f"decoder.blocks.{each}_gate.gates.kernel"] for each in ("attention", "cross"))
    np.testing.assert_array_equal(own, cross)
    assert "decoder: the checkpoint's decoder" in adapt.describe(gated, adapt.adapted_config(gated, BOTH))


def test_two_embeddings_both_start_as_the_checkpoints_and_a_new_output_matrix_is_random():
    new = BOTH | {"embedding.encoder": "separate", "output.logits": "separate"}
    model, old = adapted(LLAMA_TIED, new)
    params, table = named(model), named(old)["embed.table"]
    np.testing.assert_array_equal(params["embed.table"], table)
    np.testing.assert_array_equal(params["encoder_embed.table"], table)
    assert np.abs(params["head.kernel"] - table.T).max() > 0.01
    assert "embedding and output: the checkpoint's, random head" in adapt.describe(LLAMA_TIED, model.config)


def test_a_model_of_fewer_layers_is_that_in_which_the_others_add_nothing():
    config = changes(LLAMA, {"num_decoder_layers": 3})
    old, counts = small_models.made(config), {"num_decoder_layers": 2}
    smaller = with_params(*adapt.drop_layers(config, named(old), counts))
    silent = {
        name: leaf * np.float32([1, 0, 1])[:, None, None] if ".out." in name and "blocks" in name else leaf
        for name, leaf in named(old).items()
    }
    batch = Batch(decoder=small_models.example(1, 5, 4).decoder)
    expected = small_models.features(with_params(config, silent), batch)
    np.testing.assert_allclose(small_models.features(smaller, batch), expected, atol=1e-6)
    assert np.abs(small_models.features(old, batch) - expected).max() > 1e-2
    windows = changes(config, {"sparsity.layer_windows": (2, None, 2)})
    with pytest.raises(SettingError, match="sparsity.layer_windows=.* makes layers that differ"):
        adapt.drop_layers(windows, named(old), counts)
    with pytest.raises(SettingError, match="num_decoder_layers=4 is more than 3"):
        adapt.drop_layers(config, named(old), {"num_decoder_layers": 4})


def test_a_line_of_each_part_says_where_it_comes_from():
    new = adapt.adapted_config(LLAMA, BOTH)
    assert list(adapt.describe(LLAMA, new)) == [
        "decoder: the checkpoint's decoder",
        "cross-attention: the checkpoint's self-attention",
        "embedding and output: the checkpoint's",
        "encoder: the checkpoint's decoder",
    ]
    merged = adapt.adapted_config(LLAMA, BOTH | {"cross_attention.kind": "merged"})
    assert "cross-attention: none of its own: the decoder's self-attention reads the encoder" in [
        *adapt.describe(LLAMA, merged)
    ]


def test_what_has_two_stacks_and_what_has_other_shapes_is_refused_by_name():
    with pytest.raises(SettingError, match="'decoder' cannot start from a model of 'encoder-decoder'"):
        adapt.adapted_config(small_models.TINY, {"architecture": "decoder"})
    wider = adapt.adapted_config(changes(LLAMA, {"mlp.d_ff": 32}), BOTH)
    with pytest.raises(SettingError, match=r"mlp.*kernel has shape \[.*should be equal"):
        adapt.origins(LLAMA, wider)


def test_biases_of_one_side_and_of_both_agree_on_the_distances_that_both_tell_apart():
    table = jax.random.normal(jax.random.key(0), (32, 4))
    behind = -jnp.arange(100)[None, None, :]
    one = BucketedBias(table, False, 128)
    both = one.converted(True)
    expected, found = one.evaluate(behind), both.evaluate(behind)
    np.testing.assert_allclose(found[..., :8], expected[..., :8])
    np.testing.assert_allclose(both.evaluate(-behind)[..., 1:], found[..., 1:])
    back = both.converted(False).evaluate(behind)
    np.testing.assert_allclose(back[..., :16], found[..., :16], rtol=1e-6)


TEXT = b"the cat sat on the mat and the dog ran far; " * 40 + b"a dog was seen by the cat, and by us. " * 40


def training_batch(step, length=24, rows=16):
    starts = np.random.default_rng(step).integers(0, len(TEXT) - length - 1, rows)
    text = np.frombuffer(TEXT, np.uint8)[starts[:, None] + np.arange(length + 1)].astype(int)
    return text[:, :-1], text[:, 1:]


def prefix_lm_loss(model, halves=12):
    """Mean loss of the second half of rows, given the first to the encoder, in nats per token."""
    tokens, targets = training_batch(1_000)
    batch = Batch(encoder=Side(tokens=tokens[:, :halves]), decoder=Side(tokens=tokens[:, halves - 1 :]))
    logits = jax.nn.log_softmax(small_models.run(model, batch))
    picked = np.take_along_axis(np.asarray(logits), targets[:, halves - 1 :, None], axis=-1)
    return -picked.mean()


def trained_decoder(config):
    optimizer = OptimizerConfig(name="adamw", schedule="constant", learning_rate=1e-2)
    steps = build(StepSpec(config, optimizer), make_mesh(MeshConfig(), jax.devices()[:1]))
    state, step = steps.initial_state(0), steps.seeded_train_step(0)
    for i in range(200):
        tokens, targets = training_batch(i)
        side = Side(tokens=tokens, targets=targets, loss_weights=np.ones(tokens.shape, np.float32))
        state, _ = step(state, steps.shard_batch(Batch(decoder=side)))
    return state.params


SHAPES = {
    "t5": {"attention.scores": "dot"},
    "llama": {"attention.scores": "scaled-dot", "positions.kind": "rotary", "mlp.activation": "gated-silu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["heads", "merged"])
def test_an_adapted_decoder_starts_far_below_a_random_model(shape, kind, tmp_path):
    if (shape, kind) == ("t5", "merged"):
        pytest.skip("merged attention has no relative biases")
    sizes = {"architecture": "decoder", "vocab_size": 256, "dropout": 0.0, "d_model": 32}
    config = changes(small_models.TINY, sizes | SHAPES[shape])
    model, _ = adapted(config, BOTH | {"cross_attention.kind": kind}, trained_decoder(config))
    assert prefix_lm_loss(model) < np.log(256) - 1.5 < prefix_lm_loss(small_models.made(model.config)) - 1.5
    if shape == "t5":
        save(model, str(tmp_path))
        again = load(str(tmp_path))[1]
        np.testing.assert_allclose(prefix_lm_loss(again), prefix_lm_loss(model), rtol=1e-5)
    else:
        with pytest.raises(SettingError, match="no published family computes this model"):
            save(model, str(tmp_path))
