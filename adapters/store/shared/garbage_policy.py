"""Decides which runs of a shared store are removed, and when that is safe. Pure; used by `garbage_collector.py`.

The problem: several servers use the store, and each may collect. Their clocks differ, a message between them is an
object that is listed some seconds later, and any of them may stop at any point. No run may be removed that a server
has leased or is about to lease.

The protocol has two phases, and compares no clocks:

1. A collector *marks* runs: it writes an object with their names. A server that sees a mark decides for each of the
   names: a run that it has leased, or has used lately, it *keeps*; any other one it stops finding. Only then it writes
   its next *report*: the marks that it has seen, and the names that it keeps.
2. The collector removes a marked run when every live server has reported that it has seen the mark, and none keeps it.
   Then it removes the mark, and servers find again what was kept.

A server writes its first report before it lists the store for the first time. So a server that a collector does not
know yet will list the store later, and will see the mark. A server is dead when its report has not changed while a
collector has watched it for SILENT_S, by that collector's own clock. It has ended, or it cannot reach the store. In
that case it lists the store anew before it finds anything again.

Marks of dead servers are removed, so what they named is found again. Two collectors may mark and remove the same run:
each has asked all servers.

Example: A marks run r. B has leased r and reports {seen: A's mark, keeps: r}. C stops finding r and reports {seen: A's
mark}. A removes nothing but the mark. Had B not leased r, A would have removed it after the later of both reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from attrs import frozen

SILENT_S = 600.0  # a server without a new report for so long is dead
MAX_MARKED = 1024  # names of one mark
# A budget that is exceeded is brought down to this share of it, so that a mark is worth its round.
KEPT_PERCENT = 95


@frozen
class StoredRun:
    """One run in the store. age_s: since it was written or was last known to be used, by the store's clock.

    parent: the name of the run that it continues, as far as that is known. start: tokens before it.
    """

    name: str
    size: int
    age_s: float
    parent: str = ""
    start: int = 0


@frozen
class Mark:
    """Runs that a server is about to remove. name: that of the mark's object."""

    name: str
    owner: str
    runs: frozenset[str]


@frozen
class ServerReport:
    """The last report of one server. silent_s: how long this collector has seen no newer one."""

    server: str
    seen: frozenset[str]
    keeps: frozenset[str]
    silent_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """False if the server has been silent for so long that it counts as dead."""
        return self.silent_s < SILENT_S


@frozen
class Verdict:
    """A server's answer to the marks that it sees. hidden: runs that it stops finding."""

    keeps: frozenset[str]
    hidden: frozenset[str]


def choose_runs_to_mark(
    runs: Sequence[StoredRun], budget: int, max_age_s: float, marked: Collection[str]
) -> tuple[str, ...]:
    """Return the runs to mark: those that are too old, and the oldest ones of what is beyond the budget.

    A run is as young as the youngest one that continues it, so ends go before what they stand on. marked: runs that
    other marks name; they count as gone. budget: bytes, 0 for no limit.
    """
    ages = age_with_continuations(runs)
    left = [run for run in runs if run.name not in marked]
    left.sort(key=lambda run: (-ages[run.name], -run.start, run.name))
    held = sum(run.size for run in left)
    room = budget * KEPT_PERCENT // 100 if budget and held > budget else held
    chosen = list[str]()
    for run in left:
        if len(chosen) == MAX_MARKED or (ages[run.name] <= max_age_s and held <= room):
            break
        chosen.append(run.name)
        held -= run.size
    return tuple(chosen)


def age_with_continuations(runs: Iterable[StoredRun]) -> Mapping[str, float]:
    """Return the age of each run, in seconds, by its name.

    A run is as young as the youngest run that continues it. The later run is of no use without it.
    """
    ages = dict[str, float]()
    for run in sorted(runs, key=lambda run: -run.start):
        ages[run.name] = min(run.age_s, ages.get(run.name, run.age_s))
        # A checkpoint begins later than the run that it stands on, and a run later than the one that it continues.
        ages[run.parent] = min(ages[run.name], ages.get(run.parent, ages[run.name]))
    return ages


def review_marks(marks: Iterable[Mark], used: Collection[str]) -> Verdict:
    """Return what a server does about all marks that it sees, its own included. used: what it leases or used lately."""
    named = frozenset(name for mark in marks for name in mark.runs)
    keeps = named.intersection(used)
    return Verdict(keeps, named - keeps)


def choose_runs_to_remove(mark: Mark, reports: Iterable[ServerReport]) -> frozenset[str] | None:
    """Return the marked runs that may be removed now; None while a live server has not reported the mark."""
    live = [report for report in reports if report.is_live]
    if any(mark.name not in report.seen for report in live):
        return None
    return mark.runs.difference(*(report.keeps for report in live))


def choose_dead_objects(marks: Iterable[Mark], reports: Mapping[str, ServerReport]) -> tuple[list[str], list[str]]:
    """Return (names of marks whose server is dead, servers that are dead and have no mark left).

    A server is known by its report. Reports are removed last, so no mark is left that no server would remove.
    """
    dead = {server for server, report in reports.items() if not report.is_live}
    orphans = [mark for mark in marks if mark.owner in dead or mark.owner not in reports]
    owners = {mark.owner for mark in orphans}
    return [mark.name for mark in orphans], sorted(dead - owners)
