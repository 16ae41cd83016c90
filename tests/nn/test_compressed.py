"""Laws of memory-compressed attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import TINY, example, joined, padded, run, with_side

from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.nn.attention import Attention
from lm.nn.attention_inputs import make_attention_inputs
from lm.nn.compressed import CompressedAttention
from lm.nn.transformer import Transformer
from lm.train.flops import costs

BASE = changes(TINY, {"architecture": "decoder", "num_decoder_layers": 2, "dropout": 0.0})
CONFIG = changes(BASE, {"attention.compression": 3})
ROTARY = changes(CONFIG, {"positions.kind": "rotary", "attention.num_key_value_heads": 2})
X = np.random.default_rng(1).normal(size=(2, 8, 16)).astype(np.float32)


def model_of(config):
    return Transformer(config, nnx.Rngs(params=jax.random.key(0)))


def test_a_block_has_the_convolved_key_and_value_of_its_tokens_and_is_seen_when_it_has_ended():
    attention = CompressedAttention(CONFIG, nnx.Rngs(params=jax.random.key(0)))
    batch = Batch(decoder=Side(tokens=np.zeros((2, 8), int)))
    inputs = make_attention_inputs(CONFIG, batch, "decoder", None)

    @jax.jit
    def formula(attention, x):
        """The output, and the weights of the blocks."""
        blocks = [part[:, :6].reshape(2, 2, 3, 4, 8) for part in Attention.key_value(attention, x, None)]
        kernels = attention.key_kernel[...], attention.value_kernel[...]
        key, value = (
            jnp.einsum("bmcnh,nchg->bmng", part, kernel) for part, kernel in zip(blocks, kernels, strict=True)
        )
        logits = jnp.einsum("btnh,bmnh->bntm", attention.queries(x, None), key)
        ended = np.arange(8)[:, None] >= np.array([2, 5])[None]  # the first two queries see nothing
        weights = jax.nn.softmax(logits, axis=-1, where=ended)
        out = jnp.einsum("bntm,bmnh->btnh", weights, value).reshape(2, 8, -1)
        return attention.out(out), weights

    @jax.jit
    def computed(attention, x):
        """The output, and the weights of the tokens."""
        of_blocks = attention.all_keys(attention.key_value(x, None), inputs)
        return attention(x, inputs, None, {})[0], attention.weights(x, of_blocks, inputs)

    (found, found_weights), (out, weights) = computed(attention, X), formula(attention, X)
    np.testing.assert_allclose(found, out, atol=1e-5)
    assert (np.asarray(found)[:, :2] == 0).all()
    by_token = np.pad(np.repeat(weights / 3, 3, axis=-1), ((0, 0), (0, 0), (0, 0), (0, 2)))
    np.testing.assert_allclose(found_weights, by_token, atol=1e-6)


@pytest.mark.parametrize("config", [CONFIG, ROTARY], ids=["relative", "rotary"])
def test_no_token_changes_what_is_computed_before_it_and_packed_texts_are_those_alone(config):
    model, texts = model_of(config), [example(seed, 1, length) for seed, length in ((1, 7), (2, 2), (3, 8))]

    def outputs(text):
        return np.asarray(run(model, padded(text, 17)))  # one program for all

    packed = outputs(joined(texts))
    for text, start in zip(texts, (0, 7, 9), strict=True):
        length = text.decoder.tokens.shape[1]
        np.testing.assert_allclose(packed[0, start : start + length], outputs(text)[0, :length], atol=1e-5)
    tokens = texts[2].decoder.tokens.copy()
    tokens[:, 5:] = tokens[:, :3]
    changed = with_side(texts[2], "decoder", tokens=tokens)
    before, after = (outputs(text)[:, :8] for text in (texts[2], changed))
    np.testing.assert_array_equal(after[:, :5], before[:, :5])
    assert (np.abs(after - before)[:, 5:].max(-1) > 1e-3).all()


@pytest.mark.parametrize(
    "config", [pytest.param(CONFIG, marks=pytest.mark.slow), ROTARY], ids=["relative", "rotary"]
)
def test_decoding_with_a_cache_computes_what_a_whole_row_does(config):
    model = model_of(config)
    tokens = np.random.default_rng(0).integers(2, 40, (2, 12))
    prompt, lengths = tokens[:, :5] * 1, np.array([5, 2])
    segments = (np.arange(5) < lengths[:, None]).astype(int)
    at = lengths[:, None] - 1 + np.arange(7)  # the last place of the prompt, and the six that follow

    @jax.jit
    def cached(model):
        first, cache = model.prefill(Batch(decoder=Side(tokens=prompt, segment_ids=segments)), 11)
        model, cache = model.unstack(cache)

        def step(cache, tokens):
            logits, cache = model.step(tokens, cache)
            return cache, logits

        _, others = jax.lax.scan(step, cache, np.take_along_axis(tokens, at[:, 1:], 1).T)
        return first, *others

    whole = np.asarray(run(model, Batch(decoder=Side(tokens=tokens))))
    for places, logits in zip(at.T, cached(model), strict=True):
        np.testing.assert_allclose(logits, whole[np.arange(2), places], atol=1e-5, err_msg=str(places))


def test_a_cache_for_rows_shorter_than_a_block_shows_no_block():
    model = model_of(CONFIG)
    tokens = np.random.default_rng(0).integers(2, 40, (2, 2))
    whole = run(model, Batch(decoder=Side(tokens=tokens)))
    _, cache = model.prefill(Batch(decoder=Side(tokens=tokens[:, :1])), 2)
    np.testing.assert_allclose(model.step(tokens[:, 1], cache)[0], whole[:, 1], atol=1e-5)


def test_a_cache_has_a_third_more_and_the_kernels_are_counted():
    found, plain = costs(CONFIG, 12), costs(BASE, 12)
    assert found.cache == plain.cache * 4 / 3
    assert found.parameters - plain.parameters == 2 * 2 * 4 * 3 * 8 * 8  # layers, keys and values, heads


@pytest.mark.parametrize(
    ("new", "named"),
    [
        ({"architecture": "encoder-decoder"}, "model.architecture='encoder-decoder': it should be 'decoder'"),
        ({"attention.mask": "none"}, "model.attention.mask='none': it should be 'causal'"),
        ({"mixer.kind": "gru", "positions.kind": "none"}, "model.mixer.kind='gru': it should be 'attention'"),
        ({"block": "evolved"}, "model.block='evolved': it should be 'transformer'"),
        ({"sparsity.window": 4}, "model.sparsity=.*window=4"),
        ({"positions.kind": "relative-keys"}, "model.positions.kind='relative-keys'"),
    ],
)
def test_what_it_does_not_fit_is_refused_by_the_name_of_the_setting(new, named):
    with pytest.raises(SettingError, match=named):
        changes(CONFIG, new)
