"""The published families of decoders, as ``families`` describes them."""

from dataclasses import replace

from lm.convert.family import (
    CLASSIC,
    SIZE_NAMES,
    Family,
    Key,
    choice,
    four_times,
    keys,
    names,
    revised,
    unless,
    values,
)
from lm.convert.windows import layer_type_keys, local_keys, sliding_keys

DECODER_FAMILIES: dict[str, Family] = {}  # in the order in which they are tried for a model of ours

_VALUES = "architecture=decoder special.start=null"
_DECODER_VALUES = f"{CLASSIC} {_VALUES}"

_N_LAYER = "num_attention_heads=n_head num_hidden_layers=n_layer"
_INNER = Key("n_inner", "d_ff", None, lambda value, theirs: value or 4 * theirs["n_embd"])
_GPT2_BLOCK = """
        decoder.blocks.                   h.#.
            attention.query+key+value     attn.c_attn
            attention.out                 attn.c_proj
            mlp.{hidden,out}              mlp.{c_fc,c_proj}
            {attention,mlp}_norm          {ln_1,ln_2}
"""
DECODER_FAMILIES["gpt2"] = Family(
    classes="GPT2LMHeadModel",
    keys=keys("""vocab_size n_embd=d_model n_layer=num_decoder_layers n_head=num_heads n_positions=max_length
        layer_norm_epsilon=norm_epsilon:1e-5 resid_pdrop=dropout:0.1 activation_function=mlp:gelu_new
        tie_word_embeddings=logits:true pad_token_id=special.pad:0 eos_token_id=special.eos:null""")
    + (_INNER,),
    fixed=values(f"{_DECODER_VALUES} positions=learned"),
    only=values("scale_attn_weights=true scale_attn_by_inverse_layer_idx=false add_cross_attention=false"),
    aliases=f"hidden_size=n_embd max_position_embeddings=n_positions {_N_LAYER}",
    idle="reorder_and_upcast_attn",
    prefix="transformer.",
    base=names("{embed,decoder.positions,decoder.norm} {wte,wpe,ln_f}" + _GPT2_BLOCK),
    conv1d=True,
)
# What GPT calls GELU is the tanh form.
DECODER_FAMILIES["openai-gpt"] = replace(
    DECODER_FAMILIES["gpt2"],
    classes="OpenAIGPTLMHeadModel",
    keys=revised(
        DECODER_FAMILIES["gpt2"].keys[:-1],  # but n_inner
        choice("afn", "mlp", values("gelu=gelu-tanh relu=relu silu=silu swish=silu"), "gelu"),
    ),
    fixed=values(f"{_DECODER_VALUES} positions=learned residual=post-norm") | {"d_ff": four_times},
    only={},
    base=names("{embed,decoder.positions} {tokens_embed,positions_embed}" + _GPT2_BLOCK),
)
DECODER_FAMILIES["gpt_bigcode"] = replace(
    DECODER_FAMILIES["gpt2"],
    classes="GPTBigCodeForCausalLM",
    fixed=values(f"{_DECODER_VALUES} positions=learned num_key_value_heads=1"),
    only=values("multi_query=true num_key_value_heads=1 scale_attn_weights=true add_cross_attention=false"),
    idle="attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner max_batch_size "
    "pad_key_length pre_allocate_kv_cache validate_runner_input",
    conv1d=False,
)
DECODER_FAMILIES["gpt_neox"] = Family(
    classes="GPTNeoXForCausalLM",
    keys=keys(f"""{SIZE_NAMES} num_hidden_layers=num_decoder_layers max_position_embeddings=max_length:2048
        layer_norm_eps=norm_epsilon:1e-5 hidden_dropout=dropout:0.0 hidden_act=mlp:gelu
        tie_word_embeddings=logits:false use_parallel_residual=residual:true pad_token_id=special.pad:0
        eos_token_id=special.eos:2"""),
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
DECODER_FAMILIES["bloom"] = Family(
    classes="BloomForCausalLM",
    keys=keys("""vocab_size hidden_size=d_model n_layer=num_decoder_layers n_head=num_heads
        layer_norm_epsilon=norm_epsilon:1e-5 hidden_dropout=dropout:0.0 tie_word_embeddings=logits:true
        pad_token_id=special.pad:3 eos_token_id=special.eos:2"""),
    fixed=values(f"{_DECODER_VALUES} positions=alibi embed_norm=true mlp=gelu-tanh") | {"d_ff": four_times},
    only=values("apply_residual_connection_post_layernorm=false"),
    aliases=f"n_embed=hidden_size {_N_LAYER}",
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
DECODER_FAMILIES["gptj"] = Family(
    classes="GPTJForCausalLM=logits",
    keys=keys("""vocab_size n_embd=d_model n_layer=num_decoder_layers n_head=num_heads n_positions=max_length
        layer_norm_epsilon=norm_epsilon:1e-5 resid_pdrop=dropout:0.0 activation_function=mlp:gelu_new
        tie_word_embeddings=logits:false pad_token_id=special.pad:0 eos_token_id=special.eos:50256""")
    + (
        _INNER,
        Key(  # of a head's features so many are turned
            "rotary_dim",
            "rotary.fraction",
            64,
            lambda width, theirs: width / (theirs["n_embd"] // theirs["n_head"]),
            lambda _, own: own.rotary_width,
        ),
    ),
    fixed=values(f"{_DECODER_VALUES} positions=rotary rotary.layout=pairs residual=parallel-one-norm")
    | values("bias=false mlp_bias=true logits_bias=true"),
    only=values("scale_attn_weights=true rotary=true"),
    aliases=f"hidden_size=n_embd max_position_embeddings=n_positions {_N_LAYER}",
    prefix="transformer.",
    base=names("""
        {embed,decoder.norm}              {wte,ln_f}
        decoder.blocks.                   h.#.
            attention.{query,key,value,out}  attn.{q,k,v,out}_proj
            mlp.{hidden,out}              mlp.{fc_in,fc_out}
            attention_norm                ln_1
    """),
    top=names("{head,logits_bias} {lm_head,lm_head.bias}"),
)
DECODER_FAMILIES["gpt_neo"] = Family(
    classes="GPTNeoForCausalLM",
    keys=keys(
        "vocab_size hidden_size=d_model num_layers=num_decoder_layers num_heads resid_dropout=dropout:0.0 "
        "max_position_embeddings=max_length:2048 layer_norm_epsilon=norm_epsilon:1e-5 "
        "activation_function=mlp:gelu_new tie_word_embeddings=logits:true pad_token_id=special.pad:0 "
        "eos_token_id=special.eos:50256",
        Key("intermediate_size", "d_ff", None, lambda value, theirs: value or 4 * theirs["hidden_size"]),
        *local_keys(),
    ),
    # Scores are not scaled.
    fixed=values(f"{_DECODER_VALUES} positions=learned scores=dot qkv_bias=false"),
    aliases="num_attention_heads=num_heads num_hidden_layers=num_layers",
    prefix="transformer.",
    base=names("""
        {embed,decoder.positions,decoder.norm}  {wte,wpe,ln_f}
        decoder.blocks.                   h.#.
            attention.{query,key,value,out}  attn.attention.{q,k,v,out}_proj
            mlp.{hidden,out}              mlp.{c_fc,c_proj}
            {attention,mlp}_norm          {ln_1,ln_2}
    """),
)
DECODER_FAMILIES["opt"] = Family(
    classes="OPTForCausalLM",
    keys=keys(
        "vocab_size hidden_size=d_model num_hidden_layers=num_decoder_layers num_attention_heads=num_heads "
        "ffn_dim=d_ff max_position_embeddings=max_length:2048 dropout=dropout:0.1 "
        "activation_function=mlp:relu tie_word_embeddings=logits:true pad_token_id=special.pad:1 "
        "eos_token_id=special.eos:2",
        choice("do_layer_norm_before", "residual", {True: "pre-norm", False: "post-norm"}, True),
        Key("word_embed_proj_dim", "d_embed", None, unless("hidden_size"), lambda _, own: own.embed_width),
    ),
    fixed=values(f"{_DECODER_VALUES} positions=learned position_offset=2 norm_epsilon=1e-5 projected=tokens"),
    only=values("enable_bias=true layer_norm_elementwise_affine=true _remove_final_layer_norm=false"),
    prefix="model.",
    base=names("""
        {embed,narrowing}                 decoder.{embed_tokens,project_out}
        decoder.{positions,norm,projection}  decoder.{embed_positions,final_layer_norm,project_in}
        decoder.blocks.                   decoder.layers.#.
            attention.{query,key,value,out}  self_attn.{q,k,v,out}_proj
            mlp.{hidden,out}              {fc1,fc2}
            {attention,mlp}_norm          {self_attn,final}_layer_norm
    """),
)
_GATED = "silu=gated-silu relu=gated-relu gelu_new=gated-gelu gelu_pytorch_tanh=gated-gelu swish=gated-silu"
_HEAD_WIDTH = Key(
    "head_dim", "d_kv", None, lambda value, own: value or own["hidden_size"] // own["num_attention_heads"]
)
_LLAMA_KEYS = keys(
    f"{SIZE_NAMES} num_hidden_layers=num_decoder_layers max_position_embeddings=max_length:2048 "
    "rms_norm_eps=norm_epsilon:1e-6 attention_dropout=dropout:0.0 attention_bias=bias:false "
    "tie_word_embeddings=logits:false pad_token_id=special.pad:0 eos_token_id=special.eos:2",
    Key("num_key_value_heads", "num_key_value_heads", None, write=lambda _, own: own.key_value_heads),
    _HEAD_WIDTH,
    choice("hidden_act", "mlp", values(_GATED), "silu"),
)
_LLAMA_VALUES = values(f"{_VALUES} scores=scaled-dot norm=rms positions=rotary")
DECODER_FAMILIES["llama"] = Family(
    classes="LlamaForCausalLM",
    keys=(
        *_LLAMA_KEYS,
        Key("mlp_bias", "mlp_bias", False, unless("attention_bias", False), lambda _, own: own.mlp_has_bias),
    ),
    fixed=_LLAMA_VALUES,
    idle="pretraining_tp",
    rotary=("rope_theta", None, 1.0),  # the reference turns whole heads, whatever partial_rotary_factor says
    prefix="model.",
    base=names("""
        {embed,decoder.norm}              {embed_tokens,norm}
        decoder.blocks.                   layers.#.
            attention.{query,key,value,out}  self_attn.{q,k,v,o}_proj
            mlp.{hidden,linear,out}       mlp.{gate,up,down}_proj
            {attention,mlp}_norm          {input,post_attention}_layernorm
    """),
)
_GROUPS_OF_8 = Key("num_key_value_heads", "num_key_value_heads", 8, write=lambda _, own: own.key_value_heads)
_UNBIASED = tuple(key for key in _LLAMA_KEYS if key.ours != "bias")
DECODER_FAMILIES["mistral"] = replace(
    DECODER_FAMILIES["llama"],
    classes="MistralForCausalLM",
    keys=revised(_UNBIASED, _GROUPS_OF_8, *sliding_keys()),
    fixed=_LLAMA_VALUES | values("bias=false"),
    idle="",
)
DECODER_FAMILIES["qwen2"] = replace(
    DECODER_FAMILIES["llama"],
    classes="Qwen2ForCausalLM",
    keys=(*_UNBIASED, *layer_type_keys()),
    fixed=_LLAMA_VALUES | values("bias=false qkv_bias=true"),
    idle="",
)
DECODER_FAMILIES["qwen3"] = replace(
    DECODER_FAMILIES["llama"],
    classes="Qwen3ForCausalLM",
    keys=revised(_LLAMA_KEYS, _HEAD_WIDTH._replace(default=128), *layer_type_keys()),
    fixed=_LLAMA_VALUES | values("mlp_bias=false qk_norm=true"),
    idle="",
    base=DECODER_FAMILIES["llama"].base
    | names("decoder.blocks.attention.{query,key}_norm layers.#.self_attn.{q,k}_norm"),
)
