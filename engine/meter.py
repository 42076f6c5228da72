"""What the engine measures, as a fold over envelopes: time per state, queue, slots, hits. Live or over a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from effects.all import Ask, Launch
from effects.ids import RequestId
from engine.runner import Envelope
from states.world import Out, World

Stage = Callable[[str, float], None]  # (state, seconds)


@define
class Meter:
    """`stages_ms(request)` is what a response shows; `stage` hears of every phase that ends."""

    stage: Stage | None = None
    _since: dict[RequestId, tuple[str, int]] = field(factory=dict[RequestId, tuple[str, int]])
    _spent: dict[RequestId, dict[str, int]] = field(factory=dict[RequestId, dict[str, int]])
    _told: set[RequestId] = field(factory=set[RequestId])
    _now_ns: int = 0

    def observe(self, envelope: Envelope, outs: tuple[Out, ...], _: World, after: World) -> None:
        self._now_ns = envelope.at_ns
        for request in dict.fromkeys((envelope.request, *touched(outs))):
            state = after.requests.get(request)
            self.enter(request, "" if state is None else type(state).__name__)

    def enter(self, request: RequestId, state: str) -> None:
        was, since = self._since.get(request, ("", self._now_ns))
        if was == state:
            return
        if was:
            if request not in self._told:
                spent = self._spent.setdefault(request, {})
                spent[was] = spent.get(was, 0) + self._now_ns - since
            if self.stage is not None:
                self.stage(was, (self._now_ns - since) / 1e9)
        if state:
            self._since[request] = (state, self._now_ns)
        else:
            self._since.pop(request, None)
            self._told.discard(request)

    def stages_ms(self, request: RequestId) -> Mapping[str, float]:
        """Milliseconds in each state so far. Asked once, when the stream closes; what follows is not kept."""
        spent = self._spent.pop(request, {})
        if request in self._since:
            state, since = self._since[request]
            if self._now_ns > since:  # what follows behind the stream has only just begun
                spent[state] = spent.get(state, 0) + self._now_ns - since
            self._told.add(request)
        return {state: round(ns / 1e6, 3) for state, ns in spent.items()}


def touched(outs: tuple[Out, ...]) -> list[RequestId]:
    """Whoever else moved: a request that is admitted by another's leaving opens its slot."""
    asks: list[Ask] = []
    for out in outs:
        asks += out.asks if isinstance(out, Launch) else (out,)
    return [ask.request for ask in asks]
