"""What a lookup finds: which entries hold a prefix, leased until its rows are restored or released; or why nothing."""

from __future__ import annotations

from attrs import frozen

from adapters.store.index import Entry
from adapters.store.tier import Place


@frozen(eq=False)
class Part:
    """Rows `[start, stop)` of a sequence, in one entry. A checkpoint's are those of its block."""

    place: Place
    entry: Entry
    start: int
    stop: int


@frozen(eq=False)
class Lease:
    """Its entries stay until it is released.

    parts: the target's rows. draft: those of the draft, which end where the target's end and may begin later. state:
    the checkpoint at `length`, for a target that needs one.
    """

    parts: tuple[Part, ...]
    length: int  # tokens
    draft: tuple[Part, ...] = ()
    state: Part | None = None

    @property
    def place(self) -> Place:
        """Where most of it is."""
        host = sum(part.stop - part.start for part in self.parts if part.place == "host")
        return "host" if 2 * host >= self.length else "disk"

    @property
    def all(self) -> tuple[Part, ...]:
        return (*self.parts, *self.draft, *(() if self.state is None else (self.state,)))


@frozen
class Miss:
    """Nothing beyond what was known already. reason: machine-readable. length: tokens that are kept all the same."""

    reason: str
    length: int = 0
