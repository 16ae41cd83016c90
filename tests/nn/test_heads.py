"""Laws of heads, and of models made of models."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import CONFIGS, example, features, filled, joined, padded, tiny

from experiments.runs.kinds.answers import reader_of
from experiments.runs.kinds.head import head_spec
from experiments.study.registry import build
from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.model import HeadConfig
from lm.config.training import LossConfig
from lm.data.tasks.labelled import find_labelled
from lm.nn.electra import Electra, RestoringElectra, generator_config, generator_of
from lm.nn.finetune import ModelWithHead
from lm.nn.heads import POOLINGS, LayerMixture
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.ops.losses import copy_cross_entropy
from lm.sharding import named
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.train import losses
from lm.train.flops import step_flops

RECURRENT = {
    f"{mixer} {architecture}": changes(
        CONFIGS[architecture],
        {"mixer.kind": mixer, "mixer.width": 12, "positions.kind": "none", "compile.layers": "unroll"},
    )
    for mixer, architecture in (("lstm", "encoder"), ("gru", "decoder"))
}


read = jax.jit(ModelWithHead.__call__)


@cache
def tuned(name, **head):
    config = replace((CONFIGS | RECURRENT)[name], dropout=0.0)
    return filled(jax.eval_shape(lambda: ModelWithHead(config, HeadConfig(**head), nnx.Rngs(params=0))))


@pytest.mark.parametrize(
    ("name", "head", "shape"),
    [
        ("bert-base", {"kind": "classes", "classes": 3}, (1, 3)),
        ("gpt2", {"kind": "classes", "classes": 3, "pool": "last"}, (1, 3)),
        pytest.param("bart-base", {"kind": "regression", "pool": "mean"}, (1,), marks=pytest.mark.slow),
        pytest.param("roberta-base", {"kind": "regression", "pool": "max"}, (1,), marks=pytest.mark.slow),
        ("bert-base", {"kind": "tokens", "classes": 5}, (1, 8, 5)),
        ("bert-base", {"kind": "span"}, (1, 2, 8)),
        ("bert-base", {"kind": "classes", "classes": 2, "layers": "mixed-frozen"}, (1, 2)),
        pytest.param(
            "lstm encoder", {"kind": "classes", "classes": 3, "pool": "last"}, (1, 3), marks=pytest.mark.slow
        ),
        ("lstm encoder", {"kind": "tokens", "classes": 5}, (1, 8, 5)),
        ("gru decoder", {"kind": "regression", "pool": "max"}, (1,)),
    ],
)
def test_a_head_reads_the_text_and_not_its_padding(name, head, shape):
    model, batch = tuned(name, **head), padded(example(10, 6, 6), 8)
    found = np.asarray(read(model, batch))
    assert found.shape == shape
    text = np.asarray(batch.encoder.segment_ids) > 0
    noisy = batch.map_sides(lambda side: replace(side, tokens=np.where(text, side.tokens, 9)))
    again = np.asarray(read(model, noisy))
    where = np.broadcast_to(text[:, :, None], shape) if head["kind"] == "tokens" else np.ones(shape, bool)
    np.testing.assert_allclose(again[where], found[where], atol=1e-6)
    if head["kind"] == "span":
        assert (found[0, :, 6:] < -1e30).all()


X = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
TEXT = np.array([[0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]], bool)


@pytest.mark.parametrize(
    ("pool", "numpy"),
    [
        ("first", lambda text: text[0]),
        ("last", lambda text: text[-1]),
        ("mean", lambda text: text.mean(0)),
        ("max", lambda text: text.max(0)),
    ],
)
def test_a_pool_is_numpys_of_the_text_wherever_its_padding_stands(pool, numpy):
    expected = [numpy(x[text]) for x, text in zip(X, TEXT, strict=True)]
    for dtype, atol in ((np.float32, 1e-6), (jax.numpy.bfloat16, 3e-2)):
        found = POOLINGS[pool](jax.numpy.asarray(X, dtype), TEXT)
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=atol)
    assert np.isfinite(
        POOLINGS[pool](X, np.zeros_like(TEXT))
    ).all()  # a row of padding, which fills up a batch


pools = {name: jax.jit(pool) for name, pool in POOLINGS.items()}


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "bart-base"])
@pytest.mark.parametrize("pool", POOLINGS)
def test_a_text_in_a_packed_row_is_pooled_as_if_it_were_alone(name, pool):
    body, texts = tuned(name, kind="classes").body, [example(1, 5, 5), example(2, 6, 6)]
    side = "decoder" if body.config.has_decoder else "encoder"

    def pooled(batch, number):
        states = np.asarray(features(body, batch))
        return pools[pool](states, batch.side(side).segment_ids == number)

    packed = padded(joined(texts), 12)
    for number, text in enumerate(texts, 1):
        np.testing.assert_allclose(pooled(packed, number), pooled(padded(text, 12), 1), atol=1e-5)


@pytest.mark.parametrize(
    ("row", "pool", "layout"),
    [
        ("bert/base", "first", "ended"),
        ("bert/max-pooling", "max", "ended"),
        ("gpt/base", "last", "ended"),
        ("gpt/start-delim-extract", "last", "start-delim-extract"),
        ("bart/base", "last", "ended"),
    ],
)
def test_a_head_reads_what_its_settings_say_and_by_default_where_its_architecture_has_seen_the_text(
    row, pool, layout
):
    experiment, task = build(row, "nano"), find_labelled("follows")
    (head,) = head_spec(experiment, task).extra_configs
    reader = reader_of(experiment, task, ByteTokenizer(100))
    assert (head.pool, reader.layout) == (pool, layout)


def test_each_choice_is_scored_as_if_it_were_alone():
    model = tuned("bert-base", kind="choice")
    candidates = [padded(example(seed, 5, 5), 8) for seed in range(3)]
    together = jax.tree.map(lambda *arrays: np.stack(arrays, axis=1), *candidates)
    alone = [read(model, c.map(lambda value: value[:, None]))[0, 0] for c in candidates]
    np.testing.assert_allclose(read(model, replace(together, labels=np.zeros(1, int)))[0], alone, atol=1e-5)


def test_choices_of_an_encoder_decoder_may_have_sides_of_different_lengths():
    model, batch = tuned("encoder-decoder", kind="choice", pool="last"), example(0, 6, 4)
    choices = batch.map(lambda value: np.stack([value, value], axis=1))
    scores = read(model, choices)
    assert scores.shape == (1, 2) and scores[0, 0] == scores[0, 1]


def test_a_mixture_of_layers_is_their_mean_at_first_and_leaves_the_model_as_it_is():
    hidden = np.random.default_rng(0).normal(size=(3, 1, 4, 16)).astype(np.float32)
    np.testing.assert_allclose(LayerMixture(2)(jnp.asarray(hidden)), hidden.mean(0), atol=1e-6)
    model, batch = tuned("bert-base", kind="classes", layers="mixed-frozen"), example(11, 5, 5)
    gradients = named(jax.jit(jax.grad(lambda m: m(batch).sum()))(model))
    moved = {name for name, value in gradients.items() if np.abs(value).max() > 0}
    assert moved == {name for name in gradients if name.startswith(("head.", "mixture.", "body.pooler."))}


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_is_nan_and_without_a_weight_nothing(label):
    head = HeadConfig("classes", 3)
    model = ModelWithHead(replace(CONFIGS["encoder"], dropout=0.0), head, nnx.Rngs(params=0))
    tokens, labels = np.arange(12).reshape(3, 4), np.array([0, 2, label])
    batch = Batch(encoder=Side(tokens=tokens), labels=labels)

    @jax.jit
    def loss_and_right(batch):
        loss, found = losses.supervised_loss(model, batch, None, LossConfig())
        return loss, found["accuracy"][0]

    def sums(weights, **new):
        return loss_and_right(replace(batch, **{"label_loss_weights": np.array(weights, np.float32)} | new))

    assert np.isnan(sums([1, 1, 1])).all()
    assert sums([1, 1, 0]) == sums([1, 1, 0], labels=np.array([0, 2, 1]))


def test_a_number_without_a_weight_is_ignored_whatever_it_is():
    config = replace(CONFIGS["encoder"], dropout=0.0)
    model = ModelWithHead(config, HeadConfig("regression"), nnx.Rngs(params=0))
    side, weights = Side(tokens=np.arange(12).reshape(3, 4)), np.array([1, 1, 0], np.float32)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradients(model, labels):
        batch = Batch(encoder=side, labels=labels, label_loss_weights=weights)
        return losses.supervised_loss(model, batch, None, LossConfig())[0]

    one, other = (loss_and_gradients(model, jnp.array([0.5, 2, ignored])) for ignored in (0, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_electras_generator_writes_only_what_was_hidden_and_the_embedding_is_shared():
    generator = tiny(
        "electra-small-generator",
        d_model=8,
        dropout=0.0,
        **{"attention.num_heads": 1, "embedding.d_embed": 8},
    )
    model = Electra(tiny("electra-small", dropout=0.0), generator, nnx.Rngs(params=0))
    assert [name for name in named(model) if name.endswith("embed.table")] == ["discriminator.embed.table"]
    text = example(12, 9, 1)
    hidden = (np.arange(9) % 3 == 0)[None]
    tokens = text.encoder.tokens
    shown = np.where(hidden, 39, tokens)
    batch = Batch(encoder=Side(tokens=shown, targets=tokens, loss_weights=hidden.astype(np.float32)))
    sampled = jax.jit(lambda key: model(batch, key)[1])
    drawn = np.concatenate([sampled(jax.random.key(seed)) for seed in range(20)])
    assert (drawn[:, ~hidden[0]] == batch.encoder.targets[:, ~hidden[0]]).all()
    assert len(np.unique(drawn[:, hidden[0]])) > 10


@partial(jax.jit, static_argnames="share")
def loss_and_gradients(model, batch, share):
    """Compiled for each ``share``, MAX_MASKED_SHARE."""
    assert share == losses.MAX_MASKED_SHARE
    loss = jax.value_and_grad(losses.masked_lm, has_aux=True)
    return loss(model, batch, None, LossConfig())


@pytest.mark.parametrize("predicted", [2, 6])  # of 8: few, and more than are read alone
def test_a_masked_lm_learns_the_same_whichever_logits_are_computed(predicted, monkeypatch):
    config = replace(CONFIGS["bert-base"], dropout=0.0, heads=())
    model, text = Transformer(config, nnx.Rngs(params=jax.random.key(0))), example(13, 8, 1)
    weights = np.random.default_rng(0).permutation(np.arange(8) < predicted)[None] / 4
    side = replace(
        text.encoder,
        targets=text.encoder.tokens[:, ::-1],
        loss_weights=weights.astype(np.float32),
        content=weights > 0,
    )
    batch = replace(text, encoder=side, frequent_tokens=np.arange(10)[None])

    def learnt(share):
        monkeypatch.setattr(losses, "MAX_MASKED_SHARE", share)
        (loss, sums), gradients = loss_and_gradients(model, batch, share)
        return {"loss": loss, "sums": sums, "gradients": named(gradients)}

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), learnt(0.28), learnt(0.0))


def discriminating(heads, **new):
    """A small model with a generator, and a batch of hidden tokens for it."""
    config = tiny(
        "electra-small",
        dropout=0.0,
        heads=heads,
        **{"output.logits": "tied", "output.transform": True, "output.bias": True},
    )
    model = RestoringElectra(config, generator_config(config, 0.5), nnx.Rngs(params=0))
    text, hidden = example(12, 9, 1), (np.arange(9) % 3 == 0)[None]
    side = Side(
        tokens=np.where(hidden, 39, text.encoder.tokens),
        segment_ids=np.ones_like(text.encoder.tokens),
        targets=text.encoder.tokens,
        loss_weights=hidden.astype(np.float32),
        content=hidden,
    )
    weights = hidden if new.get("at_masks") else np.ones_like(hidden)
    return model, Batch(encoder=side, discriminator_loss_weights=weights.astype(np.float32))


@partial(jax.jit, static_argnums=2)
def loss_and_outputs(model, batch, config):
    return losses.restored_tokens(model, batch, None, config), model(batch, jax.random.key(0))


def restored(*given):
    return jax.tree.map(np.asarray, loss_and_outputs(*given))


@pytest.mark.parametrize("head", ["replaced-token", "generator"])
def test_a_step_with_a_generator_takes_the_operations_that_xla_counts(head):
    config = changes(
        PRESETS["electra-small"],
        {
            "vocab_size": 300,
            "num_encoder_layers": 1,
            "d_model": 128,
            "mlp.d_ff": 512,
            "attention.num_heads": 4,
            "attention.d_kv": 32,
            "embedding.d_embed": 128,
            "positions.max_length": 32,
            "dropout": 0.0,
            "compile.layers": "unroll",
            "heads": (head,),
            "output.logits": "tied" if head == "generator" else "none",
        },
    )
    generator = generator_of(config, 0.5)
    kind = RestoringElectra if head == "generator" else Electra
    rows, length = 4, 32
    text = np.full((rows, length), 7, np.int32)
    weights = (np.arange(length) % 4 == 0) * np.ones((rows, 1), np.float32)
    side = Side(tokens=text, segment_ids=np.ones_like(text), targets=text, loss_weights=weights)
    batch = Batch(encoder=side)

    def loss(model):
        logits, _, x = model.features(batch, jax.random.key(0), None)
        found = model.discriminator.logits(x) if head == "generator" else model.discriminator.replaced(x)
        return jax.nn.logsumexp(logits, -1).sum() + jax.nn.softplus(found).sum()

    model = jax.eval_shape(lambda: kind(config, generator, nnx.Rngs(params=0)))
    counted = jax.jit(jax.grad(loss)).lower(model).compile().cost_analysis()["flops"]
    # it counts what is not a product too, and the random numbers of the samples
    assert step_flops(config, rows, length, 0, generator) == pytest.approx(counted, rel=0.15)
    assert step_flops(config, rows, length, 0) < 0.8 * counted


def test_replace_mlm_is_the_masked_lm_loss_of_what_the_generator_wrote():
    model, batch = discriminating(("generator",), at_masks=True)
    config = LossConfig(z_loss=0.0)
    (loss, sums), outputs = restored(model, batch, config)
    assert outputs.copy_logits is None and "discriminator.copy_gate.kernel" not in named(model)
    side = replace(batch.encoder, tokens=outputs.tokens)
    masked_lm = jax.jit(lambda model, batch: losses.masked_lm(model, batch, None, config)[0])
    expected = masked_lm(model.discriminator, Batch(encoder=side))
    np.testing.assert_allclose(sums["restored_loss"], (expected, 3), rtol=1e-5)
    np.testing.assert_allclose(loss, sums["loss"][0] + sums["restored_loss"][0], rtol=1e-6)


def test_all_tokens_mlm_mixes_a_copy_of_the_input_with_the_softmax():
    model, batch = discriminating(("generator", "copy"))
    (_, sums), outputs = restored(model, batch, LossConfig())
    gate = 1 / (1 + np.exp(-outputs.copy_logits))[..., None]
    softmax = np.exp(outputs.logits) / np.exp(outputs.logits).sum(-1, keepdims=True)
    mixed = gate * np.eye(40)[outputs.tokens] + (1 - gate) * softmax
    expected = -np.log(np.take_along_axis(mixed, batch.encoder.targets[..., None], axis=-1)).sum()
    np.testing.assert_allclose(sums["restored_loss"], (expected, 9), rtol=1e-5)
    right = (mixed.argmax(-1) == batch.encoder.targets).sum()
    np.testing.assert_allclose(sums["restored_accuracy"], (right, 9))


def test_a_copied_target_out_of_range_gives_nan_unless_it_is_ignored():
    rng = np.random.default_rng(0)
    logits, gate = rng.normal(size=(1, 3, 5)).astype(np.float32), np.zeros((1, 3), np.float32)
    inputs, weights = np.array([[1, 2, 3]]), np.array([[1.0, 1.0, 0.0]])
    loss = partial(copy_cross_entropy, jnp.asarray(logits), jnp.asarray(gate), inputs)
    assert np.isfinite(loss(np.array([[1, 4, -100]]), weights)[0])
    assert np.isnan(loss(np.array([[1, 5, 0]]), weights)[0])


def test_a_copy_gate_needs_a_generator():
    with pytest.raises(SettingError, match="needs 'generator' too"):
        tiny("electra-small", heads=("copy",))
