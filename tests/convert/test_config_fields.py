"""Every field of a config.json is read, refused or without effect, as golden/make_variants.py saw in
transformers.
"""

import importlib.util
import json
from dataclasses import replace
from operator import attrgetter

import jax
import numpy as np
import pytest
from decode_prompts import with_special
from golden.drawn import drawn
from paths import GOLDEN
from safetensors.numpy import load_file, save_file
from variants import with_quick

from lm.batch import Batch, Side
from lm.config.base import SettingError, change, changes
from lm.config.decoding import Decoding
from lm.config.model import ModelConfig, SpecialTokens
from lm.convert import load, save
from lm.convert.config_json import (
    _write_new,
    config_json,
    flatten_sections,
    model_config,
    pretraining_heads_of_checkpoint,
    semantic_settings,
)
from lm.convert.families import FAMILIES
from lm.convert.known_fields import IGNORED, check_fields, known_fields, read_fields, unknown_fields
from lm.evaluate.generate import decode
from lm.nn.presets import PRESETS
from lm.nn.transformer import Transformer

# Families whose checkpoints are the base models of make_variants.py: none lie beside.
WITHOUT_FOLDER = (
    "mt5",
    "mbart",
    "pegasus",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "deberta",
    "falcon",
    "phi3",
    "gemma3_text",
    "olmo2",
    "granite",
)
FIELDS: dict[str, dict[str, dict]] = {}  # family: field: its default, another value, and the effect
for path, told in json.loads((GOLDEN / "fields.json").read_text()).items():
    FIELDS.setdefault(path.partition("/")[0], {})[path.partition("/")[2]] = told
VARIANTS = json.loads((GOLDEN / "variants.json").read_text())
SCALE_GPT = "scale_attn_weights=False is not supported"
OUTPUT = "unknown: .* which it should repeat here .tie_word_embeddings"
REFUSED = {  # legal, and told by the field's name
    "t5/is_gated_act": "is_gated_act=True contradicts feed_forward_proj='relu'",
    "umt5/is_gated_act": "is_gated_act=False contradicts feed_forward_proj='gated-gelu'",
    "t5/dense_act_fn": "dense_act_fn='silu' contradicts feed_forward_proj='relu'",
    "umt5/dense_act_fn": "dense_act_fn='silu' contradicts feed_forward_proj='gated-gelu'",
    "mt5/is_gated_act": "is_gated_act=False contradicts feed_forward_proj='gated-gelu'",
    "mt5/dense_act_fn": "dense_act_fn='silu' contradicts feed_forward_proj='gated-gelu'",
    "mt5/relative_attention_max_distance": "relative_attention_max_distance=3 should be more than half of",
    "t5/relative_attention_max_distance": "relative_attention_max_distance=3 should be more than half of",
    "umt5/relative_attention_max_distance": "relative_attention_max_distance=3 should be more than half of",
    "switch_transformers/relative_attention_max_distance": "relative_attention_max_distance=3 should be more",
    "switch_transformers/router_bias": "router_bias=True is not supported",
    "switch_transformers/router_dtype": "router_dtype='float16' is not supported",
    "switch_transformers/num_sparse_encoder_layers": "encoder_sparse_step=1 and decoder_sparse_step=2 are",
    "switch_transformers/num_sparse_decoder_layers": "encoder_sparse_step=2 and decoder_sparse_step=1 are",
    **{
        f"{name}/is_encoder_decoder": "is_encoder_decoder=False is not supported"
        for name in ("bart", "mbart")
    },
    **{
        f"{name}/tie_word_embeddings": "tie_word_embeddings=False is not supported"
        for name in ("bart", "marian", "mbart", "pegasus", "switch_transformers")
    },
    "marian/share_encoder_decoder_embeddings": "share_encoder_decoder_embeddings=False is not supported",
    "marian/vocab_size": "decoder_vocab_size=20 should be 21",
    "gpt2/add_cross_attention": "add_cross_attention=True is not supported",
    "gpt2/scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx=True is not supported",
    "gpt2/scale_attn_weights": SCALE_GPT,
    "gpt_bigcode/scale_attn_weights": SCALE_GPT,
    "gpt_bigcode/multi_query": "multi_query=False is not supported",
    "gpt_neox/attention_bias": "attention_bias=False is not supported",
    "gpt_neox/num_attention_heads": "rotary.fraction=0.25 turns 1 of model.attention.d_kv=4",
    "gpt_neo/attention_layers": "attention_layers should be those of attention_types",
    "falcon/alibi": "alibi=True is not supported",
    "bloom/apply_residual_connection_post_layernorm": "apply_residual_connection_post_layernorm=True",
    "llama/dynamic": "rope_type='dynamic' is not supported",
    "llama/partial": "partial_rotary_factor=0.5 is not supported",
    "llama/yarn_attention_factor": "attention_factor=0.7 of rotary positions is not supported",
    "opt/_remove_final_layer_norm": "_remove_final_layer_norm=True is not supported",
    "opt/enable_bias": "enable_bias=False is not supported",
    "opt/layer_norm_elementwise_affine": "layer_norm_elementwise_affine=False is not supported",
    **{
        f"t5gemma/{side}.{name}": rf"encoder.{name}=.* and decoder.{name}=.* are not supported"
        for side in ("encoder", "decoder")
        for name in (
            *("vocab_size", "hidden_size", "num_key_value_heads", "hidden_activation", "attention_bias"),
            *("query_pre_attn_scalar", "attn_logit_softcapping", "rms_norm_eps", "rope_parameters"),
        )
    },
    **{
        f"modernbert/{name}": f"{name}={value} is not supported"
        for name, value in {
            **dict.fromkeys(("attention_bias", "mlp_bias", "classifier_bias"), True),
            **dict.fromkeys(("decoder_bias", "tie_word_embeddings"), False),
            "classifier_activation": "'relu'",
            "hidden_activation": "'silu'",
        }.items()
    },
    "eurobert/attention_bias": "attention_bias=True is not supported",
    "eurobert/mlp_bias": "mlp_bias=True is not supported",
    "modernbert/stretched": "rope_parameters of full_attention=.*'linear'.* are not supported",
    "mpnet/relative_attention_num_buckets": "relative_attention_num_buckets=33 is not supported",
    "deberta-v2/grouped_convolution": "conv_groups=2 is not supported",
    **{
        f"{name}/{field}": f"{field}={value} is not supported"
        for name in ("deberta", "deberta-v2")
        for field, value in (("position_biased_input", True), ("relative_attention", False))
    },
    "xlnet/bi_data": "bi_data=True is not supported",
    "xlnet/clamp_len": "clamp_len=2 is not supported",
    "xlnet/tie_word_embeddings": "tie_word_embeddings=False is not supported",
    "gemma3_text/use_bidirectional_attention": "use_bidirectional_attention=True is not supported",
    "albert/inner_group_num": "inner_group_num=2 is not supported",
    "albert/num_hidden_groups": "num_hidden_groups=2 is not supported",
    **{
        f"{name}/is_decoder": "is_decoder=True is not supported"
        for name in ("bert", "roberta", "xlm-roberta", "camembert", "electra")
    },
    **{
        f"{name}/hidden_act": "hidden_act='relu' is not supported"
        for name in ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "electra")
    },
    **{
        f"{name}/tie_word_embeddings": OUTPUT
        for name in (
            *("bert", "roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "albert"),
            *("electra", "distilbert"),
        )
    },
}
QUICK = {  # the others are computed as their families' checkpoints of test_parity are
    "t5/tied_unscaled",
    "t5/own_scaled",
    "umt5/own_scaled",
    "umt5/own_unscaled",
    "umt5/tied_unscaled",
    "bart/sides_apart",
    "marian/sides_apart",
    "llama/attention_bias",
    "llama/mlp_bias",
    "opt/projected",
    "qwen2/window_from_a_layer_on",
    "gemma3_text/stretched",
    "longformer/window_by_layer",
    "electra/generator_as_wide",
    "switch_transformers/every_third",
    "deberta-v2/one_product",
    "deberta-v2/convolution",
    "deberta-v2/legacy",
    "xlnet/attn_type",
    "distilbert/sinusoidal_pos_embds",
    "bert/null_pad",
}
INPUTS = np.array([[7, 9, 12, 6, 8, 15, 10, 11], [13, 8, 6, 14, 17, 9, 18, 16]])


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDEN / "variants.npz") as found:
        return dict(found)


def variant(name):
    """(config.json, {tensor: shape})"""
    base, own = VARIANTS[f"{name.partition('/')[0]}/base"], VARIANTS[name]
    shapes = {key: shape for key, shape in (base["tensors"] | own["tensors"]).items() if shape is not None}
    return base["config"] | own["config"], shapes


def published(name, arrays, folder):
    """The folder of a variant as the reference saved it."""
    folder.mkdir()
    config, shapes = variant(name)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: arrays.get(f"{name}/{key}", drawn(key, tuple(shape))) for key, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def changed(config, field, value):
    """The config.json with a field, which may be one of a section."""
    section, _, name = field.rpartition(".")
    return config | ({section: config[section] | {name: value}} if section else {name: value})


def inputs(model):
    """The batch whose first stack reads INPUTS."""
    return Batch(**{"encoder" if model.config.has_encoder else "decoder": Side(tokens=INPUTS)})


def logits(model):
    batch = inputs(model)
    if model.config.has_encoder and model.config.has_decoder:
        batch = replace(batch, decoder=Side(tokens=INPUTS[::-1, :5]))
    return jax.jit(Transformer.__call__)(model, batch)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in sorted(set(VARIANTS) - set(REFUSED))
    ],
)
def test_a_model_with_one_field_changed_has_the_logits_of_the_reference(name, arrays, tmp_path):
    _, model = load(published(name, arrays, tmp_path / "in"))
    # A norm of a sub-layer's output enlarges rounding where the output is small.
    atol = 2e-4 if name.startswith("t5gemma/") else 5e-5
    np.testing.assert_allclose(logits(model), arrays[f"{name}/logits"], atol=atol)


# families whose models differ in kind from those with a folder, and from each other
ALONE = {"pegasus", "mt5", "mpnet", "deberta", "falcon", "gemma3_text", "olmo2"}


@pytest.mark.parametrize("family", with_quick(ALONE, WITHOUT_FOLDER))
def test_a_family_has_the_logits_of_the_reference_writes_what_it_writes_and_is_saved_as_it_was(
    family, arrays, tmp_path
):
    """In one test, since what they share, a compiled model, takes the time."""
    folder = published(f"{family}/base", arrays, tmp_path / "in")
    config, model = load(folder)
    assert config_json(replace(config, published=""))  # a family computes it, whichever
    np.testing.assert_allclose(logits(model), arrays[f"{family}/base/logits"], atol=1e-5, rtol=1e-5)
    if f"{family}/base/written" in arrays:
        due = arrays[f"{family}/base/written"]
        writer = with_special(model, SpecialTokens(0, None, 2))
        found = decode(writer, inputs(model), Decoding(due.shape[1]))
        np.testing.assert_array_equal(found.tokens, due)
    save(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    due, found = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    if config.positions.kind == "sinusoidal":  # computed anew where they are missing
        due = {key: tensor for key, tensor in due.items() if "embed_positions" not in key}
    assert due.keys() == found.keys()
    assert all(np.array_equal(found[key], tensor) for key, tensor in due.items())


@pytest.mark.parametrize("family", ["t5", "umt5"])
@pytest.mark.parametrize(
    ("tied", "scaled", "own_matrix", "due"),
    [
        (True, True, False, "tied-scaled"),
        (True, False, False, "tied"),
        (True, True, True, "separate-scaled"),
        (True, False, True, "separate"),
        # as they were written before there was the second field
        (None, None, False, "tied-scaled"),
        (True, None, False, "tied-scaled"),
        (True, None, True, "separate-scaled"),
        (False, None, True, "separate"),
    ],
)
def test_states_are_scaled_before_the_output_as_the_file_says_or_where_it_does_not_by_the_tied_matrix(
    family, tied, scaled, own_matrix, due
):
    theirs, _ = variant(f"{family}/base")
    theirs |= {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    assert model_config(theirs, (), untied=own_matrix).output.logits == due


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_implemented_is_refused_by_the_name_of_its_field(name, arrays, tmp_path):
    with pytest.raises(SettingError, match=f"(?s){REFUSED[name]}"):
        load(published(name, arrays, tmp_path / "in"))


RECORDED = [
    pytest.param(family, marks=[] if family in FIELDS else pytest.mark.skip("needs golden/make_variants.py"))
    for family in FAMILIES
]


def test_the_capacity_in_evaluation_matters_where_experts_choose_tokens():
    experts = {"architecture": "encoder", "experts.count": 4, "experts.kind": "expert-choice"}
    one, other = (
        semantic_settings(changes(ModelConfig(), experts | {"experts.eval_capacity_factor": factor}))
        for factor in (1.0, 4.0)
    )
    assert one != other


def test_the_nearest_family_is_one_that_can_write_a_config_whatever_the_reason_of_others_is():
    config = changes(PRESETS["albert-base"], {"shared_parts": "attention", "embedding.d_embed": None})
    with pytest.raises(SettingError, match="for albert, model.shared_parts='attention' should be 'all'"):
        config_json(config)


def test_a_family_that_can_write_a_config_counts_as_one_though_it_cannot_update_the_old(monkeypatch):
    base, shapes = variant("bert/base")
    config = change(model_config(base, pretraining_heads_of_checkpoint(base, shapes)), "residual", "rezero")

    def fails(family, config):
        raise SettingError("the old config.json cannot be updated")

    def message(*candidates):
        monkeypatch.setitem(config_json.__globals__, "_candidates", lambda _: candidates)
        with pytest.raises(SettingError) as error:
            config_json(config)
        return str(error.value)

    written = [(FAMILIES["bert"], _write_new), (FAMILIES["electra"], _write_new)]
    assert message((FAMILIES["bert"], fails), *written) == message(*written)


@pytest.mark.parametrize("family", RECORDED)
def test_a_field_without_effect_in_the_reference_has_none_here_or_is_refused(family):
    """What is read of it are ids of special tokens, rates of dropout and lengths of texts."""
    base, shapes = variant(f"{family}/base")
    heads = pretraining_heads_of_checkpoint(base, shapes)
    due = semantic_settings(model_config(base, heads))
    for field, told in FIELDS[family].items():
        if told.get("effect") == "idle":
            try:
                other = changed(base, field, told["tried"])
                assert semantic_settings(model_config(other, heads)) == due, field
            except SettingError as error:
                assert field in str(error)


WITHOUT = ("idle", "kept")  # kept: the reference takes no other value
# what the file is named and told, and how many classes a head of classes has
SAID = {"architectures", "dtype", "transformers_version", "id2label", "label2id", "num_labels"}


@pytest.mark.parametrize("family", RECORDED)
def test_every_field_that_the_reference_knows_is_read_or_shown_to_be_without_effect(family):
    table = FAMILIES[family]
    unaccounted = [
        field for field in FIELDS[family] if field not in known_fields(table) and "drop" not in field
    ]
    assert not unaccounted
    shown = {field for field, told in FIELDS[family].items() if told.get("effect") not in WITHOUT} - SAID
    assert {field for field in shown if "drop" not in field} <= read_fields(table)
    assert not {*table.ignored} & read_fields(table)


def test_the_fields_are_those_of_the_installed_transformers():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    import transformers

    for family, fields in FIELDS.items():
        config = transformers.AutoConfig.for_model(family)
        written = flatten_sections(json.loads(config.to_json_string(use_diff=False)), FAMILIES[family])
        due = {new for new in written if not new.startswith("_") and written[new] is not None}
        assert (
            due - {"output_attentions", "output_hidden_states", "return_dict", "problem_type"}
            <= set(fields) | IGNORED
        )
        assert config.attribute_map.items() <= FAMILIES[family].attribute_map.items() | {
            ("num_labels", "num_labels")
        }


def test_an_unknown_field_is_refused_where_its_name_says_that_it_computes_and_kept_elsewhere():
    theirs = {"model_type": "llama", "team": "ours", "final_logit_softcapping": 30.0, "qk_norm": None}
    with pytest.raises(
        SettingError, match=r"final_logit_softcapping=30.0 is unknown to this family and may change"
    ):
        check_fields(theirs, FAMILIES["llama"])
    del theirs["final_logit_softcapping"]
    check_fields(theirs, FAMILIES["llama"])
    assert unknown_fields(theirs, FAMILIES["llama"]) == ["qk_norm", "team"]


@pytest.mark.parametrize(
    "name", ["bert/null_pad", "electra/generator_as_wide", "distilbert/sinusoidal_pos_embds"]
)
def test_what_is_loaded_and_saved_keeps_its_family_its_nulls_and_what_nothing_reads(name, arrays, tmp_path):
    folder = published(name, arrays, tmp_path / "in")
    theirs = variant(name)[0] | {"team": {"of": "ours"}, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(theirs))
    save(load(folder)[1], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == theirs
    due, found = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert due.keys() == found.keys()
    for key, tensor in due.items():
        np.testing.assert_allclose(found[key], tensor, atol=1e-6)  # sinusoids are computed anew


@pytest.mark.parametrize(
    ("family", "path", "due"),
    [
        ("umt5", "mlp.activation", "gated-gelu"),
        ("albert", "mlp.activation", "gelu-tanh"),
        ("albert", "dropout", 0.0),
        ("marian", "special.pad", 58_100),
        ("marian", "special.eos", 0),
        ("marian", "special.start", 58_100),
        ("qwen2", "special.eos", None),
        ("qwen3", "special.eos", None),
        ("mistral", "positions.max_length", 131_072),
        ("phi3", "positions.max_length", 4_096),
        ("qwen2", "positions.max_length", 32_768),
        ("qwen3", "positions.max_length", 32_768),
        ("gemma", "positions.max_length", 8_192),
        ("gemma2", "positions.max_length", 8_192),
        ("gemma3_text", "positions.max_length", 131_072),
    ],
)
def test_a_field_that_a_file_lacks_has_the_default_of_its_class(family, path, due):
    base, shapes = variant(f"{family}/base")
    names = {name for field in FAMILIES[family].fields if path in field.settings for name in field.names}
    lacking = {name: value for name, value in base.items() if name not in names}
    found = model_config(lacking, pretraining_heads_of_checkpoint(base, shapes))
    assert attrgetter(path)(found) == due


def read_with(family, changed):
    folder = GOLDEN / family / "config.json"
    fields = json.loads(folder.read_text()) if folder.exists() else VARIANTS[f"{family}/base"]["config"]
    return model_config({name: x for name, x in (fields | changed).items() if x != "left out"}, ())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "contradict each other"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor"),
        ({"eos_token_id": [], "rope_interleaved": True}, "rope_interleaved=True is unknown"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}, "max_position_embeddings": "left out"},
            "'yarn' needs original_max_position_embeddings",
        ),
    ],
)
def test_rotary_positions_that_two_fields_tell_differently_or_in_part_are_refused(changed, message):
    with pytest.raises(SettingError, match=message):
        read_with("llama_gqa", changed)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            r"rope_parameters has \['factor', 'rope_type'\]",
        ),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "contradict each other"),
        ("gemma3_text", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("modernbert", {"rope_parameters": {"rope_theta": 5.0}}, r"rope_parameters has \['rope_theta'\]"),
    ],
)
def test_rotary_positions_by_type_of_layer_leave_nothing_unread(family, changed, message):
    with pytest.raises(SettingError, match=message):
        read_with(family, changed)


def test_what_published_files_have_beside_the_fields_of_transformers_is_without_effect():
    for family, field in (("umt5", "scalable_attention"), ("gemma2", "sliding_window_size")):
        check_fields({"model_type": family, field: 4_096}, FAMILIES[family])


def test_what_published_files_switch_off_or_leave_out_is_read():
    off = {"attention_bias": False, "auto_map": {"AutoConfig": "configuration.MyConfig"}}
    assert read_with("mistral", off) == replace(
        read_with("mistral", {}), published=read_with("mistral", off).published
    )
    causal = {"use_bidirectional_attention": False}
    assert semantic_settings(read_with("gemma2", causal)) == semantic_settings(read_with("gemma2", {}))
    for exact in ({"pretraining_tp": 4, "slow_but_exact": False}, {"slow_but_exact": True}):
        assert read_with("bloom_alibi", exact) == read_with("bloom_alibi", {})
    unsaid = {"rope_parameters": "left out", "rope_theta": "left out"}
    assert read_with("mixtral", unsaid).positions.rotary.base == 1e6
    assert read_with("mistral", unsaid).positions.rotary.base == 1e4
