"""How a stage of counts is computed: an entry of COUNT_MODELS says its model, its file and its scores."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.runs.prepare import Prepared, held_out_text, rows_of_half, tasks_of, training_streams
from experiments.runs.result import recorded
from experiments.runs.scores import score_values
from experiments.runs.stages import COUNTS_FILE, Stage
from lm.classical.hmm import HMMTagger, estimate_tagger, load_tagger, save_tagger, tag_words
from lm.classical.ngram import (
    KneserNey,
    count_ngrams,
    estimate_kneser_ney,
    load_kneser_ney,
    save_kneser_ney,
    token_log_probs,
)
from lm.data.tasks.labelled import find_labelled
from lm.data.tasks.task import Row


class CountModel(NamedTuple):
    """A kind of model made of counts."""

    estimate: Callable[[Stage, Prepared], tuple[Any, int]]  # the model, and how many tokens it counted
    save: Callable[[Any, Path], None]
    load: Callable[[Path], Any]
    size: Callable[[Any], int]  # how many numbers it consists of
    evaluate: Callable[[Any, Stage, Prepared], dict[str, float]]  # what is recorded of it


def counts_of(stage: Stage) -> Any:
    """The model of a stage that has ended; DataError if its file is missing or damaged."""
    return COUNT_MODELS[stage.settings.counts.model].load(stage.folder / COUNTS_FILE)


# ---- n-grams


def texts_as_counted(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Texts of ids as tokens int64 [N] and offsets int64 [texts + 1]."""
    offsets = np.cumsum([0, *map(len, texts)])
    return np.concatenate([np.asarray(text, np.int64) for text in texts]), offsets


def _ngrams(stage: Stage, prepared: Prepared) -> tuple[KneserNey, int]:
    settings = stage.settings
    text = training_streams(settings, prepared).read_epoch()  # which networks read once, or again and again
    # An EOS ends each document, as it separates them where networks read them.
    offsets = np.unique(text.offsets)
    tokens = np.insert(text.tokens.astype(np.int64), offsets[1:], prepared.vocabulary.eos)
    offsets += np.arange(len(offsets))
    counted = count_ngrams(tokens, offsets, settings.counts.order, settings.model.vocab_size)
    return estimate_kneser_ney(counted), len(tokens)


def _ngram_scores(model: KneserNey, stage: Stage, prepared: Prepared) -> dict[str, float]:
    text = held_out_text(stage.settings, prepared)
    if not text.documents:
        return {}
    log_prob = token_log_probs(model, *texts_as_counted(text.documents)).sum()
    return recorded(text.likelihood(float(log_prob)))


# ---- taggers


def tagged_by(model: HMMTagger, stage: Stage, rows: Sequence[Row]) -> list[list[int]]:
    """The class of each word of each row of the stage's task, decided as ``counts.tagging`` says."""
    task, counts = find_labelled(*stage.on), stage.settings.counts
    widths = {"greedy": 1, "beam": counts.beam_width, "viterbi": len(model.tags)}
    answers = []
    for (words,) in map(task.texts, rows):
        alone = counts.tagging == "most-frequent"
        tags = model.most_frequent_tags(words) if alone else tag_words(model, words, widths[counts.tagging])
        answers.append([task.labels.index(name) for name in tags])
    return answers


def _tagger(stage: Stage, prepared: Prepared) -> tuple[HMMTagger, int]:
    task = find_labelled(*stage.on)
    rows = task.rows("train", prepared.cache, stage.settings.data.corrupt_records)
    sentences = [
        [(word, task.labels[number]) for word, number in zip(words, numbers, strict=True)]
        for (words,), numbers in map(task.to_text, rows)
    ]
    return estimate_tagger(sentences, stage.settings.counts.markov), sum(map(len, sentences))


def _tagger_scores(model: HMMTagger, stage: Stage, prepared: Prepared) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for task in tasks_of(stage)["validation"]:
        rows = rows_of_half(stage, prepared, task, "validation")
        metrics = task.evaluate(rows, tagged_by(model, stage, rows))
        values |= score_values(task, metrics)
        values["score"] = values.get(f"{task.name}/score")
    return values


COUNT_MODELS: Mapping[str, CountModel] = {
    "ngram": CountModel(
        _ngrams,
        save_kneser_ney,
        load_kneser_ney,
        lambda model: sum(map(len, model.probs + model.backoffs)),
        _ngram_scores,
    ),
    "tagger": CountModel(
        _tagger,
        save_tagger,
        load_tagger,
        lambda model: int(
            model.initial_counts.size + model.transition_counts.size + np.count_nonzero(model.emission_counts)
        ),
        _tagger_scores,
    ),
}
