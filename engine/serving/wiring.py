"""The engine around a loaded target: the one place that ties executors, runner, door, meter and recorder together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from attrs import define

from adapters.device.device_events import DeviceEvent, DraftProcessChanged, ExpertUseCounted, SlotRowsLost
from adapters.device.executor import DeviceExecutor
from adapters.metrics import Metrics
from adapters.transfer.transfer import Transfer
from adapters.watched_thread import Watched
from effects.experts import PlaceExperts
from effects.ids import MAIN, PROMPTS, LaneId, RequestId
from effects.lookup import FindPrefix, ReleasePrefix
from effects.pflash import KeepFrozen
from effects.ports import PerformEffect, SubmitLaunch
from effects.prefill import OpenSlot
from effects.restore import RestoreBlocks
from effects.snapshot import SaveSnapshot
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from engine.core.cache_misses import Misses
from engine.core.event_loop import Envelope, Executors, Runner
from engine.core.request_meter import Meter
from engine.core.status import kv_pages
from engine.core.submission import EngineDoor
from engine.core.trace import Recorder
from engine.loading.load_scorer import Drafter
from states import invariants
from states.events import ExpertsUsed, ForEngine, ForModel, Happened, SlotsLost
from states.settings import Settings
from states.slots import Slots
from states.world import Output, World, has_prefill_backlog, is_first_token_pending, is_slot_requested, make_world

SPARE = 1024  # live requests beyond slots and queue: those that are being refused or are draining


@define
class Engine:
    runner: Runner
    door: EngineDoor
    metrics: Metrics


@asynccontextmanager
async def engine(
    settings: Settings,
    executor: DeviceExecutor,
    *,
    transfer: Transfer | None = None,
    facts: Mapping[str, Any],
    live: Callable[[], Mapping[str, Any]] = dict,
    threads: Sequence[Watched] = (),
    drafter: Drafter | None = None,
    freeze: Callable[[RequestId, KeepFrozen], object] = lambda *_: None,
    recorder: Recorder | None = None,
    paranoid: bool = False,
    grace_s: float = 10,
) -> AsyncIterator[Engine]:
    """Running inside the block. At its end: newcomers refused, the others drained, the (started) trace complete.

    threads: whose troubles are told with the engine's own.  drafter: of compressions.  freeze: keeps what messages
    were frozen to.
    """
    executor.row_watch.switch(on=paranoid)
    metrics = Metrics()
    metrics.watch_damage(lambda: live().get("damaged", {}))
    meter, misses = Meter(metrics.stage), Misses({} if transfer is None else transfer.lookup.diverged, settings)

    def observe(envelope: Envelope, outs: tuple[Output, ...], before: World, after: World) -> None:
        meter.observe(envelope, outs, before, after)
        misses.observe(outs, before)
        if after.slots is not before.slots:
            shown(metrics, after.slots)
        if paranoid:
            invariants.check_world(after)

    def emit(request: RequestId, effect: EmitTokens | ReportProgress) -> None:
        door.emit(request, effect)

    def close_stream(request: RequestId, effect: CloseStream) -> None:
        door.close_stream(request, effect)

    # The door needs the runner, so its two methods are looked up when they are called: it exists by then.
    notify = {
        **notifications(executor, drafter, transfer),
        KeepFrozen: (freeze,),
        EmitTokens: (emit,),
        ReportProgress: (emit,),
        CloseStream: (close_stream,),
    }
    runner = Runner(
        make_world(settings),
        Executors(lanes(settings, executor, drafter), moving(transfer), notify),
        time.monotonic_ns,
        settings.slots + settings.max_queue + SPARE,
        None if recorder is None else recorder.record,
        observe,
    )
    heard(executor, transfer, runner, metrics)

    def living() -> Mapping[str, Any]:
        return with_troubles(live(), threads, recorder)

    door = EngineDoor(runner, meter, facts, living, metrics.closed, misses.told)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.run)
            yield Engine(runner, door, metrics)
            await door.drain(grace_s)
            runner.close()
    finally:
        runner.close()
        if recorder is not None:
            recorder.close()


def with_troubles(live: Mapping[str, Any], threads: Sequence[Watched], recorder: Recorder | None) -> Mapping[str, Any]:
    """What there is to tell now, with everything that has broken."""
    troubles = {thread.name: thread.trouble for thread in threads if thread.trouble}
    if recorder is not None and recorder.lost:
        troubles["trace"] = recorder.lost
    return {**live, "troubles": {**troubles, **live.get("outages", {})}}


def shown(metrics: Metrics, slots: Slots) -> None:
    busy = sum(slot.holder is not None for slot in slots.slots)
    metrics.gauges(queue=len(slots.waiting), slots_busy=busy, slots=len(slots.slots))


def heard(executor: DeviceExecutor, transfer: Transfer | None, runner: Runner, metrics: Metrics) -> None:
    """What is nobody's outcome: rows that are gone, a draft's process that is or is back, experts that were used. And
    for whom what is kept gives way, and memory for that, and decode steps do.
    """
    if transfer is not None:
        metrics.watch_cache(transfer.store.figures)
        transfer.saver.hurried = lambda: is_slot_requested(runner.world)
        transfer.saver.reading = lambda: is_first_token_pending(runner.world)
        transfer.store.memory.busy = lambda: bool(runner.world.requests)
    executor.decoding.overlapped.has_prefill_backlog = lambda: has_prefill_backlog(runner.world)
    metrics.watch_pages(lambda: kv_pages(runner.world))
    executor.events.connect(lambda event: runner.tell(device_event(event)))


def device_event(event: DeviceEvent) -> Happened:
    """Return what an event of the device is to the engine's core."""
    match event:
        case SlotRowsLost():
            return ForEngine(SlotsLost(event.slots))
        case DraftProcessChanged():
            return ForModel("draft", event.is_there)
        case ExpertUseCounted():
            return ForEngine(ExpertsUsed(event.counts))


def lanes(settings: Settings, executor: DeviceExecutor, drafter: Drafter | None) -> dict[LaneId, SubmitLaunch]:
    """What carries out the launches of each."""
    beside = None if drafter is None else drafter.beside
    apart: dict[LaneId, SubmitLaunch] = {} if beside is None else {settings.drafter_lane: beside.submit}
    return {MAIN: executor.submit, PROMPTS: executor.submit, **apart}


def notifications(
    executor: DeviceExecutor, drafter: Drafter | None, transfer: Transfer | None
) -> dict[type, tuple[Any, ...]]:
    """Return what is called for effects without an outcome, by type, as far as executors carry them out."""
    return {
        OpenSlot: (executor.open, *(() if transfer is None else (transfer.restorer.opened,))),
        ReleasePrefix: () if transfer is None else (transfer.lookup.release,),
        Abandon: giving_up(executor, drafter, transfer),
        StopLaunch: (executor.halt,),
        PlaceExperts: (executor.place,),
    }


def moving(transfer: Transfer | None) -> dict[type, PerformEffect]:
    """What goes on beside the lanes, where rows are kept beyond the device."""
    if transfer is None:
        return {}
    return {
        FindPrefix: transfer.lookup.find,
        RestoreBlocks: transfer.restorer.restore,
        SaveSnapshot: transfer.saver.save,
    }


def giving_up(
    executor: DeviceExecutor, drafter: Drafter | None, transfer: Transfer | None
) -> tuple[Callable[[RequestId, Abandon], None], ...]:
    """Who hears that a request is given up."""
    others = [one for one in (drafter, None if transfer is None else transfer.restorer) if one is not None]
    return tuple(lambda request, _, one=one: one.abandon(request) for one in (executor, *others))
