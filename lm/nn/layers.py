"""Linear layers, embeddings and norms. Each parameter names its axes where it is made."""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from lm.config.base import SettingError
from lm.config.layers import Logits, NormConfig
from lm.ops.products import dense, states_times_rows
from lm.sharding import PARAMETER_AXES, constrain

M = TypeVar("M", bound=nnx.Module)

# Attributes that flax's utilities set on a module, and what SettingError says of each: they would do nothing
# here, or break the model.
REFUSED_ATTRIBUTES = {
    "deterministic": "having a key means training, and there is no mode to switch: call model(batch, key) "
    "to train, model(batch) to evaluate",
    "_nnx_tabulate_id": "nnx.tabulate cannot show a model whose layers are in a scan, and would leave it "
    "broken: lm.sharding.named(model) has its parameters by name",
}


class Module(nnx.Module):
    """An ``nnx.Module`` in which a key, not a mode, switches dropout on.

    ``train()``, ``eval()`` and ``nnx.tabulate`` raise SettingError, also from a module that holds this one.
    """

    deterministic = None  # flax looks for it before it sets it

    def __setattr__(self, name: str, value: object) -> None:
        if name in REFUSED_ATTRIBUTES:
            raise SettingError(REFUSED_ATTRIBUTES[name])
        super().__setattr__(name, value)


def param(value: Array, *axes: str) -> nnx.Param:
    """Return a parameter with the names of its axes, by which ``lm.sharding`` places it.

    Stacked over layers it has one more axis, in front.
    """
    if len(axes) != value.ndim:
        raise ValueError(f"a parameter of shape {value.shape} needs {value.ndim} axis names, not {axes}")
    # For ``nnx.get_partition_spec``: nothing is placed here.
    mesh_axes = tuple(PARAMETER_AXES.get(axis) for axis in axes)
    return nnx.Param(value, axes=axes, out_sharding=mesh_axes, eager_sharding=False)


def add_layers_axis(module: M) -> M:
    """Add the layers' axis to the metadata of a module made under ``jax.vmap``, and return the module."""
    for variable in jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        mesh_axes = variable.get_metadata().get("out_sharding")
        if mesh_axes is not None:
            variable.set_metadata(out_sharding=(PARAMETER_AXES["layers"], *mesh_axes))
    return module


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Array:
    """Return a float32 array drawn from a normal distribution of mean 0."""
    return std * jax.random.normal(next_key(rngs), shape, jnp.float32)


def next_key(rngs: nnx.Rngs) -> Array:
    """Return the key that ``rngs.params()`` would return, and add 1 to the stream's count, in less time.

    ``rngs.params()`` compares the shardings of the old and the new count. Traced counts have none, so JAX
    writes an error message that lists operations of the program, and flax ignores the error.
    """
    stream = rngs.params
    key = jax.random.fold_in(stream.key[...], stream.count[...])
    stream.count.set_value(stream.count[...] + 1)
    return key


def num_parameters(module: nnx.Module) -> int:
    """Return the number of parameters, also of the abstract module that ``jax.eval_shape`` gives."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(module))


# Cheap layers are recomputed in the backward pass, which would otherwise read float32 copies of their
# outputs from memory. Outside of a loop prevent_cse=False lets the compiler merge the two computations, which
# on a CPU is faster still.
remat = partial(jax.checkpoint, prevent_cse=False)


def broadcast_to_rank(vector: Float[Array, " D"], x: Float[Array, "*_ D"]) -> Float[Array, "*_ D"]:
    """Return ``vector`` [D] as [1,...,1,D], with the rank and dtype of x [...,D]."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + vector.shape)


class Identity(Module):
    """Return the input: takes the place of a layer that a model leaves out."""

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return x


class LowRankUpdate(Module):
    """A LoRA update of a linear layer, [...,in] to [...,out] through ``rank`` features (Hu et al. 2021).

    A new one returns 0.
    """

    def __init__(
        self, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str, str], *, rank: int, alpha: float
    ):
        self.scale = alpha / rank
        self.down = param(normal(rngs, (shape[0], rank), shape[0] ** -0.5), axes[0], "lora")
        self.up = param(jnp.zeros((rank, shape[1]), jnp.float32), "lora", axes[1])

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        hidden = dense(x, self.down[...].astype(x.dtype))
        return dense(hidden, self.up[...].astype(x.dtype)) * self.scale


class Linear(Module):
    """Return x [...,in] times a kernel [in,out], plus a bias [out] if it has one, in the dtype of x.

    ``lora`` is added to the product; ``lm.nn.lora.add_lora`` sets it.
    """

    def __init__(
        self, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str, str], *, std: float, use_bias: bool
    ):
        self.kernel = param(normal(rngs, shape, std), *axes)
        self.bias = param(jnp.zeros(shape[1:], jnp.float32), axes[1]) if use_bias else None
        self.lora: LowRankUpdate | None = nnx.data(None)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        y = dense(x, self.kernel[...].astype(x.dtype))
        if self.lora is not None:
            y = y + self.lora(x)
        if self.bias is not None:
            y = y + broadcast_to_rank(self.bias[...], y)
        return y


class Embed(Module):
    """A table [rows,D] of embeddings, looked up by id; with tied embeddings it is the output matrix too."""

    def __init__(self, rngs: nnx.Rngs, shape: tuple[int, int], axis: str, *, std: float, dtype: DTypeLike):
        self.dtype = dtype
        self.table = param(normal(rngs, shape, std), axis, "embed")

    def __call__(self, ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T D"]:
        """Return [B,T,D] of ids int32 [B,T]; NaN for an id that the table lacks, also for a negative one."""
        ids = jnp.asarray(ids)
        if len(ids) == 1:  # positions, which all rows share
            return self._look_up(ids)
        # The table is sharded by features. Each device looks up its features for all rows of its group, and
        # then devices exchange them. Without these constraints the compiler gathers the table on each device.
        x = self._look_up(constrain(ids, "batch_of_features", "key_length"))
        x = constrain(x, "batch_of_features", "key_length", "features")
        return constrain(x, "batch", "length", "embed")

    def _look_up(self, ids: Array) -> Array:
        # NaN, since clamping an unknown id to a row of the table would silently train on nonsense.
        rows = self.table[...].at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        # Cast after the lookup, so that the backward pass sums a frequent token's gradients in float32.
        return rows.astype(self.dtype)

    def logits(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T rows"]:
        """Return the products of x [B,T,D] with all rows, float32 [B,T,rows]."""
        return states_times_rows(x, self.table[...].astype(x.dtype))


def embedding_std(logits: Logits, width: int) -> float:
    """Return the standard deviation with which a table of embeddings of this width starts.

    A table that makes logits has rows of Euclidean length about 1, so that logits have a standard deviation
    of about 1: with "tied", and with "none", where ELECTRA's generator shares the table. All other rows are
    about sqrt(D) long; T5's "tied-scaled" divides its logits by sqrt(D) in turn.
    """
    return width**-0.5 if logits in ("tied", "none") else 1.0


class RMSNorm(Module):
    """Return x [...,D] over its root mean square, times a scale [D] (Zhang and Sennrich 2019).

    With ``fraction`` below 1 the mean is over the first D * fraction features, rounded up (partial RMS norm).
    With ``has_scale`` False there is no scale, nor any other parameter. With ``zero_centered`` True the scale
    is 1 plus the parameter (Gemma).
    """

    def __init__(
        self,
        width: int,
        epsilon: float,
        fraction: float = 1.0,
        has_scale: bool = True,
        zero_centered: bool = False,
    ):
        self.epsilon = epsilon
        # Rounded twice, since 100 * 0.07 is 7.000000000000001.
        self.num_measured = math.ceil(round(width * fraction, 6))
        self.zero_centered = zero_centered
        self.scale = _norm_scale(width, zero_centered) if has_scale else None

    @remat
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        y = x.astype(jnp.float32)
        return _scaled_over_root_mean_square(y, self, self.num_measured).astype(x.dtype)


class LayerNorm(Module):
    """Return x [...,D] centred, over its standard deviation, times a scale, plus a bias (Ba et al. 2016).

    With ``has_scale`` False there is neither scale nor bias, with ``has_bias`` False no bias (ModernBERT).
    ``zero_centered`` is as in ``RMSNorm``.
    """

    def __init__(
        self,
        width: int,
        epsilon: float,
        has_scale: bool = True,
        has_bias: bool = True,
        zero_centered: bool = False,
    ):
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.scale = _norm_scale(width, zero_centered) if has_scale else None
        has_bias = has_scale and has_bias
        self.bias = param(jnp.zeros((width,), jnp.float32), "norm") if has_bias else None

    @remat
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = _scaled_over_root_mean_square(y, self, y.shape[-1])
        return (y if self.bias is None else y + broadcast_to_rank(self.bias[...], y)).astype(x.dtype)


def _norm_scale(width: int, zero_centered: bool) -> nnx.Param:
    """Return the parameter [D] of a new norm, with which its scale is 1."""
    return param(jnp.full((width,), 0.0 if zero_centered else 1.0, jnp.float32), "norm")


def _scaled_over_root_mean_square(x: Array, norm: RMSNorm | LayerNorm, num_measured: int) -> Array:
    """Return x [...,D] over the root mean square of its first features, ``num_measured``, times the scale."""
    factor = jax.lax.rsqrt(jnp.square(x[..., :num_measured]).mean(-1, keepdims=True) + norm.epsilon)
    if norm.scale is None:
        return x * factor
    scale = 1 + norm.scale[...] if norm.zero_centered else norm.scale[...]
    return x * (factor * broadcast_to_rank(scale, x))


# By model.norm.kind; called with settings, a width, and whether the norm has parameters.
NORMS: dict[str, Callable[[NormConfig, int, bool], nnx.Module]] = {
    "rms": lambda norm, width, has_scale: RMSNorm(
        width, norm.epsilon, norm.fraction, has_scale, norm.zero_centered
    ),
    "layer": lambda norm, width, has_scale: LayerNorm(
        width, norm.epsilon, has_scale, norm.bias, norm.zero_centered
    ),
    "none": lambda norm, width, has_scale: Identity(),
}


def make_norm(norm: NormConfig, width: int, has_scale: bool = True) -> nnx.Module:
    """Return the norm that the model's settings name, for inputs of this width."""
    return NORMS[norm.kind](norm, width, has_scale)


class ScalarBias(Module):
    """Return x plus a scalar that starts at 0."""

    def __init__(self) -> None:
        self.bias = param(jnp.zeros((), jnp.float32))

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return x + self.bias[...].astype(x.dtype)


class ScalarScale(Module):
    """Return x times a scalar, which starts as given."""

    def __init__(self, start: float):
        self.scale = param(jnp.full((), start, jnp.float32))

    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return x * self.scale[...].astype(x.dtype)


def squared_relu(x: Array) -> Array:
    """Return max(x, 0)^2 (Primer, So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # by model.mlp.activation
    "relu": jax.nn.relu,
    "squared-relu": squared_relu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # by the error function, as BERT
    "gelu-tanh": jax.nn.gelu,  # as GPT-2
    "silu": jax.nn.silu,  # Swish with beta 1
    "elu": jax.nn.elu,  # Clevert et al. 2015
    "selu": jax.nn.selu,  # Klambauer et al. 2017
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    # The gate's activation (Shazeer 2020).
    "gated-sigmoid": jax.nn.sigmoid,  # GLU
    "gated-linear": lambda x: x,  # bilinear, also called LiGLU
    "gated-relu": jax.nn.relu,  # ReGLU
    "gated-gelu": jax.nn.gelu,  # GEGLU, in the tanh form, as T5 1.1
    "gated-gelu-erf": partial(jax.nn.gelu, approximate=False),  # GEGLU by the error function, as ModernBERT
    "gated-silu": jax.nn.silu,  # SwiGLU
}
