"""``lm convert``: a published checkpoint becomes a run that ``lm generate`` and ``lm fill`` read, and a run
one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.runs.origin import code, record
from experiments.runs.stages import PRETRAINING, save_settings, stages, stages_of
from experiments.runs.vocabularies import FOLDER, UNKNOWN, keep, kept
from experiments.study.experiment import Experiment, result_settings
from lm.data.text.published import FILES, find_tokenizer
from lm.files import complete_folder
from lm.nn.config import ModelConfig
from lm.settings import SettingError, changes

CONSOLE = Console(soft_wrap=True)


def import_or_export(arguments: Sequence[str]) -> None:
    """Import a published checkpoint as a run, or export a run's model in the published format."""
    import tyro

    both = {"import": import_checkpoint, "export": export_checkpoint}
    tyro.extras.subcommand_cli_from_dict(both, prog="lm convert", args=arguments)


def import_checkpoint(folder: Path, run: Path, /) -> None:
    """Make a run of a published checkpoint.

    Args:
        folder: holds config.json, safetensors and the tokenizer.
        run: folder of the run to make.
    """
    from experiments.runs.trained import prefix_of
    from lm import convert, sharding
    from lm.convert.families import FAMILIES as PUBLISHED
    from lm.convert.unread import unknown_fields
    from lm.train.checkpoints import Checkpoints
    from lm.train.config import CheckpointConfig
    from lm.train.log import packages
    from lm.train.step import StepSpec, build

    if run.exists():
        raise SettingError(f"{run} is there already; name a new run")
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
            keep(phase, vocabulary)
        with Checkpoints(str(phase / "checkpoints"), CheckpointConfig()) as checkpoints:
            checkpoints.save(state)
        record(phase, origin)
        save_settings(draft, experiment)
    CONSOLE.print(f"{run} has the model of {folder}", highlight=False)
    theirs = json.loads(config.published)
    if unknown := unknown_fields(theirs, PUBLISHED[theirs["model_type"]]):
        CONSOLE.print(
            f"nothing here reads {', '.join(unknown)} of config.json; an export has it again", highlight=False
        )
    if not vocabulary:
        CONSOLE.print(
            f"{folder} has no tokenizer; put its files into {run / PRETRAINING / FOLDER}", highlight=False
        )


def _check_links(folder: Path) -> None:
    """SettingError for a link out of the folder where the run gets a copy of what is there; weights may be
    links.

    In the cache of Hugging Face ``snapshots/REVISION/NAME`` is a link to ``blobs`` beside ``snapshots``, and
    allowed.
    """
    root = folder.resolve()
    own = [root] + ([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])
    for path in (folder / name for name in ("config.json", *FILES)):
        if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in own):
            raise SettingError(
                f"{path} is a link to {path.resolve()}, outside of the folder: copy that file if it is the "
                "model's"
            )


def imported(config: ModelConfig) -> Experiment:
    """The settings of a run that holds a model trained elsewhere; its tokenizer lies beside it, wherever that
    is.
    """
    new = {"data.vocabulary": FOLDER, "data.corpus": "documentation", "tuning.mixtures": ()}
    return replace(changes(Experiment(), new), model=config)


def digests(folder: Path) -> dict[str, str]:
    """``{name: sha256}`` of the files of a published model."""
    found = {}
    for path in sorted((folder / "config.json", *folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def export_checkpoint(run: Path, folder: Path, /, mixture: str = "") -> None:
    """Write a run's model as a checkpoint that other programs read.

    Args:
        run: folder of a run.
        folder: where config.json and safetensors go.
        mixture: which fine-tuned model; by default the pre-trained one.
    """
    from experiments.runs.trained import chosen, frame, restored
    from lm import convert

    stage = chosen(run, {stage.name: stage for stage in stages_of(run)}, mixture)
    model = restored(stage).model
    own = stage.folder / FOLDER
    bare = own.is_dir() and not any(own.iterdir())  # imported without a tokenizer
    files = {}
    if not bare:
        vocabulary = kept(stage.folder, stage.settings)
        files = vocabulary.exported(*frame(stage, vocabulary))
    convert.save(model, folder, beside=files)
    CONSOLE.print(f"{folder} has the model of {run}", highlight=False)
