"""Laws of the routing of tokens to experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from lm.ops.experts import (
    assign_slots,
    choose_experts,
    choose_tokens,
    combine,
    count_dropped,
    dense_weights,
    dispatch,
    expert_capacity,
    load_balancing_loss,
    router_z_loss,
)

GROUPS, TOKENS, EXPERTS, WIDTH = 3, 10, 4, 5
IS_TOKEN = np.arange(TOKENS) < np.array([TOKENS, 7, 4])[:, None]
WHOLE = np.ones((GROUPS, TOKENS), bool)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


LOGITS = 2 * random(GROUPS, TOKENS, EXPERTS)
PROBABILITIES = softmax(LOGITS, axis=-1)
X = random(GROUPS, TOKENS, WIDTH, seed=1)
MATRICES = random(EXPERTS, WIDTH, WIDTH, seed=2)

# compiled whole: operation by operation each would be a program of its own, for each shape
choose = jax.jit(choose_experts, static_argnums=(2, 3))
choose_by_experts = jax.jit(choose_tokens, static_argnums=2)
assign = jax.jit(assign_slots, static_argnums=(2, 3))
dropped = jax.jit(count_dropped, static_argnums=2)
balancing_loss = jax.jit(load_balancing_loss)
z_loss = jax.jit(router_z_loss)


@partial(jax.jit, static_argnums=(0, 1))
def route(per_token, capacity, is_token, probabilities):
    experts, weights = choose_experts(probabilities, probabilities, per_token, normalized=True)
    return experts, weights, assign_slots(experts, is_token, EXPERTS, capacity)


def routed(per_token, capacity, is_token=IS_TOKEN, probabilities=PROBABILITIES):
    return route(per_token, capacity, is_token, probabilities)


@jax.jit
def mix(x, weights, routes, matrices):
    return combine(jnp.einsum("gecd,edf->gecf", dispatch(x, routes), matrices), weights, routes)


def mixed(x, weights, routes, matrices=MATRICES):
    return mix(x, weights, routes, matrices)


@pytest.mark.parametrize("capacity", [1, 3, 10])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_no_expert_exceeds_its_capacity_and_no_token_its_number_of_experts(per_token, capacity):
    experts, _, routes = routed(per_token, capacity)
    experts, slot, choice = map(np.asarray, (experts, *routes))
    for group in range(GROUPS):
        taken = slot[group][slot[group] < EXPERTS * capacity]
        assert len(set(taken)) == len(taken)  # a slot has one token
        assert (np.bincount(taken // capacity, minlength=EXPERTS) <= capacity).all()
        for token in range(TOKENS):
            own = slot[group, token][slot[group, token] < EXPERTS * capacity] // capacity
            assert len(set(own)) == len(own) <= per_token
            assert set(own) <= set(experts[group, token])
        assert (choice[group] < TOKENS * per_token).sum() == len(taken)
        full = choice[group].reshape(-1)
        assert all(slot[group].reshape(-1)[full[place]] == place for place in taken)


@pytest.mark.parametrize("per_token", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_padding_takes_no_capacity(per_token):
    _, weights, routes = routed(per_token, 2)
    found = np.asarray(mixed(X, weights, routes))
    for group, length in enumerate(IS_TOKEN.sum(1).tolist()):
        one = np.ones((1, length), bool)
        _, weights, routes = routed(per_token, 2, one, PROBABILITIES[group : group + 1, :length])
        alone = mixed(X[group : group + 1, :length], weights, routes)
        np.testing.assert_allclose(found[group, :length], np.asarray(alone)[0], atol=1e-5)
        assert (found[group, length:] == 0).all()
    # The padding may also come first.
    experts = choose(PROBABILITIES, PROBABILITIES, per_token, True)[0]
    slots = np.asarray(assign(experts, ~IS_TOKEN, EXPERTS, 1).slot)
    assert (slots[1, 7] < EXPERTS).all() and (slots[1, :7] == EXPERTS).all()


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_with_room_for_all_a_token_gets_the_weighted_sum_of_its_experts(per_token):
    experts, weights, routes = routed(per_token, TOKENS, WHOLE)
    outputs = np.einsum("gtd,edf->gtef", X, MATRICES)
    of_all = jax.jit(dense_weights, static_argnums=2)(experts, weights, EXPERTS)
    formula = np.einsum("gtef,gte->gtf", outputs, of_all)
    np.testing.assert_allclose(mixed(X, weights, routes), formula, atol=1e-4)
    assert not np.asarray(dropped(routes.slot, WHOLE, EXPERTS * TOKENS)).any()


def test_weights_are_probabilities_or_sum_to_one_unless_there_is_one():
    weights = np.asarray(choose(PROBABILITIES, PROBABILITIES, 2, True)[1])
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    for per_token, normalized in ((1, True), (2, False)):
        experts, weights = choose(PROBABILITIES, PROBABILITIES, per_token, normalized)
        np.testing.assert_allclose(weights, np.take_along_axis(PROBABILITIES, np.asarray(experts), axis=-1))


@pytest.mark.parametrize("per_token", [1, 2])
def test_a_choice_depends_on_no_later_token(per_token):
    _, weights, routes = routed(per_token, 4, WHOLE)
    changed = np.concatenate([PROBABILITIES[:, :6], PROBABILITIES[:, :4]], axis=1)
    _, other_weights, other = routed(per_token, 4, WHOLE, changed)
    before, after = (np.asarray(mixed(X, *each)) for each in ((weights, routes), (other_weights, other)))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any()


def test_the_order_of_experts_changes_nothing():
    order = np.array([2, 0, 3, 1])
    _, weights, routes = routed(2, 3)
    _, other_weights, other = routed(2, 3, probabilities=PROBABILITIES[:, :, order])
    found = mixed(X, other_weights, other, MATRICES[order])
    np.testing.assert_allclose(found, mixed(X, weights, routes), atol=1e-5)
    experts = [choose(p, p, 2, True)[0] for p in (PROBABILITIES, PROBABILITIES[:, :, order])]
    losses = [
        balancing_loss(p, chosen, IS_TOKEN)
        for p, chosen in zip((PROBABILITIES, PROBABILITIES[:, :, order]), experts, strict=True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("kind", ["token choice", "expert choice"])
def test_gradients_are_those_of_products_with_one_hot_arrays(kind):
    if kind == "token choice":
        _, weights, routes = routed(2, 2)
    else:
        routes, weights = choose_by_experts(PROBABILITIES, IS_TOKEN, 3), PROBABILITIES
    slots_of_group = np.arange(np.prod(routes.choice.shape[1:]))
    places = (np.asarray(routes.slot)[..., None] == slots_of_group).astype(np.float32)  # [G,T,k,E*C]

    def by_gathers(x, weights, matrices):
        return jnp.sin(mixed(x, weights, routes, matrices)).sum()

    def by_products(x, weights, matrices):
        slots = jnp.einsum("gtd,gtkn->gnd", x, places).reshape(*routes.choice.shape, -1)
        outputs = jnp.einsum("gecd,edf->gecf", slots, matrices).reshape(GROUPS, -1, WIDTH)
        return jnp.sin(jnp.einsum("gnd,gtkn,gtk->gtd", outputs, places, weights)).sum()

    @jax.jit
    def both(*arguments):
        return [jax.value_and_grad(f, (0, 1, 2))(*arguments) for f in (by_gathers, by_products)]

    found, due = both(X, weights, MATRICES)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(due), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_in_expert_choice_every_expert_reads_its_likeliest_tokens_and_no_padding():
    choice = np.asarray(choose_by_experts(PROBABILITIES, IS_TOKEN, 3).choice)
    for group, length in enumerate(IS_TOKEN.sum(1).tolist()):
        for expert in range(EXPERTS):
            tokens = choice[group, expert] // EXPERTS
            due = np.argsort(-PROBABILITIES[group, :length, expert])[:3]
            assert set(tokens) - {TOKENS} == set(due)
    two = np.tile(np.arange(TOKENS) < 2, (GROUPS, 1))
    few = np.asarray(choose_by_experts(PROBABILITIES, two, 3).choice)
    assert (few[:, :, 2] == TOKENS * EXPERTS).all()  # empty


def test_an_even_router_has_the_least_balancing_loss_and_one_that_collapsed_the_most():
    even = np.full((1, EXPERTS, EXPERTS), 1 / EXPERTS, np.float32)
    whole = np.ones((1, EXPERTS), bool)

    def loss(probabilities, experts):
        return float(balancing_loss(probabilities, experts, whole)[0])

    spread = np.arange(EXPERTS)[None, :, None]
    collapsed = np.tile(np.eye(EXPERTS, dtype=np.float32)[0], (1, EXPERTS, 1))
    assert loss(even, spread) == pytest.approx(1)
    assert loss(collapsed, 0 * spread) == pytest.approx(EXPERTS)
    # Its gradient takes probability from experts that have more than their share of tokens.
    skewed = np.array([[[0], [0], [0], [1]]])
    of_loss = jax.jit(
        jax.grad(lambda p: load_balancing_loss(p, jnp.asarray(skewed), jnp.asarray(whole)).sum())
    )
    gradient = np.asarray(of_loss(even))
    assert (gradient[0, 0, :2] > gradient[0, 0, 2:].max()).all() and gradient[0, 0, 0] > gradient[0, 0, 1]
    assert all(loss(softmax(random(1, 4, 4, seed=k), axis=-1), spread) > 0.99 for k in range(5))


def test_losses_of_a_router_are_means_over_tokens_without_padding():
    experts = np.asarray(choose(PROBABILITIES, PROBABILITIES, 2, True)[0])
    losses, z_losses = balancing_loss(PROBABILITIES, experts, IS_TOKEN), z_loss(LOGITS, IS_TOKEN)
    for group, length in enumerate(IS_TOKEN.sum(1).tolist()):
        alone, one = slice(group, group + 1), np.ones((1, length), bool)
        due = balancing_loss(PROBABILITIES[alone, :length], experts[alone, :length], one)
        np.testing.assert_allclose(np.asarray(losses)[alone], due, rtol=1e-5)
        log_sum = np.log(np.exp(LOGITS[group, :length]).sum(-1))
        np.testing.assert_allclose(np.asarray(z_losses)[group], (log_sum**2).mean(), rtol=1e-5)
    assert not np.asarray(balancing_loss(PROBABILITIES, experts, np.zeros_like(IS_TOKEN))).any()


def test_dropped_choices_are_those_beyond_the_capacity():
    one = np.zeros((GROUPS, TOKENS, 1), int)  # all choose the first expert
    slots = assign(one, IS_TOKEN, EXPERTS, 3).slot
    assert dropped(slots, IS_TOKEN, EXPERTS * 3).tolist() == [7, 4, 1]


def test_capacity_is_the_even_share_times_the_factor():
    assert expert_capacity(100, 10, 1.25) == 13  # 12.5 rounded up
    assert expert_capacity(100, 10, 1.1) == 11  # and not 12, though 100 * 1.1 is 110.00000000000001
    assert expert_capacity(100, 10, 0.01) == 1 and expert_capacity(100, 2, 5.0) == 100
