"""Masked places are filled from what stands around them, and the least sure of them are thought over."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lm.evaluate.fill import fill, mask_predict
from lm.nn.config import ModelConfig

MASK, VOCABULARY = 1, 8
TEXT = {
    "encoder_input_tokens": np.array([[5, MASK, 3, MASK, 0], [MASK, 4, MASK, MASK, MASK]]),
    "encoder_segment_ids": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
}


@jax.tree_util.register_dataclass
@dataclass
class Neighbour:
    """Stands for a masked LM: after token x stands x + 1, and it is the surer of it the higher x; after
    masks, 7.
    """

    config = ModelConfig(architecture="encoder", vocab_size=VOCABULARY)
    strength: jax.Array

    def __call__(self, batch):
        before = jnp.pad(batch["encoder_input_tokens"], ((0, 0), (1, 0)), constant_values=2)[:, :-1]
        following = jnp.where(before == MASK, VOCABULARY - 1, (before + 1) % VOCABULARY)
        sureness = jnp.where(before == MASK, 0.1, before) * self.strength
        return jax.nn.one_hot(following, VOCABULARY) * sureness[..., None]


MODEL = Neighbour(jnp.float32(1.0))


def test_candidates_are_the_likeliest_tokens_at_each_mask_of_the_text():
    tokens, probabilities = fill(MODEL, TEXT, mask=MASK, k=2)
    assert tokens[:, 0].tolist() == [6, 4, 3, 5, 7]  # the mask in the padding is none
    np.testing.assert_allclose(probabilities[0, 0], np.exp(5) / (np.exp(5) + 7), rtol=1e-5)
    assert (probabilities[:, 0] > probabilities[:, 1]).all()
    assert fill(MODEL, TEXT, mask=MASK, k=100)[0].shape == (5, VOCABULARY)


def test_one_pass_fills_every_mask_with_its_likeliest_token_and_leaves_the_rest():
    tokens = mask_predict(MODEL, TEXT, iterations=1, mask=MASK)
    np.testing.assert_array_equal(tokens, [[5, 6, 3, 4, 0], [3, 4, 5, 7, MASK]])


def test_the_least_sure_of_the_masks_are_predicted_again_from_the_others():
    # Of three masks one is masked again in the second pass: that behind a mask, where the model knows
    # nothing.
    tokens = mask_predict(MODEL, TEXT, iterations=2, mask=MASK)
    np.testing.assert_array_equal(tokens[1], [3, 4, 5, 6, MASK])
    np.testing.assert_array_equal(mask_predict(MODEL, TEXT, iterations=3, mask=MASK), tokens)


def test_a_mask_is_never_an_answer():
    class Stubborn(Neighbour):
        def __call__(self, batch):
            return jax.nn.one_hot(jnp.full(batch["encoder_input_tokens"].shape, MASK), VOCABULARY)

    jax.tree_util.register_dataclass(Stubborn, data_fields=["strength"], meta_fields=[])
    assert (mask_predict(Stubborn(jnp.float32(1.0)), TEXT, iterations=2, mask=MASK)[:, :4] != MASK).all()
