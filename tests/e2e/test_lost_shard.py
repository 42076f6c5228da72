"""A served target whose shard's daemon goes and comes: /health and requests say so, and the next one is answered."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prepared import listening, serving
from tests.e2e.server import Running, StartedProcess

WORDS, OTHER = "known to both of them", "known to one of them only"
BODY: dict[str, Any] = {"prompt": "def add(a, b):\n    return a + b\n" * 4, "max_tokens": 6, "temperature": 0}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def daemon(port: int, *, model: str = "demo", secret: str = WORDS) -> Iterator[StartedProcess]:
    """Ready inside the block, and killed at its end."""
    with listening(model, "--device", "cpu", secret=secret, address=f"127.0.0.1:{port}") as (process, address):
        assert address == f"tcp://127.0.0.1:{port}"
        yield process


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def trouble(server: Running) -> str:
    """Return what /health says of the shard; empty if there is no trouble."""
    answer = server.client.get("/health")
    shown: str = next(iter(answer.json().get("troubles", {}).values()), "")
    assert (answer.status_code == 503) == bool(shown)
    return shown


def refused(server: Running, port: int, why: str) -> None:
    """Health and requests say why nothing can be answered."""
    until(lambda: why in trouble(server), f"/health never said {why!r} but {trouble(server)!r}")
    health = server.client.get("/health")
    assert int(health.headers["retry-after"]) > 0
    assert health.json()["status"] == "unavailable"
    assert f"shard tcp://127.0.0.1:{port}: " in health.json()["error"]["message"]
    answer = server.complete(**BODY)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("unavailable_error", "shard_lost")
    assert re.search(f"shard tcp://127.0.0.1:{port}: .*{re.escape(why)}", error["message"]), error


@pytest.mark.timeout(400)
def test_a_shard_that_is_gone_is_told_of_and_the_first_request_after_it_is_back_succeeds(tmp_path: Path) -> None:
    port, secret = free_port(), tmp_path / "secret"
    secret.write_text(WORDS, encoding="utf-8")
    secret.chmod(0o600)
    how = ("--target-devices", f"cpu:0,tcp://127.0.0.1:{port}", "--shard-secret-file", str(secret), "--draft", "none")
    with (
        daemon(port) as first,
        serving("demo", *how, "--max-ctx", "512", "--kv-cache-dir", str(tmp_path / "kv")) as server,
    ):
        cold = server.complete(**BODY).json()
        assert server.client.get("/health").json() == {"status": "ok"}
        shards = server.client.get("/props").json()["memory"]["shards"]
        assert [one["remote"] for one in shards] == [False, True]
        first.send_signal(signal.SIGKILL)
        refused(server, port, "Connection refused")
        with daemon(port, secret=OTHER):
            refused(server, port, "the secret is another one")
        with daemon(port, model="demo-hybrid"):
            refused(server, port, "it has another model")
        with daemon(port) as second:
            until(lambda: not trouble(server), "it was not looked for while no request came")
            again = server.complete(**BODY)
            assert again.status_code == 200, again.text
            assert again.json()["choices"] == cold["choices"]
            assert server.client.get("/health").json() == {"status": "ok"}
            second.send_signal(signal.SIGKILL)
            second.wait()
        with daemon(port):
            until(lambda: not trouble(server), "it was never had again, without a request")
            assert server.complete(**BODY).json()["choices"] == cold["choices"]
        lines = [line for line in server.errors if "is lost" in line and "Connection refused" in line]
        assert 0 < len(lines) <= 6, "a try that finds nothing new says nothing"
        assert not [line for line in server.errors if "Traceback" in line]
