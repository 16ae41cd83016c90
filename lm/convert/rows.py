"""What the tables of the families' settings are made of: rows that are read in both directions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm.nn.config import ModelConfig
from lm.settings import SettingError, nearest

Json = dict[str, Any]
REQUIRED, OPTIONAL = object(), object()  # defaults of settings that must, or need not, be there


def same(value: Any, _: Any) -> Any:
    return value


class Row(NamedTuple):
    """One setting of theirs and the one of ours that it becomes."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    read: Callable[[Any, Json], Any] = same  # (their value, their settings) -> ours
    write: Callable[[Any, ModelConfig], Any] = same  # (our value, our settings) -> theirs


@dataclass(frozen=True)
class Settings:
    """One family's settings."""

    classes: Mapping[str, frozenset[str]]  # their class -> the parts that it has; the fullest first
    rows: tuple[Row, ...]
    # of ours, in every model of the family; a function of the others where it depends on them
    fixed: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict)  # of theirs: the one value that is implemented
    # their names of its base and fraction, and the usual fraction
    rotary: tuple[str, str, float] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)  # their other names of a setting: the usual ones
    # of theirs: without effect on what is computed, but for dropout in training
    idle: frozenset[str] = frozenset()
    # whether its files say that the output matrix is the embedding where it is not, too
    says_tied: bool = False


def rows(**names: str) -> tuple[Row, ...]:
    return tuple(Row(theirs, ours) for theirs, ours in names.items())


def choice(theirs: str, ours: str, table: Mapping[Any, Any], default: Any = REQUIRED) -> Row:
    """A setting that is one of ``table``, theirs -> ours; of several that become the same the first is
    written.
    """

    def read(value: Any, _: Json) -> Any:
        if value not in table:
            raise SettingError(
                f"config.json: {theirs}={value!r} is not supported{nearest(str(value), map(str, table))}"
            )
        return table[value]

    # What has no name becomes the first: read again, it is seen to differ.
    return Row(
        theirs,
        ours,
        default,
        read,
        lambda value, _: next((t for t, o in table.items() if o == value), [*table][0]),
    )


def special(pad: int, eos: int | None, start: Row | None = None) -> tuple[Row, ...]:
    return (
        Row("pad_token_id", "special.pad", pad, lambda value, _: value or 0),  # null where nothing was padded
        # The first of several: the others end turns of a conversation.
        Row(
            "eos_token_id",
            "special.eos",
            eos,
            lambda value, _: value[0] if isinstance(value, list) else value,
        ),
    ) + (() if start is None else (start,))


def of_encoder(theirs: str, ours: str, decoders: str) -> Row:
    """A size of the encoder's blocks, None where the decoder's are as large."""
    return Row(
        theirs,
        f"encoder.{ours}",
        REQUIRED,
        lambda value, settings: None if value == settings[decoders] else value,
        lambda value, config: value or getattr(config, ours),
    )


def four_times(ours: Json) -> int:
    return 4 * ours["d_model"]


def parts(*parts: str) -> frozenset[str]:
    return frozenset(parts)
