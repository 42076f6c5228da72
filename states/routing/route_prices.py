"""Prices of routes: how long a replica takes until a whole prompt is there, from its rates and what it holds.

The times are those that a replica plans restores with (`states/rates.py`). They are summed up once for each set of
rates, so that a price takes a microsecond. A replica may also compute rows while it loads others (`choose_load_start`
in `states/policy.py`). That is left out here: it makes a restore at most twice as quick, and does so on every replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from attrs import frozen

from effects.ids import Tier
from states.rates import FIRST_SPAN, Rates, estimate_prefill_time, fill_gaps, find_span

UNKNOWN_NS = 1  # of computing one token, where nothing was measured: the longest prefix wins then
LOCAL_TIERS: tuple[Tier, ...] = ("device", "host", "disk")  # of one replica, the quickest first
SHARED_TIER: Tier = "shared"  # of all replicas
TIERS = (*LOCAL_TIERS, SHARED_TIER)


@frozen
class RoutePrices:
    """The times that one set of rates predicts, prepared so that a price takes a microsecond. Spans: as in `Rates`.

    before: for each span, nanoseconds to compute all tokens before it. times: for each span, nanoseconds to compute one
    of its tokens. loads: by tier, nanoseconds to load one token's rows.
    """

    before: tuple[int, ...]
    times: tuple[int, ...]
    loads: Mapping[Tier, int]

    def estimate_prefill_time(self, start: int, stop: int) -> int:
        """Return what `states.rates.estimate_prefill_time` returns, but quicker."""
        return self._sum_before(stop) - self._sum_before(start)

    def _sum_before(self, position: int) -> int:
        last = len(self.times) - 1
        span = min((position // FIRST_SPAN).bit_length(), last)
        start = FIRST_SPAN << span >> 1 if span else 0
        return self.before[span] + (position - start) * self.times[span]

    def estimate_ready_time(self, ends: tuple[int, ...], tokens: int) -> int:
        """Return the nanoseconds until all `tokens` of a prompt are there.

        ends: by tier, as in `TIERS`, the token up to which that tier and those before it have everything. Rows of a
        tier are loaded, or computed where that is quicker.
        """
        total = 0
        at = ends[0]
        for tier, end in zip(TIERS[1:], ends[1:], strict=True):
            if end > at:
                computing = self.estimate_prefill_time(at, end)
                total += min(computing, (end - at) * self.loads.get(tier, 0))
                at = end
        return total + self.estimate_prefill_time(at, max(at, tokens))


@lru_cache(maxsize=1024)
def make_prices(rates: Rates) -> RoutePrices:
    """Return the prices that these rates make."""
    times = fill_gaps(rates.prefill)
    if not any(times):
        times = (UNKNOWN_NS,)
        rates = Rates(times, rates.loads)
    beyond = max(times)
    spans = (*times, beyond)
    edges = [0, *(FIRST_SPAN << span for span in range(len(spans) - 1))]
    before = tuple(estimate_prefill_time(rates, 0, edge) for edge in edges)
    assert find_span(edges[-1]) == len(spans) - 1, edges
    return RoutePrices(before, spans, dict(rates.loads))


def round_rates(rates: Rates) -> Rates:
    """Return the rates that a digest tells: three binary digits of each time that routes depend on.

    Replicas of one kind then tell equal rates, so the router makes one price for all of them.
    """
    loads = {tier: round_time(time) for tier, time in rates.loads.items()}
    return Rates(tuple(map(round_time, rates.prefill)), loads)


def round_time(time: int) -> int:
    """Round to three binary digits."""
    shift = max(0, time.bit_length() - 3)
    return (time + (1 << shift >> 1)) >> shift << shift
