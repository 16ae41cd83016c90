"""Fields of a config.json that are no settings: those without effect on the output, and unknown ones."""

import re

from lm.convert.family import Family, Json, values
from lm.settings import SettingError, nearest

# read as a family, parts, and copies of tensors
ELSEWHERE = ("model_type", "architectures", "tie_word_embeddings")
ROTARY = ("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters", "max_position_embeddings")

# Of every family, by transformers 4 and 5: names of things, how a program is called, how parameters are drawn
# at first and how texts are generated.
_IDLE = """
    _attn_implementation_autoset _commit_hash _name_or_path _num_labels begin_suppress_tokens bos_token_id
    chunk_size_feed_forward classifier_activation classifier_bias decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range init_std is_encoder_decoder label2id language length_penalty mask_token_id max_length
    min_length name_or_path num_beam_groups num_beams num_labels num_return_sequences no_repeat_ngram_size
    encoder_no_repeat_ngram_size output_attentions output_hidden_states output_past output_scores pad_token_id
    prefix problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p unk_token_id use_bfloat16 use_cache bad_words_ids
    xla_device encoder_layerdrop decoder_layerdrop layerdrop summary_activation summary_first_dropout
    summary_last_dropout summary_proj_to_labels summary_type summary_use_proj
"""
# Written by older programs into published files, and read by none of today.
_FORMER = """
    add_bias_logits attention_mode bert_lm_layers bias_dropout_fusion directionality down_scale_factor
    extra_pos_embeddings force_bos_token_to_be_generated gap_size ignore_attention_mask layers_to_keep
    masked_softmax_fusion max_sequence_length model_parallel n_ctx n_special net_structure_type
    num_memory_blocks offset_alibi pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type predict_special_tokens seq_length skip_bias_add skip_bias_add_qkv
    static_position_embeddings tie_weights_ vocab_file
"""
IDLE = frozenset(_IDLE.split() + _FORMER.split())
ONLY = values(  # in every family: the one value that is implemented
    "quantization_config=null auto_map=null pruned_heads={} tie_encoder_decoder=false "
    "cross_attention_hidden_size=null"
)
# In all published configs a field whose name has one of these words says how something is computed.
_COMPUTES = """
    act activation alibi attention attn bias cap clip dilation dilations embed embedding embeddings epsilon
    eps expert experts gate gated groups heads logit logits mlp moe multiplier multipliers norm normalization
    normalize parallel position positions projection qk residual rms rope rotary scalar scale scaled scaling
    sliding softcap softcapping softmax sparse tie tied types window windows
""".split()


def accounted(table: Family) -> set[str]:
    """The fields of a family that are read or have no effect; rates of dropout have none but in training."""
    return read_fields(table) | IDLE | {*table.idle.split()}


def read_fields(table: Family) -> set[str]:
    """Those of them on which it depends what is computed here, or whether it is refused."""
    read = {row.theirs for row in table.keys} | {*table.usual_names, *ELSEWHERE, *ONLY, *table.only}
    return read if table.rotary is None else read | {*ROTARY, *filter(None, table.rotary[:2])}


def check_fields(theirs: Json, table: Family) -> None:
    """SettingError for a field that asks for what is not implemented, or may do so by its name."""
    for key, value in (ONLY | dict(table.only)).items():
        if theirs.get(key) not in (None, value) or key in theirs and theirs[key] is None and value:
            raise SettingError(f"config.json: {key}={theirs[key]!r} is not supported, only {value!r}")
    for old, new in table.usual_names.items():
        if theirs.get(old, theirs.get(new)) != theirs.get(new, theirs.get(old)):
            both = f"{old}={theirs[old]!r} and {new}={theirs[new]!r}"
            raise SettingError(f"config.json: {both} should be the same")
    for key in sorted(theirs.keys() - accounted(table)):
        if theirs[key] is not None and _computes(key):
            given, near = f"{key}={theirs[key]!r}", nearest(key, accounted(table))
            effect = "is unknown to this family and may change what is computed"
            raise SettingError(f"config.json: {given} {effect}{near}; take it out if it does not")


def unknown_fields(theirs: Json, table: Family) -> list[str]:
    """The fields that nothing here or in the reference reads: they are kept, and say nothing."""
    return sorted(key for key in theirs.keys() - accounted(table) if not _dropout(key))


def _computes(key: str) -> bool:
    return not _dropout(key) and not set(_COMPUTES).isdisjoint(re.split(r"[^a-z]+", key.lower()))


def _dropout(key: str) -> bool:
    return re.search(r"dropout|pdrop", key) is not None
