"""Heads of tuned models in the published format: what transformers computes above recorded checkpoints."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden.drawn import drawn
from paths import GOLDEN
from safetensors.numpy import load_file

from lm.batch import Batch, Side
from lm.config.base import SettingError
from lm.config.model import HeadConfig
from lm.convert import class_of, load, save
from lm.nn.finetune import ModelWithHead
from lm.sharding import named

KINDS = {
    "SequenceClassification": HeadConfig("classes", 3),
    "MultipleChoice": HeadConfig("choice"),
    "TokenClassification": HeadConfig("tokens", 3),
    "QuestionAnswering": HeadConfig("span"),
}
FEATURES = {"input_ids": "tokens", "attention_mask": "segment_ids", "token_type_ids": "token_types"}
with np.load(GOLDEN / "heads.npz") as arrays:
    RECORDED = dict(arrays)


def tuned(family, head):
    """The checkpoint below ``head``; pooler and head are drawn as for the recordings."""
    config, body = load(GOLDEN / family)
    if head.kind in ("classes", "choice", "regression"):
        config = replace(config, heads=tuple({*config.heads, "pooler"}))
    model, given = ModelWithHead(config, head, nnx.Rngs(params=0)), named(body)
    theirs = "qa_outputs" if head.kind == "span" else "classifier"
    drawn_as = {"body.pooler.": "pooler", "head.out.": theirs}
    params = {}
    for name, value in named(model).items():
        module = next((new for old, new in drawn_as.items() if name.startswith(old)), None)
        if module is None:
            params[name] = given[name.removeprefix("body.")]
        elif name.endswith("kernel"):
            params[name] = jnp.asarray(drawn(f"{module}.weight", value.shape[::-1]).T)
        else:
            params[name] = jnp.asarray(drawn(f"{module}.bias", value.shape))
    return jax.tree.unflatten(jax.tree.structure(model), list(params.values()))


@pytest.mark.parametrize("recorded", RECORDED)
def test_a_head_gives_what_its_class_of_transformers_gives_and_is_written_as_its(recorded, tmp_path):
    family, suffix = recorded.split("/")
    head = KINDS[suffix]
    model = tuned(family, head)
    with np.load(GOLDEN / family / "golden.npz") as golden:
        given = {
            ours: golden[f"in/{theirs}"] for theirs, ours in FEATURES.items() if f"in/{theirs}" in golden
        }
    side = Side(**given)
    batch = Batch(encoder=side.map(lambda x: x[None]) if head.kind == "choice" else side)
    found, expected = np.asarray(model(batch)), RECORDED[recorded]
    if head.kind == "span":
        found = found.swapaxes(1, 2)
    valid = given["segment_ids"] > 0 if head.kind in ("tokens", "span") else ...
    np.testing.assert_allclose(found[valid], expected[valid], atol=2e-5)

    labels = ("no", "perhaps", "yes") if head.classes == 3 else ()
    save(model, tmp_path / "out", labels=labels)
    written, theirs = load_file(tmp_path / "out" / "model.safetensors"), tmp_path / "out" / "config.json"
    module = "qa_outputs" if head.kind == "span" else "classifier"
    for name in (f"{module}.weight", f"{module}.bias"):
        np.testing.assert_array_equal(written[name], drawn(name, written[name].shape))
    config = json.loads(theirs.read_text())
    assert config["architectures"] == [class_of(model)] and class_of(model).endswith(f"For{suffix}")
    if labels:
        assert config["id2label"] == {"0": "no", "1": "perhaps", "2": "yes"}
    again, below = named(load(tmp_path / "out")[1]), named(model.body)
    for name, value in again.items():
        np.testing.assert_array_equal(below[name], value)
    pooled = head.kind not in ("tokens", "span")  # classes of the others have no pooler
    parts = {"embed", "encoder", *(["pooler"] * pooled)}  # of pre-training's heads nothing is left
    assert {*again} == {name for name in below if name.partition(".")[0] in parts}


@pytest.mark.parametrize(
    ("family", "head", "message"),
    [
        ("bert", HeadConfig("classes", 2, pool="mean"), "tuning.pool='mean' should be 'first'"),
        ("bert", HeadConfig("classes", 2, layers="mixed-frozen"), "mixes layers"),
        ("roberta", HeadConfig("classes", 2), "no class of a roberta with one linear layer for classes"),
        ("gpt2", HeadConfig("classes", 2, pool="last"), "no class of a gpt2"),
    ],
)
def test_a_head_that_no_class_computes_is_refused_with_the_reason(family, head, message, tmp_path):
    config, _ = load(GOLDEN / family)
    model = ModelWithHead(config, head, nnx.Rngs(params=0))
    with pytest.raises(SettingError, match=message):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_is_no_heads_is_refused_in_a_tuned_model_too(tmp_path):
    from safetensors.numpy import save_file

    save(tuned("bert", KINDS["TokenClassification"]), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file(load_file(path) | {"bert.adapter.weight": np.ones(2, np.float32)}, path)
    with pytest.raises(SettingError, match=r"unknown: bert.adapter.weight"):
        load(tmp_path / "out")
