"""A trained model in one small file: its settings, its vocabulary, and its parameters in half precision."""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs.init_from import save_run
from experiments.runs.paths import load_settings
from experiments.runs.stages import stages_of
from experiments.runs.trained import networks
from experiments.runs.vocabulary import read_vocabulary, stored_vocabulary
from experiments.study.experiment import Experiment
from lm import sharding
from lm.config.base import SettingError, changes, from_json, to_json
from lm.files import write

# names of the arrays in a file
SETTINGS = "settings"  # JSON
TOKENIZER = "tokenizer/"  # before the names of the tokenizer's files
PARAMETERS = "parameters/"  # before the names of the parameters


def pack_model(run: Path, file: Path) -> None:
    """Write the pre-trained model of a run into ``file``, an .npz, with parameters as float16.

    The start before it, and models that were fine-tuned from it, are left out. SettingError if the run has no
    pre-trained network, or several, as an ensemble has.
    """
    experiment = changes(load_settings(run), {"tuning.mixtures": (), "tuning.heads": (), "start.steps": 0})
    pretrained = [each for each in networks(stages_of(run)) if each.is_pretraining and each.is_compared]
    if not pretrained:
        raise SettingError(f"{run} has no pre-trained model to pack: pretraining.steps=0")
    stage, *others = pretrained
    if others:
        names = ", ".join(each.name for each in pretrained)
        raise SettingError(f"{run} has {len(pretrained)} pre-trained models ({names}), and a file holds one")
    params = stage.restore_state(sharding.make_mesh(experiment.mesh)).eval_params
    arrays: dict[str, Any] = {SETTINGS: np.frombuffer(to_json(experiment).encode(), np.uint8)}
    for name, contents in stored_vocabulary(stage.folder, experiment).files().items():
        arrays[TOKENIZER + name] = np.frombuffer(contents, np.uint8)
    for name, parameter in params.items():
        arrays[PARAMETERS + name] = np.asarray(parameter, np.float16)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write(file, packed.getvalue())


def unpack_model(file: Path, run: Path, cache: Path) -> Experiment:
    """Make ``run`` of a packed model, whole or not at all, and return its settings.

    ``cache`` is the folder that holds the data of all runs beside it. The run keeps no metrics and no scores,
    and its parameters are those that were packed, rounded to float16.
    """
    with np.load(file) as packed:
        arrays = {name: packed[name] for name in packed.files}
    experiment = from_json(Experiment, arrays[SETTINGS].tobytes())
    params = {
        name.removeprefix(PARAMETERS): array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith(PARAMETERS)
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, array in arrays.items():
            if name.startswith(TOKENIZER):
                (Path(scratch) / name.removeprefix(TOKENIZER)).write_bytes(array.tobytes())
        vocabulary = read_vocabulary(Path(scratch), experiment)
        save_run(run, experiment, vocabulary, params, {"packed": file.name}, cache)
    return experiment
