"""Laws of losses of target tokens: those that a module adds, label smoothing, and what is evaluated."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
import toy

from experiments.runs.kinds.finetuning import text_spec
from experiments.runs.kinds.pretraining import pretraining_spec
from experiments.runs.stages import stages
from experiments.study.registry import build
from lm.batch import Batch, Side
from lm.config.base import SettingError, changes, unused_settings
from lm.config.training import LossConfig
from lm.ops.losses import cross_entropy, token_loss_sums
from lm.train import losses
from lm.train.step import StepSpec

MODELS = {
    "encoder-decoder": losses.language_model,
    "gpt2": losses.language_model,
    "bert-base": losses.masked_lm,
}
OWN: Any = "own"  # a name that a module adds


def plain(logits, targets):
    """The cross-entropy, written as a module would."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]


@pytest.fixture(autouse=True)
def own(monkeypatch):
    monkeypatch.setitem(losses.TOKEN_LOSSES, "own", plain)


def batch_of(config, length=9):
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 1, (2, length)) * (rng.random((2, length)) < 0.6)
    side = Side(
        tokens=rng.integers(5, config.vocab_size, (2, length), np.int32),
        targets=np.where(weights > 0, rng.integers(5, config.vocab_size, (2, length)), -100).astype(np.int32),
        loss_weights=weights.astype(np.float32),
        segment_ids=np.ones((2, length), np.int32),
    )
    names = [name for name in ("encoder", "decoder") if getattr(config, f"has_{name}")]
    return Batch(**dict.fromkeys(names, side))


# a decoder's loss does not depend on whether an encoder is before it
@pytest.mark.parametrize("chunks", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "encoder-decoder")) for name in MODELS]
)
def test_a_loss_of_a_module_that_is_the_cross_entropy_has_its_value_and_gradient(name, chunks):
    model = small_models.make(name, **{"compile.loss_chunks": chunks} if chunks > 1 else {})
    batch = batch_of(model.config)

    def of(config, model):
        def loss(model):
            return MODELS[name](model, batch, jax.random.key(1), config)

        return jax.value_and_grad(loss, has_aux=True)(model)

    configs = LossConfig(z_loss=0.01), LossConfig(OWN, z_loss=0.01)
    due, found = jax.jit(lambda model: [of(config, model) for config in configs])(model)
    for one, other in zip(jax.tree.leaves(due), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)
    assert np.abs(jax.tree.leaves(due[1])[0]).max() > 0


def test_targets_of_weight_0_change_no_loss_and_no_gradient_and_wrong_ones_give_nan():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 7)).astype(np.float32)
    targets, weights = rng.integers(0, 7, (2, 5)), np.ones((2, 5), np.float32)

    sums = jax.jit(lambda *arrays: token_loss_sums(plain, *arrays, z_loss=0.1))
    both = jax.jit(jax.value_and_grad(lambda *arrays: sums(*arrays)[0]))

    weights[0, 2:] = 0
    broken = np.where(weights[..., None] == 0, np.float32(np.inf), logits)
    ignored = np.where(weights == 0, -100, targets)
    (due, gradient), (found, others) = (
        jax.tree.map(np.asarray, both(*arrays, weights)) for arrays in ((logits, targets), (broken, ignored))
    )
    assert found == due and (others == gradient).all() and not others[0, 2:].any()
    expected = jax.jit(lambda *arrays: cross_entropy(*arrays, z_loss=0.1, label_smoothing=0.0))
    np.testing.assert_allclose(sums(logits, targets, weights), expected(logits, targets, weights), rtol=1e-6)

    def divides(logits, targets):
        return plain(logits, targets) / logits.std(-1)  # not a number where all logits are equal

    def divided(logits, *arrays):
        return token_loss_sums(divides, logits, *arrays, z_loss=0.1)[0]

    value, others = jax.jit(jax.value_and_grad(divided))(logits, targets, weights)
    assert np.isfinite(value) and np.isfinite(others).all()
    for wrong in (-1, 7):
        assert np.isnan(sums(logits, np.where(weights > 0, wrong, targets), weights)[0])


def test_evaluations_measure_the_cross_entropy_whatever_the_loss_of_training(monkeypatch):
    monkeypatch.setitem(losses.TOKEN_LOSSES, "own", lambda logits, targets: 2 * plain(logits, targets))
    model = replace(toy.MODEL, dropout=0.0)
    usual, smoothed, doubled = (
        toy.steps(model=model, loss_config=config)
        for config in (
            LossConfig(z_loss=0.0),
            LossConfig(z_loss=0.0, label_smoothing=0.3),
            LossConfig(OWN, z_loss=0.0),
        )
    )
    state, batch = usual.initial_state(0), toy.batch(0)
    due = usual.evaluate(state, [batch])
    for steps in (smoothed, doubled):
        assert steps.evaluate(state, [batch]) == due
    trained = [
        steps.seeded_train_step(0)(steps.initial_state(0), steps.shard_batch(batch))[1]
        for steps in (usual, doubled, smoothed)
    ]
    assert trained[1]["loss"] == pytest.approx(2 * float(trained[0]["loss"]), rel=1e-5)
    assert trained[2]["loss"] != pytest.approx(float(trained[0]["loss"]), rel=1e-3)


def test_a_row_trains_with_the_losses_of_its_phases_and_shares_its_start():
    row, folder = "t5/1-baseline/baseline", Path("runs/nano/t5/1-baseline/baseline/seed-0")
    usual = build(row, "nano", {"tuning.mixtures": ("extract",)})
    smoothed = changes(usual, {"pretraining.loss.label_smoothing": 0.1, "finetuning.loss.z_loss": 0.0})
    assert pretraining_spec(smoothed).loss_config == LossConfig(label_smoothing=0.1)
    assert text_spec(smoothed).loss_config == LossConfig(z_loss=0.0)
    before, after = (
        {stage.title: stage for stage in stages(experiment, folder, Path("runs/cache"))}
        for experiment in (usual, smoothed)
    )
    start, trained = "start phase", "pre-training"
    assert before[start].folder == after[start].folder and before[trained].folder != after[trained].folder
    assert after[start].step_spec().loss_config == LossConfig()


def test_a_setting_of_a_loss_that_nothing_reads_is_named():
    experiment = build("t5/1-baseline/baseline", "nano", {"tuning.mixtures": (), "tuning.heads": ("cola",)})
    assert "tuning.mixtures" in unused_settings(experiment, ["finetuning.loss"])["finetuning.loss.z_loss"]
    for wrong in ({"z_loss": -1.0}, {"label_smoothing": 1.0}, {"label_smoothing": -0.1}):
        with pytest.raises(SettingError, match=rf"^loss\.{next(iter(wrong))}="):
            LossConfig(**wrong)


def test_a_loss_that_no_module_has_added_is_refused_with_the_nearest_name():
    unknown: Any = "cross-entropi"
    with pytest.raises(
        SettingError, match=r"^loss\.name='cross-entropi' is unknown; did you mean 'cross-ent"
    ):
        StepSpec(toy.MODEL, loss_config=LossConfig(unknown))
    assert StepSpec(toy.MODEL, loss_config=LossConfig(OWN)).loss_config.name == "own"
