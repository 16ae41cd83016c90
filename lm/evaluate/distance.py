"""Measures how far training moved a model's parameters, layer by layer."""

import numpy as np
from flax import nnx

from lm.nn.transformer import Transformer


def layer_distances(before: Transformer, after: Transformer) -> dict[str, np.ndarray]:
    """Return how far the parameters of each layer are from what they were, relative to their norm.

    For "encoder" and "decoder" float [layers+1]: ||after - before|| / ||before|| of the stack's embedding,
    then of its layers. Parameters that only one of the models has, such as adapters, are left out.
    """
    found = {}
    for side in ("encoder", "decoder"):
        old, new = getattr(before, side), getattr(after, side)
        if old is None:
            continue
        layers = zip(old.unstack().blocks, new.unstack().blocks, strict=True)
        parts = [(before.embedding(side), after.embedding(side)), *layers]
        found[side] = np.array([_relative_distance(*part) for part in parts])
    return found


def _relative_distance(before: nnx.Module, after: nnx.Module) -> float:
    """Return ||after - before|| / ||before|| over the parameters of both modules; 0 if they share none."""
    old, new = _parameters(before), _parameters(after)
    shared = old.keys() & new.keys()
    moved = sum(float(((new[path] - old[path]) ** 2).sum()) for path in shared)
    size = sum(float((old[path] ** 2).sum()) for path in shared)
    return (moved / size) ** 0.5 if size else 0.0


def _parameters(module: nnx.Module) -> dict[tuple, np.ndarray]:
    """Return path -> value of each parameter of a module."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {path: np.asarray(variable[...], np.float32) for path, variable in flat}
