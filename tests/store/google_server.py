"""A server process that speaks the protocol of Google's store, and keeps objects in memory: fake-gcs-server. For tests.

The client writes objects by the XML interface. The server takes such a write only if it looks like a signed one, and
knows no conditions there. So a front in this process makes it look so, and answers the one condition that the client
sends: write only if nothing is there (`x-goog-if-generation-match: 0`). Everything else passes through.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.store.shared_servers import BUCKET, START_S, choose_port

HOP = frozenset({"connection", "content-length", "host", "transfer-encoding"})
SIGNED = "X-Goog-Algorithm=GOOG4-RSA-SHA256"


def find_fake_gcs() -> str | None:
    """The server's command: REKINDLE_FAKE_GCS, or one on the path."""
    return os.environ.get("REKINDLE_FAKE_GCS") or shutil.which("fake-gcs-server")


class Front(BaseHTTPRequestHandler):
    """Passes requests on to the server at `port`."""

    protocol_version = "HTTP/1.1"
    port = 0

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path
        if self.command == "PUT":
            if self.headers.get("x-goog-if-generation-match") == "0" and self.ask("HEAD", path)[0] == 200:
                self.answer(412, [], b"")
                return
            path += f"?{SIGNED}"
        self.answer(*self.ask(self.command, path, body))

    do_GET = do_PUT = do_DELETE = do_HEAD = pass_on  # noqa: N815 - the names of the base class

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, list[tuple[str, str]], bytes]:
        """Return status, headers and body of the server's answer. 503: it does not run."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except OSError:
            return 503, [], b""
        finally:
            connection.close()

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in HOP:
                self.send_header(name, value)
        if self.command == "PUT" and status == 200 and "etag" not in {name.lower() for name, _ in headers}:
            self.send_header("etag", '"written"')  # the client wants one
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class GoogleServer:
    """The process. It may be stopped and started again; its objects are lost then."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.port = choose_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        own = f"127.0.0.1:{self.port}"
        words = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(self.port)]
        words += ["-public-host", own, "-external-url", f"http://{own}"]
        self._process = subprocess.Popen([self.command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while True:
            try:
                httpx.post(f"http://{own}/storage/v1/b", json={"name": BUCKET}, timeout=5).raise_for_status()
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
def google_server(command: str) -> Iterator[GoogleServer]:
    """A running server behind its front, and the variables of the environment by which clients find it."""
    server = GoogleServer(command)
    front = ThreadingHTTPServer(("127.0.0.1", 0), type("FrontOfOne", (Front,), {"port": server.port}))
    serving = threading.Thread(target=front.serve_forever, daemon=True)
    serving.start()
    account = {"gcs_base_url": f"http://127.0.0.1:{front.server_port}", "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    before = dict(os.environ)
    try:
        server.start()
        os.environ.update({"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "GOOGLE_ALLOW_HTTP": "true"})
        yield server
    finally:
        server.kill()
        front.shutdown()
        front.server_close()
        os.environ.clear()
        os.environ.update(before)
