"""`rekindle serve`: listen, load, be ready, serve, drain."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import anyio
import anyio.to_thread
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from attrs import define, evolve
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from adapters.device.executor import DeviceExecutor
from adapters.device.sampling.grammar_mask import Match
from adapters.http.apis.registry import error_response
from adapters.http.app import build_app
from adapters.http.edge_options import CompressionDefaults, EdgeOptions
from adapters.http.history.answer_tokens import TurnMemory
from adapters.http.history.frozen_messages import FrozenMessages
from adapters.http.history.history_loader import HistoryLoader
from adapters.http.history.persistent_lru import PersistentLru
from adapters.http.history.response_store import Archive
from adapters.http.page import files
from adapters.http.wire.errors import unavailable
from adapters.http.wire.server import Serving, serve
from adapters.watched_thread import Watched
from effects.job import Sampling
from engine import __version__
from engine.core.trace import VERSION, Header, Recorder
from engine.loading.background_load import BackgroundLoad
from engine.loading.expert_placement import placed
from engine.loading.load_target import Target
from engine.loading.load_text import Reading, load_text
from engine.loading.open_store import disk_folder
from engine.loading.shard_peers import hops, placement
from engine.serving.memory_trim import tidied
from engine.serving.watch_shards import ShardWatch
from engine.serving.wiring import engine
from engine.settings.formatting import size
from engine.settings.options import Options
from engine.settings.preflight import unheard
from engine.settings.start_progress import TOKENIZER, Steps
from engine.settings.user_error import UserError, innermost, told

log = logging.getLogger("rekindle")
LOOPBACK = {"127.0.0.1", "::1", "localhost"}
FILES = 8192  # descriptors: 4,096 connections, and the files of cache and checkpoint
RESPONSES, TURNS, FROZEN = "responses", "turns", "frozen"  # folders in that of the cache
LATE_S = 0.8  # after the grace period, for everything to be closed
WRITING_S = 0.2  # what has been answered is still being written: let it, for a moment


def run(options: Options, steps: Steps, beginning: BackgroundLoad, reading: Reading) -> NoReturn:
    """Serve until a signal says otherwise. Exit status 0 after a clean drain, 1 if requests were cut short."""
    raise_file_limit()
    try:
        status = anyio.run(serve_until_signal, options, steps, beginning, reading)
    except (UserError, BaseExceptionGroup) as error:
        reason = innermost(error)
        if not beginning.give_up() and isinstance(reason, UserError):
            steps.done()
            leave(told(reason))  # its step takes long, and an interpreter that ends meanwhile would crash
        if reason is error:
            raise
        raise reason from error
    leave(status)


def raise_file_limit() -> None:
    """A shell often allows fewer files than the system does: connections and the cache's files need some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def leave(status: int) -> NoReturn:
    """At once: everything of ours is closed, and taking torch apart would take a second, a CUDA context several."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


@define
class Gate:
    """Answers 503 while the model loads, the page apart, which says so; then the real application takes over."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
        elif self.app is not None:
            await self.app(scope, receive, send)
        elif (file := files.files().get(files.meant(scope, scope["path"]))) and scope["method"] in {"GET", "HEAD"}:
            await files.answered(file, Headers(scope=scope))(scope, receive, send)
        else:
            await error_response(scope, unavailable("Loading model", 1))(scope, receive, send)


async def serve_until_signal(options: Options, steps: Steps, beginning: BackgroundLoad, reading: Reading) -> int:
    gate, stop = Gate(), anyio.Event()
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, signals, gate, stop, options.grace)
            serving: Serving = await tasks.start(listen, options, gate)
            clean = await serve_model(options, gate, serving, stop, steps=steps, beginning=beginning, reading=reading)
            tasks.cancel_scope.cancel()
    return 0 if clean else 1


async def listen(options: Options, gate: Gate, *, task_status: TaskStatus[Serving] = TASK_STATUS_IGNORED) -> None:
    try:
        await serve(gate, options.host, options.port, on_listening=task_status.started)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that could be looked up
        raise unheard(options, error) from error


async def watch(signals: AsyncIterable[signal.Signals], gate: Gate, stop: anyio.Event, grace: float) -> None:
    """The first signal drains; a second one, or one while the model loads, stops at once."""
    async for number in signals:
        if stop.is_set() or gate.app is None:
            log.warning("stopping at once")
            os._exit(128 + number)
        stop.set()
        late = threading.Timer(grace + LATE_S, give_up)
        late.daemon = True
        late.start()


def give_up() -> None:
    """Something that cannot be cancelled still runs: a kernel, a tokenizer, a write to a slow disk."""
    log.error("not everything has ended in time: stopping at once")
    os._exit(1)


async def serve_model(
    options: Options,
    gate: Gate,
    serving: Serving,
    stop: anyio.Event,
    *,
    steps: Steps,
    beginning: BackgroundLoad,
    reading: Reading,
) -> bool:
    """From loading to the end of the drain. True if nobody was cut short."""
    steps(TOKENIZER)
    text = await load_text(options, reading)
    try:
        target = await beginning.target()
    except BaseException:
        await text.aclose()
        raise
    try:
        target = with_grammars(target, text.grammars.match)
        recorder, archive, memory = build_recorder(options, target), Archive(), TurnMemory()
        frozen = FrozenMessages(drafter=target.drafter.identity) if target.freezes and target.drafter else None
        cabinets: dict[str, PersistentLru] = {RESPONSES: archive, TURNS: memory}
        if frozen is not None:
            cabinets[FROZEN] = frozen
        recall = HistoryLoader(cabinets, disk_folder(options))
        watch = ShardWatch(target.peers, target.lane)
        async with engine(
            target.settings,
            target.executor,
            transfer=target.transfer,
            facts=target.facts,
            live=target.live if frozen is None else partial(living, target, frozen),
            threads=(*target.threads, watch.thread),
            drafter=target.drafter,
            freeze=(lambda *_: None) if frozen is None else frozen.keep,
            recorder=recorder,
            paranoid=options.paranoid,
        ) as running:
            running.metrics.watch_shards(partial(hops, target.shard.parts, target.draft, target.drafter))
            about = edge_options(options, target, text.sampling)
            gate.app = build_app(
                running.door, text, about, running.metrics, archive, memory=memory, frozen=frozen, recall=recall
            )
            watch.start()
            steps.done()
            settle()
            announce(options, target, serving, time.monotonic() - steps.began)
            async with anyio.create_task_group() as beside:
                beside.start_soon(tidied, running.runner, target.lane)
                beside.start_soon(recall.run)
                await stopped(stop, target.executor.threads)
                beside.cancel_scope.cancel()
            log.info("draining: newcomers are refused, running requests get %g s, or stop again", options.grace)
            deadline = anyio.current_time() + options.grace
            clean = await running.door.drain(options.grace)
            clean = await close_connections(serving, deadline) and clean
            if not clean:
                log.warning("%g s are over: what was still running was cut short", options.grace)
        watch.close()
        for cabinet in cabinets.values():
            await cabinet.close(deadline)
        await text.aclose()
        return clean
    finally:
        await target.close()


def with_grammars(target: Target, match: Match) -> Target:
    """Return the target with an executor that holds answers to their grammars. It takes the place of the first one."""
    return evolve(target, executor=DeviceExecutor(evolve(target.executor.parts, match_grammar=match)))


def living(target: Target, frozen: FrozenMessages) -> Mapping[str, Any]:
    """What /props tells of it now, with what messages were frozen to."""
    told = target.live()
    return {**told, "damaged": {**told["damaged"], FROZEN: frozen.damaged}, "frozen": frozen.figures()}


def settle() -> None:
    """What was loaded stays, so the collector need not look through it: that took 0.1 s, in the middle of a request."""
    gc.collect()
    gc.freeze()


async def stopped(stop: anyio.Event, threads: Sequence[Watched], every_s: float = 1) -> None:
    """Until somebody says so. Raises Refusal where a thread has died that nothing goes on without."""
    while not stop.is_set():
        if dead := [thread for thread in threads if thread.dead]:
            raise UserError(f"the thread {dead[0].name} has died ({dead[0].trouble}); the log above says where")
        with anyio.move_on_after(every_s):
            await stop.wait()


async def close_connections(serving: Serving, deadline: float) -> bool:
    """True if all could be ended: answers are still being written, and prompts read that will be refused."""
    serving.stop()
    with anyio.CancelScope(deadline=max(deadline, anyio.current_time() + WRITING_S)):
        await serving.ended.wait()
        return True
    serving.stop(now=True)
    return False


def build_recorder(options: Options, target: Target) -> Recorder | None:
    if options.trace is None:
        return None
    header = Header(VERSION, __version__, target.settings, target.identity, options.shown(), options.redact)
    recorder = Recorder(options.trace, header)
    try:
        recorder.start()
    except OSError as error:
        raise UserError(f"--trace {options.trace}: {error.strerror or error}") from error
    return recorder


def edge_options(options: Options, target: Target, sampling: Sampling) -> EdgeOptions:
    return EdgeOptions(
        model_id=target.model_id,
        max_ctx=target.settings.max_context,
        vocab=target.checkpoint.config.vocab_size,
        api_keys=options.api_key,
        aliases=options.alias,
        any_model=options.any_model,
        allowed_origins=tuple(map(str.lower, options.allow_origin)),
        allowed_hosts=(options.host.lower(), *map(str.lower, options.allow_host)),
        numerics=target.numerics_shown,
        model_info=target.model_info,
        sampling=sampling,
        scope=target.scope,
        disk=target.has_disk,
        compression=CompressionDefaults(
            options.prefill_compression,
            options.prefill_threshold,
            round(options.prefill_keep_ratio * 1000),
            options.curve,
            target.settings.drafter,
            freeze=target.freezes,
        ),
        stabilize=options.stabilize,
        created=int(time.time()),
        version=__version__,
        max_body=options.max_body << 20,
        max_jobs=target.settings.slots + options.max_queue,
        request_timeout_s=options.request_timeout,
    )


def costs(target: Target) -> str:
    """How weights are stored, what they take and where experts are; what a token of context takes, and a state."""
    checkpoint, shard = target.checkpoint, target.shard
    error = "" if checkpoint.error is None else f", error {checkpoint.error:.2%}"
    forms = "; ".join(checkpoint.forms[:3]) or str(shard.dtype).removeprefix("torch.")
    state, away = sum(spec.nbytes for spec in shard.state_specs), shard.memory()["host"]
    kept = f", {checkpoint.bits_of(target.weights):.1f} in memory" if checkpoint.forms else ""
    beside = f", {size(away)} of it in host memory" if away else ""
    line = f"  weights={forms} ({checkpoint.bits:.1f} bits{kept}{error}, {size(target.weights)}{beside})"
    line += f"{placed(target.offloaded)}  context={size(shard.row_spec.token_bytes)} a token"
    kept, own = target.model_info["kv_dtype"], target.model_info["dtype"]
    line += "" if kept == own else f" in {kept}"
    return line + (f", {size(state)} a state" if state else "")


def announce(options: Options, target: Target, serving: Serving, seconds: float) -> None:
    """One line that a script can wait for, then one that a person can paste."""
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    url = f"http://{host}:{serving.port}"
    if options.host not in LOOPBACK and not options.api_key:
        log.warning("listening on %s without --api-key-file: anybody who can reach it can use it", options.host)
    if "*" in options.allow_origin and not options.api_key:
        log.warning("--allow-origin * without --api-key-file: any web page that a browser here shows can use it")
    facts = f"model={target.model_id}  ctx={target.settings.max_context}  slots={target.settings.slots}"
    facts += f"  layers={placement(target.shard.parts)}"
    facts += costs(target)
    drafted = "none" if target.draft is None else f"{target.settings.block} a decode step"
    print(
        f"ready  {url}  {facts}  draft={drafted}  {target.numerics_line}  in {seconds:.1f} s",
        flush=True,
    )
    body = json.dumps({"messages": [{"role": "user", "content": "What is Rekindle?"}]})
    key = " -H 'Authorization: Bearer KEY'" if options.api_key else ""
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'", flush=True)
