"""Looking into data and models: examples as the model sees them, and what a trained model answers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from experiments.experiment import Experiment
from experiments.prepare import Encoded, Prepared, prepare, pretraining_batches, tuning_lengths
from experiments.registry import build
from lm.config import SettingError, from_json, nearest
from lm.data import pipeline
from lm.data.mixtures import mixture
from lm.data.objectives import EOS
from lm.data.pipeline import Batch
from lm.data.vocabulary import Vocabulary

CONSOLE = Console(soft_wrap=True)


def show_examples(name: str, scale: str, count: int, runs: Path) -> None:
    """Print ``count`` rows of pre-training, and of each task, with their lengths."""
    experiment = build(name, scale)
    prepared = prepare(experiment, runs / "cache", CONSOLE.print)
    batches = pretraining_batches(experiment, prepared, "train")
    CONSOLE.print(f"[bold]pre-training[/], rows of step 0, {batches.limits}")
    _print(batches(0, slice(0, min(count, experiment.pretraining.batch_size))), prepared.vocabulary)
    for mixed in experiment.tuning.mixtures:
        for task in mixture(mixed):
            examples = Encoded(task, task.rows("train", runs / "cache"), prepared.vocabulary)
            CONSOLE.print(f"[bold]{task.name}[/], {len(examples):,} examples, for the paper's column {task.column}")
            few = [examples[place] for place in range(min(count, len(examples)))]
            lengths = tuning_lengths(experiment, mixed)
            architecture = experiment.model.architecture
            for batch in pipeline.eval_batches(few, architecture=architecture, lengths=lengths, batch_size=len(few)):
                _print(batch, prepared.vocabulary)


def _print(batch: Batch, vocabulary: Vocabulary) -> None:
    """Each example of each row: what the encoder reads, and what the decoder is to write."""
    for row in range(len(batch["decoder_target_tokens"])):
        for kind, text, length in _parts(batch, row, vocabulary):
            CONSOLE.print(f"  [cyan]{kind:>7}[/] {length:4} tokens │ {escape(text)}", highlight=False)
        CONSOLE.print()


def _parts(batch: Batch, row: int, vocabulary: Vocabulary) -> Iterator[tuple[str, str, int]]:
    for example in range(1, batch["decoder_segment_ids"][row].max() + 1):
        for kind, side, tokens in (
            ("inputs", "encoder", "encoder_input_tokens"),
            ("targets", "decoder", "decoder_target_tokens"),
        ):
            if tokens in batch:
                ids = batch[tokens][row][batch[f"{side}_segment_ids"][row] == example]
                text = " ⏎ ".join(filter(None, map(vocabulary.decode, _sentences(ids))))
                yield kind, text, len(ids)


def _sentences(ids: Sequence[int]) -> Iterator[list[int]]:
    """Cut after each EOS: a decoder's row holds inputs, EOS, targets, EOS."""
    start = 0
    for place, token in enumerate(ids, 1):
        if token == EOS or place == len(ids):
            yield list(ids[start:place])
            start = place


def answer(folder: Path, prompts: Sequence[str], mixture_name: str, max_length: int) -> None:
    """Print what the model of a run writes after each prompt."""
    from experiments.run import cache_of

    experiment = load_settings(folder)
    prepared = prepare(experiment, cache_of(folder), CONSOLE.print)
    phase = _phase(folder, experiment, mixture_name)
    for prompt, text in zip(prompts, _answers(experiment, prepared, phase, prompts, max_length), strict=True):
        CONSOLE.print(f"[cyan]{escape(prompt)}[/]\n  {escape(text)}", highlight=False)


def load_settings(folder: Path) -> Experiment:
    """The settings of the run in ``folder``."""
    path = folder / "settings.json"
    if not path.exists():
        found = sorted(str(p.parent) for p in Path().glob("runs/**/settings.json"))
        raise SettingError(f"{folder} is no run: it has no settings.json{nearest(str(folder), found)}")
    return from_json(Experiment, path.read_text())


def _phase(folder: Path, experiment: Experiment, name: str) -> Path:
    """The folder of the training phase that answers."""
    phases = {m: folder / "finetuning" / m for m in experiment.tuning.mixtures}
    phases["pretraining"] = folder / "pretraining"
    name = name or next(iter(phases))
    if name not in phases:
        raise SettingError(f"--mixture {name!r} is no part of {folder}{nearest(name, phases)}")
    return phases[name]


def _answers(
    experiment: Experiment, prepared: Prepared, phase: Path, prompts: Sequence[str], max_length: int
) -> list[str]:
    from experiments.run import steps_of
    from lm import sharding
    from lm.evaluate.score import answers
    from lm.train.checkpoints import CheckpointError, Checkpoints
    from lm.train.config import CheckpointConfig

    kind = experiment.pretraining if phase.name == "pretraining" else experiment.finetuning
    steps = steps_of(experiment, kind, sharding.make_mesh(experiment.mesh))
    with Checkpoints(phase / "checkpoints", CheckpointConfig(best="highest")) as checkpoints:
        try:
            state = checkpoints.restore(steps.abstract, None if phase.name == "pretraining" else checkpoints.best())
        except CheckpointError as error:
            raise SettingError(str(error)) from error
    if state is None:
        raise SettingError(f"{phase} has no checkpoint yet; train the run first")
    encoded = [(prepared.vocabulary.encode(prompt), ()) for prompt in prompts]
    room = max(len(ids) for ids, _ in encoded) + 1
    lengths = pipeline.Lengths(raw=room, inputs=room, targets=1)
    size = -(-len(prompts) // steps.mesh.size) * steps.mesh.size
    batches = pipeline.eval_batches(
        encoded, architecture=experiment.model.architecture, lengths=lengths, batch_size=size
    )
    return answers(state.model, batches, steps.put, prepared.vocabulary.decode, max_length=max_length)[: len(prompts)]
