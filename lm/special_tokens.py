"""The special ids around a model's texts: the model's own, and where it names none its tokenizer's."""

import json
from dataclasses import replace

from lm.config.base import SettingError
from lm.config.model import ModelConfig, SpecialTokens
from lm.data.packing import ENCODER_DECODERS
from lm.tokenizers.tokenizer import PAD, TextFrame, Vocabulary


def special_ids(config: ModelConfig, vocabulary: Vocabulary) -> SpecialTokens:
    """Return the special ids of the model, or of its tokenizer where config.json names none.

    A decoder's first token is what its tokenizer puts before a text, else its bos_token_id, else its EOS, as
    GPT-2 has it.
    """
    special, affixes = config.special, vocabulary.affixes
    eos = vocabulary.eos if special.eos is None else special.eos
    if special.start is not None or not config.has_decoder:
        return replace(special, eos=eos)
    before = affixes.before[:1] if affixes else ()
    named = json.loads(config.published or "{}").get("bos_token_id")
    bos = named if isinstance(named, int) and 0 <= named < vocabulary.size else eos
    return replace(special, eos=eos, start=before[0] if before else bos)


def check_special(config: ModelConfig, vocabulary: Vocabulary, named: str) -> None:
    """Raise SettingError if a decoder's special ids are not those with which its vocabulary frames texts."""
    special = config.special
    if not config.has_decoder:
        return
    if vocabulary.eos is None or vocabulary.eos != special.eos:
        raise SettingError(
            f"{named} ends a text with id {vocabulary.eos}, the model with model.special.eos={special.eos}: "
            "they should be the same"
        )
    starts = (PAD,) if config.architecture in ENCODER_DECODERS else (PAD, None)
    if vocabulary.first_piece > 0 and (special.pad != PAD or special.start not in starts):
        raise SettingError(
            f"model.special={special} should have pad {PAD} and start {PAD} with this vocabulary"
        )


def prompt_frame(config: ModelConfig, vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """Return the ids that begin and end a prompt; None where there is none."""
    if config.architecture == "encoder":
        return vocabulary.cls, vocabulary.sep
    if config.has_encoder:
        return None, vocabulary.eos
    start = config.special.start
    return (vocabulary.cls, None) if start is None else (start, vocabulary.eos)


def text_frame(config: ModelConfig, vocabulary: Vocabulary) -> TextFrame:
    """Return the ids around the inputs and targets on which a model with a decoder is trained."""
    special, affixes = config.special, vocabulary.affixes
    before = affixes.before if affixes and config.architecture in ENCODER_DECODERS else ()
    start = special.pad if special.start is None else special.start
    return TextFrame(special.pad if special.eos is None else special.eos, start, before)
