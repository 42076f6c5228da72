"""First tokens of prompts that go along with decode steps, picked behind the forward that has the prompt's last row.

Problem. A prompt's first decode step feeds its last token. Beside other prompts that step is one more wide forward,
which takes some 30 ms for an 8B shape on an H200. The rows of an agent's usual turn take some 70 ms (decision 077).

Idea. The forward with the last rows of a prompt computes the row of its last token too, as in `last_row.py`. The host
reports these rows when it launches them, and the core asks for the first decode step while the forward still runs. That
step joins the step in flight: its token is picked from the kept row. The next forward has the row behind it:

    device:   16 decode rows, prompt rows 0..992 | first token | 17 decode rows
    host:     report 991 rows               | launch both, read both

If the core asks later, the token is picked behind the forward that runs then. If the launch has ended by then, the
decode step begins another launch, which computes the row again unless the request is alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from adapters.device.decode.in_flight_step import BatchMember, InFlightStep
from adapters.device.decode.last_row import copy_last_row
from adapters.device.decode.prompt_along import PromptRows
from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.device.sampling.sampler import Draw, LaunchedPicks, start_picking
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.step import Segment, Step

log = logging.getLogger("rekindle.device")


def keep_last_rows(along: Sequence[PromptRows], buckets: Sequence[int], hidden: Tensor, decode_rows: int) -> None:
    """Keep what a forward left of the last rows of prompts. decode_rows: the number of rows in front of those."""
    stop = decode_rows
    for rows in along:
        piece = rows.computed_piece
        stop += piece.rows
        if rows.has_last_row:
            copy_last_row(buckets, piece.state, piece.stop - 1, hidden, stop - 1)


def pick_from_kept_rows(
    shard: Pipeline, buckets: Sequence[int], running: InFlightStep, joined: Sequence[BatchMember]
) -> Sequence[BatchMember]:
    """Let members whose last rows are kept join the step in flight. Return the others, for the next step.

    The kept rows are of that step's forward, or of an earlier one. If memory is missing, all are for the next step.
    """
    ready = [member for member in joined if has_kept_row(member)]
    if not ready:
        return joined
    try:
        running.first_picks = launch_first_picks(shard, buckets, ready)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.warning("first tokens could not be picked from kept rows: %s", error)
        return joined
    running.members = [*running.members, *ready]
    return [member for member in joined if member not in ready]


def has_kept_row(member: BatchMember) -> bool:
    """Is the row kept that the member's step would compute?"""
    state = member.state
    return state.last_row is not None and state.last_row[0] == state.valid


def launch_first_picks(shard: Pipeline, buckets: Sequence[int], members: Sequence[BatchMember]) -> LaunchedPicks:
    """Launch the picks of members whose last rows are kept. All of their rows stay."""
    segments = tuple(Segment(member.slot, member.state.valid, 1) for member in members)
    step = Step(segments, bucket_of(buckets, len(members)))
    logits = shard.logits(step, gather_kept_rows(members, step.bucket))
    picks = start_picking(logits, [Draw(member.state.sampler, member.state.valid + 1) for member in members])
    for segment in segments:
        shard.commit(Step((segment,), bucket_of(buckets, 1)), [1])
    return picks


def gather_kept_rows(members: Sequence[BatchMember], bucket: int) -> Tensor:
    """Return the kept hidden states of the members' last rows: `[bucket, D]`. Padded rows mean nothing."""
    kept = [member.state.last_row[1] for member in members if member.state.last_row is not None]
    if len(kept) == 1 and len(kept[0]) == bucket:
        return kept[0]
    gathered = kept[0].new_zeros(bucket, kept[0].shape[1])
    for row, hidden in enumerate(kept):
        gathered[row] = hidden[0]
    return gathered
