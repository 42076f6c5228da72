"""Servers that share a store: one is killed, another restores its prompts, and the store goes and comes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from tests.e2e.prepared import refused, serving
from tests.e2e.server import Running
from tests.store.shared_servers import BUCKET, MotoServer, find_moto, moto_server

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
PROMPT = [10 + 37 * n % 4000 for n in range(1500)]
OTHER = [10 + 41 * n % 4000 for n in range(1500)]
ASKED = {"max_tokens": 16, "temperature": 0.8, "seed": 5}


@pytest.fixture
def server() -> Iterator[MotoServer]:
    command = find_moto()
    if command is None:
        pytest.skip("no moto_server: pip install 'moto[server]'")
    with moto_server(command) as running:
        yield running


def ask(server: Running, prompt: list[int]) -> tuple[str, str, int]:
    """The answer, the tier that it was restored from, and how much."""
    answer = server.complete(prompt, **ASKED).raise_for_status().json()
    about = answer["rekindle"]
    return answer["choices"][0]["text"], about["tier"], about["restored_tokens"]


def shared(server: Running) -> dict:
    return server.client.get("/props").json()["full_cache"]["shared"]


def wait_for(done: Callable[[], object]) -> None:
    end = time.monotonic() + 100
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def published(server: Running, least: int = 1) -> bool:
    props = server.client.get("/props").json()
    figures = props["full_cache"]["shared"]
    return figures["written"] >= least and not figures["queued_bytes"] and not props["requests"]


def place(folder: Path, url: str) -> tuple[str, ...]:
    """Options of a server with an empty cache of its own, and with nothing in host memory."""
    return ("--kv-cache-dir", str(folder), "--host-cache-budget", "0", "--kv-shared-tier", url)


def test_a_new_server_restores_what_a_killed_one_has_published(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    with serving(*place(tmp_path / "a", url), trusting=True) as first:
        cold = ask(first, PROMPT)
        assert cold[1] == "none"
        wait_for(lambda: published(first))
        first.stop(signal.SIGKILL)
    with serving(*place(tmp_path / "b", url), trusting=True) as second:
        wait_for(lambda: shared(second)["entries"])
        text, tier, restored = ask(second, PROMPT)
        assert (text, tier, restored >= 1408) == (cold[0], "shared", True)
        metrics = second.client.get("/metrics").text
        assert "rekindle_shared_usable 1.0" in metrics
        assert 'rekindle_cache_hits_total{tier="shared"} 1.0' in metrics
        assert second.client.get("/health").json() == {"status": "ok"}


def test_an_outage_of_the_store_costs_time_only_and_ends(tmp_path: Path, server: MotoServer) -> None:
    with serving(*place(tmp_path / "a", f"s3://{BUCKET}/x"), trusting=True) as running:
        first = ask(running, PROMPT)
        wait_for(lambda: published(running))
        server.kill()
        wait_for(lambda: running.client.get("/health").json()["status"] == "degraded")
        assert running.client.get("/health").json()["troubles"].keys() == {"tier shared"}
        assert "rekindle_shared_usable 0.0" in running.client.get("/metrics").text
        began = time.monotonic()
        assert ask(running, OTHER)[0]
        assert ask(running, PROMPT)[0] == first[0]
        assert time.monotonic() - began < 30
        server.start()
        wait_for(lambda: running.client.get("/health").json() == {"status": "ok"})
        figures = shared(running)
        assert (figures["outages"], figures["usable"]) == (1, True)
        third = [10 + 43 * n % 4000 for n in range(1500)]
        assert ask(running, third)[0]
        wait_for(lambda: published(running, figures["written"] + 1))


@pytest.mark.parametrize(
    ("url", "why"), [("ftp://host/x", "is no store"), ("s3:///x", "names no bucket"), ("file:///proc/x", "")]
)
def test_a_store_that_cannot_be_used_ends_the_start_in_one_line(tmp_path: Path, url: str, why: str) -> None:
    line = refused("serve", "--port", "0", *place(tmp_path, url))
    assert line.startswith("rekindle: ")
    assert "--kv-shared-tier" in line
    assert url in line
    assert why in line
