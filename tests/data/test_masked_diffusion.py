"""Rows of masked diffusion: how many tokens are masked, what they weigh, and that the loss is unbiased."""

import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.make_batches import OneWindow
from scipy.stats import kstest

from lm.config.base import SettingError
from lm.config.experts import ExpertsConfig
from lm.config.model import ModelConfig
from lm.config.training import LossConfig
from lm.data.batches import Batches, evenly_spread_uniforms
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import EncodedDocuments
from lm.data.pretraining import pretraining_rows
from lm.nn.experts import RouterStatistics
from lm.objectives.denoising import OBJECTIVES
from lm.train.losses import masked_lm
from lm.train.step import count_tokens, normalize_loss_weights

EOS, CLS, MASK, VOCABULARY_SIZE = 1, 10, 11, 12
VOCABULARY = SimpleNamespace(
    vocab_size=VOCABULARY_SIZE, num_sentinels=2, eos=EOS, sep=EOS, mask=MASK, cls=CLS, first_regular_id=3
)
TEXT = np.arange(5, 10)
DOCUMENTS = EncodedDocuments(np.tile(TEXT, 420), np.array([0, 2_100]))  # each row holds TEXT
SHORT = EncodedDocuments(np.tile(TEXT, 400), np.arange(0, 2_001, 10))  # [SEP] after every ten tokens
DIFFUSION = ("masked-diffusion", "any-order")


def batches(name, documents=DOCUMENTS, length=7, size=512, seed=3, **changes):
    objective = replace(OBJECTIVES[name], **changes)
    rows = pretraining_rows(
        CorpusSampler(OneWindow(documents, VOCABULARY), 1, seed),
        objective,
        architecture="encoder",
        inputs_length=length,
        batch_size=size,
    )
    return Batches(rows, size)


def whole(name, **settings):
    return batches(name, **settings)(2, slice(None))


@pytest.mark.parametrize("name", DIFFUSION)
def test_weights_of_masked_tokens_add_up_to_the_number_of_tokens_on_average(name):
    batch = whole(name, length=32, size=4_096)
    weights = batch.encoder.loss_weights
    assert (batch.num_loss_tokens == 30).all()
    assert ((weights > 0) == (batch.encoder.tokens == MASK)).all()
    sums = weights.sum(1, dtype=float) / 30
    assert sums.mean() == pytest.approx(1, abs=4 * sums.std() / math.sqrt(len(sums)) + 1e-6)
    for row, masked in zip(weights, (weights > 0).sum(1), strict=True):
        assert len(set(row[row > 0])) <= 1  # one weight per row
        if name == "any-order":
            assert row.max() * masked == pytest.approx(30)


def test_each_number_of_masks_is_equally_likely_in_any_order_and_all_but_none_in_diffusion():
    for name in DIFFUSION:
        counts = (whole(name, size=6_000).encoder.loss_weights > 0).sum(1)
        shares = np.bincount(counts, minlength=6) / len(counts)
        # the number of masks at a uniform rate is uniform too, in 0 to L
        expected = np.full(6, 1 / 6) if name == "masked-diffusion" else np.array([0, *[1 / 5] * 5])
        np.testing.assert_allclose(shares, expected, atol=0.02)


def test_separators_of_documents_are_masked_since_the_whole_text_has_a_probability_and_the_frame_is_not():
    for name in DIFFUSION:
        side = whole(name, documents=SHORT, length=32).encoder
        is_frame = np.zeros(side.tokens.shape, bool)
        is_frame[:, [0, -1]] = True
        assert not (side.loss_weights[is_frame] > 0).any()
        separators = (side.targets == EOS) & ~is_frame
        assert 0.4 < (side.loss_weights[separators] > 0).mean() < 0.6
        assert not side.content[separators].any()  # an end is no content
    masked = whole("masked-lm", documents=SHORT, length=32).encoder
    assert not (masked.loss_weights[masked.targets == EOS] > 0).any()


@pytest.mark.parametrize("name", DIFFUSION)
def test_a_row_depends_on_its_seed_and_number_alone(name):
    make = batches(name, length=32, size=16)
    batch, part = make(5, slice(None)), make(5, slice(4, 9))
    for feature, values in batch.features().items():
        assert (part.features()[feature] == values[4:9]).all()
    assert (make(6, slice(None)).encoder.tokens != batch.encoder.tokens).any()
    other = batches(name, length=32, size=16, seed=4)(5, slice(None))
    assert (other.encoder.loss_weights != batch.encoder.loss_weights).any()


def test_rates_of_consecutive_rows_are_spread_evenly_and_each_is_uniform_over_seeds():
    for first in (0, 7, 10**12):
        rates = np.sort(evenly_spread_uniforms(3, np.arange(first, first + 32)))
        gaps = np.diff(np.concatenate([rates, rates[:1] + 1]))
        assert gaps.max() < 2 / 32  # of independent ones the largest is about 4 / 32
    over_seeds = [evenly_spread_uniforms(seed, np.array([12]))[0] for seed in range(500)]
    assert kstest(over_seeds, "uniform").pvalue > 0.01


@jax.tree_util.register_dataclass
@dataclass
class Guesses:
    """Predicts the same for every text with the same masks: logits [32,7,V] by the set of masks."""

    table: jax.Array

    def features(self, batch, key=None):
        is_mask = batch.encoder.tokens[:, 1:6] == MASK
        return self.table[(is_mask * 2 ** jnp.arange(5)[None]).sum(1)]

    def logits(self, x):
        return x


MODEL = Guesses(jnp.asarray(np.random.default_rng(0).normal(size=(32, 7, VOCABULARY_SIZE)), jnp.float32))


def enumerated(table):
    """The bound of TEXT [nats per token], summed over all sets of masks."""
    log_probs, total = jax.nn.log_softmax(table), 0.0
    for count in range(1, 6):
        for chosen in itertools.combinations(range(5), count):
            pattern = sum(2**i for i in chosen)
            loss = -sum(log_probs[pattern, 1 + i, TEXT[i]] for i in chosen)
            total += loss / count / math.comb(5, count)
    return total / 5


@jax.jit
def loss_and_sums(table, batch):
    return masked_lm(Guesses(table), batch, None, LossConfig(z_loss=0.0))


mean_gradient = jax.jit(jax.grad(lambda table, batch: loss_and_sums(table, normalize_loss_weights(batch))[0]))


@pytest.mark.parametrize("name", DIFFUSION)
def test_the_loss_is_an_unbiased_estimate_of_the_bound_per_token(name):
    make, losses = batches(name), []
    for step in range(40):
        batch = make(step, slice(None))
        loss, sums = loss_and_sums(MODEL.table, normalize_loss_weights(batch))
        losses.append(float(loss))
        assert float(sums["loss"][0]) == pytest.approx(float(loss))
        assert float(sums["loss"][1]) == pytest.approx(1)
        assert float(count_tokens(batch)["tokens"]) == 512 * 5
    error = np.std(losses) / math.sqrt(len(losses))
    assert error < 0.02
    assert np.mean(losses) == pytest.approx(float(enumerated(MODEL.table)), abs=4 * error)


@pytest.mark.parametrize("name", DIFFUSION)
def test_the_gradient_is_an_unbiased_estimate_of_the_gradient_of_the_bound(name):
    make = batches(name)
    gradients = np.stack([mean_gradient(MODEL.table, make(step, slice(None))) for step in range(30)])
    true = np.asarray(jax.grad(enumerated)(MODEL.table))
    errors = gradients.std(0) / math.sqrt(len(gradients))
    assert np.abs(gradients.mean(0) - true).sum() < 1.5 * errors.sum()
    assert np.corrcoef(gradients.mean(0).ravel(), true.ravel())[0, 1] > 0.99


def test_evaluation_of_unnormalised_weights_is_the_same_mean():
    batch = whole("masked-diffusion")
    _, sums = loss_and_sums(MODEL.table, batch)
    total, count = map(float, sums["loss"])
    assert count == 512 * 5
    normalized, _ = loss_and_sums(MODEL.table, normalize_loss_weights(batch))
    assert total / count == pytest.approx(float(normalized), rel=1e-5)


def test_metrics_of_routers_are_means_over_rows_whatever_the_weights_of_the_masks():
    class Routed(Guesses):
        config = ModelConfig(experts=ExpertsConfig(count=2))

        def outputs(self, batch, key):
            return SimpleNamespace(x=self.features(batch), router=RouterStatistics(*jnp.ones((3, 512))))

    batch = normalize_loss_weights(whole("masked-diffusion"))
    _, sums = masked_lm(Routed(MODEL.table), batch, None, LossConfig())
    for name in ("balance_loss", "router_z_loss", "dropped_tokens"):
        total, weights = map(float, sums[name])
        assert total * Routed.config.num_expert_layers == pytest.approx(1) and weights == pytest.approx(1)


@pytest.mark.parametrize("most", [1, 5])  # of few masks, logits are computed at the masks alone
def test_the_loss_is_the_weighted_sum_over_masks_divided_by_the_number_of_all_tokens(most):
    batch = whole("any-order", size=64)
    weights = np.asarray(batch.encoder.loss_weights)
    rows = (weights > 0).sum(1) <= most
    some = batch.map(lambda array: array[rows])
    log_probs = jax.nn.log_softmax(MODEL.features(some))
    targets = np.asarray(some.encoder.targets)[:, :, None]
    expected = -(jnp.take_along_axis(log_probs, targets, axis=-1)[:, :, 0] * weights[rows]).sum()
    _, sums = loss_and_sums(MODEL.table, some)
    np.testing.assert_allclose(sums["loss"], (expected, 5 * rows.sum()), rtol=1e-5)


@pytest.mark.parametrize("changes", [{"inputs": "masks-random-or-same"}, {"pairs": "next-sentence"}])
def test_what_would_make_the_bound_invalid_is_refused(changes):
    with pytest.raises(SettingError, match=rf"objective.{next(iter(changes))}=.*uniform-rate"):
        batches("masked-diffusion", **changes)
