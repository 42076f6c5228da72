"""A whole engine around a scripted device: real fold, event loop, door, meter and recorder; only the model is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

from effects.all import EffectRequest, Launch, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, DeviceFailed, RequestId
from effects.job import Job
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.ports import Closed, DeliverOutcomes, LaunchFailed, PerformEffect
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from engine.core.cache_misses import CacheMisses
from engine.core.event_loop import EventLoop, Executors
from engine.core.request_meter import RequestMeter
from engine.core.submission import EngineTicket, Submissions
from engine.core.trace import VERSION, Header, Recorder
from engine.settings.output.live_figures import LiveFigures
from states import invariants
from states.settings import Settings
from states.world import make_world

SETTINGS = Settings(slots=2, max_context=1024, max_queue=2, chunk=64, block_size=16, batch_rows=8)


def next_token(tokens: tuple[int, ...]) -> int:
    """The scripted model: a digest of everything before."""
    return 10 + blake2b(repr(tokens).encode(), digest_size=2).digest()[0] % 200


@define
class ScriptedDevice:
    """Keeps the token of every row of every slot, and answers what the scripted model says."""

    rows: dict[int, tuple[int, ...]] = field(factory=dict[int, "tuple[int, ...]"])
    prompts: dict[int, tuple[int, ...]] = field(factory=dict[int, "tuple[int, ...]"])
    flying: set[RequestId] = field(factory=set[RequestId])
    abandoned: set[RequestId] = field(factory=set[RequestId])  # flags on what is in flight; gone with its outcome
    fails: Callable[[EffectRequest], Exception | None] = lambda _: None
    before: Callable[[Launch], Any] | None = None
    launches: list[Launch] = field(factory=list[Launch])

    def open(self, _: RequestId, effect: OpenSlot) -> None:
        kept = self.rows.get(effect.source, ())[: effect.keep]
        assert kept == effect.prompt[: effect.keep], "rows that stand for other tokens"
        self.rows[effect.slot], self.prompts[effect.slot] = kept, effect.prompt

    def abandon(self, request: RequestId, _: Abandon) -> None:
        if request in self.flying:
            self.abandoned.add(request)

    async def perform(self, launch: Launch) -> tuple[Outcome, ...]:
        self.launches.append(launch)
        self.flying = {effect_request.request for effect_request in launch.effect_requests}
        try:
            await checkpoint()
            if self.before is not None:
                await self.before(launch)
            return tuple(self.answer(effect_request) for effect_request in launch.effect_requests)
        finally:
            self.flying, self.abandoned = set(), set()

    def answer(self, effect_request: EffectRequest) -> Outcome:
        if error := self.fails(effect_request):
            raise error
        if effect_request.request in self.abandoned:
            return DeviceFailed("abandoned", "asked to stop")
        match effect_request.effect:
            case RunPrefill(slot, start, stop):
                assert len(self.rows[slot]) >= start
                self.rows[slot] = self.rows[slot][:start] + self.prompts[slot][start:stop]
                return PrefillAdvanced(stop)
            case RunDecode(slot, position, token):
                assert len(self.rows[slot]) >= position
                self.rows[slot] = (*self.rows[slot][:position], token)
                return Decoded((next_token(self.rows[slot]),))
        raise AssertionError(effect_request)


@define
class PlayedEngine:
    event_loop: EventLoop
    door: Submissions
    device: ScriptedDevice
    clock: list[int]
    closed: list[Closed]


def header(settings: Settings, *, redacted: bool = False) -> Header:
    return Header(VERSION, "test", settings, "scripted", {"model": "scripted"}, redacted)


@asynccontextmanager
async def engine(
    settings: Settings = SETTINGS,
    device: ScriptedDevice | None = None,
    trace: Path | None = None,
    *,
    redacted: bool = False,
    perform: Mapping[type, PerformEffect] = MappingProxyType({}),
) -> AsyncIterator[PlayedEngine]:
    """Running inside the block; drained and closed at its end, the trace complete."""
    device = device or ScriptedDevice()
    recorder = None if trace is None else Recorder(trace, header(settings, redacted=redacted))
    if recorder is not None:
        recorder.start()
    meter, clock, closed = RequestMeter(), [0], list[Closed]()

    def tick() -> int:
        clock[0] += 1_000_000
        return clock[0]

    notify: dict[type, tuple[Any, ...]] = {
        OpenSlot: (device.open,),
        Abandon: (device.abandon,),
        StopLaunch: (lambda *_: None,),
        **dict.fromkeys((PaceSnapshot, PaceSteps, PaceMemory, TrimMemory), (lambda *_: None,)),
    }

    def submit(launch: Launch, settle: DeliverOutcomes) -> None:
        async def carry_out() -> None:
            requests = tuple(effect_request.request for effect_request in launch.effect_requests)
            try:
                outcomes = tuple(zip(requests, await device.perform(launch), strict=True))
            except Exception as error:  # noqa: BLE001 - as the lane tells it
                settle(LaunchFailed(requests, error))
            else:
                settle(outcomes)

        tasks.start_soon(carry_out)

    event_loop = EventLoop(make_world(settings), Executors({MAIN: submit}, perform, notify), tick, 64)
    door = Submissions(event_loop, meter, None, LiveFigures, closed.append, CacheMisses({}, settings).find_divergence)
    notify |= {EmitTokens: (door.emit,), ReportProgress: (door.emit,), CloseStream: (door.close_stream,)}

    def watch(envelope: Any, outs: Any, before: Any, after: Any) -> None:
        invariants.check_world(after)
        meter.observe(envelope, outs, before, after)

    event_loop.observe = watch
    event_loop.journal = None if recorder is None else recorder.record
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(event_loop.run)
            yield PlayedEngine(event_loop, door, device, clock, closed)
            with anyio.fail_after(60):
                await door.drain(5)
            event_loop.close()
    finally:
        event_loop.close()
        if recorder is not None:
            recorder.close()


async def collect(ticket: EngineTicket) -> tuple[tuple[int, ...], Closed]:
    """Every token of a stream, and how it ended."""
    tokens: tuple[int, ...] = ()
    async for message in ticket:
        if isinstance(message, EmitTokens):
            tokens += message.tokens
        if isinstance(message, Closed):
            return tokens, message
    raise AssertionError("the stream ended without closing")


def expected(job: Job) -> tuple[int, ...]:
    """Return the tokens that the scripted model answers, computed without an engine."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < job.max_tokens:
        tokens += (next_token(job.prompt + tokens),)
        if tokens[-1] in job.stop_tokens:
            break
    return tokens
