"""The projection of a prediction head that runs in another process: it sends the last hidden states unchanged."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.step import Step

NOTHING: Mapping[str, int] = {"weights": 0, "host": 0, "buffers": 0}


@frozen
class LastHidden:
    """The target's last hidden states. They have D values a row already, so nothing is multiplied."""

    layer: int
    bit_signature: str = ""

    def project(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> Tensor:  # noqa: ARG002
        return aux_hidden_states[self.layer]

    def offload(self) -> int:
        return 0

    def load_back(self) -> int:
        return 0

    def release(self) -> None:
        """There is nothing to give back."""

    def memory(self) -> Mapping[str, int]:
        return NOTHING
