"""Where jobs come in and answers go out: ids are given here, and each request gets its stream."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import anyio
from attrs import asdict, define, evolve, field

from effects.ids import RequestId
from effects.job import Job, Report
from effects.ports import Activity, CancelReason, Closed, Divergence, JobAcceptance, Message, Status
from effects.scope import parse_scope
from effects.stream import CloseStream, EmitTokens, ReportProgress
from engine.core.cache_misses import miss_of
from engine.core.event_loop import Runner
from engine.core.prefill_log import PrefillLog
from engine.core.request_meter import Meter, stage_of
from engine.core.status import Past, kv_pages, running, slot_status
from states import residency
from states.events import Cancelled, ForRequest, Submitted

log = logging.getLogger("rekindle")


@define
class EngineTicket:
    """One request's stream. It cannot overflow: at most one message a token, one a chunk, and the last."""

    request: RequestId
    _cancel: Callable[[RequestId, CancelReason], None]
    _messages: deque[Message] = field(factory=deque[Message])
    _told: Callable[[], object] = lambda: None
    _cancelled: bool = False
    _closed: bool = False
    _done: int = 0  # prompt tokens that the client was told are in place
    _answering: bool = False

    def put(self, message: Message) -> None:
        assert not self._closed, "the stream is closed already"
        if isinstance(message, ReportProgress):
            if self._answering or message.done < self._done:
                return  # of a prompt that is computed again, behind the client's back
            self._done = message.done
        self._answering = self._answering or isinstance(message, EmitTokens)
        self._closed = isinstance(message, Closed)
        self._messages.append(message)
        self._told()

    def next_message(self) -> Message | None:
        return self._messages.popleft() if self._messages else None

    def set_listener(self, listener: Callable[[], object]) -> None:
        self._told = listener

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
        if not (self._cancelled or self._closed):
            self._cancelled = True
            self._cancel(self.request, reason)


@define
class EngineDoor:
    """`limit` bounds the live requests, so that the inbox is bounded too."""

    runner: Runner
    meter: Meter
    facts: Mapping[str, Any]  # what never changes: numerics, model, settings
    live: Callable[[], Mapping[str, Any]]  # what does: memory, the cache
    closed: Callable[[Closed], None]
    missed: Callable[[RequestId, Report], Divergence | None]  # where a prompt left what is kept; asked once, at its end
    past: Past = field(factory=Past)
    prefill: PrefillLog = field(factory=PrefillLog)
    _tickets: dict[RequestId, EngineTicket] = field(factory=dict[RequestId, EngineTicket])
    _last: int = 0
    _shut: bool = False

    def submit(self, job: Job) -> EngineTicket:
        self._last += 1
        ticket = EngineTicket(RequestId(self._last), self.cancel)
        if self._shut:
            ticket.put(Closed("shutdown", Report(len(job.prompt)), "the server is shutting down", {}))
        elif len(self._tickets) >= self.runner.limit:
            ticket.put(Closed("queue_full", Report(len(job.prompt)), "too many requests at once", {}))
        else:
            self._tickets[ticket.request] = ticket
            self.runner.post(ForRequest(ticket.request, Submitted(job)))
        return ticket

    def cancel(self, request: RequestId, reason: CancelReason) -> None:
        if request in self._tickets:
            self.runner.post(ForRequest(request, Cancelled(reason)))

    def emit(self, request: RequestId, effect: EmitTokens | ReportProgress) -> None:
        if isinstance(effect, ReportProgress):
            self.prefill.told(request, effect)
        self._tickets[request].put(effect)

    def close_stream(self, request: RequestId, effect: CloseStream) -> None:
        self.prefill.ended(request)
        diverged = self.missed(request, effect.report)
        miss = miss_of(effect.report, diverged, self.runner.world.settings)
        report = evolve(effect.report, miss=miss)
        closed = Closed(effect.finish, report, effect.detail, self.meter.closed(request), diverged)
        if report.cache.scope:
            log.info("request %d: %s", request, described(report, self.live()), extra={"request": request})
        self._tickets.pop(request).put(closed)
        self.past.closed(request, closed)
        self.closed(closed)

    @property
    def _full(self) -> bool:
        slots, most = self.runner.world.slots, self.runner.world.settings.max_queue
        return len(slots.waiting) >= most and all(slot.holder is not None for slot in slots.slots)

    def get_acceptance(self) -> JobAcceptance:
        return "draining" if self._shut else "queue_full" if self._full else "ready"

    def status(self) -> Status:
        """As every door tells it, with everything that this engine has to tell."""
        world = self.runner.world
        live, slots = self.live(), world.slots.slots
        return Status(
            state="draining" if self._shut else "ready",
            slots=tuple(slot_status(number, slot, world) for number, slot in enumerate(slots)),
            slots_busy=sum(slot.holder is not None for slot in slots),
            queue=len(world.slots.waiting),
            queue_full=self._full,
            troubles=live.get("troubles", {}),
            outages=live.get("outages", {}),
            props={
                **self.facts,
                **live,
                "kv_pages": kv_pages(world),
                "rates_ns": asdict(world.rates),
                "runtime": {"draft_residency": residency.describe_residency(world.models, world.settings, held(live))},
                "requests": dict(Counter(stage_of(state, world) for state in world.requests.values())),
            },
        )

    def activity(self) -> Activity:
        world, now_ns = self.runner.world, self.runner.clock_ns()
        recent = self.past.recent(self.meter, now_ns)
        return Activity(running(world, self.meter, now_ns), recent, self.past.totals(world))

    async def drain(self, grace_s: float) -> bool:
        """Shut: refuse newcomers, give the others `grace_s` to end, then cancel them. True if nobody was cut short."""
        self._shut = True
        with anyio.move_on_after(grace_s):
            await self.empty()
        cut = list(self._tickets)
        for request in cut:
            self.cancel(request, "shutdown")
        await self.empty()
        return not cut

    async def empty(self) -> None:
        while self.runner.world.requests or self._tickets:  # noqa: ASYNC110 - at the very end; an event would cost all
            await anyio.sleep(0.01)


def held(live: Mapping[str, Any]) -> Mapping[str, tuple[int, int]]:
    """Bytes of each model's weights (on its device, in host memory), where the memory ledger counts them."""
    models: Mapping[str, Mapping[str, int]] = live.get("memory", {}).get("models", {})
    return {name: (places["device"], places["host"]) for name, places in models.items()}


def described(report: Report, live: Mapping[str, Any]) -> str:
    """For the log: what was kept of a request, under which policy, and what of it was there before, by shard."""
    scope, recent = parse_scope(report.cache.scope), live.get("full_cache", {}).get("recent", 0)
    window = f" window={scope.count} recent={recent}" if scope.kind == "auto" else ""
    came = f"{report.restored_tokens} of {report.prompt_tokens} prompt tokens restored ({report.tier})"
    return f"{report.cache}{window}; {came}{report.miss and ', '}{report.miss}{adopted(report, live)}"


def adopted(report: Report, live: Mapping[str, Any]) -> str:
    """Which shards have taken the restored rows: each has those of its own layers, here or in another process."""
    shards = live.get("memory", {}).get("shards", ()) if report.restored_tokens else ()
    each = [
        f"{first}-{stop - 1}@{one['device']} {'remote' if one['remote'] else 'local'}={report.restored_tokens}"
        for one in shards
        for first, stop in (one["layers"],)
    ]
    return f"; adopted by {', '.join(each)}" if each else ""
