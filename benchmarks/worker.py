"""A benchmark in a process of its own, of this checkout or of another one, that measures what it is asked for.

So two checkouts can be measured in turn: a request is a line of JSON on stdin, and its answer is a line on stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

ANSWER = "answer "  # begins the lines that are answers; what else the process prints is ignored


@frozen
class Worker:
    """A running worker. `ask` blocks until it has measured."""

    process: subprocess.Popen[str]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises RuntimeError if the process has ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return found
        raise RuntimeError(f"the worker has ended before it answered {request}")


@contextmanager
def start_worker(checkout: Path, module: str, under: Sequence[str] = ()) -> Iterator[Worker]:
    """Run `python -m MODULE --worker` in a checkout, which has to have its products compiled.

    under: a command that runs it, for instance `callgrind_command`.
    """
    process = subprocess.Popen(
        [*under, sys.executable, "-m", module, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        yield Worker(process)
    finally:
        process.communicate()


def serve_requests(measure: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer requests until stdin ends. Called by a benchmark that was started with `--worker`."""
    for line in sys.stdin:
        print(ANSWER + json.dumps(measure(json.loads(line))), flush=True)
