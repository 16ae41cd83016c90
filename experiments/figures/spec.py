"""What every figure of ``lm draw`` has in common."""

import abc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class FigureSpec(abc.ABC):
    """A figure that ``lm draw`` can draw: the fields of a subclass are its options."""

    out: Path | None = None  # picture to write, .png, .svg or .pdf; by default the figure's name .png

    def description(self) -> str:
        """Return the numbers that are drawn, which are kept inside the file; nothing by default."""
        return ""

    @abc.abstractmethod
    def figure(self) -> "Figure":
        """Draw it; SettingError for options, or a run, that it cannot be drawn for."""
