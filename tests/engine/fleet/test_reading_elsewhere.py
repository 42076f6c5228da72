"""A real fleet whose prompts are read by an idle replica, against a single server. It takes minutes on two cores."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.prepared import serving
from tests.engine.fleet.test_real_fleet import list_replicas, run_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
OPTIONS = ("--slots", "4", "--threads", "1", "--max-ctx", "8192", "--kv-cache-min-tokens", "64")
CHAT = "/v1/chat/completions"
LIMIT_S = 120.0
PAGE_WORDS = 1200  # about 2,000 tokens
WORDS = ("cache", "prefix", "replica", "router", "token", "session", "tensor", "kernel", "stream", "answer", "prompt")


def write_pages(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=PAGE_WORDS))


def make_body(messages: list[dict[str, str]]) -> dict[str, Any]:
    sampling = {"max_tokens": 16, "temperature": 0.8, "seed": 5, "logprobs": True}
    return {"messages": messages, "prompt_cache_key": "talk", **sampling}


def read_answer(answer: httpx.Response) -> tuple[list[str], str]:
    """Return the tokens and the text of an answer."""
    choice = answer.raise_for_status().json()["choices"][0]
    return [one["token"] for one in choice["logprobs"]["content"]], choice["message"]["content"]


def record_talk(folder: Path, turns: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Let a single server answer a conversation. Return the requests, and the tokens of their answers."""
    recorded = list[tuple[dict[str, Any], list[str]]]()
    messages = list[dict[str, str]]()
    with serving("--kv-cache-dir", str(folder), *OPTIONS, trusting=True) as single:
        for number in range(turns):
            messages.append({"role": "user", "content": write_pages(number)})
            body = make_body([*messages])
            tokens, text = read_answer(single.client.post(CHAT, json=body))
            recorded.append((body, tokens))
            messages.append({"role": "assistant", "content": text})
    return recorded


@contextmanager
def keep_busy(url: str, replica: str, count: int) -> Iterator[None]:
    """Let a replica write so many answers that only end when their clients leave."""
    ends = httpx.get(f"{url}/props", params={"replica": replica}, timeout=30).json()["eos_tokens"]
    bias = {str(token): -100 for token in ends}
    body = {"prompt": "x = 1\n", "stream": True, "max_tokens": -1, "logit_bias": bias}
    is_enough = threading.Event()
    started = threading.Barrier(count + 1)

    def listen(_: int) -> None:
        with httpx.stream(
            "POST", f"{url}/v1/completions", params={"replica": replica}, json=body, timeout=LIMIT_S
        ) as response:
            lines = response.iter_lines()
            next(lines)
            started.wait(LIMIT_S)
            while not is_enough.is_set():
                next(lines)

    with ThreadPoolExecutor(count) as threads:
        listening = [threads.submit(listen, number) for number in range(count)]
        started.wait(LIMIT_S)
        try:
            yield
        finally:
            is_enough.set()
        for one in listening:
            one.result()


def wait_for(done: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.02)


def count_outcomes(url: str) -> dict[tuple[str, str], float]:
    """Return how many prompts had which outcome, by reader and outcome."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(r'rekindle_fleet_remote_prefills_total\{.*outcome="(\w+)",reader="(\w+)"\} (\S+)', text)
    return {(reader, outcome): float(count) for outcome, reader, count in found}


def has_unread_bytes(port: int, least: int) -> bool:
    """Return whether so many bytes of one connection wait at this port for a process that does not read them."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.rpartition(":")[2], 16) == port and int(queues.rpartition(":")[2], 16) >= least:
            return True
    return False


def test_an_idle_replica_reads_a_prompt_and_its_death_fails_nothing(tmp_path: Path) -> None:
    (first, first_tokens), (second, second_tokens), (third, third_tokens) = record_talk(tmp_path / "single", 3)
    shared = ("--kv-shared-tier", f"file://{tmp_path}/shared", "--prefill-elsewhere", "512")
    with run_fleet(tmp_path / "kv", *OPTIONS, *shared) as (url, _), httpx.Client(timeout=LIMIT_S) as client:
        answer = client.post(f"{url}{CHAT}", json=first)
        assert read_answer(answer)[0] == first_tokens
        home = answer.headers["x-rekindle-replica"]
        (reader,) = [one for one in list_replicas(url) if one["id"] != home]
        # The router has to know that the reader is idle again: it hears from each replica once a second.
        with keep_busy(url, home, 3):
            answer = client.post(f"{url}{CHAT}", json=second)
            assert read_answer(answer)[0] == second_tokens
            assert (answer.headers["x-rekindle-replica"], answer.headers.get("x-rekindle-reader")) == (
                home,
                reader["id"],
            )
            assert count_outcomes(url) == {(reader["id"], "read"): 1}
            usage = answer.json()["usage"]
            # Everything is restored but the rest of the last block, and what the planner computes meanwhile.
            restored = usage["prompt_tokens_details"]["cached_tokens"]
            assert restored > 0.9 * usage["prompt_tokens"], answer.json()

            os.kill(reader["pid"], signal.SIGSTOP)
            port = urlsplit(reader["url"]).port
            assert port is not None
            size = len(json.dumps(third))
            with ThreadPoolExecutor(1) as threads:
                asking = threads.submit(client.post, f"{url}{CHAT}", json=third)
                wait_for(lambda: has_unread_bytes(port, size // 2))
                os.kill(reader["pid"], signal.SIGKILL)
                answer = asking.result()
            assert read_answer(answer)[0] == third_tokens
            assert answer.headers["x-rekindle-replica"] == home
            assert "x-rekindle-reader" not in answer.headers
            assert count_outcomes(url) == {(reader["id"], "read"): 1, (reader["id"], "lost"): 1}
