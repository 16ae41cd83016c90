"""Folders of the repository, and the source files of its packages."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
GOLDEN = TESTS / "golden"
SHARED = ROOT.parent / "shared"  # published numbers and data sets that are not part of the repository
FILES = sorted([*ROOT.glob("lm/**/*.py"), *ROOT.glob("experiments/**/*.py"), *ROOT.glob("launch/**/*.py")])
