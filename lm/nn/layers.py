"""The layers of a Transformer; each parameter names its axes where it is made."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from lm.nn.config import ModelConfig
from lm.ops.positions import Relative, starting_slopes
from lm.settings import SettingError
from lm.sharding import PARAMETER_AXES, constrain

M = TypeVar("M", bound=nnx.Module)
Keep = dict[str, Array]  # dropout masks by where they go; none of them when evaluating


def param(value: Array, *axes: str) -> nnx.Param:
    """A parameter and the names of its axes; stacked over layers it has one more axis, in front."""
    if len(axes) != value.ndim:
        raise ValueError(f"a parameter of shape {value.shape} needs {value.ndim} axis names, not {axes}")
    # What flax knows of places (``nnx.get_partition_spec``) is told, and nothing is placed here.
    places = tuple(PARAMETER_AXES.get(axis) for axis in axes)
    return nnx.Param(value, axes=axes, out_sharding=places, eager_sharding=False)


def stacked(module: M) -> M:
    """A module made by ``jax.vmap``, whose parameters say that they have one more axis in front."""
    for box in jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        if (places := box.get_metadata().get("out_sharding")) is not None:
            box.set_metadata(out_sharding=(PARAMETER_AXES["layers"], *places))
    return module


_REFUSED = {
    "deterministic": "having a key means training, and there is no mode to switch: call model(batch, key) "
    "to train, model(batch) to evaluate",
    "_nnx_tabulate_id": "nnx.tabulate cannot show a model whose layers are in a loop, and would leave it "
    "broken: lm.sharding.named(model) has its parameters by name",
}


class Keyed(nnx.Module):
    """A module in which a key, not a mode, switches dropout on.

    What flax would set in it without effect, or to its harm, is an error: ``train()``, ``eval()``,
    ``nnx.tabulate``; also where it is a part of another module.
    """

    deterministic = None  # for which flax looks before it sets it

    def __setattr__(self, name: str, value: object) -> None:
        if name in _REFUSED:
            raise SettingError(_REFUSED[name])
        super().__setattr__(name, value)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> Array:
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)


def draw_keep(key: Array, rate: float, rows: int, shapes: dict[str, tuple[int, ...]]) -> Keep:
    """Dropout masks, bool [B,*shape] for each shape, True with probability 1 - rate.

    All come from one draw: a random generator is the costliest thing to compile in a training step. None has
    the queries' length as an axis: all positions of a row drop the same features, as in T5.
    """
    sizes = [prod(shape) for shape in shapes.values()]
    bits = constrain(jax.random.bernoulli(key, 1 - rate, (rows, sum(sizes))), "batch", "dropped")
    parts = jnp.split(bits, list(accumulate(sizes))[:-1], axis=1)
    return {name: part.reshape(rows, *shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def dropout(x: Array, keep: Array | None, rate: float) -> Array:
    """x where ``keep``, else 0, scaled to the same mean; x itself where there is no mask."""
    return x if keep is None else x * scaled(keep, rate).astype(x.dtype)


def scaled(keep: Array, rate: float) -> Array:
    """float32: 1 / (1 - rate) where ``keep``, else 0."""
    return keep / jnp.float32(1 - rate)


def split(key: Array | None, count: int) -> list[Array | None]:
    """``count`` keys, or as many times no key."""
    return [None] * count if key is None else list(jax.random.split(key, count))


# What is cheap is computed again in the backward pass, which otherwise would read float32 copies of it from
# memory. Where blocks are not in a loop the compiler merges the two computations, which is faster on a CPU.
recomputed = partial(jax.checkpoint, prevent_cse=False)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: Array, kernel: Array, dtype: DTypeLike | None = None) -> Array:
    """x [...,in] times a kernel [in,out], in ``dtype`` if that is not the inputs'.

    The gradient of the kernel is a product of two arrays with rows in front, one of which XLA on a CPU has to
    turn over: the narrower one is named first, which is that one. A transpose of the wider one, with all that
    leads to it computed once more column by column, would be a tenth of a small model's step. The barrier,
    on CPUs alone, keeps a transpose of the result out of the product, which would be slower by half.
    """
    return _product_forward(x, kernel, dtype)[0]


def _product_forward(x: Array, kernel: Array, dtype: DTypeLike | None) -> tuple[Array, tuple[Array, Array]]:
    return jnp.matmul(x, kernel, preferred_element_type=dtype), (x, kernel)


def _product_backward(
    _dtype: DTypeLike | None, inputs: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = inputs
    rows = tuple(range(x.ndim - 1))
    narrow = (x, gradient) if x.shape[-1] <= gradient.shape[-1] else (gradient, x)
    of_kernel = jnp.tensordot(*narrow, (rows, rows))
    of_kernel = jax.lax.platform_dependent(of_kernel, cpu=jax.lax.optimization_barrier, default=lambda x: x)
    of_kernel = of_kernel if narrow[0] is x else of_kernel.T
    return jnp.tensordot(gradient, kernel, (-1, 1)).astype(x.dtype), of_kernel.astype(kernel.dtype)


product.defvjp(_product_forward, _product_backward)


class LowRank(nnx.Module):
    """x [B,T,in] to [B,T,out] by two matrices [in,rank] and [rank,out], 0 when new (Hu et al. 2021)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str, str]):
        self.config = config.lora
        self.down = param(normal(rngs, (shape[0], config.lora.rank), shape[0] ** -0.5), axes[0], "lora")
        self.up = param(jnp.zeros((config.lora.rank, shape[1]), jnp.float32), "lora", axes[1])

    def __call__(self, x: Array) -> Array:
        low = product(x, self.down[...].astype(x.dtype))
        return product(low, self.up[...].astype(x.dtype)) * (self.config.alpha / self.config.rank)


class Linear(nnx.Module):
    """x [B,T,in] times a kernel [in,out], plus a bias [out] if the model has biases, in the dtype of x.

    ``lora`` is what is added to the product, once ``add_low_rank`` has set it.
    """

    def __init__(
        self, config: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str, str], std: float
    ):
        self.kernel = param(normal(rngs, shape, std), *axes)
        self.bias = param(jnp.zeros(shape[1:], jnp.float32), axes[1]) if config.bias else None
        self.lora: LowRank | None = nnx.data(None)  # which a module may replace

    def __call__(self, x: Array) -> Array:
        y = product(x, self.kernel[...].astype(x.dtype))
        y = y if self.lora is None else y + self.lora(x)
        return y if self.bias is None else y + along(self.bias[...], y)


def along(vector: Array, x: Array) -> Array:
    """``vector`` [D] in the dtype of x [...,D], with as many axes."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + vector.shape)


class Embed(nnx.Module):
    """Ids [B,T] to [B,T,D] by ``table`` [rows,D]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, shape: tuple[int, int], axis: str):
        self.dtype = config.dtype
        # Rows of length 1 make logits of size 1, here or in ELECTRA's generator, which shares them; T5's are
        # sqrt(D) long, and so its tied logits are scaled down.
        std = shape[1] ** -0.5 if config.logits in ("tied", "none") else 1.0
        self.table = param(normal(rngs, shape, std), axis, "embed")

    def __call__(self, ids: Array) -> Array:
        if len(ids) == 1:  # positions that all rows share
            return self._rows(ids)
        # Each device looks up its features of the rows of others too, which then change places: by itself
        # the compiler gathers everything everywhere.
        x = self._rows(constrain(ids, "batch_of_features", "key_length"))
        x = constrain(x, "batch_of_features", "key_length", "features")
        return constrain(x, "batch", "length", "embed")

    def _rows(self, ids: Array) -> Array:
        # An id that the table lacks, a negative one too, gives NaN: clamping it to the last row would train
        # on nonsense unseen.
        # Gradients of a frequent token's many places are added up in float32.
        rows = self.table[...].at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(self.dtype)

    def logits(self, x: Array) -> Array:
        """float32 [B,T,rows]: how well x [B,T,D] fits each row."""
        return product(x, self.table[...].astype(x.dtype).T, jnp.float32)


class Norm(nnx.Module):
    """x [B,T,D] over its root mean square, times a scale [D]; a layer norm is centred and adds a bias.

    x itself where ``model.norm`` is "none".
    """

    def __init__(self, config: ModelConfig, width: int):
        self.epsilon = config.norm_epsilon
        self.scale = param(jnp.ones((width,), jnp.float32), "norm") if config.norm != "none" else None
        self.bias = param(jnp.zeros((width,), jnp.float32), "norm") if config.norm == "layer" else None

    @recomputed
    def __call__(self, x: Array) -> Array:
        if self.scale is None:
            return x
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.epsilon) * along(self.scale[...], y)
        return (y if self.bias is None else y + along(self.bias[...], y)).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),  # of the error function, as BERT
    "gelu-tanh": jax.nn.gelu,  # as GPT-2
    "silu": jax.nn.silu,
    "gated-relu": jax.nn.relu,
    "gated-gelu": jax.nn.gelu,  # tanh form, as T5 1.1
    "gated-silu": jax.nn.silu,  # SwiGLU
}


class Mlp(nnx.Module):
    """[B,T,D] to [B,T,D] through [B,T,F]; a gated one multiplies the hidden layer by a second, linear one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        config = replace(config, bias=config.mlp_has_bias)
        inward = (config, rngs, (config.d_model, config.d_ff), ("embed", "mlp"), config.d_model**-0.5)
        self.hidden = Linear(*inward)
        self.linear = Linear(*inward) if config.mlp.startswith("gated") else None
        self.out = Linear(config, rngs, (config.d_ff, config.d_model), ("mlp", "embed"), config.d_ff**-0.5)

    def __call__(self, x: Array, keep: Array | None) -> Array:
        hidden = constrain(self.hidden(x), "batch", "length", "mlp")
        linear = None if self.linear is None else constrain(self.linear(x), "batch", "length", "mlp")
        return self._outward(hidden, linear, keep)

    @recomputed  # but for the product, which its gradients do not ask for
    def _outward(self, hidden: Array, linear: Array | None, keep: Array | None) -> Array:
        hidden = ACTIVATIONS[self.config.mlp](hidden)
        return self.out(dropout(hidden if linear is None else hidden * linear, keep, self.config.dropout))


def add_low_rank(
    config: ModelConfig, rngs: nnx.Rngs, attentions: Iterable[nnx.Module], mlp: nnx.Module | None
) -> None:
    """Give those linear layers of a block that ``model.lora.matrices`` names an update."""
    matrices = config.lora.matrices if config.lora.rank else ()
    chosen: list[tuple[nnx.Module, str]] = []
    chosen += [(module, name) for module in attentions for name in matrices if name != "mlp"]
    chosen += [(mlp, name) for name in ("hidden", "linear", "out") if mlp is not None and "mlp" in matrices]
    for module, name in chosen:
        if isinstance(linear := getattr(module, name, None), Linear):
            width, out = linear.kernel.shape
            linear.lora = LowRank(config, rngs, (width, out), linear.kernel.axes)


class Adapter(nnx.Module):
    """[B,T,D] to [B,T,D] through a narrow layer of ``adapter_width``, added to a pre-trained block and tuned.

    It has a norm in front wherever the block's norms are. A new one adds next to nothing: its output matrix
    is drawn as in Houlsby et al. 2019, whose adapters train alike from any deviation up to 1e-2. It is not 0,
    since Adafactor's learning rate is relative to a parameter's size.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        width, inner = config.d_model, config.adapter_width
        self.norm = Norm(config, width)
        self.hidden = Linear(config, rngs, (width, inner), ("embed", "adapter"), width**-0.5)
        self.out = Linear(config, rngs, (inner, width), ("adapter", "embed"), 1e-2)

    def __call__(self, x: Array, keep: Array | None) -> Array:
        return self.out(dropout(jax.nn.relu(self.hidden(self.norm(x))), keep, self.config.dropout))


class RelativeBias(nnx.Module):
    """A learnt number per head and bucket of distances, added to attention scores; ``table`` [buckets,N].

    ``bidirectional``: whether the stack reads both ways, by which a start with slopes tells what distances a
    bucket holds. A stack that is encoder and decoder in one starts with an encoder's.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, bidirectional: bool):
        self.config = config
        table = normal(rngs, (config.relative_buckets, config.num_heads), config.d_model**-0.5)
        if config.relative_bias_start == "slopes":
            distances = Relative(table, bidirectional, config.relative_max_distance).mean_distances
            table = jnp.asarray(-distances[:, None] * starting_slopes(config.num_heads))
        self.table = param(table, "buckets", "bias_heads")

    def __call__(self, bidirectional: bool) -> Relative:
        """The bias by distances, both ways or only back."""
        return Relative(self.table[...], bidirectional, self.config.relative_max_distance)


def count(module: nnx.Module) -> int:
    """The number of parameters; of shapes alone too, as ``jax.eval_shape`` gives them."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(module))
