"""Attention by the compiled library: each row over its own interval of its slot's keys.

Tiles of keys stand where they stand, and what a row finds over each is joined in their order: its bits follow from its
queries, its keys and values, and which of them it sees.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.library import NativeCode
from adapters.models.kernels.cpu.native.products import FORMS, ROW_FORMS, check_caches, check_lies
from adapters.models.kernels.row_format import form_of


@frozen(eq=False)
class NativeAttention:
    """level: as `NativeProducts` has it. to: what results are rounded to, once."""

    compiled: NativeCode
    level: int
    to: torch.dtype

    def with_output(self, dtype: torch.dtype) -> NativeAttention:
        """Return the same attention with results that are rounded to `dtype`."""
        return evolve(self, to=dtype)

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
        if k_cache.dtype not in ROW_FORMS or v_cache.dtype is not k_cache.dtype:
            raise TypeError(f"keys in {k_cache.dtype}, values in {v_cache.dtype}")
        check_caches((k_cache, v_cache))
        if k_cache.shape[1] != kv or k_cache.shape[3] != width:
            raise ValueError(f"queries of {list(q.shape)} for a cache of {list(k_cache.shape)}")
        check_lies("queries", q, (rows, kv, group, head), torch.float32)
        for column in (slots, high, *(() if low is None else (low,))):
            check_lies("slots, and what rows see", column, (rows,), torch.int64)
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
