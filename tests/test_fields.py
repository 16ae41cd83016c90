"""Every field of a config.json is read, refused or without effect, as golden/make_variants.py saw in
transformers.
"""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lm.convert import load, save
from lm.convert.families import FAMILIES
from lm.convert.unread import IDLE, accounted, check_fields, read_fields, unknown_fields
from lm.nn.transformer import Transformer
from lm.settings import SettingError

GOLDEN = Path(__file__).parent / "golden"
FIELDS = json.loads((GOLDEN / "fields.json").read_text())
VARIANTS = json.loads((GOLDEN / "variants.json").read_text())
REFUSED = {  # legal, and told by the field's name
    "t5/is_gated_act_true",
    "umt5/is_gated_act_false",
    "bart/is_encoder_decoder_false",
    "gpt_bigcode/multi_query_false",
    "gpt2/scale_attn_by_inverse_layer_idx_true",
    "gpt2/scale_attn_weights_false",
    "gpt_bigcode/scale_attn_weights_false",
    "gpt_neox/attention_bias_false",
    "bloom/apply_residual_connection_post_layernorm_true",
    "gpt2/add_cross_attention_true",
    "opt/_remove_final_layer_norm_true",
    "opt/enable_bias_false",
    "opt/layer_norm_elementwise_affine_false",
    "marian/share_encoder_decoder_embeddings_false",
    *(f"{family}/is_decoder_true" for family in ("bert", "roberta", "electra")),
    *(
        f"{family}/tie_word_embeddings_false"
        for family in ("bart", "marian", "bert", "roberta", "longformer", "albert", "electra", "distilbert")
    ),
}
QUICK = {  # the others are computed as their families' checkpoints of test_parity are
    "t5/tied_unscaled",
    "t5/own_scaled",
    "umt5/own_scaled",
    "bart/sides_apart",
    "marian/sides_apart",
    "llama/attention_bias_true",
    "llama/mlp_bias_true",
    "opt/projected",
    "qwen2/window_from_a_layer_on",
    "longformer/window_by_layer",
    "electra/generator_as_wide",
    "distilbert/sinusoidal_pos_embds_true",
    "bert/null_pad",
}
INPUTS = np.array([[7, 9, 12, 6, 8, 15, 10, 11], [13, 8, 6, 14, 17, 9, 18, 16]])


@pytest.fixture(scope="module")
def arrays():
    with np.load(GOLDEN / "variants.npz") as found:
        return dict(found)


def published(name, arrays, folder):
    """The folder of a variant as the reference saved it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(VARIANTS[name]))
    own = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
    tensors = {key: array.astype(np.float32) for key, array in own.items() if key != "logits"}
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(model):
    if model.config.has_encoder and model.config.has_decoder:
        batch = {"encoder_input_tokens": INPUTS, "decoder_input_tokens": INPUTS[::-1, :5]}
    else:
        batch = {f"{'encoder' if model.config.has_encoder else 'decoder'}_input_tokens": INPUTS}
    return jax.jit(Transformer.__call__)(model, batch)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in sorted(set(VARIANTS) - REFUSED)
    ],
)
def test_a_model_with_one_field_changed_has_the_logits_of_the_reference(name, arrays, tmp_path):
    _, model = load(published(name, arrays, tmp_path / "in"))
    np.testing.assert_allclose(logits(model), arrays[f"{name}/logits"], atol=5e-5)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_implemented_is_refused_by_the_name_of_its_field(name, arrays, tmp_path):
    field = name.partition("/")[2].rpartition("_")[0]
    with pytest.raises(SettingError, match=field):
        load(published(name, arrays, tmp_path / "in"))


# names, of which none is computed
SAID = {"architectures", "dtype", "transformers_version", "id2label", "label2id"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_the_reference_writes_is_read_or_shown_to_be_without_effect(family):
    table = FAMILIES[family]
    unaccounted = [field for field in FIELDS[family] if field not in accounted(table) and "drop" not in field]
    assert not unaccounted
    shown = {field for field, change in FIELDS[family].items() if change != "idle"} - SAID
    assert shown <= read_fields(table)
    assert not {*table.idle.split()} & read_fields(table)


def test_the_fields_are_those_of_the_installed_transformers():
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    import transformers

    for family, fields in FIELDS.items():
        config = transformers.AutoConfig.for_model(family)
        written = json.loads(config.to_json_string(use_diff=False))
        due = {new for new in written if not new.startswith("_") and written[new] is not None}
        assert (
            due - {"output_attentions", "output_hidden_states", "return_dict", "problem_type"}
            <= set(fields) | IDLE
        )
        assert config.attribute_map.items() <= FAMILIES[family].usual_names.items() | {
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
    "name", ["bert/null_pad", "electra/generator_as_wide", "distilbert/sinusoidal_pos_embds_true"]
)
def test_what_is_loaded_and_saved_keeps_its_family_its_nulls_and_what_nothing_reads(name, arrays, tmp_path):
    folder = published(name, arrays, tmp_path / "in")
    theirs = VARIANTS[name] | {"team": {"of": "ours"}, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(theirs))
    save(load(folder)[1], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == theirs
    due, found = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert due.keys() == found.keys()
    for key, tensor in due.items():
        np.testing.assert_allclose(found[key], tensor, atol=1e-6)  # sinusoids are computed anew
