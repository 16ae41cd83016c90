"""Refuse what cannot be split over a mesh, or held by its devices, before anything is compiled."""

import os
from collections.abc import Iterator, Mapping
from math import prod
from operator import attrgetter

import jax
from flax import nnx
from jax.sharding import Mesh

from lm import sharding
from lm.config.base import SettingError
from lm.config.layers import RECURRENT
from lm.config.model import ModelConfig
from lm.nn.transformer import Transformer


def check_mesh(
    model: ModelConfig, sizes: Mapping[str, int], batch_size: int, microbatches: int = 1, prefix: str = ""
) -> None:
    """Raise SettingError for a size of the model or batch that cannot be split over the mesh.

    ``sizes`` are the numbers of devices along its axes; "expert" and those of the batch may be missing.
    ``prefix`` precedes the names of the batch's settings in errors, such as "pretraining.".
    """
    for path, size, axis in _split_sizes(model):
        sharding.check_division(f"model.{path}", size, {axis: sizes[axis]})
    if model.experts.count:
        count, devices = model.experts.count, {"expert": sizes.get("expert", 1)}
        sharding.check_division("model.experts.count", count, devices)
    if microbatches < 1:
        raise SettingError(f"{prefix}microbatches={microbatches} should be at least 1")
    what = f"{prefix}batch_size"
    if batch_size % microbatches:
        raise SettingError(f"{what}={batch_size} should be a multiple of microbatches={microbatches}")
    if microbatches > 1:
        what += f"={batch_size} / {prefix}microbatches={microbatches}"
    rows = {axis: sizes.get(axis, 1) for axis in sharding.BATCH_MESH_AXES}
    sharding.check_division(what, batch_size // microbatches, rows)
    group = model.experts.group_rows
    if model.experts.count and batch_size // microbatches // prod(rows.values()) % group:
        raise SettingError(
            f"{what} of size {batch_size // microbatches} gives each of {prod(rows.values())} shards rows "
            f"that model.experts.group_rows={group} does not divide: make batch_size a multiple of "
            f"{group * prod(rows.values()) * microbatches}, or group_rows smaller"
        )


def _split_sizes(model: ModelConfig) -> Iterator[tuple[str, int, str]]:
    """Yield the path, the size and the mesh axis of each setting whose features or heads are split."""
    yield "vocab_size", model.vocab_size, "tensor"
    yield "d_model", model.d_model, "fsdp"
    if model.embedding.d_embed is not None:
        yield "embedding.d_embed", model.embedding.d_embed, "fsdp"
    if model.mixer.kind in RECURRENT or model.mixer.kind == "window":
        path = "d_model" if model.mixer.width is None else "mixer.width"
        yield path, model.state_width, "fsdp" if model.mixer.kind in RECURRENT else "tensor"
    if model.has_encoder:
        own = model.encoder
        heads = "attention.num_heads" if own.num_heads is None else "encoder.num_heads"
        d_ff = "mlp.d_ff" if own.d_ff is None else "encoder.d_ff"
        yield from _split_block_sizes(model.encoder_config, heads, d_ff)
    if model.has_decoder:
        yield from _split_block_sizes(model, "attention.num_heads", "mlp.d_ff")
    if model.has_encoder and model.has_decoder and model.cross_attention.kind == "heads":
        own_heads = model.cross_attention.num_heads is not None
        path = "cross_attention.num_heads" if own_heads else "attention.num_heads"
        yield path, model.cross_config.attention.num_heads, "tensor"


def _split_block_sizes(config: ModelConfig, heads: str, d_ff: str) -> Iterator[tuple[str, int, str]]:
    """Yield what ``_split_sizes`` does of a block, whose sizes are the settings ``heads`` and ``d_ff``."""
    if config.has_attention_logits:
        yield heads, config.attention.num_heads, "tensor"
    if config.mlp.activation != "none":
        yield d_ff, config.mlp.d_ff, "tensor"
    if config.experts.count and config.experts.d_ff is not None:
        yield "experts.d_ff", config.experts.d_ff, "tensor"


def check_memory(model: ModelConfig, mesh: Mesh) -> None:
    """Raise SettingError if parameters and gradients in float32 alone do not fit on the devices."""
    shapes = jax.eval_shape(lambda key: Transformer(model, nnx.Rngs(params=key)), jax.random.key(0))
    shardings, leaves = sharding.parameter_shardings(shapes, mesh), sharding.named(shapes)
    num_params_per_device = sum(
        prod(shardings[name].shard_shape(leaf.shape)) for name, leaf in leaves.items()
    )
    needed = 2 * 4 * num_params_per_device
    available = device_memory()
    if needed > available:
        paths = ("vocab_size", "d_model", "mlp.d_ff", "num_encoder_layers", "num_decoder_layers")
        sizes = ", ".join(f"model.{path}={attrgetter(path)(model)}" for path in paths)
        raise SettingError(
            f"the model needs {needed / 2**30:,.1f} GiB of each device for parameters and gradients, and "
            f"there are {available / 2**30:,.1f}: make it smaller ({sizes}) or use more devices (mesh.fsdp)"
        )


def check_rows(model: ModelConfig, sizes: Mapping[str, int], rows: int, length: int, named: str) -> None:
    """Raise SettingError if the devices of a mesh cannot hold a batch of ``rows`` of ``length`` tokens.

    The estimate is a lower bound: the hidden states of the batch and, where attention logits are
    materialised, those of one head for one row, [T,T]. ``named`` names the settings to change in the error.
    """
    device_rows, device_length = -(-rows // sharding.batch_shards(sizes)), -(-length // sizes["sequence"])
    states = device_rows * device_length * model.d_model * (2 if model.dtype == "bfloat16" else 4)
    stores_logits = jax.default_backend() == "cpu" and model.attention.implementation in ("auto", "xla")
    logits = device_length * length * 4 if stores_logits and model.has_attention_logits else 0
    needed, available = states + logits, device_memory()
    if needed > available:
        batch, gib = f"a batch of {rows:,} rows of {length:,} tokens", 2**30
        hint = f"ask for fewer or shorter rows, or less than model.d_model={model.d_model}"
        raise SettingError(
            f"{named}: {batch} needs at least {needed / gib:,.1f} GiB of each device, and there are "
            f"{available / gib:,.1f}: {hint}"
        )


def check_host_rows(rows: int, length: int, named: str) -> None:
    """Raise SettingError if a host cannot hold its share of ``rows`` of ``length`` tokens.

    Tokens and targets have four bytes each. ``named`` names the settings to change in the error.
    """
    needed, available, gib = -(-rows // jax.process_count()) * length * 2 * 4, host_memory(), 2**30
    if needed > available:
        raise SettingError(
            f"{named}: {rows:,} rows of {length:,} tokens need at least {needed / gib:,.1f} GiB of the host, "
            f"and there are {available / gib:,.1f}: ask for fewer or shorter rows"
        )


def host_memory() -> int:
    """Return the memory of this machine [bytes]."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_memory() -> int:
    """Return the memory of a device [bytes]; for a CPU device, its share of the machine's."""
    shared = host_memory() // jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", shared)
