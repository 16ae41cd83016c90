"""``lm doctor`` says why jax leaves the GPUs of a machine unused, and what to do next."""

import jax
import pytest

from experiments.cli import doctor
from lm.config.base import SettingError


@pytest.mark.parametrize(
    ("platforms", "plugin", "named", "mend"),
    [
        ("cpu", True, "JAX_PLATFORMS=cpu", "env -u JAX_PLATFORMS lm doctor"),
        (None, False, "jax_cuda13_plugin is not installed", "pip install 'lm-study[gpu]'"),
        (None, True, "CUDA does not start", "nvidia-smi"),
    ],
)
def test_gpus_that_jax_does_not_use_are_named_with_the_cause_and_the_next_command(
    platforms, plugin, named, mend, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(doctor, "find_spec", lambda name: name if plugin else None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    doctor.examine(tmp_path)
    out = capsys.readouterr().out
    assert "2 NVIDIA GPUs here" in out and named in out and mend in out


def test_nothing_is_said_of_gpus_that_jax_uses_or_that_are_not_there(monkeypatch):
    monkeypatch.setattr(doctor, "visible_gpus", lambda: ["0"])
    assert doctor.unused_gpus("cpu") and not doctor.unused_gpus("gpu")
    monkeypatch.setattr(doctor, "visible_gpus", list)
    assert not doctor.unused_gpus("cpu")


@pytest.mark.parametrize("error", [RuntimeError("no libtpu.so"), AssertionError()])
def test_a_platform_that_does_not_start_is_named_with_the_next_command(error, monkeypatch, tmp_path):
    def fails():
        raise error

    monkeypatch.setattr(jax, "devices", fails)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(SettingError, match=r"JAX_PLATFORMS='tpu' .* Try: JAX_PLATFORMS=cpu lm doctor"):
        doctor.examine(tmp_path)


@pytest.mark.parametrize("name", ["runs [old]", "runs [", "[bold]runs"])
def test_folders_are_printed_as_they_are_called(name, tmp_path, monkeypatch, capsys):
    runs = tmp_path / name
    monkeypatch.setenv("TFDS_DATA_DIR", str(runs / "data"))
    doctor.examine(runs)
    out = capsys.readouterr().out
    assert f"free for {runs}\n" in out and f"in {runs}/cache/tokens\n" in out
    assert f"{runs}/data" in out
