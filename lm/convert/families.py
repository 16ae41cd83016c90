"""The families of published checkpoints: what their fields and tensors are called, as ``schema`` describes.

To add a family, copy a block and add its name at the end of the file. Sources: the paper named above each
block; names of fields and tensors, and defaults of fields, are those of ``configuration_*.py`` and
``modeling_*.py`` in the library transformers. The value given to a field, as in ``pad_token(0)`` or
``Field("dropout_rate", "dropout", 0.1)``, is the one that transformers takes where config.json lacks it.
"""

from dataclasses import replace

from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import changes
from lm.config.layers import AttentionConfig, EmbeddingConfig, NormConfig, OutputConfig, PositionsConfig
from lm.config.model import ModelConfig, SpecialTokens
from lm.convert.fields import (
    GATED_ACTIVATIONS,
    POSITIONS_AFTER_PADDING,
    QUERY_SCALAR,
    T5_MAX_DISTANCE,
    activation,
    bloom_parts,
    bos_token,
    choice,
    deberta_convolution,
    deberta_distances,
    deberta_head_width,
    deberta_norm,
    deberta_products,
    embedding_width,
    encoder_size,
    eos_token,
    falcon_architecture,
    feed_forward_width,
    gemma3_rope,
    key_value_heads,
    modernbert_rope,
    none_if_equal,
    opt_embedding_width,
    pad_token,
    rope_fields,
    rotated_features,
    same_in_both,
    switch_capacity,
    switch_jitter,
    switch_layers,
    t5_activation,
    t5_logits,
    tied_embeddings,
    xlnet_head_width,
)
from lm.convert.schema import (
    EXPERT,
    LEADING_AXIS,
    OPTIONAL,
    SAME,
    TRANSPOSE,
    TWO_LEADING_AXES,
    Family,
    Field,
    Fields,
    Parameter,
    Parameters,
    Transform,
    array,
    by_head,
    decoder_task_classes,
    embedding,
    fused_linears,
    fused_qkv,
    in_layers,
    linear,
    linears,
    norm,
    override,
    renamed,
    stack,
    task_classes,
    unchanged,
    without,
)
from lm.convert.windows import (
    gemma_windows,
    gpt_neo_windows,
    longformer_windows,
    mistral_window,
    modernbert_windows,
    qwen_windows,
    t5gemma_windows,
)

# Names of sizes that many families share.
SIZE_FIELDS: Fields = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "d_model"),
    Field("num_attention_heads", "attention.num_heads"),
    Field("intermediate_size", "mlp.d_ff"),
)
NO_START = SpecialTokens(start=None)  # no token starts the decoder

# --- encoder-decoders


_T5_FEED_FORWARD = {"encoder": "layer.1", "decoder": "layer.2"}  # module of each stack's blocks


def _t5_feed_forward(side: str) -> tuple[Parameters, ...]:
    """Map the feed-forward layers of the encoder or the decoder."""
    module = f"{_T5_FEED_FORWARD[side]}.DenseReluDense"
    return (
        linear("mlp.hidden", f"{module}.wi", gated=f"{module}.wi_0"),
        linears("mlp", module, linear="wi_1", out="wo"),
    )


def _t5_stack(side: str, feed_forward: tuple[Parameters, ...]) -> tuple[Parameters, ...]:
    """Map the encoder or the decoder, whose feed-forward layers ``feed_forward`` maps.

    T5 stores relative biases in its first layer for all layers, UMT5 in every layer.
    """
    relative = "SelfAttention.relative_attention_bias"
    cross_attention: tuple[Parameters, ...] = ()
    if side == "decoder":
        cross_attention = (
            linears("cross", "layer.1.EncDecAttention", query="q", key="k", value="v", out="o"),
            norm("cross_norm", "layer.1.layer_norm"),
        )
    return (
        embedding(f"{side}.relative", f"{side}.block.0.layer.0.{relative}"),
        norm(f"{side}.norm", f"{side}.final_layer_norm"),
        stack(
            f"{side}.blocks",
            f"{side}.block",
            embedding("relative", f"layer.0.{relative}"),
            linears("attention", "layer.0.SelfAttention", query="q", key="k", value="v", out="o"),
            norm("attention_norm", "layer.0.layer_norm"),
            *cross_attention,
            *feed_forward,
            norm("mlp_norm", f"{_T5_FEED_FORWARD[side]}.layer_norm"),
        ),
    )


# Raffel et al. 2020; version 1.1: Shazeer 2020
T5 = Family(
    model_type="t5",
    architectures={"T5ForConditionalGeneration": ()},
    template=ModelConfig(
        architecture="encoder-decoder",
        positions=PositionsConfig(kind="relative"),
        attention=AttentionConfig(scores="dot"),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("d_model", "d_model"),
        Field("d_kv", "attention.d_kv"),
        Field("d_ff", "mlp.d_ff"),
        Field("num_heads", "attention.num_heads"),
        Field("num_layers", "num_encoder_layers"),
        Field(
            "num_decoder_layers",
            "num_decoder_layers",
            default=None,
            to_setting=lambda value, hf_config: value or hf_config["num_layers"],
        ),
        Field("dropout_rate", "dropout", 0.1),
        Field("relative_attention_num_buckets", "positions.relative_buckets"),
        T5_MAX_DISTANCE,
        Field("layer_norm_epsilon", "norm.epsilon", 1e-6),
        t5_activation(),
        t5_logits(),
        pad_token(0),
        eos_token(1),
        Field("decoder_start_token_id", "special.start", 0),
    ),
    supported_values={"is_encoder_decoder": True},
    attribute_map={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    ignored=("is_decoder", "n_positions"),
    tie_flag_unreliable=True,  # since transformers 5
    base_model=(
        embedding("embed", "shared"),
        *_t5_stack("encoder", _t5_feed_forward("encoder")),
        *_t5_stack("decoder", _t5_feed_forward("decoder")),
    ),
    tied_modules=("encoder.embed_tokens", "decoder.embed_tokens"),
    other_modules={"transformer": ""},  # of T5ForSequenceClassification
)

# Chung et al. 2023: relative biases in every layer
UMT5 = replace(
    T5,
    model_type="umt5",
    architectures={"UMT5ForConditionalGeneration": ()},
    template=changes(T5.template, {"positions.kind": "relative-per-layer"}),
    fields=override(T5.fields, t5_activation("gated-gelu")),
    ignored=(*T5.ignored, "scalable_attention"),  # of the program from which the weights came
)

# Xue et al. 2021: the shape of T5 1.1, whose states are never scaled before the output matrix
MT5 = replace(
    T5,
    model_type="mt5",
    architectures={"MT5ForConditionalGeneration": ()},
    fields=override(T5.fields, t5_activation("gated-gelu"), tied_embeddings(True)),
)


def _switch_feed_forward(side: str) -> tuple[Parameters, ...]:
    """Map the feed-forward layers of a stack, and the experts of the layers that have them instead."""

    def num_layers(config: ModelConfig) -> int:
        return config.num_encoder_layers if side == "encoder" else config.num_decoder_layers

    def with_experts(config: ModelConfig) -> tuple[int, ...]:
        return config.experts.layers(num_layers(config))

    def without_experts(config: ModelConfig) -> tuple[int, ...]:
        return tuple(layer for layer in range(num_layers(config)) if layer not in with_experts(config))

    module = f"{_T5_FEED_FORWARD[side]}.mlp"
    return (
        in_layers(with_experts, linear("experts.router", f"{module}.router.classifier")),
        in_layers(
            with_experts, linears("experts", f"{module}.experts.expert_{EXPERT}", hidden="wi", out="wo")
        ),
        in_layers(without_experts, linears("mlp", module, hidden="wi", out="wo")),
    )


# Fedus et al. 2021: T5 1.0 with experts, of which a token passes one
SWITCH = replace(
    T5,
    model_type="switch_transformers",
    architectures={"SwitchTransformersForConditionalGeneration": ()},
    template=changes(T5.template, {"experts.count": 8, "output.logits": "tied-scaled"}),
    fields=override(
        without(T5.fields, "output.logits"),
        activation("dense_act_fn", "relu"),
        Field("num_experts", "experts.count", 8),
        switch_layers(),
        switch_capacity(),
        switch_jitter(),
        Field("router_z_loss_coef", "experts.z_loss", 0.001),
        Field("router_aux_loss_coef", "experts.balance_loss", 0.001),
    ),
    # A router that computes in half precision rounds its logits, and so may choose other experts. The class
    # of transformers has no gates, whatever a file says. Without tied embeddings its two stacks and its
    # output have three tables.
    supported_values={
        **T5.supported_values,
        "tie_word_embeddings": True,
        "router_bias": False,
        "router_dtype": "float32",
        "feed_forward_proj": "relu",
        "is_gated_act": False,
    },
    # transformers never reads whether padding is routed, and has cross-attention whatever a file says.
    ignored=(
        *T5.ignored,
        "router_ignore_padding_tokens",
        "router_type",
        "add_router_probs",
        "add_cross_attention",
    ),
    tie_flag_unreliable=False,
    base_model=(
        embedding("embed", "shared"),
        *_t5_stack("encoder", _switch_feed_forward("encoder")),
        *_t5_stack("decoder", _switch_feed_forward("decoder")),
    ),
)


def _bart_stack(side: str) -> tuple[Parameters, ...]:
    """Map the encoder or the decoder."""
    cross_attention: tuple[Parameters, ...] = ()
    if side == "decoder":
        cross_attention = (
            linears("cross", "encoder_attn", query="q_proj", key="k_proj", value="v_proj", out="out_proj"),
            norm("cross_norm", "encoder_attn_layer_norm"),
        )
    return (
        embedding(f"{side}.positions", f"{side}.embed_positions"),
        norm(f"{side}.embed_norm", f"{side}.layernorm_embedding"),
        norm(f"{side}.norm", f"{side}.layer_norm"),  # of mBART and Pegasus
        stack(
            f"{side}.blocks",
            f"{side}.layers",
            linears("attention", "self_attn", query="q_proj", key="k_proj", value="v_proj", out="out_proj"),
            norm("attention_norm", "self_attn_layer_norm"),
            *cross_attention,
            linear("mlp.hidden", "fc1"),
            linear("mlp.out", "fc2"),
            norm("mlp_norm", "final_layer_norm"),
        ),
    )


# Lewis et al. 2020
BART = Family(
    model_type="bart",
    architectures={"BartForConditionalGeneration": ()},
    template=ModelConfig(
        architecture="encoder-decoder",
        positions=PositionsConfig(
            kind="learned",
            offset=2,  # the table of positions has two unused rows in front
        ),
        attention=AttentionConfig(scores="scaled-dot"),
        norm=NormConfig(kind="layer", epsilon=1e-5),
        bias=True,
        residual="post-norm",
        embedding=EmbeddingConfig(norm=True),
        output=OutputConfig(logits="tied"),
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("d_model", "d_model"),
        Field("encoder_layers", "num_encoder_layers"),
        Field("decoder_layers", "num_decoder_layers"),
        Field("decoder_attention_heads", "attention.num_heads"),
        encoder_size("encoder_attention_heads", "attention.num_heads", "decoder_attention_heads"),
        Field("decoder_ffn_dim", "mlp.d_ff"),
        encoder_size("encoder_ffn_dim", "mlp.d_ff", "decoder_ffn_dim"),
        Field("max_position_embeddings", "positions.max_length"),
        Field("dropout", "dropout", 0.1),
        activation("activation_function", "gelu"),
        choice("scale_embedding", "embedding.scale", {False: "none", True: "sqrt"}, False),
        pad_token(1),
        eos_token(2),
        Field("decoder_start_token_id", "special.start", 2),
    ),
    supported_values={
        "is_encoder_decoder": True,
        "normalize_before": False,
        "add_final_layer_norm": False,
        "normalize_embedding": True,
        "tie_word_embeddings": True,
    },
    attribute_map={
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
    },
    # transformers computes nothing with num_hidden_layers; in distilled models it may be the teacher's.
    ignored=("is_decoder", "num_hidden_layers"),
    base_model_prefix="model",
    base_model=(embedding("embed", "shared"), *_bart_stack("encoder"), *_bart_stack("decoder")),
    output_layers=(array("logits_bias", "final_logits_bias", LEADING_AXIS),),
    tied_modules=("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
)

# Junczys-Dowmunt et al. 2018
MARIAN = replace(
    BART,
    model_type="marian",
    architectures={"MarianMTModel": ()},
    template=changes(
        BART.template,
        {
            "positions.kind": "sinusoidal",
            "positions.sinusoid": "halves",
            "positions.offset": 0,
            "embedding.norm": False,
        },
    ),
    fields=(
        *override(
            BART.fields,
            pad_token(58_100),
            eos_token(0),
            Field("decoder_start_token_id", "special.start", 58_100),
        ),
        Field("decoder_vocab_size", "vocab_size", OPTIONAL),
    ),
    supported_values={
        **BART.supported_values,
        "normalize_embedding": False,
        "share_encoder_decoder_embeddings": True,
    },
)

# Liu et al. 2020: norms before the sub-layers, and one after each stack
MBART = replace(
    BART,
    model_type="mbart",
    architectures={"MBartForConditionalGeneration": ()},
    template=replace(BART.template, residual="pre-norm"),
    # A target starts with the code of its language; a file may name one.
    fields=override(BART.fields, Field("decoder_start_token_id", "special.start", None)),
    supported_values={**BART.supported_values, "normalize_before": True, "add_final_layer_norm": True},
)

# Zhang et al. 2020: sinusoids and no norm of the embedding, as in Marian, but norms before the sub-layers.
# The fields are BART's, since it has no decoder_vocab_size.
PEGASUS = replace(
    MARIAN,
    model_type="pegasus",
    architectures={"PegasusForConditionalGeneration": ()},
    template=replace(MARIAN.template, residual="pre-norm"),
    fields=override(
        BART.fields, pad_token(0), eos_token(1), Field("decoder_start_token_id", "special.start", 0)
    ),
    supported_values={
        **BART.supported_values,
        "normalize_before": True,
        "add_final_layer_norm": True,
        "normalize_embedding": False,
    },
)


def _t5gemma_stack(side: str) -> tuple[Parameters, ...]:
    """Map the encoder or the decoder."""
    projections = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    cross_attention: tuple[Parameters, ...] = ()
    if side == "decoder":
        cross_attention = (
            linears("cross", "cross_attn", **projections),
            norm("cross_norm", "pre_cross_attn_layernorm"),
            norm("cross_output_norm", "post_cross_attn_layernorm"),
        )
    return (
        norm(f"{side}.norm", f"{side}.norm"),
        stack(
            f"{side}.blocks",
            f"{side}.layers",
            linears("attention", "self_attn", **projections),
            norm("attention_norm", "pre_self_attn_layernorm"),
            norm("attention_output_norm", "post_self_attn_layernorm"),
            *cross_attention,
            linears("mlp", "mlp", hidden="gate_proj", linear="up_proj", out="down_proj"),
            norm("mlp_norm", "pre_feedforward_layernorm"),
            norm("mlp_output_norm", "post_feedforward_layernorm"),
        ),
    )


# What Gemma 2 and the stacks of T5Gemma share.
_GEMMA2_CHANGES = {
    "positions.kind": "rotary",
    "attention.scores": "scaled-dot",
    "norm.kind": "rms",
    "norm.zero_centered": True,
    "residual": "sandwich-norm",
    "bias": False,
    "mlp.bias": False,
    "embedding.scale": "sqrt",
}
_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "gated-gelu", **GATED_ACTIVATIONS}
_GEMMA_ACTIVATION = choice("hidden_activation", "mlp.activation", _GEMMA_ACTIVATIONS, "gelu_pytorch_tanh")

# Zhang et al. 2025 (T5Gemma): an encoder and a decoder of Gemma 2's blocks
T5GEMMA = Family(
    model_type="t5gemma",
    architectures={"T5GemmaForConditionalGeneration": ()},
    template=changes(
        ModelConfig(architecture="encoder-decoder"), _GEMMA2_CHANGES | {"embedding.encoder": "separate"}
    ),
    fields=(
        same_in_both(Field("vocab_size", "vocab_size")),
        same_in_both(Field("hidden_size", "d_model")),
        Field("encoder.num_hidden_layers", "num_encoder_layers"),
        Field("decoder.num_hidden_layers", "num_decoder_layers"),
        Field("decoder.num_attention_heads", "attention.num_heads"),
        encoder_size("encoder.num_attention_heads", "attention.num_heads", "decoder.num_attention_heads"),
        same_in_both(key_value_heads(4)),
        Field("decoder.head_dim", "attention.d_kv", 256),
        encoder_size("encoder.head_dim", "attention.d_kv", "decoder.head_dim"),
        Field("decoder.intermediate_size", "mlp.d_ff"),
        encoder_size("encoder.intermediate_size", "mlp.d_ff", "decoder.intermediate_size"),
        same_in_both(Field("max_position_embeddings", "positions.max_length", 8_192)),
        same_in_both(Field("rms_norm_eps", "norm.epsilon", 1e-6)),
        same_in_both(Field("attention_bias", "bias", False)),
        same_in_both(_GEMMA_ACTIVATION),
        same_in_both(QUERY_SCALAR),
        same_in_both(Field("attn_logit_softcapping", "attention.logit_cap", 50.0)),
        Field("decoder.final_logit_softcapping", "output.logit_cap", 30.0),
        same_in_both(rope_fields()),
        t5gemma_windows(),
        Field("dropout_rate", "dropout", 0.0),
        tied_embeddings(True),
        Field("decoder.pad_token_id", "special.pad", 0, lambda value, _: value or 0),
        replace(eos_token(1), name="decoder.eos_token_id"),
        Field("decoder.bos_token_id", "special.start", 2),
    ),
    supported_values={
        "is_encoder_decoder": True,
        **{f"{side}.model_type": "t5_gemma_module" for side in ("encoder", "decoder")},
    },
    # The whole model's size of the vocabulary, and what of a stack the whole model decides.
    ignored=(
        *("vocab_size", "is_decoder", "encoder.final_logit_softcapping"),
        *("encoder.tie_word_embeddings", "decoder.tie_word_embeddings"),
        *("encoder.cross_attention_hidden_size", "decoder.cross_attention_hidden_size"),
    ),
    sections=("encoder", "decoder"),
    base_model_prefix="model",
    base_model=(
        embedding("encoder_embed", "encoder.embed_tokens"),
        embedding("embed", "decoder.embed_tokens"),
        *_t5gemma_stack("encoder"),
        *_t5gemma_stack("decoder"),
    ),
    output_layers=(linear("head", "lm_head.out_proj"),),
    output_matrix="lm_head.out_proj",
)

# --- decoders


def _gpt2_stack(transform: Transform) -> Parameters:
    """Map the layers, whose kernels ``transform`` changes to published weights."""
    return stack(
        "decoder.blocks",
        "h",
        fused_qkv("attn.c_attn", transform=transform),
        linear("attention.out", "attn.c_proj", transform=transform),
        linear("mlp.hidden", "mlp.c_fc", transform=transform),
        linear("mlp.out", "mlp.c_proj", transform=transform),
        norm("attention_norm", "ln_1"),
        norm("mlp_norm", "ln_2"),
    )


_GPT2_ATTRIBUTE_MAP = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

# What most decoders share.
_DECODER = ModelConfig(
    architecture="decoder",
    positions=PositionsConfig(kind="learned"),
    attention=AttentionConfig(scores="scaled-dot"),
    norm=NormConfig(kind="layer"),
    bias=True,
    special=NO_START,
)

# Radford et al. 2019
GPT2 = Family(
    model_type="gpt2",
    architectures={"GPT2LMHeadModel": ()},
    task_classes=decoder_task_classes("GPT2", "tokens", "span"),
    template=_DECODER,
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_embd", "d_model"),
        Field("n_layer", "num_decoder_layers"),
        Field("n_head", "attention.num_heads"),
        Field("n_positions", "positions.max_length"),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        Field("resid_pdrop", "dropout", 0.1),
        activation("activation_function", "gelu_new"),
        tied_embeddings(True),
        pad_token(0),
        eos_token(None),  # the tokenizer's, since the default of transformers is that of one vocabulary
        bos_token(),
        feed_forward_width("n_inner", "n_embd"),
    ),
    supported_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    attribute_map=_GPT2_ATTRIBUTE_MAP,
    ignored=("reorder_and_upcast_attn",),
    base_model_prefix="transformer",
    base_model=(
        embedding("embed", "wte"),
        embedding("decoder.positions", "wpe"),
        norm("decoder.norm", "ln_f"),
        _gpt2_stack(SAME),
    ),
)

# Radford et al. 2018
OPENAI_GPT = replace(
    GPT2,
    model_type="openai-gpt",
    architectures={"OpenAIGPTLMHeadModel": ()},
    task_classes=decoder_task_classes("OpenAIGPT"),
    template=replace(GPT2.template, residual="post-norm"),
    fields=override(
        without(GPT2.fields, "mlp.d_ff"),
        # What its files call GELU is the tanh form.
        choice(
            "afn",
            "mlp.activation",
            {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
            "gelu",
        ),
    ),
    derived={"mlp.d_ff": lambda settings: 4 * settings["d_model"]},
    supported_values={},
    base_model=(
        embedding("embed", "tokens_embed"),
        embedding("decoder.positions", "positions_embed"),
        _gpt2_stack(SAME),
    ),
)

# SantaCoder, Ben Allal et al. 2023, and StarCoder, Li et al. 2023: one head of keys and values
GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architectures={"GPTBigCodeForCausalLM": ()},
    task_classes=decoder_task_classes("GPTBigCode", "tokens"),
    template=changes(GPT2.template, {"attention.num_key_value_heads": 1}),
    supported_values={
        "multi_query": True,
        "num_key_value_heads": 1,
        "scale_attn_weights": True,
        "add_cross_attention": False,
    },
    ignored=(
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "max_batch_size",
        "pad_key_length",
        "pre_allocate_kv_cache",
        "validate_runner_input",
    ),
    base_model=(*GPT2.base_model[:-1], _gpt2_stack(TRANSPOSE)),
)

# Black et al. 2022; Pythia: Biderman et al. 2023
GPT_NEOX = Family(
    model_type="gpt_neox",
    architectures={"GPTNeoXForCausalLM": ()},
    task_classes=decoder_task_classes("GPTNeoX", "tokens", "span"),
    template=changes(_DECODER, {"positions.kind": "rotary"}),
    fields=(
        *SIZE_FIELDS,
        Field("num_hidden_layers", "num_decoder_layers"),
        Field("max_position_embeddings", "positions.max_length", 2_048),
        Field("layer_norm_eps", "norm.epsilon", 1e-5),
        Field("hidden_dropout", "dropout", 0.0),
        activation("hidden_act", "gelu"),
        tied_embeddings(False),
        choice("use_parallel_residual", "residual", {True: "parallel", False: "pre-norm"}, True),
        pad_token(0),
        eos_token(2),
        bos_token(),
        rope_fields("rotary_emb_base", "rotary_pct", 0.25),
    ),
    supported_values={"attention_bias": True, "head_dim": None},
    ignored=("is_decoder",),
    base_model_prefix="gpt_neox",
    base_model=(
        embedding("embed", "embed_in"),
        norm("decoder.norm", "final_layer_norm"),
        stack(
            "decoder.blocks",
            "layers",
            fused_qkv("attention.query_key_value", per_head=True),
            linear("attention.out", "attention.dense"),
            linears("mlp", "mlp", hidden="dense_h_to_4h", out="dense_4h_to_h"),
            norm("attention_norm", "input_layernorm"),
            norm("mlp_norm", "post_attention_layernorm"),
        ),
    ),
    output_layers=(linear("head", "embed_out"),),
    output_matrix="embed_out",
)

# BigScience 2022
BLOOM = Family(
    model_type="bloom",
    architectures={"BloomForCausalLM": ()},
    task_classes=decoder_task_classes("Bloom", "tokens", "span"),
    template=changes(
        _DECODER, {"positions.kind": "alibi", "embedding.norm": True, "mlp.activation": "gelu-tanh"}
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("n_layer", "num_decoder_layers"),
        Field("n_head", "attention.num_heads"),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        Field("hidden_dropout", "dropout", 0.0),
        tied_embeddings(True),
        pad_token(3),  # as in all published files; transformers has no default
        eos_token(2),
        bos_token(),
        bloom_parts(),
    ),
    derived={"mlp.d_ff": lambda settings: 4 * settings["d_model"]},
    supported_values={"apply_residual_connection_post_layernorm": False},
    attribute_map={
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    # The width is never read: it is four times hidden_size.
    ignored=("n_inner", "attention_softmax_in_fp32"),
    base_model_prefix="transformer",
    base_model=(
        embedding("embed", "word_embeddings"),
        norm("decoder.embed_norm", "word_embeddings_layernorm"),
        norm("decoder.norm", "ln_f"),
        stack(
            "decoder.blocks",
            "h",
            fused_qkv("self_attention.query_key_value", per_head=True),
            linear("attention.out", "self_attention.dense"),
            linears("mlp", "mlp", hidden="dense_h_to_4h", out="dense_4h_to_h"),
            norm("attention_norm", "input_layernorm"),
            norm("mlp_norm", "post_attention_layernorm"),
        ),
    ),
)

# Wang and Komatsuzaki 2021
GPTJ = Family(
    model_type="gptj",
    architectures={"GPTJForCausalLM": ("logits",), "GPTJModel": ()},
    task_classes=decoder_task_classes("GPTJ", "span"),
    template=changes(
        _DECODER,
        {
            "positions.kind": "rotary",
            "positions.rotary": RotaryConfig(layout="pairs"),
            "bias": False,
            "mlp.bias": True,
            "residual": "parallel-one-norm",
        },
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("n_embd", "d_model"),
        Field("n_layer", "num_decoder_layers"),
        Field("n_head", "attention.num_heads"),
        Field("n_positions", "positions.max_length"),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        Field("resid_pdrop", "dropout", 0.0),
        activation("activation_function", "gelu_new"),
        tied_embeddings(False),
        pad_token(0),
        eos_token(50_256),
        bos_token(),
        feed_forward_width("n_inner", "n_embd"),
        rotated_features(),
    ),
    supported_values={"scale_attn_weights": True, "rotary": True},
    attribute_map=_GPT2_ATTRIBUTE_MAP,
    base_model_prefix="transformer",
    base_model=(
        embedding("embed", "wte"),
        norm("decoder.norm", "ln_f"),
        stack(
            "decoder.blocks",
            "h",
            linears("attention", "attn", query="q_proj", key="k_proj", value="v_proj", out="out_proj"),
            linears("mlp", "mlp", hidden="fc_in", out="fc_out"),
            norm("attention_norm", "ln_1"),
        ),
    ),
    output_layers=(linear("head", "lm_head"), array("logits_bias", "lm_head.bias")),
)


def _is_parallel(config: ModelConfig) -> bool:
    """Return whether attention and the feed-forward layer have a norm of the block's input each."""
    return config.residual == "parallel"


# Almazrouei et al. 2023: Falcon 7B has one head of keys and one norm in a block, 40B several and two
FALCON = Family(
    model_type="falcon",
    architectures={"FalconForCausalLM": ()},
    task_classes=decoder_task_classes("Falcon", "tokens", "span"),
    template=changes(_DECODER, {"positions.kind": "rotary", "bias": False}),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("num_hidden_layers", "num_decoder_layers"),
        Field("num_attention_heads", "attention.num_heads"),
        Field("max_position_embeddings", "positions.max_length", 2_048),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        Field("hidden_dropout", "dropout", 0.0),
        Field("bias", "bias", False),
        activation("activation", "gelu"),
        feed_forward_width("ffn_hidden_size", "hidden_size"),
        tied_embeddings(True),
        pad_token(0),
        eos_token(11),
        bos_token(),
        rope_fields(),
        falcon_architecture(),
    ),
    # Falcon divides the biases of ALiBi by the root of a head's width.
    supported_values={"alibi": False, "head_dim": None},
    base_model_prefix="transformer",
    base_model=(
        embedding("embed", "word_embeddings"),
        norm("decoder.norm", "ln_f"),
        stack(
            "decoder.blocks",
            "h",
            fused_qkv("self_attention.query_key_value", per_head=True),
            linear("attention.out", "self_attention.dense"),
            linears("mlp", "mlp", hidden="dense_h_to_4h", out="dense_4h_to_h"),
            renamed(
                _is_parallel, norm("attention_norm", "input_layernorm"), norm("attention_norm", "ln_attn")
            ),
            renamed(_is_parallel, norm("mlp_norm", "post_attention_layernorm"), norm("mlp_norm", "ln_mlp")),
        ),
    ),
)

# Black et al. 2021
GPT_NEO = Family(
    model_type="gpt_neo",
    architectures={"GPTNeoForCausalLM": ()},
    task_classes=decoder_task_classes("GPTNeo", "tokens", "span"),
    template=changes(_DECODER, {"attention.scores": "dot", "attention.qkv_bias": False}),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("num_layers", "num_decoder_layers"),
        Field("num_heads", "attention.num_heads"),
        Field("resid_dropout", "dropout", 0.0),
        Field("max_position_embeddings", "positions.max_length", 2_048),
        Field("layer_norm_epsilon", "norm.epsilon", 1e-5),
        activation("activation_function", "gelu_new"),
        tied_embeddings(True),
        pad_token(0),
        eos_token(50_256),
        bos_token(),
        feed_forward_width("intermediate_size", "hidden_size"),
        gpt_neo_windows(),
    ),
    attribute_map={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    base_model_prefix="transformer",
    base_model=(
        embedding("embed", "wte"),
        embedding("decoder.positions", "wpe"),
        norm("decoder.norm", "ln_f"),
        stack(
            "decoder.blocks",
            "h",
            linears(
                "attention", "attn.attention", query="q_proj", key="k_proj", value="v_proj", out="out_proj"
            ),
            linears("mlp", "mlp", hidden="c_fc", out="c_proj"),
            norm("attention_norm", "ln_1"),
            norm("mlp_norm", "ln_2"),
        ),
    ),
)

# Zhang et al. 2022
OPT = Family(
    model_type="opt",
    architectures={"OPTForCausalLM": ()},
    task_classes=decoder_task_classes("OPT", "span"),
    template=changes(
        _DECODER, {"positions.offset": 2, "norm.epsilon": 1e-5, "embedding.projected": "tokens"}
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("num_hidden_layers", "num_decoder_layers"),
        Field("num_attention_heads", "attention.num_heads"),
        Field("ffn_dim", "mlp.d_ff"),
        Field("max_position_embeddings", "positions.max_length", 2_048),
        Field("dropout", "dropout", 0.1),
        activation("activation_function", "relu"),
        tied_embeddings(True),
        pad_token(1),
        eos_token(2),
        bos_token(),
        choice("do_layer_norm_before", "residual", {True: "pre-norm", False: "post-norm"}, True),
        opt_embedding_width(),
    ),
    supported_values={
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    base_model_prefix="model",
    base_model=(
        embedding("embed", "decoder.embed_tokens"),
        embedding("decoder.positions", "decoder.embed_positions"),
        linear("decoder.projection", "decoder.project_in"),
        linear("narrowing", "decoder.project_out"),
        norm("decoder.norm", "decoder.final_layer_norm"),
        stack(
            "decoder.blocks",
            "decoder.layers",
            linears("attention", "self_attn", query="q_proj", key="k_proj", value="v_proj", out="out_proj"),
            linear("mlp.hidden", "fc1"),
            linear("mlp.out", "fc2"),
            norm("attention_norm", "self_attn_layer_norm"),
            norm("mlp_norm", "final_layer_norm"),
        ),
    ),
)

_HEAD_DIM = Field(
    "head_dim",
    "attention.d_kv",
    None,
    lambda value, hf_config: value or hf_config["hidden_size"] // hf_config["num_attention_heads"],
)


def _llama_body(*modules: Parameters) -> tuple[Parameters, ...]:
    """Map the body of a decoder that is named as Llama's, and whose layers have these modules."""
    return (
        embedding("embed", "embed_tokens"),
        norm("decoder.norm", "norm"),
        stack("decoder.blocks", "layers", *modules),
    )


_LLAMA_ATTENTION = linears(
    "attention", "self_attn", query="q_proj", key="k_proj", value="v_proj", out="o_proj"
)
_LLAMA_MLP = linears("mlp", "mlp", hidden="gate_proj", linear="up_proj", out="down_proj")
_LLAMA_NORMS = norm("attention_norm", "input_layernorm") + norm("mlp_norm", "post_attention_layernorm")

# Touvron et al. 2023
LLAMA = Family(
    model_type="llama",
    architectures={"LlamaForCausalLM": ()},
    task_classes=decoder_task_classes("Llama", "tokens", "span", tokens="score", omits_base_prefix=True),
    template=changes(_DECODER, {"positions.kind": "rotary", "norm.kind": "rms", "bias": False}),
    fields=(
        *SIZE_FIELDS,
        Field("num_hidden_layers", "num_decoder_layers"),
        Field("max_position_embeddings", "positions.max_length", 2_048),
        Field("rms_norm_eps", "norm.epsilon", 1e-6),
        Field("attention_dropout", "dropout", 0.0),
        Field("attention_bias", "bias", False),
        tied_embeddings(False),
        pad_token(0),
        eos_token(2),
        bos_token(),
        key_value_heads(),
        _HEAD_DIM,
        choice("hidden_act", "mlp.activation", GATED_ACTIVATIONS, "silu"),
        Field(
            "mlp_bias",
            "mlp.bias",
            False,
            none_if_equal("attention_bias", False),
            lambda _, config: config.mlp_has_bias,
        ),
        rope_fields(),
    ),
    ignored=("pretraining_tp",),
    base_model_prefix="model",
    base_model=_llama_body(_LLAMA_ATTENTION, _LLAMA_MLP, _LLAMA_NORMS),
    other_modules={"transformer": "model"},  # of LlamaForQuestionAnswering
)
_LLAMA_FIELDS_WITHOUT_BIAS = without(LLAMA.fields, "bias", "mlp.bias")

# Jiang et al. 2023
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architectures={"MistralForCausalLM": ()},
    task_classes=decoder_task_classes("Mistral", "tokens", "span", tokens="score"),
    fields=override(
        _LLAMA_FIELDS_WITHOUT_BIAS,
        Field("max_position_embeddings", "positions.max_length", 131_072),
        key_value_heads(8),
        mistral_window(),
    ),
)

# Jiang et al. 2024: Mistral with eight experts, of which a token passes two. It was published without a
# capacity, so that no token is dropped, not even in training.
_MIXTRAL_EXPERT = f"block_sparse_moe.experts.{EXPERT}"
MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architectures={"MixtralForCausalLM": ()},
    task_classes={},
    template=changes(
        LLAMA.template, {"experts.count": 8, "experts.per_token": 2, "experts.capacity_factor": None}
    ),
    fields=(
        *override(
            MISTRAL.fields,
            Field("rms_norm_eps", "norm.epsilon", 1e-5),
            mistral_window(None),
            rope_fields(default_base=1e6),
        ),
        Field("num_local_experts", "experts.count", 8),
        Field("num_experts_per_tok", "experts.per_token", 2),
    ),
    ignored=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    base_model=_llama_body(
        _LLAMA_ATTENTION,
        linear("experts.router", "block_sparse_moe.gate"),
        linears("experts", _MIXTRAL_EXPERT, hidden="w1", linear="w3", out="w2"),
        _LLAMA_NORMS,
    ),
)

# Abdin et al. 2024: Mistral with fused projections
PHI3 = replace(
    MISTRAL,
    model_type="phi3",
    architectures={"Phi3ForCausalLM": ()},
    task_classes=decoder_task_classes("Phi3", "tokens", tokens="score"),
    fields=override(
        MISTRAL.fields,
        Field("max_position_embeddings", "positions.max_length", 4_096),
        Field("rms_norm_eps", "norm.epsilon", 1e-5),
        Field("resid_pdrop", "dropout", 0.0),
        pad_token(32_000),
        eos_token(32_000),
        key_value_heads(),
        mistral_window(None),
        # The rows of 128,000 tokens have wavelengths of their own ("longrope"), which is refused.
        rope_fields(fraction="partial_rotary_factor", types=("default",)),
    ),
    ignored=("original_max_position_embeddings",),  # of "longrope"
    base_model=_llama_body(
        fused_qkv("self_attn.qkv_proj"),
        linear("attention.out", "self_attn.o_proj"),
        fused_linears(("mlp.hidden", "mlp.linear"), "mlp.gate_up_proj"),
        linear("mlp.out", "mlp.down_proj"),
        _LLAMA_NORMS,
    ),
)

_QWEN_FIELDS = (
    Field("max_position_embeddings", "positions.max_length", 32_768),
    eos_token(None),
    qwen_windows(),
)
# Yang et al. 2024
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architectures={"Qwen2ForCausalLM": ()},
    task_classes=decoder_task_classes("Qwen2", "tokens", "span", tokens="score", omits_base_prefix=True),
    template=changes(LLAMA.template, {"attention.qkv_bias": True}),
    fields=override(_LLAMA_FIELDS_WITHOUT_BIAS, *_QWEN_FIELDS),
)

_QUERY_KEY_NORMS = norm("attention.query_norm", "self_attn.q_norm") + norm(
    "attention.key_norm", "self_attn.k_norm"
)
# Yang et al. 2025: queries and keys are normalized, and biases are a field again
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architectures={"Qwen3ForCausalLM": ()},
    task_classes=decoder_task_classes("Qwen3", "tokens", "span", tokens="score", omits_base_prefix=True),
    template=changes(LLAMA.template, {"mlp.bias": False, "attention.qk_norm": True}),
    fields=override(without(LLAMA.fields, "mlp.bias"), replace(_HEAD_DIM, default=128), *_QWEN_FIELDS),
    base_model=_llama_body(_LLAMA_ATTENTION, _QUERY_KEY_NORMS, _LLAMA_MLP, _LLAMA_NORMS),
)

# Gemma Team 2024a: norms whose scale is 1 plus the parameter, scaled embeddings
GEMMA = replace(
    LLAMA,
    model_type="gemma",
    architectures={"GemmaForCausalLM": ()},
    task_classes=decoder_task_classes("Gemma", "tokens", tokens="score"),
    template=changes(
        LLAMA.template, {"norm.zero_centered": True, "embedding.scale": "sqrt", "mlp.bias": False}
    ),
    fields=override(
        without(LLAMA.fields, "mlp.bias"),
        Field("max_position_embeddings", "positions.max_length", 8_192),
        tied_embeddings(True),
        eos_token(1),
        key_value_heads(16),
        Field("head_dim", "attention.d_kv", 256),
        # What its files call GELU is the tanh form.
        choice(
            "hidden_act", "mlp.activation", _GEMMA_ACTIVATIONS | {"gelu": "gated-gelu"}, "gelu_pytorch_tanh"
        ),
    ),
    supported_values={"use_bidirectional_attention": False},
    ignored=("hidden_activation",),
)

# Gemma Team 2024b: two norms of each sub-layer, capped logits, and a window in every second layer
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    architectures={"Gemma2ForCausalLM": ()},
    task_classes=decoder_task_classes("Gemma2", "tokens", tokens="score"),
    template=changes(_DECODER, _GEMMA2_CHANGES),
    fields=override(
        GEMMA.fields,
        key_value_heads(4),
        _GEMMA_ACTIVATION,
        QUERY_SCALAR,
        Field("attn_logit_softcapping", "attention.logit_cap", 50.0),
        Field("final_logit_softcapping", "output.logit_cap", 30.0),
        gemma_windows(),
    ),
    ignored=("hidden_act", "cache_implementation", "sliding_window_size"),
    base_model=_llama_body(
        _LLAMA_ATTENTION,
        _LLAMA_MLP,
        norm("attention_norm", "input_layernorm"),
        norm("attention_output_norm", "post_attention_layernorm"),
        norm("mlp_norm", "pre_feedforward_layernorm"),
        norm("mlp_output_norm", "post_feedforward_layernorm"),
    ),
)

# Gemma Team 2025, the models of text alone: queries and keys are normalized in place of capped, five of six
# layers have a window, and the others are stretched to longer rows
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architectures={"Gemma3ForCausalLM": (), "Gemma3TextModel": ()},
    task_classes={},
    template=changes(_DECODER, _GEMMA2_CHANGES | {"attention.qk_norm": True}),
    fields=override(
        without(GEMMA2.fields, "attention.logit_cap"),
        Field("max_position_embeddings", "positions.max_length", 131_072),
        Field("final_logit_softcapping", "output.logit_cap", None),
        gemma3_rope(),
        gemma_windows("sliding_window_pattern", 6),
    ),
    supported_values={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    ignored=(*GEMMA2.ignored, "_sliding_window_pattern"),  # what layer_types was made of
    base_model=(*GEMMA2.base_model, stack("decoder.blocks", "layers", _QUERY_KEY_NORMS)),
)

# OLMo Team 2024: norms of the sub-layers' outputs alone, and of the queries and keys of all heads together
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architectures={"Olmo2ForCausalLM": ()},
    task_classes={},
    template=changes(
        LLAMA.template,
        {
            "mlp.bias": False,
            "residual": "output-norm",
            "attention.qk_norm": True,
            "attention.qk_norm_features": "all-heads",
        },
    ),
    fields=override(
        without(LLAMA.fields, "mlp.bias"),
        Field("rms_norm_eps", "norm.epsilon", 1e-5),
        pad_token(1),
        eos_token(50_279),
    ),
    base_model=_llama_body(
        _LLAMA_ATTENTION,
        _QUERY_KEY_NORMS,
        _LLAMA_MLP,
        norm("attention_output_norm", "post_attention_layernorm"),
        norm("mlp_output_norm", "post_feedforward_layernorm"),
    ),
)

# Granite Team 2024: Llama with four factors
GRANITE = replace(
    LLAMA,
    model_type="granite",
    architectures={"GraniteForCausalLM": ()},
    task_classes={},
    fields=(
        *LLAMA.fields,
        Field("embedding_multiplier", "embedding.multiplier", 1.0),
        Field("residual_multiplier", "residual_multiplier", 1.0),
        Field("logits_scaling", "output.logit_divisor", 1.0),
        Field(
            "attention_multiplier",
            "attention.scale",
            1.0,
            to_field=lambda _, config: config.attention.product_scale,
        ),
    ),
)

# --- encoders


def _embeddings() -> tuple[Parameters, ...]:
    """Map the embeddings of BERT and its successors."""
    return (
        embedding("embed", "embeddings.word_embeddings"),
        embedding("encoder.positions", "embeddings.position_embeddings"),
        embedding("encoder.types", "embeddings.token_type_embeddings"),
        norm("encoder.embed_norm", "embeddings.LayerNorm"),
    )


def _masked_lm_head(dense: str, layer_norm: str, bias: str) -> tuple[Parameters, ...]:
    """Map the layers before the masked LM's logits, and their bias, by published names."""
    return linear("transform.dense", dense), norm("transform.norm", layer_norm), array("logits_bias", bias)


# The output layer of these families has GELU, whatever hidden_act is in the blocks.
_GELU = choice("hidden_act", "mlp.activation", {"gelu": "gelu"}, "gelu")
_ENCODER = ModelConfig(
    architecture="encoder",
    positions=PositionsConfig(kind="learned"),
    attention=AttentionConfig(scores="scaled-dot"),
    norm=NormConfig(kind="layer"),
    bias=True,
    residual="post-norm",
    embedding=EmbeddingConfig(norm=True),
    output=OutputConfig(logits="tied"),
)

# Sanh et al. 2019
DISTILBERT = Family(
    model_type="distilbert",
    architectures={"DistilBertForMaskedLM": ("logits",), "DistilBertModel": ()},
    task_classes=task_classes("DistilBert", "tokens", "span")
    | task_classes(
        "DistilBert",
        "classes",
        "regression",
        "choice",
        pool="first",
        dense="pre_classifier",
        activation="relu",
    ),
    template=changes(
        _ENCODER, {"norm.epsilon": 1e-12, "positions.sinusoid": "interleaved", "special": NO_START}
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("dim", "d_model"),
        Field("n_layers", "num_encoder_layers"),
        Field("n_heads", "attention.num_heads"),
        Field("hidden_dim", "mlp.d_ff"),
        Field("max_position_embeddings", "positions.max_length"),
        Field("dropout", "dropout", 0.1),
        activation("activation", "gelu"),
        pad_token(0),
        eos_token(None),
        choice("sinusoidal_pos_embds", "positions.kind", {False: "learned", True: "sinusoidal"}, False),
    ),
    attribute_map={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    base_model_prefix="distilbert",
    base_model=(
        *_embeddings(),
        stack(
            "encoder.blocks",
            "transformer.layer",
            linears("attention", "attention", query="q_lin", key="k_lin", value="v_lin", out="out_lin"),
            linears("mlp", "ffn", hidden="lin1", out="lin2"),
            norm("attention_norm", "sa_layer_norm"),
            norm("mlp_norm", "output_layer_norm"),
        ),
    ),
    output_layers=_masked_lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    output_matrix="vocab_projector",
)

# Devlin et al. 2019
BERT = Family(
    model_type="bert",
    architectures={
        "BertForPreTraining": ("logits", "pooler", "next-sentence"),
        "BertForMaskedLM": ("logits",),
        "BertModel": (),
    },
    task_classes=task_classes("Bert", "tokens", "span")
    | task_classes(
        "Bert",
        "classes",
        "regression",
        "choice",
        pool="first",
        dense="bert.pooler.dense",
        activation="tanh",
    ),
    template=replace(_ENCODER, special=NO_START),
    fields=(
        *SIZE_FIELDS,
        Field("num_hidden_layers", "num_encoder_layers"),
        Field("max_position_embeddings", "positions.max_length"),
        Field("layer_norm_eps", "norm.epsilon", 1e-12),
        Field("hidden_dropout_prob", "dropout", 0.1),
        activation("hidden_act", "gelu"),
        pad_token(0),
        eos_token(None),
        # Published models have one type of tokens at least.
        Field("type_vocab_size", "embedding.type_vocab_size", 2, to_field=lambda value, _: max(value, 1)),
    ),
    supported_values={
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    },
    base_model_prefix="bert",
    base_model=(
        *_embeddings(),
        linear("pooler", "pooler.dense"),
        stack(
            "encoder.blocks",
            "encoder.layer",
            linears("attention", "attention.self", query="query", key="key", value="value"),
            linear("attention.out", "attention.output.dense"),
            linear("mlp.hidden", "intermediate.dense"),
            linear("mlp.out", "output.dense"),
            norm("attention_norm", "attention.output.LayerNorm"),
            norm("mlp_norm", "output.LayerNorm"),
        ),
    ),
    output_layers=(
        *_masked_lm_head(
            "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
        ),
        linear("next_sentence", "cls.seq_relationship"),
    ),
    output_matrix="cls.predictions.decoder",
)

# Liu et al. 2019
ROBERTA = replace(
    BERT,
    model_type="roberta",
    architectures={"RobertaForMaskedLM": ("logits",), "RobertaModel": ()},
    task_classes=task_classes("Roberta", "tokens", "span")
    | task_classes(
        "Roberta",
        "classes",
        "regression",
        output="classifier.out_proj",
        pool="first",
        dense="classifier.dense",
        activation="tanh",
    )
    | task_classes("Roberta", "choice", pool="first", dense="roberta.pooler.dense", activation="tanh"),
    template=_ENCODER,
    fields=override(
        BERT.fields,
        pad_token(1),
        eos_token(2),
        Field("bos_token_id", "special.start", 0),
        POSITIONS_AFTER_PADDING,
        _GELU,
    ),
    derived={"positions.offset": lambda settings: settings["special.pad"] + 1},
    base_model_prefix="roberta",
    output_layers=_masked_lm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    output_matrix="lm_head.decoder",
)


def _as_roberta(model_type: str, name: str) -> Family:
    """Return a family whose classes, which begin with ``name``, compute what RoBERTa's do."""
    renamed_classes = {
        kind: replace(task_class, name=task_class.name.replace("Roberta", name))
        for kind, task_class in ROBERTA.task_classes.items()
    }
    return replace(
        ROBERTA,
        model_type=model_type,
        architectures={f"{name}ForMaskedLM": ("logits",), f"{name}Model": ()},
        task_classes=renamed_classes,
    )


XLM_ROBERTA = _as_roberta("xlm-roberta", "XLMRoberta")  # Conneau et al. 2020
CAMEMBERT = _as_roberta("camembert", "Camembert")  # Martin et al. 2020

# Song et al. 2020: learned positions, and relative biases that all layers share
MPNET = replace(
    ROBERTA,
    model_type="mpnet",
    architectures={"MPNetForMaskedLM": ("logits",), "MPNetModel": ()},
    task_classes={
        kind: replace(
            task_class,
            name=task_class.name.replace("Roberta", "MPNet"),
            dense=task_class.dense and task_class.dense.replace("roberta.", "mpnet."),
        )
        for kind, task_class in ROBERTA.task_classes.items()
    },
    template=changes(ROBERTA.template, {"positions.kind": "relative-and-learned"}),
    fields=without(ROBERTA.fields, "embedding.type_vocab_size"),
    # The reference has these numbers in its code.
    supported_values={"relative_attention_num_buckets": 32, "pad_token_id": 1},
    base_model_prefix="mpnet",
    base_model=(
        embedding("embed", "embeddings.word_embeddings"),
        embedding("encoder.positions", "embeddings.position_embeddings"),
        norm("encoder.embed_norm", "embeddings.LayerNorm"),
        embedding("encoder.relative", "encoder.relative_attention_bias"),
        linear("pooler", "pooler.dense"),
        stack(
            "encoder.blocks",
            "encoder.layer",
            linears("attention", "attention.attn", query="q", key="k", value="v", out="o"),
            linear("mlp.hidden", "intermediate.dense"),
            linear("mlp.out", "output.dense"),
            norm("attention_norm", "attention.LayerNorm"),
            norm("mlp_norm", "output.LayerNorm"),
        ),
    ),
)

# Beltagy et al. 2020: tokens that see everything have projections of their own
LONGFORMER = replace(
    ROBERTA,
    model_type="longformer",
    architectures={"LongformerForMaskedLM": ("logits",), "LongformerModel": ()},
    # Its classes for texts, choices and answers give tokens global attention of their own accord.
    task_classes=task_classes("Longformer", "tokens"),
    template=replace(ROBERTA.template, sparsity=SparsityConfig(projections="separate")),
    fields=(*ROBERTA.fields, longformer_windows()),
    ignored=("onnx_export",),
    base_model_prefix="longformer",
    base_model=(
        *ROBERTA.base_model,
        stack(
            "encoder.blocks",
            "encoder.layer",
            linears(
                "attention.globals",
                "attention.self",
                query="query_global",
                key="key_global",
                value="value_global",
            ),
        ),
    ),
)

# Lan et al. 2020: all layers are one
ALBERT = replace(
    BERT,
    model_type="albert",
    architectures={
        "AlbertForPreTraining": ("logits", "pooler", "sentence-order"),
        "AlbertForMaskedLM": ("logits",),
        "AlbertModel": (),
    },
    task_classes=task_classes("Albert", "tokens", "span")
    | task_classes(
        "Albert", "classes", "regression", "choice", pool="first", dense="albert.pooler", activation="tanh"
    ),
    template=replace(BERT.template, shared_layers=True),
    # A single layer has none to share its parameters with.
    derived={"shared_layers": lambda settings: settings["num_encoder_layers"] > 1},
    fields=override(
        BERT.fields,
        Field("hidden_dropout_prob", "dropout", 0.0),
        activation("hidden_act", "gelu_new"),
        eos_token(3),
        embedding_width("embedding_size", 128, unchanged),
    ),
    supported_values={**BERT.supported_values, "num_hidden_groups": 1, "inner_group_num": 1},
    base_model_prefix="albert",
    base_model=(
        *_embeddings(),
        linear("pooler", "pooler"),
        linear("encoder.projection", "encoder.embedding_hidden_mapping_in"),
        stack(  # one group of one layer
            "encoder.blocks",
            "encoder.albert_layer_groups",
            linears(
                "attention",
                "albert_layers.0.attention",
                query="query",
                key="key",
                value="value",
                out="dense",
            ),
            linears("mlp", "albert_layers.0", hidden="ffn", out="ffn_output"),
            norm("attention_norm", "albert_layers.0.attention.LayerNorm"),
            norm("mlp_norm", "albert_layers.0.full_layer_layer_norm"),
        ),
    ),
    output_layers=(
        *_masked_lm_head("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
        linear("sentence_order", "sop_classifier.classifier"),
    ),
    output_matrix="predictions.decoder",
)

# Clark et al. 2020
ELECTRA = replace(
    BERT,
    model_type="electra",
    architectures={
        "ElectraForPreTraining": ("replaced-token",),
        "ElectraForMaskedLM": ("logits",),
        "ElectraModel": (),
    },
    task_classes=task_classes("Electra", "tokens", "span")
    | task_classes(
        "Electra",
        "classes",
        "regression",
        output="classifier.out_proj",
        pool="first",
        dense="classifier.dense",
        activation="gelu",
    )
    | task_classes("Electra", "choice", pool="first", dense="sequence_summary.summary", activation="gelu"),
    fields=override(BERT.fields, _GELU, embedding_width("embedding_size", 128, none_if_equal("hidden_size"))),
    base_model_prefix="electra",
    base_model=(*BERT.base_model, linear("encoder.projection", "embeddings_project")),
    output_layers=(
        *_masked_lm_head(
            "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"
        ),
        linears("replaced", "discriminator_predictions", dense="dense", out="dense_prediction"),
    ),
    output_matrix="generator_lm_head",
)

_LM_HEAD = "lm_predictions.lm_head"
# Of a module that the first layer alone has: arrays of ours have the layers' axis, of length 1.
_OF_FIRST_LAYER = Transform(lambda array: array[0], lambda tensor: tensor[None])
# torch's kernels of convolutions are [out,in,W], ours [W,in,out]
_KERNEL_OF_FIRST_LAYER = Transform(
    lambda array: array[0].transpose(), lambda tensor: tensor.transpose()[None]
)
_OLDER_LM_HEAD = "cls.predictions"


def _deberta_body(*attention: Parameters) -> tuple[Parameters, ...]:
    """Map the base model of DeBERTa, whose layers have these projections."""
    return (
        embedding("embed", "embeddings.word_embeddings"),
        embedding("encoder.types", "embeddings.token_type_embeddings"),
        norm("encoder.embed_norm", "embeddings.LayerNorm"),
        embedding("encoder.relative", "encoder.rel_embeddings"),
        stack(
            "encoder.blocks",
            "encoder.layer",
            *attention,
            linear("attention.out", "attention.output.dense"),
            linear("mlp.hidden", "intermediate.dense"),
            linear("mlp.out", "output.dense"),
            norm("attention_norm", "attention.output.LayerNorm"),
            norm("mlp_norm", "output.LayerNorm"),
        ),
    )


# He et al. 2021. Scores have products of contents and positions.
DEBERTA = replace(
    BERT,
    model_type="deberta",
    architectures={"DebertaForMaskedLM": ("logits",), "DebertaModel": ()},
    task_classes=task_classes("Deberta", "tokens", "span")
    | task_classes("Deberta", "classes", "regression", pool="first", dense="pooler.dense", activation="gelu"),
    template=changes(
        BERT.template,
        {
            "positions.kind": "relative-disentangled",
            "positions.relative_projections": "separate",
            "positions.relative_norm": False,
            "attention.key_bias": False,
        },
    ),
    fields=override(
        without(BERT.fields, "positions.max_length"),
        Field("layer_norm_eps", "norm.epsilon", 1e-7),
        Field("type_vocab_size", "embedding.type_vocab_size", 0),
        deberta_distances(has_buckets=False),
        deberta_products(),
        deberta_head_width(),
    ),
    supported_values={"pooler_hidden_act": "gelu", "talking_head": False},
    attribute_map={"pooler_hidden_size": "hidden_size", "embedding_size": "hidden_size"},
    # What is called legacy has other names of the masked LM's output layers, not those of published files.
    written_values={"legacy": False},
    base_model_prefix="deberta",
    base_model=_deberta_body(
        (
            Parameter(
                tuple(f"attention.{name}.kernel" for name in ("query", "key", "value")),
                "attention.self.in_proj.weight",
                TRANSPOSE,
                per_head=True,
            ),
        ),
        array("attention.query.bias", "attention.self.q_bias"),
        array("attention.value.bias", "attention.self.v_bias"),
        linears("attention", "attention.self", position_query="pos_q_proj", position_key="pos_proj"),
    ),
    output_layers=_masked_lm_head(f"{_LM_HEAD}.dense", f"{_LM_HEAD}.LayerNorm", f"{_LM_HEAD}.bias"),
    output_matrix=f"{_LM_HEAD}.decoder",
    other_modules={f"{_OLDER_LM_HEAD}.transform": _LM_HEAD, _OLDER_LM_HEAD: _LM_HEAD},
    # Embeddings that nothing reads without position_biased_input.
    unread_modules=("deberta.embeddings.position_embeddings",),
)

# He et al. 2021, the second version, which has a convolution; the third, of the same type: He et al. 2023
DEBERTA_V2 = replace(
    DEBERTA,
    model_type="deberta-v2",
    architectures={"DebertaV2ForMaskedLM": ("logits",), "DebertaV2Model": ()},
    task_classes=task_classes("DebertaV2", "tokens", "span")
    | task_classes(
        "DebertaV2", "classes", "regression", "choice", pool="first", dense="pooler.dense", activation="gelu"
    ),
    template=changes(BERT.template, {"positions.kind": "relative-disentangled"}),
    fields=override(
        DEBERTA.fields,
        deberta_distances(has_buckets=True),
        choice("share_att_key", "positions.relative_projections", {True: "shared", False: "separate"}, False),
        deberta_norm(),
        deberta_convolution(),
    ),
    supported_values={"pooler_hidden_act": "gelu"},
    base_model=(
        *_deberta_body(
            linears(
                "attention",
                "attention.self",
                query="query_proj",
                key="key_proj",
                value="value_proj",
                position_query="pos_query_proj",
                position_key="pos_key_proj",
            )
        ),
        norm("encoder.relative.norm", "encoder.LayerNorm"),
        array("encoder.blocks.convolution.kernel", "encoder.conv.conv.weight", _KERNEL_OF_FIRST_LAYER),
        array("encoder.blocks.convolution.bias", "encoder.conv.conv.bias", _OF_FIRST_LAYER),
        array("encoder.blocks.convolution.norm.scale", "encoder.conv.LayerNorm.weight", _OF_FIRST_LAYER),
        array("encoder.blocks.convolution.norm.bias", "encoder.conv.LayerNorm.bias", _OF_FIRST_LAYER),
    ),
    # The head of version 3's discriminators too.
    unread_modules=("mask_predictions", *DEBERTA.unread_modules),
)

# Warner et al. 2024: a window in two of three layers, with rotary positions of another base
MODERNBERT = Family(
    model_type="modernbert",
    architectures={"ModernBertForMaskedLM": ("logits",), "ModernBertModel": ()},
    template=changes(
        _ENCODER,
        {
            "positions.kind": "rotary",
            "norm.bias": False,
            "norm.first_attention": "none",
            "bias": False,
            "residual": "pre-norm",
        },
    ),
    fields=(
        *SIZE_FIELDS,
        Field("num_hidden_layers", "num_encoder_layers"),
        Field("max_position_embeddings", "positions.max_length", 8_192),
        Field("norm_eps", "norm.epsilon", 1e-5),
        Field("norm_bias", "norm.bias", False),
        Field("embedding_dropout", "dropout", 0.0),
        # The output layer has the same activation.
        choice("hidden_activation", "mlp.activation", {"gelu": "gated-gelu-erf"}, "gelu"),
        pad_token(50_283),
        eos_token(50_282),
        Field("bos_token_id", "special.start", 50_281),
        modernbert_rope(),
        modernbert_windows(),
    ),
    supported_values={
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
        "tie_word_embeddings": True,
        "head_dim": None,
        "sliding_window": None,  # another name of half of local_attention
    },
    ignored=(
        *("classifier_pooling", "cls_token_id", "sparse_prediction", "sparse_pred_ignore_index"),
        *("initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile"),
        *("repad_logits_with_grad", "layer_norm_eps", "position_embedding_type"),
    ),
    base_model_prefix="model",
    base_model=(
        embedding("embed", "embeddings.tok_embeddings"),
        norm("encoder.embed_norm", "embeddings.norm"),
        norm("encoder.norm", "final_norm"),
        stack(
            "encoder.blocks",
            "layers",
            fused_qkv("attn.Wqkv"),
            linear("attention.out", "attn.Wo"),
            fused_linears(("mlp.hidden", "mlp.linear"), "mlp.Wi"),
            linear("mlp.out", "mlp.Wo"),
            in_layers(
                lambda config: range(1, config.num_encoder_layers), norm("attention_norm", "attn_norm")
            ),
            norm("mlp_norm", "mlp_norm"),
        ),
    ),
    output_layers=_masked_lm_head("head.dense", "head.norm", "decoder.bias"),
    output_matrix="decoder",
)

# Boizard et al. 2025: the layers of Llama without a mask. Its class for texts pools in one of three ways, of
# which "mean" is that of a pooled head: a dense layer on the mean of all states.
EUROBERT = Family(
    model_type="eurobert",
    architectures={"EuroBertForMaskedLM": ("logits",), "EuroBertModel": ()},
    task_classes=task_classes("EuroBert", "tokens")
    | task_classes("EuroBert", "classes", "regression", pool="mean", dense="dense", activation="gelu"),
    template=changes(
        _ENCODER,
        {
            "positions.kind": "rotary",
            "norm.kind": "rms",
            "bias": False,
            "residual": "pre-norm",
            "embedding.norm": False,
        },
    ),
    fields=(
        *override(
            without(_LLAMA_FIELDS_WITHOUT_BIAS, "num_decoder_layers"),
            Field("max_position_embeddings", "positions.max_length", 8_192),
            Field("rms_norm_eps", "norm.epsilon", 1e-5),
            pad_token(128_001),
            eos_token(128_001),
        ),
        Field("num_hidden_layers", "num_encoder_layers"),
    ),
    supported_values={"attention_bias": False, "mlp_bias": False},
    written_values={"classifier_pooling": "mean"},
    ignored=("pretraining_tp", "mask_token_id"),
    base_model_prefix="model",
    base_model=(
        embedding("embed", "embed_tokens"),
        norm("encoder.norm", "norm"),
        stack("encoder.blocks", "layers", _LLAMA_ATTENTION, _LLAMA_MLP, _LLAMA_NORMS),
    ),
)

# Yang et al. 2019: relative positions of Transformer-XL, and a second stream of queries in pre-training
XLNET = Family(
    model_type="xlnet",
    architectures={"XLNetLMHeadModel": ("logits",), "XLNetModel": ()},
    task_classes=task_classes("XLNet", "tokens")
    | task_classes(
        "XLNet",
        *("classes", "regression", "choice"),
        output="logits_proj",
        pool="last",
        dense="sequence_summary.summary",
        activation="tanh",
    ),
    template=changes(
        _ENCODER,
        {
            "positions.kind": "relative-sinusoids",
            "positions.relative_types": True,
            "embedding.norm": False,
            "bias": False,
            "mlp.bias": True,
            "special": NO_START,
        },
    ),
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("d_model", "d_model"),
        Field("n_layer", "num_encoder_layers"),
        Field("n_head", "attention.num_heads"),
        Field("d_inner", "mlp.d_ff"),
        xlnet_head_width(),
        Field("layer_norm_eps", "norm.epsilon", 1e-12),
        Field("dropout", "dropout", 0.1),
        activation("ff_activation", "gelu"),
        # uni: the form of Transformer-XL
        choice("attn_type", "attention.encoder_mask", {"bi": "none", "uni": "causal"}, "bi"),
        pad_token(5),
        eos_token(2),
    ),
    # Distances are not clamped, no half of a batch is read backwards, and no states of earlier rows are read.
    supported_values={
        "clamp_len": -1,
        "bi_data": False,
        "same_length": False,
        "summary_type": "last",
        "summary_use_proj": True,
        "summary_activation": "tanh",
        "tie_word_embeddings": True,
    },
    attribute_map={
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    # Memories are made for a caller that passes them on; a row without any is computed as if there were none.
    ignored=(
        *("mem_len", "reuse_len", "use_mems_eval", "use_mems_train", "n_layers"),
        *("start_n_top", "end_n_top", "untie_r"),
    ),
    base_model_prefix="transformer",
    base_model=(
        embedding("embed", "word_embedding"),
        array("query_embedding", "mask_emb", TWO_LEADING_AXES),
        stack(
            "encoder.blocks",
            "layer",
            by_head("attention.query", "rel_attn.q"),
            by_head("attention.key", "rel_attn.k"),
            by_head("attention.value", "rel_attn.v"),
            by_head("attention.out", "rel_attn.o", TRANSPOSE),
            by_head("attention.sinusoids.projection", "rel_attn.r"),
            array("attention.sinusoids.content_bias", "rel_attn.r_w_bias"),
            array("attention.sinusoids.position_bias", "rel_attn.r_r_bias"),
            array("attention.sinusoids.type_bias", "rel_attn.r_s_bias"),
            array("attention.sinusoids.type_keys", "rel_attn.seg_embed"),
            norm("attention_norm", "rel_attn.layer_norm"),
            linears("mlp", "ff", hidden="layer_1", out="layer_2"),
            norm("mlp_norm", "ff.layer_norm"),
        ),
    ),
    output_layers=(array("logits_bias", "lm_loss.bias"),),
    output_matrix="lm_loss",
)

# A model of ours is exported as the first of these that computes the same.
_ENCODER_DECODERS = (
    T5,
    UMT5,
    MT5,
    SWITCH,
    BART,
    MARIAN,
    MBART,
    PEGASUS,
    T5GEMMA,
)
_DECODERS = (
    GPT2,
    OPENAI_GPT,
    GPT_BIGCODE,
    GPT_NEOX,
    BLOOM,
    GPTJ,
    FALCON,
    GPT_NEO,
    OPT,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    GRANITE,
)
_ENCODERS = (
    DISTILBERT,
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    CAMEMBERT,
    MPNET,
    LONGFORMER,
    ALBERT,
    ELECTRA,
    DEBERTA,
    DEBERTA_V2,
    MODERNBERT,
    EUROBERT,
    XLNET,
)
FAMILIES = {family.model_type: family for family in (*_ENCODER_DECODERS, *_DECODERS, *_ENCODERS)}

# Types of models that are refused, and what they need that ours lack.
UNSUPPORTED = {
    "gemma3": "it reads pictures too; gemma3_text is the type of its language model",
}
