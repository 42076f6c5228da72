"""The taps of convolutions in the order in which CPU kernels read them, made once for each layer's weights."""

from __future__ import annotations

from attrs import define, field
from torch import Tensor

from adapters.models.kernels.delta_interface import DeltaWeights


@define(eq=False)
class TapsByPlace:
    """Taps of convolutions as `[4, channels]`; kept with what they were made from, so that the identity stays taken."""

    _found: dict[int, tuple[DeltaWeights, Tensor]] = field(init=False, factory=dict)

    def of(self, weights: DeltaWeights) -> Tensor:
        found = self._found.get(id(weights))
        if found is None:
            found = self._found[id(weights)] = (weights, weights.taps.T.contiguous())
        return found[1]
