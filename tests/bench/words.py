"""Words a second: skip-gram beside gensim's, and n-grams counted and scored.

    .venv/bin/python tests/bench/words.py --gensim GENSIM_PYTHON --cores 0      its Python has gensim

The text is the documentation of installed packages by words of five occurrences at least. A call of skip-gram
is one pass over it: window 5 (drawn from 1 to 5 for each centre), 5 negatives, 100 columns, with a thread for
each core. One of n-grams counts the first nine tenths, or scores the last tenth, by trigrams.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

from sides import Side, Step, compare, describe, serve

LEAST = 5  # occurrences of a word
COLUMNS = 100  # of a table of vectors
BLOCKS = 5


def read(path: str) -> tuple[tuple[str, ...], list]:
    """Words of at least LEAST occurrences, by falling count, and the documents as their numbers."""
    import numpy as np

    documents = [line.split() for line in Path(path).read_text().splitlines()]
    counts = Counter(word for words in documents for word in words)
    frequent = [word for word, count in counts.items() if count >= LEAST]
    vocabulary = tuple(sorted(frequent, key=lambda word: (-counts[word], word)))
    id_of = {word: index for index, word in enumerate(vocabulary)}
    return vocabulary, [
        np.array([id_of[word] for word in words if word in id_of], np.int32) for words in documents
    ]


def skipgram(path: str) -> Step:
    """A pass over the text; passes follow each other as epochs do."""
    import jax

    from lm.classical.word2vec import initial_tables, train_epoch
    from lm.config.classical import VectorsConfig

    words, documents = read(path)
    config = VectorsConfig(epochs=100)
    tables, epoch = initial_tables(jax.random.key(0), len(words), COLUMNS), 0

    def step():
        nonlocal tables, epoch
        tables, epoch = jax.block_until_ready(train_epoch(tables, documents, config, 0, epoch)), epoch + 1

    return step


def gensim_skipgram(path: str) -> Step:
    """The same pass by gensim, which draws negatives for each pair."""
    from gensim.models import Word2Vec

    documents = [line.split() for line in Path(path).read_text().splitlines()]
    settings = {"vector_size": COLUMNS, "window": 5, "negative": 5, "min_count": LEAST, "sample": 0, "sg": 1}
    model = Word2Vec(**settings, workers=len(os.sched_getaffinity(0)))
    model.build_vocab(documents)
    return lambda: model.train(documents, total_examples=len(documents), epochs=1)


def ngrams(path: str, scoring: bool) -> Step:
    """Count nine tenths of the documents, or score the last tenth."""
    import numpy as np

    from lm.classical.ngram import count_ngrams, estimate_kneser_ney, token_log_probs

    words, documents = read(path)
    cut = len(documents) * 9 // 10

    def text(part):
        return np.concatenate(part), np.cumsum([0, *map(len, part)])

    def count():
        return estimate_kneser_ney(count_ngrams(*text(documents[:cut]), 3, len(words)))

    model = count()
    return (lambda: token_log_probs(model, *text(documents[cut:]))) if scoring else count


MAKERS = {
    "skip-gram": skipgram,
    "gensim": gensim_skipgram,
    "counting": lambda path: ngrams(path, scoring=False),
    "scoring": lambda path: ngrams(path, scoring=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gensim", help="a Python that has gensim; without it, ours alone")
    parser.add_argument("--cores", type=int, nargs="+", help="all sides are held to these; all by default")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    options = parser.parse_args()
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    from experiments.processes.memory import tunables
    from lm.data.documentation.docstrings import DEFAULT, extract_docstrings

    texts = [re.findall(r"\w+", document.text.lower()) for document in extract_docstrings(DEFAULT)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "words.txt"
        path.write_text("\n".join(" ".join(words) for words in texts if words))
        _, documents = read(str(path))
        size, tenth = sum(map(len, documents)), sum(map(len, documents[len(documents) * 9 // 10 :]))
        sides = {
            name: Side(name, [sys.executable, __file__, name, str(path)], {"GLIBC_TUNABLES": tunables()})
            for name in MAKERS
        }
        sides["gensim"] = Side("gensim", [options.gensim, __file__, "gensim", str(path)])
        pair = [sides["skip-gram"], *([sides["gensim"]] if options.gensim else [])]
        describe(pair)
        for title, some, words in (
            ("skip-gram", pair, size),
            ("trigrams", [sides["counting"]], size - tenth),
            ("trigrams", [sides["scoring"]], tenth),
        ):
            for each in compare(title, some, options.blocks):
                print(f"{title} | {each.name} | {words / median(each.seconds):,.0f} words a second")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in MAKERS:
        serve(lambda: MAKERS[sys.argv[1]](sys.argv[2]), 1)
    else:
        main()
