"""The requests to load a shard or a draft in another process, with limits of what may cross to it at once."""

from __future__ import annotations

from typing import Literal

from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.drafts.draft_parts import DraftPlacement, DraftShape
from adapters.remote.protocol.draft_messages import MOST_FOLLOWED, LoadDraft
from adapters.remote.protocol.frames import LARGEST, MOST_PAYLOAD
from adapters.remote.protocol.messages import LoadLayers
from adapters.remote.protocol.payload_tensors import ALIGN
from adapters.sequence_layout import dtype_name

SPARE_ROWS = 1024  # capacity is rounded up to whole tiles of keys
RUN = 1 << 23  # bytes of a restore's run, or most of it: small models' steps would make room for less
SHARED = 1 << 26  # bytes of shared memory each way, at most: of a chunk's hidden states 27B take 10 MiB, of a run 4


def build_draft_request(
    shape: DraftShape,
    placement: DraftPlacement,
    *,
    bits: Literal[0, 4, 8],
    nodes: int,
    rows: int,
    fast: bool,
) -> LoadDraft:
    """Return the request to load a draft. At most the features of a round, or the rows of a whole slot, cross at once.

    bits: that the target's weights are quantised to; 0: they are not. nodes: of a proposed tree. rows: of a decode
    step.
    """
    features = MOST_FOLLOWED * max(placement.buckets) * shape.hidden_size * placement.dtype.itemsize
    context = (placement.capacity + SPARE_ROWS) * shape.kv_bytes_per_token(placement.dtype)
    limit = min(max(features, context) + MOST_PAYLOAD, LARGEST)
    room = min(SHARED, limit)
    return LoadDraft(
        dtype=dtype_name(placement.dtype),  # type: ignore[arg-type]
        bits=bits,
        slots=placement.slots,
        capacity=placement.capacity,
        buckets=tuple(placement.buckets),
        nodes=nodes,
        rows=rows,
        fast=fast,
        limit=limit,
        shared=(room, room),
    )


def build_layers_request(config: ModelConfig, placement: ShardPlacement, *, fast: bool) -> LoadLayers:
    """Return the request to load a shard. At most a step with all its logits, or a whole slot, crosses at once.

    placement: names its layers and the dtype of its rows. Its device and its pages are not those of the other process.
    """
    layers = placement.layers
    assert layers is not None
    dtype = placement.dtype
    capacity = placement.capacity
    aux_layers = placement.aux_layers
    chunk = max(placement.buckets)
    rows = dtype if placement.rows is None else placement.rows
    crossing = sum(config.find_crossing(cut, dtype, rows).width for cut in (layers.start, layers.stop))
    wide = (crossing + len(aux_layers) * config.hidden_size) * dtype.itemsize
    row_bytes = config.kv_bytes_per_token(rows, layers)
    kept = (capacity + SPARE_ROWS) * row_bytes + max(config.state_bytes(dtype, layers=layers))
    limit = max(kept, chunk * (wide + 4 * config.vocab_size)) + MOST_PAYLOAD
    limit += ALIGN * (2 * len(layers) + len(aux_layers) + 8)  # between tensors
    limit = min(limit, LARGEST)  # rows of a whole slot may be more; they cross in runs, which never are
    room = min(SHARED, max(RUN, chunk * wide, 64 * (wide + 4 * config.vocab_size)) + MOST_PAYLOAD)
    return LoadLayers(
        layers=(layers.start, layers.stop),
        slots=placement.slots,
        capacity=capacity,
        buckets=tuple(placement.buckets),
        aux_layers=tuple(aux_layers),
        state_checkpoints=placement.state_checkpoints,
        fast=fast,
        limit=limit,
        shared=(room, room),
    )
