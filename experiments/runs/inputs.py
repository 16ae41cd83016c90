"""The inputs of a run's stages: a vocabulary, a tokenized corpus and tasks, in a cache that runs share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from experiments.runs.sources import Sources
from experiments.study.experiment import Experiment
from lm.config.base import SettingError
from lm.data.batches import Batches
from lm.data.collocations import Collocations
from lm.data.corpus.files import Split
from lm.data.corpus.sampler import CorpusSampler, choose_num_streams, largest_divisor
from lm.data.corpus.shards import InMemoryShard, Shard, sample_documents
from lm.data.corpus.token_cache import TOKENS_FOLDER, EncodedCorpus, make_encoded_corpus
from lm.data.seq2seq import EncodedExamples
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Row
from lm.metrics import Likelihood
from lm.objectives.denoising import Lengths
from lm.tokenizers.tokenizer import Tokenizer

# A stream supplies a fixed part of the rows of every batch, from shards of its own. It reads them window by
# window; a window is the part of a shard that is read and shuffled at once (``lm.data.corpus.sampler``).
# If tokens are repeated, so few streams read them that each has at least this many rows in an epoch.
MIN_ROWS_PER_STREAM = 64
ROW_INDEX_FOLDER = "rows"  # folder in the cache with the number of rows in each window of a corpus
EvalSplit = Literal["validation", "report"]  # checkpoints are chosen on the first, and scored on the second


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run, which ``Run.check`` prepares and all of its stages read."""

    vocabulary: Tokenizer
    train: EncodedCorpus
    validation: EncodedCorpus
    sources: Sources  # files of the corpus and the tasks
    left_out: Mapping[str, int] = field(default_factory=dict)  # task -> number of corrupt records left out
    batches: dict[str, Batches] = field(default_factory=dict)  # name of a stage -> its training batches
    collocations: Collocations | None = None  # of the training text, for PMI masking; None: not needed

    @property
    def cache(self) -> Path:
        """Return the folder of the tokenized corpus and the tasks."""
        return self.sources.cache


def run_reads_corpus(experiment: Experiment) -> bool:
    """Return whether a run reads its corpus: always, unless it only fine-tunes an external checkpoint."""
    return not experiment.start.model or experiment.pretraining.steps > 0


def encoded_split(
    experiment: Experiment,
    split: Split,
    vocabulary: Tokenizer,
    sources: Sources,
    streams: int | None = None,
) -> EncodedCorpus:
    """Return one split of the corpus as tokens, which are encoded as they are read.

    streams: number of streams that read it in parallel. None: 1 for the validation split; for the training
    split ``data.streams`` or, if that is 0, a number that suits the batch size and the size of the corpus.
    """
    data = experiment.data
    shards: Sequence[Shard] = [InMemoryShard(())]  # an empty corpus
    if run_reads_corpus(experiment):
        shards = sources.corpus(data.corpus, split)
    size = sum(shard.size for shard in shards)
    count = streams or 1
    if split == "train" and streams is None:
        count = choose_num_streams(data.streams, experiment.pretraining.batch_size, size)
    corpus = make_encoded_corpus(shards, vocabulary, sources.cache / TOKENS_FOLDER, count)
    return replace(corpus, on_corrupt=sources.corrupt(split), max_gigabytes=data.cache_size)


def training_streams(experiment: Experiment, inputs: Inputs) -> CorpusSampler:
    """Return the sampler by which pre-training reads the corpus, in streams."""
    corpus, count, unique = inputs.train, inputs.train.num_streams, None
    if experiment.data.repeats:
        unique = unique_tokens(experiment)  # every stream reads a part of them
        count = largest_divisor(count, most_repeated_streams(experiment))
    return CorpusSampler(corpus, count, experiment.seed, unique, inputs.cache / ROW_INDEX_FOLDER)


def unique_tokens(experiment: Experiment) -> int:
    """Return how many tokens pre-training reads ``data.repeats`` times, at least one sequence."""
    training, data = experiment.pretraining, experiment.data
    return max(training.steps * training.batch_size * data.inputs_length // data.repeats, data.inputs_length)


def most_repeated_streams(experiment: Experiment) -> int:
    """Return the largest number of streams that can share the tokens which ``data.repeats`` reads again."""
    return max(unique_tokens(experiment) // (MIN_ROWS_PER_STREAM * experiment.data.inputs_length), 1)


def check_repeated_streams(experiment: Experiment) -> None:
    """Raise SettingError if ``data.repeats`` leaves too little text for the ``data.streams`` that are given.

    Without ``data.streams`` their number is lowered.
    """
    data = experiment.data
    if not data.repeats or data.streams <= (most := most_repeated_streams(experiment)):
        return
    raise SettingError(
        f"data.streams={data.streams} should be at most {most}, or 0: data.repeats={data.repeats} leaves "
        f"{unique_tokens(experiment):,} tokens of text, and each stream needs at least {MIN_ROWS_PER_STREAM} "
        f"rows of data.inputs_length={data.inputs_length} tokens"
    )


def sequential_corpus(experiment: Experiment, inputs: Inputs) -> EncodedCorpus:
    """Return the training split in one stream, so that its shards are read one after the other."""
    return encoded_split(experiment, "train", inputs.vocabulary, inputs.sources, streams=1)


class HeldOutText(NamedTuple):
    """Whole held-out documents, whose likelihood under a language model is measured, ends included."""

    documents: Sequence[Sequence[int]]  # token ids of each, EOS at the end
    eos: int
    words: int  # number of words, split at white space
    bytes: int  # number of bytes in UTF-8

    def likelihood(self, log_prob: float, variance: float | None = None) -> Likelihood:
        """Return the likelihood under a model.

        log_prob: the sum of its log-probabilities of all tokens, EOS included [nats]. If it is an estimate of
        a lower bound, ``variance`` is the estimate's.
        """
        tokens = sum(map(len, self.documents))
        return Likelihood(-log_prob, tokens, self.words, self.bytes, variance)


def held_out_text(experiment: Experiment, inputs: Inputs) -> HeldOutText:
    """Return ``data.held_out_documents`` documents, drawn at random from the validation split."""
    data, vocabulary = experiment.data, inputs.vocabulary
    shards = inputs.sources.corpus(data.corpus, "validation")
    documents = [*islice(sample_documents(shards), data.held_out_documents)]
    ids = [[*text, vocabulary.eos] for text in vocabulary.encode_batch(documents)]
    words = sum(len(document.split()) for document in documents)
    return HeldOutText(ids, vocabulary.eos, words, sum(len(document.encode()) for document in documents))


def encoded_tasks(mixtures: Sequence[str], inputs: Inputs) -> dict[str, EncodedExamples]:
    """Return task -> its training set, for all tasks in the mixtures."""
    tasks = [task for name in mixtures for task in mixture(name) if task.train]
    rows, vocabulary = inputs.sources.rows, inputs.vocabulary
    return {task.name: EncodedExamples(task, rows(task, "train"), vocabulary) for task in tasks}


def mixture_lengths(experiment: Experiment, names: Sequence[str]) -> Lengths:
    """Return the lengths of the longest inputs and targets of these mixtures, EOS included.

    ``raw`` is the length before corruption, which is that of the inputs: tasks are not corrupted.
    """
    inputs = experiment.tuning.inputs_length
    return Lengths(raw=inputs, inputs=inputs, targets=max(mixture(name).targets_length for name in names))


def first_rows(rows: Sequence[Row], limit: int) -> Sequence[Row]:
    """Return the first ``limit`` rows; 0 means all."""
    return [rows[i] for i in range(min(limit or len(rows), len(rows)))]
