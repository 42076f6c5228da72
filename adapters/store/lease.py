"""The outcome of a lookup: the entries that hold a prefix, leased until they are released, or the reason of a miss."""

from __future__ import annotations

from attrs import field, frozen

from adapters.store.block_index import Entry
from effects.ids import Tier
from effects.ports import Divergence


@frozen(eq=False)
class LeasedPart:
    """The rows `[start, stop)` of a sequence that are in one entry.

    For a checkpoint, they are the rows of the block that ends at its position.
    """

    tier: Tier
    entry: Entry
    start: int
    stop: int


@frozen(eq=False)
class Lease:
    """A kept prefix whose entries stay until it is released.

    parts: the target's rows, ascending and without a gap, up to `length`. They begin at row 0, though the slot may have
    the first ones; for a target with positional state, at the first block that the slot does not have in full.
    draft: the draft's rows. They end where the target's rows end, and may begin later.
    states: for a target that needs one, checkpoints from which it could continue, ascending, the last one at `length`.
    """

    parts: tuple[LeasedPart, ...]
    length: int  # tokens
    draft: tuple[LeasedPart, ...] = ()
    states: tuple[LeasedPart, ...] = ()
    diverged: Divergence | None = None  # where the prompt leaves all kept sequences, and the tokens that one has there
    tier: Tier = "none"  # the tier that has most of it

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(part.stop for part in self.states)

    @property
    def all_parts(self) -> tuple[LeasedPart, ...]:
        return (*self.parts, *self.draft, *self.states)


@frozen
class Miss:
    """Nothing is kept beyond what the slot has. reason: machine-readable. length: tokens that are kept all the same."""

    reason: str
    length: int = 0
    diverged: Divergence | None = field(default=None, eq=False)
