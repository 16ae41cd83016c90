"""The patches of CONTRIBUTING.md find their lines in the code, also once others have followed them."""

import shutil
import subprocess
import sys

import pytest
from guide import SECTIONS, patch, patches
from paths import ROOT

# What somebody adds who follows a section: its names, and names of one's own in their place.
OWN_NAMES = {
    "Add an objective": {"prefix-lm-whole": "infix-whole", '"prefix"': '"infix"'},
    "Add a kind of noise": {"every-other": "every-third", "every_other": "every_third"},
    "Add an activation": {"gated-tanh": "gated-cube"},
    "Add an optimiser": {"Lion": "Tiger", "lion": "tiger"},
    "Add a mixer": {"RunningMean": "RunningSum", "running-mean": "running-sum"},
    "Add a table": {"bert-depth": "gpt-depth"},
    "Add a task": {"ag_news_subset": "yelp"},
    "Add a task that is answered through a head": {"wic": "boolq"},
    "Add a family of published weights": {"STABLELM": "STARCODER", "stablelm": "starcoder"},
}


def renamed(hunk: str, names: dict[str, str]) -> str:
    """A hunk with other names in the lines that it adds."""
    lines = hunk.splitlines(keepends=True)
    for name, own in names.items():
        lines = [line.replace(name, own) if line.startswith("+") else line for line in lines]
    return "".join(lines)


def follow(title: str, texts: dict[str, str], names: dict[str, str]) -> None:
    """Apply the patches of a section, with other names in what they add, to the files in ``texts``."""
    for file, hunk in patches(title):
        text = texts.get(file) or (ROOT / file).read_text("utf-8")
        texts[file] = patch(title, file, text, renamed(hunk, names))


@pytest.mark.parametrize("title", SECTIONS)
def test_the_guide_holds_after_an_addition_under_other_names(title, tmp_path):
    own = OWN_NAMES[title]
    assert any(renamed(hunk, own) != hunk for _, hunk in patches(title)), "OWN_NAMES should be of the section"
    texts: dict[str, str] = {}
    follow(title, texts, own)
    for each in SECTIONS:
        follow(each, texts, {})
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, "utf-8")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "."]
    formatted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert formatted.returncode == 0, formatted.stdout + formatted.stderr


def test_a_patch_that_no_longer_applies_is_named_with_its_section_and_file():
    lost = r"CONTRIBUTING.md, section 'Add a mixer': its patch to lm/x\.py .* finds them 0 times"
    with pytest.raises(AssertionError, match=lost):
        patch("Add a mixer", "lm/x.py", "a = 1\n", " b = 1\n+c = 1\n")
