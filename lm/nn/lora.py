"""Low-rank updates of linear layers, trained in place of their kernels (LoRA, Hu et al. 2021)."""

from typing import Any

from flax import nnx

from lm.config.model import ModelConfig
from lm.nn.layers import Linear, LowRankUpdate


def add_lora(config: ModelConfig, rngs: nnx.Rngs, block: Any) -> None:
    """Add a low-rank update to those linear layers of a new block that ``lora.matrices`` names."""
    if not config.lora.rank:
        return
    lora = config.lora
    attention_matrices = [name for name in lora.matrices if name != "mlp"]
    attentions = block.attention, getattr(block.attention, "globals", None), block.cross
    layers: list[Any] = []
    for attention in attentions:
        layers += [getattr(attention, name, None) for name in attention_matrices]
    if "mlp" in lora.matrices:
        layers += [getattr(block.mlp, name, None) for name in ("hidden", "linear", "out")]
    for layer in layers:
        # What the block, or one of its attentions, lacks is None or Identity.
        if isinstance(layer, Linear):
            width, out = layer.kernel.shape
            axes = layer.kernel.axes
            layer.lora = LowRankUpdate(rngs, (width, out), axes, rank=lora.rank, alpha=lora.alpha)
