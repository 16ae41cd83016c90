"""n-grams: counts, texts drawn from them, Kneser-Ney probabilities, and files of them."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from lm.classical.ngram import (
    count_ngrams,
    estimate_kneser_ney,
    load_kneser_ney,
    next_token_probs,
    save_kneser_ney,
    token_log_probs,
)
from lm.classical.tables import load_tables, save_tables
from lm.config.base import DataError, SettingError
from lm.config.classical import MAX_ORDER
from lm.metrics import Likelihood

V, BEGIN = 7, 7
ORDERS = range(1, MAX_ORDER + 1)


def flat(documents):
    """Tokens and offsets, as a corpus is stored."""
    return np.array([t for d in documents for t in d], np.uint16), np.cumsum([0, *map(len, documents)])


def drawn_documents(seed, count=30, vocab_size=V - 1):
    """Documents of 0 to 19 tokens, some frequent; the last id never occurs."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, vocab_size, n) * rng.random(n)).astype(int).tolist()
        for n in rng.integers(0, 20, count)
    ]


def counted(documents, order):
    """The n-grams that end in a token, by their order."""
    tables = {n: Counter() for n in range(1, order + 1)}
    for document in documents:
        text = [BEGIN, *document]
        for end in range(2, len(text) + 1):
            for n in range(1, min(order, end) + 1):
                tables[n][tuple(text[end - n : end])] += 1
    return tables


class Reference:
    """Interpolated Kneser-Ney as Chen and Goodman (1999) write it, by sets and dictionaries."""

    def __init__(self, documents, order):
        self.order, self.counts = order, counted(documents, order)
        preceded = defaultdict(set)
        for n in range(2, order + 1):
            for gram in self.counts[n]:
                preceded[gram[1:]].add(gram[0])
        for n in range(1, order):
            self.counts[n] = {g: len(preceded[g]) or count for g, count in self.counts[n].items()}

    def prob(self, token, context):
        context = (
            tuple(context)[len(context) - self.order + 1 :] if len(context) >= self.order else tuple(context)
        )
        lower = self.prob_below(token, context)
        table = self.counts[len(context) + 1]
        followers = {g: count for g, count in table.items() if g[:-1] == context}
        if not followers:
            return lower
        times = Counter(table.values())
        discount = times[1] / (times[1] + 2 * times[2]) if times[1] else 0.5
        total = sum(followers.values())
        share = (
            max(followers.get((*context, token), 0) - discount, 0) if (*context, token) in followers else 0
        )
        return share / total + discount * len(followers) / total * lower

    def prob_below(self, token, context):
        return self.prob(token, context[1:]) if context else 1 / V


def to_dict(found, order):
    """All n-grams of this order that occur, as tuples of ids, with their counts."""
    ids, columns = np.arange(found.index.size(order)), []
    for length in range(order, 0, -1):
        columns.append(found.index.last_tokens(length, ids))
        ids = found.index.prefixes(length, ids)
    ngrams = map(tuple, np.stack(columns[::-1], axis=1).tolist())
    counts = found.counts[order - 1].tolist()
    return {ngram: count for ngram, count in zip(ngrams, counts, strict=True) if count}


def test_counts_are_those_of_a_dictionary_and_no_ngram_crosses_the_begin_of_a_document():
    documents = drawn_documents(0)
    found, wanted = count_ngrams(*flat(documents), 5, V), counted(documents, 5)
    assert to_dict(found, 1) == wanted[1] | {(BEGIN,): len(documents)}
    for order in range(2, 6):
        assert to_dict(found, order) == wanted[order]
        assert not any(BEGIN in gram[1:] for gram in to_dict(found, order))


def test_the_largest_vocabulary_and_the_highest_order_fit_in_keys():
    documents = [[2**16 - 1, 2**16 - 2] * 4, [0, 2**16 - 1] * 3]
    table = to_dict(count_ngrams(*flat(documents), MAX_ORDER, 2**16), MAX_ORDER)
    assert table[2**16 - 1, 2**16 - 2, 2**16 - 1, 2**16 - 2, 2**16 - 1] == 2
    assert table[2**16, 0, 2**16 - 1, 0, 2**16 - 1] == 1


@pytest.mark.parametrize("order", ORDERS)
def test_probabilities_sum_to_one_and_none_is_zero_in_every_context(order):
    model = estimate_kneser_ney(count_ngrams(*flat(drawn_documents(1)), order, V))
    rng = np.random.default_rng(2)
    contexts = [rng.integers(0, V, n).tolist() for n in range(8) for _ in range(30)]
    for context in [*contexts, *(d[:4] for d in drawn_documents(1))]:
        probs = next_token_probs(model, context)
        assert probs.sum() == pytest.approx(1, abs=1e-12) and (probs > 0).all()


@pytest.mark.parametrize("order", ORDERS)
def test_probabilities_are_those_of_the_published_formula(order):
    documents, others = drawn_documents(3), drawn_documents(4, 10, V)
    model, reference = (
        estimate_kneser_ney(count_ngrams(*flat(documents), order, V)),
        Reference(documents, order),
    )
    wanted = [
        reference.prob(token, [BEGIN, *document[:t]])
        for document in (*documents[:10], *others)
        for t, token in enumerate(document)
    ]
    found = np.exp(token_log_probs(model, *flat([*documents[:10], *others])))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_text_scored_at_once_is_scored_as_token_by_token(monkeypatch):
    documents = drawn_documents(5)
    model = estimate_kneser_ney(count_ngrams(*flat(drawn_documents(6)), 4, V))
    each = [math.log(next_token_probs(model, d[:t])[token]) for d in documents for t, token in enumerate(d)]
    np.testing.assert_allclose(token_log_probs(model, *flat(documents)), each, rtol=1e-12)
    monkeypatch.setattr("lm.classical.ngram.SCORING_CHUNK", 3)  # blocks end within contexts
    np.testing.assert_allclose(token_log_probs(model, *flat(documents)), each, rtol=1e-12)


def test_a_document_is_scored_alike_whatever_stands_before_it():
    model = estimate_kneser_ney(count_ngrams(*flat(drawn_documents(7)), 3, V))
    alone = token_log_probs(model, *flat([[1, 2, 3]]))
    behind = token_log_probs(model, *flat([[4, 0, 0], [], [1, 2, 3]]))
    assert (behind[3:] == alone).all()
    assert (token_log_probs(model, *flat([[4, 0, 0, 1, 2, 3]]))[3:] != alone).any()


def test_an_order_in_which_nothing_occurs_once_still_leaves_room_for_what_was_not_seen():
    model = estimate_kneser_ney(count_ngrams(*flat([[0, 1]] * 2), 2, V))
    assert model.discounts[1] == 0.5
    assert (next_token_probs(model, [0]) > 0).all()


def test_a_higher_order_predicts_text_better_that_has_long_contexts():
    rng = np.random.default_rng(0)
    text = [0, 1]
    while len(text) < 6000:  # the token depends on the one before it or, behind 3 to 6, on two
        step = 1 if text[-1] < 3 else 3 * text[-2]
        text.append((text[-1] + step + (rng.random() < 0.1)) % V)
    train, held_out = flat([text[:5000]]), flat([text[5000:]])
    means = [
        -token_log_probs(estimate_kneser_ney(count_ngrams(*train, n, V)), *held_out).mean() for n in (1, 2, 3)
    ]
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert means[0] > means[1] + 0.2 and means[1] > means[2] + 0.2
    assert means[2] == pytest.approx(entropy, abs=0.05)


@pytest.mark.parametrize("order", [1, 4])
def test_a_saved_model_is_read_back_as_it_was(tmp_path, order):
    documents = drawn_documents(8)
    model = estimate_kneser_ney(count_ngrams(*flat(documents), order, V))
    save_kneser_ney(model, tmp_path / "model.npz")
    back = load_kneser_ney(tmp_path / "model.npz")
    assert (token_log_probs(back, *flat(documents)) == token_log_probs(model, *flat(documents))).all()
    assert back.discounts == model.discounts
    save_kneser_ney(back, tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "model.npz").read_bytes()


def test_a_damaged_missing_or_foreign_file_is_refused(tmp_path):
    path = tmp_path / "model.npz"
    with pytest.raises(DataError, match="model.npz does not exist"):
        load_kneser_ney(path)
    save_kneser_ney(estimate_kneser_ney(count_ngrams(*flat([[1, 2]]), 2, V)), path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match="model.npz is damaged"):
            load_kneser_ney(path)
    save_tables(path, "something else", {"counts": np.arange(3)})
    with pytest.raises(DataError, match="'something else', not of 'Kneser-Ney'"):
        load_kneser_ney(path)
    assert load_tables(path, "something else")["counts"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 6}, "order=6 of n-grams should be from 1 to 5"),
        ({"order": 0}, "order=0"),
        ({"vocab_size": 2**16 + 1}, "vocab_size=65537 of n-grams should be from 1 to 65,536"),
        ({"vocab_size": 2}, "ids from 1 to 2 should be from 0 to 1: vocab_size=2"),
        ({"offsets": np.array([0, 3])}, "offsets from 0 to 3 should rise from 0 to the 2 tokens"),
        ({"offsets": np.array([0, 2, 1, 2])}, "should rise"),
        ({"offsets": np.array([], int)}, "no offsets should rise"),
        ({"tokens": np.array([], int), "offsets": np.array([0, 0])}, "one token at least"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_what_was_expected(change, message):
    settings = {"tokens": np.array([1, 2]), "offsets": np.array([0, 2]), "order": 2, "vocab_size": V}
    with pytest.raises(SettingError, match=message):
        count_ngrams(**settings | change)


def test_a_text_without_tokens_has_no_log_probabilities():
    model = estimate_kneser_ney(count_ngrams(*flat([[1, 2]]), 2, V))
    assert token_log_probs(model, *flat([])).shape == token_log_probs(model, *flat([[], []])).shape == (0,)


def test_perplexity_and_bits_follow_from_nats_and_counts():
    uniform = Likelihood(nats=8 * math.log(32), tokens=8, words=4, bytes=20)  # 5 bits a token
    assert uniform.perplexity == pytest.approx(32)
    assert uniform.word_perplexity == pytest.approx(1024)
    assert uniform.bits_per_byte == pytest.approx(2)
