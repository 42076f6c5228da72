"""The gate of a snapshot: what the core allows it, and how long it may wait for host memory.

The event loop changes the pace and the saver's thread obeys (`saver.py`). A gate is closed at first.
"""

from __future__ import annotations

from queue import SimpleQueue

from attrs import define, field

from effects.pacing import PaceSnapshot


@define(eq=False)
class PaceGate:
    """The pace of one snapshot. The event loop sets it. Between two runs the saver's thread waits until it may copy.

    changed: gets an item when the thread should look again, because the pace has changed or memory has come free.
    """

    pace: PaceSnapshot = field(factory=PaceSnapshot)
    waited_ns: int = 0  # for host memory
    changed: SimpleQueue[None] = field(factory=SimpleQueue)

    def set_pace(self, pace: PaceSnapshot) -> None:
        """Change the pace, and wake the saver's thread. Called on the event loop."""
        self.pace = pace
        self.changed.put(None)

    def wait_until_open(self) -> None:
        """Wait until the next run may be copied."""
        while not self.pace.may_copy:
            self.changed.get()

    def compute_memory_wait(self, left_ns: int) -> int:
        """Return how long the snapshot may still wait for host memory. left_ns: to the end of all snapshots' limit."""
        most_ns = self.pace.memory_wait_ns
        return left_ns if most_ns is None else min(left_ns, most_ns - self.waited_ns)
