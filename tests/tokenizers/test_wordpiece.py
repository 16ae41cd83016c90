"""Laws of the WordPiece vocabularies that are trained here."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from texts import TEXTS
from trained_tokenizers import ODD

from experiments.runs.vocabulary import store_vocabulary
from experiments.study.experiment import Experiment
from lm.config.base import SettingError, changes
from lm.tokenizers import wordpiece
from lm.tokenizers.huggingface import load_pretrained_tokenizer, load_tokenizer
from lm.tokenizers.tokenizer import EOS, PAD, UNK
from lm.tokenizers.wordpiece import CONTINUATION_PREFIX, WordPieceTokenizer, train_wordpiece

SIZE = 90
LETTERS = sorted({*"".join(TEXTS)} - {" "})


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return WordPieceTokenizer(
        train_wordpiece(TEXTS, SIZE, tmp_path_factory.mktemp("wordpiece") / "small.txt"), 100
    )


def greedy(pieces, word):
    """The longest piece that a word begins with, and so on; None where none fits."""
    cut, start = [], 0
    while start < len(word):
        mark = CONTINUATION_PREFIX * (start > 0)
        ends = [end for end in range(len(word), start, -1) if mark + word[start:end] in pieces]
        if not ends:
            return None
        cut.append(mark + word[start : ends[0]])
        start = ends[0]
    return cut


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(LETTERS, min_size=1, max_size=12)))
@example("unquick foxes jumping wizardly".split())
def test_words_of_known_letters_are_cut_greedily_and_come_back(vocabulary, words):
    pieces = {*vocabulary.vocab}
    expected = [piece for word in words for piece in greedy(pieces, word)]
    ids = vocabulary.encode(" ".join(words))
    assert [vocabulary.tokens[token] for token in ids] == expected
    assert vocabulary.decode(ids) == " ".join(words)
    assert vocabulary.word_starts[ids].sum() == len(words)


def test_the_most_frequent_pair_of_neighbours_is_merged_first(tmp_path):
    """Of low x 5, lower x 2, newest x 6, widest x 3: e+s and es+t before l+o, inside of words all of them."""
    words = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    pieces = WordPieceTokenizer(
        train_wordpiece([" ".join(words)], 3 + 2 * 10 + 3, tmp_path / "a.txt"), 0
    ).tokens
    assert len(pieces) == 26 and pieces[23] in ("##es", "##st") and pieces[24] == "##est"
    assert pieces[3:23] == (*"deilnorstw", *(f"##{letter}" for letter in "deilnorstw"))


def test_a_word_with_an_unknown_character_is_one_unknown_token_and_the_rest_stays(vocabulary):
    assert vocabulary.encode("F") == [UNK] and vocabulary.encode("") == []
    ids = vocabulary.encode("quick foX7 jumps")
    assert ids.count(UNK) == 1 and vocabulary.decode(ids) == "quick [UNK] jumps"
    assert vocabulary.encode("a" * 101) == [UNK] and UNK not in vocabulary.encode("a" * 100)


@pytest.mark.parametrize("length", [wordpiece.MAX_WORD_LENGTH, wordpiece.MAX_WORD_LENGTH + 1])
def test_a_word_that_is_too_long_is_unknown_also_after_a_mask(length, vocabulary):
    word = "o" * length
    is_unknown = length > wordpiece.MAX_WORD_LENGTH
    assert (vocabulary.encode(word) == [UNK]) == is_unknown
    assert (vocabulary.encode_continuation(f"{word} fox") == [UNK, *vocabulary.encode("fox")]) == is_unknown


def test_special_tokens_are_no_text_wherever_a_text_spells_them(vocabulary):
    for spelled in ("</s>", "[PAD]", "<extra_id_0>", "##x", "## x", "####"):
        assert {*vocabulary.encode(spelled)} <= {UNK, *vocabulary.encode("x")}
    dog = vocabulary.encode("dog")
    ids = [PAD, vocabulary.vocab_size - 1, *dog, vocabulary.vocab_size - 2, EOS, *dog]
    assert vocabulary.decode(ids) == "<extra_id_0> dog <extra_id_1>"
    assert (vocabulary.mask, vocabulary.cls, vocabulary.sep) == (SIZE + 99, SIZE + 98, EOS)


@pytest.fixture(scope="module")
def ascii_pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("wordpiece") / "ascii.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wordpiece, "MIN_PIECES_PER_REQUIRED_CHARACTER", 1)
        return WordPieceTokenizer(train_wordpiece(TEXTS, 230, path), 0)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80))
@example("a ##x ### it's #1 a##b# (c#d) ## #")
def test_all_of_ascii_comes_back_but_for_blanks_and_a_run_of_hashes_never_joins_words(ascii_pieces, text):
    ids = ascii_pieces.encode(text)
    assert UNK not in ids or "[UNK]" in text
    back = ascii_pieces.decode(ids)
    assert back.replace(" ", "") == text.replace(" ", "")
    if "##" not in text:
        assert back == " ".join(text.split())
    assert ascii_pieces.encode(back) == ids


def test_a_text_that_spells_the_unknown_token_is_encoded_as_text(ascii_pieces):
    pieces = [ascii_pieces.tokens[token] for token in ascii_pieces.encode("dog [UNK] x[UNK]")]
    assert pieces == [*"d ##o ##g [ ##U ##N ##K ##] x ##[ ##U ##N ##K ##]".split()]
    assert ascii_pieces.encode_prompt("[UNK] dog") == ascii_pieces.encode("[UNK] dog")


def test_text_is_normalised_by_nfkc_and_loses_its_control_characters(ascii_pieces):
    assert ascii_pieces.decode(ascii_pieces.encode("ﬁne Ａ e​s\tc\nd")) == "fine A es c d"


def test_two_processes_train_the_same_pieces_with_the_same_ids(vocabulary, tmp_path):
    code = (
        "import sys; from pathlib import Path; from lm.tokenizers.wordpiece import train_wordpiece\n"
        f"train_wordpiece(sys.stdin.read().split('|'), {SIZE}, Path(sys.argv[1]))"
    )
    for threads in ("1", "3"):
        env = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        run = [sys.executable, "-c", code, str(tmp_path / threads)]
        subprocess.run(run, input="|".join(TEXTS), text=True, check=True, env=env)
        assert (tmp_path / threads).read_bytes() == vocabulary.path.read_bytes()


def test_a_vocabulary_travels_to_another_process_and_into_the_folder_of_a_run(vocabulary, tmp_path):
    store_vocabulary(tmp_path, vocabulary)
    stored = load_tokenizer(tmp_path / "tokenizer", 100, 512)
    for copy in (pickle.loads(pickle.dumps(vocabulary)), stored):
        assert copy.fingerprint == vocabulary.fingerprint
        assert copy.encode(TEXTS[0]) == vocabulary.encode(TEXTS[0])
    assert WordPieceTokenizer(vocabulary.path, 99).fingerprint != vocabulary.fingerprint


@pytest.mark.parametrize("frame", [("cls", "sep"), ("pad", None), (None, "eos")])
def test_an_exported_vocabulary_has_the_ids_that_the_run_was_trained_with(frame, vocabulary, tmp_path):
    begin, end = (None if name is None else getattr(vocabulary, name) for name in frame)
    for name, contents in vocabulary.export_files(begin, end).items():
        (tmp_path / name).write_bytes(contents)
    theirs, again = (
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        load_pretrained_tokenizer(tmp_path, 512),
    )
    for text in TEXTS + ODD:
        ids = vocabulary.encode(text)
        assert theirs.encode(text).ids == [token for token in (begin, *ids, end) if token is not None]
        assert theirs.decode(ids, skip_special_tokens=False) == again.decode(ids) == vocabulary.decode(ids)
    own = [vocabulary.pad, vocabulary.eos, vocabulary.mask, vocabulary.cls, vocabulary.sep]
    assert [again.pad, again.eos, again.mask, again.cls, again.sep] == own
    assert again.vocab_size == vocabulary.vocab_size and again.num_sentinels == 100
    np.testing.assert_array_equal(again.word_starts[UNK:SIZE], vocabulary.word_starts[UNK:SIZE])


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (TEXTS, 20, "its 26 characters take 55 pieces"),
        (TEXTS, 5_000, "and it has [0-9]+ in all"),
        ([], 45, "there is none"),
    ],
)
def test_a_size_that_does_not_suit_the_text_is_refused(texts, size, message, tmp_path):
    with pytest.raises(
        SettingError, match=f"data.vocabulary_size={size} does not suit the text: .*{message}"
    ):
        train_wordpiece(texts, size, tmp_path / "no.txt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "contents", [b"junk\n", b"[PAD]\n</s>\n[UNK]\na\na\n", b"[PAD]\n</s>\n[UNK]\n\n", b"\xff"]
)
def test_a_file_that_is_damaged_or_another_is_refused(contents, tmp_path):
    (tmp_path / "junk.txt").write_bytes(contents)
    with pytest.raises(SettingError, match="junk.txt (should have a different piece|cannot be read)"):
        load_tokenizer(tmp_path / "junk.txt", 100, 512).encode("a")


def test_bytes_of_unknown_characters_are_refused_by_name():
    with pytest.raises(SettingError, match="data.unknown='bytes' suits data.vocabulary unigram and bpe"):
        changes(Experiment(), {"data.unknown": "bytes", "data.vocabulary": "wordpiece:documentation"})
