"""Several layers of a model that one call carries out, and the embedding in front of them."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen
from torch import Tensor

from adapters.models.kernels.step_batch import Batch


@frozen(eq=False)
class Embedding:
    """An embedding table `[V, D]`. masked: `[D]`, which replaces the row of token `mask`, if there is one."""

    table: Tensor
    masked: Tensor | None = None
    mask: int = -1


class FusedLayers(Protocol):
    """Several layers in one call, one after the other, for steps of one bucket."""

    def run(self, residual: Tensor, batch: Batch, *, stops: bool) -> None:
        """Run residual `[R, D]` through the layers in place. Where there is an embedding, the rows of the batch's
        tokens replace it first.

        stops: the last layer stops once its keys and values are written; the residual means nothing then.
        """
        ...
