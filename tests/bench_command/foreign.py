"""A small OpenAI-compatible server that is none of ours: threads of the standard library, a script for each model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

USAGE = {"prompt_tokens": 40, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 10}}


def text(word: str = " word", **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": word, "finish_reason": None}], **more}


def end(**more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], **more}


def said(word: str, name: str = "content") -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {name: word}, "finish_reason": None}]}


# What is sent for a model: events, or text that is none. None: the connection is cut there; a number: silence.
SCRIPTS: dict[str, list[Any]] = {
    "plain": [text(), text(), text(), text(), end(), "[DONE]"],
    "counts": [text(), 0.02, text(), text(), end(usage=USAGE), "[DONE]"],
    "llama": [text(), text(), end(timings={"cache_n": 7, "prompt_n": 3})],
    "thinks": [said("", "content"), said("hm", "reasoning_content"), said("so"), end(), "[DONE]"],
    "cut": [text(), None],
    "silent": [end(), "[DONE]"],
    "fails": [text(), {"error": {"message": "out of memory", "code": 500}}],
    "garbage": [text(), "{no json"],
    "slow": [text(), *[part for _ in range(400) for part in (0.05, text())], end(), "[DONE]"],
}


class ForeignHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Foreign  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._whole(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append({"path": self.path, "key": self.headers["Authorization"], **body})
        if body["model"] not in SCRIPTS:
            return self._whole(429, {"error": {"message": "no room\nfor this", "type": "x"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in SCRIPTS[body["model"]]:
            if part is None:
                self.close_connection = True
                return None
            if isinstance(part, float):
                time.sleep(part)
                continue
            self._piece(f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode())
            self.server.sent += 1
        return self._piece(b"")

    def _piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, status: int, found: Any) -> None:
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that it has there
        """Log nothing."""


class Foreign(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ForeignHandler)
        self.models = ["counts", "plain"]
        self.bodies: list[dict[str, Any]] = []
        self.sent = 0  # events

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave in the middle on purpose."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def foreign() -> Iterator[Foreign]:
    with Foreign() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
