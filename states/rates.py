"""How long things take here, in nanoseconds, as far as decisions depend on it. Folded from acknowledgements only."""

from __future__ import annotations

from attrs import frozen


@frozen
class Rates:
    """0, or nothing, where nothing has been measured.

    prefill: to compute one prompt token, by where it stands: [0, 1024), [1024, 2048), [2048, 4096), doubling.
    host, disk: to load one token's rows. rounds: (proposals, a whole round of one request that has so many), ascending.
    """

    prefill: tuple[int, ...] = ()
    host: int = 0
    disk: int = 0
    rounds: tuple[tuple[int, int], ...] = ()

    def __attrs_post_init__(self) -> None:
        """Rates also come out of traces, which are hostile input."""
        spans = [number for pair in self.rounds for number in pair]
        if min((*self.prefill, self.host, self.disk, *spans), default=0) < 0 or len(self.prefill) > 64:
            raise ValueError(f"rates that cannot be: {self}")
