"""The published families: of each the settings, theirs and ours, and the names of its tensors.

A new family is an entry of FAMILIES. Settings stand as "theirs=ours:default", and without a default where a
file must have them; values as "setting=value". Names of tensors are lines "ours theirs", of modules: braces
hold alternatives, and a line that ends with dots is the prefix of the indented ones below it.
"""

from dataclasses import replace

from lm.convert.family import (
    OPTIONAL,
    Family,
    Key,
    after_padding,
    choice,
    four_times,
    keys,
    names,
    of_encoder,
    revised,
    t5_keys,
    unless,
    values,
    window_keys,
)

FAMILIES: dict[str, Family] = {}  # in the order in which they are tried for a model of ours

# what many families share: names of their sizes, and values of ours
_SIZES = "vocab_size hidden_size=d_model num_attention_heads=num_heads intermediate_size=d_ff"
_CLASSIC = "scores=scaled-dot norm=layer bias=true"
_DECODER_VALUES = f"{_CLASSIC} architecture=decoder special.start=null"
_POST_NORM = f"{_CLASSIC} residual=post-norm embed_norm=true"
_ENCODER_VALUES = f"{_POST_NORM} architecture=encoder"
_BOTH, _TIED = "architecture=encoder-decoder", "normalize_embedding=true tie_word_embeddings=true"

# --- encoder-decoders

FAMILIES["t5"] = Family(
    classes="T5ForConditionalGeneration",
    keys=t5_keys("""vocab_size d_model d_kv d_ff num_heads num_layers=num_encoder_layers
        dropout_rate=dropout:0.1 relative_attention_num_buckets=relative_buckets
        layer_norm_epsilon=norm_epsilon:1e-6 relative_attention_max_distance=relative_max_distance:128
        pad_token_id=special.pad:0 eos_token_id=special.eos:1 decoder_start_token_id=special.start:0"""),
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
        "eos_token_id=special.eos:2 decoder_start_token_id=special.start:2 scale_embedding=embed_scale:false",
        of_encoder("encoder_attention_heads", "num_heads", "decoder_attention_heads"),
        of_encoder("encoder_ffn_dim", "d_ff", "decoder_ffn_dim"),
    ),
    # The table of positions has two rows in front that nothing reads.
    fixed=values(f"{_POST_NORM} {_BOTH} positions=learned position_offset=2 norm_epsilon=1e-5 logits=tied"),
    only=values(f"is_encoder_decoder=true normalize_before=false add_final_layer_norm=false {_TIED}"),
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

_N_LAYER = "num_attention_heads=n_head num_hidden_layers=n_layer"
_GPT2_BLOCK = """
        decoder.blocks.                   h.#.
            attention.query+key+value     attn.c_attn
            attention.out                 attn.c_proj
            mlp.{hidden,out}              mlp.{c_fc,c_proj}
            {attention,mlp}_norm          {ln_1,ln_2}
"""
FAMILIES["gpt2"] = Family(
    classes="GPT2LMHeadModel",
    keys=keys("""vocab_size n_embd=d_model n_layer=num_decoder_layers n_head=num_heads n_positions=max_length
        layer_norm_epsilon=norm_epsilon:1e-5 resid_pdrop=dropout:0.1 activation_function=mlp:gelu_new
        tie_word_embeddings=logits:true pad_token_id=special.pad:0 eos_token_id=special.eos:null""")
    + (Key("n_inner", "d_ff", None, lambda value, theirs: value or 4 * theirs["n_embd"]),),
    fixed=values(f"{_DECODER_VALUES} positions=learned"),
    only=values("scale_attn_weights=true scale_attn_by_inverse_layer_idx=false add_cross_attention=false"),
    aliases=f"hidden_size=n_embd max_position_embeddings=n_positions {_N_LAYER}",
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
    keys=keys(f"""{_SIZES} num_hidden_layers=num_decoder_layers max_position_embeddings=max_length:2048
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
FAMILIES["bloom"] = Family(
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
_GATED = "silu=gated-silu relu=gated-relu gelu_new=gated-gelu gelu_pytorch_tanh=gated-gelu swish=gated-silu"
FAMILIES["llama"] = Family(
    classes="LlamaForCausalLM",
    keys=keys(
        f"{_SIZES} num_hidden_layers=num_decoder_layers max_position_embeddings=max_length:2048 "
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

# --- encoders

_TRANSFORM = "{transform.dense,transform.norm,logits_bias}"
FAMILIES["distilbert"] = Family(
    classes="DistilBertForMaskedLM=logits DistilBertModel",
    keys=keys("""vocab_size dim=d_model n_layers=num_encoder_layers n_heads=num_heads hidden_dim=d_ff
        max_position_embeddings=max_length dropout=dropout:0.1 activation=mlp:gelu pad_token_id=special.pad:0
        eos_token_id=special.eos:null sinusoidal_pos_embds=positions:false"""),
    fixed=values(f"{_ENCODER_VALUES} norm_epsilon=1e-12 special.start=null sinusoid=interleaved"),
    aliases="hidden_size=dim num_attention_heads=n_heads num_hidden_layers=n_layers",
    prefix="distilbert.",
    base=names("""
        {embed,encoder.positions,encoder.types}  embeddings.{word,position,token_type}_embeddings
        encoder.embed_norm                embeddings.LayerNorm
        encoder.blocks.                   transformer.layer.#.
            attention.{query,key,value,out}  attention.{q,k,v,out}_lin
            mlp.{hidden,out}              ffn.{lin1,lin2}
            {attention_norm,mlp_norm}     {sa,output}_layer_norm
    """),
    top=names(f"{_TRANSFORM} {{vocab_transform,vocab_layer_norm,vocab_projector.bias}}"),
    output="vocab_projector",
)
FAMILIES["bert"] = Family(
    classes="BertForPreTraining=logits,pooler,next-sentence BertForMaskedLM=logits BertModel",
    keys=keys(
        f"{_SIZES} num_hidden_layers=num_encoder_layers max_position_embeddings=max_length "
        "layer_norm_eps=norm_epsilon:1e-12 hidden_dropout_prob=dropout:0.1 hidden_act=mlp:gelu "
        "pad_token_id=special.pad:0 eos_token_id=special.eos:null",
        # theirs has at least one
        Key("type_vocab_size", "type_vocab_size", 2, write=lambda value, _: max(value, 1)),
    ),
    fixed=values(f"{_ENCODER_VALUES} positions=learned special.start=null"),
    only=values("is_decoder=false add_cross_attention=false position_embedding_type=absolute"),
    prefix="bert.",
    base=names("""
        {embed,encoder.positions,encoder.types}  embeddings.{word,position,token_type}_embeddings
        encoder.embed_norm                embeddings.LayerNorm
        pooler                            pooler.dense
        encoder.blocks.                   encoder.layer.#.
            attention.{query,key,value}   attention.self.{query,key,value}
            attention.globals.{query,key,value}  attention.self.{query,key,value}_global
            attention.out                 attention.output.dense
            mlp.{hidden,out}              {intermediate,output}.dense
            {attention_norm,mlp_norm}     {attention.output,output}.LayerNorm
    """),
    top=names(f"{_TRANSFORM} cls.predictions.{{transform.dense,transform.LayerNorm,bias}}")
    | {"next_sentence": "cls.seq_relationship"},
    output="cls.predictions.decoder",
)
_GELU = choice("hidden_act", "mlp", values("gelu=gelu"), "gelu")  # the output layer knows no other
FAMILIES["roberta"] = replace(
    FAMILIES["bert"],
    classes="RobertaForMaskedLM=logits RobertaModel",
    keys=revised(
        FAMILIES["bert"].keys,
        *keys("pad_token_id=special.pad:1 eos_token_id=special.eos:2 bos_token_id=special.start:0"),
        after_padding,
        _GELU,
    ),
    fixed=values(f"{_ENCODER_VALUES} positions=learned")
    | {"position_offset": lambda o: o["special.pad"] + 1},
    prefix="roberta.",
    top=names(f"{_TRANSFORM} lm_head.{{dense,layer_norm,bias}}"),
    output="lm_head.decoder",
)
FAMILIES["longformer"] = replace(
    FAMILIES["roberta"],
    classes="LongformerForMaskedLM=logits LongformerModel",
    keys=FAMILIES["roberta"].keys + window_keys(),
    fixed=FAMILIES["roberta"].fixed | {"sparsity.projections": "separate"},
    idle="onnx_export",
    prefix="longformer.",
)
FAMILIES["albert"] = replace(
    FAMILIES["bert"],
    classes="AlbertForPreTraining=logits,pooler,sentence-order AlbertForMaskedLM=logits AlbertModel",
    keys=revised(
        FAMILIES["bert"].keys,
        *keys("eos_token_id=special.eos:3"),
        Key("embedding_size", "d_embed", 128, write=lambda _, config: config.embed_width),
    ),
    fixed=FAMILIES["bert"].fixed | values("shared_layers=true"),
    only=FAMILIES["bert"].only | values("num_hidden_groups=1 inner_group_num=1"),
    prefix="albert.",  # one group of one layer
    base=names("""
        {embed,encoder.positions,encoder.types}  embeddings.{word,position,token_type}_embeddings
        encoder.embed_norm                embeddings.LayerNorm
        pooler                            pooler
        encoder.projection                encoder.embedding_hidden_mapping_in
        encoder.blocks.                   encoder.albert_layer_groups.#.albert_layers.0.
            attention.{query,key,value,out}  attention.{query,key,value,dense}
            mlp.{hidden,out}              {ffn,ffn_output}
            {attention_norm,mlp_norm}     {attention.LayerNorm,full_layer_layer_norm}
    """),
    top=names(f"{_TRANSFORM} predictions.{{dense,LayerNorm,bias}}")
    | {"sentence_order": "sop_classifier.classifier"},
    output="predictions.decoder",
)
FAMILIES["electra"] = replace(
    FAMILIES["bert"],
    classes="ElectraForPreTraining=replaced-token ElectraForMaskedLM=logits ElectraModel",
    keys=revised(
        FAMILIES["bert"].keys,
        _GELU,
        Key("embedding_size", "d_embed", 128, unless("hidden_size"), lambda _, own: own.embed_width),
    ),
    prefix="electra.",
    base=FAMILIES["bert"].base | names("encoder.projection embeddings_project"),
    top=names(f"{_TRANSFORM} generator_{{predictions.dense,predictions.LayerNorm,lm_head.bias}}")
    | names("replaced.{dense,out} discriminator_predictions.{dense,dense_prediction}"),
    output="generator_lm_head",
)
