"""Time and memory of a training step, beside the same model in torch.

    .venv/bin/python tests/bench/training.py --torch TORCH_PYTHON       its Python has torch and transformers
    .venv/bin/python tests/bench/training.py --torch TORCH_PYTHON --shapes t5 gpt --cores 0

Ours is the step of `lm run` in the environment that it sets for itself, with packing masks, z-loss, accuracy
and the norm of the gradient. Torch does none of these; it has its fused AdamW and attention (sdpa). It runs
as it comes, with our memory settings, and with these and what a user who cares for speed adds to that model:
torch.compile, logits of the masked positions alone, or autocast to bfloat16. So do we: bfloat16, and the loss
of the GPT in chunks of a row. Both sides have the same shapes, rates of dropout, optimiser and threads; but
for what is said to be bfloat16, all is float32.
"""

import argparse
import os
import sys

from sides import Side, Step, compare, describe, serve

SHAPES = {  # rows, tokens that are read, tokens that are predicted, pieces
    "t5": (16, 256, 64, 8_192),  # 2 + 2 layers of width 256; transformers' T5
    "bert": (16, 128, 128, 8_192),  # 4 layers of width 256; transformers' BERT
    "gpt": (8, 256, 256, 50_304),  # 4 layers of width 256; the model of nanoGPT
    "lstm": (32, 128, 128, 8_192),  # 2 layers of 512, width 256; torch's fused LSTM
    "lstm-mini": (32, 64, 64, 2_176),  # history/lstm at mini
}
LSTMS = {"lstm": (2, 256, 512), "lstm-mini": (1, 128, 244)}  # layers, width, state
# What a user who cares for speed adds to the model of torch, and to ours
REMEDIES: dict[str, list[tuple[str, ...]]] = {
    "t5": [("bfloat16",)],
    "bert": [("masked-logits",), ("masked-logits", "bfloat16")],
    "gpt": [("compile",), ("compile", "bfloat16")],
}
OUR_REMEDIES: dict[str, list[tuple[str, ...]]] = {
    "t5": [("bfloat16",)],
    "bert": [("bfloat16",)],
    "gpt": [("chunks",), ("chunks", "bfloat16")],
}
STEPS, BLOCKS = 3, 9


def our_settings(shape: str, remedies):
    """Return the model's settings, and its loss."""
    from experiments.study.registry import build
    from lm.config.base import changes
    from lm.nn.presets import PRESETS
    from lm.train.losses import language_model, masked_lm

    *_, length, pieces = SHAPES[shape]
    dtype, chunks = "bfloat16" if "bfloat16" in remedies else "float32", 4 if "chunks" in remedies else 1
    common = {"vocab_size": pieces, "compile.layers": "unroll", "dtype": dtype, "compile.loss_chunks": chunks}
    wide = common | {"d_model": 256, "mlp.d_ff": 1_024, "attention.d_kv": 64, "attention.num_heads": 4}
    four = wide | {"num_encoder_layers": 4, "num_decoder_layers": 4, "positions.max_length": length}
    if shape == "t5":
        two = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.1}
        return changes(PRESETS["t5-small"], wide | two), language_model
    if shape == "bert":
        return changes(PRESETS["bert-base"], {**four, "dropout": 0.1, "heads": ()}), masked_lm
    if shape == "gpt":
        return changes(PRESETS["gpt2"], {**four, "dropout": 0.0, "mlp.activation": "gelu"}), language_model
    layers, width, state = LSTMS[shape]
    sizes = {"num_decoder_layers": layers, "d_model": width, "mixer.width": state, "mlp.activation": "none"}
    return changes(build("history/lstm", "mini").model, common | sizes), language_model


def our_batch(rows: int, read: int, predicted: int, pieces: int, model):
    """Return rows of one segment each, with all features of a batch of `lm run`."""
    import numpy as np

    from lm.batch import Batch

    draw = np.random.default_rng(0)
    batch, lengths = {}, {"encoder": read, "decoder": predicted}
    for side in [side for side in lengths if getattr(model, f"has_{side}")]:
        shape, ids = (
            (rows, lengths[side]),
            draw.integers(3, pieces - 200, (rows, lengths[side] + 1), np.int32),
        )
        batch[f"{side}_input_tokens"] = ids[:, :-1]
        batch[f"{side}_segment_ids"] = np.ones(shape, np.int32)
        batch[f"{side}_positions"] = np.tile(np.arange(shape[1], dtype=np.int32), (rows, 1))
    weights = draw.random(shape) < (0.15 if model.architecture == "encoder" else 1.0)
    batch |= {f"{side}_target_tokens": ids[:, 1:], f"{side}_loss_weights": weights.astype(np.float32)}
    return Batch.from_features(batch | {f"{side}_content": weights})


def our_step(shape: str, *remedies: str) -> Step:
    """Return a function that does a step and waits for it."""
    import jax

    from lm import sharding
    from lm.config.mesh import MeshConfig
    from lm.config.training import OptimizerConfig
    from lm.train.step import StepSpec, build

    model, loss = our_settings(shape, remedies)
    optimizer = OptimizerConfig("adamw", 1e-3, "constant", weight_decay=0.01)
    steps = build(StepSpec(model, optimizer, loss), sharding.make_mesh(MeshConfig()))
    batch = steps.shard_batch(our_batch(*SHAPES[shape], model))
    trained, train_step = steps.initial_state(0), steps.seeded_train_step(0)

    def step():
        nonlocal trained
        trained, metrics = train_step(trained, batch)
        jax.block_until_ready(metrics["loss"])

    return step


def torch_model(shape: str, ids, remedies):
    """Return the model, and a function of no arguments that returns its loss."""
    import torch
    import transformers
    from torch import nn

    rows, read, predicted, pieces = SHAPES[shape]
    inputs, targets = ids(rows, read), ids(rows, predicted)
    if shape == "t5":
        sizes = {"d_model": 256, "d_ff": 1_024, "d_kv": 64, "num_heads": 4, "num_layers": 2}
        config = transformers.T5Config(
            vocab_size=pieces, dropout_rate=0.1, use_cache=False, decoder_start_token_id=0, **sizes
        )
        model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        return model, lambda: model(input_ids=inputs, labels=targets).loss
    if shape == "bert":
        sizes = {"hidden_size": 256, "intermediate_size": 1_024, "num_attention_heads": 4}
        config = transformers.BertConfig(
            vocab_size=pieces, num_hidden_layers=4, max_position_embeddings=predicted, **sizes
        )
        model = transformers.BertForMaskedLM._from_config(config, attn_implementation="sdpa")
        targets[ids(rows, predicted) > 0.15 * pieces] = -100
        if "masked-logits" not in remedies:
            return model, lambda: model(input_ids=inputs, labels=targets).loss
        is_masked = targets != -100

        def masked_loss():
            states = model.bert(input_ids=inputs).last_hidden_state
            return nn.functional.cross_entropy(model.cls(states[is_masked]), targets[is_masked])

        return model, masked_loss
    model = torch_decoder(shape)
    called = torch.compile(model) if "compile" in remedies else model
    return model, lambda: nn.functional.cross_entropy(called(inputs).flatten(0, 1), targets.flatten())


def torch_decoder(shape: str):
    """Return nanoGPT's model, or a stack of LSTMs with residuals: logits of ids, tied to the embedding."""
    from torch import nn

    class Causal(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
            mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

    class Recurrent(nn.Module):
        def __init__(self, width, state):
            super().__init__()
            self.lstm, self.out = nn.LSTM(width, state, batch_first=True), nn.Linear(state, width)

        def forward(self, x):
            return self.out(self.lstm(x)[0])

    class Decoder(nn.Module):
        def __init__(self, pieces, length, width, sublayers):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(pieces, width), nn.Embedding(length, width)
            self.sublayers, self.norm = nn.ModuleList(sublayers), nn.LayerNorm(width)
            nn.init.normal_(self.tokens.weight, std=0.02)

        def forward(self, ids):
            x = self.tokens(ids)
            if shape == "gpt":
                x = x + self.positions.weight
            for sublayer in self.sublayers:
                x = x + sublayer(x)
            return self.norm(x) @ self.tokens.weight.T

    def sublayer(width, *layers):
        return nn.Sequential(nn.LayerNorm(width), *layers)

    *_, length, pieces = SHAPES[shape]
    if shape in LSTMS:
        layers, width, state = LSTMS[shape]
        return Decoder(pieces, 1, width, [sublayer(width, Recurrent(width, state)) for _ in range(layers)])
    mlps = [(nn.Linear(256, 1_024), nn.GELU(), nn.Linear(1_024, 256)) for _ in range(4)]
    blocks = [[sublayer(256, Causal(256, 4)), sublayer(256, *mlp)] for mlp in mlps]
    return Decoder(pieces, length, 256, sum(blocks, []))


def torch_step(shape: str, *remedies: str) -> Step:
    """Return the same as ``our_step``, by torch."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pieces = SHAPES[shape][-1]
    model, loss_of = torch_model(shape, lambda *size: torch.randint(3, pieces - 200, size), remedies)
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.01, "fused": True}
    optimizer = torch.optim.AdamW(model.train().parameters(), **settings)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in remedies):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--cores", type=int, nargs="+", help="both sides are held to these; all by default")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    options = parser.parse_args()
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    from experiments.processes.memory import tunables

    kept = {"GLIBC_TUNABLES": tunables()}
    for shape in options.shapes:
        ours, theirs = [sys.executable, __file__, "lm", shape], [options.torch, __file__, "torch", shape]
        sides = [Side("lm", ours, kept), Side("torch", theirs), Side("torch, memory kept", theirs, kept)]
        for name, command, remedies in (("torch, memory kept", theirs, REMEDIES), ("lm", ours, OUR_REMEDIES)):
            every = remedies.get(shape, ())
            sides += [Side(", ".join((name, *each)), [*command, *each], kept) for each in every]
        if shape == options.shapes[0]:
            describe(sides)
        compare(shape, sides, options.blocks)


if __name__ == "__main__":
    makers = {"lm": our_step, "torch": torch_step}
    if sys.argv[1:] and sys.argv[1] in makers:
        serve(lambda: makers[sys.argv[1]](*sys.argv[2:]), STEPS)
    else:
        main()
