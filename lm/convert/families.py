"""The published families: of each the settings, theirs and ours, and the names of its tensors.

A new family is an entry of FAMILIES. Settings stand as "theirs=ours:default", and without a default where a
file must have them; values as "setting=value". Names of tensors are lines "ours theirs", of modules: braces
hold alternatives, and a line that ends with dots is the prefix of the indented ones below it.
"""

from dataclasses import replace

from lm.convert.encoders import ENCODERS
from lm.convert.family import (
    CLASSIC_VALUES,
    OPTIONAL,
    SIZE_ROWS,
    Family,
    Key,
    choice,
    four_times,
    keys,
    names,
    of_encoder,
    revised,
    t5_keys,
    unless,
    values,
)

FAMILIES: dict[str, Family] = {}  # in the order in which they are tried for a model of ours

_DECODER_VALUES = f"{CLASSIC_VALUES} architecture=decoder special.start=null"

# --- encoder-decoders

FAMILIES["t5"] = Family(
    classes="T5ForConditionalGeneration",
    keys=keys(
        "vocab_size d_model d_kv d_ff num_heads num_layers=num_encoder_layers "
        "relative_attention_num_buckets=relative_buckets "
        "relative_attention_max_distance=relative_max_distance:128 layer_norm_epsilon=norm_epsilon:1e-6 "
        "dropout_rate=dropout:0.1 pad_token_id=special.pad:0 eos_token_id=special.eos:1 "
        "decoder_start_token_id=special.start:0",
        *t5_keys(),
    ),
    fixed=values("architecture=encoder-decoder positions=relative scores=dot"),
    only=values("is_encoder_decoder=true"),
    aliases="hidden_size=d_model num_attention_heads=num_heads num_hidden_layers=num_layers head_dim=d_kv",
    idle="is_decoder n_positions",
    says_tied=True,  # since transformers 5
    # The first layer's relative biases are all layers'; only UMT5 has them in every block.
    base=names("""
        embed                             shared
        {encoder,decoder}.                {encoder,decoder}.
            relative                      block.0.layer.0.SelfAttention.relative_attention_bias
            norm                          final_layer_norm
        {encoder,decoder}.blocks.         {encoder,decoder}.block.#.layer.
            relative                      0.SelfAttention.relative_attention_bias
            attention.{query,key,value,out}  0.SelfAttention.{q,k,v,o}
            cross.{query,key,value,out}   1.EncDecAttention.{q,k,v,o}
            {attention,cross}_norm        {0,1}.layer_norm
        {encoder,decoder}.blocks.mlp.     {encoder.block.#.layer.1,decoder.block.#.layer.2}.DenseReluDense.
            {hidden,linear,out}           {wi?,wi_1,wo}
        {encoder,decoder}.blocks.         {encoder.block.#.layer.1,decoder.block.#.layer.2}.
            mlp_norm                      layer_norm
    """),
    embeddings=("encoder.embed_tokens", "decoder.embed_tokens"),
)
_TIED_SCALED = {True: "tied-scaled", False: "separate"}
FAMILIES["umt5"] = replace(
    FAMILIES["t5"],
    classes="UMT5ForConditionalGeneration",
    keys=revised(FAMILIES["t5"].keys, choice("tie_word_embeddings", "logits", _TIED_SCALED, True)),
    fixed=values("architecture=encoder-decoder positions=relative-per-layer scores=dot"),
)
FAMILIES["bart"] = Family(
    classes="BartForConditionalGeneration",
    keys=keys(
        "vocab_size d_model encoder_layers=num_encoder_layers decoder_layers=num_decoder_layers "
        "decoder_attention_heads=num_heads decoder_ffn_dim=d_ff max_position_embeddings=max_length "
        "dropout=dropout:0.1 activation_function=mlp:gelu pad_token_id=special.pad:1 "
        "eos_token_id=special.eos:2 decoder_start_token_id=special.start:2",
        of_encoder("encoder_attention_heads", "num_heads", "decoder_attention_heads"),
        of_encoder("encoder_ffn_dim", "d_ff", "decoder_ffn_dim"),
        choice("scale_embedding", "embed_scale", {False: "none", True: "sqrt"}, False),
    ),
    # The table of positions has two rows in front that nothing reads.
    fixed=values(
        f"{CLASSIC_VALUES} architecture=encoder-decoder residual=post-norm embed_norm=true positions=learned "
        "position_offset=2 norm_epsilon=1e-5 logits=tied"
    ),
    only=values(
        "is_encoder_decoder=true normalize_before=false add_final_layer_norm=false normalize_embedding=true "
        "tie_word_embeddings=true"
    ),
    aliases="hidden_size=d_model num_attention_heads=encoder_attention_heads "
    "num_hidden_layers=encoder_layers",
    idle="is_decoder",
    prefix="model.",
    base=names("""
        embed                             shared
        {encoder,decoder}.                {encoder,decoder}.
            {positions,embed_norm}        {embed_positions,layernorm_embedding}
        {encoder,decoder}.blocks.         {encoder,decoder}.layers.#.
            attention.{query,key,value,out}  self_attn.{q,k,v,out}_proj
            cross.{query,key,value,out}   encoder_attn.{q,k,v,out}_proj
            {attention,cross}_norm        {self,encoder}_attn_layer_norm
            mlp.{hidden,out}              {fc1,fc2}
            mlp_norm                      final_layer_norm
    """),
    top=names("logits_bias final_logits_bias"),
    embeddings=("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
)
FAMILIES["marian"] = replace(
    FAMILIES["bart"],
    classes="MarianMTModel",
    keys=(*FAMILIES["bart"].keys, Key("decoder_vocab_size", "vocab_size", OPTIONAL)),
    fixed=FAMILIES["bart"].fixed
    | values("positions=sinusoidal sinusoid=halves position_offset=0 embed_norm=false"),
    only=FAMILIES["bart"].only | values("normalize_embedding=false share_encoder_decoder_embeddings=true"),
)

# --- decoders

_GPT2_BLOCK = """
        decoder.blocks.                   h.#.
            attention.query+key+value     attn.c_attn
            attention.out                 attn.c_proj
            mlp.{hidden,out}              mlp.{c_fc,c_proj}
            {attention,mlp}_norm          {ln_1,ln_2}
"""
FAMILIES["gpt2"] = Family(
    classes="GPT2LMHeadModel",
    keys=keys(
        "vocab_size n_embd=d_model n_layer=num_decoder_layers n_head=num_heads n_positions=max_length "
        "layer_norm_epsilon=norm_epsilon:1e-5 resid_pdrop=dropout:0.1 activation_function=mlp:gelu_new "
        "tie_word_embeddings=logits:true pad_token_id=special.pad:0 eos_token_id=special.eos:null",
        Key("n_inner", "d_ff", None, lambda value, theirs: value or 4 * theirs["n_embd"]),
    ),
    fixed=values(f"{_DECODER_VALUES} positions=learned"),
    only=values("scale_attn_weights=true scale_attn_by_inverse_layer_idx=false add_cross_attention=false"),
    aliases="hidden_size=n_embd max_position_embeddings=n_positions num_attention_heads=n_head "
    "num_hidden_layers=n_layer",
    idle="reorder_and_upcast_attn",
    prefix="transformer.",
    base=names("{embed,decoder.positions,decoder.norm} {wte,wpe,ln_f}" + _GPT2_BLOCK),
    conv1d=True,
)
# What GPT calls GELU is the tanh form.
FAMILIES["openai-gpt"] = replace(
    FAMILIES["gpt2"],
    classes="OpenAIGPTLMHeadModel",
    keys=revised(
        FAMILIES["gpt2"].keys[:-1],  # but n_inner
        choice("afn", "mlp", values("gelu=gelu-tanh relu=relu silu=silu swish=silu"), "gelu"),
    ),
    fixed=values(f"{_DECODER_VALUES} positions=learned residual=post-norm") | {"d_ff": four_times},
    only={},
    base=names("{embed,decoder.positions} {tokens_embed,positions_embed}" + _GPT2_BLOCK),
)
FAMILIES["gpt_bigcode"] = replace(
    FAMILIES["gpt2"],
    classes="GPTBigCodeForCausalLM",
    fixed=values(f"{_DECODER_VALUES} positions=learned num_key_value_heads=1"),
    only=values("multi_query=true num_key_value_heads=1 scale_attn_weights=true add_cross_attention=false"),
    idle="attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner max_batch_size "
    "pad_key_length pre_allocate_kv_cache validate_runner_input",
    conv1d=False,
)
FAMILIES["gpt_neox"] = Family(
    classes="GPTNeoXForCausalLM",
    keys=keys(
        f"{SIZE_ROWS} num_hidden_layers=num_decoder_layers max_position_embeddings=max_length:2048 "
        "layer_norm_eps=norm_epsilon:1e-5 hidden_dropout=dropout:0.0 hidden_act=mlp:gelu "
        "tie_word_embeddings=logits:false pad_token_id=special.pad:0 eos_token_id=special.eos:2",
        choice("use_parallel_residual", "residual", {True: "parallel", False: "pre-norm"}, True),
    ),
    fixed=values(f"{_DECODER_VALUES} positions=rotary"),
    only=values("attention_bias=true head_dim=null"),
    idle="is_decoder",
    rotary=("rotary_emb_base", "rotary_pct", 0.25),
    prefix="gpt_neox.",
    base=names("""
        {embed,decoder.norm}              {embed_in,final_layer_norm}
        decoder.blocks.                   layers.#.
            attention.query+key+value     attention.query_key_value
            attention.out                 attention.dense
            mlp.{hidden,out}              mlp.{dense_h_to_4h,dense_4h_to_h}
            {attention,mlp}_norm          {input,post_attention}_layernorm
    """),
    output="embed_out",
    per_head=True,
)
FAMILIES["bloom"] = Family(
    classes="BloomForCausalLM",
    keys=keys(
        "vocab_size hidden_size=d_model n_layer=num_decoder_layers n_head=num_heads "
        "layer_norm_epsilon=norm_epsilon:1e-5 hidden_dropout=dropout:0.0 tie_word_embeddings=logits:true "
        "pad_token_id=special.pad:3 eos_token_id=special.eos:2"
    ),
    fixed=values(f"{_DECODER_VALUES} positions=alibi embed_norm=true mlp=gelu-tanh") | {"d_ff": four_times},
    only=values("apply_residual_connection_post_layernorm=false"),
    aliases="n_embed=hidden_size num_attention_heads=n_head num_hidden_layers=n_layer",
    # The same products in several parts, and the feed-forward width, which is always four times the other.
    idle="pretraining_tp slow_but_exact n_inner attention_softmax_in_fp32",
    prefix="transformer.",
    base=names("""
        embed                             word_embeddings
        decoder.{embed_norm,norm}         {word_embeddings_layernorm,ln_f}
        decoder.blocks.                   h.#.
            attention.query+key+value     self_attention.query_key_value
            attention.out                 self_attention.dense
            mlp.{hidden,out}              mlp.{dense_h_to_4h,dense_4h_to_h}
            {attention,mlp}_norm          {input,post_attention}_layernorm
    """),
    per_head=True,
)
_GATED = "silu=gated-silu relu=gated-relu gelu_new=gated-gelu gelu_pytorch_tanh=gated-gelu swish=gated-silu"
FAMILIES["llama"] = Family(
    classes="LlamaForCausalLM",
    keys=keys(
        f"{SIZE_ROWS} num_hidden_layers=num_decoder_layers max_position_embeddings=max_length:2048 "
        "rms_norm_eps=norm_epsilon:1e-6 attention_dropout=dropout:0.0 attention_bias=bias:false "
        "tie_word_embeddings=logits:false pad_token_id=special.pad:0 eos_token_id=special.eos:2",
        Key("num_key_value_heads", "num_key_value_heads", None, write=lambda _, own: own.key_value_heads),
        Key("head_dim", "d_kv", None, lambda v, own: v or own["hidden_size"] // own["num_attention_heads"]),
        choice("hidden_act", "mlp", values(_GATED), "silu"),
        Key("mlp_bias", "mlp_bias", False, unless("attention_bias", False), lambda _, own: own.mlp_has_bias),
    ),
    fixed=values("architecture=decoder special.start=null scores=scaled-dot norm=rms positions=rotary"),
    idle="pretraining_tp",
    rotary=("rope_theta", "partial_rotary_factor", 1.0),
    prefix="model.",
    base=names("""
        {embed,decoder.norm}              {embed_tokens,norm}
        decoder.blocks.                   layers.#.
            attention.{query,key,value,out}  self_attn.{q,k,v,o}_proj
            mlp.{hidden,linear,out}       mlp.{gate,up,down}_proj
            {attention,mlp}_norm          {input,post_attention}_layernorm
    """),
)

FAMILIES |= ENCODERS
