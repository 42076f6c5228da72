"""The real command with hardly any file descriptors, and with clients that hold on to what they have."""

from __future__ import annotations

import resource
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx

from tests.e2e.prepared import serving
from tests.e2e.server import Running
from tests.plain_http import NO_TLS


def descriptors(running: Running) -> int:
    return len(list(Path(f"/proc/{running.process.pid}/fd").iterdir()))


def test_without_file_descriptors_it_waits_says_so_once_and_goes_on() -> None:
    with serving() as running:
        running.client.close()
        room = descriptors(running) + 8
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (room, room))
        address = ("127.0.0.1", httpx.URL(running.url).port)
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(socket.create_connection(address, timeout=10))
            assert httpx.get(f"{running.url}/health", timeout=30, verify=NO_TLS).status_code == 200
        assert httpx.post(f"{running.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert running.stop() == 0
    warnings = [line for line in running.errors if "room for all connections" in line or "descriptor" in line]
    assert 1 <= len(warnings) <= 2
    assert not [line for line in running.errors if "Traceback" in line]


def test_a_stop_does_not_wait_for_a_prompt_that_is_still_being_read() -> None:
    with serving("--grace", "1") as running:

        def post() -> None:
            with suppress(httpx.HTTPError):
                running.complete("All work and no play. " * 1_000_000)

        client = threading.Thread(target=post)
        client.start()
        time.sleep(1.5)  # more than the body takes; nothing tells
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) in {0, 1}
        client.join()
