"""Examples of training, decoded, as the model sees them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

import numpy as np
from rich.markup import escape

from experiments.console import CONSOLE, UNBROKEN, print_line
from experiments.runs.inputs import Inputs, mixture_lengths, run_reads_corpus
from experiments.runs.kinds.pretraining import corpus_batches
from experiments.runs.paths import phase_name
from experiments.runs.phases import phase_settings, phase_steps
from experiments.runs.prepare import prepare
from experiments.runs.stages import stages
from experiments.study.experiment import Experiment
from lm.batch import Batch
from lm.data.batches import RowSource
from lm.data.pretraining import DenoiserMixtureRows, DenoisingRows, mode_tokens
from lm.data.seq2seq import EncodedExamples, eval_batches
from lm.data.tasks.labelled import LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Row
from lm.objectives.denoising import Denoiser, Lengths, Objective
from lm.special_tokens import boundary_tokens
from lm.tokenizers.tokenizer import CLS, MASK, Tokenizer

MARGIN = 24  # before the text of a part [columns]
Part = tuple[str, str, str]  # of an example: its kind, length and text


def show_examples(experiment: Experiment, count: int, cache: Path) -> None:
    """Print ``count`` examples of each kind that an experiment trains on.

    A task that no stage is trained on, as with finetuning.steps=0, is left out, and its data are not made.
    """
    data, tuning = prepare(experiment, cache, print_line), experiment.tuning
    if run_reads_corpus(experiment):
        _show_pretraining(experiment, data, count)
    boundary = boundary_tokens(experiment.model, data.vocabulary)
    trained = {name for stage in stages(experiment) for name in stage.task_names}
    for name in [name for name in tuning.mixtures if name in trained]:
        lengths, architecture = mixture_lengths(experiment, (name,)), experiment.model.architecture
        for task in mixture(name):
            source = task.rows("train", cache, experiment.data.corrupt_records)
            task.check_rows(source)
            examples = EncodedExamples(task, source, data.vocabulary)
            note = f"{len(examples):,} examples, {_column(task.column)}"
            UNBROKEN.print(f"[bold]{escape(task.name)}[/], {note}")
            few = [examples[index] for index in range(min(count, len(examples)))]
            batches = eval_batches(
                few, architecture=architecture, lengths=lengths, batch_size=len(few), boundary=boundary
            )
            for batch in batches:
                _print_examples(_parts(batch, number, data.vocabulary) for number in range(len(few)))
    for labelled in [find_labelled(name) for name in tuning.heads if name in trained]:
        source = labelled.rows("train", cache, experiment.data.corrupt_records)
        labelled.check_rows(source)
        note = f"examples for a head, {_column(labelled.column)}"
        UNBROKEN.print(f"[bold]{escape(labelled.name)}[/], {len(source):,} {note}")
        _print_examples(_labelled(labelled, source[index]) for index in range(min(count, len(source))))


def _show_pretraining(experiment: Experiment, data: Inputs, count: int) -> None:
    """Print rows of the first batch of each phase of pre-training."""
    for index in range(len(experiment.pretraining.phases) + 1):
        first, _ = phase_steps(experiment, index)
        is_last = index == len(experiment.pretraining.phases)
        name = "pre-training" if is_last else phase_name(index + 1)
        _show_phase(phase_settings(experiment, index), name, first, data, count)


def _show_phase(experiment: Experiment, name: str, step: int, data: Inputs, count: int) -> None:
    """Print rows of the batch of ``step``."""
    batches = corpus_batches(experiment, data)
    UNBROKEN.print(f"[bold]{name}[/], rows of step {step}: {described(batches.lengths)}")
    few_rows = range(min(count, experiment.pretraining.batch_size))
    batch = batches(step, slice(0, len(few_rows)))
    numbers = step * batches.batch_size + np.arange(len(few_rows))  # of all rows since step 0
    denoisers = row_denoisers(batches.row_source, experiment.objective, numbers)
    modes = mode_tokens(experiment.objective.denoisers, data.vocabulary)
    for number, denoiser in zip(few_rows, denoisers, strict=True):
        # In our own vocabularies the mask and [CLS] have the ids of sentinels, but are shown by their names.
        names = {token: mode for mode, token in modes.items()}
        if "mask" in denoiser.objective.inputs and data.vocabulary.mask is not None:
            names[data.vocabulary.mask] = MASK
        if denoiser.objective.is_mlm and data.vocabulary.cls is not None:
            names[data.vocabulary.cls] = CLS
        vocabulary = NamedTokens(data.vocabulary, names)
        if denoiser.name:
            UNBROKEN.print(f"  [cyan]denoiser[/] {escape(denoiser.name)}")
        predicted = "hidden" if denoiser.objective.is_mlm else "next"
        joins = denoiser.objective.needs_collocations
        _print_examples([_parts(batch, number, vocabulary, predicted, joins_neighbours=joins)])
    rows, objective = batches.row_source, experiment.objective
    if isinstance(rows, DenoisingRows) and "rate" not in objective.corruption.ignores:
        hidden = f"{100 * rows.hidden_share(numbers):.1f} % of their text"
        UNBROKEN.print(f"  these rows hide {hidden}; objective.rate asks for {100 * objective.rate:.3g} %\n")


def row_denoisers(rows: RowSource, objective: Objective, numbers: np.ndarray) -> list[Denoiser]:
    """Return the denoiser that makes each of these rows; without a mixture it is the objective itself."""
    denoisers = objective.denoisers
    chosen = rows.choose(numbers) if isinstance(rows, DenoiserMixtureRows) else np.zeros(len(numbers), int)
    return [denoisers[index] for index in chosen]


def described(lengths: Lengths) -> str:
    """Return in words what a row of pre-training has room for."""
    rooms = {"inputs": lengths.inputs, "targets": lengths.targets}
    said = " and ".join(f"{int(count):,} of {name}" for name, count in rooms.items() if count)
    return f"{int(lengths.raw):,} tokens of text, room for {said}"


def _column(name: str | None) -> str:
    return f"for the column {name} of reports"


@dataclass(frozen=True)
class NamedTokens:
    """Decodes as ``vocabulary``, but for some tokens that are shown by other names, such as [MASK] or [R]."""

    vocabulary: Tokenizer
    names: Mapping[int, str]

    @property
    def eos(self) -> int | None:
        return self.vocabulary.eos

    def decode(self, ids: Iterable[int]) -> str:
        text = self.vocabulary.decode(ids)
        for token, name in self.names.items():
            text = text.replace(self.vocabulary.decode([token]) or name, name)
        return text


def _print_examples(rows: Iterable[Iterable[Part]]) -> None:
    for parts in rows:
        for kind, note, text in parts:
            first, *others = wrap(text, max(CONSOLE.width - MARGIN, 1)) or [""]
            UNBROKEN.print(f"  [cyan]{kind:>7}[/] {note:>11} │ {escape(first)}")
            for line in others:
                UNBROKEN.print(f"{'│':>{MARGIN - 1}} {escape(line)}")
        UNBROKEN.print()


def _labelled(task: LabelledTask, row: Row) -> Iterator[Part]:
    """Yield the texts, for a choice those of each candidate, and the label."""
    between = " ⏎ " if task.kind == "choice" else " "
    for text in task.texts(row):
        yield "text", "", text if isinstance(text, str) else between.join(text)
    task.check_labels([row])
    label = str(task.target(row))
    if task.labels:
        label = " ".join(task.labels[k] for k in np.atleast_1d(task.target(row)))
    yield "label", "", label


def _parts(
    batch: Batch,
    row: int,
    vocabulary: "Tokenizer | NamedTokens",
    predicted: str = "hidden",
    joins_neighbours: bool = False,
) -> Iterator[Part]:
    """Yield the inputs and targets of each example of a row, and what the encoder has to predict.

    predicted: the kind of those: hidden tokens, or the next ones of an encoder with a causal mask. Tokens
    that are predicted in an order are shown in it.
    joins_neighbours: hidden tokens that are neighbours are one text, as those of a collocation.
    """
    kinds = {}
    if batch.encoder is not None:
        kinds["inputs"] = batch.encoder.tokens[row], batch.encoder.segment_ids[row]
    if batch.decoder is not None:
        kinds["targets"] = batch.decoder.targets[row], batch.decoder.segment_ids[row]
    last_segments = [*batch.sides.values()][-1].segment_ids[row]
    for example in range(1, last_segments.max() + 1):
        for kind, (tokens, segments) in kinds.items():
            ids = tokens[segments == example]
            text = " ⏎ ".join(filter(None, map(vocabulary.decode, _sentences(ids, vocabulary.eos))))
            yield kind, f"{len(ids)} tokens", text
        yield from _content(batch, row, example, vocabulary)
    if batch.encoder is not None and batch.encoder.targets is not None:
        places = np.flatnonzero(batch.encoder.loss_weights[row] > 0)
        joined_distance = 1 if joins_neighbours else 0
        if batch.encoder.prediction_order is not None:
            predicted = "in turn"
            places = places[np.argsort(batch.encoder.prediction_order[row][places])]
        cuts = np.flatnonzero(np.abs(np.diff(places)) > joined_distance) + 1
        texts = np.split(batch.encoder.targets[row][places], cuts)
        yield predicted, f"{len(places)} tokens", " · ".join(map(vocabulary.decode, texts))
    if batch.sentence_labels is not None:
        yield "label", "", "a changed pair" if batch.sentence_labels[row] else "a pair as in the text"


def _content(batch: Batch, row: int, example: int, vocabulary: "Tokenizer | NamedTokens") -> Iterator[Part]:
    """Yield the content tokens of a decoder's example, unless there are none or all but EOS are content."""
    side = batch.decoder
    if side is not None and side.content is not None:
        inside = side.segment_ids[row] == example
        ids, content = side.targets[row][inside], side.content[row][inside]
        if 0 < content.sum() < (ids != vocabulary.eos).sum():
            words = " · ".join(vocabulary.decode([token]) for token in ids[content])
            yield "content", f"{content.sum()} tokens", words


def _sentences(ids: Sequence[int], eos: int | None) -> Iterator[list[int]]:
    """Cut after each EOS: a decoder's row holds inputs, EOS, targets, EOS."""
    start = 0
    for end, token in enumerate(ids, 1):
        if token == eos or end == len(ids):
            yield list(ids[start:end])
            start = end
