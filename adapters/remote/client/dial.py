"""Two ways to connect to a daemon: launch it as a child that cannot outlive this process, or reach a running one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from attrs import define, field

from adapters.remote.protocol import shared_memory
from adapters.remote.protocol.channel import Channel, Shared
from adapters.remote.protocol.keepalive import kept_alive
from adapters.remote.protocol.lent_memory import Lender

LEAVE_S = 2  # seconds for a child to end by itself after its connection was closed
CONNECT_S = 5


class Dial(Protocol):
    """A way to connect to one daemon, any number of times."""

    @property
    def name(self) -> str: ...

    @property
    def hello_s(self) -> float:
        """Seconds that the whole handshake may take."""
        ...

    def begin(self) -> None:
        """Start the daemon if it does not run already. Raises OSError.

        Called before `open`, so that several daemons start at the same time.
        """
        ...

    def open(self) -> Channel:
        """Return a new connection. Raises ConnectionBroken or OSError."""
        ...

    def share(self, sizes: tuple[int, int]) -> Shared | None:
        """Return memory shared with the daemon. sizes: bytes to the daemon and from it.

        Returns None if there is none, for instance because the daemon is on another machine.
        """
        ...

    def end(self) -> str:
        """Close everything and end the process. Return how the process ended, in words; empty if there was none."""
        ...


@define(eq=False)
class Launched:
    """A daemon that is launched as a child, at the other end of a socket pair.

    However this process ends, the child reads the end of the connection and ends as well.

    name: as the user calls it. command: its argv, to which the descriptors are added. environment: variables that are
    set for it, the secret among them. lender: memory that it may read.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    lender: Lender | None = None
    hello_s: float = 120  # an interpreter that imports torch on a busy machine
    _process: subprocess.Popen[bytes] | None = None
    _memory: tuple[int, ...] = ()
    _lock: threading.Lock = field(factory=threading.Lock)
    _begun: Channel | None = None

    def open(self) -> Channel:
        if self._begun is None:
            self.begin()
        channel = self._begun
        self._begun = None
        assert channel is not None
        return channel

    def begin(self) -> None:
        self.end()
        ours, theirs = socket.socketpair()
        made = [shared_memory.make_memory(), shared_memory.make_memory()]
        with self._lock:
            self._memory = tuple(segment for segment in made if segment is not None)
            seen = self._memory if self.lender is None else (*self._memory, self.lender.descriptor)
            words = [*self.command, "--fd", ",".join(map(str, (theirs.fileno(), *seen)))]
            try:
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603 - the interpreter that the user named, or this one
                        words,
                        env={**os.environ, **self.environment},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,  # its log goes to stderr, as this process's does
                        pass_fds=(theirs.fileno(), *seen),
                        start_new_session=True,  # Ctrl-C is for the server to handle
                    )
            except OSError:
                ours.close()
                raise
        self._begun = Channel(ours)

    def share(self, sizes: tuple[int, int]) -> Shared | None:
        if len(self._memory) != 2 or not all(sizes):
            return None
        try:
            out, into = (
                shared_memory.grow_memory(segment, size) for segment, size in zip(self._memory, sizes, strict=True)
            )
        except OSError:
            return None
        return Shared(out, into, lender=self.lender)

    def end(self) -> str:
        begun = self._begun
        self._begun = None
        if begun is not None:
            begun.close()
        with self._lock:
            process = self._process
            self._process = None
            memory = self._memory
            self._memory = ()
        for segment in memory:
            os.close(segment)
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            return _describe_exit(process.wait(LEAVE_S))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)  # the signal ends any process, but a system call may delay that
        return "its process was killed"


def _describe_exit(status: int) -> str:
    """Return in words how a process ended."""
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


@define(eq=False)
class AtAddress:
    """A daemon that runs already and listens at host:port."""

    name: str
    address: tuple[str, int]
    hello_s: float = 30  # twice the time that a daemon lets a server wait for its turn (`TURN_S`)

    def begin(self) -> None:
        """Do nothing: the daemon is started by someone else."""

    def open(self) -> Channel:
        connection = socket.create_connection(self.address, CONNECT_S)
        return Channel(kept_alive(connection))

    def share(self, _: tuple[int, int]) -> None:
        return None

    def end(self) -> str:
        return ""
