"""A process that has imported what a server imports. It forks whenever it is asked to. What is forked measures no
rates (`tests/given_rates.py`) and has confined processes that are forked as well (`tests/forked_worker.py`).

`python -m tests.e2e.forking DESCRIPTOR`, the descriptor of a socket of packets. Each packet has the command to run, and
descriptors for its standard output, for its standard error, and for its process id and exit status. The process ends
when the socket does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

PREPARED = (
    "engine.loading.background_load",
    "engine.serving.serve",
    "engine.commands",
    "engine.settings.import_order",
    "engine.settings.preload",
    "anyio._backends._asyncio",
    "cyclopts.config",
    "cyclopts.help",
    "httpx",
    "uvicorn.lifespan.off",
    "uvicorn.lifespan.on",
    "adapters.models.families.qwen3",
    "adapters.models.families.qwen3_5",
    "adapters.models.kernels.cpu.kernels",
    "adapters.models.kernels.cpu.native.decode_round",
    "adapters.models.kernels.cpu.sampling",
)
MESSAGE = 1 << 17  # bytes of an environment and a command line


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def fork(asking: socket.socket, asked: dict[str, Any], out: int, err: int, report_end: int) -> None:
    """Twice: the one in between waits for the other and tells how it ended."""
    if os.fork():
        for descriptor in (out, err, report_end):
            os.close(descriptor)
        return
    asking.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        os.close(out)
        os.close(err)
        os.write(report_end, number(child))
        os.write(report_end, number(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        os._exit(0)
    os.close(report_end)
    for descriptor, standard in ((out, 1), (err, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv[1:] = asked["words"]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def main(descriptor: int) -> None:
    # This is what takes its time: the command line, the server, and the kernels of the CPU.
    for module in PREPARED:
        importlib.import_module(module)

    from tests.forked_worker import forked_workers, start_forker  # noqa: PLC0415 - behind what comes before torch
    from tests.given_rates import given_rates  # noqa: PLC0415 - it imports torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this is for the process that runs the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    start_forker()
    gc.freeze()
    with socket.socket(fileno=descriptor) as asking, given_rates(), forked_workers():
        while True:
            raw, descriptors, *_ = socket.recv_fds(asking, MESSAGE, 3)
            if not raw:
                return
            fork(asking, json.loads(raw), *descriptors)


if __name__ == "__main__":
    main(int(sys.argv[1]))
