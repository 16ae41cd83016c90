"""Products and their gradients are those of the formula, in bfloat16 too."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.ops.products import dense, queries_times_keys, states_times_rows, weights_times_values


@dataclass(frozen=True)
class Case:
    product: Callable
    x: str  # axes, as in an einsum
    y: str
    result: str


SIZES = {"b": 3, "t": 24, "s": 40, "k": 4, "h": 16, "i": 32, "o": 48}
CASES = {
    "dense": Case(dense, "bti", "io", "bto"),
    "narrow-dense": Case(dense, "bto", "oi", "bti"),
    "queries_times_keys": Case(queries_times_keys, "btkh", "bskh", "bkts"),
    "weights_times_values": Case(weights_times_values, "bkts", "bskh", "btkh"),
}


def transposed(x, order):
    """Return x with its axes in this order, where it has so many, and otherwise as it is."""
    return x.transpose(order) if x.ndim == len(order) else x


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)], ids=["bfloat16", "float32"]
)
def test_products_and_gradients_agree_with_the_formula_in_float64(case, dtype):
    # XLA gives an array the order of axes that its neighbours suggest, and for some orders jaxlib on CPUs has
    # no product of bfloat16: the program then compiles, and fails when it runs.
    rng = np.random.default_rng(0)
    shapes = [[SIZES[axis] for axis in axes] for axes in (case.x, case.y, case.result)]
    x, y, gradient = arrays = [rng.normal(size=shape).astype(dtype).astype(np.float64) for shape in shapes]
    expected = [
        np.einsum(f"{case.x},{case.y}->{case.result}", x, y),
        np.einsum(f"{case.result},{case.y}->{case.x}", gradient, y),
        np.einsum(f"{case.x},{case.result}->{case.y}", x, gradient),
    ]

    def forward(x, y, order):
        result = case.product(transposed(x, np.argsort(order)), transposed(y, np.argsort(order)))
        return transposed(result, order)

    def backward(x, y, gradient, order):
        result, of_gradient = jax.vjp(partial(forward, order=order), x, y)
        return of_gradient(gradient.astype(result.dtype))

    orders = list(permutations(range(len(case.x))))
    stored = [[jnp.asarray(transposed(each, order), dtype) for each in arrays] for order in orders]
    # Each order has arguments of its own, also for the gradients, so that in the one program of all of them
    # no product has the neighbours of another.
    of_all = jax.jit(
        lambda products, gradients: [
            (forward(*one, order), *backward(*other, order))
            for one, other, order in zip(products, gradients, orders, strict=True)
        ]
    )
    for order, found in zip(orders, of_all([each[:2] for each in stored], stored), strict=True):
        for ours, exact in zip(found, expected, strict=True):
            tolerance = 2**-7 if dtype == jnp.bfloat16 else 1e-5
            tolerances = {"rtol": tolerance, "atol": tolerance}
            if dtype == jnp.bfloat16 and jax.__version_info__ >= (0, 11):
                # jaxlib 0.12 sums some gradients in bfloat16, again depending on the order of axes
                tolerances = {"rtol": 0, "atol": 2**-6 * np.abs(exact).max()}
            due = transposed(exact, order)
            np.testing.assert_allclose(np.asarray(ours, np.float32), due, **tolerances, err_msg=f"{order}")


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1)])
def test_logits_of_one_state_and_of_several_are_the_products_with_each_row(shape):
    x, table = (
        jax.random.normal(jax.random.key(0), (*shape, 8)),
        jax.random.normal(jax.random.key(1), (20, 8)),
    )

    def summed(x, table):
        logits = states_times_rows(x, table)
        return (logits**2).sum(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(summed, (0, 1), has_aux=True))(x, table)
    expected = np.einsum("btd,rd->btr", x, table)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0], 2 * expected @ np.asarray(table), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients[1], 2 * np.einsum("btr,btd->rd", expected, x), rtol=1e-4, atol=1e-4)
