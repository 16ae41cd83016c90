"""README and docs: links lead somewhere, commands are accepted as they stand, code blocks are Python.

Commands are parsed by the command line itself, with its rows and settings, and not carried out: what they
need, such as a finished run or a data set, is not here. A launch prints the commands of its dry run.
"""

import ast
import importlib
import re
import shlex
from importlib.util import find_spec

import pytest
from commands import accepted
from paths import ROOT

from experiments import __main__ as cli
from experiments.cli import COMMANDS, GROUPS, demo
from experiments.runs.kinds.network import model_parameters
from experiments.study.experiment import BASELINE
from experiments.study.registry import build, find
from lm.config.base import leaves
from lm.nn.presets import PRESETS
from lm.objectives.denoising import OBJECTIVES

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "launch/README.md")),
]
PLACEHOLDERS = {"COMMAND", "RUN", "ROW", "FOLDER"}
ROWS_FIRST = ("list", "show", "run", "sweep", "report", "power", "plan")


def text_of(page):
    return page.read_text("utf-8")


def anchors(page):
    """The names under which the headings of a page are linked to, as GitHub and mkdocs make them."""
    return {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"(?m)^#+ (.*)$", text_of(page))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading_that_are_there(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{target} should be a file: the site has no pages for folders"
        assert not anchor or anchor in anchors(file), target


def commands():
    """(page, command line) of all lines of code that begin with ``lm``; lines that go on are joined."""
    for page in PAGES:
        joined = re.sub(r"\\\n\s*", "", text_of(page))
        for line in re.findall(r"(?m)^(?: {4}|\$ )?(lm (?!=).*)$", joined):
            # what stands behind two spaces or # explains it
            yield page.name, re.split(r"\s{2,}|\s+#", line)[0]


@pytest.mark.parametrize("line", sorted({line for _, line in commands()}))
def test_a_command_of_the_docs_is_accepted_as_it_stands(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("bad")
    (tmp_path / "Containerfile").touch()
    (settings,) = re.findall(r"```toml\n(.*?)```", text_of(ROOT / "docs/first-hour.md"), re.DOTALL)
    (tmp_path / "mine.toml").write_text(settings)
    _, *arguments = shlex.split(line)
    is_harness = arguments[:2] == ["eval", "harness"]  # which parses its own options
    if arguments[0] in PLACEHOLDERS or arguments[-1] == "..." or is_harness:
        return
    if arguments[0] == "--study":  # tests/experiments/study/test_extension.py, which has the modules
        return
    if arguments[0].startswith("-") or arguments == ["draw"]:
        return
    assert arguments[0] in COMMANDS or arguments[0] in GROUPS, line
    first = arguments[1] if len(arguments) > 1 and not arguments[1].startswith("-") else None
    if first and arguments[0] in ROWS_FIRST and first not in (*PLACEHOLDERS, *PRESETS, "@mine"):
        assert find(first)
    for option in ("--start", "--distillation.teacher"):  # models that are read first, and are not here
        if option in arguments:
            place = arguments.index(option)
            del arguments[place : place + 2]
    if first in PLACEHOLDERS:
        arguments[1] = "t5/1-baseline/baseline"
    if arguments[0] == "launch" and first != "delete":  # whose dry run asks gcloud for what is there
        own = [word for word in arguments if word != "--dry-run"]
        assert cli.dispatch([*own, "--dry-run"]) == 0, capsys.readouterr()
        assert capsys.readouterr().out
        return
    assert accepted(arguments, monkeypatch) == 0, capsys.readouterr()


def test_blocks_of_python_are_python():
    for page in PAGES:
        for code in re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL):
            ast.parse(code)


def test_what_blocks_of_python_import_is_there():
    found = 0
    for page in PAGES:
        if page.name == "CONTRIBUTING.md":  # its blocks run after its patches, in test_contributing.py
            continue
        for code in re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and re.match(r"(lm|experiments|launch)\b", node.module):
                    module = importlib.import_module(node.module)
                    for alias in node.names:
                        is_there = hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}")
                        assert is_there, f"{page.relative_to(ROOT)}: {node.module} has no {alias.name!r}"
                        found += 1
    assert found > 50


def test_readme_is_short_and_names_every_page():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 150
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in nav


def test_the_readme_shows_the_size_and_the_length_of_the_demos_decoder():
    model = build(demo.DECODER, demo.SCALE, demo.decoder_changes(None)).model
    shown = f"A decoder of {model_parameters(model):,} parameters after {demo.STEPS:,} steps"
    assert shown in text_of(ROOT / "README.md")


def test_the_rows_beside_the_names_of_objectives_have_these_objectives():
    page = text_of(ROOT / "docs" / "objectives.md")
    named = re.findall(r"(?m)^\| [^|`]+ \| `([a-z0-9-]+)` \| `([^`]+/[^`]+)` \|$", page)
    assert len(named) >= 21
    for objective, row in named:
        assert build(row, "nano").objective == OBJECTIVES[objective], row


def test_the_page_of_settings_has_each_with_its_choices_values_and_meaning(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from settings_page import settings_page

    page = settings_page()
    for name, _ in leaves(BASELINE):
        assert page.count(f"| `{name}` |") == 1, name
    assert "| `model.mlp.d_ff` | whole number | `256` | `3072` |" in page
    assert "`spans`" in page and "| `guard.spikes` | number or none | `none` | `none` |" in page
    for line in re.findall(r"(?m)^\| `.*$", page):
        assert line.split(" | ")[4].strip(), f"a setting's comment is its meaning: {line}"


def test_the_table_of_slices_and_pods_is_the_one_that_its_script_makes(monkeypatch):
    """Else: python docs/pod_plans.py."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    from pod_plans import outdated

    assert not outdated()


def test_the_reference_lists_the_fields_of_a_class_with_their_comments_and_defaults(monkeypatch):
    griffe = pytest.importorskip("griffe", reason="make docs installs it")
    monkeypatch.syspath_prepend(ROOT / "docs")
    from field_comments import FieldComments

    code = '''
class Spans:
    """Where noise falls."""

    # tokens that one span has
    # on average [tokens]
    mean: float = 3.0
    name: str = "#1"  # "iid" or "spans"
    _hidden: int = 0  # for nobody
    bare: int = 1
    unknown: str = setting("<unk>", {"name": ("iid",)})  # read as <unk>
    required: int
    many: tuple[int, ...] = field(default_factory=tuple)  # several
'''
    extensions = griffe.load_extensions(FieldComments())
    with griffe.temporary_visited_module(code, extensions=extensions) as module:
        _, _, fields = module["Spans"].docstring.value.partition("Attributes:\n")
    assert [line.strip() for line in fields.splitlines()] == [
        "mean: tokens that one span has on average [tokens]; default `3.0`",
        """name: "iid" or "spans"; default `'#1'`""",
        "bare: default `1`",
        "unknown: read as &lt;unk>; default `'<unk>'`",
        "required: –",
        "many: several",
    ]


def test_the_site_works_when_its_files_are_opened_from_disk():
    """Links lead to files, the search index is a script, no worker or polyfill comes from the network."""
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert "homepage: index.html" in settings, "else the logo leads to a folder"
    assert "use_directory_urls: false" in settings and "  - offline" in settings
    (shim,) = re.findall(r"polyfills: \[(\S+)\]", settings)
    assert (ROOT / "docs" / shim).exists()
    assert "iframe-worker" in shim, "else material adds one from unpkg.com"
    assert "__pycache__/" in settings and "*.py" in settings
