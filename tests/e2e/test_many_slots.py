"""Sixty-four slots: answers of many requests that decode in one step are those that each has alone."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.stream import EmitTokens
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import run_engine
from engine.settings.options import build_options

REQUESTS = 48  # more than sixteen, which is the default on a processor
pytestmark = [pytest.mark.long, pytest.mark.timeout(590)]


def some_jobs() -> list[Job]:
    """Half of them greedy, half sampled; some have penalties, and every fourth begins like others."""
    rng = random.Random(49)
    head = tuple(rng.choices(range(100, 4000), k=70))
    jobs = list[Job]()
    for number in range(REQUESTS):
        own = tuple(rng.choices(range(100, 4000), k=rng.randrange(8, 60)))
        penalty = 1.2 if number % 8 == 5 else 1.0
        sampling = Sampling(temperature=0.8 * (number % 2), seed=number, repetition_penalty=penalty)
        jobs.append(Job((*head, *own) if number % 4 == 0 else own, rng.randrange(50, 60), sampling))
    return jobs


async def answer(target: LoadedModel, jobs: list[Job], at_once: int) -> tuple[list[Tokens], int]:
    """Return the answers, and the most requests of one step."""
    answers = [()] * len(jobs)
    widest = 0

    async def one(number: int) -> None:
        nonlocal widest
        async for message in running.submissions.submit(jobs[number]):
            if isinstance(message, EmitTokens):
                answers[number] += message.tokens
                widest = max(widest, *(lane.member_count for lane in running.event_loop.world.lanes.values()))

    async with run_engine(target.settings, target.executor) as running:
        for start in range(0, len(jobs), at_once):
            async with anyio.create_task_group() as tasks:
                for number in range(start, min(start + at_once, len(jobs))):
                    tasks.start_soon(one, number)
    return answers, widest


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
async def test_many_at_once_are_answered_as_each_alone(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    how = {"disk_prefix_cache": "off", "host_cache_budget": 0, "device": "cpu", "draft": "none", "max_ctx": 512}
    target = await load_target(build_options(model=model, slots=64, **how))
    try:
        jobs = some_jobs()
        alone, _ = await answer(target, jobs, 1)
        together, widest = await answer(target, jobs, REQUESTS)
        assert together == alone
        assert widest > 16
    finally:
        await target.close()
