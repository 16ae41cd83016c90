"""Make the rows of the tasks on the documentation; a model of a million parameters learns a part of each.

Contexts and answers are short enough for the inputs and targets of the small scales. Where there are
candidates, neither frequency nor position tells the right one from the others.
"""

import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from lm.c4.filters import sentences
from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import Document

CONTEXT = 36  # most words of an input
ANSWER = 16  # most words of a target
FOLLOWING = 20  # most words of a sentence of "next"
CANDIDATES = 10  # of a cloze
SENTENCES = 4  # candidates of "next"
FREQUENT = 40  # least occurrences in the corpus of a word that is a candidate
BAND = 1.5  # largest ratio of the frequencies of two candidates

BEFORE_NOUNS = frozenset(
    "a an the this that these those its their each any all no some every another".split()
)
PREPOSITIONS = frozenset("of in on for from with by at as into about between over under after before".split())
VERBAL = frozenset(
    "to is are be was were been can could will would must may might should not does do has have".split()
)
SMALL_WORDS = frozenset("a an the of to in is are be by for from with on as at or and it that this".split())
CUES = frozenset(
    "if when by with from for as to of in on using than which because unless until into is are".split()
)
SUFFIXES = ("ing", "ed", "ly", "ion", "ment", "able", "al", "er", "s")

Groups = Mapping[str, Mapping[str, int]]  # by word, the words like it, itself included, and their counts


def docstrings_of(documents: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of the document, sentences) for each docstring."""
    for name, text in documents:
        for docstring in text.split("\n\n"):
            yield name, sentences(docstring.replace("\n", " "))


# ---- cloze: which of ten words fits


def word_groups(texts: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return, for each frequent word, the words of its class that are about as frequent, with their counts.

    A class is given by the end of a word and by its neighbours: the first of SUFFIXES that fits, the kind of
    function word that is most often before it, and whether a content word or something else comes after it
    more often. No tagger is needed; nouns and verbs with equal ends and neighbours, such as "returns" and
    "values" at the start of a clause, are not told apart.
    """
    counts: Counter[str] = Counter()
    before: dict[str, Counter[int]] = defaultdict(Counter)
    after: Counter[str] = Counter()
    kinds = [
        (word, kind) for kind, words in enumerate((BEFORE_NOUNS, PREPOSITIONS, VERBAL)) for word in words
    ]
    kind_of = dict(kinds)
    for text in texts:
        words = text.split()
        for i, word in enumerate(words):
            if is_plain(bare(word)):
                counts[bare(word)] += 1
                if i and words[i - 1] in kind_of:
                    before[bare(word)][kind_of[words[i - 1]]] += 1
                follower = words[i + 1] if i + 1 < len(words) and bare(word) == word else "."
                after[bare(word)] += is_plain(bare(follower)) and follower not in kind_of
    classes: dict[tuple, list[str]] = defaultdict(list)
    for word, count in counts.items():
        if count >= FREQUENT and len(word) > 3:
            suffix = next((end for end in SUFFIXES if word.endswith(end)), "")
            kind = max(before[word], key=lambda kind: (before[word][kind], -kind), default=None)
            classes[suffix, kind, 2 * after[word] > count].append(word)
    return dict(_bands(classes.values(), counts))


def _bands(classes: Iterable[list[str]], counts: Counter[str]) -> Iterator[tuple[str, dict[str, int]]]:
    for words in classes:
        words.sort(key=lambda word: (-counts[word], word))
        band: dict[str, int] = {}
        for word in [*words, ""]:  # "" ends the last band
            if band and counts[word] * BAND < next(iter(band.values())):
                if len(band) > CANDIDATES:
                    yield from ((one, band) for one in band)
                band = {}
            band[word] = counts[word]


def cloze(documents: Iterable[Document], rng: random.Random, groups: Groups) -> Iterator[Row]:
    """Yield sentences that lack a word, with ten candidates for it.

    Nine other words of its class and band are drawn in proportion to their counts. None of the ten occurs
    elsewhere in the input. Their order is that of a hash.
    """
    for name, parts in docstrings_of(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = sentence.split()
            if not 6 <= len(words) <= CONTEXT // 2:
                continue
            context = " ".join(previous.split()[-(CONTEXT - len(words)) :])
            seen = Counter(map(bare, (*words, *context.split())))
            gaps = [j for j, word in enumerate(words) if j and bare(word) in groups and seen[bare(word)] == 1]
            if not gaps:
                continue
            gap = rng.choice(gaps)
            answer = bare(words[gap])
            question = " ".join([*words[:gap], words[gap].replace(answer, "_"), *words[gap + 1 :]])
            others = {word: n for word, n in groups[answer].items() if word not in seen}
            if len(others) < CANDIDATES - 1:
                continue
            drawn = [answer, *weighted_sample(others, CANDIDATES - 1, rng)]
            drawn.sort(key=lambda word: zlib.crc32(f"{word} {question}".encode()))
            yield {
                "name": name,
                "question": question,
                "context": context,
                "answers": [answer],
                "candidates": drawn,
            }


def weighted_sample(counts: Mapping[str, int], number: int, rng: random.Random) -> list[str]:
    """Return ``number`` different words, each drawn in proportion to its count among those that are left."""
    left, drawn = dict(counts), []
    for _ in range(number):
        word = rng.choices(list(left), list(left.values()))[0]
        drawn.append(word)
        del left[word]
    return drawn


# ---- the others


def extract(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield cues, such as "if" or "by", in a context, with the one to four words that follow as the answer.

    The answer ends at the next punctuation mark or before the next small word.
    """
    for name, parts in docstrings_of(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = " ".join([previous, sentence]).split()[-CONTEXT:]
            counts = Counter(words)
            spans = []
            for i, word in enumerate(words):
                span = words[i + 1 : i + 1 + _span_length(words[i + 1 :])]
                if word in CUES and counts[word] == 1 and span and content(" ".join(span)):
                    spans.append((word, bare(" ".join(span))))
            if spans and len(words) >= 10:
                cue, answer = rng.choice(spans)
                yield {"name": name, "question": cue, "context": " ".join(words), "answers": [answer]}


def _span_length(words: Sequence[str]) -> int:
    """Return the words of an answer, one to four: up to one that ends in a mark, or before a small word."""
    for i, word in enumerate(words[:4]):
        if i and word in (SMALL_WORDS | CUES) - BEFORE_NOUNS:
            return i
        if bare(word) != word:
            return i + 1
    return min(4, len(words))


def acceptability(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield minimal pairs: a sentence and the same with words moved; the context is the sentence before."""
    for name, parts in docstrings_of(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = sentence.split()
            if 6 <= len(words) <= ANSWER and len(set(words)) > 4:
                context = " ".join(previous.split()[-ANSWER:])
                moved = " ".join(damaged(words, rng))
                yield {"name": name, "context": context, "sentence": sentence, "damaged": moved}


def damaged(words: list[str], rng: random.Random) -> list[str]:
    """Return the words with two or four neighbours in another order, the first and the last excepted."""
    other = words
    while other == words:
        length = rng.choice((2, 4))
        start = rng.randrange(1, len(words) - length)
        other = words[:start] + rng.sample(words[start : start + length], length) + words[start + length :]
    return other


def first_sentence(documents: Iterable[Document], _rng: random.Random) -> Iterator[Row]:
    """Yield the first sentences of docstrings and what follows them, where the two share a content word."""
    for name, (summary, *rest) in docstrings_of(documents):
        body = " ".join(" ".join(rest).split()[:CONTEXT])
        is_long = len(body.split()) >= 6 and len(summary.split()) <= ANSWER
        if is_long and content(summary) & content(body):
            yield {"name": name, "document": body, "summary": summary}


def next_sentence(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield sentences, each with four of which it follows one; the other three are of other documents.

    Only the relation between sentences tells which: each of the four is followed by such a sentence in its
    document, and what is scored is the same sentence after each, so that neither length nor frequency counts.
    """
    pairs = []
    for name, parts in docstrings_of(documents):
        fit = [(a, b) for a, b in pairwise(parts) if all(3 <= len(x.split()) <= FOLLOWING for x in (a, b))]
        pairs += [(name, *pair) for pair in fit[::2]]
    for name, first, second in pairs:
        others = rng.sample(
            [p for p in rng.sample(pairs, min(len(pairs), 12)) if p[0] != name], SENTENCES - 1
        )
        label = zlib.crc32(second.encode()) % SENTENCES
        choices = [other[1] for other in others]
        choices.insert(label, first)
        yield {"name": name, "sentences": choices, "following": second, "label": label}


def restore(documents: Iterable[Document], _rng: random.Random) -> Iterator[Row]:
    """Yield sentences without their small words (the, of, to, ...), and the whole sentences as answers."""
    for name, text in documents:
        for sentence in sentences(text.replace("\n", " ")):
            words = sentence.split()
            left = [word for word in words if word not in SMALL_WORDS]
            if 6 <= len(words) <= ANSWER and len(words) - len(left) >= 2:
                yield {"name": name, "document": " ".join(left), "summary": sentence}


TaskGenerator = Callable[[Sequence[Document], random.Random], Iterator[Row]]


def task_generators(groups: Groups) -> dict[str, TaskGenerator]:
    """Return the functions that make rows of documents, by task; ``groups`` are those of ``word_groups``."""
    return {
        "cloze": partial(cloze, groups=groups),
        "extract": extract,
        "acceptability": acceptability,
        "first-sentence": first_sentence,
        "next": next_sentence,
        "restore": restore,
    }


def is_plain(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower()


def bare(word: str) -> str:
    return word.strip(".,;:!?()[]\"'")


def content(text: str) -> set[str]:
    """Return the content words of a text: those of five letters or more, in lower case."""
    return set(re.findall(r"[a-z]{5,}", text.lower()))
