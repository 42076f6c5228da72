"""Streams that speculate together: an 8B-shaped target and draft on one CUDA device, with forced acceptance.

    python -m benchmarks.speculation_batches [--streams 1 4 16] [--accepted 4] [--tokens 128] [--rounds 3]

Behind the engine, without HTTP, which knows no way to force anything: the draft does all its work, and what it says is
replaced by what the target is known to pick, up to one wrong token. The core decides what is proposed, by prices that
are measured as at a server's start. plain: the same without a draft, as a server without one answers. Tokens a second
count from when everybody has its first token until the first one has its last; no token may differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import torch
from attrs import define, evolve

from adapters.device.executor import DeviceExecutor
from adapters.device.lane.lane import DeviceLane
from adapters.device.speculation.proposal_tree import Tree
from adapters.device.speculation.proposer import DraftRequest
from adapters.models.decoder.pipeline.pipeline import Pipeline
from benchmarks.arguments import benchmark_parser
from benchmarks.results import Figure, Goal, publish
from benchmarks.speculation_8b import BLOCK, CAPACITY, LAYERS, Forced, Pair, build
from benchmarks.tables import median, print_table
from effects.ids import Tokens
from effects.job import Job
from effects.scope import Scope
from effects.stream import EmitTokens
from engine.loading.calibration.calibrate_compute import RateShape, measure_rates
from engine.loading.drafts.load_draft import BATCH_ROWS, choose_proposal_widths
from engine.loading.warm_up import warm_up
from engine.serving.wiring import Engine, run_engine
from states.rates import Rates
from states.settings import Settings

BUCKETS = (4, 8, 16, 32, 64, 128, 256, 1024)
CONTEXT = 1000
NAMED = 8  # tokens by which prompts are distinguished


@define(eq=False)
class ForcedEach(Forced):
    """A proposer for many streams. each: what each stream will say, by the first tokens of its prompt."""

    each: Mapping[Tokens, Tokens] = {}

    def replaced(self, request: DraftRequest, tree: Tree) -> Tree:
        self.known = self.each.get(tuple(request.state.tokens[:NAMED]), ())
        return super().replaced(request, tree) if self.known else tree


def prompt(number: int) -> Tokens:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(0, 150_000, (CONTEXT,), generator=generator).tolist())


async def stream(running: Engine, job: Job, heard: list[tuple[float, Tokens]]) -> None:
    heard.extend(
        [
            (time.perf_counter(), message.tokens)
            async for message in running.submissions.submit(job)
            if isinstance(message, EmitTokens)
        ]
    )


async def measure_streams(pair: Pair, settings: Settings, streams: int, tokens: int) -> tuple[float, list[Tokens]]:
    """Tokens a second of all together, and what each said."""
    heard: list[list[tuple[float, Tokens]]] = [[] for _ in range(streams)]
    async with run_engine(settings, pair.executor) as running:
        async with anyio.create_task_group() as tasks:
            for number, one in enumerate(heard):
                tasks.start_soon(stream, running, Job(prompt(number), tokens, scope=Scope("off")), one)
        await running.submissions.wait_until_empty()
    begin, end = max(one[0][0] for one in heard), min(one[-1][0] for one in heard)
    count = sum(len(said) for one in heard for at, said in one if begin < at <= end)
    return count / (end - begin), [tuple(token for _, said in one for token in said) for one in heard]


def beginnings(streams: int, said: Sequence[Tokens]) -> dict[Tokens, Tokens]:
    return {prompt(number)[:NAMED]: (*prompt(number), *said[number]) for number in range(streams)}


async def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    lane = DeviceLane("cuda")
    most = max(given.streams)
    pair = await lane.run(partial(build, lane, most, BUCKETS, given.layers))
    await lane.run(partial(warm_up, Pipeline((pair.shard,)), pair.draft, BATCH_ROWS))
    common: dict[str, Any] = {"slots": most, "max_context": CAPACITY, "chunk": BUCKETS[-1], "batch_rows": BATCH_ROWS}
    pair.executor = DeviceExecutor(evolve(pair.executor.parts, proposer=None))
    shape = RateShape(BUCKETS[-1], CAPACITY, choose_proposal_widths(BLOCK - 1, 0))
    plain = Settings(**common)
    known: dict[int, list[Tokens]] = {}
    for streams in given.streams:  # twice, so that the first round is like the others
        for _ in range(2):
            known[streams] = (await measure_streams(pair, plain, streams, given.tokens + BLOCK))[1]
    found: dict[tuple[int, str], list[float]] = {}
    differing = 0
    for _ in range(given.rounds):
        for streams in given.streams:
            pair.executor = DeviceExecutor(evolve(pair.executor.parts, proposer=None))
            speed, said = await measure_streams(pair, plain, streams, given.tokens)
            found.setdefault((streams, "plain"), []).append(speed)
            differing += sum(one != all_[: given.tokens] for one, all_ in zip(said, known[streams], strict=True))
            forced = ForcedEach(pair.drafting, (), given.accepted - 1)
            forced.each = beginnings(streams, known[streams])
            pair.executor = DeviceExecutor(evolve(pair.executor.parts, proposer=forced))
            rates: Rates = await lane.run(partial(measure_rates, pair.executor, pair.shard, shape))
            drafted = Settings(**common, max_proposals=BLOCK - 1, rates=rates)
            speed, said = await measure_streams(pair, drafted, streams, given.tokens)
            found.setdefault((streams, "drafted"), []).append(speed)
            differing += sum(one != all_[: given.tokens] for one, all_ in zip(said, known[streams], strict=True))
    pair.executor.close()
    return [
        {
            "streams": streams,
            "plain, tok/s": median(found[streams, "plain"]),
            "drafted, tok/s": median(found[streams, "drafted"]),
            "times plain": median(
                there / here for here, there in zip(found[streams, "plain"], found[streams, "drafted"], strict=True)
            ),
            "answers differing": differing,
        }
        for streams in given.streams
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--accepted", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    given = parser.parse_args()
    rows = anyio.run(measure, given)
    print_table(f"forced acceptance {given.accepted}", rows)
    what, goal = f"8B shape, streams, forced acceptance {given.accepted}", Goal(at_least=0.98)
    figures = [Figure("speculation", what, str(row["streams"]), "x", row["times plain"], goal=goal) for row in rows]
    publish(given, "speculation_batches", {"rows": rows}, figures)


if __name__ == "__main__":
    main()
