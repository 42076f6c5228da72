"""What a daemon is asked to load, and how much may cross to it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from adapters.models.decoder.family import ModelConfig
from adapters.models.drafts.draft_parts import DraftShape
from adapters.remote.protocol.draft_messages import MOST_FOLLOWED, LoadDraft
from adapters.remote.protocol.frames import LARGEST, MOST_PAYLOAD
from adapters.remote.protocol.messages import LoadLayers
from adapters.remote.protocol.payload_tensors import ALIGN
from adapters.sequence_layout import dtype_name

SPARE_ROWS = 1024  # capacity is rounded up to whole tiles of keys
RUN = 1 << 23  # bytes of a restore's run, or most of it: small models' steps would make room for less
SHARED = 1 << 26  # bytes of shared memory each way, at most: of a chunk's hidden states 27B take 10 MiB, of a run 4


def loading_draft(
    config: ModelConfig,
    shape: DraftShape,
    dtype: torch.dtype,
    *,
    slots: int,
    capacity: int,
    buckets: Sequence[int],
    bits: Literal[0, 4, 8],
    nodes: int,
    rows: int,
    fast: bool,
) -> LoadDraft:
    """What crosses at once: the features of a round, or rows of a whole slot."""
    features = MOST_FOLLOWED * max(buckets) * config.hidden_size * dtype.itemsize
    limit = max(features, (capacity + SPARE_ROWS) * shape.kv_bytes_per_token(dtype)) + MOST_PAYLOAD
    limit = min(limit, LARGEST)
    room = min(SHARED, limit)
    return LoadDraft(
        dtype=dtype_name(dtype),  # type: ignore[arg-type]
        bits=bits,
        slots=slots,
        capacity=capacity,
        buckets=tuple(buckets),
        nodes=nodes,
        rows=rows,
        fast=fast,
        limit=limit,
        shared=(room, room),
    )


def loading(
    config: ModelConfig,
    dtype: torch.dtype,
    layers: range,
    *,
    rows: torch.dtype,
    slots: int,
    capacity: int,
    buckets: Sequence[int],
    aux_layers: Sequence[int],
    state_places: int,
    fast: bool,
) -> LoadLayers:
    """What a daemon is asked to load, and how much may cross at once: a step with all its logits, or a whole slot."""
    chunk, wide = max(buckets), (2 + len(aux_layers)) * config.hidden_size * dtype.itemsize
    kept = (capacity + SPARE_ROWS) * config.kv_bytes_per_token(rows, layers) + max(
        config.state_bytes(dtype, layers=layers)
    )
    limit = max(kept, chunk * (wide + 4 * config.vocab_size)) + MOST_PAYLOAD
    limit += ALIGN * (2 * len(layers) + len(aux_layers) + 8)  # between tensors
    limit = min(limit, LARGEST)  # rows of a whole slot may be more; they cross in runs, which never are
    room = min(SHARED, max(RUN, chunk * wide, 64 * (wide + 4 * config.vocab_size)) + MOST_PAYLOAD)
    return LoadLayers(
        layers=(layers.start, layers.stop),
        slots=slots,
        capacity=capacity,
        buckets=tuple(buckets),
        aux_layers=tuple(aux_layers),
        state_places=state_places,
        fast=fast,
        limit=limit,
        shared=(room, room),
    )
