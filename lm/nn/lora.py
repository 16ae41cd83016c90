"""Low-rank updates of linear layers, trained in place of their kernels (LoRA, Hu et al. 2021)."""

from typing import Any

from flax import nnx

from lm.config.model import ModelConfig
from lm.nn.layers import Linear, LowRankUpdate


def add_lora(config: ModelConfig, rngs: nnx.Rngs, block: Any) -> None:
    """Give an update to those linear layers of a new block that ``lora.matrices`` names."""
    if not config.lora.rank:
        return
    lora = config.lora
    projections = block.attention, getattr(block.attention, "globals", None), block.cross
    chosen = [
        getattr(module, name, None) for module in projections for name in lora.matrices if name != "mlp"
    ]
    if "mlp" in lora.matrices:
        chosen += [getattr(block.mlp, name, None) for name in ("hidden", "linear", "out")]
    for linear in chosen:
        if isinstance(linear, Linear):
            width, out = linear.kernel.shape
            axes = linear.kernel.axes
            linear.lora = LowRankUpdate(rngs, (width, out), axes, rank=lora.rank, alpha=lora.alpha)
