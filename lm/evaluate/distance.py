"""Measures how far training moved a model's parameters, layer by layer."""

import numpy as np
from flax import nnx

from lm.nn.transformer import Transformer

STACKS = ("encoder", "decoder")


def layer_distances(before: Transformer, after: Transformer) -> dict[str, np.ndarray]:
    """Return how far the parameters of each layer are from what they were, relative to their norm.

    For each stack float [layers+1]: first the embedding, then its layers; ||after - before|| / ||before||.
    Parameters that only one of the models has, such as adapters, are left out.
    """
    old, new = (_by_path(model) for model in (before, after))
    shared = sorted(old.keys() & new.keys())
    found = {}
    for stack in STACKS:
        blocks = [path for path in shared if path[:2] == (stack, "blocks")]
        if not blocks:
            continue
        layers = [_relative(old, new, blocks, layer) for layer in range(len(old[blocks[0]]))]
        embedding = [path for path in shared if path[0] == "embed"]
        found[stack] = np.array([_relative(old, new, embedding), *layers])
    return found


def _by_path(model: Transformer) -> dict[tuple, np.ndarray]:
    """Return path -> value of each parameter; those of a stack's blocks are [layers,...]."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: np.asarray(variable[...], np.float32) for path, variable in flat}


def _relative(
    old: dict[tuple, np.ndarray], new: dict[tuple, np.ndarray], paths: list[tuple], layer: int | None = None
) -> float:
    """Return the distance of some parameters, or of one layer of them, over their norm; 0 without any."""
    pairs = [(old[path], new[path]) for path in paths]
    if layer is not None:
        pairs = [(before[layer], after[layer]) for before, after in pairs]
    moved = sum(float(((after - before) ** 2).sum()) for before, after in pairs)
    size = sum(float((before**2).sum()) for before, _ in pairs)
    return (moved / size) ** 0.5 if size else 0.0
