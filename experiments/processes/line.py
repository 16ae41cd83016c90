"""JSON values between processes that know each other: bounded, and proved to come from the same start."""

import hmac
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from ipaddress import ip_address

LONGEST = 65536  # of what is read before a line ends: ours are shorter [bytes]


def proof() -> str:
    """That a process was started with the same command and LM_SECRET, which it gives away neither of."""
    secret, command = os.environ.get("LM_SECRET", ""), json.dumps(sys.argv[1:])
    return hmac.new(secret.encode(), command.encode(), "sha256").hexdigest()


def is_proof(found: object) -> bool:
    """Whether a process that says this is one of ours."""
    return isinstance(found, str) and hmac.compare_digest(found.encode(), proof().encode())


def listen(host: str, port: int) -> socket.socket:
    """At the address of ``host`` alone; everywhere, where that is not an address by which others reach this
    machine.

    On many a machine /etc/hosts has its own name as an address that no other machine reaches.
    """
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not ip_address(address[0].partition("%")[0]).is_loopback or is_loopback(host):
            return socket.create_server(address[:2], family=family, backlog=9999)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=9999, dualstack_ipv6=both)


def is_loopback(host: str) -> bool:
    """Whether a name or address is meant for this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Line:
    """JSON values through a socket, one a line."""

    def __init__(self, end: socket.socket):
        self.end, self.heard, self._rest = end, time.monotonic(), b""

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, value: dict) -> None:
        """Nothing, if nobody is there any more: whoever reads finds that out."""
        with suppress(OSError):
            self.end.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> list[dict] | None:
        """What has come, waiting for some of it; None at the end, which is also what is too long or no
        JSON.
        """
        try:
            data = self.end.recv(65536)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > LONGEST:
            return None
        self.heard = time.monotonic()
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # nobody of ours
            return None

    def next(self, within: float = math.inf) -> dict | None:
        """The next value, which may come in pieces; None at the end, or where it has not come in so many
        seconds.
        """
        end = time.monotonic() + within
        while (found := self.receive()) == [] and time.monotonic() < end:
            pass
        return found[0] if found else None

    def need(self) -> dict:
        """The next value; where there is none this process ends, with those that it started."""
        return self.next() or os.killpg(0, signal.SIGKILL)

    def end_with_it(self) -> None:
        """From now on this process ends when the other end of the line does."""
        threading.Thread(target=self.need, daemon=True).start()
