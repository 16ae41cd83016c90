"""Laws of the vocabularies and of the encoded corpus."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from texts import TEXTS

from lm.config.base import DataError, SettingError
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import in_memory_corpus
from lm.data.pretraining import pretraining_rows
from lm.objectives.denoising import OBJECTIVES
from lm.tokenizers import sentencepiece as vocabularies
from lm.tokenizers.huggingface import load_tokenizer
from lm.tokenizers.sentencepiece import ByteTokenizer, SentencePieceTokenizer, train_sentencepiece
from lm.tokenizers.tokenizer import EOS, METASPACE, PAD, UNK
from lm.tokenizers.wordpiece import train_wordpiece


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train_sentencepiece(TEXTS, 45, tmp_path_factory.mktemp("vocabulary") / "small.model")


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_give_back_any_text(text):
    text = text.encode(errors="ignore").decode()
    vocabulary = ByteTokenizer(100)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.encode_batch([text])[0].tolist() == vocabulary.encode(text)


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    return train_sentencepiece(TEXTS, 60, tmp_path_factory.mktemp("vocabulary") / "bpe.model", kind="bpe")


def test_pairs_are_merged_in_the_order_of_their_counts(tmp_path):
    """Of the paper's corpus low x 5, lower x 2, newest x 6, widest x 3: first e+s and s+t, then est."""
    words = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    path = train_sentencepiece([" ".join(words)], 3 + 11 + 3, tmp_path / "bpe.model", kind="bpe")
    pieces = [*SentencePieceTokenizer(path, 0).vocab]
    assert len(pieces[3:6]) == 3 and pieces[3] in ("es", "st") and pieces[4] == "est" and pieces[5] == "lo"
    assert SentencePieceTokenizer(path, 0).processor.encode("lowest", out_type=str)[-1] == "est"


def test_merged_pairs_give_back_their_texts_as_another_vocabulary_with_sentinels(merging, model, tmp_path):
    vocabulary = SentencePieceTokenizer(merging, 100)
    assert vocabulary.vocab_size == 160 and vocabulary.mask == 159
    assert [vocabulary.decode(ids) for ids in vocabulary.encode_batch(TEXTS)] == TEXTS
    assert vocabulary.fingerprint != SentencePieceTokenizer(model, 100).fingerprint
    again = train_sentencepiece(list(TEXTS), 60, tmp_path / "again.model", kind="bpe")
    assert again.read_bytes() == merging.read_bytes()


def test_a_misspelt_vocabulary_is_refused_with_the_nearest():
    with pytest.raises(
        SettingError, match="data.vocabulary=bep:documentation is unknown; did you mean 'bpe'"
    ):
        load_tokenizer("bep:documentation", 100, 512)
    with pytest.raises(SettingError, match="did you mean 'unigram'"):
        load_tokenizer("unigrm", 100, 512)


def test_sentencepiece_gives_back_its_texts(model):
    vocabulary = SentencePieceTokenizer(model, 100)
    assert vocabulary.vocab_size == 145
    assert [vocabulary.decode(ids) for ids in vocabulary.encode_batch(TEXTS)] == TEXTS
    assert EOS not in vocabulary.encode(TEXTS[0])


@pytest.fixture(scope="module")
def falling_back(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "bytes.model"
    return train_sentencepiece(TEXTS, 45 + 256, path, "bytes")


@settings(max_examples=200, deadline=None)
@given(st.text())
@example("75% 你好 👩‍🚀 <0x37> \u2581 é½ﬁ <extra_id_0> </s> ⁇")
def test_a_vocabulary_that_falls_back_to_bytes_gives_back_any_text_as_it_is_normalised(falling_back, text):
    text = text.encode(errors="ignore").decode()
    vocabulary = SentencePieceTokenizer(falling_back, 100)
    ids = vocabulary.encode(text)
    normal = vocabulary.processor.normalize(text).replace(METASPACE, " ")  # NFKC, and blanks as everywhere
    assert UNK not in ids and vocabulary.decode(ids) == normal.strip(" ")
    again = vocabulary.decode(ids)
    assert vocabulary.decode(vocabulary.encode(again)) == again


def test_byte_fallback_makes_another_vocabulary_with_the_same_words(model, falling_back):
    plain, falling = SentencePieceTokenizer(model, 100), SentencePieceTokenizer(falling_back, 100)
    assert falling.fingerprint != plain.fingerprint and falling.vocab_size == plain.vocab_size + 256
    assert UNK in plain.encode("75") and len(falling.encode("75")) == 3  # with the blank in front
    spelled = [
        [vocabulary.processor.id_to_piece(i) for i in vocabulary.encode(TEXTS[0])]
        for vocabulary in (plain, falling)
    ]
    assert spelled[0] == spelled[1]


def test_no_character_of_ascii_is_unknown_to_a_vocabulary_that_has_room_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabularies, "MIN_PIECES_PER_REQUIRED_CHARACTER", 1)
    trained = SentencePieceTokenizer(
        train_sentencepiece(TEXTS, 110, tmp_path / "a.model"), 0
    )  # on a text of small letters alone
    text = f"75 in 1999: {' '.join(map(chr, range(33, 127)))}"
    assert UNK not in trained.encode(text) and trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_decoding_stops_at_eos_drops_padding_and_names_sentinels(kind, model):
    vocabulary = ByteTokenizer(100) if kind == "bytes" else SentencePieceTokenizer(model, 100)
    dog = vocabulary.encode("dog")
    ids = [PAD, vocabulary.vocab_size - 1, *dog, vocabulary.vocab_size - 2, EOS, *dog]
    assert vocabulary.decode(ids).replace(" ", "") == "<extra_id_0>dog<extra_id_1>"


def test_pieces_tell_where_words_begin_and_sentences_end_and_special_tokens_are_no_pieces(model):
    for vocabulary in (ByteTokenizer(2), SentencePieceTokenizer(model, 2)):
        ids = np.array(vocabulary.encode(f" {TEXTS[0]}"))
        assert vocabulary.word_starts[ids].sum() == len(TEXTS[0].split())
        assert len(vocabulary.word_starts) == len(vocabulary.sentence_ends) == vocabulary.vocab_size
        special = [vocabulary.pad, vocabulary.eos, vocabulary.cls, vocabulary.mask]
        assert special == [PAD, EOS, vocabulary.vocab_size - 2, vocabulary.vocab_size - 1]
    assert ByteTokenizer(2).decode(np.flatnonzero(ByteTokenizer(2).sentence_ends)) == "!.?"
    assert (ByteTokenizer(1).cls, ByteTokenizer(0).mask) == (None, None)


def test_the_same_texts_train_the_same_model(model, tmp_path):
    assert train_sentencepiece(list(TEXTS), 45, tmp_path / "again.model").read_bytes() == model.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_vocabulary_travels_to_another_process(model):
    for vocabulary in (ByteTokenizer(7), SentencePieceTokenizer(model, 7)):
        copy = pickle.loads(pickle.dumps(vocabulary))
        assert copy.encode("quick fox") == vocabulary.encode("quick fox")
        assert copy.fingerprint == vocabulary.fingerprint
    assert SentencePieceTokenizer(model, 7).fingerprint != SentencePieceTokenizer(model, 8).fingerprint


@pytest.mark.parametrize(
    ("texts", "size", "mend"), [(TEXTS, 5, "smaller"), (TEXTS, 5000, "value <= "), ([], 45, "there is none")]
)
def test_a_size_that_does_not_suit_the_text_is_refused(texts, size, mend, tmp_path):
    with pytest.raises(SettingError, match=f"data.vocabulary_size={size}.*{mend}"):
        train_sentencepiece(texts, size, tmp_path / "no.model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("train", [train_sentencepiece, train_wordpiece])
@pytest.mark.parametrize("error", [DataError("record 7 is damaged"), KeyboardInterrupt("stopped")])
def test_an_error_of_the_texts_is_not_blamed_on_the_size(train, error, tmp_path):
    def texts():
        yield from TEXTS
        raise error

    with pytest.raises(type(error), match=str(error)):
        train(texts(), 1_000, tmp_path / "no.model")


def test_a_prompt_names_a_sentinel_as_decoding_writes_it():
    vocabulary = ByteTokenizer(20)
    assert vocabulary.encode_prompt("<extra_id_10>") == [vocabulary.sentinel(10)]
    for other in ("<extra_id_01>", "<extra_id_\N{ARABIC-INDIC DIGIT THREE}>"):
        assert vocabulary.encode_prompt(other) == vocabulary.encode(other)


def test_a_model_that_is_missing_or_no_model_is_refused(tmp_path):
    with pytest.raises(SettingError, match="vocabulary .*cannot be read"):
        SentencePieceTokenizer(tmp_path / "none.model", 100)
    (tmp_path / "junk.model").write_bytes(b"junk")
    with pytest.raises(SettingError, match="junk.model cannot be read as a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "junk.model", 100)
    with pytest.raises(SettingError, match=r"data.sentinels=-1"):
        ByteTokenizer(-1)


def test_a_corpus_is_encoded_whole_and_once(tmp_path):
    documents, vocabulary = [f"{i} {text}" for i, text in enumerate(TEXTS)] + [""], ByteTokenizer(100)
    corpus = in_memory_corpus(documents, vocabulary, tmp_path)
    tokens, offsets, left_out, _ = corpus.first()
    bounds = itertools.pairwise(offsets)
    assert [vocabulary.decode(tokens[begin:end]) for begin, end in bounds] == documents
    assert (tokens.dtype, left_out) == (np.uint16, 0)
    written = {path: path.read_bytes() for path in tmp_path.rglob("*.npz")}
    again = in_memory_corpus(list(documents), vocabulary, tmp_path)
    assert again == corpus and again.first().tokens.tolist() == tokens.tolist()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.npz")} == written
    assert in_memory_corpus(documents, ByteTokenizer(7), tmp_path).fingerprint != corpus.fingerprint
    assert len(corpus.first(5).tokens) == 5


def test_a_corpus_without_text_is_refused(tmp_path):
    for documents in ([], [""]):
        streams = CorpusSampler(in_memory_corpus(documents, ByteTokenizer(100), tmp_path), 1, 0)
        rows = pretraining_rows(
            streams, OBJECTIVES["baseline"], architecture="encoder-decoder", inputs_length=32, batch_size=1
        )
        with pytest.raises(SettingError, match="data.corpus has no text"):
            rows(np.arange(1))
