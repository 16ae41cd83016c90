"""Laws of the array functions; what other projects computed with theirs is in test_peer_cases.py."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import ROOT
from scipy.special import softmax

from lm.config.attention import RotaryConfig
from lm.config.decoding import Decoding
from lm.config.layers import AttentionConfig
from lm.config.model import ModelConfig
from lm.evaluate.sampling import next_token
from lm.nn.attention import attention_scale
from lm.ops.attention import attention_weights, bilinear_query
from lm.ops.losses import accuracy, cosine_distance, cross_entropy, soft_cross_entropy
from lm.ops.masks import relative_positions
from lm.ops.positions import AlibiBias, BucketedBias, alibi_slopes, rotate, sinusoids


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_the_written_gradient_of_the_loss_is_the_derived_one():
    logits, targets, weights = (
        random(2, 3, 11),
        jnp.array([[0, 5, 10], [3, 3, 1]]),
        jnp.array([[1, 0.5, 0], [1, 1, 2]]),
    )

    def formula(logits, smoothing=0.1, z=0.01):
        log_p, log_z = jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, -1)
        target = jnp.where(jax.nn.one_hot(targets, 11) > 0, 1 - smoothing, smoothing / 10)
        return ((target * (jnp.log(target) - log_p)).sum(-1) + z * log_z**2).ravel() @ weights.ravel()

    def ours(logits):
        return cross_entropy(logits, targets, weights, z_loss=0.01, label_smoothing=0.1)[0]

    both = jax.jit(lambda logits: [jax.value_and_grad(f)(logits) for f in (ours, formula)])
    for mine, theirs in zip(*both(logits), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def summed_loss(logits, targets, weights, smoothing=0.1):
    return cross_entropy(logits, targets, weights, z_loss=0.01, label_smoothing=smoothing)[0]


summed_loss_and_gradient = jax.jit(jax.value_and_grad(summed_loss))
right_and_total = jax.jit(accuracy)


@pytest.mark.parametrize("outside", [-1, -100, 11, 2**31 - 1])
def test_a_target_outside_the_vocabulary_is_nan_and_without_a_weight_exactly_nothing(outside):
    def found(*arrays):
        return jax.tree.map(np.asarray, summed_loss_and_gradient(*arrays))

    logits, targets, inside = random(2, 3, 11), *np.array([[[0, 5, 10], [3, 3, x]] for x in (outside, 4)])
    ones = np.ones((2, 3), np.float32)
    loss, gradient = found(logits, targets, ones)
    assert np.isnan(loss) and np.isnan(gradient[1, 2]).all() and np.isfinite(gradient[0]).all()
    assert np.isnan(right_and_total(logits, targets, ones)[0])
    weights = ones - (np.arange(6).reshape(2, 3) == 5)
    loss, gradient = found(logits, targets, weights)
    expected = found(logits, inside, weights)
    assert loss == expected[0] and (gradient == expected[1]).all() and (gradient[1, 2] == 0).all()
    assert right_and_total(logits, targets, weights) == right_and_total(logits, inside, weights)


def test_the_loss_against_a_teacher_is_the_cross_entropy_at_the_temperature_times_its_square():
    """The formulas of Hinton et al. 2015 and of DistilBERT's cosine distance, written out in numpy."""
    rng = np.random.default_rng(0)
    (student, teacher), temperature = rng.normal(0, 3, (2, 2, 3, 7)), 2.5
    weights = np.array([[1, 0, 0.5], [0, 2, 0]])
    exponents = (np.exp(x / temperature) for x in (student, teacher))
    q, p = (x / x.sum(-1, keepdims=True) for x in exponents)
    expected = temperature**2 * (-(p * np.log(q)).sum(-1) * weights).sum()
    soft = jax.jit(partial(soft_cross_entropy, temperature=temperature))
    found, total = soft(np.float32(student), np.float32(teacher), weights)
    np.testing.assert_allclose((found, total), (expected, weights.sum()), rtol=1e-5)
    lengths = np.linalg.norm(student, axis=-1) * np.linalg.norm(teacher, axis=-1)
    expected = ((1 - (student * teacher).sum(-1) / lengths) * weights).sum()
    student[0, 1] = 0  # a zero vector whose weight is 0 gives a finite gradient
    distance = jax.jit(jax.value_and_grad(cosine_distance, has_aux=True))
    (found, _), gradient = distance(np.float32(student), np.float32(teacher), weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[weights == 0].any()


def test_a_zero_vector_has_no_direction_and_so_distance_1_and_gradient_0():
    x, teacher, weights = np.zeros((1, 1, 3), np.float32), random(1, 1, 3), np.ones((1, 1), np.float32)
    of_x = jax.jit(jax.value_and_grad(cosine_distance, has_aux=True))
    (distance, _), gradient = of_x(x, teacher, weights)
    assert distance == 1 and not np.asarray(gradient).any()


def test_losses_of_micro_batches_add_up_and_large_logits_stay_finite():
    logits = np.float32(1e4) * np.asarray(random(4, 3, 7))
    targets, weights = np.arange(12).reshape(4, 3) % 7, np.ones((4, 3), np.float32)
    loss = jax.jit(partial(cross_entropy, z_loss=1e-4, label_smoothing=0.0))
    halves = np.array([loss(logits[i : i + 2], targets[i : i + 2], weights[i : i + 2]) for i in (0, 2)])
    np.testing.assert_allclose(halves.sum(0), np.array(loss(logits, targets, weights)), rtol=1e-6)
    assert np.isfinite(halves).all()


def test_accuracy_counts_weights_of_right_positions_and_greedy_takes_the_highest_logit():
    logits, weights = np.eye(4, dtype=np.float32), np.float32([[1, 0.5, 2, 0]])
    right, total = right_and_total(logits[None], np.array([[0, 1, 3, 3]]), weights)
    assert (right, total) == (1.5, 3.5)
    np.testing.assert_array_equal(next_token(Decoding(), jnp.asarray(logits), None), np.arange(4))


def test_a_bilinear_score_is_query_times_weight_times_key():
    query, key, weight = random(1, 3, 2, 4), random(1, 5, 2, 4, seed=1), random(2, 4, 4, seed=2)
    found = jax.jit(lambda *x: attention_weights(bilinear_query(x[0], x[1]), x[2], scale=1.0))
    expected = softmax(np.einsum("btnh,nhg,bsng->bnts", query, weight, key), axis=-1)
    np.testing.assert_allclose(found(query, weight, key), expected, atol=1e-5)
    kinds = "dot", "scaled-dot", "bilinear"
    scales = {
        scores: attention_scale(ModelConfig(attention=AttentionConfig(scores=scores))) for scores in kinds
    }
    assert scales == {"dot": 1.0, "scaled-dot": 1 / 8, "bilinear": 1 / 8}


@pytest.mark.parametrize("layout", ["interleaved", "halves", "tensor2tensor"])
def test_products_of_sinusoids_depend_on_distances_only(layout):
    table = np.asarray(sinusoids(jnp.asarray(np.arange(60)[None]), 16, layout=layout))[0]
    products = table @ table.T
    np.testing.assert_allclose(products[:50, :50], products[10:, 10:], atol=1e-4)
    assert len(np.unique(np.round(products[0], 3))) > 30


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_rotary_scores_depend_on_distances_only_and_the_rest_of_a_head_stays(layout):
    frequencies, factor = RotaryConfig().frequencies(6)
    query, key, places = random(1, 5, 2, 8), random(1, 5, 2, 8, seed=1), np.arange(5)[None]
    turn = jax.jit(lambda x, places: rotate(x, places, frequencies, factor, layout))

    def scores(shift):
        return np.einsum("btnh,bsnh->bnts", *(turn(x, places + shift) for x in (query, key)))

    np.testing.assert_allclose(scores(0), scores(300), atol=1e-4)
    assert abs(scores(0) - np.einsum("btnh,bsnh->bnts", query, key)).max() > 0.1
    low = np.asarray(query).astype(jnp.bfloat16)
    turned = np.asarray(turn(low, places))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned[..., 6:], low[..., 6:])


def test_rotary_pairs_are_rotary_halves_of_permuted_features():
    """Which is why weights of GPT-J and Llama can be turned into each other's layout."""
    frequencies, factor = RotaryConfig().frequencies(6)
    x, places = np.asarray(random(2, 5, 2, 8)), np.arange(3, 8)[None]
    as_halves = [0, 2, 4, 1, 3, 5, 6, 7]  # where the features of neighbouring pairs stand in halves

    @jax.jit
    def both(x, places):
        return [rotate(x, places, frequencies, factor, layout) for layout in ("pairs", "halves")]

    pairs, as_they_are = map(np.asarray, both(x, places))
    _, halves = both(x[..., as_halves], places)
    np.testing.assert_array_equal(pairs[..., as_halves], halves)
    assert not np.array_equal(pairs, as_they_are)


def test_a_rotary_pair_turns_by_its_angle():
    turned = rotate(
        jnp.array([[[[1.0, 0.0, 1.0, 0.0]]]]), jnp.array([[2]]), np.array([1.0, 0.5]), 1.0, "pairs"
    )
    np.testing.assert_allclose(turned.ravel(), [np.cos(2), np.sin(2), np.cos(1), np.sin(1)], atol=1e-6)


# transformers 5.23.0, modeling_rope_utils.ROPE_INIT_FUNCTIONS; of heads 128 wide every eighth frequency.
STRETCHED = [
    (
        16,
        {"scaling": "linear", "factor": 4.0},
        1.0,
        [0.25, 0.079056941, 0.025, 0.0079056947, 0.0025, 0.00079056947, 0.00025, 7.9056947e-05],
    ),
    (
        128,
        {"scaling": "llama3", "base": 5e5, "factor": 32.0, "original_length": 8192},
        1.0,
        [
            1.0,
            0.19392276,
            0.037606031,
            0.0072926651,
            0.00042955671,
            8.5702559e-06,
            1.6619674e-06,
            3.2229329e-07,
        ],
    ),
    (
        128,
        {"scaling": "yarn", "base": 1e6, "factor": 16.0, "original_length": 4096},
        1.2772588722,
        [
            1.0,
            0.17782794,
            0.026681717,
            0.0024016663,
            6.2500003e-05,
            1.1114246e-05,
            1.9764234e-06,
            3.5146334e-07,
        ],
    ),
    (8, {"scaling": "yarn", "factor": 2.0, "original_length": 16}, 1.0693147181, [1.0, 0.05, 0.005, 0.0005]),
    # No feature makes a turn in the original length, or all make more than beta_fast.
    (
        8,
        {"scaling": "yarn", "base": 5.0, "factor": 32.0, "original_length": 2},
        1.3465735903,
        [1.0, 0.66874031, 0.4472136, 0.29906976],
    ),
    (
        8,
        {"scaling": "yarn", "base": 2.0, "factor": 32.0, "original_length": 2048},
        1.3465735903,
        [0.03125, 0.02627801, 0.022097087, 0.018581361],
    ),
]


@pytest.mark.parametrize(("width", "settings", "factor", "expected"), STRETCHED)
def test_rotary_frequencies_are_stretched_as_in_transformers(width, settings, factor, expected):
    found, multiplier = RotaryConfig(**settings).frequencies(width)
    np.testing.assert_allclose(found[:: len(found) // len(expected)], expected, rtol=1e-6)
    assert multiplier == pytest.approx(factor)


def test_alibi_falls_with_distance_by_the_slope_of_each_head():
    bias = AlibiBias(jnp.asarray(alibi_slopes(8))).materialize(2, 3)
    np.testing.assert_array_equal(bias[0, 0], [[0, -0.5, -1], [-0.5, 0, -0.5]])
    np.testing.assert_array_equal(bias[0, 7], bias[0, 0] / 2**7)


@pytest.mark.parametrize("lengths", [(1, 1), (3, 5), (5, 3), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_array_of_a_bucketed_bias_is_its_value_at_each_relative_position(lengths, bidirectional):
    @jax.jit
    def both(table):
        bias = BucketedBias(table, bidirectional, 4)
        return bias.materialize(*lengths), bias.evaluate(relative_positions(*lengths))

    np.testing.assert_array_equal(*both(random(8, 2)))


TIMES = """
import time, jax, jax.numpy as jnp
from lm.ops.attention import AttentionOptions
from lm.ops.kernels.xla import xla_attention

def peer(query, key, value, mask, bias, options):
    return jax.nn.dot_product_attention(query, key, value, bias, mask, scale=options.scale)

def gradient(f):
    return jax.grad(lambda *inputs: (f(*inputs) ** 2).sum(), (0, 1, 2) if bias is None else (0, 1, 2, 4))

query, key, value = (jax.random.normal(jax.random.key(i), (4, 512, 12, 64)) for i in range(3))
lengths = jnp.array([512, 480, 500, 400])
mask = jnp.broadcast_to(jnp.arange(512)[None, None, None, :] < lengths[:, None, None, None], (4, 1, 512, 512))
for bias in (jax.random.normal(jax.random.key(3), (1, 12, 512, 512)), None):  # T5-base; BERT-base
    for derive in (lambda f: f, gradient):
        best = {}
        both = xla_attention, peer
        calls = [jax.jit(derive(lambda *x, f=f: f(*x, AttentionOptions(0.125)))) for f in both]
        for _ in range(9):
            for name, call in zip(("ours", "peer"), calls):
                begin = time.process_time()
                jax.block_until_ready(call(query, key, value, mask, bias))
                best[name] = min(best.get(name, 1e9), time.process_time() - begin)
        print(best["ours"] / best["peer"])
"""


@pytest.mark.slow
def test_attention_takes_no_longer_than_that_of_jax():
    """Processor time, forward and with the backward pass; in a process that optimises, which tests do not."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu"
    }
    root = ROOT
    out = subprocess.run(
        [sys.executable, "-c", TIMES], env=env, cwd=root, check=True, capture_output=True, text=True
    )
    assert max(map(float, out.stdout.split())) < 1.1, out.stdout
