"""Attention: the formula as the papers have it, and every implementation equal to it."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax

from lm.config.base import SettingError
from lm.config.layers import AttentionConfig, PositionsConfig
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig
from lm.nn.attention import Attention
from lm.nn.attention_dispatch import IMPLEMENTATIONS, Implementation, attend, choose_implementation
from lm.nn.attention_inputs import AttentionInputs
from lm.nn.cache import KeyValue
from lm.ops.attention import (
    AttentionOptions,
    attention_logits,
    attention_weights,
    multi_head_attention,
    scaled_dot_product_attention,
)
from lm.ops.kernels import cudnn, flash, short_rows, xla
from lm.ops.kernels.flash import FlashAttention
from lm.ops.kernels.short_rows import ShortRowsAttention
from lm.ops.kernels.tile_sweep import BACKENDS
from lm.ops.kernels.xla import xla_attention
from lm.ops.masks import AttentionMask, MaskSpec, Window, key_segments, materialize_mask
from lm.ops.positions import AlibiBias, BucketedBias, materialize_bias
from lm.sharding import make_mesh

ROWS, LENGTH, KEY_LENGTH, HEADS, WIDTH = 2, 21, 28, 4, 8  # neither length is a multiple of a tile
SEGMENTS = jnp.array([[1] * 8 + [2] * 9 + [0] * 4, [1] * 16 + [2] * 5])
KEY_SEGMENTS = jnp.array([[1] * 5 + [2] * 19 + [0] * 4, [1] * 20 + [3] * 8])  # the last queries see nothing
IDS = {"segment": SEGMENTS}, {"segment": key_segments(KEY_SEGMENTS)}


class Case(NamedTuple):
    """One line of the table: what differs from plain attention of four heads in float32."""

    key_heads: int = HEADS
    value_width: int = WIDTH
    mask: AttentionMask | None = None
    bias: str = "none"
    options: AttentionOptions = AttentionOptions()
    dropout: bool = False
    dtype: str = "float32"


CASES = {
    "plain": Case(),
    "grouped heads": Case(key_heads=2),
    "one key head": Case(key_heads=1),
    "narrow values": Case(value_width=4),
    "causal": Case(mask=AttentionMask({}, {}, MaskSpec(causal=True))),
    "window": Case(mask=AttentionMask({}, {}, MaskSpec(causal=True, window=Window(4, 2)))),
    "rows that see nothing": Case(mask=AttentionMask(*IDS, MaskSpec()), key_heads=2),
    "T5's bias": Case(bias="bucketed", options=AttentionOptions(scale=1.0)),
    "ALiBi, causal": Case(bias="alibi", mask=AttentionMask({}, {}, MaskSpec(causal=True))),
    "scale": Case(options=AttentionOptions(scale=0.3)),
    "logit cap": Case(options=AttentionOptions(scale=2.0, logit_cap=1.5)),
    "logit cap, bias and mask": Case(
        bias="bucketed",
        mask=AttentionMask(*IDS, MaskSpec(causal=True)),
        options=AttentionOptions(logit_cap=0.5),
    ),
    "dropout": Case(dropout=True, key_heads=2),
    "all of them": Case(
        2, WIDTH, AttentionMask(*IDS, MaskSpec()), "bucketed", AttentionOptions(0.7, 2.0), True
    ),
    "bfloat16": Case(2, WIDTH, AttentionMask(*IDS, MaskSpec()), "bucketed", dtype="bfloat16"),
}
ATTEND = {
    "xla": xla_attention,
    "flash, as on a TPU": FlashAttention(BACKENDS["cpu"]._replace(tile=8)),
    "flash, as on a GPU": FlashAttention(BACKENDS["gpu"]._replace(tile=16, interpret=True)),
    "short-rows": ShortRowsAttention(interpret=True),
}
# Interpreted kernels are slow to trace: the default run takes each of them through the hardest lines, and the
# formula as XLA compiles it through those that "all of them" does not have.
PARTS = {"plain", "grouped heads", "causal", "scale", "logit cap", "T5's bias"}
PARTS |= {"rows that see nothing", "dropout"}  # of "all of them" too: its mask is the same


def draw(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def results(attend, case: Case, written_out: bool):
    """Return the output of a case and the gradients of query, key, value and the bias's table."""
    query = draw(ROWS, LENGTH, HEADS, WIDTH, seed=0)
    key = draw(ROWS, KEY_LENGTH, case.key_heads, WIDTH, seed=1)
    value = draw(ROWS, KEY_LENGTH, case.key_heads, case.value_width, seed=2)
    table = draw(8, HEADS, seed=3)
    inputs = [np.asarray(x).astype(case.dtype) for x in (query, key, value)]
    options = case.options
    if case.dropout:
        kept = np.random.default_rng(5).random((ROWS, HEADS, 1, KEY_LENGTH)) < 0.5
        options = options._replace(dropout_factors=jnp.asarray(kept * np.float32(2)))

    def out(query, key, value, table):
        biases = {
            "none": None,
            "bucketed": BucketedBias(table, True, 12),
            "alibi": AlibiBias(jnp.abs(table[0])),
        }
        mask, bias = case.mask, biases[case.bias]
        if written_out:
            mask = materialize_mask(mask, LENGTH, KEY_LENGTH)
            bias = materialize_bias(bias, LENGTH, KEY_LENGTH)
            return attend(query, key, value, mask, bias, **options._asdict())
        return attend(query, key, value, mask, bias, options)

    @jax.jit
    def out_and_gradients(*inputs):
        found, pullback = jax.vjp(out, *inputs)
        return found, *pullback(draw(*found.shape, seed=4).astype(found.dtype))

    names = "output", "query", "key", "value", "table"
    arrays = [np.asarray(x, np.float32) for x in out_and_gradients(*inputs, table)]
    return dict(zip(names, arrays, strict=True))


@cache
def results_of_formula(case):
    return results(scaled_dot_product_attention, CASES[case], written_out=True)


def is_quick(attend, case):
    return case in (CASES.keys() - PARTS if attend == "xla" else {"all of them"})


@pytest.mark.parametrize(
    ("attend", "case"),
    [
        pytest.param(attend, case, marks=[] if is_quick(attend, case) else pytest.mark.slow)
        for attend in ATTEND
        for case in CASES
    ],
)
def test_every_implementation_equals_the_formula(attend, case, monkeypatch):
    if attend == "short-rows":
        monkeypatch.setattr(short_rows, "LANES", 16)  # two heads of 8 features in a register
        if CASES[case].value_width != WIDTH:
            pytest.skip("takes values as wide as keys, which choosing it asks for")
    expected = results_of_formula(case)
    found = results(ATTEND[attend], CASES[case], written_out=False)
    tolerance = 2e-2 if CASES[case].dtype == "bfloat16" else 2e-5
    for name, array in expected.items():
        scale = max(1.0, np.abs(array).max())
        np.testing.assert_allclose(found[name] / scale, array / scale, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_the_formula_is_that_of_jax(key_heads):
    query, key, value = (
        draw(2, 5, heads, 8, seed=seed) for seed, heads in enumerate((4, key_heads, key_heads))
    )
    mask, bias = np.random.default_rng(7).random((2, 1, 5, 5)) < 0.7, draw(1, 4, 5, 5, seed=8)
    mask |= np.eye(5, dtype=bool)  # JAX has no rule for a query that sees nothing

    @jax.jit
    def both(query, key, value, mask, bias):
        return [
            (
                scaled_dot_product_attention(query, key, value, mask, bias, scale=scale),
                jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale),
            )
            for scale in (None, 0.5)
        ]

    for found, peer in both(query, key, value, mask, bias):
        np.testing.assert_allclose(found, peer, atol=1e-6)


def test_a_query_that_may_attend_to_nothing_gives_zeros_and_finite_gradients():
    query, key, value = (draw(2, 3, 4, 8, seed=seed) for seed in range(3))
    mask = np.ones((2, 1, 3, 3), bool)
    mask[1, :, 2] = False

    @jax.jit
    def out_and_gradients(mask, *inputs):
        out, pullback = jax.vjp(lambda *x: scaled_dot_product_attention(*x, mask), *inputs)
        return out, pullback(jnp.ones_like(out))

    out, gradients = jax.tree.map(np.asarray, out_and_gradients(mask, query, key, value))
    assert (out[1, 2] == 0).all() and (out[1, 1] != 0).any()
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][1, 2] == 0).all()


def test_multi_head_attention_projects_attends_and_projects_back():
    x, memory = draw(2, 5, 6, seed=0), draw(2, 7, 6, seed=1)
    wq, wk, wv = draw(6, 4, 3, seed=2), draw(6, 2, 3, seed=3), draw(6, 2, 3, seed=4)
    wo = draw(4, 3, 6, seed=5)
    found = jax.jit(multi_head_attention)(x, memory, wq, wk, wv, wo)
    x, memory, wq, wk, wv, wo = map(np.asarray, (x, memory, wq, wk, wv, wo))
    expected = 0
    for head in range(4):
        query, key, value = x @ wq[:, head], memory @ wk[:, head // 2], memory @ wv[:, head // 2]
        weights = softmax(query @ key.swapaxes(1, 2) / 3**0.5, axis=-1)
        expected += weights @ value @ wo[head]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_layer_computes_multi_head_attention():
    config = ModelConfig(
        d_model=12,
        attention=AttentionConfig(num_heads=4, num_key_value_heads=2, d_kv=6, scores="scaled-dot"),
        dtype="float32",
    )
    x, mask = draw(2, 5, 12, seed=0), np.tril(np.ones((1, 1, 5, 5), bool))

    @jax.jit
    def both(x, mask):
        layer = Attention(config, nnx.Rngs(0))
        found, _ = layer(x, AttentionInputs(mask=mask), None, {})
        wq, wk, wv = (each.kernel[...].reshape(12, -1, 6) for each in (layer.query, layer.key, layer.value))
        wo = layer.out.kernel[...].reshape(4, 6, 12)
        return found, multi_head_attention(x, x, wq, wk, wv, wo, mask)

    np.testing.assert_allclose(*both(x, mask), atol=1e-5)


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, xla_attention])
def test_masks_are_bool_biases_float_and_both_have_four_axes(attend):
    query = draw(1, 3, 2, 4, seed=0)
    with pytest.raises(ValueError, match="should be bool"):
        attend(query, query, query, jnp.zeros((1, 1, 3, 3)))
    with pytest.raises(ValueError, match="should be float"):  # mask and bias in the other order
        attend(query, query, query, None, jnp.ones((1, 1, 3, 3), bool))
    for shape in ((1, 3, 3), (3, 3), (1, 3, 3, 3), (1, 1, 2, 3)):
        with pytest.raises(ValueError, match=r"should be \[B\|1,N\|1,T\|1,S\|1\] with B=1, N=2, T=3, S=3"):
            attend(query, query, query, jnp.ones(shape, bool))


def test_a_logit_cap_bounds_logits_and_leaves_small_ones():
    logits = attention_logits(jnp.array([-1e4, 0.01, 1e4]), logit_cap=50.0)
    np.testing.assert_allclose(logits, [-50, 0.01, 50], rtol=1e-5)


def test_weights_sum_to_1_in_float32_whatever_the_inputs_are():
    query, key = (draw(1, 9, 2, 16, seed=seed).astype(jnp.bfloat16) for seed in range(2))
    weights = attention_weights(query, key)
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)


def test_an_option_that_an_implementation_lacks_is_refused_by_name_and_never_lost(monkeypatch):
    capped = AttentionOptions(logit_cap=50.0)
    config = ModelConfig(
        dtype="bfloat16",
        positions=PositionsConfig(kind="rotary"),
        attention=AttentionConfig(d_kv=64, logit_cap=50.0),
    )
    monkeypatch.setattr("lm.nn.attention_dispatch._platform", lambda: "gpu")
    mask = AttentionMask({}, {}, MaskSpec(causal=True))

    def chosen(config, options):
        return choose_implementation(config, 4_096, 4_096, mask, None, options)

    assert chosen(config, AttentionOptions()) == "cudnn"
    assert chosen(config, capped) == "flash"
    asked = ModelConfig(
        dtype="bfloat16",
        positions=PositionsConfig(kind="rotary"),
        attention=AttentionConfig(d_kv=64, implementation="cudnn"),
    )
    with pytest.raises(SettingError, match="'cudnn' does not implement logit_cap"):
        chosen(asked, capped)


def test_choosing_knows_what_each_implementation_supports():
    supported = {"xla": xla.SUPPORTED, "cudnn": cudnn.SUPPORTED, "flash": flash.SUPPORTED}
    supported["short-rows"] = short_rows.SUPPORTED
    assert {name: each.options for name, each in IMPLEMENTATIONS.items()} == supported
    assert all(options <= set(AttentionOptions._fields) for options in supported.values())


class NewOptions(AttentionOptions):
    """Options with one in use that no implementation knows yet, ``temperature``."""

    @property
    def in_use(self):
        return super().in_use | {"temperature"}


@pytest.mark.parametrize("attend", ["cudnn", *ATTEND])
def test_a_new_option_is_refused_by_each_implementation_until_that_declares_it(attend):
    query = draw(1, 8, 2, 16, seed=0)
    call = ATTEND.get(attend, cudnn.cudnn_attention)
    with pytest.raises(ValueError, match="does not implement temperature"):
        call(query, query, query, None, None, NewOptions())


def test_a_new_option_is_refused_where_no_implementation_has_it(monkeypatch):
    monkeypatch.setattr("lm.nn.attention_dispatch._platform", lambda: "gpu")

    with pytest.raises(SettingError, match="temperature"):
        choose_implementation(ModelConfig(), 4_096, 4_096, None, None, NewOptions())


def test_cudnn_refuses_a_bias_rather_than_leaving_it_out():
    query = draw(1, 8, 2, 16, seed=0)
    with pytest.raises(ValueError, match="takes no bias"):
        cudnn.cudnn_attention(query, query, query, None, jnp.ones((1, 2, 8, 8)))


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (4, 4)], ids=str)
def test_a_mask_that_is_an_array_is_spread_over_devices_with_the_rows_and_heads_that_it_has(
    monkeypatch, shape
):
    """XLNet's two streams and merged attention have such masks; of the kernels "cudnn" alone takes them."""
    monkeypatch.setattr("lm.nn.attention_dispatch._platform", lambda: "gpu")
    on_a_cpu = Implementation(cudnn.SUPPORTED, lambda _query_offset: xla_attention)
    monkeypatch.setitem(IMPLEMENTATIONS, "cudnn", on_a_cpu)
    attention = AttentionConfig(d_kv=8, num_heads=4, implementation="cudnn")
    config = ModelConfig(dtype="bfloat16", positions=PositionsConfig(kind="rotary"), attention=attention)
    query, key, value = (draw(4, 6, 4, 8, seed=seed) for seed in range(3))
    mask = np.random.default_rng(3).random((*shape, 6, 6)) < 0.5

    @jax.jit
    def out(query, key, value, mask):
        return attend(config, query, KeyValue(key, value), mask, None, AttentionOptions())

    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])):
        spread = np.asarray(out(query, key, value, mask))
    np.testing.assert_allclose(spread, jax.jit(xla_attention)(query, key, value, mask), atol=1e-6)
