"""What a proof of products asks of the kernels whose products they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.delta import NativeDelta


class Multiplier(Protocol):
    """The products themselves, in no particular pieces. Overridden by nothing but tests."""

    def dtypes(self) -> Sequence[torch.dtype]:
        """What products of attention may be computed in, the preferred one first."""
        ...

    def ways(self, *, wider: bool) -> Sequence[str]:
        """How products with weights may be computed, the preferred one first. wider: in float32, too."""
        ...

    def rows_in(self, way: str) -> torch.dtype:
        """What both sides of such a product are given in."""
        ...

    def reorder(self, weight: Tensor, way: str) -> Any:
        """A weight, in the dtype of its way, as that likes it best."""
        ...

    def pack_steps(self, matrix: PackedMatrix) -> Any:
        """A packed weight as `multiply` takes it; None where there is nothing to multiply it with as it is."""
        ...

    def multiply(self, x: Tensor, weight: Any) -> Tensor:
        """`[M, K]`, and what was made of `[N, K]` or a tensor of that shape -> `[M, N]`."""
        ...

    def multiply_gated(self, x: Tensor, gate: Any, up: Any) -> Tensor: ...

    @property
    def own_attention(self) -> NativeAttention | None:
        """Attention of our own, if there is one: it serves before any other."""
        ...

    @property
    def own_rule(self) -> NativeDelta | None:
        """Recurrent layers of our own, if there are any."""
        ...
