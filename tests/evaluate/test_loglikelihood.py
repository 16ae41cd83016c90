"""Log-probabilities of texts: what the plain forward pass says, whatever they are asked together with."""

import tracemalloc
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax
from small_models import ARCHITECTURES, CONFIGS, TINY, make, run, tiny

from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.mesh import MeshConfig
from lm.config.model import PositionsConfig, SpecialTokens
from lm.evaluate import bucketing, loglikelihood
from lm.evaluate.loglikelihood import (
    Masking,
    Window,
    candidate_log_probs,
    continuation_log_probs,
    documents_log_prob,
    score_continuations,
    windows,
)
from lm.nn.ensemble import Ensemble
from lm.nn.transformer import Transformer
from lm.train.step import StepSpec, build

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


COMPANY = 64  # requests that are asked together
LONGEST = (texts(10, [7])[0], texts(11, [7])[0])


def in_company(model, pairs):
    """What is asked with as many others each time, so that all tests of a decoder share one program.

    That company changes nothing is a law of its own, below.
    """
    others = [LONGEST] * (COMPANY - len(pairs))
    return continuation_log_probs(model, [*pairs, *others], put)[: len(pairs)]


def asked_of(name, model, pairs):
    """An encoder has a row for each masked token, and so no shape that the tests could share."""
    if CONFIGS[name].has_decoder:
        return in_company(model, pairs)
    return continuation_log_probs(model, pairs, put, BERT)


def by_hand(name, model, context, continuation):
    """The sum of log-softmax at the places of the continuation, from logits [1,T,V] of this row alone."""
    config = CONFIGS[name]
    if not config.has_decoder:
        return masked_by_hand(model, context, continuation)
    start = [] if config.special.start is None else [config.special.start]
    row = [*start, *continuation] if config.has_encoder else [*start, *context, *continuation]
    first = len(row) - len(continuation)
    prefix = (np.arange(len(row)) < first)[None].astype(int)
    batch = Batch(decoder=Side(tokens=np.array([row]), causal_attention=prefix))
    if config.has_encoder:
        tokens = np.array([context or [0]])
        source = Side(tokens=tokens, segment_ids=np.full_like(tokens, bool(context)))
        batch = replace(batch, encoder=source)
    log_probs = log_softmax(np.asarray(run(model, batch))[0], axis=-1)
    return sum(float(log_probs[place - 1, row[place]]) for place in range(first, len(row)))


def masked_by_hand(model, context, continuation):
    total, start = 0.0, len(BERT.begin) + len(context)
    text = [*BERT.begin, *context, *continuation, *BERT.end]
    for place in range(start, start + len(continuation)):
        hidden = [BERT.mask if k == place else token for k, token in enumerate(text)]
        logits = np.asarray(run(model, Batch(encoder=Side(tokens=np.array([hidden])))))[0, place]
        total += float(log_softmax(logits)[text[place]])
    return total


# Every architecture, and what differs in how places are told apart, seen or written to a cache.
NAMES = [*ARCHITECTURES, "windowed decoder"]
NAMES += [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("decoder, learned", "decoder, rotary", "bart-base")
]


@pytest.mark.parametrize("name", NAMES)
def test_a_continuation_has_the_sum_of_the_log_softmax_of_the_plain_forward_pass(name):
    model, pairs = make(name), [*zip(texts(1, [3, 3]), texts(2, [4, 4]), strict=True)]
    found = asked_of(name, model, pairs)
    np.testing.assert_allclose(found, [by_hand(name, model, *pair) for pair in pairs], atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "encoder"])
def test_candidates_are_continuations_one_by_one(name):
    model = make(name)
    contexts, candidates = texts(1, [5, 1, 0, 7]), [texts(k, [k, 3, 1, 0, 4][: k + 1]) for k in range(4)]
    found = candidate_log_probs(model, contexts, candidates, put)
    assert [len(log_probs) for log_probs in found] == [len(each) for each in candidates] == [1, 2, 3, 4]
    pairs = [(context, y) for context, each in zip(contexts, candidates, strict=True) for y in each]
    due = in_company(model, pairs)
    np.testing.assert_allclose(np.concatenate(found), due, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_company_padding_and_order_change_nothing(name):
    model, pairs = make(name), [*asked(3, 40), LONGEST]
    order = np.random.default_rng(0).permutation(len(pairs))
    together = asked_of(name, model, pairs)
    shuffled = asked_of(name, model, [pairs[k] for k in order])
    np.testing.assert_allclose(shuffled, together[order], atol=1e-4)
    of_one_shape = [number for number, pair in enumerate(pairs) if (*map(len, pair),) == (3, 4)]
    assert len(of_one_shape) > 1
    for number in of_one_shape:
        alone = continuation_log_probs(model, [pairs[number]], put, masking(name))
        np.testing.assert_allclose(together[number], alone[0], atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probabilities_of_all_strings_of_one_token_add_up_to_1(name):
    every = [([5, 6, 7], [token]) for token in range(TINY.vocab_size)]
    log_probs = asked_of(name, make(name), every)
    assert np.exp(log_probs).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["decoder", "prefix-decoder", "encoder-decoder"])
def test_windows_that_hold_a_text_at_once_give_its_plain_loss(name):
    model, (text,) = make(name), texts(4, [7])
    (log_prob,) = in_company(model, [*windows(text, Window(7, 3), model.config)])
    assert log_prob == pytest.approx(by_hand(name, model, [], text), abs=1e-4)


def test_windows_score_each_token_once_after_what_fits_before_it():
    text, config = list(range(10, 20)), CONFIGS["decoder"]
    assert [*windows(text, Window(4, 2), config)] == [
        ([], [10, 11, 12, 13]),
        ([12, 13], [14, 15]),
        ([14, 15], [16, 17]),
        ([16, 17], [18, 19]),
    ]
    unstarted = replace(
        config, special=SpecialTokens(start=None)
    )  # reads its first token, and cannot score it
    assert next(windows(text, Window(4, 4), unstarted)) == ([10], [11, 12, 13])
    with pytest.raises(SettingError, match="cannot be moved by 5"):
        next(windows(text, Window(4, 5), config))


@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("start", [0, None])
def test_a_window_of_one_token_scores_it_or_is_refused_where_that_token_has_to_be_context(
    architecture, start
):
    config = replace(CONFIGS[architecture], special=SpecialTokens(start=start))
    if architecture == "decoder" and start is None:
        with pytest.raises(SettingError, match="no room for the context .* at least 2"):
            next(windows([10, 11], Window(1, 1), config))
    else:
        assert [*windows([10, 11], Window(1, 1), config)] == [([], [10]), ([], [11])]
    with pytest.raises(SettingError, match="of 1 tokens cannot be moved by 2"):
        next(windows([10, 11], Window(1, 2), config))


@pytest.mark.parametrize("start", [0, pytest.param(None, marks=pytest.mark.slow)])
def test_a_document_begins_behind_the_end_of_another_which_is_not_scored(start):
    model, documents, eos = make("decoder", special=SpecialTokens(start=start)), texts(8, [9, 3]), 1
    total = sum(by_hand_started(model, start, [eos], text) for text in documents)
    assert documents_log_prob(model, documents, Window(12, 6), eos, put) == pytest.approx(total, abs=1e-3)
    short = [([eos], documents[0][:3]), (documents[0][1:3], documents[0][3:5])]  # windows of 4, moved by 2
    rest = [(documents[0][3:5], documents[0][5:7]), (documents[0][5:7], documents[0][7:9])]
    expected = in_company(model, [*short, *rest]).sum()
    assert documents_log_prob(model, documents[:1], Window(4, 2), eos, put) == pytest.approx(
        expected, abs=1e-3
    )


def by_hand_started(model, start, context, text):
    """As ``by_hand``, of a decoder that reads ``start`` first or, if it is None, nothing."""
    row = [*([] if start is None else [start]), *context, *text]
    log_probs = log_softmax(np.asarray(run(model, Batch(decoder=Side(tokens=np.array([row])))))[0], axis=-1)
    return sum(float(log_probs[place - 1, row[place]]) for place in range(len(row) - len(text), len(row)))


def test_what_comes_later_changes_no_probability_of_what_was_before():
    model, (context, early, late) = make("decoder"), texts(5, [3, 4, 3])
    pairs = [(context, early), (context + early, late), (context, early + late)]
    first, second, both = in_company(model, pairs)
    assert both == pytest.approx(first + second, abs=1e-4)
    other = in_company(model, [(context, early + late[::-1]), (context + early, late[::-1])])
    assert other[0] - other[1] == pytest.approx(first, abs=1e-4)


def test_a_query_stream_predicts_each_token_without_having_read_it_or_another_mask():
    model = Transformer(tiny("xlnet-base"), nnx.Rngs(0))
    context, continuation = [5, BERT.mask, 6], [7, 8]
    text, due = [*BERT.begin, *context, *continuation, *BERT.end], 0.0
    for place in (4, 5):
        order = np.array([[int(k in (2, place)) for k in range(len(text))]])
        logits = run(model, Batch(encoder=Side(tokens=np.array([text]), prediction_order=order)))
        due += float(log_softmax(np.asarray(logits)[0, place])[text[place]])
    found = continuation_log_probs(model, [(context, continuation), ([9], [10] * 8)], put, BERT)
    assert found[0] == pytest.approx(due, abs=1e-4)


def test_an_ensemble_is_asked_as_one():
    model, pairs = make("decoder"), asked(6, 3)
    found = continuation_log_probs(Ensemble([model, model]), pairs, put)
    np.testing.assert_allclose(found, in_company(model, pairs), atol=1e-4)


@pytest.mark.parametrize("wrong", [-1, TINY.vocab_size])
def test_an_id_that_is_no_token_has_no_likelihood(wrong):
    """A negative one would be counted from the end of the vocabulary."""
    model = make("decoder")
    found = score_continuations(model, [([5], [6, wrong]), ([5], [6])], put)
    assert np.isnan(found.log_probs).tolist() == [True, False]
    assert not found.is_greedy[0]
    (ranked,) = candidate_log_probs(model, [[5]], [[[wrong], [6, wrong], [6]]], put)
    assert np.isnan(ranked).tolist() == [True, True, False]


def test_a_row_that_is_too_long_or_has_no_beginning_is_refused():
    model, text = make("decoder, learned"), texts(7, [17])[0]
    assert np.isfinite(continuation_log_probs(model, [(text[:8], text[8:16])], put)).all()
    with pytest.raises(SettingError, match="a row of 17 tokens exceeds model.positions.max_length=16"):
        continuation_log_probs(model, [(text[:8], text[8:])], put)
    with pytest.raises(SettingError, match="a row of 17 tokens"):
        continuation_log_probs(model, [(text[:16], [])], put)
    unstarted = make("decoder", special=SpecialTokens(start=None))
    with pytest.raises(SettingError, match="model.special.start=None"):
        continuation_log_probs(unstarted, [([], text)], put)
    with pytest.raises(SettingError, match="masking"):
        continuation_log_probs(make("encoder"), [([5], [6])], put)
    causal = make("encoder", attention=replace(TINY.attention, encoder_mask="causal"))
    with pytest.raises(SettingError, match="model.attention.encoder_mask='causal'"):
        continuation_log_probs(causal, [([5], [6])], put, BERT)


def test_a_text_is_in_memory_once_whatever_the_number_of_its_tokens_that_an_encoder_predicts():
    model, count = make("encoder"), 2_000
    text = texts(7, [count])[0]
    tracemalloc.start()
    rows = list(loglikelihood._make_rows(model.config, [], (text,), 0, BERT))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == count
    assert peak < 1_000 * count, "each row holds a few numbers, and no text of its own"


def test_a_question_may_have_more_candidates_than_the_model_has_positions():
    config = replace(CONFIGS["decoder"], positions=PositionsConfig(kind="learned", max_length=8))
    model, candidates = Transformer(config, nnx.Rngs(0)), [[token] for token in range(4, 24)]
    (found,) = candidate_log_probs(model, [[5, 6]], [candidates], put)
    due = continuation_log_probs(model, [([5, 6], each) for each in candidates], put)
    np.testing.assert_allclose(found, due, atol=1e-4)


def test_questions_of_all_lengths_compile_few_programs(monkeypatch):
    monkeypatch.setattr(bucketing, "COMPILE_COST", 300)
    sizes = np.random.default_rng(0).integers(0, 60, (300, 3))
    parts = bucketing.batches_by_length(sizes, lambda lengths: lengths.sum(-1), 2, 64)
    lengths = {part.lengths for part in parts}
    assert 1 < len(lengths) <= len({(part.rows, *part.lengths) for part in parts}) <= bucketing.MAX_SHAPES
    assert sorted(np.concatenate([part.examples for part in parts])) == [*range(300)]
    for part in parts:
        assert part.rows % 2 == 0 and len(part.examples) <= part.rows and max(part.lengths) <= 64
        assert (sizes[part.examples] <= part.lengths).all()
    monkeypatch.setattr(bucketing, "MAX_SHAPES", 2)  # each takes time to compile
    before = loglikelihood._continuation_log_probs._cache_size()
    pairs = asked(8, 60, most=9)
    model = make("decoder")
    continuation_log_probs(model, pairs, put)
    compiled = loglikelihood._continuation_log_probs._cache_size() - before
    assert 1 <= compiled <= bucketing.MAX_SHAPES
    continuation_log_probs(model, pairs[::-1], put)
    assert loglikelihood._continuation_log_probs._cache_size() - before == compiled


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2, "data": 2}])
def test_a_mesh_answers_as_one_device(sizes):
    mesh = sharding.make_mesh(MeshConfig(**sizes))
    model, pairs = make("encoder-decoder"), asked(9, 11)
    steps = build(StepSpec(model.config), mesh)
    places = sharding.parameter_shardings(model, mesh)
    spread = jax.tree.unflatten(
        jax.tree.structure(model),
        [jax.device_put(leaf, places[name]) for name, leaf in sharding.named(model).items()],
    )
    found = continuation_log_probs(spread, pairs, steps.shard_batch)
    np.testing.assert_allclose(found, in_company(model, pairs), atol=1e-4)
    contexts, candidates = [c for c, _ in pairs[:3]], [[y for _, y in pairs[3:7]]] * 3
    due = candidate_log_probs(model, contexts, candidates, put)
    np.testing.assert_allclose(
        candidate_log_probs(spread, contexts, candidates, steps.shard_batch), due, atol=1e-4
    )


@pytest.mark.parametrize("name", [name for name in CONFIGS if CONFIGS[name].has_decoder])
def test_only_a_decoders_context_loses_its_start_token_because_scoring_adds_that_alone(name):
    config = CONFIGS[name]
    start = 4  # as [CLS], which begins an encoder's text and starts the decoder that writes after it
    config = replace(config, special=replace(config.special, start=start))
    expected = [start, 7, start] if config.has_encoder else [7, start]
    assert loglikelihood.without_start([start, 7, start], config) == expected
    assert loglikelihood.without_start([7, start], config) == [7, start]
    assert loglikelihood.without_start([], config) == []
