"""A folder with config.json and safetensors: read tensor by tensor, written completely or not at all."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lm.convert.config_json import MATRIX, config_json, family_of, model_config, parts_in, parts_of
from lm.convert.families import FAMILIES
from lm.convert.family import Family, Json
from lm.convert.heads import below_head, has_head, head_json, head_tensors, is_of_head
from lm.convert.tensors import Tensor, is_constant, tensors
from lm.files import complete_folder
from lm.nn.composed import Tuned
from lm.nn.config import ModelConfig
from lm.nn.transformer import Transformer
from lm.ops.positions import sinusoids
from lm.settings import SettingError, leaves, read_object
from lm.sharding import named

SHARD_BYTES = 5 * 10**9  # a model larger than this is written in several files, as is the custom [bytes]
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NO_FILES: Mapping[str, bytes] = {}
FLOATS = ("F32", "F16", "BF16", "F64")
Read = Callable[[str], np.ndarray]


def load(folder: Path | str) -> tuple[ModelConfig, Transformer]:
    """The float32 model of a folder; SettingError lists all that is amiss, before anything is read.

    The settings keep the folder's config.json (``published``), and ``save`` what it says beside them.
    Besides the parameters there is never more than one tensor in memory. Of a model that was tuned with a
    head, its class ending in ForSequenceClassification or the like, the head is left out.
    """
    folder = Path(folder)
    theirs = read_object(folder / CONFIG)
    with ExitStack() as stack:
        files = _open(folder, stack)
        try:
            family, tuned = FAMILIES[family_of(theirs)], has_head(theirs)
            stored = _renamed(family, files)

            def read(name: str) -> np.ndarray:
                return files[stored[name]].get_tensor(stored[name])

            parts = parts_in(theirs, stored)
            if family.says_tied and _has_matrix(family, stored, read):
                parts |= {MATRIX}
            config = replace(model_config(theirs, parts), published=json.dumps(theirs, sort_keys=True))
            _check_sizes(config, [files[name].get_slice(name).get_shape() for name in files])
            abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
        except (TypeError, KeyError, AttributeError, ArithmeticError) as error:  # of values that no model has
            raise SettingError(f"{folder / CONFIG} makes no sense: {error!r:.300}") from error
        shapes = {path: leaf.shape for path, leaf in named(abstract).items()}
        due = tensors(family, config, shapes)
        wrong = [*_misfits(due, {name: files[old].get_slice(old) for name, old in stored.items()})]
        if not wrong:
            others = {name for name in stored.keys() - due if not (tuned and is_of_head(stored[name]))}
            wrong = [_unknown(name, family) for name in others if not _known(name, family, config, due, read)]
        if wrong:
            raise SettingError(f"{folder} does not fit its {CONFIG}:\n  " + "\n  ".join(sorted(wrong)))
        arrays = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
        for name, tensor in due.items():
            for (path, layer), part in zip(tensor.parts, tensor.split(read(name)), strict=True):
                arrays[path][... if layer is None else layer] = part
    on_device = [jax.device_put(arrays.pop(path)) for path in shapes]
    return config, jax.tree.unflatten(jax.tree.structure(abstract), on_device)


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """``{name of a tensor: the open file that has it}``."""
    files = [SINGLE]
    if not (folder / SINGLE).exists():
        if not (folder / INDEX).exists():
            raise SettingError(f"{folder} has neither {SINGLE} nor {INDEX}")
        index = read_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise SettingError(f"{folder / INDEX} should have a weight_map from tensors to files")
        files = sorted(set(index.values()))
    wrong = [f"{file}: lies outside of the folder" for file in files if Path(file).name != file]
    tensors_in: dict[str, Any] = {}
    for file in [] if wrong else files:
        try:
            opened = stack.enter_context(safe_open(folder / file, framework="numpy"))
        except (OSError, ValueError, SafetensorError) as error:
            wrong.append(f"{file}: {error}")
            continue
        wrong += [f"{file}: {name} is in another file too" for name in opened.keys() if name in tensors_in]
        tensors_in |= dict.fromkeys(opened.keys(), opened)
    if wrong:
        raise SettingError(f"{folder} cannot be read:\n  " + "\n  ".join(wrong))
    return tensors_in


def _check_sizes(config: ModelConfig, shapes: Sequence[Sequence[int]]) -> None:
    """Before memory is taken for the model: SettingError for a size that no tensors of these shapes have."""
    count, numbers = len(shapes), sum(map(prod, shapes))
    sizes = "vocab_size d_model d_ff d_kv num_heads d_embed type_vocab_size adapter_width".split()
    sizes += ["encoder.d_ff", "encoder.d_kv", "encoder.num_heads"]
    sizes += ["max_length", "position_offset"] * (config.positions == "learned")
    sizes += ["relative_buckets"] * config.positions.startswith("relative")
    limits = dict.fromkeys(sizes, numbers)
    layers = ["num_encoder_layers"] * config.has_encoder + ["num_decoder_layers"] * config.has_decoder
    limits |= dict.fromkeys(layers, numbers if config.shared_layers else count)
    settings = dict(leaves(config))
    for name, limit in limits.items():
        if (settings[name] or 0) > limit:
            stored = f"{count} tensors of {numbers} numbers"
            raise SettingError(f"{CONFIG} asks for {name}={settings[name]}, the files have {stored}")


def _renamed(family: Family, stored: Iterable[str]) -> dict[str, str]:
    """``{name as the family has it: name as it is stored}``, by older programs or without output layers."""
    stored = list(stored)
    prefix = "" if any(name.startswith(family.prefix) for name in stored) else family.prefix
    above = {*family.above.values(), *family.copies}
    names: dict[str, str] = {}
    for name in stored:
        new = name.removesuffix(".gamma") + ".weight" if name.endswith(".gamma") else name
        new = new.removesuffix(".beta") + ".bias" if new.endswith(".beta") else new
        new = new if {new, new.rpartition(".")[0]} & above else prefix + new
        names[name if new in names else new] = name
    return names


def _misfits(due: Mapping[str, Tensor], stored: Mapping[str, Any]) -> Iterator[str]:
    for name, tensor in due.items():
        if name not in stored:
            yield f"missing: {name} {tensor.shape}"
            continue
        shape, dtype = tuple(stored[name].get_shape()), stored[name].get_dtype()
        if shape != tensor.shape:
            yield f"misshapen: {name} {shape}, should be {tensor.shape}"
        elif dtype not in FLOATS:
            yield f"not a float: {name} is of {dtype}"


def _known(name: str, family: Family, config: ModelConfig, due: Mapping[str, Tensor], read: Read) -> bool:
    """Whether a tensor beside the parameters repeats one of them, or is the same in every model."""
    source = next((n for n, t in due.items() if t.parts == ((family.copies.get(name), None),)), None)
    if source is not None:
        return _repeats(name, source, read)
    try:
        return is_constant(name, read(name), config)
    except (TypeError, ValueError, SafetensorError):  # numpy has no such type, or the tensor no such shape
        return False


def _unknown(name: str, family: Family) -> str:
    source = family.copies.get(name)
    repeats = f" differs from {source}, which it should repeat here (tie_word_embeddings)" if source else ""
    return f"unknown: {name}{repeats}"


def _has_matrix(family: Family, stored: Collection[str], read: Read) -> bool:
    """Whether an output matrix differs from the embedding, whatever the settings say."""
    head, embed = (f"{family.modules.get(module)}.weight" for module in ("head", "embed"))
    return {head, embed} <= {*stored} and not _repeats(head, embed, read)


def _repeats(name: str, source: str, read: Read) -> bool:
    try:
        return np.array_equal(read(name), read(source))
    except (TypeError, ValueError, SafetensorError):  # numpy has no such type
        return False


def _tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], tuned: bool) -> dict[str, Tensor]:
    family = FAMILIES[config_json(config)["model_type"]]
    # as BertModel: nothing stands above
    bare = not tuned and config.logits == "none" and parts_of(config) <= {"pooler"}
    prefix = family.prefix if bare else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors(family, config, shapes).items()}


def save(
    model: Transformer | Tuned,
    folder: Path | str,
    *,
    labels: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] = NO_FILES,
) -> None:
    """Write the model in float32, and the files ``beside`` (name: contents), as a new folder: all or nothing.

    A tuned one with its head, whose classes are called ``labels``, and without heads of pre-training, which
    its class lacks. SettingError if no published family computes what this model does.
    """
    head = model if isinstance(model, Tuned) else None
    body = cast(Transformer, model.body if isinstance(model, Tuned) else model)
    folder, theirs = Path(folder), config_json(body.config)
    leaves = named(body) | _constants(theirs, body.config)
    due = _tensors(body.config, {path: leaf.shape for path, leaf in leaves.items()}, head is not None)
    if head is not None:
        theirs |= head_json(head, labels)
        leaves |= {name: leaf for name, leaf in named(head).items() if name.startswith("head.")}
        due = below_head(head, due) | head_tensors(head, {name: leaf.shape for name, leaf in leaves.items()})
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already; name a new folder")
    with complete_folder(folder) as draft:
        (draft / CONFIG).write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n")
        shards = _shards(due, shard_bytes)
        for file, names in shards.items():
            arrays = {name: _joined(due[name], leaves) for name in names}
            save_file(arrays, draft / file, metadata={"format": "pt"})
            (draft / file).chmod((draft / CONFIG).stat().st_mode)  # it is made for its owner alone
        if list(shards) != [SINGLE]:
            files = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": sum(map(_size, due.values()))}, "weight_map": files}
            (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, contents in beside.items():
            (draft / name).write_bytes(contents)


def _constants(theirs: Json, config: ModelConfig) -> dict[str, np.ndarray]:
    """Arrays that are no parameters of ours, and that the family's files have: DistilBERT's sinusoids."""
    if not theirs.get("sinusoidal_pos_embds"):
        return {}
    table = sinusoids(jnp.arange(config.max_length), config.d_model, layout=config.sinusoid)
    return {"encoder.positions.table": np.asarray(table)}


def _joined(tensor: Tensor, leaves: Mapping[str, jax.Array]) -> np.ndarray:
    parts = [np.asarray(leaves[path])[... if layer is None else layer] for path, layer in tensor.parts]
    return np.ascontiguousarray(tensor.join(parts), np.float32)


def _size(tensor: Tensor) -> int:
    return 4 * prod(tensor.shape)


def _shards(due: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """``{file: names of its tensors}``, no file larger than ``limit`` unless one tensor is."""
    groups: list[list[str]] = [[]]
    room = limit
    for name in sorted(due):
        if groups[-1] and _size(due[name]) > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= _size(due[name])
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{k:05}-of-{len(groups):05}.safetensors": group for k, group in enumerate(groups, 1)}
