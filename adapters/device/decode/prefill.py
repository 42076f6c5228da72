"""A prefill on the device: chunk by chunk, several of them over shards that compute side by side, or a piece of one
beside decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.prompt_lane import mark
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.shard import Shard
from adapters.models.kernels.step import Forward, Segment, Step
from effects.ids import DeviceFailed
from effects.prefill import RunPrefill

T = TypeVar("T")
# What a step has left, the rows of it that stay, and whose they are.
Follow: TypeAlias = Callable[[Step, Forward, Sequence[int], Sequence[SlotState]], object]


@frozen(eq=False)
class PromptPiece:
    """Rows `[start, stop)` of a slot's prompt that go behind decode steps, in one forward with them."""

    slot: int
    start: int
    stop: int
    state: SlotState

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> list[int]:
        return self.state.tokens[self.start : self.stop]

    def behind(self, step: Step, buckets: Sequence[int]) -> Step:
        """The step with these rows, too: those that were in it stay where they are."""
        return Step(
            (*step.segments, Segment(self.slot, self.start, self.rows)), bucket_of(buckets, step.rows + self.rows)
        )


def piece_of(shard: Shard, chunk: int, state: SlotState | DeviceFailed, effect: RunPrefill) -> PromptPiece | None:
    """What can go with decode steps: not where a forward settles at once or not at all, nor where anybody asks what
    these rows say, nor what is no slot's next.
    """
    if isinstance(state, DeviceFailed) or shard.state_specs or effect.logprobs >= 0:
        return None
    return (
        PromptPiece(effect.slot, effect.start, effect.stop, state)
        if misfit(shard, chunk, state, effect) is None
        else None
    )


def misfit(shard: Shard, chunk: int, state: SlotState, effect: RunPrefill) -> DeviceFailed | None:
    """Why the slot's next rows cannot be these."""
    slot, start, stop = effect.slot, effect.start, effect.stop
    if start != state.valid:
        return DeviceFailed("broken", f"slot {slot} has {state.valid} rows; a chunk cannot start at {start}")
    most = chunk * (shard.span if isinstance(shard, Pipeline) else 1)
    if not 0 < stop - start <= most or stop > len(state.tokens):
        limits = f"at most {most} of the prompt's {len(state.tokens)}"
        return DeviceFailed("broken", f"slot {slot}: rows {start}..{stop} are not {limits}")
    return None


def prefilled(
    shard: Shard,
    buckets: Sequence[int],
    state: SlotState,
    effect: RunPrefill,
    given_up: Callable[[], bool],
    *,
    follow: Follow,
) -> Iterator[int]:
    """How far it came, with each chunk, once its rows are there: of a shard that is told ahead, that is while it is at
    the next one. buckets: a chunk is the largest. No other one begins once it is given up; those that have begun are
    finished, so that all shards have the same rows. follow: reads what a chunk leaves, before the next one begins.
    """

    def told() -> Iterator[tuple[int, torch.cuda.Event | None]]:
        for step, forward in launched(shard, buckets, state, effect, given_up):
            follow(step, forward, [step.rows], [state])
            yield step.segments[0].start + step.rows, mark(shard.device) if ahead else None

    ahead = isinstance(shard, Pipeline) and shard.ahead
    try:
        for stop, event in one_behind(told()) if ahead else told():
            if event is not None:
                event.synchronize()
            state.advance(stop)
            yield stop
    except BaseException:
        with suppress(RuntimeError):  # of chunks before it: where their rows are may be somebody else's soon
            shard.synchronize()
        raise


def one_behind(items: Iterable[T]) -> Iterator[T]:
    """Each of them, once the next one was asked for."""
    held = list[T]()
    for item in items:
        yield from held
        held = [item]
    yield from held


def launched(
    shard: Shard,
    buckets: Sequence[int],
    state: SlotState,
    effect: RunPrefill,
    given_up: Callable[[], bool],
) -> Iterator[tuple[Step, Forward]]:
    """What each chunk leaves, in order, to be read before the next one."""
    chunk = max(buckets)
    begun = list[Step]()

    def chunks() -> Iterator[tuple[Step, Tensor]]:
        for start in range(effect.start, effect.stop, chunk):
            if begun and given_up():
                return
            rows = min(chunk, effect.stop - start)
            step = Step((Segment(effect.slot, start, rows),), bucket_of(buckets, rows), rows_only=True)
            begun.append(step)
            yield step, torch.from_numpy(np.array(state.tokens[start : start + rows]))

    if effect.stop - effect.start > chunk and isinstance(shard, Pipeline):
        left = shard.prefill(chunks())
    else:
        left = (shard.forward(*one) for one in chunks())
    for number, forward in enumerate(left):
        yield begun[number], forward
