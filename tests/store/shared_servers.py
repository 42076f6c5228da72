"""Server processes that speak the protocols of object stores, and keep objects in memory. For tests and benchmarks.

S3: `moto`'s server. Azure: Azurite.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
from attrs import define, field

BUCKET = "bucket"
START_S = 60.0
# Of Azurite; both are the same everywhere, and documented.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_PUBLIC_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURE_VERSION = "2021-08-06"
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


def find_azurite() -> str | None:
    """The command of Azurite's blob server: REKINDLE_AZURITE, or one on the path. It comes from npm."""
    return os.environ.get("REKINDLE_AZURITE") or shutil.which("azurite-blob")


@define(eq=False)
class AzuriteServer:
    """The process of Azurite, which speaks Azure's protocol and keeps objects in memory."""

    command: str
    port: int = field(factory=choose_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        self._process = subprocess.Popen(
            [self.command, *words, "--blobHost", "127.0.0.1", "--blobPort", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_S
        while True:
            try:
                make_container(self.url)
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


def make_container(url: str) -> None:
    """Make the container of an Azurite server, with its public account and a signature by its public key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": AZURE_VERSION}
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    signed = "\n".join(["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items()), resource])
    digest = hmac.new(base64.b64decode(AZURE_PUBLIC_KEY), signed.encode(), hashlib.sha256).digest()
    headers["authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    httpx.put(f"{url}/{AZURE_ACCOUNT}/{BUCKET}?restype=container", headers=headers, timeout=5).raise_for_status()


@contextmanager
def azurite_server(command: str) -> Iterator[AzuriteServer]:
    """A running server, and the variables of the environment by which clients find it."""
    server = AzuriteServer(command)
    before = dict(os.environ)
    try:
        server.start()
        os.environ.update({"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": server.url})
        yield server
    finally:
        server.kill()
        os.environ.clear()
        os.environ.update(before)
