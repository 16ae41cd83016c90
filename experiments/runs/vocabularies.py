"""The vocabulary that a stage is trained with: a copy in its folder, which outlives its corpus."""

from pathlib import Path

from experiments.runs import origin
from experiments.study.experiment import Experiment
from lm.data.text.published import open_vocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.files import write
from lm.settings import SettingError

FOLDER = "tokenizer"  # in the folder of a stage
UNKNOWN = ""  # the fingerprint in the record of a model that was imported without its tokenizer


def store_vocabulary(stage: Path, vocabulary: Vocabulary) -> None:
    """Copy ``vocabulary`` into the folder of a stage, replacing another; equal files are not written."""
    folder, files = stage / FOLDER, vocabulary.files()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in files:
            path.unlink()
    for name, contents in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != contents:
            write(path, contents)


def stored_vocabulary(stage: Path, experiment: Experiment) -> Vocabulary:
    """The vocabulary that the stage in a folder was trained with; SettingError if it is another or gone."""
    recorded, folder, data = origin.read(stage)["vocabulary"]["fingerprint"], stage / FOLDER, experiment.data
    bare = data.vocabulary == "bytes"  # which has no files
    if not bare and not folder.is_dir():
        raise SettingError(f"{folder} is missing: the vocabulary that this model was trained with")
    vocabulary = open_vocabulary("bytes" if bare else folder, data.sentinels, experiment.model.vocab_size)
    if recorded not in (UNKNOWN, vocabulary.fingerprint):
        raise SettingError(
            f"{folder} is not the vocabulary that this model was trained with: its fingerprint is "
            f"{vocabulary.fingerprint[:12]}, {stage / origin.FILE} has {recorded[:12]}"
        )
    return vocabulary
