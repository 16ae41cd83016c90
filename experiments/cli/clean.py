"""`lm clean`: a folder of pages -> a prepared data set, in three passes (``corpora.sieve``) over parts of
it.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from experiments.console import RUNS
from experiments.runs.progress import Reporter, reporting
from lm.data.corpora import cleaning, crawl
from lm.data.corpora.sieve import (
    FEATURES,
    NAMED,
    SPLITS,
    Cleaning,
    filter_part,
    find_repeats,
    write,
    write_part,
)
from lm.data.text.sources import HELD_OUT
from lm.settings import SettingError, diff, from_json, to_json

VERSION = "1.0.0"
RULES = cleaning.Rules()
COUNTED = ("read", "domains", *cleaning.FILTERS, cleaning.DUPLICATES, "kept")
RANGE = 1 << 21  # one process compares so many hashes at a time [spans]


def clean(
    source: Path,
    /,
    name: str,
    without: tuple[str, ...] = (),
    deduplicate: cleaning.Unit = "spans",
    rules: cleaning.Rules = RULES,
    validation: float = HELD_OUT,
    workers: int = 0,
    runs: Path = RUNS,
) -> None:
    """Make a corpus of text files, JSON lines or WET files by the rules that made C4.

    Killed, it goes on where it stopped when started again; given again, it reads all files to see that they,
    like the settings, are those that the data set was made of. --data.corpus tfds:NAME reads what it wrote.

    Args:
        source: folder or file: .txt, .jsonl ({"text", "url"}) or .wet; the last two may end in .gz.
        name: of the data set: small letters, digits and _.
        without: filters to switch off, such as policy or duplicates; all: all but the language
        ("unfiltered").
        deduplicate: keep one of each span of three sentences (the paper), or of each line (TFDS).
        rules: thresholds, language, lists.
        validation: share of the pages held out.
        workers: processes; 0: one a core.
        runs: folder that holds the runs and the prepared data.
    """
    off = cleaning.switched_off(without)
    check(name, validation, rules, off, workers)
    parts = crawl.find_parts(source)
    settings = Cleaning(str(source.resolve()), digest(parts, rules), off, deduplicate, validation, rules)
    folder = runs / "cache" / "tfds" / name / VERSION
    work = folder.parents[1] / f".{name}-clean"
    if not is_done(folder, settings):
        with locked(work, settings), reporting(2 * len(parts)) as report:
            passes(work, settings, parts, workers, report)
            finish(work, folder, settings, len(parts))
    shutil.rmtree(work, ignore_errors=True)
    print(summary(json.loads((folder / "clean.json").read_text())))
    print(f"{folder} holds it; to train on it: --data.corpus tfds:{name}")


def passes(
    work: Path, settings: Cleaning, parts: list[list[crawl.Piece]], workers: int, report: Reporter
) -> None:
    report.start("filtering")
    tasks = {work / "counts" / f"{i}.json": (work, settings, i, part) for i, part in enumerate(parts)}
    in_parallel(filter_part, tasks, workers, lambda: report.advance(1))
    totals = [json.loads(path.read_text())["spans"] for path in tasks]
    report.start("comparing")
    ranges = -(-sum(totals) // RANGE)
    bounds = itertools.pairwise(i * 2**64 // max(1, ranges) for i in range(ranges + 1))
    tasks = {work / "repeats" / f"{i}.npy": (work, pair, i, len(parts)) for i, pair in enumerate(bounds)}
    in_parallel(find_repeats, tasks, workers, lambda: None)
    report.start("writing")
    tasks = {work / "written" / f"{i}.json": (work, settings, i, total) for i, total in enumerate(totals)}
    in_parallel(write_part, tasks, workers, lambda: report.advance(1))


def check(name: str, validation: float, rules: cleaning.Rules, off: tuple[str, ...], workers: int) -> None:
    if not (name.isascii() and name.isidentifier() and name == name.lower()) or name == "documentation":
        raise SettingError(f"name={name!r} should be of small letters, digits and _, and not 'documentation'")
    if not 0 < validation < 1:
        raise SettingError(f"validation={validation} should be between 0 and 1")
    if workers < 0:
        raise SettingError(f"workers={workers} should be a number of processes, or 0 for one a core")
    for field in ("bad_words", "domains"):
        path = getattr(rules, field)
        if path and not Path(path).is_file():
            raise SettingError(f"rules.{field}={path!r} should be a file with an entry a line; there is none")
    if "language" not in off and rules.language not in (known := cleaning.identifier().labels):
        raise SettingError(f"rules.language={rules.language!r} should be one of {', '.join(known)}")


def digest(parts: list[list[crawl.Piece]], rules: cleaning.Rules) -> str:
    """Of the bytes of every file that is read, and of how they are split."""
    pieces = [*itertools.chain.from_iterable(parts)]
    paths = [*dict.fromkeys(piece.path for piece in pieces), *filter(None, (rules.bad_words, rules.domains))]
    found = hashlib.sha256("".join(map(str, pieces)).encode(errors="surrogateescape"))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for each in pool.map(_contents, paths):
            found.update(each)
    return found.hexdigest()[:16]


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def is_done(folder: Path, settings: Cleaning) -> bool:
    """Whether the data set is there; SettingError if it was made from other settings, or by something
    else.
    """
    if not folder.exists():
        return False
    about = folder / "clean.json"
    made = json.loads(about.read_text())["settings"] if about.exists() else {}
    changed = (
        diff(from_json(Cleaning, json.dumps(made)), settings) if made else {"made by": ("other", "lm clean")}
    )
    lines = "; ".join(f"{path} was {old!r}, is {new!r}" for path, (old, new) in changed.items())
    if lines:
        raise SettingError(f"{folder} is there from other settings: {lines}. Take another name, or delete it")
    return True


@contextlib.contextmanager
def locked(work: Path, settings: Cleaning) -> Iterator[None]:
    """The work folder, for one process at a time; emptied if what is in it was begun from other settings."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"another process is at work in {work}") from None
        begun = work / "settings.json"
        if not begun.exists() or begun.read_text() != to_json(settings):
            for old in set(work.iterdir()) - {work / "lock"}:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            begun.write_text(to_json(settings))
        yield


def in_parallel(
    function: Callable, tasks: Mapping[Path, tuple], workers: int, done: Callable[[], object]
) -> None:
    """``function(*task)`` for every task whose file is not there, in processes if several; ``done`` after
    each.
    """
    left = []
    for path, task in tasks.items():
        done() if path.exists() else left.append(task)
    if workers == 1 or len(left) < 2:
        for task in left:
            function(*task)
            done()
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or len(os.sched_getaffinity(0)), spawn, die_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(function, *task) for task in left]):
                future.result()
                done()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def die_with_parent() -> None:
    """A process of a pool would otherwise wait forever for a parent that was killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def finish(work: Path, folder: Path, settings: Cleaning, parts: int) -> None:
    """Puts the shards together in ``folder``, with TFDS's description and clean.json."""
    read, written = (
        [json.loads((work / name / f"{i}.json").read_text()) for i in range(parts)]
        for name in ("counts", "written")
    )
    about = totals(settings, read, written)
    draft = work / "set"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    infos = []
    for split in SPLITS:
        sizes = {i: part["sizes"][split] for i, part in enumerate(written) if part["sizes"][split][0]}
        if not sizes:
            shutil.rmtree(work)
            raise SettingError(
                f"source={settings.source}: too little is left for a {split} split\n{summary(about)}"
            )
        for shard, place in enumerate(sizes):
            name = f"{folder.parent.name}-{split}.array_record-{shard:05}-of-{len(sizes):05}"
            os.link(work / "shards" / f"{split}-{place}", draft / name)
        pages, lengths = zip(*sizes.values(), strict=True)
        infos.append(tfds.core.SplitInfo(split, list(pages), sum(lengths)))
    tfds.folder_dataset.write_metadata(
        data_dir=draft,
        features=FEATURES,
        split_infos=infos,
        version=folder.name,
        check_data=False,
        description=f"Pages of {settings.source}, cleaned.",
    )
    write(draft / "clean.json", about)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(draft, folder)


def totals(settings: Cleaning, read: list[dict], written: list[dict]) -> dict:
    """What clean.json says: settings, ``{filter: [pages, lines, characters]}`` removed, damaged places."""
    counts = [part["counts"] for part in (*read, *written)]
    names = [name for name in COUNTED if name not in settings.without]
    return {
        "settings": dataclasses.asdict(settings),
        "counts": {name: np.sum([part.get(name, [0, 0, 0]) for part in counts], axis=0) for name in names},
        "damaged": sum(part["damaged"] for part in read),
        "damages": [damage for part in read for damage in part["damages"]][:NAMED],
    }


def summary(about: dict) -> str:
    """A line a filter, in order: what it removed; then what could not be read."""
    lines = [f"{'':22}{'pages':>12}{'lines':>14}{'characters':>16}"]
    lines += [f"{name:22}{row[0]:12,}{row[1]:14,}{row[2]:16,}" for name, row in about["counts"].items()]
    lines += [f"damaged: {place}: {reason}" for place, reason in about["damages"]]
    return "\n".join([*lines, *([f"{about['damaged']} damaged places in all"] if about["damaged"] else [])])
