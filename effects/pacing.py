"""Pace of background work: snapshots, host memory, and decode steps while prompts are computed.

`states/pacing.py` decides it. No outcome comes back from these effects: they say what holds from now on, until the next
effect of the same type says something else.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import Side


@frozen
class PaceSnapshot:
    """Change what the snapshot of this request may do. The defaults hold until the first of these effects."""

    outcomes: ClassVar = ()
    side: ClassVar = Side.STORE
    may_copy: bool = False  # copy its next run now
    may_grow: bool = True  # pin more host memory for it, which takes several times as long as the copies
    # It may wait so long for host memory in all. Then rows without memory are dropped. None: the core sets no limit.
    memory_wait_ns: int | None = None


@frozen
class PaceSteps:
    """Begin, change or end the even pace of decode steps, which leaves the device to prompts between two steps."""

    outcomes: ClassVar = ()
    side: ClassVar = Side.DEVICE
    evenly: bool
    interval_ns: int = 0  # from the end of one step to the end of the next one, at least, while the pace is even


@frozen
class PaceMemory:
    """Pin host memory with pauses between two slabs, because requests are served, or without."""

    outcomes: ClassVar = ()
    side: ClassVar = Side.STORE
    gently: bool


@frozen
class TrimMemory:
    """Give free memory back to the system. It is done on the device lane, between two launches."""

    outcomes: ClassVar = ()
    side: ClassVar = Side.DEVICE
