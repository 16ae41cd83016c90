"""Figures that need no run: masks, scores, position encodings, and what attention costs here."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.figures.benchmark import device_name, measure_mixers, milliseconds
from experiments.figures.curves import DISTANCE, alibi_curves, bucket_curves, rotary_curves
from experiments.figures.draw import draw_heat_maps, draw_plots
from experiments.figures.masks import MASKS, masked_softmax_steps
from experiments.figures.panels import Curve, HeatMap, Plot, PlotGrid, Scale, tick_labels
from experiments.figures.spec import FigureSpec
from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import SettingError, changes, check_at_least, check_seed
from lm.config.layers import AttentionConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.ops.positions import sinusoids

VISIBLE = Scale("", 0, 1, categories=("hidden", "visible"))


@dataclass(frozen=True, kw_only=True)
class SinusoidsFigure(FigureSpec):
    """The sinusoids of each position (Vaswani et al. 2017), and the similarity of any two positions."""

    length: int = 64  # positions [tokens]
    width: int = 64  # size of the embedding, even [features]

    def figure(self) -> Figure:
        check_at_least(self, "--", length=1, width=2)
        if self.width % 2:
            raise SettingError(f"--width {self.width} should be even: a sine and a cosine of each wave")
        positions = jnp.arange(self.length)[None]
        waves = np.asarray(sinusoids(positions, self.width, layout="interleaved"))[0]
        cosines = waves @ waves.T / (self.width / 2)
        panels = [
            HeatMap("position × feature", waves, Scale("sine or cosine", -1, 1, "RdBu")),
            HeatMap("position × position", cosines, Scale("cosine of two positions", -1, 1, "PuOr")),
        ]
        return draw_heat_maps(panels, "feature (left), position (right)", "position [tokens]")


@dataclass(frozen=True, kw_only=True)
class MasksFigure(FigureSpec):
    """Every kind of mask, as attention applies it."""

    length: int = 16  # length of the sequences [tokens]

    def figure(self) -> Figure:
        check_at_least(self, "--", length=4)
        panels = [HeatMap(name, example.mask(self.length), VISIBLE) for name, example in MASKS.items()]
        return draw_heat_maps(panels, "key [position]", "query [position]")


@dataclass(frozen=True, kw_only=True)
class ScoresFigure(FigureSpec):
    """Scores of random queries and keys, the same under a causal mask, and their softmax."""

    length: int = 8  # length of the sequence [tokens]
    width: int = 16  # size of the head [features]
    seed: int = 0  # seed of the random numbers

    def figure(self) -> Figure:
        check_at_least(self, "--", length=1, width=1)
        check_seed(self.seed, "--seed")
        steps = masked_softmax_steps(self.length, self.width, self.seed)
        largest = float(np.abs(steps["scores"]).max())
        score = Scale("score [nats]", -largest, largest, "RdBu_r")
        weight = Scale("weight; a row's sum is 1", 0, 1)
        panels = [
            HeatMap("query · key / √width", steps["scores"], score, annotations=_numbers(steps["scores"])),
            HeatMap("causal mask (gray: −∞)", steps["masked"], score, annotations=_numbers(steps["masked"])),
            HeatMap("after softmax", steps["weights"], weight, annotations=_numbers(steps["weights"])),
        ]
        return draw_heat_maps(panels, "key [position]", "query [position]")


def _numbers(values: np.ndarray) -> np.ndarray:
    """Return each number as text with one decimal, str of the same shape."""
    texts = [f"{round(x, 1) + 0.0:.1f}".replace("-", "−") if np.isfinite(x) else "−∞" for x in values.ravel()]
    return np.array(texts).reshape(values.shape)


@dataclass(frozen=True, kw_only=True)
class DistancesFigure(FigureSpec):
    """Draws what position encodings make of the distance of two tokens, before anything is learned."""

    reach: int = 160  # longest distance [tokens]
    heads: int = 8  # heads with ALiBi [heads]
    width: int = 64  # size of a head with rotary positions [features]

    def figure(self) -> Figure:
        check_at_least(self, "--", reach=1, heads=1, width=2)
        if self.width % 2:
            raise SettingError(f"--width {self.width} should be even: features rotate in pairs")
        buckets = bucket_curves(self.reach, ModelConfig())
        alibi = alibi_curves(self.reach, self.heads)
        rotary = rotary_curves(self.reach, self.width, RotaryConfig())
        panels = [
            Plot("T5: index of the learned bias", DISTANCE, "bucket [number]", buckets),
            Plot("ALiBi", DISTANCE, "bias of the score [nats]", alibi),
            Plot("rotary", "distance [tokens]", "relative to distance 0", rotary),
        ]
        return draw_plots(PlotGrid(panels))


@dataclass(frozen=True, kw_only=True)
class LengthsFigure(FigureSpec):
    """Time and memory of one layer against sequence length: attention, windowed attention, and an LSTM."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)  # lengths of the sequences [tokens]
    window: int = 64  # how far the windowed layer attends [tokens]
    heads: int = 4  # attention heads [heads]
    width: int = 64  # size of one head; the layers are heads × width features wide [features]

    def figure(self) -> Figure:
        if not self.lengths or min(self.lengths) < 1:
            raise SettingError(f"--lengths {self.lengths} should be lengths of at least 1")
        check_at_least(self, "--", window=0, heads=1, width=1)
        lengths = sorted(set(self.lengths))
        config = ModelConfig(
            "decoder",
            positions=PositionsConfig(kind="none"),
            d_model=self.heads * self.width,
            attention=AttentionConfig(num_heads=self.heads, d_kv=self.width),
        )
        layers = {
            "attention": config,
            f"attention, window of {self.window}": replace(config, sparsity=SparsityConfig(self.window)),
            "LSTM": changes(config, {"mixer.kind": "lstm"}),
        }
        costs = dict(zip(layers, measure_mixers([*layers.values()], lengths), strict=True))
        time = {name: milliseconds(lengths, each) for name, each in costs.items()}
        memory = {
            name: Curve(lengths, [cost.temporary_bytes / 2**20 for cost in each])
            for name, each in costs.items()
        }
        x_label, ticks = "length of the sequence [tokens]", tick_labels(lengths)
        title = f"a layer of {config.d_model} features, forward\non {device_name()}"
        panels = [
            Plot(title, x_label, "time [ms]", time, "xy", x_ticks=ticks),
            Plot("temporary memory, by the compiler", x_label, "memory [MiB]", memory, "xy", x_ticks=ticks),
        ]
        return draw_plots(PlotGrid(panels))
