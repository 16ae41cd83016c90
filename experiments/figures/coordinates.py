"""The figure of the coordinate check: how much training steps change a model, by its width."""

import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import tyro
from matplotlib.figure import Figure

from experiments.figures.coordinate_check import at_width, coordinate_changes
from experiments.figures.draw import draw_plots
from experiments.figures.panels import Curve, Plot, PlotGrid, tick_labels
from experiments.figures.spec import FigureSpec
from experiments.study.registry import build
from lm.batch import Batch, Side
from lm.config.base import SettingError, check_above_0, check_at_least
from lm.config.model import ModelConfig
from lm.config.mup import MupConfig
from lm.config.training import OptimizerConfig

ROWS, LENGTH = 4, 32  # of the batch that is trained on [sequences, tokens]
PARAMETRISATIONS = {"standard": False, "muP": True}  # whether it is muP


@dataclass(frozen=True, kw_only=True)
class CoordinatesFigure(FigureSpec):
    """Draws how much steps of AdamW change hidden states and logits by width, with muP and without.

    The model is the row's at its scale, without dropout, and others that are wider. It is trained on random
    tokens, so that nothing has to be prepared.
    """

    row: tyro.conf.Positional[str]  # row of a table, with an encoder-decoder or a decoder
    scale: str = "nano"  # scale of the row, whose width is the base of muP
    factors: tuple[int, ...] = (1, 2, 4)  # widths, as multiples of the row's
    steps: int = 3  # training steps [steps]
    rate: float = 0.01  # learning rate of AdamW

    def description(self) -> str:
        """Return the numbers that are drawn, as JSON."""
        return json.dumps({"widths": self._widths, "steps": self.steps, "changes": self._changes})

    def figure(self) -> Figure:
        """Draw a panel per parametrisation and quantity, with a curve per step."""
        ticks = tick_labels(self._widths)
        panels = []
        for kind, by_name in self._changes.items():
            for name, steps in by_name.items():
                curves = {f"step {i}": Curve(self._widths, sizes) for i, sizes in enumerate(steps, 1)}
                panels.append(Plot(f"{kind}: {name}", "", "change since step 0", curves, "xy", x_ticks=ticks))
        highest = max(max(curve.y) for panel in panels for curve in panel.curves.values())
        lowest = min(min(curve.y) for panel in panels for curve in panel.curves.values())
        panels = [replace(panel, y_range=(lowest / 1.5, highest * 1.5)) for panel in panels]
        title, columns = f"{self.row} at {self.scale}", len(panels) // len(PARAMETRISATIONS)
        return draw_plots(PlotGrid(panels, title, "d_model", columns=columns, has_shared_legend=True))

    @property
    def _widths(self) -> list[int]:
        return [factor * self._config.d_model for factor in sorted(self.factors)]

    @cached_property
    def _config(self) -> ModelConfig:
        check_at_least(self, "--", steps=1)
        check_above_0(self, "--", "rate")
        if len(set(self.factors)) < 2 or min(self.factors) < 1:
            raise SettingError(f"--factors {self.factors} should be two or more, from 1 on, such as 1 2 4")
        experiment = build(self.row, self.scale)
        config = experiment.model
        if not config.has_decoder or experiment.counts.model != "none":
            raise SettingError(
                f"{self.row} has model.architecture={config.architecture!r} and counts.model="
                f"{experiment.counts.model!r}: steps train a network that predicts the next token: "
                "choose a row with a decoder, such as gpt/base"
            )
        return replace(config, dropout=0.0, mup=MupConfig())

    @cached_property
    def _changes(self) -> dict[str, dict[str, list[list[float]]]]:
        """Return {parametrisation: {quantity: [steps][widths]}}."""
        config = self._config
        models = {
            kind: [at_width(config, width, is_mup) for width in self._widths]
            for kind, is_mup in PARAMETRISATIONS.items()
        }
        optimizer = OptimizerConfig(name="adamw", schedule="constant", learning_rate=self.rate)
        batch = random_batch(config)
        found: dict[str, dict[str, list[list[float]]]] = {}
        for kind, configs in models.items():
            by_width = [coordinate_changes(each, optimizer, batch, self.steps) for each in configs]
            found[kind] = {}
            for name in by_width[0]:
                sizes = np.array([changes_of_width[name] for changes_of_width in by_width])  # [widths, steps]
                if not np.isfinite(sizes).all():
                    raise SettingError(
                        f"--rate {self.rate:g}: training diverges; choose a lower one, such as 0.01"
                    )
                found[kind][name] = sizes.T.tolist()
        return found


def random_batch(config: ModelConfig) -> Batch:
    """Return a batch of random tokens for a model with a decoder, whose targets are the next tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, config.vocab_size, (ROWS, LENGTH + 1), np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    prefix = np.zeros_like(ones) if config.architecture == "prefix-decoder" else None
    decoder = Side(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_weights=ones.astype(np.float32),
        segment_ids=ones,
        causal_attention=prefix,
    )
    if not config.has_encoder:
        return Batch(decoder=decoder)
    inputs = rng.integers(2, config.vocab_size, (ROWS, LENGTH), np.int32)
    return Batch(encoder=Side(tokens=inputs, segment_ids=ones), decoder=decoder)
