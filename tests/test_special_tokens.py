"""Laws of special tokens in texts: data have none, a prompt names masks and sentinels."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import published
import pytest
import tokenizers
from paths import GOLDEN, ROOT

from lm.config.model import ModelConfig, SpecialTokens
from lm.data.classification import Reader
from lm.data.tasks.labelled import LABELLED
from lm.objectives.denoising import Objective
from lm.objectives.formatting import INPUTS
from lm.special_tokens import check_special, special_ids
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece
from lm.tokenizers.tokenizer import EOS, METASPACE, PAD, UNK, SpecialTokenTemplate
from lm.tokenizers.wordpiece import WordPieceTokenizer, train_wordpiece

HARNESS = GOLDEN / "harness"
DOCS, TRAINED_ON = ROOT / "docs", ("code.md", "choices.md", "tasks.md")
LINES = [
    "Returns a new array of the given shape; see also `numpy.zeros`.",
    "the unbelievable understanding of undoing, redoing and <b>bold</b> statements",
    "a list [of, items] and a/b < c > d",
]
SPELLED = [
    "a <extra_id_0> b",
    "a </s> b",
    "</s><pad>",
    "of the [MASK] shape",
    "x [SEP] y [CLS] [PAD] [UNK]",
    "<unk>",
]
SPELLED += ["the <extra_id_1>thing <extra_id_0>", "<extra_id_99> <extra_id_100>", "one.<pad>two</s>"]


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory):
    """Ours, of each kind."""
    folder, texts = tmp_path_factory.mktemp("own"), [(DOCS / name).read_text("utf-8") for name in TRAINED_ON]
    return {
        "unigram": SentencePieceTokenizer(train_sentencepiece(texts, 1000, folder / "unigram.model"), 4),
        "bytes-for-unknown": SentencePieceTokenizer(
            train_sentencepiece(texts, 1300, folder / "b.model", "bytes"), 4
        ),
        "bpe": SentencePieceTokenizer(train_sentencepiece(texts, 1000, folder / "bpe.model", kind="bpe"), 4),
        "wordpiece": WordPieceTokenizer(train_wordpiece(texts, 2000, folder / "words.txt"), 4),
        "bytes": ByteTokenizer(4),
    }


OWN = ("unigram", "bytes-for-unknown", "bpe", "wordpiece", "bytes")


@pytest.mark.parametrize("text", SPELLED)
@pytest.mark.parametrize("name", OWN[:-1])
def test_an_exported_vocabulary_reads_every_text_as_before(name, text, vocabularies, tmp_path):
    own = vocabularies[name]
    for file, contents in own.export_files(None, own.eos).items():
        (tmp_path / file).write_bytes(contents)
    again = load_pretrained_tokenizer(tmp_path, own.vocab_size)
    assert again.fingerprint == own.fingerprint
    assert again.encode(text) == own.encode(text)
    assert again.encode_with_special_tokens(text, None, own.eos) == own.encode_with_special_tokens(
        text, None, own.eos
    )


@pytest.mark.parametrize("name", OWN)
def test_a_decoder_made_of_a_checkpoint_without_one_starts_as_its_vocabulary_asks(name, vocabularies):
    config = ModelConfig(architecture="encoder-decoder", special=SpecialTokens(pad=PAD, eos=EOS, start=None))
    special = special_ids(config, vocabularies[name])
    assert special.start == PAD
    check_special(replace(config, special=special), vocabularies[name], name)


@pytest.mark.parametrize("text", [*SPELLED, "– 東京 \n", "".join(map(chr, range(1, 0x180)))])
def test_an_exported_vocabulary_of_bytes_reads_every_text_as_bytes(text, vocabularies, tmp_path):
    own = vocabularies["bytes"]
    for file, contents in own.export_files(own.cls, own.sep).items():
        (tmp_path / file).write_bytes(contents)
    again = load_pretrained_tokenizer(tmp_path, own.vocab_size)
    assert again.encode(text) == own.encode(text)
    assert again.decode(own.encode(text)) == text
    assert (again.vocab_size, again.num_sentinels, again.pad, again.eos, again.mask, again.cls) == (
        own.vocab_size,
        own.num_sentinels,
        own.pad,
        own.eos,
        own.mask,
        own.cls,
    )
    assert again.template == SpecialTokenTemplate((own.cls,), (own.sep,), (own.sep,), 1)


@pytest.mark.parametrize("name", OWN)
def test_an_exported_vocabulary_puts_the_special_tokens_of_a_head_around_texts(name, vocabularies, tmp_path):
    own = vocabularies[name]
    template = SpecialTokenTemplate((own.start,), (own.delim,), (own.eos,), 1)
    for file, contents in own.export_files_with(template).items():
        (tmp_path / file).write_bytes(contents)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    one, other = own.encode("one text"), own.encode("another")
    assert theirs.encode("one text").ids == [own.start, *one, own.eos]
    assert theirs.encode("one text", "another").ids == [own.start, *one, own.delim, *other, own.eos]


def test_the_last_special_token_may_have_a_type_of_its_own(tmp_path):
    """As in XLNet, whose texts end with <sep> <cls>."""
    given = load_pretrained_tokenizer(published.write("bert", tmp_path / "bert"), 400)
    template = SpecialTokenTemplate(
        (), (given.sep,), (given.sep, given.cls), second_token_type=1, last_token_type=2
    )
    for file, contents in given.export_files_with(template).items():
        (tmp_path / file).write_bytes(contents)
    again = load_pretrained_tokenizer(tmp_path, 400)
    assert again.template == template
    reader = Reader(LABELLED["follows"], again, "encoder", 40)
    (row,) = reader.example({"sentence1": "one text", "sentence2": "another", "label": 1}).rows
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("one text", "another")
    assert (row.tokens.tolist(), row.types.tolist()) == (theirs.ids, theirs.type_ids)
    assert row.types[-3:].tolist() == [1, 1, 2]


def test_a_published_tokenizer_gets_the_special_tokens_that_a_head_has_read(tmp_path):
    path = published.write("llama", tmp_path / "llama")
    given = load_pretrained_tokenizer(path, 400)
    assert given.export_files_with(given.template) == given.files()
    template = SpecialTokenTemplate(given.template.prefix, (given.eos,), (given.eos,), 1)
    for file, contents in given.export_files_with(template).items():
        (tmp_path / file).write_bytes(contents)
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("the cat", "a dog").ids
    bos = given.template.prefix[0]
    assert ids == [bos, *given.encode("the cat"), given.eos, *given.encode("a dog"), given.eos]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and settings["eos_token"] == "</s>"


@pytest.mark.parametrize("text", SPELLED)
@pytest.mark.parametrize("name", OWN)
def test_our_data_have_no_special_tokens_and_prompts_have_those_that_they_name(name, text, vocabularies):
    own = vocabularies[name]
    first, special = own.vocab_size - own.num_sentinels, {PAD, EOS}
    assert not special & {*own.encode(text)} and max(own.encode(text)) < first
    found = [token for token in own.encode_with_special_tokens(text, None, None) if token >= first]
    named = {
        "<extra_id_0>": own.vocab_size - 1,
        "<extra_id_1>": own.vocab_size - 2,
        "[MASK]": own.vocab_size - 1,
    }
    due = sorted((text.index(spelling), token) for spelling, token in named.items() if spelling in text)
    assert found == [token for _, token in due]
    assert not special & {*own.encode_with_special_tokens(text, None, None)}


@pytest.mark.parametrize("name", ["t5_v1_0", "gpt2", "llama_gqa"])
def test_published_data_have_no_special_tokens_and_prompts_have_those_that_they_name(name):
    published = load_pretrained_tokenizer(HARNESS / name, 10**6)
    special = {
        token.content: number for number, token in published.backend.get_added_tokens_decoder().items()
    }
    ordinary = {published.vocab.get("<unk>")}
    plain = published.encode("a b")
    for spelling, number in special.items():
        for text in (f"a {spelling} b", f"a{spelling}b", f"{spelling}"):
            ids = published.encode(text)
            assert not {*ids} & {*special.values()} - ordinary, spelling
            named = spelling.startswith("<extra_id_") or number == published.mask
            framed = published.encode_with_special_tokens(text, None, None)
            before, behind = published.prefix_and_suffix
            inner = framed[len(before) : len(framed) - len(behind)]
            assert number in ordinary or (number in inner) == named, text
    assert published.encode_with_special_tokens("a b", None, None) == published.add_special_tokens(
        plain, None, None
    )


def hidden(ids, own, random):
    """Tokens with up to three spans of them hidden."""
    noise = np.zeros((1, len(ids)), bool)
    for begin in random.choice(np.arange(1, len(ids)), 3, replace=False):
        noise[0, begin : begin + random.integers(1, 4)] = True
    shown, keep, _ = INPUTS["sentinels"].apply(
        Objective(), np.array([ids], np.int32), noise, np.zeros(1), own
    )
    return shown[keep].tolist()


@pytest.mark.parametrize("name", OWN)
def test_a_text_with_hidden_spans_that_is_printed_is_read_again_as_it_was(name, vocabularies):
    own, random = vocabularies[name], np.random.default_rng(0)
    for line in LINES:
        ids = own.encode(line)
        for _ in range(60):
            shown = hidden(ids, own, random)
            if {(own.vocab.get(METASPACE), own.vocab_size - k) for k in (1, 2, 3)} & {*pairwise(shown)}:
                continue  # a blank that is a piece of its own is not seen in front of a sentinel
            assert own.encode_with_special_tokens(own.decode(shown), None, None) == shown


def test_sentinels_beyond_those_of_a_vocabulary_are_text(vocabularies):
    for name in OWN:
        own = vocabularies[name]
        assert own.encode_with_special_tokens("<extra_id_4>", None, None) == own.encode("<extra_id_4>")
        assert UNK not in own.encode("<extra_id_4>")
