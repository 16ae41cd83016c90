"""Generates the rows of the tasks that read their input: without it no answer is better than another.

Contexts and answers are short enough for the inputs and targets of the small scales. Where there are
candidates, neither frequency nor position distinguishes the right one from the others.
"""

import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter

from lm.c4.filters import sentences
from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import Document
from lm.data.documentation.task_text import (
    BEFORE_VERBS,
    DETERMINERS,
    FUNCTION_WORDS,
    MAX_ANSWER,
    MAX_CONTEXT,
    PREPOSITIONS,
    content_words,
    docstring_sentences,
    is_lowercase_word,
    strip_punctuation,
)

NAMED_WORDS = 4  # first words by which "order" names a sentence
MAX_NEXT_SENTENCE = 20  # length of a sentence of "next" [words]
CLOZE_CANDIDATES = 10
NEXT_CANDIDATES = 4
MAX_SUMMARISED, MIN_SUMMARISED = 24, 6  # length of a text of "summary" [words]
MIN_COUNT = 40  # of a candidate word in the corpus
MAX_COUNT_RATIO = 1.5  # between the counts of two candidate words

CUES = frozenset(
    "if when by with from for as to of in on using than which because unless until into is are".split()
)
ENDS_ANSWER = (FUNCTION_WORDS | CUES) - DETERMINERS  # words before which an answer ends
SUFFIXES = ("ing", "ed", "ly", "ion", "ment", "able", "al", "er", "s")

# Modal verbs by what they mean.
MODALS = {
    "required": ("must", "should"),
    "allowed": ("may", "can"),
    "forbidden": ("must not", "cannot", "should not"),
}
WordGroups = Mapping[str, Mapping[str, int]]  # for each word, the words of its group and their counts


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
    kinds = (DETERMINERS, PREPOSITIONS, BEFORE_VERBS)
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
    """Yield (word, band): a band has words of a class, whose counts are within MAX_COUNT_RATIO.

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
                if word in CUES and counts[word] == 1:
                    span = " ".join(words[i + 1 : i + 1 + _span_length(words[i + 1 :])])
                    if content_words(span):
                        spans.append((word, strip_punctuation(span)))
            if spans and len(words) >= 10:
                cue, answer = rng.choice(spans)
                yield {"name": name, "question": cue, "context": " ".join(words), "answers": [answer]}


def _span_length(words: Sequence[str]) -> int:
    """Return the number of words of an answer, 1 to 4.

    It ends with a word that a punctuation mark follows, or before a function word.
    """
    for i, word in enumerate(words[:4]):
        if i and word in ENDS_ANSWER:
            return i
        if strip_punctuation(word) != word:
            return i + 1
    return min(4, len(words))


def next_sentence(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield sentences, each with four candidates: it follows one of them, three are from other documents.

    Only the relation between sentences identifies the right one. In its document, each of the four is
    followed by a sentence of 3 to MAX_NEXT_SENTENCE words. The same sentence is scored after each, so that
    neither length nor frequency helps.
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
        elsewhere = [pair for pair in rng.sample(pairs, min(len(pairs), 12)) if pair[0] != name]
        if len(elsewhere) < NEXT_CANDIDATES - 1:  # most pairs are of one large document
            continue
        others = rng.sample(elsewhere, NEXT_CANDIDATES - 1)
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


# ---- summary: which of four texts a first sentence belongs to


def summary(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield first sentences of docstrings, each with four texts: one goes on from it, three are others.

    The same sentence is scored after each, and each of the four follows a first sentence in its document.
    """
    pairs = []
    for name, (first, *rest) in docstring_sentences(documents):
        words = " ".join(rest).split()[:MAX_SUMMARISED]
        if len(words) >= MIN_SUMMARISED and 3 <= len(first.split()) <= MAX_ANSWER:
            pairs.append((name, first, " ".join(words)))
    for name, first, text in pairs:
        drawn = rng.sample(pairs, min(len(pairs), 12))
        others = [other for other in drawn if other[0] != name][: NEXT_CANDIDATES - 1]
        if len(others) < NEXT_CANDIDATES - 1:
            continue
        label = zlib.crc32(first.encode()) % NEXT_CANDIDATES
        texts = [other[2] for other in others]
        texts.insert(label, text)
        yield {"name": name, "documents": texts, "summary": first, "label": label}


# ---- modality: a sentence with its modal verb in other words


def modality(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield sentences that say that something must, may or must not be, and the same in other words.

    The modal verb is drawn, whatever the sentence had, so that the rest of a sentence says nothing of it.
    """
    for name, text in documents:
        for sentence in sentences(text.replace("\n", " ")):
            matches = [*_MODAL_OR_COPULA.finditer(sentence)]
            if len(matches) != 1 or not 4 <= len(sentence.split()) <= MAX_ANSWER - 4:
                continue
            (match,) = matches
            before, after = sentence[: match.start()], sentence[match.end() :]
            if after.startswith(("not ", "to ")) or MODALS.keys() & {*sentence.split()}:
                continue
            rest = f"be {after}" if match[1] else after
            meaning = rng.choice([*MODALS])
            yield {
                "name": name,
                "sentence": f"{before} {rng.choice(MODALS[meaning])} {rest}",
                "answers": [f"{before} would be {meaning} to {rest}"],
                "candidates": [f"{before} would be {other} to {rest}" for other in MODALS],
            }


_MODAL_OR_COPULA = re.compile(r" (?:(?:must|should|may|can|cannot)(?: not)?|(is|are)) (?=[a-z])")


# ---- order: which of two facts comes first


def order(documents: Iterable[Document], rng: random.Random) -> Iterator[Row]:
    """Yield two sentences in each order; the answer has the first words of each, in the same order."""
    for name, text in documents:
        lengths = range(NAMED_WORDS + 1, MAX_ANSWER + 1)
        found = [part for part in sentences(text.replace("\n", " ")) if len(part.split()) in lengths]
        rng.shuffle(found)
        for pair in zip(found[::2], found[1::2], strict=False):
            named = [" ".join(sentence.split()[:NAMED_WORDS]).rstrip(".,;:") for sentence in pair]
            if named[0] == named[1]:
                continue
            answers = [", then ".join(named), ", then ".join(reversed(named))]
            for context, answer in zip((pair, pair[::-1]), answers, strict=True):
                yield {
                    "name": name,
                    "context": " ".join(context),
                    "answers": [answer],
                    "candidates": sorted(answers),
                }
