"""How fast a corpus like C4 in shape is fed to a model.

    python tests/bench/feeding.py FOLDER --gigabytes 10 --shards 1024

writes JSON lines of the documentation's sentences in random order, once, and then measures, each in a process
of its own: the time to the first batch from a cold start and the memory of the feeding process; a second run,
which finds what the first has kept; and the text that encoding processes get through, one and several, over
that of the tokenizer alone on one thread. Beside each time stands that of the CPU, which other work on the
machine does not lengthen: of it the rates for one core are made, from two sizes, so that starting processes
does not count.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import time
from pathlib import Path

import numpy as np

from experiments.runs.prepare import prepare, pretraining_batches, training_streams
from experiments.runs.vocabularies import find_vocabulary
from experiments.study.registry import build
from lm.data.corpora.corpus import corpus_shards
from lm.data.text.bulk import encode_ahead
from lm.data.text.shards import documents_of

DOCUMENT = 2_200  # mean of C4 [bytes]
STEPS = 20  # batches that are read [batches]
ROW = "t5/1-baseline/baseline"


def write(folder: Path, gigabytes: float, shards: int, texts: list[str]) -> None:
    """Files of equal size; those that are there stay."""
    sentences = [f"{part}." for text in texts for part in text.split(". ") if len(part) > 20]
    size = int(gigabytes * 1e9 / shards)
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        path = folder / f"c4-train.{shard:05}-of-{shards:05}.jsonl"
        if path.exists() and path.stat().st_size >= size:
            continue
        draw, lines, written = np.random.default_rng(shard), list[str](), 0
        while written < size:
            count = max(int(draw.lognormal(np.log(DOCUMENT / 120), 1.0)), 1)
            chosen = draw.integers(len(sentences), size=count).tolist()
            lines.append(json.dumps({"text": " ".join(sentences[i] for i in chosen)}) + "\n")
            written += len(lines[-1])
        path.write_text("".join(lines))


def settings(corpus: Path, vocabulary: Path):
    """The baseline at scale base, on the corpus."""
    changes = {"data.corpus": f"jsonl:{corpus}/*.jsonl", "data.vocabulary": str(vocabulary)}
    return build(ROW, "base", changes | {"tuning.mixtures": (), "finetuning.steps": 0})


def feed(corpus: Path, vocabulary: Path, cache: Path, told: multiprocessing.Queue) -> None:
    """Seconds and CPU seconds to the first batch, the same to STEPS, and the most memory [MB]."""
    begin, first = time.perf_counter(), None
    experiment = settings(corpus, vocabulary)
    batches = pretraining_batches(experiment, prepare(experiment, cache, print), "train")
    for step in range(STEPS):
        batches(step, slice(None))
        first = first or (time.perf_counter() - begin, time.process_time())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    told.put((*first, time.perf_counter() - begin, time.process_time(), memory))


def encode(corpus: Path, vocabulary: Path, cache: Path, workers: int, size: int, told) -> None:
    """Seconds in which so many processes start and encode ``size`` bytes, and their CPU seconds."""
    experiment = settings(corpus, vocabulary)
    streams = training_streams(experiment, prepare(experiment, cache, print))
    begin = time.perf_counter()
    encode_ahead(streams, size, workers, lambda windows: None)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    told.put((time.perf_counter() - begin, children.ru_utime + children.ru_stime))


def alone(function, *arguments):
    """What a function tells in a fresh process."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=function, args=(*arguments, told))
    process.start()
    found = told.get()
    process.join()
    return found


def tokenizer_alone(corpus: Path, vocabulary: Path) -> float:
    """Bytes a CPU second of one thread."""
    from itertools import islice

    from lm.data.text.own import SentencePiece

    shards = corpus_shards(f"jsonl:{corpus}/*.jsonl", "train", corpus)
    texts = [*islice(documents_of(shards), 10_000)]
    processor, begin = SentencePiece(vocabulary, 100).processor, time.process_time()
    processor.encode(texts, num_threads=1)
    return sum(len(text.encode()) for text in texts) / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shards", type=int, default=1024)
    parser.add_argument("--encoded", type=int, default=200, help="by so many processes [MB]")
    options = parser.parse_args()
    corpus, cache = options.folder / f"{options.gigabytes:g}GB", options.folder / "cache"
    documentation = corpus_shards("documentation", "train", cache)
    write(corpus, options.gigabytes, options.shards, [*documents_of(documentation)])
    experiment = build(ROW, "base", {"data.corpus": "documentation", "data.vocabulary_size": 8_000})
    vocabulary = find_vocabulary(experiment, cache, print).path
    shutil.rmtree(cache / "tokens", ignore_errors=True)
    shutil.rmtree(cache / "rows", ignore_errors=True)
    for start in ("cold", "kept"):
        first, first_cpu, whole, cpu, memory = alone(feed, corpus, vocabulary, cache)
        times = (
            f"first batch {first:.1f} s (CPU {first_cpu:.1f}), {STEPS} batches {whole:.1f} s (CPU {cpu:.1f})"
        )
        print(f"{start}: {times}, {memory:.0f} MB", flush=True)
    rate, size = tokenizer_alone(corpus, vocabulary), options.encoded * 1_000_000
    print(f"tokenizer alone: {rate / 1e6:.1f} MB a CPU second", flush=True)
    for workers in [count for count in (1, 2, 4) if count <= len(os.sched_getaffinity(0))]:
        spent = []
        for part in (size // 4, size):
            shutil.rmtree(cache / "tokens", ignore_errors=True)
            spent.append(alone(encode, corpus, vocabulary, cache, workers, part))
        seconds, cpu = np.diff(spent, axis=0)[0] / (size - size // 4) * 1e6
        share = f"{1 / cpu:.1f} MB a CPU second, {1e6 / cpu / rate:.2f} x the tokenizer"
        print(f"{workers} processes: {1 / seconds:.1f} MB/s; {share}", flush=True)


if __name__ == "__main__":
    main()
