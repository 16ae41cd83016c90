"""LoRA: a model with low-rank updates starts as the one without, learns by them alone, and merges."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sharded_training import transformer_batch
from small_models import CONFIGS, TINY, example, filled

from experiments.runs.init_from import experiment_for_model
from experiments.runs.kinds.finetuning import text_spec
from experiments.runs.kinds.head import head_spec
from experiments.runs.stages import stages
from experiments.study.experiment import Experiment
from lm import convert, sharding
from lm.config.base import SettingError, changes
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.mesh import MeshConfig
from lm.config.model import HeadConfig, LoraConfig, ModelConfig
from lm.config.training import CheckpointConfig, OptimizerConfig
from lm.data.tasks.labelled import find_labelled
from lm.nn.elmo import BidirectionalLM
from lm.nn.finetune import ModelWithHead, merge_lora
from lm.nn.layers import num_parameters
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.train.flops import step_flops
from lm.train.optimizers import train_lora
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.step import StepSpec, build

ALL = LoraConfig(rank=2, alpha=3.0, matrices=("query", "key", "value", "out", "mlp"))
MODELS = {
    "encoder-decoder": replace(TINY, dropout=0.0),
    "grouped heads": replace(CONFIGS["llama-3.1-8b"], dropout=0.0),
    "global projections": replace(CONFIGS["longformer-base"], dropout=0.0),
    "shared layers": replace(CONFIGS["albert-base"], dropout=0.0),
}
DECAYING = OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.1, weight_decay=0.5)


def with_updates(plain, params, seed=None):
    """The model of ``params`` with new low-rank updates or, of a seed, with such that change what it does."""
    fresh = Transformer(replace(plain, lora=ALL), nnx.Rngs(params=1))
    values = sharding.named(fresh) | params
    if seed is not None:
        draw = np.random.default_rng(seed).standard_normal
        values |= {n: jnp.float32(0.3 * draw(x.shape)) for n, x in values.items() if n.endswith("lora.up")}
    return jax.tree.unflatten(jax.tree.structure(fresh), list(values.values()))


def features(model):
    return jax.jit(Transformer.features)(model, example(0, 6, 6))


QUICK = ("encoder-decoder", "grouped heads")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_a_new_model_equals_the_one_without_updates_and_a_merged_one_the_one_with_them(name):
    plain = Transformer(MODELS[name], nnx.Rngs(params=0))
    new = with_updates(MODELS[name], sharding.named(plain))
    np.testing.assert_array_equal(features(new), features(plain))
    moved = with_updates(MODELS[name], sharding.named(plain), seed=0)
    whole = merge_lora(moved)
    assert whole.config == MODELS[name] and sharding.named(whole).keys() == sharding.named(plain).keys()
    np.testing.assert_allclose(features(whole), features(moved), atol=2e-5)
    assert np.abs(features(moved) - features(plain)).max() > 1e-2


def test_both_directions_of_a_bidirectional_model_are_merged():
    config = changes(TINY, {"architecture": "decoder", "heads": ("backward",), "dropout": 0.0})
    updated = filled(jax.eval_shape(lambda: BidirectionalLM(replace(config, lora=ALL), nnx.Rngs(params=0))))
    whole, batch, compute = merge_lora(updated), example(0, 6, 6), jax.jit(BidirectionalLM.features)
    assert not whole.config.lora.rank and not [name for name in sharding.named(whole) if ".lora." in name]
    np.testing.assert_allclose(compute(whole, batch), compute(updated, batch), atol=2e-5)


def built(mesh, devices, **settings):
    model = changes(
        TINY,
        {
            "attention.num_heads": 8,
            "attention.d_kv": 2,
            "dropout": 0.0,
            "compile.layers": "unroll",
            "lora": ALL,
        },
    )
    return build(
        StepSpec(model, DECAYING, mask_updates=train_lora, **settings), sharding.make_mesh(mesh, devices)
    )


def after_two_steps(steps):
    state, step = steps.initial_state(0), steps.seeded_train_step(0)
    before = {name: np.asarray(value) for name, value in state.params.items()}
    for k in range(2):
        state, _ = step(state, steps.shard_batch(transformer_batch(k)))
    return before, {name: np.asarray(value) for name, value in state.params.items()}


@pytest.fixture(scope="module")
def alone():
    return after_two_steps(built(MeshConfig(), jax.devices()[:1]))


@pytest.mark.slow
def test_updates_alone_are_trained_whatever_decays(alone):
    before, after = alone
    moved = {name for name in after if (after[name] != before[name]).any()}
    assert moved == {name for name in after if ".lora." in name}


@pytest.mark.slow
def test_updates_are_trained_alike_on_one_device_and_on_eight(alone):
    _, others = after_two_steps(built(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()))
    for name, value in alone[1].items():
        np.testing.assert_allclose(others[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_new_head_is_trained_with_the_updates():
    model = jax.eval_shape(
        lambda: ModelWithHead(replace(TINY, lora=ALL), HeadConfig("classes", classes=2), nnx.Rngs(0))
    )
    ones = {name: jnp.ones(leaf.shape) for name, leaf in sharding.named(model).items()}
    moved = {name for name, value in train_lora(ones, jnp.int32(0)).items() if value.any()}
    assert moved == {name for name in ones if ".lora." in name or name.startswith("head.")}


def test_updates_cost_their_parameters_at_every_position_they_read():
    config = ModelConfig(
        "decoder",
        100,
        1,
        2,
        d_model=64,
        mlp=MlpConfig(d_ff=128),
        attention=AttentionConfig(d_kv=16, num_heads=4),
    )
    for matrices in (("query", "value"), ("key", "out"), ("mlp",)):
        new = replace(config, lora=LoraConfig(rank=4, matrices=matrices))
        sizes = [
            num_parameters(jax.eval_shape(lambda c=each: Transformer(c, nnx.Rngs(params=0))))
            for each in (config, new)
        ]
        assert sizes[1] - sizes[0] == 2 * 2 * 4 * (64 + 128 if matrices == ("mlp",) else 64 + 64)
        more = step_flops(new, 8, 0, 32) - step_flops(config, 8, 0, 32)
        assert more == 6 * 8 * 32 * (sizes[1] - sizes[0])


@pytest.mark.parametrize(("size", "rank", "millions"), [("roberta-base", 8, 0.3), ("roberta-large", 8, 0.8)])
def test_updates_are_as_large_as_the_papers(size, rank, millions):
    """Table 2 of Hu et al. 2021, with updates of queries and values."""
    sizes = [
        num_parameters(jax.eval_shape(lambda c=each: Transformer(c, nnx.Rngs(params=0))))
        for each in (PRESETS[size], replace(PRESETS[size], lora=LoraConfig(rank=rank)))
    ]
    assert round((sizes[1] - sizes[0]) / 1e6, 1) == millions


def tuned(**new):
    return changes(experiment_for_model(MODELS["encoder-decoder"]), {"tuning.lora.rank": 2} | new)


def test_a_tuned_run_is_read_as_the_plain_model(tmp_path):
    """By all that generates, scores and exports."""
    plain = changes(
        PRESETS["t5-small"],
        {"vocab_size": 40, "d_model": 16, "mlp.d_ff": 32, "attention.num_heads": 2, "attention.d_kv": 8},
    )
    plain = replace(plain, num_encoder_layers=1, num_decoder_layers=1, dropout=0.0)
    new = {"tuning.mixtures": ("glue/cola",), "tuning.lora": ALL}
    stage = next(s for s in stages(changes(experiment_for_model(plain), new), tmp_path) if s.writes_answers)
    spec, mesh = text_spec(stage.settings), sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    assert spec.mask_updates is train_lora
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        build(spec, mesh).abstract,
    )
    model = with_updates(plain, sharding.named(Transformer(plain, nnx.Rngs(params=0))), seed=0)
    with Checkpoints(stage.folder / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(replace(state, step=jnp.int32(1), params=sharding.named(model)))
    found = stage.restore_transformer(mesh)
    convert.save(found, tmp_path / "out")
    published, read = convert.load(tmp_path / "out")
    assert replace(published, published="", dropout=0.0) == found.config == plain
    np.testing.assert_allclose(features(read), features(model), atol=2e-5)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"tuning.adapters": 0.5}, r"tuning.adapters=0.5 and tuning.lora.rank=2 say different things"),
        (
            {"tuning.unfreezing": "gradual"},
            r"tuning.lora.rank=2 and tuning.unfreezing='gradual' say different",
        ),
        (
            {"tuning.layers": "last-frozen"},
            r"tuning.lora.rank=2 and tuning.layers='last-frozen' say different",
        ),
        ({"tuning.lora.rank": -1}, r"lora.rank=-1 should be at least 0"),
        ({"tuning.lora.alpha": 0.0}, r"lora.alpha=0.0 should be above 0"),
        (
            {"model.lora.rank": 2},
            r"model.lora.rank=2 should be 0: low-rank updates are set by tuning.lora.rank",
        ),
    ],
)
def test_what_makes_no_sense_with_low_rank_updates_is_refused(new, message):
    with pytest.raises(SettingError, match=message):
        tuned(**new)


@pytest.mark.parametrize(
    ("model", "matrices", "message"),
    [
        (
            {"mixer.kind": "lstm", "positions.kind": "none"},
            ("query",),
            r"model.mixer.kind='lstm' has no attention for lora",
        ),
        (
            {"mlp.activation": "none"},
            ("query", "mlp"),
            r"model.mlp.activation='none' has no matrix for lora.matrices",
        ),
    ],
)
def test_matrices_that_a_model_lacks_are_refused_by_their_names(model, matrices, message):
    lora = LoraConfig(rank=2, matrices=matrices)
    experiment = replace(Experiment(), model=changes(TINY, model))
    experiment = replace(experiment, tuning=replace(experiment.tuning, lora=lora))
    with pytest.raises(SettingError, match=message):
        text_spec(experiment)
    with pytest.raises(SettingError, match=message):
        head_spec(experiment, find_labelled("sst2"))
