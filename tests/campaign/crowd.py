"""A crowd of clients that hold connections to a server, in a process of its own.

    python -m tests.campaign.crowd KIND PORT COUNT RATE

It opens COUNT connections at once, opens one anew where the server closes it, at most RATE a second, and ends when its
standard input does. Then it prints how many connections it has opened. All traffic goes to 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import define, field, frozen

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
GET = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
STREAM = json.dumps({"prompt": "x = 1\n", "stream": True, "max_tokens": 400}).encode()
TRICKLE_S = 0.5  # between two bytes of a slow body
DROPPING = 4  # threads that open and drop
DROPPED = 10  # times the rate: so many connections they open
LONGEST_S = 120.0  # however long its parent runs


@frozen
class Manner:
    """The behaviour of a connection. sends: bytes at once. trickles: then one byte now and then. reads: whether it
    reads its answers.
    """

    sends: bytes
    trickles: bytes = b""
    reads: bool = True


MANNERS: Mapping[str, Manner] = {
    "silent": Manner(b""),
    "half heads": Manner(POST + b"X-More: "),
    "post heads": Manner(POST + b"Content-Length: 100000\r\n\r\n"),
    "slow bodies": Manner(POST + b"Content-Length: 100000\r\n\r\n{", trickles=b" "),
    "half bodies": Manner(POST + b"Content-Length: 100000\r\n\r\n{" + b" " * 70_000),
    "unread gets": Manner(GET, reads=False),
    "unread pipelines": Manner(GET * 40, reads=False),
    "unread streams": Manner(POST + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM, reads=False),
    "keep-alives": Manner(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"),
    "junk": Manner(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))),
    "unwanted bodies": Manner(b"GET /health HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n"),
}
DROPS = "open and drop"
KINDS = (*MANNERS, DROPS)


@define(eq=False)
class Crowd:
    """Connections of one manner, to one port; opened anew where the server ends them."""

    manner: Manner
    port: int
    count: int
    rate: float
    opened: int = 0
    _epoll: select.epoll = field(factory=select.epoll)
    _open: dict[int, socket.socket] = field(factory=dict)

    def hold(self, ended: Callable[[], bool]) -> None:
        began = trickled = time.monotonic()
        while not ended():
            now = time.monotonic()
            allowed = int((now - began) * self.rate) + self.count - self.opened
            for _ in range(min(allowed, self.count - len(self._open))):
                self._begin()
            if self.manner.trickles and now - trickled > TRICKLE_S:
                trickled = now
                for number in list(self._open):
                    self._send(number, self.manner.trickles)
            for number, mask in self._epoll.poll(0.02):
                if mask & select.EPOLLOUT:
                    self._epoll.modify(number, self._wanted())
                    self._send(number, self.manner.sends)
                elif mask & select.EPOLLIN:
                    self._read(number)
                else:
                    self._end(number)

    def _wanted(self) -> int:
        return select.EPOLLIN if self.manner.reads else select.EPOLLRDHUP

    def _begin(self) -> None:
        one = socket.socket()
        one.setblocking(False)
        if not self.manner.reads:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect_ex(("127.0.0.1", self.port))
        self._open[one.fileno()] = one
        self._epoll.register(one, self._wanted() | select.EPOLLOUT)
        self.opened += 1

    def _send(self, number: int, raw: bytes) -> None:
        """Send what the socket takes; the rest is left out."""
        try:
            if raw:
                self._open[number].send(raw)
        except BlockingIOError:
            pass
        except OSError:
            self._end(number)

    def _read(self, number: int) -> None:
        try:
            if not self._open[number].recv(1 << 16):
                self._end(number)
        except BlockingIOError:
            pass
        except OSError:
            self._end(number)

    def _end(self, number: int) -> None:
        self._open.pop(number).close()  # which takes it out of the epoll, too


def drop(port: int, rate: float, ended: Callable[[], bool]) -> int:
    """Open and close at once, in a few threads. How often."""
    counts = [0] * DROPPING

    def run(index: int) -> None:
        began = time.monotonic()
        while not ended():
            if counts[index] * DROPPING > (time.monotonic() - began) * rate * DROPPED:
                time.sleep(0.001)
                continue
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 10).close()
            counts[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(DROPPING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


@define
class Attacking:
    """opened: connections, once it has ended."""

    opened: int = 0


@contextmanager
def crowd(kind: str, port: int, count: int, rate: float) -> Iterator[Attacking]:
    """A crowd of this kind, in a process of its own, while the block runs."""
    words = [sys.executable, "-m", "tests.campaign.crowd", kind, str(port), str(count), str(rate)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    found = Attacking()
    try:
        yield found
    finally:
        try:
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait()
    found.opened = int(said)


def main() -> None:
    kind, port, count, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    end = time.monotonic() + LONGEST_S

    def ended() -> bool:
        return over.is_set() or time.monotonic() > end

    if kind == DROPS:
        opened = drop(port, rate, ended)
    else:
        attacking = Crowd(MANNERS[kind], port, count, rate)
        attacking.hold(ended)
        opened = attacking.opened
    print(opened, flush=True)  # noqa: T201
    os._exit(0)  # thousands of sockets are closed by the kernel


if __name__ == "__main__":
    main()
