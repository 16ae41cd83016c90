"""How much arithmetic a step takes, and how much the devices could do."""

import jax
from flax import nnx

from lm.nn.config import ModelConfig
from lm.nn.mixers import MIXERS

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
        heads, groups = side.num_heads * side.d_kv, side.key_value_heads * side.d_kv
        return 2 * side.d_model * (heads * queries + groups * keys) + 2 * heads * queries * keys

    def mixing(side, positions, both_ways):  # others than attention multiply each position by their matrices
        if side.mixer == "attention":
            return attention(side, positions, positions)
        return positions * _numbers_of_matrices(side, both_ways)

    def mlp(side):
        matrices = 3 if side.mlp.startswith("gated") else 2
        return side.d_model * (side.d_ff * matrices + 2 * side.adapter_width)

    encoder = config.encoder_side
    words = 0 if config.logits == "none" else config.vocab_size
    products = (targets if config.has_decoder else inputs) * config.embed_width * words
    if config.has_decoder:
        products += config.num_decoder_layers * (mixing(config, targets, False) + targets * mlp(config))
    if config.has_encoder:
        products += config.num_encoder_layers * (mixing(encoder, inputs, True) + inputs * mlp(encoder))
    if config.has_encoder and config.has_decoder:
        products += config.num_decoder_layers * attention(config, targets, inputs)
    if "backward" in config.heads:  # as much again, from the other end
        products *= 2
    return 6.0 * rows * products


def _numbers_of_matrices(config: ModelConfig, both_ways: bool) -> int:
    """Of one layer's mixer."""
    mixer = jax.eval_shape(lambda: MIXERS[config.mixer](config, nnx.Rngs(params=0), both_ways))
    return sum(leaf.size for leaf in jax.tree.leaves(mixer) if leaf.ndim == 2)
