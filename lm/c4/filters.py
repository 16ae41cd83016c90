"""The rules that made C4 out of Common Crawl (Raffel et al. 2020, section 2.2), as a table of named filters.

A page is a list of lines. A filter maps it to the lines that remain, or to None when it drops the page.

The order is that of TFDS's code, which made C4: filters of lines come first, so that a page is judged by the
lines that remain. The paper's rules are about whole pages: any page with "lorem ipsum" or a curly bracket is
removed. Here, as in C4, such a page is kept if the bracket is in a line that an earlier filter drops, such as
one without terminal punctuation. Two parts differ from C4: py3langid identifies the language instead of
langdetect, and a regular expression finds sentences instead of NLTK. docs/corpora.md says what differs.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm.config.base import SettingError, nearest

Lines = list[str]
Filter = Callable[[Lines], Lines | None]
Unit = Literal["spans", "lines"]

END_MARKS = (".", "?", "!", '"')
POLICY = re.compile("terms of use|(?:privacy|cookie) policy|(?:uses|use of|use) cookies", re.IGNORECASE)
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
IDENTIFIED = 2000  # of a page, by which its language is identified, the slowest filter [characters]
# An end mark, closing quotes or brackets, a blank, and something that can start a sentence.
BOUNDARY = re.compile(r"(?<=[.?!])([\"')\]]*)\s+(?=[\"'(\[]*[A-Z0-9])")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|al|Fig|Eqs?|Sec|No|Vol|pp|Mrs?|Ms|Dr|St|Jr|[A-Z])\.$")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Thresholds of C4; the journal version of the paper says 5 sentences and 3 words instead."""

    sentences_per_page: int = 3  # drop pages with fewer sentences than this [sentences]
    words_per_line: int = 5  # drop lines with fewer words than this [words]
    word_length: int = 1000  # drop lines with a word longer than this [characters]
    page_length: int = 190_000  # drop pages longer than this, as TFDS does [characters]
    # drop pages with fewer lines than this, or fewer than three long ones (mC4: 3); 0: keep them [lines]
    paragraphs: int = 0
    paragraph_length: int = 200  # length of a long line [characters]
    language: str = "en"  # keep pages in this language: an ISO 639-1 code
    probability: float = 0.99  # drop pages whose language has a lower probability than this
    bad_words: str = ""  # file with one word or phrase per line; pages with one of them are dropped
    domains: str = ""  # file with one host per line; pages from other hosts are dropped; "": keep all


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, split where an end mark is followed by a blank and a capital or digit.

    C4's were found by NLTK's Punkt, which learnt its abbreviations from text; here they are a short list.
    """
    parts, start = [], 0
    for boundary in BOUNDARY.finditer(text):
        if not ABBREVIATION.search(text, start, boundary.start()):
            parts.append(text[start : boundary.end(1)].strip())
            start = boundary.end()
    return [sentence for sentence in (*parts, text[start:].strip()) if sentence]


def ends_a_sentence(line: str) -> bool:
    return line.endswith(END_MARKS) and not line.endswith("...")


def has_paragraphs(lines: Lines, count: int, length: int) -> bool:
    """Return whether there are ``count`` lines, and the three longest have ``length`` characters, at least.

    With ``count`` 0 it is always true.
    """
    return not count or (len(lines) >= count and all(size >= length for size in sorted(map(len, lines))[-3:]))


def long_enough(lines: Iterable[str], rules: Rules) -> bool:
    count = 0
    return any((count := count + len(sentences(line))) >= rules.sentences_per_page for line in lines)


def without_bad_words(words: Iterable[str], language: str) -> Callable[[str], bool]:
    """Return a test that texts with any of the words fail; whole words count if the language has blanks."""
    phrases = "|".join(re.escape(word.strip()) for word in words if word.strip())
    if not phrases:
        return lambda text: True
    spaced = language not in ("ja", "th", "zh")
    pattern = re.compile(rf"(?<!\w)(?:{phrases})(?!\w)" if spaced else phrases, re.IGNORECASE)
    return lambda text: not pattern.search(text)


@functools.cache
def identifier() -> Any:
    # py3langid is released several times a year, needs numpy alone and gives the same answer each time;
    # langdetect, which C4 used, had its last release in 2021 and draws random numbers.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def is_language(text: str, language: str, probability: float) -> bool:
    identified, certainty = identifier().classify(text[:IDENTIFIED])
    return identified == language and certainty >= probability


def lines_that(test: Callable[[str], bool]) -> Filter:
    """Return a filter that drops the lines that fail the test."""
    return lambda lines: [line for line in lines if test(line)]


def no_line_that(test: Callable[[str], bool]) -> Filter:
    """Return a filter that drops a page with any line that passes the test."""
    return lambda lines: None if any(map(test, lines)) else lines


def pages_that(test: Callable[[Lines], bool]) -> Filter:
    """Return a filter that drops a page whose lines together fail the test."""
    return lambda lines: lines if test(lines) else None


def _bad_words(rules: Rules) -> Filter:
    words = Path(rules.bad_words).read_text("utf-8").splitlines() if rules.bad_words else ()
    test = without_bad_words(words, rules.language)
    return pages_that(lambda lines: test("\n".join(lines)))


# In the order of TFDS. The filters of lines are between those of pages; "lorem-ipsum" and "curly-braces" drop
# pages, by the lines that the filters before them leave.
LINE_FILTERS: Mapping[str, Callable[[Rules], Filter]] = {
    "blanks": lambda rules: lambda lines: [text for line in lines if (text := line.strip())],
    "long-words": lambda rules: lines_that(
        lambda line: max(map(len, line.split()), default=0) <= rules.word_length
    ),
    "citations": lambda rules: lambda lines: [CITATION.sub("", s) if "[" in s else s for s in lines],
    "terminal-punctuation": lambda rules: lines_that(ends_a_sentence),
    "words-per-line": lambda rules: lines_that(lambda line: len(line.split()) >= rules.words_per_line),
    "lorem-ipsum": lambda rules: no_line_that(lambda line: "lorem ipsum" in line.lower()),
    "javascript": lambda rules: lines_that(lambda line: "javascript" not in line.lower()),
    "curly-braces": lambda rules: no_line_that(lambda line: "{" in line),
    "policy": lambda rules: lines_that(lambda line: not POLICY.search(line)),
}
FILTERS: Mapping[str, Callable[[Rules], Filter]] = {
    "page-length": lambda rules: pages_that(lambda lines: len("\n".join(lines)) <= rules.page_length),
    "paragraphs": lambda rules: pages_that(
        lambda lines: has_paragraphs(lines, rules.paragraphs, rules.paragraph_length)
    ),
    **LINE_FILTERS,
    "sentences-per-page": lambda rules: pages_that(lambda lines: long_enough(lines, rules)),
    "bad-words": _bad_words,
    "language": lambda rules: pages_that(
        lambda lines: is_language("\n".join(lines), rules.language, rules.probability)
    ),
}
DUPLICATES = "duplicates"  # the one filter that needs more than one page: span_hashes and without_spans


def switched_off(names: Iterable[str]) -> tuple[str, ...]:
    """Return the filters that ``names`` switch off; "all" stands for all but the language, as in the paper.

    SettingError with the nearest name if there is no such filter.
    """
    names, choices = set(names), (*FILTERS, DUPLICATES, "all")
    for name in sorted(names - set(choices)):
        raise SettingError(f"there is no filter {name!r}{nearest(name, choices)}")
    return tuple(name for name in choices[:-1] if name in names or ("all" in names and name != "language"))


def filters(rules: Rules, names: Iterable[str]) -> Mapping[str, Filter]:
    return {name: FILTERS[name](rules) for name in names}


def cleaned(
    lines: Lines, steps: Mapping[str, Filter], counts: Mapping[str, np.ndarray] | None = None
) -> Lines | None:
    """Return the lines that the filters ``steps`` leave, None if there are none.

    ``counts[name]`` grows by what each filter ``removed``.
    """
    for name, step in steps.items():
        after = step(lines)
        if counts is not None and after is not lines:
            counts[name] += removed(lines, after)
        if not after:
            return None
        lines = after
    return lines


def removed(before: Lines, after: Lines | None) -> np.ndarray:
    """Return how many pages, lines and characters were removed, int64 [3]."""
    after = after or []
    characters = sum(map(len, before)) - sum(map(len, after))
    return np.array([not after, len(before) - len(after), characters], np.int64)


# Duplicates: the paper keeps one of each span of three sentences, TFDS one of each line.


def match_key(line: str) -> str:
    """Return a key that is equal for lines or sentences that count as duplicates."""
    return line.lower().strip()


# the function that splits a line into units, and how many units make a span
UNITS: Mapping[str, tuple[Callable[[str], list[str]], int]] = {
    "spans": (sentences, 3),
    "lines": (lambda line: [line] if line.strip() else [], 1),
}


def span_hashes(lines: Lines, unit: Unit) -> np.ndarray:
    """Return the hash of the span from each unit on, uint64 [spans]; a page of fewer units is one span."""
    split, width = UNITS[unit]
    keys = [match_key(text) for line in lines for text in split(line)]
    spans = ["\n".join(keys[i : i + width]) for i in range(max(1, len(keys) - width + 1) if keys else 0)]
    return np.frombuffer(b"".join(hashlib.blake2b(s.encode(), digest_size=8).digest() for s in spans), "<u8")


def repeated(hashes: np.ndarray) -> np.ndarray:
    """Return where ``hashes``, uint64 [spans], repeat an earlier one, in ascending order, int64 [repeats]."""
    order = np.argsort(hashes, kind="stable")
    return np.sort(order[1:][hashes[order[1:]] == hashes[order[:-1]]])


def without_spans(lines: Lines, marked: np.ndarray, unit: Unit) -> Lines:
    """Return the lines without the units that a marked span covers; ``marked`` is bool [spans].

    Of each text one copy is kept: the first, unless a span before it in the corpus holds a part of it.
    """
    split, width = UNITS[unit]
    covered = np.convolve(marked, np.ones(width, int)) > 0
    remaining, start = [], 0
    for line in lines:
        units = split(line)
        drops = covered[start : start + len(units)]
        start += len(units)
        if not drops.any():
            remaining.append(line)
        elif not drops.all():
            remaining.append(" ".join(text for text, drop in zip(units, drops, strict=False) if not drop))
    return remaining


# Addresses


def normalize_url(url: str) -> str:
    """Return the address without scheme, "www.", tracking parameters, and slashes at the end."""
    return re.sub(r"\?(?:utm_|ref|feed).*", "", re.sub(r"^https?://(?:www\.)?", "", url)).rstrip("/")


def in_domains(url: str, domains: Collection[str]) -> bool:
    """Return whether the address's host, or a domain that it is part of, is listed."""
    host = re.split(r"[/?#]", normalize_url(url))[0].rpartition("@")[2].partition(":")[0].lower().split(".")
    return any(".".join(host[i:]) in domains for i in range(len(host)))


def hash_fraction(name: str, purpose: str) -> float:
    """Return a number in [0, 1) that depends on the name and the purpose alone.

    A document's split so does not depend on the other documents.
    """
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
