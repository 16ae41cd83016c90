"""Looking into data and models: examples as the model sees them, and what a trained model answers."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from rich.markup import escape

from experiments.cli.usage.arguments import (
    FLAT,
    first_word,
    named_settings,
    option,
    ordered,
    parse,
    scale_of,
)
from experiments.console import RUNS, UNBROKEN
from experiments.runs.prepare import (
    EncodedExamples,
    Prepared,
    prepare,
    reads_corpus,
    training_batches,
    tuning_lengths,
)
from experiments.starts import started_from
from experiments.study.experiment import BASELINE, Experiment
from experiments.study.overrides import check_start
from experiments.study.registry import build
from experiments.study.scales import DEFAULT_SCALE
from lm.batch import Batch
from lm.config.base import SettingError, at_least, changes, check_seed
from lm.config.decoding import Decoding
from lm.data.seq2seq import eval_batches
from lm.data.tasks.labelled import LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Row
from lm.objectives.denoising import Lengths
from lm.special_tokens import boundary_tokens
from lm.tokenizers.tokenizer import MASK, METASPACE, Tokenizer

if TYPE_CHECKING:  # with jax, which takes a second
    from experiments.runs.trained import Trained

GAP = re.compile(r"<mask>|<extra_id_\d+>")  # how published models write what is [MASK] here
LONGEST_SPAN = 16  # that an encoder-decoder may write for a mask [tokens]
GREEDY = Decoding()
Part = tuple[str, str, str]  # of an example: its kind, length and text


def examples_command(arguments: Sequence[str]) -> None:
    """Print pre-training and fine-tuning examples of a row, decoded, as the model sees them."""

    def examples(
        row: str,
        /,
        settings: Annotated[Experiment, FLAT] = BASELINE,
        scale: str = DEFAULT_SCALE,
        count: int = 3,
        runs: Path = RUNS,
        start: str = "",
        tasks: str = "",
    ) -> None:
        """Print pre-training and fine-tuning examples of a row, decoded, as the model sees them.

        Settings given here change the row, as for lm run.

        Args:
            row: row of the registry.
            scale: size of the study.
            count: examples of each kind.
            runs: folder that holds the prepared data and vocabulary.
            start: the checkpoint whose tokenizer is used, as for lm run.
            tasks: mixtures (of encoders: heads) or task files, separated by commas, instead of the row's.
        """
        del row, scale, start  # on which ``default`` depends
        check_start(default, named_settings(arguments, settings))
        if tasks:
            encodes = settings.model.architecture == "encoder"
            named: dict[str, tuple[str, ...]] = {"tuning.mixtures": (), "tuning.heads": ()}
            named["tuning.heads" if encodes else "tuning.mixtures"] = tuple(tasks.split(","))
            settings = changes(settings, named)
        show_examples(settings, count, runs / "cache")

    arguments = ordered(examples, arguments)
    started = started_from(option(arguments, "--start", ""), Path(option(arguments, "--runs", str(RUNS))))
    default = build(first_word(arguments), scale_of(arguments), started)
    parse(examples, "lm examples", arguments, default)


def show_examples(experiment: Experiment, count: int, cache: Path) -> None:
    """Print ``count`` examples of each kind that an experiment trains on."""
    data, tuning = prepare(experiment, cache, UNBROKEN.print), experiment.tuning
    if reads_corpus(experiment):
        _show_pretraining(experiment, data, count)
    boundary = boundary_tokens(experiment.model, data.vocabulary)
    for name in tuning.mixtures:
        lengths, architecture = tuning_lengths(experiment, (name,)), experiment.model.architecture
        for task in mixture(name):
            source = task.rows("train", cache, experiment.data.corrupt_records)
            task.check_rows(source)
            examples = EncodedExamples(task, source, data.vocabulary)
            UNBROKEN.print(f"[bold]{task.name}[/], {len(examples):,} examples, {_column(task.column)}")
            few = [examples[index] for index in range(min(count, len(examples)))]
            size = len(few)
            batches = eval_batches(
                few, architecture=architecture, lengths=lengths, batch_size=size, boundary=boundary
            )
            for batch in batches:
                _print_examples(_parts(batch, number, data.vocabulary) for number in range(len(few)))
    for labelled in map(find_labelled, tuning.heads):
        source = labelled.rows("train", cache, experiment.data.corrupt_records)
        labelled.check_rows(source)
        note = f"examples for a head, {_column(labelled.column)}"
        UNBROKEN.print(f"[bold]{labelled.name}[/], {len(source):,} {note}")
        _print_examples(_labelled(labelled, source[index]) for index in range(min(count, len(source))))


def _show_pretraining(experiment: Experiment, data: Prepared, count: int) -> None:
    """Rows of the first batch."""
    batches = training_batches(experiment, data)
    UNBROKEN.print(f"[bold]pre-training[/], rows of step 0: {described(batches.lengths)}")
    few_rows = range(min(count, experiment.pretraining.batch_size))
    # "mask" stands for itself, not for a sentinel, the first of which is the mask of our own vocabularies
    masks = "mask" in experiment.objective.inputs
    vocabulary = MaskShown(data.vocabulary) if masks else data.vocabulary
    batch = batches(0, slice(0, len(few_rows)))
    _print_examples(_parts(batch, number, vocabulary) for number in few_rows)


def described(lengths: Lengths) -> str:
    """Return in words what a row of pre-training has room for."""
    rooms = {"inputs": lengths.inputs, "targets": lengths.targets}
    said = " and ".join(f"{int(count):,} of {name}" for name, count in rooms.items() if count)
    return f"{int(lengths.raw):,} tokens of text, room for {said}"


def _column(name: str | None) -> str:
    return f"for the paper's column {name}"


@dataclass(frozen=True)
class MaskShown:
    """Decodes as ``vocabulary``, but for the mask, which is shown as [MASK]."""

    vocabulary: Tokenizer

    @property
    def eos(self) -> int | None:
        return self.vocabulary.eos

    def decode(self, ids: Iterable[int]) -> str:
        mask = self.vocabulary.decode([self.vocabulary.mask])
        return self.vocabulary.decode(ids).replace(mask or MASK, MASK)


def _print_examples(rows: Iterable[Iterable[Part]]) -> None:
    for parts in rows:
        for kind, note, text in parts:
            UNBROKEN.print(f"  [cyan]{kind:>7}[/] {note:>11} │ {escape(text)}")
        UNBROKEN.print()


def _labelled(task: LabelledTask, row: Row) -> Iterator[Part]:
    """The texts, for a choice those of each candidate, and the label."""
    between = " ⏎ " if task.kind == "choice" else " "
    for text in task.texts(row):
        yield "text", "", text if isinstance(text, str) else between.join(text)
    task.check_labels([row])
    target = task.target(row)
    yield "label", "", " ".join(task.labels[k] for k in np.atleast_1d(target)) if task.labels else str(target)


def _parts(batch: Batch, row: int, vocabulary: "Tokenizer | MaskShown") -> Iterator[Part]:
    """The inputs and targets of each example of a row, and what the encoder has to predict."""
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
        ids = batch.encoder.targets[row][batch.encoder.loss_weights[row] > 0]
        yield "hidden", f"{len(ids)} tokens", " · ".join(vocabulary.decode([token]) for token in ids)
    if batch.sentence_labels is not None:
        yield "label", "", "a changed pair" if batch.sentence_labels[row] else "a pair as in the text"


def _content(batch: Batch, row: int, example: int, vocabulary: "Tokenizer | MaskShown") -> Iterator[Part]:
    """The content tokens of a decoder's example, unless they are all that it predicts but EOS."""
    side = batch.decoder
    if side is not None and side.content is not None:
        inside = side.segment_ids[row] == example
        ids, content = side.targets[row][inside], side.content[row][inside]
        if content.sum() < (ids != vocabulary.eos).sum():
            words = " · ".join(vocabulary.decode([token]) for token in ids[content])
            yield "content", f"{content.sum()} tokens", words


def _sentences(ids: Sequence[int], eos: int | None) -> Iterator[list[int]]:
    """Cut after each EOS: a decoder's row holds inputs, EOS, targets, EOS."""
    start = 0
    for end, token in enumerate(ids, 1):
        if token == eos or end == len(ids):
            yield list(ids[start:end])
            start = end


def generate(
    run: Path,
    /,
    prompt: tuple[str, ...],
    mixture: str = "",
    decoding: Annotated[Decoding, FLAT] = GREEDY,
    seed: int = 0,
) -> None:
    """Show what a run's model writes after prompts: greedy, by sampling or by beam search.

    Args:
        run: folder of a run, such as runs/nano/t5/1-baseline/baseline/seed-0.
        prompt: one or more texts to answer or to continue.
        mixture: which fine-tuned model answers; by default the pre-trained one.
        seed: sampling seed.
    """
    from experiments.runs.trained import answering, open_run

    check_seed(seed, "--seed")
    write = _writer(decoding, seed)
    trained = open_run(run, answering(run), mixture)
    batch = trained.batch([trained.encode(text) for text in prompt], decoding.max_length)
    write(trained.model, batch)  # compiles
    start = time.perf_counter()
    tokens = write(trained.model, batch)[: len(prompt)]
    seconds, count = time.perf_counter() - start, count_written(tokens, trained.config.special.eos)
    UNBROKEN.print(f"[dim]{escape(trained.which)}[/]")
    for text, ids in zip(prompt, tokens, strict=True):
        UNBROKEN.print(f"[cyan]{escape(text)}[/]\n  {escape(trained.vocabulary.decode(ids))}")
    UNBROKEN.print(f"{count} tokens in {seconds:.3f} s: {count / seconds:.0f} tokens/s")


def count_written(tokens: np.ndarray, eos: int | None) -> int:
    """The tokens of answers [B,max_length] up to and with the first EOS; without one, all."""
    ends = tokens == eos
    return int(np.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1]).sum())


def _writer(decoding: Decoding, seed: int) -> Callable:
    """(model, batch) -> the best answers, int32 [B,max_length]."""
    import jax

    from lm.evaluate.generate import beam_search, decode

    if decoding.beams > 1:
        return lambda model, batch: np.asarray(beam_search(model, batch, decoding)[0][:, 0])
    key = jax.random.key(seed)
    return lambda model, batch: np.asarray(decode(model, batch, decoding, key=key).tokens)


@dataclass(frozen=True)
class Filling:
    """Options of how gaps are filled."""

    top: int = 5  # candidates to show: tokens for each mask of an encoder, else whole texts
    iterations: int = 0  # of encoders: fill in the whole text in N passes; 0 shows candidates for each mask
    # mask-predict predicts the least certain positions again in each pass; gibbs samples one after another,
    # each given all others
    passes: Literal["mask-predict", "gibbs"] = "mask-predict"
    seed: int = 0  # of gibbs

    def __post_init__(self):
        at_least(self, "", top=1, iterations=0)
        check_seed(self.seed, "--seed")
        if self.passes == "gibbs" and not self.iterations:
            raise SettingError("passes='gibbs' needs iterations of 1 or more, such as 10")


def fill_in(
    text: str,
    /,
    run: Path | None = None,
    filling: Annotated[Filling, FLAT] = Filling(),
    runs: Path = RUNS,
) -> None:
    """Show what a model puts for each [MASK] of a text: "Paris is the [MASK] of France."

    An encoder gives a token for each, an encoder-decoder (BART, T5) as many as it likes. <mask> and
    <extra_id_0>, <extra_id_1>, ... mean the same as [MASK].

    Args:
        text: a text with one or more [MASK].
        run: folder of a run; by default the one trained last whose model fills gaps.
        runs: folder that holds the runs.
    """
    from experiments.runs.trained import masked, newest_masked, open_run

    text = GAP.sub(MASK, text)
    if MASK not in text:
        raise SettingError(f"the text {text!r} has no {MASK} to fill")
    folder = newest_masked(runs) if run is None else run
    trained = open_run(folder, masked(folder))
    if trained.config.has_decoder and filling.iterations:
        raise SettingError("--iterations is for encoders; an encoder-decoder writes its text once")
    by_default = "" if run else ", of the newest run that fills gaps; --run names another"
    UNBROKEN.print(f"[dim]{escape(trained.which)}{by_default}[/]")
    how = _written if trained.config.has_decoder else _passed if filling.iterations else _guessed
    for line in how(trained, text, filling):
        UNBROKEN.print(line)


def _guessed(run: "Trained", text: str, filling: Filling) -> Iterator[str]:
    """Yield an encoder's likeliest tokens for each mask, with their probabilities."""
    from lm.evaluate.mask_filling import fill_masks

    vocabulary = run.vocabulary
    ids, _ = run.encode_gaps(text)
    candidates = fill_masks(run.model, run.batch([ids]), mask=vocabulary.mask, k=filling.top)
    for number, (tokens, shares) in enumerate(zip(*candidates, strict=True), 1):
        words = [escape(vocabulary.decode([token]) or str(token)) for token in tokens]
        line = "  ".join(f"{word} {share:.1%}" for word, share in zip(words, shares, strict=True))
        yield f"{escape(MASK)} {number}: {line}"


def _passed(run: "Trained", text: str, filling: Filling) -> Iterator[str]:
    """Yield the text that an encoder fills in several passes, or several texts by Gibbs sampling."""
    import jax

    from lm.evaluate.mask_filling import gibbs, mask_predict

    vocabulary, iterations = run.vocabulary, filling.iterations
    ids, _ = run.encode_gaps(text)
    if filling.passes == "gibbs":
        batch, key = run.batch([ids] * filling.top), jax.random.key(filling.seed)
        filled = gibbs(run.model, batch, key, iterations=iterations, mask=vocabulary.mask)[: filling.top]
    else:
        filled = mask_predict(run.model, run.batch([ids]), iterations=iterations, mask=vocabulary.mask)[:1]
    special = (vocabulary.cls, vocabulary.sep, vocabulary.eos)
    for row in np.asarray(filled)[:, : len(ids)]:
        yield escape(vocabulary.decode([token for token in row if token not in special]))


def _written(run: "Trained", text: str, filling: Filling) -> Iterator[str]:
    """Yield the likeliest texts of an encoder-decoder, each once, with the probability of all its answers."""
    from lm.evaluate.mask_filling import infill, sentinel_spans

    vocabulary, config = run.vocabulary, run.config
    ids, sentinels = run.encode_gaps(text)
    longest = LONGEST_SPAN * text.count(MASK) + (len(sentinels) if sentinels else len(ids)) + 1
    longest = min(longest, config.positions.max_length) if config.positions.kind == "learned" else longest
    answers, shares = infill(run.model, run.batch([ids], longest), max_length=longest, k=filling.top)
    found: dict[str, float] = {}  # text -> its probability, of all answers that read alike
    for answer, share in zip(answers[0].tolist(), shares[0].tolist(), strict=True):
        filled = escape(vocabulary.decode(answer))
        if sentinels:
            known = answer[: answer.index(vocabulary.eos)] if vocabulary.eos in answer else answer
            spans = sentinel_spans(known, sentinels, vocabulary.vocab_size - vocabulary.num_sentinels)
            words = [MASK if span is None else vocabulary.decode(span) for span in spans]
            shown = zip(text.split(MASK), [*words, ""], strict=True)
            filled = "".join(f"{escape(part)}[bold]{escape(word)}[/]" for part, word in shown)
        found[filled] = found.get(filled, 0.0) + share
    for filled, share in sorted(found.items(), key=lambda pair: -pair[1]):
        yield f"{percentage(share):>7}  {filled}"


def percentage(share: float) -> str:
    """Return ``"12.3%"``, and with an exponent what that would round to nothing."""
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.0e}%"


def show_neighbours(run: Path, /, words: tuple[str, ...], count: int = 8, stage: str = "") -> None:
    """Show the pieces whose vectors are nearest to a word's: of skip-gram, or of a model's embedding.

    Args:
        run: folder of a run, such as runs/nano/vectors/negative/seed-0.
        words: words that are one piece of the run's vocabulary.
        count: neighbours of each, by falling cosine.
        stage: whose embedding it is: by default skip-gram's, if the run has it, or the pre-trained one.
    """
    from experiments.runs.stages import stages_of
    from experiments.runs.trained import embedding_of

    stages = {each.name: each for each in stages_of(run)}
    vectors, which = embedding_of(run, stages, stage)
    UNBROKEN.print(f"[dim]{escape(which)}[/]")
    for word in words:
        piece = next((name for name in (METASPACE + word, word) if name in vectors.ids), word)
        nearest = "  ".join(f"{name} {cosine:.2f}" for name, cosine in vectors.neighbours(piece, count))
        UNBROKEN.print(f"[cyan]{escape(piece)}[/]  {escape(nearest)}", highlight=False)
