"""Corpora and benchmarks as random-access sequences, and what is said when they are missing."""

import itertools
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmark_files import TEXT, prepare
from feeding import documents, fingerprint
from paths import ROOT, SHARED

from lm.config.base import SettingError
from lm.data.corpus import readers, spec
from lm.data.corpus import tfds as rows
from lm.data.corpus.files import file_shards, matching_files, other_files
from lm.data.corpus.readers import FILE_ENDINGS
from lm.data.corpus.sampler import CorpusSampler, choose_num_streams
from lm.data.corpus.shards import (
    MAX_IMBALANCE,
    MIN_WINDOW_BYTES,
    choose_window_bytes,
    corpus_fingerprint,
    iter_documents,
    shards_for_streams,
    split_shards,
)
from lm.data.corpus.tfds import prepared_rows, tfds_folders
from lm.data.corpus.token_cache import make_encoded_corpus
from lm.tokenizers.sentencepiece import ByteTokenizer

TFDS = SHARED / "data" / "tfds"
needs_data = pytest.mark.skipif(not TFDS.exists(), reason="no prepared data")


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(TFDS))
    monkeypatch.setenv("HOME", str(tmp_path))


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return f"text:{folder}"


def paragraphs(count, word="word"):
    return "\n\n".join(f"{word} {i} " + "é filler " * 20 for i in range(count))


def test_a_large_file_is_cut_at_blank_lines_and_no_text_is_lost(tmp_path):
    text = paragraphs(400)
    spec = write(tmp_path, one=text)
    parts = [documents(spec, split, tmp_path) for split in ("train", "validation")]
    found = [document for part in parts for document in part]
    assert sorted(" ".join(found).split()) == sorted(text.split())
    assert all(
        document.startswith("word") and len(document.encode()) <= readers.MAX_DOCUMENT_BYTES
        for document in found
    )
    assert 0 < len(parts[1]) <= 0.2 * len(parts[0])
    assert not set(parts[0]) & set(parts[1])


@pytest.mark.parametrize("text", ["é" * 20000, "aé" * 9001 + "𝄞" * 5000, "x" * 30000, "line\n" * 9000])
def test_text_without_blank_lines_is_cut_between_characters(tmp_path, text):
    spec = write(tmp_path, one=text)
    found = [d for split in ("train", "validation") for d in documents(spec, split, tmp_path)]
    assert sum(map(len, found)) == len(text) if "\n" not in text else len(found) > 2
    assert set("".join(found)) <= set(text)


def test_joined_corpora_are_read_whole_one_after_the_other(tmp_path):
    specs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        specs.append(write(tmp_path / name, a=paragraphs(300, name)))
    parts = [documents(spec, "train", tmp_path) for spec in specs]
    joined = documents(" + ".join(specs), "train", tmp_path)
    assert joined == [text for part in parts for text in part]
    orders = (" + ".join(order) for order in (specs, specs[::-1]))
    assert len({fingerprint(order, "train", tmp_path) for order in orders}) == 2


def test_files_named_for_a_split_are_that_split(tmp_path):
    spec = write(tmp_path, train="all of train", valid="all of valid", test="never")
    assert list(documents(spec, "train", tmp_path)) == ["all of train"]
    assert list(documents(spec, "validation", tmp_path)) == ["all of valid"]


@pytest.mark.parametrize(("name", "trained_on"), [("test", 0), ("validation", 0), ("other", 40)])
def test_a_folder_named_for_a_split_is_that_split_also_if_it_has_all_files(name, trained_on, tmp_path):
    (tmp_path / name).mkdir()
    for number in range(40):
        (tmp_path / name / f"{number}.txt").write_text(f"text {number}")
    if not trained_on:
        with pytest.raises(SettingError, match=f"no text for 'train', .*/{name}/0.txt: add"):
            file_shards("text", str(tmp_path), "train")
    within = file_shards("text", str(tmp_path / name), "train")
    assert 0 < sum(1 for _ in iter_documents(within)) < 40


@pytest.mark.parametrize("blank", ["\ufeff", "\u3000\n", "\n \n"])
def test_a_file_of_blanks_of_any_kind_has_no_document(blank, tmp_path):
    spec = write(tmp_path, blank=blank)
    with pytest.raises(SettingError, match="no text for 'validation'"):
        documents(spec, "validation", tmp_path)


def test_a_corpus_of_own_files_is_described_with_what_its_folder_has_beside_it(tmp_path):
    own, file = write(tmp_path, a="é one", b="two", test="never"), tmp_path / "a.txt"
    (tmp_path / "notes.bak").write_text("of no kind that is read")
    found = f"{own} has 2 files of 9 bytes (1 file named for test is not read)"
    assert spec.describe_corpus(own) == found
    (tmp_path / "chat").mkdir()
    for name in ("chat/b.jsonl", "c.json.gz"):
        (tmp_path / name).write_bytes(b"12345")
    both = f"{own} + jsonl:{tmp_path}"
    unread = f"; not read: 2 files of jsonl:{tmp_path} (to read them too: --data.corpus '{both}')"
    assert spec.describe_corpus(own) == found + unread
    assert (
        spec.describe_corpus(f"documentation + {both}")
        == f"{found}; jsonl:{tmp_path} has 2 files of 10 bytes"
    )
    assert spec.describe_corpus(f"text:{file}") == f"text:{file} has 1 file of 6 bytes"
    assert spec.describe_corpus("documentation") == spec.describe_corpus("tfds:c4/en") == ""


def test_the_held_out_share_depends_on_content_alone_and_the_fingerprint_follows_it(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    specs = [write(one, a=paragraphs(300)), write(two, b=paragraphs(300))]
    train, other = (documents(spec, "train", tmp_path) for spec in specs)
    assert train == other
    prints = [fingerprint(spec, "train", tmp_path) for spec in specs]
    assert prints[0] == prints[1]
    (two / "b.txt").write_text(paragraphs(300, "other"))
    assert fingerprint(specs[1], "train", tmp_path) != prints[0]


def test_what_is_no_text_is_an_error_that_names_file_and_offset(tmp_path):
    for wrong in (b"\xff", b"\0"):
        (tmp_path / "bad.txt").write_bytes(b"good " * 4000 + wrong + b" good")
        with pytest.raises(SettingError, match=r"bad\.txt.*20000"):
            documents(f"text:{tmp_path}", "train", tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("text:/nowhere/*.txt", "no file matches"),
        (
            "documentation + documentation/operation",
            "data.corpus: documentation has no part 'operation'; did you mean 'operations'",
        ),
        ("text:a+jsonl:b", r"data.corpus=text:a\+jsonl:b: join corpora by ' \+ ', with a blank on either"),
        ("text:a +documentation", r"join corpora by ' \+ '"),
        ("text:/nowhere/c++.txt", "no file matches"),
        ("documentaton", "did you mean 'documentation'"),
        ("tfds:", "data.corpus='tfds:' is unknown; did you mean 'tfds:NAME'"),
        (
            "wikipedia",
            "is unknown; choose from documentation, documentation/PART, jsonl:PATH, parquet:PATH, text:PATH",
        ),
        ("", "data.corpus='' is unknown; choose from"),
        ("/a/folder", "data.corpus='/a/folder' should be 'text:/a/folder'$"),
        ("tfds:c4/en", "tfds build c4/en --file_format=array_record"),
        pytest.param("tfds:english_novel", "did you mean 'english_novels'", marks=needs_data),
        pytest.param("tfds:english_novels:9.0.0", "did you mean 'english_novels:1.0.0'", marks=needs_data),
        pytest.param("tfds:glue/rte", "text feature", marks=needs_data),
    ],
)
def test_a_corpus_that_is_not_there_is_named_with_the_mend(spec, message, tmp_path):
    with pytest.raises(SettingError, match=message):
        documents(spec, "train", tmp_path)


def test_a_misspelt_file_is_named_beside_the_most_similar_one(tmp_path):
    (tmp_path / "book.txt").write_text("A text.")
    with pytest.raises(
        SettingError, match=rf"no file matches {tmp_path}/bok\.txt; did you mean .*book\.txt\?"
    ):
        documents(f"text:{tmp_path}/bok.txt", "train", tmp_path)


def test_files_of_a_folder_are_found_whether_their_endings_are_small_or_capital(tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("a.txt", "B.TXT", "more/c.Txt", "d.JSONL", "e.txt.bak"):
        (tmp_path / name).write_text('{"text": "A text."}')
    assert [path.name for path in matching_files("text", str(tmp_path))] == ["B.TXT", "a.txt", "c.Txt"]
    assert other_files("text", str(tmp_path)) == {f"jsonl:{tmp_path}": "1 file"}


def test_a_corpus_without_text_is_an_error(tmp_path):
    with pytest.raises(SettingError, match="no text"):
        documents(write(tmp_path, empty=" \n\n "), "train", tmp_path)


@needs_data
def test_the_nearest_split_is_offered(tmp_path):
    with pytest.raises(SettingError, match="did you mean 'validation'"):
        rows.prepared_rows("glue/sst2", "validaton", tmp_path)


@needs_data
@pytest.mark.parametrize("name", ["wikitext/wikitext-2-articles", "english_novels", "tiny_shakespeare:1.0.0"])
def test_prepared_texts_are_read(name, tmp_path):
    train, validation = (documents(f"tfds:{name}", split, tmp_path) for split in ("train", "validation"))
    assert isinstance(train[-1], str) and not {*train} & {*validation}
    shards = [spec.corpus_shards(f"tfds:{name}", split, tmp_path) for split in ("train", "validation")]
    assert corpus_fingerprint(shards[0]) != corpus_fingerprint(shards[1])
    assert [*iter_documents(pickle.loads(pickle.dumps(shards[0])))] == train


@needs_data
def test_rows_hold_plain_python_values(tmp_path):
    row = rows.prepared_rows("squad/v1.1", "validation", tmp_path)[0]
    assert json.loads(json.dumps(row)) == row
    assert isinstance(row["answers"]["text"][0], str)
    assert len(rows.prepared_rows("glue/sst2", "train[:10]+validation[:5]", tmp_path)) == 15


def test_a_set_that_is_still_being_prepared_is_not_read(tmp_path):
    for version in ("2.0.0", "10.0.0", "10.0.0.incomplete1A2B3C"):
        (tmp_path / "tfds" / "mine" / version).mkdir(parents=True)
        (tmp_path / "tfds" / "mine" / version / "dataset_info.json").touch()
    assert rows.find_prepared("mine", tmp_path).name == "10.0.0"
    assert [name for name in rows.prepared_sets(tmp_path) if name.startswith("mine:")] == [
        "mine:10.0.0",
        "mine:2.0.0",
    ]


def test_values_become_plain():
    value = {
        "a": np.array([b"x", b"y"], object),
        "b": np.int64(3),
        "c": np.zeros((1, 2)),
        "d": np.array(b"z", object),
    }
    assert rows.plain_values(value) == {"a": ["x", "y"], "b": 3, "c": [[0.0, 0.0]], "d": "z"}


@needs_data
def test_a_set_without_random_access_is_an_error_with_the_command_that_converts_it(tmp_path):
    folder = tmp_path / "tfds" / "novels" / "1.0.0"
    folder.mkdir(parents=True)
    for name in ("dataset_info.json", "features.json"):
        text = (TFDS / "english_novels" / "1.0.0" / name).read_text()
        (folder / name).write_text(text.replace("array_record", "tfrecord"))
    with pytest.raises(SettingError, match="tfds convert_format .*--out_file_format=array_record"):
        documents("tfds:novels", "train", tmp_path)


@pytest.mark.parametrize(
    "part",
    ["[5:3]", "[3:2]", "[-1:-3]", "[50%:49%]", "[x]", "[:10", "[1:2:3]", "[200%:]", "[999:]", "[:5%:]", "[]"],
)
@pytest.mark.parametrize("before", ["", "train[:50]+"])
def test_a_slice_that_is_none_is_refused_with_what_one_looks_like(part, before, tmp_path):
    prepare("mine", tmp_path, ({"text": TEXT}, [{"text": f"text {i}"} for i in range(100)], "train"))
    with pytest.raises(SettingError, match=r"FROM below TO, such as validation\[:10%\]"):
        prepared_rows("mine", f"{before}train{part}", tmp_path)
    assert len(prepared_rows("mine", "train[:10%]+train[-3:]", tmp_path)) == 13


def test_without_a_validation_split_the_last_rows_of_train_are_held_out(tmp_path):
    prepare("mine", tmp_path, ({"text": TEXT}, [{"text": f"text {i}"} for i in range(100)], "train"))
    train, validation = (documents("tfds:mine", split, tmp_path) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (95, 5)
    assert not set(train) & set(validation)


@needs_data
def test_reading_imports_neither_tensorflow_nor_jax(tmp_path):
    code = (
        "import sys; from pathlib import Path; from lm.data.corpus import spec\n"
        f"spec.dataset_rows('glue/rte', 'train', Path({str(tmp_path)!r}))[0]\n"
        "print([name for name in ('tensorflow', 'jax', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_user_without_a_home_reads_what_lies_elsewhere(tmp_path, monkeypatch):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)  # as of a container's user that has no entry in /etc/passwd
    monkeypatch.setenv("TFDS_DATA_DIR", "/data")
    assert tfds_folders(tmp_path) == [tmp_path / "tfds", Path("/data")]


@pytest.mark.parametrize(
    ("files", "split", "named"),
    [
        ({"a.txt": "", "b.txt": ""}, "train", r"no text for 'train' in .*a.txt \(0 bytes\), .*b.txt"),
        ({"a.txt": "one\n\ntwo", "valid.txt": ""}, "validation", r"'validation' in .*valid.txt \(0 bytes\)"),
        ({"train.txt": "", "valid.txt": "one"}, "train", r"'train' in .*train.txt \(0 bytes\)"),
        ({"a.txt": " \n"}, "train", r"a.txt \(2 bytes\)"),
    ],
)
def test_a_corpus_whose_files_are_empty_is_refused_with_their_names(files, split, named, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=named):
        documents(f"text:{tmp_path}", split, tmp_path)


def test_an_empty_file_among_others_changes_nothing(tmp_path):
    for name in "bcd":
        (tmp_path / f"{name}.txt").write_text(f"this is {name}")
    found = documents(f"text:{tmp_path}", "train", tmp_path)
    (tmp_path / "a.txt").write_text("")
    assert documents(f"text:{tmp_path}", "train", tmp_path) == found


def test_the_recipe_of_text8_writes_the_published_splits_and_cuts_no_character_in_two(tmp_path):
    page = (ROOT / "docs" / "corpora.md").read_text()
    recipe, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {"__name__": "recipe"}
    exec(recipe, names)
    sizes = names["SIZES"]
    assert [*sizes.values()] == [90_000_000, 5_000_000, 5_000_000]
    names["SIZES"].update(zip(sizes, (90_001, 50_000, 49_999), strict=True))  # 90,001: in the middle of an ä
    data = ("ä bc " * 31_667).encode()[:190_000]
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "enwik8").write_bytes(data)
    names["write_splits"]("enwik8", tmp_path)
    texts = {}
    for folder in ("enwik8", "enwik8-test"):
        name = f"text:{tmp_path / folder}"
        texts[folder] = " ".join(iter_documents(spec.corpus_shards(name, "validation", tmp_path)))
    shards = spec.corpus_shards(f"text:{tmp_path / 'enwik8'}", "train", tmp_path)
    train = " ".join(iter_documents(shards))
    assert train == data[:90_000].decode().strip()
    assert texts["enwik8"] == data[90_002:140_001].decode().strip()
    assert texts["enwik8-test"] == data[140_001:].decode().strip()


def test_the_recipe_of_penn_treebank_keeps_the_test_split_out_of_training_and_loses_no_word(tmp_path):
    page = (ROOT / "docs" / "corpora.md").read_text()
    _, recipe = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {"__name__": "recipe"}
    exec(recipe, names)
    lines = {split: f" {split} said <unk> n't rise N \n" * 1_000 for split in ("train", "valid", "test")}
    (tmp_path / "downloads").mkdir()
    for split, text in lines.items():
        (tmp_path / "downloads" / f"ptb.{split}.txt").write_text(text)
    names["write_splits"](tmp_path)

    def words(folder, split):
        shards = spec.corpus_shards(f"text:{tmp_path / folder}", split, tmp_path)
        return " ".join(iter_documents(shards)).split()

    due = {split: text.replace("\n", "<eos>\n").split() for split, text in lines.items()}
    assert words("ptb", "train") == due["train"]
    assert words("ptb", "validation") == due["valid"]
    assert words("ptb-test", "validation") == due["test"]


def test_a_folder_with_a_validation_file_alone_is_held_out_whole_and_such_a_file_by_itself_in_part(tmp_path):
    file = tmp_path / "valid.txt"
    texts = [f"this is text {number}" for number in range(100)]
    file.write_text("\n\n".join(texts))
    found = [*iter_documents(file_shards("text", str(tmp_path), "validation"))]
    assert "\n\n".join(found) == "\n\n".join(texts)
    with pytest.raises(SettingError, match="no text for 'train', .* such as .*valid.txt: add one"):
        file_shards("text", str(tmp_path), "train")
    file.write_text("\n\n".join(texts * 100))
    train, held_out = (
        [*iter_documents(file_shards("text", str(file), each))] for each in ("train", "validation")
    )
    assert len(train) > len(held_out) > 0


def test_copies_of_a_document_are_held_out_together_and_never_all_text(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("the same")
    with pytest.raises(SettingError, match="there should be two that differ"):
        file_shards("text", str(tmp_path), "train")
    (tmp_path / "other.txt").write_text("another")
    train, held_out = (
        [*iter_documents(file_shards("text", str(tmp_path), s))] for s in ("train", "validation")
    )
    assert train and held_out and not {*train} & {*held_out}


@pytest.mark.parametrize("separator", ["\n\n", "\n"], ids=["blank lines", "lines"])
@pytest.mark.parametrize("kilobytes", [12, 75, 140, 700, 5_000])
def test_no_text_that_is_held_out_is_trained_on_and_none_is_lost_however_many_streams_read(
    kilobytes, separator, tmp_path
):
    path = tmp_path / "a.txt"
    numbers = np.random.default_rng(0).permutation(kilobytes * 18)
    path.write_text(separator.join(f"{number} is the number of a line of some words." for number in numbers))

    def lines(split, streams):
        shards = file_shards("text", str(path), split)
        window_bytes, found = choose_window_bytes(shards, streams), []
        for shard in split_shards(shards, streams):
            number = 0
            while (window := shard.read(number, window_bytes)) is not None:
                found += re.findall(r"(\d+) is", "\n".join(window.documents))
                number += 1
        return sorted(map(int, found))

    held_out = lines("validation", 1)
    assert held_out
    for streams in (1, 3, 8):
        assert sorted(lines("train", streams) + held_out) == sorted(numbers.tolist())


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("sizes", [(1_600, 8), (700, 700, 700), (1_500, *[5] * 30), (200, 3, 90, 40, 1, 1)])
def test_every_stream_of_files_of_any_sizes_has_about_as_much_text_and_each_document_is_read_once(
    kind, sizes, tmp_path
):
    """Else the few documents of a small file fill a share of every batch, or a stream has none."""
    number = itertools.count()
    for name, kilobytes in enumerate(sizes):
        texts = [f"{next(number)} is the number of a line of some words. " * 8 for _ in range(kilobytes * 3)]
        lines = "\n\n".join(texts) if kind == "text" else "\n".join(json.dumps({"text": x}) for x in texts)
        (tmp_path / f"{name}{FILE_ENDINGS[kind][0]}").write_text(lines)
    shards = file_shards(kind, str(tmp_path), "train")
    num_streams = choose_num_streams(0, 16, sum(shard.size for shard in shards))
    corpus = make_encoded_corpus(shards, ByteTokenizer(0), tmp_path / "cache", num_streams)
    sampler = CorpusSampler(corpus, num_streams, 0)
    streams = []
    for stream in range(num_streams):
        shards_of_stream = [corpus.shards[index] for index in sampler.shard_order(stream, 0)]
        windows = itertools.chain(*(windows_of(shard, corpus.window_bytes) for shard in shards_of_stream))
        streams.append("\n".join(itertools.chain(*windows)))
    assert min(map(len, streams)) * MAX_IMBALANCE >= sum(map(len, streams)) / num_streams
    found = re.findall(r"(\d+) is", "\n".join(streams))
    expected = re.findall(r"(\d+) is", "\n".join(iter_documents(shards)))
    assert sorted(found) == sorted(expected) and found


def test_a_corpus_with_fewer_documents_than_streams_is_read_a_few_times_only(tmp_path):
    reads = []

    class Counted:
        def __init__(self, shard):
            self.shard, self.size = shard, shard.size

        def read(self, window, window_bytes):
            reads.append(window)
            return self.shard.read(window, window_bytes)

    for name, text in (("long", "word " * 100_000), ("short", "a word"), ("third", "a third")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    shards = [*map(Counted, file_shards("jsonl", str(tmp_path), "train"))]
    assert len(shards_for_streams(shards, 16, MIN_WINDOW_BYTES)) == 16
    assert len(reads) < 1_000


def windows_of(shard, window_bytes):
    """Yield the documents of each window of a shard."""
    for number in itertools.count():
        if (window := shard.read(number, window_bytes)) is None:
            return
        yield window.documents
