"""Looking into data and models: examples as the model sees them, and what a trained model answers."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape

from experiments.console import RUNS
from experiments.runs.prepare import Encoded, prepare, pretraining_batches, tuning_lengths
from experiments.study.registry import build
from lm.data.batches import Batch
from lm.data.supervised import eval_batches
from lm.data.tasks.labelled import LabelledTask, find_labelled
from lm.data.tasks.mixtures import mixture
from lm.data.tasks.task import Row
from lm.data.text.vocabulary import EOS, MASK, Vocabulary
from lm.ops.decoding.config import Decoding
from lm.settings import SettingError

GREEDY = Decoding()
CONSOLE = Console(soft_wrap=True)

Part = tuple[str, str, str]  # of an example: what it is, how long, and its text


def show_examples(name: str, /, scale: str = "nano", count: int = 3, runs: Path = RUNS) -> None:
    """Print pre-training and fine-tuning examples of a row, decoded: inputs and targets as the model sees
    them.

    Args:
        name: row of the registry.
        scale: size of the study: nano, mini, mini-real or base.
        count: examples of each kind.
        runs: folder that holds the prepared data and vocabulary.
    """

    experiment = build(name, scale)
    prepared = prepare(experiment, runs / "cache", CONSOLE.print)
    batches = pretraining_batches(experiment, prepared, "train")
    CONSOLE.print(f"[bold]pre-training[/], rows of step 0, {batches.lengths}")
    shown = min(count, experiment.pretraining.batch_size)
    batch = batches(0, slice(0, shown))
    shows = prepared.vocabulary
    # not sentinels, the first of which is our own vocabularies' mask
    if "mask" in experiment.objective.inputs:
        shows = Masked(shows, MASK)
    _print(_parts(batch, row, shows) for row in range(shown))
    for mixed in experiment.tuning.mixtures:
        for task in mixture(mixed):
            examples = Encoded(
                task, task.rows("train", runs / "cache", experiment.data.corrupt_records), prepared.vocabulary
            )
            CONSOLE.print(
                f"[bold]{task.name}[/], {len(examples):,} examples, for the paper's column {task.column}"
            )
            few = [examples[place] for place in range(min(count, len(examples)))]
            lengths = tuning_lengths(experiment, (mixed,))
            architecture = experiment.model.architecture
            for batch in eval_batches(few, architecture=architecture, lengths=lengths, batch_size=len(few)):
                _print(_parts(batch, row, prepared.vocabulary) for row in range(len(few)))
    for task in map(find_labelled, experiment.tuning.heads):
        rows = task.rows("train", runs / "cache", experiment.data.corrupt_records)
        CONSOLE.print(
            f"[bold]{task.name}[/], {len(rows):,} examples for a head, for the paper's column {task.column}"
        )
        _print(_labelled(task, rows[place]) for place in range(min(count, len(rows))))


@dataclass(frozen=True)
class Masked:
    """Decodes as ``vocabulary``, but for the mask."""

    vocabulary: Vocabulary
    shown: str  # for the mask

    def decode(self, ids: Iterable[int]) -> str:
        mask = self.vocabulary.decode([self.vocabulary.mask])
        return self.vocabulary.decode(ids).replace(mask or self.shown, self.shown)


def _print(rows: Iterable[Iterable[Part]]) -> None:
    for parts in rows:
        for kind, note, text in parts:
            CONSOLE.print(f"  [cyan]{kind:>7}[/] {note:>11} │ {escape(text)}", highlight=False)
        CONSOLE.print()


def _labelled(task: LabelledTask, row: Row) -> Iterator[Part]:
    """The texts, of a choice those of each candidate, and what is to be told of them."""
    for text in task.texts(row):
        yield (
            "text",
            "",
            text if isinstance(text, str) else (" ⏎ " if task.kind == "choice" else " ").join(text),
        )
    target = task.target(row)
    yield "label", "", " ".join(task.labels[k] for k in np.atleast_1d(target)) if task.labels else str(target)


def _parts(batch: Batch, row: int, vocabulary: "Vocabulary | Masked") -> Iterator[Part]:
    """What the encoder reads of each example of a row, and what the decoder is to write, or the encoder to
    tell.
    """
    sides = [side for side in ("encoder", "decoder") if f"{side}_segment_ids" in batch]
    for example in range(1, batch[f"{sides[-1]}_segment_ids"][row].max() + 1):
        for kind, side, tokens in (
            ("inputs", "encoder", "encoder_input_tokens"),
            ("targets", "decoder", "decoder_target_tokens"),
        ):
            if tokens in batch:
                ids = batch[tokens][row][batch[f"{side}_segment_ids"][row] == example]
                text = " ⏎ ".join(filter(None, map(vocabulary.decode, _sentences(ids))))
                yield kind, f"{len(ids)} tokens", text
    if "encoder_target_tokens" in batch:
        ids = batch["encoder_target_tokens"][row][batch["encoder_loss_weights"][row] > 0]
        yield "hidden", f"{len(ids)} tokens", " · ".join(vocabulary.decode([token]) for token in ids)
    if "sentence_labels" in batch:
        yield "label", "", "a changed pair" if batch["sentence_labels"][row] else "a pair as in the text"


def _sentences(ids: Sequence[int]) -> Iterator[list[int]]:
    """Cut after each EOS: a decoder's row holds inputs, EOS, targets, EOS."""
    start = 0
    for place, token in enumerate(ids, 1):
        if token == EOS or place == len(ids):
            yield list(ids[start:place])
            start = place


def generate(
    run: Path,
    /,
    prompt: tuple[str, ...],
    mixture: str = "",
    decoding: Annotated[Decoding, tyro.conf.arg(name="")] = GREEDY,
    seed: int = 0,
) -> None:
    """Show what a run's model writes after prompts: greedily, sampled, or by beam search.

    Args:
        run: folder of a run, such as runs/nano/t5/1-baseline/baseline/seed-0.
        prompt: one or more texts to answer or to continue.
        mixture: which fine-tuned model answers: by default the first; 'pretraining' is the pre-trained one.
        decoding: how answers are written.
        seed: of sampling.
    """
    from experiments.runs.trained import answering, open_run

    write = _writer(decoding, seed)
    opened = open_run(run, answering(run), mixture)
    batch = opened.batch([opened.encode(text) for text in prompt], decoding.max_length)
    write(opened.model, batch)  # compiles
    start = time.perf_counter()
    tokens = write(opened.model, batch)[: len(prompt)]
    seconds, count = time.perf_counter() - start, written(tokens, opened.config.special.eos)
    for text, ids in zip(prompt, tokens, strict=True):
        CONSOLE.print(f"[cyan]{escape(text)}[/]\n  {escape(opened.vocabulary.decode(ids))}", highlight=False)
    CONSOLE.print(f"{count} tokens in {seconds:.3f} s: {count / seconds:.0f} tokens/s", highlight=False)


def written(tokens: np.ndarray, eos: int | None) -> int:
    """How many of answers [B,max_length] were written: up to and with the first EOS, padding or none before
    it.
    """
    ends = tokens == eos
    return int(np.where(ends.any(1), ends.argmax(1) + 1, tokens.shape[1]).sum())


def _writer(decoding: Decoding, seed: int) -> Callable:
    """(model, batch) -> the best answers, int32 [B,max_length]."""
    import jax

    from lm.evaluate.decode import beam_search, decode

    if decoding.beams > 1:
        return lambda model, batch: np.asarray(beam_search(model, batch, decoding)[0][:, 0])
    key = jax.random.key(seed)
    return lambda model, batch: np.asarray(decode(model, batch, decoding, key=key).tokens)


def fill_in(
    text: str, /, run: Path | None = None, top: int = 5, iterations: int = 0, runs: Path = RUNS
) -> None:
    """Show what a masked language model puts for each [MASK] of a text: "Paris is the [MASK] of France."

    Args:
        text: a text with one or more [MASK].
        run: folder of a run; by default the masked language model that was trained last.
        top: candidates shown for each mask.
        iterations: fill the whole text in this many passes, each of which thinks the least sure places over.
        runs: folder that holds the runs.
    """
    from experiments.runs.trained import masked, newest_masked, open_run
    from lm.evaluate.fill import fill, mask_predict

    if MASK not in text:
        raise SettingError(f"the text {text!r} has no {MASK} to fill")
    for name, value, least in (("--top", top, 1), ("--iterations", iterations, 0)):
        if value < least:
            raise SettingError(f"{name} {value} should be at least {least}")
    folder = newest_masked(runs) if run is None else run
    opened = open_run(folder, masked(folder))
    vocabulary = opened.vocabulary
    if vocabulary.mask is None:
        raise SettingError(f"the vocabulary of {folder} has no mask")
    ids = opened.encode(text)
    batch = opened.batch([ids])
    CONSOLE.print(f"[dim]{folder}[/]", highlight=False)
    if iterations:
        filled = np.asarray(mask_predict(opened.model, batch, iterations=iterations, mask=vocabulary.mask))[
            0, : len(ids)
        ]
        special = (vocabulary.cls, vocabulary.sep, vocabulary.eos)
        CONSOLE.print(
            escape(vocabulary.decode([token for token in filled if token not in special])), highlight=False
        )
        return
    candidates = fill(opened.model, batch, mask=vocabulary.mask, k=top)
    for place, (tokens, shares) in enumerate(zip(*candidates, strict=True), 1):
        found = "  ".join(
            f"{escape(vocabulary.decode([t]) or str(t))} {s:.1%}" for t, s in zip(tokens, shares, strict=True)
        )
        CONSOLE.print(f"{escape(MASK)} {place}: {found}", highlight=False)


def attention(run: Path, /, text: str, mixture: str = "", out: Path = Path("attention.png")) -> None:
    """Draw where each head of a run's model looks in a text, a row a layer.

    Args:
        run: folder of a run.
        text: what the model reads; an encoder-decoder is watched writing its answer.
        mixture: which fine-tuned model; by default the pre-trained one.
        out: picture to write, .png, .svg or .pdf.
    """
    from experiments.cli.attention import show_attention

    show_attention(run, text, mixture, out)
