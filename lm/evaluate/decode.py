"""Writing tokens one after another, over a cache."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from lm.nn.transformer import Batch, Transformer
from lm.ops import sampling

PAD, EOS = 0, 1  # of every vocabulary that models here are trained with
PROMPT = ("decoder_input_tokens", "decoder_segment_ids", "decoder_causal_attention")  # of a decoder alone
INPUTS = ("encoder_input_tokens", "encoder_segment_ids")  # of an encoder-decoder

Choose = Callable[[jax.Array, jax.Array | None], jax.Array]  # (logits [B,V], key) -> tokens int32 [B]


def greedy(model: Transformer, batch: Batch, *, max_length: int) -> jax.Array:
    """int32 [B,max_length]: the likeliest token at each step, up to and with EOS; zeros after it.

    ``batch`` is encoder features, or the prompts of a decoder: padded on the right, shifted, so that the last token is
    the one that the first answer follows. Rows that are all padding stay zero.
    """
    return decode(model, batch, max_length=max_length, choose=sampling.greedy, eos=EOS, key=None)


def decode(
    model: Transformer, batch: Batch, *, max_length: int, choose: Choose, eos: int, key: jax.Array | None
) -> jax.Array:
    """int32 [B,max_length] with the token of every step as ``choose`` has it; compiles once for equal shapes."""
    names = INPUTS if model.config.has_encoder else PROMPT
    batch = {name: batch[name] for name in names if name in batch}
    return _decode(model, batch, key, max_length=max_length, choose=choose, eos=eos)


@partial(jax.jit, static_argnames=("max_length", "choose", "eos"))
def _decode(model, batch, key, *, max_length, choose, eos):
    tokens = batch[INPUTS[0] if model.config.has_encoder else PROMPT[0]]
    segments = batch.get(INPUTS[1] if model.config.has_encoder else PROMPT[1], jnp.ones_like(tokens))
    prompt = (
        {"decoder_input_tokens": jnp.full((tokens.shape[0], 1), PAD, jnp.int32)} if model.config.has_encoder else {}
    )
    prompt = batch | prompt
    logits, cache = model.prefill(prompt, prompt["decoder_input_tokens"].shape[1] + max_length - 1)

    def unfinished(state):
        step, _, done, _, _ = state
        return (step < max_length) & ~done.all()

    def advance(state):
        step, written, done, logits, cache = state
        token = choose(logits, None if key is None else jax.random.fold_in(key, step))
        token = jnp.where(done, PAD, token)
        written = written.at[:, step].set(token)
        done |= token == eos
        return step + 1, written, done, *model.step(token, cache)

    written = jnp.full((tokens.shape[0], max_length), PAD, jnp.int32)
    done = ~(segments > 0).any(-1)
    return jax.lax.while_loop(unfinished, advance, (0, written, done, logits, cache))[1]
