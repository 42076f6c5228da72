"""The products by which a host computes the experts of layers whose other weights are on a device.

`CpuKernels` implements this interface. A layer's router belongs to it, so that hidden states cross to the host once and
their sums cross back once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol

from torch import Tensor

from adapters.checkpoint.packed_matrix import StackedWeight
from adapters.models.kernels.activations import SILU
from adapters.models.kernels.interfaces.experts_interface import EveryExpert, Experts, GatedWeights
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, Proof


class PackingKernels(Protocol):
    """The part of `Kernels` that puts the weights of a feed-forward into the form that its products read."""

    @property
    def packs_experts(self) -> bool: ...

    @property
    def built_in_gates(self) -> Collection[str]: ...

    def pack(self, weight: Tensor | StackedWeight) -> Any: ...

    def pack_router(self, weight: Tensor) -> Any: ...

    def pack_gated(self, weight: Tensor | StackedWeight, activation: str = SILU) -> Any: ...

    def stack_experts(self, experts: Iterable[GatedWeights], count: int) -> EveryExpert: ...


class ExpertKernels(PackingKernels, Protocol):
    """Kernels of the host that compute experts. Rows and weights are in host memory.

    As with `Kernels`, a row's bits depend neither on other rows nor on the row count. One instance serves one shard.
    """

    @property
    def name(self) -> str: ...

    @property
    def bit_signature(self) -> tuple[object, ...]: ...

    @property
    def ignores_threads(self) -> bool:
        """True if no bit of the products of the plan depends on the number of threads."""
        ...

    def copy_for_shard(self) -> ExpertKernels: ...

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof: ...

    def with_plan(self, plan: ProductPlan | None) -> ExpertKernels: ...

    def expect_experts(self) -> None:
        """Get ready for `sum_experts`, which will be called soon: wake the threads that compute experts."""
        ...

    def sum_experts(
        self, x: Tensor, experts: Experts, rows: int, deciding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sums of the first `rows` rows of x, float32 `[rows, D]`, without the shared expert's.

        Also returns the logits of the shared expert's gate, float32 `[rows, 1]`; without such a gate they have no
        columns. x: `[R, D]` with R a proven row count. deciding: what the router reads in place of x.
        """
        ...
