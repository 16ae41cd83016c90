"""How much arithmetic a step takes, and how much the devices could do."""

import jax

from lm.nn.config import ModelConfig

# bfloat16 products without sparsity [FLOP/s per device], from the makers' data sheets; by the start of device_kind
PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}


def peak(device: jax.Device) -> float | None:
    """FLOP/s of a device; None where it is not known."""
    return next((value for kind, value in PEAK.items() if device.device_kind.startswith(kind)), None)


def step_flops(config: ModelConfig, rows: int, inputs: int, targets: int) -> float:
    """FLOPs of a training step on rows of ``inputs`` and ``targets`` positions: all products, padding included.

    A product of [m,k] and [k,n] is 2mkn; the backward pass is two of each, so 6. What rematerialisation repeats is
    not counted, nor is the half of causal scores that a kernel may skip.
    """
    heads = config.num_heads * config.d_kv
    mlp = config.d_model * config.d_ff * (3 if config.mlp.startswith("gated") else 2)
    project = config.d_model * heads  # one of query, key, value and output, per position

    def attention(queries, keys):
        return 2 * project * (queries + keys) + 2 * heads * queries * keys

    products = targets * config.d_model * config.vocab_size
    products += config.num_decoder_layers * (attention(targets, targets) + targets * mlp)
    if config.has_encoder:
        products += config.num_encoder_layers * (attention(inputs, inputs) + inputs * mlp)
        products += config.num_decoder_layers * attention(targets, inputs)
    return 6.0 * rows * products
