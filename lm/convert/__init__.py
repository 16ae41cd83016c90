"""Published checkpoints as our models."""

import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from lm.convert import t5
from lm.nn.config import ModelConfig
from lm.nn.transformer import Transformer
from lm.sharding import named


class CheckpointError(ValueError):
    """A checkpoint does not hold exactly the tensors of the model that its config.json describes."""


def load(folder: Path | str) -> tuple[ModelConfig, Transformer]:
    """The model in a folder with ``config.json`` and ``model.safetensors``; CheckpointError lists all that is amiss."""
    folder = Path(folder)
    config = t5.model_config(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    wrong: list[str] = []
    values = {
        path: _take(tensors, t5.name(path, config), leaf.shape, path.endswith("kernel"), wrong)
        for path, leaf in named(abstract).items()
    }
    for name, tensor in tensors.items():
        copied = name in t5.COPIES and np.array_equal(tensor, values["embed.table"])
        if not copied and name not in t5.UNUSED:
            wrong.append(f"unknown: {name} {tensor.shape}")
    if wrong:
        raise CheckpointError(f"{folder} does not fit its config.json:\n  " + "\n  ".join(sorted(wrong)))
    return config, jax.tree.unflatten(jax.tree.structure(abstract), jax.device_put(list(values.values())))


def _take(tensors, name, shape, transposed, wrong):
    """The tensor ``name``, or all layers' on a first axis, taken out of ``tensors``; complaints to ``wrong``."""
    stacked = "#" in name
    names = [name.replace("#", str(layer)) for layer in range(shape[0])] if stacked else [name]
    part = shape[1:] if stacked else shape
    theirs = part[::-1] if transposed else part
    parts = []
    for name in names:
        tensor = tensors.pop(name, None)
        if tensor is None:
            wrong.append(f"missing: {name} {theirs}")
        elif tensor.shape != theirs:
            wrong.append(f"misshapen: {name} {tensor.shape}, should be {theirs}")
        else:
            parts.append(np.asarray(tensor.T if transposed else tensor, np.float32))
    if len(parts) < len(names):
        return None
    return np.stack(parts) if stacked else parts[0]
