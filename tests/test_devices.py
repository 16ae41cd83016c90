"""Without an accelerator jax is told so, and with one nothing is touched."""

import importlib.util
import os
import subprocess
import sys

import pytest

from lm import devices

ASKED = "import jax\njax.devices()"


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or devices.has_accelerator(), reason="needs libtpu alone"
)
@pytest.mark.parametrize("first", [pytest.param("", marks=pytest.mark.slow), "import jax"])
def test_a_library_that_only_plans_for_tpus_prints_nothing_where_there_is_none(first):
    unset = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    program = f"{first}\nimport lm.config.model\n{ASKED}"
    done = subprocess.run([sys.executable, "-c", program], env=unset, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("chosen", "accelerator", "libtpu", "due"),
    [
        (None, False, True, "cpu"),
        (None, True, True, None),
        (None, False, False, None),
        ("tpu", False, True, "tpu"),
        ("", False, True, ""),
    ],
)
def test_a_platform_is_chosen_only_where_nobody_chose_and_libtpu_has_nothing_to_find(
    chosen, accelerator, libtpu, due, monkeypatch
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("JAX_PLATFORMS", chosen)
    monkeypatch.setattr(devices, "has_accelerator", lambda: accelerator)
    monkeypatch.setattr(devices, "find_spec", lambda name: "found" if libtpu else None)
    devices.choose_platform()
    assert os.environ.get("JAX_PLATFORMS") == due


@pytest.mark.parametrize(
    ("named", "due"),
    [
        ("0,3", ["0", "3"]),
        ("GPU-8932f937,MIG-aa", ["GPU-8932f937", "MIG-aa"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_only_the_gpus_that_cuda_shows_are_visible(named, due, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert devices.visible_gpus() == due
