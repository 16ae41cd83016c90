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
    return jax.random.normal(jax.random.key(seed), shape)


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

    for mine, theirs in zip(
        jax.value_and_grad(ours)(logits), jax.value_and_grad(formula)(logits), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def summed_loss(logits, targets, weights, smoothing=0.1):
    return cross_entropy(logits, targets, weights, z_loss=0.01, label_smoothing=smoothing)[0]


@pytest.mark.parametrize("outside", [-1, -100, 11, 2**31 - 1])
def test_a_target_outside_the_vocabulary_is_nan_and_without_a_weight_exactly_nothing(outside):
    logits, targets = random(2, 3, 11), jnp.array([[0, 5, 10], [3, 3, outside]])
    both = jax.value_and_grad(summed_loss)
    loss, gradient = both(logits, targets, jnp.ones((2, 3)))
    assert jnp.isnan(loss) and jnp.isnan(gradient[1, 2]).all() and jnp.isfinite(gradient[0]).all()
    assert jnp.isnan(accuracy(logits, targets, jnp.ones((2, 3)))[0])
    weights = jnp.ones((2, 3)).at[1, 2].set(0)
    loss, gradient = both(logits, targets, weights)
    expected = both(logits, targets.at[1, 2].set(4), weights)
    assert loss == expected[0] and (gradient == expected[1]).all() and (gradient[1, 2] == 0).all()
    assert accuracy(logits, targets, weights) == accuracy(logits, targets.at[1, 2].set(4), weights)


def test_the_loss_against_a_teacher_is_the_cross_entropy_at_the_temperature_times_its_square():
    """The formulas of Hinton et al. 2015 and of DistilBERT's cosine distance, written out in numpy."""
    rng = np.random.default_rng(0)
    (student, teacher), temperature = rng.normal(0, 3, (2, 2, 3, 7)), 2.5
    weights = np.array([[1, 0, 0.5], [0, 2, 0]])
    exponents = (np.exp(x / temperature) for x in (student, teacher))
    q, p = (x / x.sum(-1, keepdims=True) for x in exponents)
    expected = temperature**2 * (-(p * np.log(q)).sum(-1) * weights).sum()
    found, total = soft_cross_entropy(
        jnp.float32(student), jnp.float32(teacher), weights, temperature=temperature
    )
    np.testing.assert_allclose((found, total), (expected, weights.sum()), rtol=1e-5)
    lengths = np.linalg.norm(student, axis=-1) * np.linalg.norm(teacher, axis=-1)
    expected = ((1 - (student * teacher).sum(-1) / lengths) * weights).sum()
    student[0, 1] = 0  # a zero vector whose weight is 0 gives a finite gradient
    distance = partial(cosine_distance, teacher_x=jnp.float32(teacher), weights=weights)
    (found, _), gradient = jax.value_and_grad(distance, has_aux=True)(jnp.float32(student))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.isfinite(gradient).all() and not gradient[weights == 0].any()


def test_a_zero_vector_has_no_direction_and_so_distance_1_and_gradient_0():
    x, teacher, weights = jnp.zeros((1, 1, 3)), random(1, 1, 3), jnp.ones((1, 1))
    (distance, _), gradient = jax.value_and_grad(cosine_distance, has_aux=True)(x, teacher, weights)
    assert distance == 1 and not gradient.any()


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
    np.testing.assert_array_equal(next_token(Decoding(), logits[0], None), jnp.arange(4))


def test_a_bilinear_score_is_query_times_weight_times_key():
    query, key, weight = random(1, 3, 2, 4), random(1, 5, 2, 4, seed=1), random(2, 4, 4, seed=2)
    found = attention_weights(bilinear_query(query, weight), key, scale=1.0)
    np.testing.assert_allclose(
        found, jax.nn.softmax(jnp.einsum("btnh,nhg,bsng->bnts", query, weight, key)), atol=1e-5
    )
    kinds = "dot", "scaled-dot", "bilinear"
    scales = {
        scores: attention_scale(ModelConfig(attention=AttentionConfig(scores=scores))) for scores in kinds
    }
    assert scales == {"dot": 1.0, "scaled-dot": 1 / 8, "bilinear": 1 / 8}


@pytest.mark.parametrize("layout", ["interleaved", "halves", "tensor2tensor"])
def test_products_of_sinusoids_depend_on_distances_only(layout):
    table = sinusoids(jnp.arange(60)[None], 16, layout=layout)[0]
    products = table @ table.T
    np.testing.assert_allclose(products[:50, :50], products[10:, 10:], atol=1e-4)
    assert len(np.unique(np.round(products[0], 3))) > 30


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_rotary_scores_depend_on_distances_only_and_the_rest_of_a_head_stays(layout):
    frequencies, factor = RotaryConfig().frequencies(6)
    query, key, places = random(1, 5, 2, 8), random(1, 5, 2, 8, seed=1), jnp.arange(5)[None]

    def scores(shift):
        turned = (rotate(x, places + shift, frequencies, factor, layout) for x in (query, key))
        return jnp.einsum("btnh,bsnh->bnts", *turned)

    np.testing.assert_allclose(scores(0), scores(300), atol=1e-4)
    assert abs(scores(0) - jnp.einsum("btnh,bsnh->bnts", query, key)).max() > 0.1
    turned = rotate(query.astype(jnp.bfloat16), places, frequencies, factor, layout)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned[..., 6:], query.astype(jnp.bfloat16)[..., 6:])


def test_rotary_pairs_are_rotary_halves_of_permuted_features():
    """Which is why weights of GPT-J and Llama can be turned into each other's layout."""
    frequencies, factor = RotaryConfig().frequencies(6)
    x, places = random(2, 5, 2, 8), jnp.arange(3, 8)[None]
    as_halves = [0, 2, 4, 1, 3, 5, 6, 7]  # where the features of neighbouring pairs stand in halves
    pairs = rotate(x, places, frequencies, factor, "pairs")
    halves = rotate(x[..., as_halves], places, frequencies, factor, "halves")
    np.testing.assert_array_equal(pairs[..., as_halves], halves)
    assert not np.array_equal(pairs, rotate(x, places, frequencies, factor, "halves"))


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
    bias = BucketedBias(random(8, 2), bidirectional, 4)
    expected = bias.evaluate(relative_positions(*lengths))
    np.testing.assert_array_equal(bias.materialize(*lengths), expected)


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
