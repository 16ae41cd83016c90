"""Checks that objective, architecture and vocabulary fit together, before any work is done."""

from lm.config.base import SettingError, nearest
from lm.data.packing import ARCHITECTURES, ENCODER_DECODERS
from lm.objectives.corruption import NOISES
from lm.objectives.denoising import IN_PLACE, Objective
from lm.tokenizers.tokenizer import Vocabulary

ONE_FOR_ONE = ("masks", "masks-or-random", "masks-random-or-same")  # inputs that are as long as the text


def check_architecture(architecture: str, seed: int = 0, generates: bool = False) -> None:
    """Raise SettingError for an unknown architecture or a seed out of range.

    ``generates``: the model has to generate text, so that an encoder is an error too.
    """
    if architecture not in ARCHITECTURES:
        raise SettingError(
            f"model.architecture={architecture!r} is unknown{nearest(architecture, ARCHITECTURES)}"
        )
    if generates and architecture == "encoder":
        raise SettingError("model.architecture='encoder' writes no text; choose tuning.heads, not mixtures")
    if not 0 <= seed < 2**32:
        raise SettingError(f"seed={seed} should be between 0 and 2^32 - 1")


def _requirements() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Return (setting, value, other setting, allowed values of the other) of objectives."""
    independent = tuple(name for name, noise in NOISES.items() if not noise.has_bounded_targets)
    infilled = tuple(name for name, noise in NOISES.items() if noise.infill)
    return [
        *[("targets", name, "noise", independent) for name in IN_PLACE],
        *[("targets", name, "inputs", ONE_FOR_ONE) for name in IN_PLACE],
        *[("noise", name, "inputs", ("span-masks",)) for name in infilled],
        ("inputs", "span-masks", "noise", infilled),
        ("sentences", "permuted", "targets", ("everything",)),
        ("pairs", "next-sentence", "targets", IN_PLACE),
        ("pairs", "sentence-order", "targets", IN_PLACE),
    ]


def check_objective(objective: Objective, architecture: str, vocabulary: Vocabulary) -> None:
    """Raise SettingError if an objective contradicts itself, the architecture or the vocabulary."""
    for field, value, other, allowed in _requirements():
        chosen = getattr(objective, other)
        if getattr(objective, field) == value and chosen not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise SettingError(
                f"objective.{other}={chosen!r} should be {expected} with objective.{field}={value!r}"
            )
    if not objective.has_inputs and architecture in ENCODER_DECODERS:
        raise SettingError(
            "objective.noise='everything' with objective.inputs='drop' leaves model.architecture="
            f"{architecture!r} no inputs; choose a decoder, or objective.noise='suffix' (prefix-lm)"
        )
    if objective.eos == "between-documents" and objective.pairs == "none" and not objective.concatenates:
        raise SettingError(
            "objective.eos='between-documents' should be 'each-example' with "
            f"objective.noise={objective.noise!r}, which keeps documents apart"
        )
    if objective.is_mlm != (architecture == "encoder"):
        raise SettingError(
            f"objective.targets={objective.targets!r} does not suit model.architecture={architecture!r}: an "
            f"encoder, and only that, predicts tokens in their places ({' or '.join(map(repr, IN_PLACE))})"
        )
    if "sentinels" in (objective.inputs, objective.targets) and vocabulary.num_sentinels < 1:
        raise SettingError("the vocabulary has no sentinels for this objective: set data.sentinels to 100")
    has_masks = objective.inputs in (*ONE_FOR_ONE, "span-masks")
    check_symbols(vocabulary, ["mask"] if has_masks else [], architecture)


def check_symbols(vocabulary: Vocabulary, names: list[str], architecture: str) -> None:
    """Raise SettingError if the vocabulary lacks a special token.

    It needs ``names``, and CLS and SEP for an encoder, EOS for all other architectures.
    """
    names = [*names, "cls", "sep"] if architecture == "encoder" else [*names, "eos"]
    if lacking := [name for name in names if getattr(vocabulary, name) is None]:
        tokens, least = ", ".join(lacking), 5 if "extract" in lacking else 2
        raise SettingError(
            f"the vocabulary has no token for {tokens}; ours need data.sentinels of at least {least}"
        )
