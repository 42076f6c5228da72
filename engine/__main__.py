"""The entry of the process: libraries that take long to open are opened while everything else is imported."""

from __future__ import annotations

import os
import select
import sys
from typing import NoReturn

from engine.settings.preload import exit_process, preload_libraries

INTERRUPTED = 130  # as shells tell of SIGINT
READER_LEFT = 141  # as shells tell of SIGPIPE, which ends other tools there: `rekindle cache ls | head`


def main(argv: list[str] | None = None) -> int:
    """Run the command that these words name. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with preload_libraries(words):
            from engine.commands import carry_out  # noqa: PLC0415 - meanwhile

            status = carry_out(words)
        print(end="", flush=True)  # what is left to be written may be all that there is
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the process itself then
            return READER_LEFT
        raise
    except BrokenPipeError:
        if not drop_output():  # it was another pipe that broke
            raise
        return READER_LEFT
    return status


def drop_output() -> bool:
    """Let output go nowhere if it goes to a pipe that no process reads. Return whether there is such a pipe."""
    broken = [descriptor for descriptor in (1, 2) if is_broken(descriptor)]
    if broken:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in broken:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(broken)


def is_broken(descriptor: int) -> bool:
    """Return whether the descriptor is a pipe whose other end is closed."""
    watched = select.poll()
    watched.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def command() -> NoReturn:
    exit_process(main())


if __name__ == "__main__":
    command()
