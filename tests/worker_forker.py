"""A process that has imported what confined processes import. It forks one whenever it is asked to.

`python -P tests/worker_forker.py DESCRIPTOR SCRIPT`: the descriptor of a socket of packets, and the path of
`confined_process.py`. Each packet has two descriptors: a socket that becomes standard input and output, and one for
the process id and then the exit status. The process ends when its socket does. `forked_worker.py` starts it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any


def load(path: str) -> Any:
    """Import a file without what it does as a program."""
    spec = spec_from_file_location("confined_process", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_bytes(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def fork(asking: socket.socket, program: Any, stream: int, report_end: int) -> None:
    """Twice: the one in between waits for the other and tells how it ended."""
    if os.fork():
        os.close(stream)
        os.close(report_end)
        return
    asking.close()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if child := os.fork():
        os.close(stream)
        with suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(report_end, to_bytes(child))
            os.write(report_end, to_bytes(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        os._exit(0)
    os.close(report_end)
    for standard in (0, 1):
        os.dup2(stream, standard)
    os.close(stream)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - nothing more is imported here
        os.dup2(nowhere.fileno(), 2)
    with suppress(EOFError, BrokenPipeError):
        program.main()
    os._exit(0)


def main(descriptor: int, script: str) -> None:
    program = load(script)
    with suppress(ImportError):  # grammars are compiled with it
        importlib.import_module("llguidance")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this is for the process that runs the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    with socket.socket(fileno=descriptor) as asking:
        while True:
            raw, descriptors, *_ = socket.recv_fds(asking, 1, 2)
            if not raw:
                return
            fork(asking, program, *descriptors)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
