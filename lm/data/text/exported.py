"""A vocabulary of ours as the tokenizer.json that other programs read, with the tokens that a run frames a
text by.
"""

import json

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from lm.data.text.own import SentencePiece
from lm.data.text.published import SETTINGS

BYTE = 6  # the type of a piece that stands for a byte, in sentencepiece_model.proto


def tokenizer_json(vocabulary: SentencePiece, begin: int | None, end: int | None) -> dict[str, bytes]:
    """``{name: contents}`` of a tokenizer with the ids of ``vocabulary`` and, around a text, ``begin`` and
    ``end``.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.processor.serialized_model_proto())
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    sentinels = [f"<extra_id_{k}>" for k in reversed(range(vocabulary.num_sentinels))]
    spelt = [piece for piece, _ in pieces] + sentinels
    found = tokenizers.Tokenizer(
        models.Unigram(
            pieces + [(sentinel, 0.0) for sentinel in sentinels],
            unk_id=vocabulary.processor.unk_id(),
            byte_fallback=any(piece.type == BYTE for piece in model.pieces),
        )
    )
    # What sentencepiece does with blanks: none at the ends, one between words, one in front.
    blanks = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    charsmap = model.normalizer_spec.precompiled_charsmap
    found.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap), *blanks] if charsmap else blanks
    )
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    found.decoder = decoders.Metaspace(prepend_scheme="always")
    named = {
        "pad": vocabulary.pad,
        "eos": vocabulary.eos,
        "unk": vocabulary.processor.unk_id(),
        "mask": vocabulary.mask,
        "cls": vocabulary.cls,
        "sep": vocabulary.sep,
        "bos": begin,
    }
    named = {f"{use}_token": spelt[token] for use, token in named.items() if token is not None}
    found.add_special_tokens(
        [AddedToken(t, normalized=False) for t in dict.fromkeys([*named.values(), *sentinels])]
    )
    before, after = ([] if token is None else [spelt[token]] for token in (begin, end))
    found.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)],
        special_tokens=[(spelt[token], token) for token in {begin, end} - {None}],
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    settings["extra_special_tokens"] = sentinels[::-1]
    pairs = begin is not None and begin == vocabulary.cls  # or a model has no types of tokens
    settings["model_input_names"] = ["input_ids", *["token_type_ids"] * pairs, "attention_mask"]
    return {"tokenizer.json": found.to_str().encode(), SETTINGS: json.dumps(settings, indent=1).encode()}
