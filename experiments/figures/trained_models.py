"""Figures of what a trained model does, most of them with a text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import ClassVar, cast

import jax
import numpy as np
import tyro
from flax import nnx
from matplotlib.figure import Figure

from experiments.figures.benchmark import SMALL_DECODER, device_name, measure_decoding, milliseconds
from experiments.figures.curves import bias_plots, draw_gradients, gradient_curves, initial_gradients
from experiments.figures.draw import draw_heat_maps, draw_plots
from experiments.figures.model_inspection import (
    ModelOnText,
    draw_alignment,
    draw_gates,
    draw_heads,
    draw_lens,
    draw_next_tokens,
    draw_next_tokens_of_ngrams,
    layer_names,
)
from experiments.figures.panels import Curve, HeatMap, Plot, PlotGrid, Scale, tick_labels
from experiments.figures.spec import FigureSpec
from experiments.runs.kinds.network import NetworkStage
from experiments.runs.kinds.stage import Stage
from experiments.runs.stages import stages_of
from experiments.runs.trained import Trained, language_models, networks, open_ngrams, open_run
from lm import sharding
from lm.batch import Side
from lm.config.base import SettingError, check_at_least
from lm.evaluate.distance import layer_distances
from lm.evaluate.generate import greedy
from lm.evaluate.lens import mean_similarity, word_similarity
from lm.evaluate.rnn_states import recurrent_layers, state_gradients
from lm.files import check_characters
from lm.nn.elmo import BidirectionalLM
from lm.nn.finetune import ModelWithHead
from lm.nn.transformer import Transformer
from lm.tokenizers.tokenizer import Tokenizer

MAX_ANSWER = 16  # longest answer that an encoder-decoder writes [tokens]
MAX_WORD = 12  # longest word that is searched for in a text [tokens]


def open_and_print(run: Path, mixture: str = "", *, needs_output: bool = False) -> Trained:
    """Open a model of a run, and print which one it is; ``needs_output``: by default one without a head."""
    stages: Sequence[Stage] = stages_of(run)
    trained = open_run(run, language_models(stages, mixture) if needs_output else stages, mixture)
    print(trained.description)
    return trained


@dataclass(frozen=True, kw_only=True)
class RunFigure(FigureSpec):
    """A figure of a run's model."""

    run: tyro.conf.Positional[Path]  # folder of a run
    # which fine-tuned model, or the pre-trained one; by default the first fine-tuned one that will do
    mixture: str = ""
    needs_output: ClassVar[bool] = False  # whether it shows probabilities of tokens

    def opened(self) -> Trained:
        """Open the model."""
        return open_and_print(self.run, self.mixture, needs_output=self.needs_output)


@dataclass(frozen=True, kw_only=True)
class TextFigure(RunFigure):
    """A figure of what a run's model does with a text."""

    text: str  # what the model reads; an encoder-decoder writes its answer

    def read(self) -> ModelOnText:
        """Open the model and let it read the text; SettingError if the text is empty."""
        return read_text(self.opened(), self.text)


@dataclass(frozen=True, kw_only=True)
class HeadsFigure(TextFigure):
    """Where heads attend in a text: the four that attend sharpest to other tokens, or all."""

    # a number, not names: so many heads are drawn, those that attend sharpest; 0: all, a line per layer
    heads: int = 4

    def figure(self) -> Figure:
        check_at_least(self, "--", heads=0)
        return draw_heads(self.read(), self.heads)


class AlignmentFigure(TextFigure):
    """Where a decoder attends in the text while it writes: cross-attention per layer, averaged over heads."""

    def figure(self) -> Figure:
        return draw_alignment(self.read())


class LensFigure(TextFigure):
    """The likeliest token after each layer, if the last norm and output matrix read it (the logit lens)."""

    needs_output: ClassVar[bool] = True

    def figure(self) -> Figure:
        return draw_lens(self.read())


@dataclass(frozen=True, kw_only=True)
class NextTokenFigure(TextFigure):
    """The likeliest next tokens after each token; of an encoder, the likeliest tokens in its place.

    Of n-grams, the first column has the likeliest tokens that begin a document.
    """

    k: int = 5  # tokens whose probability is shown
    needs_output: ClassVar[bool] = True

    def figure(self) -> Figure:
        check_at_least(self, "--", k=1)
        if (ngrams := open_ngrams(self.run, self.mixture)) is None:
            return draw_next_tokens(self.read(), self.k)
        print(ngrams.description)
        check_text(self.text)
        return draw_next_tokens_of_ngrams(ngrams, self.text, self.k)


class GatesFigure(TextFigure):
    """Draws what the gates of an LSTM or a GRU let through at each token (an encoder's forward half)."""

    def figure(self) -> Figure:
        return draw_gates(self.read())


@dataclass(frozen=True, kw_only=True)
class SimilarityFigure(FigureSpec):
    """Draws how similar the states of one word in two sentences are, from its embedding to the last layer."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, one panel each
    text: str  # the first sentence
    other: str  # the second sentence
    word: str  # a word of both sentences, spelled alike
    # stage of every run, such as pretraining; by default its fine-tuned model, if there is one
    mixture: str = ""

    def figure(self) -> Figure:
        if not self.runs:
            raise SettingError("lm draw similarity RUN [RUN ...]: name a run at least")
        if not self.word.strip():
            raise SettingError("--word is empty: give a word that both sentences have")
        check_characters([self.text, self.other], "--text and --other")
        panels = []
        for folder in self.runs:
            run = open_and_print(folder, self.mixture)
            curves = similarity_curves(run, (self.text, self.other), self.word)
            num_layers = len(next(iter(curves.values())).x)
            ticks: dict[float, str] = dict(enumerate(["embedding", *layer_names(num_layers - 1)]))
            name = folder.parent.name if folder.name.startswith("seed-") else folder.name
            title = f"{name}: {run.config.architecture}, {run.config.mixer.kind}"
            panels.append(
                Plot(title, "layer", "cosine of two states", curves, y_range=(-0.05, 1.05), x_ticks=ticks)
            )
        return draw_plots(PlotGrid(panels, has_shared_legend=True))


@dataclass(frozen=True, kw_only=True)
class MixtureFigure(FigureSpec):
    """Draws which layers the heads of a run with `tuning.layers mixed-frozen` read, one line per task."""

    run: tyro.conf.Positional[Path]  # folder of a run

    def figure(self) -> Figure:
        stages = [
            stage
            for stage in networks(stages_of(self.run))
            if stage.has_head and stage.settings.tuning.layers == "mixed-frozen"
        ]
        if not stages:
            raise SettingError(
                f"{self.run} mixes no layers: train a row with --tuning.layers mixed-frozen, "
                "such as bert/mixed-layers"
            )
        weights = np.stack([layer_weights(stage) for stage in stages])
        annotations = np.array([[f"{weight:.3f}" for weight in task] for task in weights])
        scale = Scale("weight; a task's sum is 1", 0, 1)
        tasks, layers = [stage.name for stage in stages], layer_names(weights.shape[1])
        return draw_heat_maps(
            [HeatMap("", weights, scale, tasks, layers, annotations)], "after layer", "task"
        )


@dataclass(frozen=True, kw_only=True)
class TuningFigure(FigureSpec):
    """Draws how far fine-tuning moved the parameters of each layer, one line per task."""

    run: tyro.conf.Positional[Path]  # folder of a run

    def figure(self) -> Figure:
        curves: dict[str, Curve] = {}
        num_layers = 0
        for stage in networks(stages_of(self.run)):
            if stage.is_pretraining or not isinstance(stage.parent, NetworkStage):
                continue
            mesh = sharding.make_mesh(stage.settings.mesh)
            before = stage.parent.restore_transformer(mesh, step=stage.parent_step)
            found = layer_distances(before, stage.restore_transformer(mesh))
            for stack, distances in found.items():
                label = f"{stage.name}, {stack}" if len(found) > 1 else stage.name
                curves[label] = Curve(np.arange(len(distances)), distances)
                num_layers = max(num_layers, len(distances) - 1)
        if not curves:
            raise SettingError(
                f"{self.run} has no model that was fine-tuned from its own pre-training: leave "
                "--finetuning.steps at more than 0, with tuning.mixtures or tuning.heads"
            )
        ticks: dict[float, str] = dict(enumerate(["embedding", *layer_names(num_layers + 1)[1:]]))
        moved = "distance from the pre-trained parameters,\nrelative to their norm"
        return draw_plots(PlotGrid([Plot("", "layer", moved, curves, x_ticks=ticks)], has_shared_legend=True))


class BiasFigure(RunFigure):
    """Draws what each head has learned to add to scores by distance, T5's bias."""

    def figure(self) -> Figure:
        return draw_plots(PlotGrid(bias_plots(self.opened().model)))


@dataclass(frozen=True, kw_only=True)
class GradientFigure(FigureSpec):
    """Draws how much a state of an RNN and of an LSTM depends on earlier ones, by their distance.

    Without a run: of layers at initialization, over random inputs. With a run: of its layers, over a text.
    """

    run: tyro.conf.Positional[Path | None] = None  # folder of a run
    text: str = ""  # what the run's model reads
    width: int = 64  # size of the state, without a run [features]
    length: int = 64  # length of the sequence, without a run [tokens]
    gain: float = 2.0  # factor of the second RNN's recurrent weights, without a run

    def figure(self) -> Figure:
        check_at_least(self, "--", width=1, length=3)
        if not isfinite(self.gain):
            raise SettingError(f"--gain {self.gain:g} should be a finite factor, such as 2")
        self._check_that_options_are_read()
        if self.run is None:
            title = f"layers of {self.width} features at initialization"
            return draw_gradients(title, initial_gradients(self.width, self.length, self.gain))
        inspected = read_text(open_and_print(self.run), self.text)
        num_tokens = len(next(iter(inspected.ids.values())))
        if num_tokens < 3:
            raise SettingError(f"--text has {num_tokens} tokens: a curve over distances needs at least 3")
        curves: dict[str, Curve] = {}
        for layer, (direction, x) in enumerate(recurrent_layers(inspected.model, inspected.batch), 1):
            name = f"layer {layer}, {direction.config.mixer.kind}"
            curves |= gradient_curves(name, state_gradients(direction, x[0, :num_tokens]))
        return draw_gradients(f"{num_tokens} tokens, forward direction", curves)

    def _check_that_options_are_read(self) -> None:
        """Raise SettingError for a text without a run, and for an option of random layers with a run."""
        if self.run is None and self.text:
            raise SettingError("--text is read by the model of a run: name a run, or leave --text out")
        given = [
            f"--{name}"
            for name in ("width", "length", "gain")
            if getattr(self, name) != getattr(GradientFigure, name)
        ]
        if self.run is not None and given:
            raise SettingError(
                f"{' and '.join(given)} describe layers at initialization, and {self.run} is a run: leave "
                "the options out, or the run"
            )


@dataclass(frozen=True, kw_only=True)
class DecodingFigure(FigureSpec):
    """Time per token against the length of the sequence, with a cache and without, on this machine."""

    run: tyro.conf.Positional[Path | None] = None  # folder of a run; by default a small decoder is timed
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)  # lengths of the sequences [tokens]

    def figure(self) -> Figure:
        if not self.lengths or min(self.lengths) < 2:
            raise SettingError(f"--lengths {self.lengths} should be lengths of at least 2")
        if self.run is None:
            model = Transformer(SMALL_DECODER, nnx.Rngs(params=jax.random.key(0)))
        else:
            model = open_and_print(self.run).model
        lengths = sorted(set(self.lengths))
        costs = measure_decoding(model, lengths)
        curves = {name: milliseconds(lengths, each) for name, each in costs.items()}
        layers = f"{model.config.num_decoder_layers} layers of {model.config.d_model} features, batch size 1"
        panel = Plot(
            f"{layers}\non {device_name()}",
            "length of the sequence [tokens]",
            "time per token [ms]",
            curves,
            log="xy",
            x_ticks=tick_labels(lengths),
        )
        return draw_plots(PlotGrid([panel]))


def check_text(text: str) -> None:
    """Raise SettingError for a text without words, and for one with halves of characters."""
    if not text.strip():
        raise SettingError("--text is empty: give a sentence to look at")
    check_characters(text, "--text")


def read_text(run: Trained, text: str) -> ModelOnText:
    """Let a run's model read a text; an encoder-decoder writes an answer. SettingError for an empty text."""
    check_text(text)
    ids, config = run.encode(text), run.config
    batch, tokens = run.batch([ids]), {"encoder" if config.has_encoder else "decoder": ids}
    if config.has_encoder and config.has_decoder:
        answer = np.asarray(greedy(run.model, batch, max_length=MAX_ANSWER))[0].tolist()
        end = answer.index(config.special.eos) if config.special.eos in answer else len(answer)
        start = [] if config.special.start is None else [config.special.start]
        tokens["decoder"] = start + answer[:end]
        decoder_tokens = np.tile(np.array(tokens["decoder"], np.int32), (run.devices, 1))
        batch = replace(batch, decoder=run.shard_batch(Side(tokens=decoder_tokens)))
    denoisers = run.stage.settings.objective.denoisers
    masks = any("mask" in denoiser.objective.inputs for denoiser in denoisers)
    uses_mask_token = masks and not config.published
    return ModelOnText(run.model, run.vocabulary, batch, tokens, uses_mask_token)


def similarity_curves(run: Trained, texts: tuple[str, str], word: str) -> dict[str, Curve]:
    """Return cosines by layer, embedding first: of a word's states in two texts, and of other tokens."""
    first_ids, second_ids = (run.encode(text) for text in texts)
    spans = word_span(run.vocabulary, first_ids, word), word_span(run.vocabulary, second_ids, word)
    model = contextual_model(run)
    first, second = text_states(run, model, first_ids), text_states(run, model, second_ids)
    of_word = word_similarity(first, second, spans)
    of_others = mean_similarity(first, second, (first_ids, second_ids))
    layers = np.arange(len(of_word))
    return {
        f"“{word}” in both texts": Curve(layers, of_word),
        "mean of other pairs of tokens": Curve(layers, of_others),
    }


def contextual_model(run: Trained) -> Transformer | BidirectionalLM:
    """Return the model of a run; for ELMo, both of its language models together."""
    if run.stage.writes_answers or "backward" not in run.config.heads:
        return run.model
    model = run.stage.restore_state(sharding.make_mesh(run.stage.settings.mesh)).eval_model
    return model.body if isinstance(model, ModelWithHead) else cast(BidirectionalLM, model)


def text_states(run: Trained, model: Transformer | BidirectionalLM, ids: list[int]) -> np.ndarray:
    """Return a text's token embeddings, then the states of each layer, float32 [layers+2,T,D]."""
    batch = run.batch([ids])
    side = "encoder" if run.config.has_encoder else "decoder"
    if run.config.has_encoder and run.config.has_decoder:
        start = np.zeros((run.devices, 1), np.int32)
        batch = replace(batch, decoder=run.shard_batch(Side(tokens=start)))
    states = np.asarray(model.hidden_states(batch)[side][:, 0, : len(ids)], np.float32)
    embedded = np.asarray(run.model.embedding(side)(batch.side(side).tokens)[0, : len(ids)], np.float32)
    # Embeddings may be narrower than states; zeros change no cosine.
    padded = np.zeros((1, *states.shape[1:]), np.float32)
    padded[0, :, : embedded.shape[-1]] = embedded
    return np.concatenate([padded, states])


def word_span(vocabulary: Tokenizer, ids: list[int], word: str) -> slice:
    """Return the tokens of a text that spell ``word``; SettingError if none do."""
    for size in range(1, min(MAX_WORD, len(ids)) + 1):
        for start in range(len(ids) - size + 1):
            if vocabulary.decode(ids[start : start + size]).strip() == word.strip():
                return slice(start, start + size)
    raise SettingError(f"--word {word!r} is not spelt by whole tokens of {vocabulary.decode(ids)!r}")


def layer_weights(stage: NetworkStage) -> np.ndarray:
    """Return the weight of each layer in what the head of a stage reads, float32 [layers+1]."""
    model = stage.restore_state(sharding.make_mesh(stage.settings.mesh)).eval_model
    assert isinstance(model, ModelWithHead) and model.mixture is not None, "a head that reads mixed layers"
    return np.asarray(model.mixture.layer_weights)
