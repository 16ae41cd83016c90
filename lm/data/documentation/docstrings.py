"""English prose from the docstrings and help topics of installed Python packages, which are not imported."""

import ast
import importlib.machinery
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lm.c4 import filters

# What a default install brings, by import name; a package that is absent is skipped.
INSTALLED = """
absl array_record attr click contourpy cycler dateutil docstring_parser einops etils flax fontTools fsspec
google grain humanize idna importlib_resources jax jaxlib joblib lxml markdown_it matplotlib ml_dtypes
mpl_toolkits msgpack narwhals nltk numpy opt_einsum optax orbax packaging PIL portalocker psutil pyarrow
pygments pyparsing regex requests rich rouge_score sacrebleu safetensors scipy sentencepiece simple_parsing
sklearn tensorboardX tensorflow_datasets tensorstore threadpoolctl toml tqdm tree treescope typeguard tyro
urllib3 wrapt yaml zipp
""".split()
STDLIB = sorted(sys.stdlib_module_names)
DEFAULT = STDLIB + INSTALLED
SKIPPED = set("__pycache__ test tests testing _testing idlelib idle_test lib2to3 turtledemo".split())

RULES = filters.Rules()
PARAGRAPH_FILTERS = filters.filters(RULES, filters.LINE_FILTERS)
HEAD = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[rRuU]?(\"\"\"|''')")
OPENING = re.compile(r"^[ \t]*[rRuU]?(\"\"\"|''')", re.MULTILINE)
BULLET = re.compile(r"(?:[-*+•]|\(?\d+[.)]|#\.)\s+")
FIELD = re.compile(r"(?::\w[^:]*:|\*{0,2}\w[\w.]*(?: ?\([^)]*\))?:)\s+")  # ":param x: ...", "x (int): ..."
NO_PROSE = re.compile(r"[^\n:]{1,80} : |[^\w\"'(`*:\[“‘]")  # "x : int", directives, prompts
RULER = re.compile(r"([=\-~^*+#])\1{2,}$")  # under a heading
ROLE = re.compile(r"(?::[\w:]+:)?`[~!]?([^`<]+?)(?:\s*<[^`]*>)?`_*")
CODE_MARK = re.compile(r"[\\{}|<>@]|[=:]{2}| = |https?:")
NO_LETTER = re.compile(r"[^A-Za-z ]")
ASCII = str.maketrans("‘’“”–—\u00a0", "''\"\"-- ")


class Document(NamedTuple):
    name: str  # of a module or help topic
    text: str  # docstrings, "\n\n" between them, "\n" between the paragraphs of one


def files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """(module name, file) of every module of the packages except tests, in order of name."""
    for package in sorted(set(packages)):
        spec = importlib.machinery.PathFinder.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            yield from sorted(_below(package, root))
        if spec and spec.origin and spec.origin.endswith(".py") and not spec.submodule_search_locations:
            yield package, Path(spec.origin)


def _below(package: str, root: str) -> Iterator[tuple[str, Path]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        inner = [package, *Path(folder).relative_to(root).parts]
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix == ".py" and not stem.startswith("test_") and not stem.endswith("_test"):
                yield ".".join(inner if stem == "__init__" else [*inner, stem]), Path(folder, name)


def docstrings(source: str) -> Iterator[str]:
    """Triple-quoted strings opening a module or behind a line ending in a colon; 10 times faster than ast."""
    position = 0
    if head := HEAD.match(source):
        position = source.find(head[1], head.end())
        yield source[head.end() : position]
        position += 3
    while opening := OPENING.search(source, max(position, 0)):
        position = opening.end()
        window = max(0, opening.start() - 500)  # copying all before it would take quadratic time
        line_end = window + len(source[window : opening.start()].rstrip())
        line = source[source.rfind("\n", 0, line_end) + 1 : line_end]
        if line.split("#")[0].rstrip().endswith(":"):
            end = source.find(opening[1], position)
            if end > 0:
                yield source[position:end]
                position = end + 3


def paragraphs(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring, a line each; bullets and fields lose their mark, tables are dropped."""
    lines: list[str] = []
    base, hanging = 0, False
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        text = line.strip()
        word = text[:1].isalpha()  # most lines: no mark, at no cost
        if not word and RULER.match(text):
            text, lines = "", []
        indent = len(line) - len(line.lstrip())
        continues = bool(lines) and bool(text) and (indent > base if hanging else indent == base)
        bullet = None if word else BULLET.match(text)
        if not continues or bullet:
            if lines:
                yield " ".join(lines)
            mark = bullet or FIELD.match(text)
            lines, base, hanging = [], indent, bool(mark)
            if not text or (NO_PROSE.match(text) and not mark):
                continue
            text = text[mark.end() :] if mark else text
        lines.append(text)


def prose(paragraph: str) -> str | None:
    """The paragraph without mark-up, or None if it is not plain English."""
    if not filters.ends_a_sentence(paragraph.rstrip("`*")):  # a cheap test for most of what is not prose
        return None
    text = " ".join(ROLE.sub(r"\1", paragraph).translate(ASCII).replace("`", "").replace("*", "").split())
    if not (text.isascii() and filters.ends_a_sentence(text) and (text[0].isalpha() or text[0] in "\"'(")):
        return None
    return None if CODE_MARK.search(text) or len(NO_LETTER.findall(text)) > 0.15 * len(text) else text


def clean_paragraphs(docstring: str) -> tuple[list[str], str | None]:
    """(clean paragraphs, the docstring's opening if it is one of them)."""
    texts = [prose(paragraph) for paragraph in paragraphs(docstring)]
    return filters.cleaned(list(filter(None, texts)), PARAGRAPH_FILTERS) or [], next(iter(texts), None)


def pages(packages: Iterable[str]) -> Iterator[tuple[str, Iterable[str]]]:
    """(name, docstrings) of every module, and of every help topic as one docstring."""
    for name, path in files(packages):
        source = path.read_text("utf-8", errors="replace")
        if name == "pydoc_data.topics":
            tree = ast.parse(source).body
            topics = next(ast.literal_eval(node.value) for node in tree if isinstance(node, ast.Assign))
            yield from ((f"help.{topic}", [text]) for topic, text in sorted(topics.items()))
        elif '"""' in source or "'''" in source:
            yield name, docstrings(source)


def harvest(packages: Iterable[str] = DEFAULT) -> Iterator[Document]:
    """One document per module, in order of name; no sentence of five words occurs twice in all of them."""
    seen: set[str] = set()
    for name, strings in pages(packages):
        text = ""
        for string in strings:
            lines, opening = clean_paragraphs(string)
            if fresh := [line for line in lines if _is_new(line, seen)]:
                text += ("\n\n" if fresh[0] == opening else "\n") + "\n".join(fresh)
        if filters.long_enough(text.split("\n"), RULES):
            yield Document(name, text.strip())


def unfiltered(packages: Iterable[str]) -> Iterator[Document]:
    """The same modules' docstrings as they stand: mark-up, code, tables and repeats."""
    for name, strings in pages(packages):
        if text := "\n\n".join(filter(None, map(inspect.cleandoc, strings))):
            yield Document(name, text)


def _is_new(line: str, seen: set[str]) -> bool:
    sentences = [s for s in filters.sentences(line) if s.count(" ") + 1 >= RULES.words_per_line]
    keys = set(map(filters.match_key, sentences))
    is_new = not keys & seen
    seen |= keys
    return is_new
