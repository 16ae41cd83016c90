"""Time of a training step of the LSTM language model, over that of the same model in torch.

    .venv/bin/python tests/bench/lstm_step.py TORCH_PYTHON     its Python has torch

Both sides are processes of their own that take turns, a block of steps each; the ratio is of neighbouring
blocks. The same shapes, float32, AdamW, gradients clipped; torch has its fused LSTM. Both have the memory
tunables that `lm run` sets for itself.
"""

import os
import subprocess
import sys
import time
from statistics import median

SHAPES = {  # rows, tokens, pieces, layers, width, state: those of history/lstm at mini, and a larger one
    "mini": (32, 64, 2_176, 1, 128, 244),
    "wide": (32, 128, 8_192, 2, 256, 512),
}
STEPS, BLOCKS = 20, 9


def jax_step(rows, tokens, pieces, layers, width, state):
    """A function that does a step and waits for it."""
    import jax
    import numpy as np

    from experiments.study.registry import build
    from lm import sharding
    from lm.train.step import StepSpec
    from lm.train.step import build as build_steps

    changes = {
        "model.vocab_size": pieces,
        "model.num_decoder_layers": layers,
        "model.d_model": width,
        "model.mixer_width": state,
        "model.mlp": "none",
        "pretraining.batch_size": rows,
    }
    row = build("history/lstm", "mini", changes)
    steps = build_steps(StepSpec(row.model, row.pretraining.optimizer), sharding.make_mesh(row.mesh))
    ids = np.random.default_rng(0).integers(3, pieces - 200, (rows, tokens + 1), np.int32)
    batch = steps.put(
        {
            "decoder_input_tokens": ids[:, :-1],
            "decoder_target_tokens": ids[:, 1:],
            "decoder_loss_weights": np.ones((rows, tokens), np.float32),
            "decoder_segment_ids": np.ones((rows, tokens), np.int32),
            "decoder_positions": np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
        }
    )
    trained, train_step = steps.init(0), steps.train_step(0)

    def step():
        nonlocal trained
        trained, metrics = train_step(trained, batch)
        jax.block_until_ready(metrics["loss"])

    return step


def torch_step(rows, tokens, pieces, layers, width, state):
    """As ``jax_step``: embedding, layers of norm, LSTM, projection and residual, norm, tied logits."""
    import torch
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    embedding = nn.Embedding(pieces, width)
    blocks = nn.ModuleList(
        nn.ModuleList([nn.LayerNorm(width), nn.LSTM(width, state, batch_first=True), nn.Linear(state, width)])
        for _ in range(layers)
    )
    final = nn.LayerNorm(width)
    parameters = [*embedding.parameters(), *blocks.parameters(), *final.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    ids = torch.randint(3, pieces - 200, (rows, tokens + 1))

    def step():
        x = embedding(ids[:, :-1])
        for norm, lstm, project in blocks:
            x = x + project(lstm(norm(x))[0])
        logits = final(x) @ embedding.weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


def answer(side, shape):
    """For each line that is read, the seconds of a step, over a block of them."""
    step = {"jax": jax_step, "torch": torch_step}[side](*SHAPES[shape])
    for _ in range(3):
        step()
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        print((time.perf_counter() - start) / STEPS, flush=True)


def main(torch_python):
    from experiments.processes.memory import TUNABLES

    text = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"GLIBC_TUNABLES": text}
    for shape in SHAPES:
        sides = {
            side: subprocess.Popen([python, __file__, side, shape], **options)
            for side, python in (("jax", sys.executable), ("torch", torch_python))
        }
        seconds = {side: [] for side in sides}
        for _ in range(BLOCKS):
            for side, process in sides.items():
                print(file=process.stdin, flush=True)
                seconds[side].append(float(process.stdout.readline()))
        for process in sides.values():
            process.stdin.close()
            process.wait()
        ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
        ours, theirs = (1e3 * median(times) for times in seconds.values())
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{shape}: {ours:.1f} ms here, {theirs:.1f} ms in torch, ratio {median(ratios):.2f} {spread}")


if __name__ == "__main__":
    answer(*sys.argv[1:]) if len(sys.argv) == 3 else main(*sys.argv[1:])
