"""Tokenize a corpus before training, on all cores and on every machine that shares the token cache."""

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lm.config.base import SettingError
from lm.data.corpus.process_pool import process_pool
from lm.data.corpus.sampler import CorpusSampler
from lm.data.corpus.token_cache import EncodedCorpus, encode_documents

WINDOWS_PER_TASK = 16
SAMPLED_WINDOWS = 8  # from which costs are estimated
CLAIM_TIMEOUT = 1800  # a claim of another machine that was not renewed for so long is void [seconds]


class EncodingCost(NamedTuple):
    """Hold an estimate of what it takes to tokenize a part of a corpus."""

    tokens: int
    bytes_read: int
    bytes_written: int
    core_seconds: float


class WindowRange(NamedTuple):
    """Name consecutive windows of a shard, ``first`` to ``end`` - 1, or all from ``first`` on."""

    shard: int
    first: int
    end: int | None


def window_ranges(sampler: CorpusSampler, num_bytes: int | None) -> list[WindowRange]:
    """Return the windows that the streams read first, in that order, as tasks for ``encode_windows``.

    They cover about ``num_bytes`` stored bytes, or the whole corpus if it is None.
    """
    corpus, streams = sampler.corpus, range(sampler.num_streams)
    share = None if num_bytes is None else num_bytes / sampler.num_streams
    by_stream = [[*_ranges_of_shards(corpus, sampler.shard_order(stream, 0), share)] for stream in streams]
    rounds = itertools.zip_longest(*by_stream)  # each has the next task of every stream
    return [task for tasks in rounds for task in tasks if task is not None]


def _ranges_of_shards(
    corpus: EncodedCorpus, shards: list[int], num_bytes: float | None
) -> Iterator[WindowRange]:
    for shard in shards:
        shard_bytes = corpus.shards[shard].size
        num_windows = max(round(shard_bytes / corpus.window_bytes), 1)
        for first in range(0, num_windows, WINDOWS_PER_TASK):
            if num_bytes is not None and num_bytes <= 0:
                return
            is_last = first + WINDOWS_PER_TASK >= num_windows
            # the last is open-ended: a compressed file may have more windows than its size suggests
            yield WindowRange(shard, first, None if is_last else first + WINDOWS_PER_TASK)
            if num_bytes is not None:
                num_bytes -= min(WINDOWS_PER_TASK, num_windows - first) * shard_bytes / num_windows


def estimate_cost(sampler: CorpusSampler, tokens: int | None) -> EncodingCost:
    """Estimate the cost of encoding the first ``tokens`` tokens, or all of them if it is None.

    It is extrapolated from SAMPLED_WINDOWS windows, of as many shards as there are. Windows of compressed
    JSON lines and of parquet hold more text than stored bytes: there the estimate is too low, by the factor
    of compression. SettingError if the windows have no text.
    """
    corpus, order = sampler.corpus, sampler.shard_order(0, 0)
    num_tokens = bytes_read = bytes_written = 0
    begin = time.process_time()
    for index in range(SAMPLED_WINDOWS):
        shard = corpus.shards[order[index * len(order) // SAMPLED_WINDOWS]]
        num_windows = max(round(shard.size / corpus.window_bytes), 1)
        window = shard.read(index % num_windows, corpus.window_bytes)
        encoded = encode_documents(window.documents if window else [], corpus.tokenizer)
        num_tokens += len(encoded.tokens)
        bytes_read += min(shard.size, corpus.window_bytes)
        bytes_written += encoded.tokens.nbytes + 4 * len(encoded.offsets)
    seconds = time.process_time() - begin
    if not num_tokens:
        raise SettingError(f"data.corpus: the first windows of {corpus.shards[order[0]].name} have no text")
    corpus_tokens = sum(shard.size for shard in corpus.shards) * num_tokens / bytes_read
    encoded_tokens = corpus_tokens if tokens is None else min(tokens, corpus_tokens)
    factor = encoded_tokens / num_tokens
    return EncodingCost(
        round(encoded_tokens), round(bytes_read * factor), round(bytes_written * factor), seconds * factor
    )


def pretokenize(
    sampler: CorpusSampler, num_bytes: int | None, workers: int, advance: Callable[[int], object]
) -> list[WindowRange]:
    """Encode what the streams read first, in ``workers`` processes.

    About ``num_bytes`` stored bytes are encoded, or the whole corpus if it is None. ``advance`` is called
    with the number of windows of each task that is done. Returns the tasks that other machines have claimed.
    """
    tasks, claimed_elsewhere = window_ranges(sampler, num_bytes), list[WindowRange]()
    with process_pool(workers, _initialize_worker, (sampler.corpus,)) as pool:
        futures = {pool.submit(_encode_in_worker, task): task for task in tasks}
        for future in as_completed(futures):
            num_windows = future.result()
            if num_windows is None:
                claimed_elsewhere.append(futures[future])
            else:
                advance(num_windows)
    return claimed_elsewhere


_WORKER_CORPUS: list[EncodedCorpus] = []  # set once in each worker, since loading a tokenizer is slow


def _initialize_worker(corpus: EncodedCorpus) -> None:
    _WORKER_CORPUS.append(corpus)


def _encode_in_worker(task: WindowRange) -> int | None:
    return encode_windows(_WORKER_CORPUS[0], task)


def encode_windows(corpus: EncodedCorpus, task: WindowRange) -> int | None:
    """Encode the windows of a task that the cache lacks and return how many windows the task has.

    None if another process, on any machine, has claimed the task.
    """
    claim = corpus.path(task.shard, task.first).with_suffix(".claim")
    if not try_claim(claim):
        return None
    windows = itertools.count(task.first) if task.end is None else range(task.first, task.end)
    num_windows = 0
    try:
        for window in windows:
            # a cached window needs no reading, except in an open-ended task, where it may be past the end
            is_done = task.end is not None and corpus.is_cached(task.shard, window)
            if not is_done and corpus.read(task.shard, window) is None:
                break
            num_windows += 1
            claim.touch()
    finally:
        claim.unlink(missing_ok=True)
    return num_windows


def try_claim(path: Path) -> bool:
    """Try to claim a task by creating the file ``path``; return whether this process now has it.

    An abandoned claim of another process is taken over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with suppress(FileExistsError), path.open("x") as file:
            file.write(f"{platform.node()} {os.getpid()}")
            return True
        with suppress(FileNotFoundError):  # the other process has finished meanwhile
            if not _is_abandoned(path):
                return False
            path.unlink()
    return False


def _is_abandoned(path: Path) -> bool:
    """Return whether the process that wrote a claim is gone, or has not renewed it for CLAIM_TIMEOUT."""
    age = time.time() - path.stat().st_mtime
    node, _, process = path.read_text().partition(" ")
    is_gone = node == platform.node() and process.isdigit() and not _process_exists(int(process))
    return age > CLAIM_TIMEOUT or is_gone


def _process_exists(process: int) -> bool:
    """Return whether this machine has a process of that id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True
