"""Walk the fields of every config.json, and record what the reference computes where one is changed.

``python make_variants.py`` needs torch and transformers 5. Of each type a tiny model is saved and each of its
fields is changed in turn, the weights being the same: ``fields.json`` holds the fields that are written, and
whether a change shows in the outputs ("computes"), does not ("idle"), or cannot be made with these weights or
at all ("untried"). ``variants.json`` and ``variants.npz`` hold configs, weights (by name, float16 where that
is exact) and logits of the models in which a change shows, and of the shapes in ``SHAPES``.
"""

import copy
import json
import logging
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
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
TYPES = {  # class, the sizes of its tiny model
    "t5": ("T5ForConditionalGeneration", T5),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "bart": ("BartForConditionalGeneration", SIDES),
    "marian": ("MarianMTModel", SIDES | {"decoder_vocab_size": 20}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gpt_neox": ("GPTNeoXForCausalLM", BERT | {"hidden_size": 16, "bos_token_id": 1}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 20, "hidden_size": 8, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", BERT | {"num_key_value_heads": 1}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 2}),
    "gpt_neo": ("GPTNeoForCausalLM", NEO),
    "opt": ("OPTForCausalLM", OPT),
    "mistral": ("MistralForCausalLM", BERT | {"num_key_value_heads": 1, "sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", BERT | {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", BERT | {"num_key_value_heads": 1, "head_dim": 6}),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", BERT),
    "longformer": ("LongformerForMaskedLM", BERT | {"attention_window": 4}),
    "albert": ("AlbertForMaskedLM", BERT | {"embedding_size": 6}),
    "electra": ("ElectraForMaskedLM", BERT | {"embedding_size": 6}),
}
APART = {
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 14,
}
# type: name: (what is changed, the tensors that are drawn anew though the reference repeats another there)
SHAPES = {
    "t5": {
        f"{'tied' if tied else 'own'}_{'scaled' if scaled else 'unscaled'}": (
            {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": scaled},
            () if tied else ("lm_head",),
        )
        for tied in (True, False)
        for scaled in (True, False)
    },
    "umt5": {"own_scaled": ({}, ("lm_head",))},
    "bart": {"sides_apart": (APART, ())},
    "marian": {"sides_apart": (APART, ())},
    "llama": {
        "both_biases": ({"attention_bias": True, "mlp_bias": True}, ()),
    },
    "opt": {"projected": ({"word_embed_proj_dim": 6, "do_layer_norm_before": False}, ())},
    "mistral": {"no_window": ({"sliding_window": None}, ())},
    "qwen2": {
        "window_from_a_layer_on": (
            {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
            (),
        ),
    },
    "longformer": {"window_by_layer": ({"num_hidden_layers": 4, "attention_window": [4, 8, 8, 4]}, ())},
    "electra": {"generator_as_wide": ({"embedding_size": 8}, ())},
    "bert": {"null_pad": ({"pad_token_id": None}, ())},
}
OTHERS = {  # what is tried where a field is no number; of numbers another is taken
    "activation_function": "relu",
    "hidden_act": "relu",
    "activation": "relu",
    "afn": "relu",
    "feed_forward_proj": "gated-gelu",
    "dense_act_fn": "silu",
    "n_inner": 20,
    "summary_type": "last",
    "summary_activation": "tanh",
    "classifier_dropout": 0.5,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": 5,
    "sep_token_id": 6,
    "problem_type": "regression",
    "attention_types": [[["local", "global"], 1]],
    "attention_layers": ["local", "global"],
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
}
UNTRIED = ("transformers_version", "architectures", "dtype", "model_type")  # of the file and not of the model
INPUTS = np.array([[7, 9, 12, 6, 8, 15, 10, 11], [13, 8, 6, 14, 17, 9, 18, 16]])
TARGETS = INPUTS[::-1, :5].copy()


def build(kind, changed, apart=()):
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**changed)
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    for module in apart:
        layer = model.get_submodule(module)
        layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        fixed = getattr(config, "sinusoidal_pos_embds", False) and "position_embeddings" in name
        if parameter.requires_grad and not fixed or name.endswith("final_logits_bias"):
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            drawn = rng.standard_normal(tuple(parameter.shape)) * (0.6 if parameter.ndim > 1 else 0.3)
            drawn += "norm" in name.lower() and name.endswith("weight")
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(drawn.astype(np.float16).astype(np.float32)))
    return model


def outputs(model):
    ids = torch.from_numpy(INPUTS)
    both = model.config.is_encoder_decoder
    decoder = {"decoder_input_ids": torch.from_numpy(TARGETS)} if both else {}
    with torch.no_grad():
        return model(input_ids=ids, **decoder).logits.numpy()


def saved(model):
    """(config.json, tensors)"""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return json.loads((Path(folder) / "config.json").read_text()), load_file(
            Path(folder) / "model.safetensors"
        )


def other(name, value):
    if name in OTHERS:
        return copy.deepcopy(OTHERS[name])
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if isinstance(value, int) else min(value + 0.3, 0.9)
    return None


def walk(kind, sizes):
    """``({field: what a change of it does}, {field: the changed model})``, of fields as they are written."""
    base = build(kind, sizes)
    config, tensors = saved(base)
    due, found, models = outputs(base), {}, {}
    for name, value in config.items():
        found[name], new = "untried", other(name, value)
        if name in UNTRIED or new is None:
            continue
        try:
            model = build(kind, {**sizes, name: new})
            if saved(model)[0].get(name) != new:  # the reference has it as it was, whatever is asked for
                continue
            shapes = {key: tensor.shape for key, tensor in saved(model)[1].items()}
            same = shapes == {key: tensor.shape for key, tensor in tensors.items()}
            logits = outputs(model)
        except Exception as error:  # whatever the reference has against it
            print(f"  {kind} {name}={new!r}: {type(error).__name__} {str(error).splitlines()[0]:.80}")
            continue
        if same:
            alike = logits.shape == due.shape and np.allclose(logits, due, atol=1e-6)
            found[name] = "idle" if alike else "computes"
        if isinstance(value, bool) and found[name] != "idle":
            models[f"{name}_{str(new).lower()}"] = model
    return found, models


def kept(name, model, configs, arrays):
    config, tensors = saved(model)
    configs[name] = config
    for key, tensor in tensors.items():
        half = tensor.astype(np.float16)
        arrays[f"{name}/{key}"] = half if np.array_equal(half.astype(tensor.dtype), tensor) else tensor
    arrays[f"{name}/logits"] = outputs(model)


def main():
    fields, configs, arrays = {}, {}, {}
    for family, (kind, sizes) in TYPES.items():
        fields[family], models = walk(kind, sizes)
        models |= {
            name: build(kind, sizes | new, apart) for name, (new, apart) in SHAPES.get(family, {}).items()
        }
        for name, model in models.items():
            kept(f"{family}/{name}", model, configs, arrays)
    (HERE / "fields.json").write_text(json.dumps(fields, indent=1) + "\n")
    (HERE / "variants.json").write_text(json.dumps(configs, indent=1) + "\n")
    np.savez_compressed(HERE / "variants.npz", **arrays)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    main()
