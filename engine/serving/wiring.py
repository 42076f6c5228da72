"""The engine around a loaded target: the one place that connects the executors with the core.

`run_engine` builds the event loop, tells it which executor carries out each type of effect, and connects what observes
events: the meter, the metrics and the recorder.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from attrs import define, evolve, frozen

from adapters.device.device_events import DeviceEvent, DraftProcessChanged, ExpertUseCounted, SlotRowsLost
from adapters.device.executor import DeviceExecutor
from adapters.metrics import Metrics
from adapters.transfer.transfer import Transfer
from adapters.watched_thread import WatchedThread
from effects.experts import MoveExperts
from effects.ids import ENGINE, MAIN, PROMPTS, LaneId, RequestId
from effects.lookup import FindPrefix, ReleasePrefix
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.ports import NotifyEffect, PerformEffect, SubmitLaunch
from effects.prefill import OpenSlot
from effects.prompt_compression import KeepFrozen
from effects.restore import RestoreBlocks
from effects.snapshot import SaveSnapshot
from effects.stream import Abandon, CloseStream, EmitTokens, ReportProgress, StopLaunch
from engine.core.cache_misses import CacheMisses
from engine.core.event_loop import Envelope, EventLoop, Executors
from engine.core.request_meter import RequestMeter
from engine.core.submission import Submissions
from engine.core.trace import Recorder
from engine.loading.load_scorer import LoadedScorer
from engine.serving.memory_trim import MemoryTrimmer
from engine.settings.output.live_figures import LiveFigures
from engine.settings.output.server_facts import ServerFacts
from states import invariants
from states.events import ExpertsUsed, ForEngine, ForModel, Happened, SlotsLost
from states.settings import Settings
from states.slots import Slots
from states.world import Output, World, make_world

SPARE = 1024  # live requests beyond slots and queue: those that are being refused or are draining


@define
class Engine:
    """A running engine."""

    event_loop: EventLoop
    submissions: Submissions
    metrics: Metrics


@frozen
class StatusSources:
    """The sources of what an engine reports about the process around it.

    facts: what never changes; None without a loaded model. live: returns what changes. threads: /health reports their
    troubles.
    """

    facts: ServerFacts | None = None
    live: Callable[[], LiveFigures] = LiveFigures
    threads: Sequence[WatchedThread] = ()


@frozen
class CompressionParts:
    """The parts that compress prompts: the model that scores them, and what keeps the text of frozen messages."""

    scorer: LoadedScorer | None
    freeze: NotifyEffect = lambda *_: None  # of `KeepFrozen`


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
    prompt_scorer = None if compression is None else compression.scorer
    metrics = Metrics()
    metrics.watch_damage(lambda: live().damaged)
    meter = RequestMeter(metrics.observe_stage)
    misses = CacheMisses({} if transfer is None else transfer.lookup.divergences, settings)

    def observe(envelope: Envelope, outs: tuple[Output, ...], before: World, after: World) -> None:
        meter.observe(envelope, outs, before, after)
        misses.observe(outs, before)
        if after.slots is not before.slots:
            update_gauges(metrics, after.slots)
        if paranoid:
            invariants.check_world(after)

    notify = list_notify_handlers(executor, transfer, compression)
    if transfer is not None:
        metrics.watch_cache(transfer.store.collect_figures)
        transfer.store.memory.set_pace(ENGINE, PaceMemory(gently=False))  # the start is over; no request is served yet
    event_loop = EventLoop(
        make_world(settings),
        Executors(list_lane_submitters(settings, executor, prompt_scorer), list_store_performers(transfer), notify),
        time.monotonic_ns,
        settings.slots + settings.max_queue + SPARE,
        None if recorder is None else recorder.record,
        observe,
    )
    executor.events.connect(lambda event: event_loop.post_if_open(make_device_event(event)))

    def collect_live() -> LiveFigures:
        return add_troubles(live(), sources.threads, recorder)

    submissions = Submissions(
        event_loop, meter, sources.facts, collect_live, metrics.count_closed, misses.find_divergence
    )
    metrics.watch_pages(submissions.count_pages)
    notify |= {
        EmitTokens: (submissions.emit,),
        ReportProgress: (submissions.emit,),
        CloseStream: (submissions.close_stream,),
    }
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(event_loop.run)
            yield Engine(event_loop, submissions, metrics)
            await submissions.drain(grace_s)
            event_loop.close()
    finally:
        event_loop.close()
        if recorder is not None:
            recorder.close()


def add_troubles(live: LiveFigures, threads: Sequence[WatchedThread], recorder: Recorder | None) -> LiveFigures:
    """Return what is reported now, with everything that has broken."""
    troubles = {thread.name: thread.trouble for thread in threads if thread.trouble}
    if recorder is not None and recorder.failure:
        troubles["trace"] = recorder.failure
    return evolve(live, troubles={**live.troubles, **troubles, **live.outages})


def update_gauges(metrics: Metrics, slots: Slots) -> None:
    """Show the slots in the metrics."""
    busy = sum(slot.holder is not None for slot in slots.slots)
    metrics.set_gauges(queue=len(slots.waiting), slots_busy=busy, slots=len(slots.slots))


def make_device_event(event: DeviceEvent) -> Happened:
    """Return an event of the device as the core knows it."""
    match event:
        case SlotRowsLost():
            return ForEngine(SlotsLost(event.slots))
        case DraftProcessChanged():
            return ForModel("draft", event.is_there)
        case ExpertUseCounted():
            return ForEngine(ExpertsUsed(event.counts))


def list_lane_submitters(
    settings: Settings, executor: DeviceExecutor, prompt_scorer: LoadedScorer | None
) -> dict[LaneId, SubmitLaunch]:
    """Return the function that carries out the launches of each lane."""
    submitters: dict[LaneId, SubmitLaunch] = {MAIN: executor.submit, PROMPTS: executor.submit}
    if prompt_scorer is not None and prompt_scorer.own_lane is not None:
        submitters[settings.scorer_lane] = prompt_scorer.own_lane.submit
    return submitters


def list_store_performers(transfer: Transfer | None) -> dict[type, PerformEffect]:
    """Return the functions that carry out effects of the store, if rows are kept beyond the device."""
    if transfer is None:
        return {}
    return {
        FindPrefix: transfer.lookup.find_prefix,
        RestoreBlocks: transfer.restorer.restore,
        SaveSnapshot: transfer.saver.save,
    }


def list_notify_handlers(
    executor: DeviceExecutor, transfer: Transfer | None, compression: CompressionParts | None
) -> dict[type, tuple[NotifyEffect, ...]]:
    """Return the functions that carry out effects without an outcome, all but those of streams."""
    handlers: dict[type, tuple[NotifyEffect, ...]] = {
        OpenSlot: (executor.open,),
        Abandon: list_abandon_handlers(executor, None if compression is None else compression.scorer, transfer),
        StopLaunch: (executor.stop_launch,),
        KeepFrozen: () if compression is None else (compression.freeze,),
        MoveExperts: (executor.move_experts,),
        PaceSteps: (executor.pace_steps,),
        PaceMemory: (),
        TrimMemory: (MemoryTrimmer(executor.parts.lane).trim_memory,),
    }
    if transfer is not None:
        handlers |= {
            OpenSlot: (executor.open, transfer.restorer.place_fence),
            ReleasePrefix: (transfer.lookup.release_prefix,),
            PaceSnapshot: (transfer.saver.pace_snapshot,),
            PaceMemory: (transfer.store.memory.set_pace,),
        }
    return handlers


def list_abandon_handlers(
    executor: DeviceExecutor, prompt_scorer: LoadedScorer | None, transfer: Transfer | None
) -> tuple[Callable[[RequestId, Abandon], None], ...]:
    """Return the functions that are called when a request is abandoned."""
    others = [
        executor_part
        for executor_part in (prompt_scorer, None if transfer is None else transfer.restorer)
        if executor_part is not None
    ]
    return tuple(
        lambda request, _, executor_part=executor_part: executor_part.abandon(request)
        for executor_part in (executor, *others)
    )
