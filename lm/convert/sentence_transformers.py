"""Folders of sentence-transformers: a published model, a pooling of its states, and dense layers.

Source: Reimers and Gurevych 2019.

``modules.json`` lists the modules, each with a folder: the model in the folder itself, ``1_Pooling``,
``2_Dense`` and so on. The types have the names that all versions of the library know.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as safetensors_bytes

from lm.config.base import SettingError, parse_json, read_object
from lm.config.model import HeadDense, Pool

MODULES = "modules.json"
POOLING = "1_Pooling"  # folder of the pooling
POOLING_MODES: dict[Pool, str] = {
    "first": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
}
OTHER_MODES = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
# What later versions of the library call a mode, in the one field ``pooling_mode``.
MODE_NAMES: dict[Any, Pool] = {"cls": "first", "lasttoken": "last", "mean": "mean", "max": "max"}
ACTIVATIONS: dict[HeadDense, str] = {
    "none": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
}


@dataclass(frozen=True)
class Dense:
    """A dense layer: kernel float32 [in,out], bias float32 [out] or None, and its activation."""

    kernel: np.ndarray
    bias: np.ndarray | None
    activation: HeadDense


def module_files(pool: Pool, width: int, layers: Sequence[Dense], max_length: int) -> dict[str, bytes]:
    """Return ``{name: contents}`` of the files that make a folder with a model one of sentence-transformers.

    ``width`` is that of the model's states, ``max_length`` the longest text that it reads [tokens].
    """
    modes = {name: pool == ours for ours, name in POOLING_MODES.items()} | dict.fromkeys(OTHER_MODES, False)
    files = {
        "sentence_bert_config.json": _json({"max_seq_length": max_length, "do_lower_case": False}),
        f"{POOLING}/config.json": _json({"word_embedding_dimension": width} | modes),
    }
    kinds = [("Transformer", ""), ("Pooling", POOLING)]
    for number, layer in enumerate(layers, len(kinds)):
        folder = f"{number}_Dense"
        kinds.append(("Dense", folder))
        inputs, outputs = layer.kernel.shape
        config = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": layer.bias is not None,
            "activation_function": ACTIVATIONS[layer.activation],
        }
        tensors = {"linear.weight": np.ascontiguousarray(layer.kernel.T)}
        if layer.bias is not None:
            tensors["linear.bias"] = layer.bias
        files[f"{folder}/config.json"] = _json(config)
        files[f"{folder}/model.safetensors"] = safetensors_bytes(tensors, metadata={"format": "pt"})
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    return files | {MODULES: _json(modules)}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


@dataclass(frozen=True)
class _ListedModule:
    """A module that a modules.json lists."""

    kind: str  # the last part of its type, such as "Pooling"
    folder: str  # below the one of modules.json; "": that folder itself


def _listed_modules(path: Path) -> list[_ListedModule]:
    """Return the modules that a modules.json lists, in order; SettingError if it is no such list."""
    listed = parse_json(path.read_bytes(), path)
    if not isinstance(listed, list):
        raise SettingError(f"{path} should hold a list of modules, not {listed!r:.80}")
    modules = []
    for entry in listed:
        match entry:
            case {"type": str(name), "path": str(folder)} if _lies_below(folder):
                modules.append(_ListedModule(name.rpartition(".")[2], folder))
            case _:
                raise SettingError(
                    f"{path} lists {entry!r:.80}: each module should have a type, and as its path a folder "
                    "beside that file"
                )
    return modules


def _lies_below(folder: str) -> bool:
    """Return whether a path stays below the folder that it is relative to."""
    return not Path(folder).is_absolute() and ".." not in Path(folder).parts


def pooling_of(folder: Path) -> Pool | None:
    """Return how a folder of sentence-transformers pools a text's states; None if it is no such folder.

    The settings of the pooling are in the folder that ``modules.json`` names, by default ``1_Pooling``.
    SettingError for a pooling that is not implemented here, such as several together.
    """
    if not (folder / MODULES).exists():
        return None
    modules = _listed_modules(folder / MODULES)
    pooling_folders = [module.folder for module in modules if module.kind == "Pooling"]
    path = folder / (pooling_folders or [POOLING])[0] / "config.json"
    if not pooling_folders and not path.exists():
        return None
    kinds = [module.kind for module in modules]
    if others := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        warnings.warn(f"{folder}: {', '.join(others)} is not read: vectors are those below it", stacklevel=2)
    config = read_object(path)
    chosen: list[Any] = [name for name in (*POOLING_MODES.values(), *OTHER_MODES) if config.get(name) is True]
    by_field = {name: pool for pool, name in POOLING_MODES.items()}
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        chosen, by_field = (named if isinstance(named, list) else [named]), MODE_NAMES
    pools = [by_field.get(mode) if isinstance(mode, str) else None for mode in chosen]
    if len(pools) != 1 or pools[0] is None:
        raise SettingError(f"{path}: pooling {chosen} is not supported, only one of {', '.join(by_field)}")
    return pools[0]
