"""What n-grams write, and what is drawn of them, are the probabilities that they give."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chisquare

from experiments.evaluate.generation import ngram_continuations
from experiments.figures import model_inspection
from experiments.figures.model_inspection import draw_ranked_tokens, ranked_next_tokens
from experiments.runs.trained import TrainedNgrams
from lm.classical.ngram import count_ngrams, estimate_kneser_ney, next_token_probs
from lm.config.decoding import Decoding

V, PAD, EOS = 6, 0, 1
LEAST_P = 1e-3  # of a chi-square test whose seed is fixed
SAMPLES = 2000


def ngrams_of(order):
    """N-grams of 60 documents of ids 2 to 5, of which some are frequent, with an EOS each."""
    rng = np.random.default_rng(0)
    documents = [[*(2 + rng.binomial(3, 0.3, n)).tolist(), EOS] for n in rng.integers(0, 12, 60)]
    tokens, offsets = np.concatenate(documents), np.cumsum([0, *map(len, documents)])
    model = estimate_kneser_ney(count_ngrams(tokens, offsets, order, V))
    return TrainedNgrams(model, SimpleNamespace(pad=PAD, eos=EOS), "")


@pytest.fixture(scope="module")
def trigrams():
    return ngrams_of(3)


def warped(probs, decoding):
    """The probabilities that are sampled from, as the options say."""
    probs = probs ** (1 / decoding.temperature)
    kept = np.argsort(-probs)[: decoding.top_k or V]
    shares = probs[kept] / probs[kept].sum()
    kept = kept[np.cumsum(shares) - shares < decoding.top_p]
    return np.where(np.isin(np.arange(V), kept), probs, 0) / probs[kept].sum()


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(2, temperature=1.0),
        Decoding(2, temperature=2.0),
        Decoding(2, temperature=1.0, top_k=3),
        Decoding(2, temperature=1.0, top_p=0.8),
    ],
)
def test_pairs_of_tokens_are_sampled_as_often_as_their_probabilities_say(trigrams, decoding):
    prompt = [2, 3]
    found = Counter(map(tuple, ngram_continuations(trigrams, [prompt] * SAMPLES, decoding, seed=0).tolist()))
    first = warped(next_token_probs(trigrams.model, prompt), decoding)
    expected = {(EOS, PAD): first[EOS]}
    for token in {*range(V)} - {EOS}:
        behind = warped(next_token_probs(trigrams.model, [*prompt, token]), decoding)
        expected |= {(token, second): first[token] * behind[second] for second in range(V)}
    assert {*found} <= {pair for pair, prob in expected.items() if prob > 0}
    likely = [pair for pair, prob in expected.items() if prob * SAMPLES >= 5]
    counts = np.array([found[pair] for pair in likely])
    shares = np.array([expected[pair] for pair in likely])
    rest = SAMPLES - counts.sum(), 1 - shares.sum()
    if rest[1] * SAMPLES >= 5:
        counts, shares = np.append(counts, rest[0]), np.append(shares, rest[1])
    assert chisquare(counts, counts.sum() * shares / shares.sum()).pvalue > LEAST_P


@pytest.mark.parametrize("order", [1, 2, 5])
def test_without_a_temperature_each_token_is_the_likeliest_one_until_the_end_of_the_document(order):
    ngrams = ngrams_of(order)
    prompts = [[], [2], [5, 5, 4], [4, 2, 2, 3, 3]]
    answers = ngram_continuations(ngrams, prompts, Decoding(12), seed=0)
    for prompt, answer in zip(prompts, answers.tolist(), strict=True):
        wanted = []
        while len(wanted) < 12 and EOS not in wanted:
            wanted.append(int(next_token_probs(ngrams.model, [*prompt, *wanted]).argmax()))
        assert answer == wanted + [PAD] * (12 - len(wanted))


def test_a_seed_samples_the_same_texts_again_and_equal_prompts_get_different_ones(trigrams):
    sampled = Decoding(16, temperature=1.0)
    first, again, other = (
        ngram_continuations(trigrams, [[2]] * 4, sampled, seed).tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len({*map(tuple, first)}) > 1


def test_the_probabilities_in_the_picture_are_those_of_the_model_and_each_column_sums_to_one(
    trigrams, monkeypatch
):
    ids = [2, 2, 5, 3]
    tokens, probs = ranked_next_tokens(trigrams.model, ids, V)
    for end in range(len(ids) + 1):
        wanted = next_token_probs(trigrams.model, ids[:end])
        assert probs[end].tolist() == wanted[tokens[end]].tolist() == sorted(wanted, reverse=True)
        assert sorted(tokens[end].tolist()) == [*range(V)]
    _, likeliest = ranked_next_tokens(trigrams.model, ids, 2)
    assert likeliest.tolist() == probs[:, :2].tolist()
    drawn = []
    monkeypatch.setattr(model_inspection, "draw_heat_maps", lambda panels, *_: drawn.extend(panels))
    draw_ranked_tokens(["[START]", *map(str, ids)], tokens[:, :2].astype(str), likeliest, "")
    assert drawn[0].values.shape == (3, 5)
    np.testing.assert_allclose(drawn[0].values[:2].T, likeliest)
    np.testing.assert_allclose(drawn[0].values.sum(0), 1, rtol=1e-12)
