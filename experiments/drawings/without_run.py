"""Pictures of what needs no run: masks, scores, position encodings, and what attention costs here."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.drawings.curves import DISTANCE, alibi_curves, bucket_curves, rotary_curves
from experiments.drawings.masks import MASKS, score_stages
from experiments.drawings.measured import machine, milliseconds, mixer_costs
from experiments.drawings.panels import Heat, Picture, Plot, Scale, heatmaps, plots
from lm.config.attention import RotaryConfig, SparsityConfig
from lm.config.base import SettingError, at_least, changes
from lm.config.layers import AttentionConfig, PositionsConfig
from lm.config.model import ModelConfig
from lm.ops.positions import sinusoids

SEEN = Scale("", 0, 1, two=("hidden", "seen"))


@dataclass(frozen=True, kw_only=True)
class SinusoidPicture(Picture):
    """The sinusoids of each position (Vaswani et al. 2017), and the similarity of any two positions."""

    length: int = 64  # positions [tokens]
    width: int = 64  # of the embedding, even [features]

    def figure(self) -> Figure:
        at_least(self, "--", length=1, width=2)
        if self.width % 2:
            raise SettingError(f"--width {self.width} should be even: a sine and a cosine of each wave")
        positions = jnp.arange(self.length)[None]
        waves = np.asarray(sinusoids(positions, self.width, layout="interleaved"))[0]
        product = waves @ waves.T / (self.width / 2)
        size = Scale("sine or cosine", -1, 1, "RdBu")
        like = Scale("cosine of two positions", -1, 1, "PuOr")
        panels = [Heat("position × feature", waves, size), Heat("position × position", product, like)]
        return heatmaps(panels, "feature (left), position (right)", "position [tokens]")


@dataclass(frozen=True, kw_only=True)
class MaskPicture(Picture):
    """Every kind of mask, as attention uses it."""

    length: int = 16  # of the rows [tokens]

    def figure(self) -> Figure:
        at_least(self, "--", length=4)
        panels = [Heat(name, seen.mask(self.length), SEEN) for name, seen in MASKS.items()]
        return heatmaps(panels, "key [position]", "query [position]")


@dataclass(frozen=True, kw_only=True)
class ScorePicture(Picture):
    """Scores of random queries and keys, the same under a causal mask, and their softmax."""

    length: int = 8  # of the row [tokens]
    width: int = 16  # of the head [features]
    seed: int = 0  # of the random numbers

    def figure(self) -> Figure:
        at_least(self, "--", length=1, width=1)
        arrays = score_stages(self.length, self.width, self.seed)
        high = float(np.abs(arrays["scores"]).max())
        score = Scale("score [nats]", -high, high, "RdBu_r")
        scales = {"scores": score, "masked": score, "weights": Scale("weight; a row's sum is 1", 0, 1)}
        titles = {
            "scores": "query · key / √width",
            "masked": "causal mask (gray: −∞)",
            "weights": "after softmax",
        }
        panels = [
            Heat(titles[name], values, scales[name], words=_numbers(values))
            for name, values in arrays.items()
        ]
        return heatmaps(panels, "key [position]", "query [position]")


def _numbers(values: np.ndarray) -> np.ndarray:
    """str of each finite number, with one digit behind the point."""
    words = [f"{round(x, 1) + 0.0:.1f}".replace("-", "−") if np.isfinite(x) else "−∞" for x in values.ravel()]
    return np.array(words).reshape(values.shape)


@dataclass(frozen=True, kw_only=True)
class DistancePicture(Picture):
    """What position encodings make of the distance of two tokens, before anything is learnt."""

    reach: int = 160  # longest distance [tokens]
    heads: int = 8  # of ALiBi [heads]
    width: int = 64  # of a head that rotary positions turn [features]

    def figure(self) -> Figure:
        at_least(self, "--", reach=1, heads=1, width=2)
        if self.width % 2:
            raise SettingError(f"--width {self.width} should be even: features turn in pairs")
        buckets = bucket_curves(self.reach, ModelConfig())
        rotary = rotary_curves(self.reach, self.width, RotaryConfig())
        return plots(
            [
                Plot("T5: which learnt bias", DISTANCE, "bucket [number]", buckets),
                Plot("ALiBi", DISTANCE, "bias of the score [nats]", alibi_curves(self.reach, self.heads)),
                Plot("rotary", "distance [tokens]", "over its value at distance 0", rotary),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class LengthPicture(Picture):
    """Time and memory of one layer against the length of a row: attention, in a window, and an LSTM; here."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)  # of the rows [tokens]
    window: int = 64  # how far the windowed layer looks back [tokens]
    heads: int = 4  # attention heads [heads]
    width: int = 64  # of one head; the layers are heads × width features wide [features]

    def figure(self) -> Figure:
        if not self.lengths or min(self.lengths) < 1:
            raise SettingError(f"--lengths {self.lengths} should be lengths of at least 1")
        at_least(self, "--", window=0, heads=1, width=1)
        sizes = ModelConfig(
            "decoder",
            positions=PositionsConfig(kind="none"),
            d_model=self.heads * self.width,
            attention=AttentionConfig(num_heads=self.heads, d_kv=self.width),
        )
        layers = {
            "attention": sizes,
            f"attention, window of {self.window}": replace(sizes, sparsity=SparsityConfig(self.window)),
            "LSTM": changes(sizes, {"mixer.kind": "lstm"}),
        }
        costs = dict(zip(layers, mixer_costs([*layers.values()], self.lengths), strict=True))
        time = {name: (self.lengths, milliseconds(each)) for name, each in costs.items()}
        memory = {
            name: (self.lengths, np.array([cost.temporaries for cost in each]) / 2**20)
            for name, each in costs.items()
        }
        row = "length of the row [tokens]"
        title = f"a layer of {sizes.d_model} features, forward\non {machine()}"
        return plots(
            [
                Plot(title, row, "time [ms]", time, log="xy"),
                Plot("what the compiler sets aside", row, "temporaries [MiB]", memory, log="xy"),
            ]
        )
