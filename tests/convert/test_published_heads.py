"""Heads of tuned models in the published formats: what transformers computes above recorded checkpoints."""

import json
from dataclasses import replace
from functools import cache

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
from lm.convert import class_name_of_model, describe, load, pooling_of, save
from lm.convert.heads import is_head_tensor, published_head
from lm.nn.finetune import ModelWithHead
from lm.nn.transformer import Transformer
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

recorded_checkpoint = cache(lambda family: load(GOLDEN / family))
run = jax.jit(lambda model, batch: model(batch))
features = jax.jit(Transformer.features)


def abstract(config, head):
    return jax.eval_shape(lambda: ModelWithHead(config, head, nnx.Rngs(params=0)))


def with_params(model, params):
    """The abstract model with these arrays, by name."""
    arrays = [jnp.asarray(params[name]) for name in named(model)]
    return jax.tree.unflatten(jax.tree.structure(model), arrays)


def random_model(config, head):
    """A model whose parameters are all drawn."""
    model = abstract(config, head)
    return with_params(model, {name: drawn(name, value.shape) for name, value in named(model).items()})


def module_of(name):
    """What drawn.py calls a module of a published head, by the name of its tensor."""
    path = name.split(".")[:-1]
    heads = (
        "pooler",
        "pre_classifier",
        "classifier",
        "sequence_summary",
        "logits_proj",
        "qa_outputs",
        "score",
        "dense",
    )
    module = next(part for part in path if part in heads)
    return path[-1] if module == "classifier" else module


def tuned(family, head):
    """The checkpoint below ``head``, whose layers are drawn as recorded; a bias that theirs lacks is 0.

    The dense layer of BERT's and ALBERT's classes is the pooler, which their checkpoints may have. What is
    called so in DeBERTa's classes is of the head.
    """
    config, body = recorded_checkpoint(family)
    published = published_head(config, head)
    task_class = published.family.task_classes[head.kind]
    has_pooler = task_class.dense is not None and task_class.dense.endswith(("pooler", "pooler.dense"))
    if has_pooler and family not in ("roberta", "deberta_v2"):
        config = replace(config, heads=tuple({*config.heads, "pooler"}))
    elif task_class.dense is not None:
        head = replace(head, dense=task_class.activation)
    if head.is_pooled:
        head = replace(head, pool=task_class.pool)
    model, given = abstract(config, head), named(body)
    theirs = {
        "body.pooler.": task_class.dense,
        "head.dense.": task_class.dense,
        "head.out.": task_class.output,
    }
    params = {}
    for name, value in named(model).items():
        module = next((new for old, new in theirs.items() if name.startswith(old)), None)
        if module is None:
            params[name] = given[name.removeprefix("body.")]
        elif name.endswith("kernel"):
            weight = module_of(f"{module}.weight")
            params[name] = drawn(f"{weight}.weight", value.shape[::-1]).T
        elif module == "score" and not task_class.has_bias:
            params[name] = np.zeros(value.shape, np.float32)
        else:
            params[name] = drawn(f"{module_of(f'{module}.bias')}.bias", value.shape)
    return with_params(model, params)


def batch_of(family, config, kind=None):
    """The recorded inputs of a checkpoint, and where they have tokens."""
    with np.load(GOLDEN / family / "golden.npz") as golden:
        given = {
            ours: golden[f"in/{theirs}"] for theirs, ours in FEATURES.items() if f"in/{theirs}" in golden
        }
    side = Side(**given)
    if kind == "choice":
        side = side.map(lambda x: x[None])
    name = "decoder" if config.has_decoder else "encoder"
    return Batch(**{name: side}), given["segment_ids"] > 0


@cache
def outputs_of_body(family):
    """What the model below all heads of a family computes of the recorded inputs."""
    config, body = recorded_checkpoint(family)
    batch, _ = batch_of(family, config)
    return jax.tree.map(np.asarray, jax.jit(Transformer.outputs)(body, batch))


WITHOUT_BIAS = ("xlnet", "eurobert")  # whose heads are recorded without biases
WHOLE = ("bert/SequenceClassification", "gpt2/SequenceClassification")
FAST = ("bert", "albert", "roberta", "distilbert", "electra_disc", "gpt2", "llama_gqa")


@pytest.mark.parametrize(
    "recorded", [pytest.param(x, marks=[] if x.startswith(FAST) else pytest.mark.slow) for x in RECORDED]
)
def test_a_head_gives_what_its_class_of_transformers_gives_and_is_written_as_its(
    recorded, tmp_path, monkeypatch
):
    family, suffix = recorded.split("/")
    model, below = tuned(family, KINDS[suffix]), outputs_of_body(family)
    head = model.settings
    batch, is_token = batch_of(family, model.config, head.kind)
    with monkeypatch.context() as patch:
        if recorded not in WHOLE:  # the heads of a family differ, not what is below them
            patch.setattr(Transformer, "outputs", lambda *_: jax.tree.map(jnp.asarray, below))
        found = np.asarray(jax.jit(lambda model, batch: model(batch))(model, batch))
    expected = RECORDED[recorded]
    if head.kind == "span":
        found = found.swapaxes(1, 2)
    valid = ... if head.is_pooled else is_token
    if expected.any():  # a token class of a decoder without biases has one, which is drawn
        bias = 0.0 if family in WITHOUT_BIAS else extra_bias(model)
        np.testing.assert_allclose(found[valid] + bias, expected[valid], atol=3e-5)

    labels = ("no", "perhaps", "yes") if head.classes == 3 else ()
    save(model, tmp_path / "out", labels=labels)
    written, theirs = load_file(tmp_path / "out" / "model.safetensors"), tmp_path / "out" / "config.json"
    heads = {name: x for name, x in written.items() if is_head_tensor(name)}
    for name, array in heads.items():
        if array.any():  # else a bias that our head lacks
            np.testing.assert_array_equal(
                array, drawn(f"{module_of(name)}.{name.split('.')[-1]}", array.shape)
            )
    config = json.loads(theirs.read_text())
    assert config["architectures"] == [class_name_of_model(model)]
    assert class_name_of_model(model).endswith(f"For{suffix}")
    if labels:
        assert config["id2label"] == {"0": "no", "1": "perhaps", "2": "yes"}
    again, before = named(load(tmp_path / "out")[1]), named(model.body)
    for name, value in again.items():
        if name in before:
            np.testing.assert_array_equal(before[name], value)
    # of pre-training's heads nothing is left but what XLNet's classes have too
    parts = {name.partition(".")[0] for name in again} - {"query_embedding"}
    assert parts <= {"embed", "encoder", "decoder", "pooler"}
    assert {name for name in before if name.startswith(("embed.", "encoder.", "decoder."))} <= {*again}


def extra_bias(model):
    """The bias that the recorded class has and the head of a model without biases lacks."""
    kind = model.settings.kind
    if model.head.out.bias is not None or kind not in ("tokens", "span"):
        return 0.0
    module = "qa_outputs" if kind == "span" else "score"
    return drawn(f"{module}.bias", (model.head.out.kernel.shape[-1],))


def test_a_bias_that_the_class_of_a_decoder_lacks_moves_into_the_norm_below(tmp_path):
    model = tuned("gpt2", KINDS["SequenceClassification"])
    model.head.out.bias[...] = jnp.array([0.5, -1.0, 2.0])
    batch, _ = batch_of("gpt2", model.config)
    save(model, tmp_path / "out")
    score = load_file(tmp_path / "out" / "model.safetensors")["score.weight"]
    _, body = load(tmp_path / "out")
    last = np.asarray(batch.decoder.segment_ids).sum(1) - 1
    states = np.asarray(features(body, batch))[np.arange(len(last)), last]
    np.testing.assert_allclose(states @ score.T, run(model, batch), atol=2e-5)


def test_a_head_whose_bias_cannot_move_is_refused(tmp_path):
    model = tuned("gpt2", KINDS["SequenceClassification"])
    model.head.out.kernel[...] = jnp.ones(model.head.out.kernel.shape)
    model.head.out.bias[...] = jnp.array([0.5, -1.0, 2.0])
    with pytest.raises(SettingError, match="GPT2ForSequenceClassification has no bias"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_class_that_reads_the_last_token_does_not_take_the_end_of_a_text_for_padding(tmp_path):
    model = tuned("gpt2", KINDS["SequenceClassification"])
    special = model.body.config.special
    for pad, expected in ((special.eos, None), (0, 0)):
        model.body.config = replace(model.body.config, special=replace(special, pad=pad), published="")
        save(model, tmp_path / str(pad))
        assert json.loads((tmp_path / str(pad) / "config.json").read_text())["pad_token_id"] == expected


@pytest.mark.parametrize("family", ["llama_gqa", "gptj"])
def test_an_untied_decoder_is_read_below_its_head_without_an_output_matrix_and_written_again(
    family, tmp_path
):
    model = tuned(family, KINDS["SequenceClassification"])
    save(model, tmp_path / "out")
    config, body = load(tmp_path / "out")
    assert config.output.logits == "none" and body.head is None
    save(random_model(config, model.settings), tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["architectures"] == [class_name_of_model(model)]


@pytest.mark.parametrize(
    ("suffix", "due"), [("TokenClassification", "id2label label2id"), ("MultipleChoice", "")]
)
def test_nothing_is_written_of_the_head_of_the_file_that_a_model_was_loaded_with(suffix, due):
    model = tuned("bert", KINDS[suffix])
    former = {"id2label": {"0": "a"}, "label2id": {"a": 0}, "num_labels": 1, "problem_type": "regression"}
    published = json.dumps(json.loads(model.body.config.published) | former)
    model.body.config = replace(model.body.config, published=published)
    written, _ = describe(model, ())
    assert former.keys() & written.keys() == {*due.split()}
    assert all(written[name] != former[name] for name in due.split())


@pytest.mark.parametrize(
    ("family", "head", "message"),
    [
        ("bert", HeadConfig("classes", 2, layers="mixed-frozen"), "mixture of all layers.*'last' or"),
        ("bart", HeadConfig("classes", 2, pool="last"), "by one position and .* tuning.mixtures instead"),
        ("longformer", HeadConfig("span"), "no class of longformer for span"),
        ("openai_gpt", HeadConfig("tokens", 3), "no class of openai-gpt for tokens"),
    ],
)
def test_a_head_that_no_program_computes_is_refused_with_the_reason_and_what_leaves(
    family, head, message, tmp_path
):
    config, _ = recorded_checkpoint(family)
    model = random_model(config, head)
    with pytest.raises(SettingError, match=message):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# what sentence-transformers computes is stated here in numpy
ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: np.asarray(jax.nn.gelu(x, approximate=False)),
}
POOLINGS = {
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_lasttoken": lambda states: states[-1],
    "pooling_mode_mean_tokens": lambda states: states.mean(0),
    "pooling_mode_max_tokens": lambda states: states.max(0),
}


def by_modules(folder, states, is_token):
    """What the modules after the first of a folder compute of the states [B,T,D] of its model."""
    _, pooling, *layers = json.loads((folder / "modules.json").read_text())
    config = json.loads((folder / pooling["path"] / "config.json").read_text())
    assert config["word_embedding_dimension"] == states.shape[-1]
    (mode,) = [name for name, value in config.items() if value is True]
    x = np.stack([POOLINGS[mode](row[real]) for row, real in zip(states, is_token, strict=True)])
    for layer in layers:
        config = json.loads((folder / layer["path"] / "config.json").read_text())
        tensors = load_file(folder / layer["path"] / "model.safetensors")
        x = x @ tensors["linear.weight"].T + (tensors["linear.bias"] if config["bias"] else 0)
        x = ACTIVATIONS[config["activation_function"].rpartition(".")[2]](x)
    return x


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", HeadConfig("classes", 3, pool="mean")),
        ("bert", HeadConfig("classes", 3, pool="max", dense="gelu")),
        ("bert", HeadConfig("classes", 3, dense="relu")),  # through the pooler and another layer
        ("distilbert", HeadConfig("regression")),
        ("gpt2", HeadConfig("classes", 3, pool="mean")),
        ("openai_gpt", HeadConfig("classes", 3, pool="last")),  # its last norm is in a block
        ("llama_gqa", HeadConfig("choice", pool="last")),
    ],
)
def test_other_heads_on_texts_leave_as_modules_that_compute_the_same(family, head, tmp_path):
    config, _ = recorded_checkpoint(family)
    model = random_model(config, head)
    assert class_name_of_model(model) == "SentenceTransformer"
    save(model, tmp_path / "out", labels=(), max_length=40)
    batch, is_token = batch_of(family, config, head.kind)
    loaded_config, loaded = load(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())["max_seq_length"] == 40
    with pytest.warns(UserWarning, match="Dense is not read"):
        assert pooling_of(tmp_path / "out") == head.pool
    flat = batch.map_sides(lambda side: side.map(lambda x: x.reshape(-1, x.shape[-1])))
    states = np.asarray(features(loaded, flat))
    found = by_modules(tmp_path / "out", states, is_token)
    np.testing.assert_allclose(found.ravel(), np.asarray(run(model, batch)).ravel(), atol=2e-5)


def test_how_a_folder_of_sentence_transformers_pools_is_read_in_both_spellings(tmp_path):
    assert pooling_of(tmp_path) is None
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "1_Pooling").mkdir()
    for config, expected in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "first"),
    ):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        assert pooling_of(tmp_path) == expected
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": ["cls", "mean"]}))
    with pytest.raises(SettingError, match="not supported, only one of"):
        pooling_of(tmp_path)


def test_a_pooling_is_read_in_the_folder_that_modules_json_names(tmp_path):
    kinds = {"": "Transformer", "1_WeightedLayerPooling": "WeightedLayerPooling", "2_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Pooling").mkdir()
    (tmp_path / "2_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with pytest.warns(UserWarning, match="WeightedLayerPooling is not read"):
        assert pooling_of(tmp_path) == "mean"
    (tmp_path / "2_Pooling" / "config.json").unlink()
    with pytest.warns(UserWarning), pytest.raises(SettingError, match=r"2_Pooling.config.json"):
        pooling_of(tmp_path)
    for contents, found in (("5", "5"), ('["a"]', "'a'"), ('[{"type": "x.Pooling", "path": 3}]', "3")):
        (tmp_path / "modules.json").write_text(contents)
        with pytest.raises(SettingError, match=rf"modules.json.* {found}"):
            pooling_of(tmp_path)


def test_a_tensor_that_is_no_heads_is_refused_in_a_tuned_model_too(tmp_path):
    from safetensors.numpy import save_file

    save(tuned("bert", KINDS["TokenClassification"]), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file(load_file(path) | {"bert.adapter.weight": np.ones(2, np.float32)}, path)
    with pytest.raises(SettingError, match=r"unknown: bert.adapter.weight"):
        load(tmp_path / "out")
