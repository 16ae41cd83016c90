"""Decoding over a cache is the full forward pass, for all four architectures and prompts of unequal lengths.

Drawing and searching are tested with the cases of other implementations, on a chain that stands in for a
model.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_nn import ARCHITECTURES, make, run
from test_peer_cases import PEERS, left_out

from lm.evaluate import decode as decoding
from lm.evaluate.decode import beam_search, decode, greedy
from lm.nn.cache import Cache, KeyValue
from lm.nn.config import ModelConfig, SpecialTokens
from lm.nn.transformer import Transformer
from lm.ops.decoding import beams, sampling
from lm.ops.decoding.sampling import Sampling
from lm.settings import SettingError

EOS, ENDLESS = 1, SpecialTokens(eos=None)
WRITING = [architecture for architecture in ARCHITECTURES if architecture != "encoder"]
LENGTHS = np.array([5, 2, 0])  # of the prompts; the last row is padding
STEPS = 6


def prompts(architecture):
    """Three rows of prompts, or of encoder features."""
    tokens = np.random.default_rng(0).integers(2, 40, (3, 5))
    valid = (np.arange(5)[None] < LENGTHS[:, None]).astype(int)
    if "encoder" in architecture:
        return {"encoder_input_tokens": tokens * valid, "encoder_segment_ids": valid}
    return {
        "decoder_input_tokens": tokens * valid,
        "decoder_segment_ids": valid,
        "decoder_causal_attention": valid,  # the whole prompt is the prefix
    }


def with_answers(batch, answers):
    """The batch of the full forward pass in which each row's prompt is followed by its answer, and where they
    begin.
    """
    if "encoder_input_tokens" in batch:
        tokens = np.concatenate([np.zeros((3, 1), int), answers], axis=1)
        return batch | {"decoder_input_tokens": tokens}, np.zeros(3, int)
    tokens, prefix = (
        np.zeros((3, 5 + STEPS), int),
        np.pad(batch["decoder_causal_attention"], ((0, 0), (0, STEPS))),
    )
    for row, length in enumerate(LENGTHS):
        tokens[row, : length + STEPS] = [*batch["decoder_input_tokens"][row, :length], *answers[row]]
    segments = np.arange(5 + STEPS)[None] < LENGTHS[:, None] + STEPS
    features = {"decoder_segment_ids": segments.astype(int), "decoder_causal_attention": prefix}
    return features | {"decoder_input_tokens": tokens}, LENGTHS - 1


@pytest.mark.parametrize("architecture", WRITING)
def test_greedy_decoding_over_a_cache_takes_the_likeliest_tokens_of_the_full_forward_pass(architecture):
    model, batch = make(architecture), prompts(architecture)
    found = decode(
        model, batch, max_length=STEPS, choose=sampling.greedy, key=None, special=ENDLESS, record=jnp.asarray
    )
    full, first = with_answers(batch, np.array(found.tokens))
    expected = run(model, full)
    for row in (0, 1):
        due = expected[row, first[row] : first[row] + STEPS]
        np.testing.assert_allclose(found.record[row], due, atol=1e-5)
        np.testing.assert_array_equal(found.tokens[row], due.argmax(-1))


@pytest.mark.parametrize("architecture", ["encoder-decoder", "prefix-decoder"])
def test_prompts_generate_the_same_wherever_their_padding_is_and_whatever_it_holds(architecture):
    model, batch = make(architecture), prompts(architecture)
    tokens, segments = (next(name for name in batch if kind in name) for kind in ("tokens", "segment"))
    batch[tokens][0, 1] = 0  # text that looks like padding
    left = {
        name: np.stack([np.roll(row, -n) for row, n in zip(v, LENGTHS, strict=True)])
        for name, v in batch.items()
    }
    left[tokens] += 7 * (left[segments] == 0)
    keep = {"max_length": 4, "choose": sampling.greedy, "key": None, "record": jnp.asarray}
    first, second = decode(model, batch, **keep), decode(model, left, **keep)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.record[:2], second.record[:2])


def scripted(logits, key):
    """Stands for a way to choose: EOS in the first row, 7 in the others."""
    return jnp.array([EOS, 7, 7], jnp.int32)


def test_rows_are_padded_after_eos_and_decoding_stops_when_all_have_written_it(monkeypatch):
    model, batch = make("decoder"), prompts("decoder")
    written = decode(model, batch, max_length=4, choose=scripted, key=None, special=SpecialTokens(pad=9))
    np.testing.assert_array_equal(written.tokens, [[EOS, 9, 9, 9], [7, 7, 7, 7], [9, 9, 9, 9]])
    np.testing.assert_array_equal(written.lengths, [1, 4, 0])
    steps = []
    original = Transformer.step

    def counted(self, tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return original(self, tokens, cache)

    monkeypatch.setattr(Transformer, "step", counted)
    decode(
        model, batch, max_length=5, choose=scripted, key=None, special=SpecialTokens(eos=7)
    ).tokens.block_until_ready()
    jax.effects_barrier()
    assert len(steps) == 4  # the first row never writes 7; the first token needs no step
    steps.clear()
    decode(model, batch, max_length=6, choose=lambda logits, key: jnp.full(3, EOS), key=None)
    jax.effects_barrier()
    assert not steps


def test_equal_shapes_compile_once():
    model, other = make("decoder"), jax.tree.map(lambda x: x + 0.01, make("decoder"))
    batch = prompts("decoder")
    greedy(model, batch, max_length=3)
    compiled = decoding._decode._cache_size()
    greedy(other, batch | {"decoder_target_tokens": batch["decoder_input_tokens"]}, max_length=3)
    assert decoding._decode._cache_size() == compiled


@jax.tree_util.register_dataclass
@dataclass
class Chain:
    """Stands for a model: in row b the token after ``previous`` at step t has the logits tables[b, t,
    previous].
    """

    tables: jax.Array  # [B,T|1,V,V]

    @property
    def config(self):
        return ModelConfig(architecture="decoder", special=SpecialTokens(start=None))

    def prefill(self, batch, size):
        lengths = (batch["decoder_segment_ids"] > 0).sum(-1)
        last = jnp.take_along_axis(batch["decoder_input_tokens"], lengths[:, None] - 1, axis=1)[:, 0]
        return self.step(last, Cache(KeyValue(self.tables[None], ()), jnp.zeros_like(lengths), None, None))

    def step(self, tokens, cache):
        tables = cache.self_attention.key[0]
        at = jnp.minimum(cache.length, tables.shape[1] - 1)
        return tables[jnp.arange(len(at)), at, tokens], cache._replace(length=cache.length + 1)


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
    batch = {"decoder_input_tokens": inputs[:, : lengths.max()], "decoder_segment_ids": segments}
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
    choose = Sampling(
        args.get("temperature", 0.0 if "markov_logits" in args else 1.0),
        args.get("topk", 0),
        args.get("topp", 1.0),
    )
    length = args.get("max_decode_steps", len(expected[0]))
    written = decode(model, batch, max_length=length, choose=choose, key=jax.random.key(0))
    for prompt, answer, row in zip(begun, written.tokens.tolist(), expected, strict=True):
        room = len(row) - len(prompt)  # T5X has the prompt and its answer share a row
        assert [*prompt, *answer[:room], *[0] * (room - length)] == row


@pytest.mark.parametrize(("args", "expected"), cases("sampling.warp_logits"))
def test_warped_logits_are_those_of_the_peers(args, expected):
    warped = sampling.warp(
        jnp.array(args["logits"]),
        temperature=args["temperature"],
        top_k=args["topk"],
        top_p=args["topp"] or 1.0,
    )
    np.testing.assert_array_equal(warped > -jnp.inf, np.array(expected["kept"]) == 1)
    for row, kept in zip(np.array(warped), expected["kept_logits"], strict=True):
        np.testing.assert_allclose(row[row > -np.inf], kept, atol=2e-5)


def test_draws_follow_the_warped_distribution_and_the_key_alone():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.1]])).repeat(4096, 0)
    drawn = Sampling(top_k=2)(logits, jax.random.key(3))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4096, [2 / 3, 1 / 3, 0, 0], atol=0.03)
    np.testing.assert_array_equal(drawn, Sampling(top_k=2)(logits, jax.random.key(3)))
    for bad in (
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"temperature": float("nan")},
    ):
        with pytest.raises(SettingError, match=f"{next(iter(bad))}="):
            Sampling(**bad)


@pytest.mark.parametrize(
    ("args", "expected"), [*cases("t5x.decoding.beam_search"), *cases("t5x.decoding.beam_search:markov_toy")]
)
def test_beams_are_those_of_t5x(args, expected):
    model, batch, _ = chain_and_prompts(args)
    tokens, scores = beam_search(
        model,
        batch,
        beams=args["beam_size"],
        max_length=args["max_decode_len"],
        length_penalty=args["alpha"],
        early_stopping="never",
        rules="t5",
        special=SpecialTokens(eos=args["eos_id"]),
    )
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
    tokens, scores = beam_search(
        model,
        batch,
        beams=args["beam_size"],
        max_length=length,
        length_penalty=args["alpha"],
        early_stopping="never",
        rules="t5",
    )
    due = zip(begun, tokens.tolist(), expected["sequences"], args["logits"], strict=True)
    for prompt, answers, rows, logits in due:
        assert len(set(map(tuple, answers))) == len(answers)
        for answer, row in zip(answers, rows, strict=True):
            room = len(row) - len(prompt)
            found = [*prompt, *answer[:room], *[0] * (room - length)]
            assert found == row or equally_likely(found, row, logits)
    if "scores" in expected:
        np.testing.assert_allclose(scores, expected["scores"], atol=1e-4)


@pytest.mark.parametrize("rules", beams.RULES)
@pytest.mark.parametrize(("args", "expected"), cases("beam_search.exhaustive"))
def test_very_many_beams_find_the_best_of_all_sequences(args, expected, rules):
    model, batch, _ = chain_and_prompts(args)
    count = 600  # more than there are sequences
    tokens, scores = beam_search(
        model,
        batch,
        beams=count,
        max_length=args["max_decode_len"],
        length_penalty=0.0,
        early_stopping="never",
        rules=rules,
    )
    search = beams.Search(count, args["max_decode_len"], args["alpha"], "never", "t5")
    ended = [
        (float(search.score(s, row.index(EOS) + 1)), row[: row.index(EOS) + 1])
        for row, s in zip(tokens[0].tolist(), scores[0], strict=True)
        if EOS in row
    ]
    for (score, row), best in zip(sorted(ended, reverse=True)[: len(expected)], expected, strict=True):
        assert row == best["sequence"]
        np.testing.assert_allclose(score, best["score"], atol=1e-4)


def test_length_penalties_are_those_of_their_papers():
    for args, expected in (case.values for case in cases("t5x.decoding.brevity_penalty")):
        np.testing.assert_allclose(
            beams.RULES["t5"].penalty(jnp.array(args["lengths"]), args["alpha"]), expected
        )
    assert beams.RULES["t5"].penalty(7.0, 2.0) == 4.0  # ((5 + 7) / 6) ** 2
    assert beams.RULES["transformers"].penalty(7.0, 2.0) == 49.0


@pytest.mark.parametrize(("architecture", "early_stopping"), [("encoder-decoder", True), ("decoder", False)])
def test_a_beam_of_one_is_greedy(architecture, early_stopping):
    model, batch = make(architecture), prompts(architecture)
    # what a row writes third
    special = replace(ENDLESS, eos=int(greedy(model, batch, max_length=STEPS)[0, 2]))
    tokens, scores = beam_search(
        model,
        batch,
        beams=1,
        max_length=STEPS,
        length_penalty=1.0,
        early_stopping=early_stopping,
        rules="transformers",
        special=special,
    )
    expected = decode(model, batch, max_length=STEPS, choose=sampling.greedy, key=None, special=special)
    np.testing.assert_array_equal(tokens[:, 0], expected.tokens)
    assert scores[2, 0] == -jnp.inf  # the row that is all padding


def test_settings_of_a_search_are_refused_by_name():
    for bad in ({"beams": 0}, {"max_length": 0}, {"early_stopping": "sometimes"}, {"rules": "t6"}):
        with pytest.raises(SettingError, match=f"{next(iter(bad))}="):
            beams.Search(
                **{"beams": 2, "max_length": 3, "length_penalty": 0.6, "early_stopping": True, "rules": "t5"}
                | bad
            )
