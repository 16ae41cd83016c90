"""Updates that are left out: loss or gradient are not finite, or the loss jumps above those before it."""

import jax
import jax.numpy as jnp

from lm.train.config import GuardConfig

WINDOW = 128  # of the updates last made, whose losses say what is usual [steps]
LEAST = 0.1  # as which a smaller deviation counts: losses near zero jump by factors all the time [nats/token]

Guard = dict[str, jax.Array]


def create(config: GuardConfig) -> Guard | None:
    """What is remembered from step to step; None where every update is made."""
    if not config.leaves_out:
        return None
    guard = {"in_a_row": jnp.zeros((), jnp.int32)}
    if config.spikes is not None:
        guard |= {"made": jnp.zeros((), jnp.int32), "losses": jnp.zeros(WINDOW, jnp.float32)}
    return guard


def judge(config: GuardConfig, guard: Guard, loss: jax.Array, norm: jax.Array) -> tuple[jax.Array, Guard]:
    """bool []: whether to make the update with this loss and norm of the gradient, float32 [] each; and what
    next.

    A spike is a loss further above the mean of the last WINDOW updates than ``config.spikes`` times their
    standard deviation; until there were so many, nothing is. The norm of the gradient need only be finite: in
    ordinary runs with Adafactor it jumps to a hundred deviations while the loss stays within four.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    good = finite | (config.non_finite == "stop")  # which the loop does when it reads them
    after = {}
    if config.spikes is not None:
        limit = guard["losses"].mean() + config.spikes * jnp.maximum(guard["losses"].std(), LEAST)
        good &= ~(finite & (guard["made"] >= WINDOW) & (loss > limit))
        losses = jnp.where(good, guard["losses"].at[guard["made"] % WINDOW].set(loss), guard["losses"])
        after = {"made": guard["made"] + good, "losses": losses}
    return good, after | {"in_a_row": jnp.where(good, 0, guard["in_a_row"] + 1)}
