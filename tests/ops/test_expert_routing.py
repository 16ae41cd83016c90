"""Laws of the routing of tokens to experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
IS_TOKEN = jnp.arange(TOKENS)[None, :] < jnp.array([TOKENS, 7, 4])[:, None]
WHOLE = jnp.ones((GROUPS, TOKENS), bool)


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


LOGITS = 2 * random(GROUPS, TOKENS, EXPERTS)
PROBABILITIES = jax.nn.softmax(LOGITS)
X = random(GROUPS, TOKENS, WIDTH, seed=1)
MATRICES = random(EXPERTS, WIDTH, WIDTH, seed=2)


def routed(per_token, capacity, is_token=IS_TOKEN, probabilities=PROBABILITIES):
    experts, weights = choose_experts(probabilities, probabilities, per_token, normalized=True)
    return experts, weights, assign_slots(experts, is_token, EXPERTS, capacity)


def mixed(x, weights, routes, matrices=MATRICES):
    return combine(jnp.einsum("gecd,edf->gecf", dispatch(x, routes), matrices), weights, routes)


@pytest.mark.parametrize("capacity", [1, 3, 10])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_no_expert_exceeds_its_capacity_and_no_token_its_number_of_experts(per_token, capacity):
    experts, _, routes = routed(per_token, capacity)
    slot, choice = map(np.asarray, routes)
    for group in range(GROUPS):
        taken = slot[group][slot[group] < EXPERTS * capacity]
        assert len(set(taken)) == len(taken)  # a slot has one token
        assert (np.bincount(taken // capacity, minlength=EXPERTS) <= capacity).all()
        for token in range(TOKENS):
            own = slot[group, token][slot[group, token] < EXPERTS * capacity] // capacity
            assert len(set(own)) == len(own) <= per_token
            assert set(own) <= set(np.asarray(experts[group, token]))
        assert (choice[group] < TOKENS * per_token).sum() == len(taken)
        full = choice[group].reshape(-1)
        assert all(slot[group].reshape(-1)[full[place]] == place for place in taken)


@pytest.mark.parametrize("per_token", [1, 2])
def test_padding_takes_no_capacity(per_token):
    _, weights, routes = routed(per_token, 2)
    found = mixed(X, weights, routes)
    for group, length in enumerate(IS_TOKEN.sum(1).tolist()):
        one = jnp.ones((1, length), bool)
        _, weights, routes = routed(per_token, 2, one, PROBABILITIES[group : group + 1, :length])
        alone = mixed(X[group : group + 1, :length], weights, routes)
        np.testing.assert_allclose(found[group, :length], alone[0], atol=1e-5)
        assert (found[group, length:] == 0).all()
    # The padding may also come first.
    experts = choose_experts(PROBABILITIES, PROBABILITIES, per_token, True)[0]
    slots = assign_slots(experts, ~IS_TOKEN, EXPERTS, 1).slot
    assert (slots[1, 7] < EXPERTS).all() and (slots[1, :7] == EXPERTS).all()


@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_with_room_for_all_a_token_gets_the_weighted_sum_of_its_experts(per_token):
    experts, weights, routes = routed(per_token, TOKENS, WHOLE)
    outputs = jnp.einsum("gtd,edf->gtef", X, MATRICES)
    formula = jnp.einsum("gtef,gte->gtf", outputs, dense_weights(experts, weights, EXPERTS))
    np.testing.assert_allclose(mixed(X, weights, routes), formula, atol=1e-4)
    assert (count_dropped(routes.slot, WHOLE, EXPERTS * TOKENS) == 0).all()


def test_weights_are_probabilities_or_sum_to_one_unless_there_is_one():
    np.testing.assert_allclose(choose_experts(PROBABILITIES, PROBABILITIES, 2, True)[1].sum(-1), 1, atol=1e-6)
    for per_token, normalized in ((1, True), (2, False)):
        experts, weights = choose_experts(PROBABILITIES, PROBABILITIES, per_token, normalized)
        np.testing.assert_allclose(weights, jnp.take_along_axis(PROBABILITIES, experts, axis=-1))


@pytest.mark.parametrize("per_token", [1, 2])
def test_a_choice_depends_on_no_later_token(per_token):
    _, weights, routes = routed(per_token, 4, WHOLE)
    changed = PROBABILITIES.at[:, 6:].set(PROBABILITIES[:, :4])
    _, other_weights, other = routed(per_token, 4, WHOLE, changed)
    before, after = mixed(X, weights, routes), mixed(X, other_weights, other)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any()


def test_the_order_of_experts_changes_nothing():
    order = jnp.array([2, 0, 3, 1])
    _, weights, routes = routed(2, 3)
    _, other_weights, other = routed(2, 3, probabilities=PROBABILITIES[:, :, order])
    found = mixed(X, other_weights, other, MATRICES[order])
    np.testing.assert_allclose(found, mixed(X, weights, routes), atol=1e-5)
    experts = [choose_experts(p, p, 2, True)[0] for p in (PROBABILITIES, PROBABILITIES[:, :, order])]
    losses = [
        load_balancing_loss(p, chosen, IS_TOKEN)
        for p, chosen in zip((PROBABILITIES, PROBABILITIES[:, :, order]), experts, strict=True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("kind", ["token choice", "expert choice"])
def test_gradients_are_those_of_products_with_one_hot_arrays(kind):
    if kind == "token choice":
        _, weights, routes = routed(2, 2)
    else:
        routes, weights = choose_tokens(PROBABILITIES, IS_TOKEN, 3), PROBABILITIES
    places = jax.nn.one_hot(routes.slot, routes.choice[0].size)  # [G,T,k,E*C]

    def by_gathers(x, weights, matrices):
        return jnp.sin(mixed(x, weights, routes, matrices)).sum()

    def by_products(x, weights, matrices):
        slots = jnp.einsum("gtd,gtkn->gnd", x, places).reshape(*routes.choice.shape, -1)
        outputs = jnp.einsum("gecd,edf->gecf", slots, matrices).reshape(GROUPS, -1, WIDTH)
        return jnp.sin(jnp.einsum("gnd,gtkn,gtk->gtd", outputs, places, weights)).sum()

    arguments = X, weights, MATRICES
    found, due = (jax.value_and_grad(f, (0, 1, 2))(*arguments) for f in (by_gathers, by_products))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(due), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_in_expert_choice_every_expert_reads_its_likeliest_tokens_and_no_padding():
    routes = choose_tokens(PROBABILITIES, IS_TOKEN, 3)
    for group, length in enumerate(IS_TOKEN.sum(1).tolist()):
        for expert in range(EXPERTS):
            tokens = np.asarray(routes.choice[group, expert]) // EXPERTS
            due = np.argsort(-np.asarray(PROBABILITIES[group, :length, expert]))[:3]
            assert set(tokens) - {TOKENS} == set(due)
    few = choose_tokens(PROBABILITIES, jnp.arange(TOKENS)[None, :] < jnp.full((GROUPS, 1), 2), 3)
    assert (few.choice[:, :, 2] == TOKENS * EXPERTS).all()  # empty


def test_an_even_router_has_the_least_balancing_loss_and_one_that_collapsed_the_most():
    even = jnp.full((1, EXPERTS, EXPERTS), 1 / EXPERTS)
    whole = jnp.ones((1, EXPERTS), bool)

    def loss(probabilities, experts):
        return float(load_balancing_loss(probabilities, experts, whole)[0])

    spread = jnp.arange(EXPERTS)[None, :, None]
    assert loss(even, spread) == pytest.approx(1)
    assert loss(jax.nn.one_hot(jnp.zeros((1, EXPERTS), int), EXPERTS), 0 * spread) == pytest.approx(EXPERTS)
    # Its gradient takes probability from experts that have more than their share of tokens.
    skewed = jnp.array([[[0], [0], [0], [1]]])
    gradient = jax.grad(lambda p: load_balancing_loss(p, skewed, whole).sum())(even)
    assert (gradient[0, 0, :2] > gradient[0, 0, 2:].max()).all() and gradient[0, 0, 0] > gradient[0, 0, 1]
    assert all(loss(jax.nn.softmax(random(1, 4, 4, seed=k)), spread) > 0.99 for k in range(5))


def test_losses_of_a_router_are_means_over_tokens_without_padding():
    experts, _ = choose_experts(PROBABILITIES, PROBABILITIES, 2, True)
    for group, length in enumerate(IS_TOKEN.sum(1).tolist()):
        alone, one = slice(group, group + 1), jnp.ones((1, length), bool)
        due = load_balancing_loss(PROBABILITIES[alone, :length], experts[alone, :length], one)
        found = load_balancing_loss(PROBABILITIES, experts, IS_TOKEN)[alone]
        np.testing.assert_allclose(found, due, rtol=1e-5)
        log_sum = np.log(np.exp(np.asarray(LOGITS[group, :length])).sum(-1))
        np.testing.assert_allclose(router_z_loss(LOGITS, IS_TOKEN)[group], (log_sum**2).mean(), rtol=1e-5)
    nothing = jnp.zeros_like(IS_TOKEN)
    assert (load_balancing_loss(PROBABILITIES, experts, nothing) == 0).all()


def test_dropped_choices_are_those_beyond_the_capacity():
    one = jnp.zeros((GROUPS, TOKENS, 1), int)  # all choose the first expert
    slots = assign_slots(one, IS_TOKEN, EXPERTS, 3).slot
    assert count_dropped(slots, IS_TOKEN, EXPERTS * 3).tolist() == [7, 4, 1]


def test_capacity_is_the_even_share_times_the_factor():
    assert expert_capacity(100, 10, 1.25) == 13  # 12.5 rounded up
    assert expert_capacity(100, 10, 0.01) == 1 and expert_capacity(100, 2, 5.0) == 100
