"""Runs one level of load: busy streams, or arrivals at a rate. It also measures the client's own cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

import anyio
from attrs import define, field

from engine.settings.output.progress import Advance
from engine.tools.bench.bench_options import MOST_STREAMS
from engine.tools.bench.bench_prompts import LoadPrompt, Prompts, make_random
from engine.tools.bench.load_client import LoadClient, Sample

# The interval in seconds at which the client measures its own lateness.
PROBE_S = 0.01


@define(eq=False)
class Level:
    """One level of load. streams: requests at once, 0 if they arrive at a rate.

    Seconds of processor time and lateness are this client's own.
    """

    streams: int
    rate: float
    samples: list[Sample] = field(factory=list[Sample])
    began: float = 0.0
    ended: float = 0.0
    processor_s: float = 0.0
    late: list[float] = field(factory=list[float])
    unsent: int = 0  # arrivals that were dropped because too many requests were open

    @property
    def name(self) -> str:
        return f"{self.rate:g} / s" if self.rate else f"{self.streams} stream{'s' * (self.streams != 1)}"

    async def run(self, client: LoadClient, prompts: Prompts, count: int, warm_up: int, step: Advance) -> None:
        """Send the prompts, after `warm_up` requests of each stream that do not count.

        Everything that was sent counts, even if the run is interrupted.
        """
        warm = warm_up * max(1, self.streams)
        if warm:
            await run_streams(
                client, prompts.make_chains(f"{self.name}: warm-up", warm), max(1, self.streams), [], lambda: None
            )
        chains = prompts.make_chains(self.name, count)
        self.began = time.perf_counter()
        spent = time.process_time()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._measure_lateness)
                if self.rate:
                    await self._send_by_clock(client, chains, make_random(f"{prompts.seed} {self.name} arrivals"), step)
                else:
                    await run_streams(client, chains, self.streams, self.samples, step)
                tasks.cancel_scope.cancel()
        finally:
            self.ended = time.perf_counter()
            self.processor_s = time.process_time() - spent

    async def _send_by_clock(
        self, client: LoadClient, chains: Iterator[Iterator[LoadPrompt]], draw: Random, step: Advance
    ) -> None:
        """Send requests at the times that the clock gives. An arrival does not wait for earlier requests."""
        limiter = anyio.CapacityLimiter(MOST_STREAMS)
        due = time.perf_counter()

        async def follow(chain: Iterator[LoadPrompt]) -> None:
            async with limiter:
                for prompt in chain:
                    await ask_one(client, prompt, self.samples, step)

        async with anyio.create_task_group() as tasks:
            for chain in chains:
                due += draw.expovariate(self.rate)
                await anyio.sleep(max(0.0, due - time.perf_counter()))
                if limiter.available_tokens:
                    tasks.start_soon(follow, chain)
                else:
                    self.unsent += sum(1 for _ in chain)

    async def _measure_lateness(self) -> None:
        """Measure how late this program does what it has to do. An event may be read as late as that."""
        while True:
            due = time.perf_counter() + PROBE_S
            await anyio.sleep(PROBE_S)
            self.late.append(time.perf_counter() - due)


async def run_streams(
    client: LoadClient, chains: Iterator[Iterator[LoadPrompt]], streams: int, samples: list[Sample], step: Advance
) -> None:
    """Run the streams. Each takes a chain, and the next chain when all prompts of the first are answered."""

    async def stream() -> None:
        for chain in chains:
            for prompt in chain:
                await ask_one(client, prompt, samples, step)

    async with anyio.create_task_group() as tasks:
        for _ in range(streams):
            tasks.start_soon(stream)


async def ask_one(client: LoadClient, prompt: LoadPrompt, samples: list[Sample], step: Advance) -> None:
    sample = Sample(time.perf_counter())
    samples.append(sample)
    await client.ask(prompt, sample)
    step()
