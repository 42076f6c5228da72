"""Measures agents' sessions with a common head on a GPU of 24 GB: rows in a pool of pages compared with whole slots, 8B
shape.

The engine and its lane over random weights, without HTTP. Each way serves the same sessions, all sent at once, from
the memory that a GPU of that size leaves; answers have to be the same, token by token.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
import torch
from attrs import define, field

from adapters.device.executor import DeviceExecutor
from adapters.device.executor_parts import ExecutorParts
from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.numerics.synthetic import RandomWeights
from benchmarks.arguments import benchmark_parser
from benchmarks.cuda_model import DEVICE, DTYPE, config_8b
from benchmarks.results import Figure, publish
from benchmarks.tables import median, print_table
from effects.ids import PAGE, Tokens
from effects.job import Job
from effects.ports import Closed
from effects.stream import EmitTokens
from engine.loading.memory.memory_fit import DeviceNeed, Fit, fit_page_pool, fit_slots
from engine.serving.wiring import run_engine
from states.settings import Settings

GIB, LAYERS, POSITIONS = 1 << 30, 36, 40960
BUCKETS = (4, 8, 16, 32, 64, 1024)


@define
class HeardSession:
    """The answer of one session: the times of its first and its last token, and all tokens."""

    first_s: float = 0.0
    last_s: float = 0.0
    tokens: list[int] = field(factory=list)
    finish: str = ""


def prompts(sessions: int, length: int, head: int) -> list[Tokens]:
    generator = torch.Generator().manual_seed(1)
    shared, *rest = (
        tuple(torch.randint(1000, 100_000, (count,), generator=generator).tolist())
        for count in (head, *[length - head] * sessions)
    )
    return [(*shared, *own) for own in rest]


async def serve_jobs(fit: Fit, jobs: list[Job]) -> tuple[float, list[HeardSession]]:
    config, lane = config_8b(LAYERS, POSITIONS), DeviceLane("cuda")

    def build() -> DeviceExecutor:
        kernels, weights = TritonKernels(DEVICE), RandomWeights(config, 1, DEVICE, DTYPE)
        how: dict[str, Any] = {"device": DEVICE, "dtype": DTYPE, "buckets": BUCKETS}
        how |= {"slots": fit.slots, "capacity": fit.context, "pages": fit.pages}
        return DeviceExecutor(
            ExecutorParts(Pipeline([DenseShard(config, weights, kernels, ShardPlacement(**how))]), BUCKETS, lane=lane)
        )

    executor = await lane.run(build)
    settings = Settings(
        slots=fit.slots,
        max_context=fit.context,
        chunk=BUCKETS[-1],
        batch_rows=64,
        pages=fit.pages,
        shares_pages=bool(fit.pages),
    )
    heard = [HeardSession() for _ in jobs]
    try:
        async with run_engine(settings, executor) as running:

            async def one(job: Job, session: HeardSession) -> None:
                async for message in running.submissions.submit(job):
                    if isinstance(message, EmitTokens):
                        session.last_s = time.monotonic() - began
                        session.first_s = session.first_s or session.last_s
                        session.tokens += message.tokens
                    elif isinstance(message, Closed):
                        session.finish = message.finish

            for _ in range(3):  # kernels, graphs
                began = time.monotonic()
                await one(Job(jobs[0].prompt[:1500], 4), HeardSession())
            began = time.monotonic()
            async with anyio.create_task_group() as tasks:
                for job, session in zip(jobs, heard, strict=True):
                    tasks.start_soon(one, job, session)
            took = time.monotonic() - began
    finally:
        await anyio.to_thread.run_sync(executor.close)
    return took, heard


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--length", type=int, default=20_000)
    parser.add_argument("--head", type=int, default=12_000)
    parser.add_argument("--answer", type=int, default=128)
    asked = parser.parse_args()
    config = config_8b(LAYERS, POSITIONS)
    weights = sum(torch.Size(shape).numel() for shape in config.tensors(range(config.num_layers)).values())
    there = int(asked.gib * GIB * 9 / 10)  # less the reserve
    need = DeviceNeed("cuda:0", there, weights * DTYPE.itemsize + GIB // 2, config.kv_bytes_per_token(DTYPE))
    context = -(-(asked.length + asked.answer) // PAGE) * PAGE
    ways = {
        "whole slots": fit_slots([need], config.max_positions, 0, context),
        "pages": fit_page_pool([need], config.max_positions, 0, context),
    }
    jobs = [Job(prompt, asked.answer) for prompt in prompts(asked.sessions, asked.length, asked.head)]
    rows, answers = list[dict[str, Any]](), list[list[list[int]]]()
    for name, fit in ways.items():
        took, heard = anyio.run(serve_jobs, fit, jobs)
        answers.append([one.tokens for one in heard])
        count = sum(len(one.tokens) for one in heard)
        rows.append(
            {
                "way": name,
                "slots": fit.slots,
                "rows": fit.rows,
                "served": sum(one.finish == "length" for one in heard),
                "s": took,
                "tokens/s": count / took,
                "median first token s": median([one.first_s for one in heard]),
                "same answers": answers[-1] == answers[0],
            }
        )
    print_table(f"{asked.sessions} sessions of {asked.length} tokens, {asked.head} in common, {asked.gib:g} GiB", rows)
    whole, pages = (row["s"] for row in rows)
    what, at = "8B shape in 24 GiB, rows in pages beside whole slots", f"{asked.sessions} sessions of {asked.length}"
    figures = [Figure("memory", what, at, "s", pages, {"whole slots": whole})]
    publish(asked, "kv_pool", {"rows": rows, "asked": vars(asked)}, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
