"""Arguments of launches on a CUDA device: descriptors of rows and blocks, the sizes of caches, and common options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOut
from triton.tools.tensor_descriptor import TensorDescriptor

from adapters.models.kernels.formats.row_format import as_bytes, format_of
from adapters.models.kernels.step_batch import Batch

Constants: TypeAlias = Mapping[str, bool | int | float | str | None]
"""Constants of a kernel by their names in it, and Triton's own options of a launch."""


class LaunchArguments(TypedDict):
    """The options of every launch, as `launch` takes them.

    PDL, launch_pdl: the kernel may start while the one before it drains (programmatic dependent launch). The first is a
    constant of the kernel, the second one tells the driver; None: the device cannot. num_warps: of 32 threads each.
    """

    PDL: bool | None
    num_warps: int
    launch_pdl: bool | None


class AttentionArguments(LaunchArguments):
    """The options of kernels that attend.

    PRECISION: how float32 is multiplied. STAGES: tiles of keys and values that are loaded ahead. Sums are never fused.
    """

    enable_fp_fusion: bool
    PRECISION: str
    STAGES: int


class CacheArguments(AttentionArguments):
    """The options of kernels that read cached rows.

    HEAD: numbers of a value. BLOCK_M, BLOCK_N: rows of a tile of queries, and of keys. K_KIND, V_KIND: see `row_kind`.
    K_APART, V_APART: numbers from one row of a cache to the next one.
    """

    HEAD: int
    BLOCK_M: int
    BLOCK_N: int
    K_KIND: int
    K_APART: int
    V_KIND: int
    V_APART: int


def cache_sizes(cache: Tensor, batch: Batch) -> tuple[int, int, int]:
    """Return slots, heads and rows of a slot, whether or not rows are paged."""
    if batch.pages is None:
        return cache.shape[0], cache.shape[1], cache.shape[2]
    slots, count = batch.pages.shape
    return slots, cache.shape[1], count * cache.shape[2]


def page_size(cache: Tensor, batch: Batch) -> int:
    """Return the rows of a page; 0: rows are not paged."""
    return 0 if batch.pages is None else cache.shape[2]


def describe_cache(cache: Tensor, tile: int, size: int) -> tuple[Any, Tensor]:
    """Return how kernels read tiles of `size` numbers of some rows, and where the scales of coded rows are (of other
    rows anything, never read).
    """
    if format_of(cache).is_coded:
        return as_bytes(cache), as_bytes(cache).view(torch.float32)
    if cache.stride(2) != cache.shape[3]:  # other bytes are between these rows
        return cache, cache
    return TensorDescriptor.from_tensor(cache.view(-1, cache.shape[-1]), [tile, size]), cache


def describe_blocks(matrix: Tensor, *block: int) -> LaidOut:
    """Return a descriptor by which bulk copies bring blocks of a matrix in the layout that `wgmma` reads."""
    return LaidOut.from_tensor(matrix, [*block], shared_layout(block, matrix.dtype))


@cache
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a block. Cached, because computing it takes as long as the launch that needs
    it.
    """
    number = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([*block], number)


@cache
def word_layout() -> gl.NVMMASharedLayout:
    """Return the layout of a block of int32 in which every byte lies where `shared_layout` has it."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


def launch_options(warps: int, pdl: bool | None) -> LaunchArguments:
    """Return the options of every launch with so many warps. pdl: see `LaunchArguments`."""
    return {"PDL": pdl, "num_warps": warps, "launch_pdl": pdl}
