"""Shardings of all arrays, by two tables from the names of their axes to the axes of a mesh.

A module names the axes of its parameters and activations and knows no mesh. Without a mesh around it
(``jax.set_mesh``) all of this does nothing. Any mesh will do whose axes are left to the compiler
(``AxisType.Auto``): an axis of the tables that it lacks is one of a single device.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lm.batch import FEATURES as BATCH_FEATURES
from lm.batch import Batch, Side
from lm.config.base import SettingError, did_you_mean
from lm.config.mesh import MeshConfig, describe_mesh

Tree = TypeVar("Tree")
Shape = tuple[int, ...]

# Leaves come in the order of feature names, decoder before encoder.
_SIDE_FIELDS = [field for side, field in BATCH_FEATURES.values() if side == "encoder"]
_BATCH_FIELDS = ["decoder", "encoder", *(field for side, field in BATCH_FEATURES.values() if not side)]
jax.tree_util.register_dataclass(Side, data_fields=_SIDE_FIELDS, meta_fields=[])
jax.tree_util.register_dataclass(Batch, data_fields=_BATCH_FIELDS, meta_fields=[])

# the mesh axes over which the rows of a batch are spread
BATCH_MESH_AXES = ("slice", "data", "fsdp", "expert")

PARAMETER_AXES: dict[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "state": "fsdp",
    "gates": None,  # of recurrent layers: replicated
    "layers": None,
    "norm": None,
    "buckets": None,
    "bias_heads": None,
    "length": None,
    "kv": None,
    "taps": None,  # positions that a kernel of a convolution reads
    "memory": None,  # values of a product-key memory: as of a table of embeddings, features are sharded
    "adapter": None,
    "lora": None,
    "classes": None,
}

ACTIVATION_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": BATCH_MESH_AXES,
    # Queries are split by position. Keys are not: each device has all keys and values of its rows, so that
    # attention needs one all-gather, and each device computes its mask and bias without the others.
    "length": "sequence",
    "key_length": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    "embed": None,
    "kv": None,
    "gates": None,
    "dropped": None,
    # tokens that devices have exchanged, so that each has those of its own experts, of all rows of its group:
    "batch_of_experts": ("slice", "data", "fsdp"),
    "experts": "expert",
    "slots": None,
    # what a look-up in a table returns, before it is resharded:
    "batch_of_features": ("slice", "data", "expert"),
    "features": "fsdp",  # as the features of the table
}

# Axes that are replicated if their size is not divisible: the one token of a step of decoding, and the few
# key heads that many query heads share. For all other axes such a size is an error.
REPLICATED_IF_INDIVISIBLE = ("length", "kv_heads")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Return the mesh of these devices, or of all, with axes of type Auto.

    Neighbours on a mesh axis are neighbours in a TPU's network; only the axis "slice" crosses slices. Raises
    SettingError if the sizes do not fit the devices.
    """
    devices = list(jax.devices()) if devices is None else devices
    sizes = config.sizes(len(devices))
    on_tpu = devices[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if on_tpu else 1
    if slices not in (1, sizes["slice"]):
        raise SettingError(f"mesh.slice={sizes['slice']} should be {slices}, the devices' number of slices")
    shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
    if slices == 1:
        arranged = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        inside, across = (1, *shape[1:]), (slices, *(1,) * (len(shape) - 1))
        arranged = create_hybrid_device_mesh(inside, across, devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(sizes), axis_types=types)


def mesh_axes(axes: str | tuple[str, ...] | None, mesh: Any) -> str | tuple[str, ...] | None:
    """Return those mesh axes of an entry in the tables that the mesh has; None if it has none of them."""
    if isinstance(axes, tuple):
        return tuple(axis for axis in axes if axis in mesh.shape) or None
    return axes if axes in mesh.shape else None


def check_mesh_types(mesh: Any) -> None:
    """Raise SettingError for a mesh with Explicit axes, where shardings are part of an array's type."""
    explicit = [
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    ]
    if explicit:
        raise SettingError(
            f"mesh axes {', '.join(explicit)} are Explicit, and should be left to the compiler: pass "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to jax.make_mesh"
        )


def check_division(what: str, size: int, sizes: Mapping[str, int]) -> None:
    """Raise SettingError if an axis of this size cannot be split over these mesh ``sizes``."""
    if size % (shards := prod(sizes.values())):
        fitting = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
        raise SettingError(
            f"{what} of size {size} cannot be split over {describe_mesh(sizes)}: make it a multiple of "
            f"{shards}, or mesh.{' * mesh.'.join(sizes)} one of {', '.join(map(str, fitting))}"
        )


def check_length(length: int, sizes: Mapping[str, int]) -> None:
    """Raise SettingError if rows of ``length`` tokens cannot be split over mesh ``sizes``."""
    check_division("the longest row", length, {"sequence": sizes.get("sequence", 1)})


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Return x with the sharding of an activation with these axes; x itself without several devices."""
    mesh, what = jax.sharding.get_abstract_mesh(), f"activation {axes}"
    _check_names(axes, ACTIVATION_AXES, what)
    if mesh.empty:
        return x
    spec = _spec(axes, x.shape, ACTIVATION_AXES, what, mesh)
    return x if mesh.size == 1 else jax.lax.with_sharding_constraint(x, spec)


def named(tree: Any) -> dict[str, Any]:
    """Return {dotted name: leaf} of any pytree; parameters are named by attributes, as in "embed.table"."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [_key_name(key) for key in path]
        if keys[-1:] == ["value"]:  # of the nnx.Variable around an array
            keys.pop()
        leaves[".".join(keys)] = leaf
    return leaves


def _key_name(key: Any) -> str:
    """Return the name of a step on jax's path to a leaf: of an attribute, a dictionary's key or an index."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def logical_axes(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """Return {parameter name: logical names of its axes}, "layers" first where it is stacked over layers.

    Raises SettingError for an array outside of nnx.Param, or without one name for each axis.
    """
    by_name, boxes = {}, jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, nnx.Variable))
    for name, box in zip(named(model), boxes, strict=True):
        if not isinstance(box, nnx.Variable):
            raise SettingError(f"a model should hold its arrays in nnx.Param only, not {name} by itself")
        names = box.get_metadata().get("axes")
        if names is None or len(box.shape) - len(names) not in (0, 1):
            raise SettingError(
                f"parameter {name} of shape {box.shape} has axes {names}: one name each is needed"
            )
        by_name[name] = ("layers",) * (len(box.shape) - len(names)) + tuple(names)
    return by_name


def parameter_shardings(model: nnx.Module, mesh: Mesh) -> dict[str, NamedSharding]:
    """Return {parameter name: sharding}, also for an abstract model (``jax.eval_shape``)."""
    leaves, shardings = named(model), {}
    for name, names in logical_axes(model).items():
        spec = _spec(names, leaves[name].shape, PARAMETER_AXES, f"parameter {name}", mesh)
        shardings[name] = NamedSharding(mesh, spec)
    return shardings


def constrain_to_parameters(
    arrays: Mapping[str, jax.Array], axes: Mapping[str, tuple[str, ...]]
) -> dict[str, jax.Array]:
    """Return gradients {parameter name: array} with the shardings of the parameters with these axes.

    The mesh is the one around the call; nothing changes without a mesh of several devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return dict(arrays)
    specs = {
        name: _spec(axes[name], x.shape, PARAMETER_AXES, f"parameter {name}", mesh)
        for name, x in arrays.items()
    }
    return {name: jax.lax.with_sharding_constraint(x, specs[name]) for name, x in arrays.items()}


def optimizer_state_shardings(
    init: Callable[[dict[str, Any]], Any], model: nnx.Module, shardings: Mapping[str, NamedSharding]
) -> Any:
    """Return the shardings of ``init``'s state, whose arrays are sharded as their parameter, axis by axis.

    Axes are recognised by size: ``init`` is traced with stand-ins for the parameters whose axes all differ in
    size. A stand-in may be wider than its parameter, or else narrower: of these the one counts whose state
    has the axes of the parameter's state, since an optimiser may go by sizes, as Adafactor does. Arrays under
    no parameter's name, such as a count, are replicated. Raises SettingError for an array of two axes or more
    that are not the parameter's.
    """
    mesh: Any = next(iter(shardings.values())).mesh
    params, wider, narrower = named(model), dict[str, Shape](), dict[str, Shape]()
    for name, axes in logical_axes(model).items():
        is_stacked = axes[:1] == ("layers",)
        wider[name] = _distinct_sizes(params[name].shape, is_stacked)
        narrower[name] = _distinct_smaller_sizes(params[name].shape, is_stacked)

    def trace(shapes: Mapping[str, Shape]) -> Any:
        structs = {name: jax.ShapeDtypeStruct(shapes[name], params[name].dtype) for name in shapes}
        return jax.eval_shape(init, structs)

    def sharding_of(path, leaf, *traced):
        owners = [key.key for key in path if getattr(key, "key", None) in wider]
        if owners:
            owner = owners[-1]
            for stand_in, of_stand_in in zip((wider, narrower), traced, strict=True):
                axes = _axes_of(leaf.shape, of_stand_in.shape, params[owner].shape, stand_in[owner])
                if axes is not None:
                    spec = [None if axis is None else shardings[owner].spec[axis] for axis in axes]
                    return NamedSharding(mesh, PartitionSpec(*spec))
        if leaf.ndim > 1 and leaf.size > 1:
            shapes = {name: params[name].shape for name in owners[-1:]}
            raise SettingError(
                f"the optimiser's {jax.tree_util.keystr(path)} of shape {leaf.shape} has other axes than the "
                f"parameter, {shapes}"
            )
        return replicated(mesh)

    state = trace({name: params[name].shape for name in wider})
    return jax.tree_util.tree_map_with_path(sharding_of, state, trace(wider), trace(narrower))


def _axes_of(
    shape: Shape, of_stand_in: Shape, parameter: Shape, stand_in: Shape
) -> tuple[int | None, ...] | None:
    """Return which axis of the parameter each axis of an array of its optimiser's state is.

    ``shape`` is that of the array, ``of_stand_in`` that of the array for the stand-in. None stands for an
    axis that was reduced to size 1. The result is None if the two arrays do not have the same axes, each of
    them once.
    """
    if len(shape) != len(of_stand_in):
        return None
    axes: list[int | None] = []
    for size, size_of_stand_in in zip(shape, of_stand_in, strict=True):
        if size_of_stand_in in stand_in:
            axis = stand_in.index(size_of_stand_in)
            if axis in axes or parameter[axis] != size:
                return None
            axes.append(axis)
        elif size == size_of_stand_in == 1:
            axes.append(None)
        else:
            return None
    return tuple(axes)


def _distinct_sizes(shape: Shape, stacked: bool) -> Shape:
    """Return a size for each axis of ``shape``, all different and none smaller than there.

    Axes are visited from the smallest to the largest, and each gets at least 1 more than the one before. The
    axis of layers, the first if ``stacked``, keeps its size, which the others avoid.
    """
    sizes, last, layers = list(shape), 0, shape[0] if stacked else 0
    for axis in sorted(range(stacked, len(shape)), key=lambda axis: shape[axis]):
        last = max(shape[axis], last + 1)
        last += last == layers
        sizes[axis] = last
    return tuple(sizes)


def _distinct_smaller_sizes(shape: Shape, stacked: bool) -> Shape:
    """Return sizes as ``_distinct_sizes`` does, but none larger than in ``shape``.

    Where there are too few sizes from 2 on, they are those of ``_distinct_sizes``.
    """
    sizes, layers = list(shape), shape[0] if stacked else 0
    last = max(shape, default=0) + 1
    for axis in sorted(range(stacked, len(shape)), key=lambda axis: (shape[axis], axis), reverse=True):
        last = min(shape[axis], last - 1)
        last -= last == layers
        sizes[axis] = last
    return tuple(sizes) if last > 1 else _distinct_sizes(shape, stacked)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that each device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch, whose rows are split over the mesh axes ``BATCH_MESH_AXES``."""
    check_mesh_types(mesh)
    return NamedSharding(mesh, PartitionSpec(mesh_axes(BATCH_MESH_AXES, mesh)))


def layered_batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays [layers,B,...], such as recurrent states: rows as in a batch."""
    return NamedSharding(mesh, PartitionSpec(None, mesh_axes(BATCH_MESH_AXES, mesh)))


def mesh_of(model: Any) -> Mesh | None:
    """Return the mesh that the parameters of a model lie on; None for a single device without a mesh."""
    return getattr(jax.tree.leaves(model)[0].sharding, "mesh", None)


def batch_shards(sizes: Mapping[str, int]) -> int:
    """Return into how many shards a mesh of these ``sizes`` splits the rows of a batch."""
    return prod(sizes.get(axis, 1) for axis in BATCH_MESH_AXES)


def abstract_arrays(tree: Any) -> Any:
    """Return shapes, dtypes and shardings in place of the arrays of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def process_rows(mesh: Mesh, batch_size: int) -> list[slice]:
    """Return the rows of a global batch that this process feeds, in order; they need not be contiguous.

    Where a tensor axis spans several processes, these feed the same rows.
    """
    spans: set[tuple[int, int]] = set()  # (start, stop), once where several devices hold the same rows
    for index in batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values():
        if index:
            start, stop, _ = index[0].indices(batch_size)
            spans.add((start, stop))
    return [slice(start, stop) for start, stop in sorted(spans)]


def put_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Return the global batch on the devices, from the rows that this process feeds (``process_rows``).

    ``batch`` is a ``Batch`` or any tree of arrays whose first axis is the row.
    """
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    num_shards = batch_shards(mesh.shape)
    # number of a shard of the global batch -> its number among those of this process
    local_shards = {rows.start: number for number, rows in enumerate(process_rows(mesh, num_shards))}

    def put(local_rows):
        size = len(local_rows) // len(local_shards)

        def read_shard(index):
            start = local_shards[(index[0].start or 0) // size] * size
            return local_rows[start : start + size]

        return jax.make_array_from_callback((size * num_shards, *local_rows.shape[1:]), sharding, read_shard)

    return jax.tree.map(put, batch)


def _check_names(names: tuple[str, ...], table: Mapping[str, Any], what: str) -> None:
    """Raise SettingError for an axis that a table lacks."""
    for name in names:
        if name not in table:
            raise SettingError(
                f"{what} has the axis {name!r}, which lm.sharding lacks{did_you_mean(name, table)}"
            )


def _spec(names: tuple[str, ...], shape: tuple[int, ...], table: Mapping[str, Any], what: str, mesh: Any):
    """Return the partition of an array by the names of its axes in ``table``.

    Raises SettingError for an unknown name, or a size that is not divisible.
    """
    check_mesh_types(mesh)
    _check_names(names, table, what)
    partition = []
    for name, size in zip(names, shape, strict=True):
        split = mesh_axes(table[name], mesh)
        split_axes = (split,) if isinstance(split, str) else split or ()
        sizes = {axis: mesh.shape[axis] for axis in split_axes}
        if name in REPLICATED_IF_INDIVISIBLE and size % prod(sizes.values()):
            split, sizes = None, {}
        check_division(f"{what}: axis {name!r}", size, sizes)
        partition.append(split)
    return PartitionSpec(*partition)
