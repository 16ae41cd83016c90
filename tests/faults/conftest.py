"""What the fault tests share."""

import time
from functools import cache

import lives
import pytest

from lm.data.documentation import corpus


@pytest.fixture(scope="session")
def prepare(tmp_path_factory):
    """A new folder of runs each time, with one cache of data, vocabularies and compiled steps."""
    shared = tmp_path_factory.mktemp("shared")
    corpus.prepare_sets(shared, packages=corpus.STDLIB)

    def new(name):
        runs = tmp_path_factory.mktemp(name)
        (runs / "cache").symlink_to(shared)
        return runs

    return new


@pytest.fixture(scope="session")
def undisturbed(prepare):
    """The folder of a run of a family that nothing happened to, and the seconds it took."""

    @cache
    def lived(family, count=1):
        runs, begin = prepare("undisturbed"), time.monotonic()
        assert lives.ends(lives.start(runs, family, count)) == [0] * count, lives.said(runs)
        return runs, time.monotonic() - begin

    return lived


def pytest_configure(config):
    config.addinivalue_line("markers", "fault(id, promise): what is proved, of which event in proofs.toml")
