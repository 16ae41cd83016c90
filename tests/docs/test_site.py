"""The site: its pages, its reference, the addresses that it links to, and the workflows that build it."""

import dataclasses
import re
import shutil
import subprocess
import sys
import tomllib
import typing
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from paths import ROOT

from experiments.cli import COMMANDS
from experiments.study.experiment import Experiment

DOCS = ROOT / "docs"
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
REFERENCED = [  # modules, once for each time that a page lists them
    name
    for page in (DOCS / "reference").glob("*.md")
    for name in re.findall(r"(?m)^::: (\S+)$", page.read_text("utf-8"))
]


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)


def settings_classes(cls: type) -> set[type]:
    """A dataclass, those that it inherits from, and those of its fields, at any depth."""
    found = {base for base in cls.__mro__ if dataclasses.is_dataclass(base)}
    for base in list(found):
        for kind in typing.get_type_hints(base).values():
            for part in (kind, *typing.get_args(kind)):
                if dataclasses.is_dataclass(part):
                    found |= settings_classes(part)
    return found


def test_every_settings_class_is_in_the_reference():
    classes = settings_classes(Experiment)
    for path in sorted((ROOT / "lm/config").glob("*.py")):
        module = import_module(f"lm.config.{path.stem}".removesuffix(".__init__"))
        classes |= {
            each
            for name, each in vars(module).items()
            if isinstance(each, type) and each.__module__ == module.__name__ and not name.startswith("_")
        }
    assert len(classes) > 40
    for each in classes:
        assert each.__module__ in REFERENCED, f"{each} is on no page of docs/reference"
        assert each.__doc__ and not each.__doc__.startswith(f"{each.__name__}("), f"{each} has no docstring"


@pytest.mark.parametrize("package", ["ops", "nn", "train", "classical"])
def test_every_public_module_of_a_package_is_in_the_reference(package):
    """Packages inside it, such as kernels, are left out: its modules choose and call them."""
    files = [path.stem for path in (ROOT / "lm" / package).glob("*.py") if not path.stem.startswith("_")]
    modules = {f"lm.{package}.{name}" for name in files}
    assert len(modules) > 3
    missing = modules.difference(REFERENCED)
    assert not missing, f"on no page of docs/reference: {sorted(missing)}"


def test_every_module_of_the_reference_exists_and_is_on_one_page():
    assert len(REFERENCED) == len(set(REFERENCED))
    for name in REFERENCED:
        import_module(name)


def test_every_command_is_in_the_reference_with_all_of_its_options():
    from commands_page import commands_page

    page = commands_page()
    for name, command in COMMANDS.items():
        section = re.search(rf"(?ms)^## lm {name}$(.*?)(?=^## |\Z)", page)
        assert section, name
        assert f"[`lm {name}`](#lm-{name.replace(' ', '-')})" in page
        if name == "eval harness":  # whose options are those of another program
            continue
        module, _, function = command.place.partition(":")
        for option in arguments(getattr(import_module(module), function)):
            names = rf"`\[?(--(?:[a-z]+\.)?{option.replace('_', '-')}|{option.upper()})\b"
            assert re.search(names, section[1]), f"lm {name} lacks {option}"


def arguments(function) -> list[str]:
    """The names of a command's arguments and options, but those of settings, which have a page."""
    found = []
    for name, kind in typing.get_type_hints(function).items():
        if dataclasses.is_dataclass(kind):  # such as the options of several commands
            found += arguments(kind)
        elif name not in ("return", "settings") and typing.get_origin(kind) is not typing.ClassVar:
            found.append(name)
    return found


def other_addresses(urls: dict[str, str]) -> list[str]:
    """Say which addresses of the project, in CITATION.cff and on the pages, are others than ``urls``."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    found = [
        ("CITATION.cff", f"{field}: ", citation[field], name)
        for field, name in (("repository-code", "Repository"), ("url", "Documentation"))
    ]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        file, cloned = str(page.relative_to(ROOT)), re.findall(r"git clone (\S+)", page.read_text("utf-8"))
        found += [(file, "git clone ", address, "Repository") for address in cloned]
    return [
        f"{file}: {before}{address} should be {urls[name]}, the {name} of pyproject.toml"
        for file, before, address, name in found
        if address != urls[name]
    ]


def test_the_addresses_of_the_project_are_those_of_pyproject():
    assert other_addresses(URLS) == []


def test_each_place_of_an_address_is_named_that_differs():
    fork = {"Repository": "https://git.lab.example/fork", "Documentation": URLS["Documentation"]}
    expected = "should be https://git.lab.example/fork, the Repository of pyproject.toml"
    wrong = other_addresses(fork)
    assert all(line.endswith(expected) for line in wrong)
    assert {line.partition(":")[0] for line in wrong} >= {"CITATION.cff", "README.md"}


def test_the_site_links_to_the_repository_once_it_has_an_address(monkeypatch):
    import addresses

    config = {}
    monkeypatch.setattr(
        addresses, "addresses", lambda: {"Repository": "https://a.b/c", "Documentation": "https://d"}
    )
    assert addresses.on_config(config) == {"repo_url": "https://a.b/c", "site_url": "https://d"}
    example = {"Repository": "https://example.org/lm", "Documentation": "https://example.org/lm/docs"}
    monkeypatch.setattr(addresses, "addresses", lambda: example)
    assert addresses.on_config({}) == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_has_a_time_limit_and_every_workflow_a_group(path: Path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or "uses" in job, name


@pytest.mark.slow
def test_the_site_is_not_built_with_a_link_that_leads_nowhere(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.xz"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("lm", "experiments", "launch", "pyproject.toml", "CHANGELOG.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (command,) = re.findall(r"-m (mkdocs build .*)", (ROOT / "Makefile").read_text("utf-8"))
    questions = tmp_path / "docs" / "questions.md"
    text = questions.read_text("utf-8")
    for link, code in (("[a page](words.md)", 0), ("[no page](nowhere.md)", 1)):
        questions.write_text(f"{text}\n\n{link}\n", "utf-8")
        built = subprocess.run([sys.executable, "-m", *command.split()], cwd=tmp_path, check=False)
        assert built.returncode == code
        if code == 0:
            assert links_to_folders(tmp_path / "dist" / "site") == {}


def links_to_folders(site: Path) -> dict[str, set[str]]:
    """The links of each page of a built site that lead to no file, as one to a folder does on a disk."""
    found = {}
    for page in site.rglob("*.html"):
        targets = re.findall(r"""<a\s[^>]*?href="?([^"\s>]+)""", page.read_text("utf-8"))
        paths = {target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:", target)} - {""}
        if wrong := {path for path in paths if not (page.parent / unquote(path)).is_file()}:
            found[str(page.relative_to(site))] = wrong
    return found
