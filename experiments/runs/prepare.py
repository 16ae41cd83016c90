"""Settings -> data: the corpus as tokens, the vocabulary, the tasks; made once, cached, shared by all runs.

What is missing or does not fit together is named; checks.py asks for that before anything compiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, cast

from experiments.runs import origin
from experiments.runs.stages import Stage, stages, start_of
from experiments.runs.vocabularies import (
    Say,
    TaskRows,
    find_vocabulary,
    rows_of,
    unwritable,
    vocabulary_corpus,
)
from experiments.study.experiment import Experiment
from lm.config.base import SettingError
from lm.config.model import RECURRENT
from lm.data.batches import Batches, TBPTTRows
from lm.data.classification import Reader
from lm.data.corpus.files import Split
from lm.data.corpus.sampler import MIN_ROWS_PER_STREAM, CorpusSampler, choose_num_streams, largest_divisor
from lm.data.corpus.shards import InMemoryShard, Shard, corpus_fingerprint, sample_documents
from lm.data.corpus.spec import corpus_shards
from lm.data.corpus.token_cache import TOKENS_FOLDER, EncodedCorpus, make_encoded_corpus
from lm.data.masked_lm import MaskedLMRows
from lm.data.pretraining import DenoisingRows, pretraining_rows
from lm.data.seq2seq import CorpusExamples, EncodedExamples, Example, MixtureRows
from lm.data.tasks.labelled import LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixing_rates, mixture
from lm.data.tasks.task import BaseTask, Row, Task
from lm.files import write
from lm.metrics import Likelihood
from lm.objectives.denoising import Lengths, compute_lengths
from lm.special_tokens import boundary_tokens, check_special
from lm.tokenizers.huggingface import load_tokenizer
from lm.tokenizers.tokenizer import Tokenizer

NOTES = "rows"  # the folder of how many rows windows have
CORPUS = "corpus"  # its name among the tasks of a mixture
READ_ORDER = "in shards, by streams"  # in which a corpus is read; recorded with each stage
SPLITS: tuple[Split, ...] = ("train", "validation")
Half = Literal["validation", "report"]  # of the rows of a task that nothing is trained on
MANY_UNWRITABLE = 0.05  # share of a task's answers of which it is said
FOLDER = "tokenizer"  # in the folder of a stage: its vocabulary, which outlives its corpus
UNKNOWN = ""  # the fingerprint in the record of a model that was imported without its tokenizer


@dataclass(frozen=True)
class Prepared:
    """What a run reads."""

    vocabulary: Tokenizer
    train: EncodedCorpus
    validation: EncodedCorpus
    cache: Path  # that holds them, and the tasks
    left_out: Mapping[str, int] = field(default_factory=dict)  # corrupt records skipped, by task


def prepare(experiment: Experiment, cache: Path, say: Say) -> Prepared:
    """Find or make all that ``experiment`` reads; SettingError for what is missing or does not fit."""
    skipped: dict[str, int] = {}
    answered: list[TaskRows] = []
    for name in experiment.tuning.mixtures:
        mixture(name)  # SettingError if it is none, read or not
    for stage in stages(experiment):
        for split, tasks in tasks_of(stage).items():  # finds their files, and reads nothing yet
            for task in tasks:
                rows = rows_of(task, split, experiment, cache)
                skipped |= {task.name: len(rows.skipped)} if split == "train" else {}
                answered += [(task, rows)] if split == "train" and isinstance(task, Task) else []
    skipped = {name: count for name, count in skipped.items() if count}
    for name, count in skipped.items():
        say(f"{count:,} corrupt records of {name} are left out of training (data.corrupt_records='skip')")
    start = start_of(experiment, cache.parent, cache)
    if start is None:
        vocabulary = find_vocabulary(experiment, cache, say)
        for name, share in unwritable(answered, vocabulary).items():
            if share >= MANY_UNWRITABLE:
                lacks = f"{share:.0%} of the answers of {name} have characters that the vocabulary lacks"
                say(f"{lacks}, and can never be written right: --data.unknown bytes writes all")
    else:
        vocabulary = stored_vocabulary(start.folder, experiment)
    check_special(experiment.model, vocabulary, f"data.vocabulary={experiment.data.vocabulary}")
    if vocabulary.vocab_size > experiment.model.vocab_size:
        raise SettingError(
            f"model.vocab_size={experiment.model.vocab_size} is less than the vocabulary's "
            f"{vocabulary.vocab_size} (sentinels included): set it to "
            f"{-(-vocabulary.vocab_size // 128) * 128}"
        )
    train, validation = (encoded_split(experiment, split, vocabulary, cache) for split in SPLITS)
    return Prepared(vocabulary, train, validation, cache, skipped)


def encoded_split(
    experiment: Experiment, split: Split, vocabulary: Tokenizer, cache: Path, streams: int | None = None
) -> EncodedCorpus:
    """The corpus as tokens, encoded as it is read, by as many streams as are right for it or given."""
    data = experiment.data
    corrupt = data.corrupt_records if split == "train" else "stop"
    shards: Sequence[Shard] = [InMemoryShard(())]
    if reads_corpus(experiment):
        shards = corpus_shards(data.corpus, split, cache, corrupt)
    size = sum(shard.size for shard in shards)
    count = (
        choose_num_streams(data.streams, experiment.pretraining.batch_size, size) if split == "train" else 1
    )
    corpus = make_encoded_corpus(shards, vocabulary, cache / TOKENS_FOLDER, streams or count)
    return replace(corpus, on_corrupt=corrupt, max_gigabytes=data.cache_size)


def reads_corpus(experiment: Experiment) -> bool:
    """False where a checkpoint is tuned as it is."""
    return not experiment.start.model or experiment.pretraining.steps > 0


def reader_of(experiment: Experiment, task: LabelledTask, vocabulary: Tokenizer) -> Reader:
    """How the model of ``experiment`` reads a labelled task."""
    tuning = experiment.tuning
    return Reader(task, vocabulary, experiment.model.architecture, tuning.inputs_length, tuning.layout)


def tasks_of(stage: Stage) -> dict[str, list[BaseTask]]:
    """The tasks that a stage is trained on ("train") and evaluated on ("validation", "report")."""
    train: list[BaseTask]
    validation: list[BaseTask]
    if stage.kind in ("head", "count"):
        train = validation = [find_labelled(name) for name in stage.on]
    else:
        train = [task for name in stage.on for task in mixture(name) if task.train]
        validation = [task for name in stage.scored_on for task in mixture(name).evaluated]
    report = [task for task in validation if task.report]
    return {"train": train, "validation": validation, "report": report}


def rows_of_half(stage: Stage, prepared: Prepared, task: BaseTask, half: Half) -> Sequence[Row]:
    """The first ``tuning.evaluation_examples`` or ``tuning.report_examples`` of a task."""
    tuning = stage.settings.tuning
    limit = tuning.report_examples if half == "report" else tuning.evaluation_examples
    rows = first(task.rows(half, prepared.cache), limit)
    task.check_labels(rows)
    return rows


def first(rows: Sequence[Row], limit: int) -> Sequence[Row]:
    """The first ``limit`` rows; 0 means all."""
    return [rows[i] for i in range(min(limit or len(rows), len(rows)))]


def fingerprints(stage: Stage, cache: Path) -> dict[str, str]:
    """``{"corpus train": fingerprint, ...}`` of every split that a stage reads."""
    data = stage.settings.data
    texts: dict[str, Sequence[Shard]] = {}
    for split in SPLITS if reads_corpus(stage.settings) else ():
        corrupt = data.corrupt_records if split == "train" else "stop"
        texts[f"{CORPUS} {split}"] = corpus_shards(data.corpus, split, cache, corrupt)
    if corpus := vocabulary_corpus(stage.settings):
        texts["vocabulary train"] = corpus_shards(corpus, "train", cache, data.corrupt_records)
    found = {name: corpus_fingerprint(shards) for name, shards in texts.items()} | {
        f"{CORPUS} is read": READ_ORDER
    }
    for part, tasks in tasks_of(stage).items():
        rows = {task.name: rows_of(task, part, stage.settings, cache) for task in tasks}
        found |= {f"{name} {part}": stored.fingerprint for name, stored in rows.items()}
        found |= {f"{task.name} file": task.digest for task in tasks if task.digest}
    return found


def store_vocabulary(stage: Path, vocabulary: Tokenizer) -> None:
    """Copy ``vocabulary`` into the folder of a stage, replacing another; equal files are not written."""
    folder, files = stage / FOLDER, vocabulary.files()
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in files:
            path.unlink()
    for name, contents in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != contents:
            write(path, contents)


def stored_vocabulary(stage: Path, experiment: Experiment) -> Tokenizer:
    """The vocabulary that the stage in a folder was trained with; SettingError if it is another or gone."""
    recorded, folder, data = origin.read(stage)["vocabulary"]["fingerprint"], stage / FOLDER, experiment.data
    bare = data.vocabulary == "bytes"  # which has no files
    if not bare and not folder.is_dir():
        raise SettingError(f"{folder} is missing: the vocabulary that this model was trained with")
    vocabulary = load_tokenizer("bytes" if bare else folder, data.sentinels, experiment.model.vocab_size)
    if recorded not in (UNKNOWN, vocabulary.fingerprint):
        raise SettingError(
            f"{folder} is not the vocabulary that this model was trained with: its fingerprint is "
            f"{vocabulary.fingerprint[:12]}, {stage / origin.FILE} has {recorded[:12]}"
        )
    return vocabulary


def unique_tokens(experiment: Experiment) -> int:
    """How many tokens pre-training reads ``data.repeats`` times; one row's at least."""
    phase, data = experiment.pretraining, experiment.data
    return max(phase.steps * phase.batch_size * data.inputs_length // data.repeats, data.inputs_length)


def training_streams(experiment: Experiment, prepared: Prepared) -> CorpusSampler:
    """The streams in which pre-training reads the corpus."""
    corpus, data = prepared.train, experiment.data
    unique, count = unique_tokens(experiment) if data.repeats else None, corpus.num_streams
    if unique:  # of which every stream has a part
        count = largest_divisor(count, unique // (MIN_ROWS_PER_STREAM * data.inputs_length))
    return CorpusSampler(corpus, count, experiment.seed, unique, prepared.cache / NOTES)


def in_own_order(experiment: Experiment, prepared: Prepared) -> EncodedCorpus:
    """The text of the corpus one shard after the other, whatever the batches of pre-training are."""
    return encoded_split(experiment, "train", prepared.vocabulary, prepared.cache, streams=1)


class HeldOutText(NamedTuple):
    """Whole documents, of which every language model is asked how likely they and their ends are."""

    documents: Sequence[Sequence[int]]  # ids of each, with EOS behind it
    eos: int
    words: int  # between blanks
    bytes: int  # as UTF-8

    def likelihood(self, log_prob: float) -> Likelihood:
        """Of a model that gives all of it, ends included, this log-probability [nats]."""
        return Likelihood(-log_prob, sum(map(len, self.documents)), self.words, self.bytes)


def held_out_text(experiment: Experiment, prepared: Prepared) -> HeldOutText:
    """``data.held_out_documents`` of the validation split, of parts of it in random order."""
    data = experiment.data
    shards = corpus_shards(data.corpus, "validation", prepared.cache)
    chosen = [*islice(sample_documents(shards), data.held_out_documents)]
    ids = [[*text, prepared.vocabulary.eos] for text in prepared.vocabulary.encode_batch(chosen)]
    return HeldOutText(
        ids,
        prepared.vocabulary.eos,
        sum(len(x.split()) for x in chosen),
        sum(len(x.encode()) for x in chosen),
    )


def pretraining_batches(
    experiment: Experiment,
    prepared: Prepared,
    split: Literal["train", "validation"],
    times: int = 1,
    rows: int | None = None,
) -> Batches[DenoisingRows | MaskedLMRows]:
    """The batches of pre-training on the corpus; those of the validation split have one noise in all runs.

    Rows are ``times`` as long as those of the experiment; ``rows`` of them are a batch, if given.
    """
    data, size = experiment.data, rows or experiment.pretraining.batch_size
    if split == "train":
        streams = training_streams(experiment, prepared)
        streams = replace(streams, num_streams=streams.num_streams if not size % streams.num_streams else 1)
    else:
        streams = CorpusSampler(prepared.validation, 1, index_folder=prepared.cache / NOTES)
    source = pretraining_rows(
        streams,
        experiment.objective,
        architecture=experiment.model.architecture,
        inputs_length=data.inputs_length * times,
        batch_size=size,
        boundary=boundary_tokens(experiment.model, prepared.vocabulary),
    )
    return Batches(source, size)


def training_batches(experiment: Experiment, prepared: Prepared) -> Batches:
    """The batches of pre-training that it is trained on, whose rows may last several steps."""
    data, phase = experiment.data, experiment.pretraining
    tbptt, lengths = phase.tbptt, compute_lengths(experiment.objective, data.inputs_length)
    if tbptt is None:
        return pretraining_batches(experiment, prepared, "train")
    long = replace(
        experiment,
        data=replace(data, inputs_length=data.inputs_length * tbptt.chunks_per_row),
        pretraining=replace(phase, steps=-(-phase.steps // tbptt.chunks_per_row)),
    )
    rows = pretraining_batches(long, prepared, "train").rows
    return Batches(TBPTTRows(rows, lengths, tbptt.rows, tbptt.chunks_per_row), tbptt.rows)


def check_lasting(experiment: Experiment) -> None:
    """SettingError where rows should last several steps and no state is carried from one to the next."""
    model, objective, phase = experiment.model, experiment.objective, experiment.pretraining
    due: dict[str, tuple[object, tuple[object, ...]]] = {
        "model.mixer.kind": (model.mixer.kind, RECURRENT),
        "model.architecture": (model.architecture, ("decoder",)),
        "model.heads": (model.heads, ((),)),
        "objective.noise": (objective.noise, ("everything",)),
        "objective.eos": (objective.eos, ("between-documents",)),
        "mixing.pretraining": (experiment.mixing.pretraining, ("corpus",)),
        "pretraining.microbatches": (phase.microbatches, (1,)),
    }
    for name, (value, right) in due.items() if phase.tbptt else ():
        if value not in right:
            should = f"should be {' or '.join(map(repr, right))}"
            last = f"pretraining.steps_per_row={phase.steps_per_row}"
            raise SettingError(f"{name}={value!r} {should} with {last}, for which a state is carried")


def encoded_tasks(
    experiment: Experiment, mixtures: Sequence[str], prepared: Prepared
) -> dict[str, EncodedExamples]:
    """The training sets of all tasks in the mixtures, by task."""
    tasks = [task for name in mixtures for task in mixture(name) if task.train]
    rows = [task.rows("train", prepared.cache, experiment.data.corrupt_records) for task in tasks]
    return {
        task.name: EncodedExamples(task, x, prepared.vocabulary) for task, x in zip(tasks, rows, strict=True)
    }


def mixed_batches(experiment: Experiment, mixtures: Sequence[str], prepared: Prepared) -> Batches:
    """The batches of multi-task pre-training: the tasks' training sets, and mostly the corpus too."""
    mixing = experiment.mixing
    examples: dict[str, Sequence[Example]] = {**encoded_tasks(experiment, mixtures, prepared)}
    sizes = {name: min(len(rows), mixing.limit) for name, rows in examples.items()}
    corpus = pretraining_batches(experiment, prepared, "train")
    if mixing.pretraining != "tasks":
        examples[CORPUS] = CorpusExamples(cast(DenoisingRows, corpus.rows))
        sizes[CORPUS] = round(mixing.limit * mixing.corpus_share)
    tuned, limits = tuning_lengths(experiment, mixtures), corpus.lengths
    lengths = Lengths(limits.raw, max(limits.inputs, tuned.inputs), max(limits.targets, tuned.targets))
    shares = mixing_rates(sizes, kind=mixing.rates, limit=None, temperature=mixing.temperature)
    boundary = boundary_tokens(experiment.model, prepared.vocabulary)
    rows = MixtureRows(examples, shares, experiment.model.architecture, lengths, experiment.seed, boundary)
    return Batches(rows, experiment.pretraining.batch_size)


def tuning_lengths(experiment: Experiment, names: Sequence[str]) -> Lengths:
    """Lengths of the inputs and targets of mixtures, EOS counted."""
    inputs = experiment.tuning.inputs_length
    return Lengths(raw=inputs, inputs=inputs, targets=max(mixture(name).targets_length for name in names))
