"""The special ids around a model's texts: the model's own or, where it names none, its tokenizer's."""

import json
from dataclasses import replace

from lm.config.base import SettingError
from lm.config.model import ModelConfig, SpecialTokens
from lm.data.packing import ENCODER_DECODERS
from lm.tokenizers.tokenizer import PAD, BoundaryTokens, Tokenizer


def is_trained_here(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer was trained here, so that its first ids are PAD, EOS and UNK."""
    return tokenizer.first_regular_id > 0


def special_ids(config: ModelConfig, tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special ids of the model, or of its tokenizer where config.json names none.

    The first token of a decoder is what its tokenizer puts before a text, else its bos_token_id, else its EOS
    (as in GPT-2). With a vocabulary that was trained here it is PAD.
    """
    special, template = config.special, tokenizer.template
    eos = tokenizer.eos if special.eos is None else special.eos
    if special.start is not None or not config.has_decoder:
        return replace(special, eos=eos)
    if is_trained_here(tokenizer):
        return replace(special, eos=eos, start=PAD)
    if template and template.prefix:
        return replace(special, eos=eos, start=template.prefix[0])
    bos = json.loads(config.published or "{}").get("bos_token_id")
    is_valid = isinstance(bos, int) and 0 <= bos < tokenizer.vocab_size
    return replace(special, eos=eos, start=bos if is_valid else eos)


def check_special(config: ModelConfig, tokenizer: Tokenizer, name: str) -> None:
    """Raise SettingError if a decoder's special ids differ from its tokenizer's.

    ``name`` is how messages call the tokenizer.
    """
    special = config.special
    if not config.has_decoder:
        return
    if tokenizer.eos is None or tokenizer.eos != special.eos:
        raise SettingError(
            f"{name} ends a text with id {tokenizer.eos}, the model with model.special.eos={special.eos}: "
            "they should be the same"
        )
    allowed_starts = (PAD,) if config.architecture in ENCODER_DECODERS else (PAD, None)
    if is_trained_here(tokenizer) and (special.pad != PAD or special.start not in allowed_starts):
        raise SettingError(
            f"model.special={special} should have pad {PAD} and start {PAD} with this vocabulary: set "
            f"--model.special.pad {PAD} --model.special.start {PAD}"
        )


def prompt_special_ids(config: ModelConfig, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return the ids that begin and end a prompt; None where there is none.

    A decoder without a start token whose tokenizer was trained here is trained after PAD.
    """
    if config.architecture == "encoder":
        return tokenizer.cls, tokenizer.sep
    if config.has_encoder:
        return None, tokenizer.eos
    if config.special.start is None and not is_trained_here(tokenizer):
        return tokenizer.cls, None
    return boundary_tokens(config, tokenizer).decoder_start, tokenizer.eos


def boundary_tokens(config: ModelConfig, tokenizer: Tokenizer) -> BoundaryTokens:
    """Return the ids around the inputs and targets on which a model with a decoder is trained."""
    special, template = config.special, tokenizer.template
    return BoundaryTokens(
        eos=special.pad if special.eos is None else special.eos,
        decoder_start=special.pad if special.start is None else special.start,
        prefix=template.prefix if template and config.architecture in ENCODER_DECODERS else (),
    )
