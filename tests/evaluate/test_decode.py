"""Decoding over a cache is the full forward pass, for all four architectures and prompts of unequal lengths.

Drawing and searching are tested with the cases of other implementations, on a chain that stands in for a
model.
"""

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_prompts import LENGTHS, cached_logits, prompts, with_special
from recorded_cases import PEERS, left_out
from small_models import ARCHITECTURES, make, run
from variants import with_quick

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.decoding import Decoding
from lm.config.model import ModelConfig, SpecialTokens
from lm.evaluate import generate as decoding
from lm.evaluate.beam_search import T5_RULES, TRANSFORMERS_RULES, Search, blockwise_top_k
from lm.evaluate.generate import beam_search, decode, greedy
from lm.evaluate.sampling import next_token, warp_logits
from lm.nn.cache import Cache

EOS, ENDLESS = 1, SpecialTokens(eos=None)
WRITING = [architecture for architecture in ARCHITECTURES if architecture != "encoder"]
STEPS = 6


def endless(architecture):
    """A model that never ends a text, so that it writes by one program in all tests."""
    return with_special(make(architecture), ENDLESS)


def with_answers(batch, answers):
    """The batch of the full forward pass in which each row's prompt is followed by its answer, and where they
    begin.
    """
    if batch.encoder is not None:
        tokens = np.concatenate([np.zeros((3, 1), int), answers], axis=1)
        return replace(batch, decoder=Side(tokens=tokens)), np.zeros(3, int)
    tokens, prefix = (
        np.zeros((3, 5 + STEPS), int),
        np.pad(batch.decoder.causal_attention, ((0, 0), (0, STEPS))),
    )
    for row, length in enumerate(LENGTHS):
        tokens[row, : length + STEPS] = [*batch.decoder.tokens[row, :length], *answers[row]]
    segments = np.arange(5 + STEPS)[None] < LENGTHS[:, None] + STEPS
    side = Side(tokens=tokens, segment_ids=segments.astype(int), causal_attention=prefix)
    return Batch(decoder=side), LENGTHS - 1


@pytest.mark.parametrize("architecture", with_quick(("encoder-decoder", "decoder"), WRITING))
def test_greedy_decoding_over_a_cache_takes_the_likeliest_tokens_of_the_full_forward_pass(architecture):
    model, batch = endless(architecture), prompts(architecture)
    found = decode(model, batch, Decoding(STEPS))
    logits = cached_logits(model, batch, found.tokens)
    tokens, logits = np.array(found.tokens), np.array(logits)
    full, first = with_answers(batch, tokens)
    expected = np.array(run(model, full))
    for row in (0, 1):
        due = expected[row, first[row] : first[row] + STEPS]
        np.testing.assert_allclose(logits[row], due, atol=1e-5)
        np.testing.assert_array_equal(tokens[row], due.argmax(-1))


@pytest.mark.parametrize("architecture", ["encoder-decoder", "prefix-decoder"])
def test_prompts_generate_the_same_wherever_their_padding_is_and_whatever_it_holds(architecture):
    model, batch = endless(architecture), prompts(architecture)
    ((name, side),) = batch.sides.items()
    side.tokens[0, 1] = 0  # text that looks like padding
    left = side.map(lambda v: np.stack([np.roll(row, -n) for row, n in zip(v, LENGTHS, strict=True)]))
    left = Batch(**{name: replace(left, tokens=left.tokens + 7 * (left.segment_ids == 0))})
    first, second = (greedy(model, rows, max_length=STEPS) for rows in (batch, left))
    np.testing.assert_array_equal(first, second)
    ours, theirs = (np.array(cached_logits(model, rows, first)) for rows in (batch, left))
    np.testing.assert_array_equal(ours[:2], theirs[:2])


@jax.tree_util.register_dataclass
@dataclass
class Chain:
    """Stands for a model: after ``previous``, row b has the logits tables[b, t, previous] at step t."""

    tables: jax.Array  # [B,T|1,V,V]
    config: ModelConfig = field(
        default=ModelConfig(architecture="decoder", special=SpecialTokens(start=None)),
        metadata={"static": True},
    )

    def prefill(self, batch, size):
        lengths = (batch.decoder.segment_ids > 0).sum(-1)
        last = jnp.take_along_axis(batch.decoder.tokens, lengths[:, None] - 1, axis=1)[:, 0]
        return self.step(last, Cache(self.tables[None], jnp.zeros_like(lengths), None, None, size))

    def unstack(self, cache):
        return self, replace(cache, carry=tuple(cache.carry))

    def step(self, tokens, cache):
        tables = cache.carry[0]
        at = jnp.minimum(cache.length, tables.shape[1] - 1)
        return tables[jnp.arange(len(at)), at, tokens], replace(cache, length=cache.length + 1)


def scripted(tokens):
    """A model that writes tokens [B] one after another in each row, whatever went before."""
    tables = np.zeros((3, 1, 40, 40), np.float32)
    tables[np.arange(3), 0, :, tokens] = 9.0
    return Chain(jnp.asarray(tables))


def test_rows_are_padded_after_eos_and_decoding_stops_when_all_have_written_it(monkeypatch):
    model, batch = scripted([EOS, 7, 7]), prompts("decoder")
    written = decode(with_special(model, SpecialTokens(pad=9)), batch, Decoding(4))
    np.testing.assert_array_equal(written.tokens, [[EOS, 9, 9, 9], [7, 7, 7, 7], [9, 9, 9, 9]])
    np.testing.assert_array_equal(written.lengths, [1, 4, 0])
    steps = []
    original = Chain.step

    def counted(self, tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return original(self, tokens, cache)

    monkeypatch.setattr(Chain, "step", counted)  # the prefill takes one too
    decode(with_special(model, SpecialTokens(eos=7)), batch, Decoding(5)).tokens.block_until_ready()
    jax.effects_barrier()
    assert len(steps) == 1 + 4  # the first row never writes 7; the first token needs no step
    steps.clear()
    decode(scripted([EOS] * 3), batch, Decoding(6)).tokens.block_until_ready()
    jax.effects_barrier()
    assert len(steps) == 1


def test_equal_shapes_compile_once():
    model, batch = endless("decoder"), prompts("decoder")
    other = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + np.float32(0.01)), model)
    greedy(model, batch, max_length=STEPS)
    compiled = decoding._decode._cache_size()
    with_targets = replace(batch.decoder, targets=batch.decoder.tokens)
    greedy(other, Batch(decoder=with_targets), max_length=STEPS)
    assert decoding._decode._cache_size() == compiled


def cases(function):
    found = [case for case in PEERS["cases"] if case["fn"] == function and not left_out(case["id"])]
    return [pytest.param(case["args"], case["expected"], id=case["id"]) for case in found]


def chain_and_prompts(args):
    """What a case describes; its prompts are the tokens up to the last that is not 0."""
    inputs = np.array(args.get("prompts_with_leading_bos", args.get("inputs", [[0]])))
    if "edge_potentials_by_step" in args:
        size = len(args["states"])
        tables = np.stack([np.tile(args["step0_logits"], (size, 1)), *args["edge_potentials_by_step"]])[None]
    elif "markov_logits" in args:
        tables = np.tile(np.array(args["markov_logits"]), (len(inputs), 1, 1, 1))
    else:
        tables = np.array(args["logits"])[:, None, None, :].repeat(
            max(inputs.max() + 1, len(args["logits"][0])), 2
        )
        tables[tables <= -1e10] = -np.inf  # T5X takes nothing below -1e7 for a sequence
    lengths = np.array([len(np.trim_zeros(row, "b")) or 1 for row in inputs])
    segments = (np.arange(lengths.max())[None] < lengths[:, None]).astype(int)
    batch = Batch(decoder=Side(tokens=inputs[:, : lengths.max()], segment_ids=segments))
    return (
        Chain(jnp.asarray(tables, jnp.float32)),
        batch,
        [row[1:n].tolist() for row, n in zip(inputs, lengths, strict=True)],
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [*cases("t5x.decoding.temperature_sample:greedy"), *cases("t5x.decoding.temperature_sample:static")],
)
def test_drawn_answers_are_those_of_t5x(args, expected):
    model, batch, begun = chain_and_prompts(args)
    expected = expected["sequences"] if isinstance(expected, dict) else expected
    length = args.get("max_decode_steps", len(expected[0]))
    temperature = args.get("temperature", 0.0 if "markov_logits" in args else 1.0)
    sampled = {"top_k": args.get("topk", 0), "top_p": args.get("topp", 1.0)} if temperature else {}
    decoding = Decoding(length, temperature=temperature, **sampled)
    written = decode(model, batch, decoding, key=jax.random.key(0))
    for prompt, answer, row in zip(begun, written.tokens.tolist(), expected, strict=True):
        room = len(row) - len(prompt)  # T5X has the prompt and its answer share a row
        assert [*prompt, *answer[:room], *[0] * (room - length)] == row


@pytest.mark.parametrize(("args", "expected"), cases("sampling.warp_logits"))
def test_warped_logits_are_those_of_the_peers(args, expected):
    settings = {"top_k": args["topk"], "top_p": args["topp"] or 1.0}
    warp = jax.jit(warp_logits, static_argnums=0)
    warped = np.array(warp(Decoding(temperature=args["temperature"], **settings), jnp.array(args["logits"])))
    np.testing.assert_array_equal(warped > -np.inf, np.array(expected["kept"]) == 1)
    for row, kept in zip(warped, expected["kept_logits"], strict=True):
        np.testing.assert_allclose(row[row > -np.inf], kept, atol=2e-5)


def test_draws_follow_the_warped_distribution_and_the_key_alone():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]])).repeat(4096, 0)
    sampled = Decoding(temperature=1.0, top_k=2)
    drawn = next_token(sampled, logits, jax.random.key(3))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4096, [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_array_equal(drawn, next_token(sampled, logits, jax.random.key(3)))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 3},
        {"beams": 0},
        {"beams": 2, "temperature": 1.0},
        {"max_length": 0},
    ],
)
def test_settings_of_decoding_are_refused_by_name(settings):
    with pytest.raises(SettingError, match=f"{next(iter(settings))}="):
        Decoding(**settings)
    with pytest.raises(SettingError, match="early_stopping="):
        replace(T5_RULES, early_stopping="sometimes")


def test_beams_and_a_temperature_are_refused_where_they_would_not_count():
    model, batch = endless("decoder"), prompts("decoder")
    with pytest.raises(SettingError, match="beams=2.*beam_search"):
        decode(model, batch, Decoding(STEPS, beams=2))
    with pytest.raises(SettingError, match=r"temperature=0\.5.*decode"):
        beam_search(model, batch, Decoding(STEPS, temperature=0.5))


@pytest.mark.parametrize(
    ("args", "expected"), [*cases("t5x.decoding.beam_search"), *cases("t5x.decoding.beam_search:markov_toy")]
)
def test_beams_are_those_of_t5x(args, expected):
    model, batch, _ = chain_and_prompts(args)
    search = Decoding(args["max_decode_len"], args["beam_size"], args["alpha"])
    tokens, scores = beam_search(with_special(model, SpecialTokens(eos=args["eos_id"])), batch, search)
    if "sequences" in expected:
        np.testing.assert_array_equal(tokens[0], expected["sequences"])
        np.testing.assert_allclose(scores[0], expected["scores"], atol=2e-4)
    else:
        assert sorted(tokens[0].tolist()) == expected["set_of_sequences"]


def equally_likely(one, other, logits):
    """Whether two rows end alike and have the same score, so that either may stand first: [2, 3] and [3,
    2].
    """
    alike = [min(token, 2) for token in one] == [min(token, 2) for token in other]  # 0 is padding, 1 is EOS
    return alike and math.isclose(*(sum(logits[token] for token in row if token) for row in (one, other)))


@pytest.mark.parametrize(("args", "expected"), cases("t5x.decoding.beam_search:static"))
def test_beams_go_on_from_prompts_of_unequal_lengths_as_in_t5x(args, expected):
    model, batch, begun = chain_and_prompts(args)
    length = args.get("max_decode_step", 4)
    tokens, scores = beam_search(model, batch, Decoding(length, args["beam_size"], args["alpha"]))
    due = zip(begun, tokens.tolist(), expected["sequences"], args["logits"], strict=True)
    for prompt, answers, rows, logits in due:
        assert len(set(map(tuple, answers))) == len(answers)
        for answer, row in zip(answers, rows, strict=True):
            room = len(row) - len(prompt)
            found = [*prompt, *answer[:room], *[0] * (room - length)]
            assert found == row or equally_likely(found, row, logits)
    if "scores" in expected:
        np.testing.assert_allclose(scores, expected["scores"], atol=1e-4)


@pytest.mark.parametrize("rules", [T5_RULES, TRANSFORMERS_RULES], ids=["t5", "transformers"])
@pytest.mark.parametrize(("args", "expected"), cases("beam_search.exhaustive"))
def test_very_many_beams_find_the_best_of_all_sequences(args, expected, rules):
    model, batch, _ = chain_and_prompts(args)
    count = 600  # more than there are sequences
    rules = replace(rules, early_stopping="never")
    tokens, scores = beam_search(model, batch, Decoding(args["max_decode_len"], count, 0.0), rules=rules)
    search = Search(Decoding(length_penalty=args["alpha"]), T5_RULES)
    ended = [
        (float(search.score(s, row.index(EOS) + 1)), row[: row.index(EOS) + 1])
        for row, s in zip(tokens[0].tolist(), scores[0], strict=True)
        if EOS in row
    ]
    for (score, row), best in zip(sorted(ended, reverse=True)[: len(expected)], expected, strict=True):
        assert row == best["sequence"]
        np.testing.assert_allclose(score, best["score"], atol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("length", [40, 1_024, 2_500])
def test_the_highest_of_many_values_are_those_of_a_sort_the_first_of_equal_ones_first(count, length):
    values = np.random.default_rng(0).integers(0, 40, (3, length)).astype(np.float32)
    values[1, ::2], values[2, 5:] = -np.inf, -np.inf
    found = blockwise_top_k(jnp.asarray(values), count)
    for row, best, places in zip(values, *map(np.asarray, found), strict=True):
        due = np.argsort(-row, kind="stable")[:count]
        np.testing.assert_array_equal(best, row[due])
        np.testing.assert_array_equal(places, due)


def test_length_penalties_are_those_of_their_papers():
    for args, expected in (case.values for case in cases("t5x.decoding.brevity_penalty")):
        np.testing.assert_allclose(
            T5_RULES.length_penalty(jnp.array(args["lengths"]), args["alpha"]), expected
        )
    assert T5_RULES.length_penalty(7.0, 2.0) == 4.0  # ((5 + 7) / 6) ** 2
    assert TRANSFORMERS_RULES.length_penalty(7.0, 2.0) == 49.0


@pytest.mark.parametrize(("architecture", "early_stopping"), [("encoder-decoder", True), ("decoder", False)])
def test_a_beam_of_one_is_greedy(architecture, early_stopping):
    model, batch = endless(architecture), prompts(architecture)
    answers = np.array(greedy(model, batch, max_length=STEPS))
    eos = answers[0, 2]  # what a row writes third
    is_end = answers == eos
    expected = np.where(is_end.cumsum(1) - is_end > 0, ENDLESS.pad, answers)
    model = with_special(model, replace(ENDLESS, eos=int(eos)))
    rules = replace(TRANSFORMERS_RULES, early_stopping=early_stopping)
    tokens, scores = beam_search(model, batch, Decoding(STEPS, 1, 1.0), rules=rules)
    np.testing.assert_array_equal(np.array(tokens)[:, 0], expected)
    assert np.array(scores)[2, 0] == -jnp.inf  # the row that is all padding
