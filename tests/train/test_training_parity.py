"""Ten steps of training published checkpoints, by the optimisers of the study, are those of the reference."""

import zlib
from dataclasses import replace

import jax
import numpy as np
import pytest
from paths import GOLDEN

from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import changes
from lm.config.mesh import MeshConfig
from lm.config.training import LossConfig, OptimizerConfig
from lm.convert import load
from lm.convert.config_json import config_json
from lm.convert.families import FAMILIES
from lm.convert.tensors import tensors
from lm.sharding import named
from lm.train.losses import language_model, masked_lm
from lm.train.step import StepSpec, build

STEPS = 10
# the settings of golden/make_training.py
OPTIMIZERS = {
    "adamw": OptimizerConfig(
        name="adamw", learning_rate=1e-3, schedule="constant", epsilon=1e-4, weight_decay=0.01
    ),
    "adafactor": OptimizerConfig(learning_rate=1e-2, schedule="constant", factor_from=1),
}
RATES = {"t5_v1_0": 0.1}  # of these, in a model whose scores are not scaled
CASES = [(name, "adamw") for name in ("t5_v1_0", "bert", "gpt2", "llama_gqa")]
# by Adafactor not GPT-2, which stores three matrices as one, nor BERT: a bias of keys has no gradient but
# rounding, which Adafactor makes as large as any
CASES += [(name, "adafactor") for name in ("t5_v1_0", "llama_gqa")]
QUICK = {("llama_gqa", "adamw")}


@pytest.fixture(scope="module")
def reference():
    with np.load(GOLDEN / "training.npz") as arrays:
        return dict(arrays)


def products(name, array):
    """[5]: the norm of a tensor, and its products with vectors that its name decides."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    flat = np.asarray(array, np.float64).ravel()
    return np.array([np.linalg.norm(flat), *(rng.standard_normal((4, flat.size)) @ flat)])


def batch_of(name):
    """What the reference was given, as batches of ours have it."""
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        given = {key[3:]: arrays[key] for key in arrays.files if key.startswith("in/")}
    ids, seen, labels = given["input_ids"], given["attention_mask"], given["labels"]
    weights = (labels != -100).astype(np.float32)
    targets = np.where(labels == -100, 0, labels)
    predicted = {"targets": targets, "loss_weights": weights}
    if name == "bert":
        return Batch(
            encoder=Side(tokens=ids, segment_ids=seen, token_types=given["token_type_ids"], **predicted),
            sentence_labels=given["next_sentence_label"],
            sentence_loss_weights=np.ones(len(ids), np.float32),
        )
    if "decoder_input_ids" in given:
        tokens, segments = given["decoder_input_ids"], given["decoder_attention_mask"]
        return Batch(
            encoder=Side(tokens=ids, segment_ids=seen),
            decoder=Side(tokens=tokens, segment_ids=segments, **predicted),
        )
    return Batch(
        decoder=Side(
            tokens=ids[:, :-1], segment_ids=seen[:, :-1], targets=targets[:, 1:], loss_weights=weights[:, 1:]
        )
    )


def trained(name, kind):
    """(losses, parameters after the last step by name, the model's settings), without dropout."""
    config, model = load(GOLDEN / name)
    loss = masked_lm if name == "bert" else language_model
    settings = changes(config, {"dropout": 0.0, "compile.layers": "unroll"})
    optimizer = OPTIMIZERS[kind]
    rate = optimizer.learning_rate * RATES.get(name, 1.0)
    spec = StepSpec(
        settings, replace(optimizer, learning_rate=rate), loss=loss, loss_config=LossConfig(z_loss=0.0)
    )
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    steps = build(spec, mesh)
    fresh, batch = steps.initial_state(0), sharding.put_batch(batch_of(name), mesh)
    params = {path: jax.device_put(x, fresh.params[path].sharding) for path, x in named(model).items()}
    state, step, losses = replace(fresh, params=params), steps.seeded_train_step(0), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"] + metrics.get("sentence_loss", 0.0)))
    return losses, {path: np.asarray(x) for path, x in state.params.items()}, config


def published(params, config):
    """``{their name: array}`` of our parameters."""
    family = FAMILIES[config_json(config)["model_type"]]
    due = tensors(family, config, {path: x.shape for path, x in params.items()})
    return {name: tensor.gather(params) for name, tensor in due.items()}


@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_ten_steps_of_training_give_the_losses_and_the_weights_of_the_reference(name, kind, reference):
    losses, params, config = trained(name, kind)
    np.testing.assert_allclose(losses, reference[f"{name}/{kind}/losses"], rtol=1e-5)
    compared = 0
    for tensor, array in published(params, config).items():
        if (due := reference.get(f"{name}/{kind}/{tensor}")) is not None:
            np.testing.assert_allclose(
                products(tensor, array), due, rtol=0, atol=1e-5 * due[0], err_msg=tensor
            )
            compared += 1
    assert compared > 10
