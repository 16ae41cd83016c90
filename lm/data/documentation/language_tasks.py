"""Generates the rows of the tasks that know the language: minimal pairs of a sentence and a wrong one.

The pairs differ in the order of two to four words, or in one word, in the manner of BLiMP (Warstadt et al.
2020). Both words of a pair are right equally often, and the pair is scored after the sentence before.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from lm.data.corpus.tfds import Row
from lm.data.documentation.docstrings import Document
from lm.data.documentation.task_text import (
    BEFORE_VERBS,
    DETERMINERS,
    MAX_ANSWER,
    PREPOSITIONS,
    docstring_sentences,
    is_lowercase_word,
    strip_punctuation,
)

MIN_WORDS = 6  # of a sentence
MIN_COUNT = 10  # of both words of a pair in the corpus

Find = Callable[[Sequence[str]], Iterator[tuple[int, str]]]  # words -> the places and their wrong words

AGREEING = (("is", "are"), ("has", "have"), ("was", "were"), ("does", "do"))  # of one thing, of several
# no pair of "every" is kept, since "all" becomes "each" alone; without it the others were drawn differently
DETERMINER_PAIRS = (("this", "these"), ("a", "an"), ("each", "all"), ("every", "all"))
BEFORE_BASE = frozenset("to can could will would must may might should cannot".split())
BEFORE_PARTICIPLE = frozenset("is are be was were been has have being".split())


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


def minimal_pairs(documents: Iterable[Document], rng: random.Random, find: Find) -> Iterator[Row]:
    """Yield pairs of sentences that differ in one of the words that ``find`` returns with their wrong words.

    Of each two words, as many pairs are yielded with one right as with the other.
    """
    rows = []
    for name, parts in docstring_sentences(documents):
        for previous, sentence in pairwise(["", *parts]):
            words = sentence.split()
            if not MIN_WORDS <= len(words) <= MAX_ANSWER:
                continue
            context = " ".join(previous.split()[-MAX_ANSWER:])
            for place, wrong in find(words):
                damaged = " ".join([*words[:place], wrong, *words[place + 1 :]])
                row = {"name": name, "context": context, "sentence": sentence, "damaged": damaged}
                rows.append((strip_punctuation(words[place]), strip_punctuation(wrong), row))
    counts = Counter((right, wrong) for right, wrong, _ in rows)
    rng.shuffle(rows)
    taken = Counter[tuple[str, str]]()
    for right, wrong, row in rows:
        if taken[right, wrong] < min(counts[right, wrong], counts[wrong, right]):
            taken[right, wrong] += 1
            yield row


def agreement(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the places of verbs that agree with a noun, and the verb that does not.

    The noun is the word before, or it is separated from the verb by a preposition and a noun of the other
    number, which attracts agreement: "the values of the array are".
    """
    swapped = {word: other for pair in AGREEING for word, other in (pair, pair[::-1])}
    plural_verbs = {plural for _, plural in AGREEING}
    for place in range(1, len(words) - 1):
        verb, before = words[place], words[max(place - 5, 0) : place]
        if verb not in swapped or {"and", "or", "there"} & {*before} or not _is_noun(before[-1]):
            continue
        is_plural = verb in plural_verbs
        prepositions = [i for i, word in enumerate(before) if word in PREPOSITIONS and i]
        noun = before[prepositions[0] - 1] if prepositions else before[-1]
        attracts = prepositions and _is_plural(before[-1]) != is_plural
        if _is_noun(noun) and _is_plural(noun) == is_plural and (attracts or not prepositions):
            yield place, swapped[verb]


def _is_noun(word: str) -> bool:
    return is_lowercase_word(word) and len(word) > 3 and word not in BEFORE_VERBS | DETERMINERS


def _is_plural(noun: str) -> bool:
    return noun.endswith("s") and not noun.endswith(("ss", "us", "is"))


def determiners(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the places of determiners that agree with the noun or the sound that follows, and a wrong one."""
    singular = {one: several for one, several in DETERMINER_PAIRS if one != "a"}
    plural = {"these": "this", "all": "each"}
    for place, (word, following) in enumerate(pairwise(words)):
        noun = strip_punctuation(following)
        if word in ("a", "an") and is_lowercase_word(noun):
            yield place, {"a": "an", "an": "a"}[word]
        elif word in singular and _is_noun(noun) and not _is_plural(noun):
            yield place, singular[word]
        elif word in plural and _is_noun(noun) and _is_plural(noun):
            yield place, plural[word]


def verb_forms(words: Sequence[str], forms: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the places of infinitives and participles behind an auxiliary or "to", and the other form."""
    for place, (previous, word) in enumerate(pairwise(words), 1):
        bare = strip_punctuation(word)
        if bare not in forms or not word.startswith(bare):
            continue
        is_participle = bare.endswith("ed")
        if previous in (BEFORE_PARTICIPLE if is_participle else BEFORE_BASE):
            yield place, forms[bare] + word.removeprefix(bare)


def base_and_participle(counts: Mapping[str, int]) -> dict[str, str]:
    """Return the participle of each regular verb, and its base form, if both forms are frequent."""
    forms: dict[str, str] = {}
    for participle, count in counts.items():
        if count < MIN_COUNT or not participle.endswith("ed"):
            continue
        for base in (participle.removesuffix("ed"), participle.removesuffix("d")):
            if counts.get(base, 0) >= MIN_COUNT:
                forms |= {participle: base, base: participle}
                break
    return forms
