"""A real `rekindle serve` in a process of its own, and what a test needs to talk to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import httpx
from attrs import define, field

from tests.importing import importing
from tests.plain_http import NO_TLS

READY = re.compile(r"ready  (http://\S+)  ")


class StartedProcess(Protocol):
    """The methods of `Popen` that tests use."""

    pid: int
    returncode: int | None
    stdout: IO[str] | None
    stderr: IO[str] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...

    def kill(self) -> None: ...


class Start(Protocol):
    """A function that starts `python -m` with some words."""

    def __call__(self, words: Sequence[str], env: Mapping[str, str], cwd: Path) -> StartedProcess: ...


@define
class Running:
    process: StartedProcess
    url: str
    lines: list[str]
    errors: list[str]
    seconds: float
    client: httpx.Client = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)

    def chat(self, text: str, **more: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **more}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: object, **more: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def endless(self) -> dict[str, object]:
        """The body of a completion that only ends when its context is full."""
        ends = self.client.get("/props").json()["eos_tokens"]
        return {
            "prompt": "x = 1\n",
            "stream": True,
            "max_tokens": -1,
            "logit_bias": {str(token): -100 for token in ends},
        }

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


def command(*words: str, trusting: bool = False) -> list[str]:
    """Return a command of ours. A server keeps nothing on disk unless the words name a folder, so no user's cache is
    touched.

    trusting: it restores whatever it finds first (`trusting.py`).
    """
    if "serve" in words and "--kv-cache-dir" not in words:
        words += ("--disk-prefix-cache", "off")
    return [sys.executable, "-m", "tests.e2e.trusting" if trusting else "engine", *words]


def plainly(words: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd)


@contextmanager
def started(words: Sequence[str], cwd: Path | None, start: Start) -> Iterator[tuple[StartedProcess, list[str]]]:
    """With what it says on standard error as it comes; killed at the block's end if it still runs."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, **importing(root), "PYTHONUNBUFFERED": "1"}
    process = start(words, environment, cwd or root)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr as stderr:
        errors = list[str]()
        reader = threading.Thread(target=lambda: errors.extend(stderr), daemon=True)
        reader.start()
        try:
            yield process, errors
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            reader.join(10)


@contextmanager
def serving(*words: str, cwd: Path | None = None, trusting: bool = False, start: Start = plainly) -> Iterator[Running]:
    """Ready inside the block; killed at its end if it still runs."""
    began = time.monotonic()
    with started(command("serve", "--port", "0", *words, trusting=trusting), cwd, start) as (process, errors):
        first = process.stdout.readline()
        match = READY.match(first)
        assert match, (first, errors, process.poll())
        lines = [first, process.stdout.readline()]
        running = Running(process, match[1], lines, errors, time.monotonic() - began)
        with running.client:
            yield running


def refused(*words: str, start: Start = plainly) -> str:
    """Return the line that a command writes before it exits with 2. The log of its start does not count."""
    with started(command(*words), None, start) as (process, errors):
        process.stdout.read()
        assert process.wait(50) == 2, errors
    (line,) = [line for line in "".join(errors).splitlines() if line and " INFO rekindle: " not in line]
    assert line.startswith("rekindle: ")
    return line
