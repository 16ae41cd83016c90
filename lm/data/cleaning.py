"""The rules that made C4 out of Common Crawl, for one page of text (Raffel et al. 2020, section 2.2).

Not here, as only the open web needs them: bad words, languages, normal forms of addresses, limits on whole pages.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator

END_MARKS = (".", "?", "!", '"')
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
# An end mark, closing quotes or brackets, a blank, and something that can start a sentence.
BOUNDARY = re.compile(r"(?<=[.?!])([\"')\]]*)\s+(?=[\"'(\[]*[A-Z0-9])")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|etc|al|Fig|Eq|Eqs|Sec|No|Vol|pp|Mr|Mrs|Ms|Dr|St|Jr)|\b[A-Z])\.$")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Thresholds of C4; the journal version of the paper says 5 sentences and 3 words instead."""

    sentences_per_page: int = 3  # a page with fewer is dropped [sentences]
    words_per_line: int = 5  # a line with fewer is dropped [words]
    word_length: int = 1000  # a line with a longer word is dropped [characters]


def sentences(text: str) -> list[str]:
    """The sentences of a text, split where an end mark is followed by a blank and a capital or a digit."""
    found, start = [], 0
    for boundary in BOUNDARY.finditer(text):
        if not ABBREVIATION.search(text, start, boundary.start()):
            found.append(text[start : boundary.end(1)].strip())
            start = boundary.end()
    return [sentence for sentence in (*found, text[start:].strip()) if sentence]


def has_long_word(line: str, rules: Rules) -> bool:
    return len(line) > rules.word_length and any(len(word) > rules.word_length for word in line.split())


def ends_a_sentence(line: str) -> bool:
    return line.endswith(END_MARKS) and not line.endswith("...")


def is_policy(line: str) -> bool:
    lower = line.lower()
    return any(phrase in lower for phrase in POLICY)


def clean_lines(page: str, rules: Rules) -> list[str] | None:
    """The lines worth keeping; None if one line condemns the page. The order of the rules is that of TFDS."""
    kept = []
    for line in map(str.strip, page.splitlines()):
        if has_long_word(line, rules):
            continue
        line = CITATION.sub("", line)
        if not ends_a_sentence(line) or len(line.split()) < rules.words_per_line:
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return None
        if "javascript" in lower:
            continue
        if "{" in line:
            return None
        if not is_policy(line):
            kept.append(line)
    return kept


def long_enough(lines: Iterable[str], rules: Rules) -> bool:
    count = 0
    return any((count := count + len(sentences(line))) >= rules.sentences_per_page for line in lines)


def clean_page(page: str, rules: Rules) -> str | None:
    """The page's clean lines, or None when it is dropped."""
    lines = clean_lines(page, rules)
    return "\n".join(lines) if lines and long_enough(lines, rules) else None


def remove_duplicates(pages: Iterable[str], rules: Rules, seen: set[str] | None = None) -> Iterator[str | None]:
    """Each page without the lines met before, on it or an earlier one; None where too little is left."""
    seen = set() if seen is None else seen
    for page in pages:
        lines = first_occurrences(page.split("\n"), seen, key=normal)
        yield "\n".join(lines) if long_enough(lines, rules) else None


def first_occurrences(lines: Iterable[str], seen: set[str], key: Callable[[str], str]) -> list[str]:
    kept = []
    for line in lines:
        if key(line) not in seen:
            seen.add(key(line))
            kept.append(line)
    return kept


def normal(line: str) -> str:
    """What two lines share that count as one: the paper speaks of three-sentence spans, TFDS compares lines."""
    return line.lower().strip()
