"""Updates that are left out: of a loss or gradient that is not finite, or that jumps above those before it."""

import jax
import jax.numpy as jnp

from lm.train.config import GuardConfig

WINDOW = 128  # of the updates last made, which say what is usual [steps]

Guard = dict[str, jax.Array]


def create(config: GuardConfig) -> Guard | None:
    """What is remembered from step to step; None where every update is made."""
    if not config.leaves_out:
        return None
    guard = {"in_a_row": jnp.zeros((), jnp.int32)}
    if config.spikes is not None:
        guard |= {"made": jnp.zeros((), jnp.int32), "usual": jnp.zeros((2, WINDOW), jnp.float32)}
    return guard


def judge(config: GuardConfig, guard: Guard, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, Guard]:
    """bool []: whether to make the update with this loss and norm of the gradient, float32 [] each; and what next.

    A spike is one of the two further above the mean of the last WINDOW updates than ``config.spikes`` times their
    standard deviation; until there were so many, nothing is a spike.
    """
    values = jnp.stack([loss, norm])
    finite = jnp.isfinite(values).all()
    good = finite | (config.non_finite == "stop")  # which the loop does when it reads them
    if config.spikes is None:
        return good, {"in_a_row": jnp.where(good, 0, guard["in_a_row"] + 1)}
    mean, deviation = guard["usual"].mean(axis=1), guard["usual"].std(axis=1)
    good &= ~(finite & (guard["made"] >= WINDOW) & (values > mean + config.spikes * deviation).any())
    usual = jnp.where(good, guard["usual"].at[:, guard["made"] % WINDOW].set(values), guard["usual"])
    in_a_row = jnp.where(good, 0, guard["in_a_row"] + 1)
    return good, {"in_a_row": in_a_row, "made": guard["made"] + good, "usual": usual}
