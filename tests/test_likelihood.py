"""Log-probabilities of texts: what the plain forward pass says, whatever they are asked together with."""

import jax
import numpy as np
import pytest
from test_nn import ARCHITECTURES, CONFIGS, TINY, make, run

from lm.evaluate.likelihood import (
    Masking,
    candidate_log_probs,
    continuation_log_probs,
)

WRITING = [architecture for architecture in ARCHITECTURES if architecture != "encoder"]
BERT = Masking(39, (2,), (3,))
put = jax.device_put


def masking(name):
    return None if CONFIGS[name].has_decoder else BERT


def texts(seed, lengths):
    random = np.random.default_rng(seed)
    return [random.integers(4, 38, length).tolist() for length in lengths]


def asked(seed, count, most=7):
    """Contexts and continuations of up to ``most`` tokens, some of them empty."""
    lengths = np.random.default_rng(seed).integers(0, most + 1, (2, count))
    return list(zip(texts(seed + 1, lengths[0]), texts(seed + 2, lengths[1]), strict=True))


def by_hand(name, model, context, continuation):
    """The sum of log-softmax at the places of the continuation, from logits [1,T,V] of this row alone."""
    config = CONFIGS[name]
    if not config.has_decoder:
        return masked_by_hand(model, context, continuation)
    start = [] if config.special.start is None else [config.special.start]
    row = [*start, *continuation] if config.has_encoder else [*start, *context, *continuation]
    first = len(row) - len(continuation)
    batch = {"decoder_input_tokens": np.array([row])}
    if config.has_encoder:
        batch["encoder_input_tokens"] = np.array([context], int).reshape(1, -1)
    batch["decoder_causal_attention"] = (np.arange(len(row)) < first)[None].astype(int)
    log_probs = jax.nn.log_softmax(run(model, batch)[0])
    return sum(float(log_probs[place - 1, row[place]]) for place in range(first, len(row)))


def masked_by_hand(model, context, continuation):
    total, start = 0.0, len(BERT.begin) + len(context)
    text = [*BERT.begin, *context, *continuation, *BERT.end]
    for place in range(start, start + len(continuation)):
        hidden = [BERT.mask if k == place else token for k, token in enumerate(text)]
        logits = run(model, {"encoder_input_tokens": np.array([hidden])})[0, place]
        total += float(jax.nn.log_softmax(logits)[text[place]])
    return total


# Every architecture, and what differs in how places are told apart, seen or written to a cache.
NAMES = [
    *ARCHITECTURES,
    "decoder, learned",
    "decoder, rotary",
    "encoder-decoder, relative-per-layer",
    "bart-base",
]
NAMES += ["decoder, alibi", "windowed decoder", "sparse decoder"]


@pytest.mark.parametrize("name", NAMES)
def test_a_continuation_has_the_sum_of_the_log_softmax_of_the_plain_forward_pass(name):
    model, pairs = make(name), [*zip(texts(1, [3, 3]), texts(2, [4, 1]), strict=True)]
    found = continuation_log_probs(model, pairs, put, masking(name))
    np.testing.assert_allclose(found, [by_hand(name, model, *pair) for pair in pairs], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_candidates_are_continuations_one_by_one(name):
    model = make(name)
    contexts, candidates = texts(1, [5, 1, 0, 7]), [texts(k, [k, 3, 1, 0, 4][: k + 1]) for k in range(4)]
    found = candidate_log_probs(model, contexts, candidates, put, masking(name))
    for context, each, log_probs in zip(contexts, candidates, found, strict=True):
        due = continuation_log_probs(model, [(context, y) for y in each], put, masking(name))
        np.testing.assert_allclose(log_probs, due, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_company_padding_and_order_change_nothing(name):
    model, pairs = make(name), asked(3, 40)
    order = np.random.default_rng(0).permutation(len(pairs))
    together = continuation_log_probs(model, pairs, put, masking(name))
    shuffled = continuation_log_probs(model, [pairs[k] for k in order], put, masking(name))
    np.testing.assert_allclose(shuffled, together[order], atol=1e-4)
    for number in (0, 7, 23):
        alone = continuation_log_probs(model, [pairs[number]], put, masking(name))
        np.testing.assert_allclose(together[number], alone[0], atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probabilities_of_all_strings_of_one_token_add_up_to_1(name):
    every = [[token] for token in range(TINY.vocab_size)]
    (log_probs,) = candidate_log_probs(make(name), [[5, 6, 7]], [every], put, masking(name))
    assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-5)
