"""Submissions: the engine takes jobs here, gives each an id and a stream, and puts answers into the stream."""

from __future__ import annotations

import logging
from asyncio import Future, get_running_loop
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

import anyio
from attrs import define, evolve, field

from effects.ids import RequestId
from effects.job import Job, Report
from effects.ports import Activity, CancelReason, Closed, Divergence, JobAcceptance, Message, Status
from effects.scope import parse_scope
from effects.stream import CloseStream, EmitTokens, ReportProgress
from engine.core.cache_misses import explain_miss
from engine.core.engine_props import EngineProps
from engine.core.event_loop import EventLoop
from engine.core.prefill_log import PrefillLog
from engine.core.request_meter import RequestMeter, stage_of
from engine.core.status import RequestHistory, describe_pace, kv_pages, list_running, slot_status
from engine.settings.output.live_figures import LiveFigures
from engine.settings.output.server_facts import ServerFacts
from states import residency, slot_admission
from states.events import Cancelled, ForRequest, Submitted
from states.world import World

log = logging.getLogger("rekindle")


@define
class EngineTicket:
    """The stream of one request.

    It cannot overflow: it holds at most one message for each token and each chunk, and the last one.
    """

    request: RequestId
    _cancel: Callable[[RequestId, CancelReason], None]
    _messages: deque[Message] = field(factory=deque[Message])
    _listener: Callable[[], object] = lambda: None  # called after each message
    _cancelled: bool = False
    _closed: bool = False
    _done: int = 0  # prompt tokens that the client knows to be in place
    _is_answering: bool = False

    def put(self, message: Message) -> None:
        """Append a message to the stream, and call the listener. The client never sees progress go back."""
        assert not self._closed, "the stream is closed already"
        match message:
            case EmitTokens():
                self._is_answering = True
            case ReportProgress(done):
                if self._is_answering or done < self._done:
                    return  # the prompt is computed again, which the client does not see
                self._done = done
            case Closed():
                self._closed = True
        self._messages.append(message)
        self._listener()

    def next_message(self) -> Message | None:
        return self._messages.popleft() if self._messages else None

    def set_listener(self, listener: Callable[[], object]) -> None:
        self._listener = listener

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while (message := self.next_message()) is not None:
                yield message
                if isinstance(message, Closed):
                    return
            news = get_running_loop().create_future()
            self.set_listener(partial(set_news, news))
            await news

    def cancel(self, reason: CancelReason) -> None:
        if not (self._cancelled or self._closed):
            self._cancelled = True
            self._cancel(self.request, reason)


def set_news(news: Future[None]) -> None:
    """Wake the reader of a stream, unless it is awake already or has gone."""
    if not news.done():
        news.set_result(None)


@define
class Submissions:
    """Takes jobs, and has the streams of live requests.

    `event_loop.limit` bounds the live requests, so that the inbox is bounded too. on_closed: called with the last
    message of every stream. find_divergence: returns where a prompt left what is kept. It is called once, when the
    request ends.
    """

    event_loop: EventLoop
    meter: RequestMeter
    facts: ServerFacts | None  # what never changes; None without a loaded model
    live: Callable[[], LiveFigures]  # returns what changes: memory, the cache
    on_closed: Callable[[Closed], None]
    find_divergence: Callable[[RequestId, Report], Divergence | None]
    history: RequestHistory = field(factory=RequestHistory)
    prefill_log: PrefillLog = field(factory=PrefillLog)
    _tickets: dict[RequestId, EngineTicket] = field(factory=dict[RequestId, EngineTicket])
    _last_id: int = 0
    _is_draining: bool = False

    def submit(self, job: Job) -> EngineTicket:
        """Take a job and return its stream. A job that is refused has its last message in the stream already."""
        self._last_id += 1
        ticket = EngineTicket(RequestId(self._last_id), self.cancel)
        if self._is_draining:
            ticket.put(Closed("shutdown", Report(len(job.prompt)), "the server is shutting down", {}))
        elif len(self._tickets) >= self.event_loop.limit:
            ticket.put(Closed("queue_full", Report(len(job.prompt)), "too many requests at once", {}))
        else:
            self._tickets[ticket.request] = ticket
            self.event_loop.post(ForRequest(ticket.request, Submitted(job)))
        return ticket

    def cancel(self, request: RequestId, reason: CancelReason) -> None:
        if request in self._tickets:
            self.event_loop.post(ForRequest(request, Cancelled(reason)))

    def emit(self, request: RequestId, effect: EmitTokens | ReportProgress) -> None:
        if isinstance(effect, ReportProgress):
            self.prefill_log.log_progress(request, effect)
        self._tickets[request].put(effect)

    def close_stream(self, request: RequestId, effect: CloseStream) -> None:
        """Put the last message into a request's stream, with its report, and log what was restored."""
        self.prefill_log.forget(request)
        diverged = self.find_divergence(request, effect.report)
        miss = explain_miss(effect.report, diverged, self.event_loop.world.settings)
        report = evolve(effect.report, miss=miss)
        closed = Closed(effect.finish, report, effect.detail, self.meter.close_stream(request), diverged)
        if report.cache.scope:
            log.info("request %d: %s", request, describe_cache_use(report, self.live()), extra={"request": request})
        self._tickets.pop(request).put(closed)
        self.history.add_closed(request, closed)
        self.on_closed(closed)

    @property
    def _is_queue_full(self) -> bool:
        """Would the world reject a job now?"""
        world = self.event_loop.world
        return slot_admission.is_queue_full(world.slots, world.requests, world.settings)

    def get_acceptance(self) -> JobAcceptance:
        return "draining" if self._is_draining else "queue_full" if self._is_queue_full else "ready"

    def status(self) -> Status:
        """Return the status that every door returns, with all that this engine reports."""
        world = self.event_loop.world
        live = self.live()
        slots = world.slots.slots
        return Status(
            state="draining" if self._is_draining else "ready",
            slots=tuple(slot_status(number, slot, world) for number, slot in enumerate(slots)),
            total_slots=world.settings.serving_slots,
            # Requests in spare slots are being saved, or have the place of one that is.
            slots_busy=min(sum(slot.holder is not None for slot in slots), world.settings.serving_slots),
            queue=len(world.slots.waiting),
            queue_full=self._is_queue_full,
            troubles=live.troubles,
            outages=live.outages,
            props=EngineProps(
                self.facts,
                live,
                kv_pages(world),
                world.rates,
                describe_pace(world),
                residency.describe_residency(world.models, world.settings, count_model_bytes(live)),
                Counter(stage_of(state, world) for state in world.requests.values()),
            ),
        )

    def read_world(self) -> World:
        """Return the world as it is now."""
        return self.event_loop.world

    def count_pages(self) -> Mapping[str, int]:
        """Return the shared pages of KV memory by use, for the metrics."""
        return kv_pages(self.event_loop.world)

    def activity(self) -> Activity:
        world = self.event_loop.world
        now_ns = self.event_loop.clock_ns()
        recent = self.history.recent(self.meter, now_ns)
        return Activity(list_running(world, self.meter, now_ns), recent, self.history.totals(world))

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests, give the others `grace_s` seconds to end, then cancel them.

        Returns True if no request was cancelled.
        """
        self._is_draining = True
        with anyio.move_on_after(grace_s):
            await self.wait_until_empty()
        cut = list(self._tickets)
        for request in cut:
            self.cancel(request, "shutdown")
        await self.wait_until_empty()
        return not cut

    async def wait_until_ended(self, request: RequestId) -> None:
        """Wait until a request has ended in every respect: its stream is closed, and its rows have been kept."""
        await self.event_loop.wait_until(lambda world: request not in world.requests)

    async def wait_until_empty(self) -> None:
        """Wait until no request is live. Then every stream is closed as well."""
        await self.event_loop.wait_until_idle()


def count_model_bytes(live: LiveFigures) -> Mapping[str, tuple[int, int]]:
    """Return the bytes of each model's weights, on its device and in host memory, as the memory ledger counts them."""
    models = {} if live.memory is None else live.memory.models
    return {name: (memory.device, memory.host) for name, memory in models.items()}


def describe_cache_use(report: Report, live: LiveFigures) -> str:
    """Return for the log what was kept of a request, under which policy, and what of it was restored, by shard."""
    scope = parse_scope(report.cache.scope)
    recent = 0 if live.store is None else live.store.recent
    window = f" window={scope.count} recent={recent}" if scope.kind == "auto" else ""
    came = f"{report.restored_tokens} of {report.prompt_tokens} prompt tokens restored ({report.tier})"
    if report.followed_tokens:
        came += f", {report.followed_tokens} of them computed by another request meanwhile"
    return f"{report.cache}{window}; {came}{report.miss and ', '}{report.miss}{describe_adoption(report, live)}"


def describe_adoption(report: Report, live: LiveFigures) -> str:
    """Return which shards took the restored rows. Each takes those of its own layers, in whichever process it is."""
    shards = live.memory.shards if live.memory is not None and report.restored_tokens else ()
    adoptions = [
        f"{shard.layers[0]}-{shard.layers[1] - 1}@{shard.device} {'remote' if shard.remote else 'local'}="
        f"{report.restored_tokens}"
        for shard in shards
    ]
    return f"; adopted by {', '.join(adoptions)}" if adoptions else ""
