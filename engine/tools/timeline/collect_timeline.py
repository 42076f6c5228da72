"""Collects the content of a timeline while a trace is replayed: requests, bars for their states, and launches."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from effects.all import Effect, EffectRequest, Launch
from effects.ids import LaneId, RequestId, Side
from engine.core.event_loop import Envelope
from engine.core.request_meter import STAGES
from engine.tools.timeline.columns import MixedColumns, compute_steps
from states.events import ForLaunch, ForModel, ForRequest, Submitted
from states.world import Output, World

# The most events of one page. A million events with their effects take some 16 MiB of the page, compressed, and some
# 200 MiB of a browser's memory. A tab may have several times that.
# memory: a tab may have several times that.
MOST_EVENTS = 1 << 20
# The latest time after the first event: 35 years in microseconds, which a browser can represent exactly.
MOST_US = 1 << 50
STATES = tuple(STAGES.values())
# The end of a span that the trace does not have, and the row of an event without a request.
OPEN = -1
NO_ROW = -1


@define
class Spans:
    """Spans of events. Each begins with one event and ends with another."""

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
    """The content of the page. first: the event with which the page begins."""

    first: int = 0
    # Microseconds since the first event, never less than those before.
    times: list[int] = field(factory=list[int])
    seqs: tuple[int, int] = (0, -1)  # of the first event and the last
    event_rows: list[int] = field(factory=list[int])
    events: MixedColumns = field(factory=MixedColumns)
    effect_counts: list[int] = field(factory=list[int])  # effects that each event led to
    effect_rows: list[int] = field(factory=list[int])
    effect_requests: MixedColumns = field(factory=MixedColumns)
    requests: list[int] = field(factory=list[int])  # the request of each row
    bars: Spans = field(factory=Spans)  # owner: the row; kind: its state
    launches: Spans = field(factory=Spans)  # owner: the lane; kind: the first of its effects
    sizes: list[int] = field(factory=list[int])  # effects of each launch
    together: list[int] = field(factory=list[int])  # effects of each launch, with those that joined
    store: Spans = field(factory=Spans)  # owner: the row; kind: the effect
    left_out: int = 0  # events for which there was no room
    _start_ns: int = 0
    _rows: dict[RequestId, int] = field(factory=dict[RequestId, int])  # the row of each live request
    _bar: dict[RequestId, int] = field(factory=dict[RequestId, int])  # the open bar of each request
    _running: dict[LaneId, int] = field(factory=dict[LaneId, int])  # the launch on each lane
    # Effects on the store without an outcome yet.
    _awaited: dict[RequestId, tuple[int, Effect]] = field(factory=dict[RequestId, "tuple[int, Effect]"])

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
        """Begin the page. Every request that is live at this event gets a row."""
        self.seqs = (envelope.seq, envelope.seq)
        self._start_ns = envelope.at_ns
        for request, state in before.requests.items():
            self.add_request(request)
            self._bar[request] = self.bars.begin(self._rows[request], STATES.index(STAGES[type(state)]), 0)

    def add_request(self, request: RequestId) -> None:
        self._rows[request] = len(self.requests)
        self.requests.append(request)

    def add_event(self, envelope: Envelope, number: int) -> None:
        row = NO_ROW
        happened = envelope.happened
        event = happened if isinstance(happened, ForLaunch | ForModel) else happened.event
        if isinstance(happened, ForRequest):
            request = happened.request
            if isinstance(event, Submitted):
                self.add_request(request)
            row = self._rows.get(request, NO_ROW)
            span, effect = self._awaited.get(request, (0, None))
            if effect is not None and type(event) in effect.outcomes:
                self.store.stop[span] = number
                del self._awaited[request]
        self.event_rows.append(row)
        self.events.add(event)

    def add_transitions(self, before: World, after: World, number: int) -> None:
        """Begin a new bar for every request whose state the event has changed."""
        for request, state in after.requests.items():
            was = before.requests.get(request)
            if was is not state and type(was) is not type(state):
                self.end_bar(request, number)
                kind = STATES.index(STAGES[type(state)])
                self._bar[request] = self.bars.begin(self._rows[request], kind, number)
        for request in before.requests.keys() - after.requests.keys():
            self.end_bar(request, number)

    def end_bar(self, request: RequestId, number: int) -> None:
        if (bar := self._bar.pop(request, None)) is not None:
            self.bars.stop[bar] = number

    def add_effects(self, outs: tuple[Output, ...], after: World, number: int) -> None:
        first = len(self.effect_rows)
        for lane in [lane for lane in self._running if not after.lanes[lane].running]:
            self.launches.stop[self._running.pop(lane)] = number
        for out in outs:
            effect_requests = out.effect_requests if isinstance(out, Launch) else (out,)
            if isinstance(out, Launch):
                self.add_launch(out, number, len(after.lanes[out.lane].running))
            for effect_request in effect_requests:
                self.add_effect(effect_request, number)
        self.effect_counts.append(len(self.effect_rows) - first)

    def add_launch(self, launch: Launch, number: int, together: int) -> None:
        if (last := self._running.pop(launch.lane, None)) is not None:
            self.launches.stop[last] = number
        self._running[launch.lane] = self.launches.begin(launch.lane, len(self.effect_rows), number)
        self.sizes.append(len(launch.effect_requests))
        self.together.append(max(together, len(launch.effect_requests)))

    def add_effect(self, effect_request: EffectRequest, number: int) -> None:
        row = self._rows.get(effect_request.request, NO_ROW)
        if effect_request.effect.outcomes and effect_request.effect.side is Side.STORE:
            self._awaited[effect_request.request] = (
                self.store.begin(row, len(self.effect_rows), number),
                effect_request.effect,
            )
        self.effect_rows.append(row)
        self.effect_requests.add(effect_request.effect)

    def pack(self) -> dict[str, Any]:
        """Return the data that the page's script reads."""
        return {
            "states": STATES,
            "seqs": self.seqs,
            "times": compute_steps(self.times),
            "requests": self.requests,
            "eventRows": self.event_rows,
            "events": self.events.pack(),
            "effectCounts": self.effect_counts,
            "effectRows": self.effect_rows,
            "effects": self.effect_requests.pack(),
            "bars": self.bars.pack(),
            "launches": {**self.launches.pack(), "size": self.sizes, "together": self.together},
            "store": self.store.pack(),
        }
