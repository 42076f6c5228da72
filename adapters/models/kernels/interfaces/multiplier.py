"""The products that a proof multiplies, as an interface: `CpuKernels` implements it, `proof/` tries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from adapters.checkpoint.packed_matrix import PackedMatrix
from adapters.models.kernels.interfaces.attention_rule import AttentionRule
from adapters.models.kernels.interfaces.delta_interface import DeltaKernels, DeltaShape


class ExactAttention(Protocol):
    """Attention in which the bits of a row depend on its queries and on the keys and values that it sees."""

    def with_output(self, dtype: torch.dtype) -> Self:
        """Return the same attention with results that are rounded to `dtype`."""
        ...

    def attend(
        self,
        q: Tensor,
        slots: Tensor,
        seen: tuple[Tensor | None, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        rule: AttentionRule = ...,
    ) -> Tensor:
        """Attend with q float32 `[R, KV, G, hd]` and return `[R, H hd]`.

        slots: of each row, int64 `[R]`. Caches: `[slots, KV, capacity, width of the row format]`. seen: the first key
        that each row sees (int64 `[R]`, None for key 0) and the key behind the last one. Of `rule` only cap and sinks
        are applied: its window must be in `seen` already, and the caller cuts the values (`latent`).
        """
        ...


class Multiplier(Protocol):
    """The products of one kind of kernels, before any row count is proven. Only tests replace it."""

    def attention_dtypes(self) -> Sequence[torch.dtype]:
        """Return the dtypes that products of attention may be computed in, the preferred one first."""
        ...

    @property
    def has_tiles(self) -> bool:
        """Return whether unpacked weights are multiplied by a processor's instructions for tiles."""
        ...

    def ways(self, *, wider: bool) -> Sequence[str]:
        """Return how products with weights may be computed, the preferred way first. wider: float32 is allowed too."""
        ...

    def operand_dtype(self, way: str) -> torch.dtype:
        """Return the dtype that both operands of a product of this way have."""
        ...

    def reorder(self, weight: Tensor, way: str) -> Any:
        """Return a weight, in the dtype of its way, in the memory layout that the way reads fastest."""
        ...

    def pack_steps(self, matrix: PackedMatrix) -> Any:
        """Return a packed weight as `multiply` takes it, or None where nothing multiplies it in its packed form."""
        ...

    def multiply(self, x: Tensor, weight: Any) -> Tensor:
        """Multiply `[M, K]` with a weight `[N, K]`, as it is or from `reorder` or `pack_steps`. Returns `[M, N]`."""
        ...

    def multiply_gated(self, x: Tensor, gate: Any, up: Any) -> Tensor: ...

    @property
    def native_attention(self) -> ExactAttention | None:
        """The attention of the compiled library. Where there is one it is preferred to products and softmax."""
        ...

    def native_rule(self, shape: DeltaShape) -> DeltaKernels | None:
        """Return the delta rule of the compiled library, or None where it is missing or has no room for such heads."""
        ...


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that ways and traces have for a dtype, for instance `bfloat16`."""
    return str(dtype).removeprefix("torch.")
