"""Array functions against the numbers of other implementations (shared/parity/peer_cases.json), and laws."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.ops import masks
from lm.ops.attention import dot_product_attention
from lm.ops.losses import accuracy, cross_entropy
from lm.ops.positions import relative_position_bucket
from lm.ops.sampling import greedy

PEERS = Path(__file__).parents[1].parent / "shared" / "parity" / "peer_cases.json"


def cases(function):
    found = json.loads(PEERS.read_text())["cases"] if PEERS.exists() else []
    found = [pytest.param(case["args"], case["expected"], id=case["id"]) for case in found if case["fn"] == function]
    return found or [pytest.param(None, None, marks=pytest.mark.skip("shared/parity is not here"))]


@pytest.mark.parametrize(("args", "expected"), cases("relative_position_bucket"))
def test_relative_buckets_are_exactly_those_of_the_peers(args, expected):
    low, high = args.pop("relative_position")
    np.testing.assert_array_equal(relative_position_bucket(jnp.arange(low, high + 1), **args), expected)


@pytest.mark.parametrize(("args", "expected"), cases("t5x.layers.make_decoder_mask"))
def test_decoder_masks_are_those_of_the_peer(args, expected):
    tokens = jnp.array(args["decoder_target_tokens"])
    segments = jnp.array(args.get("decoder_segment_ids", tokens > 0)).astype(jnp.int32)
    mask = masks.causal(tokens.shape[1])
    if "decoder_causal_attention" in args:
        mask |= masks.prefix(jnp.array(args["decoder_causal_attention"]))
    np.testing.assert_array_equal((mask & masks.same_segment(segments, segments))[:, None], expected)


@pytest.mark.parametrize(("args", "expected"), cases("attention"))
def test_attention_is_that_of_the_peers(args, expected):
    query, key, value = (jnp.array(args[name]).swapaxes(1, 2) for name in "qkv")
    mask = None if args["mask"] is None else jnp.array(args["mask"])[:, 0] > 0
    bias = None if args["bias"] is None else jnp.array(args["bias"])
    scale = query.shape[-1] ** -0.5 if args["scale"] == "head_dim**-0.5" else args["scale"]
    out = dot_product_attention(query, key, value, mask, bias, scale=scale)
    np.testing.assert_allclose(out.swapaxes(1, 2), expected, atol=1e-5)


@pytest.mark.parametrize(("args", "expected"), cases("t5x.losses.compute_weighted_cross_entropy"))
def test_loss_and_its_gradient_are_those_of_the_peer(args, expected):
    logits, targets, weights = (jnp.array(args[name]) for name in ("logits", "targets", "weights"))
    loss = partial(cross_entropy, z_loss=args["z_loss"], label_smoothing=args["label_smoothing"])
    for name, value in zip(("loss", "weight_sum", "z_loss"), loss(logits, targets, weights), strict=True):
        np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-5)
    gradient = jax.grad(lambda logits: loss(logits, targets, weights)[0])(logits)
    np.testing.assert_allclose(gradient, expected["grad_logits"], atol=2e-5)


@pytest.mark.parametrize(("args", "expected"), cases("cross_entropy"))
def test_mean_loss_and_its_gradient_are_those_of_the_peer(args, expected):
    labels = jnp.array(args["labels"])

    def mean(logits):
        total, count, _ = cross_entropy(logits, labels.clip(0), labels >= 0, z_loss=0.0, label_smoothing=0.0)
        return total / count

    loss, gradient = jax.value_and_grad(mean)(jnp.array(args["logits"]))
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-6)
    np.testing.assert_allclose(gradient, expected["grad"], atol=1e-6)


def random(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def test_the_written_gradient_of_the_loss_is_the_derived_one():
    logits, targets, weights = random(2, 3, 11), jnp.array([[0, 5, 10], [3, 3, 1]]), jnp.array([[1, 0.5, 0], [1, 1, 2]])

    def formula(logits, smoothing=0.1, z=0.01):
        log_p, log_z = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, -1)
        target = jnp.where(jax.nn.one_hot(targets, 11) > 0, 1 - smoothing, smoothing / 10)
        return ((target * (jnp.log(target) - log_p)).sum(-1) + z * log_z**2).ravel() @ weights.ravel()

    def ours(logits):
        return cross_entropy(logits, targets, weights, z_loss=0.01, label_smoothing=0.1)[0]

    for mine, theirs in zip(jax.value_and_grad(ours)(logits), jax.value_and_grad(formula)(logits), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_losses_of_micro_batches_add_up_and_large_logits_stay_finite():
    logits, targets, weights = 1e4 * random(4, 3, 7), jnp.arange(12).reshape(4, 3) % 7, jnp.ones((4, 3))
    loss = partial(cross_entropy, z_loss=1e-4, label_smoothing=0.0)
    halves = [loss(logits[i : i + 2], targets[i : i + 2], weights[i : i + 2]) for i in (0, 2)]
    np.testing.assert_allclose(jnp.array(halves).sum(0), jnp.array(loss(logits, targets, weights)), rtol=1e-6)
    assert jnp.isfinite(jnp.array(halves)).all()


def test_accuracy_counts_weights_of_right_positions_and_greedy_takes_the_highest_logit():
    logits, weights = jnp.eye(4)[None], jnp.array([[1, 0.5, 2, 0]])
    right, total = accuracy(logits, jnp.array([[0, 1, 3, 3]]), weights)
    assert (right, total) == (1.5, 3.5)
    np.testing.assert_array_equal(greedy(logits[0], None), jnp.arange(4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(dtype):
    query, key, value = (random(2, 3, 4, 8, seed=i).astype(dtype) for i in range(3))
    mask = jnp.ones((2, 3, 3), bool).at[1, 2].set(False)

    def out(*inputs):
        return dot_product_attention(*inputs, mask)

    assert (out(query, key, value)[1, 2] == 0).all()
    assert (out(query, key, value)[1, 1] != 0).all()
    gradients = jax.grad(lambda *inputs: out(*inputs).astype(jnp.float32).sum(), argnums=(0, 1, 2))(query, key, value)
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert (gradients[0][1, 2] == 0).all()


def test_grouped_heads_are_repeated_heads_and_dropped_keys_are_dropped_values():
    query, key, value, bias = (
        random(2, 5, 6, 4),
        random(2, 7, 2, 4, seed=1),
        random(2, 7, 2, 4, seed=2),
        random(1, 6, 5, 7),
    )
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, (2, 6, 1, 7)) * 2.0
    grouped = dot_product_attention(query, key, value, None, bias, keep=keep)
    key, value = (jnp.repeat(x, 3, axis=2) for x in (key, value))
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) + bias)
    expected = jnp.einsum("bnts,bsnh->btnh", weights, value * keep[:, :, 0].swapaxes(1, 2)[..., None])
    np.testing.assert_allclose(grouped, expected, atol=1e-5)


def test_attention_weights_are_computed_in_float32_when_activations_are_not():
    query, key, value = (random(1, 64, 2, 16, seed=i).astype(jnp.bfloat16) for i in range(3))
    exact = dot_product_attention(*(x.astype(jnp.float32) for x in (query, key, value)))
    low = dot_product_attention(query, key, value)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), exact, atol=2e-2)


def test_masks_print_as_they_should():
    segments = jnp.array([[1, 1, 2, 0]])
    mask = (masks.causal(4) | masks.prefix(jnp.array([[1, 1, 0, 0]]))) & masks.same_segment(segments, segments)
    np.testing.assert_array_equal(mask[0], [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    assert masks.fully_visible(2, 3).shape == (1, 2, 3)
    assert masks.fully_visible(2, 3).all()
