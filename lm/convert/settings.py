"""The settings of each family, theirs and ours: one table of rows, read in both directions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lm.convert.rows import (
    OPTIONAL,
    REQUIRED,
    Json,
    Row,
    Settings,
    choice,
    four_times,
    of_encoder,
    parts,
    rows,
    special,
)
from lm.nn.config import ModelConfig
from lm.settings import SettingError

# GELU is that of the error function in BERT and GPT-NeoX, its tanh form in GPT-2, ALBERT, BLOOM and T5 1.1.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_TIED = choice("tie_word_embeddings", "logits", {True: "tied", False: "separate"}, True)
_UNTIED = _TIED._replace(default=False)
_CLASSIC = {"scores": "scaled-dot", "norm": "layer", "bias": True}
_DECODER = {**_CLASSIC, "architecture": "decoder", "special.start": None}
_ENCODER = {
    **_CLASSIC,
    "architecture": "encoder",
    "positions": "learned",
    "residual": "post-norm",
    "embed_norm": True,
}
_NO_DECODER = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}


def _t5_logits(_: Any, theirs: Json) -> str:
    """Whether states are scaled by d_model^-0.5 stands in a setting of its own since transformers 5, where a
    matrix of its own is known by its tensor; before, a matrix that was the embedding (T5 1.0) was scaled,
    another (1.1) not."""
    tied = theirs.get("tie_word_embeddings", True)
    scaled = theirs.get("scale_decoder_outputs", tied)
    for name, value in (("tie_word_embeddings", tied), ("scale_decoder_outputs", scaled)):
        if not isinstance(value, bool):
            raise SettingError(f"config.json: {name}={value!r} should be true or false")
    return ("tied" if tied else "separate") + ("-scaled" if scaled else "")


# The gated GELU of T5 1.1 is the tanh form, the plain one would be that of the error function.
_T5_MLP = choice(
    "feed_forward_proj",
    "mlp",
    {mlp: mlp for mlp in ("relu", "gated-gelu", "gated-silu", "gated-relu", "gelu", "silu")},
    "relu",
)


def _t5_parts(mlp: str) -> Json:
    """What their files repeat of ``feed_forward_proj``."""
    mlp = _T5_MLP.write(mlp, ModelConfig())
    activation = "gelu_new" if mlp == "gated-gelu" else mlp.removeprefix("gated-")
    return {"is_gated_act": mlp.startswith("gated-"), "dense_act_fn": activation}


def _t5_part(name: str) -> Callable[[Any, Json], str]:
    def read(value: Any, theirs: Json) -> str:
        mlp = _T5_MLP.read(theirs.get("feed_forward_proj", "relu"), theirs)
        if value != _t5_parts(mlp)[name]:
            raise SettingError(f"config.json: {name}={value!r} is not what feed_forward_proj={mlp!r} says")
        return mlp

    return read


_T5 = Settings(
    {"T5ForConditionalGeneration": parts()},
    rows(
        vocab_size="vocab_size",
        d_model="d_model",
        d_kv="d_kv",
        d_ff="d_ff",
        num_heads="num_heads",
        num_layers="num_encoder_layers",
        relative_attention_num_buckets="relative_buckets",
    )
    + (
        Row(
            "num_decoder_layers",
            "num_decoder_layers",
            None,
            lambda value, theirs: value or theirs["num_layers"],
        ),
        Row("relative_attention_max_distance", "relative_max_distance", 128),
        Row("layer_norm_epsilon", "norm_epsilon", 1e-6),
        Row("dropout_rate", "dropout", 0.1),
        _T5_MLP,
        Row(
            "is_gated_act",
            "mlp",
            OPTIONAL,
            _t5_part("is_gated_act"),
            lambda mlp, _: _t5_parts(mlp)["is_gated_act"],
        ),
        Row(
            "dense_act_fn",
            "mlp",
            OPTIONAL,
            _t5_part("dense_act_fn"),
            lambda mlp, _: _t5_parts(mlp)["dense_act_fn"],
        ),
        # Where both are true and there is a matrix of its own, it is that which is scaled.
        Row("tie_word_embeddings", "logits", True, _t5_logits, lambda value, _: value != "separate"),
        Row(
            "scale_decoder_outputs", "logits", OPTIONAL, _t5_logits, lambda value, _: value.endswith("scaled")
        ),
        *special(0, 1, Row("decoder_start_token_id", "special.start", 0)),
    ),
    {"architecture": "encoder-decoder", "positions": "relative", "scores": "dot"},
    {"is_encoder_decoder": True},
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    idle=frozenset({"is_decoder", "n_positions"}),
    says_tied=True,  # since transformers 5
)
_BART = Settings(
    {"BartForConditionalGeneration": parts()},
    rows(
        vocab_size="vocab_size",
        d_model="d_model",
        encoder_layers="num_encoder_layers",
        decoder_layers="num_decoder_layers",
        decoder_attention_heads="num_heads",
        decoder_ffn_dim="d_ff",
        max_position_embeddings="max_length",
    )
    + (
        of_encoder("encoder_attention_heads", "num_heads", "decoder_attention_heads"),
        of_encoder("encoder_ffn_dim", "d_ff", "decoder_ffn_dim"),
        Row("dropout", "dropout", 0.1),
        choice("activation_function", "mlp", _ACTIVATIONS, "gelu"),
        choice("scale_embedding", "embed_scale", {False: "none", True: "sqrt"}, False),
        *special(1, 2, Row("decoder_start_token_id", "special.start", 2)),
    ),
    # The table of positions has two rows in front that nothing reads.
    {
        **_CLASSIC,
        "architecture": "encoder-decoder",
        "positions": "learned",
        "position_offset": 2,
        "embed_norm": True,
        "residual": "post-norm",
        "norm_epsilon": 1e-5,
        "logits": "tied",
    },
    {
        "is_encoder_decoder": True,
        "normalize_before": False,
        "add_final_layer_norm": False,
        "normalize_embedding": True,
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
    idle=frozenset({"is_decoder"}),
)
_MARIAN = replace(
    _BART,
    classes={"MarianMTModel": parts()},
    rows=_BART.rows + (Row("decoder_vocab_size", "vocab_size", OPTIONAL),),
    fixed={
        **_BART.fixed,
        "positions": "sinusoidal",
        "sinusoid": "halves",
        "position_offset": 0,
        "embed_norm": False,
    },
    only={**_BART.only, "normalize_embedding": False, "share_encoder_decoder_embeddings": True},
)
_GPT2 = Settings(
    {"GPT2LMHeadModel": parts()},
    rows(
        vocab_size="vocab_size",
        n_embd="d_model",
        n_layer="num_decoder_layers",
        n_head="num_heads",
        n_positions="max_length",
    )
    + (
        Row("n_inner", "d_ff", None, lambda value, theirs: value or 4 * theirs["n_embd"]),
        Row("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Row("resid_pdrop", "dropout", 0.1),
        choice("activation_function", "mlp", _ACTIVATIONS, "gelu_new"),
        _TIED,
        *special(0, None),
    ),
    {**_DECODER, "positions": "learned"},
    {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    idle=frozenset({"reorder_and_upcast_attn"}),
)
_GPT = replace(
    _GPT2,
    classes={"OpenAIGPTLMHeadModel": parts()},
    rows=tuple(row for row in _GPT2.rows if row.theirs not in ("n_inner", "activation_function"))
    # What GPT calls GELU is the tanh form.
    + (choice("afn", "mlp", {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}, "gelu"),),
    fixed={**_GPT2.fixed, "residual": "post-norm", "d_ff": four_times},
    only={},
)
_BIGCODE = replace(
    _GPT2,
    classes={"GPTBigCodeForCausalLM": parts()},
    fixed={**_GPT2.fixed, "num_key_value_heads": 1},
    only={
        "multi_query": True,
        "num_key_value_heads": 1,
        "scale_attn_weights": True,
        "add_cross_attention": False,
    },
    idle=frozenset(
        {
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
            "inference_runner",
            "max_batch_size",
            "pad_key_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
        }
    ),
)
_BLOOM = Settings(
    {"BloomForCausalLM": parts()},
    rows(vocab_size="vocab_size", hidden_size="d_model", n_layer="num_decoder_layers", n_head="num_heads")
    + (
        Row("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Row("hidden_dropout", "dropout", 0.0),
        _TIED,
        *special(3, 2),
    ),
    {**_DECODER, "positions": "alibi", "embed_norm": True, "mlp": "gelu-tanh", "d_ff": four_times},
    {"apply_residual_connection_post_layernorm": False},
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    # Of the same products in several parts, and the width of the feed-forward layer, which is four times the
    # other.
    idle=frozenset({"pretraining_tp", "slow_but_exact", "n_inner", "attention_softmax_in_fp32"}),
)
_NEOX = Settings(
    {"GPTNeoXForCausalLM": parts()},
    rows(
        vocab_size="vocab_size",
        hidden_size="d_model",
        num_hidden_layers="num_decoder_layers",
        num_attention_heads="num_heads",
        intermediate_size="d_ff",
    )
    + (
        Row("max_position_embeddings", "max_length", 2_048),
        Row("layer_norm_eps", "norm_epsilon", 1e-5),
        Row("hidden_dropout", "dropout", 0.0),
        choice("hidden_act", "mlp", _ACTIVATIONS, "gelu"),
        choice("use_parallel_residual", "residual", {True: "parallel", False: "pre-norm"}, True),
        _UNTIED,
        *special(0, 2),
    ),
    {**_DECODER, "positions": "rotary"},
    {"attention_bias": True, "head_dim": None},
    idle=frozenset({"is_decoder"}),
    rotary=("rotary_emb_base", "rotary_pct", 0.25),
)
_LLAMA = Settings(
    {"LlamaForCausalLM": parts()},
    rows(
        vocab_size="vocab_size",
        hidden_size="d_model",
        num_hidden_layers="num_decoder_layers",
        num_attention_heads="num_heads",
        intermediate_size="d_ff",
    )
    + (
        Row(
            "num_key_value_heads", "num_key_value_heads", None, write=lambda _, config: config.key_value_heads
        ),
        Row(
            "head_dim",
            "d_kv",
            None,
            lambda v, theirs: v or theirs["hidden_size"] // theirs["num_attention_heads"],
        ),
        Row("max_position_embeddings", "max_length", 2_048),
        Row("rms_norm_eps", "norm_epsilon", 1e-6),
        Row("attention_dropout", "dropout", 0.0),
        choice(
            "hidden_act",
            "mlp",
            {
                "silu": "gated-silu",
                "relu": "gated-relu",
                "gelu_new": "gated-gelu",
                "gelu_pytorch_tanh": "gated-gelu",
                "swish": "gated-silu",
            },
            "silu",
        ),
        Row("attention_bias", "bias", False),
        Row(
            "mlp_bias",
            "mlp_bias",
            False,
            lambda value, theirs: None if value is theirs.get("attention_bias", False) else value,
            lambda _, config: config.mlp_has_bias,
        ),
        _UNTIED,
        *special(0, 2),
    ),
    {
        "architecture": "decoder",
        "special.start": None,
        "scores": "scaled-dot",
        "norm": "rms",
        "positions": "rotary",
    },
    idle=frozenset({"pretraining_tp"}),
    rotary=("rope_theta", "partial_rotary_factor", 1.0),
)

_BERT_ROWS = rows(
    vocab_size="vocab_size",
    hidden_size="d_model",
    num_hidden_layers="num_encoder_layers",
    num_attention_heads="num_heads",
    intermediate_size="d_ff",
) + (
    Row("max_position_embeddings", "max_length"),
    # theirs has at least one
    Row("type_vocab_size", "type_vocab_size", 2, write=lambda value, _: max(value, 1)),
    Row("layer_norm_eps", "norm_epsilon", 1e-12),
    Row("hidden_dropout_prob", "dropout", 0.1),
    choice("hidden_act", "mlp", _ACTIVATIONS, "gelu"),
)
# The output layer of these knows no other activation.
_GELU_ROWS = _BERT_ROWS[:-1] + (choice("hidden_act", "mlp", {"gelu": "gelu"}, "gelu"),)
_BERT = Settings(
    {
        "BertForPreTraining": parts("logits", "pooler", "next-sentence"),
        "BertForMaskedLM": parts("logits"),
        "BertModel": parts(),
    },
    _BERT_ROWS + special(0, None),
    {**_ENCODER, "special.start": None},
    _NO_DECODER,
)
# The first token stands at the id of padding plus one: rows before it are for padding, and unused.
_AFTER_PAD = Row(
    "max_position_embeddings",
    "max_length",
    REQUIRED,
    lambda value, theirs: value - (theirs.get("pad_token_id", 1) or 0) - 1,
    lambda value, config: value + config.position_offset,
)
_ROBERTA = replace(
    _BERT,
    classes={"RobertaForMaskedLM": parts("logits"), "RobertaModel": parts()},
    rows=tuple(_AFTER_PAD if row.ours == "max_length" else row for row in _GELU_ROWS)
    + special(1, 2, Row("bos_token_id", "special.start", 0)),
    fixed={**_ENCODER, "position_offset": lambda ours: ours["special.pad"] + 1},
)


def _windows(value: Any, theirs: Json) -> tuple[int, ...]:
    """Of each layer, or of all; theirs counts both sides."""
    layers = theirs["num_hidden_layers"]
    windows = value if isinstance(value, list) else [value]
    if (
        isinstance(value, list)
        and len(value) != layers
        or not all(type(window) is int and window > 0 and window % 2 == 0 for window in windows)
    ):
        raise SettingError(
            f"config.json: attention_window={value} should be an even number, or one for each of {layers} "
            "layers"
        )
    return tuple(window // 2 for window in windows)


def _unlike(windows: tuple[int, ...]) -> tuple[int, ...]:
    return windows if len(set(windows)) > 1 else ()


def _both_sides(_: Any, config: ModelConfig) -> list[int]:
    sparsity = config.sparsity
    return [2 * (w or 1) for w in sparsity.layer_windows or (sparsity.window,) * config.num_encoder_layers]


_LONGFORMER = replace(
    _ROBERTA,
    classes={"LongformerForMaskedLM": parts("logits"), "LongformerModel": parts()},
    rows=_ROBERTA.rows
    + (
        Row("attention_window", "sparsity.window", 512, lambda *theirs: max(_windows(*theirs)), _both_sides),
        Row(
            "attention_window",
            "sparsity.layer_windows",
            512,
            lambda *theirs: _unlike(_windows(*theirs)),
            _both_sides,
        ),
    ),
    fixed={**_ROBERTA.fixed, "sparsity.projections": "separate"},
    idle=frozenset({"onnx_export"}),
)
_DISTILBERT = Settings(
    {"DistilBertForMaskedLM": parts("logits"), "DistilBertModel": parts()},
    rows(
        vocab_size="vocab_size",
        dim="d_model",
        n_layers="num_encoder_layers",
        n_heads="num_heads",
        hidden_dim="d_ff",
        max_position_embeddings="max_length",
    )
    + (
        Row("dropout", "dropout", 0.1),
        choice("activation", "mlp", _ACTIVATIONS, "gelu"),
        choice("sinusoidal_pos_embds", "positions", {False: "learned", True: "sinusoidal"}, False),
        *special(0, None),
    ),
    {key: value for key, value in _ENCODER.items() if key != "positions"}
    | {"norm_epsilon": 1e-12, "special.start": None, "sinusoid": "interleaved"},
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)
_ALBERT = replace(
    _BERT,
    classes={
        "AlbertForPreTraining": parts("logits", "pooler", "sentence-order"),
        "AlbertForMaskedLM": parts("logits"),
        "AlbertModel": parts(),
    },
    rows=_BERT_ROWS
    + (Row("embedding_size", "d_embed", 128, write=lambda _, config: config.embed_width),)
    + special(0, 3),
    fixed={**_BERT.fixed, "shared_layers": True},
    only={**_NO_DECODER, "num_hidden_groups": 1, "inner_group_num": 1},
)
_ELECTRA = replace(
    _BERT,
    classes={
        "ElectraForPreTraining": parts("replaced-token"),
        "ElectraForMaskedLM": parts("logits"),
        "ElectraModel": parts(),
    },
    rows=_GELU_ROWS
    + special(0, None)
    + (
        Row(
            "embedding_size",
            "d_embed",
            128,
            lambda value, theirs: None if value == theirs["hidden_size"] else value,
            lambda _, config: config.embed_width,
        ),
    ),
)

SETTINGS: dict[str, Settings] = {
    "t5": _T5,
    "umt5": replace(
        _T5,
        classes={"UMT5ForConditionalGeneration": parts()},
        rows=tuple(row for row in _T5.rows if row.ours != "logits")
        + (choice("tie_word_embeddings", "logits", {True: "tied-scaled", False: "separate"}, True),),
        fixed={**_T5.fixed, "positions": "relative-per-layer"},
    ),
    "bart": _BART,
    "marian": _MARIAN,
    "gpt2": _GPT2,
    "openai-gpt": _GPT,
    "gpt_bigcode": _BIGCODE,
    "gpt_neox": _NEOX,
    "bloom": _BLOOM,
    "llama": _LLAMA,
    "distilbert": _DISTILBERT,
    "bert": _BERT,
    "roberta": _ROBERTA,
    "longformer": _LONGFORMER,
    "albert": _ALBERT,
    "electra": _ELECTRA,
}
