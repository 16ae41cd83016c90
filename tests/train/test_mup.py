"""muP: steps change what a model computes by as much at any width, and at the base nothing is different."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.figures.coordinate_check import at_width, coordinate_changes
from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import SettingError, changes
from lm.config.layers import AttentionConfig, CompileConfig, MlpConfig
from lm.config.model import ModelConfig
from lm.config.training import OptimizerConfig
from lm.nn.attention import attention_scale
from lm.nn.transformer import Transformer
from lm.train.mup import check_optimizer, learning_rate_multipliers
from lm.train.optimizers import make_optimizer, train_all

BASE = ModelConfig(
    "decoder",
    vocab_size=50,
    num_decoder_layers=1,
    d_model=16,
    dropout=0.0,
    mlp=MlpConfig(d_ff=32),
    attention=AttentionConfig(num_heads=2, d_kv=8),
    compile=CompileConfig(layers="unroll"),
)
ADAMW = OptimizerConfig(name="adamw", schedule="constant", learning_rate=0.01)
TOKENS = np.random.default_rng(0).integers(2, 50, (2, 16), np.int32)
BATCH = Batch(
    decoder=Side(
        tokens=TOKENS, targets=np.roll(TOKENS, -1, 1), loss_weights=np.ones(TOKENS.shape, np.float32)
    )
)


@pytest.mark.slow
def test_a_step_changes_states_and_logits_by_as_much_at_any_width_with_mup_and_by_more_without():
    mup = [coordinate_changes(at_width(BASE, width, True), ADAMW, BATCH, 3) for width in (16, 32, 64)]
    standard = [coordinate_changes(at_width(BASE, width, False), ADAMW, BATCH, 3) for width in (16, 64)]
    for name in ("hidden states", "logits"):
        sizes = np.array([width[name] for width in mup])  # [widths, steps]
        np.testing.assert_array_equal(sizes[0], standard[0][name], "the base is the standard, bit for bit")
        assert (sizes.max(0) / sizes.min(0) < 2.5).all() and (sizes[-1] / sizes[0] < 1.2).all(), name
        assert (standard[1][name] / standard[0][name] > 2).all(), name


@pytest.mark.parametrize(
    ("logits", "scores"), [("tied", "scaled-dot"), ("tied-scaled", "dot"), ("separate", "dot")]
)
def test_each_parameter_starts_and_learns_as_the_table_says(logits, scores):
    base = changes(BASE, {"output.logits": logits, "attention.scores": scores, "embedding.scale": "sqrt"})
    wide = at_width(base, 64, is_mup=True)
    models = [Transformer(config, nnx.Rngs(params=jax.random.key(0))) for config in (base, wide)]
    small, large = map(sharding.named, models)
    hidden = {name for name in small if ".blocks." in name and name.endswith("kernel")}
    assert learning_rate_multipliers(wide, sharding.logical_axes(models[1])) == dict.fromkeys(hidden, 1 / 4)
    for name in small:
        ratio = np.std(large[name]) / np.std(small[name]) if np.std(small[name]) else 1.0
        assert ratio == pytest.approx(1 / 2 if name in hidden else 1, rel=0.2), name
    assert attention_scale(wide) == attention_scale(base) / 4
    embeddings = [
        model.decoder._first_block_input(jnp.ones((1, 1, 16)), None, None, None) for model in models
    ]
    assert (embeddings[0] == embeddings[1]).all(), "the factor of embeddings is the base's"
    states = [jnp.ones((1, 1, config.d_model)) for config in (base, wide)]
    matrices = [sharding.named(model)["head.kernel" if model.head else "embed.table"] for model in models]
    small_logits, large_logits = (
        model.logits(x).std() / (jnp.abs(matrix).mean() * x.shape[-1] ** 0.5)
        for model, x, matrix in zip(models, states, matrices, strict=True)
    )
    assert large_logits / small_logits == pytest.approx(1 / 4, rel=0.3), "of a product with as many terms"


def test_only_the_update_of_a_matrix_is_smaller_in_a_wider_model_not_its_weight_decay():
    axes = {"w": ("layers", "embed", "mlp"), "b": ("layers", "mlp")}
    assert learning_rate_multipliers(at_width(BASE, 16, is_mup=True), axes) == {}
    factors = learning_rate_multipliers(at_width(BASE, 32, is_mup=True), axes)
    params = {"w": jnp.ones((1, 2, 2)), "b": jnp.ones((1, 2))}

    def update(weight_decay, gradient):
        config = changes(ADAMW, {"weight_decay": weight_decay, "learning_rate": 1.0})
        optimizer = make_optimizer(config, axes, train_all, factors)
        grads = {name: jnp.full_like(x, gradient) for name, x in params.items()}
        new, _ = optimizer.update(grads, optimizer.init(params), params, step=jnp.int32(0))
        return {name: float(x.mean()) for name, x in new.items()}

    assert update(0.0, 3.0) == pytest.approx({"w": -0.5, "b": -1})
    assert update(0.1, 0.0) == pytest.approx({"w": -0.1, "b": 0})


@pytest.mark.parametrize(
    "optimizer",
    [{"name": "muon"}, {"name": "adamw-relative"}, {"name": "adafactor"}],
    ids=lambda new: new["name"],
)
def test_an_optimiser_whose_rule_is_another_is_refused(optimizer):
    wide, config = at_width(BASE, 32, is_mup=True), changes(OptimizerConfig(), optimizer)
    with pytest.raises(SettingError, match="model.mup.base=16 .* choose one of the two"):
        check_optimizer(wide, config)
    check_optimizer(BASE, config)
    check_optimizer(wide, changes(OptimizerConfig(), {"relative": "none"}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("mixer.kind", "synthesizer"),
        ("attention.scores", "bilinear"),
        ("embedding.d_embed", 4),
    ],
)
def test_a_part_that_the_table_does_not_cover_is_refused(path, value):
    with pytest.raises(SettingError, match="not for published weights"):
        changes(BASE, {"mup.base": 16, "published": "{}"})
    with pytest.raises(SettingError, match=rf"model.mup.base=16 has no rule for model.{path}="):
        changes(BASE, {"mup.base": 16, "output.logits": "separate", path: value})
