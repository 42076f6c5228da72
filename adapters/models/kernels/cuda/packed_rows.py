"""Launches for rows that `rotate_store` does not write itself: packed ones, and those of two formats."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import Constants, cache_sizes, launch_options, page_size
from adapters.models.kernels.cuda.tiles import round_up_to_power
from adapters.models.kernels.formats.row_format import INT4, LIMITS, SCALE, STEPS, as_bytes, format_of
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton import packed_rows
from adapters.models.kernels.triton_launch import launch

MANY_ROWS = 64  # of a step whose programs take several heads
# Heads of such a program, which it takes one after the other. An H200 starts a program every 1.2 ns, and all of them
# together turn heads faster than that.
_AT_ONCE = 8


def are_usual(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether keys and values have one format that is not packed."""
    return k_cache.dtype is v_cache.dtype and not format_of(k_cache).is_packed


def row_kind(cache: Tensor) -> int:
    """Return what kernels read rows as: 0: numbers, by a descriptor; 1: codes of a byte; 2: numbers between other
    bytes; 3 and 4: packed codes of 3.5 and of 4 bits.
    """
    form = format_of(cache)
    if form.is_packed:
        return 4 if cache.dtype is INT4 else 3
    return 1 if form.is_coded else 2 if cache.stride(2) != cache.shape[3] else 0


def scales_of(cache: Tensor) -> Tensor:
    """Return a cache as the float32 numbers that its scales are among; of rows that are not coded anything."""
    return as_bytes(cache).view(torch.float32) if format_of(cache).is_coded else cache


def _count_heads_at_once(rows: int) -> int:
    """Return how many heads a program takes, one after the other. In a step of few rows each has one of its own."""
    return _AT_ONCE if rows > MANY_ROWS else 1


def _describe_rotation(head: int, block: int) -> Constants:
    """Return the constants of a rotation of heads in blocks."""
    count = round_up_to_power(head // block)
    return {"SIZE": head, "COUNT": count, "BLOCK": block, "LOG": block.bit_length() - 1, "ROOT": block**-0.5}


def keep_heads(
    prepared: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor, heads: int, kv: int, pdl: bool | None
) -> Tensor:
    """Write keys and values, and return the queries, `[R, heads, hd]`.

    prepared: heads of queries, keys and values side by side, `[R, heads, hd]`; no values where caches are one tensor.
    """
    count, every, head = prepared.shape
    q = prepared.new_empty(count, heads, head)
    at_once = _count_heads_at_once(count)
    limits = [LIMITS.get(cache.dtype, STEPS) for cache in (k_cache, v_cache)]
    apart = k_cache.stride(2) * k_cache.dtype.itemsize
    launch(
        packed_rows.keep_heads,
        (count, -(-every // at_once)),
        prepared,
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        scales_of(k_cache),
        scales_of(v_cache),
        batch.slots,
        batch.positions,
        batch.positions if batch.pages is None else batch.pages,  # never read without
        cache_sizes(k_cache, batch)[2],
        HEADS=heads,
        KV=kv,
        VALUES=every - heads - kv,
        **_describe_rotation(head, head & -head),
        PADDED=round_up_to_power(head // 2),
        K_KIND=row_kind(k_cache),
        V_KIND=row_kind(v_cache),
        K_LIMIT=limits[0],
        V_LIMIT=limits[1],
        K_APART=k_cache.stride(2),
        V_APART=v_cache.stride(2),
        APART=apart // SCALE,
        PAGE=page_size(k_cache, batch),
        AT_ONCE=at_once,
        enable_fp_fusion=False,
        **launch_options(1, pdl),
    )
    return q


def turn_back(attended: Tensor, head: int, pdl: bool | None) -> Tensor:
    """Rotate what is attended of rotated values, `[..., size]`, in place, and return it. head: numbers of a row."""
    size = attended.shape[-1]
    shape = _describe_rotation(size, head & -head)
    count = attended.numel() // size
    at_once = gcd(_count_heads_at_once(len(attended)), count)
    options = {"AT_ONCE": at_once, "enable_fp_fusion": False, **launch_options(1, pdl)}
    launch(packed_rows.rotate_heads, (count // at_once,), attended, **shape, **options)
    return attended
