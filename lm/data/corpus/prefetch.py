"""Tokenize windows ahead of the batches that are made of them, in background processes.

The processes follow the notes that say how far each stream has been read, and fill the token cache. Without
them every window is encoded when it is first needed; the batches are the same.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lm.data.corpus.sampler import Streams, WindowPlace, last_note

LEAD = 2  # of each stream, encoded ahead of the one that is being read [windows]
PAUSE = 0.5  # between polls when every stream is far enough ahead [seconds]


@contextmanager
def encoding_ahead(streams: Streams, notes: Mapping[int, Path | None], processes: int) -> Iterator[None]:
    """Run ``processes`` background processes that encode what the streams in ``notes`` need next.

    ``notes`` maps each stream to the file that says how far it has been read; the streams are divided among
    the processes, which end with the context.
    """
    spawn = multiprocessing.get_context("spawn")
    shares = [dict([*notes.items()][k::processes]) for k in range(processes)]
    arguments = [(streams, share, os.getpid()) for share in shares if share]
    children = [spawn.Process(target=_follow, args=each, daemon=True) for each in arguments]
    for child in children:
        child.start()
    try:
        yield
    finally:
        for child in children:
            child.terminate()
            child.join()


def _follow(streams: Streams, notes: Mapping[int, Path | None], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    leads = [Lead(streams, stream, path) for stream, path in notes.items()]
    while os.getppid() == parent:
        if not sum(lead.advance() for lead in leads):
            time.sleep(PAUSE)


class Lead:
    """Track how far one stream is encoded, and how far it has been read."""

    def __init__(self, streams: Streams, stream: int, notes: Path | None):
        self._streams, self._stream, self._notes = streams, stream, notes
        self._places: list[WindowPlace | None] = [None]  # the one being read, and those encoded after it
        self._next = streams.places(stream)

    def advance(self) -> bool:
        """Encode the next window unless LEAD windows are ready already; return whether one was encoded."""
        noted = last_note(self._notes)
        read = noted[1] if noted else None
        if read not in self._places:  # reading started elsewhere, or overtook this process
            self._places, self._next = [read], self._streams.places(self._stream, read)
        self._places = self._places[self._places.index(read) :]
        if len(self._places) > LEAD:
            return False
        self._places.append(next(self._next))
        return True
