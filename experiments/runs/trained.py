"""A run that was trained, or imported: its vocabulary, its model, and texts as that model reads them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.runs.finetuning import adapted
from experiments.runs.folders import cache_of, home_of, load_settings, phases
from experiments.runs.vocabularies import kept
from experiments.study.experiment import Experiment
from lm import sharding
from lm.data.text.vocabulary import Vocabulary
from lm.nn.composed import BODY, DISCRIMINATOR
from lm.nn.transformer import Batch, Transformer
from lm.settings import SettingError, nearest
from lm.train.checkpoints import CheckpointError, Checkpoints
from lm.train.config import CheckpointConfig
from lm.train.manifest import manifests
from lm.train.state import State
from lm.train.step import Steps, StepSpec, build


def frame(experiment: Experiment, phase: str, vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """The ids that begin and end a text as the model of a phase reads it."""
    config, start = experiment.model, experiment.model.special.start
    goes_on = phase.startswith("pretraining") and experiment.mixing.pretraining == "corpus"
    asks = not goes_on or experiment.objective.has_inputs  # or the text is to go on
    return {
        "encoder": (vocabulary.cls, vocabulary.sep),
        "encoder-decoder": (None, vocabulary.eos),
        "decoder": (vocabulary.cls, None) if start is None else (start, vocabulary.eos if asks else None),
    }[config.architecture.removeprefix("shared-").removeprefix("prefix-")]


@dataclass(frozen=True)
class Trained:
    """What came out of one phase of a run."""

    experiment: Experiment
    vocabulary: Vocabulary
    phase: str
    model: Transformer
    put: Callable[[dict[str, np.ndarray]], Batch]
    devices: int  # rows of a batch are a multiple of it

    def encode(self, text: str) -> list[int]:
        """``text`` as an encoder reads it, or as the prompt of a decoder; masks are masks."""
        return self.vocabulary.encode_framed(text, *frame(self.experiment, self.phase, self.vocabulary))

    def batch(self, rows: Sequence[Sequence[int]], answer: int = 1) -> Batch:
        """Rows of ids, padded to one length, and rows of padding; SettingError without room for ``answer``
        tokens.
        """
        config = self.experiment.model
        if not rows or not all(rows):
            raise SettingError("a text without tokens leaves the model nothing to go on from")
        shape = (-(-len(rows) // self.devices) * self.devices, max(map(len, rows)))
        longest = max(shape[1], answer) if config.has_encoder else shape[1] + answer - 1
        if config.positions == "learned" and longest > config.max_length:
            raise SettingError(
                f"{shape[1]} tokens of text and {answer} of answer do not fit in "
                f"model.max_length={config.max_length}"
            )
        tokens, segments = np.full(shape, config.special.pad, np.int32), np.zeros(shape, np.int32)
        for place, row in enumerate(rows):
            tokens[place, : len(row)], segments[place, : len(row)] = row, 1
        side = "encoder" if config.has_encoder else "decoder"
        batch = {f"{side}_input_tokens": tokens, f"{side}_segment_ids": segments}
        if config.architecture == "prefix-decoder":
            batch["decoder_causal_attention"] = segments
        return self.put(batch)


def open_run(folder: Path, phases: Callable[[Experiment], Sequence[str]], name: str) -> Trained:
    """The run in ``folder`` after the phase ``name``, by default the first of those that ``phases``
    allows.
    """
    experiment = load_settings(folder)
    name = chosen(folder, phases(experiment), name)
    model = restored(folder, experiment, name).model
    steps = _steps(experiment, name)
    return Trained(
        experiment, vocabulary_of(folder, experiment, name), name, model, steps.put, steps.mesh.size
    )


def chosen(folder: Path, allowed: Sequence[str], name: str) -> str:
    """The phase ``name``, by default the first; SettingError with the nearest if the run in ``folder`` lacks
    it.
    """
    if not allowed:
        raise SettingError(
            f"{folder} has no model for this: by its settings neither pre-training nor fine-tuning leaves "
            "one "
            "(pretraining.steps, finetuning.steps, tuning)"
        )
    name = name or allowed[0]
    if name not in allowed:
        raise SettingError(f"--mixture {name!r} is no part of {folder}{nearest(name, allowed)}")
    return name


def place_of(folder: Path, experiment: Experiment, name: str) -> Path:
    """The folder of the phase ``name`` of the run in ``folder``."""
    return phases(experiment, folder, home_of(folder, cache_of(folder)))[name]


def vocabulary_of(folder: Path, experiment: Experiment, name: str) -> Vocabulary:
    """The vocabulary that the phase ``name`` of the run in ``folder`` was trained with."""
    return kept(place_of(folder, experiment, name), experiment)


def restored(folder: Path, experiment: Experiment, name: str, steps: Steps | None = None) -> State:
    """The parameters after the phase ``name`` of the run in ``folder``, the best ones if it was scored.

    With ``steps``, of a model with a head, they are all there; without, those of the body.
    """
    phase = place_of(folder, experiment, name)
    prefix = prefix_of(experiment, name) if steps is None else ""
    abstract = (_steps(experiment, name) if steps is None else steps).abstract
    with Checkpoints(str(phase / "checkpoints"), CheckpointConfig(best="highest")) as checkpoints:
        if not checkpoints.steps():
            raise SettingError(f"{phase} has no checkpoint yet; train the run first")
        try:
            return checkpoints.restore_model(abstract, checkpoints.best(), source=lambda path: prefix + path)
        except CheckpointError as error:
            raise SettingError(str(error)) from error


def _steps(experiment: Experiment, name: str) -> Steps:
    model = experiment.model if name.startswith("pretraining") else adapted(experiment)
    return build(StepSpec(model), sharding.make_mesh(experiment.mesh))


def answering(experiment: Experiment) -> list[str]:
    """The phases whose model writes text."""
    if not experiment.model.has_decoder:
        raise SettingError(
            "model.architecture='encoder' writes no text; `lm fill` shows what it puts for [MASK]"
        )
    text = [name for name in pretrained(experiment) if name.split("/")[0] not in experiment.tuning.heads]
    return sorted(text, key=lambda name: name.startswith("pretraining"))


def pretrained(experiment: Experiment) -> list[str]:
    """Pre-training first, then the phases that change its model."""
    return list(phases(experiment, Path(), Path()))


def masked(experiment: Experiment) -> list[str]:
    """Pre-training of a masked language model."""
    model = experiment.model
    if model.architecture != "encoder" or model.logits == "none":
        raise SettingError(
            f"--run: a model with architecture={model.architecture!r} and logits={model.logits!r} is no "
            "masked LM; "
            "name the run of one, such as bert/base"
        )
    names = [name for name in pretrained(experiment) if name.startswith("pretraining")]
    if not names:
        raise SettingError("--run: pretraining.steps=0: nothing was pre-trained; name another run")
    return names


def prefix_of(experiment: Experiment, name: str) -> str:
    """What the names of the model's parameters begin with in the checkpoints of a phase."""
    if name.split("/")[0] in experiment.tuning.heads:
        return BODY
    return DISCRIMINATOR if "replaced-token" in experiment.model.heads else ""


def newest_masked(runs: Path) -> Path:
    """The folder below ``runs`` with the masked language model that was trained last."""
    trained = {}
    for path in sorted(runs.glob("**/settings.json")):
        try:
            experiment = load_settings(path.parent)
        except SettingError as error:  # it may be the newest
            print(f"left out: {error}", file=sys.stderr)
            continue
        try:
            name = masked(experiment)[0]
        except SettingError:
            continue
        place = place_of(path.parent, experiment, name)
        saved = [about["saved"] for about in manifests(place / "checkpoints").values() if about is not None]
        if saved:
            trained[path.parent] = max(saved)
    if not trained:
        raise SettingError(
            f"--run: {runs} holds no trained masked LM yet: `lm run bert/base` trains one, or name another "
            "run"
        )
    return max(trained, key=trained.get)
