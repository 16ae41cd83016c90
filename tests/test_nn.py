"""Laws of the Transformer, for every architecture, family and way to tell positions apart."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm.batch import Batch, Side
from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import SettingError
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig
from lm.evaluate.generate import greedy
from lm.nn.dropout import draw_dropout_masks, dropout
from lm.nn.layers import count
from lm.nn.positions import RelativePositionBias
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.ops.losses import cross_entropy
from lm.ops.masks import relative_positions
from lm.ops.positions import AlibiBias, BucketedBias
from lm.sharding import axes, make_mesh, named, parameters

TINY = ModelConfig(
    vocab_size=40,
    num_encoder_layers=2,
    num_decoder_layers=2,
    d_model=16,
    d_ff=24,
    d_kv=8,
    num_heads=4,
    dropout=0.1,
    relative_buckets=8,
    relative_max_distance=6,
    max_length=16,
)
SHAPE = {
    name: getattr(TINY, name)
    for name in (
        "vocab_size",
        "num_encoder_layers",
        "num_decoder_layers",
        "d_model",
        "d_ff",
        "d_kv",
        "num_heads",
        "max_length",
    )
}
BASE = PRESETS["t5-base"]
SETUP = Path(__file__).parents[2] / "shared" / "t5" / "setup.json"
ARCHITECTURES = ["encoder-decoder", "shared-encoder-decoder", "decoder", "prefix-decoder", "encoder"]
POSITIONS = ["none", "learned", "sinusoidal", "relative-per-layer", "rotary", "alibi"]  # besides TINY's
WINDOW = {"sparsity": SparsityConfig(window=2, global_tokens=1, projections="separate")}
BLOCKS = {"sparsity": SparsityConfig(window=0, global_tokens=1, block=2, random_blocks=1)}


def tiny(size, **new):
    """The family of a published size, as small as TINY."""
    return replace(PRESETS[size], **SHAPE | {"d_embed": 8 if PRESETS[size].d_embed else None} | new)


CONFIGS = {a: replace(TINY, architecture=a) for a in ARCHITECTURES}
CONFIGS |= {
    f"{a}, {p}": replace(TINY, architecture=a, positions=p, rotary=RotaryConfig(fraction=0.5))
    for a in ("encoder-decoder", "decoder", "encoder")
    for p in POSITIONS
}
CONFIGS |= {
    name: tiny(name)
    for name in (
        "umt5-small",
        "transformer-base",
        "marian",
        "bart-base",
        "bert-base",
        "roberta-base",
        "albert-base",
        "electra-small",
        "gpt",
        "gpt2",
        "gpt-neox-20b",
        "bloom",
        "llama-7b",
    )
}
CONFIGS |= {
    "llama-3.1-8b": tiny("llama-3.1-8b", num_key_value_heads=2),
    "santacoder": tiny("santacoder", num_key_value_heads=1),
    "longformer-base": tiny("longformer-base", **WINDOW),
    "sparse decoder": replace(TINY, architecture="decoder", **BLOCKS),
    "windowed decoder": replace(TINY, architecture="decoder", sparsity=SparsityConfig(window=1, dilation=2)),
    "bilinear": replace(TINY, scores="bilinear"),
    "adapters": replace(TINY, adapter_width=4),
    "no mask": replace(TINY, architecture="decoder", mask="none"),
    "no feed-forward": replace(TINY, mlp="none"),
    "no residual": replace(TINY, residual="none"),
    "no norm": replace(TINY, norm="none", adapter_width=4),
}
CONFIGS |= {
    f"{mixer} encoder-decoder": replace(TINY, mixer=mixer, mixer_width=12, positions="none")
    for mixer in ("rnn", "gru", "lstm", "window", "none")
}
CONFIGS |= {
    f"{mixer} decoder, {cross} cross-attention": replace(
        TINY, mixer=mixer, mixer_width=12, positions="none", cross_attention=cross
    )
    for mixer, cross in (("lstm", "none"), ("gru", "none"), ("lstm", "dot"), ("lstm", "additive"))
}
CONFIGS |= {"multiplicative cross-attention": replace(TINY, cross_attention="multiplicative")}
DECODERS = [name for name, config in CONFIGS.items() if config.has_decoder]


@cache
def made(config):
    return Transformer(config, nnx.Rngs(params=jax.random.key(0)))


def make(name, **settings):
    """The same parameters for all ``settings``, none of which changes their shapes."""
    config = replace(CONFIGS[name], **settings)
    structure = jax.tree.structure(jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))
    return jax.tree.unflatten(structure, jax.tree.leaves(made(CONFIGS[name])))


def example(seed, source, target, prefix=0):
    """One sequence pair alone in a batch; ``prefix`` positions of the target see one another."""
    random = np.random.default_rng(seed)
    prefix = (np.arange(target) < prefix)[None].astype(int)
    source, target = (random.integers(2, 40, (1, length)) for length in (source, target))
    return Batch(
        encoder=Side(tokens=source, segment_ids=np.ones_like(source)),
        decoder=Side(tokens=target, segment_ids=np.ones_like(target), causal_attention=prefix),
    )


def joined(examples):
    """The examples packed into one row."""
    numbered = [
        b.map_sides(lambda side, k=k: replace(side, segment_ids=side.segment_ids * (k + 1)))
        for k, b in enumerate(examples)
    ]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays, axis=1), *numbered)


def with_side(batch, name, **new):
    """The batch with other arrays on one side."""
    return replace(batch, **{name: replace(batch.side(name), **new)})


def padded(batch, length):
    return batch.map(lambda value: np.pad(value, ((0, 0), (0, length - value.shape[1]))))


run = jax.jit(lambda model, batch, key=None: model(batch, key))
features = jax.jit(Transformer.features)


# test_parity.py packs texts for their published weights and decodes with these, over the cache too
PUBLISHED = {name for name in PRESETS if name in CONFIGS}


# decoders whose cache is that of another one, with another part around it
LIKE_OTHERS = {"adapters", "bilinear", "no residual", "no feed-forward", "no norm"}
LIKE_OTHERS |= {f"decoder, {p}" for p in POSITIONS} | {f"{m} encoder-decoder" for m in ("rnn", "gru", "none")}
LIKE_OTHERS |= {f"encoder-decoder, {p}" for p in ("none", "sinusoidal", "relative-per-layer")}
LIKE_OTHERS |= {f"lstm decoder, {cross} cross-attention" for cross in ("dot", "additive")}


def but_for(slow, names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("name", but_for(PUBLISHED, CONFIGS))
def test_a_packed_example_sees_only_itself_and_padding_changes_nothing(name):
    model = make(name)
    examples = [example(1, 5, 7, prefix=3), example(2, 6, 4, prefix=2)]
    packed = features(model, padded(joined(examples), 12))[0]
    first, second = (features(model, padded(b, 12))[0] for b in examples)
    ends = (7, 4) if model.config.has_decoder else (5, 6)
    np.testing.assert_allclose(
        packed[: sum(ends)], np.concatenate([first[: ends[0]], second[: ends[1]]]), atol=1e-5
    )
    if name in ARCHITECTURES:
        without = examples[0].map_sides(lambda side: replace(side, segment_ids=None))
        np.testing.assert_allclose(features(model, without)[0], first[: ends[0]], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    but_for(PUBLISHED | LIKE_OTHERS, (name for name in DECODERS if CONFIGS[name].mask == "causal")),
)
def test_a_step_over_the_cache_gives_what_the_whole_row_gives(name):
    model, batch = make(name), example(3, 5, 9)
    batch = with_side(batch, "decoder", causal_attention=np.zeros((1, 9), int) if "prefix" in name else None)
    if model.config.logits == "none":
        pytest.skip("no logits")
    full = run(model, batch)
    prompt = replace(batch, decoder=batch.decoder.map(lambda value: value[:, :4]))
    logits, cached = jax.jit(Transformer.prefill, static_argnums=2)(model, prompt, 11)
    step = jax.jit(Transformer.step)
    for place in range(4, 9):
        np.testing.assert_allclose(logits[0], full[0, place - 1], atol=2e-5)
        logits, cached = step(model, batch.decoder.tokens[:, place], cached)
    np.testing.assert_allclose(logits[0], full[0, 8], atol=2e-5)


class Given(nnx.Module):
    """Embeddings that stand for themselves."""

    dtype = "float32"

    def __init__(self, embedded):
        self.embedded = nnx.Param(embedded)

    def __call__(self, tokens):
        return self.embedded[...]

    def logits(self, x):
        return x


def influence(name, prefix=0):
    """bool [T,T]: which input positions move each position's output, through the embedding of each."""
    model, batch = make(name), example(3, 6, 6, prefix=prefix)
    if model.config.has_decoder and model.config.has_encoder:
        # not under test: nobody sees the encoder's output
        batch = with_side(batch, "encoder", segment_ids=np.zeros((1, 6), int))
    side = "decoder" if model.config.has_decoder else "encoder"

    def outputs(embedded):
        changed = jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model))
        changed.embed = Given(embedded)
        return changed.features(batch)[0]

    jacobian = jax.jit(jax.jacobian(outputs))(model.embed(batch.side(side).tokens))
    return np.abs(jacobian[:, :, 0]).max((1, 3)) > 0


@pytest.mark.parametrize("name", [*ARCHITECTURES[:4], "gpt-neox-20b", "bloom"])
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


def loss_and_gradients(model, batch, key):
    def loss(model):
        side = "decoder" if model.config.has_decoder else "encoder"
        targets = np.roll(batch.side(side).tokens, -1, axis=1)
        weights = batch.side(side).segment_ids > 0
        return cross_entropy(model(batch, key), targets, weights, z_loss=1e-4, label_smoothing=0.0)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss))(model)
    return {"loss": value} | named(gradients)


@pytest.mark.parametrize("architecture", but_for({"adapters", "albert-base"}, SCANNED))
def test_scanned_unrolled_and_recomputed_stacks_give_the_same_loss_and_gradients(architecture):
    batch, key = example(4, 5, 6, prefix=2), jax.random.key(7)
    expected = loss_and_gradients(make(architecture), batch, key)
    for settings in ({"remat": "full"}, {"remat": "dots", "layers": "unroll"}):
        found = loss_and_gradients(make(architecture, **settings), batch, key)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{settings} {name}")


def test_remat_recomputes():
    batch = example(4, 5, 6)

    def products(remat):
        gradient = jax.jit(jax.grad(lambda m: m(batch).sum()))
        return gradient.lower(make("decoder", remat=remat)).as_text().count("dot_general")

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


def test_each_parameter_starts_with_the_standard_deviation_of_its_formula():
    config = replace(
        TINY,
        vocab_size=2_000,
        d_model=64,
        d_ff=128,
        d_kv=16,
        relative_buckets=64,
        mlp="gated-gelu",
        logits="separate",
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
@pytest.mark.parametrize("name", ["encoder-decoder", "gpt-neox-20b", "bart-base"])
def test_a_new_adapter_changes_next_to_nothing_and_no_other_parameter(name):
    plain, batch = make(name), example(14, 5, 6)
    adapted = made(replace(CONFIGS[name], adapter_width=4))
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
            count(jax.eval_shape(partial(Transformer, replace(BASE, adapter_width=each)), nnx.Rngs(params=0)))
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
    new = {"architecture": architecture, "positions": positions, "relative_max_distance": 12}
    config = replace(TINY, **new, relative_bias_start="slopes")
    start, normal = named(made(config)), named(made(replace(config, relative_bias_start="normal")))
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


@pytest.mark.parametrize("new", [{}, {"scores": "scaled-dot", "num_key_value_heads": 2}])
def test_a_mimetic_start_lets_cross_attention_look_at_the_same_feature(new):
    """Query times key kernel of each head is about a multiple of the unit matrix, and all else as ever."""
    config = replace(TINY, d_model=256, d_kv=64, cross_attention_start="mimetic", **new)
    start, normal = named(made(config)), named(made(replace(config, cross_attention_start="normal")))
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
    with pytest.raises(SettingError, match="rows of 17 tokens are longer than model.max_length=16"):
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
            call(replace(batch, decoder=None))
    for call in (*calls, model.encode, partial(decode, model)):
        with pytest.raises(SettingError, match="the batch has no encoder side"):
            call(replace(batch, encoder=None))


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
    np.testing.assert_allclose(model(batch), before, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder-decoder", "santacoder", "lstm encoder-decoder", "albert-base"])
def test_flax_is_told_where_parameters_live(name):
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2, data=1), jax.devices()[:2])
    model = make(name)
    told = named(nnx.get_partition_spec(nnx.state(model)))
    for parameter, place in parameters(model, mesh).items():
        by_head = "kv_heads" in axes(model)[parameter]  # where they divide
        assert told[parameter] == place.spec or by_head, parameter
    assert any("tensor" in spec for spec in told.values())


@pytest.mark.parametrize(
    ("settings", "named_setting"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"type_vocab_size": -1}, "type_vocab_size"),
        ({"heads": ("next-sentence",)}, "heads"),
        ({"adapter_width": -1}, "adapter_width"),
        ({"positions": "rotary", "rotary": RotaryConfig(fraction=1.5)}, "rotary.fraction"),
        ({"positions": "sinusoidal", "d_model": 15}, "d_model"),
        ({"logits": "tied", "d_embed": 8}, "logits_transform"),
        ({"sparsity": SparsityConfig(window=1, projections="separate")}, "sparsity.projections"),
        ({"mask": "none", "architecture": "encoder"}, "mask='none' is of decoders"),
        ({"mask": "none", "mixer": "lstm", "positions": "none"}, "mixer='lstm' has no mask"),
        ({"residual": "none", "mixer": "none", "positions": "none"}, "residual='none'"),
        ({"mlp": "none", "logits_transform": True}, "mlp='none'"),
        ({"mlp": "none", "heads": ("replaced-token",)}, "mlp='none'"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_the_name_of_its_setting(settings, named_setting):
    with pytest.raises(SettingError, match=named_setting):
        replace(TINY, **settings)


def test_global_tokens_and_random_blocks_need_a_window():
    with pytest.raises(SettingError, match="sparsity.random_blocks=2 needs"):
        SparsityConfig(random_blocks=2)


@pytest.mark.parametrize("name", ["bert-base", "electra-small", "gpt2", "t5-base", "t5-1.1-base", "llama-7b"])
def test_first_logits_are_of_the_size_of_one(name):
    model = Transformer(tiny(name, d_model=64, d_embed=None), nnx.Rngs(params=jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (1, 4, 64))
    scale = 64**-0.5 if model.config.logits == "tied-scaled" else 1.0
    logits = model.embed.logits(x * scale) if model.head is None else model.logits(x)
    assert 0.5 < logits.std() < 2


def test_a_model_without_an_output_matrix_says_so():
    with pytest.raises(SettingError, match="logits"):
        make("electra-small")(example(13, 5, 5))
