"""Time and memory of writing texts, beside `generate` of transformers.

    .venv/bin/python tests/bench/decoding.py --torch TORCH_PYTHON       its Python has torch and transformers
    .venv/bin/python tests/bench/decoding.py --torch TORCH_PYTHON --shapes t5-greedy-1 --cores 0

Weights are random, of the published sizes; every row writes to its end. Both sides have the same rows,
lengths and threads. Transformers runs as it comes, with our memory settings, and with these and weights in
bfloat16; but for that, all is float32.
"""

import argparse
import os
import sys

from sides import Side, Step, compare, describe, serve

SHAPES = {  # size, rows, beams, tokens that are read, tokens that are written
    "t5-greedy-1": ("t5-small", 1, 1, 64, 64),
    "t5-greedy-16": ("t5-small", 16, 1, 64, 64),
    "t5-beams-1": ("t5-small", 1, 4, 64, 64),
    "t5-beams-16": ("t5-small", 16, 4, 64, 64),
    "gpt2-greedy-1": ("gpt2", 1, 1, 32, 64),
    "gpt2-long-1": ("gpt2", 1, 1, 512, 128),
}
BLOCKS = 7


def our_call(shape: str) -> Step:
    """Return a function that writes the answers and waits for them."""
    from dataclasses import replace

    import jax
    import numpy as np
    from flax import nnx

    from lm import batch
    from lm.config.decoding import Decoding
    from lm.evaluate.generate import beam_search, decode
    from lm.nn.presets import PRESETS
    from lm.nn.transformer import Transformer

    size, rows, beams, read, written = SHAPES[shape]
    config = PRESETS[size]
    model = jax.jit(lambda key: Transformer(config, nnx.Rngs(params=key)))(jax.random.key(0))
    endless = replace(config.special, eos=None)
    side = "encoder" if config.has_encoder else "decoder"
    ids = np.random.default_rng(0).integers(3, 30_000, (rows, read), np.int32)
    rows_read = batch.Batch(**{side: batch.Side(tokens=ids, segment_ids=np.ones_like(ids))})
    decoding = Decoding(written, beams)
    write = beam_search if beams > 1 else decode
    return lambda: jax.block_until_ready(write(model, rows_read, decoding, special=endless))


def torch_call(shape: str, dtype: str) -> Step:
    """Return the same as ``our_call``, by transformers."""
    import torch
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size, rows, beams, read, written = SHAPES[shape]
    if size == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    else:
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(num_layers=6, num_heads=8, vocab_size=32_128, decoder_start_token_id=0)
        )
    model = model.eval().to(getattr(torch, dtype))
    ids = torch.randint(3, 30_000, (rows, read), generator=torch.Generator().manual_seed(0))
    lengths = {"max_new_tokens": written, "min_new_tokens": written}
    options = lengths | {"num_beams": beams, "do_sample": False, "attention_mask": torch.ones_like(ids)}

    def call():
        with torch.inference_mode():
            return model.generate(ids, pad_token_id=0, **options)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", metavar="PYTHON", help="the Python of the other side")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--cores", type=int, nargs="+", help="that both sides run on")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--side", choices=("ours", "torch"), help="serve as this side, of one shape")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of its weights")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, options.cores)
    if options.side:
        shape = options.shapes[0]
        serve(
            lambda: our_call(shape) if options.side == "ours" else torch_call(shape, options.dtype), calls=1
        )
        return
    if not options.torch:
        parser.error("--torch PYTHON is needed")
    from experiments.processes.memory import tunables

    kept = {"GLIBC_TUNABLES": tunables()}
    for shape in options.shapes:
        theirs = (options.torch, __file__, "--side", "torch", "--shapes", shape)
        sides = [
            Side("ours", (sys.executable, __file__, "--side", "ours", "--shapes", shape), kept),
            Side("transformers", theirs),
            Side("transformers, memory kept", theirs, kept),
            Side("transformers, memory kept, bfloat16", (*theirs, "--dtype", "bfloat16"), kept),
        ]
        if shape == next(iter(options.shapes)):
            describe(sides)
        compare(shape, sides, options.blocks)


if __name__ == "__main__":
    main()
