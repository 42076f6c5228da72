"""Row operations between products, by the compiled library (rows.h): norms, and the preparation of projected heads.

Each row is computed by itself, in operations that every processor rounds alike, so its bits are its own.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, WIDEST, check_layout, describe_caches
from adapters.models.kernels.formats.row_format import format_of
from adapters.models.kernels.interfaces.layer_interface import Rope

# As in numbers.h.
NORMED_KEYS = 1
NORMED_VALUES = 2


@frozen(eq=False)
class PreparedHeads:
    """The preparation of projected heads: a float32 bias of all of them, a norm if `normed`, and a float32 weight `[H
    + KV, hd]`. norms_values: values are normed as well.
    """

    bias: Tensor | None
    weight: Tensor
    normed: bool
    eps: float
    norms_values: bool = False

    @property
    def norm_code(self) -> int:
        """Return what is normed, as numbers.h says it."""
        return (NORMED_KEYS if self.normed else 0) | (NORMED_VALUES if self.norms_values else 0)


def count_value_heads(k_cache: Tensor, v_cache: Tensor) -> int:
    """Return how many heads of values a row has of its own: none if keys and values are one tensor."""
    return 0 if k_cache is v_cache else v_cache.shape[1]


def check_heads(prep: PreparedHeads, heads: int, kv: int, head: int) -> None:
    check_layout(f"what {heads} + {kv} heads are multiplied with", prep.weight, (heads + kv, head), torch.float32)
    if prep.bias is not None:
        check_layout(f"a bias of {heads} + 2 x {kv} heads", prep.bias, (heads + 2 * kv, head), torch.float32)


def check_rope(rope: Rope) -> None:
    for table in (rope.cos, rope.sin):
        check_layout("a rotary table", table, (len(rope.cos), rope.cos.shape[1]), torch.float32)


@frozen(eq=False)
class NativeRows:
    """Row operations at one level of instructions (see `NativeLibrary`)."""

    compiled: NativeLibrary
    level: int

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add delta to residual `[R, D]` in place; return the RMSNorm of the sum times weight, rounded once."""
        rows, width = residual.shape
        if delta is not None and (not residual.is_contiguous() or delta.shape != residual.shape):
            raise ValueError(f"a residual of {list(residual.shape)}, {list(delta.shape)} to be added: not in place")
        alike = delta is None or delta.dtype is residual.dtype
        if not alike or residual.dtype not in DTYPE_CODES or weight.dtype not in {residual.dtype, torch.float32}:
            raise TypeError(f"a norm of {residual.dtype} with a weight in {weight.dtype}")
        if weight.shape != (width,):
            raise ValueError(f"a norm of {width} numbers with a weight of {list(weight.shape)}")
        residual = residual.contiguous()
        weight = weight.contiguous()
        delta = None if delta is None else delta.contiguous()
        out = torch.empty_like(residual)
        self.compiled.code.rekindle_norm(
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            DTYPE_CODES[residual.dtype],
            DTYPE_CODES[weight.dtype],
            eps,
            torch.get_num_threads(),
            self.level,
        )
        return out

    def prepare_heads(
        self,
        projected: Tensor,
        heads: PreparedHeads,
        rope: Rope,
        at: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """Prepare and rotate projected `[R, (H + 2 KV) hd]`; return queries, float32 `[R, H, hd]`, and write keys and
        values. Caches without heads take none. Caches that are one tensor take the keys, and rows have no values.

        at: slots and positions of the rows, int64 `[R]`; position -1 marks a padded row.
        """
        (_, kv, _, width) = k_cache.shape
        (rows, columns) = projected.shape
        head = format_of(k_cache).head_size(width)
        queries = columns // head - kv - count_value_heads(k_cache, v_cache)
        turned = rope.cos.shape[1]
        if projected.dtype not in DTYPE_CODES or projected.stride(1) != 1:
            raise TypeError(f"heads in {projected.dtype}, strides {projected.stride()}, for a cache in {k_cache.dtype}")
        if head > WIDEST or 2 * turned > head or columns % head or queries < 0:
            raise ValueError(f"{columns} columns for heads of {head}, {2 * turned} of which are rotated")
        slot, group, apart, *forms = describe_caches(((k_cache, v_cache),))
        check_heads(heads, queries, kv, head)
        check_rope(rope)
        for column in at:
            check_layout("slots and positions", column, (rows,), torch.int64)
        out = torch.empty(rows, queries, head)
        self.compiled.code.rekindle_heads(
            projected.data_ptr(),
            projected.stride(0),
            rows,
            queries,
            kv,
            head,
            None if heads.bias is None else heads.bias.data_ptr(),
            heads.weight.data_ptr(),
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
            turned,
            at[0].data_ptr(),
            at[1].data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *(slot, group, apart),
            out.data_ptr(),
            DTYPE_CODES[projected.dtype],
            *forms,
            heads.norm_code,
            heads.eps,
            torch.get_num_threads(),
            self.level,
        )
        return out
