"""Laws of the Funnel-Transformer. Packing and decoding are in test_transformer.py too."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from small_models import CONFIGS, TINY, example, features, joined, loss_and_gradients, made, make, padded, run

from lm.config.base import SettingError, changes
from lm.config.funnel import FunnelConfig
from lm.data.packing import PaddedTexts, make_packed_batch
from lm.nn.funnel import mean_pool
from lm.objectives.denoising import Lengths
from lm.train.flops import cache_bytes, costs, step_flops

NAME, FUNNEL = "funnel", {"funnel.blocks": 2}
PLAIN = CONFIGS["encoder-decoder"]
BATCH = example(4, 5, 6)


def test_a_position_is_the_mean_of_its_tokens_and_nan_where_they_are_of_two_examples():
    x = np.arange(12, dtype=np.float32).reshape(1, 6, 2)
    np.testing.assert_allclose(mean_pool(x[:, :5], None, 2)[0], [[1, 2], [5, 6], [8, 9]])
    found = mean_pool(x, np.array([[1, 1, 1, 0, 0, 0]]), 2)[0]
    np.testing.assert_allclose(found, [[1, 2], [4, 5], [0, 0]])
    mixed = mean_pool(x, np.array([[1, 1, 1, 2, 2, 2]]), 2)[0]
    assert np.isnan(mixed).any(-1).tolist() == [False, True, False]


def test_the_decoder_reads_rows_that_are_shorter_by_the_factor_of_each_block():
    assert FunnelConfig(blocks=3).pooling_layers(12) == (4, 8)
    assert FunnelConfig(blocks=3).pooling_layers(4) == (1, 3)
    model = made(changes(TINY, FUNNEL | {"num_encoder_layers": 4, "funnel.blocks": 3}))
    encoded = jax.eval_shape(lambda: model._encoder(*model._encoder_inputs(BATCH)).x)
    assert encoded.shape == (1, 2, 16)  # of 5 tokens
    # the last token of the text is in it, and a padding token is not
    longer = padded(BATCH, 8)
    with_other = replace(longer, encoder=replace(longer.encoder, tokens=longer.encoder.tokens + 0))
    with_other.encoder.tokens[:, 5:] = 7
    found = np.asarray(features(model, BATCH))
    np.testing.assert_allclose(features(model, with_other)[:, :6], found, atol=1e-5)
    last = replace(BATCH, encoder=replace(BATCH.encoder, tokens=BATCH.encoder.tokens.copy()))
    last.encoder.tokens[:, 4] += 1
    assert np.abs(features(model, last) - found).max() > 1e-4


def test_examples_that_are_not_aligned_are_never_mixed_silently():
    packed = features(make(NAME), padded(joined([BATCH, example(2, 6, 4)]), 12))
    assert np.isnan(packed).any()


def test_packed_examples_begin_at_multiples_and_lose_nothing():
    tokens = np.array([[5, 6, 7, 0], [8, 0, 0, 0], [9, 9, 9, 9]], np.int32)
    texts = PaddedTexts(tokens, np.array([3, 1, 4], np.int32), tokens > 0)
    rows, lengths = np.array([0, 0, 1]), Lengths(8, 8, 8)
    side = make_packed_batch(texts, texts, rows, "encoder-decoder", lengths, 2, pad_to_multiple_of=4).encoder
    assert side.tokens.tolist() == [[5, 6, 7, 0, 8, 0, 0, 0], [9, 9, 9, 9, 0, 0, 0, 0]]
    assert side.segment_ids.tolist() == [[1, 1, 1, 0, 2, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert side.positions.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]


@pytest.mark.slow
def test_recomputed_stacks_and_those_that_drop_out_nothing_give_the_same_loss_and_gradients():
    key = jax.random.key(7)
    expected = loss_and_gradients(make(NAME), BATCH, key)
    found = loss_and_gradients(make(NAME, **{"compile.remat": "full"}), BATCH, key)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    undropped = make(NAME, dropout=0.0)
    np.testing.assert_allclose(run(undropped, BATCH, key), run(undropped, BATCH), atol=1e-5)


def test_shorter_rows_are_counted():
    config, block = CONFIGS[NAME], 2 * (2 * 16 * 24)
    assert costs(config, 10).parameters == costs(PLAIN, 10).parameters
    # the second layer's MLP, and the keys and values that each layer of the decoder reads, see 5 of 10 tokens
    fewer = 5 * block + 2 * 5 * (2 * 2 * 16 * 32 + 6 * 2 * 2 * 32)
    assert step_flops(PLAIN, 1, 10, 6) - step_flops(config, 1, 10, 6) == 3 * fewer
    assert cache_bytes(PLAIN, 6, 10) - cache_bytes(config, 6, 10) == cache_bytes(PLAIN, 6, 10) - cache_bytes(
        PLAIN, 6, 5
    )


@pytest.mark.parametrize(
    "new",
    [
        {"architecture": "encoder"},
        {"funnel.blocks": 3},
        {"sparsity.window": 1},
        {"cross_attention.encoder_layers": "weighted"},
        {"residual": "parallel"},
    ],
)
def test_it_needs_an_encoder_of_a_decoder_without_parts_that_need_rows_of_one_length(new):
    with pytest.raises(SettingError, match=r"model\.funnel\.blocks"):
        changes(TINY, FUNNEL | new)
