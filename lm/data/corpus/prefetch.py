"""Windows that are encoded ahead of the batches made of them, by processes of their own.

They follow the notes of those who make batches, and fill the folder that these look into first. Without them
every window is encoded when it is needed: what comes of it is the same.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lm.data.corpus.sampler import Streams, WindowPlace, last_note

LEAD = 2  # windows of each stream that are encoded ahead of the one that is read [windows]
PAUSE = 0.5  # where nothing is to be done [seconds]


@contextmanager
def encoding_ahead(streams: Streams, notes: Mapping[int, Path | None], processes: int) -> Iterator[None]:
    """Meanwhile ``processes`` encode what the streams in ``notes`` need next, each for some of them.

    ``notes``: by stream, the file that tells how far it has been read.
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
    """How far one stream is encoded, and how far it has been read."""

    def __init__(self, streams: Streams, stream: int, notes: Path | None):
        self._streams, self._stream, self._notes = streams, stream, notes
        self._places: list[WindowPlace | None] = [None]  # the one that is read, and those encoded after it
        self._next = streams.places(stream)

    def advance(self) -> bool:
        """Encode the next window, unless it is far enough ahead; whether it did."""
        noted = last_note(self._notes)
        read = noted[1] if noted else None
        if read not in self._places:  # reading began elsewhere, or was faster
            self._places, self._next = [read], self._streams.places(self._stream, read)
        self._places = self._places[self._places.index(read) :]
        if len(self._places) > LEAD:
            return False
        self._places.append(next(self._next))
        return True
