"""The three passes of `lm data clean` over the parts of a crawl, each a function of files written before.

1. Filter a part's pages and write the hashes of their spans, sorted.
2. For a range of hashes, find the spans that occurred before.
3. Remove those from a part and write its share of the dataset.

Files appear complete and are not written again, so that a killed command resumes. No pass holds more than a
part or a range in memory. The computations are functions without files, which ``lm.c4.beam`` uses too.
"""

import bisect
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from lm import files
from lm.c4 import filters, pages
from lm.c4.filters import hash_fraction
from lm.data.corpus.tfds import serialized

PAGE_FEATURES = tfds.features.FeaturesDict({"text": tfds.features.Text(), "url": tfds.features.Text()})
BOTH_SPLITS = ("train", "validation")
SPAN = np.dtype([("hash", "<u8"), ("part", "<u4"), ("number", "<u4")])
LISTED_DAMAGES = 20  # damaged places that are listed; all are counted


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """All settings and inputs that decide what is written."""

    source: str
    files: str  # digest of names and contents, and of the lists of words and hosts
    without: tuple[str, ...]
    deduplicate: filters.Unit
    validation: float
    rules: filters.Rules


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    files.write(path, json.dumps(content, indent=1, default=np.ndarray.tolist))


def spans_within(path: Path, field: str, bounds: tuple[int, int]) -> np.ndarray:
    """Return the spans, SPAN [spans], whose ``field``, by which the table is sorted, is within ``bounds``."""
    table = np.load(path, mmap_mode="r")
    first, last = (bisect.bisect_left(table, bound, key=lambda span: span[field]) for bound in bounds)
    return np.array(table[first:last])


def new_record() -> dict[str, Any]:
    """Return an empty record for ``filtered``: counts by filter, damaged places, spans of what remains."""
    return {"spans": 0, "damaged": 0, "damages": [], "counts": defaultdict(lambda: np.zeros(3, np.int64))}


def filtered(
    settings: Cleaning, pieces: list[pages.Piece], record: dict[str, Any]
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (text, address, hashes of spans, uint64 [spans]) for each page that the filters leave.

    What they remove, and damaged places, are counted in ``record``.
    """
    rules, counts = settings.rules, record["counts"]
    steps = filters.filters(rules, (name for name in filters.FILTERS if name not in settings.without))
    domains = frozenset(Path(rules.domains).read_text("utf-8").lower().split()) if rules.domains else None
    hashes = np.zeros(0, "<u8")
    for page in (page for piece in pieces for page in pages.read_pages(piece)):
        if isinstance(page, pages.Damage):
            record["damaged"] += 1
            record["damages"] += [page] if record["damaged"] <= LISTED_DAMAGES else []
            continue
        lines = page.text.splitlines()
        counts["read"] += filters.removed(lines, None)
        if domains is not None and not filters.in_domains(page.url, domains):
            counts["domains"] += filters.removed(lines, None)
        elif clean := filters.cleaned(lines, steps, counts):
            if filters.DUPLICATES not in settings.without:
                hashes = filters.span_hashes(clean, settings.deduplicate)
            record["spans"] += len(hashes)
            yield "\n".join(clean), page.url, hashes


def sorted_spans(part: int, hashes: list[np.ndarray]) -> np.ndarray:
    """Return the spans of a part, SPAN [spans], sorted by hash, equal ones by number.

    ``hashes``: uint64 [spans] of each of its pages, in order.
    """
    joined = np.concatenate([np.zeros(0, "<u8"), *hashes])
    spans = np.full(len(joined), part, SPAN)
    spans["number"] = np.argsort(joined, kind="stable")
    spans["hash"] = joined[spans["number"]]
    return spans


def repeated_spans(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return all spans but the first of each hash, SPAN [repeats], sorted by part.

    ``tables``: the spans of each part, in order of part.
    """
    spans = np.concatenate(tables)
    return spans[filters.repeated(spans["hash"])]


def filter_part(work: Path, settings: Cleaning, part: int, pieces: list[pages.Piece]) -> None:
    """Filter a part; write pages/PART, spans/PART.npy and counts/PART.json.

    ``pages`` has [text, address, number of spans] in JSON a line, ``spans`` SPAN [spans] sorted by hash,
    ``counts`` the record of ``filtered``.
    """
    record, hashes = new_record(), []
    with files.atomic_file(work / "pages" / str(part)) as file:
        for text, url, of_page in filtered(settings, pieces, record):
            hashes.append(of_page)
            file.write(json.dumps([text, url, len(of_page)], ensure_ascii=False).encode() + b"\n")
    with files.atomic_file(work / "spans" / f"{part}.npy") as file:
        np.save(file, sorted_spans(part, hashes))
    write_json(work / "counts" / f"{part}.json", record)


def find_repeats(work: Path, bounds: tuple[int, int], number: int, parts: int) -> None:
    """Write repeats/NUMBER.npy: the spans whose hash is in ``bounds`` and occurred before, sorted by part."""
    tables = (work / "spans" / f"{part}.npy" for part in range(parts))
    with files.atomic_file(work / "repeats" / f"{number}.npy") as file:
        np.save(file, repeated_spans([spans_within(table, "hash", bounds) for table in tables]))


def write_part(work: Path, settings: Cleaning, part: int, total: int) -> None:
    """Write the shards of a part from the files of the passes before; ``total``: its number of spans."""
    repeated = np.zeros(total, bool)
    for path in (work / "repeats").glob("*.npy"):
        repeated[spans_within(path, "part", (part, part + 1))["number"]] = True
    with (work / "pages" / str(part)).open("rb") as file:
        write_shards(work, settings, part, map(json.loads, file), repeated)


def write_shards(
    work: Path, settings: Cleaning, part: int, rows: Iterable[Sequence], repeated: np.ndarray
) -> None:
    """Write shards/SPLIT-PART, an ArrayRecord file a split, and written/PART.json, their sizes and counts.

    ``rows``: (text, address, number of spans) of each page in order. ``repeated``: bool [spans of all pages].
    """
    paths = {split: work / "shards" / f"{split}-{part}" for split in BOTH_SPLITS}
    drafts = {split: files.temporary_path(path) for split, path in paths.items()}
    (work / "shards").mkdir(parents=True, exist_ok=True)
    shards = {split: ArrayRecordWriter(str(path), "group_size:1") for split, path in drafts.items()}
    serializer = ExampleSerializer(PAGE_FEATURES.get_serialized_info())
    sizes = {split: [0, 0] for split in BOTH_SPLITS}  # pages, bytes
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))
    for text, url in unique_pages(rows, settings, repeated, counts):
        split = "validation" if hash_fraction(text, "clean") < settings.validation else "train"
        row = PAGE_FEATURES.encode_example({"text": text, "url": url})
        example = serialized(serializer.get_tf_example(row))
        shards[split].write(example)
        sizes[split][0] += 1
        sizes[split][1] += len(example)
    for split, shard in shards.items():
        shard.close()
        os.replace(drafts[split], paths[split])  # a runner may have two machines write one part
    write_json(work / "written" / f"{part}.json", {"sizes": sizes, "counts": counts})


def unique_pages(
    rows: Iterable[Sequence], settings: Cleaning, repeated: np.ndarray, counts: dict[str, np.ndarray]
) -> Iterator[tuple[str, str]]:
    """Yield (text, address) for each page that is left without the repeated spans; ``counts`` grows."""
    first, checks_length = 0, "sentences-per-page" not in settings.without
    for text, url, spans in rows:
        marked, first = repeated[first : first + spans], first + spans
        lines = text.split("\n")
        if marked.any():
            fresh = filters.without_spans(lines, marked, settings.deduplicate)
            if checks_length and not filters.long_enough(fresh, settings.rules):
                fresh = []
            counts[filters.DUPLICATES] += filters.removed(lines, fresh)
            lines = fresh
        if lines:
            counts["kept"] += filters.removed(lines, None)
            yield "\n".join(lines), url
