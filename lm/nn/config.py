"""The shape of a Transformer, and the shapes that were published.

Source of the T5 sizes: Raffel et al. 2020, sections 3.1.2 and 3.7; of T5 1.1: the released checkpoints' configurations.
"""

from dataclasses import dataclass, replace
from typing import Literal

from lm.config import SettingError

Architecture = Literal["encoder-decoder", "shared-encoder-decoder", "decoder", "prefix-decoder"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides which function a Transformer computes and how it is compiled."""

    architecture: Architecture = "encoder-decoder"  # which stacks there are, and what each position sees
    vocab_size: int = 32_128  # rows of the embedding; at least the vocabulary with its sentinels [tokens]
    num_encoder_layers: int = 12  # blocks of the encoder; unused without one [layers]
    num_decoder_layers: int = 12  # blocks of the decoder [layers]
    d_model: int = 768  # width of the residual stream [features]
    d_ff: int = 3_072  # width of the feed-forward layer [features]
    d_kv: int = 64  # width of one attention head [features]
    num_heads: int = 12  # attention heads [heads]
    mlp: Literal["relu", "gated-gelu"] = "relu"  # feed-forward layer: T5 1.0 or T5 1.1
    logits: Literal["tied", "separate"] = "tied"  # output matrix: the embedding (T5 1.0) or its own (T5 1.1)
    relative_buckets: int = 32  # rows of the relative-position bias table [buckets]
    relative_max_distance: int = 128  # distance from which on all positions share a bucket [tokens]
    norm_epsilon: float = 1e-6  # added to the mean square before its root is taken
    dropout: float = 0.1  # rate at which activations and attention weights are zeroed in training
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters and softmax stay float32
    layers: Literal["scan", "unroll"] = "scan"  # how the stack is compiled; the numbers are the same
    remat: Literal["none", "dots", "full"] = "none"  # what the backward pass recomputes: nothing, all but matmuls, all

    def __post_init__(self):
        for name in ("vocab_size", "num_decoder_layers", "d_model", "d_ff", "d_kv", "num_heads", "relative_buckets"):
            if getattr(self, name) < 1:
                raise SettingError(f"model.{name}={getattr(self, name)} should be at least 1")
        if not 0 <= self.dropout < 1:
            raise SettingError(f"model.dropout={self.dropout} should be in [0, 1)")
        if self.architecture == "shared-encoder-decoder" and self.num_encoder_layers != self.num_decoder_layers:
            raise SettingError(
                f"model.num_encoder_layers={self.num_encoder_layers} should equal model.num_decoder_layers="
                f"{self.num_decoder_layers} when the two stacks share their parameters"
            )

    @property
    def has_encoder(self) -> bool:
        return self.architecture in ("encoder-decoder", "shared-encoder-decoder")


def _t5(d_model: int, d_ff: int, d_kv: int, num_heads: int, num_layers: int) -> ModelConfig:
    return ModelConfig(
        d_model=d_model, d_ff=d_ff, d_kv=d_kv, num_heads=num_heads,
        num_encoder_layers=num_layers, num_decoder_layers=num_layers,
    )  # fmt: skip


def _t5_1_1(d_model: int, d_ff: int, d_kv: int, num_heads: int, num_layers: int) -> ModelConfig:
    return replace(_t5(d_model, d_ff, d_kv, num_heads, num_layers), mlp="gated-gelu", logits="separate")


SIZES = {
    "t5-small": _t5(512, 2_048, 64, 8, 6),
    "t5-base": _t5(768, 3_072, 64, 12, 12),
    "t5-large": _t5(1_024, 4_096, 64, 16, 24),
    "t5-3b": _t5(1_024, 16_384, 128, 32, 24),
    "t5-11b": _t5(1_024, 65_536, 128, 128, 24),
    "t5-1.1-small": _t5_1_1(512, 1_024, 64, 6, 8),
    "t5-1.1-base": _t5_1_1(768, 2_048, 64, 12, 12),
    "t5-1.1-large": _t5_1_1(1_024, 2_816, 64, 16, 24),
    "t5-1.1-xl": _t5_1_1(2_048, 5_120, 64, 32, 24),
    "t5-1.1-xxl": _t5_1_1(4_096, 10_240, 64, 64, 24),
}
