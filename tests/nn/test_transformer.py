"""Laws of the Transformer, for every architecture, family and way to tell positions apart."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paths import SHARED
from small_models import (
    ARCHITECTURES,
    CONFIGS,
    POSITIONS,
    TINY,
    cached_logits,
    example,
    features,
    influence,
    joined,
    loss_and_gradients,
    made,
    make,
    moved,
    padded,
    run,
    tiny,
    with_side,
)
from variants import but_for

from lm.batch import Batch, Side
from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import SettingError, changes
from lm.config.mesh import MeshConfig
from lm.evaluate.generate import greedy
from lm.nn.dropout import draw_dropout_masks, dropout
from lm.nn.layers import next_key, num_parameters
from lm.nn.positions import RelativePositionBias
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.ops.masks import relative_positions
from lm.ops.positions import AlibiBias, BucketedBias
from lm.sharding import logical_axes, make_mesh, named, parameter_shardings

BASE = PRESETS["t5-base"]
SETUP = SHARED / "t5" / "setup.json"


DECODERS = [name for name, config in CONFIGS.items() if config.has_decoder]


# test_parity.py packs texts for their published weights and decodes with these, over the cache too; for
# most families with the slow tests
PUBLISHED = {name for name in PRESETS if name in CONFIGS}


# decoders whose masks and cache are those of another one, with another part around it
LIKE_OTHERS = {"adapters", "bilinear", "no residual", "no feed-forward", "no norm"}
LIKE_OTHERS |= {f"decoder, {p}" for p in POSITIONS} | {f"{m} encoder-decoder" for m in ("rnn", "gru", "none")}
LIKE_OTHERS |= {f"encoder-decoder, {p}" for p in ("none", "sinusoidal", "relative-per-layer")}
LIKE_OTHERS |= {f"lstm decoder, {cross} cross-attention" for cross in ("dot", "additive")}
LIKE_OTHERS |= {
    "gru decoder, none cross-attention",
    "multiplicative cross-attention",
    "transparent attention",
}
LIKE_OTHERS |= {"branches", "decoder, evolved"}  # the latter as "evolved"
LIKE_OTHERS |= {"continued positions", "merged attention", "merged, one stack"}  # as "merged, continued"
LIKE_OTHERS |= {
    "decoder, adaptive softmax",
    "decoder, experts in every second layer",
    "encoder, one expert per token",
}
LIKE_OTHERS |= {f"encoder, {p}" for p in ("learned", "rotary", "alibi")}  # as the encoder of both stacks
# parts whose other laws have files of their own
OWN_FILES = {"evolved", "universal", "product-key memory", "redllm", "dense synthesizer", "funnel"}
OWN_FILES |= {"lightweight convolution", "shared-encoder-decoder", "encoder-decoder, relative-keys"}
OWN_FILES |= {"lstm decoder, none cross-attention"}
DECODED_HERE_ALONE = {"evolved", "encoder-decoder, relative-keys"}  # no file of theirs decodes
# what the cache of another one decodes, and computes nothing from other tokens
DECODED_LIKE_OTHERS = {"shared-encoder-decoder", "decoder, adaptive embedding", "product-key memory"}
DECODED_LIKE_OTHERS |= {"lightweight convolution"}  # as "decoder, dynamic convolution"
DECODED_LIKE_OTHERS |= {"experts"}  # test_experts.py decodes with them


def drawn(name):
    """A new model where no norm holds back what larger parameters would compute, else one without zeros."""
    config = CONFIGS[name]
    return make(name) if config.norm.kind == "none" else moved(config)


def aligned(batch, config):
    """The example with its inputs padded to the tokens that become one position of the encoder's output."""
    multiple = config.funnel.multiple
    return replace(
        batch,
        encoder=batch.encoder.map(lambda value: np.pad(value, ((0, 0), (0, -value.shape[1] % multiple)))),
    )


@pytest.mark.parametrize("name", but_for(PUBLISHED | LIKE_OTHERS | OWN_FILES, CONFIGS))
def test_a_packed_example_sees_only_itself_and_padding_changes_nothing(name):
    model = drawn(name)
    examples = [example(1, 5, 7, prefix=3), example(2, 6, 4, prefix=2)]
    read = features if model.config.output.logits == "none" else run
    packed = read(model, padded(joined([aligned(b, model.config) for b in examples]), 12))[0]
    first, second = (read(model, padded(b, 12))[0] for b in examples)
    ends = (7, 4) if model.config.has_decoder else (5, 6)
    np.testing.assert_allclose(
        packed[: sum(ends)], np.concatenate([first[: ends[0]], second[: ends[1]]]), atol=1e-5
    )
    if name in ARCHITECTURES:
        without = examples[0].map_sides(lambda side: replace(side, segment_ids=None))
        np.testing.assert_allclose(read(model, without)[0], first[: ends[0]], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    but_for(
        PUBLISHED | LIKE_OTHERS | DECODED_LIKE_OTHERS | (OWN_FILES - DECODED_HERE_ALONE),
        (name for name in DECODERS if CONFIGS[name].attention.mask == "causal"),
    ),
)
def test_a_step_over_the_cache_gives_what_the_whole_row_gives(name):
    model, batch = drawn(name), example(3, 5, 9)
    if model.config.output.logits == "none":
        pytest.skip("no logits")
    full = np.asarray(run(model, padded(batch, 12)))  # the program of packed examples
    for place, logits in enumerate(cached_logits(model, batch), 3):
        np.testing.assert_allclose(logits[0], full[0, place], atol=2e-5)


@pytest.mark.parametrize(
    "name",
    but_for(
        {"shared-encoder-decoder", "bloom", "gpt-neox-20b"}, [*ARCHITECTURES[:4], "gpt-neox-20b", "bloom"]
    ),
)
def test_a_decoder_depends_on_what_came_before_and_on_all_of_it(name):
    expected = np.tri(6, dtype=bool)
    if name == "prefix-decoder":
        expected[:3, :3] = True
    np.testing.assert_array_equal(influence(name, prefix=3), expected)


def test_two_windowed_layers_see_twice_as_far_and_an_encoder_sees_everything():
    distance = np.arange(6)[:, None] - np.arange(6)[None, :]
    np.testing.assert_array_equal(influence("windowed decoder"), np.isin(distance, [0, 2, 4]))
    assert not np.triu(influence("sparse decoder"), 1).any()
    assert influence("encoder").all()
    assert influence("longformer-base").all()  # through the global position


SCANNED = ["decoder", "adapters", "albert-base"]


@pytest.mark.parametrize("architecture", but_for({"adapters", "albert-base"}, SCANNED))
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients(architecture):
    batch, key = example(4, 5, 6, prefix=2), jax.random.key(7)
    expected = loss_and_gradients(make(architecture), batch, key)
    for settings in ({"compile.remat": "full"}, {"compile.remat": "dots", "compile.layers": "unroll"}):
        found = loss_and_gradients(make(architecture, **settings), batch, key)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{settings} {name}")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_remat_recomputes(dtype):
    batch = example(4, 5, 6)

    def products(remat):
        model = make("decoder", **{"compile.remat": remat, "dtype": dtype})
        gradient = jax.jit(jax.grad(lambda m: m(batch).sum()))
        return gradient.lower(model).as_text().count("dot_general")

    assert products("none") <= products("dots") < products("full")


def test_a_key_means_training_and_the_same_key_the_same_masks():
    model, batch = make("encoder-decoder"), example(5, 5, 6)
    plain, one, again, two = (
        run(model, batch, *k) for k in ((), (jax.random.key(1),), (jax.random.key(1),), (jax.random.key(2),))
    )
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - plain).max() > 1e-2
    assert np.abs(one - two).max() > 1e-2
    still = make("encoder-decoder", dropout=0.0)
    np.testing.assert_array_equal(run(still, batch, jax.random.key(1)), run(still, batch))


def test_dropout_keeps_the_mean_and_one_mask_for_the_whole_length():
    keep = draw_dropout_masks(jax.random.key(0), 0.25, 4, {"one": (1, 1000), "two": (2, 3)})
    assert keep["two"].shape == (4, 2, 3)
    x = dropout(jnp.ones((4, 50, 1000)), keep["one"], 0.25)
    assert (x == x[:, :1]).all()
    assert not (x[0] == x[1]).all()
    np.testing.assert_allclose(np.unique(x), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(x.mean(), 1, atol=0.02)


@pytest.mark.parametrize("name", ["params", "default"])
def test_keys_of_parameters_are_those_of_flaxs_stream_and_are_counted_as_there(name):
    ours, theirs = (nnx.Rngs(**{name: 7}) for _ in range(2))
    for _ in range(2):
        assert next_key(ours) == theirs.params()
        assert ours.params() == theirs.params()  # the two may take turns


def test_each_parameter_starts_with_the_standard_deviation_of_its_formula():
    config = changes(
        TINY,
        {
            "vocab_size": 2_000,
            "d_model": 64,
            "mlp.d_ff": 128,
            "attention.d_kv": 16,
            "positions.relative_buckets": 64,
            "mlp.activation": "gated-gelu",
            "output.logits": "separate",
        },
    )
    model = Transformer(config, nnx.Rngs(params=jax.random.key(0)))
    attention = {"query": (64 * 16) ** -0.5, "key": 64**-0.5, "value": 64**-0.5, "out": (4 * 16) ** -0.5}
    mlp = {"hidden": 64**-0.5, "linear": 64**-0.5, "out": 128**-0.5}
    for name, value in named(model).items():
        *_, module, layer, _ = ["", *name.split(".")]
        if name.endswith("scale"):
            assert (value == 1).all()
            continue
        tops = {"embed": 1.0, "head": 64**-0.5, "relative": 64**-0.5}
        std = tops[layer] if layer in tops else (mlp if module == "mlp" else attention)[layer]
        np.testing.assert_allclose(value.std(), std, rtol=0.15 if layer == "relative" else 0.03, err_msg=name)
    for name, value in named(model).items():  # no two layers, and no two parameters, start alike
        if "blocks" in name and name.endswith("kernel"):
            assert np.abs(value[0] - value[1]).max() > 0.01


# pre-norm, parallel, post-norm
@pytest.mark.parametrize("name", but_for({"bart-base"}, ("encoder-decoder", "gpt-neox-20b", "bart-base")))
def test_a_new_adapter_changes_next_to_nothing_and_no_other_parameter(name):
    plain, batch = make(name), example(14, 5, 6)
    adapted = made(changes(CONFIGS[name], {"mlp.adapter_width": 4}))
    for parameter, value in named(plain).items():
        np.testing.assert_array_equal(named(adapted)[parameter], value)
    before, after = features(plain, batch), features(adapted, batch)
    assert 0 < np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)


def test_adapters_are_as_large_as_the_papers():
    if not SETUP.exists():
        pytest.skip(f"{SETUP} is not here")
    due = json.loads(SETUP.read_text())["finetune_methods"]["adapters"]["value"]
    for width, more in due["computed_new_params_24_adapters_incl_norm"].items():
        plain, adapted = (
            num_parameters(
                jax.eval_shape(
                    partial(Transformer, changes(BASE, {"mlp.adapter_width": each})), nnx.Rngs(params=0)
                )
            )
            for each in (0, int(width))
        )
        assert adapted - plain == more


def test_a_shared_model_has_one_stack_and_both_uses_move_it():
    model, batch = make("shared-encoder-decoder"), example(6, 5, 6)
    assert {name.split(".")[0] for name in named(model)} == {"embed", "decoder"}
    encoder_only = jax.jit(jax.grad(lambda m: m.encode(batch).sum()))(model)
    moved = {name for name, value in named(encoder_only).items() if np.abs(value).max() > 0}
    assert moved == {name for name in named(model) if "cross" not in name}


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_laid_out_along_diagonals_is_the_bias_of_each_distance(bidirectional):
    bias = RelativePositionBias(TINY, nnx.Rngs(params=0), bidirectional)(bidirectional)
    np.testing.assert_array_equal(bias.materialize(9, 9), bias.evaluate(relative_positions(9, 9)))


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "prefix-decoder", "encoder"])
@pytest.mark.parametrize("positions", ["relative", "relative-per-layer"])
def test_a_start_with_slopes_is_alibis_bias_but_for_the_buckets(architecture, positions):
    """In each bucket the mean of ALiBi's bias, with slopes from 1 down; all other parameters are as ever."""
    new = {"architecture": architecture, "positions.kind": positions, "positions.relative_max_distance": 12}
    config = changes(TINY, {**new, "positions.relative_bias_start": "slopes"})
    start, normal = (
        named(made(config)),
        named(made(changes(config, {"positions.relative_bias_start": "normal"}))),
    )
    tables = {name: value for name, value in start.items() if "relative" in name}
    assert tables and all((start[name] == normal[name]).all() for name in start.keys() - tables.keys())
    alibi = AlibiBias(jnp.array([1, 1 / 2, 1 / 4, 1 / 8])).materialize(13, 13)[0]
    for name, table in tables.items():
        both = name.startswith("encoder") or architecture == "prefix-decoder"
        table = table[0] if positions == "relative-per-layer" else table
        bias = BucketedBias(table, both, 12).materialize(13, 13)[0]
        seen = np.ones((13, 13), bool) if both else np.tri(13, dtype=bool)
        near = seen & (
            abs(relative_positions(13, 13)[0]) < (2 if both else 4)
        )  # each of these has its own bucket
        np.testing.assert_array_equal(bias[:, near], alibi[:, near])
        first, last = bias[:, -1, :], alibi[:, -1, :]  # from the last query: each distance back once
        for bucket in np.unique(first[0]):
            held = first[0] == bucket
            np.testing.assert_allclose(
                first[:, held], last[:, held].mean(1, keepdims=True).repeat(held.sum(), 1)
            )


@pytest.mark.parametrize("new", [{}, {"attention.scores": "scaled-dot", "attention.num_key_value_heads": 2}])
def test_a_mimetic_start_lets_cross_attention_look_at_the_same_feature(new):
    """Query times key kernel of each head is about a multiple of the unit matrix, and all else as ever."""
    config = changes(TINY, {"d_model": 256, "attention.d_kv": 64, "cross_attention.start": "mimetic", **new})
    start, normal = named(made(config)), named(made(changes(config, {"cross_attention.start": "normal"})))
    changed = {name for name, value in start.items() if not (value == normal[name]).all()}
    assert changed == {"decoder.blocks.cross.query.kernel"}
    query, key = (start[f"decoder.blocks.cross.{side}.kernel"] for side in ("query", "key"))
    np.testing.assert_allclose(query.std(), normal["decoder.blocks.cross.query.kernel"].std(), rtol=0.05)
    key = key.reshape(2, 256, -1, 64).repeat(4 // (key.shape[-1] // 64), axis=2)
    products = np.einsum("ldnh,lenh->lnde", query.reshape(2, 256, 4, 64), key)
    same = jnp.diagonal(products, axis1=2, axis2=3)
    assert same.std() < 0.25 * same.mean()
    others = products[:, :, ~np.eye(256, dtype=bool)]
    np.testing.assert_allclose(same.mean() / others.std(), 64**0.5, rtol=0.05)


def test_bfloat16_activations_leave_parameters_and_logits_in_float32():
    model, batch = make("encoder-decoder", dtype="bfloat16"), example(7, 5, 6)
    assert {value.dtype for value in named(model).values()} == {jnp.dtype("float32")}
    assert run(model, batch, jax.random.key(0)).dtype == jnp.float32
    assert jax.eval_shape(lambda: model.encode(batch)).dtype == jnp.bfloat16
    exact = run(make("encoder-decoder"), batch)
    np.testing.assert_allclose(run(model, batch), exact, atol=0.2)


@pytest.mark.parametrize("outside", [40, -1, -100])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_token_outside_the_vocabulary_is_not_trained_on_silently(outside, rows):
    batch = Batch(decoder=Side(tokens=np.full((rows, 6), outside)))
    assert np.isnan(run(make("decoder"), batch)).all()
    inside = Batch(decoder=Side(tokens=np.full((rows, 6), 39)))
    assert np.isfinite(run(make("decoder"), inside)).all()


@pytest.mark.parametrize("name", ["decoder, learned", "bart-base"])  # which has rows in front of the first
@pytest.mark.parametrize("outside", [-1, -2, -3, 16])
def test_a_position_that_is_not_learned_is_no_other_position(name, outside):
    def last(position):
        positions = np.array([[0, 1, 2, 3, 4, position]])
        return run(make(name), with_side(example(8, 5, 6), "decoder", positions=positions))[0, 5]

    assert np.isnan(last(outside)).all()
    assert np.isfinite(last(0)).all() and np.isfinite(last(15)).all()


def test_rows_longer_than_positions_are_learned_are_refused_before_anything_is_computed():
    model = make("decoder, learned")

    def shapes(length, **new):
        batch = Batch(decoder=Side(tokens=jnp.ones((1, length), jnp.int32), **new))
        return jax.eval_shape(lambda: model(batch)).shape

    assert shapes(16) == (1, 16, 40)
    with pytest.raises(SettingError, match="rows of 17 tokens are longer than model.positions.max_length=16"):
        shapes(17)
    with pytest.raises(SettingError, match="rows of 17 tokens"):
        shapes(17, segment_ids=jnp.ones((1, 17), jnp.int32))
    packed = jnp.arange(20)[None] % 10  # two texts, neither of which is too long
    assert shapes(20, segment_ids=jnp.ones_like(packed), positions=packed) == (1, 20, 40)
    assert jax.eval_shape(lambda: make("decoder, rotary")(example(1, 4, 30))).shape == (1, 30, 40)


def test_a_side_that_the_batch_lacks_is_named():
    model, batch = make("encoder-decoder"), example(8, 5, 6)
    calls = (model, model.hidden_states, partial(model.prefill, max_length=8))
    for call in calls:
        with pytest.raises(SettingError, match=r"the batch has no decoder side.*Batch\(decoder=Side\("):
            jax.eval_shape(call, replace(batch, decoder=None))
    for call in (*calls, model.encode, partial(decode, model)):
        with pytest.raises(SettingError, match="the batch has no encoder side"):
            jax.eval_shape(call, replace(batch, encoder=None))


def decode(model, batch):
    return greedy(model, batch, max_length=2)


class Holder(nnx.Module):
    def __init__(self, model):
        self.model = model


@pytest.mark.parametrize("switch", ["train", "eval"])
def test_a_mode_that_would_change_nothing_is_refused(switch):
    model = make("decoder")
    for module in (model, Holder(model)):
        with pytest.raises(SettingError, match=r"having a key means training.*call model\(batch, key\)"):
            getattr(module, switch)()
    assert named(model) and np.isfinite(run(model, example(8, 5, 6))).all()


def test_a_table_that_cannot_be_made_leaves_the_model_as_it_is():
    model, batch = make("decoder"), example(8, 5, 6)
    before = run(model, batch)
    with pytest.raises(SettingError, match="nnx.tabulate cannot show.*lm.sharding.named"):
        nnx.tabulate(model, batch)
    np.testing.assert_array_equal(run(model, batch), before)
    again = jax.jit(lambda model: model(batch))  # which calls the model anew, as ``run`` does not
    np.testing.assert_allclose(again(model), before, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder-decoder", "santacoder", "lstm encoder-decoder", "albert-base"])
def test_flax_is_told_where_parameters_live(name):
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2, data=1), jax.devices()[:2])
    model = make(name)
    told = named(nnx.get_partition_spec(nnx.state(model)))
    for parameter, place in parameter_shardings(model, mesh).items():
        by_head = "kv_heads" in logical_axes(model)[parameter]  # where they divide
        assert told[parameter] == place.spec or by_head, parameter
    assert any("tensor" in spec for spec in told.values())


@pytest.mark.parametrize(
    ("settings", "named_setting"),
    [
        ({"attention.num_key_value_heads": 3}, "num_key_value_heads"),
        ({"attention.num_key_value_heads": -4}, "num_key_value_heads"),
        ({"embedding.type_vocab_size": -1}, "type_vocab_size"),
        ({"heads": ("next-sentence",)}, "heads"),
        ({"mlp.adapter_width": -1}, "adapter_width"),
        ({"positions.kind": "rotary", "positions.rotary": RotaryConfig(fraction=1.5)}, "rotary.fraction"),
        ({"positions.kind": "sinusoidal", "d_model": 15}, "d_model"),
        ({"output.logits": "tied", "embedding.d_embed": 8}, "output.transform"),
        ({"sparsity": SparsityConfig(window=1, projections="separate")}, "sparsity.projections"),
        ({"attention.mask": "none", "architecture": "encoder"}, "mask='none' is of decoders"),
        (
            {"attention.mask": "none", "mixer.kind": "lstm", "positions.kind": "none"},
            "mixer.kind='lstm' has no mask",
        ),
        ({"residual": "none", "mixer.kind": "none", "positions.kind": "none"}, "residual='none'"),
        ({"mlp.activation": "none", "output.transform": True}, "mlp.activation='none'"),
        ({"mlp.activation": "none", "heads": ("replaced-token",)}, "mlp.activation='none'"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_the_name_of_its_setting(settings, named_setting):
    with pytest.raises(SettingError, match=named_setting):
        changes(TINY, settings)


def test_global_tokens_and_random_blocks_need_a_window():
    with pytest.raises(SettingError, match="sparsity.random_blocks=2 needs"):
        SparsityConfig(random_blocks=2)


@pytest.mark.parametrize(  # one of each kind of model.output.logits
    "name",
    but_for(
        {"gpt2", "t5-1.1-base"}, ["bert-base", "electra-small", "gpt2", "t5-base", "t5-1.1-base", "llama-7b"]
    ),
)
def test_first_logits_are_of_the_size_of_one(name):
    model = Transformer(
        tiny(name, d_model=64, **{"embedding.d_embed": None}), nnx.Rngs(params=jax.random.key(0))
    )
    x = jax.random.normal(jax.random.key(1), (1, 4, 64))
    scale = 64**-0.5 if model.config.output.logits == "tied-scaled" else 1.0
    logits = model.embed.logits(x * scale) if model.head is None else model.logits(x)
    assert 0.5 < logits.std() < 2


def test_a_model_without_an_output_matrix_says_so():
    with pytest.raises(SettingError, match="logits"):
        jax.eval_shape(make("electra-small"), example(13, 5, 5))
