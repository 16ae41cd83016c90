"""The house: imports point down, files stay small, and nothing heavy is imported where it need not be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli.commands import COMMANDS, HELP

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("lm/**/*.py"), *ROOT.glob("experiments/**/*.py"), *ROOT.glob("launch/**/*.py")])

# A package may import itself and what is listed; lm.settings and lm.files are open to all.
ALLOWED = {
    "lm.settings": set(),
    "lm.files": set(),
    "lm.mesh": set(),
    "lm.metrics": set(),
    "lm.ops": set(),
    "lm.data": {"lm.metrics"},
    "lm.sharding": {"lm.mesh", "lm.nn.config"},
    "lm.nn": {"lm.ops", "lm.sharding"},
    "lm.train": {"lm.nn", "lm.ops", "lm.sharding", "lm.mesh"},
    "lm.evaluate": {"lm.nn", "lm.ops", "lm.sharding", "lm.mesh", "lm.data.tasks", "lm.metrics"},
    "lm.convert": {"lm.nn", "lm.ops", "lm.sharding", "lm.mesh"},
    "lm.data.text": set(),
    "lm.data.corpora": {"lm.data.text"},
    "lm.data.tasks": {"lm.data.text", "lm.data.corpora", "lm.metrics"},
    "experiments": {"lm"},
    "experiments.study": {"lm"},
    "experiments.processes": {"lm"},
    "experiments.runs": {"lm", "experiments.study", "experiments.processes"},
    "experiments.report": {"lm", "experiments.study", "experiments.runs"},
    "experiments.plan": {"lm", "experiments.study", "experiments.runs", "experiments.report"},
    "experiments.cli": {"lm", "experiments"},
    "launch": set(),
}
FULLEST = 12  # files in a folder, __init__.py not counted
FULLER = {"lm/train": 16}  # those that are still fuller, which may only shrink
LONGER = {
    "lm.convert.settings": 510,
    "lm.convert.names": 396,
    "lm.train.checkpoints": 356,
    "lm.data.objectives": 354,
}
FORBIDDEN = {
    "lm.data": {"jax", "flax"},
    "lm.metrics": {"jax", "flax"},
    "lm.ops": {"flax"},
    "lm.settings": {"numpy"},
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module(path)} should name what it imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_down(path):
    packages = [package for package in ALLOWED if inside(module(path), package)]
    assert packages or path.read_text() == "", f"ALLOWED should say what {module(path)} may import"
    for package in packages:
        allowed = ALLOWED[package] | {package, "lm.settings", "lm.files"}
        ours = {name for name in imports(path) if name.split(".")[0] in ("lm", "experiments", "launch")}
        wrong = {name for name in ours if not any(inside(name, up) for up in allowed)}
        assert not wrong, f"{module(path)} may not import {wrong}"
        outside = {name.split(".")[0] for name in imports(path)} & FORBIDDEN.get(package, set())
        assert not outside, f"{module(path)} may not import {outside}"


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside of functions count: what needs a circle has no order in which it can be read."""
    modules, edges = {module(path) for path in FILES if path.name != "__init__.py"}, {}
    for path in FILES:
        names = imports(path)  # of modules, and of what is in them
        edges[module(path)] = modules & (names | {name.rpartition(".")[0] for name in names}) - {module(path)}

    def reached(name: str) -> set[str]:
        seen, todo = set(), [name]
        while todo:
            new = edges.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen

    assert not [name for name in edges if name in reached(name)]


def test_folders_hold_no_more_files_than_a_reader_takes_in():
    folders = {path.parent for path in FILES}
    found = {
        str(f.relative_to(ROOT)): sum(p.parent == f and p.name != "__init__.py" for p in FILES)
        for f in folders
    }
    assert {folder: count for folder, count in found.items() if count > FULLEST} == FULLER


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=module)
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) <= LONGER.get(module(path), 340)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 70, f"{node.name} is too long"


def test_comparing_rows_needs_no_jax_and_data_needs_neither_jax_nor_tensorflow():
    code = (
        "import sys, experiments.study.registry, experiments.__main__; light = set(sys.modules)\n"
        "import lm.data.pipeline, lm.data.text.sources, lm.data.text.tokens\n"
        "print([n for n in ('jax', 'flax', 'tyro', 'grain', 'matplotlib') if n in light],"
        "[n for n in ('jax', 'flax', 'tensorflow', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[] []"


def test_every_command_is_in_the_help_and_can_be_asked_for_its_own_without_jax():
    assert [line.split()[0] for line in HELP.splitlines()] == list(COMMANDS)
    code = (
        "import sys; from importlib import import_module as load\n"
        "from experiments.cli.commands import COMMANDS\n"
        "places = [command.split(':') for command in COMMANDS.values()]\n"
        "found = [getattr(load(f'experiments.cli.{m}'), f) for m, f in places]\n"
        "print(len(found), 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == f"{len(COMMANDS)} False"
