"""What serving would make on its first use is made before anybody waits for it: kernels, graphs, buffers."""

from __future__ import annotations

import torch

from adapters.models.dflash.blocks import SMALLEST_BLOCK, BlockRequest
from adapters.models.dflash.draft import DFlashDraft
from adapters.models.shard import Segment, Shard, Step

PASSES = {"cpu": 1, "cuda": 3}  # once for kernels and buffers; a graph is recorded the second time, then replayed


def warm_up(shard: Shard, draft: DFlashDraft | None, most_rows: int) -> None:
    """Every bucket, and every block of the draft. most_rows: of one batched decode step."""
    token = torch.zeros(1, dtype=torch.int64)
    for bucket in shard.buckets * PASSES[shard.device.type]:
        step = Step((Segment(0, 0, 1),), bucket, rows_only=True)
        left = shard.forward(step, token)
        if draft is not None:
            draft.extend(step, left.aux_hidden_states)
        if bucket <= most_rows:
            step = Step((Segment(0, 0, 1),), bucket)
            shard.logits(step, shard.forward(step, token).hidden)
    if draft is not None:
        warm_up_proposals(draft, min(shard.slots, most_rows // draft.block), PASSES[shard.device.type])


def warm_up_proposals(draft: DFlashDraft, slots: int, passes: int) -> None:
    """Blocks of every size for one slot, and whole ones for up to so many."""
    blocks = {min(SMALLEST_BLOCK << doubled, draft.block) for doubled in range(draft.block.bit_length())}
    for rows in sorted(blocks) * passes:
        draft.propose([BlockRequest(0, 0, 1, 0, rows - 1)])
    for count in [*range(2, slots + 1)] * passes:
        draft.propose([BlockRequest(slot, 0, 1, 0, draft.block - 1) for slot in range(count)])
