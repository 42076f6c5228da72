"""Replay: fold the recorded events again and compare every effect and digest with the recorded ones.

It needs no model, and no clock: timers are effects, and that they have elapsed is in the trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field

from engine.core.event_loop import Envelope
from engine.core.trace import UNREADABLE, Digest, Header, LineCutShort, Record, converter, digest, read_trace
from engine.settings.output.progress import count_progress
from states.machine import IllegalEvent
from states.world import Output, World, advance, make_world

T = TypeVar("T")
CUT_SHORT = 3  # exit status: of a trace that has no end, and agrees as far as it goes


class ReplayDiffers(Exception):
    """The same events no longer lead to the same decisions. The message shows event, expected and actual."""


class TraceCutShort(ReplayDiffers):
    """The trace has no end, and everything that is in it agrees.

    Its server was killed or still runs, or the trace has ended early: a disk was full or too slow (`Recorder`).
    """


@define
class Replay:
    """Takes records in order, and `finish` at the end. Raises ReplayDiffers at the first difference."""

    world: World
    event: Envelope | None = None
    expected: list[Output] = field(factory=list["Output"])
    events: int = 0
    is_complete: bool = False

    @classmethod
    def from_header(cls, header: Header) -> Replay:
        """Begin with the world that the header of a trace describes."""
        return cls(make_world(header.settings))

    def feed(self, number: int, record: Record) -> tuple[Output, ...]:
        """Take the next record. Returns what it asks for if it is an event, else nothing. number: of its line."""
        if self.is_complete:
            raise self.build_difference(number, "nothing after the last digest", record)
        if isinstance(record, Envelope):
            return self.fold_event(number, record)
        if isinstance(record, Digest):
            self.compare_digest(number, record)
        elif not self.expected or self.expected[0] != record:
            raise self.build_difference(number, self.expected[0] if self.expected else "no (further) effect", record)
        else:
            self.expected.pop(0)
        return ()

    def fold_event(self, number: int, envelope: Envelope) -> tuple[Output, ...]:
        """Fold a recorded event and return what it asks for now, which the next records must be equal to."""
        if self.expected:
            raise self.build_difference(number, self.expected[0], "no (further) effect")
        if envelope.seq != self.events:
            raise ReplayDiffers(
                f"line {number}: event {envelope.seq} where event {self.events} was due: a line is missing"
            )
        self.event = envelope
        try:
            self.world, outs = advance(self.world, envelope.happened)
        except (IllegalEvent, AssertionError, *UNREADABLE) as error:  # a trace is hostile input
            raise ReplayDiffers(f"line {number}: {format_record(envelope)}\n  cannot happen here: {error!r}") from error
        self.expected = list(outs)
        self.events += 1
        return outs

    def compare_digest(self, number: int, recorded: Digest) -> None:
        """Compare the digest of the world with a recorded one."""
        if self.expected:
            raise self.build_difference(number, self.expected[0], "no (further) effect")
        now = digest(self.world)
        if recorded.seq != self.events - 1 or recorded.world != now:
            raise self.build_difference(number, Digest(self.events - 1, now, recorded.last), recorded)
        self.is_complete = recorded.last

    def finish(self, executed: int | None = None) -> None:
        """End the replay at the end of the trace. Raises TraceCutShort if the trace has no last digest.

        executed: as in `summary`.
        """
        if self.is_complete:
            return
        where = f"after event {self.events - 1}" if self.events else "before its first event"
        missing = " What came of the last event was not recorded to its end." if self.expected else ""
        more = "" if executed is None else f" {executed} tokens were executed, and are the recorded ones."
        raise TraceCutShort(
            f"the trace was cut short {where}: its server was killed, could not write on, or still runs.\n"
            f"  replayed: {self.events} events, and everything that was recorded of them agrees.{missing}{more}"
        )

    def summary(self, executed: int | None) -> str:
        """Return the result in a line. executed: number of tokens that were computed again; None if none were to be."""
        more = "" if executed is None else f", {executed} tokens executed"
        return f"identical: {self.events} events{more}, world {digest(self.world)}"

    def build_difference(self, number: int, now: object, recorded: object) -> ReplayDiffers:
        """Return the error that shows what was recorded in a line and what is decided now."""
        after = "before the first event" if self.event is None else f"after event {format_record(self.event)}"
        return ReplayDiffers(
            f"line {number}: {after}\n  recorded: {format_record(recorded)}\n  replayed: {format_record(now)}"
        )


def format_record(value: object, width: int = 600) -> str:
    """Return a record as the trace has it, shortened to `width` characters."""
    if isinstance(value, str):
        return value
    text = json.dumps(converter().unstructure(value, unstructure_as=Record), separators=(",", ":"))
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"


def until_cut_line(records: Iterable[T]) -> Iterator[T]:
    """Yield all records but a last one that is incomplete. The reader then finds no last digest."""
    with suppress(LineCutShort):
        yield from records


def replay(header: Header, records: Iterable[tuple[int, Record]], until: int | None = None) -> Replay:
    """Replay all records, or up to and including event `until`. Raises ReplayDiffers."""
    run = Replay.from_header(header)
    with count_progress("replayed lines") as step:
        for number, record in until_cut_line(records):
            if until is not None and isinstance(record, Envelope) and record.seq > until:
                return run
            run.feed(number, record)
            step()
    run.finish()
    return run


def world_json(world: World) -> Any:
    """Return the world as JSON values, for `--until`."""
    return {
        "digest": digest(world),
        "requests": {
            request: {"is": type(state).__name__, **converter().unstructure(state)}
            for request, state in sorted(world.requests.items())
        },
        "slots": converter().unstructure(world.slots),
        "lanes": converter().unstructure(world.lanes),
        "models": converter().unstructure(world.models),
        "pacing": converter().unstructure(world.pacing),
    }


def replay_file(path: Path, until: int | None = None) -> Replay:
    """Replay a trace from a file. Raises BadTrace or ReplayDiffers."""
    header, records = read_trace(path)
    return replay(header, records, until)
