"""A batch: what a model reads and what it should predict, as arrays whose first axis is the row.

Arrays are numpy's on the host and jax's on devices; ``lm.sharding`` registers both classes as pytrees. What
a batch lacks is None. In multiple choice the arrays of a side are [B,C,T], with C candidates per row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lm.config.base import SettingError, nearest

Array = Any  # np.ndarray or jax.Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """What one stack reads, the encoder or the decoder, and what is predicted from it; each [B,T]."""

    tokens: Array  # int32: what is read
    segment_ids: Array = None  # int32, 0: padding; None: each row is one text
    positions: Array = None  # int32; None: counted from the start of each segment
    token_types: Array = None  # int32: 0 in the first text of a row, 1 in the second
    causal_attention: Array = None  # int32, 1: a prefix, which all attend to (prefix decoders)
    global_attention: Array = None  # 1: an encoder's positions that attend to all, whatever the window
    targets: Array = None  # int32: the token that is predicted at each position
    loss_weights: Array = None  # float32: the weight of each target in the loss
    content: Array = None  # bool: targets that are text, no sentinel, EOS or copy (``lm.data.content``)

    def map(self, function: Callable[[Array], Array]) -> "Side":
        """Return the side with ``function`` applied to each array that there is."""
        return Side(**{name: function(array) for name, array in _present(self).items()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows for a model: an encoder side, a decoder side or both, and labels of whole rows."""

    encoder: Side | None = None
    decoder: Side | None = None
    text_loss_weights: Array = None  # float32 [B,S]: 1 for tokens that ELECTRA's discriminator judges
    sentence_labels: Array = None  # int32 [B]: 1 if the second text is random (NSP) or both are swapped (SOP)
    sentence_loss_weights: Array = None  # float32 [B]
    labels: Array = None  # of a fine-tuning head: classes [B] or [B,T], numbers [B], spans [B,2]
    label_loss_weights: Array = None  # float32 [B] or [B,T]
    frequent_pieces: Array = None  # int32 [B,10]: the most frequent content tokens of held-out text; -1 pads

    @property
    def sides(self) -> dict[str, Side]:
        """Return the sides that there are, by name."""
        sides = {"encoder": self.encoder, "decoder": self.decoder}
        return {name: side for name, side in sides.items() if side is not None}

    def side(self, name: str) -> Side:
        """Return the side "encoder" or "decoder"; SettingError if there is none."""
        if name not in self.sides:
            raise SettingError(
                f"the batch has no {name} side, which the model reads: Batch({name}=Side(...))"
            )
        return self.sides[name]

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        """Return the batch with ``function`` applied to each array that there is."""
        return Batch.from_features({name: function(array) for name, array in self.features().items()})

    def map_sides(self, function: Callable[[Side], Side]) -> "Batch":
        """Return the batch with ``function`` applied to each side that there is."""
        return replace(self, **{name: function(side) for name, side in self.sides.items()})

    def loss_weights(self) -> dict[str, Array]:
        """Return the weights of every term of a loss, by feature name."""
        return {name: array for name, array in self.features().items() if name in LOSS_WEIGHTS}

    def features(self) -> dict[str, Array]:
        """Return the arrays that there are by feature name, as files hold them: see ``FEATURES``."""
        arrays = {}
        for name, (side, field) in FEATURES.items():
            owner = getattr(self, side) if side else self
            if owner is not None and (array := getattr(owner, field)) is not None:
                arrays[name] = array
        return arrays

    @classmethod
    def from_features(cls, features: Mapping[str, Array]) -> "Batch":
        """Return the batch of arrays by feature name; SettingError for a name that is unknown."""
        parts: dict[str, dict[str, Array]] = {"encoder": {}, "decoder": {}, "": {}}
        for name, array in features.items():
            if name not in FEATURES:
                raise SettingError(f"feature {name!r} of a batch is unknown{nearest(name, FEATURES)}")
            side, field = FEATURES[name]
            parts[side][field] = array
        sides = {name: Side(**parts[name]) for name in ("encoder", "decoder") if parts[name]}
        return cls(**sides, **parts[""])


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches, which have the same features, in order."""
    parts = [batch.features() for batch in batches]
    return Batch.from_features({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _present(part: Batch | Side) -> dict[str, Any]:
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in values.items() if value is not None}


def _features() -> dict[str, tuple[str, str]]:
    renamed = {"tokens": "input_tokens", "targets": "target_tokens"}  # seqio's names
    table = {
        field.name: ("", field.name) for field in fields(Batch) if field.name not in ("encoder", "decoder")
    }
    for side in ("encoder", "decoder"):
        for field in fields(Side):
            table[f"{side}_{renamed.get(field.name, field.name)}"] = side, field.name
    return dict(sorted(table.items()))


# Name of a feature in files and in seqio -> (side, or "" for the batch itself; field).
FEATURES = _features()
LOSS_WEIGHTS = frozenset(name for name in FEATURES if name.endswith("_loss_weights"))
