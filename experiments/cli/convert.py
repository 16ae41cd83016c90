"""``lm convert``: checkpoints of transformers become runs, and models of runs such checkpoints."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.cli.settings import Mixture
from experiments.console import print_line
from experiments.runs.init_from import import_published
from experiments.runs.paths import PRETRAINING, describe_model
from experiments.runs.vocabulary import TOKENIZER_FOLDER, stored_vocabulary
from lm.config.base import SettingError
from lm.config.training import Weights
from lm.tokenizers.sentencepiece import TOKENIZER_CONFIG

if TYPE_CHECKING:
    from experiments.runs.kinds.head import HeadFinetuning
    from experiments.runs.kinds.network import NetworkStage
    from lm.nn.finetune import ModelWithHead
    from lm.nn.transformer import Transformer


# files of a checkpoint that say how it is asked, and not what it computes
NOT_KEPT = ("generation_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")


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
    experiment = import_published(folder, run)
    config = experiment.model
    phase = run / PRETRAINING
    ((step, path),) = manifest.steps(phase / "checkpoints").items()
    arrays = manifest.read_manifest(path, step)["arrays"]
    shapes = [shape for name, (shape, _) in arrays.items() if name.startswith("params.")]
    size = sum(map(prod, shapes)) / 1e6
    _describe(json.loads(config.published), f"({size:.1f} M parameters) from {folder} into {run}")
    if lost := [name for name in NOT_KEPT if (folder / name).exists()]:
        print_line(f"not kept, and not exported again: {', '.join(lost)}")
    if not any((phase / TOKENIZER_FOLDER).iterdir()):
        print_line(f"{folder} has no tokenizer; put its files into {phase / TOKENIZER_FOLDER}")
    elif config.has_encoder and config.has_decoder:
        if why := stored_vocabulary(phase, experiment).unusable_sentinels:
            print_line(f"its gaps are not filled, since the vocabulary has no sentinels: {why}")


def _describe(published: dict[str, Any], what: str) -> None:
    """Print what was imported, and which fields of its config.json say nothing of the model here."""
    from lm.convert.families import FAMILIES as PUBLISHED
    from lm.convert.heads import has_head
    from lm.convert.known_fields import unknown_fields

    kind = published["model_type"]
    print_line(f"imported {kind} {what}")
    if has_head(published):
        kept = f"{published['architectures'][0]} has a head, which is not read: only the model below it"
        print_line(kept)
    if unknown := unknown_fields(published, PUBLISHED[kind]):
        print_line(f"not read from config.json: {', '.join(unknown)}; an export writes it again")


def export_checkpoint(
    run: Path,
    folder: Path,
    /,
    mixture: Mixture = "",
    weights: Weights = "scored",
    head: Literal["keep", "drop"] = "keep",
) -> None:
    """Write a run's model as a checkpoint in the format of transformers.

    A head is written if a class of transformers computes the same, such as BertForSequenceClassification,
    else as modules of sentence-transformers. If neither does, nothing is written, unless --head drop leaves
    the head out. README.md is written from the run's records.

        lm convert export runs/nano/t5/1-baseline/baseline/seed-0 my-t5

    Args:
        run: Folder of a run, @NAME or @last.
        folder: Folder for config.json, safetensors and the tokenizer.
        weights: Write the moving average of the parameters (average, see optimizer.ema), the last parameters
            (last), or those that evaluations use: the average if there is one (scored).
        head: Write the head (keep) or only the model below it (drop).
    """
    from experiments.runs.checks import why_not_exportable
    from experiments.runs.kinds.head import HeadFinetuning
    from experiments.runs.model_card import CARD, model_card
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import networks, select_stage
    from lm import convert, sharding

    convert.check_new_folder(folder)
    models = {stage.name: stage for stage in networks(stages_of(run)) if stage.has_text_model}
    stage = select_stage(run, models, mixture)
    mesh, files = sharding.make_mesh(stage.settings.mesh), dict[str, bytes]()
    model: Transformer | ModelWithHead
    labels: tuple[str, ...] = ()
    if has_head := isinstance(stage, HeadFinetuning) and head == "keep":
        if reason := why_not_exportable(stage.settings, stage.task):
            raise SettingError(f"the head for {stage.task.name} cannot be written: {reason}")
        model, labels = stage.trained_with_head(mesh, weights), stage.task.labels
        hf_config, class_name = convert.describe(model, labels)
        files |= tokenizer_of_head(stage, pads_always=class_name == convert.SENTENCE_TRANSFORMER)
        what = class_name
    else:
        model, what = stage.restore_transformer(mesh, weights=weights), "model"
        hf_config, class_name = convert.describe(model, labels)
        files |= tokenizer_of_text(stage)
        if isinstance(stage, HeadFinetuning):
            files = with_max_length(files, stage.settings.tuning.inputs_length)
            if modules := pooling_files(stage):
                files, class_name = files | modules, convert.SENTENCE_TRANSFORMER
    files[CARD] = model_card(run, stage, hf_config, class_name, weights, has_head).encode()
    length = stage.settings.tuning.inputs_length
    convert.save(model, folder, labels=labels, max_length=length, beside=files)
    which = describe_model(run, stage.name, models, unfinished=stage.progress_if_unfinished)
    print_line(f"exported to {folder}: the {what} of {which}")


def tokenizer_of_text(stage: "NetworkStage") -> dict[str, bytes]:
    """Return ``{name: contents}`` of the tokenizer of a stage; nothing if it was imported without one."""
    from experiments.runs.trained import boundary_ids

    folder = stage.folder / TOKENIZER_FOLDER
    if folder.is_dir() and not any(folder.iterdir()):
        return {}
    vocabulary = stored_vocabulary(stage.folder, stage.settings)
    return {**vocabulary.export_files(*boundary_ids(stage, vocabulary))}


def tokenizer_of_head(stage: "HeadFinetuning", *, pads_always: bool) -> dict[str, bytes]:
    """Return ``{name: contents}`` of the tokenizer of a stage, which frames texts as its head reads them.

    Longer texts than in training are cut as there. ``pads_always``: the program pads single texts too.
    """
    from experiments.runs.kinds.answers import reader_of

    vocabulary = stored_vocabulary(stage.folder, stage.settings)
    template = reader_of(stage.settings, stage.task, vocabulary).template
    files = with_max_length(vocabulary.export_files_with(template), stage.settings.tuning.inputs_length)
    config = json.loads(files[TOKENIZER_CONFIG])
    if pads_always and vocabulary.pad is None and "pad_token" not in config:
        # which one does not matter: what is padding is masked
        names = {token_id: token for token, token_id in vocabulary.vocab.items()}
        config["pad_token"] = names[template.suffix[-1]]
    return files | {TOKENIZER_CONFIG: json.dumps(config, indent=1).encode()}


def with_max_length(files: Mapping[str, bytes], length: int) -> dict[str, bytes]:
    """Return the files of a tokenizer which cuts texts after ``length`` tokens; no files as they are."""
    if not files:
        return {}
    config = json.loads(files.get(TOKENIZER_CONFIG, b"{}")) | {"model_max_length": length}
    return {**files, TOKENIZER_CONFIG: json.dumps(config, indent=1).encode()}


def pooling_files(stage: "HeadFinetuning") -> dict[str, bytes]:
    """Return the files by which sentence-transformers pools the states below a head; none if it cannot.

    Its vectors are then those that the head has read.
    """
    from experiments.runs.checks import exported_model
    from experiments.runs.kinds.head import head_config
    from lm import convert

    config, head = exported_model(stage.settings), head_config(stage.settings, stage.task)
    reads_pooler = head.pool == "first" and "pooler" in config.heads
    if not head.is_pooled or head.layers == "mixed-frozen" or config.has_decoder or reads_pooler:
        return {}
    return convert.module_files(head.pool, config.d_model, (), stage.settings.tuning.inputs_length)
