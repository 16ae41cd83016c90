"""Tokenizers in the published format, trained on a few texts, and texts that are hard to encode."""

import tokenizers

TEXTS = ["the cat sat on the mat", "a dog ran to the house. it was late!", "who is there?"]


def byte_pairs(path):
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "<pad>", "</s>", "<mask>"]
    )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(TEXTS, trainer)
    made.enable_padding(length=64, pad_id=1, pad_token="<pad>")
    made.save(str(path))


ODD = [
    "</s",
    "<0x37>",
    "<0x37> a<0xE4>b",
    "<0x",
    "👩‍🚀",
    "",
    "   ",
    " two  blanks ",
    "Ａ ﬁ ½ e\u0301",
    "75% 你好",
    "a\tb\nc\u00a0d",
    "the " * 30,
    "x" * 70,
    "abc",
]
