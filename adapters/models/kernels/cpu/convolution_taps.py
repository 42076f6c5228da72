"""Convolution taps in the order in which CPU kernels read them, made once for each layer's weights."""

from __future__ import annotations

from attrs import define, field
from torch import Tensor

from adapters.models.kernels.interfaces.delta_interface import DeltaWeights


@define(eq=False)
class TransposedTaps:
    """A cache of taps as `[4, channels]`. An entry keeps the weights that it was made from, so that no other object
    can take over their identity.
    """

    _found: dict[int, tuple[DeltaWeights, Tensor]] = field(init=False, factory=dict)

    def taps_of(self, weights: DeltaWeights) -> Tensor:
        """Return the transposed taps of a layer."""
        found = self._found.get(id(weights))
        if found is None:
            found = self._found[id(weights)] = (weights, weights.taps.T.contiguous())
        return found[1]
