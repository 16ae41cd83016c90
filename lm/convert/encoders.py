"""The published families of encoders, as ``families`` has the others."""

from dataclasses import replace

from lm.convert.family import (
    CLASSIC_VALUES,
    SIZE_ROWS,
    Family,
    Key,
    after_padding,
    choice,
    keys,
    names,
    revised,
    unless,
    values,
    window_keys,
)

ENCODERS: dict[str, Family] = {}

_ENCODER_VALUES = f"{CLASSIC_VALUES} architecture=encoder residual=post-norm embed_norm=true"
_TRANSFORM = "{transform.dense,transform.norm,logits_bias}"
ENCODERS["distilbert"] = Family(
    classes="DistilBertForMaskedLM=logits DistilBertModel",
    keys=keys(
        "vocab_size dim=d_model n_layers=num_encoder_layers n_heads=num_heads hidden_dim=d_ff "
        "max_position_embeddings=max_length dropout=dropout:0.1 activation=mlp:gelu "
        "pad_token_id=special.pad:0 eos_token_id=special.eos:null",
        choice("sinusoidal_pos_embds", "positions", {False: "learned", True: "sinusoidal"}, False),
    ),
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
ENCODERS["bert"] = Family(
    classes="BertForPreTraining=logits,pooler,next-sentence BertForMaskedLM=logits BertModel",
    keys=keys(
        f"{SIZE_ROWS} num_hidden_layers=num_encoder_layers max_position_embeddings=max_length "
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
    top=names(f"""
        {_TRANSFORM}  cls.predictions.{{transform.dense,transform.LayerNorm,bias}}
        next_sentence                     cls.seq_relationship
    """),
    output="cls.predictions.decoder",
)
_GELU = choice("hidden_act", "mlp", values("gelu=gelu"), "gelu")  # the output layer knows no other
ENCODERS["roberta"] = replace(
    ENCODERS["bert"],
    classes="RobertaForMaskedLM=logits RobertaModel",
    keys=revised(
        ENCODERS["bert"].keys,
        *keys("pad_token_id=special.pad:1 eos_token_id=special.eos:2 bos_token_id=special.start:0"),
        after_padding,
        _GELU,
    ),
    fixed=values(f"{_ENCODER_VALUES} positions=learned")
    | {"position_offset": lambda ours: ours["special.pad"] + 1},
    prefix="roberta.",
    top=names(f"{_TRANSFORM} lm_head.{{dense,layer_norm,bias}}"),
    output="lm_head.decoder",
)
ENCODERS["longformer"] = replace(
    ENCODERS["roberta"],
    classes="LongformerForMaskedLM=logits LongformerModel",
    keys=ENCODERS["roberta"].keys + window_keys(),
    fixed=ENCODERS["roberta"].fixed | {"sparsity.projections": "separate"},
    idle="onnx_export",
    prefix="longformer.",
)
ENCODERS["albert"] = replace(
    ENCODERS["bert"],
    classes="AlbertForPreTraining=logits,pooler,sentence-order AlbertForMaskedLM=logits AlbertModel",
    keys=revised(
        ENCODERS["bert"].keys,
        *keys("eos_token_id=special.eos:3"),
        Key("embedding_size", "d_embed", 128, write=lambda _, own: own.embed_width),
    ),
    fixed=ENCODERS["bert"].fixed | values("shared_layers=true"),
    only=ENCODERS["bert"].only | values("num_hidden_groups=1 inner_group_num=1"),
    prefix="albert.",
    # one group of one layer
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
    top=names(f"""
        {_TRANSFORM}  predictions.{{dense,LayerNorm,bias}}
        sentence_order                    sop_classifier.classifier
    """),
    output="predictions.decoder",
)
ENCODERS["electra"] = replace(
    ENCODERS["bert"],
    classes="ElectraForPreTraining=replaced-token ElectraForMaskedLM=logits ElectraModel",
    keys=revised(
        ENCODERS["bert"].keys,
        _GELU,
        Key("embedding_size", "d_embed", 128, unless("hidden_size"), lambda _, own: own.embed_width),
    ),
    prefix="electra.",
    base=ENCODERS["bert"].base | names("encoder.projection embeddings_project"),
    top=names(f"""
        {_TRANSFORM}  generator_{{predictions.dense,predictions.LayerNorm,lm_head.bias}}
        replaced.{{dense,out}}            discriminator_predictions.{{dense,dense_prediction}}
    """),
    output="generator_lm_head",
)
