"""Times of requests by stage, as a fold over envelopes: live in a server, or over a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from attrs import define, field

from effects.ids import RequestId
from effects.ports import MAX_RECENT_SHOWN, Stage
from effects.residency import LoadModel, UnloadModel
from engine.core.event_loop import Envelope
from states import request_states
from states.world import Output, World

STAGES: Mapping[type[request_states.State], Stage] = {
    request_states.Waiting: "Waiting",
    request_states.LookingUp: "LookingUp",
    request_states.Restoring: "Restoring",
    request_states.LoadingScorer: "LoadingScorer",
    request_states.Compressing: "Compressing",
    request_states.UnloadingScorer: "UnloadingScorer",
    request_states.UnparkingDraft: "UnparkingDraft",
    request_states.Prefilling: "Prefilling",
    request_states.Speculating: "Speculating",
    request_states.Snapshotting: "Snapshotting",
    request_states.Parking: "Parking",
    request_states.Draining: "Draining",
    request_states.Recovering: "Recovering",
    request_states.Yielding: "Yielding",
}
"""The stage that clients see of each state. `New` and `Done` are left within the fold, so they have none."""
WEIGHT_MOVES: Mapping[type[request_states.State], tuple[LoadModel | UnloadModel, Stage]] = {
    request_states.LoadingScorer: (LoadModel("scorer"), "Compressing"),
    request_states.UnloadingScorer: (UnloadModel("scorer"), "Prefilling"),
    request_states.UnparkingDraft: (LoadModel("draft"), "Prefilling"),
}
"""States in which weights are to be moved: the move, and the stage that it is needed for."""


def stage_of(state: request_states.State, world: World) -> Stage:
    """Return the stage that clients see of a request in this state.

    A move of weights waits for its lane as other work does, and often there is nothing to move. Until the lane carries
    such a move out, the request waits for the work that comes after it, and that is what clients see.
    """
    if type(state) not in WEIGHT_MOVES:
        return STAGES[type(state)]
    move, next_stage = WEIGHT_MOVES[type(state)]
    running = [effect_request.effect for lane in world.lanes.values() for effect_request in lane.running]
    if any(type(effect) is type(move) and effect.name == move.name for effect in running):
        return STAGES[type(state)]
    if isinstance(state, request_states.UnparkingDraft) and state.slot_lease.valid_rows >= state.prompt.prefill_rows:
        return "Speculating"
    return next_stage


@define
class RequestMeter:
    """Measures stages. `stages_ms` is shown in a response. stage: is called with the name and seconds of each stage
    that ends.
    """

    stage: Callable[[Stage, float], None] | None = None  # hears (stage, seconds)
    _current_stage: dict[RequestId, tuple[Stage, int]] = field(factory=dict[RequestId, tuple[Stage, int]])
    _spent: dict[RequestId, dict[Stage, int]] = field(factory=dict[RequestId, dict[Stage, int]])
    _closed_requests: deque[RequestId] = field(factory=deque[RequestId])  # whose stream has closed; the last of them
    _now_ns: int = 0

    def observe(self, envelope: Envelope, _: tuple[Output, ...], before: World, after: World) -> None:
        """Note the stage of every request after an event.

        An event of one request moves others too: one that gets the slot that became free, or one that only waited for a
        model.
        """
        self._now_ns = envelope.at_ns
        earlier = before.requests
        for request, state in after.requests.items():
            if type(earlier.get(request)) is not type(state) or type(state) in WEIGHT_MOVES:
                self.enter_stage(request, stage_of(state, after))
        for request in earlier.keys() - after.requests.keys():
            self.enter_stage(request, None)

    def enter_stage(self, request: RequestId, stage: Stage | None) -> None:
        """End the current stage of a request and begin another. stage: None when the request has left the world."""
        was, since = self._current_stage.get(request, (None, self._now_ns))
        if was == stage:
            return
        if was is None:
            self._spent[request] = {}
        else:
            if (spent := self._spent.get(request)) is not None:
                spent[was] = spent.get(was, 0) + self._now_ns - since
            if self.stage is not None:
                self.stage(was, (self._now_ns - since) / 1e9)
        if stage is not None:
            self._current_stage[request] = (stage, self._now_ns)
        else:
            self._current_stage.pop(request, None)

    def close_stream(self, request: RequestId) -> Mapping[Stage, float]:
        """Return the milliseconds in each stage so far, when the stream of a request closes.

        What the request does after that is still measured.
        """
        self._closed_requests.append(request)
        if len(self._closed_requests) > MAX_RECENT_SHOWN:
            self._spent.pop(self._closed_requests.popleft(), None)
        # what follows has only just begun
        return {stage: spent for stage, spent in self.stages_ms(request).items() if spent}

    def stages_ms(self, request: RequestId, now_ns: int | None = None) -> Mapping[Stage, float]:
        """Return the milliseconds in each stage so far, for requests whose stream is open and for the last that have
        closed.

        now_ns: by the clock that stamps events; None means the time of the last event.
        """
        spent = dict(self._spent.get(request, {}))
        if request in self._current_stage:
            stage, since = self._current_stage[request]
            now = self._now_ns if now_ns is None else now_ns
            spent[stage] = spent.get(stage, 0) + now - since
        return {stage: round(ns / 1e6, 3) for stage, ns in spent.items()}
