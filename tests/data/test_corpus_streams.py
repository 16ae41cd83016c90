"""Laws of a corpus in shards: read in windows of any size, dealt to streams, encoded when needed and once."""

import gzip
import hashlib
import itertools
import json
import lzma
import platform
import random
import re
import subprocess
import sys
import time
import zlib
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from feeding import VOCABULARY, WORDS, Watched, rows_in_streams
from pyarrow import parquet

from experiments.runs import checks
from experiments.study.registry import build
from lm.config.base import DataError, SettingError
from lm.data.batches import stream
from lm.data.corpus import precompute
from lm.data.corpus import token_cache as encoding
from lm.data.corpus.files import FileShard, file_shards
from lm.data.corpus.prefetch import pretokenize_in_background
from lm.data.corpus.sampler import CorpusSampler, choose_num_streams, read_index
from lm.data.corpus.shards import (
    MAX_WINDOW_BYTES,
    InMemoryShard,
    WindowText,
    iter_documents,
    sample_documents,
)
from lm.data.corpus.spec import corpus_shards
from lm.data.corpus.tables import read_table
from lm.data.corpus.token_cache import EncodedCorpus
from lm.data.pretraining import pretraining_rows
from lm.objectives.denoising import OBJECTIVES
from lm.tokenizers.sentencepiece import ByteTokenizer


def text_of(batch):
    """Of mass-style, whose targets are the text."""
    ids = batch.decoder.targets
    return ids[batch.decoder.loss_weights > 0]


@pytest.mark.parametrize("name", ["mass-style", pytest.param("prefix-lm", marks=pytest.mark.slow)])
def test_hosts_read_the_shards_of_their_own_rows_and_no_others(tmp_path, name):
    read = []
    for host in range(4):
        shards = Watched.several()
        made = rows_in_streams(shards, tmp_path / str(host), name=name)
        for step in range(400):
            made(step, slice(2 * host, 2 * host + 2))
        read.append({shard.name for shard in shards if shard.read_windows})
    assert [len(names) for names in read] == [2] * 4
    assert set().union(*read) == set("01234567")


def test_the_first_batch_reads_a_window_or_two_of_each_stream(tmp_path):
    shards = Watched.several()
    rows_in_streams(shards, tmp_path)(0, slice(None))
    assert sum(len(set(shard.read_windows)) for shard in shards) <= 2 * 4
    assert sum(1 for shard in shards if shard.read_windows) == 4


def test_each_stream_has_its_text_once_an_epoch_and_another_order_in_the_next(tmp_path):
    made = rows_in_streams(Watched.several(), tmp_path)
    whole = np.sort(np.concatenate(VOCABULARY.encode_batch(WORDS)))
    indices = [made.row_source.reader.row_index(s, made.row_source.count_rows, "segments") for s in range(4)]
    rows = [index.count_epoch_rows(10**6) for index in indices]
    epochs = []
    for epoch in (0, 1):
        texts = []
        for number, count in enumerate(rows):
            nth = np.arange(epoch * count, (epoch + 1) * count)
            numbers = nth // 2 * 8 + number * 2 + nth % 2  # two rows of each batch are the stream's
            texts += [text_of(made.row_source(numbers))]
        epochs.append(np.concatenate(texts))
    for text in epochs:
        assert np.sort(text[text > 1]).tolist() == whole.tolist()
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("name", [pytest.param("mass-style", marks=pytest.mark.slow), "prefix-lm"])
def test_going_on_reads_nothing_before_and_gives_the_same_rows_whatever_the_notes_say(tmp_path, name):
    whole = rows_in_streams(Watched.several(), tmp_path / "a", name=name)
    expected = [whole(step, slice(None)) for step in range(700)]
    notes, folder = tmp_path / "notes", tmp_path / "b"
    first = rows_in_streams(Watched.several(), folder, notes=notes, name=name)
    for step in range(600):
        first(step, slice(None))
    files = sorted(notes.rglob("*.txt"))
    assert len(files) == 4
    kept = [path.read_text() for path in files]
    for change in (str, lambda text: text[:-9], lambda text: text.replace("1", "2"), lambda text: ""):
        for path, text in zip(files, kept, strict=True):
            path.write_text(change(text))
        shards = Watched.several()
        resumed = rows_in_streams(
            shards, tmp_path / f"c{change('1 2 3 4 5 6 7 8 9')}", notes=notes, name=name
        )
        batch = resumed(601, slice(None))
        assert all((value == expected[601].features()[key]).all() for key, value in batch.features().items())
        if change is str:
            assert sum(len(set(shard.read_windows)) for shard in shards) <= 4 * 3
    del first


def rows_from_epoch(epoch, folder, name):
    """Batches from the begin of an epoch on: the windows before it are told by notes."""
    rows_in_streams(Watched.several(), folder, notes=folder / "notes", name=name)(300, slice(None))
    for path in (folder / "notes").rglob("*.txt"):
        rows, place = next(read_index(path))
        numbers = " ".join(map(str, (1, *place._replace(epoch=epoch, index_in_epoch=0, tokens_before=0))))
        path.write_text(f"{numbers} {zlib.crc32(numbers.encode())}\n")
    return rows_in_streams(Watched.several(), folder, notes=folder / "notes", name=name)


EPOCHS = (126, 127, 128, 254, 255, 256, 10**6, 10**6 + 1)


# recorded when later epochs had no batches, but with mass-style, which concatenates documents
@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("prefix-lm", "f6e51834 79dd3be9"),
        ("deshuffling", "c9c720cf c9f55745"),
        ("mass-style", "8b4f92bd f40f5304 2b88d7c1 40d6de58 ae41508a 58eb3ee6 90cee8ac dc50fc2f"),
    ],
)
def test_every_epoch_has_its_own_batches_and_the_first_128_are_the_recorded_ones(tmp_path, name, recorded):
    hashes = []
    for epoch in EPOCHS:
        batch = rows_from_epoch(epoch, tmp_path / str(epoch), name)(1, slice(None))
        assert (batch.decoder.loss_weights.sum(1) > 0).all()
        joined = b"".join(values.tobytes() for _, values in sorted(batch.features().items()))
        hashes.append(hashlib.sha256(joined).hexdigest()[:8])
    assert len({*hashes}) == len(EPOCHS)
    assert hashes[: len(recorded.split())] == recorded.split()


def test_a_cut_corpus_repeats_its_first_tokens_and_needs_no_others(tmp_path):
    shards = Watched.several()
    made = rows_in_streams(shards, tmp_path, unique=4 * 300)
    texts = [text_of(made(step, slice(None))) for step in range(200)]
    words = np.concatenate(texts)
    assert sum(len(set(shard.read_windows)) for shard in shards) <= 4 * 2
    rows = -(-300 // 32)  # of a stream in an epoch, the last of which is short
    assert 200 * 2 % rows == 0
    assert (np.unique(words[words > 1], return_counts=True)[1] % (200 * 2 // rows) == 0).all()
    assert len(words[words > 1]) == 200 * 2 // rows * 4 * 300


def test_what_is_kept_is_not_read_again_and_no_more_is_kept_than_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "EVICTION_INTERVAL", 1)
    shards = Watched.several()
    first = EncodedCorpus(tuple(shards), VOCABULARY, tmp_path, 1000, 4).first()
    read = [len(shard.read_windows) for shard in shards]
    again = EncodedCorpus(tuple(shards), VOCABULARY, tmp_path, 1000, 4).first()
    assert again.tokens.tolist() == first.tokens.tolist()
    assert [len(shard.read_windows) for shard in shards] == read
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.npz"))
    most = size // 3 / 1e9
    small = EncodedCorpus(tuple(shards), VOCABULARY, tmp_path / "small", 1000, 4, max_gigabytes=most)
    assert small.first().tokens.tolist() == first.tokens.tolist()
    assert sum(path.stat().st_size for path in (tmp_path / "small").rglob("*.npz")) <= size // 3
    assert small.first().tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize("kind", ["text", "jsonl", "gz", "parquet"])
@pytest.mark.parametrize("size", [300, 5_000, MAX_WINDOW_BYTES])
def test_windows_of_any_size_in_any_order_hold_each_document_once(tmp_path, kind, size):
    documents = [f"{i} is a document of {'many ' * (i % 40)}words" for i in range(300)]
    if kind == "text":
        (tmp_path / "a.txt").write_text("\n\n".join(documents[:200]))
        for i, text in enumerate(documents[200:]):
            (tmp_path / f"b{i:03}.txt").write_text(text)
    elif kind == "parquet":
        table = pyarrow.table({"text": documents})
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    else:
        lines = "".join(
            json.dumps({"text": text}) + "\n\n" * (i % 2) + "\n" for i, text in enumerate(documents)
        )
        opened = gzip.open if kind == "gz" else open
        with opened(tmp_path / ("a.jsonl.gz" if kind == "gz" else "a.jsonl"), "wt") as file:
            file.write(lines)
    kind = "jsonl" if kind == "gz" else kind
    found = []
    for split in ("train", "validation"):
        for shard in corpus_shards(f"{kind}:{tmp_path}", split, tmp_path):
            windows = {}
            for number in itertools.count():
                if (window := shard.read(number, size)) is None:
                    break
                windows[number] = window.documents
            order = np.random.default_rng(0).permutation(len(windows)).tolist()
            assert {number: shard.read(number, size).documents for number in order} == windows
            assert shard.read(len(windows) + 3, size) is None
            found += sum(windows.values(), [])
    pieces = " ".join(" ".join(found).split()) if kind == "text" else sorted(found)
    assert sorted(pieces.split() if kind == "text" else pieces) == sorted(
        " ".join(documents).split() if kind == "text" else documents
    )


def test_damaged_lines_and_files_are_named_and_left_out_if_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": 3}\n{"text": "two"}\n' + '{"text": "more"}\n' * 50)
    with pytest.raises(DataError, match=r"a\.jsonl: the line at byte 16 .*data.corrupt_records='skip'"):
        corpus_shards(f"jsonl:{path}", "train", tmp_path)
    shards = corpus_shards(f"jsonl:{path}", "train", tmp_path, "skip")
    assert [shard.read(0, MAX_WINDOW_BYTES).num_corrupt for shard in shards] == [1]
    path.write_text('{"text": "one"}\n{"content": "two"}\n')
    with pytest.raises(DataError, match=r"byte 16 .*\(it has no such field\): mend it, or set"):
        corpus_shards(f"jsonl:{path}", "train", tmp_path)
    path.write_text('{"content": "one", "url": "x"}\n')
    with pytest.raises(
        DataError, match=r"\(it has content, url\): rename the field of the text, such as with jq"
    ):
        corpus_shards(f"jsonl:{path}", "train", tmp_path)
    whole = gzip.compress(b'{"text": "a line"}\n' * 40_000)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"b\.jsonl\.gz is damaged or cut off"):
        corpus_shards(f"jsonl:{tmp_path / 'b.jsonl.gz'}", "train", tmp_path)
    parquet.write_table(pyarrow.table({"words": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet should have one column 'text', not \['words'\]"):
        corpus_shards(f"parquet:{tmp_path / 'c.parquet'}", "train", tmp_path)
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "g.parquet")
    with pytest.raises(DataError, match=r"should have one column 'text', not \['text', 'text'\]"):
        corpus_shards(f"parquet:{tmp_path / 'g.parquet'}", "train", tmp_path)
    (tmp_path / "d.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"d\.parquet cannot be read as parquet"):
        corpus_shards(f"parquet:{tmp_path / 'd.parquet'}", "train", tmp_path)
    parquet.write_table(pyarrow.table({"text": [b"a", None]}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"e\.parquet: the column 'text' should hold text, not bytes"):
        corpus_shards(f"parquet:{tmp_path / 'e.parquet'}", "train", tmp_path)
    _, *buffers = pyarrow.array([b"\xff", b"a"]).buffers()
    latin = pyarrow.StringArray.from_buffers(2, *buffers)
    parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"f\.parquet cannot be read as parquet: .*utf-8"):
        corpus_shards(f"parquet:{tmp_path / 'f.parquet'}", "train", tmp_path)


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_with_any_byte_changed_is_named_as_a_corpus_and_as_a_table(
    tmp_path, ending, compress
):
    path = tmp_path / f"a.jsonl{ending}"
    words = random.Random(0).choices(WORDS, k=2_000)
    whole = compress(b"".join(b'{"text": "%s"}\n' % word.encode() for word in words))
    for place in range(10, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        for read in (lambda: file_shards("jsonl", str(path), "train"), lambda: read_table(path)):
            with pytest.raises(DataError, match=rf"a\.jsonl{ending}\b"):
                read()


def test_a_compressed_file_that_was_replaced_is_read_anew_from_any_window(tmp_path):
    path, windows = tmp_path / "a.jsonl.gz", []
    for word in ("old", "new"):
        lines = "".join(f'{{"text": "{word} text {number}"}}\n' for number in range(100))
        (tmp_path / "draft").write_bytes(gzip.compress(lines.encode()))
        (tmp_path / "draft").replace(path)
        (shard,) = file_shards("jsonl", str(path), "train")
        windows.append(shard.read(len(windows), 1_000).documents)
    assert {text.split()[0] for text in windows[0]} == {"old"}
    assert {text.split()[0] for text in windows[1]} == {"new"}


def test_half_a_character_in_json_is_read_as_a_mark_that_any_tokenizer_takes(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rf'{{"text": "cut \ud83d in {number}"}}' for number in range(50)))
    (shard,) = corpus_shards(f"jsonl:{path}", "train", tmp_path)
    assert all(text.startswith("cut ? in ") for text in shard.read(0, MAX_WINDOW_BYTES).documents)


FULL = """
import resource, sys; from pathlib import Path
from lm.data.corpus import token_cache
from lm.tokenizers.sentencepiece import ByteTokenizer
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # of a file: as a full disk has it
try:
    token_cache.in_memory_corpus(["word " * 10_000], ByteTokenizer(100), Path(sys.argv[1])).first()
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing(tmp_path):
    ran = subprocess.run([sys.executable, "-B", "-c", FULL, tmp_path], capture_output=True, text=True)
    assert "File too large" in ran.stdout and str(tmp_path) in ran.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], ran.stderr


def test_a_sample_is_of_all_of_a_corpus_and_reads_a_part_of_it():
    shards = Watched.several(80)
    sample = [*itertools.islice(sample_documents(shards), 40)]
    assert sum(1 for shard in shards if shard.read_windows) <= 20
    numbers = [int(text.split()[1]) for text in sample]
    assert min(numbers) < 100 and max(numbers) > 300
    assert sorted(sample_documents(Watched.several(80))) == sorted(WORDS)


@pytest.mark.parametrize("ending", ["txt", "jsonl", "jsonl.gz", "parquet"])
def test_a_sample_that_is_read_to_its_end_has_each_document_of_the_files_once(tmp_path, ending):
    texts = [f"document {i}, whose words are many and much alike" for i in range(1_400)]  # 1.1 to 1.4 windows
    path = tmp_path / f"a.{ending}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if ending == "parquet":
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, path, row_group_size=100, compression="zstd")
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text("\n\n".join(texts) if ending == "txt" else lines)
    kind = {"txt": "text", "parquet": "parquet"}.get(ending, "jsonl")
    for split in ("train", "validation"):
        shards = corpus_shards(f"{kind}:{path}", split, tmp_path)
        documents = sorted(iter_documents(shards))
        assert documents and sorted(sample_documents(shards)) == documents


def test_the_rows_of_an_epoch_are_counted_from_its_start_wherever_rows_were_looked_up_before(tmp_path):
    def index():
        made = rows_in_streams(Watched.several(), tmp_path / "tokens", notes=tmp_path / "notes")
        reader = made.row_source.reader
        return reader.row_index(0, reader.count_segments, "segments")

    found = index()
    count = found.count_epoch_rows(10**6)
    found.find(4 * count)
    for row in (0, count - 1, count, 2 * count + 1, 3 * count + count // 2):
        resumed = index()
        resumed.find(row)
        assert resumed.count_epoch_rows(10**6) == count
        assert resumed.count_epoch_rows(count - 1) == count - 1


@pytest.mark.parametrize(
    ("wanted", "batch", "size", "count"),
    [(0, 128, 1e9, 16), (0, 12, 1e9, 4), (0, 128, 3e5, 4), (6, 12, 1, 6)],
)
def test_streams_divide_a_batch_and_are_few_where_there_is_little(wanted, batch, size, count):
    assert choose_num_streams(wanted, batch, int(size)) == count


def test_streams_that_divide_no_batch_are_refused():
    with pytest.raises(SettingError, match="data.streams=5 should divide the 12 sequences of a batch"):
        choose_num_streams(5, 12, 10**9)


@pytest.mark.parametrize("batch_size", [2, 10])
def test_a_batch_that_its_streams_do_not_divide_is_refused_before_anything_is_read(tmp_path, batch_size):
    shards = Watched.several()
    sampler = rows_in_streams(shards, tmp_path).row_source.reader.sampler
    settings = {"architecture": "encoder-decoder", "inputs_length": 32, "batch_size": batch_size}
    with pytest.raises(SettingError, match=f"batch_size={batch_size} should be a multiple of .* 4 streams"):
        pretraining_rows(sampler, OBJECTIVES["mass-style"], **settings)
    assert not any(shard.read_windows for shard in shards)


def test_a_stream_without_text_is_refused_with_the_mend(tmp_path):
    made = rows_in_streams([InMemoryShard(("only one",))], tmp_path)
    with pytest.raises(SettingError, match="no text to train on in stream .* of 4.*data.streams lower"):
        made(0, slice(None))


def test_the_documents_of_a_window_are_those_of_its_shard():
    assert [*iter_documents([InMemoryShard(tuple(WORDS))])] == WORDS
    assert isinstance(InMemoryShard(("a",)).read(0, 1), WindowText)


@pytest.mark.parametrize("change", ["appended", "cut", "missing"])
def test_a_shard_that_is_not_what_it_was_is_named_and_refused(tmp_path, change):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {i}"}}\n' for i in range(50)))
    shards = corpus_shards(f"jsonl:{tmp_path}/*.jsonl", "train", tmp_path)
    corpus = EncodedCorpus(shards, VOCABULARY, tmp_path / "kept", 1000, 1)
    assert corpus.read(0, 0) is not None
    path = tmp_path / "b.jsonl"
    whole = path.read_text()
    if change == "missing":
        path.unlink()
    else:
        path.write_text(whole + '{"text": "more"}\n' if change == "appended" else whole[: len(whole) // 2])
    assert corpus.read(0, 1) is not None or corpus.read(2, 0) is not None
    with pytest.raises(DataError, match=r"b\.jsonl (has changed|cannot be read)"):
        corpus.read(1, 0)


@pytest.mark.parametrize("name", ["mass-style", "prefix-lm"])
def test_another_number_of_hosts_goes_on_with_the_same_data(tmp_path, name):
    whole, step = rows_in_streams(Watched.several(), tmp_path / "a", name=name), 100
    for hosts in (1, 4, 2):
        parts = []
        for host in range(hosts):
            share = 8 // hosts
            made = rows_in_streams(Watched.several(), tmp_path / "b", notes=tmp_path / "notes", name=name)
            rows = slice(host * share, (host + 1) * share)
            parts.append([*stream(made, step, step + 20, rows=(rows,))])
        for nth in range(20):
            expected = whole(step + nth, slice(None))
            for key, values in expected.features().items():
                assert (np.concatenate([part[nth].features()[key] for part in parts]) == values).all()
        step += 20


def test_a_part_that_another_process_has_claimed_is_left_to_it_while_that_runs(tmp_path):
    corpus = EncodedCorpus((InMemoryShard(tuple(WORDS)),), VOCABULARY, tmp_path, 1000, 1)
    task = precompute.WindowRange(0, 0, 3)
    claim = corpus.path(0, 0).with_suffix(".claim")
    assert precompute.try_claim(claim)
    assert precompute.encode_windows(corpus, task) is None and not corpus.is_cached(0, 0)
    dead = subprocess.Popen(["true"])
    dead.wait()
    claim.write_text(f"{platform.node()} {dead.pid}")
    assert precompute.encode_windows(corpus, task) == 3 and corpus.is_cached(0, 2) and not claim.exists()
    claim.write_text(f"{platform.node()}-other {dead.pid}")
    assert precompute.encode_windows(corpus, task) is None


def test_what_is_to_be_encoded_ahead_is_what_the_streams_read_first_and_as_much_as_is_asked_for(tmp_path):
    shards = [InMemoryShard(tuple(WORDS[i::40]), str(i)) for i in range(40)]  # each less than a window
    size = sum(shard.size for shard in shards)
    for window in (200, 10_000):
        corpus = EncodedCorpus(tuple(shards), VOCABULARY, tmp_path / str(window), window, 4)
        tasks = precompute.window_ranges(CorpusSampler(corpus, 4, 3), size // 2)
        stored = sum(shards[number].size for number in {task.shard for task in tasks})
        assert size // 2 <= stored < size * 0.7
        first = [CorpusSampler(corpus, 4, 3).shard_order(stream, 0)[0] for stream in range(4)]
        assert [task.shard for task in tasks[:4]] == first


def test_the_cost_of_a_corpus_is_estimated_from_several_windows(tmp_path):
    shards = [InMemoryShard(tuple(WORDS[i::40]), str(i)) for i in range(40)]
    corpus = EncodedCorpus(tuple(shards), VOCABULARY, tmp_path, 10_000, 4)
    sampler = CorpusSampler(corpus, 1, 3)
    # the shard that is read first has characters of three bytes, each a token or several
    first = sampler.shard_order(0, 0)[0]
    shards[first] = InMemoryShard(("\N{SNOWMAN}" * 300,) * len(WORDS[first::40]), str(first))
    corpus = EncodedCorpus(tuple(shards), VOCABULARY, tmp_path, 10_000, 4)
    true = sum(
        len(precompute.encode_documents(shard.read(0, 10_000).documents, VOCABULARY).tokens)
        for shard in shards
    )
    estimated = precompute.estimate_cost(CorpusSampler(corpus, 1, 3), None)
    assert true / 2 < estimated.tokens < 2 * true
    part = precompute.estimate_cost(CorpusSampler(corpus, 1, 3), estimated.tokens // 2)
    assert part.tokens == estimated.tokens // 2
    assert part.bytes_read == pytest.approx(estimated.bytes_read / 2, rel=0.01)


@pytest.mark.slow
def test_processes_that_encode_ahead_keep_what_the_streams_read_next(tmp_path):
    shards = [InMemoryShard(tuple(WORDS[i::8]), str(i)) for i in range(8)]
    made = rows_in_streams(shards, tmp_path / "kept", notes=tmp_path / "notes")
    reading = made.row_source.reader
    notes = {number: reading.index_file(number, made.row_source.row_index_key) for number in range(4)}
    made(0, slice(None))
    with pretokenize_in_background(reading.sampler, notes, 2):
        deadline = time.monotonic() + 120
        while len([*(tmp_path / "kept").rglob("*.npz")]) < 4 * 3 and time.monotonic() < deadline:
            time.sleep(0.1)
    watched = Watched.several()
    again = rows_in_streams(watched, tmp_path / "kept", notes=tmp_path / "notes")
    alone = rows_in_streams(Watched.several(), tmp_path / "alone")
    for step in range(12):
        batch, expected = again(step, slice(None)), alone(step, slice(None))
        assert all((value == expected.features()[key]).all() for key, value in batch.features().items())
    assert not any(shard.read_windows for shard in watched)


def test_damaged_text_ends_the_tokenizing_ahead_of_its_stream_alone_and_prints_nothing(tmp_path, capfd):
    (tmp_path / "damaged.jsonl").write_text("no JSON")
    damaged = FileShard((tmp_path / "damaged.jsonl",), "jsonl", 1_000)
    corpus = EncodedCorpus((damaged, InMemoryShard(tuple(WORDS))), VOCABULARY, tmp_path / "kept", 1000, 2)
    sampler = CorpusSampler(corpus, 2)
    with pretokenize_in_background(sampler, {0: None, 1: None}, 1):
        deadline = time.monotonic() + 60
        while len([*(tmp_path / "kept").rglob("*.npz")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert [corpus.is_cached(1, window) for window in range(3)] == [True, True, False]
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(DataError, match="damaged.jsonl: the line at byte 0"):
        next(sampler.windows(0))


@pytest.mark.slow
def test_after_a_corpus_is_prepared_nothing_is_read_of_it(tmp_path):
    made = rows_in_streams([InMemoryShard(tuple(WORDS[i::8]), str(i)) for i in range(8)], tmp_path / "kept")
    done = []
    assert precompute.pretokenize(made.row_source.reader.sampler, None, 2, done.append) == []
    assert sum(done) == len([*(tmp_path / "kept").rglob("*.npz")]) - 8  # behind each shard its end is kept
    watched = Watched.several()
    again = rows_in_streams(watched, tmp_path / "kept")
    for step in range(12):
        again(step, slice(None))
    assert not any(shard.read_windows for shard in watched)


def test_a_disk_that_is_too_small_for_the_encoded_text_is_told_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    large = SimpleNamespace(size=10**12)
    corpus = SimpleNamespace(shards=(large,), folder=tmp_path / "tokens")
    prepared = SimpleNamespace(train=corpus, vocabulary=VOCABULARY, cache=tmp_path)
    base = build("t5/1-baseline/baseline", "base")
    with pytest.raises(SettingError, match=r"will keep 69 GB .* where 1 GB are free: .*data.cache_size"):
        checks.check_disk_space(base, prepared)
    checks.check_disk_space(build("t5/1-baseline/baseline", "base", {"data.cache_size": 0.9}), prepared)
    checks.check_disk_space(build("t5/1-baseline/baseline", "nano"), prepared)


def test_the_room_for_encoded_text_is_that_of_all_that_is_read_in_the_tokens_of_the_vocabulary(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))

    def needed(changes, corpus_bytes, vocabulary=VOCABULARY):
        corpus = SimpleNamespace(shards=(SimpleNamespace(size=corpus_bytes),), folder=tmp_path / "tokens")
        prepared = SimpleNamespace(train=corpus, vocabulary=vocabulary, cache=tmp_path)
        with pytest.raises(SettingError) as error:
            checks.check_disk_space(build("t5/1-baseline/baseline", "base", changes), prepared)
        return re.search(r"will keep (\d+) GB", str(error.value))[1]

    # 568 tokens of text in each row, of which inputs with sentinels for the spans have 512
    assert needed({"objective.noise": "spans"}, 10**12) == "76"
    assert needed({"objective.noise": "spans", "data.repeats": 4}, 10**12) == "17"
    # two bytes for each byte of the text, or for each word piece of about four
    assert needed({}, 10**10, ByteTokenizer(100)) == "20"
    assert needed({}, 10**10, SimpleNamespace(vocab_size=32_100)) == "5"
