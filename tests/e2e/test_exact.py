"""The promise on the real demo model: the same tokens cold, continued, alone and batched; in buckets and in a grid."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.text.text import Text
from benchmarks.exactness import each_batched, each_cold, each_continued, prompts
from effects.job import Job, Sampling
from engine.begin import load_target
from engine.options import Options
from engine.target import Target

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.95, seed=1),
    Sampling(temperature=1.1, top_k=40, min_p=0.02, seed=2, presence_penalty=0.4),
    Sampling(repetition_penalty=1.2, logprobs=3),
]


@pytest.fixture(params=["bfloat16", "float32"], scope="module")
async def target(request: pytest.FixtureRequest) -> AsyncIterator[Target]:
    loaded = await load_target(
        Options(dtype=request.param, max_ctx=2048, device="cpu", disk_prefix_cache="off", host_cache_budget=0)
    )
    yield loaded
    await loaded.close()


async def jobs(target: Target) -> list[Job]:
    text = Text.load(target.folder)
    made = [prompt[-900:] for prompt in (await prompts(text, 64))[-8:]]
    await text.aclose()
    return [Job(prompt, 12, sampling=SAMPLINGS[n % 4]) for n, prompt in enumerate(made)]


def gridded(target: Target) -> Target:
    """As if the probe had found that buckets differ: whole chunks from position 0, one width for decoding."""
    settings = evolve(target.settings, block_size=target.settings.chunk, keep_decoded=False, batch_rows=8, block=0)
    return evolve(
        target, settings=settings, executor=DeviceExecutor(target.shard, (8, settings.chunk), lane=target.lane)
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shapes", ["buckets", "grid"])
async def test_tokens_are_the_same_however_they_come_about(target: Target, shapes: str) -> None:
    if shapes == "grid":
        target = gridded(target)
    else:
        assert target.numerics.mode == "buckets", target.numerics.failures
    asked, restored = await jobs(target), list[int]()
    cold = await each_cold(target, asked)
    assert len({tokens for tokens in cold if tokens}) > 4
    assert await each_continued(target, asked, restored) == cold
    assert sum(restored) > 500, "nothing was continued"
    assert await each_batched(target, asked, None) == cold
