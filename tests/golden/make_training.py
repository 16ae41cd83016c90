"""Make training.npz anew: ten steps of training published checkpoints with torch and transformers.

    python make_training.py

Needs torch and transformers 5. Read: the checkpoints here and the inputs in their golden.npz. Written, of
each model and optimiser: the loss before each step, and of every tensor after the last its norm and its
products with random vectors, which stand for all of it. No dropout; weights decay in matrices alone.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
MODELS = ("t5_v1_0", "bert", "gpt2", "llama_gqa")
STEPS, PRODUCTS = 10, 4
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-4}  # a gradient that is 0 but for rounding stays small
RATES = {"t5_v1_0": 1e-4}  # whose scores are not scaled: at 1e-3, ten steps make 5e-5 of rounding
RATE = 1e-3
DECAY = 0.01


def adamw(model, rate):
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, **ADAMW)


def adafactor(model, rate):
    how = {"scale_parameter": True, "relative_step": False, "warmup_init": False, "decay_rate": -0.8}
    return transformers.optimization.Adafactor(model.parameters(), lr=10 * rate, clip_threshold=1.0, **how)


OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor}


def products(name, array):
    """[1 + PRODUCTS]: the norm of a tensor, and its products with vectors that its name decides."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    flat = np.asarray(array, np.float64).ravel()
    return np.array([np.linalg.norm(flat), *(rng.standard_normal((PRODUCTS, flat.size)) @ flat)])


def main():
    found = {}
    for name in MODELS:
        meta = json.loads((HERE / name / "meta.json").read_text())
        with np.load(HERE / name / "golden.npz") as arrays:
            batch = {
                key[3:]: torch.from_numpy(arrays[key]).long() for key in arrays.files if key.startswith("in/")
            }
        for kind, make in OPTIMIZERS.items():
            if (name, kind) == ("gpt2", "adafactor"):  # of which it sees three matrices as one
                continue
            model = getattr(transformers, meta["class"]).from_pretrained(
                HERE / name, attn_implementation="eager", dtype=torch.float32
            )
            model.eval()
            optimizer, losses = make(model, RATES.get(name, RATE)), []
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = model(**batch).loss
                losses.append(float(loss.detach()))
                loss.backward()
                optimizer.step()
            found[f"{name}/{kind}/losses"] = np.array(losses)
            with torch.no_grad():
                tensors = {n: x.numpy() for n, x in model.state_dict().items()}
            kept = {n: x for n, x in tensors.items() if x.dtype == np.float32}
            for tensor, array in kept.items():
                found[f"{name}/{kind}/{tensor}"] = products(tensor, array)
            print(name, kind, losses[0], losses[-1])
    np.savez_compressed(HERE / "training.npz", **found)


if __name__ == "__main__":
    main()
