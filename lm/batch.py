"""A batch: what a model reads and what it should predict, as arrays whose first axis is the row.

A side of a batch is the arrays of the encoder, or those of the decoder: what that stack reads and predicts.
Arrays are numpy's on the host and jax's on devices; ``lm.sharding`` registers both classes as pytrees. An
array that a batch lacks is None. In multiple choice the arrays of a side are [B,C,T], with C candidates per
row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lm.config.base import SettingError, did_you_mean

Array = Any  # np.ndarray or jax.Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The tokens that the encoder or the decoder reads, and its targets; all arrays [B,T]."""

    tokens: Array  # int32: the stack's input
    segment_ids: Array = None  # int32, 0: padding; None: each row is one text
    positions: Array = None  # int32; None: counted from the start of each segment
    token_types: Array = None  # int32: 0 in the first text of a row, 1 in the second
    causal_attention: Array = None  # int32: 1 in the prefix, to which all tokens attend (prefix decoders)
    global_attention: Array = None  # 1: an encoder's positions that attend to all, whatever the window
    # int32: 1, 2, ... in the order in which an encoder predicts tokens, each from those before it (XLNet); 0:
    # not predicted, and read by all
    prediction_order: Array = None
    targets: Array = None  # int32: the token that is predicted at each position
    loss_weights: Array = None  # float32: the weight of each target in the loss
    # bool: content tokens, the targets that are no sentinel and no EOS, and not visible in the inputs at the
    # same position (``lm.data.content``)
    content: Array = None

    def map(self, function: Callable[[Array], Array]) -> "Side":
        """Return the side with ``function`` applied to each of its arrays."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return Side(**{name: function(array) for name, array in arrays.items() if array is not None})


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows for a model: the arrays of its encoder, of its decoder or of both, and labels of whole rows."""

    encoder: Side | None = None
    decoder: Side | None = None
    discriminator_loss_weights: Array = None  # float32 [B,S]: 1 for targets of ELECTRA's discriminator
    sentence_labels: Array = None  # int32 [B]: 1 if the second text is random (NSP) or both are swapped (SOP)
    sentence_loss_weights: Array = None  # float32 [B]
    labels: Array = None  # of a fine-tuning head: classes [B] or [B,T], numbers [B], spans [B,2]
    label_loss_weights: Array = None  # float32 [B] or [B,T]
    # float32 [B], of an encoder's rows whose loss estimates a bound: the tokens by whose number the sum of
    # weighted losses is divided; None: it is divided by the sum of the weights
    num_loss_tokens: Array = None
    frequent_tokens: Array = None  # int32 [B,10]: the most frequent content tokens of held-out text; -1 pads

    @property
    def sides(self) -> dict[str, Side]:
        """Return the batch's sides by name, "encoder" and "decoder"."""
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
        """Return the batch with ``function`` applied to each of its arrays."""
        return Batch.from_features({name: function(array) for name, array in self.features().items()})

    def map_sides(self, function: Callable[[Side], Side]) -> "Batch":
        """Return the batch with ``function`` applied to each of its sides."""
        return replace(self, **{name: function(side) for name, side in self.sides.items()})

    def loss_weights(self) -> dict[str, Array]:
        """Return the loss weights of all kinds of targets, by feature name."""
        return {name: array for name, array in self.features().items() if name in LOSS_WEIGHTS}

    def features(self) -> dict[str, Array]:
        """Return the batch's arrays by feature name, as files hold them: see ``FEATURES``."""
        arrays = {}
        for name, (side, field) in FEATURES.items():
            owner = getattr(self, side) if side else self
            if owner is not None and (array := getattr(owner, field)) is not None:
                arrays[name] = array
        return arrays

    @classmethod
    def from_features(cls, features: Mapping[str, Array]) -> "Batch":
        """Return the batch of arrays by feature name.

        SettingError for a name that is unknown, and for a side without its tokens.
        """
        by_side: dict[str, dict[str, Array]] = {"encoder": {}, "decoder": {}, "": {}}
        for name, array in features.items():
            if name not in FEATURES:
                raise SettingError(f"feature {name!r} of a batch is unknown{did_you_mean(name, FEATURES)}")
            side, field = FEATURES[name]
            if side and f"{side}_input_tokens" not in features:
                raise SettingError(f"{name} needs {side}_input_tokens too, which the batch lacks")
            by_side[side][field] = array
        sides = {name: Side(**by_side[name]) for name in ("encoder", "decoder") if by_side[name]}
        return cls(**sides, **by_side[""])


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return the rows of all batches in order; SettingError unless all have the same features."""
    features = [batch.features() for batch in batches]
    names = features[0].keys()
    if differing := {name for each in features for name in each.keys() ^ names}:
        raise SettingError(f"batches can be joined only if all have {sorted(differing)}, or none")
    return Batch.from_features({name: np.concatenate([each[name] for each in features]) for name in names})


# Field -> its part of the feature's name, where the two differ.
_FEATURE_NAMES = {
    "tokens": "input_tokens",  # as in seqio
    "targets": "target_tokens",
    "discriminator_loss_weights": "text_loss_weights",
    "frequent_tokens": "frequent_pieces",
}


def _features() -> dict[str, tuple[str, str]]:
    table = {}
    for field in fields(Batch):
        if field.name not in ("encoder", "decoder"):
            table[_FEATURE_NAMES.get(field.name, field.name)] = "", field.name
    for side in ("encoder", "decoder"):
        for field in fields(Side):
            table[f"{side}_{_FEATURE_NAMES.get(field.name, field.name)}"] = side, field.name
    return dict(sorted(table.items()))


# Name of a feature in files -> (side, or "" for the batch itself; field).
FEATURES = _features()
LOSS_WEIGHTS = frozenset(name for name in FEATURES if name.endswith("_loss_weights"))
