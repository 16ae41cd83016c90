"""How the processes of a run find each other: the first listens, the others call and prove who they are."""

import hmac
import json
import os
import socket
import sys
import time
from contextlib import suppress
from ipaddress import ip_address

from experiments.processes.exit_codes import AGAIN, EXIT_CODES, Ended
from experiments.processes.line import Line
from experiments.processes.place import Place, is_loopback

REPLY = 1.0  # for a caller to say who it is, and to be answered [seconds]
LATE = 5.0  # for the first process to say who is missing, when the time is over [seconds]


def proof() -> str:
    """That a process was started with the same command and LM_SECRET, of which it reveals neither."""
    secret, command = os.environ.get("LM_SECRET", ""), json.dumps(sys.argv[1:])
    return hmac.new(secret.encode(), command.encode(), "sha256").hexdigest()


def listen(host: str, port: int) -> socket.socket:
    """At the address of ``host`` alone; everywhere, if other machines do not reach this one by that address.

    On many a machine /etc/hosts has its own name as an address that no other machine reaches.
    """
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not ip_address(str(address[0]).partition("%")[0]).is_loopback or is_loopback(host):
            return socket.create_server(address[:2], family=family, backlog=9999)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=9999, dualstack_ipv6=both)


class Meeting:
    """The processes that have come: their hosts, and the lines to them."""

    def __init__(self, place: Place, start: float):
        self.place, self.start = place, start
        self.hosts = {place.index: socket.gethostname()}
        self.lines: dict[int, Line] = {}  # of the first process to all others, of the others to the first

    def attend(self) -> int:
        """Wait until all are there: jax's port on the first host. Ended names those who are missing."""
        end = time.monotonic() + self.start
        news = self._call(end) if self.place.index else self._receive(end)
        self.hosts |= {int(index): host for index, host in news["hosts"].items()}
        return news["port"]

    def name(self, index: int) -> str:
        host = f" on {self.hosts[index]}" if index in self.hosts else ""
        return f"process {index} of {self.place.count}{host}"

    def tell(self, value: dict) -> None:
        """Send to all to whom there is a line."""
        for line in self.lines.values():
            line.send(value)

    def _missing(self, processes: str) -> Ended:
        place = self.place
        fault = f"process {processes} of {place.count} did not come to {place.host} within {self.start:.0f} s"
        return Ended(EXIT_CODES["failed"], f"{fault}; LM_PROCESSES=1 runs each alone")

    def _receive(self, end: float) -> dict:
        """The first process: take the others in."""
        place = self.place
        try:
            door = listen(place.host, place.port)
        except OSError as error:
            fault = f"LM_COORDINATOR={place.host}:{place.port} should be a free port here: {error}"
            raise Ended(EXIT_CODES["bad settings"], fault) from error
        with door:
            while missing := sorted(set(range(place.count)) - set(self.hosts)):
                door.settimeout(max(end - time.monotonic(), 0.01))
                try:
                    line = Line(door.accept()[0])
                except TimeoutError:
                    processes = ", ".join(map(str, missing))
                    self.tell({"missing": processes})
                    raise self._missing(processes) from None
                self.take_in(line, missing)
        with socket.create_server(("", 0)) as free:  # jax takes it in a moment
            news = {"port": free.getsockname()[1], "hosts": self.hosts}
        self.tell(news)
        return news

    def take_in(self, line: Line, missing: list[int]) -> None:
        """Hear who calls: a process that is ``missing``, one that is refused and told why, or a stranger."""
        line.end.settimeout(REPLY)
        try:
            index, count, host, shown = (line.next(REPLY) or {})["hello"]
            caller, same = f"LM_PROCESS={int(index)} of {int(count)} on {host}", count == self.place.count
        except (ValueError, KeyError, TypeError):
            return
        code = EXIT_CODES["bad settings"]
        if not (isinstance(shown, str) and hmac.compare_digest(shown.encode(), proof().encode())):
            # it is not told what differs
            fault = "has another command or LM_SECRET than the first process; LM_PROCESSES=1 runs each alone"
        elif same and index in missing:
            self.hosts[index], self.lines[index] = host, line
            return
        else:
            fault = f"the first waits for {missing} of {self.place.count}"
            if same and index in self.hosts:  # its line broke, or it is left from an earlier start
                code = AGAIN
        line.send({"refused": f"{caller}: {fault}", "code": code})

    def _call(self, end: float) -> dict:
        """The others: go to the first process and wait until all have come."""
        place = self.place
        news: dict | None = None
        while not news:
            if time.monotonic() > end:
                raise self._missing("0")
            with suppress(OSError):
                line = Line(socket.create_connection((place.host, place.port), timeout=REPLY))
                line.end.settimeout(max(end - time.monotonic(), 0) + LATE)
                line.send({"hello": [place.index, place.count, self.hosts[place.index], proof()]})
                news = line.next()
            time.sleep(0.1)
        if "refused" in news:
            raise Ended(news["code"], news["refused"])
        if "missing" in news:
            raise self._missing(news["missing"])
        self.lines[0] = line
        return news
