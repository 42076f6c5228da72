"""The process of a replica's server: `rekindle serve`, started by the actor that Ray Serve knows as the replica.

The words of the command come as one line of JSON on standard input, so that keys are not seen in the list of processes.
Standard input stays open as long as the actor lives. At its end this process ends as well, at once: a server without
its actor would hold memory, a device and a cache folder without an owner.
"""

from __future__ import annotations

import os
import sys
from threading import Thread
from typing import NoReturn

import msgspec

from engine.__main__ import main
from engine.settings.preload import exit_process

ORPHANED = 3  # the exit status of a server whose actor is gone


def watch_actor() -> None:
    """End the process when its standard input ends."""
    while os.read(0, 1 << 12):
        pass
    os._exit(ORPHANED)


def run() -> NoReturn:
    """Read the words of the command, and carry it out."""
    words = msgspec.json.decode(sys.stdin.buffer.readline(), type=list[str])
    Thread(target=watch_actor, name="actor-watch", daemon=True).start()
    exit_process(main(words))


if __name__ == "__main__":
    run()
