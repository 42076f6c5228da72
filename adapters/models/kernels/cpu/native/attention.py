"""Attention by the compiled library (attention.h): each row over its own interval of its slot's keys.

Tiles of keys start at fixed positions, and the results of tiles are joined in their order. So a row's bits follow
from its queries, its keys and values, and which of them it sees.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, check_layout, describe_caches
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionRule


@frozen(eq=False)
class NativeAttention:
    """Attention at one level of instructions (see `NativeLibrary`). to: the dtype that results are rounded to, once."""

    compiled: NativeLibrary
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
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        """Attend with q float32 `[R, KV, G, hd]`: `[R, H hd]`, rounded once.

        seen: the first key that each row sees and the key behind the last one, int64 `[R]`; None: from key 0 on. The
        window of `rule` must be in it already.
        """
        rows, kv, group, head = q.shape
        (low, high) = seen
        described = describe_caches(((k_cache, v_cache),))
        widths = [format_of(cache).row_width(head) for cache in (k_cache, v_cache)]
        if k_cache.shape[1] != kv or [k_cache.shape[3], v_cache.shape[3]] != widths:
            raise ValueError(f"queries of {list(q.shape)} for a cache of {list(k_cache.shape)}")
        check_layout("queries", q, (rows, kv, group, head), torch.float32)
        for column in (slots, high, *(() if low is None else (low,))):
            check_layout("slots, and what rows see", column, (rows,), torch.int64)
        if rule.sinks is not None:
            check_layout("sinks", rule.sinks, (kv * group,), torch.float32)
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
            *described,
            out.data_ptr(),
            DTYPE_CODES[self.to],
            None if rule.sinks is None else rule.sinks.data_ptr(),
            rule.cap,
            torch.get_num_threads(),
            self.level,
        )
        if failed:
            raise MemoryError(f"no memory for attention of {rows} rows")
        return out
