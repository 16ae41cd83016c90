"""Published checkpoints: the numbers of an independent implementation (transformers 5.23, float32), and refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from lm.convert import CheckpointError, load, t5
from lm.evaluate.decode import decode
from lm.nn.transformer import Transformer
from lm.ops.losses import cross_entropy
from lm.ops.sampling import greedy
from lm.sharding import named

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = ["t5_v1_0", "t5_v1_1"]
run = jax.jit(Transformer.__call__)


@pytest.fixture(scope="module", params=FOLDERS)
def golden(request):
    folder = GOLDEN / request.param
    arrays = {name: np.asarray(value) for name, value in np.load(folder / "golden.npz").items()}
    return load(folder)[1], arrays, json.loads((folder / "meta.json").read_text())


def batch_of(arrays, source="in/"):
    return {
        "encoder_input_tokens": arrays[f"{source}input_ids"],
        "encoder_segment_ids": arrays[f"{source}attention_mask"],
        "decoder_input_tokens": arrays["in/decoder_input_ids"],
        "decoder_segment_ids": arrays["in/decoder_attention_mask"],
    }


@pytest.mark.parametrize("source", ["in/", "left_pad/"])
def test_logits_are_those_of_the_reference(golden, source):
    model, arrays, _ = golden
    logits = run(model, batch_of(arrays, source))
    valid = arrays["in/decoder_attention_mask"] > 0
    np.testing.assert_allclose(logits[valid], arrays["out/logits"][valid], atol=1e-5)


def test_encodings_are_those_of_the_reference(golden):
    model, arrays, _ = golden
    encode = jax.jit(Transformer.encode)
    valid = arrays["in/attention_mask"] > 0
    np.testing.assert_allclose(encode(model, batch_of(arrays))[valid], arrays["hidden/enc_final"][valid], atol=2e-5)
    if "long/input_ids" in arrays:
        encoded = encode(model, {"encoder_input_tokens": arrays["long/input_ids"]})
        np.testing.assert_allclose(encoded, arrays["long/enc_final"], atol=1e-5)


def test_packed_pairs_have_the_logits_that_the_reference_gives_each_alone(golden):
    model, arrays, _ = golden
    batch = {}
    for ours, theirs in (("encoder", "input_ids"), ("decoder", "decoder_input_ids")):
        parts = [arrays[f"pack/{theirs}_{k}"] for k in range(3)]
        batch[f"{ours}_input_tokens"] = np.concatenate(parts, axis=1)
        batch[f"{ours}_segment_ids"] = np.concatenate([np.full_like(p, k + 1) for k, p in enumerate(parts)], axis=1)
    expected = np.concatenate([arrays[f"pack/logits_{k}"] for k in range(3)], axis=1)
    np.testing.assert_allclose(run(model, batch), expected, atol=1e-5)


def test_loss_and_gradient_norms_are_those_of_the_reference(golden):
    model, arrays, meta = golden
    labels = arrays["in/labels"]

    @jax.jit
    @jax.value_and_grad
    def loss(model):
        weights = labels != -100
        total, count, _ = cross_entropy(
            model(batch_of(arrays)), np.maximum(labels, 0), weights, z_loss=0.0, label_smoothing=0.0
        )
        return total / count

    value, gradients = loss(model)
    np.testing.assert_allclose(value, arrays["out/loss"], atol=1e-5)
    seen = 0
    for path, gradient in named(gradients).items():
        theirs = t5.name(path, model.config)
        for layer, part in enumerate(gradient) if "#" in theirs else [(0, gradient)]:
            expected = meta["grad_norms"][theirs.replace("#", str(layer))]
            np.testing.assert_allclose(jnp.linalg.norm(part), expected, rtol=1e-5, err_msg=theirs)
            seen += 1
    assert seen == len(meta["grad_norms"])


@pytest.mark.parametrize("name", ["greedy_no_eos", "greedy"])
def test_greedy_tokens_are_those_of_the_reference(golden, name):
    model, arrays, meta = golden
    eos = meta["gen"]["eos_token_id"] if name == "greedy" else -1
    expected = arrays[f"gen/{name}/sequences"][:, 1:]
    tokens = decode(model, batch_of(arrays), max_length=expected.shape[1], choose=greedy, eos=eos, key=None)
    np.testing.assert_array_equal(tokens, expected)


def test_bfloat16_stays_near_the_reference(golden):
    model, arrays, _ = golden
    low = jax.eval_shape(lambda: Transformer(replace(model.config, dtype="bfloat16"), nnx.Rngs(params=0)))
    low = jax.tree.unflatten(jax.tree.structure(low), jax.tree.leaves(model))
    logits = run(low, batch_of(arrays))
    valid = arrays["in/decoder_attention_mask"] > 0
    assert logits.dtype == jnp.float32
    assert 1e-4 < np.abs(logits[valid] - arrays["out/logits"][valid]).max() < 0.2


def test_every_misfit_of_a_checkpoint_is_listed_at_once(tmp_path):
    shutil.copy(GOLDEN / "t5_v1_0" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "t5_v1_0" / "model.safetensors")
    del tensors["encoder.block.1.layer.0.SelfAttention.k.weight"]
    tensors["decoder.final_layer_norm.weight"] = np.ones(31, np.float32)
    tensors["surprise.weight"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    listed = [line.split()[:2] for line in str(error.value).splitlines()[1:]]
    assert listed == [
        ["misshapen:", "decoder.final_layer_norm.weight"],
        ["missing:", "encoder.block.1.layer.0.SelfAttention.k.weight"],
        ["unknown:", "surprise.weight"],
    ]


def test_copies_of_the_embedding_are_accepted_and_impostors_are_not(tmp_path):
    shutil.copy(GOLDEN / "t5_v1_0" / "config.json", tmp_path)
    tensors = load_file(GOLDEN / "t5_v1_0" / "model.safetensors")
    tensors |= dict.fromkeys(t5.COPIES, tensors["shared.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    save_file(tensors | {"lm_head.weight": tensors["shared.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unknown: lm_head.weight"):
        load(tmp_path)
