"""What CONTRIBUTING.md says of adding things: its patches, applied to a copy of the code, do what it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from guide import SECTIONS, blocks, patch, patches
from paths import ROOT

SCRIPTS = ("make_study.py", "make_batches.py", "make_setting_paths.py")
# prints which of the recorded files lack what the code in this folder has
OUTDATED = """
import json, make_batches, make_setting_paths, make_study

rows = json.loads(make_study.PLACE.read_text())["rows"]
runnable = [name for name, row in make_study.REGISTRY.items() if not row.needs]
found = {row: make_study.settings(row, "nano") for row in runnable}
if found != {row: scales["nano"][0] for row, scales in rows.items()}:
    print("make_study.py")
batches = json.loads(make_batches.PLACE.read_text())
objectives = {name.split()[0] for name, _ in make_batches.registry()}
if not objectives <= {name.split()[0] for name in batches["cases"]} or batches["combinations"].keys() != set(
    make_batches.CHOICES["noise"]
):
    print("make_batches.py")
if make_setting_paths.outdated():
    print("make_setting_paths.py")
"""


ONE_BY_ONE = [pytest.param([title], id=title, marks=pytest.mark.slow) for title in SECTIONS]


@pytest.mark.parametrize("titles", [pytest.param([*SECTIONS], id="all together"), *ONE_BY_ONE])
def test_what_the_guide_adds_works_in_the_files_that_it_names_and_changes_the_recorded_files_that_it_names(
    titles, tmp_path
):
    """A guide that nobody follows goes stale within weeks; here every commit follows it."""
    copy_code(tmp_path, "launch")  # ruff sorts imports by what is there
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for title in titles:
        follow(title, tmp_path)
    run(["-m", "ruff", "check", "--no-cache", "."], tmp_path)
    run(["-m", "ruff", "format", "--check", "--no-cache", "."], tmp_path)
    checks = []
    for title in titles:
        own = [body for kind, body in blocks(title) if kind == "python"]
        assert own, f"{title} should end with Python that fails where its change has no effect"
        checks += [f"exec(compile({body!r}, {title!r}, 'exec'), {{}})" for body in own]
    printed = python("\n".join([*checks, OUTDATED]), tmp_path, ROOT / "tests" / "golden").split()
    named = "".join(SECTIONS[title] for title in titles)
    assert [script for script in SCRIPTS if script in printed] == [
        script for script in SCRIPTS if script in named
    ]


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_the_tests_that_most_changes_break_pass_once_the_guide_was_followed(title, tmp_path):
    copy_code(tmp_path, "tests", "docs")
    follow(title, tmp_path)
    for file in ("pyproject.toml", "CONTRIBUTING.md", "README.md", "mkdocs.yml"):
        shutil.copy(ROOT / file, tmp_path)
    for script in re.findall(r"python\s+(tests/golden/make_\w+\.py)", SECTIONS[title]):
        run([script], tmp_path)
    fast = re.search(r"^FAST := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    files = [f"tests/{name}.py" for name in fast]
    print(
        run(
            ["-m", "pytest", "-q", "-p", "no:cacheprovider", *filter(lambda x: (ROOT / x).exists(), files)],
            tmp_path,
        )
    )


def copy_code(folder: Path, *others: str) -> None:
    """Copy the packages, and ``others`` of the project's folders, with what Python has compiled of them."""
    for package in ("lm", "experiments", *others):
        shutil.copytree(ROOT / package, folder / package)


def follow(title: str, folder: Path) -> None:
    """Apply the patches of a section to the copy of the code in ``folder``."""
    for name, hunk in patches(title):
        path = folder / name
        if not path.exists():  # a test's
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path)
        path.write_text(patch(title, name, path.read_text(), hunk))


def python(code: str, *folders: Path) -> str:
    """What Python prints that imports from these folders, the first of which is the current one."""
    return run(["-c", code], *folders)


def run(arguments: list[str], *folders: Path) -> str:
    """What Python prints, with these arguments, that imports from these folders."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folders[0], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
