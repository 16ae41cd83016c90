"""Numbers shown elsewhere as they come, such as in TensorBoard. metrics.jsonl has them all, and nothing waits
here.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

ROOM = 1_000  # of what waits to be written [records]
PATIENCE = 5.0  # for what is not yet written at the end [seconds]

Write = Callable[[int, Mapping[str, float]], None]  # the values of a step, by name


class Tracker:
    """Gives records to ``opened``'s function in a thread of its own: it may be slow or fail, and training
    goes on.
    """

    def __init__(self, name: str, opened: Callable[[], AbstractContextManager[Write]]):
        self.name, self._opened = name, opened
        self._queue, self._works, self._lost = queue.Queue(ROOM), True, 0
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Have a record written; it is left out, and counted, where too many wait already."""
        if self._works:
            self._put((step, values), wait=0.0)

    def close(self) -> None:
        """Have the rest written, but wait for PATIENCE at most."""
        end = time.monotonic() + PATIENCE
        if self._works and self._put(None, PATIENCE):
            self._thread.join(max(end - time.monotonic(), 0.0))
        lost = self._lost + self._queue.qsize()
        if self._works and lost:
            _warn(f"{self.name} was too slow and lacks up to {lost} records; metrics.jsonl has them")
        self._works = False

    def _put(self, record: tuple | None, wait: float) -> bool:
        try:
            self._queue.put(record, block=wait > 0, timeout=wait or None)
        except queue.Full:
            self._lost += record is not None
            return False
        return True

    def _write_all(self) -> None:
        try:
            with self._opened() as write:
                while (record := self._queue.get()) is not None:
                    write(*record)
        except Exception as error:
            if self._works:
                self._works = False
                _warn(
                    f"{self.name} is left out from now on ({type(error).__name__}: {error}); training goes on"
                )


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


@contextmanager
def tensorboard(folder: Path, first: int) -> Iterator[Write]:
    """Into ``folder`` for TensorBoard, which forgets what it had from step ``first`` on.

    Event by event: the library's own writer has a thread whose end it waits for, without end if its disk is
    full.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar

    folder.mkdir(parents=True, exist_ok=True)
    # one a start, of which two may be in one second
    writer = EventsWriter(str(folder / "events"), f".{first}")
    try:
        writer.write_event(
            Event(step=first, session_log=SessionLog(status=SessionLog.START), wall_time=time.time())
        )

        def write(step: int, values: Mapping[str, float]) -> None:
            now = time.time()
            for name, value in values.items():
                writer.write_event(Event(step=step, wall_time=now, summary=scalar(name, value)))
            writer.flush()

        yield write
    finally:
        writer.close()
