"""The vocabulary that a phase is trained with, stored beside its record, whatever becomes of the text it was
made of.
"""

from pathlib import Path

from experiments.runs import origin
from experiments.study.experiment import Experiment
from lm.data.text.published import open_vocabulary
from lm.data.text.vocabulary import Vocabulary
from lm.files import write
from lm.settings import SettingError

FOLDER = "tokenizer"  # in the folder of a phase
UNKNOWN = ""  # the fingerprint in the record of a model that was imported without its tokenizer


def keep(phase: Path, vocabulary: Vocabulary) -> None:
    """Copy ``vocabulary`` into the folder of a phase, in the place of another; nothing is written if it is
    there.
    """
    place, files = phase / FOLDER, vocabulary.files()
    for path in place.iterdir() if place.is_dir() else ():
        if path.name not in files:
            path.unlink()
    for name, contents in files.items():
        path = place / name
        if not path.exists() or path.read_bytes() != contents:
            write(path, contents)


def kept(phase: Path, experiment: Experiment) -> Vocabulary:
    """The vocabulary that the phase in this folder was trained with; SettingError if that is not what lies
    there.
    """
    known, place, data = origin.read(phase)["vocabulary"], phase / FOLDER, experiment.data
    bare = data.vocabulary == "bytes"
    if not bare and not place.is_dir():
        raise SettingError(f"{place} is missing: the vocabulary that this model was trained with")
    found = open_vocabulary("bytes" if bare else place, data.sentinels, experiment.model.vocab_size)
    if known["fingerprint"] not in (UNKNOWN, found.fingerprint):
        raise SettingError(
            f"{place} is not the vocabulary that this model was trained with: its fingerprint is "
            f"{found.fingerprint[:12]}, {phase / origin.FILE} has {known['fingerprint'][:12]}"
        )
    return found
