"""Checks that the settings of data go together, before any work is done; errors name the setting."""

from collections.abc import Sequence
from typing import get_args

from lm.config.base import SettingError, did_you_mean
from lm.data.packing import ARCHITECTURES, DECODERS, ENCODER_DECODERS
from lm.objectives.corruption import BOUNDS_LIKELIHOOD, HIDES_NOTHING, NOISES
from lm.objectives.denoising import IN_PLACE, Denoiser, Objective, PairsName
from lm.objectives.formatting import INPUTS
from lm.tokenizers.tokenizer import Tokenizer

TOKEN_FOR_TOKEN = ("masks", "masks-or-random", "masks-random-or-same")
AROUND_MIDDLE = ("prefix-suffix-middle", "suffix-prefix-middle")  # inputs of fill-in-the-middle


def check_architecture(architecture: str, seed: int = 0, generates: bool = False) -> None:
    """Raise SettingError for an unknown architecture or a seed out of range.

    ``generates``: the model has to generate text, so that an encoder is an error too.
    """
    if architecture not in ARCHITECTURES:
        raise SettingError(
            f"model.architecture={architecture!r} is unknown{did_you_mean(architecture, ARCHITECTURES)}"
        )
    if generates and architecture == "encoder":
        raise SettingError("model.architecture='encoder' writes no text; choose tuning.heads, not mixtures")
    if not 0 <= seed < 2**32:
        raise SettingError(f"seed={seed} should be between 0 and 2^32 - 1")


def _compatible_values() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Return rows (setting, value, other setting, values of that one that go with it) of an objective."""
    anywhere = tuple(
        name for name, noise in NOISES.items() if noise.hides_tokens and not noise.fits_without_trimming
    )
    infilled = tuple(name for name, noise in NOISES.items() if noise.infill)
    return [
        *[("targets", name, "noise", anywhere) for name in IN_PLACE],
        *[("targets", name, "inputs", TOKEN_FOR_TOKEN) for name in IN_PLACE if name != "permuted"],
        ("targets", "permuted", "inputs", ("visible",)),
        ("targets", "permuted", "pairs", ("none",)),
        ("inputs", "visible", "targets", ("permuted",)),
        *[("noise", name, "inputs", ("span-masks",)) for name in infilled],
        *[("noise", name, "inputs", ("masks",)) for name in BOUNDS_LIKELIHOOD],
        *[("noise", name, "targets", ("in-place",)) for name in BOUNDS_LIKELIHOOD],
        *[("noise", name, "pairs", ("none",)) for name in BOUNDS_LIKELIHOOD],
        ("inputs", "span-masks", "noise", (*infilled, *HIDES_NOTHING)),
        ("sentences", "permuted", "targets", ("everything",)),
        ("sentences", "rotated", "targets", ("everything",)),
        *[("noise", name, "targets", ("everything",)) for name in HIDES_NOTHING],
        ("noise", "middle", "targets", ("drop", "everything")),
        *[("inputs", name, "noise", ("middle", "single-span")) for name in AROUND_MIDDLE],
        *[("inputs", name, "targets", ("drop",)) for name in AROUND_MIDDLE],
        ("targets", "shuffled-sentinels", "noise", ("spans", "single-span", "suffix-share")),
        ("targets", "shuffled-sentinels", "inputs", ("sentinels",)),
        *[("pairs", name, "targets", IN_PLACE) for name in get_args(PairsName) if name != "none"],
    ]


def check_objective(objective: Objective, architecture: str) -> None:
    """Raise SettingError if an objective, or one of its mixture, contradicts itself or the architecture."""
    if objective.mixture:
        check_mixture(objective.denoisers)
    for denoiser in objective.denoisers:
        _check_single_objective(denoiser.objective, architecture)


def check_has_tokens(objective: Objective, architecture: str, tokenizer: Tokenizer) -> None:
    """Raise SettingError if the tokenizer lacks special tokens that an objective puts into its examples."""
    for denoiser in objective.denoisers:
        _check_has_tokens(denoiser.objective, architecture, tokenizer)
    modes = {denoiser.mode for denoiser in objective.denoisers if denoiser.mode}
    if modes and tokenizer.num_sentinels < len(modes) + 2:
        raise SettingError(
            f"the vocabulary has {tokenizer.num_sentinels} sentinels, and the modes {sorted(modes)} take "
            f"{len(modes)} of them: set data.sentinels to 100"
        )


def _check_single_objective(objective: Objective, architecture: str) -> None:
    for field, value, other, allowed in _compatible_values():
        chosen = getattr(objective, other)
        if getattr(objective, field) == value and chosen not in allowed:
            expected = f"should be {' or '.join(map(repr, allowed))} with objective.{field}={value!r}"
            raise SettingError(f"objective.{other}={chosen!r} {expected}")
    if not objective.has_inputs and architecture in ENCODER_DECODERS:
        raise SettingError(
            "objective.noise='everything' with objective.inputs='drop' leaves model.architecture="
            f"{architecture!r} no inputs; choose a decoder, or objective.noise='suffix' (prefix-lm)"
        )
    if not objective.writes_eos and (objective.is_mlm or architecture == "encoder"):
        raise SettingError(
            "objective.eos='none' suits a model with a decoder: in an encoder [SEP] ends each text, so "
            "objective.eos should be 'each-example' or 'between-documents'"
        )
    needs_eos = objective.pairs == "none" and not objective.concatenates and not objective.is_mlm
    if objective.eos == "between-documents" and needs_eos:
        noise = f"objective.noise={objective.noise!r}, which keeps documents apart"
        cause = noise if objective.documents == "concatenated" else "objective.documents='apart'"
        should = "should be 'none' or 'each-example'"
        raise SettingError(f"objective.eos='between-documents' {should} with {cause}")
    is_packed = objective.documents == "apart" and not objective.is_mlm
    if is_packed and objective.corruption.counts is None:
        countable = [name for name, noise in NOISES.items() if noise.counts]
        raise SettingError(
            f"objective.noise={objective.noise!r} hides a random number of tokens, so that documents "
            "cannot be packed before it is drawn: objective.documents='apart' needs objective.noise="
            f"{' or '.join(map(repr, countable))}"
        )
    if architecture == "encoder":
        # An encoder with a causal mask may also be a causal language model.
        suits_architecture = objective.is_mlm or not objective.has_inputs
    else:
        suits_architecture = not objective.is_mlm
    if not suits_architecture:
        raise SettingError(
            f"objective.targets={objective.targets!r} does not suit model.architecture={architecture!r}: an "
            f"encoder, and only that, predicts tokens in their places ({' or '.join(map(repr, IN_PLACE))})"
        )
    if objective.inputs in AROUND_MIDDLE and architecture not in DECODERS:
        raise SettingError(
            f"objective.inputs={objective.inputs!r} is an order of a decoder's row: model.architecture="
            f"{architecture!r} should be {' or '.join(map(repr, DECODERS))}, or objective.inputs 'sentinels'"
        )


def _check_has_tokens(objective: Objective, architecture: str, tokenizer: Tokenizer) -> None:
    needed = INPUTS[objective.inputs].num_sentinels
    if "sentinels" in (objective.inputs, objective.targets):
        needed = max(needed, 2)  # a noise span may part two spans of text, and a rolled one is in two parts
    if tokenizer.num_sentinels < needed:
        count = "no" if not tokenizer.num_sentinels else f"only {tokenizer.num_sentinels}"
        raise SettingError(
            f"the vocabulary has {count} sentinels for this objective: set data.sentinels to 100"
        )
    has_masks = objective.inputs in (*TOKEN_FOR_TOKEN, "span-masks")
    check_special_tokens(tokenizer, ["mask"] if has_masks else [], architecture)


def check_mixture(denoisers: Sequence[Denoiser]) -> None:
    """Raise SettingError if denoisers cannot stand in one mixture."""
    names = [denoiser.name for denoiser in denoisers]
    if not names or len(set(names)) < len(names):
        raise SettingError(f"the denoisers of a mixture should have names, each its own, not {names}")
    for denoiser in denoisers:
        if not denoiser.weight > 0:
            raise SettingError(f"denoiser {denoiser.name!r}: weight={denoiser.weight} should be above 0")
        if denoiser.objective.mixture:
            raise SettingError(f"denoiser {denoiser.name!r} should be one objective, not a mixture")
    in_place = [denoiser.name for denoiser in denoisers if denoiser.objective.is_mlm]
    if in_place and len(in_place) < len(denoisers):
        raise SettingError(f"of a mixture all denoisers or none should suit an encoder, not only {in_place}")
    if in_place and len({(each.objective.targets, each.objective.pairs) for each in denoisers}) > 1:
        raise SettingError("the denoisers of an encoder's mixture should have the same targets and pairs")
    bounds = [denoiser.name for denoiser in denoisers if denoiser.objective.corruption.loss_weights]
    if bounds and len(bounds) < len(denoisers):
        raise SettingError(
            f"of a mixture all denoisers or none should bound the likelihood, not only {bounds}"
        )
    modes = {denoiser.mode for denoiser in denoisers if denoiser.mode}
    if modes and in_place:
        raise SettingError(
            f"the mode tokens {sorted(modes)} begin inputs of a decoder, and not of an encoder"
        )


def check_special_tokens(tokenizer: Tokenizer, names: list[str], architecture: str) -> None:
    """Raise SettingError if the tokenizer lacks a special token.

    Needed are ``names``, and CLS and SEP of an encoder, EOS of all other architectures.
    """
    names = [*names, "cls", "sep"] if architecture == "encoder" else [*names, "eos"]
    if missing := [name for name in names if getattr(tokenizer, name) is None]:
        sentinels = 5 if "extract" in missing else 2
        raise SettingError(
            f"the vocabulary has no token for {', '.join(missing)}; ours need data.sentinels of at least "
            f"{sentinels}"
        )
