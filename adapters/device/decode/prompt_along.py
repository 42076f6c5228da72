"""Prompts whose rows go along with the steps of a launch that decodes (`RunPrefill.forward_rows`).

Overlapped decode (`overlapped_decode.py`) launches each step before it has read the one before. The rows of a prompt
need nothing of the step before but that it was launched. So they can go along with such steps:

    device:   16 decode rows, prompt rows 0..496 | 16 decode rows, prompt rows 496..992 | 17 decode rows
    host:     launch the second step, report 992 rows | read the first one's picks | launch the third step | ...

The last rows are reported as soon as they are launched. Whatever the lane launches behind it finds them in place, and
copies on other streams wait for all that it has launched. So the prompt's first decode step, or its next rows, can go
with the next step already. The rows of the step in front are covered by that outcome. So rows 0..496 of the example
have none of their own, although the step that computes them is read later.

If the forward of the last rows has room, it computes the row of the prompt's last token as well. Then the first decode
step needs no forward (`kept_rows.py`).

Invariants:

* The decode rows come first in a forward, so their logits have the bits that they have alone.
* Prompts take the rows of a forward in the order in which they came. So a prompt has rows in every step from its first
  one to its last one. With positional state one prompt goes along at a time, unless a step moves the states of several
  slots (`PositionalStates.commits_per_segment`).
* Rows count as valid when the step that computes them has been read, or when the last rows of the prompt have been
  launched, if that is sooner.
* A prompt has outcomes with `more`, then one without. That one comes with its last rows, or sooner: where it is given
  up, or where the launch ends.
* Without memory for a step with its rows the prompt fails. Its positional state may have moved by then, so such a slot
  is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.device.decode.last_row import has_place_for_last_row
from adapters.device.decode.prefill import PromptPiece, find_prompt_piece
from adapters.device.lane.out_of_memory import out_of_memory_failure
from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState, abandoned_failure
from adapters.models.decoder.pipeline.pipeline import Pipeline
from effects.all import EffectRequest, Outcome
from effects.ids import DeviceFailed, RequestId
from effects.prefill import PrefillAdvanced, RunPrefill


@define(eq=False)
class PromptAlong:
    """A prompt that goes along.

    next_row: rows of the slot before it are there, or were launched. has_ended: its last outcome was reported.
    """

    effect_request: EffectRequest
    effect: RunPrefill
    state: SlotState
    next_row: int
    has_ended: bool = False


@frozen(eq=False)
class PromptRows:
    """The rows of a prompt that a step computes together with decode rows.

    has_last_row: behind them the step computes the row of the prompt's last token, which is kept.
    """

    prompt: PromptAlong
    piece: PromptPiece
    has_last_row: bool = False

    @property
    def computed_piece(self) -> PromptPiece:
        """The rows that the step computes."""
        piece = self.piece
        return PromptPiece(piece.slot, piece.start, piece.stop + self.has_last_row, piece.state)

    @property
    def are_last(self) -> bool:
        """Are they the last ones of the effect?"""
        return self.piece.stop == self.prompt.effect.stop

    def report(self, following: Sequence[PromptRows]) -> list[tuple[RequestId, Outcome]]:
        """Count the rows as computed, and return their outcome, unless the prompt has ended.

        following: what the next step takes along.
        """
        if self.prompt.has_ended:
            return []
        self.piece.state.mark_computed(self.piece.stop)
        self.prompt.has_ended = all(one.prompt is not self.prompt for one in following)
        return [(self.prompt.effect_request.request, PrefillAdvanced(self.piece.stop, more=not self.prompt.has_ended))]


@define(eq=False)
class PlaceAlong:
    """The place of the prompts that go along with a launch. Used on the lane.

    chunk: the most rows of a forward. is_abandoned: is a request given up? keeps_last_rows: may forwards have the rows
    of prompts' last tokens? With positional state or a draft they may not: these would have to take the row back.
    """

    shard: Pipeline
    chunk: int
    slots: SlotTable
    is_abandoned: Callable[[RequestId], bool]
    keeps_last_rows: bool = False
    _prompts: list[PromptAlong] = field(init=False, factory=list[PromptAlong])  # with rows that were not launched yet

    def begin(self, effect_request: EffectRequest) -> list[tuple[RequestId, Outcome]]:
        """Let a prompt go along from the next step on that has room. Return its failure if it cannot, else nothing.

        A second prompt whose state the step cannot move, or rows that cannot share a forward, are a bug: the core asks
        for neither (`may_go_along` and `has_room_along` of `states/lane.py`). So such a prompt fails and is not
        computed by itself, which would hide the bug.
        """
        effect = effect_request.effect
        assert isinstance(effect, RunPrefill), effect_request
        if self.is_abandoned(effect_request.request):
            return [(effect_request.request, abandoned_failure(effect_request.request))]
        state = self.slots.find(effect.slot, effect_request.request)
        if isinstance(state, DeviceFailed):
            return [(effect_request.request, state)]
        states = self.shard.states
        is_second = bool(self._prompts and states.specs and not states.commits_per_segment)
        if is_second or find_prompt_piece(self.shard, self.chunk, state, effect) is None:
            rows = f"slot {effect.slot}: rows {effect.start}..{effect.stop}"
            return [(effect_request.request, DeviceFailed("broken", f"{rows} cannot go along with decode steps"))]
        state.rows_ahead = 0  # they are overwritten
        self._prompts.append(PromptAlong(effect_request, effect, state, effect.start))
        return []

    def drop_abandoned(self) -> list[tuple[RequestId, Outcome]]:
        """Let prompts that were given up go no further. Return the failures of those without a launched row."""
        failures = list[tuple[RequestId, Outcome]]()
        for prompt in tuple(self._prompts):
            request = prompt.effect_request.request
            if self.is_abandoned(request):
                self._prompts.remove(prompt)
                if prompt.next_row == prompt.effect.start:
                    failures.append((request, abandoned_failure(request)))
        return failures

    def find_rows(self, decode_rows: int) -> tuple[PromptRows, ...]:
        """Return the rows of each prompt that go with the next step, which has so many decode rows."""
        found = list[PromptRows]()
        room = max(1, self._prompts[0].effect.forward_rows - decode_rows) if self._prompts else 0
        for prompt in self._prompts:
            if not room:
                break
            stop = min(prompt.next_row + room, prompt.effect.stop)
            room -= stop - prompt.next_row
            has_last_row = self.keeps_last_rows and room > 0 and has_place_for_last_row(prompt.state, stop)
            room -= has_last_row
            piece = PromptPiece(prompt.effect.slot, prompt.next_row, stop, prompt.state)
            found.append(PromptRows(prompt, piece, has_last_row))
        return tuple(found)

    def note_launched(self, launched: Sequence[PromptRows]) -> list[tuple[RequestId, Outcome]]:
        """Note that a step with these rows was launched. Return the outcomes of prompts whose last ones are there."""
        outcomes = list[tuple[RequestId, Outcome]]()
        for rows in launched:
            rows.prompt.next_row = rows.piece.stop
            if rows.are_last:
                self._prompts.remove(rows.prompt)
                outcomes += rows.report(())
        return outcomes

    def fail(self, error: Exception) -> list[tuple[RequestId, Outcome]]:
        """Let all prompts fail, because there was no memory for a step with their rows. Return the failures."""
        failures = list[tuple[RequestId, Outcome]]()
        for prompt in self._prompts:
            prompt.has_ended = True
            failure = out_of_memory_failure(error)
            if self.shard.states.specs:
                failure = DeviceFailed("broken", f"slot {prompt.effect.slot} was being settled: {error}")
                self.slots.put(prompt.effect.slot, failure)
            failures.append((prompt.effect_request.request, failure))
        self._prompts.clear()
        return failures

    def end(self) -> list[EffectRequest]:
        """End the launch. Return the prompts that have to be computed in another way, since no step took them along."""
        untouched = [one.effect_request for one in self._prompts if one.next_row == one.effect.start]
        self._prompts.clear()
        return untouched


def append_tokens(tokens: Tensor, along: Sequence[PromptRows]) -> Tensor:
    """Return the tokens of a step with those of the rows that go along: int64, on the device of the step's own."""
    own = torch.tensor([token for rows in along for token in rows.computed_piece.tokens], dtype=torch.int64)
    return torch.cat((tokens, own.to(tokens.device, non_blocking=True)))


def goes_along(effect_request: EffectRequest) -> bool:
    """Is it a prompt whose rows go along with several decode steps?"""
    return isinstance(effect_request.effect, RunPrefill) and effect_request.effect.forward_rows > 0


def limit_to_forward(effect_request: EffectRequest, decode_rows: int) -> EffectRequest:
    """Return the effect with the rows that go with a single step of so many decode rows, if it `goes_along`.

    It is called where steps are not overlapped. If rows are cut, the effect keeps no checkpoint: its end is another.
    """
    effect = effect_request.effect
    if not (isinstance(effect, RunPrefill) and effect.forward_rows):
        return effect_request
    stop = min(effect.stop, effect.start + max(1, effect.forward_rows - decode_rows))
    if stop == effect.stop:
        return effect_request
    return EffectRequest(effect_request.request, evolve(effect, stop=stop, checkpoint=False, device_checkpoint=None))
