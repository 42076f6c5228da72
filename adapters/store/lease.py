"""What a lookup finds: which entries hold a prefix, leased until its rows are restored or released; or why nothing."""

from __future__ import annotations

from attrs import field, frozen

from adapters.store.block_index import Entry
from adapters.store.tier import StateCheckpoint
from effects.ports import Divergence


@frozen(eq=False)
class Part:
    """Rows `[start, stop)` of a sequence, in one entry. A checkpoint's are those of its block."""

    place: StateCheckpoint
    entry: Entry
    start: int
    stop: int


@frozen(eq=False)
class Lease:
    """Its entries stay until it is released.

    parts: the target's rows, from where the slot has none. draft: those of the draft, which end where the target's end
    and may begin later. states: for a target that needs one, checkpoints that could be gone on from, ascending, the
    last one at `length`.
    """

    parts: tuple[Part, ...]
    length: int  # tokens
    draft: tuple[Part, ...] = ()
    states: tuple[Part, ...] = ()
    diverged: Divergence | None = None  # from what else is kept, where it ends

    @property
    def place(self) -> StateCheckpoint:
        """Where most of it is."""
        host, whole = (
            sum(part.stop - part.start for part in (*self.parts, *self.states[-1:]) if part.place in places)
            for places in (("host",), ("host", "disk"))
        )
        return "host" if 2 * host >= whole else "disk"

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(part.stop for part in self.states)

    @property
    def all(self) -> tuple[Part, ...]:
        return (*self.parts, *self.draft, *self.states)


@frozen
class Miss:
    """Nothing beyond what was known already. reason: machine-readable. length: tokens that are kept all the same."""

    reason: str
    length: int = 0
    diverged: Divergence | None = field(default=None, eq=False)
