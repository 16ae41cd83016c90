"""Pictures of what a run's model does, most of them with a text."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import jax
import numpy as np
import tyro
from flax import nnx
from matplotlib.figure import Figure

from experiments.drawings.curves import Curve, bias_plots, draw_gradients, gradient_curves, starting_gradients
from experiments.drawings.measured import SMALL_DECODER, decoding_costs, machine, milliseconds
from experiments.drawings.panels import Heat, Picture, Plot, Scale, heatmaps, plots
from experiments.drawings.reading import (
    Reading,
    draw_alignment,
    draw_gates,
    draw_heads,
    draw_lens,
    draw_next,
    layer_names,
)
from experiments.runs.recipes import trained
from experiments.runs.stages import Stage, stages_of
from experiments.runs.trained import Trained, open_run
from lm import sharding
from lm.batch import Batch, Side
from lm.config.base import SettingError, at_least
from lm.evaluate.generate import greedy
from lm.evaluate.lens import mean_similarity, word_similarity
from lm.evaluate.rnn_states import recurrent_layers, state_gradients
from lm.nn.elmo import BidirectionalLM
from lm.nn.finetune import ModelWithHead
from lm.nn.transformer import Transformer
from lm.tokenizers.tokenizer import Tokenizer

WRITTEN = 16  # longest answer that a decoder is watched writing [tokens]
LONGEST_PIECE_RUN = 12  # of the longest word


def open_and_tell(run: Path, mixture: str = "") -> Trained:
    """Open a model of a run, and print which it is."""
    trained = open_run(run, stages_of(run), mixture)
    print(trained.which)
    return trained


@dataclass(frozen=True, kw_only=True)
class OfRun(Picture):
    """A picture of a run's model."""

    run: tyro.conf.Positional[Path]  # folder of a run
    mixture: str = ""  # which fine-tuned model; by default the pre-trained one

    def opened(self) -> Trained:
        """The model."""
        return open_and_tell(self.run, self.mixture)


@dataclass(frozen=True, kw_only=True)
class OfText(OfRun):
    """A picture of what a run's model does with a text."""

    text: str  # what the model reads; an encoder-decoder is watched writing its answer

    def read(self) -> Reading:
        """The model with the text; SettingError if that is empty."""
        return open_text(self.opened(), self.text)


@dataclass(frozen=True, kw_only=True)
class HeadsPicture(OfText):
    """Where heads look in a text: the four that look sharpest at other tokens, or all."""

    heads: int = 4  # panels to draw, of the heads that look sharpest at other tokens (0: all)

    def figure(self) -> Figure:
        at_least(self, "--", heads=0)
        return draw_heads(self.read(), self.heads)


class AlignmentPicture(OfText):
    """Where a decoder looks in the text while it writes: cross-attention of each layer, mean of its heads."""

    def figure(self) -> Figure:
        return draw_alignment(self.read())


class LensPicture(OfText):
    """The likeliest token after each layer, if the last norm and output matrix read it (the logit lens)."""

    def figure(self) -> Figure:
        return draw_lens(self.read())


@dataclass(frozen=True, kw_only=True)
class NextPicture(OfText):
    """The likeliest next tokens after each token."""

    k: int = 5  # of how many tokens the probability is shown

    def figure(self) -> Figure:
        at_least(self, "--", k=1)
        return draw_next(self.read(), self.k)


class GatesPicture(OfText):
    """What the gates of an LSTM or a GRU let through at each token (of an encoder: of its forward half)."""

    def figure(self) -> Figure:
        return draw_gates(self.read())


@dataclass(frozen=True, kw_only=True)
class SimilarityPicture(Picture):
    """How alike the states of one word in two sentences are, from its embedding to the last layer."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, a panel each
    text: str  # the first sentence
    other: str  # the second sentence
    word: str  # in both sentences, spelt alike

    def figure(self) -> Figure:
        if not self.runs:
            raise SettingError("lm draw similarity RUN [RUN ...]: name a run at least")
        panels = []
        for folder in self.runs:
            run = open_and_tell(folder)
            lines = similarity_lines(run, (self.text, self.other), self.word)
            names = ["embedding", *layer_names(len(lines["mean of other pairs of tokens"][0]) - 1)]
            config = run.config
            title = f"{config.architecture}, {config.mixer.kind}"
            panels.append(
                Plot(title, "layer", "cosine of two states", lines, ticks=names, span=(-0.05, 1.05))
            )
        return plots(panels)


@dataclass(frozen=True, kw_only=True)
class MixturePicture(Picture):
    """Which layers the heads of a run read that has `tuning.layers mixed-frozen`, a line a task."""

    run: tyro.conf.Positional[Path]  # folder of a run

    def figure(self) -> Figure:
        stages = [stage for stage in stages_of(self.run) if stage.kind == "head"]
        stages = [stage for stage in stages if stage.settings.tuning.layers == "mixed-frozen"]
        if not stages:
            raise SettingError(
                f"{self.run} mixes no layers: train a row with --tuning.layers mixed-frozen, "
                "such as bert/mixed-layers"
            )
        shares = np.stack([mixture_shares(stage) for stage in stages])
        words = np.array([[f"{share:.3f}" for share in task] for task in shares])
        scale = Scale("weight; a task's sum is 1", 0, 1)
        panel = Heat("", shares, scale, [stage.name for stage in stages], layer_names(shares.shape[1]), words)
        return heatmaps([panel], "after layer", "task")


class BiasPicture(OfRun):
    """What each head has learnt to add to scores by distance, T5's bias."""

    def figure(self) -> Figure:
        return plots(bias_plots(self.opened().model))


@dataclass(frozen=True, kw_only=True)
class GradientPicture(Picture):
    """How much a state of an RNN and of an LSTM owes to earlier ones, by their distance.

    Without a run of layers as they start, with random inputs; with one of its layers, and a text.
    """

    run: tyro.conf.Positional[Path | None] = None  # folder of a run
    text: str = ""  # what the model of the run reads
    width: int = 64  # without a run: of the state [features]
    length: int = 64  # without a run: of the row [tokens]
    gain: float = 2.0  # without a run: how many times larger the weights of the second RNN are

    def figure(self) -> Figure:
        at_least(self, "--", width=1, length=3)
        if self.run is None:
            title = f"layers of {self.width} features as they start"
            return draw_gradients(title, starting_gradients(self.width, self.length, self.gain))
        read_text = open_text(open_and_tell(self.run), self.text)
        tokens = len(next(iter(read_text.ids.values())))
        if tokens < 3:
            raise SettingError(f"--text has {tokens} tokens: a curve over their distances needs at least 3")
        curves: dict[str, Curve] = {}
        for layer, (direction, x) in enumerate(recurrent_layers(read_text.model, read_text.batch), 1):
            name = f"layer {layer}, {direction.config.mixer.kind}"
            curves |= gradient_curves(name, state_gradients(direction, x[0, :tokens]))
        return draw_gradients(f"{tokens} tokens, forward direction", curves)


@dataclass(frozen=True, kw_only=True)
class DecodingPicture(Picture):
    """The time of the last token of a row against its length, with a cache and without, on this machine."""

    run: tyro.conf.Positional[Path | None] = (
        None  # folder of a run, whose model is timed; else a small decoder
    )
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)  # of the rows [tokens]

    def figure(self) -> Figure:
        if not self.lengths or min(self.lengths) < 2:
            raise SettingError(f"--lengths {self.lengths} should be lengths of at least 2")
        if self.run is None:
            model = Transformer(SMALL_DECODER, nnx.Rngs(params=jax.random.key(0)))
        else:
            model = open_and_tell(self.run).model
        config = model.config
        lines = {
            name: (self.lengths, milliseconds(c)) for name, c in decoding_costs(model, self.lengths).items()
        }
        title = f"{config.num_decoder_layers} layers of {config.d_model} features, 1 row"
        where = f"{title}\non {machine()}"
        return plots([Plot(where, "length of the row [tokens]", "time of a token [ms]", lines, log="xy")])


def open_text(run: Trained, text: str) -> Reading:
    """A run's model with a text; an encoder-decoder writes an answer. SettingError if the text is empty."""
    if not text.strip():
        raise SettingError("--text is empty: give a sentence to look at")
    ids, config = run.encode(text), run.config
    batch, tokens = run.batch([ids]), {"encoder" if config.has_encoder else "decoder": ids}
    if config.has_encoder and config.has_decoder:
        answer = np.asarray(greedy(run.model, batch, max_length=WRITTEN))[0].tolist()
        end = answer.index(config.special.eos) if config.special.eos in answer else len(answer)
        start = [] if config.special.start is None else [config.special.start]
        tokens["decoder"] = start + answer[:end]
        rows = np.tile(np.array(tokens["decoder"], np.int32), (run.devices, 1))
        batch = replace(batch, decoder=run.put(Side(tokens=rows)))
    masks = "mask" in run.stage.settings.objective.inputs and not config.published
    return Reading(run.model, run.vocabulary, batch, tokens, masks)


def similarity_lines(run: Trained, texts: tuple[str, str], word: str) -> dict[str, Curve]:
    """By layer, from the embedding on: the cosine of a word's states in two texts, and of unequal tokens."""
    first_ids, second_ids = (run.encode(text) for text in texts)
    spans = word_span(run.vocabulary, first_ids, word), word_span(run.vocabulary, second_ids, word)
    model = reader_of_texts(run)
    first, second = text_states(run, model, first_ids), text_states(run, model, second_ids)
    curves = {
        f"“{word}” here and there": word_similarity(first, second, spans),
        "mean of other pairs of tokens": mean_similarity(first, second, (first_ids, second_ids)),
    }
    return {name: (np.arange(len(values)), values) for name, values in curves.items()}


def reader_of_texts(run: Trained) -> Transformer | BidirectionalLM:
    """The model of a run; of ELMo's two language models both."""
    if run.stage.kind == "text" or "backward" not in run.config.heads:
        return run.model
    model = trained(run.stage, sharding.make_mesh(run.stage.settings.mesh)).eval_model
    return model.body if isinstance(model, ModelWithHead) else cast(BidirectionalLM, model)


def text_states(run: Trained, model: Transformer | BidirectionalLM, ids: list[int]) -> np.ndarray:
    """float32 [layers+2,T,D] of one text: the tokens' embeddings alone, then each layer's states."""
    batch: Batch = run.batch([ids])
    side = "encoder" if run.config.has_encoder else "decoder"
    if run.config.has_encoder and run.config.has_decoder:
        starts = np.zeros((run.devices, 1), np.int32)
        batch = replace(batch, decoder=run.put(Side(tokens=starts)))
    states = np.asarray(model.hidden_states(batch)[side][:, 0, : len(ids)], np.float32)
    embedded = np.asarray(run.model.embed(batch.side(side).tokens)[0, : len(ids)], np.float32)
    wide = np.zeros((1, *states.shape[1:]), np.float32)  # embeddings may be narrower: zeros change no cosine
    wide[0, :, : embedded.shape[-1]] = embedded
    return np.concatenate([wide, states])


def word_span(vocabulary: Tokenizer, ids: list[int], word: str) -> slice:
    """The tokens of a text that are ``word``; SettingError if none are."""
    for size in range(1, min(LONGEST_PIECE_RUN, len(ids)) + 1):
        for start in range(len(ids) - size + 1):
            if vocabulary.decode(ids[start : start + size]).strip() == word.strip():
                return slice(start, start + size)
    raise SettingError(f"--word {word!r} is no run of tokens of {vocabulary.decode(ids)!r}")


def mixture_shares(stage: Stage) -> np.ndarray:
    """float32 [layers+1]: the weight of each layer in what the head of a stage reads."""
    model = trained(stage, sharding.make_mesh(stage.settings.mesh)).eval_model
    assert isinstance(model, ModelWithHead) and model.mixture is not None, (
        "a head that reads a mixture of layers"
    )
    return np.asarray(model.mixture.layer_weights)
