"""The entries of /props that the engine adds, as one typed object. They become JSON only when an answer is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

from effects.ports import Stage
from engine.settings.output.live_figures import LiveFigures
from engine.settings.output.server_facts import ServerFacts
from states.rates import Rates
from states.residency import ResidencyReport


@frozen
class DecodePace:
    """The pace of decode steps: the latency target, and what steps keep now.

    is_even: steps keep an even pace, because prompts wait. interval_ms: the least time from one step to the next one.
    """

    latency_target_ms: float
    is_even: bool
    interval_ms: float


@frozen
class EngineProps:
    """Implements `Props`.

    facts: None without a loaded model. kv_pages: shared pages by use; empty if each slot has rows of its own. requests:
    those that are live, by stage.
    """

    facts: ServerFacts | None
    live: LiveFigures
    kv_pages: Mapping[str, int]
    rates: Rates
    pace: DecodePace
    residency: ResidencyReport
    requests: Mapping[Stage, int]

    def build_json(self) -> Mapping[str, Any]:
        """Return the entries by name, as /props has them."""
        return {
            **({} if self.facts is None else self.facts.build_json()),
            **self.live.build_json(),
            "kv_pages": self.kv_pages,
            "rates_ns": show_rates(self.rates),
            "decode_pace": asdict(self.pace),
            "runtime": {"draft_residency": asdict(self.residency)},
            "requests": self.requests,
        }


def show_rates(rates: Rates) -> Mapping[str, Any]:
    """Return what /props shows as `rates_ns`, with the loading times as `host` and `disk`, 0 at first."""
    shown = asdict(rates, recurse=False)
    loads = shown.pop("loads")
    shown["copied"] = [asdict(gains) for gains in rates.copied]
    return {"host": 0, "disk": 0, **loads, **shown}
