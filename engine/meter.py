"""What the engine measures, as a fold over envelopes: time per state, queue, slots, hits. Live or over a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from effects.all import Ask, Launch
from effects.ids import RequestId
from effects.ports import Stage
from engine.runner import Envelope
from states import life
from states.events import ForRequest
from states.world import Out, World

STAGES: Mapping[type[life.State], Stage] = {
    life.Waiting: "Waiting",
    life.LookingUp: "LookingUp",
    life.Restoring: "Restoring",
    life.Compressing: "Compressing",
    life.Unparking: "Unparking",
    life.Prefilling: "Prefilling",
    life.Speculating: "Speculating",
    life.Snapshotting: "Snapshotting",
    life.Parking: "Parking",
    life.Draining: "Draining",
    life.Recovering: "Recovering",
    life.Yielding: "Yielding",
}
"""What is told of each state that a request can be seen in; `New` and `Done` are left within the fold."""


@define
class Meter:
    """`stages_ms(request)` is what a response shows; `stage` hears of every one that ends."""

    stage: Callable[[Stage, float], None] | None = None  # hears (stage, seconds)
    _since: dict[RequestId, tuple[Stage, int]] = field(factory=dict[RequestId, tuple[Stage, int]])
    _spent: dict[RequestId, dict[Stage, int]] = field(factory=dict[RequestId, dict[Stage, int]])
    _told: set[RequestId] = field(factory=set[RequestId])
    _now_ns: int = 0

    def observe(self, envelope: Envelope, outs: tuple[Out, ...], _: World, after: World) -> None:
        self._now_ns = envelope.at_ns
        own = (envelope.happened.request,) if isinstance(envelope.happened, ForRequest) else ()
        for request in dict.fromkeys((*own, *touched(outs))):
            state = after.requests.get(request)
            self.enter(request, None if state is None else STAGES[type(state)])

    def enter(self, request: RequestId, stage: Stage | None) -> None:
        was, since = self._since.get(request, (None, self._now_ns))
        if was == stage:
            return
        if was is not None:
            if request not in self._told:
                spent = self._spent.setdefault(request, {})
                spent[was] = spent.get(was, 0) + self._now_ns - since
            if self.stage is not None:
                self.stage(was, (self._now_ns - since) / 1e9)
        if stage is not None:
            self._since[request] = (stage, self._now_ns)
        else:
            self._since.pop(request, None)
            self._told.discard(request)

    def stages_ms(self, request: RequestId) -> Mapping[Stage, float]:
        """Milliseconds in each stage so far. Asked once, when the stream closes; what follows is not kept."""
        spent = self._spent.pop(request, {})
        if request in self._since:
            stage, since = self._since[request]
            if self._now_ns > since:  # what follows behind the stream has only just begun
                spent[stage] = spent.get(stage, 0) + self._now_ns - since
            self._told.add(request)
        return {stage: round(ns / 1e6, 3) for stage, ns in spent.items()}


def touched(outs: tuple[Out, ...]) -> list[RequestId]:
    """Whoever else moved: a request that is admitted by another's leaving opens its slot."""
    asks: list[Ask] = []
    for out in outs:
        asks += out.asks if isinstance(out, Launch) else (out,)
    return [ask.request for ask in asks]
