"""The vocabulary that a phase is trained with, kept beside its record: whatever becomes of the text it was
made of.
"""

from collections.abc import Mapping
from pathlib import Path

from experiments.runs import origin
from experiments.study.experiment import Experiment
from lm.data.text.exported import tokenizer_json
from lm.data.text.own import Bytes, SentencePiece
from lm.data.text.published import FILES, Tokenizer, find_tokenizer
from lm.data.text.vocabulary import Vocabulary
from lm.files import complete, naming
from lm.settings import SettingError

FOLDER = "tokenizer"  # in the folder of a phase
# in it: a SentencePiece model of ours; else there are a published tokenizer's files
MODEL = "vocabulary.model"
UNKNOWN = ""  # the fingerprint in the record of a model that was imported without its tokenizer


def keep(phase: Path, vocabulary: Vocabulary) -> None:
    """Copy ``vocabulary`` into the folder of a phase, in the place of another; nothing is written if it is
    there.
    """
    place = phase / FOLDER
    if isinstance(vocabulary, SentencePiece):
        files: Mapping[str, bytes] = {MODEL: Path(vocabulary.path).read_bytes()}
    else:
        files = tokenizer_files(vocabulary, None, None)
    for path in place.iterdir() if place.is_dir() else ():
        if path.name not in files:
            path.unlink()
    for name, contents in files.items():
        path = place / name
        if not path.exists() or path.read_bytes() != contents:
            with naming(path), complete(path) as file:
                file.write(contents)


def kept(phase: Path, experiment: Experiment) -> Vocabulary:
    """The vocabulary that the phase in this folder was trained with; SettingError if that is not what lies
    there.
    """
    known, place, data = origin.read(phase)["vocabulary"], phase / FOLDER, experiment.data
    if data.vocabulary == "bytes":
        found: Vocabulary = Bytes(data.sentinels)
    elif (place / MODEL).exists():
        found = SentencePiece(place / MODEL, data.sentinels)
    elif place.is_dir():
        found = find_tokenizer(place, experiment.model.vocab_size)
    else:
        raise SettingError(f"{place} is missing: the vocabulary that this model was trained with")
    if known["fingerprint"] not in (UNKNOWN, found.fingerprint):
        raise SettingError(
            f"{place} is not the vocabulary that this model was trained with: its fingerprint is "
            f"{found.fingerprint[:12]}, {phase / origin.FILE} has {known['fingerprint'][:12]}"
        )
    return found


def tokenizer_files(vocabulary: Vocabulary, begin: int | None, end: int | None) -> Mapping[str, bytes]:
    """``{name: contents}`` of the files that make a vocabulary for other programs; none for bytes.

    Ours puts the ids ``begin`` and ``end`` around a text, as the run does; a published one knows what it puts
    there.
    """
    if isinstance(vocabulary, Tokenizer):
        files = [vocabulary.path.with_name(name) for name in FILES]
        return {file.name: file.read_bytes() for file in files if file.exists()}
    if not isinstance(vocabulary, SentencePiece):
        return {}
    return tokenizer_json(vocabulary, begin, end)
