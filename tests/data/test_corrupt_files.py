"""Damaged data is named or made anew: never other text, never other numbers, never half a file."""

import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from benchmark_files import TEXT, prepare
from feeding import VOCABULARY, documents
from texts import TEXTS
from toy import damages

from experiments.cli import doctor
from experiments.runs.sources import Sources
from experiments.runs.stages import stages
from experiments.runs.vocabulary import find_vocabulary
from experiments.study.experiment import Experiment
from lm.batch import Batch
from lm.c4 import pages
from lm.config.base import DataError, SettingError, change, changes
from lm.data import batches
from lm.data.corpus import tfds as rows
from lm.data.corpus import token_cache
from lm.data.corpus.files import FileShard
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.shards import iter_documents
from lm.data.corpus.spec import corpus_shards
from lm.data.corpus.token_cache import make_encoded_corpus
from lm.data.pretraining import pretraining_rows
from lm.files import (
    atomic_file,
    json_with_checksum,
    matches_checksum,
    parse_with_checksum,
    write_with_checksum,
)
from lm.objectives.denoising import OBJECTIVES
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.tokenizers.tokenizer import TOKENIZER_ALGORITHMS, UNK

MINE = [f"text {i} " + "words and more words " * (i % 7) for i in range(40)]


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def folder(tmp_path):
    prepare("mine", tmp_path, ({"text": TEXT}, [{"text": text} for text in MINE], "train validation"))
    return tmp_path / "tfds" / "mine" / "1.0.0"


def shard(folder, split="train"):
    return next(folder.glob(f"*{split}*array_record*"))


def flip(path, place, bit=1):
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def damage(path, *numbers):
    """Flip a bit within the stored text of these records."""
    for number in numbers:
        flip(path, path.read_bytes().index(f"text {number} ".encode()) + 2)


@pytest.fixture
def stored(folder):
    """With records that are kept as they are, so that a test finds them."""
    from array_record.python.array_record_module import ArrayRecordWriter

    for split in ("train", "validation"):
        reader = ArrayRecordReader(str(shard(folder, split)))
        records = reader.read_all()
        reader.close()
        writer = ArrayRecordWriter(str(shard(folder, split)), "group_size:1,uncompressed")
        for text in MINE:  # in order
            writer.write(next(record for record in records if text.encode() + b"|" in record + b"|"))
        writer.close()
    rows.open_builder.cache_clear()
    return folder


def test_a_record_with_any_byte_changed_is_read_right_or_is_an_error_that_names_file_and_record(
    stored, tmp_path
):
    path = shard(stored)
    good = path.read_bytes()
    used = np.flatnonzero(np.frombuffer(good, np.uint8))
    reached, named = 0, 0
    for place in [*used[:: len(used) // 150], *range(0, len(good), len(good) // 40)]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        try:
            found = rows.prepared_rows("mine", "train", tmp_path)
        except DataError as error:  # the index of the records
            assert path.name in str(error)
            continue
        for number, text in enumerate(MINE[: len(found)]):
            try:
                assert found[number]["text"] == text
                reached += 1
            except DataError as error:
                assert f"record {number} (number {number} of {path.name})" in str(error)
                named += 1
    assert reached and named


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:70_000]), "cannot be opened"),
        (lambda path: path.write_bytes(b"no records " * 10_000), "cannot be opened"),
    ],
)
def test_a_missing_or_broken_file_is_named_before_anything_is_read(folder, tmp_path, break_it, message):
    break_it(shard(folder))
    for corrupt in ("stop", "skip"):
        with pytest.raises(
            DataError, match=rf"(?s)mine/1\.0\.0, split 'train'.*train\.array_record.*{message}"
        ):
            documents("tfds:mine", "train", tmp_path, corrupt)
    if message in ("is missing", "is empty"):  # lm doctor opens none of them
        assert message in doctor.damage("mine:1.0.0", tmp_path)
    assert len(rows.prepared_rows("mine", "validation", tmp_path)) == len(MINE)


def test_doctor_names_a_whole_set_as_a_setting_does_and_nothing_else(folder, tmp_path, capsys):
    (tmp_path / "cache").symlink_to(tmp_path)
    doctor.examine(tmp_path)
    assert "tfds:mine:1.0.0\n" in capsys.readouterr().out


def test_a_file_with_another_number_of_records_is_named(folder, tmp_path):
    about = folder / "dataset_info.json"
    about.write_text(about.read_text().replace('"40"', '"41"'))
    with pytest.raises(DataError, match="has 40 records, dataset_info.json counts 41"):
        rows.prepared_rows("mine", "train", tmp_path)


@pytest.mark.parametrize("form", ["pythonClassName", "type", "json"])
def test_a_set_that_names_code_outside_of_tfds_is_refused_and_the_code_does_not_run(
    folder, tmp_path, form, monkeypatch
):
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    about = json.loads((folder / "features.json").read_text())
    if form == "json":
        about = {**about, "jsonFeature": {"json": json.dumps({"text": {"type": "evil.Text", "content": {}}})}}
    else:
        about = {form: "evil.Text", "content": {}} if form == "type" else {**about, form: "evil.Text"}
    (folder / "features.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"'evil\.Text', code outside of TFDS"):
        rows.prepared_rows("mine", "train", tmp_path)
    assert not Path("ran").exists()


def test_corrupt_records_are_left_out_of_training_counted_and_never_of_evaluation(stored, tmp_path):
    whole = rows.prepared_rows("mine", "train", tmp_path)
    prints = [
        rows.prepared_rows("mine", "train", tmp_path, corrupt).fingerprint for corrupt in ("stop", "skip")
    ]
    assert prints == [whole.fingerprint] * 2  # nothing changes where nothing is corrupt
    damage(shard(stored), 0, 7, 8, 39)
    damage(shard(stored, "validation"), 3)
    left = rows.prepared_rows("mine", "train", tmp_path, "skip")
    assert left.skipped == (0, 7, 8, 39)
    assert [row["text"] for row in left] == [text for k, text in enumerate(MINE) if k not in left.skipped]
    assert documents("tfds:mine", "train", tmp_path, "skip") == [row["text"] for row in left]
    read = [shard.read(0, 1 << 20) for shard in corpus_shards("tfds:mine", "train", tmp_path, "skip")]
    assert [window.num_corrupt for window in read] == [4]
    assert rows.corrupt_records(rows.TfdsRows(stored, "train"), tmp_path) == left.skipped
    with pytest.raises(DataError, match="record 3 .*never out of evaluation"):
        documents("tfds:mine", "validation", tmp_path)


def test_a_corrupt_record_stops_the_encoding_of_a_corpus_and_leaves_nothing_behind(stored, tmp_path):
    damage(shard(stored), 7)
    place, lengths = tmp_path / "tokens", [len(text.encode()) for text in MINE]
    for corrupt in ("skip", "stop"):  # what one keeps the other does not read
        shards = corpus_shards("tfds:mine", "train", tmp_path, corrupt)
        made = replace(
            token_cache.make_encoded_corpus(shards, ByteTokenizer(100), place, 1), on_corrupt=corrupt
        )
        if corrupt == "skip":
            assert (len(made.first().tokens), made.first().num_corrupt) == (sum(lengths) - lengths[7], 1)
            kept = files(place)
        else:
            with pytest.raises(DataError, match="record 7 "):
                made.first()
    assert files(place) == kept


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_record_in_the_middle_of_training_arrives_as_it_is_named(stored, tmp_path, workers):
    damage(shard(stored), 20)
    stream = batches.stream(Lengths(rows.TfdsRows(stored, "train")), 0, 40, workers=workers)
    with pytest.raises(Exception, match=r"(?s)record 20 \(number 20 of mine-train\.array_record") as caught:
        list(stream)
    assert isinstance(caught.value, DataError)


class Lengths:
    """A batch function of rows."""

    def __init__(self, found):
        self.found = found

    def __call__(self, step, chosen):
        return Batch(labels=np.array([len(self.found[step]["text"])]))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_tokens_with_any_byte_changed_and_files_cut_short_are_read_right_or_made_anew(tmp_path, capsys):
    texts = TEXTS * 2  # more bytes than zipfile reads at once
    made = token_cache.in_memory_corpus(texts, ByteTokenizer(100), tmp_path)
    good, path = made.first(), made.path(0, 0)
    content, draw = path.read_bytes(), random.Random(0)
    broken = [content[: len(content) * k // 8] for k in range(8)]
    header = content.index(b"NUMPY")  # of the tokens: type and shape
    for place in [*draw.sample(range(len(content)), 100), *range(header, header + 80)]:
        other = bytes([content[place] ^ 1 << draw.randrange(8)])
        broken += [content[:place] + other + content[place + 1 :]]
    flags = content.index(b"PK\1\2") + 8
    broken.append(content[:flags] + b"\1" + content[flags + 1 :])  # as if encrypted
    for damaged in broken:
        path.write_bytes(damaged)
        again = token_cache.in_memory_corpus(texts, ByteTokenizer(100), tmp_path).first()
        assert np.array_equal(again.tokens, good.tokens) and np.array_equal(again.offsets, good.offsets)
    assert capsys.readouterr().out.count("is damaged, and is encoded again") > 150
    assert path.read_bytes() == content and not [*tmp_path.rglob("*.lock")]


def test_a_damaged_vocabulary_is_trained_anew(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    experiment = change(Experiment(), "data.corpus", f"text:{tmp_path / 'text.txt'}")
    experiment, said = change(experiment, "data.vocabulary_size", 45), []
    good = find_vocabulary(experiment, Sources(tmp_path), said.append)
    find_vocabulary(experiment, Sources(tmp_path), said.append)
    assert len(said) == 1
    flip(good.path, 1000)
    again = find_vocabulary(experiment, Sources(tmp_path), said.append)
    assert len(said) == 2
    assert again.fingerprint == good.fingerprint
    assert again.path == good.path


def test_vocabularies_with_and_without_byte_fallback_lie_beside_each_other(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS))
    experiment = change(Experiment(), "data.corpus", f"text:{tmp_path / 'text.txt'}")
    experiment = change(experiment, "data.vocabulary_size", 45 + 256)
    falling_back = find_vocabulary(change(experiment, "data.unknown", "bytes"), Sources(tmp_path), print)
    assert UNK not in falling_back.encode("75%")
    with pytest.raises(SettingError, match="data.vocabulary_size=301"):  # so many word pieces the text lacks
        find_vocabulary(experiment, Sources(tmp_path), print)


@pytest.mark.parametrize("kind", TOKENIZER_ALGORITHMS)
def test_a_vocabulary_of_each_kind_is_trained_on_the_corpus_that_it_names(kind, tmp_path):
    for name, texts in {"a": TEXTS, "b": [text.upper() for text in TEXTS]}.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts))
    size = 90 if kind == "wordpiece" else 45  # whose letters stand twice, with ## and without
    new = {"data.corpus": f"text:{tmp_path / 'a.txt'}", "data.vocabulary_size": size, "tuning.mixtures": ()}
    own = changes(Experiment(), new | {"data.vocabulary": kind})
    named = change(own, "data.vocabulary", f"{kind}:text:{tmp_path / 'b.txt'}")
    vocabularies = [find_vocabulary(experiment, Sources(tmp_path), print) for experiment in (own, named)]
    assert all(vocabulary.path.name.startswith(f"{kind}-{size}-") for vocabulary in vocabularies)
    for vocabulary, known, unknown in zip(vocabularies, ("fox", "FOX"), ("FOX", "fox"), strict=True):
        assert UNK not in vocabulary.encode(known) and UNK in vocabulary.encode(unknown)
    splits = [stages(experiment)[0].fingerprints(Sources(tmp_path)) for experiment in (own, named)]
    assert set(splits[1]) - set(splits[0]) == {"vocabulary train"}


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    write_with_checksum(tmp_path / "a", b"first")
    with pytest.raises(KeyError), atomic_file(tmp_path / "a") as file:
        file.write(b"half of the sec")
        file.flush()
        assert matches_checksum(tmp_path / "a")
        raise KeyError
    assert (tmp_path / "a").read_bytes() == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.sha256"]
    (tmp_path / "a").write_bytes(b"second")
    assert not matches_checksum(tmp_path / "a")


@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_an_interrupted_change_leaves_a_file_whole_with_old_or_new_contents(
    tmp_path, monkeypatch, interrupted
):
    path, count = tmp_path / "a", itertools.count(1)
    write_with_checksum(path, b"old")

    def replaces(*paths):
        if next(count) == interrupted:
            raise KeyboardInterrupt
        replace(*paths)

    replace = os.replace
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replaces)
        write_with_checksum(path, b"new")
    assert path.read_bytes() == (b"new" if interrupted == 3 else b"old") and matches_checksum(path)
    write_with_checksum(path, b"newer")
    assert matches_checksum(path)
    path.write_bytes(b"old")
    assert not matches_checksum(path)


def test_a_sealed_value_comes_back_as_it_was_or_its_file_is_named():
    value = {"a": [1, 2.5, None, "\u2028\ud800"], "b": {"c": {}, "d": float("nan")}}
    whole = json_with_checksum(value).encode()
    same = repr(parse_with_checksum(whole, "it"))
    assert same == repr(value)
    deep = b'{"sha256": "0", "a": ' + b"[" * 900 + b"]" * 900 + b"}"
    for data in (*damages(whole, random.Random(0), 200), b"[]", b"{}", deep):
        try:
            assert repr(parse_with_checksum(data or b"", "it")) == same
        except SettingError as error:
            assert str(error).startswith("it ")


ENCODE = """
import sys; from pathlib import Path; from lm.data.corpus import token_cache
from lm.tokenizers.sentencepiece import ByteTokenizer
from lm.data.corpus.shards import iter_documents
class Said(ByteTokenizer):
    def encode_batch(self, texts):
        print("encodes", flush=True)
        return super().encode_batch(texts)
token_cache.CHARACTERS_PER_CALL = 10_000
print("go", flush=True); sys.stdin.read(1)
made = token_cache.in_memory_corpus([f"{n} " * 50 for n in range(4000)], Said(100), Path(sys.argv[1])).first()
print(len(made.tokens), int(made.tokens.sum()))
"""


def encoder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", ENCODE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "go\n"
    return process


def test_processes_that_encode_at_once_or_are_killed_do_no_harm(tmp_path):
    first, second, killed = (encoder(tmp_path) for _ in range(3))
    killed.stdin.write("x")
    killed.stdin.close()
    assert killed.stdout.readline() == "encodes\n"
    for process in (first, second):
        process.stdin.write("x")
        process.stdin.close()
    killed.kill()
    found = [process.stdout.read().splitlines() for process in (first, second)]
    assert [first.wait(), second.wait(), bool(killed.wait())] == [0, 0, True]
    alone = encoder(tmp_path / "other").communicate("x")[0].splitlines()
    assert {lines[-1] for lines in found} == {alone[-1]}
    encoded = sum(lines.count("encodes") for lines in found)
    assert 0 < encoded <= alone.count("encodes"), "no window is encoded by both"


def read(path):
    found = list(pages.read_pages(pages.Piece(str(path), 0, os.path.getsize(path))))
    return [f for f in found if isinstance(f, pages.Page)], [f for f in found if isinstance(f, pages.Damage)]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[" * 100_000,
        b"null",
        b"3",
        b"NaN",
        b'{"text": NaN}',
        b'{"text": 1' + b"0" * 5000 + b"}",
        b'{"text": []}',
        b'{"text": "\xff"}',
        b"\xff\xfe",
        b'"text"',
        b'{"text": null}',
        b"x" * 5000,
        b'{"text": "a", "url": 3}',
    ],
)
def test_a_malformed_line_is_named_and_the_others_are_read(tmp_path, line, monkeypatch):
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 4096)
    for name, opened in (("a.jsonl", open), ("a.jsonl.gz", gzip.open)):
        with opened(tmp_path / name, "wb") as file:
            file.write(b'{"text": "first"}\n' + line + b'\n{"text": "last", "text": "twice"}\n')
        found, wrong = read(tmp_path / name)
        assert [page.text for page in found] == ["first", "twice"]
        assert [place.endswith("line 2") for place, _ in wrong] == [True]


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "", "1e3", "٣", "99999999999"])
def test_a_wet_record_of_no_sensible_length_is_named(tmp_path, length):
    whole = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 4\r\n\r\ntext\r\n\r\n"
    bad = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {length}\r\n\r\nlost\r\n\r\n"
    (tmp_path / "a.wet").write_text(bad + whole)
    found, wrong = read(tmp_path / "a.wet")
    assert [page.text for page in found] == ["text"]
    assert len(wrong) == 1


def test_a_gzip_that_is_cut_short_gives_what_is_before_and_is_named(tmp_path):
    content = gzip.compress(b"".join(b'{"text": "page %d"}\n' % n for n in range(20_000)))
    for end in (5, len(content) // 2, len(content) - 3):
        (tmp_path / "a.jsonl.gz").write_bytes(content[:end])
        found, wrong = read(tmp_path / "a.jsonl.gz")
        assert [page.text for page in found] == [f"page {n}" for n in range(len(found))]
        assert len(wrong) == 1
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    assert read(tmp_path / "a.jsonl.gz")[1]


def test_text_that_changed_since_it_was_listed_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("good text\n\n" * 2000)
    found = corpus_shards(f"text:{tmp_path / 'a.txt'}", "train", tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff" * 22_000)
    with pytest.raises(SettingError, match=r"a\.txt: byte"):
        [*iter_documents(found)]


def test_rows_do_not_depend_on_what_was_counted_while_corrupt_records_were_skipped(tmp_path):
    path, ends = tmp_path / "a.jsonl", 1_000  # bytes at both ends, by which the file is known
    whole = [json.dumps({"text": f"document {number} " * 50}) for number in range(400)]
    damaged = [*whole[:100], "x" * len(whole[100]), *whole[101:]]

    def made(on_corrupt, index_folder):
        shards = [FileShard((path,), "jsonl", ends, on_corrupt)]
        corpus = replace(make_encoded_corpus(shards, VOCABULARY, tmp_path / "kept", 1), on_corrupt=on_corrupt)
        sampler = CorpusSampler(corpus, 1, 3, index_folder=index_folder)
        settings = {"architecture": "encoder-decoder", "inputs_length": 32, "batch_size": 4}
        return pretraining_rows(sampler, OBJECTIVES["mass-style"], **settings)

    rows = np.arange(10_000, 10_004)
    path.write_text("\n".join(damaged))
    made("skip", tmp_path / "rows")(rows)
    path.write_text("\n".join(whole))
    resumed, counted_anew = made("stop", tmp_path / "rows")(rows), made("stop", None)(rows)
    assert (resumed.decoder.targets == counted_anew.decoder.targets).all()


@pytest.mark.parametrize("value", ["null", "3", '["a"]'])
def test_a_line_whose_text_is_no_string_is_named_with_what_it_holds(tmp_path, value):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{{"text": {value}}}\n')
    shown = re.escape(repr(json.loads(value)))
    with pytest.raises(DataError, match=f"the line at byte 17 .*its text is {shown}, and should be a string"):
        FileShard((path,), "jsonl", 1_000).read(0, 1 << 16)
    assert FileShard((path,), "jsonl", 1_000, "skip").read(0, 1 << 16) == (["good"], 1)
