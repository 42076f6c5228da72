"""The process of a replica's server: `rekindle serve`, started by the actor that Ray Serve knows as the replica.

What the server needs comes as one line of JSON on standard input, so that keys are not seen in the list of processes.
Standard input stays open as long as the actor lives. At its end this process drains as at SIGTERM, since its streams do
not pass through the actor, and ends. It holds memory, a device and a cache folder without an owner meanwhile, so it
ends within a limit.
"""

from __future__ import annotations

import os
import signal
import sys
from threading import Event, Thread, main_thread
from typing import NoReturn

import msgspec

from engine.__main__ import main
from engine.fleet.replica.server_process import ServerTask
from engine.settings.preload import exit_process

ORPHANED = 3  # the exit status of a server that was not drained within its limit after its actor had gone


def watch_actor(drain_s: float) -> None:
    """Wait until standard input ends. Then let the server drain, and end the process after `drain_s` in any case."""
    while os.read(0, 1 << 12):
        pass
    main_id = main_thread().ident
    assert main_id is not None
    signal.pthread_kill(main_id, signal.SIGTERM)
    Event().wait(drain_s)
    os._exit(ORPHANED)


def run() -> NoReturn:
    """Read the words of the command, and carry it out."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerTask)
    Thread(target=watch_actor, args=(task.drain_s,), name="actor-watch", daemon=True).start()
    exit_process(main(task.words))


if __name__ == "__main__":
    run()
