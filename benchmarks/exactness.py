"""The promise, measured: the same tokens cold, continued, alone, batched with three others, and executed again.

`python -m benchmarks.exactness [--prompts 200] [--model demo] [--device cpu] [--dtype auto]`
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from attrs import evolve

from adapters.text.text import Text
from benchmarks.report import machine, raw, table
from effects.ids import Tokens
from effects.job import Job, Sampling
from effects.stream import EmitTokens
from engine import __version__
from engine.assemble import Engine, engine
from engine.execute import execute
from engine.options import Options
from engine.target import Target, load_target
from engine.trace import VERSION, Header, Recorder

ANSWER = 48  # tokens


async def prompts(text: Text, count: int) -> list[Tokens]:
    """Code, chat, tables and long listings, 20 to 4,000 tokens; a mixture that the demo was made for."""
    rng = random.Random(0)
    made = list[Tokens]()
    for n in range(count):
        kind = n % 4
        if kind == 0:
            source = f"def function_{n}(items):\n" + "".join(
                f"    total_{k} = items[{k}] + {rng.randrange(99)}\n" for k in range(n % 60)
            )
            made.append((await text.tokenizer.encode([source]))[0])
        elif kind == 1:
            question = f"What is {rng.randrange(50)} + {rng.randrange(50)}? " + "Please think about it. " * (n % 30)
            made.append(await text.encode_chat([{"role": "user", "content": question}]))
        elif kind == 2:
            pairs = [f"key {rng.randrange(1000)} -> {rng.randrange(1000)}" for _ in range(10 + n % 200)]
            made.append(
                await text.encode_chat([{"role": "user", "content": "\n".join([*pairs, f"What is {pairs[3][:8]}?"])}])
            )
        else:
            listing = "\n".join(f"value_{k} = {rng.randrange(10_000)}" for k in range(5 + n % 300))
            made.append((await text.tokenizer.encode([listing]))[0])
    return [prompt[-4000:] for prompt in made]


async def answer(running: Engine, job: Job) -> tuple[Tokens, int]:
    """The tokens of a job, and how much of its prompt was restored."""
    tokens: Tokens = ()
    restored = 0
    async for message in running.door.submit(job):
        if isinstance(message, EmitTokens):
            tokens += message.tokens
        else:
            restored = getattr(getattr(message, "report", None), "restored_tokens", restored)
    return tokens, restored


async def each_cold(target: Target, jobs: list[Job]) -> list[Tokens]:
    """Every job in a world of its own: nothing to continue from, nobody beside it."""
    answers = list[Tokens]()
    for job in jobs:
        async with engine(target.settings, target.executor, facts={}) as running:
            tokens, restored = await answer(running, job)
            assert restored == 0
            answers.append(tokens)
    return answers


async def each_continued(target: Target, jobs: list[Job], restored: list[int]) -> list[Tokens]:
    """Every job after one that shares two thirds of its prompt."""
    answers = list[Tokens]()
    async with engine(target.settings, target.executor, facts={}) as running:
        for job in jobs:
            await answer(running, evolve(job, prompt=job.prompt[: max(1, len(job.prompt) * 2 // 3)], max_tokens=3))
            tokens, kept = await answer(running, job)
            answers.append(tokens)
            restored.append(kept)
    return answers


async def each_batched(target: Target, jobs: list[Job], recorder: Recorder | None) -> list[Tokens]:
    """Four at a time."""
    answers: list[Tokens] = [()] * len(jobs)

    async def one(number: int) -> None:
        answers[number] = (await answer(running, jobs[number]))[0]

    async with engine(target.settings, target.executor, facts={}, recorder=recorder) as running:
        for start in range(0, len(jobs), 4):
            async with anyio.create_task_group() as tasks:
                for number in range(start, min(start + 4, len(jobs))):
                    tasks.start_soon(one, number)
    return answers


async def timed(
    name: str, work: Callable[[], Awaitable[list[Tokens]]], cold: list[Tokens] | None
) -> tuple[list[Tokens], dict[str, Any]]:
    start = time.monotonic()
    answers = await work()
    differing = 0 if cold is None else sum(one != other for one, other in zip(answers, cold, strict=True))
    return answers, {
        "how": name,
        "jobs": len(answers),
        "differing": differing,
        "seconds": round(time.monotonic() - start, 1),
    }


async def measure(options: Options, count: int) -> int:
    target = await load_target(options)
    text = Text.load(target.folder)
    made = await prompts(text, count)
    jobs = [Job(prompt, ANSWER, stop_tokens=tuple(text.tokenizer.end_tokens)) for prompt in made]
    seeded = [evolve(job, sampling=Sampling(temperature=0.8, top_p=0.95, seed=n)) for n, job in enumerate(jobs)]
    rows, restored = list[dict[str, Any]](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "batched.jsonl.zst"
        for kind, these in (("greedy", jobs), ("seeded", seeded)):
            cold, row = await timed(f"{kind}, cold and alone", partial(each_cold, target, these), None)
            rows.append(row)
            rows.append((await timed(f"{kind}, continued", partial(each_continued, target, these, restored), cold))[1])
            recorder = None
            if kind == "seeded":
                recorder = Recorder(
                    trace, Header(VERSION, __version__, target.settings, target.identity, options.shown())
                )
                recorder.start()
            rows.append(
                (await timed(f"{kind}, batched by four", partial(each_batched, target, these, recorder), cold))[1]
            )
        await text.aclose()
        await target.close()
        run, tokens = await execute(trace, options.model)
    table("Exactness", rows)
    executed = {"events": run.events, "tokens": tokens, "differing": 0}
    table("The batched run, executed again from its trace", [executed])
    where = {"numerics": dict(target.numerics_shown), "machine": machine()}
    raw(
        "exactness",
        {
            "rows": rows,
            "restored_tokens": sum(restored),
            "prompt_tokens": sum(map(len, made)),
            "executed": executed,
            **where,
        },
    )
    return sum(row["differing"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    options = Options(
        model=given.model, device=given.device, dtype=given.dtype, slots=4, disk_prefix_cache="off", host_cache_budget=0
    )
    return 1 if anyio.run(measure, options, given.prompts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
