"""Launches of the candidates, in the places of the kernels that serve: `make_candidates` gives both to one device."""

from __future__ import annotations

import torch
from attrs import define
from torch import Tensor

from adapters.models.kernels.cuda.attention import CHAIN_AHEAD, LOG2_E, SPLIT, CudaAttention
from adapters.models.kernels.cuda.descriptors import cache_sizes, describe_blocks, launch_options, page_size
from adapters.models.kernels.cuda.device_traits import DeviceTraits
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.products import CudaProducts
from adapters.models.kernels.cuda.step_tiles import TileKind
from adapters.models.kernels.cuda.tiles import KV_TILE, count_parts
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton_launch import launch
from benchmarks.candidates import chain_overlapped, wide
from benchmarks.candidates.wide_tiles import cut_columns_ahead


@define(eq=False)
class CandidateAttention(CudaAttention):
    """Attention whose chunks of a prompt go through `chain_overlapped.attend_chain_overlapped`."""

    def _chain_ahead(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, out: Tensor) -> None:
        _, heads, head = q.shape
        slots, kv, capacity = cache_sizes(k_cache, batch)
        options = CHAIN_AHEAD[head]
        consumers = options["CONSUMERS"]
        tiles = self.planner.find_tiles(batch, TileKind(consumers * (64 // (heads // kv))), slots)
        described = (describe_blocks(cache.view(-1, head), KV_TILE, head) for cache in (k_cache, v_cache))
        pages = batch.positions if batch.pages is None else batch.pages  # never read without
        launch(
            chain_overlapped.attend_chain_overlapped,
            (len(tiles) * kv,),
            q,
            *described,
            tiles,
            out,
            pages,
            capacity,
            len(tiles),
            head**-0.5 * LOG2_E,
            HEADS=heads,
            KV=kv,
            GROUP=heads // kv,
            SPLIT=SPLIT,
            **options,
            PAGE=page_size(k_cache, batch),
            enable_fp_fusion=False,
            **launch_options(4 if consumers == 2 else 8, self.pdl),
        )


@define
class CandidateProducts(CudaProducts):
    """Products of which those of many rows go through `wide.linear_wide_ahead`."""

    def multiply(self, x: Tensor, w: Tensor, out: Tensor, *, gated: bool, piece: int = 0) -> None:
        is_wide = self.hopper and not piece and len(x) > NARROW and x.dtype != torch.float32
        if is_wide and _can_be_copied_in_bulk(out):
            self._multiply_wide_ahead(x, w, out, gated=gated)
        else:
            super().multiply(x, w, out, gated=gated, piece=piece)

    def _multiply_wide_ahead(self, x: Tensor, w: Tensor, out: Tensor, *, gated: bool) -> None:
        (count, depth) = x.shape
        for cut in cut_columns_ahead(count, len(w), self.processors, x.dtype, self.shared):
            tile = cut.tile
            to = out[:, cut.first // 2 if gated else cut.first :]
            width = tile.columns // 2 if gated else min(tile.columns, 128)
            descriptors = (
                describe_blocks(x, 64, tile.depth),
                describe_blocks(w[cut.first : cut.first + cut.columns], tile.columns, tile.depth),
                describe_blocks(to, 64, width),
            )
            programs = min(count_parts(count, tile.rows) * count_parts(cut.columns, tile.columns), self.processors)
            options = launch_options(tile.warps, self.pdl) | {"STAGES": tile.stages, "GROUP": 8, "GATED": gated}
            launch(wide.linear_wide_ahead, (programs,), *descriptors, count, cut.columns, depth, **options)


def _can_be_copied_in_bulk(matrix: Tensor) -> bool:
    """Return whether bulk copies can read and write this matrix: its rows begin at multiples of 16 bytes."""
    return not (matrix.stride(0) * matrix.itemsize % 16 or matrix.data_ptr() % 16)


def make_candidates(device: torch.device, traits: DeviceTraits | None = None) -> TritonKernels:
    """Return the kernels that serve, with the candidates in place of those that they may replace.

    traits: of the device; the default is to ask it. A copy for another shard has only kernels that serve.
    """
    kernels = TritonKernels(device) if traits is None else TritonKernels(device, traits=traits)
    can = kernels.traits.capability
    own = (kernels.traits.processors, kernels.traits.shared, kernels.pdl, can.has_hopper_kernels)
    kernels._attention = CandidateAttention(device, *own)  # noqa: SLF001 - a place that only candidates take
    kernels.products = CandidateProducts(*own, can.takes_plain_pointers)
    return kernels
