"""Requests that begin together with one head: it is computed once, and every answer is the one that comes alone."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.exactness import Answered, collect_answer
from effects.job import Job, Sampling
from effects.scope import Scope
from engine.__main__ import main
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import build_options
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
    [*(pytest.param("demo", leaves, marks=pytest.mark.long) for leaves in (False, True)), ("demo-hybrid", True)],
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
        alone = [complete_alone(running, body, number) for number, body in enumerate(bodies[:3])]
        assert [one["choices"] for one in together[:3]] == alone
        assert running.stop() == 0
    assert main(["replay", str(trace)]) == 0


@pytest.mark.parametrize(
    ("model", "length"),
    [pytest.param("demo", HEAD + TAIL, marks=pytest.mark.long), ("demo-hybrid", 200)],
    ids=["demo", "hybrid"],
)
@pytest.mark.timeout(120)
def test_several_answers_to_one_prompt_compute_it_once(model: str, length: int) -> None:
    """The prompt of the hybrid is one chunk, at whose end its state is kept."""
    (body, *_) = make_bodies(3)
    body["prompt"] = body["prompt"][:length]
    with serving(model, "--slots", "8") as running:
        together = complete(running, {**body, "n": 4, "temperature": 0.9})
        followed = [job["prefix_cache"]["followed"] for job in together["rekindle"]["jobs"]]
        assert followed[0] == 0, "the first one leads"
        assert all(tokens >= length - 64 for tokens in followed[1:]), followed


@pytest.mark.timeout(120)
async def test_a_hybrid_shares_a_head_that_is_shorter_than_a_chunk() -> None:
    """The first chunk passes the end of the head before the others are known. The second prompt is cut there."""
    draw = random.Random(5)
    head = [draw.randrange(200, 4000) for _ in range(150)]
    prompts = [(*head, *(draw.randrange(200, 4000) for _ in range(50))) for _ in range(4)]
    jobs = [Job(prompt, 6, Sampling(logprobs=1), scope=Scope("off")) for prompt in prompts]
    target = await load_target(build_options(model="demo-hybrid", draft="none", slots=6, disk_prefix_cache="off"))
    alone = [(await answer_together(target, [job]))[0] for job in jobs]
    together = await answer_together(target, jobs)
    assert [one.report.followed_tokens for one in together if one.report is not None] == [0, 0, 128, 128]
    assert [(one.tokens, one.logprobs) for one in together] == [(one.tokens, one.logprobs) for one in alone]
    await target.close()


async def answer_together(target: LoadedModel, jobs: Sequence[Job]) -> list[Answered]:
    """Answer jobs that are submitted at the same moment, in a world of their own without a store."""
    found = [Answered()] * len(jobs)

    async def answer_one(running: Engine, number: int) -> None:
        found[number] = await collect_answer(running, jobs[number])

    async with run_engine(target.settings, target.executor) as running, anyio.create_task_group() as tasks:
        for number in range(len(jobs)):
            tasks.start_soon(answer_one, running, number)
    return found
