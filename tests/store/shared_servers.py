"""A server process that speaks the S3 protocol, `moto`'s, which keeps objects in memory. For tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from attrs import define, field

BUCKET = "bucket"
START_S = 60.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def find_moto() -> str | None:
    """The server's command: REKINDLE_MOTO_SERVER, that of this environment, or one on the path."""
    own = Path(sys.executable).with_name("moto_server")
    return os.environ.get("REKINDLE_MOTO_SERVER") or (str(own) if own.exists() else shutil.which("moto_server"))


def choose_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@define(eq=False)
class MotoServer:
    """The process. It may be stopped and started again, with its port; its objects are lost then."""

    command: str
    port: int = field(factory=choose_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self.command, "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_S
        signed = {"authorization": "AWS4-HMAC-SHA256 Credential=id/20260101/us-east-1/s3/aws4_request"}
        while True:
            try:
                httpx.put(f"{self.url}/{BUCKET}", headers=signed, timeout=5).raise_for_status()
            except httpx.TransportError:
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None


@contextmanager
def moto_server(command: str) -> Iterator[MotoServer]:
    """A running server, and the variables of the environment by which clients find it."""
    server = MotoServer(command)
    before = dict(os.environ)
    try:
        server.start()
        os.environ.update(CREDENTIALS | {"AWS_ENDPOINT_URL": server.url})
        yield server
    finally:
        server.kill()
        os.environ.clear()
        os.environ.update(before)
