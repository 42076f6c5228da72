"""The status of requests: those that are live, read from the world, and those that have ended."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from itertools import islice

from attrs import define, evolve, field

from effects.ids import RequestId
from effects.ports import (
    MAX_RECENT_SHOWN,
    MAX_RUNNING_SHOWN,
    Closed,
    PastRequest,
    RequestStatus,
    SlotStatus,
    Stage,
    Totals,
)
from engine.core.engine_props import DecodePace
from engine.core.request_meter import RequestMeter, stage_of
from states import pages, request_states
from states.slots import Follow, Slot
from states.world import World


def slot_status(number: int, slot: Slot, world: World) -> SlotStatus:
    """Return what /slots shows of a slot."""
    state = None if slot.holder is None else stage_of(world.requests[slot.holder], world)
    busy = slot.holder is not None
    return SlotStatus(id=number, is_processing=busy, request=slot.holder, state=state, kept_tokens=len(slot.tokens))


def kv_pages(world: World) -> dict[str, int]:
    """Return the shared pages by use, and the requests that wait for pages. Empty if each slot has rows of its own."""
    settings = world.settings
    slots = world.slots.slots
    if not settings.pages:
        return {}
    busy = (slot.pages for slot in slots if slot.holder is not None)
    idle = (slot.pages for slot in slots if slot.holder is None)
    of_use = pages.count_use(busy, idle, settings.pages)
    return {"rows": settings.page, "total": settings.pages, **of_use, "waiting": len(world.slots.short_of_pages)}


def describe_pace(world: World) -> DecodePace:
    """Return the pace of decode steps."""
    demand = world.pacing.demand
    return DecodePace(world.settings.latency_target_ns / 1e6, demand.has_prefill_backlog, demand.step_interval_ns / 1e6)


def list_running(world: World, meter: RequestMeter, now_ns: int) -> tuple[RequestStatus, ...]:
    """Return the status of live requests, MAX_RUNNING_SHOWN at most. Those with a slot come before those that wait."""
    seated = (item for item in world.requests.items() if not isinstance(item[1], request_states.Waiting))
    waiting = (item for item in world.requests.items() if isinstance(item[1], request_states.Waiting))
    shown = [*islice(seated, MAX_RUNNING_SHOWN)]
    shown += islice(waiting, MAX_RUNNING_SHOWN - len(shown))
    return tuple(
        request_status(
            request, state, stage_of(state, world), meter.stages_ms(request, now_ns), world.slots.follows.get(request)
        )
        for request, state in shown
    )


def request_status(
    request: RequestId,
    state: request_states.State,
    stage: Stage,
    stages_ms: Mapping[Stage, float],
    follow: Follow | None = None,
) -> RequestStatus:
    """Return the status of a live request. follow: the rows that it waits for, if another request computes them."""
    if isinstance(state, request_states.Waiting):
        waiting = RequestStatus(request, stage, stages_ms, len(state.prompt.tokens), 0, 0, "none")
        if follow is None or follow.ended:
            return waiting
        return evolve(
            waiting,
            follows=follow.leader,
            follows_rows=follow.awaited_rows,
            follows_wait_ms=follow.waiting_ns / 1e6,
            follows_compute_ms=follow.computing_ns / 1e6,
        )
    assert not isinstance(state, request_states.New | request_states.Done), "left within the fold"
    left = request_states.get_remainder(state)
    answer = state.answer if isinstance(state, request_states.Speculating) else request_states.Generated()
    return RequestStatus(
        request,
        stage,
        stages_ms,
        prompt_tokens=len(left.prompt.tokens),
        # the first decode step feeds the last token
        done=len(left.prompt.tokens) if answer.tokens else min(left.slot_lease.rows, len(left.prompt.tokens)),
        restored_tokens=left.slot_lease.reused_rows,
        tier=left.slot_lease.tier,
        completion_tokens=len(left.answer),
        decode_steps=answer.decode_steps,
    )


@define
class RequestHistory:
    """Requests that have ended: their sums, and the last few of them one by one."""

    _recent: deque[PastRequest] = field(factory=lambda: deque[PastRequest](maxlen=MAX_RECENT_SHOWN))
    _finished: Counter[str] = field(factory=Counter[str])
    _hits: Counter[str] = field(factory=Counter[str])
    _misses: Counter[str] = field(factory=Counter[str])
    _restored: Counter[str] = field(factory=Counter[str])
    _tokens: Counter[str] = field(factory=Counter[str])

    def add_closed(self, request: RequestId, closed: Closed) -> None:
        """Add a request whose stream has closed."""
        report = closed.report
        self._finished[closed.finish] += 1
        if report.restored_tokens:
            self._hits[report.tier] += 1
            self._restored[report.tier] += report.restored_tokens
        if report.miss:
            self._misses[report.miss.partition(":")[0]] += 1
        for kind in ("prompt_tokens", "completion_tokens", "decode_steps", "proposed", "accepted"):
            self._tokens[kind] += getattr(report, kind)
        self._recent.appendleft(
            PastRequest(
                request,
                closed.finish,
                round(time.time(), 3),
                closed.stages_ms,
                report.prompt_tokens,
                report.restored_tokens,
                report.tier,
                report.miss,
                report.completion_tokens,
                report.decode_steps,
                report.proposed,
                report.accepted,
                report.speculation,
                report.cache.rows,
                report.cache.reason,
            )
        )

    def recent(self, meter: RequestMeter, now_ns: int) -> tuple[PastRequest, ...]:
        """Return the last requests, the newest first, with the time that they spent after their stream closed."""
        return tuple(
            evolve(ended_request, stages_ms=meter.stages_ms(ended_request.id, now_ns) or ended_request.stages_ms)
            for ended_request in self._recent
        )

    def totals(self, world: World) -> Totals:
        """Return the sums over all requests, including the answers that are not finished yet."""
        tokens = self._tokens
        going_on = sum(
            len(state.answer.tokens)
            for state in world.requests.values()
            if isinstance(state, request_states.Speculating)
        )
        return Totals(
            dict(self._finished),
            dict(self._hits),
            dict(self._misses),
            dict(self._restored),
            prompt_tokens=tokens["prompt_tokens"],
            completion_tokens=tokens["completion_tokens"] + going_on,
            decode_steps=tokens["decode_steps"],
            proposed=tokens["proposed"],
            accepted=tokens["accepted"],
        )
