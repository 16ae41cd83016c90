"""``lm convert``: published checkpoints become runs, for ``lm generate`` and ``lm fill``, and runs such."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cli import EXAMPLES
from experiments.cli.arguments import parse
from experiments.cli.usage.page import HELP_WORDS, help_page
from experiments.console import UNBROKEN
from experiments.runs.origin import code, record
from experiments.runs.prepare import FOLDER, UNKNOWN, store_vocabulary, stored_vocabulary
from experiments.runs.stages import PRETRAINING, save_settings, stages, stages_of
from experiments.study.experiment import Experiment, result_settings
from lm.data.text.published import FILES, find_tokenizer
from lm.files import complete_folder
from lm.nn.config import ModelConfig
from lm.settings import SettingError, changes, nearest


def import_or_export(arguments: Sequence[str]) -> None:
    """Import a published checkpoint as a run, or export a run's model in the published format."""
    both = {"import": import_checkpoint, "export": export_checkpoint}
    way, *others = arguments or ("--help",)
    if way in HELP_WORDS:
        pages = [
            help_page(f"lm convert {name}", function, EXAMPLES["convert"], "", True)
            for name, function in both.items()
        ]
        print("\n\n".join(pages))
    elif way not in both:
        raise SettingError(f"lm convert {way}: the first word is import or export{nearest(way, both)}")
    else:
        parse(both[way], f"lm convert {way}", others)


def import_checkpoint(folder: Path, run: Path, /) -> None:
    """Turn a published checkpoint, in the format of Hugging Face's transformers, into a run.

    Args:
        folder: holds config.json, safetensors and the tokenizer.
        run: folder of the run to make.
    """
    from experiments.runs.recipes import prefix_of
    from lm import convert, sharding
    from lm.train.checkpoints import Checkpoints
    from lm.train.config import CheckpointConfig
    from lm.train.log import packages
    from lm.train.step import StepSpec, build

    if run.exists():
        raise SettingError(f"{run} already exists; choose another folder")
    _check_links(folder)
    config, model = convert.load(folder)
    has_tokenizer = any((folder / name).exists() for name in FILES)
    # SettingError if it does not belong to the embedding
    vocabulary = find_tokenizer(folder, config.vocab_size) if has_tokenizer else None
    experiment = imported(config)
    mesh = sharding.make_mesh(experiment.mesh)
    state = build(StepSpec(config, experiment.pretraining.optimizer), mesh).init(experiment.seed)
    prefix = prefix_of(stages(experiment)[0])
    state = replace(state, params={prefix + name: array for name, array in sharding.named(model).items()})
    origin = {
        "settings": result_settings(experiment),
        "code": code(),
        "packages": packages(),
        "data": digests(folder),
        "vocabulary": {"fingerprint": vocabulary.fingerprint if vocabulary else UNKNOWN},
    }
    with complete_folder(run) as draft:
        phase = draft / PRETRAINING
        (phase / FOLDER).mkdir(parents=True)
        if vocabulary:
            store_vocabulary(phase, vocabulary)
        with Checkpoints(str(phase / "checkpoints"), CheckpointConfig()) as checkpoints:
            checkpoints.save(state)
        record(phase, origin)
        save_settings(draft, experiment)
    size = sum(array.size for array in state.params.values()) / 1e6
    _describe(json.loads(config.published), f"({size:.1f} M parameters) from {folder} into {run}")
    if not vocabulary:
        UNBROKEN.print(f"{folder} has no tokenizer; put its files into {run / PRETRAINING / FOLDER}")


def _describe(published: dict[str, Any], what: str) -> None:
    """Print what was imported, and which fields of its config.json say nothing of the model here."""
    from lm.convert.families import FAMILIES as PUBLISHED
    from lm.convert.unread import unknown_fields

    kind = published["model_type"]
    UNBROKEN.print(f"imported {kind} {what}")
    if unknown := unknown_fields(published, PUBLISHED[kind]):
        UNBROKEN.print(f"not read from config.json: {', '.join(unknown)}; an export writes it again")


def _check_links(folder: Path) -> None:
    """SettingError if a file that the run copies, not weights, is a link out of the folder.

    Allowed are links of the cache of Hugging Face, from ``snapshots/REVISION/NAME`` to ``blobs``.
    """
    root = folder.resolve()
    homes = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in (folder / name for name in ("config.json", *FILES)):
        target = path.resolve()
        if path.is_symlink() and not any(target.is_relative_to(home) for home in homes):
            raise SettingError(
                f"{path} is a link to {target}, outside of the folder: copy that file if it is the model's"
            )


def imported(config: ModelConfig) -> Experiment:
    """The settings of a run that holds a model trained elsewhere; its tokenizer lies in the run."""
    new = {"data.vocabulary": FOLDER, "data.corpus": "documentation", "tuning.mixtures": ()}
    return replace(changes(Experiment(), new), model=config)


def digests(folder: Path) -> dict[str, str]:
    """``{name: sha256}`` of the files of a published model."""
    sums = {}
    for path in sorted((folder / "config.json", *folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def export_checkpoint(run: Path, folder: Path, /, mixture: str = "") -> None:
    """Write a run's model as a checkpoint that other programs read.

    Args:
        run: folder of a run.
        folder: where config.json and safetensors go.
        mixture: which fine-tuned model; by default the pre-trained one.
    """
    from experiments.runs.recipes import trained_body
    from experiments.runs.trained import chosen, frame
    from lm import convert, sharding

    stage = chosen(run, {stage.name: stage for stage in stages_of(run) if stage.has_model}, mixture)
    model = trained_body(stage, sharding.make_mesh(stage.settings.mesh))
    files: dict[str, bytes] = {}
    tokenizer = stage.folder / FOLDER
    if not tokenizer.is_dir() or any(tokenizer.iterdir()):  # else imported without one
        vocabulary = stored_vocabulary(stage.folder, stage.settings)
        files |= vocabulary.exported(*frame(stage, vocabulary))
    convert.save(model, folder, beside=files)
    UNBROKEN.print(f"exported the model of {run} to {folder}")
