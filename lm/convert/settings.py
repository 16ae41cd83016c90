"""The settings of each family, theirs and ours: one table of rows, read in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lm.config import SettingError, nearest
from lm.nn.config import ModelConfig

Json = dict[str, Any]
REQUIRED, OPTIONAL = object(), object()  # defaults of settings that must, or need not, be there


def _same(value: Any, _: Any) -> Any:
    return value


class Row(NamedTuple):
    """One setting of theirs and the one of ours that it becomes."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    read: Callable[[Any, Json], Any] = _same  # (their value, their settings) -> ours
    write: Callable[[Any, ModelConfig], Any] = _same  # (our value, our settings) -> theirs


@dataclass(frozen=True)
class Settings:
    """One family's settings."""

    classes: Mapping[str, frozenset[str]]  # their class -> the parts that it has; the fullest first
    rows: tuple[Row, ...]
    fixed: Mapping[str, Any]  # of ours, in every model of the family; a function of the others where it depends on them
    only: Mapping[str, Any] = field(default_factory=dict)  # of theirs: the one value that is implemented
    rotary: tuple[str, str, float] | None = None  # their names of its base and fraction, and the usual fraction
    older: Mapping[str, str] = field(default_factory=dict)  # their names that were used before: the present ones


def _rows(**names: str) -> tuple[Row, ...]:
    return tuple(Row(theirs, ours) for theirs, ours in names.items())


def _choice(theirs: str, ours: str, table: Mapping[Any, Any], default: Any = REQUIRED) -> Row:
    """A setting that is one of ``table``, theirs -> ours; of several that become the same the first is written."""

    def read(value: Any, _: Json) -> Any:
        if value not in table:
            raise SettingError(
                f"config.json: {theirs}={value!r} is not supported{nearest(str(value), map(str, table))}"
            )
        return table[value]

    # What has no name becomes the first: read again, it is seen to differ.
    return Row(
        theirs, ours, default, read, lambda value, _: next((t for t, o in table.items() if o == value), [*table][0])
    )


def _special(pad: int, eos: int | None, start: Row | None = None) -> tuple[Row, ...]:
    return (
        Row("pad_token_id", "special.pad", pad, lambda value, _: value or 0),  # null where nothing was padded
        # The first of several: the others end turns of a conversation.
        Row("eos_token_id", "special.eos", eos, lambda value, _: value[0] if isinstance(value, list) else value),
    ) + (() if start is None else (start,))


def _four_times(ours: Json) -> int:
    return 4 * ours["d_model"]


def _parts(*parts: str) -> frozenset[str]:
    return frozenset(parts)


# GELU is that of the error function in BERT and GPT-NeoX, its tanh form in GPT-2, ALBERT, BLOOM and T5 1.1.
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu_fast": "gelu-tanh",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
_TIED = _choice("tie_word_embeddings", "logits", {True: "tied", False: "separate"}, True)
_UNTIED = _TIED._replace(default=False)
_CLASSIC = {"scores": "scaled-dot", "norm": "layer", "bias": True}
_DECODER = {**_CLASSIC, "architecture": "decoder", "special.start": None}
_ENCODER = {
    **_CLASSIC, "architecture": "encoder", "positions": "learned", "residual": "post-norm", "embed_norm": True,
}  # fmt: skip
_NO_DECODER = {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}

_T5 = Settings(
    {"T5ForConditionalGeneration": _parts()},
    _rows(vocab_size="vocab_size", d_model="d_model", d_kv="d_kv", d_ff="d_ff", num_heads="num_heads",
          num_layers="num_encoder_layers", relative_attention_num_buckets="relative_buckets") + (
        Row("num_decoder_layers", "num_decoder_layers", None, lambda value, theirs: value or theirs["num_layers"]),
        Row("relative_attention_max_distance", "relative_max_distance", 128),
        Row("layer_norm_epsilon", "norm_epsilon", 1e-6),
        Row("dropout_rate", "dropout", 0.1),
        # The gated GELU of T5 1.1 is the tanh form, the plain one would be that of the error function.
        _choice("feed_forward_proj", "mlp", {
            "relu": "relu", "gated-gelu": "gated-gelu", "gated-silu": "gated-silu", "gated-relu": "gated-relu",
            "gelu": "gelu", "silu": "silu",
        }, "relu"),
        # A matrix that is the embedding is scaled by d_model^-0.5, one of its own (T5 1.1) is not.
        _choice("tie_word_embeddings", "logits", {True: "tied-scaled", False: "separate"}, True),
        *_special(0, 1, Row("decoder_start_token_id", "special.start", 0)),
    ),
    {"architecture": "encoder-decoder", "positions": "relative", "scores": "dot"},
)  # fmt: skip
_BART = Settings(
    {"BartForConditionalGeneration": _parts()},
    _rows(vocab_size="vocab_size", d_model="d_model", encoder_layers="num_encoder_layers",
          decoder_layers="num_decoder_layers", encoder_attention_heads="num_heads",
          decoder_attention_heads="num_heads", encoder_ffn_dim="d_ff", decoder_ffn_dim="d_ff",
          max_position_embeddings="max_length") + (
        Row("dropout", "dropout", 0.1),
        _choice("activation_function", "mlp", _ACTIVATIONS, "gelu"),
        _choice("scale_embedding", "embed_scale", {False: "none", True: "sqrt"}, False),
        *_special(1, 2, Row("decoder_start_token_id", "special.start", 2)),
    ),
    # The table of positions has two rows in front that nothing reads.
    {**_CLASSIC, "architecture": "encoder-decoder", "positions": "learned", "position_offset": 2, "embed_norm": True,
     "residual": "post-norm", "norm_epsilon": 1e-5, "logits": "tied"},
    {"normalize_before": False, "add_final_layer_norm": False, "normalize_embedding": True,
     "tie_word_embeddings": True},
)  # fmt: skip
_MARIAN = replace(
    _BART,
    classes={"MarianMTModel": _parts()},
    rows=_BART.rows + (Row("decoder_vocab_size", "vocab_size", OPTIONAL),),
    fixed={**_BART.fixed, "positions": "sinusoidal", "sinusoid": "halves", "position_offset": 0, "embed_norm": False},
    only={**_BART.only, "normalize_embedding": False, "share_encoder_decoder_embeddings": True},
)
_GPT2 = Settings(
    {"GPT2LMHeadModel": _parts()},
    _rows(vocab_size="vocab_size", n_embd="d_model", n_layer="num_decoder_layers", n_head="num_heads",
          n_positions="max_length") + (
        Row("n_inner", "d_ff", None, lambda value, theirs: value or 4 * theirs["n_embd"]),
        Row("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Row("resid_pdrop", "dropout", 0.1),
        _choice("activation_function", "mlp", _ACTIVATIONS, "gelu_new"),
        _TIED, *_special(0, None),
    ),
    {**_DECODER, "positions": "learned"},
    {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
)  # fmt: skip
_GPT = replace(
    _GPT2,
    classes={"OpenAIGPTLMHeadModel": _parts()},
    rows=tuple(row for row in _GPT2.rows if row.theirs not in ("n_inner", "activation_function"))
    # What GPT calls GELU is the tanh form.
    + (_choice("afn", "mlp", {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}, "gelu"),),
    fixed={**_GPT2.fixed, "residual": "post-norm", "d_ff": _four_times},
    only={},
)
_BIGCODE = replace(
    _GPT2,
    classes={"GPTBigCodeForCausalLM": _parts()},
    fixed={**_GPT2.fixed, "num_key_value_heads": 1},
    only={"multi_query": True, "scale_attn_weights": True, "add_cross_attention": False},
)
_BLOOM = Settings(
    {"BloomForCausalLM": _parts()},
    _rows(vocab_size="vocab_size", hidden_size="d_model", n_layer="num_decoder_layers", n_head="num_heads") + (
        Row("layer_norm_epsilon", "norm_epsilon", 1e-5), Row("hidden_dropout", "dropout", 0.0),
        _TIED, *_special(3, 2),
    ),
    {**_DECODER, "positions": "alibi", "embed_norm": True, "mlp": "gelu-tanh", "d_ff": _four_times},
    {"apply_residual_connection_post_layernorm": False},
    older={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)  # fmt: skip
_NEOX = Settings(
    {"GPTNeoXForCausalLM": _parts()},
    _rows(vocab_size="vocab_size", hidden_size="d_model", num_hidden_layers="num_decoder_layers",
          num_attention_heads="num_heads", intermediate_size="d_ff") + (
        Row("max_position_embeddings", "max_length", 2_048), Row("layer_norm_eps", "norm_epsilon", 1e-5),
        Row("hidden_dropout", "dropout", 0.0), _choice("hidden_act", "mlp", _ACTIVATIONS, "gelu"),
        _choice("use_parallel_residual", "residual", {True: "parallel", False: "pre-norm"}, True),
        _UNTIED, *_special(0, 2),
    ),
    {**_DECODER, "positions": "rotary"},
    {"attention_bias": True},
    rotary=("rotary_emb_base", "rotary_pct", 0.25),
)  # fmt: skip
_LLAMA = Settings(
    {"LlamaForCausalLM": _parts()},
    _rows(vocab_size="vocab_size", hidden_size="d_model", num_hidden_layers="num_decoder_layers",
          num_attention_heads="num_heads", intermediate_size="d_ff") + (
        Row("num_key_value_heads", "num_key_value_heads", None, write=lambda _, config: config.key_value_heads),
        Row("head_dim", "d_kv", None, lambda v, theirs: v or theirs["hidden_size"] // theirs["num_attention_heads"]),
        Row("max_position_embeddings", "max_length", 2_048), Row("rms_norm_eps", "norm_epsilon", 1e-6),
        Row("attention_dropout", "dropout", 0.0),
        _choice("hidden_act", "mlp", {"silu": "gated-silu", "relu": "gated-relu", "gelu_new": "gated-gelu",
                                      "gelu_pytorch_tanh": "gated-gelu", "swish": "gated-silu"}, "silu"),
        # Biases are everywhere or nowhere.
        Row("attention_bias", "bias", False), Row("mlp_bias", "bias", OPTIONAL),
        _UNTIED, *_special(0, 2),
    ),
    {"architecture": "decoder", "special.start": None, "scores": "scaled-dot", "norm": "rms", "positions": "rotary"},
    rotary=("rope_theta", "partial_rotary_factor", 1.0),
)  # fmt: skip

_BERT_ROWS = _rows(
    vocab_size="vocab_size", hidden_size="d_model", num_hidden_layers="num_encoder_layers",
    num_attention_heads="num_heads", intermediate_size="d_ff",
) + (
    Row("max_position_embeddings", "max_length"),
    Row("type_vocab_size", "type_vocab_size", 2, write=lambda value, _: max(value, 1)),  # theirs has at least one
    Row("layer_norm_eps", "norm_epsilon", 1e-12), Row("hidden_dropout_prob", "dropout", 0.1),
    _choice("hidden_act", "mlp", _ACTIVATIONS, "gelu"),
)  # fmt: skip
# The output layer of these knows no other activation.
_GELU_ROWS = _BERT_ROWS[:-1] + (_choice("hidden_act", "mlp", {"gelu": "gelu"}, "gelu"),)
_BERT = Settings(
    {"BertForPreTraining": _parts("logits", "pooler", "next-sentence"), "BertForMaskedLM": _parts("logits"),
     "BertModel": _parts()},
    _BERT_ROWS + _special(0, None), {**_ENCODER, "special.start": None}, _NO_DECODER,
)  # fmt: skip
# The first token stands at the id of padding plus one: rows before it are for padding, and unused.
_AFTER_PAD = Row(
    "max_position_embeddings", "max_length", REQUIRED,
    lambda value, theirs: value - (theirs.get("pad_token_id", 1) or 0) - 1,
    lambda value, config: value + config.position_offset,
)  # fmt: skip
_ROBERTA = replace(
    _BERT,
    classes={"RobertaForMaskedLM": _parts("logits"), "RobertaModel": _parts()},
    rows=tuple(_AFTER_PAD if row.ours == "max_length" else row for row in _GELU_ROWS)
    + _special(1, 2, Row("bos_token_id", "special.start", 0)),
    fixed={**_ENCODER, "position_offset": lambda ours: ours["special.pad"] + 1},
)


def _window(value: Any, _: Json) -> int:
    windows = set(value) if isinstance(value, list) else {value}
    if len(windows) > 1 or max(windows) % 2:
        raise SettingError(f"config.json: attention_window={value} should be one even number, the same in all layers")
    return windows.pop() // 2  # theirs counts both sides


_LONGFORMER = replace(
    _ROBERTA,
    classes={"LongformerForMaskedLM": _parts("logits"), "LongformerModel": _parts()},
    rows=_ROBERTA.rows + (
        Row("attention_window", "sparsity.window", 512, _window,
            lambda value, config: [2 * (value or 1)] * config.num_encoder_layers),
    ),
    fixed={**_ROBERTA.fixed, "sparsity.projections": "separate"},
)  # fmt: skip
_DISTILBERT = Settings(
    {"DistilBertForMaskedLM": _parts("logits"), "DistilBertModel": _parts()},
    _rows(vocab_size="vocab_size", dim="d_model", n_layers="num_encoder_layers", n_heads="num_heads",
          hidden_dim="d_ff", max_position_embeddings="max_length") + (
        Row("dropout", "dropout", 0.1), _choice("activation", "mlp", _ACTIVATIONS, "gelu"), *_special(0, None),
    ),
    {**_ENCODER, "norm_epsilon": 1e-12, "special.start": None},
)  # fmt: skip
_ALBERT = replace(
    _BERT,
    classes={"AlbertForPreTraining": _parts("logits", "pooler", "sentence-order"),
             "AlbertForMaskedLM": _parts("logits"), "AlbertModel": _parts()},
    rows=_BERT_ROWS + (Row("embedding_size", "d_embed", 128, write=lambda _, config: config.embed_width),)
    + _special(0, 3),
    fixed={**_BERT.fixed, "shared_layers": True},
    only={**_NO_DECODER, "num_hidden_groups": 1, "inner_group_num": 1},
)  # fmt: skip
_ELECTRA = replace(
    _BERT,
    classes={"ElectraForPreTraining": _parts("replaced-token"), "ElectraForMaskedLM": _parts("logits"),
             "ElectraModel": _parts()},
    rows=_GELU_ROWS + _special(0, None) + (
        Row("embedding_size", "d_embed", 128, lambda value, theirs: None if value == theirs["hidden_size"] else value,
            lambda _, config: config.embed_width),
    ),
)  # fmt: skip

SETTINGS: dict[str, Settings] = {
    "t5": _T5,
    "umt5": replace(
        _T5,
        classes={"UMT5ForConditionalGeneration": _parts()},
        fixed={**_T5.fixed, "positions": "relative-per-layer"},
    ),
    "bart": _BART, "marian": _MARIAN, "gpt2": _GPT2, "openai-gpt": _GPT, "gpt_bigcode": _BIGCODE, "gpt_neox": _NEOX,
    "bloom": _BLOOM, "llama": _LLAMA, "distilbert": _DISTILBERT, "bert": _BERT, "roberta": _ROBERTA,
    "longformer": _LONGFORMER, "albert": _ALBERT, "electra": _ELECTRA,
}  # fmt: skip
