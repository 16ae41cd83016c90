"""The rules that made C4 out of Common Crawl (Raffel et al. 2020, section 2.2), as a table of named filters.

A page is a list of lines. A filter maps it to the lines that remain, or to None if it drops the page.

``Rules.order`` chooses between two orders. "released" is that of TFDS's code, which made C4: filters of lines
come first, and a page is judged by the lines that they leave. A page stays if its curly bracket is in a line
that an earlier filter drops, such as one without terminal punctuation. "paper" follows the paper's words, by
which any page with "lorem ipsum", a curly bracket or a bad word is removed: these filters see the page as it
was read. Two parts differ from C4 in both orders (see docs/choices.md): py3langid identifies the language
instead of langdetect, and a regular expression finds sentences instead of NLTK.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lm.config.base import SettingError, did_you_mean

Lines = list[str]
Filter = Callable[[Lines], Lines | None]
Unit = Literal["spans", "lines"]
Order = Literal["released", "paper"]

TERMINAL_PUNCTUATION = (".", "?", "!", '"')
POLICY_PHRASES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
LANGUAGE_ID_CHARACTERS = 2000  # from the start of a page; identifying its language is the slowest filter
# Terminal punctuation, closing quotes or brackets, white space, and what can begin a sentence: a letter or
# digit, which should not be lower case.
SENTENCE_END = re.compile(r"(?<=[.?!])([\"')\]]*)\s+(?=[\"'(\[]*([^\W_]))")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|al|Fig|Eqs?|Sec|No|Vol|pp|Mrs?|Ms|Dr|St|Jr|[A-Z])\.$")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Order and thresholds of C4's filters; the journal version has 5 sentences and 3 words instead."""

    # released: pages are judged by the lines that filters of lines leave (TFDS); paper: pages with a curly
    # bracket, "lorem ipsum" or a bad word in any line are dropped
    order: Order = "released"
    sentences_per_page: int = 3  # drop pages with fewer sentences than this [sentences]
    words_per_line: int = 5  # drop lines with fewer words than this [words]
    word_length: int = 1000  # drop lines with a word longer than this [characters]
    page_length: int = 190_000  # drop pages longer than this, as TFDS does [characters]
    # drop pages with fewer lines than this, or fewer than three long ones (mC4: 3); 0: keep them [lines]
    paragraphs: int = 0
    paragraph_length: int = 200  # length of a long line [characters]
    # keep pages in this language: an ISO 639-1 code. "terminal-punctuation" and "sentences-per-page" know
    # Western punctuation alone: switch them off for others, as mC4 does
    language: str = "en"
    probability: float = 0.99  # drop pages whose language has a lower probability than this
    bad_words: str = ""  # file with one word or phrase per line; pages with one of them are dropped
    domains: str = ""  # file with one host per line; pages from other hosts are dropped; "": keep all


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, split between terminal punctuation and a capital or digit.

    A letter of a script without capitals begins a sentence too. C4 used NLTK's Punkt, which learns
    abbreviations from text; here they are a short list.
    """
    parts, start = [], 0
    for boundary in SENTENCE_END.finditer(text):
        begins = not boundary[2].islower()
        if begins and not ABBREVIATION.search(text, start, boundary.start()):
            parts.append(text[start : boundary.end(1)].strip())
            start = boundary.end()
    return [sentence for sentence in (*parts, text[start:].strip()) if sentence]


def ends_a_sentence(line: str) -> bool:
    return line.endswith(TERMINAL_PUNCTUATION) and not line.endswith("...")


def mentions_policy(line: str) -> bool:
    """Return whether a line speaks of the rules of a website or of cookies."""
    lower = line.lower()
    return any(phrase in lower for phrase in POLICY_PHRASES)


def has_paragraphs(lines: Lines, count: int, length: int) -> bool:
    """Return whether there are ``count`` lines or more, and the three longest have ``length`` characters.

    With ``count`` 0 it is always true.
    """
    if not count:
        return True
    longest = sorted(map(len, lines))[-3:]
    return len(lines) >= count and all(characters >= length for characters in longest)


def has_enough_sentences(lines: Iterable[str], rules: Rules) -> bool:
    count = 0
    for line in lines:
        count += len(sentences(line))
        if count >= rules.sentences_per_page:
            return True
    return False


def bad_words_test(words: Iterable[str], language: str) -> Callable[[str], bool]:
    """Return a test that fails for texts with any of the words.

    Only whole words match, but in languages without spaces.
    """
    phrases = "|".join(re.escape(word.strip()) for word in words if word.strip())
    if not phrases:
        return lambda text: True
    has_spaces = language not in ("ja", "th", "zh")
    pattern = re.compile(rf"(?<!\w)(?:{phrases})(?!\w)" if has_spaces else phrases, re.IGNORECASE)
    return lambda text: not pattern.search(text)


@functools.cache
def language_identifier() -> Any:
    # py3langid is released several times a year, needs only numpy and is deterministic;
    # langdetect, which C4 used, had its last release in 2021 and draws random numbers.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def is_language(text: str, language: str, probability: float) -> bool:
    identified, certainty = language_identifier().classify(text[:LANGUAGE_ID_CHARACTERS])
    return identified == language and certainty >= probability


def has_longer_word(line: str, length: int) -> bool:
    return len(line) > length and any(len(word) > length for word in line.split())


def keep_lines(test: Callable[[str], bool]) -> Filter:
    """Return a filter that drops the lines that fail the test."""
    return lambda lines: [line for line in lines if test(line)]


def drop_page_with_line(test: Callable[[str], bool]) -> Filter:
    """Return a filter that drops a page with any line that passes the test."""
    return lambda lines: None if any(map(test, lines)) else lines


def keep_page(test: Callable[[Lines], bool]) -> Filter:
    """Return a filter that drops a page whose lines together fail the test."""
    return lambda lines: lines if test(lines) else None


def read_list(path: str) -> list[str]:
    """Return the lines of a text file, without the mark of UTF-8 at its start; [] for the path "".

    Raises OSError if it cannot be read, UnicodeDecodeError if it is not UTF-8.
    """
    return Path(path).read_text("utf-8-sig").splitlines() if path else []


def strip_lines(lines: Lines) -> Lines:
    """Return the lines without white space around them; empty ones are dropped."""
    stripped = map(str.strip, lines)
    return [line for line in stripped if line]


def remove_citations(lines: Lines) -> Lines:
    """Return the lines without the marks of Wikipedia, such as ``[1]`` and ``[edit]``."""
    return [CITATION.sub("", line) if "[" in line else line for line in lines]


def bad_words_filter(rules: Rules) -> Filter:
    """Return the filter that drops pages with a word of the file ``rules.bad_words``."""
    test = bad_words_test(read_list(rules.bad_words), rules.language)
    return keep_page(lambda lines: test("\n".join(lines)))


# In the released order. "lorem-ipsum" and "curly-braces" drop pages, but see only the lines that the filters
# before them leave, and so belong to the filters of lines.
LINE_FILTERS: Mapping[str, Callable[[Rules], Filter]] = {
    "blanks": lambda rules: strip_lines,
    "long-words": lambda rules: keep_lines(lambda line: not has_longer_word(line, rules.word_length)),
    "citations": lambda rules: remove_citations,
    "terminal-punctuation": lambda rules: keep_lines(ends_a_sentence),
    "words-per-line": lambda rules: keep_lines(lambda line: len(line.split()) >= rules.words_per_line),
    "lorem-ipsum": lambda rules: drop_page_with_line(lambda line: "lorem ipsum" in line.lower()),
    "javascript": lambda rules: keep_lines(lambda line: "javascript" not in line.lower()),
    "curly-braces": lambda rules: drop_page_with_line(lambda line: "{" in line),
    "policy": lambda rules: keep_lines(lambda line: not mentions_policy(line)),
}
FILTERS: Mapping[str, Callable[[Rules], Filter]] = {
    "page-length": lambda rules: keep_page(lambda lines: len("\n".join(lines)) <= rules.page_length),
    "paragraphs": lambda rules: keep_page(
        lambda lines: has_paragraphs(lines, rules.paragraphs, rules.paragraph_length)
    ),
    **LINE_FILTERS,
    "sentences-per-page": lambda rules: keep_page(lambda lines: has_enough_sentences(lines, rules)),
    "bad-words": bad_words_filter,
    "language": lambda rules: keep_page(
        lambda lines: is_language("\n".join(lines), rules.language, rules.probability)
    ),
}
# the filters that, in the paper's words, drop a page for any line of it
WHOLE_PAGE_FILTERS = ("lorem-ipsum", "curly-braces", "bad-words")
DUPLICATES = "duplicates"  # the only filter that needs more than one page: span_hashes and remove_spans


def disabled_filters(names: Iterable[str]) -> tuple[str, ...]:
    """Return the filters that ``names`` switch off; "all" means all but the language, as in the paper.

    SettingError with the nearest name if there is no such filter.
    """
    disabled, choices = set(names), (*FILTERS, DUPLICATES, "all")
    for name in sorted(disabled - set(choices)):
        raise SettingError(f"there is no filter {name!r}{did_you_mean(name, choices)}")
    if "all" in disabled:
        disabled |= {*choices} - {"language"}
    return tuple(name for name in choices[:-1] if name in disabled)


def ordered_filters(order: Order) -> tuple[str, ...]:
    """Return the names of all filters in the order in which they are applied."""
    if order == "released":
        return tuple(FILTERS)
    rest = [name for name in FILTERS if name not in WHOLE_PAGE_FILTERS]
    first_line_filter = rest.index(next(iter(LINE_FILTERS)))
    return (*rest[:first_line_filter], *WHOLE_PAGE_FILTERS, *rest[first_line_filter:])


def build_filters(rules: Rules, names: Iterable[str]) -> Mapping[str, Filter]:
    """Return the filters with these names, in the given order."""
    return {name: FILTERS[name](rules) for name in names}


def apply_filters(
    lines: Lines, filters: Mapping[str, Filter], counts: Mapping[str, np.ndarray] | None = None
) -> Lines | None:
    """Return the lines of a page that the filters leave, None if there are none.

    Adds to ``counts[name]`` what each filter removed (``count_removed``).
    """
    for name, apply in filters.items():
        after = apply(lines)
        if counts is not None and after is not lines:
            counts[name] += count_removed(lines, after)
        if not after:
            return None
        lines = after
    return lines


def count_removed(before: Lines, after: Lines | None) -> np.ndarray:
    """Return the pages, lines and characters removed, int64 [3]; ``after`` None: the whole page is."""
    after = after or []
    characters = sum(map(len, before)) - sum(map(len, after))
    return np.array([not after, len(before) - len(after), characters], np.int64)


# Duplicates: the paper keeps one copy of each span of three sentences, TFDS one copy of each line.


def duplicate_key(line: str) -> str:
    """Return a key that is equal for lines or sentences that count as duplicates."""
    return line.lower().strip()


# the function that splits a line into units, and how many units make a span
UNITS: Mapping[str, tuple[Callable[[str], list[str]], int]] = {
    "spans": (sentences, 3),
    "lines": (lambda line: [line] if line.strip() else [], 1),
}


def span_hashes(lines: Lines, unit: Unit) -> np.ndarray:
    """Return the hash of each span of consecutive units, uint64 [spans]; a shorter page is one span."""
    split, width = UNITS[unit]
    keys = [duplicate_key(text) for line in lines for text in split(line)]
    num_spans = max(1, len(keys) - width + 1) if keys else 0
    spans = ["\n".join(keys[i : i + width]) for i in range(num_spans)]
    hashes = (hashlib.blake2b(span.encode(), digest_size=8).digest() for span in spans)
    return np.frombuffer(b"".join(hashes), "<u8")


def repeated_indices(hashes: np.ndarray) -> np.ndarray:
    """Return the positions of hashes, uint64 [spans], that occur earlier too: int64 [repeats], ascending."""
    order = np.argsort(hashes, kind="stable")
    return np.sort(order[1:][hashes[order[1:]] == hashes[order[:-1]]])


def remove_spans(lines: Lines, is_repeated: np.ndarray, unit: Unit) -> Lines:
    """Return the lines without the units that the repeated spans cover; ``is_repeated`` is bool [spans].

    One copy of each text is kept: the first, unless a span before it in the corpus holds a part of it.
    """
    split, width = UNITS[unit]
    covered = np.convolve(is_repeated, np.ones(width, int)) > 0
    remaining, start = [], 0
    for line in lines:
        units = split(line)
        is_covered = covered[start : start + len(units)]
        start += len(units)
        if not is_covered.any():
            remaining.append(line)
        elif not is_covered.all():
            kept = [text for text, drop in zip(units, is_covered, strict=True) if not drop]
            remaining.append(" ".join(kept))
    return remaining


# Addresses


def in_domains(url: str, domains: Collection[str]) -> bool:
    """Return whether the host of an address, or a domain that contains it, is in ``domains``."""
    address = re.sub(r"^([a-z][a-z\d+.-]*:)?//", "", url.lower())
    host = re.split(r"[/?#]", address)[0].rpartition("@")[2].partition(":")[0]
    labels = host.rstrip(".").split(".")
    return any(".".join(labels[i:]) in domains for i in range(len(labels)))


def hash_fraction(name: str, purpose: str) -> float:
    """Return a number in [0, 1) that depends on the name and the purpose alone.

    Splits that are chosen by it do not change when documents are added.
    """
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
