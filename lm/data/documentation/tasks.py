"""The tasks on the documentation by name, and what generates their rows from documents."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from lm.data.corpus.tfds import Row
from lm.data.documentation import language_tasks, reading_tasks
from lm.data.documentation.docstrings import Document
from lm.data.documentation.task_text import strip_punctuation

TaskGenerator = Callable[[Sequence[Document], random.Random], Iterator[Row]]


def task_generators(texts: Iterable[str]) -> dict[str, TaskGenerator]:
    """Return the function that generates each task's rows from documents.

    ``texts``: of the corpus, from which the words are counted that tasks choose from.
    """
    texts = list(texts)
    counts = Counter(strip_punctuation(word) for text in texts for word in text.split())
    forms = language_tasks.base_and_participle(counts)
    pairs = language_tasks.minimal_pairs
    return {
        "cloze": partial(reading_tasks.cloze, groups=reading_tasks.word_groups(texts)),
        "extract": reading_tasks.extract,
        "restore": reading_tasks.restore,
        "next": reading_tasks.next_sentence,
        "summary": reading_tasks.summary,
        "modality": reading_tasks.modality,
        "order": reading_tasks.order,
        "acceptability": language_tasks.acceptability,
        "agreement": partial(pairs, find=language_tasks.agreement),
        "determiners": partial(pairs, find=language_tasks.determiners),
        "verb-forms": partial(pairs, find=partial(language_tasks.verb_forms, forms=forms)),
    }
