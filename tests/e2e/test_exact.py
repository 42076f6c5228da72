"""The promise on the real demo model: the same tokens cold, continued, alone and batched; in buckets and in a grid."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from attrs import evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.text.model_text import Text
from benchmarks.exactness import collect_answer, each_batched, each_cold, each_continued, prompts
from effects.decode import Logprob
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.stream import EmitTokens
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import build_options
from tests.pairs import usual_where

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.95, seed=1),
    Sampling(temperature=1.1, top_k=40, min_p=0.02, seed=2, presence_penalty=0.4),
    Sampling(repetition_penalty=1.2, logprobs=3),
]


# Neither in a grid nor in buckets, which are about rows, is anything about dtypes: one of them is tried in both.
every_way = pytest.mark.parametrize(
    ("target", "shapes"),
    [
        ("bfloat16", "buckets"),
        ("bfloat16", "grid"),
        pytest.param("float32", "buckets", marks=pytest.mark.long),
    ],
    indirect=["target"],
    scope="module",
)


@pytest.fixture(scope="module")
async def target(request: pytest.FixtureRequest) -> AsyncIterator[LoadedModel]:
    loaded = await load_target(
        build_options(dtype=request.param, max_ctx=2048, device="cpu", disk_prefix_cache="off", host_cache_budget=0)
    )
    yield loaded
    await loaded.close()


async def jobs(target: LoadedModel) -> list[Job]:
    text = Text.load(target.folder)
    made = [prompt[-450:] for prompt in (await prompts(text, 64))[-5:]]
    await text.aclose()
    return [Job(prompt, 12, sampling=SAMPLINGS[n % 4]) for n, prompt in enumerate(made)]


def gridded(target: LoadedModel) -> LoadedModel:
    """Return a target with the settings of the grid, as if the probe had found that buckets differ: whole chunks from
    position 0, one width for decoding.
    """
    settings = evolve(
        target.settings, block_size=target.settings.chunk, keep_decoded=False, batch_rows=8, max_proposals=0
    )
    return evolve(
        target,
        settings=settings,
        executor=DeviceExecutor(ExecutorParts(target.shard, (8, settings.chunk), lane=target.lane)),
    )


@pytest.mark.timeout(300)
@every_way
async def test_tokens_are_the_same_however_they_come_about(target: LoadedModel, shapes: str) -> None:
    if shapes == "grid":
        target = gridded(target)
    else:
        assert target.numerics.mode == "buckets", target.numerics.failures
    asked, restored = await jobs(target), list[int]()
    cold = await each_cold(target, asked)
    assert len({tokens for tokens in cold if tokens}) > 3
    assert await each_continued(target, asked, restored) == cold
    assert sum(restored) > 500, "nothing was continued"
    assert await each_batched(target, asked, None) == cold


@pytest.mark.timeout(300)
@usual_where(lambda places: places["shapes"] == 0)
@every_way
async def test_a_prompts_logprobs_are_those_that_its_tokens_were_generated_with(
    target: LoadedModel, shapes: str
) -> None:
    """They change nothing for other requests either: no request continues from such a prompt."""
    if shapes == "grid":
        target = gridded(target)
    first, *_ = await jobs(target)
    job = evolve(first, sampling=Sampling(logprobs=2), max_tokens=90)
    async with run_engine(target.settings, target.executor) as running:
        said, logprobs = await heard(running, job)
        whole = (*job.prompt, *said)
        again, _ = await heard(running, evolve(job, prompt=whole, max_tokens=1, prompt_logprobs=2))
        report = (await collect_answer(running, evolve(job, prompt=whole, max_tokens=1, prompt_logprobs=2))).report
        assert report is not None
        assert report.restored_tokens == 0
        assert len(report.prompt_logprobs) == len(whole) - 1
        assert report.prompt_logprobs[-len(said) :] == logprobs
        assert all(len(alternatives) == 2 for _, alternatives in report.prompt_logprobs)
        assert (await collect_answer(running, evolve(job, prompt=whole, max_tokens=1))).tokens == again
    async with run_engine(target.settings, target.executor) as running:
        await collect_answer(running, evolve(job, prompt=whole, max_tokens=1, prompt_logprobs=0))
        after = (await collect_answer(running, evolve(job, prompt=whole, max_tokens=1))).report
        assert after is not None
        assert after.restored_tokens == 0


async def heard(running: Engine, job: Job) -> tuple[Tokens, tuple[Logprob, ...]]:
    tokens, logprobs = Tokens(), tuple[Logprob, ...]()
    async for message in running.submissions.submit(job):
        if isinstance(message, EmitTokens):
            tokens, logprobs = tokens + message.tokens, logprobs + message.logprobs
    return tokens, logprobs
