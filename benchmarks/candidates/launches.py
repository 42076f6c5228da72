"""Launches of the candidate, in the place of the kernel that serves: `make_candidates` gives it to one device."""

from __future__ import annotations

import torch
from attrs import define
from torch import Tensor

from adapters.models.kernels.cuda.attention import CHAIN_AHEAD, LOG2_E, SPLIT, CudaAttention
from adapters.models.kernels.cuda.descriptors import cache_sizes, describe_blocks, launch_options, page_size
from adapters.models.kernels.cuda.device_traits import DeviceTraits
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.cuda.step_tiles import TileKind
from adapters.models.kernels.cuda.tiles import KV_TILE
from adapters.models.kernels.step_batch import Batch
from adapters.models.kernels.triton_launch import launch
from benchmarks.candidates import chain_overlapped


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


def make_candidates(device: torch.device, traits: DeviceTraits | None = None) -> TritonKernels:
    """Return the kernels that serve, with the candidate in place of the one that it may replace.

    traits: of the device; the default is to ask it. A copy for another shard has only kernels that serve.
    """
    kernels = TritonKernels(device) if traits is None else TritonKernels(device, traits=traits)
    can = kernels.traits.capability
    own = (kernels.traits.processors, kernels.traits.shared, kernels.pdl, can.has_hopper_kernels)
    kernels._attention = CandidateAttention(device, *own)  # noqa: SLF001 - a place that only candidates take
    return kernels
