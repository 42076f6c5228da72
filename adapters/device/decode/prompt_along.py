"""A prompt whose rows go along with the steps of a launch that decodes (`RunPrefill.forward_rows`).

Overlapped decode (`overlapped_decode.py`) launches each step before it has read the one before. The rows of a prompt
need nothing of the step before but that it was launched. So they can go along with such steps:

    device:   16 decode rows, prompt rows 0..496 | 16 decode rows, prompt rows 496..992 | 17 decode rows
    host:     launch the second step, report 992 rows | read the first one's picks | launch the third step | ...

The last rows are reported as soon as they are launched. Whatever the lane launches behind them finds them in place, and
copies on other streams wait for all that it has launched. So the prompt's first decode step, or its next rows, can go
with the next step already. The rows of the step in front are covered by that outcome. So rows 0..496 of the example
have none of their own, although the step that computes them is read later.

Invariants:

* One prompt goes along at a time. The decode rows come first in a forward, so their logits have the bits that they have
  alone.
* Rows count as valid when the step that computes them has been read, or when the last rows of the prompt have been
  launched, if that is sooner.
* A prompt has outcomes with `more`, then one without. That one comes with its last rows, or sooner: where it is given
  up, or where the launch ends.
* Without memory for a step with its rows the prompt fails. Its positional state may have moved by then, so such a slot
  is broken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

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
    """The rows of a prompt that a step computes together with decode rows."""

    prompt: PromptAlong
    piece: PromptPiece

    @property
    def are_last(self) -> bool:
        """Are they the last ones of the effect?"""
        return self.piece.stop == self.prompt.effect.stop

    def append_tokens(self, tokens: Tensor) -> Tensor:
        """Return the tokens of a step with those of these rows behind them: int64, on the device of the step's own."""
        own = torch.tensor(self.piece.tokens, dtype=torch.int64)
        return torch.cat((tokens, own.to(tokens.device, non_blocking=True)))

    def report(self, following: PromptRows | None) -> list[tuple[RequestId, Outcome]]:
        """Count the rows as computed, and return their outcome, unless the prompt has ended.

        following: what the next step takes along.
        """
        if self.prompt.has_ended:
            return []
        self.piece.state.mark_computed(self.piece.stop)
        self.prompt.has_ended = following is None or following.prompt is not self.prompt
        return [(self.prompt.effect_request.request, PrefillAdvanced(self.piece.stop, more=not self.prompt.has_ended))]


@define(eq=False)
class PlaceAlong:
    """The place of the one prompt that goes along with a launch. Used on the lane.

    chunk: the most rows of a forward. is_abandoned: is a request given up?
    """

    shard: Pipeline
    chunk: int
    slots: SlotTable
    is_abandoned: Callable[[RequestId], bool]
    _prompt: PromptAlong | None = field(init=False, default=None)  # with rows that were not launched yet

    def begin(self, effect_request: EffectRequest) -> list[tuple[RequestId, Outcome]]:
        """Let a prompt go along from the next step on. Return its failure if it cannot, else nothing.

        A second prompt, or rows that cannot share a forward, are a bug: the core asks for neither (`may_go_along` and
        `can_join` of `states/lane.py`). So such a prompt fails and is not computed by itself, which would hide the bug.
        """
        effect = effect_request.effect
        assert isinstance(effect, RunPrefill), effect_request
        if self.is_abandoned(effect_request.request):
            return [(effect_request.request, abandoned_failure(effect_request.request))]
        state = self.slots.find(effect.slot, effect_request.request)
        if isinstance(state, DeviceFailed):
            return [(effect_request.request, state)]
        if self._prompt is not None or find_prompt_piece(self.shard, self.chunk, state, effect) is None:
            rows = f"slot {effect.slot}: rows {effect.start}..{effect.stop}"
            return [(effect_request.request, DeviceFailed("broken", f"{rows} cannot go along with decode steps"))]
        state.rows_ahead = 0  # they are overwritten
        self._prompt = PromptAlong(effect_request, effect, state, effect.start)
        return []

    def drop_abandoned(self) -> list[tuple[RequestId, Outcome]]:
        """Let a prompt that was given up go no further. Return its failure if none of its rows was launched."""
        prompt = self._prompt
        if prompt is None or not self.is_abandoned(prompt.effect_request.request):
            return []
        self._prompt = None
        request = prompt.effect_request.request
        return [] if prompt.next_row > prompt.effect.start else [(request, abandoned_failure(request))]

    def find_rows(self, decode_rows: int) -> PromptRows | None:
        """Return the rows that go with the next step, which has so many decode rows; None if none do."""
        prompt = self._prompt
        if prompt is None:
            return None
        effect = prompt.effect
        stop = min(prompt.next_row + max(1, effect.forward_rows - decode_rows), effect.stop)
        return PromptRows(prompt, PromptPiece(effect.slot, prompt.next_row, stop, prompt.state))

    def note_launched(self, rows: PromptRows) -> list[tuple[RequestId, Outcome]]:
        """Note that a step with these rows was launched. Return their outcome if they are the last ones."""
        rows.prompt.next_row = rows.piece.stop
        if not rows.are_last:
            return []
        self._prompt = None
        return rows.report(None)

    def fail(self, error: Exception) -> list[tuple[RequestId, Outcome]]:
        """Let the prompt fail, because there was no memory for a step with its rows. Return the failure."""
        prompt = self._prompt
        if prompt is None:
            return []
        self._prompt = None
        prompt.has_ended = True
        failure = out_of_memory_failure(error)
        if self.shard.states.specs:
            failure = DeviceFailed("broken", f"slot {prompt.effect.slot} was being settled: {error}")
            self.slots.put(prompt.effect.slot, failure)
        return [(prompt.effect_request.request, failure)]

    def end(self) -> list[EffectRequest]:
        """End the launch. Return the prompt that has to be computed in another way, since no step took it along."""
        prompt = self._prompt
        self._prompt = None
        return [prompt.effect_request] if prompt is not None and prompt.next_row == prompt.effect.start else []


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
