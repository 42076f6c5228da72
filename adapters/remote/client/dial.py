"""How a daemon is had: launched as a child that cannot outlive this process, or reached where it runs already."""

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

LEAVE_S = 2  # for a child to leave by itself, once its connection is closed
CONNECT_S = 5


class Dial(Protocol):
    """How a daemon is had: one that is launched, or one that runs already."""

    @property
    def name(self) -> str: ...

    @property
    def hello_s(self) -> float:
        """Seconds that a hello may take altogether."""
        ...

    def begin(self) -> None:
        """Have it start, where it is not there yet, so that several start side by side. Raises OSError."""
        ...

    def open(self) -> Channel:
        """Raises Broken, OSError."""
        ...

    def share(self, sizes: tuple[int, int]) -> Shared | None:
        """Memory that the daemon has, too, of so many bytes each way; None where it is on another machine."""
        ...

    def end(self) -> str:
        """Close everything, leave no process. What became of it, in words, if that says anything."""
        ...


@define(eq=False)
class Launched:
    """A child at the other end of a socket pair: when this process ends, however, the child reads an end and leaves.

    name: as the user calls it. command: its argv, to which the descriptors are added. environment: what is set for it,
    a secret among that. lender: of what it may see.
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
            self._memory = tuple(one for one in made if one is not None)
            seen = self._memory if self.lender is None else (*self._memory, self.lender.descriptor)
            words = [*self.command, "--fd", ",".join(map(str, (theirs.fileno(), *seen)))]
            try:
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603 - the interpreter that the user named, or this one
                        words,
                        env={**os.environ, **self.environment},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,  # what it has to say is on stderr, with ours
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
            out, into = (shared_memory.grow_memory(one, size) for one, size in zip(self._memory, sizes, strict=True))
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
        for one in memory:
            os.close(one)
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            return _ended(process.wait(LEAVE_S))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)  # nothing survives that signal, but a system call may be in its way
        return "its process was killed"


def _ended(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


@define(eq=False)
class AtAddress:
    """One that listens at host:port."""

    name: str
    address: tuple[str, int]
    hello_s: float = 30  # twice as long as a daemon lets its next server wait for its turn

    def begin(self) -> None:
        """It is there, or it is not."""

    def open(self) -> Channel:
        connection = socket.create_connection(self.address, CONNECT_S)
        return Channel(kept_alive(connection))

    def share(self, _: tuple[int, int]) -> None:
        return None

    def end(self) -> str:
        return ""
