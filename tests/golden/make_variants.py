"""Walk the fields of every config.json, and record what the reference computes where one is changed.

``python make_variants.py [TYPE ...]`` needs torch and transformers 5; what is recorded of other types stays.
Of each type a tiny model is made, and each field that is written, or that the source of the model reads, is
changed in turn. ``fields.json`` holds of every field the default, what was tried instead and the effect: the
logits are other ones ("computes") or the same ("idle") with the same weights, there are other tensors
("shapes"), or the reference cannot have it ("refused") or keeps what it had ("kept"). ``variants.json`` holds
the differing configs and shapes of tensors of all models whose effect is "computes" or "shapes" and of those
in ``SHAPES``, ``variants.npz`` their logits and what some write. A field of a stack's section is named as in
"encoder.hidden_size". Weights are those of ``drawn.py``; only tensors that are not drawn, as sinusoids, are
kept.
"""

import copy
import inspect
import json
import logging
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from drawn import drawn
from safetensors.numpy import load_file

HERE = Path(__file__).parent
SIDES = {
    "vocab_size": 20,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": 20,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "decoder_start_token_id": 0,
}
SWITCH = T5 | {
    "num_layers": 2,
    "num_experts": 3,
    "expert_capacity": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_decoder_layers": 2,
}
GPT = {
    "vocab_size": 20,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
WIDE = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
BERT = WIDE | {"max_position_embeddings": 20}
DISTIL = {
    "vocab_size": 20,
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 12,
    "max_position_embeddings": 20,
}
NEO = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "max_position_embeddings": 16,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 3,
}
OPT = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 12,
    "max_position_embeddings": 16,
}
GROUPED = BERT | {"num_key_value_heads": 1, "head_dim": 6}
GEMMA2 = GROUPED | {
    "hidden_size": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 3,
    "attn_logit_softcapping": 0.5,  # sharper attention would show each other rounding
    "final_logit_softcapping": 4.0,
}
FALCON = WIDE | {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 12, "pad_token_id": 0}
FALCON = {name: value for name, value in FALCON.items() if name != "intermediate_size"}
FALCON40B = {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
GEMMA3 = GROUPED | {
    "hidden_size": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
}
FACTORS = {
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
DEBERTA = BERT | {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 4,
    "max_relative_positions": 6,
    "legacy": False,
}
DEBERTA_V1 = {
    name: value
    for name, value in DEBERTA.items()
    if name not in ("share_att_key", "norm_rel_ebd", "position_buckets")
}
XLNET = {"vocab_size": 20, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12}
T5GEMMA = {f"{side}.{name}": value for side in ("encoder", "decoder") for name, value in GEMMA2.items()}
SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
TYPES = {  # class, the sizes of its tiny model
    "t5": ("T5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", SWITCH),
    "bart": ("BartForConditionalGeneration", SIDES),
    "marian": ("MarianMTModel", SIDES | {"decoder_vocab_size": 20}),
    "mbart": ("MBartForConditionalGeneration", SIDES),
    "pegasus": ("PegasusForConditionalGeneration", SIDES | {"pad_token_id": 0, "eos_token_id": 1}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", BERT | {"hidden_size": 16, "bos_token_id": 1}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 20, "hidden_size": 8, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", BERT | {"num_key_value_heads": 1}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 2}),
    "falcon": ("FalconForCausalLM", FALCON),
    "gpt_neo": ("GPTNeoForCausalLM", NEO),
    "opt": ("OPTForCausalLM", OPT),
    "mistral": ("MistralForCausalLM", BERT | {"num_key_value_heads": 1, "sliding_window": 3}),
    "phi3": (
        "Phi3ForCausalLM",
        BERT | {"num_key_value_heads": 1, "sliding_window": 3, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "qwen2": ("Qwen2ForCausalLM", BERT | {"num_key_value_heads": 1} | SLIDING),
    "qwen3": ("Qwen3ForCausalLM", BERT | {"num_key_value_heads": 1, "head_dim": 6} | SLIDING),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "olmo2": ("Olmo2ForCausalLM", BERT | {"num_key_value_heads": 1, "pad_token_id": 0}),
    "granite": ("GraniteForCausalLM", BERT | {"num_key_value_heads": 1, "pad_token_id": 0} | FACTORS),
    "t5gemma": ("T5GemmaForConditionalGeneration", T5GEMMA | {"vocab_size": 20}),
    "modernbert": (
        "ModernBertForMaskedLM",
        BERT | {"local_attention": 4, "pad_token_id": 1, "num_hidden_layers": 3},
    ),
    "eurobert": ("EuroBertForMaskedLM", BERT | {"num_key_value_heads": 1, "pad_token_id": 0}),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", BERT),
    "xlm-roberta": ("XLMRobertaForMaskedLM", BERT),
    "camembert": ("CamembertForMaskedLM", BERT),
    "mpnet": ("MPNetForMaskedLM", BERT),
    "longformer": ("LongformerForMaskedLM", BERT | {"attention_window": 4}),
    "albert": ("AlbertForMaskedLM", BERT | {"embedding_size": 6}),
    "electra": ("ElectraForMaskedLM", BERT | {"embedding_size": 6}),
    "deberta": ("DebertaForMaskedLM", DEBERTA_V1),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA),
    "xlnet": ("XLNetLMHeadModel", XLNET),
}
TYPED = ("full_attention", "sliding_attention")
APART = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 14,
}
ROPE = {"rope_theta": 500.0, "original_max_position_embeddings": 4, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "attention_factor": 0.7}
# of T5 and UMT5: the output matrix is the embedding or its own, behind states that are scaled or not
T5_OUTPUTS = {
    f"{'tied' if tied else 'own'}_{'scaled' if scaled else 'unscaled'}": (
        {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": scaled},
        () if tied else ("lm_head",),
    )
    for tied in (True, False)
    for scaled in (True, False)
}
# type: name: (what is changed, the tensors that are drawn anew though the reference repeats another there)
SHAPES = {
    "t5": T5_OUTPUTS,
    "umt5": T5_OUTPUTS,
    # the output matrix of the published models
    "mt5": {"own": ({}, ("lm_head",)), "relu": ({"feed_forward_proj": "relu"}, ())},
    "switch_transformers": {
        "every_third": (
            {
                "num_layers": 5,
                "num_decoder_layers": 6,
                "num_sparse_encoder_layers": 1,
                "num_sparse_decoder_layers": 2,
                "encoder_sparse_step": 3,
            },
            (),
        ),
        "no_experts_asked": ({"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}, ()),
    },
    "bart": {"sides_apart": (APART, ())},
    "mbart": {"sides_apart": (APART | {"scale_embedding": True}, ())},
    "pegasus": {"scaled": ({"scale_embedding": True}, ())},
    "falcon": {
        "grouped": (FALCON40B, ()),
        "grouped_one_norm": (FALCON40B | {"num_ln_in_parallel_attn": 1}, ()),
        "one_after_the_other": ({"parallel_attn": False, "multi_query": False, "bias": True}, ()),
    },
    "phi3": {"partial": ({"rope_parameters": {**PARTIAL, "rope_theta": 500.0}, "sliding_window": None}, ())},
    "marian": {"sides_apart": (APART, ())},
    "llama": {
        "both_biases": ({"attention_bias": True, "mlp_bias": True}, ()),
        "yarn": ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, ()),
        "yarn_attention_factor": ({"rope_parameters": ROPE | YARN}, ()),
        "llama3": ({"rope_parameters": ROPE | LLAMA3}, ()),
        "dynamic": ({"rope_parameters": ROPE | {"rope_type": "dynamic"}}, ()),
        "partial": ({"rope_parameters": PARTIAL}, ()),
    },
    "gpt_neox": {
        "partial": ({"rope_parameters": PARTIAL}, ()),
        "linear": ({"rope_parameters": {**PARTIAL, "rope_type": "linear", "factor": 4.0}}, ()),
    },
    "gpt_neo": {"deeper": ({"num_layers": 3, "attention_types": [[["global", "local", "local"], 1]]}, ())},
    "opt": {"projected": ({"word_embed_proj_dim": 6, "do_layer_norm_before": False}, ())},
    "mistral": {"no_window": ({"sliding_window": None}, ())},
    "qwen2": {
        "window_from_a_layer_on": (
            {"num_hidden_layers": 3},
            (),
        ),
    },
    "longformer": {
        "window_by_layer": ({"num_hidden_layers": 4, "attention_window": [4, 8, 8, 4]}, ()),
        "attention_window": ({"attention_window": 8}, ()),
    },
    "electra": {"generator_as_wide": ({"embedding_size": 8}, ())},
    "deberta": {
        "one_product": ({"pos_att_type": ["p2c"]}, ()),
        "by_length": ({"max_relative_positions": -1}, ()),
    },
    "deberta-v2": {
        "convolution": ({"conv_kernel_size": 3, "conv_act": "gelu"}, ()),
        "grouped_convolution": ({"conv_kernel_size": 3, "conv_groups": 2}, ()),
        # an embedding for each distance, matrices of its own, and one product, as in version 1
        "one_product": ({"position_buckets": -1, "share_att_key": False, "pos_att_type": ["p2c"]}, ()),
    },
    "bert": {"null_pad": ({"pad_token_id": None}, ())},
    "gemma3_text": {
        "stretched": (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                }
            },
            (),
        ),
        "by_pattern": ({"layer_types": None, "sliding_window_pattern": 2}, ()),
        "capped": ({"final_logit_softcapping": 4.0}, ()),
    },
    "gemma2": {"all_sliding": ({"layer_types": ["sliding_attention"] * 2}, ())},
    "t5gemma": {
        "stacks_apart": (
            {
                "encoder.num_hidden_layers": 3,
                "encoder.num_attention_heads": 4,
                "encoder.head_dim": 4,
                "encoder.intermediate_size": 10,
                "encoder.sliding_window": 1,
            },
            (),
        ),
    },
    "modernbert": {
        "one_base": (
            {"rope_parameters": {name: {"rope_type": "default", "rope_theta": 50.0} for name in TYPED}},
            (),
        ),
        "stretched": (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}
                }
            },
            (),
        ),
        "all_sliding": ({"layer_types": ["sliding_attention"] * 3}, ()),
    },
}
OTHERS = {  # what is tried in place of a value that is no number, the first that differs
    "activation_function": ["relu", "gelu"],
    "hidden_act": ["relu"],
    "activation": ["relu"],
    "afn": ["relu"],
    "feed_forward_proj": ["gated-gelu", "relu"],
    "dense_act_fn": ["silu"],
    "relative_attention_max_distance": [3],
    "n_inner": [20],
    "head_dim": [6, 8],
    "intermediate_size": [20],
    "summary_type": ["last"],
    "summary_activation": ["tanh"],
    "summary_proj_to_labels": [False],
    "classifier_dropout": [0.5],
    "pad_token_id": [3],
    "bos_token_id": [4],
    "eos_token_id": [5],
    "sep_token_id": [6],
    "decoder_start_token_id": [7],
    "forced_eos_token_id": [8],
    "problem_type": ["regression"],
    "position_embedding_type": ["relative_key"],
    "attention_types": [[[["local", "global"], 1]]],
    "attention_layers": [["local", "global"]],
    "layer_types": [[*reversed(TYPED)], [*TYPED], [*TYPED, "full_attention"]],
    "rope_parameters": [{"rope_type": "linear", **ROPE}],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "label2id": [{"a": 0, "b": 1, "c": 2}],
    "attention_window": [[2, 4], 2],
    "local_attention": [2],
    "classifier_pooling": ["mean"],
    "hidden_activation": ["silu"],
    "classifier_activation": ["relu"],
    "query_pre_attn_scalar": [30],
    "use_bidirectional_attention": [True],
    "sliding_window": [None, 2],
    "num_ln_in_parallel_attn": [1],
    "quantization_config": [{"bits": 4}],
    "norm_rel_ebd": ["none"],
    "pos_att_type": [["c2p"]],
    "position_buckets": [-1],
    "conv_kernel_size": [3],
    "router_dtype": ["float16"],
    "pooler_hidden_act": ["relu"],
    "embedding_size": [6],
    "attn_type": ["uni"],
    "ff_activation": ["relu"],
    "clamp_len": [2],
    "reuse_len": [4],
    "n_layers": [3],  # in an example of the source, and nowhere else
}
# Types whose base model also writes, since no checkpoint of theirs lies beside; encoders do not write.
WRITERS = ("mt5", "mbart", "pegasus", "falcon", "phi3", "gemma3_text", "olmo2", "granite")
NEW_TOKENS, START = 6, 2  # how many tokens they write, and which their decoder reads first
UNTRIED = ("transformers_version", "architectures", "dtype", "model_type")  # of the file and not of the model
CALLS = {"output_attentions", "output_hidden_states", "return_dict", "use_cache", "_attn_implementation"}
CALLS |= {"gradient_checkpointing"}
# Gemma 3's source has its models with pictures too.
CALLS |= {"text_config", "vision_config", "mm_tokens_per_image", "image_token_id"}
INPUTS = np.array([[7, 9, 12, 6, 8, 15, 10, 11], [13, 8, 6, 14, 17, 9, 18, 16]])
TARGETS = INPUTS[::-1, :5].copy()
EFFECTS = ("computes", "shapes")  # of which the models are kept


def build(kind, changed, apart=()):
    """A model of the class ``kind`` with drawn weights; its modules ``apart`` have such of their own."""
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**copy.deepcopy(nested(changed)))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    for module in apart:
        layer = model.get_submodule(module)
        layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        fixed = getattr(config, "sinusoidal_pos_embds", False) and "position_embeddings" in name
        if parameter.requires_grad and not fixed or name.endswith("final_logits_bias"):
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(drawn(name, tuple(parameter.shape))))
    return model


def outputs(model):
    ids = torch.from_numpy(INPUTS)
    both = model.config.is_encoder_decoder
    decoder = {"decoder_input_ids": torch.from_numpy(TARGETS)} if both else {}
    with torch.no_grad():
        return model(input_ids=ids, **decoder).logits.numpy()


def written(model):
    """The tokens that a model writes after INPUTS, of which each is the most likely."""
    both = model.config.is_encoder_decoder
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"bos_token_id": None, "forced_eos_token_id": None}
    settings |= {"decoder_start_token_id": START} if both else {}
    model.generation_config = transformers.GenerationConfig(**settings)
    with torch.no_grad():
        return model.generate(torch.from_numpy(INPUTS)).numpy()[:, -NEW_TOKENS:]


def saved(model):
    """(config.json, tensors)"""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text()), load_file(
            Path(folder) / "model.safetensors"
        )


def nested(fields):
    """The fields as a config.json has them, those of a section together."""
    found = {}
    for name, value in fields.items():
        section, _, field = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[field] = value
    return found


def flat(config, sections):
    """The fields of a config.json by name, those of a section as in "encoder.hidden_size"."""
    parts = [(f"{section}.", config[section]) for section in sections]
    outside = {name: value for name, value in config.items() if name not in sections}
    return outside | {f"{prefix}{name}": value for prefix, part in parts for name, value in part.items()}


def sections_of(kind):
    """The fields of a class's config that hold configs of its stacks."""
    return tuple(getattr(transformers, kind).config_class.sub_configs)


def others(name, value):
    """What is tried in place of a value, best first."""
    name = name.rpartition(".")[2]
    if name in OTHERS:
        return [other for other in OTHERS[name] if other != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value or 2]
    return [min(value + 0.3, 0.9)] if isinstance(value, float) else []


def fields_of(kind, config):
    """``{field: its value}``: of those that are written and those that the source of the model reads."""
    model_class = getattr(transformers, kind)
    source = Path(inspect.getfile(model_class)).read_text()
    read = {
        *re.findall(r"config\.(\w+)", source),
        *re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source),
    }
    read -= CALLS | {*model_class.config_class.attribute_map}
    own, sections = model_class.config_class(), sections_of(kind)
    parts = {f"{section}.": getattr(own, section) for section in sections}
    found = {
        f"{prefix}{name}": getattr(part, name, None)
        for prefix, part in ({"": own} | parts).items()
        for name in sorted({*read} - {*sections})
        if not callable(getattr(part, name, 0)) and (not sections or hasattr(part, name))
    }
    return found | flat(config, sections)


def effect(kind, sizes, name, new, due):
    """(what the change does, the changed model)"""
    (config, tensors), logits = due
    try:
        model = build(kind, {**sizes, name: new})
        theirs, changed = saved(model)
        if flat(theirs, sections_of(kind)).get(name) != new:
            return "kept", model
        if {k: t.shape for k, t in changed.items()} != {k: t.shape for k, t in tensors.items()}:
            outputs(model)
            return "shapes", model
        found = outputs(model)
        alike = found.shape == logits.shape and np.allclose(found, logits, atol=2e-5)  # of 20 or so: rounding
        return "idle" if alike else "computes", model
    except Exception as error:  # whatever the reference has against it
        print(f"  {kind} {name}={new!r}: {type(error).__name__} {str(error).splitlines()[0]:.80}")
        return "refused", None


def walk(kind, sizes):
    """``({field: default, what was tried and its effect}, {name: changed model})``."""
    base = build(kind, sizes)
    due = saved(base), outputs(base)
    fields, models = {}, {"base": base}
    for name, value in fields_of(kind, due[0][0]).items():
        fields[name] = {"default": value}
        for new in [] if name in UNTRIED else others(name, value):
            found, model = effect(kind, sizes, name, new, due)
            if "effect" not in fields[name] or found in (*EFFECTS, "idle"):
                fields[name] |= {"tried": new, "effect": found}
            if found in EFFECTS:
                models[name] = model
                break
    return fields, models


def changes(new, old):
    """What of ``new`` differs; None: it is gone."""
    return {key: new.get(key) for key in [*new, *(old.keys() - new)] if new.get(key) != old.get(key)}


def main():
    fields, variants, arrays = {}, {}, {}
    asked = sys.argv[1:] or list(TYPES)
    if sys.argv[1:]:
        fields, variants = (
            json.loads((HERE / f"{name}.json").read_text()) for name in ("fields", "variants")
        )
        arrays = dict(np.load(HERE / "variants.npz"))
        for table in (fields, variants, arrays):
            for key in [key for key in table if key.partition("/")[0] in asked]:
                del table[key]
    for family, (kind, sizes) in TYPES.items():
        if family not in asked:
            continue
        found, models = walk(kind, sizes)
        fields |= {f"{family}/{field}": told for field, told in found.items()}
        models |= {
            name: build(kind, sizes | new, apart) for name, (new, apart) in SHAPES.get(family, {}).items()
        }
        base = None
        for name, model in models.items():
            config, tensors = saved(model)
            shapes = {key: [*tensor.shape] for key, tensor in tensors.items()}
            base = base or (config, shapes)
            both = {"config": (config, base[0]), "tensors": (shapes, base[1])}
            variants[f"{family}/{name}"] = {
                part: new if name == "base" else changes(new, old) for part, (new, old) in both.items()
            }
            arrays[f"{family}/{name}/logits"] = outputs(model)
            if name == "base" and family in WRITERS:
                arrays[f"{family}/base/written"] = written(model)
            fixed = {k: t for k, t in tensors.items() if not np.array_equal(t, drawn(k, t.shape))}
            arrays |= {f"{family}/{name}/{key}": tensor for key, tensor in fixed.items()}
    for name, table in (("fields", fields), ("variants", variants)):
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
        (HERE / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    np.savez_compressed(HERE / "variants.npz", **arrays)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    main()
