"""Experts that the host computes: the other weights of their layers are on a device, and theirs are in host memory.

Theory of operation
-------------------

A layer of experts reads a few megabytes of weights for each row, out of gigabytes. Where the device has no room for
them, the host's memory serves them sooner than the bus could carry them. So the rows travel and the weights stay:

1. The device copies the normed hidden states of a step to pinned memory, some kilobytes a row (`HostRows.send`).
2. Meanwhile it computes the shared expert, if the layer has one, and the host wakes its threads.
3. The host runs router and experts with its own kernels (`ExpertKernels`), packed weights in their packed form.
4. The sums go back to the device, which adds the shared expert's result.

Invariants: all rows of such a layer go through the host, prompts as well, so a row has the same bits however it is
computed. Which layers these are is part of the numerics class. The buffers serve every layer of a shard: a layer's
sums are on the device before its stream copies the next layer's rows, and the host waits for those rows.
"""

from __future__ import annotations

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.expert_sums import add_shared, compute_shares
from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
from adapters.models.kernels.interfaces.experts_interface import Experts, GatedWeights, run_feed_forward
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.layer_kinds import describe_kind
from adapters.models.kernels.offload import allocate_pinned, count_bytes
from adapters.models.kernels.step_batch import Batch


@frozen(eq=False)
class HostRows:
    """Pinned host memory for the rows of one step, on their way to the host's experts and back.

    given: `[2, R, D]` in the model's dtype: what experts read, and what routers read if that is something else.
    rounded, wide: sums `[R, D]`, in the model's dtype and in float32. gates: float32 `[R, 1]`.
    sent: event behind the last copy to the host; None on a CPU.
    """

    given: Tensor
    rounded: Tensor
    wide: Tensor
    gates: Tensor
    sent: torch.cuda.Event | None

    @classmethod
    def allocate(cls, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> HostRows:
        """Return buffers for steps of up to this many rows. Raises MemoryError."""

        def pin(*shape: int, kind: torch.dtype) -> Tensor:
            size = torch.Size(shape).numel()
            return allocate_pinned(size * kind.itemsize).view(kind).view(shape)

        return cls(
            pin(2, rows, width, kind=dtype),
            pin(rows, width, kind=dtype),
            pin(rows, width, kind=torch.float32),
            pin(rows, 1, kind=torch.float32),
            torch.cuda.Event() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        )

    def send(self, x: Tensor, deciding: Tensor | None) -> None:
        """Begin to copy rows `[R, D]` to the host."""
        for place, rows in zip(self.given, (x, deciding), strict=True):
            if rows is not None:
                place[: len(rows)].copy_(rows, non_blocking=True)
        if self.sent is not None:
            self.sent.record()

    def receive(self, count: int, *, decides: bool) -> tuple[Tensor, Tensor | None]:
        """Wait for the rows that were sent last and return them, and what routers read in their place."""
        if self.sent is not None:
            self.sent.synchronize()
        return self.given[0, :count], self.given[1, :count] if decides else None

    @staticmethod
    def stage(pinned: Tensor, found: Tensor, count: int) -> Tensor:
        """Return `count` pinned rows that begin with `found`, `[n, ...]`, and are zeros behind it."""
        rows = pinned[:count]
        rows[: len(found)].copy_(found)
        rows[len(found) :].zero_()
        return rows


@define(eq=False)
class CpuExperts:
    """The experts of one shard that the host computes.

    layers: the layers of the model that have these experts. kernels: of the host, for the shapes that serve. weights:
    the checkpoint's weights, which are read onto the host. rows: buffers for the shard's steps.
    """

    layers: range
    kernels: ExpertKernels
    weights: WeightSource
    rows: HostRows
    _loaded: list[CpuExpertsLayer] = field(init=False, factory=list)

    @classmethod
    def prepare(
        cls, layers: range, kernels: ExpertKernels, weights: WeightSource, width: int, placement: ShardPlacement
    ) -> CpuExperts:
        """Return experts that a shard with this placement fills. width: of hidden states. Raises MemoryError."""
        rows = HostRows.allocate(max(placement.buckets), width, placement.dtype, placement.device)
        return cls(layers, kernels, weights, rows)

    def add_layer(self, experts: Experts, shared: GatedWeights | None) -> CpuExpertsLayer:
        """Return a layer whose router and experts are in host memory. shared: the shared expert, on the device."""
        found = CpuExpertsLayer(self, experts, shared)
        self._loaded.append(found)
        return found

    @property
    def host_bytes(self) -> int:
        return sum(experts.host_bytes for experts in tuple(self._loaded))

    @property
    def device_bytes(self) -> int:
        """Bytes of shared experts."""
        return count_bytes([experts.shared for experts in self._loaded if experts.shared is not None])

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        for layer in self._loaded:
            layer.close()
        self._loaded.clear()


class CpuExpertsLayer:
    """The experts of one layer, computed by the host. It is no tree of weights: these are not the device's."""

    def __init__(self, owner: CpuExperts, experts: Experts, shared: GatedWeights | None) -> None:
        self._owner = owner
        self._experts: Experts | None = experts
        self.shared = shared
        self.host_bytes = count_bytes(experts)

    def __repr__(self) -> str:
        """Return a text that is equal for layers that launch the same kernels on the device (`describe_kind`)."""
        return f"CpuExpertsLayer({describe_kind(self.shared)})"

    def set_scales(self, scales: Tensor) -> None:
        """Multiply the weights of the chosen experts with these, float32 `[E]` on any device."""
        assert self._experts is not None
        self._experts = evolve(self._experts, scales=scales.cpu())

    def run(self, kernels: Kernels, x: Tensor, batch: Batch, deciding: Tensor | None = None, *, out: Tensor) -> Tensor:
        """Run x `[R, D]` through the experts into `out` `[R, D]` and return it. Waits for the device.

        kernels: the device's. deciding: what the router reads in place of x.
        """
        experts = self._experts
        assert experts is not None, "these experts were closed"
        rows = self._owner.rows
        rows.send(x, deciding)
        self._owner.kernels.expect_experts()
        own = None if self.shared is None else run_feed_forward(kernels, x, self.shared)
        given, decides = rows.receive(len(x), decides=deciding is not None)
        count = sum(segment.count for segment in batch.segments)
        total, gates = self._owner.kernels.sum_experts(given, experts, count, decides)
        if own is None:
            return out.copy_(rows.stage(rows.rounded, total, len(x)), non_blocking=True)
        shares = compute_shares(gates)
        if shares is not None:
            shares = rows.stage(rows.gates, shares, len(x)).to(x.device, non_blocking=True)
        total = rows.stage(rows.wide, total, len(x)).to(x.device, non_blocking=True)
        return out.copy_(add_shared(total, own, shares))

    def close(self) -> None:
        self._experts = None
        self.shared = None
