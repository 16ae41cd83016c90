"""What the published decoders need of a model, each a setting: it computes what it says, with a cache too."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from small_models import hidden_states, moved, run

from lm.batch import Batch, Side
from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import SettingError, change, changes
from lm.config.layers import AttentionConfig, MlpConfig, OutputConfig, PositionsConfig
from lm.config.model import EncoderConfig, ModelConfig
from lm.convert.config_json import config_json, model_config
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.sharding import named

BASE = ModelConfig(
    "decoder",
    vocab_size=23,
    num_encoder_layers=4,
    num_decoder_layers=4,
    d_model=16,
    mlp=MlpConfig(d_ff=24),
    attention=AttentionConfig(d_kv=4, num_heads=4, scores="scaled-dot"),
    positions=PositionsConfig(kind="rotary", max_length=16),
    output=OutputConfig(logits="separate"),
)
ALTERNATING = SparsityConfig(layer_windows=(None, 1, None, 1))
VALUES = {
    "value-width": {"attention.d_v": 6, "attention.num_key_value_heads": 2},
    "narrow-values": {"attention.d_v": 2, "attention.qkv_bias": True},
    "query-and-key-norms": {"attention.qk_norm": True, "attention.num_key_value_heads": 1},
    "head-norms": {
        "attention.qk_norm": True,
        "attention.value_norm": True,
        "attention.output_norm": True,
        "attention.norm_scale": False,
    },
    "one-norm": {"residual": "parallel-one-norm", "positions.rotary": RotaryConfig(layout="pairs")},
    "alternating-windows": {"sparsity": ALTERNATING},
    "unrolled-windows": {"sparsity": ALTERNATING, "compile.layers": "unroll", "compile.remat": "full"},
    "window-base": {
        "sparsity": ALTERNATING,
        "positions.rotary": RotaryConfig(window_base=5.0),
        "norm.first_attention": "none",
    },
    "one-window-base": {"sparsity": SparsityConfig(2), "positions.rotary": RotaryConfig(window_base=5.0)},
    "sandwich-norm": {
        "residual": "sandwich-norm",
        "norm.zero_centered": True,
        "attention.query_pre_attn_scalar": 7,
        "attention.logit_cap": 2.0,
        "output.logit_cap": 3.0,
    },
    "output-norm": {  # OLMo 2's, with Granite's factors and Gemma 3's windows
        "residual": "output-norm",
        "attention.qk_norm": True,
        "attention.qk_norm_features": "all-heads",
        "attention.num_key_value_heads": 2,
        "attention.scale": 0.4,
        "embedding.multiplier": 2.0,
        "residual_multiplier": 0.7,
        "output.logit_divisor": 1.5,
        "sparsity": ALTERNATING,
        "positions.rotary": RotaryConfig(scaling="linear", factor=3.0, window_scaling="none"),
    },
    "projected-tokens": {
        "embedding.d_embed": 8,
        "embedding.projected": "tokens",
        "output.logits": "tied",
        "positions.kind": "learned",
    },
}
# by test_parity.py too, with published weights, or test_config_fields.py
DECODED = {"query-and-key-norms", "one-norm", "unrolled-windows", "projected-tokens", "output-norm"}
DECODED |= {"alternating-windows", "one-window-base", "narrow-values"}  # as "window-base", "value-width"
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 9))


def logits(model, tokens=TOKENS):
    return np.asarray(run(model, Batch(decoder=Side(tokens=tokens))))


@jax.jit
def whole_and_cached(model, tokens):
    """The logits of a row, and of its tokens from the third on by a cache."""
    whole = model(Batch(decoder=Side(tokens=tokens)))
    first, held = model.prefill(Batch(decoder=Side(tokens=tokens[:, :3])), 9)

    def step(held, token):
        found, held = model.step(token, held)
        return held, found

    _, others = jax.lax.scan(step, held, tokens[:, 3:].T)
    return whole, first, others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DECODED)) for name in VALUES]
)
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_row(name):
    whole, first, others = map(np.asarray, whole_and_cached(moved(changes(BASE, VALUES[name])), TOKENS))
    for place, found in enumerate([first, *others], 2):
        np.testing.assert_allclose(found, whole[:, place], atol=2e-5)


@pytest.mark.parametrize("kind", ["heads", "merged"])
def test_a_decoder_over_its_cache_reads_an_encoder_whatever_number_its_segment_has(kind):
    new = {"architecture": "encoder-decoder", "positions.kind": "rotary", "cross_attention.kind": kind}
    model = moved(changes(BASE, new))

    def first_logits(segment):
        segments = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32) * segment
        encoder = Side(tokens=TOKENS[:2, :4], segment_ids=segments)
        batch = Batch(encoder=encoder, decoder=Side(tokens=TOKENS[:2, :1]))
        return jax.jit(lambda model, batch: model.prefill(batch, 3)[0])(model, batch)

    np.testing.assert_array_equal(first_logits(1), first_logits(2))


def parameters(**settings):
    """``{name: shape}``"""
    config = changes(BASE, settings)
    model = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    return {name: leaf.shape for name, leaf in named(model).items()}


def test_values_have_a_width_of_their_own_in_kernels_and_cache():
    shapes = parameters(**{"attention.d_v": 6, "attention.num_key_value_heads": 2})
    kernels = [shapes[f"decoder.blocks.attention.{part}.kernel"] for part in ("query", "key", "value", "out")]
    assert kernels == [(4, 16, 16), (4, 16, 8), (4, 16, 12), (4, 24, 16)]
    model = moved(changes(BASE, VALUES["value-width"]))
    held = jax.eval_shape(lambda: model.decoder.init_carry(3, 5))
    assert (held.key.shape, held.value.shape) == ((4, 3, 2, 5, 4), (4, 3, 2, 5, 6))


def test_an_encoder_whose_heads_are_narrower_may_have_the_decoders_values():
    config = changes(
        BASE, {"architecture": "encoder-decoder", "attention.d_v": 6, "encoder": EncoderConfig(d_kv=2)}
    )
    batch = Batch(encoder=Side(tokens=TOKENS), decoder=Side(tokens=TOKENS))
    assert np.isfinite(run(moved(config), batch)).all()


def test_a_scale_of_queries_or_keys_does_not_matter_once_they_are_normalised():
    model = moved(changes(BASE, {"attention.qk_norm": True, "norm.epsilon": 1e-12}))
    before = logits(model)
    for part in ("query", "key", "value"):
        louder = jax.tree.map(lambda leaf: leaf, model)
        kernel = getattr(louder.decoder.blocks.attention, part).kernel
        kernel[...] = 7 * kernel[...]
        assert np.allclose(logits(louder), before, atol=1e-4) == (part != "value")


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_heads_without_scales_have_no_parameters_and_undo_the_scale_of_values_and_outputs(kind):
    new = VALUES["head-norms"] | {"norm.kind": kind, "norm.epsilon": 1e-12}
    assert parameters(**new).keys() == parameters(**{"norm.kind": kind}).keys()
    model = moved(changes(BASE, new))
    before = logits(model)
    for part in ("query", "key", "value"):
        louder = jax.tree.map(lambda leaf: leaf, model)
        kernel = getattr(louder.decoder.blocks.attention, part).kernel
        kernel[...] = 7 * kernel[...]
        np.testing.assert_allclose(logits(louder), before, atol=1e-4)
    scaled = parameters(**{**new, "attention.norm_scale": True})
    names = {name.split(".")[-2] for name in scaled.keys() - parameters(**{"norm.kind": kind}).keys()}
    assert names == {"query_norm", "key_norm", "value_norm", "out_norm"}


def test_biases_of_queries_keys_and_values_are_a_setting_of_their_own():
    def biased(**settings):
        return {name.split(".")[-2] for name in parameters(**settings) if name.endswith("bias")}

    assert biased(bias=True, **{"attention.qkv_bias": False}) == {"out", "hidden"}
    assert biased(**{"attention.qkv_bias": True}) == {"query", "key", "value"}


def test_a_block_of_one_norm_is_a_parallel_one_whose_norms_are_equal():
    one, two = (moved(replace(BASE, residual=kind)) for kind in ("parallel-one-norm", "parallel"))
    assert logits(one).shape == logits(two).shape
    source = named(one)
    filled = [
        source[name.replace("mlp_norm", "attention_norm")] if "_norm" in name else source[name]
        for name in named(two)
    ]
    two = jax.tree.unflatten(jax.tree.structure(two), filled)
    np.testing.assert_allclose(logits(one), logits(two), atol=1e-5)


@pytest.mark.parametrize(("windows", "reach"), [((1, 0, 2, 1), 4), ((0, None, 0, 0), 8), ((0, 0, 0, 0), 0)])
def test_a_position_depends_on_as_many_before_it_as_the_windows_of_all_layers_reach(windows, reach):
    widest = None if None in windows else max(windows)
    model = moved(replace(BASE, sparsity=SparsityConfig(widest, layer_windows=windows)))
    change = np.array(
        [np.abs(logits(model, changed(place)) - logits(model))[0, -1].max() for place in range(9)]
    )
    assert (change > 0).tolist() == [8 - place <= reach for place in range(9)]


def changed(place):
    tokens = TOKENS.copy()
    tokens[:, place] = (tokens[:, place] + 1) % 23
    return tokens


def test_a_window_of_each_layer_is_one_window_where_all_are_alike():
    each, one = (
        moved(replace(BASE, sparsity=SparsityConfig(2, layer_windows=windows))) for windows in ((2,) * 4, ())
    )
    np.testing.assert_allclose(logits(each), logits(one), atol=1e-5)


def test_tokens_are_projected_before_positions_are_added_and_states_back_without_biases():
    model = moved(changes(BASE, {"bias": True, **VALUES["projected-tokens"]}))
    shapes = {name: leaf.shape for name, leaf in named(model).items()}
    assert shapes["decoder.positions.table"] == (16, 16) and shapes["embed.table"] == (23, 8)
    assert {name for name in shapes if name.startswith(("decoder.projection", "narrowing"))} == {
        "decoder.projection.kernel",
        "narrowing.kernel",
    }
    x = hidden_states(model, Batch(decoder=Side(tokens=TOKENS)))["decoder"][0]
    tokens = model.embed.table[...][TOKENS] @ model.decoder.projection.kernel[...]
    np.testing.assert_allclose(x, tokens + model.decoder.positions.table[...][None, :9], atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention.d_v": 0}, "model.attention.d_v=0"),
        (
            {
                "attention.implementation": "cudnn",
                "dtype": "bfloat16",
                "attention.d_kv": 8,
                "attention.d_v": 16,
            },
            "model.attention.d_v",
        ),
        ({"sparsity": SparsityConfig(layer_windows=(None, 1))}, "2 windows.*num_decoder_layers=4"),
        (
            {"architecture": "encoder-decoder", "num_encoder_layers": 3, "sparsity": ALTERNATING},
            "sparsity.layer_windows has 4 windows.*num_encoder_layers=3",
        ),
        (
            {"architecture": "encoder-decoder", "encoder": EncoderConfig(layer_windows=(1, None))},
            "encoder.layer_windows has 2 windows.*num_encoder_layers=4",
        ),
        ({"attention.query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ({"attention.scale": 0.5, "attention.query_pre_attn_scalar": 4}, "scale=0.5 takes the place of"),
        ({"positions.rotary.scaling": "yarn", "positions.rotary.window_scaling": "none"}, "scaling='yarn'"),
        ({"attention.logit_cap": 0.0}, "attention.logit_cap=0.0"),
        ({"output.logit_cap": -1.0}, "output.logit_cap=-1.0"),
        ({"norm.first_attention": "none", "residual": "post-norm"}, "first_attention='none'.*'post-norm'"),
        ({"norm.first_attention": "none", "shared_layers": True}, "first_attention='none'"),
        ({"embedding.d_embed": 8, "output.logits": "tied"}, "model.embedding.projected='tokens'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_setting(settings, message):
    with pytest.raises(SettingError, match=message):
        changes(BASE, settings)


@pytest.mark.parametrize("windows", [(1, 2, 2), (None, -1), (3, None)])
def test_the_widest_window_of_the_layers_is_the_models(windows):
    with pytest.raises(SettingError, match="layer_windows"):
        SparsityConfig(3, layer_windows=windows)


@pytest.mark.parametrize(
    ("size", "path", "value"),
    [
        ("llama-7b", "attention.d_v", 64),
        ("llama-7b", "positions.rotary.layout", "pairs"),
        ("gpt-j-6b", "positions.rotary.layout", "halves"),
        ("gpt-neo-125m", "attention.scores", "scaled-dot"),
        ("opt-350m", "attention.d_v", 32),
        ("qwen3-8b", "attention.qkv_bias", True),
    ],
)
def test_a_model_that_no_family_computes_is_not_exported_as_one_that_does(size, path, value):
    config = change(PRESETS[size], path, value)
    with pytest.raises(SettingError, match="no published family computes this model"):
        config_json(config)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt-neo-125m", "gpt-j-6b", "opt-350m", "mistral-7b", "qwen2.5-7b", "qwen3-8b"),
        *("gemma-2b", "gemma-2-27b", "t5gemma-2b-2b", "modernbert-base"),
    ],
)
def test_settings_of_a_published_size_come_back_from_its_config_json(name):
    theirs = config_json(PRESETS[name])
    again = model_config(theirs, ["logits"] if name in ("gpt-j-6b", "modernbert-base") else [])
    assert config_json(again) == theirs


@pytest.mark.parametrize(
    ("size", "new", "message"),
    [
        ("gpt-neo-125m", {"attention_types": [[["global", "near"], 6]], "attention_layers": None}, "'near'"),
        ("gpt-neo-125m", {"attention_types": [[["global", "local"], 5]]}, "12 layers"),
        ("gpt-neo-125m", {"attention_types": [[["local"], 10**12], [["global"], 12 - 10**12]]}, "12 layers"),
        ("gpt-neo-125m", {"attention_layers": ["global"] * 12}, "attention_layers"),
        ("gpt-neo-125m", {"window_size": 0}, "window_size=0"),
        ("mistral-7b", {"sliding_window": "wide"}, "sliding_window='wide'"),
        ("mistral-7b", {"layer_types": ["full_attention"] * 32}, "layer_types"),
        ("qwen3-8b", {"layer_types": ["sliding_attention"] * 36}, "layer_types"),
        ("qwen3-8b", {"use_sliding_window": 1}, "use_sliding_window=1"),
        ("opt-350m", {"enable_bias": False}, "enable_bias"),
        ("gpt-j-6b", {"rotary_dim": 63}, "rotary.fraction"),
        (
            "qwen2.5-7b",
            {
                "num_hidden_layers": 10**12,
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": None,
            },
            "10+ layers should be from 1 to",
        ),
    ],
)
def test_windows_and_fields_that_are_not_computed_here_are_refused(size, new, message):
    with pytest.raises(SettingError, match=message):
        model_config(config_json(PRESETS[size]) | new, [])


def test_windows_from_a_layer_on_are_those_of_a_list_of_types():
    theirs = config_json(PRESETS["qwen2.5-7b"]) | {"use_sliding_window": True, "sliding_window": 100}
    types = ["full_attention"] * 20 + ["sliding_attention"] * 8
    listed = model_config(theirs | {"layer_types": types}, [])
    counted = model_config(theirs | {"layer_types": None, "max_window_layers": 20}, [])
    assert listed == counted and listed.sparsity.layer_windows == (None,) * 20 + (99,) * 8
    assert config_json(listed)["layer_types"] == types and config_json(listed)["max_window_layers"] == 20
