"""``lm data clean``: a folder of pages becomes a prepared data set, in the three passes of ``lm.c4``."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tensorflow_datasets as tfds
import tyro
from filelock import FileLock, Timeout

from experiments.cli.settings import Runs
from experiments.console import RUNS
from experiments.processes.jobs import cores, when_parent_is_gone
from experiments.processes.progress import Reporter, reporting
from lm.c4 import filters, pages, passes
from lm.c4.passes import BOTH_SPLITS, CleaningConfig
from lm.config.base import SettingError, diff, from_json, to_json
from lm.data.corpus.process_pool import process_pool
from lm.data.corpus.shards import HELD_OUT_SHARE

VERSION = "1.0.0"
RANGE = 1 << 21  # hashes that one process compares at a time [spans]
Tasks = dict[Path, tuple]  # arguments by the file that a task writes
Parts = list[list[pages.Piece]]


@dataclasses.dataclass(frozen=True)
class CleanOptions:
    """Name of the data set, and options of how it is made."""

    name: str  # name of the data set: small letters, digits and _
    # filters to switch off, such as policy or duplicates; all: all but the language ("unfiltered")
    without: tuple[str, ...] = ()
    # keep one of each span of three sentences (the paper), or of each line (TFDS)
    deduplicate: filters.Unit = "spans"
    rules: filters.Rules = filters.Rules()  # order of the filters, thresholds, language, lists
    validation: float = HELD_OUT_SHARE  # share of the pages that is held out
    workers: int = 0  # number of processes; 0: one per core [processes]
    # KEY=VALUE options with which Apache Beam runs it, such as runner=DataflowRunner project=mine; the
    # package's extra "beam" installs Beam
    beam_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        name, rules = self.name, self.rules
        if not (name.isascii() and name.isidentifier() and name == name.lower()) or name == "documentation":
            raise SettingError(f"name={name!r} should be small letters, digits and _, not 'documentation'")
        if not 0 < self.validation < 1:
            raise SettingError(f"validation={self.validation} should be between 0 and 1")
        if self.workers < 0:
            raise SettingError(f"workers={self.workers} should be a number of processes, or 0 for one a core")
        if self.workers and self.beam_options:
            raise SettingError(
                f"workers={self.workers} are of this machine; beam_options say how many Beam takes"
            )
        if rules.paragraph_length != filters.Rules.paragraph_length and not rules.paragraphs:
            raise SettingError(
                f"rules.paragraph_length={rules.paragraph_length} is read where rules.paragraphs is above 0: "
                "set it too, to 3 as mC4 does"
            )
        for field in ("bad_words", "domains"):
            path = getattr(rules, field)
            try:
                filters.read_list(path)
            except (OSError, UnicodeDecodeError) as error:
                reason = f"should be a text file in UTF-8, with an entry a line: {error}"
                raise SettingError(f"rules.{field}={path!r} {reason}") from error
        language, disabled = rules.language, filters.disabled_filters(self.without)
        if "language" not in disabled and language not in (known := filters.language_identifier().labels):
            raise SettingError(f"rules.language={language!r} should be one of {', '.join(known)}")


def data_clean(
    source: Path, /, options: Annotated[CleanOptions, tyro.conf.arg(name="")], runs: Runs = RUNS
) -> None:
    """Make a corpus of text files, JSON lines or WET files by the rules that made C4.

    The same command resumes after a kill; when all is done, it checks that settings and all bytes of the
    source are those that the data set was made of. --data.corpus tfds:NAME trains on it.

        lm data clean pages --name mine
        lm data clean crawl --name web --without policy --workers 8
        lm data clean crawl --name strict --rules.order paper

    Args:
        source: Folder or file: .txt, .jsonl ({"text", "url"}) or .wet; the last two may end in .gz.
    """
    run = build_pipeline(source, options)
    parts = pages.find_parts(source)
    settings = CleaningConfig(
        str(source.resolve()),
        digest(parts, options.rules),
        filters.disabled_filters(options.without),
        **{name: getattr(options, name) for name in ("deduplicate", "validation", "rules")},
    )
    folder = runs / "cache" / "tfds" / options.name / VERSION
    work = folder.parents[1] / f".{options.name}-clean"
    if not is_cleaned(folder, settings):
        with working_in(work, settings), reporting(2 * len(parts)) as report:
            finish(run(work, settings, parts, report), folder, settings, len(parts))
    shutil.rmtree(work, ignore_errors=True)
    print(removed_table(json.loads((folder / "clean.json").read_text())))
    print(f"{folder} holds it; to train on it: --data.corpus tfds:{options.name}")


def build_pipeline(
    source: Path, options: CleanOptions
) -> Callable[[Path, CleaningConfig, Parts, Reporter], Path]:
    """Return a function that writes the shards and counts of all parts, and returns their folder."""
    if not options.beam_options:
        return functools.partial(run_in_pool, workers=options.workers)
    rules = options.rules
    named = {"source": str(source), "rules.bad_words": rules.bad_words, "rules.domains": rules.domains}
    for field, path in named.items():
        if path and not Path(path).is_absolute():
            raise SettingError(
                f"{field}={path!r} should be an absolute path, the same on all of Beam's machines"
            )
    from lm.c4 import beam  # an extra

    flags = beam.runner_options(options.beam_options)
    return functools.partial(run_in_beam, pipeline=functools.partial(beam.run_pipeline, options=flags))


def run_in_beam(
    work: Path, settings: CleaningConfig, parts: Parts, report: Reporter, *, pipeline: Callable[..., None]
) -> Path:
    """Run all passes as one pipeline of Apache Beam; return the folder with shards and counts."""
    report.start("running on Beam")
    folder = work.absolute() / "beam"  # apart: run_in_pool would take a part counted there for half done
    pipeline(folder, settings, parts)
    report.advance(2 * len(parts))
    return folder


def run_in_pool(
    work: Path, settings: CleaningConfig, parts: Parts, report: Reporter, *, workers: int
) -> Path:
    """Run the passes one after another in processes here; return the folder with shards and counts.

    Of each pass the parts that an earlier start has finished are left out.
    """
    report.start("filtering")
    tasks: Tasks = {work / "counts" / f"{i}.json": (work, settings, i, part) for i, part in enumerate(parts)}
    in_parallel(passes.filter_part, tasks, workers, lambda: report.advance(1))
    num_spans = [json.loads(path.read_text())["spans"] for path in tasks]
    report.start("comparing")
    ranges = -(-sum(num_spans) // RANGE)
    bounds = itertools.pairwise(i * 2**64 // max(1, ranges) for i in range(ranges + 1))
    tasks = {work / "repeats" / f"{i}.npy": (work, pair, i, len(parts)) for i, pair in enumerate(bounds)}
    in_parallel(passes.find_repeats, tasks, workers, lambda: None)
    report.start("writing")
    tasks = {work / "written" / f"{i}.json": (work, settings, i, total) for i, total in enumerate(num_spans)}
    in_parallel(passes.write_part, tasks, workers, lambda: report.advance(1))
    return work


def digest(parts: Parts, rules: filters.Rules) -> str:
    """Return the digest of every file that is read, and of how the files are split."""
    pieces = [*itertools.chain.from_iterable(parts)]
    paths = [*dict.fromkeys(piece.path for piece in pieces), *filter(None, (rules.bad_words, rules.domains))]
    total = hashlib.sha256("".join(map(str, pieces)).encode(errors="surrogateescape"))
    with ThreadPoolExecutor(cores()) as pool:
        for contents in pool.map(_contents, paths):
            total.update(contents)
    return total.hexdigest()[:16]


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def is_cleaned(folder: Path, settings: CleaningConfig) -> bool:
    """Return whether the dataset exists; SettingError if it was not made from these settings."""
    if not folder.exists():
        return False
    record, changed = folder / "clean.json", {"made by": ("other", "lm data clean")}
    if record.exists() and (old := json.loads(record.read_text())["settings"]):
        changed = diff(from_json(CleaningConfig, json.dumps(old)), settings)
    if changed:
        lines = "; ".join(f"{path} was {old!r}, is {new!r}" for path, (old, new) in changed.items())
        raise SettingError(f"{folder} has other settings: {lines}. Take another name, or delete it")
    return True


@contextlib.contextmanager
def working_in(work: Path, settings: CleaningConfig) -> Iterator[None]:
    """Hold the work folder for this process alone, and empty it if it was begun with other settings."""
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(work / "lock", fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        raise SettingError(f"another process is at work in {work}") from None
    with lock:
        saved = work / "settings.json"
        if not saved.exists() or saved.read_text() != to_json(settings):
            for old in set(work.iterdir()) - {work / "lock"}:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            saved.write_text(to_json(settings))
        yield


def in_parallel(function: Callable, tasks: Tasks, workers: int, advance: Callable[[], object]) -> None:
    """Call ``function(*task)`` for each task whose file is missing, in processes if there are several.

    ``advance`` is called once for each task, also for one whose file is there.
    """
    todo = []
    for path, task in tasks.items():
        if path.exists():
            advance()
        else:
            todo.append(task)
    if workers == 1 or len(todo) < 2:
        for task in todo:
            function(*task)
            advance()
        return
    # otherwise a process of the pool would wait forever for a parent that was killed
    end_with_parent = functools.partial(when_parent_is_gone, functools.partial(os._exit, 1))
    with process_pool(workers or cores(), end_with_parent) as pool:
        for future in as_completed([pool.submit(function, *task) for task in todo]):
            future.result()
            advance()


def finish(work: Path, folder: Path, settings: CleaningConfig, parts: int) -> None:
    """Put the shards together in ``folder``, with TFDS's description and clean.json."""
    read = [json.loads((work / "counts" / f"{i}.json").read_text()) for i in range(parts)]
    written = [json.loads((work / "written" / f"{i}.json").read_text()) for i in range(parts)]
    record = totals(settings, read, written)
    draft = work / "set"  # not beside ``folder``: what a kill leaves of it is deleted with the work folder
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    infos = []
    for split in BOTH_SPLITS:
        sizes = {i: part["sizes"][split] for i, part in enumerate(written) if part["sizes"][split][0]}
        if not sizes:
            shutil.rmtree(work)
            too_little = f"source={settings.source}: too little is left for a {split} split"
            raise SettingError(f"{too_little}\n{removed_table(record)}")
        for shard, part in enumerate(sizes):
            name = f"{folder.parent.name}-{split}.array_record-{shard:05}-of-{len(sizes):05}"
            os.link(work / "shards" / f"{split}-{part}", draft / name)
        num_pages, num_bytes = zip(*sizes.values(), strict=True)
        infos.append(tfds.core.SplitInfo(split, list(num_pages), sum(num_bytes)))
    description = {"version": folder.name, "description": f"Pages of {settings.source}, cleaned."}
    tfds.folder_dataset.write_metadata(
        data_dir=draft, features=passes.PAGE_FEATURES, split_infos=infos, check_data=False, **description
    )
    passes.write_json(draft / "clean.json", record)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(draft, folder)


def totals(settings: CleaningConfig, read: list[dict], written: list[dict]) -> dict[str, Any]:
    """Return the content of clean.json: settings, what each filter removed, and damaged places.

    What a filter removed is ``[pages, lines, characters]``.
    """
    counts = [part["counts"] for part in (*read, *written)]
    order = filters.ordered_filters(settings.rules.order)
    counted = ("read", "domains", *order, filters.DUPLICATES, "kept")
    names = [name for name in counted if name not in settings.without]
    return {
        "settings": dataclasses.asdict(settings),
        "counts": {name: np.sum([part.get(name, [0, 0, 0]) for part in counts], axis=0) for name in names},
        "damaged": sum(part["damaged"] for part in read),
        "damages": [damage for part in read for damage in part["damages"]][: passes.LISTED_DAMAGES],
    }


def removed_table(record: dict[str, Any]) -> str:
    """Return a line for each filter, in order, with what it removed; then what could not be read."""
    lines = [f"{'':22}{'pages':>12}{'lines':>14}{'characters':>16}"]
    lines += [f"{name:22}{row[0]:12,}{row[1]:14,}{row[2]:16,}" for name, row in record["counts"].items()]
    lines += [f"damaged: {location}: {reason}" for location, reason in record["damages"]]
    if record["damaged"]:
        lines.append(f"{record['damaged']} damaged places in all")
    return "\n".join(lines)
