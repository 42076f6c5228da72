"""Attention by the compiled library: each row over its own interval of its slot's keys.

Tiles of keys stand where they stand, and what a row finds over each is joined in their order: its bits follow from its
queries, its keys and values, and which of them it sees.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.native.compiled import NativeCode
from adapters.models.kernels.native.products import FORMS, ROW_FORMS
from adapters.models.kernels.row_form import form_of


@frozen(eq=False)
class NativeAttention:
    """level: as `NativeProducts` has it. to: what results are rounded to, once."""

    compiled: NativeCode
    level: int
    to: torch.dtype

    def attend(
        self,
        q: Tensor,
        slots: Tensor,
        seen: tuple[Tensor | None, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """q float32 `[R, KV, G, hd]` -> `[R, H hd]`, rounded once. seen: each row sees the keys from the one up to the
        other, without that itself, of its slot; int64 `[R]`, None: from the first key on.
        """
        rows, kv, group, head = q.shape
        (low, high), width = seen, form_of(k_cache).width(head)
        if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (width, 1):
            raise ValueError(f"keys of {list(k_cache.shape)}, values of {list(v_cache.shape)}, for queries of {head}")
        if k_cache.shape[1] != kv or not len(slots) == len(high) == rows or not q.is_contiguous():
            raise ValueError(f"queries of {list(q.shape)} for a cache of {list(k_cache.shape)}")
        if q.dtype is not torch.float32 or k_cache.dtype not in ROW_FORMS or v_cache.dtype is not k_cache.dtype:
            raise TypeError(f"queries in {q.dtype}, keys in {k_cache.dtype}, values in {v_cache.dtype}")
        out = torch.empty(rows, kv * group * head, dtype=self.to)
        failed = self.compiled.code.rekindle_attend(
            q.data_ptr(),
            rows,
            kv,
            group,
            head,
            slots.data_ptr(),
            None if low is None else low.data_ptr(),
            high.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.stride(0),
            k_cache.stride(1),
            ROW_FORMS[k_cache.dtype],
            out.data_ptr(),
            FORMS[self.to],
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for attention of {rows} rows")
        return out
