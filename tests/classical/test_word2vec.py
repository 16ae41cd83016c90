"""Laws of skip-gram: its gradients, its windows, its draws, and what its vectors learn."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from skipgram import train_skipgram

from lm.classical.word2vec import (
    WordVectors,
    context_windows,
    initial_tables,
    join_documents,
    keep_probabilities,
    mean_loss,
    negative_sampling_gradients,
    negative_sampling_loss,
    noise_distribution,
    pad_text,
    sample_negatives,
    softmax_gradients,
    softmax_loss,
)
from lm.config.base import SettingError
from lm.config.classical import VectorsConfig

B, C, K, V, D = 4, 3, 5, 7, 6
WIDTH = 8  # of the vectors of toy texts
TINY = VectorsConfig(window=2, epochs=6, batch=16, learning_rate=0.1)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


WEIGHTS = jnp.array([[1, 1, 1], [1, 0, 1], [0, 0, 1], [0, 0, 0]], jnp.float32)
TARGETS = jnp.array([[0, 3, 3], [6, 1, 2], [5, 5, 4], [0, 1, 2]])


def test_the_softmax_loss_is_minus_the_log_probability_of_each_context():
    u, v = normal(0, B, D), normal(1, V, D)
    expected = 0.0
    for row, (targets, weights) in enumerate(zip(TARGETS, WEIGHTS, strict=True)):
        p = np.exp(np.asarray(v @ u[row]))
        expected -= (np.log(p / p.sum())[np.asarray(targets)] * np.asarray(weights)).sum()
    assert softmax_loss(u, v, TARGETS, WEIGHTS) == pytest.approx(expected, rel=1e-5)


def test_the_softmax_gradients_are_those_of_differentiation():
    u, v = normal(0, B, D), normal(1, V, D)
    expected = jax.grad(softmax_loss, argnums=(0, 1))(u, v, TARGETS, WEIGHTS)
    for ours, theirs in zip(softmax_gradients(u, v, TARGETS, WEIGHTS), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_softmax_gradients_of_one_pair_are_the_printed_ones():
    u, v, context = normal(0, 1, D), normal(1, V, D), 3
    p = jax.nn.softmax(v @ u[0])
    d_u, d_v = softmax_gradients(u, v, jnp.array([[context]]), jnp.ones((1, 1)))
    np.testing.assert_allclose(d_u[0], -v[context] + p @ v, atol=1e-5)
    np.testing.assert_allclose(d_v, (p - jnp.eye(V)[context])[:, None] * u, atol=1e-5)


def test_the_negative_loss_is_that_of_each_pair_with_the_negatives_of_its_centre():
    u, positive, negative = normal(0, B, D), normal(1, B, C, D), normal(2, B, K, D)
    expected = 0.0
    for b in range(B):
        for c in range(C):
            near, far = np.asarray(positive[b, c] @ u[b]), np.asarray(negative[b] @ u[b])
            pair = -np.log(1 / (1 + np.exp(-near))) - np.log(1 / (1 + np.exp(far))).sum()
            expected += float(WEIGHTS[b, c]) * pair
    assert negative_sampling_loss(u, positive, negative, WEIGHTS) == pytest.approx(expected, rel=1e-5)


def test_the_gradients_of_negative_sampling_are_those_of_differentiation():
    u, positive, negative = normal(0, B, D), normal(1, B, C, D), normal(2, B, K, D)
    d_u, d_v = negative_sampling_gradients(u, positive, negative, WEIGHTS)
    expected = jax.grad(negative_sampling_loss, argnums=(0, 1, 2))(u, positive, negative, WEIGHTS)
    np.testing.assert_allclose(d_u, expected[0], atol=1e-5)
    np.testing.assert_allclose(d_v, jnp.concatenate(expected[1:], axis=1), atol=1e-5)


@pytest.mark.parametrize("reach", [1, 2])
def test_pairs_lie_within_reach_and_in_one_document(reach):
    documents = [np.array([0, 1, 2, 3]), np.array([4]), np.array([], int), np.array([5, 6])]
    words, numbers = join_documents(documents, V)
    text = pad_text(words, numbers, 2, 9)
    places = 2 + np.arange(7)
    centres, contexts, weights = context_windows(jax.device_put(text), places, np.full(7, reach), 2)
    found = sorted(
        (int(centres[b]), int(contexts[b, c])) for b, c in zip(*np.nonzero(np.asarray(weights)), strict=True)
    )
    expected = sorted(
        (int(centre), int(context))
        for ids in documents
        for t, centre in enumerate(ids)
        for s, context in enumerate(ids)
        if 0 < abs(t - s) <= reach
    )
    assert found == expected


@pytest.mark.parametrize("counts", [[5, 1, 0, 80, 14], [3], [1] * 6])
def test_negatives_are_drawn_with_the_counts_to_the_power_of_three_quarters(counts):
    counts = np.array(counts)
    noise, power = noise_distribution(counts), counts**0.75
    # Each cell is drawn with 1/V, and gives its own word or its alias: the probabilities are exact.
    p = np.bincount(np.arange(len(counts)), noise.threshold, len(counts))
    p += np.bincount(noise.alias, 1 - noise.threshold, len(counts))
    np.testing.assert_allclose(p / len(counts), power / power.sum(), atol=1e-6)
    drawn = np.asarray(sample_negatives(jax.random.key(0), jax.device_put(noise), (100, 400)))
    share = np.bincount(drawn.ravel(), minlength=len(counts)) / drawn.size
    np.testing.assert_allclose(share, power / power.sum(), atol=0.01)


def test_subsampling_keeps_rare_words_and_frequent_ones_by_the_root_of_their_frequency():
    counts = np.array([9000, 990, 10, 0])
    np.testing.assert_allclose(
        keep_probabilities(counts, 0.01), [(0.01 / 0.9) ** 0.5, (0.01 / 0.099) ** 0.5, 1, 1]
    )
    assert (keep_probabilities(counts, 0.0) == 1).all()


def toy_texts():
    """Sentences in which "cat" and "dog" stand in the same places, as "red" and "blue" do in others."""
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(400):
        texts.append(f"the {rng.choice(['cat', 'dog'])} sleeps at home")
        texts.append(f"my {rng.choice(['red', 'blue'])} car drives fast")
    return texts


@pytest.fixture(scope="module")
def toy():
    """The words of the toy texts, and each text as their numbers."""
    split = [text.split() for text in toy_texts()]
    words = sorted({word for text in split for word in text})
    return words, [np.array([words.index(word) for word in text]) for text in split]


@pytest.mark.parametrize("negatives", [5, 0], ids=["negative-sampling", "softmax"])
@pytest.mark.parametrize("subsample", [0.0, 0.05])
def test_words_that_are_interchangeable_become_neighbours_and_the_loss_falls(toy, negatives, subsample):
    words, ids = toy
    config = replace(TINY, negatives=negatives, subsample=subsample)
    tables = train_skipgram(ids, (len(words), WIDTH), config, 0)
    untrained = initial_tables(jax.random.key(0), len(words), WIDTH)
    assert mean_loss(tables, ids, config, 1) < 0.8 * mean_loss(untrained, ids, config, 1)
    vectors = WordVectors(tuple(words), np.asarray(tables.centres))
    for one, other in (("cat", "dog"), ("red", "blue")):
        assert vectors.neighbours(one, 1)[0][0] == other and vectors.neighbours(other, 1)[0][0] == one


def test_the_same_seed_gives_the_same_tables_and_another_gives_others(toy):
    words, ids = toy
    config = replace(TINY, epochs=1, subsample=0.05)
    first, again, other = (train_skipgram(ids[:50], (len(words), WIDTH), config, seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not any((a == b).all() for a, b in zip(first, other, strict=True))


def test_only_words_of_the_text_are_moved_as_centres(toy):
    words, ids = toy
    missing = len(words)
    short = train_skipgram(ids[:5], (missing + 1, WIDTH), replace(TINY, epochs=1), 0)
    longer = train_skipgram(ids[:5], (missing + 1, WIDTH), replace(TINY, epochs=3), 0)
    assert (short.centres[missing] == longer.centres[missing]).all()
    assert (longer.contexts[missing] == 0).all()
    assert (short.centres[ids[0]] != longer.centres[ids[0]]).any(axis=1).all()


def test_an_update_is_a_step_of_gradient_descent_on_the_loss_of_the_batch():
    """One batch of one document, with all contexts and the full softmax: u and v move by -rate x gradient."""
    ids = np.array([0, 1, 2, 1, 3])
    rates = {"learning_rate": 0.5, "last_rate": 0.5}
    config = VectorsConfig(window=2, reach="whole", negatives=0, epochs=1, batch=5, **rates)
    untrained = initial_tables(jax.random.key(0), V, D)
    moved = train_skipgram([ids], (V, D), config, 0)
    text = jax.device_put(pad_text(*join_documents([ids], V), 2, 5))
    centres, contexts, weights = context_windows(text, 2 + np.arange(5), np.full(5, 2), 2)

    def loss(u, v):
        return softmax_loss(u[centres], v, contexts, weights)

    gradients = jax.grad(loss, argnums=(0, 1))(*untrained)
    for start, end, gradient in zip(untrained, moved, gradients, strict=True):
        np.testing.assert_allclose(end, start - 0.5 * gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("documents", "mend"),
    [
        ([], "no text"),
        ([[]], "no text"),
        ([[0, 7]], "word 7 .*0..6"),
        ([[-1]], "word -1"),
        ([[2**32]], "word 4294967296"),
    ],
)
def test_text_that_the_tables_do_not_fit_is_refused(documents, mend):
    with pytest.raises(SettingError, match=mend):
        train_skipgram([np.array(ids, int) for ids in documents], (V, WIDTH), TINY, 0)


def test_settings_without_sense_are_refused():
    for name in ("window", "batch", "tokens"):
        with pytest.raises(SettingError, match=f"vectors.{name}=0 should be at least 1"):
            VectorsConfig(**{name: 0})
    for name in ("negatives", "epochs"):
        with pytest.raises(SettingError, match=f"vectors.{name}=-1 should be at least 0"):
            VectorsConfig(**{name: -1})


VECTORS = WordVectors(
    ("bank", "river", "money", "tree"),
    np.array([[1, 0], [2, 1], [-1, 0], [0, 3]], np.float32),
)


def test_a_word_has_one_vector_in_every_sentence():
    river, money = VECTORS.vectors("river bank".split()), VECTORS.vectors("bank money money".split())
    assert (river[1] == money[0]).all() and (river[0] != money[0]).any()


def test_neighbours_are_ordered_by_cosine_whatever_the_lengths():
    names, cosines = zip(*VECTORS.neighbours("bank", 9), strict=True)
    assert names == ("river", "tree", "money")
    np.testing.assert_allclose(cosines, [2 / 5**0.5, 0, -1], atol=1e-6)
    assert VECTORS.neighbours("tree", 1)[0][0] == "river"


def test_a_misspelt_word_is_refused_with_the_nearest():
    with pytest.raises(SettingError, match="'rivre' has no vector; did you mean 'river'"):
        VECTORS.neighbours("rivre", 1)


def test_a_table_that_does_not_fit_the_words_is_refused():
    with pytest.raises(SettingError, match=r"centres should be \[1,D\]"):
        WordVectors(("bank",), np.zeros((2, 3)))
