"""The row of a prompt's last token, computed with the rows before it, so that the first token takes no forward.

A prefill ends before the prompt's last token, because a decode step feeds that one and needs its logits. Such a step
reads all weights for one row. So the last chunk of a prompt has one row more where that is possible, and the hidden
state of this row waits in the slot's state (`SlotState.last_row`). The first decode step makes its logits of it. If the
step has other requests as well, the row is computed again, since a row more costs nothing there. The core (`states/`)
knows nothing of this: to it, rows behind the valid ones are garbage.

A forward that decode steps share with prompts may have this row as well (`kept_rows.py`).

The bits are the same, because a row does not depend on the rows that share its forward. Recurrent layers leave the
last rows of such a step in their rings (`StateBatch.holds`), so that the last one can be committed later, or never.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adapters.device.lane.buckets import bucket_of
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.step import Forward, Step
from effects.ids import PAGE
from effects.prefill import RunPrefill


def can_take_last_row(
    shard: Pipeline, buckets: Sequence[int], state: SlotState, effect: RunPrefill, *, is_alone: bool
) -> bool:
    """Say whether the last chunk of this prefill may have the row of the prompt's last token as well.

    There must be room for it in the chunk, and memory for it in the page of the row before it. The shard must launch
    ahead of the host, which only a target of one part on a GPU does.

    Of the chunk's other rows, the last layer need only compute keys and values. With this row along it computes all of
    them. By arithmetic, that is 0.5 to 1.8 ms for 1,024 rows of an 8B shape on an H200, where a decode step takes 4 to
    6. Beside other requests the row would be computed again, so other models than hybrids do it only for a request that
    is alone. A hybrid must commit per segment.

    `run_prefill` asks only if no draft follows the rows. A prefill that shares its forward with other prompts, but not
    with decode steps, takes no such row. With decode steps, `PlaceAlong` decides.

    buckets: the largest is a chunk. is_alone: no other request is in a launch.
    """
    stop = effect.stop
    rows = (stop - effect.start) % max(buckets)
    has_room = rows > 0 and has_place_for_last_row(state, stop) and is_row_cheap(buckets, rows)
    # Buckets that are not proven are two at most.
    allowed = shard.states.commits_per_segment if shard.states.specs else is_alone and len(buckets) > 2
    return shard.launches_ahead and allowed and has_room


def has_place_for_last_row(state: SlotState, stop: int) -> bool:
    """Is the row behind `[0, stop)` that of the prompt's last token, with memory in the page of the row before it?"""
    return stop == len(state.tokens) - 1 and stop % PAGE > 0


def is_row_cheap(buckets: Sequence[int], rows: int) -> bool:
    """Does a forward of so many rows take about as long with one row more?

    It does if its bucket stays. A narrow forward takes as long as its weights take to be read, whatever its bucket.
    """
    more = bucket_of(buckets, rows + 1)
    return more <= NARROW or more == bucket_of(buckets, rows)


def keep_last_row(shard: Pipeline, buckets: Sequence[int], state: SlotState, step: Step, forward: Forward) -> None:
    """Commit all rows of the step but the last one, and keep what the forward left of that one."""
    shard.commit(step, [step.rows - 1])
    copy_last_row(buckets, state, step.segments[0].start + step.rows - 1, forward.hidden, step.rows - 1)


def copy_last_row(buckets: Sequence[int], state: SlotState, position: int, hidden: Tensor, index: int) -> None:
    """Keep what a forward left of the row of a prompt's last token. index: of that row in `hidden`."""
    kept = hidden.new_zeros(bucket_of(buckets, 1), hidden.shape[1])
    kept[0] = hidden[index]
    state.last_row = (position, kept)


def forward_unless_kept(shard: Pipeline, step: Step, tokens: Tensor, state: SlotState | None) -> Forward:
    """Run the forward of a step that decodes, unless its only row is there already.

    state: of the step's only member. None: it has several, or the host does not know the token that is fed.
    """
    if state is not None and state.last_row is not None and step.rows == 1:
        position, hidden = state.last_row
        if position == step.segments[0].start and len(hidden) == step.bucket:
            return Forward(hidden, {})
    return shard.forward(step, tokens)


def has_own_time(states: Sequence[SlotState]) -> bool:
    """Does a step of these members take what later ones take? Asked before its tokens are appended.

    A step with a member whose last row is kept may need no forward, or wait for that member's last chunk.
    """
    return all(state.last_row is None for state in states)
