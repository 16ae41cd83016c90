"""A sample of held-out text: what a model reads, what it writes before and after training, what is true."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.runs.collocations import find_collocations
from experiments.runs.inputs import Inputs, encoded_split
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.pretraining import ExternalCheckpoint, pretraining_batches
from experiments.runs.paths import find_cache
from experiments.runs.sources import Sources
from experiments.runs.stages import stages_of
from experiments.runs.trained import networks, open_run
from experiments.study.experiment import Experiment
from lm import sharding
from lm.batch import Batch
from lm.config.decoding import Decoding
from lm.evaluate.generate import decode
from lm.nn.transformer import Transformer

CANDIDATES = 16  # held-out examples, of which the first that can be typed again is shown
WIDTH = 80  # of the terminal [columns]
PROMPT_LENGTH = 24  # of a text that a decoder continues [tokens]
DECODING = Decoding(max_length=32, temperature=0.5, top_p=0.9)  # small models lose themselves at more


@dataclass(frozen=True)
class Sample:
    """An example of held-out text, and what a model writes for it."""

    prompt: str
    before: str  # by the model at the start of its training
    after: str  # by the trained model
    continuation: str  # what the text says

    def lines(self) -> Iterator[str]:
        """Yield the lines of each text, for a terminal of WIDTH columns."""
        texts = {
            "held-out text": self.prompt,
            "before training": self.before,
            "after training": self.after,
            "in the text": self.continuation,
        }
        margin = max(map(len, texts)) + 3
        for label, text in texts.items():
            yield from textwrap.wrap(f"{label + ':':<{margin}}{text}", WIDTH, subsequent_indent=" " * margin)


def held_out_sample(experiment: Experiment, folder: Path) -> Sample | None:
    """Return what a run's pre-trained model writes for an example of the held-out text.

    A decoder continues the text; an encoder-decoder writes what its objective hid. None for an encoder, for
    counts, without pre-training on running text, and in one of several processes.
    """
    writes = experiment.model.has_decoder and experiment.counts.model == "none"
    if not writes or experiment.mixing.pretraining != "corpus" or jax.process_count() > 1:
        return None
    trains = [stage for stage in networks(stages_of(folder)) if stage.is_pretraining and stage.is_compared]
    if not trains:
        return None
    stage, trained, sources = trains[0], open_run(folder, trains), Sources(find_cache(folder))
    vocabulary, mesh = trained.vocabulary, sharding.make_mesh(experiment.mesh)
    text = encoded_split(experiment, "validation", vocabulary, sources)
    inputs = Inputs(vocabulary, text, text, sources)
    if experiment.objective.needs_collocations:
        inputs = replace(inputs, collocations=find_collocations(experiment, vocabulary, sources, print))
    batches = pretraining_batches(experiment, inputs, "validation")
    rows = (batches(0, slice(row, row + 1)) for row in range(min(CANDIDATES, batches.batch_size)))
    examples = [first_example(row, experiment.objective.has_inputs) for row in rows]

    def can_be_typed(prompt: list[int], continuation: list[int]) -> bool:
        """Return whether a prompt is the same tokens when it is read again, and cuts no word of its text."""
        shown = vocabulary.decode(prompt)
        is_cut = not vocabulary.decode([*prompt, *continuation]).startswith(f"{shown} ")
        return trained.encode(shown) == prompt and (experiment.model.has_encoder or not is_cut)

    prompt, continuation = next((pair for pair in examples if can_be_typed(*pair)), examples[0])
    batch = trained.batch([prompt], DECODING.max_length)

    def write(model: Transformer) -> str:
        return vocabulary.decode(np.asarray(decode(model, batch, DECODING, key=jax.random.key(0)).tokens[0]))

    before = write(first_model(stage, mesh))
    return Sample(vocabulary.decode(prompt), before, write(trained.model), vocabulary.decode(continuation))


def first_example(batch: Batch, has_inputs: bool) -> tuple[list[int], list[int]]:
    """Return the ids that a model reads of the first example of a batch, and those that it should write."""
    decoder = batch.side("decoder").map(lambda values: values[0])
    segments = decoder.segment_ids == 1
    targets, inputs = decoder.targets[segments], decoder.tokens[segments]
    if batch.encoder is not None:
        read = batch.encoder.tokens[0][batch.encoder.segment_ids[0] == 1]
        return read.tolist(), targets.tolist()
    prefix = int(decoder.causal_attention[segments].sum())
    place = prefix if has_inputs else min(PROMPT_LENGTH, len(inputs) // 2)
    return inputs[:place].tolist(), targets[place - 1 :][: DECODING.max_length].tolist()


def first_model(stage: NetworkStage, mesh: Mesh) -> Transformer:
    """Return the model that pre-training began with: a checkpoint's, or a random one.

    A phase that trained an encoder for a decoder is no model that writes: the decoder after it is random.
    """
    while isinstance(stage.parent, NetworkStage) and stage.parent.has_text_model:
        if stage.parent.settings.model.has_decoder != stage.settings.model.has_decoder:
            break
        stage = stage.parent
    if isinstance(stage, ExternalCheckpoint):
        return stage.restore_transformer(mesh)
    return cast(Transformer, stage.transformer_steps(mesh).initial_state(stage.settings.seed).eval_model)
