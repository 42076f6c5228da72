"""`rekindle serve`: listen, load, be ready, serve, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

import anyio
import anyio.to_thread
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from attrs import define, evolve
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from adapters.device.executor import DeviceExecutor
from adapters.device.sampling.grammar_mask import Match
from adapters.http.apis.registry import make_error_response
from adapters.http.app import build_app
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.frozen_messages import FrozenMessages
from adapters.http.history.histories import Histories
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.history.persistent_lru import PersistentLru
from adapters.http.history.response_store import ResponseStore
from adapters.http.page import files
from adapters.http.wire.errors import unavailable
from adapters.http.wire.server import RunningServer, serve_app
from adapters.watched_thread import WatchedThread
from engine import __version__
from engine.core.trace import VERSION, Header, Recorder
from engine.loading.background_load import BackgroundLoad
from engine.loading.load_target import LoadedModel
from engine.loading.load_text import Reading, load_text
from engine.loading.memory.expert_placement import resolve_cpu_experts
from engine.loading.open_store import disk_folder
from engine.loading.shard_peers import collect_remote_figures
from engine.serving.announce import announce
from engine.serving.build_edge_options import build_edge_options
from engine.serving.fleet_routes import make_fleet_routes
from engine.serving.watch_shards import ShardWatch
from engine.serving.wiring import CompressionParts, Engine, StatusSources, run_engine
from engine.settings.options import Options
from engine.settings.output.live_figures import LiveFigures
from engine.settings.output.start_progress import TOKENIZER, StartProgress
from engine.settings.preflight import build_bind_error
from engine.settings.user_error import UserError, find_innermost, report_error

log = logging.getLogger("rekindle")
FILES = 8192  # descriptors: 4,096 connections, and the files of cache and checkpoint
# Folders in that of the cache.
RESPONSES = "responses"
TURNS = "turns"
FROZEN = "frozen"
LATE_S = 0.8  # after the grace period, for everything to be closed
WRITING_S = 0.2  # what has been answered is still being written: let it, for a moment


def run_server(options: Options, progress: StartProgress, beginning: BackgroundLoad, reading: Reading) -> NoReturn:
    """Serve until a signal ends it. The exit status is 0 after a clean drain, and 1 if requests were cancelled."""
    raise_file_limit()
    try:
        status = anyio.run(serve_until_signal, options, progress, beginning, reading)
    except (UserError, BaseExceptionGroup) as error:
        reason = find_innermost(error)
        if not beginning.cancel() and isinstance(reason, UserError):
            progress.finish()
            exit_process(
                report_error(reason)
            )  # its step takes long, and an interpreter that ends meanwhile would crash
        if reason is error:
            raise
        raise reason from error
    exit_process(status)


def raise_file_limit() -> None:
    """Raise the limit of open files: a shell often allows fewer than connections and cache files need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def exit_process(status: int) -> NoReturn:
    """End the process at once. Everything of ours is closed; taking torch apart would take a second, a CUDA context
    several.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


@define
class LoadingGate:
    """Answers 503 while the model loads, except for the page, which says so. Then the application answers."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
        elif self.app is not None:
            await self.app(scope, receive, send)
        elif (file := files.load_files().get(files.page_path(scope, scope["path"]))) and scope["method"] in {
            "GET",
            "HEAD",
        }:
            await files.make_file_response(file, Headers(scope=scope))(scope, receive, send)
        else:
            await make_error_response(scope, unavailable("Loading model", 1))(scope, receive, send)


async def serve_until_signal(
    options: Options, progress: StartProgress, beginning: BackgroundLoad, reading: Reading
) -> int:
    """Listen, load and serve. Returns the exit status."""
    gate = LoadingGate()
    stop = anyio.Event()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_signals, signals, gate, stop, options.http.grace)
            serving: RunningServer = await tasks.start(listen, options, gate)
            clean = await serve_model(
                options, gate, serving, stop, progress=progress, beginning=beginning, reading=reading
            )
            tasks.cancel_scope.cancel()
    return 0 if clean else 1


async def listen(
    options: Options, gate: LoadingGate, *, task_status: TaskStatus[RunningServer] = TASK_STATUS_IGNORED
) -> None:
    """Run the HTTP server. Raises UserError if it cannot listen."""
    try:
        await serve_app(gate, options.http.host, options.http.port, on_listening=task_status.started)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that could be looked up
        raise build_bind_error(options.http, error) from error


async def watch_signals(
    signals: AsyncIterable[signal.Signals], gate: LoadingGate, stop: anyio.Event, grace: float
) -> None:
    """Drain at the first signal. Stop at once at a second one, or at one while the model loads."""
    async for number in signals:
        if stop.is_set() or gate.app is None:
            log.warning("stopping at once")
            os._exit(128 + number)
        stop.set()
        late = threading.Timer(grace + LATE_S, exit_late)
        late.daemon = True
        late.start()


def exit_late() -> None:
    """End the process because something that cannot be cancelled still runs: a kernel, a tokenizer, a slow disk."""
    log.error("the shutdown took too long: stopping at once")
    os._exit(1)


async def serve_model(
    options: Options,
    gate: LoadingGate,
    serving: RunningServer,
    stop: anyio.Event,
    *,
    progress: StartProgress,
    beginning: BackgroundLoad,
    reading: Reading,
) -> bool:
    """Serve from the load to the end of the drain. Returns True if no request was cut short."""
    progress(TOKENIZER)
    text = await load_text(options.model, reading)
    try:
        target = await beginning.wait_for_target()
    except BaseException:
        await text.aclose()
        raise
    try:
        target = with_grammars(target, text.grammars.match)
        recorder = build_recorder(options, target)
        histories, loader = make_histories(options, target)
        frozen = histories.frozen_messages
        watch = ShardWatch(target.peers, target.lane)
        async with run_engine(
            target.settings,
            target.executor,
            transfer=target.transfer,
            status=StatusSources(
                facts=target.facts,
                live=target.collect_live if frozen is None else partial(collect_live_properties, target, frozen),
                threads=(*target.threads, watch.thread),
            ),
            compression=CompressionParts(target.scorer, (lambda *_: None) if frozen is None else frozen.store),
            recorder=recorder,
            paranoid=options.diagnostics.paranoid,
        ) as running:
            running.metrics.watch_shards(
                partial(collect_remote_figures, target.shard.parts, target.draft, target.scorer)
            )
            about = build_edge_options(options, target, text)
            routes = make_fleet_routes(running.submissions, target)
            gate.app = build_app(running.submissions, text, about, running.metrics, histories, fleet_routes=routes)
            watch.start()
            progress.finish()
            freeze_collected()
            announce(options, target, serving, time.monotonic() - progress.began)
            async with anyio.create_task_group() as background:
                background.start_soon(loader.run)
                await wait_for_stop(stop, target.executor.threads)
                background.cancel_scope.cancel()
            deadline = anyio.current_time() + options.http.grace
            clean = await drain_requests(running, serving, options.http.grace)
        watch.close()
        for history in loader.stores.values():
            await history.close(deadline)
        await text.aclose()
        return clean
    finally:
        await target.close()


def make_histories(options: Options, target: LoadedModel) -> tuple[Histories, HistoryLoader]:
    """Return the memories of a server, and what reads them at its start."""
    responses = ResponseStore()
    turns = TurnMemory()
    frozen = FrozenMessages(scorer_identity=target.scorer.identity) if target.freezes and target.scorer else None
    kept: dict[str, PersistentLru] = {RESPONSES: responses, TURNS: turns}
    if frozen is not None:
        kept[FROZEN] = frozen
    loader = HistoryLoader(kept, disk_folder(options.cache))
    return Histories(responses, turns, frozen, loader), loader


async def drain_requests(running: Engine, serving: RunningServer, grace_s: float) -> bool:
    """Let running requests end within the grace. Return True if none was cut short."""
    log.info("shutting down: running requests have %g s; a second signal ends them", grace_s)
    deadline = anyio.current_time() + grace_s
    clean = await running.submissions.drain(grace_s)
    clean = await close_connections(serving, deadline) and clean
    if not clean:
        log.warning("%g s are over: the requests that were still running were cut short", grace_s)
    return clean


def with_grammars(target: LoadedModel, match: Match) -> LoadedModel:
    """Return the target with a new executor in place of its own. The new one keeps answers to their grammars."""
    return evolve(target, executor=DeviceExecutor(evolve(target.executor.parts, match_grammar=match)))


def collect_live_properties(target: LoadedModel, frozen: FrozenMessages) -> LiveFigures:
    """Return what /props shows now, with the messages that were frozen."""
    live = target.collect_live()
    damaged = {**live.damaged, FROZEN: frozen.damaged_count}
    return evolve(live, damaged=damaged, frozen=frozen.count_figures())


def freeze_collected() -> None:
    """Freeze all objects: otherwise the collector looks through them for 0.1 s in the middle of a request."""
    gc.collect()
    gc.freeze()


async def wait_for_stop(stop: anyio.Event, threads: Sequence[WatchedThread]) -> None:
    """Wait for the stop event. Raises UserError if a thread has died that the server cannot work without."""
    loop = asyncio.get_running_loop()
    death = anyio.Event()

    def report_death() -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it the waiting
            loop.call_soon_threadsafe(death.set)

    for thread in threads:
        thread.call_on_death(report_death)
    async with anyio.create_task_group() as waiting:

        async def wait_for_first(event: anyio.Event) -> None:
            await event.wait()
            waiting.cancel_scope.cancel()

        waiting.start_soon(wait_for_first, stop)
        waiting.start_soon(wait_for_first, death)
    if not stop.is_set():
        dead = next(thread for thread in threads if thread.is_dead)
        raise UserError(f"the thread {dead.name} died ({dead.trouble}); see the log above")


async def close_connections(serving: RunningServer, deadline: float) -> bool:
    """End the connections. Returns True if all answers were written before the deadline."""
    serving.stop()
    with anyio.CancelScope(deadline=max(deadline, anyio.current_time() + WRITING_S)):
        await serving.end_event.wait()
        return True
    serving.stop(now=True)
    return False


def build_recorder(options: Options, target: LoadedModel) -> Recorder | None:
    """Start to record a trace, if one is asked for. Raises UserError if its file cannot be written."""
    if options.diagnostics.trace is None:
        return None
    values = resolve_cpu_experts(options, target.shard).redacted_values()
    header = Header(VERSION, __version__, target.settings, target.identity, values, options.diagnostics.redact)
    recorder = Recorder(options.diagnostics.trace, header)
    try:
        recorder.start()
    except OSError as error:
        raise UserError(f"--trace {options.diagnostics.trace}: {error.strerror or error}") from error
    return recorder
