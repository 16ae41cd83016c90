"""Mixtures of experts: a router chooses experts for each token, and each expert has a capacity.

Shapes: G groups, T tokens of a group, E experts, k experts per token, C slots of an expert (its capacity),
D = d_model. The tokens of a group share the capacity of the experts; groups do not know one another. Padding
takes no slot.

Tokens are moved by gathers, also in the backward pass: dispatching a token and combining the outputs of its
experts are each other's transpose. Their cost grows with T, where that of products with a one-hot tensor
[T,E,C] (Lepikhin et al. 2021, algorithm 1) grows with its square.

Sources: Fedus et al. 2021 (Switch Transformers), sections 2.1 and 2.2; Zoph et al. 2022 (ST-MoE), section
3.2; Zhou et al. 2022 (expert choice), section 3.2.
"""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32


class Routes(NamedTuple):
    """Holds the slot of an expert that each choice of a token has, and the other way round."""

    slot: Int32[Array, "G T k"]  # expert * C + index among its slots, of each choice; E * C: it has none
    choice: Int32[Array, "G E C"]  # token * k + number of the choice, in each slot; T * k: it is empty


def expert_capacity(tokens: int, num_experts: int, factor: float) -> int:
    """Return how many of a group's ``tokens`` an expert reads at most: C of Fedus et al., equation 3.

    The number of experts per token is no part of it, as in that paper: with two experts per token, a factor
    of 2 has room for all choices of tokens that are evenly spread. It is at least 1, and at most all tokens.

    >>> expert_capacity(512, 128, 1.25), expert_capacity(4, 128, 1.0), expert_capacity(4, 2, 8.0)
    (5, 1, 4)
    """
    even_share = round(tokens * factor / num_experts, 6)  # since 100 * 1.1 is 110.00000000000001
    return min(max(ceil(even_share), 1), tokens)


def choose_experts(
    scores: Float32[Array, "G T E"], probabilities: Float32[Array, "G T E"], per_token: int, normalized: bool
) -> tuple[Int32[Array, "G T k"], Float32[Array, "G T k"]]:
    """Return the experts of each token by their scores, best first, and the weights of their outputs.

    A weight is the router's probability (Fedus et al., equation 2), divided by the sum of the token's if
    ``normalized`` (Lepikhin et al. 2021, Mixtral). That of a single expert is not divided: it would be 1, and
    the router would learn nothing from the model's loss.
    """
    # One maximum after another: compilers gather a sharded batch on every device to sort it.
    remaining, chosen, chosen_probabilities = scores, [], []
    for _ in range(per_token):
        best = remaining.argmax(-1)
        is_best = jax.nn.one_hot(best, remaining.shape[-1], dtype=bool)
        chosen.append(best.astype(jnp.int32))
        chosen_probabilities.append(jnp.where(is_best, probabilities, 0.0).sum(-1))
        remaining = jnp.where(is_best, -jnp.inf, remaining)
    experts, weights = jnp.stack(chosen, axis=-1), jnp.stack(chosen_probabilities, axis=-1)
    if normalized and per_token > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    return experts, weights


def assign_slots(
    experts: Int[Array, "G T k"], is_token: Bool[Array, "G T"], num_experts: int, capacity: int
) -> Routes:
    """Return the slots of tokens that chose these experts; an expert whose slots are taken drops a token.

    Slots are given out in the order of the tokens, all choices of a token before those of the next one. So
    what a token gets depends on those before it alone, which a causal decoder needs. (Lepikhin et al. 2021
    serve the first choices of all tokens before second ones.)
    """
    groups, tokens, per_token = experts.shape
    chosen = experts.reshape(groups, tokens * per_token)
    is_choice = jnp.repeat(is_token, per_token, axis=1)  # padding chooses no expert
    is_chosen = (chosen[:, :, None] == jnp.arange(num_experts)[None, None, :]) & is_choice[:, :, None]
    one_hot = is_chosen.astype(jnp.int32)
    earlier = jnp.cumsum(one_hot, axis=1) - one_hot  # how often each expert was chosen before
    index = (earlier * one_hot).sum(-1)  # among the choices of the same expert
    no_slot = num_experts * capacity
    slot = jnp.where(is_choice & (index < capacity), chosen * capacity + index, no_slot)
    return Routes(
        slot.reshape(groups, tokens, per_token), _invert(slot, no_slot).reshape(groups, num_experts, capacity)
    )


def is_within_capacity(
    experts: Int[Array, "B T k"], segments: Int[Array, "B T"] | None, num_experts: int, capacity: int
) -> Bool[Array, "B T k"]:
    """Return which choices are among the first ``capacity`` of their expert in their text.

    All choices of a token count before those of the next one. ``segments`` int32 [B,T] number the texts of a
    row, each of which counts by itself; None: a row is one text.
    """
    rows, length, per_token = experts.shape
    chosen = jax.nn.one_hot(experts.reshape(rows, -1), num_experts, dtype=jnp.int32)  # [B,Tk,E]
    earlier = jnp.cumsum(chosen, axis=1) - chosen
    if segments is not None:
        is_start = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        is_first_choice = (jnp.arange(per_token) == 0)[None, None, :]
        starts = (is_start[:, :, None] & is_first_choice).reshape(rows, -1, 1)
        # Counts never fall along a row, so that the last one at a start is the largest.
        earlier_at_start = jax.lax.cummax(jnp.where(starts, earlier, 0), axis=1)
        earlier = earlier - earlier_at_start
    return ((earlier * chosen).sum(-1) < capacity).reshape(experts.shape)


def choose_tokens(
    probabilities: Float32[Array, "G T E"], is_token: Bool[Array, "G T"], capacity: int
) -> Routes:
    """Return routes on which each expert takes its likeliest tokens: expert choice (Zhou et al. 2022).

    Here k = E: each expert counts as one choice of the token, and any number of them may take it; the
    weights of their outputs are the ``probabilities``. Every expert reads ``capacity`` tokens, or all of a
    group that has fewer. Which ones depends on the whole group.
    """
    groups, tokens, num_experts = probabilities.shape
    by_expert = jnp.where(is_token[:, :, None], probabilities, -1.0).swapaxes(1, 2)  # [G,E,T]
    best, token = jax.lax.top_k(by_expert, capacity)
    no_choice = tokens * num_experts
    choice = token * num_experts + jnp.arange(num_experts)[None, :, None]
    choice = jnp.where(best < 0, no_choice, choice)
    slot = _invert(choice.reshape(groups, -1), no_choice).reshape(groups, tokens, num_experts)
    return Routes(slot, choice)


def dispatch(x: Float[Array, "G T D"], routes: Routes) -> Float[Array, "G E C D"]:
    """Return the token in each slot of each expert [G,E,C,D]; zeros in empty slots."""
    return _dispatch(x, routes.slot, routes.choice)


def combine(
    outputs: Float[Array, "G E C D"], weights: Float32[Array, "G T k"], routes: Routes
) -> Float[Array, "G T D"]:
    """Return the weighted sum of the outputs of each token's experts [G,T,D].

    It is 0 for a token that all its experts dropped: the residual connection passes it on.
    """
    by_choice = _undispatch(outputs, routes.slot, routes.choice)
    return jnp.einsum("gtkd,gtk->gtd", by_choice, weights.astype(outputs.dtype))


def dense_weights(
    experts: Int[Array, "G T k"], weights: Float32[Array, "G T k"], num_experts: int
) -> Float32[Array, "G T {num_experts}"]:
    """Return the weight of every expert for each token [G,T,E]: 0 for those that it did not choose."""
    return jnp.einsum("gtke,gtk->gte", jax.nn.one_hot(experts, num_experts, dtype=jnp.float32), weights)


def load_balancing_loss(
    probabilities: Float32[Array, "G T E"], experts: Int[Array, "G T k"], is_token: Bool[Array, "G T"]
) -> Float32[Array, " G"]:
    """Return E times the sum over experts of f_i P_i (Fedus et al. 2021, equations 4 to 6).

    f_i is the share of the group's choices that expert i got, before any is dropped, and P_i the mean of its
    probability. The loss is 1 if both are even, and E if all tokens go to one expert with probability 1.
    """
    num_experts = probabilities.shape[-1]
    is_chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32).mean(2)  # [G,T,E]
    share = _mean_over_tokens(is_chosen, is_token)
    return num_experts * (share * _mean_over_tokens(probabilities, is_token)).sum(-1)


def router_z_loss(logits: Float32[Array, "G T E"], is_token: Bool[Array, "G T"]) -> Float32[Array, " G"]:
    """Return the mean over tokens of the squared log-sum-exp of the router's logits [G].

    It keeps the logits small, whose rounding errors in a softmax grow with them (Zoph et al., equation 5).
    """
    return _mean_over_tokens(jnp.square(jax.nn.logsumexp(logits, axis=-1))[..., None], is_token)[:, 0]


def count_dropped(
    slot: Int[Array, "G T k"], is_token: Bool[Array, "G T"], num_slots: int
) -> Float32[Array, " G"]:
    """Return the number of choices [G] in each group that have none of the ``num_slots`` slots."""
    return ((slot >= num_slots) & is_token[:, :, None]).sum((1, 2), dtype=jnp.float32)


def _mean_over_tokens(x: Array, is_token: Array) -> Array:
    """Return the mean [G,E] of x [G,T,E] over tokens; 0 for a group of padding alone."""
    weights = is_token.astype(x.dtype)
    return jnp.einsum("gte,gt->ge", x, weights) / jnp.maximum(weights.sum(1), 1)[:, None]


def _invert(indices: Array, size: int) -> Array:
    """Return the inverse [G,size] of indices [G,N]: at ``indices[n]`` stands n, and N where no index points.

    Indices equal to ``size`` are ignored.
    """
    count = indices.shape[1]

    def invert(row: Array) -> Array:
        return (
            jnp.full((size,), count, jnp.int32).at[row].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        )

    return jax.vmap(invert)(indices)


def _take(x: Array, index: Array) -> Array:
    """Return the vectors [G,M,D] of x [G,N,D] at ``index`` [G,M]; zeros for index N."""
    return jnp.take_along_axis(x, index[:, :, None], axis=1, mode="fill", fill_value=0)


@jax.custom_vjp
def _dispatch(x: Array, slot: Array, choice: Array) -> Array:
    per_token = slot.shape[2]
    return _take(x, choice.reshape(len(x), -1) // per_token).reshape(*choice.shape, x.shape[-1])


@jax.custom_vjp
def _undispatch(outputs: Array, slot: Array, _choice: Array) -> Array:
    """Return the output [G,T,k,D] of the slot of each choice; zeros where it has none."""
    by_slot = outputs.reshape(len(outputs), -1, outputs.shape[-1])
    return _take(by_slot, slot.reshape(len(outputs), -1)).reshape(*slot.shape, outputs.shape[-1])


def _dispatch_forward(x, slot, choice):
    return _dispatch(x, slot, choice), (slot, choice)


def _dispatch_backward(routes, gradient):
    return _undispatch(gradient, *routes).sum(2), None, None


def _undispatch_forward(outputs, slot, choice):
    return _undispatch(outputs, slot, choice), (slot, choice)


def _undispatch_backward(routes, gradient):
    _, choice = routes
    by_choice = gradient.reshape(len(gradient), -1, gradient.shape[-1])
    taken = _take(by_choice, choice.reshape(len(gradient), -1))
    return taken.reshape(*choice.shape, gradient.shape[-1]), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)
_undispatch.defvjp(_undispatch_forward, _undispatch_backward)
