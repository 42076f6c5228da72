"""A model's embedding: on the device, or in host memory that the device reads rows of by itself."""

from __future__ import annotations

from torch import Tensor

from adapters.models.kernels.offload import allocate_pinned


def host_table(table: Tensor) -> Tensor | None:
    """A copy `[V, D]` in host memory, which a GPU reads where it is. None: the host cannot give any, or none such."""
    try:
        memory = allocate_pinned(table.nbytes)
    except MemoryError:
        return None
    kept = memory.view(table.dtype).view(table.shape)
    return kept.copy_(table) if kept.is_pinned() else None
