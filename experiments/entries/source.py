"""Checks the text of an entry's file: it may compute, but neither read files nor replace others' code.

The check makes mistakes visible and cheating laborious; it is no sandbox. Whoever accepts an entry reads its
file, which is short.
"""

import ast
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from lm.config.base import SettingError

MOST_BYTES = 20_000  # of a file: there is no room for a text or for weights
# modules that a file may import, and those below them; numpy and jax read files by some of their functions
ALLOWED_MODULES = (
    *("collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"),
    *("jax", "numpy", "flax", "optax", "jaxtyping"),
    *("lm.batch", "lm.config", "lm.nn", "lm.objectives", "lm.ops", "lm.train.optimizers"),
    *("experiments.entries.entry", "experiments.study.changes", "experiments.study.presets"),
)
# names, also behind a dot, by which files and networks are read, or what others define is replaced
REFUSED_NAMES = frozenset(
    "__import__ breakpoint builtins compile delattr eval exec getattr globals input locals open setattr vars "
    "DataSource ctypeslib experimental files fromfile fromregex genfromtxt io_callback lib load loads "
    "loadtxt memmap pure_callback save savetxt savez tofile attrgetter methodcaller update_wrapper "
    "Path ctypes importlib io multiprocessing os pathlib pickle shutil socket subprocess sys urllib".split()
)
COUNTED = ("flops", "cache_bytes")  # methods by which modules count their costs
# methods that a class of a file may define or call; every other name with two underscores is refused
ALLOWED_DUNDERS = frozenset("__init__ __post_init__ __call__ __all__ __future__".split())


def check_source(source: bytes, name: str) -> None:
    """Raise SettingError, with file and line, for the first thing that the file of an entry may not do."""
    if len(source) > MOST_BYTES:
        raise SettingError(f"{name} has {len(source):,} bytes; an entry has at most {MOST_BYTES:,}")
    try:
        tree = ast.parse(source)  # of the bytes, as Python reads them: a first line may name an encoding
    except (SyntaxError, ValueError) as error:
        raise SettingError(f"{name}:{getattr(error, 'lineno', 1)}: {error}") from error
    for node, fault in faults(tree):
        raise SettingError(f"{name}:{getattr(node, 'lineno', 1)}: an entry may not {fault}")


def faults(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node of a syntax tree that does what no entry may, and what that is."""
    own = {id(target) for target in _attributes_of_own_instances(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not is_allowed(alias.name):
                    yield node, refused_import(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if not is_allowed(module):
                yield node, refused_import(module)
                continue
            try:
                imported = import_module(module)
            except ImportError as error:
                yield node, f"import from {module}: {error}"
                continue
            for alias in node.names:
                value = getattr(imported, alias.name, None)
                if alias.name in REFUSED_NAMES or alias.name == "*":
                    yield node, f"import {alias.name} from {module}"
                elif isinstance(value, ModuleType) and not is_allowed(value.__name__):
                    yield node, refused_import(value.__name__)
        elif isinstance(node, ast.Name | ast.Attribute):
            used = node.id if isinstance(node, ast.Name) else node.attr
            if used in REFUSED_NAMES or (used.startswith("__") and used not in ALLOWED_DUNDERS):
                yield node, f"use {used}, which can read files or replace what others define"
            is_set = not isinstance(node.ctx, ast.Load)
            if is_set and isinstance(node, ast.Attribute) and id(node) not in own:
                yield node, f"set {ast.unparse(node)}: what others define stays as it is"
            if is_set and used in COUNTED:
                yield node, f"define {used}: the project counts what an entry computes"
        for name in _names_bound(node):
            if name in COUNTED:
                yield node, f"define {name}: the project counts what an entry computes"
            elif name.startswith("__") and name not in ALLOWED_DUNDERS:
                yield node, f"define {name}, by which an object can stand in for what others define"


def is_allowed(module: str) -> bool:
    """Return whether a file may import a module."""
    is_below = any(module == allowed or module.startswith(f"{allowed}.") for allowed in ALLOWED_MODULES)
    return is_below and REFUSED_NAMES.isdisjoint(module.split("."))


def refused_import(module: str) -> str:
    """Return the fault of importing a module that is not allowed."""
    return f"import {module}: it may import {', '.join(ALLOWED_MODULES)}"


def _names_bound(node: ast.AST) -> list[str]:
    """Return the names that a node defines otherwise than by assignment; in a class they are methods."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.MatchAs | ast.MatchStar):
        return [node.name or ""]
    if isinstance(node, ast.MatchMapping):
        return [node.rest or ""]
    return []


def _attributes_of_own_instances(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield each ``self.x`` in methods of a file's classes, whatever the method calls its instance."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for method in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            if method.decorator_list or not method.args.args:
                continue
            instance = method.args.args[0].arg
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if node.value.id == instance:
                        yield node
