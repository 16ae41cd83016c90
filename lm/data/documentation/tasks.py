"""Generates the rows of the tasks on the documentation; a model of a million parameters learns part of each.

Contexts and answers are short enough for the inputs and targets of the small scales. Where there are
candidates, neither frequency nor position distinguishes the right one from the others.
"""

import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter

from lm.c4.filters import sentences
from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import Document

MAX_CONTEXT = 36  # of an input [words]
MAX_ANSWER = 16  # of a target [words]
MAX_NEXT_SENTENCE = 20  # of a sentence of "next" [words]
CLOZE_CANDIDATES = 10
NEXT_CANDIDATES = 4
MIN_COUNT = 40  # of a candidate word in the corpus
MAX_COUNT_RATIO = 1.5  # between the counts of two candidate words

BEFORE_NOUNS = frozenset(
    "a an the this that these those its their each any all no some every another".split()
)
PREPOSITIONS = frozenset("of in on for from with by at as into about between over under after before".split())
BEFORE_VERBS = frozenset(
    "to is are be was were been can could will would must may might should not does do has have".split()
)
FUNCTION_WORDS = frozenset(
    "a an the of to in is are be by for from with on as at or and it that this".split()
)
CUES = frozenset(
    "if when by with from for as to of in on using than which because unless until into is are".split()
)
SUFFIXES = ("ing", "ed", "ly", "ion", "ment", "able", "al", "er", "s")

WordGroups = Mapping[str, Mapping[str, int]]  # for each word, the words of its group and their counts


def docstring_sentences(documents: Iterable[Document]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of the document, sentences) for each docstring."""
    for name, text in documents:
        for docstring in text.split("\n\n"):
            yield name, sentences(docstring.replace("\n", " "))


# ---- cloze: which of ten words fits


def word_groups(texts: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return, for each frequent word, the words of its class that are about as frequent, with their counts.

    The class of a word consists of the first of SUFFIXES that it has, the kind of function word that precedes
    it most often, and whether it is followed by a content word more often than not. No tagger is needed, but
    nouns and verbs with the same suffix and neighbours, such as "returns" and "values" at the start of a
    clause, are in one class.
    """
    counts: Counter[str] = Counter()
    kinds_before: dict[str, Counter[int]] = defaultdict(Counter)  # by the index of a kind in ``kinds``
    content_after: Counter[str] = Counter()
    kinds = (BEFORE_NOUNS, PREPOSITIONS, BEFORE_VERBS)
    kind_of = {word: index for index, words in enumerate(kinds) for word in words}
    for text in texts:
        words = text.split()
        for previous, token, following in zip(["", *words], words, [*words[1:], "."], strict=False):
            word = strip_punctuation(token)
            if not is_lowercase_word(word):
                continue
            counts[word] += 1
            if previous in kind_of:
                kinds_before[word][kind_of[previous]] += 1
            has_punctuation = token != word  # so that the next word is in another phrase
            if not has_punctuation and following not in kind_of:
                content_after[word] += is_lowercase_word(strip_punctuation(following))
    classes: dict[tuple, list[str]] = defaultdict(list)
    for word, count in counts.items():
        if count >= MIN_COUNT and len(word) > 3:
            suffix = next((suffix for suffix in SUFFIXES if word.endswith(suffix)), "")
            before = sorted(kinds_before[word].items())  # of equally frequent kinds, max takes the first
            kind = max(before, key=itemgetter(1))[0] if before else None
            classes[suffix, kind, 2 * content_after[word] > count].append(word)
    return dict(_frequency_bands(classes.values(), counts))


def _frequency_bands(
    classes: Iterable[list[str]], counts: Counter[str]
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (word, band): a band has the words of a class whose counts are within MAX_COUNT_RATIO.

    Bands with too few candidates are left out.
    """
    for words in classes:
        words.sort(key=lambda word: (-counts[word], word))
        band: dict[str, int] = {}
        for word in [*words, ""]:  # "" ends the last band
            if band and counts[word] * MAX_COUNT_RATIO < next(iter(band.values())):
                if len(band) > CLOZE_CANDIDATES:
                    yield from ((member, band) for member in band)
                band = {}
            band[word] = counts[word]


def cloze(documents: Iterable[Document], rng: random.Random, groups: WordGroups) -> Iterator[Row]:
    """Yield sentences that lack a word, with ten candidates for it.

    The nine others are drawn from the word's group in proportion to their counts. None of the ten occurs
    elsewhere in the input. They are sorted by a hash.
    """
    for name, parts in docstring_sentences(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = sentence.split()
            if not 6 <= len(words) <= MAX_CONTEXT // 2:
                continue
            context = " ".join(previous.split()[-(MAX_CONTEXT - len(words)) :])
            bare_words = [strip_punctuation(word) for word in words]
            seen = Counter([*bare_words, *map(strip_punctuation, context.split())])
            gaps = [i for i, word in enumerate(bare_words) if i and word in groups and seen[word] == 1]
            if not gaps:
                continue
            gap = rng.choice(gaps)
            answer = bare_words[gap]
            question = " ".join([*words[:gap], words[gap].replace(answer, "_"), *words[gap + 1 :]])
            others = {word: n for word, n in groups[answer].items() if word not in seen}
            if len(others) < CLOZE_CANDIDATES - 1:
                continue
            drawn = [answer, *weighted_sample(others, CLOZE_CANDIDATES - 1, rng)]
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


# ---- the other tasks


def extract(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield cues, such as "if" or "by", in a context, with the one to four words that follow as the answer.

    The answer ends at the next punctuation mark or before the next function word.
    """
    for name, parts in docstring_sentences(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = " ".join([previous, sentence]).split()[-MAX_CONTEXT:]
            counts = Counter(words)
            spans = []
            for i, word in enumerate(words):
                span = words[i + 1 : i + 1 + _span_length(words[i + 1 :])]
                if word in CUES and counts[word] == 1 and span and content_words(" ".join(span)):
                    spans.append((word, strip_punctuation(" ".join(span))))
            if spans and len(words) >= 10:
                cue, answer = rng.choice(spans)
                yield {"name": name, "question": cue, "context": " ".join(words), "answers": [answer]}


def _span_length(words: Sequence[str]) -> int:
    """Return the number of words of an answer, 1 to 4.

    It ends with a word that a punctuation mark follows, or before a function word.
    """
    for i, word in enumerate(words[:4]):
        if i and word in (FUNCTION_WORDS | CUES) - BEFORE_NOUNS:
            return i
        if strip_punctuation(word) != word:
            return i + 1
    return min(4, len(words))


def acceptability(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield minimal pairs: a sentence, and the same with words moved; the context is the sentence before."""
    for name, parts in docstring_sentences(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = sentence.split()
            if 6 <= len(words) <= MAX_ANSWER and len(set(words)) > 4:
                context = " ".join(previous.split()[-MAX_ANSWER:])
                moved = " ".join(shuffle_neighbours(words, rng))
                yield {"name": name, "context": context, "sentence": sentence, "damaged": moved}


def shuffle_neighbours(words: list[str], rng: random.Random) -> list[str]:
    """Return the words with two or four neighbours in another order; the first and the last word stay."""
    other = words
    while other == words:
        length = rng.choice((2, 4))
        start = rng.randrange(1, len(words) - length)
        other = words[:start] + rng.sample(words[start : start + length], length) + words[start + length :]
    return other


def first_sentence(documents: Iterable[Document], _rng: random.Random) -> Iterator[Row]:
    """Yield the first sentence of docstrings and the text after it, if the two share a content word."""
    for name, (summary, *rest) in docstring_sentences(documents):
        body = " ".join(" ".join(rest).split()[:MAX_CONTEXT])
        is_long = len(body.split()) >= 6 and len(summary.split()) <= MAX_ANSWER
        if is_long and content_words(summary) & content_words(body):
            yield {"name": name, "document": body, "summary": summary}


def next_sentence(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield sentences, each with four candidates: it follows one of them, three are from other documents.

    Only the relation between sentences identifies the right one. Each of the four is followed by a sentence
    of such a length in its document, and the same sentence is scored after each, so that neither length nor
    frequency helps.
    """
    pairs = []
    for name, parts in docstring_sentences(documents):
        fit = [
            (a, b)
            for a, b in pairwise(parts)
            if all(3 <= len(x.split()) <= MAX_NEXT_SENTENCE for x in (a, b))
        ]
        pairs += [(name, *pair) for pair in fit[::2]]
    for name, first, second in pairs:
        others = rng.sample(
            [p for p in rng.sample(pairs, min(len(pairs), 12)) if p[0] != name], NEXT_CANDIDATES - 1
        )
        label = zlib.crc32(second.encode()) % NEXT_CANDIDATES
        choices = [other[1] for other in others]
        choices.insert(label, first)
        yield {"name": name, "sentences": choices, "following": second, "label": label}


def restore(documents: Iterable[Document], _rng: random.Random) -> Iterator[Row]:
    """Yield sentences without their function words (the, of, to, ...), and the whole sentence as answer."""
    for name, text in documents:
        for sentence in sentences(text.replace("\n", " ")):
            words = sentence.split()
            left = [word for word in words if word not in FUNCTION_WORDS]
            if 6 <= len(words) <= MAX_ANSWER and len(words) - len(left) >= 2:
                yield {"name": name, "document": " ".join(left), "summary": sentence}


TaskGenerator = Callable[[Sequence[Document], random.Random], Iterator[Row]]


def task_generators(groups: WordGroups) -> dict[str, TaskGenerator]:
    """Return the function that generates each task's rows from documents; ``groups``: see ``word_groups``."""
    return {
        "cloze": partial(cloze, groups=groups),
        "extract": extract,
        "acceptability": acceptability,
        "first-sentence": first_sentence,
        "next": next_sentence,
        "restore": restore,
    }


def is_lowercase_word(word: str) -> bool:
    return word.isascii() and word.isalpha() and word.islower()


def strip_punctuation(word: str) -> str:
    return word.strip(".,;:!?()[]\"'")


def content_words(text: str) -> set[str]:
    """Return the content words of a text: those of five letters or more, in lower case."""
    return set(re.findall(r"[a-z]{5,}", text.lower()))
