"""Published checkpoints: read and written to the byte, and refused where they are not what they should be."""

import json
import os
import re
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import published
import pytest
import toy
from flax import nnx
from paths import GOLDEN, ROOT
from safetensors.numpy import load_file, save_file

from experiments.cli.convert import export_checkpoint, import_checkpoint
from experiments.evaluate.generation import Filling, fill_gaps
from experiments.runs.stages import stages_of
from experiments.runs.trained import open_run
from lm.batch import Batch, Side
from lm.config.base import SettingError, change, changes
from lm.config.layers import AttentionConfig, MlpConfig
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig, SpecialTokens
from lm.config.training import CheckpointConfig, OptimizerConfig
from lm.convert import load, save
from lm.convert.config_json import (
    config_json,
    flatten_sections,
    model_config,
    pretraining_heads_of_checkpoint,
)
from lm.convert.families import FAMILIES, UNSUPPORTED
from lm.convert.heads import base_class
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer
from lm.sharding import make_mesh, named
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.step import StepSpec, build

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
MODEL = "model.safetensors"


def copied(name, folder):
    """(folder with the checkpoint, its tensors)"""
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("golden.npz"))
    return folder, load_file(folder / MODEL)


def listed(folder):
    with pytest.raises(SettingError) as error:
        load(folder)
    return [line.split()[:2] for line in str(error.value).splitlines()[1:]]


def of_zeros(config):
    """A model whose numbers do not matter."""
    abstract = jax.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0)))
    return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, np.float32)), abstract)


def same(model, other):
    return all(map(np.array_equal, jax.tree.leaves(model), jax.tree.leaves(other)))


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_loaded_is_saved_to_the_byte(name, tmp_path):
    config, model = load(GOLDEN / name)
    save(model, tmp_path / "out")
    assert (tmp_path / "out" / MODEL).read_bytes() == (GOLDEN / name / MODEL).read_bytes()
    assert load(tmp_path / "out")[0] == config


BEGINNINGS = {  # beginning of a size's name: the first family that computes it; the longest counts
    "mt5": "t5",
    "switch-": "switch_transformers",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "deberta-v3-": "deberta-v2",
    "mdeberta": "deberta-v2",
    "phi-3": "mistral",
    "phi-4": "llama",
    "spanbert": "bert",
    "gpt": "openai-gpt",
    "gpt3": "gpt2",
    "santacoder": "gpt_bigcode",
    "starcoder": "gpt_bigcode",
    "gpt-neox": "gpt_neox",
    "gpt-neo-": "gpt_neo",
    "gpt-j": "gptj",
    "gemma-2-": "gemma2",
    "gemma-3-": "gemma3_text",
    "olmo-2-": "olmo2",
    "pythia": "gpt_neox",
    "yi-": "llama",
}
UNPUBLISHED = {
    "transformer-base": "sinusoid=",
    "transformer-big": "sinusoid=",
    "gpt3-13b": "40 heads should divide",
    "mpt-7b": "no published family computes this model",
    "mpt-30b": "no published family computes this model",
    "palm-8b": "no published family computes this model",
    "palm-62b": "no published family computes this model",
    "palm-540b": "no published family computes this model",
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_published_size_is_a_model_of_its_family(name):
    if name in UNPUBLISHED:
        with pytest.raises(SettingError, match=UNPUBLISHED[name]):
            config_json(PRESETS[name])
    else:
        begins = max(filter(name.startswith, [*FAMILIES, *BEGINNINGS]), key=len)
        assert config_json(PRESETS[name])["model_type"] == BEGINNINGS.get(begins, begins)


def test_a_type_that_needs_a_part_which_is_not_here_is_refused_with_its_name():
    for model_type, lacking in UNSUPPORTED.items():
        with pytest.raises(SettingError, match=re.escape(f"{model_type!r} is not supported: {lacking}")):
            model_config({"model_type": model_type}, ())


def test_a_discriminator_of_deberta_is_read_without_the_layers_that_transformers_leaves_out(tmp_path):
    """As published: no class is named, and the file has layers that nothing reads."""
    config = json.loads((GOLDEN / "deberta_v2" / "config.json").read_text())
    config = {name: x for name, x in config.items() if name not in ("architectures", "legacy")}
    tensors = load_file(GOLDEN / "deberta_v2" / "model.safetensors")
    unread = ("mask_predictions.classifier.weight", "deberta.embeddings.position_embeddings.weight")
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | dict.fromkeys(unread, np.ones((1, 32), np.float32)), folder / "model.safetensors")
    save(load(folder)[1], tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], tensor) for name, tensor in tensors.items())
    # or transformers would look for the output layers under other names
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config | {"legacy": False}


def test_all_classes_of_a_family_are_of_its_own():
    for family in FAMILIES.values():
        names = [task_class.name for task_class in family.task_classes.values()]
        assert all(name.startswith(base_class(family).removesuffix("Model")) for name in names), names
    assert base_class(FAMILIES["marian"]) == "MarianModel"
    assert base_class(FAMILIES["gemma3_text"]) == "Gemma3TextModel"


def test_a_model_without_a_head_of_its_file_is_written_as_a_class_without_it(tmp_path):
    config, _ = load(GOLDEN / "bert")
    assert json.loads(config.published)["architectures"] == ["BertForPreTraining"]
    save(of_zeros(change(config, "heads", ())), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    assert load(tmp_path / "out")[0].heads == ()


def test_shards_hold_what_one_file_would(tmp_path):
    _, model = load(GOLDEN / "llama_gqa")
    save(model, tmp_path / "out", shard_bytes=30_000)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "config.json",
        *(f"model-0000{k}-of-00005.safetensors" for k in range(1, 6)),
        f"{MODEL}.index.json",
    ]
    assert same(load(tmp_path / "out")[1], model)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_becomes_float32(dtype, tmp_path):
    folder, tensors = copied("gpt2", tmp_path / "in")
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, folder / MODEL)
    low = load(folder)[1]
    for ours, expected in zip(jax.tree.leaves(low), jax.tree.leaves(load(GOLDEN / "gpt2")[1]), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_array_equal(ours, np.asarray(expected).astype(dtype).astype(np.float32))


def older(name, tensors):
    """(the parameters as older programs wrote them: without prefix, norms called otherwise; copies and
    buffers)
    """
    if name == "bert":
        spelt = {"Norm.weight": "Norm.gamma", "Norm.bias": "Norm.beta"}
        new = {
            next((key.replace(o, n) for o, n in spelt.items() if o in key), key): t
            for key, t in tensors.items()
        }
        table, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
        copies = {"cls.predictions.decoder.weight": table, "cls.predictions.decoder.bias": bias}
        return new, copies | {"bert.embeddings.position_ids": np.arange(64)[None]}
    if name == "gpt2":
        new = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
        masks = {
            "h.0.attn.bias": np.tri(64, dtype=np.uint8)[None, None],
            "h.1.attn.masked_bias": np.array(-1e4),
        }
        return new, masks | {"lm_head.weight": new["wte.weight"]}
    if name == "gpt_neo":
        causal = np.tri(64, dtype=np.uint8)
        # Layers 1 and 3 see their own token and four before it.
        masks = {0: causal, 1: causal - np.tri(64, k=-5, dtype=np.uint8)}
        return tensors, {
            f"transformer.h.{i}.attn.attention.bias": mask[None, None] for i, mask in masks.items()
        }
    if name == "llama_gqa":
        return tensors, {"model.layers.0.self_attn.rotary_emb.inv_freq": 10_000.0 ** -(np.arange(4) / 4)}
    table = np.arange(64)[:, None] / 10_000 ** (np.arange(16) / 16)
    return tensors, {
        "model.encoder.embed_positions.weight": np.concatenate([np.sin(table), np.cos(table)], 1)
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neo", "llama_gqa", "marian_sinusoidal"])
def test_files_of_older_programs_are_read_and_their_copies_and_constants_checked(name, tmp_path):
    folder, tensors = copied(name, tmp_path / "in")
    new, extra = older(name, tensors)
    save_file(new | extra, folder / MODEL)
    assert same(load(folder)[1], load(GOLDEN / name)[1])
    for spoilt in extra:
        save_file(new | extra | {spoilt: np.asarray(extra[spoilt] + 1)}, folder / MODEL)
        ((kind, found),) = listed(folder)
        assert kind == "unknown:" and found.endswith(spoilt)


@pytest.mark.parametrize(
    ("name", "tensor"), [("bert", "bert.embeddings.LayerNorm.gamma"), ("llama_gqa", "lm_head.bias")]
)
def test_a_tensor_without_a_place_is_unknown_though_another_has_its_name_of_today(name, tensor, tmp_path):
    folder, tensors = copied(name, tmp_path / "in")
    save_file({tensor: np.ones(32, np.float32)} | tensors, folder / MODEL)
    with pytest.raises(SettingError, match=f"unknown: {tensor}$"):
        load(folder)


def test_a_bart_may_hold_the_version_of_its_first_format_and_the_layers_of_its_teacher(tmp_path):
    folder, tensors = copied("bart", tmp_path / "in")
    versions = {f"model.{side}.version": np.array([3.0], np.float32) for side in ("encoder", "decoder")}
    save_file(tensors | versions, folder / MODEL)
    configured(num_hidden_layers=12)(folder)
    assert same(load(folder)[1], load(GOLDEN / "bart")[1])


@pytest.mark.parametrize(
    ("name", "pretraining_head", "class_name", "head"),
    [
        ("modernbert", "decoder.bias", "ModernBertForSequenceClassification", "classifier"),
        ("modernbert", "decoder.bias", "ModernBertForTokenClassification", "classifier"),
        ("xlnet", "lm_loss.bias", "XLNetForQuestionAnsweringSimple", "qa_outputs"),
    ],
)
def test_a_fine_tuned_model_is_read_without_its_head(name, pretraining_head, class_name, head, tmp_path):
    folder, tensors = copied(name, tmp_path / "in")
    del tensors[pretraining_head]
    layer = {f"{head}.weight": np.ones((2, 32), np.float32), f"{head}.bias": np.ones(2, np.float32)}
    save_file(tensors | layer, folder / MODEL)
    configured(architectures=[class_name])(folder)
    encoder, expected = (
        {path: x for path, x in named(load(each)[1]).items() if path.startswith("encoder.")}
        for each in (folder, GOLDEN / name)
    )
    assert encoder.keys() == expected.keys()
    for path, x in encoder.items():
        np.testing.assert_array_equal(x, expected[path])


@pytest.mark.parametrize(
    ("name", "prefix", "class_name", "head"),
    [
        ("llama_gqa", "model.", "LlamaForQuestionAnswering", "qa_outputs"),
        ("qwen3", "model.", "Qwen3ForQuestionAnswering", "qa_outputs"),
        ("t5_v1_0", "", "T5ForSequenceClassification", "classification_head.out_proj"),
    ],
)
def test_a_class_that_calls_its_base_model_transformer_is_read_without_its_head(
    name, prefix, class_name, head, tmp_path
):
    folder, tensors = copied(name, tmp_path / "in")
    tensors.pop("lm_head.weight", None)
    renamed = {f"transformer.{key.removeprefix(prefix)}": tensor for key, tensor in tensors.items()}
    save_file(renamed | {f"{head}.weight": np.ones((2, 32), np.float32)}, folder / MODEL)
    configured(architectures=[class_name])(folder)
    found, expected = (named(load(each)[1]) for each in (folder, GOLDEN / name))
    assert expected.keys() - found.keys() <= {"head.kernel"}
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path])


def test_an_albert_of_one_layer_is_the_first_layer_of_a_deeper_one_and_saved_to_the_byte(tmp_path):
    folder, _ = copied("albert", tmp_path / "in")
    configured(num_hidden_layers=1)(folder)
    _, model = load(folder)
    batch = Batch(encoder=Side(tokens=np.arange(3, 11)[None]))
    _, deeper = load(GOLDEN / "albert")
    np.testing.assert_allclose(
        model.features(batch), deeper.hidden_states(batch)["encoder"][1], atol=1e-6, rtol=1e-6
    )
    save(model, tmp_path / "out")
    for file in ("config.json", MODEL):
        written = (tmp_path / "out" / file).read_bytes()
        if file == MODEL:
            assert written == (folder / file).read_bytes()
        else:
            assert json.loads(written) == json.loads((folder / file).read_text())
    config = changes(model.config, {"published": "", "embedding.d_embed": 8})
    assert config_json(config)["model_type"] == "albert"


def test_every_misfit_of_a_checkpoint_is_listed_at_once(tmp_path):
    folder, tensors = copied("t5_v1_0", tmp_path / "in")
    del tensors["encoder.block.1.layer.0.SelfAttention.k.weight"]
    tensors["decoder.final_layer_norm.weight"] = np.ones(31, np.float32)
    tensors["encoder.final_layer_norm.weight"] = np.ones(32, np.int8)
    save_file(tensors, folder / MODEL)
    assert listed(folder) == [
        ["misshapen:", "decoder.final_layer_norm.weight"],
        ["missing:", "encoder.block.1.layer.0.SelfAttention.k.weight"],
        ["not", "a"],
    ]


def truncated(folder):
    (folder / MODEL).write_bytes((folder / MODEL).read_bytes()[:-100])


def configured(**new):
    def spoil(folder):
        theirs = json.loads((folder / "config.json").read_text()) | new
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in theirs.items() if value != "gone"})
        )

    return spoil


def empty_index(folder):
    (folder / MODEL).unlink()
    (folder / f"{MODEL}.index.json").write_text('{"weight_map": {}}')


@pytest.mark.parametrize(
    "name, spoil, message",
    [
        ("gpt2", truncated, f"{MODEL}: "),
        ("gpt2", lambda folder: (folder / MODEL).write_bytes(b"pickled"), f"{MODEL}: "),
        ("gpt2", lambda folder: (folder / MODEL).unlink(), "neither model.safetensors nor"),
        ("gpt2", empty_index, "should have a weight_map from tensors to files"),
        ("gpt2", lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        ("gpt2", configured(model_type="gp2"), "model_type='gp2' is not supported; did you mean 'gpt2'"),
        ("gpt2", configured(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", configured(activation_function="gelu_nwe"), "activation_function='gelu_nwe'.*'gelu_new'"),
        ("gpt2", configured(n_embd="gone"), "n_embd is missing"),
        ("gpt2", configured(n_embd="32"), "n_embd='32' should be a whole number"),
        ("gpt2", configured(quantization_config={"bits": 4}), "quantization_config="),
        (
            "bloom_alibi",
            configured(apply_residual_connection_post_layernorm=True),
            "apply_residual_connection",
        ),
        (
            "opt",
            configured(word_embed_proj_dim=16, tie_word_embeddings=False),
            "word_embed_proj_dim=16 with tie_word_embeddings=False is not supported: .* hidden_size=32",
        ),
        (
            "bloom_alibi",
            configured(pretraining_tp=2, slow_but_exact=True),
            "slow_but_exact=True with pretraining_tp=2 is not supported, since .* leaves out biases",
        ),
        ("llama_gqa", configured(rope_parameters={"rope_type": "dynamic"}), "rope_type='dynamic'"),
        ("albert", configured(num_hidden_groups=2), "num_hidden_groups=2"),
        (
            "bert",
            configured(position_embedding_type="relative_key"),
            "position_embedding_type='relative_key'",
        ),
        ("longformer", configured(attention_window=[8, 16, 8]), r"attention_window=\[8, 16, 8\]"),
        # each of them has tensors of its own, so that a list of those that are missing would never end
        ("mixtral", configured(num_local_experts=2**16), r"asks for experts\.count=65536, the files have"),
    ],
)
def test_what_cannot_be_read_is_named(name, spoil, message, tmp_path):
    folder, _ = copied(name, tmp_path / "in")
    spoil(folder)
    with pytest.raises(SettingError, match=message):
        load(folder)


STRETCHED = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
}


@pytest.mark.parametrize("kind", STRETCHED)
def test_both_spellings_of_rotary_settings_mean_the_same(kind):
    theirs = json.loads((GOLDEN / "llama_mha_v4cfg" / "config.json").read_text())
    stretch = STRETCHED[kind] | {"rope_type": kind}
    old = model_config(theirs | {"rope_scaling": stretch}, ())
    del theirs["rope_theta"], theirs["rope_scaling"]
    assert old == model_config(theirs | {"rope_parameters": stretch | {"rope_theta": 500.0}}, ())
    assert (old.positions.rotary.scaling, old.positions.rotary.factor, old.positions.rotary.base) == (
        kind,
        stretch["factor"],
        500.0,
    )
    assert model_config(config_json(old), ()) == old


@pytest.mark.parametrize(("head_width", "rotated"), [(16, 16), (44, 30), (49, 4), (256, 64)])
def test_a_gpt_j_rotates_as_many_features_as_its_file_says(head_width, rotated):
    theirs = json.loads((GOLDEN / "gptj" / "config.json").read_text())
    theirs |= {"n_embd": 4 * head_width, "n_head": 4, "rotary_dim": rotated}
    config = model_config(theirs, [])
    assert config.rotary_width == rotated and config_json(config)["rotary_dim"] == rotated


def test_a_narrower_embedding_is_written_only_where_it_is_the_output_matrix_too():
    config = changes(PRESETS["opt-125m"], {"embedding.d_embed": 512})
    assert config_json(config)["word_embed_proj_dim"] == 512
    with pytest.raises(SettingError, match="no published family computes this model"):
        config_json(change(config, "output.logits", "separate"))


@pytest.mark.parametrize(("width", "heads"), [(3, 4), (3, 2), (4, 0)])
def test_heads_that_do_not_share_the_width_of_a_gpt_j_are_refused_in_words(width, heads):
    theirs = json.loads((GOLDEN / "gptj" / "config.json").read_text())
    with pytest.raises(SettingError, match=f"{heads} heads should divide a width of {width}"):
        model_config(theirs | {"n_embd": width, "n_head": heads}, [])
    if heads:
        config = changes(PRESETS["gpt2"], {"d_model": width, "attention.num_heads": heads})
        with pytest.raises(SettingError, match="no published family computes this model"):
            config_json(config)


@pytest.mark.parametrize("rotated", [None, 0, 2.0, "4", True])
def test_a_gpt_j_without_a_number_of_rotated_features_is_refused_by_the_field(rotated):
    theirs = json.loads((GOLDEN / "gptj" / "config.json").read_text())
    with pytest.raises(SettingError, match=f"config.json: rotary_dim={rotated!r} should be a number of"):
        model_config(theirs | {"rotary_dim": rotated}, [])


def test_a_gemma_3_of_transformers_4_means_the_same_as_one_of_5():
    older = config_json(PRESETS["gemma-3-4b"])
    stretched = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert older["rope_local_base_freq"] == 10_000.0 and older["rope_scaling"] == {
        name: stretched[name] for name in ("rope_type", "factor")
    }
    newer = {name: value for name, value in older.items() if "rope" not in name}
    bases = {"full_attention": stretched, "sliding_attention": {"rope_theta": 10_000.0}}
    assert model_config(newer | {"rope_parameters": bases}, ()) == model_config(older, ())
    del older["layer_types"]
    by_period = model_config(older | {"sliding_window_pattern": 3}, ())
    assert by_period.sparsity.layer_windows[:4] == (1_023, 1_023, None, 1_023)
    assert model_config(older, ()).sparsity == PRESETS["gemma-3-4b"].sparsity


@pytest.mark.parametrize("period", [2, 3, 7])
def test_a_modernbert_of_transformers_4_means_the_same_as_one_of_5(period):
    theirs = json.loads((GOLDEN / "modernbert" / "config.json").read_text())
    types = ["sliding_attention" if layer % period else "full_attention" for layer in range(4)]
    new = model_config(theirs | {"layer_types": types}, ["logits"])
    older = {name: value for name, value in theirs.items() if name not in ("layer_types", "rope_parameters")}
    bases = {"global_rope_theta": 160_000.0, "local_rope_theta": 100.0}
    old = model_config(older | bases | {"global_attn_every_n_layers": period}, ["logits"])
    assert old == new and old.positions.rotary.window_base == 100.0
    written = config_json(old)
    assert written["layer_types"] == types and written["local_rope_theta"] == 100.0
    assert model_config(written, ["logits"]) == old
    one = model_config(older | bases | {"local_rope_theta": None}, ["logits"])
    assert one.positions.rotary.window_base is None and one.positions.rotary.base == 160_000.0
    assert config_json(one)["local_rope_theta"] == 160_000.0


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        (
            "modernbert",
            {"layer_types": None, "global_attn_every_n_layers": 0},
            "global_attn_every_n_layers=0",
        ),
        ("modernbert", {"local_attention": "wide"}, "local_attention='wide' should be a number of tokens"),
        ("modernbert", {"rope_scaling": {"factor": 2.0}}, "rope_scaling="),
        ("modernbert", {"layer_types": ["full_attention"] * 3}, "layer_types=.*for each of 4 layers"),
        ("t5gemma", {"encoder": None}, "encoder=None should hold the fields of a stack"),
        ("t5gemma", {"encoder.hidden_size": 64}, "encoder.hidden_size=64 and decoder.hidden_size=32 are not"),
        ("t5gemma", {"encoder.sliding_window": None}, "encoder.layer_types"),
        ("t5gemma", {"decoder.qk_norm": True}, "decoder.qk_norm=True is unknown to this family"),
        ("t5gemma", {"is_encoder_decoder": False}, "is_encoder_decoder=False"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"num_hidden_layers": 0, "layer_types": None}, "0 layers should be from 1 to 10000"),
        ("qwen2", {"max_window_layers": "28", "layer_types": None}, "max_window_layers='28' should be"),
    ],
)
def test_what_the_newest_families_lack_is_refused_by_the_name_of_its_field(name, new, message):
    theirs = json.loads((GOLDEN / name / "config.json").read_text())
    for path, value in new.items():
        section, _, field = path.rpartition(".")
        (theirs[section] if section else theirs)[field] = value
    with pytest.raises(SettingError, match=message):
        model_config(theirs, ["logits"] if name == "modernbert" else [])


@pytest.mark.parametrize(
    ("name", "path", "value", "fields"),
    [
        (
            "t5gemma",
            "attention.logit_cap",
            7.0,
            {"encoder.attn_logit_softcapping", "decoder.attn_logit_softcapping"},
        ),
        ("t5gemma", "encoder.layer_windows", (1, 1, 1), {"encoder.sliding_window", "encoder.layer_types"}),
        ("gemma2", "attention.query_pre_attn_scalar", None, {"query_pre_attn_scalar"}),
        (
            "modernbert",
            "positions.rotary.window_base",
            None,
            {"local_rope_theta", "global_rope_theta", "rope_parameters"},
        ),
    ],
)
def test_a_setting_that_has_changed_since_the_import_is_written_and_all_else_is_kept(
    name, path, value, fields
):
    config = load(GOLDEN / name)[0]
    family = FAMILIES[config_json(config)["model_type"]]
    before, after = (
        flatten_sections(config_json(each), family) for each in (config, change(config, path, value))
    )
    assert {key for key in before | after if before.get(key) != after.get(key)} == fields
    assert before == flatten_sections(json.loads(config.published), family)


def test_settings_are_read_by_the_names_they_had_before():
    theirs = json.loads((GOLDEN / "bloom_alibi" / "config.json").read_text())
    older = theirs | {"n_embed": theirs.pop("hidden_size"), "num_attention_heads": theirs.pop("n_head")}
    assert model_config(older, ()) == change(load(GOLDEN / "bloom_alibi")[0], "published", "")
    with pytest.raises(SettingError, match="n_embed=8 and hidden_size=32 should be the same"):
        model_config(theirs | {"n_embed": 8, "hidden_size": 32, "n_head": 4}, ())


def test_a_head_is_known_by_its_tensors_where_the_class_does_not_name_it():
    theirs = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    heads = pretraining_heads_of_checkpoint(theirs, ["cls.seq_relationship.weight"])
    assert heads == {"logits", "next-sentence"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("residual", "sandwich-norm"),
        ("residual", "output-norm"),
        ("residual_multiplier", 0.5),
        ("embedding.multiplier", 2.0),
        ("attention.scale", 0.5),
        ("output.logit_divisor", 2.0),
        ("norm.bias", False),
        ("norm.zero_centered", True),
        ("norm.first_attention", "none"),
        ("attention.query_pre_attn_scalar", 100),
        ("attention.logit_cap", 50.0),
        ("output.logit_cap", 30.0),
        ("mlp.activation", "gated-gelu-erf"),
        ("attention.scores", "bilinear"),
        ("architecture", "prefix-decoder"),
        ("sparsity.dilation", 2),
        ("attention.mask", "none"),
        ("mlp.activation", "none"),
        ("mlp.activation", "squared-relu"),
        ("mlp.activation", "gated-sigmoid"),
        ("norm.fraction", 0.5),
        ("residual", "rezero"),
        ("shared_layers", True),
        ("norm.kind", "none"),
        ("residual", "none"),
    ],
)
def test_a_model_of_no_family_is_refused_by_the_setting(path, value, tmp_path):
    config = change(PRESETS["gpt2"], path, value)
    with pytest.raises(SettingError, match=f"model.{path}="):
        config_json(config)


def test_a_setting_that_follows_from_another_is_no_reason():
    with pytest.raises(
        SettingError, match=r"distilbert, model\.positions\.kind='rotary' should be 'learned'$"
    ):
        config_json(change(PRESETS["distilbert"], "positions.kind", "rotary"))


@pytest.mark.parametrize(("path", "value"), [("norm.fraction", 0.5), ("embedding.encoder", "separate")])
def test_a_t5_with_a_part_that_its_family_lacks_is_refused_by_the_setting(path, value):
    with pytest.raises(SettingError, match=f"model.{path}="):
        config_json(change(PRESETS["t5-base"], path, value))


def test_a_folder_that_is_there_is_not_written_to(tmp_path):
    config = ModelConfig(
        vocab_size=16,
        d_model=8,
        mlp=MlpConfig(d_ff=8),
        attention=AttentionConfig(d_kv=4, num_heads=2),
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(SettingError, match="is there already"):
        save(of_zeros(config), tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "precious"]


@pytest.mark.parametrize("size", ["gpt2", "pythia-70m", "llama-7b"])
@pytest.mark.parametrize("start", [0, None])
def test_a_decoder_is_written_with_the_id_that_begins_its_texts(size, start):
    """Else transformers begins them with the default of the type, which may lie beyond the vocabulary."""
    config = changes(PRESETS[size], {"vocab_size": 11, "special": SpecialTokens(0, 1, start)})
    assert config_json(config)["bos_token_id"] == start


def test_a_published_decoder_keeps_the_id_that_begins_its_texts_and_gets_one_if_it_has_none():
    config, _ = load(GOLDEN / "gpt2")
    assert config.special.start is None  # the tokenizer's comes first
    assert config_json(config)["bos_token_id"] == json.loads(config.published)["bos_token_id"] == 3
    without = {name: x for name, x in json.loads(config.published).items() if name != "bos_token_id"}
    config = replace(config, published=json.dumps(without))
    assert "bos_token_id" not in config_json(config)
    begun = replace(config, special=replace(config.special, start=3))
    assert config_json(begun) == without | {"bos_token_id": 3}


def test_a_checkpoint_becomes_a_run_and_the_run_the_checkpoint(tmp_path):
    source, tensors = copied("bert", tmp_path / "in")
    configured(team={"of": "ours"}, pad_token_id=None)(source)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", *(f"rare{k}" for k in range(57))]
    (source / "vocab.txt").write_text("\n".join(words) + "\n")
    import_checkpoint(source, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "run")
    assert str(tmp_path) not in (tmp_path / "run" / "settings.json").read_text()
    assert open_run(tmp_path / "run", stages_of(tmp_path / "run")).encode("the [MASK]") == [2, 5, 4, 3]
    export_checkpoint(tmp_path / "run", tmp_path / "out", "pretraining")
    theirs = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == theirs
    for name in (MODEL, "vocab.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    (source / "vocab.txt").write_text("\n".join(words + [f"word{k}" for k in range(65)]))
    with pytest.raises(SettingError, match="ids up to 128, the model's embedding 128 rows"):
        import_checkpoint(source, tmp_path / "other")
    (source / "vocab.txt").write_text("\n".join(words[:-1]))
    with pytest.raises(SettingError, match="has 63 tokens, the model's embedding 128 rows"):
        import_checkpoint(source, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "run"]


def test_an_import_whose_sentinels_ascend_says_so_and_so_does_filling_gaps_with_it(tmp_path, capsys):
    source = published.write("t5", tmp_path / "in")
    import_checkpoint(source, tmp_path / "usual")
    assert "no sentinels" not in capsys.readouterr().out
    file = source / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    sentinels = [token for token in tokenizer["added_tokens"] if token["content"].startswith("<extra_id_")]
    lowest, highest = sentinels[0]["id"], sentinels[-1]["id"]
    for number, token in enumerate(sentinels):
        token["content"] = f"<extra_id_{number}>"
    file.write_text(json.dumps(tokenizer))
    import_checkpoint(source, tmp_path / "run")
    why = f"<extra_id_0> should have the last id, {highest}, <extra_id_1> the id before it, and so on; found "
    why += f"<extra_id_0> at {lowest}"
    assert why in capsys.readouterr().out
    with pytest.raises(SettingError, match=f"has no sentinels: {why}"):
        fill_gaps(tmp_path / "run", ["the [MASK]"], "", Filling(), 0)


def library_examples():
    """Return the code of the blocks of Python in docs/library.md."""
    text = (ROOT / "docs" / "library.md").read_text("utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_library_example_of_the_docs_runs_as_it_stands(tmp_path, monkeypatch):
    code, _ = library_examples()
    small = changes(
        PRESETS["t5-small"],
        {
            "vocab_size": 64,
            "d_model": 16,
            "mlp.d_ff": 32,
            "attention.num_heads": 2,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
        },
    )
    monkeypatch.setitem(PRESETS, "t5-small", small)
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(code, made)
    assert made["logits"].shape == (1, 3, 64) and made["weights"]["cross"].shape == (1, 1, 2, 3, 4)


def test_the_sharded_step_of_the_docs_learns_on_eight_devices_what_it_learns_on_one(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the example sets it, too late for this process
    _, code = library_examples()
    assert code.index("--xla_force_host_platform_device_count=8") < code.index("import jax")
    made = {}
    exec(code, made)
    sharding = made["state"].params["decoder.blocks.attention.query.kernel"].sharding
    assert sharding.num_devices == 8 and sharding.spec == jax.P(None, "fsdp", "tensor")
    losses = made["losses"]
    np.testing.assert_allclose(losses["sharded"], losses["one device"], rtol=1e-5)
    assert losses["one device"][2] < losses["one device"][0]


def linked(link, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    link.rename(target)
    link.symlink_to(target)


def test_a_link_out_of_the_folder_is_refused_and_one_within_the_cache_of_the_model_is_not(tmp_path):
    source, _ = copied("bert", tmp_path / "models--ours" / "snapshots" / "0123")
    (source / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{k}" for k in range(60))])
    )
    for name in ("config.json", MODEL, "vocab.txt"):
        linked(source / name, source.parents[1] / "blobs" / f"{name}-of-it")
    import_checkpoint(source, tmp_path / "run")
    (source / "vocab.txt").unlink()
    (tmp_path / "secret").write_text("[PAD]\nword\n")
    (source / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(SettingError, match=r"vocab.txt is a link to .*/secret, outside of the folder"):
        import_checkpoint(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_exported_files_are_for_whom_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        save(load(GOLDEN / "bert")[1], tmp_path / "out", beside={"vocab.txt": b"a"})
    finally:
        os.umask(before)
    assert {
        path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()
    } == dict.fromkeys(["config.json", MODEL, "vocab.txt"], "0o640")


def test_the_average_or_the_parameters_themselves_are_exported_on_request(tmp_path):
    source, _ = copied("bert", tmp_path / "in")
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "pretraining" / "checkpoints"
    import_checkpoint(source, run)
    with pytest.raises(
        SettingError, match=r"checkpoints keeps no average of the parameters .optimizer.ema=0"
    ):
        export_checkpoint(run, tmp_path / "average", weights="average")
    config, model = load(source)
    spec = StepSpec(config, OptimizerConfig(ema=0.9))
    state = toy.drawn(build(spec, make_mesh(MeshConfig(), jax.devices()[:1])).abstract)
    due = named(model)
    average = {name: value + 1 for name, value in due.items()}
    with Checkpoints(checkpoints, CheckpointConfig()) as keeper:
        keeper.save(replace(state, step=jnp.int32(1), params=due, average=average))
    for weights, more in (("average", 1), ("scored", 1), ("last", 0)):
        export_checkpoint(run, tmp_path / weights, weights=weights)
        for name, value in named(load(tmp_path / weights)[1]).items():
            np.testing.assert_array_equal(value, due[name] + more, err_msg=f"{weights} {name}")
