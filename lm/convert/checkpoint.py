"""Read and write folders with config.json and safetensors: tensor by tensor, completely or not at all."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lm.config.base import SettingError, changes, leaves, read_object
from lm.config.model import ModelConfig
from lm.convert.config_json import (
    config_json,
    family_of,
    model_config,
    pretraining_heads_of_checkpoint,
    pretraining_heads_of_config,
)
from lm.convert.heads import (
    HEAD_FIELDS,
    OUT,
    PublishedHead,
    base_class,
    body_tensors,
    dense_arrays,
    has_head,
    head_arrays,
    head_json,
    head_tensors,
    is_base_model,
    is_head_tensor,
    published_head,
    with_tied_output,
)
from lm.convert.schema import Family, HFConfig
from lm.convert.sentence_transformers import Dense, module_files
from lm.convert.tensors import Tensor, is_buffer, tensors
from lm.files import atomic_folder
from lm.nn.finetune import ModelWithHead
from lm.nn.transformer import Transformer
from lm.ops.positions import sinusoids
from lm.sharding import named

SHARD_BYTES = 5 * 10**9  # larger models are written as several files, as the hub does [bytes]
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NO_FILES: Mapping[str, bytes] = {}
FLOATS = ("F32", "F16", "BF16", "F64")

# --- reading


@dataclass(frozen=True)
class StoredTensors:
    """The tensors in a folder's open files, by the names that today's transformers gives them."""

    files: Mapping[str, Any]  # name in the file -> open file
    stored_names: Mapping[str, str]  # today's name -> name in the file

    def header(self, name: str) -> Any:
        """Return the header of a tensor, with get_shape() and get_dtype(), without reading its numbers."""
        return self.files[self.stored_names[name]].get_slice(self.stored_names[name])

    def read(self, name: str) -> np.ndarray:
        """Return a tensor."""
        return self.files[self.stored_names[name]].get_tensor(self.stored_names[name])

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors hold the same numbers; False if numpy cannot represent one."""
        try:
            return np.array_equal(self.read(name), self.read(other))
        except (TypeError, ValueError, SafetensorError):
            return False


def load(folder: Path | str) -> tuple[ModelConfig, Transformer]:
    """Return the settings and the float32 model of a folder.

    SettingError lists all expected tensors that are missing, misshapen or not floats or, if there are none,
    all unknown tensors. At most two stored tensors are in memory at a time, apart from the parameters. The
    settings keep the folder's config.json in ``published``, which ``save`` writes again. A fine-tuned head,
    as of BertForSequenceClassification, is not read.
    """
    folder = Path(folder)
    hf_config = read_object(folder / CONFIG)
    with ExitStack() as exit_stack:
        files = _open_files(folder, exit_stack)
        try:
            family, with_head = family_of(hf_config), has_head(hf_config)
            stored = StoredTensors(files, _current_names(family, files))
            config = _read_config(hf_config, family, stored)
            if _lacks_output(hf_config, family, config, stored):
                config = changes(config, {"output.logits": "none", "output.bias": False})
            abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # of absurd values
            raise SettingError(f"{folder / CONFIG} makes no sense: {error!r:.300}") from error
        shapes = {path: leaf.shape for path, leaf in named(abstract).items()}
        expected = tensors(family, config, shapes)
        problems = [*_misfits(expected, stored)]
        if not problems:
            extra = {*stored.stored_names.keys() - expected.keys()}
            extra = {name for name in extra if not _is_in(name, family.unread_modules)}
            if with_head:
                extra = {name for name in extra if not is_head_tensor(stored.stored_names[name])}
            problems = [*_unknown_tensors(extra, family, config, expected, stored)]
        if problems:
            raise SettingError(f"{folder} does not fit its {CONFIG}:\n  " + "\n  ".join(sorted(problems)))
        arrays = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
        for name, tensor in expected.items():
            tensor.scatter(stored.read(name), arrays)
    on_device = [jax.device_put(arrays.pop(path)) for path in shapes]
    return config, jax.tree.unflatten(jax.tree.structure(abstract), on_device)


def _read_config(hf_config: HFConfig, family: Family, stored: StoredTensors) -> ModelConfig:
    """Return the settings of a checkpoint; SettingError if they ask for more than its files hold."""
    names = stored.stored_names
    untied = family.tie_flag_unreliable and _is_untied(family, stored)
    config = model_config(hf_config, pretraining_heads_of_checkpoint(hf_config, names), untied=untied)
    config = replace(config, published=json.dumps(hf_config, sort_keys=True))
    _check_sizes(config, [file.get_slice(name).get_shape() for name, file in stored.files.items()])
    return config


def _lacks_output(hf_config: HFConfig, family: Family, config: ModelConfig, stored: StoredTensors) -> bool:
    """Return whether a decoder's files have no output matrix, since the class in config.json has none.

    Such are classes with a fine-tuned head, and base models whose output matrix is not the embedding.
    """
    if config.has_encoder or f"{family.output_matrix}.weight" in stored.stored_names:
        return False
    is_separate = config.output.logits.startswith("separate")
    return has_head(hf_config) or (is_separate and is_base_model(hf_config, family))


def weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors: the one file, or all that the index names.

    SettingError if the folder has neither, or the index has no weight_map from tensors to files or an empty
    one.
    """
    if (folder / SINGLE).exists():
        return [SINGLE]
    if not (folder / INDEX).exists():
        raise SettingError(f"{folder} has neither {SINGLE} nor {INDEX}")
    index = read_object(folder / INDEX).get("weight_map")
    if not index or not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise SettingError(f"{folder / INDEX} should have a weight_map from tensors to files")
    return sorted(set(index.values()))


def _open_files(folder: Path, exit_stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor in a folder, by the tensor's name."""
    files = weight_files(folder)
    problems = [f"{file}: lies outside of the folder" for file in files if Path(file).name != file]
    file_of_tensor: dict[str, Any] = {}
    for file in [] if problems else files:
        try:
            opened = exit_stack.enter_context(safe_open(folder / file, framework="numpy"))
        except (OSError, ValueError, SafetensorError) as error:
            problems.append(f"{file}: {error}")
            continue
        twice = [name for name in opened.keys() if name in file_of_tensor]
        problems += [f"{file}: {name} is in another file too" for name in twice]
        file_of_tensor |= dict.fromkeys(opened.keys(), opened)
    if problems:
        raise SettingError(f"{folder} cannot be read:\n  " + "\n  ".join(problems))
    return file_of_tensor


def _check_sizes(config: ModelConfig, shapes: Sequence[Sequence[int]]) -> None:
    """Raise SettingError for a size that no tensors of these shapes can have, before memory is allocated."""
    count, numbers = len(shapes), sum(map(prod, shapes))
    sizes = [
        "vocab_size",
        "d_model",
        "attention.d_kv",
        "attention.num_heads",
        "mlp.d_ff",
        "mlp.adapter_width",
    ]
    sizes += ["embedding.d_embed", "embedding.type_vocab_size"]
    sizes += ["encoder.d_ff", "encoder.d_kv", "encoder.num_heads"]
    if config.positions.is_learned:
        sizes += ["positions.max_length", "positions.offset"]
    if config.positions.has_buckets:
        sizes += ["positions.relative_buckets"]
    limits = dict.fromkeys(sizes, numbers)
    limits["experts.count"] = count  # each has tensors of its own
    for has_side, layers in (
        (config.has_encoder, "num_encoder_layers"),
        (config.has_decoder, "num_decoder_layers"),
    ):
        if has_side:
            limits[layers] = numbers if config.shared_layers else count
    settings = dict(leaves(config))
    for name, limit in limits.items():
        if (settings[name] or 0) > limit:
            held = f"{count} tensors of {numbers} numbers"
            raise SettingError(f"{CONFIG} asks for {name}={settings[name]}, the files have {held}")


def _current_names(family: Family, stored_names: Collection[str]) -> dict[str, str]:
    """Return the stored name of each tensor, by the name in the family's class with heads today.

    Older files call the parameters of norms gamma and beta; files of a base model lack its prefix, and some
    families have other names of modules.
    """
    has_prefix = any(name.startswith(family.tensor_prefix) for name in stored_names)
    output_names = {parameter.name for module in family.output_layers for parameter in module}
    names_without_prefix = output_names | {*family.copies}
    current: dict[str, str] = {}
    for stored in stored_names:
        name = stored
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            if name.endswith(old):
                name = name.removesuffix(old) + new
        for other, module in family.other_modules.items():
            if _is_in(name, (other,)):
                name = (module + name.removeprefix(other)).removeprefix(".")
                break
        lacks_prefix = not has_prefix and not name.startswith(family.tensor_prefix)
        if lacks_prefix and name not in names_without_prefix:
            name = family.tensor_prefix + name
        if name in current or name in stored_names:  # another has this name today; this one keeps its own
            name = stored
        current[name] = stored
    return current


def _is_in(name: str, modules: Iterable[str]) -> bool:
    """Return whether a tensor is of one of these modules."""
    return any(name.startswith(f"{module}.") for module in modules)


def _misfits(expected: Mapping[str, Tensor], stored: StoredTensors) -> Iterator[str]:
    """Yield a message for each expected tensor that is missing, misshapen or not a float."""
    for name, tensor in expected.items():
        if name not in stored.stored_names:
            yield f"missing: {name} {tensor.shape}"
            continue
        header = stored.header(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != tensor.shape:
            yield f"misshapen: {name} {shape}, should be {tensor.shape}"
        elif dtype not in FLOATS:
            yield f"not a float: {name} is of {dtype}"


def _unknown_tensors(
    names: Collection[str],
    family: Family,
    config: ModelConfig,
    expected: Mapping[str, Tensor],
    stored: StoredTensors,
) -> Iterator[str]:
    """Yield a message for each tensor of ``names`` that neither repeats a parameter nor is a buffer."""
    tensor_of = {tensor.sources: name for name, tensor in expected.items()}
    for name in names:
        path = family.copies.get(name)
        original = None if path is None else tensor_of.get(((path, None),))
        if original is not None:
            known = stored.equal(name, original)
        else:
            known = _is_buffer(name, stored, config)
        if not known and original is not None:
            reason = f"differs from {path}, which it should repeat here (tie_word_embeddings)"
            yield f"unknown: {name} {reason}"
        elif not known:
            yield f"unknown: {name}"


def _is_buffer(name: str, stored: StoredTensors, config: ModelConfig) -> bool:
    try:
        return is_buffer(name, stored.read(name), config)
    except (TypeError, ValueError, SafetensorError):  # numpy has no such type, or the tensor no such shape
        return False


def _is_untied(family: Family, stored: StoredTensors) -> bool:
    """Return whether the output matrix is stored and differs from the embedding."""
    matrices = [family.parameters[path].tensor_name(None, None) for path in ("head.kernel", "embed.table")]
    return stored.stored_names.keys() >= {*matrices} and not stored.equal(*matrices)


# --- writing


def check_new_folder(folder: Path) -> None:
    """Raise SettingError unless ``folder`` is missing or empty, as ``save`` needs it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already; name a new folder")


def save(
    model: Transformer | ModelWithHead,
    folder: Path | str,
    *,
    labels: Sequence[str] = (),
    max_length: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    beside: Mapping[str, bytes] = NO_FILES,
) -> None:
    """Write a model in float32, and the files ``beside`` (name -> contents), as a new folder, or nothing.

    A fine-tuned model is written with its head, whose classes are called ``labels``, and without the heads of
    pre-training, which its class lacks. Modules of sentence-transformers read texts of ``max_length`` tokens
    at most. SettingError if neither a class of transformers nor such modules compute what this model does.
    """
    folder = Path(folder)
    body = cast(Transformer, model.body if isinstance(model, ModelWithHead) else model)
    hf_config, _ = describe(model, labels)
    arrays = named(body) | _sinusoids(hf_config, body.config)
    published = _published_tensors(
        family_of(hf_config), body.config, arrays, bare=not isinstance(model, ModelWithHead)
    )
    if isinstance(model, ModelWithHead):
        head = published_head(body.config, model.settings)
        published = body_tensors(head, published)
        if head.task_class is None:
            beside = {**beside, **_modules(model, head, max_length)}
        else:
            arrays = head_arrays(head, model, arrays)
            published |= head_tensors(head, {path: array.shape for path, array in arrays.items()})
    check_new_folder(folder)
    with atomic_folder(folder) as draft:
        (draft / CONFIG).write_text(json.dumps(hf_config, indent=2, sort_keys=True) + "\n")
        shards = _shards(published, shard_bytes)
        for file, names in shards.items():
            contents = {
                name: np.ascontiguousarray(published[name].gather(arrays), np.float32) for name in names
            }
            save_file(contents, draft / file, metadata={"format": "pt"})
            # safetensors makes files that their owner alone may read.
            (draft / file).chmod((draft / CONFIG).stat().st_mode)
        if list(shards) != [SINGLE]:
            weight_map = {name: file for file, names in shards.items() for name in names}
            total_size = sum(map(_bytes, published.values()))
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name, data in beside.items():
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_bytes(data)


def describe(model: Transformer | ModelWithHead, labels: Sequence[str]) -> tuple[HFConfig, str]:
    """Return the config.json that ``save`` writes, and the name of the class that it is written as."""
    body = cast(Transformer, model.body if isinstance(model, ModelWithHead) else model)
    hf_config = config_json(with_tied_output(body.config))
    if isinstance(model, ModelWithHead) or has_head(hf_config):
        # The head of the file that the model was loaded with is not here.
        hf_config = {name: x for name, x in hf_config.items() if name not in HEAD_FIELDS}
        hf_config["architectures"] = [base_class(family_of(hf_config))]
    if isinstance(model, ModelWithHead):
        head = published_head(body.config, model.settings)
        hf_config |= head_json(head, labels, model.head.out.kernel.shape[-1])
        if head.needs_null_pad_token(body.config):
            hf_config["pad_token_id"] = None
        return hf_config, head.class_name
    return hf_config, str((hf_config.get("architectures") or [""])[0])


def _modules(model: ModelWithHead, head: PublishedHead, max_length: int | None) -> dict[str, bytes]:
    """Return the files that make the folder of a model with such a head one of sentence-transformers."""
    layers = [Dense(*dense_arrays(model, layer.module), layer.activation) for layer in head.dense_layers]
    layers.append(Dense(*dense_arrays(model, OUT), "none"))
    config = cast(Transformer, model.body).config
    longest = max_length or config.positions.max_length
    return module_files(model.settings.pool, config.d_model, layers, longest)


def _published_tensors(
    family: Family, config: ModelConfig, arrays: Mapping[str, Any], *, bare: bool
) -> dict[str, Tensor]:
    """Return the tensors of a model without its fine-tuned head, by name.

    Names lack the family's prefix if the model is a base model such as BertModel: ``bare``, that is without a
    fine-tuned head, and without pre-training heads except the pooler and the embedding of the query stream.
    """
    found = tensors(family, config, {path: array.shape for path, array in arrays.items()})
    in_base_model = {"pooler", "query-stream"}
    has_other_heads = not pretraining_heads_of_config(config) <= in_base_model
    is_base_model = bare and config.output.logits == "none" and not has_other_heads
    if not is_base_model:
        return found
    return {name.removeprefix(family.tensor_prefix): tensor for name, tensor in found.items()}


def _sinusoids(hf_config: HFConfig, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return DistilBERT's table of sinusoids, which its files hold and which is no parameter of ours."""
    if not hf_config.get("sinusoidal_pos_embds"):
        return {}
    table = sinusoids(
        jnp.arange(config.positions.max_length), config.d_model, layout=config.positions.sinusoid
    )
    return {"encoder.positions.table": np.asarray(table)}


def _bytes(tensor: Tensor) -> int:
    return 4 * prod(tensor.shape)


def _shards(published: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """Return the names of the tensors of each file; a file is at most ``limit`` bytes or a single tensor."""
    shards: list[list[str]] = [[]]
    room = limit
    for name in sorted(published):
        size = _bytes(published[name])
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{k:05}-of-{len(shards):05}.safetensors": names for k, names in enumerate(shards, 1)}
