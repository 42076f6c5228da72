"""The outcome of a lookup: the entries that hold a prefix, leased until they are released, or the reason of a miss."""

from __future__ import annotations

from attrs import field, frozen

from adapters.store.block_index import Entry
from effects.ids import Tier
from effects.ports import Divergence


@frozen(eq=False)
class LeasedPart:
    """Rows `[start, stop)` of a sequence, in one entry. A checkpoint's are those of its block."""

    tier: Tier
    entry: Entry
    start: int
    stop: int


@frozen(eq=False)
class Lease:
    """A kept prefix whose entries stay until it is released.

    parts: the target's rows, from where the slot has none. draft: those of the draft, which end where the target's end
    and may begin later. states: for a target that needs one, checkpoints that could be gone on from, ascending, the
    last one at `length`.
    """

    parts: tuple[LeasedPart, ...]
    length: int  # tokens
    draft: tuple[LeasedPart, ...] = ()
    states: tuple[LeasedPart, ...] = ()
    diverged: Divergence | None = None  # from what else is kept, where it ends
    tier: Tier = "none"  # the one that most of it comes from

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(part.stop for part in self.states)

    @property
    def all_parts(self) -> tuple[LeasedPart, ...]:
        return (*self.parts, *self.draft, *self.states)


@frozen
class Miss:
    """Nothing kept beyond what the slot has. reason: machine-readable. length: tokens that are kept all the same."""

    reason: str
    length: int = 0
    diverged: Divergence | None = field(default=None, eq=False)
