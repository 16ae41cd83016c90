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

# Packages of a default install, by import name; absent ones are skipped.
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
    name: str  # of the module or help topic
    text: str  # docstrings, "\n\n" between them, "\n" between the paragraphs of one


def files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield (module name, file) for every module of the packages except tests, in order of name."""
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
    """Yield the triple-quoted strings that open a module or follow a line ending in a colon.

    Finding them by regular expressions is 10 times faster than parsing with ``ast``.
    """
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
    """Yield the paragraphs of a docstring, a line each, without tables and marks of bullets and fields."""
    lines: list[str] = []
    base, hanging = 0, False
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        text = line.strip()
        word = text[:1].isalpha()  # most lines: no need to look for marks
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
    """Return the paragraph without mark-up, or None if it is not plain English."""
    if not filters.ends_a_sentence(paragraph.rstrip("`*")):  # a cheap test for most of what is not prose
        return None
    text = " ".join(ROLE.sub(r"\1", paragraph).translate(ASCII).replace("`", "").replace("*", "").split())
    if not (text.isascii() and filters.ends_a_sentence(text) and (text[0].isalpha() or text[0] in "\"'(")):
        return None
    return None if CODE_MARK.search(text) or len(NO_LETTER.findall(text)) > 0.15 * len(text) else text


def clean_paragraphs(docstring: str) -> tuple[list[str], str | None]:
    """Return the clean paragraphs, and the docstring's first paragraph, None if that is not plain English."""
    texts = [prose(paragraph) for paragraph in paragraphs(docstring)]
    return filters.apply_filters(list(filter(None, texts)), PARAGRAPH_FILTERS) or [], next(iter(texts), None)


def pages(packages: Iterable[str]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield (name, docstrings) for every module, and for every help topic as a single docstring."""
    for name, path in files(packages):
        source = path.read_text("utf-8", errors="replace")
        if name == "pydoc_data.topics":
            tree = ast.parse(source).body
            topics = next(ast.literal_eval(node.value) for node in tree if isinstance(node, ast.Assign))
            yield from ((f"help.{topic}", [text]) for topic, text in sorted(topics.items()))
        elif '"""' in source or "'''" in source:
            yield name, docstrings(source)


def extract_docstrings(packages: Iterable[str] = DEFAULT) -> Iterator[Document]:
    """Yield a document for each module, in order of name, of clean paragraphs.

    No sentence of five words or more occurs twice in all documents.
    """
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
    """Yield the same modules' docstrings as they stand, with mark-up, code, tables and repeats."""
    for name, strings in pages(packages):
        if text := "\n\n".join(filter(None, map(inspect.cleandoc, strings))):
            yield Document(name, text)


def _is_new(line: str, seen: set[str]) -> bool:
    sentences = [s for s in filters.sentences(line) if s.count(" ") + 1 >= RULES.words_per_line]
    keys = set(map(filters.match_key, sentences))
    is_new = not keys & seen
    seen |= keys
    return is_new
