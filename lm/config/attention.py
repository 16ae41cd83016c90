"""Settings of rotary positions and of sparse masks.

Sources: the papers named beside them and, where these are silent, the configurations of released weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from typing import Literal

import numpy as np

from lm.config.base import GIVEN, Condition, Conditions, SettingError, check_above_0, check_at_least, setting

# ``read_if`` of settings: which others they depend on
STRETCHED: Condition = {"scaling": ("linear", "llama3", "yarn")}
LLAMA3: Condition = {"scaling": ("llama3",)}
YARN: Condition = {"scaling": ("yarn",)}
WINDOWED: Conditions = ({"window": GIVEN}, {"layer_windows": GIVEN})


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions (RoPE), and how they are stretched to rows longer than in training."""

    base: float = 10_000.0  # base of the geometric series of wavelengths (theta) [tokens]
    # base in layers that have a window, if other than in those that have none (ModernBERT) [tokens]
    window_base: float | None = None
    # how wavelengths are stretched in layers that have a window: as in the others, or not (Gemma 3)
    window_scaling: Literal["same", "none"] = setting("same", STRETCHED)
    fraction: float = 1.0  # share of a head's features that are rotated, from the first on
    # which of the R features rotate together: i and i + R/2 (GPT-NeoX, Llama), or neighbours (Su et al.,
    # GPT-J)
    layout: Literal["halves", "pairs"] = "halves"
    # how wavelengths are stretched for longer rows
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = setting(1.0, STRETCHED)  # how many times longer than original_length rows become
    # row length of the original training [tokens]
    original_length: int = setting(2_048, {"scaling": ("llama3", "yarn")})
    # llama3: wavelengths above original_length divided by this are stretched
    low_frequency_factor: float = setting(1.0, LLAMA3)
    # llama3: wavelengths below original_length divided by this are kept
    high_frequency_factor: float = setting(4.0, LLAMA3)
    # yarn: features that rotate more often than this in original_length are kept [turns]
    beta_fast: float = setting(32.0, YARN)
    # yarn: features that rotate less often than this in original_length are stretched fully [turns]
    beta_slow: float = setting(1.0, YARN)

    def __post_init__(self):
        check_above_0(
            self, "model.positions.rotary.", "base window_base factor low_frequency_factor beta_slow"
        )
        check_at_least(self, "model.positions.rotary.", original_length=1)
        for name in ("base", "window_base"):
            base = getattr(self, name)
            if self.scaling == "yarn" and base is not None and base <= 1:
                raise SettingError(
                    f"model.positions.rotary.{name}={base} should be above 1 for model.positions.rotary."
                    "scaling='yarn', which goes by the wavelengths: set it to 10_000, or scaling to 'none'"
                )
        if self.window_scaling == "none" and self.scaling == "yarn":
            raise SettingError(
                "model.positions.rotary.window_scaling='none' leaves layers unstretched, whose attention "
                "yarn would sharpen all the same: model.positions.rotary.scaling='yarn' should be 'linear' "
                "or 'llama3'"
            )
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            if not least < most:
                limit = f"model.positions.rotary.{high}={most}"
                raise SettingError(f"model.positions.rotary.{low}={least} should be below {limit}")

    def for_window_layers(self) -> "RotaryConfig":
        """Return the settings of layers that have a window: their base, and stretched or not."""
        base = self.base if self.window_base is None else self.window_base
        scaling = self.scaling if self.window_scaling == "same" else "none"
        return replace(self, base=base, scaling=scaling)

    def frequencies(self, width: int) -> tuple[np.ndarray, float]:
        """Return the rotary frequencies of heads ``width`` wide, and a factor of cosines and sines.

        The frequencies are float32 [R/2], in radians a position. A scaling decides which share of each
        frequency stays; the rest is divided by ``factor``, so that the angles of ``factor`` times longer rows
        are those of the rows trained on. It goes by the turns in ``original_length``.
        """
        width = int(self.fraction * width)
        frequencies = self.base ** -(np.arange(0, width, 2) / width)
        kept = np.clip(self._kept_share(frequencies), 0, 1)
        frequencies *= 1 / self.factor + kept * (1 - 1 / self.factor)
        # Longer rows spread attention thinner; yarn sharpens it again.
        sharpening = 0.1 * log(max(self.factor, 1)) + 1 if self.scaling == "yarn" else 1.0
        return frequencies.astype(np.float32), sharpening

    def _kept_share(self, frequencies: np.ndarray) -> np.ndarray:
        """Return which share of each frequency is not divided by ``factor``, [R/2].

        Shares below 0 mean none, shares above 1 all. ``frequencies`` [R/2] are those without scaling, in
        radians per position.
        """
        turns = self.original_length * frequencies / (2 * pi)
        if self.scaling == "linear":
            return np.zeros_like(turns)
        if self.scaling == "llama3":  # linear in the turns, between those stretched wholly and not at all
            low, high = self.low_frequency_factor, self.high_frequency_factor
            return (turns - low) / (high - low)
        if self.scaling == "yarn":  # Peng et al. 2023: linear in the number of the feature
            width = 2 * len(turns)
            first = floor(self._feature_with_turns(self.beta_fast, turns[0], width))
            last = ceil(self._feature_with_turns(self.beta_slow, turns[0], width))
            first, last = max(first, 0), min(last, width - 1)
            # Below 0, as in the released program, if no feature makes beta_slow turns, so that all are kept,
            # or if all make more than beta_fast, so that all are stretched.
            span = last - first or 1e-3
            return 1 - (np.arange(width // 2) - first) / span
        return np.ones_like(turns)

    def _feature_with_turns(self, count: float, first_turns: float, width: int) -> float:
        """Return the index, a fraction between two features, at which ``count`` turns are made.

        Of ``width`` rotated features the first makes ``first_turns``.
        """
        return width * log(first_turns / count) / (2 * log(self.base))


@dataclass(frozen=True)
class SparsityConfig:
    """Sparse self-attention; distances are counted in blocks of ``block`` positions."""

    window: int | None = None  # number of blocks that a block attends to on each side; None: all [blocks]
    dilation: int = setting(1, WINDOWED)  # dilation of the window; 2 skips every other block [blocks]
    # number of blocks at the start of a row that attend to, and are attended by, all [blocks]
    global_tokens: int = setting(0, {"window": GIVEN})
    block: int = setting(1, WINDOWED)  # size of a block: 1 in Longformer, 64 in BigBird [tokens]
    # number of random blocks before its window that each block also attends to, and in encoders these to it,
    # as in BigBird [blocks]
    random_blocks: int = setting(0, {"window": GIVEN})
    # whether global positions share the projections of the others or have their own (Longformer)
    projections: Literal["shared", "separate"] = "shared"
    # window of each layer, the widest being window; None: that layer attends to all positions; empty: window
    # for all layers [blocks]
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self):
        check_at_least(
            self, "model.sparsity.", window=0, dilation=1, global_tokens=0, block=1, random_blocks=0
        )
        windows = self.layer_windows
        if windows and (widest_window(windows) != self.window or not windows_are_valid(windows)):
            raise SettingError(
                f"model.sparsity.layer_windows={self.layer_windows} should be from 0 to "
                f"model.sparsity.window={self.window}, the widest (None: without end)"
            )
        for name in ("global_tokens", "random_blocks"):
            if self.window is None and getattr(self, name):
                raise SettingError(f"model.sparsity.{name}={getattr(self, name)} needs model.sparsity.window")


def widest_window(windows: Sequence[int | None]) -> int | None:
    """Return the widest of the windows of layers; None if a layer has none, and so attends to everything."""
    return None if None in windows else max(window for window in windows if window is not None)


def windows_are_valid(windows: Sequence[int | None]) -> bool:
    """Return whether each window is 0 or more, or None."""
    return all(window is None or window >= 0 for window in windows)
