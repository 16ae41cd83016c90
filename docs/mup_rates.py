"""Train small decoders at five learning rates and three widths, with muP and without, and draw their losses.

    python docs/mup_rates.py CACHE

CACHE is a folder that has the built-in text, such as runs/cache after ``lm run``. It takes minutes on one
core. The losses are kept in docs/mup_rates.json, and a run of that file is not repeated: remove the file to
train all. With ``--draw`` in place of CACHE it trains nothing, and draws docs/pictures/mup.png from that
file.
"""

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from experiments.figures.coordinate_check import at_width
from experiments.figures.draw import draw_plots, save_figure
from experiments.figures.panels import Curve, Plot, PlotGrid
from lm.batch import Batch, Side
from lm.config.layers import AttentionConfig, CompileConfig, MlpConfig
from lm.config.model import ModelConfig
from lm.config.training import LossConfig, OptimizerConfig
from lm.data.corpus.shards import sample_documents
from lm.data.corpus.spec import corpus_shards
from lm.files import write
from lm.train.losses import language_model
from lm.train.step import StepSpec, compute_gradients, initial_state

DOCS = Path(__file__).parent
LOSSES, PICTURE = DOCS / "mup_rates.json", DOCS / "pictures" / "mup.png"
WIDTHS = (64, 128, 256)  # the first is muP's base [features]
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
STEPS, ROWS, LENGTH = 200, 8, 32  # length of a run, and of a row in bytes [steps, sequences, tokens]
HELD_OUT_ROWS = 256  # rows of the text that the loss is measured on [sequences]
BASE = ModelConfig(
    "decoder",
    vocab_size=256,  # bytes
    num_decoder_layers=2,
    d_model=WIDTHS[0],
    dropout=0.0,
    mlp=MlpConfig(d_ff=4 * WIDTHS[0]),
    attention=AttentionConfig(num_heads=4, d_kv=WIDTHS[0] // 4),
    compile=CompileConfig(layers="unroll"),
)
# The rate is 1 here: an update is proportional to it, so one compiled program serves all rates.
OPTIMIZER = OptimizerConfig(
    name="adamw", learning_rate=1.0, schedule="linear", warmup_steps=20, decay_end=STEPS, clip_norm=1.0
)


def rows_of_text(cache: Path, split: str, count: int) -> np.ndarray:
    """Return rows of bytes of the built-in text, int32 [count,LENGTH+1]."""
    size, text = count * (LENGTH + 1), bytearray()
    for document in islice(sample_documents(corpus_shards("documentation", split, cache)), size):
        text += document.encode() + b"\n"
        if len(text) >= size:
            break
    return np.frombuffer(bytes(text[:size]), np.uint8).astype(np.int32).reshape(count, LENGTH + 1)


def make_trainer(width: int, is_mup: bool):
    """Return the compiled function from a rate and rows of text to the final loss [nats per byte]."""
    spec = StepSpec(at_width(BASE, width, is_mup), OPTIMIZER, loss_config=LossConfig(z_loss=0.0))
    optimizer = spec.make_optimizer()

    def batch_of(rows: jax.Array) -> Batch:
        weights = jax.numpy.ones((len(rows), LENGTH))
        return Batch(decoder=Side(tokens=rows[:, :-1], targets=rows[:, 1:], loss_weights=weights))

    @jax.jit
    def train(rate: jax.Array, batches: jax.Array, held_out: jax.Array) -> jax.Array:
        def step(state, rows):
            found = compute_gradients(spec, state, batch_of(rows), jax.random.key(0))
            updates, opt_state = optimizer.update(
                found.gradients, state.opt_state, state.params, step=state.step
            )
            params = {name: value + rate * updates[name] for name, value in state.params.items()}
            return replace(state, step=state.step + 1, params=params, opt_state=opt_state), None

        state, _ = jax.lax.scan(step, initial_state(spec, optimizer, jax.numpy.uint32(0)), batches)
        _, sums = language_model(state.eval_model, batch_of(held_out), None, spec.loss_config)
        return sums["loss"][0] / sums["loss"][1]

    return train


def train_all(cache: Path) -> None:
    """Train the runs that LOSSES lacks, and write it after each."""
    batches = rows_of_text(cache, "train", STEPS * ROWS).reshape(STEPS, ROWS, LENGTH + 1)
    held_out = rows_of_text(cache, "validation", HELD_OUT_ROWS)
    for width in WIDTHS:
        for is_mup in (True, False) if width != WIDTHS[0] else (True,):  # at the base they are the same
            train = make_trainer(width, is_mup)
            for rate in RATES:
                losses, name = read_losses(), run_name(width, is_mup, rate)
                if name not in losses:
                    losses[name] = round(float(train(np.float32(rate), batches, held_out)), 4)
                    print(name, losses[name], flush=True)
                    write(LOSSES, json.dumps(losses, indent=1) + "\n")


def run_name(width: int, is_mup: bool, rate: float) -> str:
    """Return the name of a run; one serves both parametrisations at the width of the base."""
    kind = "muP" if is_mup or width == WIDTHS[0] else "standard"
    return f"{kind}, width {width}, rate {rate:g}"


def read_losses() -> dict[str, float]:
    """Return the losses by the names of runs [nats per byte]."""
    return json.loads(LOSSES.read_text()) if LOSSES.exists() else {}


def draw() -> None:
    """Draw the losses over the rates: a panel per parametrisation, a curve per width."""
    losses, panels = read_losses(), []
    for is_mup, title in ((False, "standard parametrisation"), (True, f"muP, base {WIDTHS[0]}")):
        curves = {
            f"width {width}": Curve(RATES, [losses[run_name(width, is_mup, rate)] for rate in RATES])
            for width in WIDTHS
        }
        y_label = f"loss after {STEPS} steps [nats per byte]"
        panels.append(Plot(title, "learning rate", y_label, curves, "x"))
    lowest, highest = min(losses.values()), min(max(losses.values()), 2 * min(losses.values()))
    y_range = lowest - 0.05, highest + 0.05
    panels = [replace(panel, y_range=y_range) for panel in panels]
    save_figure(draw_plots(PlotGrid(panels, has_shared_legend=True)), PICTURE)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] != "--draw":
        train_all(Path(sys.argv[1]))
    draw()
