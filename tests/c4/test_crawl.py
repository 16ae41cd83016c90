"""`lm data clean`: what becomes of pages, whatever they are stored in, when it is killed, and when they are
damaged.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from feeding import documents

from experiments.cli import data_clean as command
from lm.c4 import filters, pages
from lm.config.base import SettingError

OFF = ("language",)  # whose detector takes a second to load; it has a test of its own


def sentence(number):
    return f"This is the sentence with number {number} of them."


def article(number):
    return "\n".join(sentence(f"{number} {part}") for part in "abcd")


def wet(text, url="http://news.b.org/", kind="conversion"):
    body = text.encode()
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


@pytest.fixture
def source(tmp_path):
    """40 articles in three kinds of files, one of them twice, and a page for some of the filters."""
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [{"text": article(i), "url": f"https://www.a.com/{i}"} for i in range(20)]
    rows += [
        {"text": article(3)},
        {"text": article(50) + "\nlorem ipsum dolor sit amet."},
        {"text": "Too little."},
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = [wet("no page", kind="warcinfo"), *(wet(article(i)) for i in range(20, 30))]
    (folder / "b.warc.wet.gz").write_bytes(b"".join(map(gzip.compress, records)))
    for i in range(30, 40):
        (folder / f"c{i}.txt").write_text(article(i))
    return folder


def clean(source, name="pages", without=OFF, **settings):
    runs = source.parent / "runs"
    options = command.CleanOptions(name, without, validation=0.2, workers=1, **settings)
    command.data_clean(source, options, runs)
    return runs / "cache"


def texts(cache, name="pages"):
    return [text for split in command.BOTH_SPLITS for text in documents(f"tfds:{name}", split, cache)]


def files(cache, name="pages"):
    folder = cache / "tfds" / name / "1.0.0"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_article_is_there_once_and_all_else_is_counted(source):
    cache = clean(source)
    assert sorted(texts(cache)) == sorted(article(i) for i in range(40))
    counts = json.loads(files(cache)["clean.json"])["counts"]
    assert {name: row[0] for name, row in counts.items() if row[0]} == {
        "read": 43,
        "kept": 40,
        "duplicates": 1,
        "lorem-ipsum": 1,
        "words-per-line": 1,
    }
    gone = np.sum([row for name, row in counts.items() if name not in ("read", "kept")], axis=0)
    assert np.array_equal(gone + counts["kept"], counts["read"])


def test_by_the_papers_order_the_page_with_a_mark_in_a_short_line_is_gone_and_counted_first(source):
    rows = [{"text": article(60) + "\nUse {."}]
    (source / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    released = texts(clean(source))
    cache = clean(source, "paper", rules=filters.Rules(order="paper"))
    assert sorted(released) == sorted([*texts(cache, "paper"), article(60)])
    counts = json.loads(files(cache, "paper")["clean.json"])["counts"]
    assert counts["curly-braces"][0] == 1 and counts["lorem-ipsum"][0] == 1
    assert [*counts].index("curly-braces") < [*counts].index("blanks")
    with pytest.raises(SettingError, match="rules.order was 'paper', is 'released'"):
        clean(source, "paper")


@pytest.mark.parametrize("deduplicate", ["spans", "lines"])
def test_parts_and_ranges_change_no_page(source, deduplicate, monkeypatch):
    whole = texts(clean(source, deduplicate=deduplicate))
    monkeypatch.setattr(pages, "PART_BYTES", 300)
    monkeypatch.setattr(command, "RANGE", 7)
    assert len(pages.find_parts(source)) > 10
    cache = clean(source, "other", deduplicate=deduplicate)
    assert sorted(texts(cache, "other")) == sorted(whole)
    assert json.loads(files(cache, "other")["clean.json"])["damaged"] == 0


def test_killed_anywhere_it_goes_on_to_the_same_bytes(source, monkeypatch):
    monkeypatch.setattr(pages, "PART_BYTES", 1000)
    undisturbed = files(clean(source))
    (source.parent / "runs").rename(source.parent / "before")
    replace, rng, done, kills = os.replace, random.Random(1), [], []

    def killed(old, new):
        if rng.random() < 0.25:
            kills.append(new)
            raise KeyboardInterrupt
        replace(old, new)
        done.append(str(new))

    monkeypatch.setattr(os, "replace", killed)
    for _ in range(50):
        with contextlib.suppress(KeyboardInterrupt):
            cache = clean(source)
            break
    finished = [name for name in done if name.endswith(".json") and "/set/" not in name]
    assert len(kills) > 5
    assert len(set(finished)) == len(finished)  # a part that is done is not done again
    assert files(cache) == undisturbed
    assert [path.name for path in (cache / "tfds").iterdir()] == ["pages"]


@pytest.mark.slow
def test_a_process_group_killed_at_three_moments_and_one_process_both_write_the_bytes_of_two(tmp_path):
    rng = random.Random(0)
    words = "when they were all at home again it was said that the old house had been sold to people"
    words = f"{words} from there".split()
    lines = [" ".join(rng.choices(words, k=15)) + f" {number}." for number in range(40_000)]
    (tmp_path / "source").mkdir()
    for name in "abc":
        rows = [{"text": "\n".join(rng.choices(lines, k=40))} for _ in range(400)]
        rows += [{"text": "\n".join(lines[i : i + 40])} for i in range(0, 4000, 40)]  # in all three
        (tmp_path / "source" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def begin(name, workers):
        settings = ("--name", "pages", "--workers", str(workers), "--runs", str(tmp_path / name))
        line = (sys.executable, "-m", "experiments", "clean", str(tmp_path / "source"), *settings)
        return subprocess.Popen(line, process_group=0)

    def made():
        return sum(path.is_file() for path in tmp_path.glob("killed/cache/tfds/.pages-clean/*/*"))

    for _ in range(3):
        process, enough = begin("killed", 2), made() + rng.randrange(1, 8)
        while made() < enough:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    for name, workers in (("killed", 2), ("two", 2), ("one", 1)):
        assert begin(name, workers).wait() == 0
    one, two, killed = (files(tmp_path / name / "cache") for name in ("one", "two", "killed"))
    assert one == two == killed
    assert json.loads(one["clean.json"])["counts"]["duplicates"][0] == 200
    assert os.listdir(tmp_path / "killed" / "cache" / "tfds") == ["pages"]


def test_damaged_places_are_named_counted_and_skipped(source, capsys):
    with (source / "a.jsonl").open("a") as file:
        file.write('\n{"text": "cut\n["text"]\n{"url": "a.com"}')
    (source / "d.wet").write_bytes(b"rubbish\n" + wet(article(60)) + wet(article(61))[:-30])
    (source / "e.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": article(62)}).encode())[:-12])
    (source / "f.txt").write_bytes(b"\xff\xfe")
    assert sorted(texts(clean(source))) == sorted(map(article, [*range(40), 60]))
    said = capsys.readouterr().out
    for place in (*(f"a.jsonl, line {i}" for i in (24, 25, 26)), *(f"d.wet, record {i}" for i in (1, 2))):
        assert f"{place}: " in said
    assert "e.jsonl.gz: " in said
    assert "f.txt: " in said
    assert "7 damaged places" in said


def test_a_source_of_damage_alone_is_an_error_that_names_it(tmp_path):
    (tmp_path / "bad.jsonl").write_text("no JSON")
    with pytest.raises(SettingError, match=r"bad\.jsonl, line 1"):
        clean(tmp_path)


def test_only_listed_hosts_are_kept_and_their_subdomains(source, tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfB.org\r\n")
    cache = clean(source, rules=filters.Rules(domains=str(tmp_path / "hosts")))
    assert sorted(texts(cache)) == sorted(map(article, range(20, 30)))


def test_unfiltered_pages_stay_as_they_are(source):
    found = texts(clean(source, without=("all", "language")))
    assert len(found) == 43
    assert "Too little." in found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "nowhere"}, "it does not exist"),
        ({"source": "empty"}, "none of its 0 files"),
        ({"without": ("policies",)}, "did you mean 'policy'"),
        ({"name": "No-Name"}, "small letters"),
        ({"validation": 1.0}, "between 0 and 1"),
        ({"workers": -1}, "workers=-1"),
        ({"rules": filters.Rules(paragraph_length=100)}, "rules.paragraph_length=100 is read where"),
        ({"rules": filters.Rules(bad_words="missing")}, "rules.bad_words='missing'"),
        ({"rules": filters.Rules(domains="empty")}, "rules.domains='empty'"),
        ({"rules": filters.Rules(bad_words="latin-1")}, "should be a text file in UTF-8"),
        ({"without": (), "rules": filters.Rules(language="xx")}, "rules.language='xx'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_read(settings, message, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin-1").write_bytes("Blödsinn".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    given = {"source": ".", "name": "x", "without": OFF} | settings
    with pytest.raises(SettingError, match=message):
        command.data_clean(tmp_path / given.pop("source"), command.CleanOptions(**given), tmp_path / "runs")


def test_a_finished_set_is_left_alone_and_other_settings_are_refused_with_the_difference(source):
    before = files(clean(source))
    assert files(clean(source)) == before
    with pytest.raises(SettingError, match="rules.words_per_line was 5, is 3"):
        clean(source, rules=filters.Rules(words_per_line=3))


def test_other_pages_in_files_of_the_same_size_and_time_are_told_from_those_that_a_set_was_made_of(source):
    clean(source)
    path = next(path for path in sorted(source.rglob("*")) if path.suffix == ".txt")
    about, text = path.stat(), path.read_bytes()
    path.write_bytes(text.replace(b"e", b"a", 1))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size
    with pytest.raises(SettingError, match="files was .* is .*Take another name, or delete it"):
        clean(source)


def test_a_page_of_repeated_lines_and_blank_ones_is_dropped(source):
    rows = [{"text": article(i) + "\n\n"} for i in range(2)]  # its lines are those of two other pages
    (source / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = texts(
        clean(
            source,
            without=(*OFF, "blanks", "sentences-per-page", "terminal-punctuation", "words-per-line"),
            deduplicate="lines",
        )
    )
    assert all(map(str.strip, found)) and len(found) == 41


@pytest.mark.parametrize("unit", filters.UNITS)
def test_without_repeated_spans_no_sentence_is_lost_and_a_page_seen_before_is_empty(unit):
    rng = random.Random(0)
    pages = [[sentence(rng.randrange(12)) for _ in range(rng.randrange(1, 8))] for _ in range(200)]
    hashes = [filters.span_hashes(lines, unit) for lines in [*pages, *pages]]
    marked = np.zeros(sum(map(len, hashes)), bool)
    marked[filters.repeated_indices(np.concatenate(hashes))] = True
    ends = np.cumsum([len(part) for part in hashes])[:-1]
    left = [
        filters.remove_spans(*page, unit)
        for page in zip([*pages, *pages], np.split(marked, ends), strict=True)
    ]
    assert {line for lines in left for line in lines} == {line for lines in pages for line in lines}
    assert not any(left[len(pages) :])
    whole = [lines for lines, old in zip(left, pages, strict=False) if lines == old]
    kept = [tuple(lines[i : i + 3]) for lines in whole for i in range(len(lines) - 2)]
    assert len(set(kept)) == len(kept)
