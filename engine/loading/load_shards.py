"""Shards of a target's layers, each on its device, and where their weights come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adapters.checkpoint.finite_check import defer_finite_checks
from adapters.checkpoint.upload import MAX_PENDING_BYTES, PIECE_BYTES, Upload
from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.embedding_and_head import CopiedEnds
from adapters.models.decoder.host_experts import HostExperts
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.pipelined_chunks import current
from adapters.models.decoder.shard import Shard
from adapters.models.kernels.interface import Kernels
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.client.remote_shard import RemoteShard
from adapters.remote.protocol.load_request import loading
from adapters.store.slab_memory import Buffer, Memory
from engine.loading.device_survey import Placement, free_memory


def shards(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    kernels: Sequence[Kernels | None],
    sources: Sequence[WeightSource],
    *,
    rows: torch.dtype,
    fast: bool,
    pages: int = 0,
    offloaded: HostExperts | None = None,
    offload_embedding: bool = False,
    **how: Any,
) -> Pipeline:
    """Each on its device, with the tensors of its own layers and no other. sources: of each, as `uploading` gives them.
    pages, rows, offloaded, offload_embedding, how: as `Build` has it; shards in other processes have no pages and keep
    nothing on the host.
    """
    parts = list[Shard]()
    for place, own, weights in zip(plan, kernels, sources, strict=True):
        if place.peer is not None:
            ends = CopiedEnds(checkpoint.config, checkpoint, own, dtype, place.device)
            asked = loading(checkpoint.config, dtype, place.layers, rows=rows, fast=fast, **how)
            shape = checkpoint.config.hidden_size, checkpoint.config.num_layers
            parts.append(RemoteShard(place.peer, asked, ends, *shape))
            continue
        assert own is not None
        with current(place.device):
            where: dict[str, Any] = {"device": place.device, "layers": place.layers, "pages": pages}
            where |= {"dtype": dtype, "rows": rows, "offloaded": offloaded, "offload_embedding": offload_embedding}
            parts.append(checkpoint.family.build(checkpoint.config, weights, own, **where, **how))
    return Pipeline(parts)


@contextmanager
def uploading(
    checkpoint: Checkpoint, plan: Sequence[Placement], memory: Memory, dtype: torch.dtype
) -> Iterator[Sequence[WeightSource]]:
    """Where each shard's weights come from. Those of a GPU come ahead of whoever asks for them, and the first of them
    at once, as long as three quarters of what is free there stay free: what is proven needs room, too. Where a
    processor has layers they wait, since what it proves may change how much room all the rest has. memory: for what
    they pass through. dtype: that they are going to have.
    """
    own = {number: one for number, one in enumerate(plan) if one.local and one.device.type == "cuda"}
    taken = list[Buffer]()  # theirs while they are known

    def buffer() -> Tensor:
        one = memory.take(PIECE_BYTES)
        taken.append(one)
        return one.data

    uploads = {number: upload(checkpoint, one, buffer, dtype) for number, one in own.items()}
    try:
        if all(one.device.type == "cuda" for one in plan if one.local):
            for one in uploads.values():
                one.start()
        with defer_finite_checks():
            yield [uploads.get(number, checkpoint) for number in range(len(plan))]
    finally:
        for one in uploads.values():
            one.close()
        taken.clear()  # whoever still knows where weights came from shall not hold the pool's memory


def upload(checkpoint: Checkpoint, place: Placement, buffer: Callable[[], Tensor], dtype: torch.dtype) -> Upload:
    return Upload(
        source=checkpoint,
        tensors=checkpoint.tensors,
        names=checkpoint.config.tensors(place.layers),
        device=place.device,
        new_buffer=buffer,
        on_tensor_read=checkpoint.heard,
        served_dtype=dtype,
        max_pending_bytes=max(MAX_PENDING_BYTES, free_memory(place.device) // 4),
    )
