"""`lm data clean` on Apache Beam's local runner: the bytes that the pool of one machine writes."""

import gzip
import importlib.util
import json
import random
import sys

import numpy as np
import pytest

from experiments.cli import data_clean as command
from lm.c4 import filters, pages, passes
from lm.config.base import SettingError

needs_beam = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None, reason="Apache Beam is an extra: make test-beam"
)
DIRECT = "runner=DirectRunner"
OFF = ("language",)  # whose model takes a second to load


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Parts of 2 kB in which most sentences, and some pages, occur in several parts; four damaged places."""
    rng, folder = random.Random(0), tmp_path / "source"
    folder.mkdir()
    sentences = [f"This is the sentence with number {number} of them." for number in range(150)]
    texts = ["\n".join(rng.choices(sentences, k=rng.randrange(3, 9))) for _ in range(100)]
    rows = [{"text": text, "url": f"https://{rng.choice('abc')}.org/"} for text in texts]
    lines = [json.dumps(row) for row in rows] + ["no JSON", '{"url": "a.org"}']
    rng.shuffle(lines)
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("\n\n".join(rng.sample(texts, 10)))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[:20]).encode())[:-12])
    (folder / "d.txt").write_bytes(b"\xff")
    monkeypatch.setattr(pages, "PART_BYTES", 2_000)
    assert len(pages.find_parts(folder)) > 10
    return folder


def cleaned_files(source, runs, **settings):
    options = {"without": OFF, "validation": 0.2} | settings
    command.data_clean(source, command.CleanOptions("pages", **options), source.parent / runs)
    folder = source.parent / runs / "cache" / "tfds" / "pages" / "1.0.0"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@needs_beam
@pytest.mark.parametrize(
    "settings",
    [
        {"deduplicate": "spans"},
        {"deduplicate": "lines"},
        {"without": (*OFF, "duplicates")},
        {"without": ("all", "language"), "rules": "domains"},
    ],
    ids=str,
)
def test_beam_and_the_pool_write_the_same_bytes_and_counts(source, settings, monkeypatch):
    from lm.c4 import beam

    hosts = source.parent / "hosts"
    hosts.write_text("a.org\nb.org\n")
    if "rules" in settings:
        settings = settings | {"rules": filters.Rules(domains=str(hosts))}
    monkeypatch.setattr(beam, "RANGE_BYTES", 5_000)
    pool = cleaned_files(source, "pool", workers=1, **settings)
    assert cleaned_files(source, "beam", beam_options=(DIRECT,), **settings) == pool
    record = json.loads(pool["clean.json"])
    assert record["damaged"] >= 4
    assert record["counts"].get("duplicates", [1])[0] > 0
    assert record["counts"]["kept"][0] > 0


@needs_beam
def test_two_worker_processes_write_the_bytes_of_one(source):
    one = cleaned_files(source, "one", beam_options=(DIRECT, "direct_num_workers=1"))
    several = (DIRECT, "direct_num_workers=2", "direct_running_mode=multi_processing")
    assert cleaned_files(source, "two", beam_options=several) == one


@needs_beam
def test_which_copy_stays_does_not_depend_on_the_order_in_which_a_runner_delivers(source):
    from lm.c4 import beam

    parts, rng = pages.find_parts(source), random.Random(1)
    settings = passes.CleaningConfig(str(source), "", OFF, "spans", 0.2, filters.Rules())
    elements = [
        element
        for i, part in enumerate(parts)
        for element in beam.filter_elements((i, json.dumps(part)), settings, 1)
    ]

    def written(name, shuffle):
        def values(tag, key, pairs):
            found = [value for group, value in pairs if group == key]
            shuffle(found)
            return {tag: found}

        of_tag = {
            tag: [element.value for element in elements if element.tag == tag]
            for tag in (beam.PAGES, beam.SPANS, beam.RECORDS)
        }
        tables = values(beam.SPANS, 0, of_tag.pop(beam.SPANS))[beam.SPANS]
        of_tag[beam.REPEATS] = [*beam.repeats_by_part(0, tables)]
        for part in range(len(parts)):
            group = {}
            for tag, pairs in of_tag.items():
                group |= values(tag, part, pairs)
            beam.write_joined_part((part, group), str(source.parent / name), settings)
        folder = source.parent / name
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    in_order = written("in order", lambda found: None)
    assert len(in_order) == 4 * len(parts)
    assert written("mixed", rng.shuffle) == in_order


@needs_beam
def test_after_a_job_that_failed_the_pool_and_a_second_job_write_the_bytes_of_an_undisturbed_run(
    source, monkeypatch
):
    undisturbed = cleaned_files(source, "undisturbed", workers=1)
    write_shards = passes.write_shards

    def broken(work, settings, part, rows, repeated):
        if part == 5:
            raise OSError("no room")
        write_shards(work, settings, part, rows, repeated)

    for runs, settings in (("pool", {"workers": 1}), ("beam", {"beam_options": (DIRECT,)})):
        monkeypatch.setattr(passes, "write_shards", broken)
        with pytest.raises(Exception, match="no room"):
            cleaned_files(source, runs, beam_options=(DIRECT,))
        assert not (source.parent / runs / "cache" / "tfds" / "pages").exists()
        monkeypatch.setattr(passes, "write_shards", write_shards)
        assert cleaned_files(source, runs, **settings) == undisturbed


@needs_beam
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((DIRECT, "direct_num_worker=2"), "no 'direct_num_worker'; did you mean 'direct_num_workers'"),
        (("--runner=DirectRunner",), "'--runner=DirectRunner' should be KEY"),
        ((DIRECT, "direct_num_workers=two"), "direct_num_workers: invalid int value: 'two'"),
        (("runner=SparcRunner",), "SparcRunner"),
        (("runner=DataflowRunner",), r"apache_beam\[gcp\]|project"),
    ],
)
def test_options_that_no_runner_reads_are_refused_before_anything_starts(options, message, source):
    with pytest.raises(SettingError, match=f"beam_options: .*{message}"):
        cleaned_files(source, "runs", beam_options=options)
    assert not (source.parent / "runs").exists()


@needs_beam
def test_options_of_a_job_server_are_left_to_it():
    from lm.c4 import beam

    options = beam.runner_options(
        ["runner=FlinkRunner", "flink_master=localhost:8081", "state_backend=rocksdb"]
    )
    every = options.get_all_options(retain_unknown_options=True)
    assert (every["flink_master"], every["state_backend"]) == ("localhost:8081", "rocksdb")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 2}, "workers=2 are of this machine"),
        ({"source": "tests"}, "source='tests' should be an absolute path"),
        (
            {"rules": filters.Rules(domains="README.md")},
            "rules.domains='README.md' should be an absolute path",
        ),
    ],
)
def test_what_other_machines_cannot_share_is_refused(settings, message, source, monkeypatch):
    monkeypatch.chdir(command.__file__.removesuffix("experiments/cli/data_clean.py"))
    given = {"source": source, "beam_options": (DIRECT,)} | settings
    with pytest.raises(SettingError, match=message):
        command.data_clean(
            command.Path(given.pop("source")), command.CleanOptions("pages", **given), source.parent / "runs"
        )
    assert not (source.parent / "runs").exists()


def test_without_beam_its_options_are_refused_with_the_extra_that_brings_it(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    monkeypatch.delitem(sys.modules, "lm.c4.beam", raising=False)
    monkeypatch.delattr("lm.c4.beam", raising=False)
    with pytest.raises(SettingError, match=r"pip install --constraint constraints-beam.txt '\.\[beam\]'"):
        cleaned_files(source, "runs", beam_options=(DIRECT,))
    assert not (source.parent / "runs").exists()


@needs_beam
def test_a_range_of_hashes_that_all_differ_has_no_repeats():
    from lm.c4 import beam

    tables = [passes.sort_spans(part, [np.arange(3, dtype="<u8") + 3 * part]) for part in range(2)]
    assert not [*beam.repeats_by_part(0, [table.tobytes() for table in tables])]
    again = [
        (part, np.frombuffer(numbers, "<u4").tolist())
        for part, numbers in beam.repeats_by_part(
            0, [table.tobytes() for table in [*tables, passes.sort_spans(2, [np.array([4, 9, 4], "<u8")])]]
        )
    ]
    assert again == [(2, [0, 2])]
