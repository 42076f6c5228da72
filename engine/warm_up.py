"""What serving would make on its first use is made before anybody waits for it: kernels, graphs, buffers."""

from __future__ import annotations

from typing import Any

import torch

from adapters.device.proposer import DraftModel
from adapters.models.draft import CachedDraft, first_tokens
from adapters.models.pipeline import Pipeline
from adapters.models.shard import Segment, Step
from engine.draft import Room

PASSES = {"cpu": 1, "cuda": 3}  # once for kernels and buffers; a graph is recorded the second time, then replayed


def warm_up(shard: Pipeline, draft: DraftModel | None, most_rows: int) -> None:
    """Every bucket, and every shape that a draft that is here proposes in. most_rows: of one batched decode step."""
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
    if isinstance(draft, CachedDraft):
        rehearse(draft, shard.slots, most_rows, passes)


def warm_up_apart(draft: CachedDraft[Any], room: Room, most_rows: int) -> None:
    """The same of a draft without its target, by the process that it is in: rows come projected."""
    passes, token = PASSES[draft.device.type], torch.zeros(1, dtype=torch.int64)
    width = draft.hidden_size
    for bucket in room.buckets * passes:
        draft.take(Step((Segment(0, 0, 1),), bucket), token, torch.zeros(1, width, dtype=draft.dtype))
    rehearse(draft, room.slots, most_rows, passes)


def rehearse(draft: CachedDraft[Any], slots: int, most_rows: int, passes: int) -> None:
    for requests in list(draft.rehearsals(slots, most_rows)) * passes:
        draft.propose(requests, first_tokens)
