"""The published tensors of a model: their names and shapes, and which of our arrays each holds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from ml_dtypes import finfo

from lm.config.model import ModelConfig
from lm.convert.schema import EXPERT, Family, Transform, split_heads
from lm.ops.positions import sinusoids

Shape = tuple[int, ...]
Index = int | tuple[int, int] | None  # a layer, or a layer and an expert; None: a whole array


@dataclass(frozen=True)
class Tensor:
    """A published tensor, and the array of ours that it holds, or several, fused along their last axis."""

    # path of each array, and which part of it
    sources: tuple[tuple[str, Index], ...]
    shapes: tuple[Shape, ...]  # of those arrays, or of one layer or expert of each
    transform: Transform
    # number of key/value heads whose parts are interleaved: [q0, k0, v0, q1, k1, v1, ...]; None: each array
    # is whole, [q, k, v]
    num_heads: int | None = None

    @property
    def shape(self) -> Shape:
        """Return the shape of the published tensor."""
        fused = (*self.shapes[0][:-1], sum(shape[-1] for shape in self.shapes))
        return self.transform.publish(np.broadcast_to(np.float32(0), fused)).shape  # takes no memory

    def gather(self, arrays: Mapping[str, jax.Array | np.ndarray]) -> np.ndarray:
        """Return the published tensor of our arrays."""
        parts = [np.asarray(arrays[path])[... if index is None else index] for path, index in self.sources]
        return self.transform.publish(self._fuse(parts))

    def scatter(self, tensor: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a published tensor into our arrays."""
        parts = self._split(self.transform.restore(tensor))
        for (path, index), part in zip(self.sources, parts, strict=True):
            arrays[path][... if index is None else index] = part

    def _fuse(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        if self.num_heads is None:
            return np.concatenate(parts, -1)
        leading = parts[0].shape[:-1]
        heads = [part.reshape(*leading, self.num_heads, -1) for part in parts]
        return np.concatenate(heads, -1).reshape(*leading, -1)

    def _split(self, fused: np.ndarray) -> list[np.ndarray]:
        widths = np.array([shape[-1] for shape in self.shapes])
        if self.num_heads is None or len(self.shapes) == 1:
            return np.split(fused, np.cumsum(widths)[:-1], -1)
        leading = fused.shape[:-1]
        heads = fused.reshape(*leading, self.num_heads, -1)
        parts = np.split(heads, np.cumsum(widths // self.num_heads)[:-1], -1)
        return [part.reshape(*leading, -1) for part in parts]


def tensors(family: Family, config: ModelConfig, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the tensors, by name, of a model whose parameters have these paths and shapes."""
    parameters = family.parameters
    named: dict[str, Tensor] = {}
    for parameter in dict.fromkeys(parameters[path] for path in shapes):
        paths = [path for path in parameter.paths if path in shapes]
        num_heads = config.attention.key_value_heads if parameter.per_head else None
        transform = parameter.transform
        if parameter.has_heads_axis:
            transform = split_heads(transform, config.attention.num_heads)
        layers = [None] if parameter.stack is None else range(shapes[paths[0]][0])
        for layer in layers:
            name = parameter.tensor_name(layer, config)
            experts = range(config.experts.count) if EXPERT in name else [None]
            for expert in experts:
                index: Index = layer if layer is None or expert is None else (layer, expert)
                sources = tuple((path, index) for path in paths)
                depth = (layer is not None) + (expert is not None)
                part_shapes = tuple(shapes[path][depth:] for path in paths)
                whole_name = name.replace(EXPERT, str(expert))
                named[whole_name] = Tensor(sources, part_shapes, transform, num_heads)
    return named


def is_buffer(name: str, tensor: np.ndarray, config: ModelConfig) -> bool:
    """Return whether a tensor is a constant, of the right value, that older files hold beside parameters."""
    size = tensor.shape[-1] if tensor.ndim else 1
    if name.endswith("position_ids"):
        return np.array_equal(tensor.reshape(-1), np.arange(size))
    if match := re.search(r"(\d+)\.(\w+\.)*att(n|ention)\.bias$", name):  # of GPT-2, GPT-Neo and GPT-NeoX
        layer, windows = int(match[1]), config.windows("decoder")
        if layer >= len(windows) or size * size != tensor.size:
            return False
        return np.array_equal(tensor.reshape(size, size) != 0, _causal_mask(size, windows[layer]))
    if name.endswith("masked_bias"):  # what GPT-2 writes to masked scores
        return tensor.size == 1 and bool((tensor <= -1e4).all())
    if name.endswith("rotary_emb.inv_freq"):
        frequencies = config.positions.rotary.base ** -(np.arange(size) * 2 / config.rotary_width)
        return 2 * size == config.rotary_width and np.allclose(tensor, frequencies, rtol=1e-2)
    is_table = name.endswith(("embed_positions.weight", "position_embeddings.weight"))
    if is_table and config.positions.kind == "sinusoidal" and tensor.ndim == 2:
        rounding = max(1e-5, float(finfo(tensor.dtype).eps))
        table = sinusoids(jnp.arange(len(tensor)), size, layout=config.positions.sinusoid)
        return np.allclose(tensor, table, atol=rounding)
    if name.endswith(("encoder.version", "decoder.version")):  # of fairseq's classes, from which BART came
        return tensor.size == 1
    # The first export of T5 wrote it, and nothing reads it: cross-attention has no relative biases.
    return name == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def _causal_mask(size: int, window: int | None) -> np.ndarray:
    """Return which tokens [size,size] see which: those up to their own, as far back as the window reaches."""
    mask = np.tri(size, dtype=bool)
    return mask if window is None else mask & ~np.tri(size, k=-window - 1, dtype=bool)
