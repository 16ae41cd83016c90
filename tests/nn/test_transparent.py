"""Laws of transparent attention. Packing and decoding are in test_transformer.py too."""

import jax
import numpy as np
import pytest
from small_models import CONFIGS, TINY, example, loss_and_gradients, make, run

from lm.config.base import SettingError, changes
from lm.train.flops import costs, step_flops

NAME = "transparent attention"
BATCH = example(4, 5, 6)


def reading(layer):
    """The model whose decoder reads one layer of the encoder alone, as all its layers do."""
    model = make(NAME)
    model.layer_weights.logits[...] = model.layer_weights.logits[...].at[layer].set(1e4)
    return model


@pytest.mark.slow
def test_reading_the_last_layer_alone_is_attention_to_the_encoders_output():
    model = reading(-1)
    plain = make("encoder-decoder")
    for stack in ("embed", "encoder", "decoder"):
        setattr(plain, stack, getattr(model, stack))
    np.testing.assert_allclose(run(model, BATCH), run(plain, BATCH), atol=1e-5)
    assert np.abs(run(model, BATCH) - run(reading(0), BATCH)).max() > 1e-3
    found = model.attention_weights(BATCH)
    for name, weights in plain.attention_weights(BATCH).items():
        np.testing.assert_allclose(found[name], weights, atol=1e-5)


@pytest.mark.slow
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients():
    key = jax.random.key(7)
    expected = loss_and_gradients(make(NAME), BATCH, key)
    assert np.abs(expected["layer_weights.logits"]).min() > 0
    found = loss_and_gradients(
        make(NAME, **{"compile.layers": "unroll", "compile.remat": "full"}), BATCH, key
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_its_weights_are_counted():
    found, plain = CONFIGS[NAME], CONFIGS["encoder-decoder"]
    assert costs(found, 10).parameters - costs(plain, 10).parameters == 3 * 2
    assert step_flops(found, 1, 10, 6) - step_flops(plain, 1, 10, 6) == 3 * 2 * 10 * 16 * 3 * 2


@pytest.mark.parametrize(
    "new", [{"architecture": "decoder"}, {"cross_attention.kind": "dot"}, {"shared_layers": True}]
)
def test_it_needs_a_decoder_whose_layers_read_an_encoder_each_for_itself(new):
    with pytest.raises(SettingError, match="model.cross_attention.encoder_layers='weighted'"):
        changes(TINY, {"cross_attention.encoder_layers": "weighted"} | new)
