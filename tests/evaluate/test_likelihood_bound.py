"""Masked diffusion on a distribution that can be summed over: the bound and the samples are exact."""

import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.model import ModelConfig, PositionsConfig
from lm.evaluate import likelihood_bound
from lm.evaluate.likelihood_bound import continuation_bounds, documents_bound
from lm.evaluate.loglikelihood import Masking, Window
from lm.evaluate.mask_filling import ancestral, most_confident_first

SYMBOLS, LENGTH = 3, 4  # texts are strings of the symbols 0, 1, 2
MASK = SYMBOLS
STRINGS = np.array(list(itertools.product(range(SYMBOLS), repeat=LENGTH)))
PROBABILITIES = np.random.default_rng(0).dirichlet(np.full(len(STRINGS), 0.3))
MASKS_ALONE = Masking(MASK)
put = jax.device_put


@jax.tree_util.register_dataclass
@dataclass
class Exact:
    """Predicts the conditional probability of each symbol given those that are not masked, from a table.

    The table [4^L,L,4] has the log-probabilities of the symbols at each position of each string with masks.
    """

    config = ModelConfig(architecture="encoder", vocab_size=SYMBOLS + 1)
    table: jax.Array

    def __call__(self, batch, key=None):
        tokens = batch.encoder.tokens
        index = (tokens[:, :LENGTH] * (SYMBOLS + 1) ** jnp.arange(LENGTH)[None]).sum(1)
        return self.table[index][:, : tokens.shape[1]]


def table(predict):
    """The table of ``predict``: (string with masks, the strings that match it) -> probabilities [L,3]."""
    rows = []
    for masked in itertools.product(range(SYMBOLS + 1), repeat=LENGTH):
        masked = np.array(masked[::-1])  # the first position counts least
        fits = ((STRINGS == masked) | (masked == MASK)).all(1)
        rows.append(predict(masked, fits))
    probabilities = np.concatenate([rows, np.full((len(rows), LENGTH, 1), 1e-30)], axis=-1)
    return Exact(jnp.asarray(np.log(np.maximum(probabilities, 1e-30)), jnp.float32))


def conditionals(_masked, fits):
    weights = PROBABILITIES * fits
    shares = [[weights[STRINGS[:, i] == symbol].sum() for symbol in range(SYMBOLS)] for i in range(LENGTH)]
    return np.array(shares) / weights.sum()


def guesses(masked, _fits):
    return np.random.default_rng(masked + 1).dirichlet(np.ones(SYMBOLS), LENGTH)


EXACT = table(conditionals)
INEXACT = table(guesses)  # no distribution has these conditional probabilities


def enumerated(model, text):
    """The bound of a text, summed over all sets of masks."""
    total = 0.0
    for count in range(1, LENGTH + 1):
        for chosen in itertools.combinations(range(LENGTH), count):
            masked = text.copy()
            masked[list(chosen)] = MASK
            log_probs = model(Batch(encoder=Side(tokens=jnp.asarray(masked)[None])))[0]
            loss = -sum(float(log_probs[i, text[i]]) for i in chosen)
            total += loss / count / math.comb(LENGTH, count)
    return total


def test_the_bound_of_exact_conditional_probabilities_is_the_entropy_of_their_distribution():
    bounds = continuation_bounds(EXACT, [((), text) for text in STRINGS], put, MASKS_ALONE, draws=64)
    entropy = -(PROBABILITIES * np.log(PROBABILITIES)).sum()
    error = math.sqrt((PROBABILITIES**2 * bounds.variances).sum())
    assert 0 < error < 0.05
    assert abs((PROBABILITIES * bounds.nats).sum() - entropy) < 3 * error
    np.testing.assert_allclose(bounds.nats, -np.log(PROBABILITIES), atol=5 * np.sqrt(bounds.variances).max())


@pytest.mark.parametrize("model", [EXACT, INEXACT])
def test_the_bound_is_the_mean_over_all_sets_of_masks_and_19_of_20_intervals_contain_it(model):
    text, count = STRINGS[50], 2_000
    bounds = continuation_bounds(model, [((), text)] * count, put, MASKS_ALONE, draws=16)
    true = enumerated(model, text)
    assert bounds.nats.mean() == pytest.approx(true, abs=4 * bounds.nats.std() / math.sqrt(count))
    assert bounds.variances.mean() == pytest.approx(bounds.nats.var(), rel=0.2)
    corpora = bounds.nats.reshape(-1, 20).sum(1), bounds.variances.reshape(-1, 20).sum(1)
    inside = np.abs(corpora[0] - 20 * true) < 1.96 * np.sqrt(corpora[1])
    assert 0.89 <= inside.mean() <= 0.99


def test_a_wrong_model_has_a_bound_above_the_entropy():
    bounds = continuation_bounds(INEXACT, [((), text) for text in STRINGS], put, MASKS_ALONE, draws=16)
    assert (PROBABILITIES * bounds.nats).sum() > -(PROBABILITIES * np.log(PROBABILITIES)).sum() + 0.1


def test_a_context_is_never_masked_and_a_single_token_has_its_exact_probability():
    text = STRINGS[50]
    bounds = continuation_bounds(EXACT, [(text[:-1], text[-1:])], put, MASKS_ALONE, draws=2)
    same_start = (STRINGS[:, :-1] == text[:-1]).all(1)
    expected = -math.log(PROBABILITIES[50] / PROBABILITIES[same_start].sum())
    assert bounds.nats[0] == pytest.approx(expected, rel=1e-5)
    assert bounds.variances[0] == 0


def test_the_sets_of_masks_are_the_same_for_all_models_and_whatever_comes_after():
    requests = [((), text) for text in STRINGS[:5]]
    alone = continuation_bounds(EXACT, requests[:3], put, MASKS_ALONE, draws=4)
    together = continuation_bounds(EXACT, requests, put, MASKS_ALONE, draws=4)
    np.testing.assert_allclose(alone.nats, together.nats[:3], rtol=1e-6)


def test_an_odd_number_of_draws_is_refused_since_their_differences_tell_the_variance():
    with pytest.raises(SettingError, match="draws=3.*even"):
        continuation_bounds(EXACT, [((), STRINGS[0])], put, MASKS_ALONE, draws=3)


def test_a_text_to_score_that_holds_the_mask_is_refused_since_its_probability_is_0():
    with pytest.raises(SettingError, match="mask"):
        continuation_bounds(EXACT, [([0], [1, 2, 0]), ([0], [MASK, 1, 2])], put, MASKS_ALONE, 2)
    assert np.isfinite(continuation_bounds(EXACT, [([MASK], [1, 2, 0])], put, MASKS_ALONE, 2).nats).all()


def test_a_document_is_scored_once_with_its_end_after_the_end_of_another():
    end = 2  # a symbol of the toy stands for [SEP]
    framed = Masking(MASK, (), (end,))
    documents = [[0, 1, 0, 1, 1, end], [1, end]]
    model = table(lambda _masked, _fits: np.full((LENGTH, SYMBOLS), 1 / SYMBOLS))
    bounds = documents_bound(model, documents, Window(3, 2), put, framed, draws=8)
    # windows of 2, 2 and 2 tokens, of which the first follows an end; the second document is one window
    np.testing.assert_allclose(bounds.nats, np.array([2, 2, 2, 2]) * math.log(SYMBOLS), rtol=1e-5)


def all_masked(rows):
    tokens = np.full((rows, LENGTH), MASK)
    return Batch(encoder=Side(tokens=tokens, segment_ids=np.ones_like(tokens)))


def frequencies(tokens):
    index = (np.asarray(tokens) * SYMBOLS ** np.arange(LENGTH)[::-1]).sum(1)
    return np.bincount(index, minlength=len(STRINGS))


def p_value(tokens):
    """Of a chi-square test that strings have PROBABILITIES; rare strings count together."""
    found, expected = frequencies(tokens), PROBABILITIES * len(tokens)
    rare = expected < 5
    found = np.append(found[~rare], found[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return chisquare(found, expected).pvalue


def test_ancestral_samples_of_many_steps_have_the_distribution_and_those_of_one_step_do_not():
    rows = 4_000
    many = ancestral(EXACT, all_masked(rows), jax.random.key(0), iterations=100, mask=MASK)
    assert p_value(many) > 0.01
    one = ancestral(EXACT, all_masked(rows), jax.random.key(0), iterations=1, mask=MASK)
    assert p_value(one) < 1e-6  # all tokens are drawn independently


def test_with_a_step_per_token_the_likeliest_token_of_the_surest_position_comes_first():
    tokens = most_confident_first(
        EXACT, all_masked(4), jax.random.key(0), iterations=LENGTH, mask=MASK, temperature=0.0
    )
    text = np.full(LENGTH, MASK)
    while (text == MASK).any():  # by hand
        log_probs = np.array(EXACT(Batch(encoder=Side(tokens=jnp.asarray(text)[None])))[0])
        log_probs[text != MASK] = -np.inf
        position, symbol = np.unravel_index(log_probs.argmax(), log_probs.shape)
        text[position] = symbol
    assert (np.asarray(tokens) == text).all()


@pytest.mark.parametrize("iterations", [1, 2, 3, 7])
def test_given_tokens_stay_and_every_mask_is_filled_whatever_the_number_of_steps(iterations):
    batch = all_masked(5)
    tokens = batch.encoder.tokens.copy()
    tokens[:, 1] = 2
    batch = replace(batch, encoder=replace(batch.encoder, tokens=tokens))
    key = jax.random.key(1)
    for filled in (
        ancestral(EXACT, batch, key, iterations=iterations, mask=MASK),
        most_confident_first(EXACT, batch, key, iterations=iterations, mask=MASK, temperature=1.0),
    ):
        filled = np.asarray(filled)
        assert (filled[:, 1] == 2).all() and (filled != MASK).all()


@pytest.mark.parametrize("wrong", [-1, SYMBOLS + 1])
def test_an_id_that_is_no_token_has_no_bound(wrong):
    bounds = continuation_bounds(EXACT, [((0, 1, 2), (wrong,))], put, MASKS_ALONE, draws=2)
    assert np.isnan(bounds.nats).all()


def test_a_text_that_is_too_long_is_refused_before_any_is_scored(monkeypatch):
    config = replace(EXACT.config, positions=PositionsConfig(kind="learned", max_length=LENGTH))
    model = replace(EXACT)
    monkeypatch.setattr(Exact, "config", config)
    monkeypatch.setattr(likelihood_bound, "REQUESTS_AT_ONCE", 1)
    monkeypatch.setattr(likelihood_bound, "run_batched", lambda *_: pytest.fail("a text was scored"))
    requests = [((), STRINGS[0]), (STRINGS[0], STRINGS[1])]
    with pytest.raises(SettingError, match=f"a row of {2 * LENGTH} tokens exceeds .*max_length={LENGTH}"):
        continuation_bounds(model, requests, put, MASKS_ALONE, draws=2)
