"""The facts that a running server reports of its model, and that never change while it runs.

The loaded model makes them (`LoadedModel.facts`), the core passes them on, and /props shows them as JSON. They stand
below both, since neither of these packages knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen
from attrs.filters import exclude

from effects.model_details import ModelDetails
from states.residency import Policy
from states.settings import Settings


@frozen
class CompressionFacts:
    """The settings of prompt compression, as /props shows them under `pflash`.

    curve: ratios that are kept, by tokens of the prompt. drafter: the name of the prompt scorer, and device where it
    is; None without one. most_tokens: of a prompt that is scored. hot_window: the last messages, which are never
    frozen.
    """

    mode: str
    threshold: int
    keep_ratio: float
    curve: tuple[tuple[int, float], ...]
    drafter: str | None
    device: str | None
    most_tokens: int
    draft_residency: Policy
    freeze: bool
    hot_window: int


@frozen
class ServerFacts:
    """The facts of a server. device: all devices that have layers of the model, in words."""

    model_id: str
    identity: str
    device: str
    details: ModelDetails
    compression: CompressionFacts
    settings: Settings

    def build_json(self) -> Mapping[str, Any]:
        """Return the facts as /props has them."""
        named = {"id": self.model_id, "identity": self.identity, "device": self.device}
        return {
            "model": {**named, **asdict(self.details)},
            "pflash": asdict(self.compression),
            # Rates change and are shown as `rates_ns`.
            "settings": asdict(self.settings, filter=exclude("rates")),
        }
