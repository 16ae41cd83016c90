"""A corpus encoded before any model asks for it: by all cores, on as many machines as share its folder."""

import itertools
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lm.config.base import SettingError
from lm.data.corpus.sampler import Streams
from lm.data.corpus.token_cache import EncodedCorpus, encode

TASK = 16  # windows that a process encodes at a time, one after the other [windows]
ABANDONED = 1800  # what another machine has claimed and not finished for so long is done again [seconds]


class EncodingCost(NamedTuple):
    """What it takes to encode a part of a corpus, by a sample of it."""

    tokens: int
    bytes_read: int
    bytes_kept: int
    core_seconds: float


class Windows(NamedTuple):
    """Successive windows of a shard, from ``first`` to ``end`` - 1; None: to the last."""

    shard: int
    first: int
    end: int | None


def windows_of(streams: Streams, size: int | None) -> list[Windows]:
    """What the streams read first, in the order in which they do: of ``size`` stored bytes, None: of all."""
    corpus = streams.corpus
    share = None if size is None else size / streams.count
    by_stream = [[*_of_stream(corpus, streams.shards(s, 0), share)] for s in range(streams.count)]
    return [task for tasks in itertools.zip_longest(*by_stream) for task in tasks if task is not None]


def _of_stream(corpus: EncodedCorpus, shards: list[int], size: float | None) -> Iterator[Windows]:
    for shard in shards:
        stored = corpus.shards[shard].size
        count = max(round(stored / corpus.window), 1)
        for first in range(0, count, TASK):
            if size is not None and size <= 0:
                return
            last = first + TASK >= count  # how many follow is not known of a compressed file
            yield Windows(shard, first, None if last else first + TASK)
            if size is not None:
                size -= min(TASK, count - first) * stored / count


def cost_of(streams: Streams, tokens: int | None) -> EncodingCost:
    """Of the first ``tokens``, None: of all; SettingError if the corpus has none."""
    corpus, sample = streams.corpus, streams.shards(0, 0)[0]
    begin = time.process_time()
    window = corpus.shards[sample].read(0, corpus.window)
    encoded = encode(window.documents if window else [], corpus.vocabulary)
    seconds, size = time.process_time() - begin, min(corpus.shards[sample].size, corpus.window)
    if not len(encoded.tokens):
        raise SettingError(f"data.corpus: the first window of {corpus.shards[sample].name} has no text")
    every = sum(shard.size for shard in corpus.shards) * len(encoded.tokens) / size
    count = every if tokens is None else min(tokens, every)
    kept = encoded.tokens.nbytes + 4 * len(encoded.offsets)
    factor = count / len(encoded.tokens)
    return EncodingCost(round(count), round(size * factor), round(kept * factor), seconds * factor)


def encode_ahead(
    streams: Streams, size: int | None, workers: int, advance: Callable[[int], object]
) -> list[Windows]:
    """Encode what the streams read first, in ``workers`` processes; tasks that other machines have claimed.

    ``advance`` is called with the number of windows of each task that is done.
    """
    tasks, spawn = windows_of(streams, size), multiprocessing.get_context("spawn")
    corpus, elsewhere = streams.corpus, list[Windows]()
    with ProcessPoolExecutor(workers, spawn, initializer=_give, initargs=(corpus,)) as pool:
        futures = {pool.submit(_encode_given, task): task for task in tasks}
        try:
            for future in as_completed(futures):
                if (done := future.result()) is None:
                    elsewhere.append(futures[future])
                else:
                    advance(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return elsewhere


_GIVEN: list[EncodedCorpus] = []  # to a process of the pool, once: opening its vocabulary takes a while


def _give(corpus: EncodedCorpus) -> None:
    _GIVEN.append(corpus)


def _encode_given(task: Windows) -> int | None:
    return encode_windows(_GIVEN[0], task)


def encode_windows(corpus: EncodedCorpus, task: Windows) -> int | None:
    """How many windows of a task there are, encoded now or before; None: another machine is at it."""
    claim = corpus.path(task.shard, task.first).with_suffix(".claim")
    if not claimed(claim):
        return None
    numbers = itertools.count(task.first) if task.end is None else range(task.first, task.end)
    done = 0
    try:
        for number in numbers:
            # of a whole task what is kept need not be read; of an open one it may be the mark of the end
            known = task.end is not None and corpus.is_kept(task.shard, number)
            if not known and corpus.read(task.shard, number) is None:
                break
            done += 1
            claim.touch()
    finally:
        claim.unlink(missing_ok=True)
    return done


def claimed(path: Path) -> bool:
    """Whether this process may do what ``path`` stands for: nobody else does, on any machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with suppress(FileExistsError), path.open("x") as file:
            file.write(f"{platform.node()} {os.getpid()}")
            return True
        with suppress(FileNotFoundError):  # it is done meanwhile
            if not _abandoned(path):
                return False
            path.unlink()
    return False


def _abandoned(path: Path) -> bool:
    """Whether the process that claimed it is gone, or has not been heard of for long."""
    age, (node, _, process) = time.time() - path.stat().st_mtime, path.read_text().partition(" ")
    return age > ABANDONED or (node == platform.node() and process.isdigit() and not _runs(int(process)))


def _runs(process: int) -> bool:
    """Whether there is a process of that number on this machine."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
