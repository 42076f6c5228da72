"""Time for the core, which has no clock: a timer is asked for, and an event says that it has elapsed."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from attrs import frozen

TimerName: TypeAlias = Literal["snapshot_quiet", "snapshot_patience", "trim_interval", "trim_patience"]


@frozen
class StartTimer:
    """Post the event `TimerElapsed` with the same name and number after `delay_ns` nanoseconds.

    A timer is never stopped. The core ignores the event of a timer that it no longer waits for.
    """

    outcomes: ClassVar = ()
    name: TimerName
    number: int  # timers are counted from 1, so each number is used once
    delay_ns: int
