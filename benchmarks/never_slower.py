"""Measures that a draft makes nothing slower: with it and without, in turn, in one process.

    python -m benchmarks.never_slower [--parts streams,pairs] [--streams 1,4,16] [--device cpu] [--record]

streams: so many clients at once, each with its own prompts, whose computation counts. The draft is used as it is, and
once more so that it is never right. pairs: single answers of 512 tokens with a draft that is never right, and no pair
may lose more than 2 %. Each answer is given several times in turn, in every order, and the shortest times are compared.
Single ones differ by more than 2 %, and other work on the machine only adds to them. A second target without a draft
shows how much of the difference is noise of the machine. Every target lives as long as a server would, so what it
learns stays. Wall time and processor time are given: on a machine with other work the second says more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import cycle, permutations
from typing import Any

import anyio
from attrs import define, evolve

from benchmarks.arguments import options_of, server_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.speculation import answer, never_right
from benchmarks.subjects import prompts
from benchmarks.tables import median, print_table
from effects.ids import Tokens
from effects.job import Job
from effects.scope import Scope
from engine.loading.background_load import load_target
from engine.loading.load_target import LoadedModel
from engine.serving.serve import freeze_collected
from engine.serving.wiring import Engine, run_engine
from engine.settings.options import Options, evolve_options

LONGEST = 256  # tokens of a prompt
ANSWER = 512  # of a pair
AGAIN = "plain again"  # a target of its own: another one's slots have the prompt


@define
class Took:
    tokens: int
    wall: float
    cpu: float
    decode_steps: int
    answers: list[Tokens]


async def together(running: Engine, jobs: Sequence[Job]) -> Took:
    """All at once. wall, cpu: seconds until the last one is done, prompts included."""
    found: list[Any] = [None] * len(jobs)

    async def one(at: int) -> None:
        found[at] = await answer(running, jobs[at])

    wall, cpu = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for at in range(len(jobs)):
            tasks.start_soon(one, at)
    spent = time.perf_counter() - wall, time.process_time() - cpu
    decode_steps = sum(each.report.decode_steps for each in found if each.report is not None)
    return Took(sum(len(each.tokens) for each in found), *spent, decode_steps, [each.tokens for each in found])


async def time_batches(ways: dict[str, Engine], batches: Sequence[Sequence[Job]]) -> dict[str, list[Took]]:
    """Every batch in every way, one right after the other; who begins takes turns."""
    took: dict[str, list[Took]] = {way: [] for way in ways}
    for number, jobs in enumerate(batches):
        for way in sorted(ways, reverse=number % 2 == 1):
            took[way].append(await together(ways[way], jobs))
    return took


def row(what: str, took: dict[str, list[Took]], way: str = "draft") -> dict[str, Any]:
    """x: plain time over time with the draft, of all and of single batches; below 1 the draft loses."""
    plain, drafted = took["plain"], took[way]
    walls = [one.wall / other.wall for one, other in zip(plain, drafted, strict=True)]
    cpus = [one.cpu / other.cpu for one, other in zip(plain, drafted, strict=True)]
    return {
        "what": what,
        "tokens": sum(one.tokens for one in plain),
        "plain tok/s": sum(one.tokens for one in plain) / sum(one.wall for one in plain),
        "draft tok/s": sum(one.tokens for one in drafted) / sum(one.wall for one in drafted),
        "x wall": sum(one.wall for one in plain) / sum(one.wall for one in drafted),
        "x cpu": sum(one.cpu for one in plain) / sum(one.cpu for one in drafted),
        "median x wall": median(walls),
        "least x wall": min(walls),
        "median x cpu": median(cpus),
        "least x cpu": min(cpus),
        "tok/round": sum(one.tokens for one in drafted) / sum(one.decode_steps for one in drafted),
        "differing": sum(one.answers != other.answers for one, other in zip(plain, drafted, strict=True)),
    }


async def streams(ways: dict[str, Engine], kind: str, counts: Sequence[int], repeats: int, most: int) -> list[Any]:
    rows = list[Any]()
    for count in counts:
        asked = prompts(["code"], count * repeats, LONGEST)["code"]
        jobs = [Job(prompt, most, scope=Scope("off")) for prompt in asked]
        batches = [jobs[at * count : (at + 1) * count] for at in range(repeats)]
        freeze_collected()
        rows.append(row(f"{count} streams, {kind}", await time_batches(ways, batches)))
        print(json.dumps(rows[-1]), flush=True)
    return rows


async def pairs(ways: dict[str, Engine], count: int, turns: int) -> list[Any]:
    took: dict[str, list[Took]] = {way: [] for way in ways}
    asked = prompts(["code"], count, LONGEST)["code"]
    freeze_collected()
    for prompt in asked:
        job = Job(prompt, ANSWER, scope=Scope("off"))
        given: dict[str, list[Took]] = {way: [] for way in ways}
        for _, order in zip(range(turns), cycle(permutations(ways)), strict=False):
            for way in order:
                given[way].append(await together(ways[way], [job]))
        for way, answers in given.items():
            wall, cpu = min(each.wall for each in answers), min(each.cpu for each in answers)
            took[way].append(evolve(answers[0], wall=wall, cpu=cpu))
    rows = [row("pairs, never right", took), row("pairs, plain and plain again", took, AGAIN)]
    print(*map(json.dumps, rows), sep="\n", flush=True)
    return rows


async def measure(options: Options, given: argparse.Namespace) -> list[dict[str, Any]]:
    parts, counts = given.parts.split(","), [int(count) for count in given.streams.split(",")]
    options = evolve_options(options, disk_prefix_cache="off", host_cache_budget=0)
    targets: dict[str, LoadedModel] = {
        "plain": await load_target(evolve_options(options, draft="none")),
        "draft": await load_target(options),
    }
    if "pairs" in parts:
        targets[AGAIN] = await load_target(evolve_options(options, draft="none"))
    rows = list[dict[str, Any]]()
    for kind in ("as it is", "never right"):
        if kind == "never right":
            never_right(targets["draft"].draft)
        async with AsyncExitStack() as stack:
            ways = {
                way: await stack.enter_async_context(run_engine(target.settings, target.executor))
                for way, target in targets.items()
            }
            if "pairs" in parts and kind == "never right":
                rows += await pairs(ways, given.pairs, given.turns)
            if "streams" in parts:
                two = {way: running for way, running in ways.items() if way != AGAIN}
                rows += await streams(two, kind, counts, given.repeats, given.tokens)
    for target in targets.values():
        await target.close()
    return rows


def main() -> None:
    parser = server_parser(__doc__)
    parser.add_argument("--parts", default="streams,pairs")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--repeats", type=int, default=4, help="batches of streams")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream's answer")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6, help="how often each answer of a pair is given")
    given = parser.parse_args()
    rows = anyio.run(measure, options_of(given), given)
    print_table("with the draft against without", rows)
    figures = [
        Figure(
            "speculation", "speed with a draft against none", row["what"], "x", row["x wall"], goal=Goal(at_least=0.98)
        )
        for row in rows
    ]
    publish(given, "never_slower", {"rows": rows}, figures, given.device)


if __name__ == "__main__":
    main()
