"""Builds the shards of a target's layers, each on its device, and finds the sources of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import evolve
from torch import Tensor

from adapters.checkpoint.finite_check import defer_finite_checks
from adapters.checkpoint.upload import MAX_PENDING_BYTES, PIECE_BYTES, Upload
from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.embedding_and_head import CopiedEnds
from adapters.models.decoder.expert_products import list_host_tensors
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.shard import Shard, ShardPlacement
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.protocol.load_request import build_layers_request
from adapters.store.slab_memory import Buffer, SlabMemory
from engine.loading.memory.device_survey import Placement, free_memory
from engine.loading.memory.packed_estimate import log_unpacked_weights
from engine.loading.prove_numerics import ProvenKernels


def build_shards(
    checkpoint: Checkpoint,
    plan: Sequence[Placement],
    kernels: ProvenKernels,
    sources: Sequence[WeightSource],
    common: ShardPlacement,
    *,
    experts: HostExperts | None,
    fast: bool,
) -> Pipeline:
    """Build the shard of each placement on its device, with the tensors of its own layers and no others.

    kernels, sources: of each shard, as `prove` and `stage_weights` return them. common: the slots, rows and types of
    all shards; the plan has the device and the layers of each. Shards in other processes have no pages and keep nothing
    in host memory. experts: those that are in host memory, from where they are brought. fast: numerics are `fast`.
    """
    config = checkpoint.config
    parts = list[Shard]()
    for part_placement, own, weights in zip(plan, kernels.shards, sources, strict=True):
        placement = evolve(common, device=part_placement.device, layers=part_placement.layers)
        if part_placement.peer is not None:
            ends = CopiedEnds(config, checkpoint, own, common.dtype, part_placement.device)
            request = build_layers_request(config, placement, fast=fast)
            left = config.find_crossing(part_placement.layers.stop, common.dtype, common.rows or common.dtype).width
            parts.append(RemoteShard(part_placement.peer, request, ends, config.hidden_size, config.num_layers, left))
            continue
        assert own is not None
        cpu_experts = None
        if part_placement.cpu_experts:
            assert kernels.experts is not None
            own_experts = kernels.experts.copy_for_shard()
            cpu_experts = CpuExperts.prepare(
                part_placement.cpu_experts, own_experts, checkpoint, config.hidden_size, placement
            )
        with use_device(part_placement.device):
            shard = checkpoint.family.build(config, weights, own, placement, offloaded=experts, cpu_experts=cpu_experts)
            parts.append(shard)
    return Pipeline(parts)


@contextmanager
def stage_weights(
    checkpoint: Checkpoint, plan: Sequence[Placement], memory: SlabMemory, dtype: torch.dtype
) -> Iterator[Sequence[WeightSource]]:
    """Yield the source of each shard's weights.

    Weights of a GPU are uploaded before the shard asks for them. The upload begins at once, as long as three quarters
    of the free memory stay free, since proofs need memory too. If a CPU has layers, uploads wait, because its proof may
    change how much memory the rest has. memory: what weights are copied through. dtype: the one that they will have.
    """
    log_unpacked_weights(checkpoint, dtype, plan)
    own = {
        number: placement
        for number, placement in enumerate(plan)
        if placement.is_local and placement.device.type == "cuda"
    }
    taken = list[Buffer]()  # the buffers of the uploads

    def buffer() -> Tensor:
        piece = memory.allocate(PIECE_BYTES)
        taken.append(piece)
        return piece.data

    uploads = {number: upload_weights(checkpoint, placement, buffer, dtype) for number, placement in own.items()}
    try:
        if all(placement.device.type == "cuda" for placement in plan if placement.is_local):
            for upload in uploads.values():
                upload.start()
        with defer_finite_checks():
            yield [uploads.get(number, checkpoint) for number in range(len(plan))]
    finally:
        for upload in uploads.values():
            upload.close()
        # Sources may be kept longer than this block, and must not hold the pool's memory.
        taken.clear()


def upload_weights(
    checkpoint: Checkpoint, part_placement: Placement, buffer: Callable[[], Tensor], dtype: torch.dtype
) -> Upload:
    """Return the upload of one shard to its GPU, without the experts that the host computes."""
    elsewhere = set(list_host_tensors(checkpoint.config, part_placement.cpu_experts))
    return Upload(
        source=checkpoint,
        tensors=checkpoint.tensors,
        names=[name for name in checkpoint.config.tensors(part_placement.layers) if name not in elsewhere],
        device=part_placement.device,
        new_buffer=buffer,
        on_tensor_read=checkpoint.on_read,
        served_dtype=dtype,
        max_pending_bytes=max(MAX_PENDING_BYTES, free_memory(part_placement.device) // 4),
    )
