"""How tensors of a family are laid out: which of our arrays, or which layer of them, each is made of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from ml_dtypes import finfo

from lm.convert.family import Family
from lm.nn.config import ModelConfig
from lm.ops.positions import sinusoids

Shape = tuple[int, ...]
POSITIONS = ("embed_positions.weight", "position_embeddings.weight")
LEAVES = {"kernel": "weight", "scale": "weight", "table": "weight", "bias": "bias"}  # ours: theirs


@dataclass(frozen=True)
class Tensor:
    """One tensor of theirs: of which of our arrays, or of which layer of them, it is made, and how."""

    parts: tuple[tuple[str, int | None], ...]
    widths: tuple[int, ...]  # of the parts, along the last axis
    shape: Shape  # theirs
    turned: bool = False  # theirs is our transpose
    row: bool = False  # theirs has a first axis of 1
    heads: int = 0  # fused head by head; 0: one whole part after the other

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Theirs, from our parts."""
        if len(parts) == 1:
            whole = parts[0]
        elif self.heads:
            lead = parts[0].shape[:-1]
            whole = np.stack([part.reshape(*lead, self.heads, -1) for part in parts], -2).reshape(*lead, -1)
        else:
            whole = np.concatenate(parts, -1)
        return (whole.T if self.turned else whole).reshape(self.shape)

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Our parts; the inverse of ``join``."""
        whole = theirs[0] if self.row else theirs.T if self.turned else theirs
        if not self.heads:
            return np.split(whole, np.cumsum(self.widths)[:-1], -1)
        lead = whole.shape[:-1]
        whole = whole.reshape(*lead, self.heads, len(self.parts), -1)
        return [whole[..., part, :].reshape(*lead, -1) for part in range(len(self.parts))]


def tensors(family: Family, config: ModelConfig, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """``{their name: tensor}`` of a model whose parameters have these names and shapes."""
    gate = "_0" if config.mlp.startswith("gated") else ""
    modules = {ours: theirs.replace("?", gate) for ours, theirs in family.modules.items()}
    grouped: dict[str, list[str]] = {}
    for path in shapes:
        module, _, leaf = path.rpartition(".")
        name = modules[path] if path in modules else f"{modules[module]}.{LEAVES[leaf]}"
        grouped.setdefault(name, []).append(path)
    tensors, order = {}, list(modules)
    for name, paths in grouped.items():
        paths.sort(key=lambda path: order.index(path if path in modules else path.rpartition(".")[0]))
        turned = paths[0].endswith("kernel") and not (family.conv1d and ".c_" in name)
        layers = range(shapes[paths[0]][0]) if "#" in name else [None]
        ours = [shapes[path][1:] if "#" in name else shapes[path] for path in paths]
        widths = tuple(shape[-1] for shape in ours)
        shape, row = (*ours[0][:-1], sum(widths)), name == "final_logits_bias"
        shape = (1, *shape) if row else shape[::-1] if turned else shape
        heads = config.num_heads if family.per_head and len(paths) > 1 else 0
        for layer in layers:
            parts = tuple((path, layer) for path in paths)
            tensors[name.replace("#", str(layer))] = Tensor(parts, widths, shape, turned, row, heads)
    return tensors


def is_constant(name: str, tensor: np.ndarray, config: ModelConfig) -> bool:
    """Whether older files hold this tensor beside the parameters, alike in every model of the settings."""
    size = tensor.shape[-1] if tensor.ndim else 1
    if name.endswith("position_ids"):
        return np.array_equal(tensor.reshape(-1), np.arange(size))
    if re.search(r"att(n|ention)\.bias$", name):  # the causal mask of GPT-2 and GPT-NeoX
        square = size * size == tensor.size
        return square and np.array_equal(tensor.reshape(size, size) != 0, np.tri(size, dtype=bool))
    if name.endswith("masked_bias"):
        return tensor.size == 1 and bool((tensor <= -1e4).all())
    if name.endswith("rotary_emb.inv_freq"):
        due = config.rotary.base ** -(np.arange(size) * 2 / config.rotary_width)
        return 2 * size == config.rotary_width and np.allclose(tensor, due, rtol=1e-2)
    if name.endswith(POSITIONS) and config.positions == "sinusoidal" and tensor.ndim == 2:
        rounding = max(1e-5, float(finfo(tensor.dtype).eps))
        table = sinusoids(jnp.arange(len(tensor)), size, layout=config.sinusoid)
        return np.allclose(tensor, table, atol=rounding)
    # Written by the first export of T5, and read by nothing: cross-attention has no bias.
    return name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
