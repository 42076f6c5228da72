"""Tests of answers that come and go together: each is the one alone, and the trace of that replays and executes."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from effects.all import Launch
from engine.__main__ import main
from engine.core.trace import read_trace
from tests.e2e.prepared import serving
from tests.e2e.server import Running


def asked(count: int) -> list[dict[str, object]]:
    """Prompts of one token, which has no rows to be read: all that is on the lane is decode steps."""
    rng = random.Random(3)
    return [
        {
            "prompt": [rng.randrange(200, 4000)],
            "max_tokens": rng.randrange(3, 40),
            "temperature": rng.choice((0, 0.8)),
            "seed": number,
            "ignore_eos": True,
            "presence_penalty": 0.4 * (number % 3 == 0),
            "logprobs": 1,
        }
        for number in range(count)
    ]


def answer(running: Running, body: dict[str, object]) -> object:
    (choice,) = running.client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    return choice


@pytest.mark.timeout(150)
def test_who_comes_beside_others_gets_the_answer_alone_and_the_trace_says_how(tmp_path: Path) -> None:
    trace, bodies = tmp_path / "together.jsonl", asked(7)

    def late(number: int) -> object:
        time.sleep(0.01 * (number % 4))
        return answer(running, bodies[number])

    with serving("--draft", "none", "--slots", "6", "--trace", str(trace)) as running:
        with ThreadPoolExecutor(6) as clients:
            together = list(clients.map(late, range(len(bodies))))
        assert together == [answer(running, body) for body in bodies]
        assert running.stop() == 0
    launches = [record for _, record in read_trace(trace)[1] if isinstance(record, Launch)]
    assert any(launch.joins for launch in launches)
    assert main(["replay", str(trace)]) == 0
    assert main(["replay", str(trace), "--execute"]) == 0
