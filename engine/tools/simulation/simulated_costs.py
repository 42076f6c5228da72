"""The costs of a simulation: times, and bytes of a token's rows, measured or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

from effects.ids import Tier
from engine.settings.user_error import UserError
from states.rates import Rates
from states.routing.route_prices import SHARED_TIER

# The number of position ranges that the world's rates distinguish: up to 2**19 tokens.
SPANS = 10
MOST_FILE = 1 << 16  # bytes


@frozen
class Costs:
    """Costs in nanoseconds, unless a name says otherwise. A cost that depends on the position p is a + b * p."""

    source: str = "the demo in bf16 on two cores"
    token_bytes: int = 2560  # KV rows of one token
    state_bytes: int = 0  # bytes of a checkpoint of recurrent state; 0: the model has none
    prefill: int = 185_000  # one prompt token, in a chunk, at position 0
    prefill_slope: float = 69.0  # added for each token before it
    decode: int = 6_200_000  # one token of one answer at position 0
    decode_slope: float = 560.0
    decode_more: int = 1_000_000  # for each further request in the same decode step
    # With a draft or copies: tokens that a decode step gives on average, and its time over that of a plain one.
    tokens_per_step: float = 1.0
    step_price: float = 1.0
    host: int = 600  # load one token's rows from host memory
    disk: int = 4_300  # load one token's rows from disk
    shared: int = 21_000  # load one token's rows from the shared tier of a fleet: 1 Gbit/s
    share: int = 21_000  # write one token's rows to it, in the background
    copy: int = 500  # copy one token's rows from slot to slot, or out of a slot to keep them
    write: int = 6_000  # write one token's rows in the background
    drafter: int = 20_000  # to score one prompt token: a ninth of computing it
    find: int = 40  # look up one prompt token in the index
    stored: float = 1.0  # bytes on disk for each byte of rows; below 1 if files are compressed
    file: int = 2400  # bytes of a file besides its rows and token ids
    launch: int = 190_000  # the engine's own time for one launch

    def __attrs_post_init__(self) -> None:
        for name, value in list_figures(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
                raise ValueError(f"{name} is {str(value)[:40]}; accepted: a number from 0")
        if min(self.tokens_per_step, self.step_price) < 1:
            raise ValueError("tokens_per_step and step_price: accepted: a number from 1")
        if self.token_bytes < 1 or self.token_bytes != int(self.token_bytes):
            raise ValueError(f"token_bytes is {self.token_bytes}; accepted: an integer from 1")
        if self.state_bytes != int(self.state_bytes):
            raise ValueError(f"state_bytes is {self.state_bytes}; accepted: an integer from 0")

    @property
    def loads(self) -> Mapping[Tier, int]:
        """The nanoseconds to load one token's rows from each tier that a simulation has."""
        return {"host": self.host, "disk": self.disk}

    @property
    def state_tokens(self) -> int:
        """The tokens whose rows take as long to move as a checkpoint."""
        return -(-self.state_bytes // self.token_bytes)

    def chunk_ns(self, start: int, stop: int) -> int:
        """Return the time to compute the rows `[start, stop)` in one launch."""
        middle = (start + stop) / 2
        return self.launch + round((stop - start) * (self.prefill + self.prefill_slope * middle))

    def decode_ns(self, positions: list[int]) -> int:
        """Return the time of one token each for requests whose last tokens are at these positions.

        Where a step gives several tokens, that is a token's share of the step.
        """
        alone = self.decode + self.decode_slope * max(positions)
        plain = self.launch + alone + self.decode_more * (len(positions) - 1)
        return round(plain * self.step_price / self.tokens_per_step)

    def mixed_ns(self, positions: list[int], start: int, stop: int) -> int:
        """Return the time of both in one forward: the sum of both, less one launch."""
        return self.decode_ns(positions) + self.chunk_ns(start, stop) - self.launch

    def build_rates(self, *, shared: bool = False) -> Rates:
        """Return the rates that the engine would have measured at its start: nanoseconds per token.

        Prefill has one for each span of positions (`states/rates.py`), from its middle. shared: with a shared tier.
        """
        edges = [0, *(1024 << span for span in range(SPANS))]
        prefill = [
            max(1, round(self.prefill + self.prefill_slope * (start + stop) / 2)) for start, stop in pairwise(edges)
        ]
        loads = {**self.loads, SHARED_TIER: self.shared} if shared else self.loads
        return Rates(tuple(prefill), {tier: max(1, int(cost)) for tier, cost in loads.items()})


def list_figures(costs: Costs) -> dict[str, Any]:
    """Return the figures that are numbers."""
    return attrs.asdict(costs, filter=lambda attribute, _: attribute.name != "source")


def read_costs(path: Path, before: Costs) -> Costs:
    """Return the costs with the figures of a file, a JSON object, in place of some. Raises UserError or OSError."""
    if path.stat().st_size > MOST_FILE:
        raise UserError(f"--costs {path}: larger than {MOST_FILE} bytes")
    known = [field.name for field in attrs.fields(Costs)]
    accepted = f"accepted: a JSON object with any of {', '.join(known)}"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"--costs {path}: no JSON ({error}); {accepted}") from error
    if not isinstance(raw, dict) or (unknown := sorted(raw.keys() - set(known))):
        what = "no JSON object" if not isinstance(raw, dict) else f"unknown: {', '.join(unknown)}"
        raise UserError(f"--costs {path}: {what}; {accepted}")
    try:
        return evolve(before, **{"source": f"{path.name}; what it does not name: {before.source}", **raw})
    except (TypeError, ValueError) as error:
        raise UserError(f"--costs {path}: {error}") from error


@frozen
class MeasuredCosts:
    """Costs from recorded outcomes: pairs of a position and the nanoseconds of a prefilled token or a decode step."""

    chunks: tuple[tuple[float, float], ...] = ()
    decode_steps: tuple[tuple[float, float], ...] = ()
    loads: Mapping[str, tuple[float, ...]] = attrs.field(factory=dict)  # tier -> nanoseconds a token
    token_bytes: int = 0
    state_tokens: int = 0

    def apply_to(self, costs: Costs, source: str) -> Costs:
        """Return the costs with measured figures in place of assumed ones. Without measurements they are unchanged."""
        changes: dict[str, Any] = {}
        if self.chunks:
            changes["prefill"], changes["prefill_slope"] = fit_line(self.chunks)
        if self.decode_steps:
            changes["decode"], changes["decode_slope"] = fit_line(self.decode_steps)
        changes |= {tier: round(compute_median(values)) for tier, values in self.loads.items() if values}
        if self.token_bytes:
            changes["token_bytes"] = self.token_bytes
        if self.state_tokens:
            changes["state_bytes"] = self.state_tokens * (self.token_bytes or costs.token_bytes)
        if not changes:
            return costs
        return evolve(costs, **changes, source=f"{source} ({', '.join(sorted(changes))}); the rest {costs.source}")


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[int, float]:
    """Return (a, b) of the least squares fit y = a + b * x, with neither of them below 0."""
    listed = list(points)
    mean_x = sum(x for x, _ in listed) / len(listed)
    mean_y = sum(y for _, y in listed) / len(listed)
    spread = sum((x - mean_x) ** 2 for x, _ in listed)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in listed) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
    return round(mean_y - slope * mean_x), slope


def compute_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
