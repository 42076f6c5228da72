"""Counts the exchanges of steps with a daemon, for `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define


@define
class HopCounter:
    """The exchanges of steps with one daemon. ns: their time without the daemon's computing, computed_ns: that."""

    count: int = 0
    ns: int = 0
    computed_ns: int = 0

    def add(self, waited_ns: int, computed_ns: int) -> None:
        """Count one exchange. waited_ns: the whole time of it. computed_ns: the part that the daemon reports."""
        self.count += 1
        self.ns += max(0, waited_ns - computed_ns)
        self.computed_ns += computed_ns

    def build_figures(self) -> Mapping[str, float]:
        return {"hops": self.count, "hop_seconds": self.ns / 1e9, "compute_seconds": self.computed_ns / 1e9}
