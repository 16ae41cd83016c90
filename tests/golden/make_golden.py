"""Make the checkpoints here anew, and what the reference computes with them: ``python make_golden.py [NAME
...]``.

Needs torch and transformers 5. Read: each folder's config.json, and what its meta.json says of generation.
Written: model.safetensors with random weights (numpy, by seed and name), scaled so that every parameter shows
in the logits; golden.npz with inputs and outputs (CPU, float32, eager attention, no dropout); gradients and
losses in meta.json.
"""

import copy
import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
SPECS = {  # class, seed, options
    "t5_v1_0": ("T5ForConditionalGeneration", 101, {"long": 150, "lengths": (40, 21)}),
    "t5_v1_1": ("T5ForConditionalGeneration", 102, {}),
    "umt5": ("UMT5ForConditionalGeneration", 117, {"long": 40}),
    "switch": ("SwitchTransformersForConditionalGeneration", 131, {}),
    "bart": ("BartForConditionalGeneration", 103, {}),
    "marian_sinusoidal": ("MarianMTModel", 104, {}),
    "gpt2": ("GPT2LMHeadModel", 105, {"prefix": True}),
    "gpt_bigcode_mqa": ("GPTBigCodeForCausalLM", 106, {}),
    "llama_gqa": ("LlamaForCausalLM", 107, {"prefix": True}),
    "llama_mha_v4cfg": ("LlamaForCausalLM", 108, {"prefix": True}),
    "bloom_alibi": ("BloomForCausalLM", 109, {}),
    "gpt_neox_rotary": ("GPTNeoXForCausalLM", 110, {"prefix": True}),
    "openai_gpt": ("OpenAIGPTLMHeadModel", 118, {}),
    "gptj": ("GPTJForCausalLM", 119, {}),
    "gpt_neo": ("GPTNeoForCausalLM", 120, {}),
    "opt": ("OPTForCausalLM", 121, {}),
    "mistral": ("MistralForCausalLM", 122, {}),
    "mixtral": ("MixtralForCausalLM", 129, {}),
    "qwen2": ("Qwen2ForCausalLM", 123, {}),
    "qwen3": ("Qwen3ForCausalLM", 124, {}),
    "gemma": ("GemmaForCausalLM", 225, {}),
    "gemma2": ("Gemma2ForCausalLM", 209, {}),
    "t5gemma": ("T5GemmaForConditionalGeneration", 204, {"long": 40}),
    "modernbert": ("ModernBertForMaskedLM", 128, {}),
    "eurobert": ("EuroBertForMaskedLM", 132, {}),
    "bert": ("BertForPreTraining", 111, {}),
    "roberta": ("RobertaForMaskedLM", 112, {}),
    "albert": ("AlbertForMaskedLM", 113, {}),
    "electra_disc": ("ElectraForPreTraining", 114, {}),
    "distilbert": ("DistilBertForMaskedLM", 115, {}),
    "longformer": ("LongformerForMaskedLM", 116, {"length": 22, "global": [0, 5]}),
    "deberta_v2": ("DebertaV2ForMaskedLM", 130, {}),
    "xlnet": ("XLNetLMHeadModel", 131, {"left": True, "streams": True}),
}
HOOKS = {  # family: module whose output is recorded -> as what; "#" is the number of the layer
    "t5": {
        f"{s}coder.{m}": f"{s[:2]}c_{k}"
        for s in ("en", "de")
        for m, k in (("block.#", "block_#"), ("final_layer_norm", "final"))
    },
    "bart": {
        f"model.{s}coder.{m}": f"{s[:2]}c_{k}"
        for s in ("en", "de")
        for m, k in (("layers.#", "block_#"), ("layernorm_embedding", "embed"))
    },
    "gpt2": {"transformer.h.#": "block_#", "transformer.ln_f": "final"},
    "bloom": {
        "transformer.word_embeddings_layernorm": "embed",
        "transformer.h.#": "block_#",
        "transformer.ln_f": "final",
    },
    "llama": {"model.embed_tokens": "embed", "model.layers.#": "block_#", "model.norm.kind": "final"},
    "opt": {"model.decoder.layers.#": "block_#", "model.decoder.final_layer_norm": "final"},
    "gpt_neox": {"gpt_neox.layers.#": "block_#", "gpt_neox.final_layer_norm": "final"},
    "albert": {
        "albert.embeddings": "embed",
        "albert.encoder.embedding_hidden_mapping_in": "embed_projected",
        "albert.encoder.albert_layer_groups.0.albert_layers.0": "block",
    },
    "distilbert": {"distilbert.embeddings": "embed", "distilbert.transformer.layer.#": "block_#"},
    "gemma": {"model.layers.#": "block_#", "model.norm": "final"},
    "t5gemma": {
        f"model.{s}coder.{m}": f"{s[:2]}c_{k}"
        for s in ("en", "de")
        for m, k in (("layers.#", "block_#"), ("norm", "final"))
    },
    "modernbert": {"model.embeddings": "embed", "model.layers.#": "block_#", "model.final_norm": "final"},
}
HOOKS |= {
    "umt5": HOOKS["t5"],
    "switch_transformers": HOOKS["t5"],
    "marian": HOOKS["bart"],
    "gpt_bigcode": HOOKS["gpt2"],
    "openai-gpt": HOOKS["gpt2"],
    "gptj": HOOKS["gpt2"],
    "gpt_neo": HOOKS["gpt2"],
    "mistral": HOOKS["llama"],
    "mixtral": HOOKS["llama"],
    "qwen2": HOOKS["llama"],
    "qwen3": HOOKS["llama"],
    "eurobert": HOOKS["llama"],
    "gemma2": HOOKS["gemma"],
}
HOOKS |= {
    f: {f"{f}.embeddings": "embed", f"{f}.encoder.layer.#": "block_#"}
    for f in ("bert", "roberta", "electra", "longformer")
}
HOOKS |= {"deberta-v2": {"deberta.embeddings": "embed", "deberta.encoder.layer.#": "block_#"}}
T5_LIKE = ("t5", "umt5", "switch_transformers")
SCALED = ("umt5", "switch_transformers")  # whose states are scaled before the output, or so by default
HOOKS |= {"xlnet": {"transformer.word_embedding": "embed", "transformer.layer.#": "block_#"}}
LENGTH_FIRST = ("xlnet",)  # whose hidden states are [T,B,D]
ZERO_CENTERED = ("gemma", "gemma2", "t5gemma")  # whose norms multiply by 1 plus the weight
TABLES = ("embed", "wte", "wpe", "shared", "token_type", "lm_head", "decoder.weight")


def deviation(name, shape, family, config):
    """How large the random numbers of a matrix are."""
    t5, scaled = family in T5_LIKE, getattr(config, "scale_decoder_outputs", family in SCALED)
    if "relative_attention_bias" in name:
        return 1.0
    if any(table in name for table in TABLES) and "norm" not in name and "hidden_mapping" not in name:
        if family in ZERO_CENTERED:  # whose embeddings are multiplied by the root of their width
            return 0.3 / np.sqrt(shape[-1])
        if t5:
            return 0.3 if "shared" in name else 1.0 / np.sqrt(shape[-1])
        # or decoding would loop on one token
        strong = 4.0 if family == "bart" and "positions" in name else 1.1
        return (1.0 if "lm_head" in name or "embed_out" in name else strong) / np.sqrt(shape[-1])
    if t5 and name.endswith(".q.weight"):
        return 1.4 * (config.d_model * config.d_kv) ** -0.5
    gain = 1.2 if family in ("bart", "marian") else 1.3 if family == "t5" and scaled else 1.0
    gain = {"gemma": 1.2, "gemma2": 1.6, "t5gemma": 1.6}.get(family, gain)
    gain = 0.7 if "encoder_attn.out_proj" in name or "encoder_attn.v_proj" in name else gain
    return gain / np.sqrt(shape[0] if family in ("gpt2", "openai-gpt") and ".c_" in name else shape[-1])


def value(name, shape, family, config, seed):
    rng, low = np.random.default_rng([seed, zlib.crc32(name.encode())]), name.lower()
    noise, flat = rng.standard_normal(shape), len(shape) == 1
    norm = flat and any(k in low for k in ("layernorm", "layer_norm", ".ln_", "norm.", "_norm", "ln_f"))
    if norm and low.endswith("weight"):
        if family in ZERO_CENTERED:  # a larger last norm makes up for smaller embeddings
            return (2.0 if name in ("model.norm.weight", "model.decoder.norm.weight") else 0.0) + 0.2 * noise
        scaled = getattr(config, "scale_decoder_outputs", family in SCALED)
        return (3.5 if scaled and name == "decoder.final_layer_norm.weight" else 1.0) * (1.0 + 0.2 * noise)
    if flat or low.endswith("bias"):
        return (0.1 if norm or family in ("bart", "marian") else 0.2) * noise
    return deviation(low, shape, family, config) * noise


def fill(model, family, seed):
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("final_logits_bias")]
    for name, parameter in [*model.named_parameters(), *buffers]:  # those that are tied come once
        if parameter.requires_grad or buffers and name == buffers[0][0]:
            new = np.ascontiguousarray(value(name, tuple(parameter.shape), family, model.config, seed))
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(new))


def tokens(rng, vocabulary, lengths, width, pad, left=False):
    ids, mask = np.full((len(lengths), width), pad), np.zeros((len(lengths), width), np.int64)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if left else slice(0, length)
        ids[row, place], mask[row, place] = rng.integers(6, vocabulary, length), 1
    return ids, mask


def run(model, **inputs):
    with torch.no_grad():
        return model(**{name: torch.from_numpy(np.asarray(array)) for name, array in inputs.items()})


def logits(found):
    return (found.logits if "logits" in found else found.prediction_logits).numpy()


def forward(model, family, batch, store):
    def record(name):
        def hook(module, arguments, out):
            out = out if torch.is_tensor(out) else out[0]
            out = out.transpose(0, 1) if family in LENGTH_FIRST else out
            again = sum(key.split("#")[0] == f"hidden/{name}" for key in store)
            store[f"hidden/{name}" + (f"#{again}" if again else "")] = out.detach().numpy().copy()

        return hook

    for path, name in HOOKS[family].items():
        for layer in range(8):
            modules = dict(model.named_modules())
            if (layer == 0 or "#" in path) and path.replace("#", str(layer)) in modules:
                modules[path.replace("#", str(layer))].register_forward_hook(
                    record(name.replace("#", str(layer)))
                )
    store |= {f"in/{name}": array for name, array in batch.items()}
    found = run(model, **batch, output_attentions=True)
    for module in model.modules():
        module._forward_hooks.clear()
    for name in ("logits", "prediction_logits", "seq_relationship_logits", "loss"):
        if name in found:
            store[f"out/{name}"] = found[name].numpy()
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        store |= {f"attn/{name}_{layer}": map_.numpy() for layer, map_ in enumerate(found.get(name) or ())}


def generate(model, inputs, store, meta):
    settings = meta["gen"]
    pad, start = settings["pad_token_id"], settings["decoder_start_token_id"]
    common = {
        "max_new_tokens": settings["max_new_tokens"],
        "do_sample": False,
        "pad_token_id": pad,
        "return_dict_in_generate": True,
        "bos_token_id": None,
        "forced_eos_token_id": None,
    }
    common |= {} if start is None else {"decoder_start_token_id": start}
    first = inputs["input_ids"].shape[1] if start is None else 1

    def written(eos, **options):
        model.generation_config = transformers.GenerationConfig(**common, eos_token_id=eos, **options)
        inner = {name: torch.from_numpy(array) for name, array in inputs.items()}
        with torch.no_grad():
            return model.generate(**inner, generation_config=copy.deepcopy(model.generation_config))

    free = written(None, output_logits=True)
    store["gen/greedy_no_eos/sequences"] = free.sequences.numpy()
    store["gen/greedy_no_eos/logits"] = torch.stack(free.logits, 1).numpy()
    eos = settings["eos_token_id"]  # one that greedy and beam search do write
    store["gen/greedy/sequences"] = written(eos).sequences.numpy()
    for name, options in settings["beam"].items():
        found = written(eos, output_scores=True, **options)
        sequences = found.sequences.numpy().copy()
        for row in sequences:
            ends = np.flatnonzero(row[first:] == eos)
            row[first + ends[0] + 1 if len(ends) else len(row) :] = pad
        store[f"gen/{name}/sequences"], store[f"gen/{name}/scores"] = (
            sequences,
            found.sequences_scores.numpy(),
        )


def as_stored(name, gradient):
    """(name, array) of the tensors of a file that a parameter of transformers 5 holds fused."""
    module, _, fused = name.partition(".mlp.")
    experts = f"{module}.block_sparse_moe.experts"
    if fused == "gate.weight":
        yield f"{module}.block_sparse_moe.gate.weight", gradient
    elif fused == "experts.gate_up_proj":
        for expert, both in enumerate(gradient):
            for matrix, part in zip(("w1", "w3"), both.chunk(2), strict=True):
                yield f"{experts}.{expert}.{matrix}.weight", part
    elif fused == "experts.down_proj":
        yield from ((f"{experts}.{expert}.w2.weight", part) for expert, part in enumerate(gradient))
    else:
        yield name, gradient


def train(model, batch, meta):
    def fresh():
        new = copy.deepcopy(model).eval()
        for module in new.modules():  # or the row of padding would get no gradient
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None
        return new

    batch = {name: torch.from_numpy(array) for name, array in batch.items()}
    first = fresh()
    first(**batch).loss.backward()
    gradients = {n: p.grad.double() for n, p in first.named_parameters() if p.grad is not None}
    if model.config.model_type == "mixtral":
        gradients = dict(stored for name, x in gradients.items() for stored in as_stored(name, x))
    norms = {name: float(x.norm()) for name, x in gradients.items()}
    meta["grad_norms"], meta["global_grad_norm"] = norms, sum(norm**2 for norm in norms.values()) ** 0.5
    for name, make in (
        ("sgd_lr0.02", lambda p: torch.optim.SGD(p, lr=0.02)),
        (
            "adamw_lr1e-3_b0.9_0.999_eps1e-8_wd0.01",
            lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
        ),
    ):
        new, losses = fresh(), []
        optimizer = make([parameter for parameter in new.parameters() if parameter.requires_grad])
        for _ in range(6):
            optimizer.zero_grad()
            loss = new(**batch).loss
            losses.append(float(loss.detach()))
            loss.backward()
            if model.config.model_type == "switch_transformers":  # an expert that no token chose counts too
                for parameter in new.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            optimizer.step()
        meta.setdefault("loss_curves", {})[name] = losses


def sequences_to_sequences(model, rng, options, store, meta):
    config = model.config
    vocabulary, pad = config.vocab_size, config.pad_token_id
    start = meta["gen"]["decoder_start_token_id"]
    s, t = options.get("lengths", (19, 13))
    source, seen = tokens(rng, vocabulary, [s, s - 4, s // 2], s, pad)
    labels, targets = tokens(rng, vocabulary, [t, t - 5, t // 2 + 1], t, -100)
    shifted = np.pad(np.where(labels == -100, pad, labels)[:, :-1], ((0, 0), (1, 0)), constant_values=start)
    decoder = {"decoder_input_ids": shifted, "decoder_attention_mask": targets}
    batch = {"input_ids": source, "attention_mask": seen, **decoder, "labels": labels}
    forward(model, config.model_type, batch, store)
    if config.model_type in ("t5", "umt5", "t5gemma"):
        order = np.argsort(seen, axis=1, kind="stable")
        left = {name: np.take_along_axis(batch[name], order, 1) for name in ("input_ids", "attention_mask")}
        store |= {f"left_pad/{name}": array for name, array in left.items()}
        store["left_pad/logits"] = logits(run(model, **left, **decoder))
    if "long" in options:
        store["long/input_ids"], _ = tokens(rng, vocabulary, [options["long"]], options["long"], pad)
        store["long/enc_final"] = run(
            model.get_encoder(), input_ids=store["long/input_ids"]
        ).last_hidden_state.numpy()
    for k, (m, n) in enumerate([(7, 5), (4, 6), (6, 3)]):
        one, two = tokens(rng, vocabulary, [m], m, pad)[0], tokens(rng, vocabulary, [n], n, pad)[0]
        two[:, 0] = start
        store |= {f"pack/input_ids_{k}": one, f"pack/decoder_input_ids_{k}": two}
        store[f"pack/logits_{k}"] = logits(run(model, input_ids=one, decoder_input_ids=two))
    generate(model, {"input_ids": source, "attention_mask": seen}, store, meta)
    return batch


def causal(model, rng, options, store, meta):
    vocabulary, t = model.config.vocab_size, 17
    ids, mask = tokens(rng, vocabulary, [t, t - 3, t // 2], t, 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask == 1, ids, -100)}
    forward(model, model.config.model_type, batch, store)
    if "prefix" in options:
        prefix, places = np.array([5, 9, 1]), np.arange(t)
        sees = (places[None] <= places[:, None])[None] | (places < prefix[:, None, None])
        store["prefix_lm/input_ids"], _ = tokens(rng, vocabulary, [t] * 3, t, 0)
        store["prefix_lm/prefix_len"] = prefix
        mask = np.where(sees, 0.0, np.finfo(np.float32).min).astype(np.float32)[:, None]
        inputs = {"input_ids": store["prefix_lm/input_ids"], "position_ids": np.tile(places, (3, 1))}
        store["prefix_lm/logits"] = logits(run(model, attention_mask=mask, **inputs))
    for k, length in enumerate([7, 4, 6]):
        store[f"pack/input_ids_{k}"], _ = tokens(rng, vocabulary, [length], length, 0)
        store[f"pack/logits_{k}"] = logits(run(model, input_ids=store[f"pack/input_ids_{k}"]))
    if "gen" in meta:
        store["gen/input_ids"], store["gen/attention_mask"] = tokens(
            rng, vocabulary, [8, 5, 6], 8, 0, left=True
        )
        generate(model, {name: store[f"gen/{name}"] for name in ("input_ids", "attention_mask")}, store, meta)
    return batch


def encoder(model, rng, options, store, meta):
    vocabulary, pad, t = model.config.vocab_size, model.config.pad_token_id, options.get("length", 18)
    left = "left" in options
    ids, mask = tokens(rng, vocabulary, [t, t - 5, t // 2], t, pad, left)
    batch = {"input_ids": ids, "attention_mask": mask}
    if model.config.model_type in ("bert", "albert", "electra", "xlnet"):
        batch["token_type_ids"] = (np.arange(t) >= t // 3) * mask
    if "global" in options:
        batch["global_attention_mask"] = (
            np.isin(np.arange(t), options["global"])[None].repeat(3, 0).astype(np.int64)
        )
    if model.config.model_type == "electra":
        batch["labels"] = (rng.random(ids.shape) < 0.3).astype(np.int64)
    else:
        chosen = (rng.random(ids.shape) < 0.3) & (mask == 1)
        chosen[:, -1 if left else 1] = True
        batch["labels"] = np.where(chosen, rng.integers(6, vocabulary, ids.shape), -100)
    if model.config.model_type == "bert":
        batch["next_sentence_label"] = np.array([0, 1, 1])
    forward(model, model.config.model_type, batch, store)
    for k, length in enumerate([7, 5]):
        store[f"pack/input_ids_{k}"], _ = tokens(rng, vocabulary, [length], length, pad)
        store[f"pack/logits_{k}"] = logits(run(model, input_ids=store[f"pack/input_ids_{k}"]))
    if "streams" in options:
        two_streams(model, rng, batch, store)
    return batch


def two_streams(model, rng, batch, store):
    """Records what the query stream predicts of four tokens of each row, in a random order."""
    mask, rows = batch["attention_mask"], len(batch["attention_mask"])
    order = np.zeros(mask.shape, np.int64)
    for row in range(rows):
        order[row, rng.permutation(np.flatnonzero(mask[row]))[:4]] = np.arange(1, 5)
    hidden = (order[:, None, :] > 0) & (order[:, None, :] >= order[:, :, None])
    targets = np.stack([np.argmax(order == step, axis=1) for step in range(1, 5)], axis=1)
    mapping = np.zeros((rows, 4, mask.shape[1]), np.float32)
    np.put_along_axis(mapping, targets[:, :, None], 1.0, axis=2)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    found = run(model, **inputs, perm_mask=hidden.astype(np.float32), target_mapping=mapping)
    store |= {"query/order": order, "query/logits": found.logits.numpy()}


def make(name, out):
    kind, seed, options = SPECS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class.from_pretrained(HERE / name)
    config._attn_implementation = "eager"
    model, meta = model_class(config), json.loads((HERE / name / "meta.json").read_text())
    if name == "t5_v1_1":  # transformers 5 ties what the published models do not
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    for path, parameter in model.eval().named_parameters():
        if config.model_type == "marian" and "embed_positions" in path:
            parameter.requires_grad_(False)
    fill(model, config.model_type, seed)
    store, rng = {}, np.random.default_rng(seed + 1)
    causes = "CausalLM" in kind or "LMHead" in kind
    causes = causes and config.model_type != "xlnet"
    record = sequences_to_sequences if config.is_encoder_decoder else causal if causes else encoder
    batch = record(model, rng, options, store, meta)
    train(model, batch, meta)
    (out / name).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (out / name / "model.safetensors").write_bytes((Path(folder) / "model.safetensors").read_bytes())
    store = {
        key: array.astype(np.int32) if array.dtype == np.int64 else array for key, array in store.items()
    }
    np.savez_compressed(out / name / "golden.npz", **store)
    (out / name / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[1:] or SPECS:
        make(name, HERE)
