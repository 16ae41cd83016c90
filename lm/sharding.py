"""Where every array lives: decided by two tables alone, from the names of axes to the axes of a mesh.

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
from lm.config.base import SettingError, nearest
from lm.config.mesh import MeshConfig, describe_mesh

Tree = TypeVar("Tree")

# Leaves come in the order of feature names, decoder before encoder.
_SIDE_FIELDS = [field for side, field in BATCH_FEATURES.values() if side == "encoder"]
_BATCH_FIELDS = ["decoder", "encoder", *(field for side, field in BATCH_FEATURES.values() if not side)]
jax.tree_util.register_dataclass(Side, data_fields=_SIDE_FIELDS, meta_fields=[])
jax.tree_util.register_dataclass(Batch, data_fields=_BATCH_FIELDS, meta_fields=[])

BATCH = ("slice", "data", "fsdp")  # the mesh axes over which the rows of a batch are spread

PARAMETER_AXES: dict[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "state": "fsdp",
    "gates": None,  # of recurrent layers: whole on each device
    "layers": None,
    "norm": None,
    "buckets": None,
    "bias_heads": None,
    "length": None,
    "kv": None,
    "adapter": None,
    "lora": None,
    "classes": None,
}

ACTIVATION_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": BATCH,
    "length": "sequence",  # positions of queries; each device has all keys and values of its rows, so that
    "key_length": None,  # attention needs one all-gather and its mask and bias no other device
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    "embed": None,
    "kv": None,
    "gates": None,
    "dropped": None,
    # where a look-up in a table leaves its rows, before they change places:
    "batch_of_features": ("slice", "data"),
    "features": "fsdp",  # with the features that the table has there
}

# Other sizes that do not divide are an error. These are then held by each device: the one token of a step of
# decoding, and the few heads of keys that many heads of queries share.
WHERE_IT_DIVIDES = ("length", "kv_heads")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh of these devices, or of all; the compiler places what is not placed here (``AxisType.Auto``).

    Neighbours on a mesh axis are neighbours in a TPU's network; only the axis "slice" leaves a slice.
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


def mesh_axes(place: str | tuple[str, ...] | None, mesh: Any) -> str | tuple[str, ...] | None:
    """The mesh axes of a ``place`` in the tables that the mesh has; None if it has none of them."""
    if isinstance(place, tuple):
        return tuple(axis for axis in place if axis in mesh.shape) or None
    return place if place in mesh.shape else None


def check_mesh_types(mesh: Any) -> None:
    """SettingError for a mesh whose arrays would carry their places in their types."""
    explicit = [
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    ]
    if explicit:
        raise SettingError(
            f"mesh axes {', '.join(explicit)} are Explicit, and should be left to the compiler: pass "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to jax.make_mesh"
        )


def check_division(what: str, size: int, sizes: Mapping[str, int]) -> None:
    """SettingError if an axis of this size cannot be split over these mesh ``sizes``."""
    if size % (parts := prod(sizes.values())):
        fitting = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
        raise SettingError(
            f"{what} of size {size} cannot be split over {describe_mesh(sizes)}: make it a multiple of "
            f"{parts}, or mesh.{' * mesh.'.join(sizes)} one of {', '.join(map(str, fitting))}"
        )


def check_length(length: int, sizes: Mapping[str, int]) -> None:
    """SettingError if the longest rows, of ``length`` tokens, cannot be split over mesh ``sizes``."""
    check_division("the longest row", length, {"sequence": sizes.get("sequence", 1)})


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """``x`` laid out by the names of its axes; ``x`` itself without a mesh of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    spec = _spec(axes, x.shape, ACTIVATION_AXES, f"activation {axes}", mesh)
    return x if mesh.empty or mesh.size == 1 else jax.lax.with_sharding_constraint(x, spec)


def named(tree: Any) -> dict[str, Any]:
    """``{dotted name: leaf}`` of any pytree; a parameter's name does not end in the box that holds it."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
        leaves[".".join(parts[:-1] if parts[-1:] == ["value"] else parts)] = leaf
    return leaves


def axes(model: nnx.Module) -> dict[str, tuple[str, ...]]:
    """``{parameter name: names of its axes}``, with "layers" in front where it is stacked over layers."""
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


def parameters(model: nnx.Module, mesh: Mesh) -> dict[str, NamedSharding]:
    """``{parameter name: where it lives}``; also of a model of shapes (``jax.eval_shape``)."""
    leaves, places = named(model), {}
    for name, names in axes(model).items():
        spec = _spec(names, leaves[name].shape, PARAMETER_AXES, f"parameter {name}", mesh)
        places[name] = NamedSharding(mesh, spec)
    return places


def constrain_to_parameters(
    arrays: Mapping[str, jax.Array], axes: Mapping[str, tuple[str, ...]]
) -> dict[str, jax.Array]:
    """Return gradients ``{parameter name: array}``, laid out as the parameters with these axes are.

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


def like_parameters(
    init: Callable[[dict[str, Any]], Any], model: nnx.Module, places: Mapping[str, NamedSharding]
) -> Any:
    """Where the optimiser's memory of ``{parameter name: array}`` lives: its axes where the parameter's do.

    Axes are recognised by size, in stand-ins for the parameters that have no two axes of one size. What is
    under no parameter's name, such as a count, every device holds. SettingError for a larger array of other
    axes.
    """
    mesh: Any = next(iter(places.values())).mesh
    params = named(model)
    shapes = {
        n: _distinct_sizes(params[n].shape, names[:1] == ("layers",)) for n, names in axes(model).items()
    }
    stand_ins = {name: jax.ShapeDtypeStruct(shape, params[name].dtype) for name, shape in shapes.items()}

    def place(path, leaf):
        owners = [key.key for key in path if getattr(key, "key", None) in shapes]
        spec = dict(zip(shapes[owners[-1]], places[owners[-1]].spec, strict=True)) if owners else {}
        sizes = [size for size in leaf.shape if size > 1]  # 1: in place of what is not remembered
        if len(set(sizes) & spec.keys()) == len(sizes):
            return NamedSharding(mesh, PartitionSpec(*map(spec.get, leaf.shape)))
        if leaf.ndim > 1:
            memory = f"the optimiser's {jax.tree_util.keystr(path)} of shape {leaf.shape}"
            raise SettingError(f"{memory} has other axes than the parameter, {spec}")
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(init, stand_ins))


def _distinct_sizes(shape: tuple[int, ...], stacked: bool) -> tuple[int, ...]:
    """Sizes in the same order, no two equal: of equal axes the later gets larger. Layers stay as many."""
    sizes, last, layers = list(shape), 0, shape[0] if stacked else 0
    for axis in sorted(range(stacked, len(shape)), key=lambda axis: shape[axis]):
        last = max(shape[axis], last + 1)
        last += last == layers
        sizes[axis] = last
    return tuple(sizes)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batches(mesh: Mesh) -> NamedSharding:
    """Where a batch lives: its rows spread over the mesh axes ``BATCH``."""
    check_mesh_types(mesh)
    return NamedSharding(mesh, PartitionSpec(mesh_axes(BATCH, mesh)))


def layers_of_batches(mesh: Mesh) -> NamedSharding:
    """Where arrays [layers,B,...] live, such as recurrent states: their rows as those of a batch."""
    return NamedSharding(mesh, PartitionSpec(None, mesh_axes(BATCH, mesh)))


def batch_parts(sizes: Mapping[str, int]) -> int:
    """Into how many parts a mesh of these ``sizes`` cuts the rows of a batch."""
    return prod(sizes.get(axis, 1) for axis in BATCH)


def described(tree: Any) -> Any:
    """Shapes, dtypes and places of the arrays of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def rows_of_process(mesh: Mesh, batch_size: int) -> list[slice]:
    """The rows of a global batch that this process feeds, in order; they need not be one block.

    Where a tensor axis spans several processes, these feed the same rows.
    """
    indices = batches(mesh).addressable_devices_indices_map((batch_size,)).values()
    return [slice(*span) for span in sorted({index[0].indices(batch_size)[:2] for index in indices if index})]


def put_batch(batch: Tree, mesh: Mesh) -> Tree:
    """The global batch on the devices, from the rows that this process feeds (``rows_of_process``).

    ``batch`` is a ``Batch`` or any tree of arrays whose first axis is the row.
    """
    place = batches(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, place)
    parts = batch_parts(mesh.shape)
    held = {rows.start: number for number, rows in enumerate(rows_of_process(mesh, parts))}

    def spread(values):
        size = len(values) // len(held)

        def part(index):
            first = held[(index[0].start or 0) // size] * size
            return values[first : first + size]

        return jax.make_array_from_callback((size * parts, *values.shape[1:]), place, part)

    return jax.tree.map(spread, batch)


def _spec(names: tuple[str, ...], shape: tuple[int, ...], table: Mapping[str, Any], what: str, mesh: Any):
    """Where such an array lives; SettingError for an unknown name, or a size that does not divide."""
    check_mesh_types(mesh)
    places = []
    for name, size in zip(names, shape, strict=True):
        if name not in table:
            raise SettingError(f"{what} has the axis {name!r}, which lm.sharding lacks{nearest(name, table)}")
        place = mesh_axes(table[name], mesh)
        spread = (place,) if isinstance(place, str) else place or ()
        sizes = {axis: mesh.shape[axis] for axis in spread}
        if name in WHERE_IT_DIVIDES and size % prod(sizes.values()):
            place, sizes = None, {}
        check_division(f"{what}: axis {name!r}", size, sizes)
        places.append(place)
    return PartitionSpec(*places)
