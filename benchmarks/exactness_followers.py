"""Jobs that begin together with others of the same head, some of which leave. `benchmarks.exactness` compares them.

Each job gets two companions, whose prompts begin like its own and then go on differently. All three are submitted at
the same moment, in a random order, so the job leads its companions, follows one of them, or both in turn. A companion
may leave when a random part of its prompt is there: what it led is then computed by another one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
from attrs import evolve, field, frozen

from effects.ids import Tokens
from effects.job import Job
from effects.stream import EmitTokens, ReportProgress
from engine.loading.load_target import LoadedModel
from engine.serving.wiring import Engine, run_engine

Answer = TypeVar("Answer")

COMPANIONS = 2  # of each job
AT_ONCE = 2  # jobs, each with its companions: more requests than there are slots
ANSWER = 3  # tokens of a companion
MOST_TAIL = 200  # tokens of a companion's prompt behind the common head
LEAVING_SHARE = 0.5  # of the companions


@frozen
class Companion:
    """A request that shares the head of a job's prompt.

    leave_at: it leaves once so many tokens of its prompt are there; None: it stays.
    """

    job: Job
    leave_at: int | None


@frozen
class Companions:
    """Draws companions, and counts what became of them."""

    draw: random.Random
    counts: Counter[str] = field(factory=Counter[str])

    def make_companion(self, job: Job) -> Companion:
        draw = self.draw
        head = draw.randint(min(len(job.prompt), len(job.prompt) // 4 + 1), len(job.prompt))
        own = tuple(draw.choice(job.prompt) for _ in range(draw.randint(1, MOST_TAIL)))
        prompt: Tokens = (*job.prompt[:head], *own)
        leave_at = draw.randrange(len(prompt)) if draw.random() < LEAVING_SHARE else None
        return Companion(evolve(job, prompt=prompt, max_tokens=ANSWER), leave_at)

    async def accompany(self, engine: Engine, companion: Companion) -> None:
        """Submit a companion, and cancel it where it is to leave."""
        ticket = engine.submissions.submit(companion.job)
        self.counts["companions"] += 1
        async for message in ticket:
            done = None
            if isinstance(message, ReportProgress):
                done = message.done
            elif isinstance(message, EmitTokens):
                done = len(companion.job.prompt)
            if companion.leave_at is not None and done is not None and done >= companion.leave_at:
                ticket.cancel("client_gone")
                self.counts["left"] += 1
                return


async def answer_among_companions(
    target: LoadedModel, jobs: Sequence[Job], seed: int, ask: Callable[[Engine, Job], Awaitable[Answer]]
) -> tuple[list[Answer], Counter[str]]:
    """Answer all jobs, each of them together with its companions. Return the answers, and counts of the companions and
    of those that left.
    """
    found = dict[int, Answer]()
    companions = Companions(random.Random(seed))

    async def answer(number: int) -> None:
        found[number] = await ask(engine, jobs[number])

    async with run_engine(target.settings, target.executor, transfer=target.transfer) as engine:
        for start in range(0, len(jobs), AT_ONCE):
            async with anyio.create_task_group() as tasks:
                for number in range(start, min(start + AT_ONCE, len(jobs))):
                    index = companions.draw.randint(0, COMPANIONS)
                    for order in range(COMPANIONS + 1):
                        if order == index:
                            tasks.start_soon(answer, number)
                        else:
                            tasks.start_soon(companions.accompany, engine, companions.make_companion(jobs[number]))
    return [found[number] for number in range(len(jobs))], companions.counts
