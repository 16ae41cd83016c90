"""Sentences and words of documents, as the tasks on the documentation need them."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from lm.c4.filters import sentences
from lm.data.documentation.docstrings import Document

MAX_CONTEXT = 36  # of an input [words]
MAX_ANSWER = 16  # of a target [words]

DETERMINERS = frozenset("a an the this that these those its their each any all no some every another".split())
PREPOSITIONS = frozenset("of in on for from with by at as into about between over under after before".split())
BEFORE_VERBS = frozenset(
    "to is are be was were been can could will would must may might should not does do has have".split()
)
FUNCTION_WORDS = frozenset(
    "a an the of to in is are be by for from with on as at or and it that this".split()
)


def docstring_sentences(documents: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of the document, sentences) for each docstring."""
    for name, text in documents:
        for parts in _sentences_by_docstring(text):
            yield name, [*parts]


@lru_cache(20_000)  # each task reads the same documents
def _sentences_by_docstring(text: str) -> list[list[str]]:
    return [sentences(docstring.replace("\n", " ")) for docstring in text.split("\n\n")]


def is_lowercase_word(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower()


@lru_cache(100_000)
def strip_punctuation(word: str) -> str:
    return word.strip(".,;:!?()[]\"'")


def content_words(text: str) -> set[str]:
    """Return the content words of a text: those of five letters or more, in lower case."""
    return set(re.findall(r"[a-z]{5,}", text.lower()))
