"""Files that others wrote: each works, or is one clear error; none runs code, ends the process or fills the
memory.
"""

import ast
import base64
import copy
import json
import os
import re
import shutil
import struct
import time
from pathlib import Path

import pytest
import tokenizers
from benchmark_files import SETS, TEXT, prepare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import FILES, GOLDEN
from trained_tokenizers import TEXTS, byte_pairs

from experiments.evaluate.tasks import RowSelection, score_file
from experiments.runs.paths import load_settings
from experiments.study.experiment import BASELINE, Experiment
from lm.c4 import pages
from lm.config.base import SettingError, from_json, leaves, to_json
from lm.convert import load
from lm.convert.families import FAMILIES
from lm.data.corpus import tfds as rows
from lm.files import json_with_checksum
from lm.tokenizers.huggingface import load_pretrained_tokenizer
from lm.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece

GOLDENS = ["t5_v1_0", "bart", "gpt2", "llama_gqa", "gpt_neo", "qwen2", "longformer", "marian_sinusoidal"]
# what one example may add to the memory [bytes], and how long it may take [seconds]
MOST, LONGEST = 1 << 29, 20.0
WEIRD = [
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**15, 10**400, 0.5, 1e300, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "/etc/passwd", "\0", "\ud800", [], [0], [2**63, 2], [[]], {}, {"a": 1}),
]
each_count = pytest.mark.parametrize(
    "count", [12, pytest.param(300, marks=pytest.mark.slow)], ids=["few", "many"]
)


def places(value, path=()):
    found = [path] if path else []
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += places(value[key], (*path, key))
    return found


@st.composite
def changed(draw, value):
    """A copy of a JSON value in which some places have another value, are gone or are there twice."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        if not (paths := places(value)):
            break
        *path, last = draw(st.sampled_from(paths))
        inner = value
        for key in path:
            inner = inner[key]
        what = draw(st.integers(0, 5))
        if what == 0:
            del inner[last]
        elif what == 1 and isinstance(inner, dict):
            inner[draw(st.sampled_from([str(key) for key in inner] + ["other"]))] = inner.pop(last)
        else:
            inner[last] = copy.deepcopy(draw(st.sampled_from(WEIRD) | st.integers(-3, 600)))
    return value


def written(value):
    return changed(value).map(lambda value: json.dumps(value).encode())


@st.composite
def broken(draw, content):
    """Bytes of which some are others, inserted or gone."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)) | st.integers(0, min(200, len(content))))
        end = draw(st.sampled_from([start, start + 1, start + 1, start + 9, len(content)]))
        content[start:end] = draw(st.binary(min_size=1, max_size=3) | st.just(b""))
    return bytes(content)


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measures memory by Linux's /proc"
)


def memory():
    """Bytes in use, and the most that were since ``forget``, by anything in this process."""
    status = Path("/proc/self/status").read_text()
    return [1024 * int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) for name in ("VmRSS", "VmHWM")]


def forget():
    # sets the most memory in use back to what is now (man proc)
    Path("/proc/self/clear_refs").write_text("5")


def fuzz(count, path, contents, use):
    """``use()`` works, or is a SettingError, in bounded memory and time, for ``count`` contents of a file."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count < 100,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(contents)
    def check(content):
        path.write_bytes(content)
        forget()
        (before, _), start = memory(), time.perf_counter()
        try:
            use()
        except SettingError as error:
            assert str(error)
        assert memory()[1] - before < MOST
        assert time.perf_counter() - start < LONGEST

    check()


@pytest.fixture(params=GOLDENS)
def folder(request, tmp_path):
    return shutil.copytree(
        GOLDEN / request.param, tmp_path / "in", ignore=shutil.ignore_patterns("golden.npz")
    )


def split_header(content):
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


@each_count
def test_a_model_is_loaded_from_a_file_of_tensors_of_any_kind_or_that_is_refused(folder, count):
    path = folder / "model.safetensors"
    header, tensors = split_header(path.read_bytes())

    def joined(header):
        text = json.dumps(header).encode(errors="surrogatepass")
        return struct.pack("<Q", len(text)) + text + tensors

    sizes = st.sampled_from([0, 1, 2**20, 2**63, 2**64 - 1]).map(
        lambda n: struct.pack("<Q", n) + joined(header)[8:]
    )
    fuzz(count, path, changed(header).map(joined) | broken(joined(header)) | sizes, lambda: load(folder))


@pytest.mark.parametrize(
    "entry",
    [
        ("F32", [2], [0, 4]),
        ("F32", [2], [4, 8]),
        ("F32", [2], [8, 0]),
        ("F32", [2], [-8, 0]),
        ("F32", [-2], [0, 8]),
        ("F32", [2**62, 2**62], [0, 8]),
        ("F32", [2], [8, 16]),
        ("OBJ", [2], [0, 8]),
    ],
)
def test_a_tensor_that_lies_outside_of_its_file_or_upon_another_is_refused(tmp_path, entry):
    entry = dict(zip(("dtype", "shape", "data_offsets"), entry, strict=True))
    shutil.copy(GOLDEN / "gpt2" / "config.json", tmp_path)
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": entry}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(SettingError, match="model.safetensors"):
        load(tmp_path)


OUTSIDE = ["../a", "/etc/passwd", ".", "in/../a"]


@pytest.mark.parametrize("file", [*OUTSIDE, "..", "", "\0", "\ud800", "gone"])
def test_an_index_names_files_of_its_folder_only(tmp_path, file):
    folder = shutil.copytree(GOLDEN / "gpt2", tmp_path / "in")
    (folder / "model.safetensors").rename(tmp_path / "a")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    said = "lies outside of the folder" if file in OUTSIDE else ""
    with pytest.raises(SettingError, match=rf"cannot be read:\n  {re.escape(file)}: {said}"):
        load(folder)


@each_count
def test_a_config_of_any_kind_describes_a_model_or_is_refused(folder, count):
    path = folder / "config.json"
    good = path.read_bytes()
    fuzz(count, path, written(json.loads(good)) | broken(good), lambda: load(folder))


NO_ARRAY = "max_position_embeddings relative_attention_max_distance window_size max_window_layers".split()


@pytest.mark.parametrize("size", [10**6, 10**15, 10**400], ids=["million", "vast", "endless"])
def test_a_model_far_larger_than_its_files_is_refused_before_it_is_made(folder, size):
    theirs = json.loads((folder / "config.json").read_text())
    names = {name for field in FAMILIES[theirs["model_type"]].fields for name in field.names} & theirs.keys()
    for name in [name for name in names if type(theirs[name]) is int and "token_id" not in name]:
        (folder / "config.json").write_text(json.dumps(theirs | {name: size}))
        start = time.perf_counter()
        try:
            load(folder)
            assert name in NO_ARRAY
        except SettingError:
            assert time.perf_counter() - start < LONGEST


@each_count
def test_settings_of_any_kind_survive_json_and_have_no_nan_or_are_refused(tmp_path, count):
    good, path = json.loads(to_json(BASELINE)), tmp_path / "settings.json"

    def use():
        experiment = load_settings(tmp_path)
        assert from_json(Experiment, to_json(experiment)) == experiment
        assert all(value == value for _, value in leaves(experiment))

    fuzz(
        4 * count,
        path,
        changed(good).map(lambda value: json_with_checksum(value).encode())
        | broken(json_with_checksum(good).encode()),
        use,
    )


def test_a_setting_that_is_no_number_is_refused():
    with pytest.raises(SettingError, match="norm.epsilon"):
        from_json(Experiment, to_json(BASELINE).replace('"epsilon": 1e-06', '"epsilon": NaN'))


@each_count
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.wet", "a.txt"])
def test_a_crawl_of_any_kind_is_pages_and_damage_that_can_be_written(tmp_path, name, count):
    path = tmp_path / name
    lines = b'{"text": "one page", "url": "a.b"}\n\n{"text": "\\ud800 two"}\n' * 3
    wet = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 4\r\n\r\ntext\r\n\r\n" * 3

    def use():
        for found in pages.read_pages(pages.Piece(str(path), 0, os.path.getsize(path))):
            assert isinstance(found, pages.Page | pages.Damage)
            str(found).encode()

    fuzz(count, path, broken(lines if "json" in name else wet), use)


@each_count
def test_records_of_any_kind_are_those_that_were_written_or_are_refused(tmp_path, count):
    texts = [f"text {i} " * (1 + i % 5) for i in range(12)]
    prepare("mine", tmp_path, ({"text": TEXT}, [{"text": text} for text in texts], "train"))
    path = next(tmp_path.glob("tfds/mine/1.0.0/*array_record*"))
    good = sorted(row["text"] for row in rows.prepared_rows("mine", "train", tmp_path))

    def use():
        assert sorted(row["text"] for row in rows.prepared_rows("mine", "train", tmp_path)) == good

    content = path.read_bytes()
    bits = st.tuples(
        st.integers(0, 1200) | st.integers(65_500, 65_600) | st.integers(0, len(content) - 1),
        st.integers(0, 7),
    )
    flipped = bits.map(
        lambda at: content[: at[0]] + bytes([content[at[0]] ^ 1 << at[1]]) + content[at[0] + 1 :]
    )
    cut = st.integers(0, len(content)).map(lambda end: content[:end])
    fuzz(4 * count, path, flipped | broken(content) | cut, use)


@each_count
@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_with_a_description_of_any_kind_a_set_has_all_its_rows_or_is_refused(tmp_path, name, count):
    prepare("mine", tmp_path, ({"text": TEXT}, [{"text": "text"}] * 3, "train"))
    path = tmp_path / "tfds" / "mine" / "1.0.0" / name
    good = path.read_bytes()

    def use():
        rows.open_builder.cache_clear()
        assert len(list(rows.prepared_rows("mine", "train", tmp_path))) == 3

    fuzz(4 * count, path, written(json.loads(good)) | broken(good), use)


def word_pieces(path):
    ids = {
        token: k
        for k, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "."])
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.save(str(path))


def used(folder):
    found = load_pretrained_tokenizer(folder, 300)
    ids = [*found.encode(TEXTS[1]), 0, 1, 2, found.vocab_size - 1]
    found.decode(ids)
    assert len(found.word_starts) == len(found.sentence_ends) == found.vocab_size
    if hasattr(found, "framed"):
        found.encode_with_template(*TEXTS[:2])


@each_count
@pytest.mark.parametrize("make", [byte_pairs, word_pieces])
def test_a_tokenizer_of_any_kind_is_of_one_size_throughout_or_is_refused(tmp_path, make, count):
    path = tmp_path / "tokenizer.json"
    make(path)
    good = path.read_bytes()
    fuzz(8 * count, path, written(json.loads(good)) | broken(good), lambda: used(tmp_path))


@each_count
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer_config.json", "vocab.json"])
def test_pieces_of_any_kind_are_of_one_size_throughout_or_are_refused(tmp_path, name, count):
    folder = tmp_path / "in"
    train_sentencepiece(TEXTS * 50, 28, folder / "spiece.model")
    good = (folder / "spiece.model").read_bytes()
    if name == "vocab.json":
        ids = load_pretrained_tokenizer(folder, 28).vocab
        (folder / "spiece.model").rename(folder / "source.spm")
        shutil.copy(folder / "source.spm", folder / "target.spm")
    value = {"extra_ids": 10, "do_lower_case": True} if name == "tokenizer_config.json" else None
    value = ids if name == "vocab.json" else value

    def use():
        used(folder)
        if name == "spiece.model":
            vocabulary = SentencePieceTokenizer(folder / name, 100)
            vocabulary.decode(vocabulary.encode_batch(TEXTS)[0])
            assert len(vocabulary.word_starts) == vocabulary.vocab_size

    pieces = broken(good[-900:]).map(lambda end: good[:-900] + end)  # before them, the table of normalisation
    fuzz(4 * count, folder / name, broken(good) | pieces if value is None else written(value), use)


@each_count
def test_answers_of_any_kind_are_scored_or_refused(tmp_path, count):
    prepare("cnn_dailymail", tmp_path / "cache", SETS["cnn_dailymail"])
    path = tmp_path / "answers.jsonl"

    two = changed(["Ann ran.", {"prediction": "Bea"}]).map(
        lambda lines: "\n".join(map(json.dumps, lines)).encode()
    )
    contents = two | broken(b'"Ann ran."\n{"prediction": "Bea"}\n') | st.just(b"[" * 100_000)
    fuzz(2 * count, path, contents, lambda: score_file(path, "cnn_dailymail", RowSelection(runs=tmp_path)))


def dangerous(node):
    """What runs or unpickles what it reads."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return {name.split(".")[0] for name in names} & {
            "pickle",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
            "yaml",
        }
    if isinstance(node, ast.Call):
        if any(keyword.arg in ("allow_pickle", "shell") for keyword in node.keywords):
            return {"allow_pickle or shell"}
        return {getattr(node.func, "id", None)} & {"eval", "exec", "compile", "__import__"}
    return set()


def test_nothing_runs_or_unpickles_what_it_reads():
    found = {path: set().union(*map(dangerous, ast.walk(ast.parse(path.read_text())))) for path in FILES}
    assert not {path: names for path, names in found.items() if names}


def in_sequence(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": [*steps]}}


def replacements(pattern, content, times):
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


def template(single, special_tokens):
    made = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special_tokens}
    return {"post_processor": made}


def framed(ids, pieces):
    token = {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}
    return template([{"SpecialToken": {"id": "a", "type_id": 0}}] * pieces, {"a": token})


def repeated(times):
    return template([{"Sequence": {"id": "A", "type_id": 0}}] * times, {})


def mapped(length, times):
    charsmap = base64.b64encode(bytes(4) + b"a" * length + b"\0").decode()  # no trie, and one replacement
    return [{"type": "Precompiled", "precompiled_charsmap": charsmap}] * times


@pytest.mark.parametrize(
    "part, message",
    [
        (
            in_sequence(*replacements({"String": "a"}, "a" * 1_000, 5)),
            r"make a text up to 1e\+15 times longer; at most 100",
        ),
        (in_sequence(*replacements({"Regex": ""}, "ab", 9)), "times longer"),
        (framed(30_000, 30_000), "adds 900000000 characters or ids to a text"),
        (repeated(5_000), r"make a text up to 5e\+03 times longer; at most 100"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "adds 1000000 characters"),
        ({"normalizer": {"type": "Replace", "pattern": 7}}, "has a malformed 'Replace'"),
        (in_sequence(*mapped(999, 2)), r"make a text up to 9.98e\+05 times longer; at most 1000"),
        (
            in_sequence(*replacements({"String": "a"}, "a" * 100, 1), *mapped(999, 1)),
            r"make a text up to 9.99e\+04 times longer; at most 1000",
        ),
    ],
)
def test_a_tokenizer_that_would_fill_the_memory_is_refused_before_it_is_made(part, message, tmp_path):
    byte_pairs(tmp_path / "tokenizer.json")
    theirs = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(theirs | part))
    began = time.monotonic()
    with pytest.raises(SettingError, match=message):
        load_pretrained_tokenizer(tmp_path, 300)
    assert time.monotonic() - began < LONGEST
