"""``lm convert``: a published checkpoint becomes a run that ``lm generate`` and ``lm fill`` read, and a run one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.experiment import Experiment
from experiments.folders import load_settings
from lm.config import SettingError, changes, to_json
from lm.data.tokenizers import FILES, SETTINGS, Tokenizer, find_tokenizer
from lm.data.vocabulary import SentencePiece, Vocabulary
from lm.files import complete_folder
from lm.nn.config import ModelConfig

CONSOLE = Console(soft_wrap=True)
TOKENIZER = "tokenizer"  # the folder in a run that keeps the tokenizer of an imported model


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
    from experiments.trained import prefix_of
    from lm import convert, sharding
    from lm.train.checkpoints import Checkpoints
    from lm.train.config import CheckpointConfig, LossConfig
    from lm.train.step import build

    if run.exists():
        raise SettingError(f"{run} is there already; name a new run")
    config, model = convert.load(folder)
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}
    if files:
        find_tokenizer(folder, config.vocab_size)  # SettingError if it does not belong to the embedding
    experiment = imported(config, run)
    mesh = sharding.make_mesh(experiment.mesh)
    state = build(config, experiment.pretraining.optimizer, LossConfig(), mesh).init(experiment.seed)
    prefix = prefix_of(experiment, "pretraining")
    state = replace(state, params={prefix + name: array for name, array in sharding.named(model).items()})
    with complete_folder(run) as draft:
        (draft / TOKENIZER).mkdir()
        for name, contents in files.items():
            (draft / TOKENIZER / name).write_bytes(contents)
        with Checkpoints(str(draft / "pretraining" / "checkpoints"), CheckpointConfig()) as checkpoints:
            checkpoints.save(state)
        (draft / "settings.json").write_text(to_json(experiment) + "\n")
    CONSOLE.print(f"{run} has the model of {folder}", highlight=False)
    if not files:
        CONSOLE.print(f"{folder} has no tokenizer; put its files into {run / TOKENIZER}", highlight=False)


def imported(config: ModelConfig, run: Path) -> Experiment:
    """The settings of a run that holds a model trained elsewhere."""
    new = {"data.vocabulary": str(run.absolute() / TOKENIZER), "data.corpus": "documentation", "tuning.mixtures": ()}
    return replace(changes(Experiment(), new), model=config)


def export_checkpoint(run: Path, folder: Path, /, mixture: str = "") -> None:
    """Write a run's model as a checkpoint that other programs read.

    Args:
        run: folder of a run.
        folder: where config.json and safetensors go.
        mixture: which fine-tuned model; by default the pre-trained one.
    """
    from experiments.trained import chosen, pretrained, restored, vocabulary_of
    from lm import convert

    experiment = load_settings(run)
    model = restored(run, experiment, chosen(run, pretrained(experiment), mixture)).model
    own = run / TOKENIZER
    bare = own.is_dir() and not any(own.iterdir())  # imported without a tokenizer
    files = {} if bare else tokenizer_files(vocabulary_of(run, experiment))
    convert.save(model, folder, beside=files)
    CONSOLE.print(f"{folder} has the model of {run}", highlight=False)


def tokenizer_files(vocabulary: Vocabulary) -> Mapping[str, bytes]:
    """``{name: contents}`` of the files that make a vocabulary for other programs; none for bytes."""
    if isinstance(vocabulary, Tokenizer):
        files = [vocabulary.path.with_name(name) for name in FILES]
        return {file.name: file.read_bytes() for file in files if file.exists()}
    if not isinstance(vocabulary, SentencePiece):
        return {}
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": vocabulary.num_sentinels}
    return {"spiece.model": Path(vocabulary.path).read_bytes(), SETTINGS: json.dumps(settings, indent=1).encode()}
