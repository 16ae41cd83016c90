"""Settings and a folder of runs small enough to be trained in a test."""

import pytest
import small_corpus
from tiny import TINY

from experiments.study.scales import SCALES

SMALL = (
    SCALES["nano"]
    | TINY
    | {
        "pretraining.steps": 4,
        "finetuning.steps": 2,
        "finetuning.save_every": 1,
    }
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs whose cache holds a small documentation corpus, and a scale ``tiny``."""
    folder = tmp_path_factory.mktemp("runs")
    small_corpus.prepare(folder / "cache")
    (folder / "words").mkdir()
    (folder / "words" / "vocab.txt").write_text("[PAD]\n[UNK]\n</s>\n[CLS]\n[SEP]\n[MASK]\n")
    SCALES["tiny"] = SMALL
    yield folder
    del SCALES["tiny"]
