"""`lm data clean` on many machines: the passes of ``lm.c4.passes`` as an Apache Beam pipeline.

    parts - filter -+- pages ------------------------------+
                    +- spans, cut by hash - find repeats --+- by part - write
                    +- record ------------------------------+

Beam's runner carries what the passes exchange. Only the source and the finished shards are files, and all
machines must see them under the same paths. Which copy of a span is kept does not depend on the speed of
machines, since pages are numbered and the tables of a range of hashes are sorted by part before they are
compared. So the bytes written are those that one machine would write.
"""

import contextlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm import files
from lm.c4 import pages, passes
from lm.c4.passes import SPAN, CleaningConfig
from lm.config.base import SettingError, did_you_mean

try:
    import apache_beam
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners.portability.portable_runner import PortableRunner
except ImportError as error:
    raise SettingError(
        f"beam_options need Apache Beam ({error}): pip install --constraint constraints-beam.txt '.[beam]'"
    ) from error

# Bytes of the source, as stored, for each range of hashes: with a span in 100 bytes that is 20 million spans
# of 16 bytes if no filter drops any page, and as much again while they are sorted.
RANGE_BYTES = 1 << 31
PAGES, SPANS, RECORDS, REPEATS = "pages", "spans", "records", "repeats"


def runner_options(pairs: Iterable[str]) -> PipelineOptions:
    """Return Beam's options from ``KEY=VALUE`` pairs; ``KEY`` alone is a flag.

    Raises SettingError for an unknown option. The job servers of Flink and Spark have options of their own:
    Beam warns of those that they do not know.
    """
    flags = []
    for pair in pairs:
        if not pair[:1].isalpha():  # Beam would ignore it
            raise SettingError(f"beam_options: {pair!r} should be KEY or KEY=VALUE, without dashes")
        flags.append(f"--{pair}")
    options, stderr = PipelineOptions(flags), io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            given = options.get_all_options(retain_unknown_options=True)
            runner = apache_beam.Pipeline(options=options).runner  # checks what the runner needs
    except SystemExit:
        reason = stderr.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise SettingError(f"beam_options: {reason}") from None
    except (ValueError, ImportError, AttributeError, RuntimeError) as error:
        raise SettingError(f"beam_options: {error}") from error
    known = PipelineOptions([]).get_all_options()
    for name in sorted(given.keys() - known.keys()):
        if not isinstance(runner, PortableRunner):
            raise SettingError(
                f"beam_options: {type(runner).__name__} has no {name!r}{did_you_mean(name, known)}"
            )
    return options


def run_pipeline(
    work: Path, settings: CleaningConfig, parts: list[list[pages.Piece]], options: PipelineOptions
) -> None:
    """Run the passes, and return when the job is done.

    It writes counts/PART.json, written/PART.json and the shards of every part below ``work``.
    """
    ranges = 1 + sum(piece.end - piece.start for part in parts for piece in part) // RANGE_BYTES
    numbered = [(i, json.dumps(part)) for i, part in enumerate(parts)]  # JSON, since a path may not be UTF-8
    with apache_beam.Pipeline(options=options) as pipeline:
        filtering = apache_beam.FlatMap(filter_elements, settings, ranges)
        comparing = apache_beam.FlatMapTuple(repeats_by_part)
        writing = apache_beam.Map(write_joined_part, str(work), settings)
        outputs = (
            pipeline
            | "parts" >> apache_beam.Create(numbered)
            | "spread" >> apache_beam.Reshuffle()
            | "filter" >> filtering.with_outputs(PAGES, SPANS, RECORDS)
        )
        repeats = outputs[SPANS] | "by hash" >> apache_beam.GroupByKey() | "compare" >> comparing
        streams = {PAGES: outputs[PAGES], RECORDS: outputs[RECORDS], REPEATS: repeats}
        _ = streams | "by part" >> apache_beam.CoGroupByKey() | "write" >> writing


def filter_elements(numbered: tuple[int, str], settings: CleaningConfig, ranges: int) -> Iterator[Any]:
    """Filter the pages of (part, its pieces as JSON), and yield (key, value) in three outputs.

    - PAGES: part, (number, text, address, number of spans)
    - SPANS: range of hashes, bytes of SPAN [spans]
    - RECORDS: part, its record as JSON
    """
    part, pieces = numbered
    record, hashes = passes.empty_record(), []
    rows = passes.filter_pages(settings, [pages.Piece(*piece) for piece in json.loads(pieces)], record)
    for number, (text, url, page_hashes) in enumerate(rows):
        hashes.append(page_hashes)
        yield apache_beam.pvalue.TaggedOutput(PAGES, (part, (number, text, url, len(page_hashes))))
    spans = passes.sort_spans(part, hashes)
    starts = np.array([i * 2**64 // ranges for i in range(1, ranges)], "<u8")
    for number, table in enumerate(np.split(spans, np.searchsorted(spans["hash"], starts))):
        if len(table):
            yield apache_beam.pvalue.TaggedOutput(SPANS, (number, table.tobytes()))
    text = json.dumps(record, default=np.ndarray.tolist)
    yield apache_beam.pvalue.TaggedOutput(RECORDS, (part, text))


def repeats_by_part(_range: int, tables: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (part, the numbers of its spans that occurred before, as uint32) for a range of hashes."""
    in_order = sorted((np.frombuffer(table, SPAN) for table in tables), key=lambda spans: spans["part"][0])
    repeated = passes.find_repeated_spans(in_order)
    parts, starts = np.unique(repeated["part"], return_index=True)
    for part, numbers in zip(parts, np.split(repeated["number"], starts)[1:], strict=True):
        yield int(part), numbers.tobytes()


def write_joined_part(
    joined: tuple[int, Mapping[str, Iterable[Any]]], work: str, settings: CleaningConfig
) -> None:
    """Write the shards of a part from (part, its elements by output)."""
    part, group = joined
    (record,) = group[RECORDS]
    repeated = np.zeros(json.loads(record)["spans"], bool)
    for numbers in group[REPEATS]:
        repeated[np.frombuffer(numbers, "<u4")] = True
    rows = [row for _, *row in sorted(group[PAGES])]
    passes.write_shards(Path(work), settings, part, rows, repeated)
    files.write(Path(work) / "counts" / f"{part}.json", record)
