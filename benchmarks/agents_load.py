"""The load of several agents that begin together, and single prompts, over HTTP. `benchmarks.peer` sends it.

All sessions begin at the same moment, and their prompts have one head (the tools and the system prompt of an agent).
Each session has some turns. A turn's prompt is the one before it, an answer, and a tool's result. The answers are drawn
tokens as well: so all servers get the same prompts, whatever they answer.
"""

from __future__ import annotations

import time
from asyncio import SelectorEventLoop
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from attrs import define, field, frozen

from effects.ids import Tokens
from engine.tools.bench.bench_figures import compute_percentile
from engine.tools.bench.bench_options import MeasuredServer, RequestOptions
from engine.tools.bench.bench_prompts import LoadPrompt, draw_tokens, make_random
from engine.tools.bench.load_client import LoadClient, Sample, TimestampSelector
from engine.tools.simulation.tally import InfiniteCache

Result = TypeVar("Result")
FIRST_OWN = (100, 900)  # tokens of a session's first question
BLOCK = 16  # tokens: the smallest that any of the servers reuses


@frozen
class Workload:
    """The shape of the load. Ranges are of tokens."""

    sessions: int
    turns: int
    head: int
    results: tuple[int, int]  # of a tool
    answers: tuple[int, int]

    @property
    def longest(self) -> int:
        """The tokens of the longest prompt with its answer, at most."""
        return self.head + FIRST_OWN[1] + self.turns * (self.results[1] + self.answers[1])

    def make_sessions(self, seed: int) -> list[list[LoadPrompt]]:
        """Draw the prompts of each session, the same ones for one seed."""
        head = draw_tokens(make_random(f"{seed} head"), self.head)
        return [self.make_session(head, f"{seed} session {number}") for number in range(self.sessions)]

    def make_session(self, head: Tokens, name: str) -> list[LoadPrompt]:
        draw = make_random(name)
        prompt = (*head, *draw_tokens(draw, draw.randint(*FIRST_OWN)))
        made = list[LoadPrompt]()
        for _ in range(self.turns):
            answer = draw.randint(*self.answers)
            made.append(LoadPrompt(prompt, answer))
            prompt = (*prompt, *draw_tokens(draw, answer), *draw_tokens(draw, draw.randint(*self.results)))
        return made


@define
class AgentsRun:
    """The outcome of one run: samples by turn, and the tokens that a cache of all earlier prompts would have found."""

    seconds: float = 0.0
    turns: list[list[Sample]] = field(factory=list["list[Sample]"])
    prompt_tokens: int = 0
    findable: int = 0

    def compute_figures(self) -> dict[str, float]:
        """Return the figures under the names that `benchmarks.peer` shows.

        Requests that failed are counted, and have no part in the times. An answer whose tokens have no text is one of
        them: small models give some. Raises SystemExit if more than half failed.
        """
        every = [sample for turn in self.turns for sample in turn]
        failed = [sample.error for sample in every if sample.error]
        first = sorted(sample.first for sample in self.turns[0] if sample.first is not None)
        if not first or 2 * len(failed) > len(every):
            raise SystemExit(f"{len(failed)} of {len(every)} requests of the agents failed: {failed[0]}")
        if failed:
            print(f"{len(failed)} of {len(every)} requests of the agents failed: {failed[0]}", flush=True)
        later = sorted(sample.first for turn in self.turns[1:] for sample in turn if sample.first is not None)
        found = sum(sample.cached or 0 for sample in every)
        figures = {
            "agents: whole run, s": self.seconds,
            "agents: tok/s": sum(sample.tokens for sample in every) / self.seconds,
            "agents: first token of the first turn p50, s": compute_percentile(first, 50),
            "agents: first token of the first turn, last, s": first[-1],
            "agents: unanswered": len(failed),
            "agents: found, %": 100 * found / self.prompt_tokens,
            "agents: could be found, %": 100 * self.findable / self.prompt_tokens,
        }
        if later:
            figures["agents: first token of later turns p50, s"] = compute_percentile(later, 50)
            figures["agents: first token of later turns p95, s"] = compute_percentile(later, 95)
        return figures


def run_agents(url: str, workload: Workload, seed: int) -> AgentsRun:
    """Send a workload to a server. All sessions begin at the same moment."""
    sessions = workload.make_sessions(seed)
    run = AgentsRun(turns=[[] for _ in range(workload.turns)])
    cache = InfiniteCache(BLOCK)
    for turn in zip(*sessions, strict=True):
        for prompt in turn:
            run.prompt_tokens += len(prompt.tokens)
            run.findable += cache.count_shared_tokens(prompt.tokens, ())

    async def send_session(client: LoadClient, prompts: Sequence[LoadPrompt]) -> None:
        for turn, prompt in enumerate(prompts):
            sample = Sample(0.0)
            run.turns[turn].append(sample)
            await client.ask(prompt, sample)

    async def send_all(client: LoadClient) -> None:
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for prompts in sessions:
                tasks.start_soon(send_session, client, prompts)
        run.seconds = time.perf_counter() - started

    run_with_client(url, send_all)
    return run


def ask_in_turn(url: str, prompts: Sequence[LoadPrompt]) -> list[Sample]:
    """Ask a server one prompt after the other. Raises SystemExit if one fails."""

    async def ask(client: LoadClient) -> list[Sample]:
        samples = [Sample(0.0) for _ in prompts]
        for prompt, sample in zip(prompts, samples, strict=True):
            await client.ask(prompt, sample)
            if sample.error:
                raise SystemExit(f"a prompt of {len(prompt.tokens)} tokens failed: {sample.error}")
        return samples

    return run_with_client(url, ask)


def run_with_client(url: str, work: Callable[[LoadClient], Awaitable[Result]]) -> Result:
    """Run work on a loop whose client notes when data came. A short request before it warms the server up."""
    selector = TimestampSelector()
    client = LoadClient.from_options(MeasuredServer(url=url), RequestOptions(), lambda: selector.at)

    async def run() -> Result:
        async with client:
            await client.find_model()
            await client.ask(LoadPrompt(draw_tokens(make_random(str(time.time_ns())), 64), 8), Sample(0.0))
            return await work(client)

    return anyio.run(run, backend_options={"loop_factory": lambda: SelectorEventLoop(selector)})
