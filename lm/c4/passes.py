"""The three passes of `lm data clean` over the parts of a crawl, each a function of files written before.

1. Filter the pages of a part, and write the hashes of their spans, sorted.
2. For a range of hashes, find the spans that occurred before.
3. Remove these from a part, and write its shards of the dataset.

A pass reads files that the passes before it wrote. Files are complete or absent and are not written twice, so
that a killed command resumes. No pass holds more than a part or a range in memory. The computations are
functions without files, which ``lm.c4.beam`` uses too.
"""

import bisect
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from lm import files
from lm.c4 import filters, pages
from lm.c4.filters import hash_fraction
from lm.data.corpus.tfds import serialize_example

PAGE_FEATURES = tfds.features.FeaturesDict({"text": tfds.features.Text(), "url": tfds.features.Text()})
BOTH_SPLITS = ("train", "validation")
SPAN = np.dtype([("hash", "<u8"), ("part", "<u4"), ("number", "<u4")])
LISTED_DAMAGES = 20  # damages that are listed; all are counted


@dataclasses.dataclass(frozen=True)
class CleaningConfig:
    """All settings and inputs that the result depends on; it is saved with the result to notice changes."""

    source: str
    files: str  # digest of the source's files, and of the lists of bad words and hosts
    without: tuple[str, ...]  # filters that are switched off
    deduplicate: filters.Unit
    validation: float  # share of the pages
    rules: filters.Rules


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    files.write(path, json.dumps(content, indent=1, default=np.ndarray.tolist))


def spans_in_range(path: Path, field: str, bounds: tuple[int, int]) -> np.ndarray:
    """Return the spans, SPAN [spans], whose ``field`` is in [start, end); the table is sorted by it."""
    table = np.load(path, mmap_mode="r")
    first, last = (bisect.bisect_left(table, bound, key=lambda span: span[field]) for bound in bounds)
    return np.array(table[first:last])


def empty_record() -> dict[str, Any]:
    """Return an empty record for ``filter_pages``: counts by filter, damages, spans that remain."""
    return {"spans": 0, "damaged": 0, "damages": [], "counts": defaultdict(lambda: np.zeros(3, np.int64))}


class FilteredPage(NamedTuple):
    """Holds what the filters leave of a page."""

    text: str
    url: str
    span_hashes: np.ndarray  # uint64 [spans]


def filter_pages(
    settings: CleaningConfig, pieces: list[pages.Piece], record: dict[str, Any]
) -> Iterator[FilteredPage]:
    """Yield each page of which the filters leave something.

    Adds what they remove, and damages, to ``record``.
    """
    rules, counts = settings.rules, record["counts"]
    enabled = [name for name in filters.ordered_filters(rules.order) if name not in settings.without]
    page_filters = filters.build_filters(rules, enabled)
    domains = {host for line in filters.read_list(rules.domains) for host in line.lower().split()}
    hashes = np.zeros(0, "<u8")
    for page in (page for piece in pieces for page in pages.read_pages(piece)):
        if isinstance(page, pages.Damage):
            record["damaged"] += 1
            if record["damaged"] <= LISTED_DAMAGES:
                record["damages"].append(page)
            continue
        lines = page.text.splitlines()
        counts["read"] += filters.count_removed(lines, None)
        if rules.domains and not filters.in_domains(page.url, domains):
            counts["domains"] += filters.count_removed(lines, None)
        elif clean := filters.apply_filters(lines, page_filters, counts):
            if filters.DUPLICATES not in settings.without:
                hashes = filters.span_hashes(clean, settings.deduplicate)
            record["spans"] += len(hashes)
            yield FilteredPage("\n".join(clean), page.url, hashes)


def sort_spans(part: int, hashes: list[np.ndarray]) -> np.ndarray:
    """Return the spans of a part, SPAN [spans], sorted by hash; equal ones are sorted by number.

    ``hashes``: uint64 [spans] for each of its pages, in order.
    """
    joined = np.concatenate([np.zeros(0, "<u8"), *hashes])
    spans = np.full(len(joined), part, SPAN)
    spans["number"] = np.argsort(joined, kind="stable")
    spans["hash"] = joined[spans["number"]]
    return spans


def find_repeated_spans(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return all spans but the first with each hash, SPAN [repeats], sorted by part.

    ``tables``: the spans of each part, in the order of parts.
    """
    spans = np.concatenate(tables)
    return spans[filters.repeated_indices(spans["hash"])]


def filter_part(work: Path, settings: CleaningConfig, part: int, pieces: list[pages.Piece]) -> None:
    """Filter a part; write pages/PART, spans/PART.npy and counts/PART.json.

    A line of ``pages`` is [text, address, number of spans] in JSON; ``spans`` is SPAN [spans], sorted by
    hash; ``counts`` is the record of ``filter_pages``.
    """
    record, hashes = empty_record(), []
    with files.atomic_file(work / "pages" / str(part)) as file:
        for text, url, page_hashes in filter_pages(settings, pieces, record):
            hashes.append(page_hashes)
            file.write(json.dumps([text, url, len(page_hashes)], ensure_ascii=False).encode() + b"\n")
    with files.atomic_file(work / "spans" / f"{part}.npy") as file:
        np.save(file, sort_spans(part, hashes))
    write_json(work / "counts" / f"{part}.json", record)


def find_repeats(work: Path, bounds: tuple[int, int], number: int, parts: int) -> None:
    """Write repeats/NUMBER.npy: the spans whose hash is in ``bounds`` and occurred before, sorted by part."""
    tables = (work / "spans" / f"{part}.npy" for part in range(parts))
    with files.atomic_file(work / "repeats" / f"{number}.npy") as file:
        np.save(file, find_repeated_spans([spans_in_range(table, "hash", bounds) for table in tables]))


def write_part(work: Path, settings: CleaningConfig, part: int, total: int) -> None:
    """Write the shards of a part from the files of the first two passes; it has ``total`` spans."""
    is_repeated = np.zeros(total, bool)
    for path in (work / "repeats").glob("*.npy"):
        is_repeated[spans_in_range(path, "part", (part, part + 1))["number"]] = True
    with (work / "pages" / str(part)).open("rb") as file:
        write_shards(work, settings, part, map(json.loads, file), is_repeated)


def write_shards(
    work: Path, settings: CleaningConfig, part: int, rows: Iterable[Sequence], is_repeated: np.ndarray
) -> None:
    """Write shards/SPLIT-PART, one ArrayRecord file per split, and written/PART.json, their sizes and counts.

    ``rows``: (text, address, number of spans) of each page, in order. ``is_repeated``: bool, for all spans.
    """
    paths = {split: work / "shards" / f"{split}-{part}" for split in BOTH_SPLITS}
    drafts = {split: files.temporary_path(path) for split, path in paths.items()}
    (work / "shards").mkdir(parents=True, exist_ok=True)
    shards = {split: ArrayRecordWriter(str(path), "group_size:1") for split, path in drafts.items()}
    serializer = ExampleSerializer(PAGE_FEATURES.get_serialized_info())
    sizes = {split: [0, 0] for split in BOTH_SPLITS}  # pages, bytes
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3, np.int64))
    for text, url in remove_repeats(rows, settings, is_repeated, counts):
        split = "validation" if hash_fraction(text, "clean") < settings.validation else "train"
        row = PAGE_FEATURES.encode_example({"text": text, "url": url})
        example = serialize_example(serializer.get_tf_example(row))
        shards[split].write(example)
        sizes[split][0] += 1
        sizes[split][1] += len(example)
    for split, shard in shards.items():
        shard.close()
        os.replace(drafts[split], paths[split])  # Beam may have two machines write one part
    write_json(work / "written" / f"{part}.json", {"sizes": sizes, "counts": counts})


def remove_repeats(
    rows: Iterable[Sequence], settings: CleaningConfig, is_repeated: np.ndarray, counts: dict[str, np.ndarray]
) -> Iterator[tuple[str, str]]:
    """Yield (text, address) of each page that remains without repeated spans; add removals to ``counts``."""
    checks_sentences = "sentences-per-page" not in settings.without
    first_span = 0
    for text, url, num_spans in rows:
        page_is_repeated = is_repeated[first_span : first_span + num_spans]
        first_span += num_spans
        lines = text.split("\n")
        if page_is_repeated.any():
            remaining = filters.remove_spans(lines, page_is_repeated, settings.deduplicate)
            has_sentences = not checks_sentences or filters.has_enough_sentences(remaining, settings.rules)
            is_blank = not any(map(str.strip, remaining))
            if is_blank or not has_sentences:
                remaining = []
            counts[filters.DUPLICATES] += filters.count_removed(lines, remaining)
            lines = remaining
        if lines:
            counts["kept"] += filters.count_removed(lines, None)
            yield "\n".join(lines), url
