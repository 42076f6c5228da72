"""The figures of a store and of its tiers. Metrics and the log read them, and /props shows them as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import asdict, field, frozen

from effects.ids import Tier

TOP: Final[Tier] = "disk"  # clients read the figures of this tier at the top of `full_cache`, those of others below it


@frozen
class TierFigures:
    """The figures of one tier.

    bytes: that are kept. budget: bytes that may be kept. evictions: of entries, so far. more: what only this tier
    counts or tells, under the names that /props has.
    """

    bytes: int
    budget: int
    entries: int
    evictions: int
    more: Mapping[str, int | str] = field(factory=dict[str, int | str])

    def get_count(self, name: str) -> int:
        """Return one of `more` that is a number."""
        count = self.more[name]
        assert isinstance(count, int)
        return count

    def build_json(self) -> Mapping[str, Any]:
        """Return the figures as /props has them."""
        common = {"bytes": self.bytes, "budget": self.budget, "entries": self.entries, "evictions": self.evictions}
        return {**common, **self.more}


NO_TOP: Final = TierFigures(0, 0, 0, 0, {"quarantined": 0})  # in place of the figures of `TOP` where it is missing


@frozen
class RestoreTotals:
    """The sum of all restores so far from one tier."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@frozen
class StoreFigures:
    """The figures of a store.

    tiers: the quickest first. hits: lookups that found more than the device had, by tier. misses: those that did not,
    by reason. dropped_rows, dropped_draft_rows: rows that snapshots did not keep. recent: prompts that scope `auto`
    compares with.
    """

    tiers: Mapping[Tier, TierFigures]
    hits: Mapping[str, int]
    misses: Mapping[str, int]
    restores: Mapping[str, RestoreTotals]
    leases: int
    dropped_rows: int
    dropped_draft_rows: int
    recent: int

    @property
    def top(self) -> TierFigures:
        return self.tiers.get(TOP, NO_TOP)

    @property
    def others(self) -> Mapping[Tier, TierFigures]:
        """The figures of all tiers but the one at the top."""
        return {name: figures for name, figures in self.tiers.items() if name != TOP}

    def build_json(self) -> Mapping[str, Any]:
        """Return what /props shows as `full_cache`: the figures of each tier by its name, and the disk's at the top."""
        return {
            "disk_policy": "full" if TOP in self.tiers else "off",
            **self.top.build_json(),
            **{name: figures.build_json() for name, figures in self.others.items()},
            "hits": self.hits,
            "misses": self.misses,
            "restores": {tier: asdict(totals) for tier, totals in self.restores.items()},
            "leases": self.leases,
            "dropped_rows": self.dropped_rows,
            "dropped_draft_rows": self.dropped_draft_rows,
            "recent": self.recent,
        }
