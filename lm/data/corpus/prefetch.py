"""Tokenize windows in background processes, before batches are made of them.

The processes follow the index files, which say how far each stream has been read, and fill the token cache.
Without them every window is encoded when it is first needed; the batches are the same.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lm.config.base import SettingError
from lm.data.corpus.sampler import CorpusSampler, WindowPosition, last_entry

WINDOWS_AHEAD = 2  # encoded of each stream after the window that is being read
POLL_SECONDS = 0.5  # between looks at the index files when every stream is far enough ahead


@contextmanager
def pretokenize_in_background(
    sampler: CorpusSampler, index_files: Mapping[int, Path | None], processes: int
) -> Iterator[None]:
    """Run ``processes`` background processes that encode what the streams in ``index_files`` read next.

    ``index_files`` maps each stream to the file that says how far it has been read. The streams are divided
    among the processes, which end with the context. A stream with text that cannot be read is left to
    training, which raises the error when it reads that text.
    """
    spawn = multiprocessing.get_context("spawn")
    children = []
    for k in range(processes):
        if own_files := dict([*index_files.items()][k::processes]):
            arguments = (sampler, own_files, os.getpid())
            children.append(spawn.Process(target=_run_worker, args=arguments, daemon=True))
    for child in children:
        child.start()
    try:
        yield
    finally:
        for child in children:
            child.terminate()
            child.join()


def _run_worker(sampler: CorpusSampler, index_files: Mapping[int, Path | None], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    streams = [StreamPretokenizer(sampler, stream, path) for stream, path in index_files.items()]
    while streams and os.getppid() == parent:
        is_idle = True
        for stream in [*streams]:
            try:
                if stream.advance():
                    is_idle = False
            except (SettingError, OSError):
                # Training raises it, in the process of the run, if it comes to read that window.
                streams.remove(stream)
        if is_idle:
            time.sleep(POLL_SECONDS)


class StreamPretokenizer:
    """Encode the windows of one stream that are read next."""

    def __init__(self, sampler: CorpusSampler, stream: int, index_file: Path | None):
        self._sampler, self._stream, self._index_file = sampler, stream, index_file
        # the window that is being read, None at the start, and those encoded after it
        self._encoded: list[WindowPosition | None] = [None]
        self._windows = sampler.windows(stream)

    def advance(self) -> bool:
        """Encode the next window unless WINDOWS_AHEAD are ready already; return whether one was encoded."""
        entry = last_entry(self._index_file)
        current = entry.position if entry else None
        if current not in self._encoded:  # reading started elsewhere, or overtook this process
            self._encoded = [current]
            self._windows = self._sampler.windows(self._stream, current)
        self._encoded = self._encoded[self._encoded.index(current) :]
        if len(self._encoded) > WINDOWS_AHEAD:
            return False
        self._encoded.append(next(self._windows))
        return True
