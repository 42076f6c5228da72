"""An engine that computes nothing: slots, a bounded queue, prefill in chunks, decode steps, and tokens that are a
digest.

It keeps the promises of `effects.ports`: submit never blocks, messages come in order, the last one is Closed, exactly
once, and a cancelled job ends within one chunk or decode step.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup
from attrs import define, evolve, field, frozen

from effects.decode import Logprob
from effects.ids import RequestId, Tier, Tokens
from effects.job import Job, Report
from effects.ports import (
    Activity,
    CancelReason,
    Closed,
    Divergence,
    JobAcceptance,
    Message,
    SlotStatus,
    Stage,
    Status,
    Totals,
)
from effects.scope import Selection
from effects.stream import EmitTokens, Finish, ReportProgress
from engine.core.cache_misses import find_longest_divergence

# After so many tokens the digests end an answer if steps take no time. Every request without a limit of its own would
# fill the context otherwise. An answer that takes its time has no end, so that clients may leave it.
ANSWER_TOKENS = 128

FINISHES: Mapping[CancelReason, Finish] = {
    "client_gone": "cancelled",
    "deadline": "deadline",
    "stop_string": "stop",
    "shutdown": "shutdown",
}


@frozen
class FakeProps:
    """Implements `Props`."""

    def build_json(self) -> Mapping[str, Any]:
        return {"model": "fake"}


@define(eq=False)
class FakeTicket:
    request: RequestId
    job: Job
    messages: deque[Message] = field(factory=deque)
    listener: Callable[[], object] = lambda: None
    reason: CancelReason | None = None
    started: float = field(factory=time.monotonic)
    accepted: bool = False
    working: bool = False
    closed: Closed | None = None
    closed_at: float = 0.0
    report: Report = field(factory=lambda: Report(0))
    diverged: Divergence | None = None

    @staticmethod
    def make(request: int, job: Job) -> FakeTicket:
        return FakeTicket(RequestId(request), job, report=Report(len(job.prompt)))

    def next_message(self) -> Message | None:
        return self.messages.popleft() if self.messages else None

    def set_listener(self, listener: Callable[[], object]) -> None:
        self.listener = listener

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while (message := self.next_message()) is not None:
                yield message
                if isinstance(message, Closed):
                    return
            news = anyio.Event()
            self.set_listener(news.set)
            await news.wait()

    def cancel(self, reason: CancelReason) -> None:
        if self.reason is None and self.closed is None:
            self.reason = reason

    def tell(self, message: Message) -> None:
        self.messages.append(message)
        self.listener()

    def close(self, finish: Finish, detail: str = "") -> None:
        assert self.closed is None
        self.closed = Closed(finish, self.report, detail, self.stages_ms(), self.diverged)
        self.closed_at = time.monotonic()
        self.tell(self.closed)

    def stages_ms(self) -> dict[Stage, float]:
        """Half and half, once it is worked at; a job that is turned away spends no time in any."""
        spent = 1000 * (time.monotonic() - self.started)
        if self.working:
            return {"Prefilling": spent / 2, "Speculating": spent / 2}
        return {"Waiting": spent} if self.accepted else {}

    async def pause(self, seconds: float) -> bool:
        """Work for so long; False if the job was cancelled meanwhile: work is cut at the next chunk or decode step."""
        await anyio.sleep(seconds)
        return self.reason is None


Script = Callable[[Job], Iterator[int]]


@define(eq=False, slots=False)
class FakeDoor:
    """Set its fields to make it slow, full, or broken. `script` says what is answered to a job."""

    script: Script
    tasks: TaskGroup
    slots: int = 4
    max_queue: int = 32
    chunk: int = 8
    go: anyio.Event | None = None  # it works only once this is set
    chunk_s: float = 0.0
    step_s: float = 0.0
    per_step: int = 1
    fail_after: int | None = None  # tokens
    failure: Finish = "failed"  # how, then
    hang_after: int | None = None  # tokens; the engine never says anything again
    state: Literal["ready", "draining"] = "ready"
    troubles: Mapping[str, str] = field(factory=dict)
    outages: Mapping[str, str] = field(factory=dict)
    tickets: list[FakeTicket] = field(factory=list)
    waiting: int = 0
    busy: int = 0
    last: bool = True  # progress counts a prompt's last token, which the first decode step feeds
    selection: Selection = field(factory=Selection)  # what is kept of a prompt beyond the device
    kept: list[tuple[str, Tokens]] = field(factory=list)  # salts and prompts whose rows are still there

    @staticmethod
    @asynccontextmanager
    async def opened(script: Script, **settings: Any) -> AsyncIterator[FakeDoor]:
        async with anyio.create_task_group() as tasks:
            yield FakeDoor(script, tasks, **settings)
            tasks.cancel_scope.cancel()

    def reset(self) -> None:
        """Forget all requests and scripts, as a new door. Nothing may run."""
        fresh = FakeDoor(DIGESTS, self.tasks)
        for name in (
            "script",
            "per_step",
            "last",
            "selection",
            "fail_after",
            "failure",
            "state",
            "kept",
            "tickets",
            "busy",
        ):
            setattr(self, name, getattr(fresh, name))

    def submit(self, job: Job) -> FakeTicket:
        ticket = FakeTicket.make(len(self.tickets), job)
        self.tickets.append(ticket)
        if self.state != "ready":
            ticket.close("shutdown")
        elif self._full:
            ticket.close("queue_full")
        else:
            ticket.accepted = True
            ticket.tell(ReportProgress(0, len(job.prompt), 0))
            if self.busy < self.slots:
                self.busy += 1
                self.tasks.start_soon(self._serve, ticket)
            else:
                self.waiting += 1
                self.tasks.start_soon(self._queue, ticket)
        return ticket

    def get_acceptance(self) -> JobAcceptance:
        return "draining" if self.state != "ready" else "queue_full" if self._full else "ready"

    @property
    def _full(self) -> bool:
        return self.busy >= self.slots and self.waiting >= self.max_queue

    def status(self) -> Status:
        return Status(
            state=self.state,
            slots=tuple(map(self._slot, range(self.slots))),
            total_slots=self.slots,
            slots_busy=self.busy,
            queue=self.waiting,
            queue_full=self._full,
            troubles={**self.troubles, **self.outages},
            outages=self.outages,
            props=FakeProps(),
        )

    def activity(self) -> Activity:
        """Nothing: tests of the page run a real engine."""
        return Activity((), (), Totals({}, {}, {}, {}))

    def _slot(self, number: int) -> SlotStatus:
        busy = number < self.busy
        return SlotStatus(number, busy, RequestId(number) if busy else None, "Prefilling" if busy else None, 0)

    async def _queue(self, ticket: FakeTicket) -> None:
        while self.busy >= self.slots and ticket.reason is None:  # noqa: ASYNC110 - a fake need not be clever
            await anyio.sleep(0.002)
        self.waiting -= 1
        if ticket.reason is not None:
            ticket.close(FINISHES[ticket.reason])
            return
        self.busy += 1
        await self._serve(ticket)

    async def _serve(self, ticket: FakeTicket) -> None:
        try:
            await self._work(ticket)
        finally:
            self.busy -= 1
            self.kept.append((ticket.job.salt, ticket.job.prompt))

    async def _work(self, ticket: FakeTicket) -> None:
        ticket.working = True
        if self.go is not None:
            await self.go.wait()
        job, total = ticket.job, len(ticket.job.prompt)
        cached = self.common(job)
        found = [find_longest_divergence([kept], job.prompt) for salt, kept in self.kept if salt == job.salt]
        ticket.diverged = max((one for one in found if one and one.at >= cached), key=lambda one: one.at, default=None)
        missed = "" if cached else "empty_store"
        logprobs = tuple((-0.25, ((token, -0.25),) * job.prompt_logprobs) for token in job.prompt[1:])
        logprobs = logprobs if job.prompt_logprobs >= 0 else ()
        tier: Tier = "device" if cached else "none"
        ticket.report = Report(total, cached, tier, missed, cache=self.selection, prompt_logprobs=logprobs)
        ticket.tell(ReportProgress(cached, total, cached))
        done = cached
        end = total if self.last else total - 1
        while done < end:
            if not await ticket.pause(self.chunk_s):
                return ticket.close(FINISHES[ticket.reason or "client_gone"])
            done = min(end, done + self.chunk)
            ticket.tell(ReportProgress(done, total, cached))
        return await self._decode(ticket)

    async def _decode(self, ticket: FakeTicket) -> None:
        job, count = ticket.job, 0
        tokens = self.script(job)
        if self.script is DIGESTS and not self.step_s and self.per_step == 1:
            tokens = itertools.islice(tokens, ANSWER_TOKENS)
        while True:
            if not await ticket.pause(self.step_s):
                return ticket.close(FINISHES[ticket.reason or "client_gone"])
            if count == self.fail_after:
                return ticket.close(self.failure, "the fake was asked to: secret detail")
            if count == self.hang_after:
                await anyio.sleep_forever()
            batch: list[int] = []
            finish: Finish | None = None
            while finish is None and len(batch) < self.per_step:
                batch.append(next(tokens, job.stop_tokens[0] if job.stop_tokens else 0))
                count += 1
                if batch[-1] in job.stop_tokens:
                    finish = "stop"
                elif count == job.max_tokens:
                    finish = "length"
            decode_steps = ticket.report.decode_steps + 1
            ticket.report = evolve(
                ticket.report, completion_tokens=count, decode_steps=decode_steps, proposed=2 * decode_steps
            )
            ticket.tell(EmitTokens(tuple(batch), logprobs(job, batch)))
            if finish is not None:
                return ticket.close(finish)

    def common(self, job: Job) -> int:
        """Rows of an earlier prompt that this one shares, in steps of 4; the last token is always computed."""
        best = 0
        for kept in [kept for salt, kept in self.kept if salt == job.salt and job.scope.kind != "off"]:
            shared = next((n for n, (a, b) in enumerate(zip(kept, job.prompt, strict=False)) if a != b), None)
            best = max(best, min(len(kept), len(job.prompt)) if shared is None else shared)
        return min(best, len(job.prompt) - 1) // 4 * 4


def logprobs(job: Job, tokens: list[int]) -> tuple[Logprob, ...]:
    if job.sampling.logprobs < 0:
        return ()
    return tuple(
        (-0.5, tuple((token + other, -0.5 - other) for other in range(job.sampling.logprobs))) for token in tokens
    )


def digest_script(low: int, high: int) -> Script:
    """Tokens in [low, high) that depend on the prompt, the seed and the position, and on nothing else."""

    def script(job: Job) -> Iterator[int]:
        prompt = zlib.crc32(f"{job.prompt} {job.sampling.seed} ".encode())
        for position in itertools.count(len(job.prompt)):
            yield low + zlib.crc32(b"%d" % position, prompt) % (high - low)

    return script


DIGESTS = digest_script(20, 300)
"""What a door says unless a test gives it a script."""
