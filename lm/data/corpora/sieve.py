"""The three passes of `lm clean` over the parts of a crawl, each a function of files that were there before.

1. Filter a part's pages and note the hashes of their spans, sorted. 2. For a range of hashes, find the spans
that were there before. 3. Take those out of a part and write its share of the data set. What a pass has
written appears whole and is not written again, so that a killed command goes on where it stopped; none holds
more than a part or a range.
"""

import bisect
import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.core.example_serializer import ExampleSerializer

from lm import files
from lm.data.corpora import cleaning, crawl
from lm.data.corpora.harvest import share

FEATURES = tfds.features.FeaturesDict({"text": tfds.features.Text(), "url": tfds.features.Text()})
SPLITS = ("train", "validation")
SPAN = np.dtype([("hash", "<u8"), ("part", "<u4"), ("number", "<u4")])
NAMED = 20  # so many damaged places are named; all are counted


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """All that decides what is written."""

    source: str
    files: str  # digest of names and contents, and of the lists of words and hosts
    without: tuple[str, ...]
    deduplicate: cleaning.Unit
    validation: float
    rules: cleaning.Rules


def write(path: Path, content: Mapping[str, Any]) -> None:
    files.write(path, json.dumps(content, indent=1, default=np.ndarray.tolist))


def within(path: Path, field: str, bounds: tuple[int, int]) -> np.ndarray:
    """SPAN [spans]: those of a table, sorted by ``field``, in which it is within bounds."""
    table = np.load(path, mmap_mode="r")
    first, last = (bisect.bisect_left(table, bound, key=lambda span: span[field]) for bound in bounds)
    return np.array(table[first:last])


def filter_part(work: Path, settings: Cleaning, place: int, pieces: list[crawl.Piece]) -> None:
    """pages/PLACE: [text, address, spans] a line; spans/PLACE: SPAN, sorted by hash; counts/PLACE."""
    rules = settings.rules
    steps = cleaning.filters(rules, (name for name in cleaning.FILTERS if name not in settings.without))
    domains = frozenset(Path(rules.domains).read_text("utf-8").lower().split()) if rules.domains else None
    counts = defaultdict(lambda: np.zeros(3, np.int64))
    damaged, damages, found = 0, [], [np.zeros(0, "<u8")]
    with files.complete(work / "pages" / str(place)) as file:
        for page in (page for piece in pieces for page in crawl.read(piece)):
            if isinstance(page, crawl.Damage):
                damaged += 1
                damages += [page] if damaged <= NAMED else []
                continue
            lines = page.text.splitlines()
            counts["read"] += cleaning.removed(lines, None)
            if domains is not None and not cleaning.in_domains(page.url, domains):
                counts["domains"] += cleaning.removed(lines, None)
            elif lines := cleaning.cleaned(lines, steps, counts):
                if cleaning.DUPLICATES not in settings.without:
                    found.append(cleaning.span_hashes(lines, settings.deduplicate))
                row = ["\n".join(lines), page.url, len(found[-1])]
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    hashes = np.concatenate(found)
    spans = np.full(len(hashes), place, SPAN)
    spans["number"] = np.argsort(hashes, kind="stable")
    spans["hash"] = hashes[spans["number"]]
    with files.complete(work / "spans" / f"{place}.npy") as file:
        np.save(file, spans)
    about = {"spans": len(spans), "damaged": damaged, "damages": damages, "counts": counts}
    write(work / "counts" / f"{place}.json", about)


def find_repeats(work: Path, bounds: tuple[int, int], place: int, parts: int) -> None:
    """repeats/PLACE: SPAN, sorted by part: each span whose hash is within bounds and was there before."""
    spans = np.concatenate([within(work / "spans" / f"{part}.npy", "hash", bounds) for part in range(parts)])
    with files.complete(work / "repeats" / f"{place}.npy") as file:
        np.save(file, spans[cleaning.repeated(spans["hash"])])


def write_part(work: Path, settings: Cleaning, place: int, total: int) -> None:
    """shards/SPLIT-PLACE, an array_record a split, and written/PLACE.json, their counts."""
    repeated = np.zeros(total, bool)
    for path in (work / "repeats").glob("*.npy"):
        repeated[within(path, "part", (place, place + 1))["number"]] = True
    (work / "shards").mkdir(exist_ok=True)
    shards = {
        split: ArrayRecordWriter(str(work / "shards" / f"{split}-{place}"), "group_size:1")
        for split in SPLITS
    }
    serializer = ExampleSerializer(FEATURES.get_serialized_info())
    sizes = {split: [0, 0] for split in SPLITS}  # pages, bytes
    counts = defaultdict(lambda: np.zeros(3, np.int64))
    for text, url in unique(work / "pages" / str(place), settings, repeated, counts):
        split = "validation" if share(text, "clean") < settings.validation else "train"
        example = serializer.get_tf_example(FEATURES.encode_example({"text": text, "url": url}))
        # else each process has an order of the fields
        example = example.SerializeToString(deterministic=True)
        shards[split].write(example)
        sizes[split][0] += 1
        sizes[split][1] += len(example)
    for shard in shards.values():
        shard.close()
    write(work / "written" / f"{place}.json", {"sizes": sizes, "counts": counts})


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
                if "sentences-per-page" not in settings.without and not cleaning.long_enough(
                    left, settings.rules
                ):
                    left = []
                counts[cleaning.DUPLICATES] += cleaning.removed(lines, left)
                lines = left
            if lines:
                counts["kept"] += cleaning.removed(lines, None)
                yield "\n".join(lines), url
