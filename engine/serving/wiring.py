"""The engine around a loaded target: the one place that connects executors, event loop, submissions, meter and
recorder.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from attrs import define, field, frozen

from adapters.device.device_events import DeviceEvent, DraftProcessChanged, ExpertUseCounted, SlotRowsLost
from adapters.device.executor import DeviceExecutor
from adapters.metrics import Metrics
from adapters.transfer.transfer import Transfer
from adapters.watched_thread import WatchedThread
from effects.experts import PlaceExperts
from effects.ids import MAIN, PROMPTS, LaneId, RequestId
from effects.lookup import FindPrefix, ReleasePrefix
from effects.pflash import KeepFrozen
from effects.ports import PerformEffect, SubmitLaunch
from effects.prefill import OpenSlot
from effects.restore import RestoreBlocks
from effects.snapshot import SaveSnapshot
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from engine.core.cache_misses import CacheMisses
from engine.core.event_loop import Envelope, EventLoop, Executors
from engine.core.request_meter import RequestMeter
from engine.core.status import kv_pages
from engine.core.submission import Submissions
from engine.core.trace import Recorder
from engine.loading.load_scorer import LoadedScorer
from states import invariants
from states.events import ExpertsUsed, ForEngine, ForModel, Happened, SlotsLost
from states.settings import Settings
from states.slots import Slots
from states.world import Output, World, has_prefill_backlog, is_first_token_pending, is_slot_requested, make_world

SPARE = 1024  # live requests beyond slots and queue: those that are being refused or are draining


@define
class Engine:
    """A running engine."""

    event_loop: EventLoop
    submissions: Submissions
    metrics: Metrics


@frozen
class StatusSources:
    """What an engine tells about the process around it.

    facts: what never changes, for /props. live: returns what does. threads: whose troubles /health reports.
    """

    facts: Mapping[str, Any] = field(factory=dict[str, Any])
    live: Callable[[], Mapping[str, Any]] = dict
    threads: Sequence[WatchedThread] = ()


@frozen
class CompressionParts:
    """What prompts are compressed with: the model that scores them, and what keeps the text of frozen messages."""

    scorer: LoadedScorer | None
    freeze: Callable[[RequestId, KeepFrozen], object] = lambda *_: None


@asynccontextmanager
async def run_engine(
    settings: Settings,
    executor: DeviceExecutor,
    *,
    transfer: Transfer | None = None,
    status: StatusSources | None = None,
    compression: CompressionParts | None = None,
    recorder: Recorder | None = None,
    paranoid: bool = False,
    grace_s: float = 10,
) -> AsyncIterator[Engine]:
    """Run an engine inside the block. At its end new requests are refused, the others end, and the trace is complete.

    executor: of a loaded target. transfer: None if no rows are kept beyond the device. recorder: already started.
    paranoid: check the invariants after every event. grace_s: seconds until running requests are cancelled at the end.
    """
    executor.row_watch.switch(on=paranoid)
    sources = status or StatusSources()
    live = sources.live
    drafter = None if compression is None else compression.scorer
    metrics = Metrics()
    metrics.watch_damage(lambda: live().get("damaged", {}))
    meter = RequestMeter(metrics.observe_stage)
    misses = CacheMisses({} if transfer is None else transfer.lookup.divergences, settings)

    def observe(envelope: Envelope, outs: tuple[Output, ...], before: World, after: World) -> None:
        meter.observe(envelope, outs, before, after)
        misses.observe(outs, before)
        if after.slots is not before.slots:
            update_gauges(metrics, after.slots)
        if paranoid:
            invariants.check_world(after)

    notify: dict[type, tuple[Any, ...]] = {
        OpenSlot: (executor.open,),
        Abandon: list_abandon_handlers(executor, drafter, transfer),
        StopLaunch: (executor.halt,),
        KeepFrozen: ((lambda *_: None) if compression is None else compression.freeze,),
        PlaceExperts: (executor.place,),
    }
    if transfer is not None:
        metrics.watch_cache(transfer.store.collect_figures)
        notify[OpenSlot] = (executor.open, transfer.restorer.raise_fence)
        notify[ReleasePrefix] = (transfer.lookup.release_prefix,)
    runner = EventLoop(
        make_world(settings),
        Executors(list_lane_submitters(settings, executor, drafter), list_store_performers(transfer), notify),
        time.monotonic_ns,
        settings.slots + settings.max_queue + SPARE,
        None if recorder is None else recorder.record,
        observe,
    )
    heard(executor, transfer, runner, metrics)

    def living() -> Mapping[str, Any]:
        return add_troubles(live(), sources.threads, recorder)

    door = Submissions(runner, meter, sources.facts, living, metrics.count_closed, misses.find_divergence)
    notify |= {EmitTokens: (door.emit,), ReportProgress: (door.emit,), CloseStream: (door.close_stream,)}
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


def add_troubles(
    live: Mapping[str, Any], threads: Sequence[WatchedThread], recorder: Recorder | None
) -> Mapping[str, Any]:
    """Return what is reported now, with everything that has broken."""
    troubles = {thread.name: thread.trouble for thread in threads if thread.trouble}
    if recorder is not None and recorder.failure:
        troubles["trace"] = recorder.failure
    return {**live, "troubles": {**troubles, **live.get("outages", {})}}


def update_gauges(metrics: Metrics, slots: Slots) -> None:
    """Show the slots in the metrics."""
    busy = sum(slot.holder is not None for slot in slots.slots)
    metrics.set_gauges(queue=len(slots.waiting), slots_busy=busy, slots=len(slots.slots))


def heard(executor: DeviceExecutor, transfer: Transfer | None, runner: EventLoop, metrics: Metrics) -> None:
    """What is nobody's outcome: rows that are gone, a draft's process that is or is back, experts that were used. And
    for whom what is kept gives way, and memory for that, and decode steps do.
    """
    if transfer is not None:
        transfer.saver.is_slot_requested = lambda: is_slot_requested(runner.world)
        transfer.saver.is_first_token_pending = lambda: is_first_token_pending(runner.world)
        transfer.store.memory.is_busy = lambda: bool(runner.world.requests)
    executor.decoding.overlapped.has_prefill_backlog = lambda: has_prefill_backlog(runner.world)
    metrics.watch_pages(lambda: kv_pages(runner.world))
    executor.events.connect(lambda event: runner.post_if_open(make_device_event(event)))


def make_device_event(event: DeviceEvent) -> Happened:
    """Return what an event of the device is to the engine's core."""
    match event:
        case SlotRowsLost():
            return ForEngine(SlotsLost(event.slots))
        case DraftProcessChanged():
            return ForModel("draft", event.is_there)
        case ExpertUseCounted():
            return ForEngine(ExpertsUsed(event.counts))


def list_lane_submitters(
    settings: Settings, executor: DeviceExecutor, drafter: LoadedScorer | None
) -> dict[LaneId, SubmitLaunch]:
    """Return what carries out the launches of each lane."""
    beside = None if drafter is None else drafter.own_lane
    apart: dict[LaneId, SubmitLaunch] = {} if beside is None else {settings.drafter_lane: beside.submit}
    return {MAIN: executor.submit, PROMPTS: executor.submit, **apart}


def list_store_performers(transfer: Transfer | None) -> dict[type, PerformEffect]:
    """Return what carries out effects beside the lanes, if rows are kept beyond the device."""
    if transfer is None:
        return {}
    return {
        FindPrefix: transfer.lookup.find_prefix,
        RestoreBlocks: transfer.restorer.restore,
        SaveSnapshot: transfer.saver.save,
    }


def list_abandon_handlers(
    executor: DeviceExecutor, drafter: LoadedScorer | None, transfer: Transfer | None
) -> tuple[Callable[[RequestId, Abandon], None], ...]:
    """Return who is told that a request is abandoned."""
    others = [one for one in (drafter, None if transfer is None else transfer.restorer) if one is not None]
    return tuple(lambda request, _, one=one: one.abandon(request) for one in (executor, *others))
