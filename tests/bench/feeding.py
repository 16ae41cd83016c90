"""How fast a corpus like C4 in shape is fed to a model.

    python tests/bench/feeding.py FOLDER --gigabytes 10 --shards 1024

writes JSON lines of the documentation's sentences in random order, once, and then measures, each in a process
of its own: the time to the first batch from a cold start and the memory of the feeding process; a second run,
which finds what the first has kept; and, in turns, the text that one and several processes get through by the
clock: with the tokenizer alone, and with all that encoding does (read, encode, keep). What the machine itself
lacks for two processes to be twice as fast as one, the tokenizer alone shows too.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import time
from itertools import islice, product
from pathlib import Path
from statistics import median

import numpy as np

from experiments.runs.prepare import prepare, pretraining_batches, training_streams
from experiments.runs.vocabularies import find_vocabulary
from experiments.study.registry import build
from lm.data.corpus.precompute import pretokenize
from lm.data.corpus.shards import iter_documents
from lm.data.corpus.spec import corpus_shards
from lm.tokenizers.sentencepiece import SentencePieceTokenizer

DOCUMENT = 2_200  # mean of C4 [bytes]
DOCUMENTS = 30_000  # that the tokenizer alone encodes
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
    """Bytes a second that so many processes encode of ``size`` bytes, once each has its first shard."""
    shutil.rmtree(cache / "tokens", ignore_errors=True)
    experiment = settings(corpus, vocabulary)
    streams, done = training_streams(experiment, prepare(experiment, cache, print)), list[float]()
    pretokenize(streams, size, workers, lambda _: done.append(time.perf_counter()))
    shards = [shard.size for shard in streams.corpus.shards]
    told.put(sum(shards) / len(shards) * (len(done) - workers) / (done[-1] - done[workers - 1]))


def tokenize(corpus: Path, vocabulary: Path, ready, told) -> None:
    """Bytes a second of one thread of the tokenizer alone, on text that is in memory."""
    shards = corpus_shards(f"jsonl:{corpus}/*.jsonl", "train", corpus)
    texts = [*islice(iter_documents(shards), DOCUMENTS)]
    processor, size = (
        SentencePieceTokenizer(vocabulary, 100).processor,
        sum(len(text.encode()) for text in texts),
    )
    ready.wait()
    begin = time.perf_counter()
    processor.encode(texts, num_threads=1)
    told.put(size / (time.perf_counter() - begin))


def together(count: int, function, *arguments) -> list:
    """What a function tells in each of so many fresh processes."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    more = (context.Barrier(count),) if function is tokenize else ()
    processes = [context.Process(target=function, args=(*arguments, *more, told)) for _ in range(count)]
    for process in processes:
        process.start()
    found = [told.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--shards", type=int, default=1024)
    parser.add_argument("--encoded", type=int, default=400, help="by each process [MB]")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    corpus, cache = options.folder / f"{options.gigabytes:g}GB", options.folder / "cache"
    documentation = corpus_shards("documentation", "train", cache)
    write(corpus, options.gigabytes, options.shards, [*iter_documents(documentation)])
    experiment = build(ROW, "base", {"data.corpus": "documentation", "data.vocabulary_size": 8_000})
    vocabulary = find_vocabulary(experiment, cache, print).path
    shutil.rmtree(cache / "tokens", ignore_errors=True)
    shutil.rmtree(cache / "rows", ignore_errors=True)
    for start in ("cold", "kept"):
        [(first, first_cpu, whole, cpu, memory)] = together(1, feed, corpus, vocabulary, cache)
        times = (
            f"first batch {first:.1f} s (CPU {first_cpu:.1f}), {STEPS} batches {whole:.1f} s (CPU {cpu:.1f})"
        )
        print(f"{start}: {times}, {memory:.0f} MB", flush=True)
    counts = [count for count in (1, 2, 4) if count <= len(os.sched_getaffinity(0))]
    rates: dict[tuple[str, int], list[float]] = {}
    for turn, workers in product(range(options.turns), counts):
        size = options.encoded * 1_000_000 * workers
        alone = sum(together(workers, tokenize, corpus, vocabulary))
        [whole] = together(1, encode, corpus, vocabulary, cache, workers, size)
        rates.setdefault(("tokenizer", workers), []).append(alone / 1e6)
        rates.setdefault(("encoding", workers), []).append(whole / 1e6)
        ratio = f"{whole / alone:.2f} of the tokenizer"
        print(f"{workers} processes, turn {turn}: {whole / 1e6:.1f} MB/s, {ratio}", flush=True)
    for (what, workers), values in rates.items():
        times = median(values) / median(rates[what, 1])
        print(f"{what}, {workers} processes: {median(values):.1f} MB/s, {times:.2f} times that of one")


if __name__ == "__main__":
    main()
