"""The laws of the layout: imports point down and in no circle; nothing heavy is imported without need."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from paths import FILES, ROOT

from experiments.cli import COMMANDS, overview

# figures, plan, evaluate and entries import neither each other nor report, but that entries saves its figure
# with figures.draw
BELOW_CLI = "console study processes runs evaluate report plan figures entries"
# A package may import itself and what is listed; lm.batch, lm.config and lm.files are open to all.
ALLOWED = {
    "lm": set(),
    "lm.batch": set(),
    "lm.devices": set(),
    "lm.config": set(),
    "lm.files": set(),
    "lm.metrics": set(),
    "lm.ops": set(),
    "lm.classical": set(),
    "lm.tokenizers": set(),
    "lm.objectives": {"lm.tokenizers"},
    "lm.c4": {"lm.data.corpus"},
    "lm.data": {"lm.metrics", "lm.objectives", "lm.tokenizers", "lm.c4"},
    "lm.data.corpus": {"lm.tokenizers", "lm.data.documentation"},
    "lm.data.documentation": {"lm.data.corpus", "lm.c4"},
    "lm.data.tasks": {"lm.data.corpus", "lm.data.documentation", "lm.metrics", "lm.tokenizers"},
    "lm.sharding": set(),
    "lm.nn": {"lm.ops", "lm.sharding"},
    "lm.train": {"lm.nn", "lm.ops", "lm.sharding"},
    "lm.evaluate": {"lm.nn", "lm.ops", "lm.sharding", "lm.data.tasks", "lm.tokenizers", "lm.metrics"},
    "lm.convert": {"lm.nn", "lm.ops", "lm.sharding"},
    "lm.special_tokens": {"lm.data", "lm.tokenizers"},
    "lm.predictions": {"lm.data", "lm.nn", "lm.sharding"},
    "lm.notebook": {
        "lm.convert",
        "lm.data",
        "lm.evaluate",
        "lm.nn",
        "lm.objectives",
        "lm.predictions",
        "lm.sharding",
        "lm.special_tokens",
        "lm.tokenizers",
        "lm.train",
    },
    "experiments": {"lm", "launch"},
    "experiments.console": set(),
    "experiments.study": {"lm"},
    "experiments.processes": {"lm"},
    "experiments.runs": {"lm", "experiments.study", "experiments.processes"},
    "experiments.harness": {"lm", "experiments.runs"},
    "experiments.notebook": {"lm", "experiments.cli", "experiments.runs"},
    "experiments.report": {
        "lm",
        "experiments.console",
        "experiments.figures.draw",
        "experiments.figures.panels",
        "experiments.figures.spec",
        "experiments.figures.training",
        "experiments.study",
        "experiments.runs",
    },
    "experiments.entries": {
        "lm",
        "experiments.console",
        "experiments.figures.draw",
        "experiments.study",
        "experiments.runs",
    },
    "experiments.plan": {
        "lm",
        "experiments.console",
        "experiments.study",
        "experiments.runs",
        "launch.accelerators",
    },
    "experiments.figures": {"lm", "experiments.study", "experiments.runs"},
    "experiments.evaluate": {"lm", "experiments.console", "experiments.study", "experiments.runs"},
    "experiments.cli": {"lm", "launch", *(f"experiments.{below}" for below in BELOW_CLI.split())},
    "experiments.__main__": {"lm", "experiments.cli", "experiments.processes", "experiments.study"},
    "launch": set(),
}
FORBIDDEN = {
    "lm.batch": {"jax", "flax"},
    "lm.config": {"flax"},
    "lm.config.base": {"jax", "numpy"},
    "lm.config.model": {"jax", "numpy"},
    "lm.config.layers": {"jax", "numpy"},
    "lm.data": {"jax", "flax"},
    "lm.objectives": {"jax", "flax"},
    "lm.tokenizers": {"jax", "flax"},
    "lm.c4": {"jax", "flax"},
    "lm.metrics": {"jax", "flax"},
    "lm.ops": {"flax"},
    "lm.classical.ngram": {"jax", "flax", "scipy", "sklearn"},
    "lm.classical.hmm": {"jax", "flax", "scipy", "sklearn"},
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module(path)} should name what it imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def upward(path: Path) -> set[str]:
    """What a module imports and, by ALLOWED and FORBIDDEN, may not."""
    wrong = set()
    for package in (package for package in ALLOWED if inside(module(path), package)):
        allowed = ALLOWED[package] | {package, "lm.batch", "lm.config", "lm.files"}
        ours = {name for name in imports(path) if name.split(".")[0] in ("lm", "experiments", "launch")}
        wrong |= {name for name in ours if not any(inside(name, up) for up in allowed)}
        wrong |= {name.split(".")[0] for name in imports(path)} & FORBIDDEN.get(package, set())
    return wrong


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_down(path):
    packages = [package for package in ALLOWED if inside(module(path), package)]
    assert packages or path.read_text() == "", f"ALLOWED should say what {module(path)} may import"
    assert not upward(path), f"{module(path)} may not import {upward(path)}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def modules() -> dict[str, set[str]]:
    """Our modules, and which others each imports.

    Imports inside of functions count: what needs a circle has no order in which it can be read.
    """
    names, edges = {module(path) for path in FILES if path.name != "__init__.py"}, {}
    for path in FILES:
        imported = imports(path)  # of modules, and of what is in them
        edges[module(path)] = names & (imported | {name.rpartition(".")[0] for name in imported}) - {
            module(path)
        }
    return edges


# a package that is above what it imports in the list of docs/code.md, which says so
OUT_OF_ORDER = {("lm.c4", "lm.data")}


def test_the_list_of_packages_names_all_of_them_and_each_after_what_it_imports():
    """The reader of docs/code.md so meets nothing that is explained below."""
    listed = re.search(r"(?ms)^    lm/config/.*?\n\n", (ROOT / "docs" / "code.md").read_text("utf-8"))[0]
    packages = {".".join(name.split(".")[:2]) for name in modules()} - {"lm", "experiments"}
    places = {}
    for package in packages:
        folder, _, name = package.partition(".")
        if folder == "launch":  # which imports nothing of ours
            continue
        name += "/" if (ROOT / folder / name).is_dir() else ".py"
        shown = rf"(?m)^    lm/{re.escape(name)}" if folder == "lm" else rf"(?<![\w/]){re.escape(name)}"
        place = re.search(shown, listed if folder == "lm" else listed[listed.index("    experiments/") :])
        assert place, f"docs/code.md should list {folder}/{name}"
        places[package] = place.start() + len(listed) * (folder == "experiments")
    used = {
        (importer, imported)
        for module, found in modules().items()
        for importer, imported in (
            (".".join(name.split(".")[:2]) for name in (module, other)) for other in found
        )
        if {importer, imported} <= places.keys()
    }
    assert {edge for edge in used if places[edge[0]] < places[edge[1]]} == OUT_OF_ORDER


def reached(name: str, edges: dict[str, set[str]]) -> set[str]:
    """What a module imports, and what that imports, and so on."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        new = edges.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def test_no_import_goes_in_a_circle():
    edges = modules()
    assert [name for name in edges if name in reached(name, edges)] == []


def test_nothing_asks_whether_a_mixer_is_called_attention():
    """Its class says what it can do (``has_attention_logits``), so that subclasses can do it too."""
    compared = re.compile("mixer [!=]= .attention")
    assert [module(path) for path in FILES if compared.search(path.read_text())] == []


def test_nothing_escapes_the_formatter():
    assert [module(path) for path in FILES if "fmt: " + "skip" in path.read_text()] == []


def test_only_paths_makes_or_reads_the_name_of_a_stage():
    """Other modules ask a stage for its base name and member, so that its name can be anything."""
    name = re.compile("startswith.[\"']pretrain|= [\"']pretraining[\"']|/member-|/without-|[\"']pretraining/")
    home = ROOT / "experiments" / "runs" / "paths.py"
    assert name.search(home.read_text())
    others = [path for path in ROOT.glob("experiments/**/*.py") if path != home]
    assert not [module(path) for path in others if name.search(path.read_text())]


def test_comparing_rows_needs_no_jax_and_data_needs_neither_jax_nor_tensorflow():
    code = (
        "import sys, experiments.runs.result, experiments.study.registry, experiments.__main__\n"
        "light = set(sys.modules)\n"
        "import lm.data.seq2seq, lm.data.classification, lm.data.corpus.files, lm.data.corpus.token_cache\n"
        "print([n for n in ('jax', 'flax', 'tyro', 'grain', 'matplotlib') if n in light],"
        "[n for n in ('jax', 'flax', 'tensorflow', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[] []"


def test_every_command_is_in_the_help_and_most_can_be_asked_for_their_own_without_jax():
    names = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
    assert [line.split()[0] for line in overview().splitlines()] == list(names)
    light = [name for name in COMMANDS if name != "plan" and not name.startswith("draw ")]
    code = (
        "import sys; from experiments.cli.app import function_of\n"
        f"found = [function_of(name) for name in {light!r}]\n"
        "print(len(found), 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == f"{len(light)} False"
