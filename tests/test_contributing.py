"""What CONTRIBUTING.md says of adding things: its patches, applied to a copy of the code, do what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^### (Add .+?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall((ROOT / "CONTRIBUTING.md").read_text()))


def patch(text: str, hunk: str) -> str:
    """``text`` changed as a hunk of a diff says; the lines it changes must stand in the text exactly once."""
    lines = hunk.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "+")
    after = "".join(f"{line[1:]}\n" for line in lines if line[:1] != "-")
    assert text.count(before) == 1, f"stands {text.count(before)} times in the file:\n{before}"
    return text.replace(before, after)


@pytest.mark.parametrize("title", SECTIONS)
def test_what_the_guide_adds_works_in_the_files_that_it_names_and_no_others(title, tmp_path):
    """A guide that nobody follows goes stale within weeks; here every commit follows it."""
    for package in ("lm", "experiments"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    for hunk in (body for kind, body in blocks if kind == "diff"):
        name, _, lines = hunk.partition("\n")
        path = tmp_path / name.removeprefix("--- ")
        path.write_text(patch(path.read_text(), lines))
    checks = [body for kind, body in blocks if kind == "python"]
    assert checks, "the section should end with Python that fails where its change has no effect"
    for check in checks:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", check]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
