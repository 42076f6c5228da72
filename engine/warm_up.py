"""What serving would make on its first use is made before anybody waits for it: kernels, graphs, buffers."""

from __future__ import annotations

from typing import Any

import torch

from adapters.models.draft import CachedDraft, first_tokens
from adapters.models.shard import Segment, Shard, Step

PASSES = {"cpu": 1, "cuda": 3}  # once for kernels and buffers; a graph is recorded the second time, then replayed


def warm_up(shard: Shard, draft: CachedDraft[Any] | None, most_rows: int) -> None:
    """Every bucket, and every shape that its draft proposes in. most_rows: of one batched decode step."""
    token = torch.zeros(1, dtype=torch.int64)
    for bucket in shard.buckets * PASSES[shard.device.type]:
        step = Step((Segment(0, 0, 1),), bucket, rows_only=True)
        left = shard.forward(step, token)
        if draft is not None:
            draft.extend(step, token, left.aux_hidden_states)
        if bucket <= most_rows:
            step = Step((Segment(0, 0, 1),), bucket)
            shard.logits(step, shard.forward(step, token).hidden)
    if draft is not None:
        for requests in list(draft.rehearsals(shard.slots, most_rows)) * PASSES[shard.device.type]:
            draft.propose(requests, first_tokens)
