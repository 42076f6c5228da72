"""A fleet on a Ray of its own, with the demo. It takes some minutes on two cores, and 2 GiB."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}

SMALL = ("--slots", "2", "--threads", "1", "--draft", "none")  # no answer is copied, so long ones take a while
LONG = 2000  # tokens: one second or more on any machine


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def run_fleet(folder: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a fleet of demos. Yields its address and its process."""
    words = ["fleet", "demo", "--port", str(find_free_port()), "--kv-cache-dir", str(folder), *more]
    command = [sys.executable, "-P", "-m", "engine", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("ready  "), ready
            yield ready.split()[1], process
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a fleet of two replicas, and its process."""
    with run_fleet(tmp_path_factory.mktemp("kv"), *SMALL) as running:
        yield running


def list_replicas(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/fleet", timeout=30).raise_for_status().json()["data"]
    return found


def count_busy_slots(url: str) -> int:
    """Return the busy slots of all replicas. One that was killed is listed for a while, without figures."""
    return sum(one.get("slots_busy", 0) for one in list_replicas(url))


def ask(url: str, **more: Any) -> tuple[str, str]:
    """Return the answer's text, and the replica that gave it."""
    answer = httpx.post(f"{url}/v1/chat/completions", json={**ASK, **more}, timeout=120).raise_for_status()
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-rekindle-replica"]


def test_a_fleet_answers_streams_and_tells_of_both_replicas(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = fleet
    replicas = list_replicas(url)
    assert [one["state"] for one in replicas] == ["ready", "ready"]
    assert len({one["identity"] for one in replicas}) == 1
    text, _ = ask(url)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**ASK, "stream": True}, timeout=120) as response:
        parts = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == text
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    assert all(f'rekindle_queue_length{{replica="{one["id"]}"}} 0.0' in metrics for one in replicas)


def test_a_killed_replica_fails_no_request(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    url, _ = fleet
    text, _ = ask(url)
    os.kill(list_replicas(url)[0]["pid"], signal.SIGKILL)
    assert [ask(url)[0] for _ in range(8)] == [text] * 8


def test_a_client_that_leaves_cancels_its_request(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    """Head and body of the request come in two pieces, as those of most clients do."""
    url, _ = fleet
    body = json.dumps({**ASK, "max_tokens": LONG, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    before = count_finished(url, "cancelled")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as client:
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n")
        time.sleep(0.1)
        client.sendall(body)
        wait_for(lambda: count_busy_slots(url))
    wait_for(lambda: not count_busy_slots(url))
    assert count_finished(url, "cancelled") == before + 1


def count_finished(url: str, finish: str) -> int:
    """Return how many requests have ended so, in all replicas."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(
        int(float(line.split()[-1]))
        for line in lines
        if line.startswith("rekindle_requests_total{") and f'finish="{finish}"' in line
    )


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.1)


def test_a_fleet_that_stops_finishes_its_requests(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    body = {**ASK, "max_tokens": LONG, "ignore_eos": True}
    with run_fleet(tmp_path / "kv", *SMALL, "--grace", "60") as (url, _):
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120))
        )
        asking.start()
        wait_for(lambda: count_busy_slots(url))
    asking.join(120)
    assert answers[0].json()["usage"]["completion_tokens"] == LONG


def wait_for_replicas(url: str, count: int) -> None:
    end = time.monotonic() + 200
    while len([one for one in list_replicas(url) if one["state"] == "ready"]) != count:
        assert time.monotonic() < end, f"there are not {count} replicas"
        time.sleep(0.5)


def test_a_range_of_replicas_follows_the_load_and_each_writes_its_trace(tmp_path: Path) -> None:
    delays = ("--replicas", "1..2", "--upscale-delay", "1", "--downscale-delay", "2")
    with run_fleet(tmp_path / "kv", *SMALL, *delays, "--trace", str(tmp_path / "day.jsonl")) as (url, _):
        assert len(list_replicas(url)) == 1
        is_enough = threading.Event()

        def keep_asking(_: int) -> set[str]:
            found = set[str]()
            while not is_enough.is_set():
                found.add(ask(url, max_tokens=LONG, ignore_eos=True)[0])
            return found

        with ThreadPoolExecutor(6) as threads:
            texts = threads.map(keep_asking, range(6))
            try:
                wait_for_replicas(url, 2)
            finally:
                is_enough.set()
        assert len(set().union(*texts)) == 1
        wait_for_replicas(url, 1)
        ask(url)
    assert len(list(tmp_path.glob("day-*.jsonl"))) == 2
