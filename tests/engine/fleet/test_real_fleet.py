"""A fleet on a Ray of its own, with the demo. It takes a minute on two cores, and 2 GiB."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a fleet of two replicas, and its process."""
    words = ["fleet", "demo", "--slots", "2", "--threads", "1", "--port", str(find_free_port())]
    words += ["--kv-cache-dir", str(tmp_path_factory.mktemp("kv"))]
    command = [sys.executable, "-P", "-m", "engine", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("ready  "), ready
        yield ready.split()[1], process
        process.kill()


def list_replicas(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/fleet", timeout=30).raise_for_status().json()["data"]
    return found


def ask(url: str) -> tuple[str, str]:
    """Return the answer's text, and the replica that gave it."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=120).raise_for_status()
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


def test_a_killed_replica_fails_no_request_and_the_end_is_clean(fleet: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = fleet
    text, _ = ask(url)
    os.kill(list_replicas(url)[0]["pid"], signal.SIGKILL)
    assert [ask(url)[0] for _ in range(8)] == [text] * 8
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0


def wait_for_replicas(url: str, count: int) -> None:
    end = time.monotonic() + 150
    while len([one for one in list_replicas(url) if one["state"] == "ready"]) != count:
        assert time.monotonic() < end, f"there are not {count} replicas"
        time.sleep(0.5)


def test_a_range_of_replicas_follows_the_load(tmp_path: Path) -> None:
    words = ["--replicas", "1..2", "--upscale-delay", "1", "--downscale-delay", "2", "--trace", str(tmp_path / "t.jsonl")]
    with run_fleet(tmp_path, words) as (url, _):
        assert len(list_replicas(url)) == 1
        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(lambda _: ask(url, max_tokens=200), range(400))
            wait_for_replicas(url, 2)
            threads.shutdown(cancel_futures=True)
        assert len({text for text, _ in answers_of(answers)}) == 1
        wait_for_replicas(url, 1)
        ask(url)
    assert len(list(tmp_path.glob("t-*.jsonl"))) == 2
