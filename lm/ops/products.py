"""Matrix products with gradients written out, for what compilers make of the automatic ones.

Two things matter where models compute in bfloat16. A product of a float32 gradient and a bfloat16 matrix runs
at the speed of float32, so gradients are rounded first, as in mixed precision elsewhere. And XLA on CPUs has
fast kernels for products of bfloat16 with results in float32; jaxlib 0.10 has none with results in bfloat16.
Neither matters in float32, for which the gradient of ``dense`` is written out for another reason.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Float, Float32


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(
    x: Float[Array, "*batch in"], kernel: Float[Array, "in out"], dtype: DTypeLike | None = None
) -> Float[Array, "*batch out"]:
    """Return x [...,in] times a kernel [in,out], in ``dtype`` or else that of x.

    Its gradient is written out for XLA on CPUs, which has to transpose one factor of the kernel's gradient:
    the first one. So the narrower factor is named first. Transposing the wider one, with all operations
    before it recomputed column by column, would be a tenth of a small model's step. Forward-mode
    differentiation (``jax.jvp``) is refused, as of every function with a gradient of its own.

    Policies of rematerialisation know the result as "product".
    """
    return _dense_forward(x, kernel, dtype)[0]


# Forward passes must not call the function with the custom gradient: a policy of rematerialisation would see
# one call in place of the product and its name, and compute both again.


def _dense_forward(x: Array, kernel: Array, dtype: DTypeLike | None) -> tuple[Array, tuple[Array, Array]]:
    return checkpoint_name(_tensordot(x, kernel, (-1, 0), dtype), "product"), (x, kernel)


def _dense_backward(
    _dtype: DTypeLike | None, inputs: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    x, kernel = inputs
    gradient = gradient.astype(x.dtype)
    batch_axes = tuple(range(x.ndim - 1))
    is_x_narrow = x.shape[-1] <= gradient.shape[-1]
    factors = (x, gradient) if is_x_narrow else (gradient, x)
    d_kernel = _tensordot(*factors, (batch_axes, batch_axes), kernel.dtype)
    # On CPUs the barrier keeps the transpose below out of the product, which it would make half as fast.
    d_kernel = jax.lax.platform_dependent(d_kernel, cpu=jax.lax.optimization_barrier, default=lambda x: x)
    d_kernel = d_kernel if is_x_narrow else d_kernel.T
    return _tensordot(gradient, kernel, (-1, 1), x.dtype), d_kernel


dense.defvjp(_dense_forward, _dense_backward)


def states_times_rows(x: Float[Array, "B T D"], table: Float[Array, "rows D"]) -> Float32[Array, "B T rows"]:
    """Return the products of states with all rows of a table of embeddings, float32 [B,T,rows].

    For a single state, as of a model that writes one text, XLA on CPUs is given the table as the first
    factor, behind a barrier: otherwise jaxlib 0.12 makes one loop of the product and the norm before it,
    which takes four times as long.
    """

    def states_first(x: Array, table: Array) -> Array:
        return dense(x, table.T, jnp.float32)

    def table_first(x: Array, table: Array) -> Array:
        x = jax.lax.optimization_barrier(x)
        return jnp.einsum("rd,btd->rbt", table, x, preferred_element_type=jnp.float32).reshape(1, 1, -1)

    if x.shape[:2] == (1, 1):
        return jax.lax.platform_dependent(x, table, cpu=table_first, default=states_first)
    return states_first(x, table)


def _tensordot(
    x: Array, y: Array, axes: tuple[int, int] | tuple[tuple[int, ...], ...], dtype: DTypeLike | None
) -> Array:
    """Return the products of x and y summed over ``axes``, in ``dtype`` or else that of x."""
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    product = partial(jnp.tensordot, axes=axes, preferred_element_type=dtype)
    if dtype != jnp.bfloat16:
        return product(x, y)

    def rounded(x: Array, y: Array) -> Array:
        return product(x, y, preferred_element_type=jnp.float32).astype(dtype)

    # On CPUs only: elsewhere devices would exchange their partial sums in float32, twice as many bytes.
    return jax.lax.platform_dependent(x, y, cpu=rounded, default=product)


# The products of attention, of arrays of one dtype. Their gradients are in bfloat16 where the inputs are, on
# CPUs too. There, some products of bfloat16 with a batch axis and results in float32 compile and then fail
# when they run, depending on the order in which axes lie in memory (jaxlib 0.10.2 and 0.12).


def _float32_einsum(equation: str, x: Array, y: Array) -> Float32[Array, "..."]:
    """Return an einsum in float32; of bfloat16 on CPUs one that takes up no transpose around it."""
    product = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if x.dtype != jnp.bfloat16:
        return product(x, y)
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: barrier(product(*barrier((x, y)))), default=product
    )


@jax.custom_vjp
def queries_times_keys(
    query: Float[Array, "B T K H"], key: Float[Array, "B S K H"]
) -> Float32[Array, "B K T S"]:
    """Return the products of each query with each key, float32 [B,K,T,S]."""
    return _queries_times_keys_forward(query, key)[0]


def _queries_times_keys_forward(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return _float32_einsum("btkh,bskh->bkts", query, key), (query, key)


def _queries_times_keys_backward(inputs: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = inputs
    gradient = gradient.astype(query.dtype)
    d_query = jnp.einsum("bkts,bskh->btkh", gradient, key)
    return d_query, jnp.einsum("bkts,btkh->bskh", gradient, query)


queries_times_keys.defvjp(_queries_times_keys_forward, _queries_times_keys_backward)


@jax.custom_vjp
def weights_times_values(
    weights: Float[Array, "B K T S"], value: Float[Array, "B S K H"]
) -> Float32[Array, "B T K H"]:
    """Return the sums of values by weights, float32 [B,T,K,H]."""
    return _weights_times_values_forward(weights, value)[0]


def _weights_times_values_forward(weights: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
    return _float32_einsum("bkts,bskh->btkh", weights, value), (weights, value)


def _weights_times_values_backward(inputs: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    weights, value = inputs
    gradient = gradient.astype(value.dtype)
    d_weights = jnp.einsum("btkh,bskh->bkts", gradient, value)
    return d_weights, jnp.einsum("bkts,btkh->bskh", weights, gradient)


weights_times_values.defvjp(_weights_times_values_forward, _weights_times_values_backward)
