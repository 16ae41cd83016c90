"""JSON values between two processes that know each other, of bounded length."""

import json
import math
import os
import signal
import socket
import threading
import time
from contextlib import suppress

LONGEST_LINE = 65536  # of what is read before a line ends: ours are shorter [bytes]


class Line:
    """JSON values through a socket, one a line."""

    def __init__(self, end: socket.socket):
        self.end, self.heard = end, time.monotonic()
        self._values: list[dict] = []  # what came behind the last value of `next`
        self._rest = b""  # what came behind the last end of a line

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, value: dict) -> None:
        """Nothing, if nobody is there any more: whoever reads finds that out."""
        with suppress(OSError):
            self.end.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """What has come, waiting for some of it; None at the end, and for what is too long or not JSON."""
        if self._values:
            values, self._values = self._values, []
            return values
        try:
            data = self.end.recv(65536)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > LONGEST_LINE:
            return None
        self.heard = time.monotonic()
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # not a process of ours
            return None

    def next(self, within: float = math.inf) -> dict | None:
        """The next value, which may come in pieces; None at the end, or after so many seconds."""
        end = time.monotonic() + within
        while (values := self.receive()) == [] and time.monotonic() < end:
            pass
        if not values:
            return None
        value, *self._values = values
        return value

    def need(self) -> dict:
        """The next value; where there is none this process ends, with those that it started."""
        value = self.next()
        if not value:
            os.killpg(0, signal.SIGKILL)
        return value or {}

    def end_with_it(self) -> None:
        """From now on this process ends when the other end of the line does."""
        threading.Thread(target=self.need, daemon=True).start()
