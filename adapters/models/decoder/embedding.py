"""A model's embedding: on the device, or in host memory that the device reads rows of by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.models.kernels.offload import pinned


def host_table(table: Tensor) -> Tensor | None:
    """A copy `[V, D]` in host memory, which a GPU reads where it is. None: the host cannot give any, or none such."""
    try:
        memory = pinned(table.nbytes)
    except MemoryError:
        return None
    kept = memory.view(table.dtype).view(table.shape)
    return kept.copy_(table) if kept.is_pinned() else None


def embed(table: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    """out `[R, D]`: of tokens `[R]` the rows of table `[V, D]`, which may be `host_table`'s. Returns out."""
    if table.device == out.device:
        return torch.index_select(table, 0, tokens, out=out)
    from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415
    from adapters.models.kernels.triton.rows import gather  # noqa: PLC0415 - needs Triton, so a GPU build

    launch(gather, (len(tokens),), table, tokens, out, table.shape[1], BLOCK=1024, num_warps=4)
    return out
