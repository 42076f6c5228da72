"""Requests that begin together with one head: it is computed once, and every answer is the one that comes alone."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main
from tests.e2e.prepared import serving
from tests.e2e.server import Running

HEAD, TAIL = 900, 90  # tokens
COUNT = 5  # requests that begin together


def make_bodies(seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    head = [draw.randrange(200, 4000) for _ in range(HEAD)]
    return [
        {
            "prompt": [*head, *(draw.randrange(200, 4000) for _ in range(TAIL))],
            "max_tokens": 6,
            "temperature": draw.choice((0, 0.8)),
            "seed": number,
            "ignore_eos": True,
            "logprobs": 1,
        }
        for number in range(COUNT)
    ]


def complete(running: Running, body: dict[str, Any]) -> dict[str, Any]:
    return dict(running.client.post("/v1/completions", json=body).raise_for_status().json())


def complete_alone(running: Running, body: dict[str, Any], number: int) -> Any:
    """The answer of a request that shares no rows with any other."""
    return complete(running, {**body, "cache_salt": f"alone-{number}"})["choices"]


def leave_early(running: Running, body: dict[str, Any]) -> None:
    """Ask, and leave while the prompt is being computed."""
    with running.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        answer.raise_for_status()


@pytest.mark.parametrize(
    ("model", "leader_leaves"),
    [("demo", False), pytest.param("demo", True, marks=pytest.mark.long), ("demo-hybrid", True)],
)
@pytest.mark.timeout(240)
def test_a_head_in_common_is_computed_once(tmp_path: Path, model: str, leader_leaves: bool) -> None:
    trace, bodies = tmp_path / "followers.jsonl", make_bodies(1 + leader_leaves)
    with serving(model, "--slots", "8", "--trace", str(trace)) as running, ThreadPoolExecutor(COUNT + 1) as clients:
        leaving = clients.submit(leave_early, running, bodies[0]) if leader_leaves else None
        time.sleep(0.05)
        together = list(clients.map(lambda body: complete(running, body), bodies))
        if leaving is not None:
            leaving.result()
        followed = [one["rekindle"]["prefix_cache"]["followed"] for one in together]
        computed = sum(
            len(body["prompt"]) - one["rekindle"]["restored_tokens"] for body, one in zip(bodies, together, strict=True)
        )
        assert sum(tokens >= HEAD - 64 for tokens in followed) >= COUNT - 2, followed
        assert computed < 2 * HEAD + COUNT * (TAIL + 64), "the head is computed twice at most, where a leader leaves"
        alone = [complete_alone(running, body, number) for number, body in enumerate(bodies)]
        assert [one["choices"] for one in together] == alone
        assert running.stop() == 0
    assert main(["replay", str(trace)]) == 0


@pytest.mark.timeout(120)
def test_several_answers_to_one_prompt_compute_it_once() -> None:
    (body, *_) = make_bodies(3)
    with serving("--slots", "8") as running:
        together = complete(running, {**body, "n": 4, "temperature": 0.9})
        followed = [job["prefix_cache"]["followed"] for job in together["rekindle"]["jobs"]]
        assert followed[0] == 0, "the first one leads"
        assert all(tokens >= HEAD for tokens in followed[1:]), followed
