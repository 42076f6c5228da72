"""Starts and stops the server of a replica as a child process (`engine/replica_server.py`).

A process of its own keeps the server as it is without Ray: its threads, its collector, its signals and its exit are the
same, and Ray's threads never hold the interpreter between two decode steps.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Thread

import msgspec
from attrs import define, field, frozen

from engine.settings.user_error import UserError

READY = re.compile(r"ready  (http://\S+)  ")
LOG_LINES = 40  # last lines of the log, which are shown if the server does not start
RAY_THREADS = "OMP_NUM_THREADS"  # Ray sets it to the CPUs of the actor, and a server has its own option


@frozen
class ServerTask:
    """The input of a server. words: `serve` and its options. drain_s: its limit once its actor is gone."""

    words: list[str]
    drain_s: float


@define(eq=False)
class ServerProcess:
    """A running server. url: where it listens."""

    url: str
    process: subprocess.Popen[str]
    is_stopping: bool = field(default=False, init=False)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def watch(self, on_death: Callable[[int], None]) -> None:
        """Call `on_death` with the exit status if the server ends by itself. It is called on a thread."""

        def wait() -> None:
            status = self.process.wait()
            if not self.is_stopping:
                on_death(status)

        Thread(target=wait, name="server-watch", daemon=True).start()

    def stop(self, timeout_s: float) -> None:
        """Let running requests end, and stop. timeout_s: after which the server is killed."""
        self.is_stopping = True
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def build_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: without options, which come as words, and without Ray's number of threads."""
    return {
        name: value for name, value in environment.items() if not name.startswith("REKINDLE_") and name != RAY_THREADS
    }


def start_server(task: ServerTask, kept_open: Sequence[int] = ()) -> ServerProcess:
    """Start a server, and wait until it is ready. Raises UserError if it ends instead.

    The lines of its log go to this process's own standard error. kept_open: descriptors that stay open as long as the
    server lives, also where this process dies before it.
    """
    command = [sys.executable, "-P", "-m", "engine.replica_server"]
    environment = build_environment(os.environ)
    process = subprocess.Popen(  # noqa: S603 - this program, and a list
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=kept_open,
        start_new_session=True,  # Ray kills the whole process group of an actor that dies
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(task).decode() + "\n")
    process.stdin.flush()
    last_lines = deque[str](maxlen=LOG_LINES)
    reader = Thread(target=copy_log, args=(process, last_lines), name="server-log", daemon=True)
    reader.start()
    ready = READY.match(process.stdout.readline())
    if ready is None:
        process.kill()
        reader.join()
        process.communicate()
        refusals = [line.removeprefix("rekindle: ") for line in last_lines if line.startswith("rekindle: ")]
        raise UserError((refusals or [*last_lines] or ["the server ended without a message"])[-1])
    Thread(target=process.stdout.read, name="server-output", daemon=True).start()
    return ServerProcess(ready[1], process)


def copy_log(process: subprocess.Popen[str], last_lines: deque[str]) -> None:
    """Copy the lines of a server's log to standard error, and keep the last ones."""
    assert process.stderr is not None
    for line in process.stderr:
        last_lines.append(line.strip())
        print(line, end="", file=sys.stderr, flush=True)
