"""The convolution of DFlash 2, which lets a row of a block see the rows just before it.

It stands on both sides of attention and of the feed-forward. Column c of row r becomes

    sum over taps t of (base[t, c] + f[r, t, group of c]) * x[r - t, c]

Rows before the block count as zeros. The factors f of both sides are projected from the row on the near side.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.drafts.dflash.parts import ConvolutionShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.step_batch import BlockBatch


@frozen
class Convolution:
    """A loaded convolution. base: float32 `[2, taps, D]`, for the near side and the far side."""

    shape: ConvolutionShape
    base: Tensor
    projection: Any

    def enter(self, kernels: Kernels, x: Tensor, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """Return rows `[R, D]` for what the convolution stands around, and the factors that `leave` needs."""
        factors = torch.unflatten(kernels.linear(x, self.projection), 1, (2, self.shape.taps, -1))
        return self._mix(x, self.base[0], factors[:, 0], batch), factors[:, 1]

    def leave(self, x: Tensor, factors: Tensor, batch: BlockBatch) -> Tensor:
        """Return rows `[R, D]` that come out of it. factors: from `enter`."""
        return self._mix(x, self.base[1], factors, batch)

    def _mix(self, x: Tensor, base: Tensor, factors: Tensor, batch: BlockBatch) -> Tensor:
        """Compute in float32, and round once."""
        rows = len(x)
        wide = torch.unflatten(x.float(), 1, (-1, self.shape.group))
        own = torch.unflatten(base, 1, (-1, self.shape.group))
        places = (batch.positions - batch.starts).view(-1, 1, 1)
        mixed = (own[0] + factors[:, 0].float().unsqueeze(-1)) * wide
        for tap in range(1, self.shape.taps):
            before = torch.nn.functional.pad(wide, (0, 0, 0, 0, tap, 0))[:rows]
            term = (own[tap] + factors[:, tap].float().unsqueeze(-1)) * before
            mixed = mixed + torch.where(places >= tap, term, 0.0)
        return mixed.flatten(1).to(x.dtype)


def load_convolution(read: WeightReader, kernels: Kernels, shape: ConvolutionShape, prefix: str) -> Convolution:
    """Load the convolution whose tensors' names begin with `prefix`."""
    projection = kernels.pack(read(f"{prefix}kernel_projection.weight"))
    return Convolution(shape, read.wide(f"{prefix}base_kernel"), projection)
