"""Starts `rekindle` in a process whose imports are done: it is forked from one that has done nothing else.

Most of a start is Python and the import of torch, which take the same time each time, and the measurement of rates.
Tests of what a process has before that start it in full, with `tests.e2e.server`: limits, the seed of hashes, what is
measured at a start, and what libraries read of the environment when they are loaded. Servers may be started here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

from attrs import define, field

from engine.settings.shard_secret import VARIABLE
from tests.e2e import server
from tests.e2e.forking import MESSAGE
from tests.importing import importing


@define
class Forked:
    """A `StartedProcess`. events: the socket on which its id comes, and then its exit status."""

    args: Sequence[str]
    stdout: TextIOWrapper
    stderr: TextIOWrapper
    _events: socket.socket
    pid: int = field(init=False)
    returncode: int | None = None

    def __attrs_post_init__(self) -> None:
        self.pid = self._number()

    def _number(self) -> int:
        raw = self._events.recv(8)
        assert len(raw) == 8, "the process that forks is gone"
        return int.from_bytes(raw, "little", signed=True)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """timeout: in seconds. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._events], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            self.returncode = self._number()
            self._events.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def forking(root: Path) -> socket.socket:
    """To the process that has imported; there is one, until this one ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "tests.e2e.forking", str(theirs.fileno())]
    environment = {**os.environ, **importing(root), "PYTHONUNBUFFERED": "1"}
    with theirs:
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=environment, cwd=root)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def forked(words: Sequence[str], env: Mapping[str, str], cwd: Path) -> Forked:
    """`words` begin with `python -m` and the module's name."""
    out, err, events = os.pipe(), os.pipe(), socket.socketpair()
    asked = json.dumps({"module": words[2], "words": words[3:], "cwd": str(cwd), "env": {**env}}).encode()
    assert len(asked) < MESSAGE
    try:
        socket.send_fds(forking(Path(__file__).parents[2]), [asked], [out[1], err[1], events[1].fileno()])
    finally:
        os.close(out[1])
        os.close(err[1])
        events[1].close()
    return Forked(words, os.fdopen(out[0]), os.fdopen(err[0]), events[0])


@contextlib.contextmanager
def listening(*words: str, secret: str, address: str = "127.0.0.1:0") -> Iterator[tuple[server.StartedProcess, str]]:
    """A process for layers that waits for servers, and its address; killed at the block's end if it still runs."""
    command = [sys.executable, "-m", "engine", "shard", *words, "--listen", address]

    def start(words: Sequence[str], env: Mapping[str, str], cwd: Path) -> Forked:
        return forked(words, {**env, VARIABLE: secret}, cwd)

    with server.started(command, None, start) as (process, _):
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("ready  ").strip()


serving = functools.partial(server.serving, start=forked)
refused = functools.partial(server.refused, start=forked)
