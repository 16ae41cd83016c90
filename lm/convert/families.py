"""The published families: of each the settings, theirs and ours, and the names of its tensors.

A new family is an entry of FAMILIES. Settings stand as "theirs=ours:default", and without a default where a
file must have them; values as "setting=value". Names of tensors are lines "ours theirs", of modules: braces
hold alternatives, and a line that ends with dots is the prefix of the indented ones below it.
"""

from dataclasses import replace

from lm.convert.decoders import DECODER_FAMILIES
from lm.convert.family import (
    CLASSIC,
    OPTIONAL,
    SIZE_NAMES,
    Family,
    Key,
    after_padding,
    choice,
    keys,
    names,
    of_encoder,
    revised,
    t5_keys,
    unless,
    values,
)
from lm.convert.windows import attention_window_keys

FAMILIES: dict[str, Family] = {}  # in the order in which they are tried for a model of ours

_POST_NORM = f"{CLASSIC} residual=post-norm embed_norm=true"
_ENCODER_VALUES = f"{_POST_NORM} architecture=encoder"
_BOTH, _TIED = "architecture=encoder-decoder", "normalize_embedding=true tie_word_embeddings=true"

# --- encoder-decoders

FAMILIES["t5"] = Family(
    classes="T5ForConditionalGeneration",
    keys=t5_keys("""vocab_size d_model d_kv d_ff num_heads num_layers=num_encoder_layers
        dropout_rate=dropout:0.1 relative_attention_num_buckets=relative_buckets
        layer_norm_epsilon=norm_epsilon:1e-6
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
FAMILIES["umt5"] = replace(
    FAMILIES["t5"],
    classes="UMT5ForConditionalGeneration",
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

FAMILIES |= DECODER_FAMILIES

# --- encoders

_TRANSFORM = "{transform.dense,transform.norm,logits_bias}"
FAMILIES["distilbert"] = Family(
    classes="DistilBertForMaskedLM=logits DistilBertModel",
    heads="DistilBert=tokens,span",
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
    heads="Bert=classes,regression,choice,tokens,span",
    keys=keys(
        f"{SIZE_NAMES} num_hidden_layers=num_encoder_layers max_position_embeddings=max_length "
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
    heads="Roberta=tokens,span",
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
    heads="Longformer=tokens,span",
    keys=FAMILIES["roberta"].keys + attention_window_keys(),
    fixed=FAMILIES["roberta"].fixed | {"sparsity.projections": "separate"},
    idle="onnx_export",
    prefix="longformer.",
)
FAMILIES["albert"] = replace(
    FAMILIES["bert"],
    classes="AlbertForPreTraining=logits,pooler,sentence-order AlbertForMaskedLM=logits AlbertModel",
    heads="Albert=classes,regression,choice,tokens,span",
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
    heads="Electra=tokens,span",
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
