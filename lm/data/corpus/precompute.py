"""Tokenize a corpus ahead of training, on all cores and on every machine that shares the token cache."""

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

TASK = 16  # that a process encodes in one task, one after the other [windows]
ABANDONED = 1800  # a claim of another machine that was not renewed for so long is void [seconds]


class EncodingCost(NamedTuple):
    """Hold an estimate, from a sample, of what it takes to tokenize a part of a corpus."""

    tokens: int
    bytes_read: int
    bytes_kept: int
    core_seconds: float


class Windows(NamedTuple):
    """Name consecutive windows of a shard, ``first`` to ``end`` - 1; an ``end`` of None means to the last."""

    shard: int
    first: int
    end: int | None


def windows_of(streams: Streams, size: int | None) -> list[Windows]:
    """Return the windows that the streams read first, in that order, as tasks for ``encode_windows``.

    They cover about ``size`` stored bytes, or the whole corpus if it is None.
    """
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
            last = first + TASK >= count  # how many more a compressed file has is unknown
            yield Windows(shard, first, None if last else first + TASK)
            if size is not None:
                size -= min(TASK, count - first) * stored / count


def cost_of(streams: Streams, tokens: int | None) -> EncodingCost:
    """Estimate the cost of encoding the first ``tokens`` tokens, or all of them if it is None.

    It is extrapolated from the first window of a shard; SettingError if that window has no text.
    """
    corpus, sample = streams.corpus, streams.shards(0, 0)[0]
    begin = time.process_time()
    window = corpus.shards[sample].read(0, corpus.window)
    encoded = encode(window.documents if window else [], corpus.tokenizer)
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
    """Encode what the streams read first in ``workers`` processes; return tasks claimed by other machines.

    About ``size`` stored bytes are encoded, or the whole corpus if it is None. ``advance`` is called with the
    number of windows of each task that is done.
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


_GIVEN: list[EncodedCorpus] = []  # set once in each process of the pool, since opening a vocabulary is slow


def _give(corpus: EncodedCorpus) -> None:
    _GIVEN.append(corpus)


def _encode_given(task: Windows) -> int | None:
    return encode_windows(_GIVEN[0], task)


def encode_windows(corpus: EncodedCorpus, task: Windows) -> int | None:
    """Encode the windows of a task that the cache lacks and return how many windows the task has.

    None if another process, on any machine, has claimed the task.
    """
    claim = corpus.path(task.shard, task.first).with_suffix(".claim")
    if not claimed(claim):
        return None
    numbers = itertools.count(task.first) if task.end is None else range(task.first, task.end)
    done = 0
    try:
        for number in numbers:
            # a kept window needs no reading, except in an open-ended task, where it may mark the end
            known = task.end is not None and corpus.is_kept(task.shard, number)
            if not known and corpus.read(task.shard, number) is None:
                break
            done += 1
            claim.touch()
    finally:
        claim.unlink(missing_ok=True)
    return done


def claimed(path: Path) -> bool:
    """Try to claim a task by creating the file ``path``; return whether this process now has it.

    An abandoned claim of another process is taken over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with suppress(FileExistsError), path.open("x") as file:
            file.write(f"{platform.node()} {os.getpid()}")
            return True
        with suppress(FileNotFoundError):  # the other process has finished meanwhile
            if not _abandoned(path):
                return False
            path.unlink()
    return False


def _abandoned(path: Path) -> bool:
    """Return whether the process that wrote a claim is gone, or has not renewed it for ABANDONED seconds."""
    age, (node, _, process) = time.time() - path.stat().st_mtime, path.read_text().partition(" ")
    return age > ABANDONED or (node == platform.node() and process.isdigit() and not _runs(int(process)))


def _runs(process: int) -> bool:
    """Return whether this machine has a process of that id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
