"""Attention of one's own: a subclass of ``Attention`` under another name can do and costs what that does."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_prompts import cached_logits
from flax import nnx
from small_models import run

from experiments.plan import estimate
from lm.batch import Batch, Side
from lm.config.attention import SparsityConfig
from lm.config.base import SettingError, changes, unused_settings
from lm.config.layers import MIXERS_WITH_LOGITS, AttentionConfig, MixerConfig, MlpConfig
from lm.config.model import LoraConfig, ModelConfig
from lm.nn.attention import Attention
from lm.nn.layers import Linear, normal, param
from lm.nn.mixers import MIXERS
from lm.nn.presets import PRESETS
from lm.nn.synthesizer import Synthesizer
from lm.nn.transformer import Transformer
from lm.objectives.denoising import Lengths
from lm.ops.attention import repeat_heads
from lm.ops.kernels import short_rows
from lm.ops.positions import materialize_bias
from lm.sharding import named
from lm.train.flops import cache_bytes, costs, step_flops

TINY = ModelConfig(
    "decoder",
    40,
    2,
    2,
    d_model=16,
    mlp=MlpConfig(d_ff=24),
    attention=AttentionConfig(d_kv=8, num_heads=2),
    dropout=0.0,
)


def with_mixer(config, kind, **new):
    """The settings with a mixer that ``changes`` does not know as a choice."""
    return replace(config, mixer=MixerConfig(kind, **new))


class Own(Attention):
    """As its parent."""


class Wider(Attention):
    """With one more matrix [D,D] that multiplies each position."""

    def __init__(self, config, rngs, bidirectional):
        super().__init__(config, rngs, bidirectional)
        width = config.d_model
        self.more = Linear(rngs, (width, width), ("embed", "mlp"), std=width**-0.5, use_bias=False)


class SalientKeys(Attention):
    """With a term u . k in its scores, for a vector u of each head."""

    def __init__(self, config, rngs, bidirectional):
        super().__init__(config, rngs, bidirectional)
        self.salience = param(
            normal(rngs, (config.attention.num_heads, config.attention.d_kv), 1.0), "heads", "kv"
        )

    def score_bias(self, query, key, inputs):
        bias = materialize_bias(super().score_bias(query, key, inputs), query.shape[1], key.shape[1])
        vectors = self.options.scale * self.salience[...]
        term = jnp.einsum("bsnh,nh->bns", repeat_heads(key, query.shape[2]), vectors)[:, :, None]
        return term if bias is None else bias + term


class SalientQueries(SalientKeys):
    """The same scores from queries to which the vectors are added."""

    def _queries(self, projections, x, inputs):
        return super()._queries(projections, x, inputs) + self.salience[...][None, None]

    def score_bias(self, query, key, inputs):
        return Attention.score_bias(self, query, key, inputs)


class KeyDistance(Attention):
    """With one term for all rows and heads, which broadcasts: -0.5 for each key that is further back."""

    def score_bias(self, query, key, inputs):
        relative = jnp.arange(key.shape[1])[None, None] - inputs.positions[:1, :, None]
        term = 0.5 * relative[:, None]
        bias = super().score_bias(query, key, inputs)
        return term if bias is None else term + materialize_bias(bias, query.shape[1], key.shape[1])


class Distance(Attention):
    """With a term -0.3 |t - s| in its scores."""

    def score_bias(self, query, key, inputs):
        term = -0.3 * jnp.abs(inputs.positions[:, :, None] - inputs.key_positions[:, None])[:, None]
        bias = materialize_bias(super().score_bias(query, key, inputs), query.shape[1], key.shape[1])
        return term if bias is None else bias + term


ADDED = {
    "distance": Distance,
    "own": Own,
    "wider": Wider,
    "salient-keys": SalientKeys,
    "salient-queries": SalientQueries,
    "key-distance": KeyDistance,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, make in ADDED.items():
        monkeypatch.setitem(MIXERS, name, make)


def test_classes_and_settings_agree_on_which_mixers_have_scores():
    said = {name for name, make in MIXERS.items() if getattr(make, "has_attention_logits", False)}
    assert said - ADDED.keys() == set(MIXERS_WITH_LOGITS)
    monkey = with_mixer(TINY, "own")
    assert monkey.has_attention_logits and with_mixer(TINY, "wider").has_attention_logits


@pytest.mark.parametrize(
    "new",
    [
        {"positions.kind": "relative"},
        {"positions.kind": "rotary", "sparsity": SparsityConfig(window=1)},
        {"lora": LoraConfig(rank=2, matrices=("query", "key", "value", "out"))},
        {"architecture": "prefix-decoder"},
        {"architecture": "encoder", "sparsity": SparsityConfig(1, global_tokens=1, projections="separate")},
        {"architecture": "encoder-decoder", "cross_attention.start": "mimetic"},
        *(
            pytest.param(new, marks=pytest.mark.slow)
            for new in (
                {"architecture": "shared-encoder-decoder"},
                {"positions.kind": "relative-per-layer"},
                {"positions.kind": "rotary"},
                {"positions.kind": "alibi"},
                {"attention.mask": "none"},
            )
        ),
    ],
    ids=lambda new: ", ".join(map(str, new.values()))[:40],
)
def test_a_subclass_takes_what_attention_takes_and_computes_and_costs_the_same(new):
    config = changes(TINY, new)
    own = with_mixer(config, "own")
    models = [Transformer(each, nnx.Rngs(params=jax.random.key(0))) for each in (config, own)]
    tokens = np.arange(12).reshape(2, 6)
    decoder = Side(tokens=tokens, causal_attention=np.ones((2, 6), np.int32))
    batch = Batch(encoder=Side(tokens=tokens), decoder=decoder)
    first, second = (named(model) for model in models)
    assert first.keys() == second.keys() and all(map(np.array_equal, first.values(), second.values()))
    np.testing.assert_array_equal(run(models[0], batch), run(models[1], batch))
    assert step_flops(own, 2, 6, 6) == step_flops(config, 2, 6, 6)
    assert costs(own, 6) == costs(config, 6)


def loss_and_gradients(config, batch):
    """A loss of the logits, and its gradients."""
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    return jax.jit(jax.value_and_grad(lambda m: jnp.square(m(batch)).mean()))(model)


def tokens_of(config, rows=2, length=8):
    tokens = np.random.default_rng(0).integers(3, 40, (rows, length))
    side = Side(tokens=tokens, causal_attention=np.ones((rows, length), np.int32))
    return Batch(encoder=side if config.has_encoder else None, decoder=side if config.has_decoder else None)


@pytest.mark.parametrize(
    ("platform", "new"),
    [
        ("tpu", {"positions.kind": "relative"}),
        ("gpu", {"positions.kind": "alibi", "attention.implementation": "flash"}),
        pytest.param(
            "tpu",
            {"positions.kind": "rotary", "attention.num_key_value_heads": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param("cpu", {"positions.kind": "relative-per-layer"}, marks=pytest.mark.slow),
        (
            "cpu",
            {
                "architecture": "encoder",
                "sparsity": SparsityConfig(1, global_tokens=1, projections="separate"),
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(map(str, value.values()))[:40],
)
def test_a_term_of_scores_is_trained_as_that_of_queries_by_each_implementation(monkeypatch, platform, new):
    base = {"attention.scores": "scaled-dot", "num_decoder_layers": 1, "num_encoder_layers": 1}
    config = changes(TINY, base | new)
    batch = tokens_of(config)
    auto = changes(config, {"attention.implementation": "auto"})
    expected = loss_and_gradients(with_mixer(auto, "salient-queries"), batch)
    monkeypatch.setattr("lm.nn.attention_dispatch._platform", lambda: platform)
    monkeypatch.setattr(short_rows, "LANES", 16)
    found = loss_and_gradients(with_mixer(config, "salient-keys"), batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        pytest.param("salient-keys", "relative", marks=pytest.mark.slow),
        ("salient-keys", "rotary"),
        ("distance", "none"),
    ],
)
def test_a_term_of_scores_is_the_same_in_decoding_with_a_cache(kind, positions):
    config = with_mixer(changes(TINY, {"positions.kind": positions}), kind)
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    text = tokens_of(config, length=7).decoder.tokens
    cached = cached_logits(model, Batch(decoder=Side(tokens=text[:, :3])), text[:, 3:])
    np.testing.assert_allclose(run(model, Batch(decoder=Side(tokens=text)))[:, 2:-1], cached, atol=1e-5)


def test_distances_are_the_same_over_a_cache_whose_positions_continue_after_the_encoders():
    new = {"architecture": "encoder-decoder", "positions.kind": "rotary"}
    config = with_mixer(changes(TINY, new | {"cross_attention.positions": "continued"}), "distance")
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    batch = tokens_of(config)

    @jax.jit
    def cached(model):
        tokens = batch.decoder.tokens
        first, cache = model.prefill(replace(batch, decoder=Side(tokens=tokens[:, :3])), 9)
        return first, model.logits(model.extend(tokens[:, 3:], cache)[0])

    whole, (first, others) = run(model, batch), cached(model)
    np.testing.assert_allclose(first, whole[:, 2], atol=1e-5)
    np.testing.assert_allclose(others, whole[:, 3:], atol=1e-5)


def test_a_term_that_all_rows_and_heads_share_is_the_same_by_each_implementation(monkeypatch):
    config = with_mixer(changes(TINY, {"positions.kind": "learned"}), "key-distance")
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    batch = tokens_of(config)
    expected = run(model, batch)
    monkeypatch.setattr("lm.nn.attention_dispatch._platform", lambda: "tpu")
    monkeypatch.setattr(short_rows, "LANES", 16)
    # not ``run``, which has its program already
    np.testing.assert_allclose(jax.jit(lambda model: model(batch))(model), expected, atol=1e-5)


@pytest.mark.parametrize("logits", ["dense", "random"])
def test_a_term_of_scores_reaches_a_synthesizer(monkeypatch, logits):
    class Own(KeyDistance, Synthesizer):
        """A synthesizer with that term."""

    new = {"positions.kind": "learned", "mixer.kind": "synthesizer", "mixer.products": "none"}
    config = changes(TINY, new | {"mixer.logits": logits})
    batch, given = tokens_of(config), []
    for make in (Synthesizer, Own):
        monkeypatch.setitem(MIXERS, "synthesizer", make)
        given.append(run(Transformer(config, nnx.Rngs(params=jax.random.key(0))), batch))
    assert not np.allclose(*given, atol=1e-3)


def test_a_plan_of_ones_own_attention_is_that_of_attention():
    gpt, lengths = PRESETS["gpt2"], Lengths(512, 512, 512)
    own = with_mixer(gpt, "own")
    assert estimate._mixer_features(own, 2) == estimate._mixer_features(gpt, 2)
    assert estimate._stacks(own, lengths) == estimate._stacks(gpt, lengths)


def test_a_matrix_that_a_subclass_adds_is_counted():
    plain, wider = with_mixer(TINY, "own"), with_mixer(TINY, "wider")
    more = step_flops(wider, 3, 0, 7) - step_flops(plain, 3, 0, 7)
    assert more == 6 * 3 * 7 * TINY.num_decoder_layers * TINY.d_model**2


class Convolution(nnx.Module):
    """A mixer without attention that counts itself: length^2 FLOPs a row, and as many bytes as tokens."""

    def __init__(self, config, rngs, bidirectional):
        pass

    def flops(self, length, visible):
        return length * visible

    def cache_bytes(self, length):
        return length


class Running(nnx.Module):
    """A mixer with one matrix that says nothing of its costs."""

    def __init__(self, config, rngs, bidirectional):
        width = config.d_model
        self.out = Linear(rngs, (width, width), ("embed", "mlp"), std=1.0, use_bias=True)

    def init_carry(self, rows, length):
        return jax.numpy.zeros((rows, 1, 16))


def test_a_mixer_that_counts_its_own_costs_is_counted_by_that(monkeypatch):
    monkeypatch.setitem(MIXERS, "convolution", Convolution)
    base = changes(TINY, {"positions.kind": "none"})
    none, own = (with_mixer(base, name) for name in ("none", "convolution"))
    layers = TINY.num_decoder_layers
    assert step_flops(own, 3, 0, 7) - step_flops(none, 3, 0, 7) == 3 * 3 * layers * 7 * 7
    assert costs(own, 7).scores == 3 * layers * 7
    assert cache_bytes(own, 7, 0) == 7 * layers


def test_a_mixer_that_does_not_is_counted_by_its_matrices_and_its_carry(monkeypatch):
    monkeypatch.setitem(MIXERS, "running", Running)
    base = changes(TINY, {"positions.kind": "none"})
    none, own = (with_mixer(base, name) for name in ("none", "running"))
    layers = TINY.num_decoder_layers
    assert step_flops(own, 3, 0, 7) - step_flops(none, 3, 0, 7) == 6 * 3 * 7 * layers * 16 * 16
    assert costs(own, 7).scores == 0
    assert cache_bytes(own, 7, 0) == cache_bytes(own, 1, 0) == layers * 16 * 4


class Latent(Attention):
    """Attention whose cache holds one narrow vector for each token."""

    def init_carry(self, rows, length):
        return jax.numpy.zeros((rows, 1, length, 3))


def test_a_subclass_with_another_cache_needs_no_count_of_its_own(monkeypatch):
    monkeypatch.setitem(MIXERS, "latent", Latent)
    assert cache_bytes(with_mixer(TINY, "latent"), 5, 0) == TINY.num_decoder_layers * 5 * 3 * 4


def test_a_mixer_that_is_defined_anew_under_its_name_is_counted_anew(monkeypatch):
    config = with_mixer(changes(TINY, {"positions.kind": "none"}), "own")
    before = step_flops(config, 3, 0, 7), costs(config, 7).parameters
    monkeypatch.setitem(MIXERS, "own", Wider)
    assert step_flops(config, 3, 0, 7) > before[0]
    assert costs(config, 7).parameters == before[1] + TINY.num_decoder_layers * 16 * 16


def test_a_function_that_hides_what_it_makes_is_refused(monkeypatch):
    monkeypatch.setitem(MIXERS, "hidden", lambda config, rngs, bidirectional: Own(config, rngs))
    with pytest.raises(SettingError, match=r"MIXERS\['hidden'\] should say has_attention_logits=True"):
        Transformer(with_mixer(changes(TINY, {"positions.kind": "none"}), "hidden"), nnx.Rngs(params=0))


def test_a_mixer_of_ones_own_may_read_what_any_mixer_reads():
    own = with_mixer(changes(TINY, {"attention.scores": "scaled-dot"}), "own", width=8, window=2)
    paths = ("mixer.width", "mixer.window", "attention.scores", "attention.d_kv")
    paths += ("attention.num_heads", "attention.mask", "sparsity.window")
    assert unused_settings(own, paths) == {}
    assert unused_settings(with_mixer(own, "attention"), paths).keys() == {"mixer.width", "mixer.window"}
