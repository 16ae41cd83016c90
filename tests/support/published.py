"""Tiny checkpoints in the published format, each with a tokenizer and special ids of its own kind."""

import json
from pathlib import Path

from drawn import drawn_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lm.config.base import changes
from lm.config.model import SpecialTokens
from lm.convert import save
from lm.nn.presets import PRESETS

WORDS = "the a cat dog sat on mat ran far and was seen by us true false yes no question context".split()
SMALL = {
    "d_model": 16,
    "mlp.d_ff": 32,
    "attention.d_kv": 8,
    "attention.num_heads": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
SENTINELS = 20
# family: size that it is cut from, special tokens in the order of their ids, what its tokenizer puts around
# one text and two, and pad, end and start as config.json has them
FAMILIES = {
    "t5": ("t5-small", ["<pad>", "</s>", "<unk>"], ("$A </s>", "$A </s> $B </s>"), (0, 1, 0)),
    "bart": (
        "bart-base",
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        (1, 2, 2),
    ),
    "gpt2": ("gpt2", ["<unk>", "!", "?", "<|endoftext|>"], None, (0, 3, None)),
    "llama": ("llama-7b", ["<unk>", "<s>", "</s>"], ("<s> $A", "<s> $A <s> $B"), (0, 2, None)),
    "bert": (
        "bert-base",
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        (0, None, None),
    ),
    "roberta": (
        "roberta-base",
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        (1, 2, 0),
    ),
}


def tokenizer_of(family: str) -> Tokenizer:
    """Pieces of bytes, as in GPT-2, whatever the family: only the special tokens differ."""
    _, special, template, _ = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    if family == "t5":
        top = [AddedToken(f"<extra_id_{k}>") for k in reversed(range(SENTINELS))]
        tokenizer.add_special_tokens(top)
    if template is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in special]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template[0], pair=template[1], special_tokens=ids
        )
    return tokenizer


def write(family: str, folder: Path, seed: int = 0, **settings) -> Path:
    """A folder with config.json, safetensors and tokenizer of a random model, unless it is there."""
    if folder.exists():
        return folder
    size, _, _, ids = FAMILIES[family]
    tokenizer = tokenizer_of(family)
    special = SpecialTokens(*ids)
    rows = tokenizer.get_vocab_size()
    config = changes(
        PRESETS[size], {**SMALL, "vocab_size": rows, "special": special, "positions.max_length": 256}
    )
    config = changes(config, {"attention.num_key_value_heads": None, **settings})
    names = {"tokenizer.json": tokenizer.to_str().encode()}
    save(drawn_model(config, seed), folder, beside=names | {"tokenizer_config.json": json.dumps({}).encode()})
    return folder
