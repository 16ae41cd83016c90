"""Decoding over a cache is the full forward pass, for all four architectures and prompts of unequal lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_nn import ARCHITECTURES, make, run

from lm.evaluate import decode as decoding
from lm.evaluate.decode import EOS, decode, greedy
from lm.nn.transformer import Transformer
from lm.ops import sampling

LENGTHS = np.array([5, 2, 0])  # of the prompts; the last row is padding
STEPS = 6
prefill = jax.jit(Transformer.prefill, static_argnames="size")
step = jax.jit(Transformer.step)


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
    """The batch of the full forward pass in which each row's prompt is followed by its answer, and where they begin."""
    if "encoder_input_tokens" in batch:
        tokens = np.concatenate([np.zeros((3, 1), int), answers], axis=1)
        return batch | {"decoder_input_tokens": tokens}, np.zeros(3, int)
    tokens, prefix = np.zeros((3, 5 + STEPS), int), np.pad(batch["decoder_causal_attention"], ((0, 0), (0, STEPS)))
    for row, length in enumerate(LENGTHS):
        tokens[row, : length + STEPS] = [*batch["decoder_input_tokens"][row, :length], *answers[row]]
    segments = np.arange(5 + STEPS)[None] < LENGTHS[:, None] + STEPS
    features = {"decoder_segment_ids": segments.astype(int), "decoder_causal_attention": prefix}
    return features | {"decoder_input_tokens": tokens}, LENGTHS - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoding_over_a_cache_is_the_full_forward_pass(architecture):
    model, batch = make(architecture), prompts(architecture)
    answers = np.random.default_rng(1).integers(2, 40, (3, STEPS))
    full, first = with_answers(batch, answers)
    expected = run(model, full)
    prompt = {"decoder_input_tokens": np.zeros((3, 1), int)} | batch
    logits, cache = prefill(model, prompt, size=prompt["decoder_input_tokens"].shape[1] + STEPS)
    for t in range(STEPS):
        for row in (0, 1):
            np.testing.assert_allclose(logits[row], expected[row, first[row] + t], atol=1e-5)
        logits, cache = step(model, answers[:, t], cache)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_takes_the_likeliest_token_of_the_full_forward_pass(architecture):
    model, batch = make(architecture), prompts(architecture)
    tokens = decode(model, batch, max_length=STEPS, choose=sampling.greedy, eos=-1, key=None)
    full, first = with_answers(batch, np.array(tokens))
    likeliest = run(model, full).argmax(-1)
    for row in (0, 1):
        np.testing.assert_array_equal(tokens[row], likeliest[row, first[row] : first[row] + STEPS])


def scripted(logits, key):
    """Stands for a way to choose: EOS in the first row, 7 in the others."""
    return jnp.array([EOS, 7, 7], jnp.int32)


def test_rows_are_zero_after_eos_and_decoding_stops_when_all_have_written_it(monkeypatch):
    model, batch = make("decoder"), prompts("decoder")
    tokens = decode(model, batch, max_length=4, choose=scripted, eos=EOS, key=None)
    np.testing.assert_array_equal(tokens, [[EOS, 0, 0, 0], [7, 7, 7, 7], [0, 0, 0, 0]])
    steps = []
    original = Transformer.step

    def counted(self, tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return original(self, tokens, cache)

    monkeypatch.setattr(Transformer, "step", counted)
    decode(model, batch, max_length=5, choose=scripted, eos=7, key=None).block_until_ready()
    jax.effects_barrier()
    assert len(steps) == 5  # the first row never writes 7
    steps.clear()
    decode(model, batch, max_length=6, choose=lambda logits, key: jnp.full(3, EOS), eos=EOS, key=None)
    jax.effects_barrier()
    assert len(steps) == 1


def test_equal_shapes_compile_once():
    model, other = make("decoder"), jax.tree.map(lambda x: x + 0.01, make("decoder"))
    batch = prompts("decoder")
    greedy(model, batch, max_length=3)
    compiled = decoding._decode._cache_size()
    greedy(other, batch | {"decoder_target_tokens": batch["decoder_input_tokens"]}, max_length=3)
    assert decoding._decode._cache_size() == compiled
