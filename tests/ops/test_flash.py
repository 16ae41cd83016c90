"""Flash attention: equal to explicit scores, forward and backward, with memory linear in the length."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from paths import ROOT, SUPPORT, TESTS

from lm.batch import Batch, Side
from lm.config.base import SettingError, change, changes
from lm.config.layers import AttentionConfig, MlpConfig, PositionsConfig
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig
from lm.nn.attention_dispatch import choose_implementation
from lm.nn.transformer import Transformer
from lm.ops.attention import AttentionOptions
from lm.ops.kernels import short_rows
from lm.ops.kernels.cudnn import cudnn_attention
from lm.ops.kernels.flash import FlashAttention
from lm.ops.kernels.tile_sweep import BACKENDS
from lm.ops.kernels.xla import xla_attention
from lm.ops.masks import AttentionMask, MaskSpec, Window, key_segments
from lm.ops.positions import AlibiBias, BucketedBias
from lm.sharding import make_mesh

INTERPRETED = {
    "tpu": BACKENDS["cpu"]._replace(tile=8),
    "gpu": BACKENDS["gpu"]._replace(tile=16, interpret=True),
}
ROWS, LENGTH, KEYS, HEADS, GROUPS, WIDTH = 2, 21, 28, 4, 2, 8  # neither length is a multiple of a tile
SEGMENTS = np.array([[1] * 8 + [2] * 9 + [0] * 4, [1] * 16 + [2] * 5])
KEY_SEGMENTS = np.array([[1] * 5 + [2] * 19 + [0] * 4, [1] * 20 + [3] * 8])  # whose last queries see nothing


def numbers(**more):
    """A mask's numbers by name, of queries and of keys."""
    named = {"segment": (SEGMENTS, np.where(KEY_SEGMENTS, KEY_SEGMENTS, -1))} | more
    return [{name: jnp.asarray(pair[side]) for name, pair in named.items()} for side in (0, 1)]


PLACES = np.arange(LENGTH)[None], np.arange(KEYS)[None] + 3
FIRST = PLACES[0] < 5, PLACES[1] < 5
MASKS = {
    "all": None,
    "causal": AttentionMask({}, {}, MaskSpec(causal=True)),
    "segments": AttentionMask(*numbers(), MaskSpec()),
    "prefix": AttentionMask(*numbers(prefix=FIRST), MaskSpec(causal=True)),
    "window": AttentionMask({}, {}, MaskSpec(window=Window(4, 2))),
    "causal-window": AttentionMask({}, {}, MaskSpec(causal=True, window=Window(4, 4))),
    "dilated": AttentionMask(
        *numbers(position=PLACES, **{"global": FIRST}), MaskSpec(window=Window(6, 6, 2))
    ),
    "positions": AttentionMask(*numbers(position=PLACES), MaskSpec(window=Window(3, 3))),
}
BIASES = {
    "none": lambda table: None,
    "both-ways": lambda table: BucketedBias(table, True, 12),
    "back": lambda table: BucketedBias(table, False, 6),
    "alibi": lambda table: AlibiBias(jnp.abs(table[0])),
}
# Every condition of a mask with some bias and every bias with some mask, two of them with values of another
# width; all of them is the slow test.
FEW = [("prefix", "both-ways"), ("dilated", "alibi")]
FEW_OF_WIDTH = [(4, "causal", "back"), (12, "positions", "none")]
ALL = [(mask, bias) for mask in MASKS for bias in BIASES]


def draw(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def kept():
    """Factors that drop half of the keys."""
    is_kept = np.random.default_rng(5).random((ROWS, HEADS, 1, KEYS)) < 0.5
    return jnp.asarray(is_kept * np.float32(2))


def results(call, mask, bias, dtype="float32", keep=None, value_width=WIDTH):
    """The output, and the gradients of query, key, value and the bias's table."""
    shapes = (LENGTH, HEADS, WIDTH), (KEYS, GROUPS, WIDTH), (KEYS, GROUPS, value_width)
    inputs = [draw(ROWS, *shape, seed=i).astype(dtype) for i, shape in enumerate(shapes)]

    def out(*inputs):
        *inputs, table = inputs
        return call(
            *inputs, MASKS[mask], BIASES[bias](table), AttentionOptions(scale=0.5, dropout_factors=keep)
        )

    @jax.jit
    def both(*inputs):
        found, back = jax.vjp(out, *inputs)
        return found, back(draw(ROWS, LENGTH, HEADS, value_width, seed=4).astype(dtype))

    return jax.tree.leaves(both(*inputs, draw(8, HEADS, seed=3)))


def assert_equal_to_explicit_scores(backend, mask, bias, dtype="float32", keep=None, atol=2e-5, **new):
    expected = results(xla_attention, mask, bias, dtype, keep, **new)
    call = backend if callable(backend) else FlashAttention(backend)
    for name, one, other in zip(
        ("out", "query", "key", "value", "table"),
        results(call, mask, bias, dtype, keep, **new),
        expected,
        strict=True,
    ):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        scale = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one / scale, other / scale, atol=atol, err_msg=name)


@pytest.mark.parametrize(("mask", "bias"), FEW)
def test_flash_is_explicit_scores_and_so_are_its_gradients(mask, bias):
    assert_equal_to_explicit_scores(INTERPRETED["tpu"], mask, bias)


@pytest.mark.parametrize(("value_width", "mask", "bias"), FEW_OF_WIDTH)
def test_flash_takes_values_narrower_or_wider_than_keys(value_width, mask, bias):
    assert_equal_to_explicit_scores(INTERPRETED["tpu"], mask, bias, value_width=value_width)


@pytest.mark.slow
@pytest.mark.parametrize("platform", INTERPRETED)
@pytest.mark.parametrize(("mask", "bias"), ALL)
def test_flash_is_explicit_scores_on_either_kind_of_device(platform, mask, bias):
    assert_equal_to_explicit_scores(INTERPRETED[platform], mask, bias)


def test_dropped_keys_and_low_precision_are_those_of_explicit_scores_and_a_gpu_s_loop_is_a_tpu_s_grid():
    keep = kept()
    assert_equal_to_explicit_scores(INTERPRETED["gpu"], "segments", "both-ways", "bfloat16", keep, atol=2e-2)


@pytest.mark.parametrize(
    ("lanes", "mask", "bias", "dtype", "atol"),  # one, two or four heads of 8 features to a register
    [
        (16, "causal", "back", "float32", 2e-5),
        (8, "segments", "both-ways", "float32", 2e-5),
        (16, "positions", "none", "bfloat16", 2e-2),
        *(pytest.param(32, *case, "float32", 2e-5, marks=pytest.mark.slow) for case in ALL),
    ],
)
def test_whole_rows_at_once_are_explicit_scores_and_so_are_their_gradients(
    monkeypatch, lanes, mask, bias, dtype, atol
):
    monkeypatch.setattr(short_rows, "LANES", lanes)
    keep = kept()
    attend = short_rows.ShortRowsAttention(interpret=True)
    assert_equal_to_explicit_scores(attend, mask, bias, dtype, keep, atol)


@pytest.mark.parametrize(
    ("heads", "width", "together"), [(12, 64, 2), (32, 128, 1), (3, 64, 0), (8, 80, 0), (2, 256, 1)]
)
def test_heads_lie_side_by_side_where_they_fill_registers(heads, width, together):
    assert short_rows.heads_per_register(heads, width) == together


TINY = ModelConfig(
    "encoder-decoder",
    vocab_size=40,
    d_model=16,
    mlp=MlpConfig(d_ff=16),
    attention=AttentionConfig(d_kv=4, num_heads=4),
    num_encoder_layers=1,
    num_decoder_layers=1,
    positions=PositionsConfig(relative_buckets=8, relative_max_distance=12),
)


def example(rows):
    """A packed batch: two texts a row, and padding."""
    rng, sides = np.random.default_rng(0), {}
    for side, lengths in (("encoder", (7, 5, 4)), ("decoder", (3, 4, 1))):
        segments = np.tile(np.repeat([1, 2, 0], lengths), (rows, 1)).astype(np.int32)
        sides[side] = Side(tokens=rng.integers(2, 40, segments.shape), segment_ids=segments)
    return Batch(**sides).map(lambda x: jnp.asarray(x, jnp.int32))


def gradients(attention, sizes, architecture="encoder-decoder"):
    config = changes(TINY, {"attention.implementation": attention, "architecture": architecture})
    abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    model = jax.tree.map(lambda leaf: jnp.asarray(0.3 * draw(*leaf.shape, seed=leaf.size)), abstract)
    batch = example(4)

    def loss(model):
        text = (batch.decoder.segment_ids > 0)[:, :, None]
        return jnp.where(text, model(batch, jax.random.key(1)) ** 2, 0).sum()

    with jax.set_mesh(make_mesh(MeshConfig(**sizes), jax.devices()[: prod(sizes.values())])):
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(model))


@pytest.mark.slow
def test_a_model_is_the_same_by_flash_on_devices_that_share_out_rows_queries_and_heads():
    spread = gradients("flash", {"data": 2, "sequence": 2, "tensor": 2})
    for one, other in zip(*map(jax.tree.leaves, (spread, gradients("xla", {"data": 1}))), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize(
    "architecture", ["decoder", pytest.param("encoder-decoder", marks=pytest.mark.slow)]
)  # the latter has three times as many kernels to trace
def test_a_model_is_the_same_by_whole_rows_on_devices_that_share_out_rows_and_heads(
    monkeypatch, architecture
):
    expected = gradients("xla", {"data": 1}, architecture)
    monkeypatch.setattr(short_rows, "LANES", 8)
    for module in ("attention_dispatch", "attention_inputs"):
        monkeypatch.setattr(f"lm.nn.{module}.choose_implementation", lambda *_: "short-rows")
    for one, other in zip(
        *map(jax.tree.leaves, (gradients("auto", {"fsdp": 2, "tensor": 2}, architecture), expected)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-4 * max(1.0, np.abs(other).max()))


def test_nothing_as_large_as_the_scores_is_made_where_flash_is_taken():
    config = change(TINY, "attention.implementation", "flash")
    ones = jnp.ones((1, 640), jnp.int32)
    side = Side(tokens=ones, segment_ids=ones)
    batch = Batch(encoder=side, decoder=side)
    model = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    program = jax.make_jaxpr(jax.grad(lambda m: m.features(batch, jax.random.key(0)).sum()))(model)
    shapes = [shape.split(",") for shape in re.findall(r"\w\[([\d,]+)\]", str(program))]
    assert max(sum(int(size) >= 640 for size in shape) for shape in shapes) == 1


def attention_step(call, length, mask):
    """A training step's attention of one row, 12 heads of 64, with T5's bias: a function and its inputs'
    shapes.
    """

    def loss(query, key, value, table, segments):
        by_segment = AttentionMask({"segment": segments}, {"segment": key_segments(segments)}, MaskSpec())
        seen = by_segment if mask == "segments" else MASKS[mask]
        return (
            call(query, key, value, seen, BucketedBias(table, mask == "segments", 128))
            .astype(jnp.float32)
            .sum()
        )

    shapes = [((1, length, 12, 64), jnp.bfloat16)] * 3 + [((32, 12), jnp.float32), ((1, length), jnp.int32)]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))), shapes


def flash_on(platform, **settings):
    return FlashAttention(BACKENDS[platform]._replace(**settings))


@pytest.mark.parametrize("mask", ["segments", pytest.param("causal", marks=pytest.mark.slow)])
def test_flash_is_three_kernels_for_a_gpu(mask):
    step, shapes = attention_step(flash_on("gpu"), 8192, mask)
    # from jax 0.11 on Pallas asks the mesh what kind of GPU it lowers for
    gpu = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=gpu)
    with use_abstract_mesh(mesh):
        traced = step.trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@__gpu$xla.gpu.triton") == 3


def temporaries(call, length, mask):
    """Bytes on one v5e chip, by the compiler's figures; printed, to be run in a process of its own."""
    from jax.experimental.topologies import get_topology_desc

    device = get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    step, shapes = attention_step(call, length, mask)
    place = jax.sharding.SingleDeviceSharding(device)
    inputs = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    return step.lower(*inputs).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.slow
@pytest.mark.parametrize("tile", [256, BACKENDS["tpu"].tile])
def test_temporaries_on_a_tpu_at_8192_tokens_are_a_tenth_of_those_of_explicit_scores_at_4096(tile):
    code = (
        "from test_flash import *\n"
        f"flash = flash_on('tpu', tile={tile})\n"
        "print([temporaries(flash, 8192, 'segments'), temporaries(xla_attention, 4096, 'segments')])"
    )
    environment = os.environ | {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT))),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=TESTS / "ops"
    )
    assert done.returncode == 0, done.stderr
    flash, explicit = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert flash <= min(0.2 * 2**30, explicit / 10)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(("mask", "bias"), ALL)
def test_flash_is_explicit_scores_on_a_gpu_and_cudnn_too(mask, bias):
    assert_equal_to_explicit_scores(BACKENDS["gpu"], mask, bias, "bfloat16", atol=2e-2)
    if bias == "none":
        for one, other in zip(
            *(results(f, mask, bias, "bfloat16") for f in (cudnn_attention, xla_attention)),
            strict=True,
        ):
            np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=5e-2)


@pytest.mark.parametrize(
    ("platform", "length", "mask", "bias", "expected"),
    [
        ("cpu", 8192, "causal", "none", "xla"),
        ("tpu", 512, "segments", "both-ways", "short-rows"),
        ("tpu", 1024, "causal", "none", "xla"),
        ("tpu", 1025, "segments", "both-ways", "flash"),
        ("tpu", 1, "all", "none", "xla"),
        ("gpu", 8192, "causal", "none", "cudnn"),
        ("gpu", 8192, "segments", "none", "flash"),
        ("gpu", 8192, "all", "alibi", "flash"),
    ],
)
def test_what_computes_attention_goes_by_device_length_mask_and_bias(
    monkeypatch, platform, length, mask, bias, expected
):
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    config, bias = change(ModelConfig(), "dtype", "bfloat16"), BIASES[bias](jnp.ones((8, 4)))
    key_length = 8192 if length == 1 else length
    found = choose_implementation(config, length, key_length, MASKS[mask], bias, AttentionOptions())
    assert found == expected


def test_what_an_implementation_cannot_do_is_refused_by_name():
    with pytest.raises(SettingError, match="'cudnn' needs model.dtype='bfloat16'.*'float32'"):
        ModelConfig(
            "decoder",
            positions=PositionsConfig(kind="rotary"),
            attention=AttentionConfig(implementation="cudnn"),
        )
    with pytest.raises(
        SettingError, match="that adds nothing to the scores, not 'bfloat16', 64, None and 'relative'"
    ):
        ModelConfig(dtype="bfloat16", attention=AttentionConfig(implementation="cudnn"))
    with pytest.raises(SettingError, match="'cudnn' is not available on 'cpu'"):
        config = ModelConfig(
            dtype="bfloat16",
            positions=PositionsConfig(kind="rotary"),
            attention=AttentionConfig(implementation="cudnn"),
        )
        choose_implementation(config, 8, 8, None, None, AttentionOptions())
