"""The content of a timeline, folded from a trace while it is replayed: every request once, its states as bars, its
launches.
"""

from __future__ import annotations

from typing import Any

from attrs import define, field

from effects.all import Effect, EffectRequest, Launch
from effects.ids import LaneId, RequestId, Side
from engine.core.event_loop import Envelope
from engine.core.request_meter import STAGES
from engine.tools.timeline.columns import MixedColumns, compute_steps
from states.events import ForModel, ForRequest, Submitted
from states.world import Output, World

# Events of one page. A million with what they led to are some 16 MiB of it, compressed, and some 200 MiB of a browser's
# memory: a tab may have several times that.
MOST_EVENTS = 1 << 20
MOST_US = 1 << 50  # after the first event: 35 years, and an exact number in a browser
STATES = tuple(STAGES.values())
# an end that the trace does not have; an event of no request
OPEN = -1
NOBODY = -1


@define
class Spans:
    """Spans of events: each begins with one event and ends with another."""

    owner: list[int] = field(factory=list[int])
    kind: list[int] = field(factory=list[int])
    start: list[int] = field(factory=list[int])  # ascending
    stop: list[int] = field(factory=list[int])  # OPEN until it is known

    def begin(self, owner: int, kind: int, event: int) -> int:
        self.owner.append(owner)
        self.kind.append(kind)
        self.start.append(event)
        self.stop.append(OPEN)
        return len(self.start) - 1

    def pack(self) -> dict[str, list[int]]:
        took = [OPEN if stop == OPEN else stop - start for start, stop in zip(self.start, self.stop, strict=True)]
        return {"owner": self.owner, "kind": self.kind, "start": compute_steps(self.start), "took": took}


@define
class Timeline:
    """RequestOutcome of every event, in order. first: the one that the page begins with."""

    first: int = 0
    times: list[int] = field(factory=list[int])  # microseconds since the first one, never less than before
    seqs: tuple[int, int] = (0, -1)  # of the first event and the last
    event_rows: list[int] = field(factory=list[int])
    events: MixedColumns = field(factory=MixedColumns)
    ask_counts: list[int] = field(factory=list[int])  # that each event led to
    ask_rows: list[int] = field(factory=list[int])
    asks: MixedColumns = field(factory=MixedColumns)
    requests: list[int] = field(factory=list[int])  # of each row
    bars: Spans = field(factory=Spans)  # owner: the row; kind: its state
    launches: Spans = field(factory=Spans)  # owner: the lane; kind: the first of its asks
    sizes: list[int] = field(factory=list[int])  # of each launch: its asks
    together: list[int] = field(factory=list[int])  # and with those whom it joined
    store: Spans = field(factory=Spans)  # owner: the row; kind: the ask
    left_out: int = 0  # events that there was no more room for
    _start_ns: int = 0
    _rows: dict[RequestId, int] = field(factory=dict[RequestId, int])  # of who is, or was last, called so
    _bar: dict[RequestId, int] = field(factory=dict[RequestId, int])  # that each request is in
    _running: dict[LaneId, int] = field(factory=dict[LaneId, int])  # the launch on each lane
    _awaited: dict[RequestId, tuple[int, Effect]] = field(factory=dict[RequestId, "tuple[int, Effect]"])  # of the store

    def observe(self, envelope: Envelope, outs: tuple[Output, ...], before: World, after: World) -> None:
        if envelope.seq < self.first:
            return
        if len(self.times) >= MOST_EVENTS:
            self.left_out += 1
            return
        if not self.times:
            self.begin(envelope, before)
        number = len(self.times)
        since = (envelope.at_ns - self._start_ns) // 1000
        self.times.append(min(max(since, *self.times[-1:], 0), MOST_US))
        self.seqs = self.seqs[0], envelope.seq
        self.add_event(envelope, number)
        self.add_transitions(before, after, number)
        self.add_effects(outs, after, number)

    def begin(self, envelope: Envelope, before: World) -> None:
        """Begin the page: every request that is live already has a row from here on."""
        self.seqs = (envelope.seq, envelope.seq)
        self._start_ns = envelope.at_ns
        for request, state in before.requests.items():
            self.add_request(request)
            self._bar[request] = self.bars.begin(self._rows[request], STATES.index(STAGES[type(state)]), 0)

    def add_request(self, request: RequestId) -> None:
        self._rows[request] = len(self.requests)
        self.requests.append(request)

    def add_event(self, envelope: Envelope, number: int) -> None:
        row = NOBODY
        happened = envelope.happened
        event = happened if isinstance(happened, ForModel) else happened.event
        if isinstance(happened, ForRequest):
            request = happened.request
            if isinstance(event, Submitted):
                self.add_request(request)
            row = self._rows.get(request, NOBODY)
            span, effect = self._awaited.get(request, (0, None))
            if effect is not None and type(event) in effect.outcomes:
                self.store.stop[span] = number
                del self._awaited[request]
        self.event_rows.append(row)
        self.events.add(event)

    def add_transitions(self, before: World, after: World, number: int) -> None:
        """Who is in another state than before the event."""
        for request, state in after.requests.items():
            was = before.requests.get(request)
            if was is not state and type(was) is not type(state):
                self.end_request(request, number)
                kind = STATES.index(STAGES[type(state)])
                self._bar[request] = self.bars.begin(self._rows[request], kind, number)
        for request in before.requests.keys() - after.requests.keys():
            self.end_request(request, number)

    def end_request(self, request: RequestId, number: int) -> None:
        if (bar := self._bar.pop(request, None)) is not None:
            self.bars.stop[bar] = number

    def add_effects(self, outs: tuple[Output, ...], after: World, number: int) -> None:
        first = len(self.ask_rows)
        for lane in [lane for lane in self._running if not after.lanes[lane].running]:
            self.launches.stop[self._running.pop(lane)] = number
        for out in outs:
            asks = out.asks if isinstance(out, Launch) else (out,)
            if isinstance(out, Launch):
                self.add_launch(out, number, len(after.lanes[out.lane].running))
            for ask in asks:
                self.add_store_effect(ask, number)
        self.ask_counts.append(len(self.ask_rows) - first)

    def add_launch(self, launch: Launch, number: int, together: int) -> None:
        if (last := self._running.pop(launch.lane, None)) is not None:
            self.launches.stop[last] = number
        self._running[launch.lane] = self.launches.begin(launch.lane, len(self.ask_rows), number)
        self.sizes.append(len(launch.asks))
        self.together.append(max(together, len(launch.asks)))

    def add_store_effect(self, ask: EffectRequest, number: int) -> None:
        row = self._rows.get(ask.request, NOBODY)
        if ask.effect.outcomes and ask.effect.side is Side.STORE:
            self._awaited[ask.request] = self.store.begin(row, len(self.ask_rows), number), ask.effect
        self.ask_rows.append(row)
        self.asks.add(ask.effect)

    def pack(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {
            "states": STATES,
            "seqs": self.seqs,
            "times": compute_steps(self.times),
            "requests": self.requests,
            "eventRows": self.event_rows,
            "events": self.events.pack(),
            "askCounts": self.ask_counts,
            "askRows": self.ask_rows,
            "asks": self.asks.pack(),
            "bars": self.bars.pack(),
            "launches": {**self.launches.pack(), "size": self.sizes, "together": self.together},
            "store": self.store.pack(),
        }
