"""Sentences of documentation with the names of Python objects as entities: named-entity recognition.

Authors mark names in docstrings by Sphinx's roles, such as ``:class:`~sqlalchemy.orm.Session` ``. The role is
the type of the entity, and the markup is removed. A name that its author did not mark is no entity, so that
labels may be missing, as in every annotated text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import CODE_SIGN, TaggedWords, paragraphs, tagged_rows
from lm.data.documentation.packages import PACKAGES
from lm.data.documentation.pinned import matching_modules

# role -> type of the entity
ENTITY_TYPES: Mapping[str, str] = {
    "class": "class",
    "exc": "class",
    "func": "function",
    "meth": "function",
    "attr": "attribute",
    "data": "attribute",
    "mod": "module",
}
NAME_LABELS = (
    "O",
    *(f"{prefix}-{kind}" for kind in dict.fromkeys(ENTITY_TYPES.values()) for prefix in "BI"),
)
# whose authors mark most names; pinned as the built-in corpus is
MARKED_PACKAGES = frozenset(
    "celery jax mlflow-skinny networkx optuna pandas pennylane pyramid pyro-ppl sqlalchemy sympy".split()
)
MARKUP = re.compile(r":(?:py:)?([\w:]+):`([^`]*)`")
PLACE = "\0"  # stands for a marked name while a paragraph is divided into sentences
DOTTED_NAME = re.compile(r"\w+(?:\.\w+)*", re.ASCII)
SENTENCE_END = re.compile(rf"(?<=[.!?])\s+(?=[A-Z{PLACE}])")
WORD = re.compile(rf"{PLACE}|\w+|[^\w\s]", re.ASCII)
OTHER_MARKUP = re.compile(r"[`*]")
SENTENCE_LENGTHS = range(4, 61)  # [words]


def marked_modules(wheels: Path) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield (name, docstrings) of the modules of MARKED_PACKAGES, the same on every machine.

    Wheels that are missing are fetched into ``wheels``. SettingError if a package can be neither read nor
    fetched.
    """
    for package in PACKAGES:
        if package.name in MARKED_PACKAGES:
            yield from matching_modules(package, wheels)[0]


def object_name_rows(modules: Iterable[tuple[str, Iterable[str]]]) -> dict[str, list[Row]]:
    """Return ``{split: rows}``, a row for each sentence with a marked name, its labels in ``entities``."""
    sentences = ((name, chain.from_iterable(map(tagged_sentences, strings))) for name, strings in modules)
    return tagged_rows(sentences, "object names", NAME_LABELS, "entities")


def tagged_sentences(docstring: str) -> Iterator[TaggedWords]:
    """Yield the words of each sentence that has a marked name, with their labels.

    Sentences with other markup, such as literals and formulas, are left out: whether their words are names of
    objects is unknown.

    >>> list(tagged_sentences("Closes the :class:`~orm.Session`, as :meth:`Session.close` does."))[0][2:7]
    [('Session', 'B-class'), (',', 'O'), ('as', 'O'), ('Session', 'B-function'), ('.', 'I-function')]
    """
    for paragraph in paragraphs(docstring):
        if MARKUP.search(paragraph) is None or PLACE in paragraph:
            continue
        markups = MARKUP.finditer(paragraph)
        for sentence in SENTENCE_END.split(MARKUP.sub(PLACE, paragraph)):
            names = [next(markups) for _ in range(sentence.count(PLACE))]
            if tagged := _tag_sentence(sentence, names):
                yield tagged


def _tag_sentence(sentence: str, markups: list[re.Match[str]]) -> TaggedWords:
    """Return the words with their labels; none for a sentence that is not used."""
    is_plain = sentence.isascii() and not OTHER_MARKUP.search(sentence) and not CODE_SIGN.search(sentence)
    if not markups or not is_plain or sentence[-1:] not in ".!?":
        return []
    words: TaggedWords = []
    rest = iter(markups)
    for word in WORD.findall(sentence):
        if word != PLACE:
            words.append((word, "O"))
        elif name := _name_words(next(rest)):
            words += name
        else:
            return []
    return words if len(words) in SENTENCE_LENGTHS else []


def _name_words(markup: re.Match[str]) -> TaggedWords:
    """Return the words of a marked name with their labels; none for another role or a title with a target."""
    role, text = markup[1], markup[2]
    name = text.lstrip("~.").removesuffix("()")
    if role not in ENTITY_TYPES or not DOTTED_NAME.fullmatch(name):
        return []
    if text.startswith("~"):  # only the last part is shown
        name = name.rpartition(".")[2]
    first, *others = WORD.findall(name)
    kind = ENTITY_TYPES[role]
    return [(first, f"B-{kind}"), *((word, f"I-{kind}") for word in others)]
