"""Replay: fold the recorded events again and compare everything that was decided. No model is needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field

from engine.core.event_loop import Envelope
from engine.core.trace import UNREADABLE, Digest, Header, LineCutShort, Record, converter, digest, read
from engine.settings.progress import progress
from states.machine import IllegalEvent
from states.world import Output, World, advance, make_world

T = TypeVar("T")
CUT_SHORT = 3  # exit status: of a trace that has no end, and agrees as far as it goes


class Diverged(Exception):
    """The same events no longer lead to the same decisions. The message shows event, expected and actual."""


class CutShort(Diverged):
    """The trace has no end: its server was killed, or still runs. Everything that is in it agrees."""


@define
class Replay:
    """Feed it records in order; `finish` at the end. Raises Diverged at the first difference."""

    world: World
    event: Envelope | None = None
    expected: list[Output] = field(factory=list["Output"])
    events: int = 0
    ended: bool = False

    @classmethod
    def of(cls, header: Header) -> Replay:
        return cls(make_world(header.settings))

    def feed(self, number: int, record: Record) -> tuple[Output, ...]:
        """What a record led to: the asks, when it was an event."""
        if self.ended:
            raise self.differs(number, "nothing after the last digest", record)
        if isinstance(record, Envelope):
            return self.happened(number, record)
        if isinstance(record, Digest):
            self.compare(number, record)
        elif not self.expected or self.expected[0] != record:
            raise self.differs(number, self.expected[0] if self.expected else "no (further) ask", record)
        else:
            self.expected.pop(0)
        return ()

    def happened(self, number: int, envelope: Envelope) -> tuple[Output, ...]:
        if self.expected:
            raise self.differs(number, self.expected[0], "no (further) ask")
        if envelope.seq != self.events:
            raise Diverged(f"line {number}: event {envelope.seq} where event {self.events} was due: a line is missing")
        self.event = envelope
        try:
            self.world, outs = advance(self.world, envelope.happened)
        except (IllegalEvent, AssertionError, *UNREADABLE) as error:  # a trace is hostile input
            raise Diverged(f"line {number}: {show(envelope)}\n  cannot happen here: {error!r}") from error
        self.expected = list(outs)
        self.events += 1
        return outs

    def compare(self, number: int, recorded: Digest) -> None:
        if self.expected:
            raise self.differs(number, self.expected[0], "no (further) ask")
        now = digest(self.world)
        if recorded.seq != self.events - 1 or recorded.world != now:
            raise self.differs(number, Digest(self.events - 1, now, recorded.last), recorded)
        self.ended = recorded.last

    def finish(self) -> None:
        """At the end of the trace. Raises CutShort where it is no end."""
        if self.ended:
            return
        missing = " What came of the last event was not recorded to its end." if self.expected else ""
        raise CutShort(
            f"the trace was cut short after event {self.events - 1}: its server was killed, or it still runs.\n"
            f"  replayed: {self.events} events, and everything that was recorded of them agrees.{missing}"
        )

    def summary(self, executed: int | None) -> str:
        """executed: how many tokens were computed again; None: none were asked for."""
        more = "" if executed is None else f", {executed} tokens executed"
        return f"identical: {self.events} events{more}, world {digest(self.world)}"

    def differs(self, number: int, now: object, recorded: object) -> Diverged:
        after = "before the first event" if self.event is None else f"after event {show(self.event)}"
        return Diverged(f"line {number}: {after}\n  recorded: {show(recorded)}\n  replayed: {show(now)}")


def show(value: object, width: int = 600) -> str:
    """A record as the trace has it, cut where it is long."""
    if isinstance(value, str):
        return value
    text = json.dumps(converter().unstructure(value, unstructure_as=Record), separators=(",", ":"))
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"


def until_cut(records: Iterable[T]) -> Iterator[T]:
    """All but a last one that is half there: whoever reads these finds no end behind them."""
    with suppress(LineCutShort):
        yield from records


def replay(header: Header, records: Iterable[tuple[int, Record]], until: int | None = None) -> Replay:
    """Replay all, or up to and including event `until`; raises Diverged."""
    run = Replay.of(header)
    with progress("replayed lines") as step:
        for number, record in until_cut(records):
            if until is not None and isinstance(record, Envelope) and record.seq > until:
                return run
            run.feed(number, record)
            step()
    run.finish()
    return run


def world_json(world: World) -> Any:
    """The world as JSON, for `--until`."""
    return {
        "digest": digest(world),
        "requests": {
            request: {"is": type(state).__name__, **converter().unstructure(state)}
            for request, state in sorted(world.requests.items())
        },
        "slots": converter().unstructure(world.slots),
        "lanes": converter().unstructure(world.lanes),
        "models": converter().unstructure(world.models),
    }


def replay_file(path: Path, until: int | None = None) -> Replay:
    """Raises BadTrace or Diverged."""
    header, records = read(path)
    return replay(header, records, until)
