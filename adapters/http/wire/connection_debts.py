"""What each open connection owes the server, and which connection makes room for a newcomer.

A connection owes something whenever its client has to act before the server can go on: send a head or a body, read an
answer, or close. Holding such a connection costs a client nothing, so a server that may not close it can be filled by
anybody. A connection that owes nothing is being answered: it is never closed for another one.

The rule: the kind of debt that most connections have loses its oldest connection. So clients that hold bodies displace
each other, and neither the idle connections of a client library nor clients that send their heads at once. The age
counts from the beginning of the debt, or from the last `INSTALMENT` of it that was paid: an upload that goes on is
younger than one that stands still.

Of bodies, which take memory, there is a limit to how many are owed at a time (`MOST_BODIES`).

Each debt also has a limit in seconds, room or not: see `docs/RELIABILITY.md`.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

from attrs import define, field

INSTALMENT = 1 << 16  # bytes of a body, or of an answer, that make its connection young again
MOST_BODIES = 2048  # 160 KiB of memory each, where 64 KiB of it have come and no more comes: 320 MiB

C = TypeVar("C")


class Debt(Enum):
    """What a client has to do before its connection can go on."""

    HEAD = "head"  # send a request's head, or the rest of one
    REQUEST = "request"  # send a further request on a connection that is kept alive
    BODY = "body"  # send the rest of a body that somebody waits for
    READING = "reading"  # read what the server has written
    CLOSING = "closing"  # send the rest of a body that nobody wants, or close


@define(eq=False)
class DebtLedger(Generic[C]):
    """All open connections by what they owe; those of each kind with the oldest debt first."""

    _debts: dict[C, Debt | None] = field(factory=dict)
    _lines: dict[Debt, dict[C, float]] = field(factory=lambda: {debt: {} for debt in Debt})

    def __len__(self) -> int:
        return len(self._debts)

    def add(self, connection: C, debt: Debt, now: float) -> None:
        """A connection is open, and owes this."""
        self._debts[connection] = debt
        self._lines[debt][connection] = now

    def record(self, connection: C, debt: Debt | None, now: float) -> None:
        """An open connection owes this from now on; None: nothing. Recording the same debt again leaves its age."""
        before = self._debts.get(connection)
        if before is debt or connection not in self._debts:
            return
        self._debts[connection] = debt
        if before is not None:
            del self._lines[before][connection]
        if debt is not None:
            self._lines[debt][connection] = now

    def renew(self, connection: C, now: float) -> None:
        """The connection has paid an instalment, so its debt is as young as a new one."""
        if (debt := self._debts.get(connection)) is not None:
            del self._lines[debt][connection]
            self._lines[debt][connection] = now

    def remove(self, connection: C) -> None:
        """The connection is closed."""
        if (debt := self._debts.pop(connection, None)) is not None:
            del self._lines[debt][connection]

    def knows(self, connection: C) -> bool:
        """Return whether the connection is open."""
        return connection in self._debts

    def beyond(self, debt: Debt, most: int) -> C | None:
        """Return the oldest connection with this debt, if more than `most` have it."""
        line = self._lines[debt]
        return next(iter(line)) if len(line) > most else None

    def oldest(self) -> tuple[C, float] | None:
        """Return the connection that goes first, and when its debt began. None: every one is being answered."""
        fullest = max(self._lines.values(), key=len)
        return next(iter(fullest.items()), None)
