"""FLOPs of a training step or a token, bytes of the cache of decoding, and the peak FLOP/s of devices.

What a layer costs is counted by the layer itself (``lm.nn.costs``); here the layers of a model are added up.
"""

from typing import NamedTuple

import jax
from flax import nnx

from lm.config.base import SettingError
from lm.config.model import ModelConfig
from lm.nn.block import Block
from lm.nn.costs import matmul_flops, mixer_cache_bytes, mixer_flops
from lm.nn.layers import count
from lm.nn.stack import Stack
from lm.nn.transformer import Transformer

# Products of bfloat16 without sparsity [FLOP/s per device], from the makers' data sheets; by the start of
# ``device_kind``.
PEAK_FLOPS = {
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


def peak_flops(device: jax.Device) -> float | None:
    """Return the peak FLOP/s of a device; None for a device that PEAK_FLOPS lacks."""
    kind = device.device_kind
    return next((value for prefix, value in PEAK_FLOPS.items() if kind.startswith(prefix)), None)


def step_flops(config: ModelConfig, rows: int, inputs: int, targets: int) -> float:
    """Return the FLOPs of a training step on ``rows`` rows of ``inputs`` and ``targets`` tokens.

    Padding counts. A product of [m,k] and [k,n] takes 2mkn, and the backward pass two such products, so that
    a step takes three forward passes. What rematerialisation repeats is not counted, nor is the half of
    causal scores that a kernel may skip, nor ELECTRA's generator. Scores outside of windows are counted.
    """
    vocab_size = 0 if config.output.logits == "none" else config.vocab_size
    predicted = targets if config.has_decoder else inputs
    forward = 2 * predicted * config.embed_width * vocab_size
    if config.has_encoder:
        encoder_block = abstract_block(config.encoder_config, has_cross_attention=False)
        forward += config.num_encoder_layers * _block_flops(encoder_block, inputs)
    if config.has_decoder:
        decoder_block = abstract_block(config, has_cross_attention=config.has_encoder)
        layer = _block_flops(decoder_block, targets)
        if decoder_block.cross is not None:
            layer += decoder_block.cross.cross_flops(targets, inputs)
        forward += config.num_decoder_layers * layer
    if "backward" in config.heads:  # a second stack as large reads from the other end
        forward *= 2
    return 3.0 * rows * forward


def abstract_block(config: ModelConfig, has_cross_attention: bool) -> Block:
    """Return one block of a stack, with shapes in place of arrays: nothing is computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: Block(config, nnx.Rngs(params=key), has_cross_attention), key)


def _block_flops(block: Block, length: int) -> int:
    """Return the FLOPs of a block's forward pass over a row, without cross-attention."""
    mixer = mixer_flops(block.attention, length, length)
    return mixer + matmul_flops(block.mlp, length) + matmul_flops(block.adapter, length)


class Costs(NamedTuple):
    """What a model costs for each token, by its settings alone."""

    parameters: int  # N; tied matrices count once
    training: float  # of a token, with its share of attention's scores [FLOP]
    scores: float  # that share [FLOP]
    generating: float  # of the token after a row; 0 without a decoder [FLOP]
    cache: int  # of a row in decoding: keys and values, or a recurrent state [bytes]


def longest_row(config: ModelConfig, length: int) -> int:
    """Return ``length`` or, if less, the longest row that learned positions reach [tokens]."""
    positions = config.positions
    return min(length, positions.max_length) if positions.kind == "learned" else length


def costs(config: ModelConfig, length: int) -> Costs:
    """Return the costs for rows of ``length`` tokens, as many on each side of an encoder-decoder.

    A token takes two operations for each of N parameters, and the backward pass twice as many: training on D
    tokens takes a N D, where a is 6, or 3 where each token passes one of two stacks (Kaplan et al. 2020,
    section 2.1, whose N leaves out embeddings). What layers share counts as often as it is used. Scores come
    on top: a product with a key and one with a value. Of a causal row all scores count, of a window those
    inside.

    Raises SettingError for rows that are longer than learned positions reach.
    """
    if length > longest_row(config, length):
        raise SettingError(
            f"rows of {length} tokens are longer than model.positions.max_length="
            f"{config.positions.max_length}, up to which positions are learned"
        )
    key = jax.eval_shape(lambda: jax.random.key(0))
    model = jax.eval_shape(lambda key: Transformer(config, nnx.Rngs(params=key)), key)
    parameters = count(model)
    num_stacks = config.has_encoder + config.has_decoder
    passes = 2 if config.architecture == "shared-encoder-decoder" else 1  # of the same parameters
    encoder = decoder = 0
    if config.has_encoder:
        encoder = _score_flops(config.encoder_config, config.num_encoder_layers, length)
    if config.has_decoder:
        decoder = _score_flops(config, config.num_decoder_layers, length)
    cross = abstract_block(config, has_cross_attention=num_stacks == 2).cross
    if cross is not None:  # a decoder's token also reads all of the encoder's output
        across = cross.cross_flops(1, length) - cross.cross_flops(1, 0) - cross.cross_flops(0, length)
        decoder += config.num_decoder_layers * across
    scores = (encoder + decoder) / num_stacks
    repeated = _repeated_parameters(model.encoder) + _repeated_parameters(model.decoder)
    applied = used = parameters + repeated
    if config.architecture == "encoder-decoder":  # the encoder has run before
        used -= count(model.encoder) + _repeated_parameters(model.encoder)
        used -= 0 if model.encoder_embed is None else count(model.encoder_embed)
    return Costs(
        parameters,
        training=6.0 * applied * passes / num_stacks + 3.0 * scores,
        scores=3.0 * scores,
        generating=2.0 * used + decoder if config.has_decoder else 0.0,
        cache=cache_bytes(config, length, length) if config.has_decoder else 0,
    )


def _repeated_parameters(stack: Stack | None) -> int:
    """Return how many more parameters the stack would have if its layers did not share any."""
    if stack is None:
        return 0
    return sum((stack.num_layers // leaf.shape[0] - 1) * leaf.size for leaf in jax.tree.leaves(stack.blocks))


def cache_bytes(config: ModelConfig, length: int, inputs: int) -> int:
    """Return the bytes that decoding holds of a row of ``length`` tokens that reads ``inputs`` encoded ones.

    Attention's cache holds whole rows, with a window or without.
    """
    block = abstract_block(config, has_cross_attention=config.has_encoder)
    layer = mixer_cache_bytes(block.attention, length)
    if block.cross is not None:
        layer += block.cross.cache_bytes(inputs)
    return config.num_decoder_layers * layer


def _score_flops(config: ModelConfig, num_layers: int, length: int) -> int:
    """Return the FLOPs of a token with the keys and values of its own stack's layers, forward."""
    mixer = abstract_block(config, has_cross_attention=False).attention
    without = mixer_flops(mixer, 1, 0)
    layers = _visible_tokens(config, num_layers, length)
    return sum(mixer_flops(mixer, 1, visible) - without for visible in layers)


def _visible_tokens(config: ModelConfig, num_layers: int, length: int) -> list[int]:
    """Return for each layer how many tokens of a row of ``length`` a token reads, by window and sparsity."""
    sparsity = config.sparsity
    sides = 1 if config.has_decoder else 2  # a decoder's window lies behind a token, an encoder's on both
    visible = []
    for window in sparsity.layer_windows or (sparsity.window,) * num_layers:
        if window is None:
            visible.append(length)
        else:
            blocks = 1 + sides * window + sparsity.random_blocks + sparsity.global_tokens
            visible.append(min(length, blocks * sparsity.block))
    return visible
