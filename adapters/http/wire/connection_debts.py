"""Record what each open connection owes the server, and find the connection that makes room for a newcomer.

A connection owes something whenever its client has to act before the server can go on. The client may have to send a
head or a body, read an answer, or close. Such a connection costs a client nothing, so anybody could fill a server that
may not close it. A connection that owes nothing is being answered, and it is never closed for another one.

The rule: the kind of debt that most connections have loses its oldest connection. So clients that hold bodies displace
each other. They displace neither the idle connections of a client library nor clients that send their heads at once.
The age counts from the beginning of the debt, or from the last `INSTALMENT` of it that was paid. An upload that goes on
is therefore younger than one that stands still.

Bodies take memory, so at most `MOST_BODIES` connections may owe one at a time. Each debt also has a limit in seconds,
whether or not there is room: see `docs/RELIABILITY.md`.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

from attrs import define, field

INSTALMENT = 1 << 16  # bytes of a body or an answer that renew the debt of its connection
MOST_BODIES = 2048  # a body that stops after 64 KiB takes 160 KiB of memory: 320 MiB for all

C = TypeVar("C")


class Debt(Enum):
    """The thing that a client has to do before its connection can go on."""

    HEAD = "head"  # send a request's head, or the rest of one
    REQUEST = "request"  # send a further request on a connection that is kept alive
    BODY = "body"  # send the rest of a body that a handler waits for
    READING = "reading"  # read what the server has written
    CLOSING = "closing"  # send the rest of a body that no handler reads, or close


@define(eq=False)
class DebtLedger(Generic[C]):
    """All open connections by what they owe. Those of each kind are ordered by age, the oldest debt first."""

    _debts: dict[C, Debt | None] = field(factory=dict)
    _connections_by_debt: dict[Debt, dict[C, float]] = field(factory=lambda: {debt: {} for debt in Debt})

    def __len__(self) -> int:
        return len(self._debts)

    def add(self, connection: C, debt: Debt, now: float) -> None:
        """Add a connection that was opened and owes this."""
        self._debts[connection] = debt
        self._connections_by_debt[debt][connection] = now

    def record(self, connection: C, debt: Debt | None, now: float) -> None:
        """Set what an open connection owes from now on; None: nothing. Recording the same debt again does not change
        its age.
        """
        before = self._debts.get(connection)
        if before is debt or connection not in self._debts:
            return
        self._debts[connection] = debt
        if before is not None:
            del self._connections_by_debt[before][connection]
        if debt is not None:
            self._connections_by_debt[debt][connection] = now

    def renew(self, connection: C, now: float) -> None:
        """Make a debt as young as a new one, as the connection has paid an instalment."""
        if (debt := self._debts.get(connection)) is not None:
            del self._connections_by_debt[debt][connection]
            self._connections_by_debt[debt][connection] = now

    def remove(self, connection: C) -> None:
        """Remove a connection that was closed."""
        if (debt := self._debts.pop(connection, None)) is not None:
            del self._connections_by_debt[debt][connection]

    def is_open(self, connection: C) -> bool:
        """Return whether the connection is open."""
        return connection in self._debts

    def find_excess(self, debt: Debt, most: int) -> C | None:
        """Return the oldest connection with this debt, if more than `most` have it."""
        line = self._connections_by_debt[debt]
        return next(iter(line)) if len(line) > most else None

    def find_oldest(self) -> tuple[C, float] | None:
        """Return the connection that is closed first, and when its debt began. None: every connection is being
        answered.
        """
        fullest = max(self._connections_by_debt.values(), key=len)
        return next(iter(fullest.items()), None)
