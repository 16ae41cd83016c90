"""Masked places are filled from what stands around them, and the least sure of them are thought over."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import make

from lm.batch import Batch, Side
from lm.config.model import ModelConfig
from lm.evaluate.loglikelihood import continuation_log_probs
from lm.evaluate.mask_filling import (
    fill_masks,
    gibbs,
    infill,
    mask_predict,
    metropolis_hastings,
    sentinel_spans,
)

MASK, VOCABULARY = 1, 8
TEXT = Batch(
    encoder=Side(
        tokens=np.array([[5, MASK, 3, MASK, 0], [MASK, 4, MASK, MASK, MASK]]),
        segment_ids=np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]),
    )
)


@jax.tree_util.register_dataclass
@dataclass
class Neighbour:
    """Stands for a masked LM: after token x stands x + 1, and it is the surer of it the higher x; after
    masks, 7.
    """

    config = ModelConfig(architecture="encoder", vocab_size=VOCABULARY)
    strength: jax.Array

    def __call__(self, batch):
        before = jnp.pad(batch.encoder.tokens, ((0, 0), (1, 0)), constant_values=2)[:, :-1]
        following = jnp.where(before == MASK, VOCABULARY - 1, (before + 1) % VOCABULARY)
        sureness = jnp.where(before == MASK, 0.1, before) * self.strength
        return jax.nn.one_hot(following, VOCABULARY) * sureness[..., None]


MODEL = Neighbour(jnp.float32(1.0))


def test_candidates_are_the_likeliest_tokens_at_each_mask_of_the_text():
    tokens, probabilities = fill_masks(MODEL, TEXT, mask=MASK, k=2)
    assert tokens[:, 0].tolist() == [6, 4, 3, 5, 7]  # the mask in the padding is none
    np.testing.assert_allclose(probabilities[0, 0], np.exp(5) / (np.exp(5) + 7), rtol=1e-5)
    assert (probabilities[:, 0] > probabilities[:, 1]).all()
    assert fill_masks(MODEL, TEXT, mask=MASK, k=100)[0].shape == (5, VOCABULARY)


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
            return jax.nn.one_hot(jnp.full(batch.encoder.tokens.shape, MASK), VOCABULARY)

    jax.tree_util.register_dataclass(Stubborn, data_fields=["strength"], meta_fields=[])
    assert (mask_predict(Stubborn(jnp.float32(1.0)), TEXT, iterations=2, mask=MASK)[:, :4] != MASK).all()


@jax.tree_util.register_dataclass
@dataclass
class Joint:
    """A masked LM whose conditionals are those of ``table`` [4,4]: of two tokens that stand side by side."""

    config = ModelConfig(architecture="encoder", vocab_size=4)
    table: jax.Array

    def __call__(self, batch):
        tokens = batch.encoder.tokens
        known = jnp.pad(self.table, ((0, 1), (0, 1)))  # 4: nothing stands there
        left = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=4)[:, :-1]
        right = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=4)[:, 1:]
        share = jnp.where((tokens == 0)[..., None], 0, known[left, :4] + known.T[right, :4])
        hidden = (tokens == MASK)[..., None]  # a token that is not hidden is given away as 0
        return jnp.log(jnp.where(hidden, share + 1e-9, jnp.eye(4)[0] + 1e-9))


TABLE = np.zeros((4, 4))  # of the tokens 2 and 3
TABLE[2:, 2:] = [[0.45, 0.05], [0.2, 0.3]]
PAIRS = Batch(encoder=Side(tokens=np.full((4096, 2), MASK)))


def test_gibbs_sampling_from_the_conditionals_of_a_joint_distribution_draws_from_it():
    tokens = np.asarray(gibbs(Joint(jnp.asarray(TABLE)), PAIRS, jax.random.key(0), iterations=12, mask=MASK))
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(tokens.T), 1)
    deviation = np.sqrt(TABLE * (1 - TABLE) / len(tokens))
    assert (np.abs(counts / len(tokens) - TABLE) <= 4 * deviation).all()


def test_metropolis_hastings_draws_texts_in_proportion_to_their_pseudo_likelihood():
    joint = np.zeros((4, 4))  # of all tokens but the mask, so that every text has a probability
    joint[np.ix_([0, 2, 3], [0, 2, 3])] = [[0.1, 0.05, 0.05], [0.1, 0.3, 0.05], [0.02, 0.13, 0.2]]
    tokens, accepted = metropolis_hastings(
        Joint(jnp.asarray(joint)), PAIRS, jax.random.key(0), iterations=12, mask=MASK
    )
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(np.asarray(tokens).T), 1)
    due = joint**2 / (joint.sum(0) * joint.sum(1, keepdims=True) + 1e-9)  # p(a | b) p(b | a)
    due /= due.sum()
    deviation = np.sqrt(due * (1 - due) / len(tokens))
    assert (np.abs(counts / len(tokens) - due) <= 4 * deviation + 1e-6).all()
    assert np.abs(due - joint).max() > 0.05 and 0.3 < accepted.mean() < 1


def test_a_pass_visits_each_position_once_in_an_order_of_each_rows_own():
    turns = np.zeros((4, 4))
    turns[MASK, 2] = turns[2, MASK] = 1  # beside a mask stands 2,
    turns[2, 3] = turns[3, 2] = 1  # and beside 2 stands 3
    tokens = gibbs(Joint(jnp.asarray(turns)), PAIRS, jax.random.key(0), iterations=1, mask=MASK)
    orders, counts = np.unique(tokens, axis=0, return_counts=True)
    assert orders.tolist() == [[2, 3], [3, 2]] and (np.abs(counts - 2048) < 4 * 32).all()


def many(batch):
    return batch.map(lambda values: np.tile(values, (64, 1)))


def test_a_key_repeats_gibbs_sampling_and_neither_what_is_given_nor_padding_changes():
    first, again, other = (
        np.asarray(gibbs(MODEL, many(TEXT), jax.random.key(key), iterations=3, mask=MASK))
        for key in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    given = many(TEXT).encoder.tokens
    hidden = (given == MASK) & (many(TEXT).encoder.segment_ids > 0)
    np.testing.assert_array_equal(first[~hidden], given[~hidden])
    assert (first[hidden] != MASK).all()


def test_a_text_without_a_mask_stays_as_it_is():
    given = Batch(encoder=Side(tokens=np.array([[5, 3, 4]])))
    np.testing.assert_array_equal(
        gibbs(MODEL, given, jax.random.key(0), iterations=2, mask=MASK), [[5, 3, 4]]
    )


@pytest.mark.parametrize("name", ["encoder-decoder", pytest.param("bart-base", marks=pytest.mark.slow)])
def test_answers_that_fill_gaps_have_the_probability_of_their_tokens_the_likeliest_first(name):
    model = make(name)
    text = [5, 6, 7, 3]
    batch = Batch(encoder=Side(tokens=np.array([text]), segment_ids=np.ones((1, 4), np.int32)))
    answers, shares = infill(model, batch, max_length=3, k=4)
    eos = model.config.special.eos
    ids = [row[: row.index(eos) + 1] if eos in row else row for row in answers[0].tolist()]
    due = np.exp(continuation_log_probs(model, [(text, answer) for answer in ids], jax.device_put))
    np.testing.assert_allclose(shares[0], due, rtol=1e-4)
    assert len({*map(tuple, ids)}) == 4
    finished = [share for share, answer in zip(shares[0], ids, strict=True) if answer[-1] == eos]
    assert finished == sorted(finished, reverse=True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([99, 5, 6, 98, 7, 97], [[5, 6], [7]]),  # several tokens for one gap, and a sentinel at the end
        ([99, 5, 6], [[5, 6], None]),
        ([4, 98, 7, 99, 98, 8], [[], [7]]),  # in another order, one empty, one twice
        ([], [None, None]),
    ],
)
def test_what_t5_writes_behind_a_sentinel_fills_its_gap(answer, expected):
    assert sentinel_spans(answer, [99, 98], 97) == expected
