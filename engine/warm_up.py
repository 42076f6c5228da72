"""What serving would make on its first use is made before anybody waits for it: kernels, graphs, buffers."""

from __future__ import annotations

from typing import Any

import torch

from adapters.models.draft import CachedDraft, first_tokens
from adapters.models.pipeline import Pipeline
from adapters.models.shard import Segment, Step

PASSES = {"cpu": 1, "cuda": 3}  # once for kernels and buffers; a graph is recorded the second time, then replayed


def warm_up(shard: Pipeline, draft: CachedDraft[Any] | None, most_rows: int) -> None:
    """Every bucket, and every shape that its draft proposes in. most_rows: of one batched decode step."""
    token = torch.zeros(1, dtype=torch.int64)
    passes = max(PASSES[device.type] for device in shard.devices)
    for bucket in shard.buckets * passes:
        step = Step((Segment(0, 0, 1),), bucket, rows_only=True)
        left = shard.forward(step, token)
        if draft is not None:
            draft.extend(step, token, left.aux_hidden_states)
        if bucket <= most_rows:
            step = Step((Segment(0, 0, 1),), bucket)
            shard.logits(step, shard.forward(step, token).hidden)
    if draft is not None:
        for requests in list(draft.rehearsals(shard.slots, most_rows)) * passes:
            draft.propose(requests, first_tokens)
