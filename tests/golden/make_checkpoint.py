"""Make checkpoint/ anew, as this release saves it: ``python make_checkpoint.py``. Beside it, in
checkpoint.json: the sha256 of every array, and the loss of the step after. Later releases have to read what
is here, so that it is made anew only when a format is given up on purpose.
"""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np

from lm import sharding
from lm.batch import Batch, Side
from lm.config.layers import AttentionConfig, MlpConfig, PositionsConfig
from lm.config.mesh import MeshConfig
from lm.config.model import ModelConfig
from lm.config.training import CheckpointConfig, OptimizerConfig
from lm.files import json_with_checksum
from lm.train.runtime import manifest
from lm.train.runtime.checkpoints import Checkpoints
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build

HERE = Path(__file__).parent / "checkpoint"
STEP = 3
MODEL = ModelConfig(
    architecture="decoder",
    vocab_size=40,
    num_decoder_layers=1,
    d_model=8,
    mlp=MlpConfig(d_ff=16),
    attention=AttentionConfig(d_kv=4, num_heads=2),
    dropout=0.1,
    positions=PositionsConfig(relative_buckets=8, relative_max_distance=6),
)


def steps() -> Steps:
    """Of T5's decoder on one device, whose Adafactor factors some of its parameters."""
    mesh = sharding.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    return build(StepSpec(MODEL, OptimizerConfig(factor_from=8)), mesh)


def batch(step: int) -> Batch:
    """Eight rows of six tokens."""
    targets = np.random.default_rng(step).integers(3, MODEL.vocab_size, (8, 6), np.int32)
    return Batch(
        decoder=Side(
            tokens=np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            segment_ids=np.ones_like(targets),
            targets=targets,
            loss_weights=np.ones(targets.shape, np.float32),
        )
    )


def next_step(made: Steps, state: State) -> tuple[State, float]:
    """The state after the next step, and its loss."""
    state, metrics = made.seeded_train_step(0)(state, sharding.put_batch(batch(int(state.step)), made.mesh))
    return state, float(metrics["loss"])


def hashes(state: State) -> dict[str, str]:
    """sha256 of every array, by name."""
    return {
        name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for name, leaf in sharding.named(state).items()
    }


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    made = steps()
    state = made.initial_state(0)
    for _ in range(STEP):
        state, _ = next_step(made, state)
    with Checkpoints(HERE, CheckpointConfig()) as checkpoints:
        checkpoints.save(state)
        checkpoints.write_scores(int(state.step), {"score": 0.5, "cola/score": 0.25})
    folder = HERE / str(STEP)
    (folder / "commit_success.txt").write_text("orbax names the machine's folder here\n")
    sealed = manifest.read_manifest(folder, STEP) | {"files": manifest.checksums(folder)}
    (folder / manifest.MANIFEST).write_text(json_with_checksum(sealed))
    about = {"arrays": hashes(state), "next_loss": next_step(made, state)[1]}
    HERE.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
