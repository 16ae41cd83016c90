"""English prose from the docstrings and help topics of installed Python packages, which are not imported."""

import ast
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from string import ascii_letters
from typing import Literal, NamedTuple

from lm.c4 import filters
from lm.data.corpus.tfds import Row

# Packages of a default install, by import name; those that are missing are skipped.
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

COPIES = set("_vendor vendor vendored _vendored extern third_party thirdparty".split())
SKIPPED_IN_WHEELS = SKIPPED | COPIES

RULES = filters.Rules()
PARAGRAPH_FILTERS = filters.build_filters(RULES, filters.LINE_FILTERS)
MODULE_DOCSTRING = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[rRuU]?(\"\"\"|''')")
DOCSTRING_START = re.compile(r"^[ \t]*[rRuU]?(\"\"\"|''')", re.MULTILINE)
BULLET_MARK = re.compile(r"(?:[-*+•]|\(?\d+[.)]|#\.)\s+", re.ASCII)
# fields of Sphinx and of Google: ":param x: ..." and "x (int): ..."
FIELD_MARK = re.compile(r"(?::\w[^:]*:|\*{0,2}\w[\w.]*(?: ?\([^)]*\))?:)\s+", re.ASCII)
NOT_PROSE = re.compile(r"[^\n:]{1,80} : |[^\w\"'(`*:\[“‘]", re.ASCII)  # "x : int", directives, prompts
UNDERLINE = re.compile(r"([=\-~^*+#])\1{2,}$")  # below a heading
SPHINX_ROLE = re.compile(r"(?::[\w:]+:)?`[~!]?([^`<]+?)(?:\s*<[^`]*>)?`_*")
CODE_SIGN = re.compile(r"[\\{}|<>@]|[=:]{2}| = |https?:")
# a word with a capital, digit or underscore that does not begin the sentence
NAME_OR_NUMBER = re.compile(r"(?<=[ (\"'])[a-z]*[A-Z0-9_][^ ,;:)]*", re.ASCII)
WITHOUT_LETTERS = str.maketrans("", "", ascii_letters + " ")
ASCII = str.maketrans("‘’“”–—\u00a0", "''\"\"-- ")


# a document is in train if its hash is below the first, in validation if below the second, else in test
TRAIN_BELOW, VALIDATION_BELOW = 0.8, 0.9

TaggedWords = list[tuple[str, str]]  # the words of a text, each with its tag


class Document(NamedTuple):
    name: str  # of the module or help topic
    text: str  # docstrings, separated by "\n\n"; their paragraphs are separated by "\n"


def split_of(name: str, purpose: str = "corpus") -> Literal["train", "validation", "test"]:
    """Return the split of a document, which depends on its name alone.

    So no set trains on what another is evaluated on. ``purpose``: seed of the hash.
    """
    fraction = filters.hash_fraction(name, purpose)
    if fraction < TRAIN_BELOW:
        return "train"
    return "validation" if fraction < VALIDATION_BELOW else "test"


def tagged_rows(
    modules: Iterable[tuple[str, Iterable[TaggedWords]]], purpose: str, labels: Sequence[str], column: str
) -> dict[str, list[Row]]:
    """Return ``{split: rows}``, a row for each text of tagged words; no text occurs twice in all splits.

    A row has the ``name`` of its module, the ``tokens``, and in ``column`` the index in ``labels`` of each
    token's tag. The split of a module, train, validation or report, depends on its name alone.
    """
    splits: dict[str, list[Row]] = {"train": [], "validation": [], "report": []}
    seen: set[tuple[str, ...]] = set()
    for name, texts in modules:
        split = split_of(name, purpose)
        for text in texts:
            words, tags = zip(*text, strict=True)
            if words not in seen:
                seen.add(words)
                row = {"name": name, "tokens": [*words], column: [labels.index(tag) for tag in tags]}
                splits["report" if split == "test" else split].append(row)
    return splits


def module_files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield (module name, file) for every module of the packages except tests, sorted by name."""
    for package in sorted(set(packages)):
        if (spec := importlib.machinery.PathFinder.find_spec(package)) is None:
            continue
        for root in spec.submodule_search_locations or ():
            yield from sorted(_modules_below(package, root))
        if not spec.submodule_search_locations and spec.origin and spec.origin.endswith(".py"):
            yield package, Path(spec.origin)


def _modules_below(package: str, root: str) -> Iterator[tuple[str, Path]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        inner = [package, *Path(folder).relative_to(root).parts]
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix == ".py" and not stem.startswith("test_") and not stem.endswith("_test"):
                yield ".".join(inner if stem == "__init__" else [*inner, stem]), Path(folder, name)


def docstrings(source: str) -> Iterator[str]:
    """Yield the triple-quoted strings that open a module or follow a line ending in a colon.

    Regular expressions find them 10 times faster than parsing with ``ast`` does.
    """
    position = 0
    if opening := MODULE_DOCSTRING.match(source):
        position = source.find(opening[1], opening.end())
        yield source[opening.end() : position]
        position += 3
    while opening := DOCSTRING_START.search(source, max(position, 0)):
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
    """Yield the paragraphs of a docstring, each on one line, without tables, bullets and names of fields."""
    lines: list[str] = []
    base, hanging = 0, False
    for line in [*dedent(docstring).split("\n"), ""]:
        text = line.strip()
        word = text[:1].isascii() and text[:1].isalpha()  # most lines: no need to look for marks
        if not word and UNDERLINE.match(text):
            text, lines = "", []
        indent = len(line) - len(line.lstrip())
        has_indent = indent > base if hanging else indent == base  # that of the paragraph
        continues = bool(lines) and bool(text) and has_indent
        bullet = None if word else BULLET_MARK.match(text)
        if not continues or bullet:
            if lines:
                yield " ".join(lines)
            mark = bullet or FIELD_MARK.match(text)
            lines, base, hanging = [], indent, bool(mark)
            if not text or (NOT_PROSE.match(text) and not mark):
                continue
            text = text[mark.end() :] if mark else text
        lines.append(text)


@lru_cache(10_000)
def to_prose(paragraph: str) -> str | None:
    """Return the paragraph without mark-up, or None if it is not plain English."""
    if not filters.ends_a_sentence(paragraph.rstrip("`*")):  # a cheap test, which most code fails
        return None
    text = SPHINX_ROLE.sub(r"\1", paragraph) if "`" in paragraph else paragraph  # most have none
    text = text.translate(ASCII).replace("`", "").replace("*", "")
    text = " ".join(text.split())
    if not (text.isascii() and filters.ends_a_sentence(text) and (text[0].isalpha() or text[0] in "\"'(")):
        return None
    if CODE_SIGN.search(text) or len(text.translate(WITHOUT_LETTERS)) > 0.15 * len(text):
        return None
    return text


def clean_paragraphs(docstring: str) -> tuple[list[str], str | None]:
    """Return the clean paragraphs, and the docstring's first paragraph, None if that is not plain English."""
    texts = [to_prose(paragraph) for paragraph in paragraphs(docstring)]
    clean = filters.apply_filters([text for text in texts if text], PARAGRAPH_FILTERS) or []
    return clean, texts[0] if texts else None


def module_docstrings(packages: Iterable[str]) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield (name, docstrings) of every module; each help topic is a module with a single docstring."""
    for name, path in module_files(packages):
        source = path.read_text("utf-8", errors="replace")
        if name == "pydoc_data.topics":
            tree = ast.parse(source).body
            topics = next(ast.literal_eval(node.value) for node in tree if isinstance(node, ast.Assign))
            yield from ((f"help.{topic}", [text]) for topic, text in sorted(topics.items()))
        elif '"""' in source or "'''" in source:
            yield name, docstrings(source)


def extract_docstrings(packages: Iterable[str] = DEFAULT) -> Iterator[Document]:
    """Yield a document of clean paragraphs for each module, sorted by name.

    A paragraph is left out if one of its sentences, of five words or more, occurs in an earlier paragraph.
    """
    seen: set[str] = set()
    for name, strings in module_docstrings(packages):
        text = ""
        for string in strings:
            lines, first_paragraph = clean_paragraphs(string)
            if new_lines := [line for line in lines if is_new(line, seen)]:
                separator = "\n\n" if new_lines[0] == first_paragraph else "\n"
                text += separator + "\n".join(new_lines)
        if filters.has_enough_sentences(text.split("\n"), RULES):
            yield Document(name, text.strip())


def unfiltered(packages: Iterable[str]) -> Iterator[Document]:
    """Yield the docstrings of the same modules unchanged, with mark-up, code, tables and repetitions."""
    for name, strings in module_docstrings(packages):
        if text := "\n\n".join(filter(None, map(dedent, strings))):
            yield Document(name, text)


def is_new(line: str, seen: set[str]) -> bool:
    """Return whether no sentence of the line was seen before; add all of them to ``seen``."""
    sentences = [s for s in filters.sentences(line) if s.count(" ") + 1 >= RULES.words_per_line]
    keys = set(map(filters.duplicate_key, sentences))
    unseen = not keys & seen
    seen |= keys
    return unseen


def dedent(docstring: str) -> str:
    """Return the docstring without common indentation; ``inspect.cleandoc`` differs between versions."""
    lines = docstring.expandtabs().split("\n")
    margins = [len(line) - len(line.lstrip(" ")) for line in lines[1:] if line.strip(" ")]
    margin = min(margins, default=0)
    return "\n".join([lines[0].lstrip(" "), *(line[margin:] for line in lines[1:])]).strip("\n")


def is_module_path(path: str) -> bool:
    """Return whether a file of a distribution is a module that is no test and no copy of another package."""
    *folders, name = path.split("/")
    stem = name.removesuffix(".py")
    return (
        name != stem
        and not path.startswith("..")
        and not SKIPPED_IN_WHEELS & {*folders}
        and not stem.startswith("test_")
        and not stem.endswith("_test")
    )
