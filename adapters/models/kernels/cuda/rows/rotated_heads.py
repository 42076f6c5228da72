"""Launches the projection of one row before attention, which rotates its heads and writes keys and values itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapters.models.kernels.cuda.descriptors import cache_sizes, describe_blocks, launch_options, page_size
from adapters.models.kernels.cuda.tiles import choose_tile_ahead
from adapters.models.kernels.cuda.weights import CudaWeight
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton.hopper.rows.rotated_heads import project_rotated
from adapters.models.kernels.triton_launch import launch

HEAD = 64  # numbers of a head: as many as a program of `linear_ahead` has rows of the weight


def can_project(x: Tensor, packed: Any, prep: HeadPrep, rope: Rope, caches: tuple[Tensor, Tensor]) -> bool:
    """Return whether `project` serves on Hopper: one row, whose heads of 64 have no norms and are rotated as a whole.

    The caches keep keys and values in the type of x.
    """
    is_row = len(x) == 1 and x.dtype == torch.bfloat16 and isinstance(packed, CudaWeight)
    is_usual = is_row and not (packed.gated or packed.piece) and prep.q_norm is None and prep.k_norm is None
    k_cache, v_cache = caches
    is_kept = k_cache is not v_cache and all(one.dtype == x.dtype and one.shape[3] == HEAD for one in caches)
    return is_usual and is_kept and 2 * rope.cos.shape[1] == HEAD


def project(
    x: Tensor,
    packed: CudaWeight,
    prep: HeadPrep,
    rope: Rope,
    batch: Batch,
    caches: tuple[Tensor, Tensor],
    shared: int,
    pdl: bool | None,
) -> Tensor:
    """Return the rotated queries `[1, H, 64]` of a row for which `can_project` holds.

    shared: bytes of shared memory that a program may have.
    """
    k_cache, v_cache = caches
    _, kv, capacity = cache_sizes(k_cache, batch)
    programs = len(packed.weight) // HEAD
    tile = choose_tile_ahead(1, x.dtype, shared)
    assert tile.columns == HEAD
    q = x.new_empty(1, programs - 2 * kv, HEAD)
    launch(
        project_rotated,
        (programs,),
        describe_blocks(packed.weight, tile.columns, tile.depth),
        describe_blocks(x, tile.rows, tile.depth),
        rope.cos if prep.bias is None else prep.bias,  # where there is none, never read
        rope.cos,
        rope.sin,
        batch.slots,
        batch.positions,
        batch.positions if batch.pages is None else batch.pages,  # without pages, never read
        q,
        k_cache,
        v_cache,
        x.shape[1],
        capacity,
        HEADS=programs - 2 * kv,
        KV=kv,
        STAGES=tile.stages,
        PAGE=page_size(k_cache, batch),
        HAS_BIAS=prep.bias is not None,
        enable_fp_fusion=False,
        **launch_options(tile.warps, pdl),
    )
    return q
