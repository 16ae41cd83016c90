"""Says which fields of a config.json are read, ignored or refused.

A field that no one knows is refused if its name suggests that it changes the outputs; otherwise it is kept.
"""

import re
from typing import Any

from lm.config.base import SettingError, did_you_mean
from lm.convert.schema import Family, HFConfig

# Fields of every family that are read outside of ``Family.fields``.
_READ_ELSEWHERE = ("model_type", "architectures", "tie_word_embeddings")

# Fields of every family that change no output, in transformers 4 and 5: names of things, options of the
# program, the initialization of parameters, and the generation of text.
_IGNORED = """
    _attn_implementation_autoset auto_map _commit_hash _name_or_path _num_labels begin_suppress_tokens
    bos_token_id chunk_size_feed_forward classifier_activation classifier_bias decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range init_std is_encoder_decoder label2id language length_penalty mask_token_id max_length
    min_length name_or_path num_beam_groups num_beams num_labels num_return_sequences no_repeat_ngram_size
    encoder_no_repeat_ngram_size output_attentions output_hidden_states output_past output_scores pad_token_id
    prefix problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p unk_token_id use_bfloat16 use_cache bad_words_ids
    xla_device encoder_layerdrop decoder_layerdrop layerdrop summary_activation summary_first_dropout
    summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
"""
# Fields that older programs wrote into published files and that none of today's reads.
_LEGACY = """
    add_bias_logits attention_mode bert_lm_layers bias_dropout_fusion directionality down_scale_factor
    extra_pos_embeddings force_bos_token_to_be_generated gap_size ignore_attention_mask layers_to_keep
    masked_softmax_fusion max_sequence_length model_parallel n_ctx n_special net_structure_type
    num_memory_blocks offset_alibi pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type predict_special_tokens seq_length skip_bias_add skip_bias_add_qkv
    static_position_embeddings tie_weights_ vocab_file
"""
IGNORED = frozenset(_IGNORED.split() + _LEGACY.split())

# Fields of every family of which one value alone is implemented here.
_SUPPORTED_VALUES: dict[str, Any] = {
    "quantization_config": None,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
}
# Fields that published files of families without them have, where false says nothing of the model.
_SWITCHED_OFF = ("attention_bias", "rope_interleaved", "apply_residual_connection_post_layernorm")
# In all published files a field whose name has one of these words decides how something is computed.
_WORDS_OF_COMPUTATION = """
    act activation alibi attention attn bias cap clip dilation dilations embed embedding embeddings epsilon
    eps expert experts gate gated groups heads logit logits mlp moe multiplier multipliers norm normalization
    normalize parallel position positions projection qk residual rms rope rotary scalar scale scaled scaling
    sliding softcap softcapping softmax sparse tie tied types window windows
""".split()


def read_fields(family: Family) -> set[str]:
    """Return the fields that decide what is computed here, or whether the file is refused."""
    names = {name for field in family.fields for name in field.names}
    names |= {*_READ_ELSEWHERE, *_SUPPORTED_VALUES, *family.supported_values, *family.attribute_map}
    return names | {*family.written_values}


def known_fields(family: Family) -> set[str]:
    """Return the fields that are read, and those that are known to change no output."""
    ignored = IGNORED | {*family.ignored}
    in_sections = {f"{section}.{name}" for section in family.sections for name in ignored}
    return read_fields(family) | ignored | in_sections


def unknown_fields(hf_config: HFConfig, family: Family) -> list[str]:
    """Return the fields that neither this package nor transformers reads; an export writes them again."""
    unknown = hf_config.keys() - known_fields(family)
    return sorted(name for name in unknown if not _is_dropout_rate(name))


def check_fields(hf_config: HFConfig, family: Family) -> None:
    """Raise SettingError for a field that asks for what is not implemented, or may do so by its name."""
    for name, supported in (_SUPPORTED_VALUES | dict(family.supported_values)).items():
        value = hf_config.get(name, supported)
        means_false = value is None and not supported  # null is as good as false to transformers
        if value != supported and not means_false:
            raise SettingError(f"config.json: {name}={value!r} is not supported, only {supported!r}")
    for alias, name in family.attribute_map.items():
        if alias in hf_config and name in hf_config and hf_config[alias] != hf_config[name]:
            both = f"{alias}={hf_config[alias]!r} and {name}={hf_config[name]!r}"
            raise SettingError(f"config.json: {both} should be the same")
    known = known_fields(family)
    for name in sorted(hf_config.keys() - known):
        if hf_config[name] is False and name in _SWITCHED_OFF:
            continue
        if hf_config[name] is not None and _may_change_outputs(name):
            raise SettingError(
                f"config.json: {name}={hf_config[name]!r} is unknown to this family and may change what is "
                f"computed{did_you_mean(name, known - hf_config.keys())}; take it out if it does not"
            )


def _may_change_outputs(name: str) -> bool:
    """Return whether the name of an unknown field suggests so."""
    words = re.split(r"[^a-z]+", name.lower())
    return not _is_dropout_rate(name) and not set(_WORDS_OF_COMPUTATION).isdisjoint(words)


def _is_dropout_rate(name: str) -> bool:
    return re.search(r"dropout|pdrop", name) is not None
