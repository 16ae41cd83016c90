"""The three passes of `lm clean` over the parts of a crawl, each a function of files that were there before.

1. Filter a part's pages and note the hashes of their spans, sorted. 2. For a range of hashes, find the spans that were
there before. 3. Take those out of a part and write its share of the data set. What a pass has written appears whole
and is not written again, so that a killed command goes on where it stopped; none holds more than a part or a range.
"""

import bisect
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter

from lm.data import cleaning, crawl
from lm.data.harvest import share

FEATURES = tfds.features.FeaturesDict({"text": tfds.features.Text(), "url": tfds.features.Text()})
NAMED = 20  # so many damaged places are named; all are counted


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """All that decides what is written."""

    source: str
    files: str  # digest of names, sizes and times, and of the lists of words and hosts
    without: tuple[str, ...]
    deduplicate: cleaning.Unit
    validation: float
    rules: cleaning.Rules


def write(path: Path, content: dict | Callable[[BinaryIO], object]) -> None:
    """A file that is there whole or not at all: JSON, or what a function writes."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        content(file) if callable(content) else file.write(json.dumps(content, indent=1).encode())
    os.replace(draft, path)


def store(path: Path, array: np.ndarray) -> None:
    write(path, lambda file: np.save(file, array))


def filter_part(work: Path, settings: Cleaning, place: int, pieces: list[crawl.Piece]) -> None:
    """pages/PLACE: [text, address, spans] a line; hashes/PLACE sorted, spans/PLACE where each was; counts/PLACE."""
    if (work / "counts" / f"{place}.json").exists():
        return
    names = tuple(name for name in cleaning.FILTERS if name not in settings.without)
    steps, rules = cleaning.steps(settings.rules, names), settings.rules
    domains = frozenset(Path(rules.domains).read_text("utf-8").lower().split()) if rules.domains else None
    counts = {name: np.zeros(3, np.int64) for name in ("read", "domains", *names)}
    damages, found = [], [np.zeros(0, "<u8")]

    def fill(file: BinaryIO) -> None:
        for page in (page for piece in pieces for page in crawl.read(piece)):
            if isinstance(page, crawl.Damage):
                damages.append(page)
                continue
            lines = page.text.splitlines()
            counts["read"] += cleaning.removed(lines, None)
            if domains is not None and not cleaning.in_domains(page.url, domains):
                counts["domains"] += cleaning.removed(lines, None)
            elif lines := cleaning.apply(steps, lines, counts):
                if cleaning.DUPLICATES not in settings.without:
                    found.append(cleaning.span_hashes(lines, settings.deduplicate))
                row = ["\n".join(lines), page.url, len(found[-1])]
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    write(work / "pages" / str(place), fill)
    hashes = np.concatenate(found)
    order = np.argsort(hashes, kind="stable")
    store(work / "hashes" / f"{place}.npy", hashes[order])
    store(work / "spans" / f"{place}.npy", order.astype("<u4"))
    about = {"spans": len(hashes), "damaged": len(damages), "damages": damages[:NAMED]}
    write(work / "counts" / f"{place}.json", about | {"counts": {name: v.tolist() for name, v in counts.items()}})


def find_repeats(work: Path, bounds: tuple[int, int], place: int, parts: int) -> None:
    """repeats/PLACE: uint32 [2, repeats], part and number of each span whose hash is within bounds and was before."""
    target = work / "repeats" / f"{place}.npy"
    if target.exists():
        return
    hashes, spans, owner = [], [], []
    for part in range(parts):
        sorted_hashes = np.load(work / "hashes" / f"{part}.npy", mmap_mode="r")
        first, last = (bisect.bisect_left(sorted_hashes, bound) for bound in bounds)
        hashes.append(np.array(sorted_hashes[first:last]))
        spans.append(np.array(np.load(work / "spans" / f"{part}.npy", mmap_mode="r")[first:last]))
        owner.append(np.full(last - first, part, "<u4"))
    again = cleaning.repeated(np.concatenate(hashes))
    store(target, np.stack([np.concatenate(owner)[again], np.concatenate(spans)[again]]))


def write_part(work: Path, settings: Cleaning, place: int, total: int) -> None:
    """shards/SPLIT-PLACE, one array_record a split that has pages, and written/PLACE.json, their counts."""
    if (work / "written" / f"{place}.json").exists():
        return
    repeated = np.zeros(total, bool)
    for path in (work / "repeats").glob("*.npy"):
        owner, spans = np.load(path, mmap_mode="r")
        first, last = np.searchsorted(owner, [place, place + 1])
        repeated[spans[first:last]] = True
    counts = {name: np.zeros(3, np.int64) for name in (cleaning.DUPLICATES, "kept")}
    sizes: dict[str, list[int]] = {}
    with contextlib.ExitStack() as stack:
        writers: dict[str, Any] = {}
        for text, url in unique(work / "pages" / str(place), settings, repeated, counts):
            split = "validation" if share(text, "clean") < settings.validation else "train"
            if split not in sizes:
                sizes[split] = [0, 0]
                (work / "shards").mkdir(exist_ok=True)
                writers[split] = ArrayRecordWriter(str(work / "shards" / f"{split}-{place}"), "group_size:1")
                stack.callback(writers[split].close)
            example = FEATURES.serialize_example(FEATURES.encode_example({"text": text, "url": url}))
            writers[split].write(example)
            sizes[split][0] += 1
            sizes[split][1] += len(example)
    about = {"sizes": sizes, "counts": {name: values.tolist() for name, values in counts.items()}}
    write(work / "written" / f"{place}.json", about)


def unique(
    path: Path, settings: Cleaning, repeated: np.ndarray, counts: dict[str, np.ndarray]
) -> Iterator[tuple[str, str]]:
    """(text, address) of what the repeated spans leave of a part's pages."""
    first = 0
    with path.open("rb") as file:
        for text, url, spans in map(json.loads, file):
            marked, first = repeated[first : first + spans], first + spans
            lines = text.split("\n")
            if marked.any():
                left = cleaning.without_spans(lines, marked, settings.deduplicate)
                if "sentences-per-page" not in settings.without and not cleaning.long_enough(left, settings.rules):
                    left = []
                counts[cleaning.DUPLICATES] += cleaning.removed(lines, left)
                lines = left
            if lines:
                counts["kept"] += cleaning.removed(lines, None)
                yield "\n".join(lines), url
