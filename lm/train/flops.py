"""How much arithmetic a step or a token takes and decoding remembers, and how much the devices could do."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.nn.attention import Attention
from lm.nn.layers import count
from lm.nn.mixers import make_mixer
from lm.nn.transformer import Transformer

# bfloat16 products without sparsity [FLOP/s per device], from the makers' data sheets; by the start of
# device_kind
PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "TPU7x": 1153.5e12,  # of each of a chip's two devices
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak(device: jax.Device) -> float | None:
    """FLOP/s of a device; None where it is not known."""
    return next((value for kind, value in PEAK.items() if device.device_kind.startswith(kind)), None)


def step_flops(config: ModelConfig, rows: int, inputs: int, targets: int) -> float:
    """FLOPs of a training step on rows of ``inputs`` and ``targets`` positions: all products, padding
    included.

    A product of [m,k] and [k,n] is 2mkn; the backward pass is two of each, so 6. What rematerialisation
    repeats is not counted, nor is the half of causal scores that a kernel may skip, nor ELECTRA's generator.
    """

    def attention(side, queries, keys):  # query and output are as many, and key and value
        sizes = side.attention
        width = sizes.d_kv + sizes.value_width  # of a head's key and value
        heads, groups = sizes.num_heads * width, sizes.key_value_heads * width
        products = side.d_model * (heads * queries + groups * keys) + _low_rank(side, queries, keys)
        return products + heads * queries * keys

    # Of one head as wide as the model: its matrices, scores, and the mean of values.
    def crossing(queries, keys):
        square, kind = config.d_model**2, config.cross_attention.kind
        if kind == "heads":
            return attention(config, queries, keys)
        matrices = {
            "dot": queries,
            "multiplicative": queries + keys,
            "additive": 2 * queries + keys,
            "none": 0,
        }
        return square * matrices[kind] + (kind != "none") * 2 * config.d_model * queries * keys

    def mixing(side, positions, both_ways):  # others than attention multiply each position by their matrices
        numbers = _numbers_of_matrices(partial(make_mixer, side, bidirectional=both_ways))
        if not side.has_scores:
            return positions * numbers
        more = numbers - _numbers_of_matrices(partial(Attention, side))  # that a user's own has
        return attention(side, positions, positions) + positions * more

    def mlp(side):
        matrices = 3 if side.mlp.activation.startswith("gated") else 2
        matrices = 0 if side.mlp.activation == "none" else matrices
        rank = matrices * side.lora.rank * ("mlp" in side.lora.matrices)
        width = side.mlp.d_ff
        return side.d_model * (width * matrices + 2 * side.mlp.adapter_width + rank) + width * rank

    encoder = config.encoder_side
    words = 0 if config.output.logits == "none" else config.vocab_size
    products = (targets if config.has_decoder else inputs) * config.embed_width * words
    if config.has_decoder:
        products += config.num_decoder_layers * (mixing(config, targets, False) + targets * mlp(config))
    if config.has_encoder:
        products += config.num_encoder_layers * (mixing(encoder, inputs, True) + inputs * mlp(encoder))
    if config.has_encoder and config.has_decoder:
        products += config.num_decoder_layers * crossing(targets, inputs)
    if "backward" in config.heads:  # as much again, from the other end
        products *= 2
    return 6.0 * rows * products


def _low_rank(side: ModelConfig, queries: int, keys: int) -> int:
    """The products with low-rank updates of an attention's matrices."""
    positions = {"query": queries, "key": keys, "value": keys, "out": queries}
    widths = {
        "key": side.attention.key_value_heads * side.attention.d_kv,
        "value": side.attention.key_value_heads * side.attention.value_width,
    }
    widths |= {
        "query": side.attention.num_heads * side.attention.d_kv,
        "out": side.attention.num_heads * side.attention.value_width,
    }
    updated = [name for name in side.lora.matrices if name in positions]
    return side.lora.rank * sum(positions[name] * (side.d_model + widths[name]) for name in updated)


class Costs(NamedTuple):
    """What a model takes for each token, by its settings alone."""

    parameters: int  # N, tied matrices once
    training: float  # of a token, with its share of attention's scores [FLOP]
    scores: float  # that share [FLOP]
    generating: float  # of the token after a row; 0 without a decoder [FLOP]
    cache: int  # that decoding holds of a row: keys and values, or a recurrent state [bytes]


def longest_row(config: ModelConfig, length: int) -> int:
    """``length``, or as many tokens as a row can have where positions are learned and end before [tokens]."""
    return min(length, config.positions.max_length) if config.positions.kind == "learned" else length


def costs(config: ModelConfig, length: int) -> Costs:
    """Of rows of ``length`` tokens, as many on each side of an encoder-decoder.

    SettingError for rows that are longer than learned positions reach.

    A token takes two operations for each of N parameters, and the backward pass twice as many: training on D
    tokens takes a N D, where a is 6, or 3 where each token passes one of two stacks (Kaplan et al. 2020,
    section 2.1, whose N leaves out embeddings). A score is a product with a key and one with a value besides;
    of a causal row all count, of a window those inside.
    """
    if length > longest_row(config, length):
        raise SettingError(
            f"rows of {length} tokens are longer than model.positions.max_length="
            f"{config.positions.max_length}, up to which positions are learned"
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = jax.eval_shape(lambda key: Transformer(config, nnx.Rngs(params=key)), key)
    parameters, sides = count(model), config.has_encoder + config.has_decoder
    passes = 2 if config.architecture == "shared-encoder-decoder" else 1  # of the same parameters
    encoder = _scores(config.encoder_side, config.num_encoder_layers, length) if config.has_encoder else 0
    decoder = _scores(config, config.num_decoder_layers, length) if config.has_decoder else 0
    if sides == 2:  # to all of the encoder's output
        decoder += (
            config.num_decoder_layers
            * length
            * config.attention.num_heads
            * (config.attention.d_kv + config.attention.value_width)
        )
    scores = (encoder + decoder) / sides
    read = parameters - (count(model.encoder) if config.architecture == "encoder-decoder" else 0)
    return Costs(
        parameters,
        training=6.0 * (parameters * passes / sides + scores),
        scores=6.0 * scores,
        generating=2.0 * (read + decoder) if config.has_decoder else 0.0,
        cache=cache_bytes(config, length, length) if config.has_decoder else 0,
    )


def cache_bytes(config: ModelConfig, length: int, inputs: int) -> int:
    """What decoding holds of a row of ``length`` tokens, and for cross-attention of ``inputs`` [bytes].

    Attention's cache holds whole rows, be there a window or not.
    """

    def held(model: Transformer) -> object:
        carry = model.decoder.init_carry(1, length)
        if not config.has_encoder or config.cross_attention.kind == "none":
            return carry
        return carry, model.decoder.encoder_key_value(jnp.zeros((1, inputs, config.d_model), config.dtype))

    key = jax.eval_shape(lambda: jax.random.key(0))
    model = jax.eval_shape(lambda key: Transformer(config, nnx.Rngs(params=key)), key)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(held, model)))


def _scores(config: ModelConfig, layers: int, length: int) -> int:
    """Multiplications of a token with the keys and values of its own stack, where that has attention."""
    sparsity, each = config.sparsity, 0
    for window in sparsity.layer_windows or (sparsity.window,) * layers:
        sides = 1 if config.has_decoder else 2  # on which a window lies
        blocks = 0 if window is None else 1 + sides * window + sparsity.random_blocks + sparsity.global_tokens
        each += length if window is None else min(length, blocks * sparsity.block)
    heads = config.attention.num_heads * (config.attention.d_kv + config.attention.value_width)
    return each * heads if config.has_scores else 0


def _numbers_of_matrices(make: Callable[..., object]) -> int:
    """Of one layer's mixer, which ``make(rngs=...)`` makes."""
    mixer = jax.eval_shape(lambda: make(rngs=nnx.Rngs(params=0)))
    return sum(leaf.size for leaf in jax.tree.leaves(mixer) if leaf.ndim == 2)
