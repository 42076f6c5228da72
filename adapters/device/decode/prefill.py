"""Prefill of a prompt on the device: in chunks, or one piece of it in a forward with decode steps.

Theory of operation
-------------------

A prefill computes rows `[start, stop)` of a slot's prompt. It runs in chunks of the largest bucket, which is the most
rows that one forward may have. The rows of a chunk need no logits: what counts are the target's caches, and the hidden
states that a draft follows.

* One effect may span several chunks. If the shard is a pipeline over several devices, `Pipeline.prefill` keeps all of
  them busy: while the second device computes chunk 1, the first one computes chunk 2.
* A shard that runs ahead of the host gets chunk N + 1 before chunk N is known to be done. So `run_prefill` yields one
  chunk behind, and waits for an event of the device before it says that a chunk is in place.
* A piece of a prompt can share a forward with decode steps (`PromptPiece`). The decode rows come first, so their
  logits have the same bits as without the piece.
* Pieces of several prompts can share a forward, and one launch can have several such forwards (`run_pieces`). Short
  prompts then fill a chunk together, and the device need not wait for the host between them.

Invariants:

* A slot's rows count as valid only when the device has computed them.
* When a request is given up, no further chunk begins. Chunks that have begun are finished on all shards, so that every
  shard has the same rows.
* The last chunk of a prompt is the exception where the first decode step needs no forward of its own (`last_row.py`).
  It is reported once it is launched, so that this step is launched before the device would idle. What the lane launches
  behind it finds its rows in place, and copies on other streams wait for all that the lane has launched.
* If a chunk raises, the device is waited for before anything else: where its rows go may belong to another slot soon.

Example: 5,000 rows with chunks of 2,048 are three forwards, of 2,048, 2,048 and 904 rows. The last one runs in the
smallest bucket that has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from adapters.device.decode.last_row import can_take_last_row, keep_last_row
from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.prompt_lane import record_event
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.step import Forward, Segment, Step
from effects.ids import DeviceFailed
from effects.prefill import RunPrefill

T = TypeVar("T")
# Gets a step, what its forward left, how many rows of each segment stay, and the states of their slots.
Follow: TypeAlias = Callable[[Step, Forward, Sequence[int], Sequence[SlotState]], object]


@frozen(eq=False)
class PromptPiece:
    """Rows `[start, stop)` of a slot's prompt that share a forward: with decode rows, or with rows of other prompts."""

    slot: int
    start: int
    stop: int
    state: SlotState

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return self.stop - self.start

    @property
    def tokens(self) -> list[int]:
        """The tokens that its rows feed."""
        return self.state.tokens[self.start : self.stop]

    def append_to(self, step: Step, buckets: Sequence[int]) -> Step:
        """Return the step with these rows behind its own, which stay where they are."""
        return Step(
            (*step.segments, Segment(self.slot, self.start, self.rows)), bucket_of(buckets, step.rows + self.rows)
        )


def find_prompt_piece(
    shard: Pipeline, chunk: int, state: SlotState | DeviceFailed, effect: RunPrefill
) -> PromptPiece | None:
    """Return the piece of a prefill that can share a forward with decode steps; None if it has to run by itself.

    It cannot share one if the rows' log-probabilities are asked for, or if the rows are not the next ones of the slot.
    With positional state, the state that the slot has cannot be kept before. And where a shard does not commit per
    segment, a step that decodes takes at most a block of rows of a slot.
    """
    if isinstance(state, DeviceFailed) or effect.logprobs >= 0:
        return None
    states = shard.states
    is_long = effect.stop - effect.start > states.block and not states.commits_per_segment
    if states.specs and (effect.keeps_state_first or is_long):
        return None
    return (
        PromptPiece(effect.slot, effect.start, effect.stop, state)
        if find_prefill_misfit(shard, chunk, state, effect) is None
        else None
    )


def find_prefill_misfit(shard: Pipeline, chunk: int, state: SlotState, effect: RunPrefill) -> DeviceFailed | None:
    """Return why these cannot be the slot's next rows; None if they can. chunk: rows of one forward."""
    slot = effect.slot
    start = effect.start
    stop = effect.stop
    if start != state.valid:
        return DeviceFailed("broken", f"slot {slot} has {state.valid} rows; a chunk cannot start at {start}")
    most = chunk * shard.span
    if not 0 < stop - start <= most or stop > len(state.tokens):
        limits = f"at most {most} of the prompt's {len(state.tokens)}"
        return DeviceFailed("broken", f"slot {slot}: rows {start}..{stop} are not {limits}")
    return None


def run_prefill(
    shard: Pipeline,
    buckets: Sequence[int],
    state: SlotState,
    effect: RunPrefill,
    given_up: Callable[[], bool],
    *,
    follow: Follow | None,
    is_alone: bool,
    waits_for_last: bool,
) -> Iterator[int]:
    """Compute the rows of a prefill, and yield after each chunk how many rows of the slot are in place.

    For a shard that runs ahead of the host, this happens while the device is at the next chunk. waits_for_last: also
    a chunk with the prompt's last row is waited for. Otherwise it is yielded when it is launched.
    buckets: the largest is a chunk. given_up: no further chunk begins once it is true. follow: reads what the forward
    of a chunk left, before the next one overwrites it; None: nothing follows, so the prompt's last row may go along.
    is_alone: see `can_take_last_row`.
    """
    takes_last = follow is None and can_take_last_row(shard, buckets, state, effect, is_alone=is_alone)

    def run_chunks() -> Iterator[tuple[int, torch.cuda.Event | None]]:
        for step, forward in launch_chunks(shard, buckets, state, effect, given_up, takes_last=takes_last):
            if not step.rows_only:
                keep_last_row(shard, buckets, state, step, forward)
            elif follow is not None:
                follow(step, forward, [step.rows], [state])
            stop = min(step.segments[0].start + step.rows, effect.stop)
            is_awaited = ahead and (waits_for_last or step.rows_only)
            yield stop, record_event(shard.spec.device) if is_awaited else None

    ahead = shard.launches_ahead
    for stop in settle_in_order(shard, run_chunks()):
        state.mark_computed(stop)
        yield stop


def run_pieces(
    shard: Pipeline, buckets: Sequence[int], forwards: Iterable[Sequence[PromptPiece]], follow: Follow
) -> Iterator[Sequence[PromptPiece]]:
    """Compute pieces of several prompts, and yield those of each forward when their rows are in place.

    For a shard that runs ahead of the host, this happens while the device is at the next forward. No piece of a forward
    is of the same slot as another one. follow: as in `run_prefill`.
    """
    ahead = shard.launches_ahead

    def launch_all() -> Iterator[tuple[Sequence[PromptPiece], torch.cuda.Event | None]]:
        for pieces in forwards:
            segments = tuple(Segment(piece.slot, piece.start, piece.rows) for piece in pieces)
            rows = sum(piece.rows for piece in pieces)
            step = Step(segments, bucket_of(buckets, rows), rows_only=True)
            tokens = [token for piece in pieces for token in piece.tokens]
            forward = shard.forward(step, torch.from_numpy(np.array(tokens)))
            follow(step, forward, [piece.rows for piece in pieces], [piece.state for piece in pieces])
            yield pieces, record_event(shard.spec.device) if ahead else None

    for pieces in settle_in_order(shard, launch_all()):
        for piece in pieces:
            piece.state.mark_computed(piece.stop)
        yield pieces


def settle_in_order(shard: Pipeline, launched: Iterator[tuple[T, torch.cuda.Event | None]]) -> Iterator[T]:
    """Yield what was launched when the device is done with it. Each has an event that is recorded behind it.

    Where the shard launches ahead, the next one is launched before this one is waited for.
    """
    try:
        for item, event in delay_by_one(launched) if shard.launches_ahead else launched:
            if event is not None:
                event.synchronize()
            yield item
    except BaseException:
        # Earlier forwards may still run, and where their rows go may belong to another slot soon.
        with suppress(RuntimeError):
            shard.synchronize()
        raise


def delay_by_one(items: Iterable[T]) -> Iterator[T]:
    """Yield each item once the next one has been asked for."""
    pending = list[T]()
    for item in items:
        yield from pending
        pending = [item]
    yield from pending


def launch_chunks(
    shard: Pipeline,
    buckets: Sequence[int],
    state: SlotState,
    effect: RunPrefill,
    given_up: Callable[[], bool],
    *,
    takes_last: bool,
) -> Iterator[tuple[Step, Forward]]:
    """Launch the chunks, and yield each with what its forward left, to be read before the next one is asked for.

    takes_last: the last chunk also has the row of the prompt's last token. It is the only one that is not `rows_only`.
    """
    chunk = max(buckets)
    begun = list[Step]()

    def chunks() -> Iterator[tuple[Step, Tensor]]:
        for start in range(effect.start, effect.stop, chunk):
            if begun and given_up():
                return
            has_last = takes_last and start + chunk >= effect.stop
            rows = min(chunk, effect.stop - start) + int(has_last)
            step = Step((Segment(effect.slot, start, rows),), bucket_of(buckets, rows), rows_only=not has_last)
            begun.append(step)
            yield step, torch.from_numpy(np.array(state.tokens[start : start + rows]))

    for number, forward in enumerate(shard.prefill(chunks())):
        yield begun[number], forward
