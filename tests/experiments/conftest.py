"""The width of tables in tests, the device and the first parameters of their runs, and a fixture of tests
that register rows.
"""

import jax
import pytest
from drawn import drawn_state

from experiments.console import CONSOLE
from experiments.study.registry import REGISTRY, TABLES
from lm import sharding
from lm.config.mesh import MeshConfig
from lm.train.step import Steps

CONSOLE.width = 160  # so that no cell is wrapped where a test looks for it


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """Runs without a mesh of their own use one of the eight devices, for which programs compile sooner."""
    with pytest.MonkeyPatch.context() as patch:
        whole = sharding.make_mesh

        def make_mesh(config, devices=None):
            alone = devices is None and config == MeshConfig()
            return whole(config, jax.devices()[:1] if alone else devices)

        patch.setattr(sharding, "make_mesh", make_mesh)
        yield


@pytest.fixture(autouse=True, scope="module")
def drawn_parameters(request):
    """Runs start from parameters that numpy draws, but where these are a user's or other processes', or are
    compared with new ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in ("test_run.py", "test_processes.py", "test_vector_stages.py"):
            patch.setattr(Steps, "initial_state", drawn_state)
        yield


@pytest.fixture
def restored_registry():
    """Undo what a test registers."""
    rows, tables = dict(REGISTRY), dict(TABLES)
    yield
    for now, before in ((REGISTRY, rows), (TABLES, tables)):
        now.clear()
        now |= before
