"""FLOPs of a training step or a token, bytes of the cache of decoding, and the peak FLOP/s of devices.

What a layer costs is counted by the layer itself (``lm.nn.costs``); here the layers of a model are added up.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import jax
from flax import nnx

from lm.config.base import SettingError
from lm.config.model import MIXERS, ModelConfig
from lm.nn.adaptive import AdaptiveEmbed, AdaptiveSoftmax
from lm.nn.attention import Attention
from lm.nn.block import Block
from lm.nn.convolution import InputConvolution
from lm.nn.costs import matmul_flops
from lm.nn.elmo import BidirectionalLM
from lm.nn.heads import MLMTransform
from lm.nn.layers import num_parameters
from lm.nn.memory import ProductKeyMemory
from lm.nn.rnn import Recurrent
from lm.nn.softmaxes import SoftmaxMixture
from lm.nn.stack import BLOCKS, input_projection
from lm.nn.transformer import Transformer, output_projection
from lm.sharding import logical_axes, named

M = TypeVar("M")  # a module

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
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,  # SXM; must follow the longer names of which it is a prefix
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Return the peak FLOP/s of a device; None if PEAK_FLOPS lacks it, and for a partition of one (MIG)."""
    kind = device.device_kind
    if " MIG " in kind:
        return None
    return next((value for prefix, value in PEAK_FLOPS.items() if kind.startswith(prefix)), None)


def step_flops(
    config: ModelConfig, rows: int, inputs: int, targets: int, generator: ModelConfig | None = None
) -> float:
    """Return the FLOPs of a training step on ``rows`` rows of ``inputs`` and ``targets`` tokens.

    Padding counts. A product of [m,k] and [k,n] takes 2mkn, and the backward pass two such products, so that
    a step takes three forward passes. What rematerialisation repeats is not counted, nor is the half of
    causal scores that a kernel may skip. Scores outside of windows are counted.

    generator: ELECTRA's, which is trained on the same rows in the same step; None without one.
    """
    if generator is not None:
        return step_flops(config, rows, inputs, targets) + step_flops(generator, rows, inputs, targets)
    forward: float = _output_flops(config, targets if config.has_decoder else inputs)
    forward += _embedding_projection_flops(config, inputs * config.has_encoder + targets * config.has_decoder)
    if config.has_encoder:
        encoder_flops = _encoder_flops(config, inputs)
        forward += encoder_flops
        if "query-stream" in config.heads:  # which has the keys and values of the other stream
            encoder_block = abstract_block(config.encoder_config, has_cross_attention=False)
            attention = cast(Attention, encoder_block.attention)
            shared = matmul_flops(attention.key, inputs) + matmul_flops(attention.value, inputs)
            forward += encoder_flops - config.num_encoder_layers * shared
            forward += _embedding_projection_flops(config, inputs)
    if config.has_decoder:
        decoder_block = abstract_block(config, has_cross_attention=config.has_encoder)
        forward += _stack_flops(decoder_block, config.num_decoder_layers, targets)
        if config.has_encoder:
            encoded = config.encoder_lengths(inputs)[-1]
            forward += config.num_decoder_layers * decoder_block.cross_flops(targets, encoded)
        if config.has_transparent_attention:
            weights = (config.num_encoder_layers + 1) * config.num_decoder_layers
            forward += 2 * inputs * config.d_model * weights
    if "backward" in config.heads:  # a second stack as large reads from the other end
        forward *= 2
    return 3.0 * rows * forward


def _output_flops(config: ModelConfig, positions: int) -> int:
    """Return the FLOPs from the last hidden states to the logits of so many positions, forward.

    Each softmax of a mixture has logits of its own.
    """
    if config.output.logits == "none":
        return 0
    if config.embedding.clusters and config.output.logits.startswith("tied"):
        matrices = matmul_flops(_abstract_embedding(config), positions)
    else:
        matrices = 2 * positions * config.embed_width * config.vocab_size
    matrices += matmul_flops(_abstract(output_projection, config), positions)
    if config.output.transform:
        matrices += matmul_flops(_abstract(MLMTransform, config), positions)
    flops = matrices * config.output.softmaxes
    if config.output.softmaxes > 1:
        flops += matmul_flops(_abstract(SoftmaxMixture, config), positions)
    if config.output.softmax == "adaptive":
        flops += matmul_flops(_abstract(AdaptiveSoftmax, config), positions)
    return flops


def _embedding_projection_flops(config: ModelConfig, positions: int) -> int:
    """Return the FLOPs of the projections of so many embeddings to d_model, forward; 0 without any."""
    if config.embedding.clusters:
        return _abstract_embedding(config).lookup_flops(positions)
    return matmul_flops(_abstract(input_projection, config), positions)


def _abstract_embedding(config: ModelConfig) -> AdaptiveEmbed:
    """Return an adaptive embedding with shapes in place of arrays."""
    return _abstract(partial(AdaptiveEmbed, std=1.0), config)


def _abstract(make: Callable[..., M], config: ModelConfig, *arguments: Any) -> M:
    """Return a module with shapes in place of arrays: nothing is computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda key: make(config, nnx.Rngs(params=key), *arguments), key)


@lru_cache(maxsize=64)  # the counts of a model ask for it, and for its blocks, several times
def _shared(make: Callable[..., M], config: ModelConfig, _mixer: Any, *arguments: Any) -> M:
    """Return what ``_abstract`` does; callers share it, and must not change it.

    _mixer: the class of the model's mixer, since a notebook may define one anew under the same name.
    """
    return _abstract(make, config, *arguments)


def _abstract_model(config: ModelConfig) -> Transformer | BidirectionalLM:
    """Return a model with shapes in place of arrays, which callers share and must not change."""
    make = BidirectionalLM if "backward" in config.heads else Transformer
    return _shared(make, config, MIXERS.get(config.mixer.kind))


def abstract_block(config: ModelConfig, has_cross_attention: bool) -> Block:
    """Return one block of a stack, with shapes in place of arrays: nothing is computed.

    Callers share it, and must not change it.
    """
    return _shared(BLOCKS[config.block], config, MIXERS.get(config.mixer.kind), has_cross_attention)


def abstract_memory(config: ModelConfig) -> ProductKeyMemory:
    """Return a product-key memory with shapes in place of arrays."""
    return _abstract(ProductKeyMemory, config)


def _stack_flops(block: Block, num_layers: int, length: int) -> float:
    """Return the FLOPs of the forward pass of so many blocks over a row, without cross-attention."""
    mixers = num_layers * block.mixer_flops(length, length)
    flops = mixers + _feed_forward_flops(block, num_layers, length)
    if block.config.embedding.convolution:
        flops += _abstract(InputConvolution, block.config).flops(length)
    return flops


def _encoder_flops(config: ModelConfig, length: int) -> float:
    """Return the FLOPs of the forward pass of an encoder over a row, whose layers may make it shorter."""
    block = abstract_block(config.encoder_config, has_cross_attention=False)
    if config.funnel.blocks == 1:
        return _stack_flops(block, config.num_encoder_layers, length)
    flops = 0.0
    for row, shorter in pairwise(config.encoder_lengths(length)):
        # attention reads whole rows, and what follows it those that it has made shorter
        flops += block.mixer_flops(row, row) + _feed_forward_flops(block, 1, shorter)
    return flops


def _feed_forward_flops(block: Block, num_layers: int, length: int) -> float:
    """Return the FLOPs of what follows the mixers of so many blocks, forward.

    These are feed-forward layers, experts, adapters, and the gates of residual branches. The gate of a GLU
    counts as part of its feed-forward layer.
    """
    with_experts = len(block.config.experts.layers(num_layers))
    flops: float = num_layers * (matmul_flops(block.adapter, length) + block.gate_flops(length))
    if block.config.universal.halting == "adaptive":
        flops += num_layers * 2 * length * block.config.d_model
    with_memory = 1 if block.has_product_key_memory else 0
    flops += (num_layers - with_experts - with_memory) * matmul_flops(block.mlp, length)
    if block.has_product_key_memory:
        flops += abstract_memory(block.config).flops(length)
    if block.experts is not None:
        flops += with_experts * block.experts.flops(length)
    return flops


class Costs(NamedTuple):
    """Holds what a model costs per token, which follows from its settings alone."""

    parameters: int  # N with embeddings; tied matrices count once
    # of these, those that a token passes: neither those of experts that it is not sent to, nor values of a
    # memory that it does not read
    active_parameters: int
    # of these, the tables of tokens, positions and types, and an output matrix that is not tied
    embedding_parameters: int
    training: float  # counted product by product, with a token's share of attention's scores [FLOP]
    scores: float  # that share [FLOP]
    generating: float  # of the token after a row; 0 without a decoder [FLOP]
    cache: int  # of a row in decoding: keys and values, or a recurrent state [bytes]

    @property
    def non_embedding_parameters(self) -> int:
        """Return Kaplan et al.'s N, without embeddings."""
        return self.parameters - self.embedding_parameters

    @property
    def active_non_embedding_parameters(self) -> int:
        """Return the number of parameters that a token passes, without embeddings."""
        return self.active_parameters - self.embedding_parameters


def longest_row(config: ModelConfig) -> int | None:
    """Return the longest row that the model reads [tokens]; None: it has no limit.

    Learned positions and synthesizers end at ``positions.max_length``. All other positions, sinusoids
    included, are computed for any place of a row.
    """
    return config.positions.max_length if config.has_max_length else None


def check_length(config: ModelConfig, length: int, name: str = "length") -> None:
    """Raise SettingError for rows of ``length`` tokens that are longer than the model's positions reach."""
    longest = longest_row(config)
    if longest is not None and length > longest:
        raise SettingError(
            f"{name}={length} should be at most {longest}: beyond model.positions.max_length={longest} "
            "the model has no positions"
        )


def costs(config: ModelConfig, length: int, targets: int | None = None) -> Costs:
    """Return the costs of a model.

    ``length`` is the row length in tokens; for an encoder-decoder, that of the inputs.
    targets: length of an encoder-decoder's targets; None: as long as the inputs.

    ``training`` is ``step_flops`` over the tokens of a row, without scores outside of windows. It differs
    from the usual estimate 6 N D (Kaplan et al. 2020, section 2.1, whose N leaves out embeddings):
    attention scores are added; a token of an encoder-decoder passes through only one of the two stacks;
    looking up an embedding takes no product, while the output matrix does. Of a causal row all
    scores count, of a window those inside.

    Raises SettingError for rows that are longer than the model's positions reach.
    """
    is_both = config.has_encoder and config.has_decoder
    if not is_both or targets is None:
        targets = length
    check_length(config, max(length, targets))
    model: Any = _abstract_model(config)
    one_way = model.forward if "backward" in config.heads else model
    tokens = length + targets if is_both else length
    full_scores = windowed_scores = 0  # FLOPs of a row, forward: of all scores, and of those inside windows
    if config.has_encoder:
        encoder_full, encoder_windowed = _encoder_score_flops(config, length)
        full_scores += encoder_full
        windowed_scores += encoder_windowed
    if config.has_decoder:
        visible = [targets] * config.num_decoder_layers
        full_scores += targets * _score_flops(config, visible, config.has_encoder)
        windowed_scores += targets * _own_score_flops(config, targets)
    cross_scores = targets * _cross_score_flops(config, length)
    directions = 2 if {"backward", "query-stream"} & {*config.heads} else 1  # as in ``step_flops``
    scores = 3.0 * directions * (windowed_scores + cross_scores) / tokens
    outside = 3.0 * directions * (full_scores - windowed_scores)
    return Costs(
        num_parameters(model),
        num_parameters(model) - _inactive_parameters(config),
        _embedding_parameters(one_way, model),
        training=(step_flops(config, 1, length, targets) - outside) / tokens,
        scores=scores,
        generating=float(_generating_flops(config, targets, length)) if config.has_decoder else 0.0,
        cache=cache_bytes(config, targets, length) if config.has_decoder else 0,
    )


def _inactive_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of experts and memories that a token does not pass; a mean."""
    stacks = []
    if config.has_encoder:
        stacks.append((config.encoder_config, config.num_encoder_layers, "encoder"))
    if config.has_decoder and config.architecture != "shared-encoder-decoder":
        stacks.append((config, config.num_decoder_layers, "decoder"))
    total = 0.0
    for stack, num_layers, side in stacks:
        experts = abstract_block(stack, has_cross_attention=False).experts
        if experts is not None:
            is_shared = config.shares_layers(side) and config.shared_parts in ("all", "mlp")
            layers = 1 if is_shared else len(stack.experts.layers(num_layers))
            total += layers * experts.inactive_parameters
    if config.memory.keys:
        total += abstract_memory(config).inactive_parameters
    return round(total)


def expert_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of all experts, which ``mesh.expert`` shards; without routers."""
    model = _abstract_model(config)
    axes = logical_axes(model)
    return sum(prod(x.shape) for name, x in named(model).items() if "experts" in axes[name])


def _embedding_parameters(model: Transformer, whole: Transformer | BidirectionalLM) -> int:
    """Return the parameters of a model's embeddings, and of an output matrix that is not one of them.

    ``model`` is the Transformer in ``whole``, which may have a backward stack with tables of its own.
    """
    backward = whole.backward if isinstance(whole, BidirectionalLM) else None
    stacks = [stack for stack in (model.encoder, model.decoder, backward) if stack is not None]
    tables = [model.embed, model.encoder_embed, model.head]
    for stack in stacks:
        tables += [stack.positions, stack.types]
    return sum(num_parameters(table) for table in tables if table is not None)


def _generating_flops(config: ModelConfig, length: int, inputs: int) -> float:
    """Return the FLOPs of the token after ``length`` others, whose keys and values are in the cache.

    An encoder-decoder also reads ``inputs`` encoded tokens.
    """
    block = abstract_block(config, has_cross_attention=config.has_encoder)
    layer: float = block.mixer_flops(1, 0)
    if isinstance(block.attention, Recurrent):
        layer -= matmul_flops(block.attention.first, 1)  # of the start state, which is kept
    if config.has_encoder:
        layer += block.cross_flops(1, 0)
    products: float = config.num_decoder_layers * layer + _output_flops(config, 1)
    products += _embedding_projection_flops(config, 1)
    products += _feed_forward_flops(block, config.num_decoder_layers, 1)
    return products + _own_score_flops(config, length) + _cross_score_flops(config, inputs)


def cache_bytes(config: ModelConfig, length: int, inputs: int) -> int:
    """Return the bytes that decoding holds of a row of ``length`` tokens that reads ``inputs`` encoded ones.

    Attention's cache holds whole rows, with a window or without.
    """
    block = abstract_block(config, has_cross_attention=config.has_encoder)
    layer = block.mixer_cache_bytes(length)
    if config.has_encoder:
        layer += block.cross_cache_bytes(config.encoder_lengths(inputs)[-1])
    return config.num_decoder_layers * layer


def _score_flops(config: ModelConfig, visible: Sequence[int], crosses: bool = False) -> int:
    """Return the FLOPs of a token's scores in layers in which it reads so many tokens each, forward."""
    block = abstract_block(config, has_cross_attention=crosses)
    without_scores = block.mixer_flops(1, 0)
    return sum(block.mixer_flops(1, number) - without_scores for number in visible)


def _encoder_score_flops(config: ModelConfig, length: int) -> tuple[int, int]:
    """Return the FLOPs of the scores of an encoder's row, forward: all, and those inside of windows."""
    if config.funnel.blocks > 1:  # rows get shorter, and have no windows
        rows = config.encoder_lengths(length)[:-1]
        full = sum(row * _score_flops(config.encoder_config, [row]) for row in rows)
        return full, full
    full = length * _score_flops(config.encoder_config, [length] * config.num_encoder_layers)
    return full, length * _score_flops(config.encoder_config, _visible_tokens(config, "encoder", length))


def _own_score_flops(config: ModelConfig, length: int) -> int:
    """Return the FLOPs of one decoder token's self-attention scores, forward."""
    return _score_flops(config, _visible_tokens(config, "decoder", length), config.has_encoder)


def _cross_score_flops(config: ModelConfig, inputs: int) -> int:
    """Return the FLOPs of one decoder token's cross-attention scores, forward; 0 without an encoder."""
    if not (config.has_encoder and config.has_decoder):
        return 0
    block = abstract_block(config, has_cross_attention=True)
    encoded = config.encoder_lengths(inputs)[-1]
    scores = block.cross_flops(1, encoded) - block.cross_flops(1, 0) - block.cross_flops(0, encoded)
    return config.num_decoder_layers * scores


def _visible_tokens(config: ModelConfig, stack: str, length: int) -> list[int]:
    """Return how many tokens of a row of ``length`` a token reads in each layer of the encoder or decoder."""
    sparsity = config.sparsity
    # a decoder's window, or a causal encoder's, lies behind a token, another encoder's on both sides
    sides = 1 if stack == "decoder" or config.is_causal_encoder else 2
    visible = []
    for window in config.windows(stack):
        if window is None:
            visible.append(length)
        else:
            # all of these are numbers of blocks, also ``global_tokens``
            blocks = 1 + sides * (window + sparsity.random_blocks) + sparsity.global_tokens
            visible.append(min(length, blocks * sparsity.block))
    return visible
