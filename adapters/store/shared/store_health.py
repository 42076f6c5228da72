"""Decides when a shared store counts as lost, when it is tried again, and how long one operation may take. Pure.

The problem: a request must not wait for a store that is gone or slow. Each operation has a limit. The first one that
fails takes the whole tier away: nothing is found in it, and nothing is written to it. So an outage costs the requests
that were reading at that moment one limit each, and later requests nothing. From then on only the tier's own thread
tries the store, with growing pauses; what it tries is a whole refresh. When one succeeds, the tier is back.

A store that answers small questions and fails at large ones would come and go. So failures that follow one another
within SOUND_S make the pause grow, although successes lie between them.
"""

from __future__ import annotations

from attrs import evolve, frozen

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SOUND_S = 120.0  # the store has worked for so long: earlier failures are forgotten
# The limit of a read, for which a request waits: a second and a half, and what its bytes take at the least speed that
# is of use. Eight are under way at once, so a whole restore comes at 32 MiB/s at least.
BASE_LIMIT_S = 1.5
LEAST_BYTES_A_S = 4 << 20
# No request waits for listings and writes, of which several share the way to the store.
PATIENCE_S = 10.0
LEAST_WRITTEN_BYTES_A_S = 1 << 20
# A refresh takes at most a tenth of the thread's time, and begins every REFRESH_S while listing is quick.
REFRESH_S = 5.0
REFRESH_SHARE = 10
LONGEST_REFRESH_S = 120.0


@frozen
class StoreHealth:
    """The state of a store. trouble: why it is not used, in one line; empty while it is.

    failures: that followed one another. failed_s: time of the last one. retry_s: time of the next try.
    """

    trouble: str = ""
    failures: int = 0
    failed_s: float = 0.0
    retry_s: float = 0.0

    @property
    def is_usable(self) -> bool:
        return not self.trouble


def record_failure(health: StoreHealth, now_s: float, why: str) -> StoreHealth:
    """Take the store away. Operations that were under way fail at the same time; they count as one failure."""
    if not health.is_usable and now_s < health.retry_s:
        return health
    recent = health.failures if now_s - health.failed_s <= SOUND_S else 0
    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(recent, 16))
    return StoreHealth(why or "the store failed", recent + 1, now_s, now_s + pause)


def record_refresh(health: StoreHealth) -> StoreHealth:
    """Take the store back after a refresh that worked. Its failures are forgotten later, by `record_failure`."""
    return evolve(health, trouble="")


def choose_pause(health: StoreHealth, now_s: float, refresh_took_s: float) -> float:
    """Return the seconds until the next refresh begins."""
    if not health.is_usable:
        return max(0.0, health.retry_s - now_s)
    return min(LONGEST_REFRESH_S, max(REFRESH_S, REFRESH_SHARE * refresh_took_s))


def compute_limit(size: int) -> float:
    """Return the seconds that a read of this many bytes may take."""
    return BASE_LIMIT_S + size / LEAST_BYTES_A_S


def compute_patient_limit(size: int) -> float:
    """Return the seconds that any other operation may take; size: bytes that it writes."""
    return PATIENCE_S + size / LEAST_WRITTEN_BYTES_A_S
