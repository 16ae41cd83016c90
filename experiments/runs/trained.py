"""A run that was trained, or imported: its vocabulary, its model, and texts as that model reads them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from experiments.runs.recipes import body_steps, trained_body
from experiments.runs.stages import Stage, load_settings, stages_of
from experiments.runs.vocabularies import kept
from lm import sharding
from lm.data.text.vocabulary import Vocabulary
from lm.nn.config import ModelConfig
from lm.nn.transformer import Transformer
from lm.nn.view import Batch
from lm.settings import SettingError, nearest
from lm.train.manifest import manifests

T = TypeVar("T")


def frame(stage: Stage, vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """The ids that begin and end a text as the model of a stage reads it."""
    experiment = stage.settings
    config, start = experiment.model, experiment.model.special.start
    goes_on = stage.kind == "pretrain" and experiment.mixing.pretraining == "corpus"
    asks = not goes_on or experiment.objective.has_inputs  # or the text is to go on
    return {
        "encoder": (vocabulary.cls, vocabulary.sep),
        "encoder-decoder": (None, vocabulary.eos),
        "decoder": (vocabulary.cls, None) if start is None else (start, vocabulary.eos if asks else None),
    }[config.architecture.removeprefix("shared-").removeprefix("prefix-")]


@dataclass(frozen=True)
class Trained:
    """What came out of one stage of a run."""

    stage: Stage
    vocabulary: Vocabulary
    model: Transformer
    put: Callable[[dict[str, np.ndarray]], Batch]
    devices: int  # rows of a batch are a multiple of it

    @property
    def config(self) -> ModelConfig:
        return self.stage.settings.model

    def encode(self, text: str) -> list[int]:
        """``text`` as an encoder reads it, or as the prompt of a decoder; masks are masks."""
        return self.vocabulary.encode_framed(text, *frame(self.stage, self.vocabulary))

    def batch(self, rows: Sequence[Sequence[int]], answer: int = 1) -> Batch:
        """Rows of ids, padded to one length, and rows of padding; SettingError without room for ``answer``
        tokens.
        """
        config = self.config
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


def open_run(folder: Path, stages: Sequence[Stage], name: str = "") -> Trained:
    """The run in ``folder`` after the stage ``name``, by default the first of those ``stages`` of it."""
    stage = chosen(folder, {stage.name: stage for stage in stages}, name)
    mesh = sharding.make_mesh(stage.settings.mesh)
    model, put = trained_body(stage, mesh).model, body_steps(stage, mesh).put
    return Trained(stage, kept(stage.folder, stage.settings), model, put, mesh.size)


def chosen(folder: Path, models: Mapping[str, T], name: str) -> T:
    """The one called ``name``, by default the first; SettingError with the nearest if the run lacks it."""
    if not models:
        raise SettingError(
            f"{folder} has no model for this: by its settings neither pre-training nor fine-tuning leaves "
            "one (pretraining.steps, finetuning.steps, tuning)"
        )
    if name and name not in models:
        raise SettingError(f"--mixture {name!r} is no part of {folder}{nearest(name, models)}")
    return models[name or next(iter(models))]


def answering(folder: Path) -> list[Stage]:
    """The stages of a run whose model writes text, fine-tuned ones first."""
    if not load_settings(folder).model.has_decoder:
        raise SettingError(
            "model.architecture='encoder' writes no text; `lm fill` shows what it puts for [MASK]"
        )
    text = [stage for stage in stages_of(folder) if stage.kind != "head"]
    return sorted(text, key=lambda stage: stage.kind == "pretrain")


def masked(folder: Path) -> list[Stage]:
    """Pre-training of a masked language model."""
    model = load_settings(folder).model
    if model.architecture != "encoder" or model.logits == "none":
        raise SettingError(
            f"--run: a model with architecture={model.architecture!r} and logits={model.logits!r} is no "
            "masked LM; name the run of one, such as bert/base"
        )
    found = [stage for stage in stages_of(folder) if stage.kind == "pretrain"]
    if not found:
        raise SettingError("--run: pretraining.steps=0: nothing was pre-trained; name another run")
    return found


def newest_masked(runs: Path) -> Path:
    """The folder below ``runs`` with the masked language model that was trained last."""
    trained = {}
    for path in sorted(runs.glob("**/settings.json")):
        try:
            load_settings(path.parent)
        except SettingError as error:  # it may be the newest
            print(f"left out: {error}", file=sys.stderr)
            continue
        try:
            stage = masked(path.parent)[0]
        except SettingError:
            continue
        saved = [
            about["saved"] for about in manifests(stage.folder / "checkpoints").values() if about is not None
        ]
        if saved:
            trained[path.parent] = max(saved)
    if not trained:
        raise SettingError(
            f"--run: {runs} holds no trained masked LM yet: `lm run bert/base` trains one, or name another "
            "run"
        )
    return max(trained, key=trained.get)
