"""``lm convert``: checkpoints of transformers become runs, and models of runs such checkpoints."""

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.cli.settings import Mixture
from experiments.console import UNBROKEN
from experiments.runs.init_from import import_published
from experiments.runs.paths import PRETRAINING, describe_model
from experiments.runs.vocabulary import FOLDER, stored_vocabulary
from lm.config.base import SettingError
from lm.config.training import Weights

if TYPE_CHECKING:
    from lm.nn.finetune import ModelWithHead
    from lm.nn.transformer import Transformer


def import_checkpoint(folder: Path, run: Path, /) -> None:
    """Turn a checkpoint in the format of Hugging Face's transformers into a run.

        lm convert import bert-base-uncased runs/bert

    Args:
        folder: Folder with config.json, safetensors and the tokenizer.
        run: Folder of the new run.
    """
    from lm.train.runtime import manifest

    if run.exists():
        raise SettingError(f"{run} already exists; choose another folder")
    config = import_published(folder, run).model
    phase = run / PRETRAINING
    ((step, path),) = manifest.steps(phase / "checkpoints").items()
    arrays = manifest.read_manifest(path, step)["arrays"]
    shapes = [shape for name, (shape, _) in arrays.items() if name.startswith("params.")]
    size = sum(map(prod, shapes)) / 1e6
    _describe(json.loads(config.published), f"({size:.1f} M parameters) from {folder} into {run}")
    if not any((phase / FOLDER).iterdir()):
        UNBROKEN.print(f"{folder} has no tokenizer; put its files into {phase / FOLDER}")


def _describe(published: dict[str, Any], what: str) -> None:
    """Print what was imported, and which fields of its config.json say nothing of the model here."""
    from lm.convert.families import FAMILIES as PUBLISHED
    from lm.convert.heads import has_head
    from lm.convert.known_fields import unknown_fields

    kind = published["model_type"]
    UNBROKEN.print(f"imported {kind} {what}")
    if has_head(published):
        kept = f"{published['architectures'][0]} has a head, which is not read: only the model below it"
        UNBROKEN.print(kept)
    if unknown := unknown_fields(published, PUBLISHED[kind]):
        UNBROKEN.print(f"not read from config.json: {', '.join(unknown)}; an export writes it again")


def export_checkpoint(
    run: Path,
    folder: Path,
    /,
    mixture: Mixture = "",
    weights: Weights = "scored",
    head: Literal["keep", "drop"] = "keep",
) -> None:
    """Write a run's model as a checkpoint in the format of transformers.

    A classification head is written if a class of transformers computes the same, such as
    BertForSequenceClassification. If none does, nothing is written, unless --head drop leaves the head out.

        lm convert export runs/nano/t5/1-baseline/baseline/seed-0 my-t5

    Args:
        run: Folder of a run.
        folder: Folder for config.json, safetensors and the tokenizer.
        weights: Write the moving average of the parameters (average, see optimizer.ema), the last parameters
            (last), or those that evaluations use: the average if there is one (scored).
        head: Write the head (keep) or only the model below it (drop).
    """
    from experiments.runs.kinds.head import HeadFinetuning
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import chosen, frame, networks
    from lm import convert, sharding
    from lm.data.tasks.labelled import find_labelled

    models = {stage.name: stage for stage in networks(stages_of(run)) if stage.has_model}
    stage = chosen(run, models, mixture)
    mesh, what, labels = sharding.make_mesh(stage.settings.mesh), "model", tuple[str, ...]()
    if isinstance(stage, HeadFinetuning) and head == "keep":
        tuned = stage.trained_with_head(mesh, weights)
        try:
            what = convert.class_of(tuned)
        except SettingError as error:
            below = "--head drop writes the model below it"
            raise SettingError(
                f"the head for {', '.join(stage.task_names)} cannot be written: {error}; {below}"
            ) from error
        model: Transformer | ModelWithHead = tuned
        labels = find_labelled(*stage.task_names).labels
    else:
        model = stage.trained_body(mesh, weights)
    files: dict[str, bytes] = {}
    tokenizer = stage.folder / FOLDER
    if not tokenizer.is_dir() or any(tokenizer.iterdir()):  # else imported without one
        vocabulary = stored_vocabulary(stage.folder, stage.settings)
        files |= vocabulary.export_files(*frame(stage, vocabulary))
    convert.save(model, folder, labels=labels, beside=files)
    UNBROKEN.print(f"exported the {what} of {describe_model(run, stage.name, models)} to {folder}")
