"""Transitions after a slot's rows are lost: the request is served again from the start, once.

When rows are lost a second time, the request fails (`Prompt.heard_tokens` is None until the first time). Tokens of the
answer that the client has heard are not sent again: the same prompt gives the same answer, so it is computed again from
its start and compared with what was heard. Effects that were in flight when the rows were lost still answer, and their
outcomes are dropped here. A request that waits for a slot again is the next one in the queue (`requeue_holder` in
`states/slots.py`).
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed, ReleasePrefix
from effects.prefill import PrefillAdvanced
from effects.prompt_compression import PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored
from effects.stream import Abandon, CloseStream
from states.events import Cancelled, SlotEmptied
from states.machine import Transition
from states.phases import forget_all_rows, unload_model
from states.reports import make_report, make_report_without_slot
from states.request_states import (
    FINISH,
    AnsweringState,
    Draining,
    Parking,
    Recovering,
    RequestRemainder,
    Restoring,
    Snapshotting,
    Waiting,
    Yielding,
    get_remainder,
)
from states.settings import DecisionContext

RecoverOrFail: TypeAlias = Transition[Recovering, Abandon] | Transition[Draining, CloseStream, Abandon]
KeepRecovering: TypeAlias = Transition[Recovering] | Transition[Waiting]
RequeueOrYield: TypeAlias = Transition[Waiting] | Transition[Yielding, UnloadModel]

LOST_TWICE = "the rows of its slot were lost a second time"


# --- the rows are lost ---


def recover_or_fail(state: AnsweringState, _: SlotEmptied, context: DecisionContext) -> RecoverOrFail:
    """Abandon what is in flight, and wait for its outcomes before the request waits for a slot again.

    If rows of this request were lost before, the request fails instead: its stream is closed with `LOST_TWICE`.
    """
    left = forget_all_rows(get_remainder(state))
    in_flight = state.loading + state.computing if isinstance(state, Restoring) else 1
    if left.prompt.heard_tokens is None:
        left = evolve(left, prompt=evolve(left.prompt, heard_tokens=left.answer))
        return Transition(Recovering(left, in_flight), Abandon())
    closing = CloseStream("lost", make_report(context, state), LOST_TWICE)
    return Transition(Draining(left, in_flight, rows_lost=True), closing, Abandon())


def forget_rows_while_draining(state: Draining, _: SlotEmptied, __: DecisionContext) -> Transition[Draining]:
    """Note that no row of the slot is left to be kept. The effects in flight still answer."""
    return Transition(Draining(forget_all_rows(state.remainder), state.in_flight, rows_lost=True))


def forget_rows_while_snapshotting(
    state: Snapshotting, _: SlotEmptied, __: DecisionContext
) -> Transition[Snapshotting]:
    """Note that no row of the slot is left. The snapshot in flight still answers."""
    return Transition(Snapshotting(forget_all_rows(state.remainder)))


def forget_rows_while_parking(state: Parking, _: SlotEmptied, __: DecisionContext) -> Transition[Parking]:
    """Note that no row of the slot is left. The unload in flight still answers."""
    return Transition(Parking(forget_all_rows(state.remainder)))


# --- outcomes of what was in flight ---


def release_found_prefix(
    state: Recovering, event: PrefixFound, _: DecisionContext
) -> Transition[Waiting, ReleasePrefix]:
    """Give the lease back. The lookup was all that was in flight."""
    return Transition(Waiting(note_shared_tokens(state.remainder, event).prompt), ReleasePrefix(event.lease))


def requeue_after_miss(state: Recovering, event: PrefixMissed, _: DecisionContext) -> Transition[Waiting]:
    """Wait for a slot again. The lookup was all that was in flight."""
    return Transition(Waiting(note_shared_tokens(state.remainder, event).prompt))


def note_shared_tokens(left: RequestRemainder, event: PrefixFound | PrefixMissed) -> RequestRemainder:
    """Keep the result of the comparison with recent prompts, because the next lookup does not compare again."""
    return evolve(left, prompt=evolve(left.prompt, shared_tokens=left.prompt.shared_tokens or event.shared))


def drop_restored_rows(state: Recovering, _: BlocksRestored | StoreFailed, __: DecisionContext) -> KeepRecovering:
    """Ignore the outcome of a load or a lookup. Wait for a slot again if nothing else is in flight."""
    if state.in_flight > 1:
        return Transition(Recovering(state.remainder, state.in_flight - 1))
    return Transition(Waiting(state.remainder.prompt))


def yield_prompt_scorer(
    state: Recovering, _: PromptScored | PromptCompressed, context: DecisionContext
) -> Transition[Yielding, UnloadModel]:
    """Give the prompt scorer back. The prompt is scored again in the next slot."""
    return Transition(Yielding(state.remainder), unload_model(context.settings, "scorer"))


def yield_loaded_model(
    state: Recovering, event: ModelLoaded, context: DecisionContext
) -> Transition[Yielding, UnloadModel]:
    """Give the model back that was loaded for the request meanwhile."""
    left = evolve(state.remainder, leased_model=event.name)
    return Transition(Yielding(left), unload_model(context.settings, event.name))


def drop_computed_rows(
    state: Recovering, event: PrefillAdvanced | DeviceFailed, context: DecisionContext
) -> Transition[Recovering] | RequeueOrYield:
    """Ignore the outcome of a device effect, and go on once everything in flight has answered."""
    if isinstance(event, PrefillAdvanced) and event.more:
        return Transition(state)
    if state.in_flight > 1:
        return Transition(Recovering(state.remainder, state.in_flight - 1))
    return requeue_or_yield(state, context)


def drop_decoded_tokens(
    state: Recovering, event: Decoded, context: DecisionContext
) -> Transition[Recovering] | RequeueOrYield:
    """Ignore decoded tokens, and go on after the last outcome of the launch."""
    return Transition(state) if event.more else requeue_or_yield(state, context)


def requeue_or_yield(state: Recovering, context: DecisionContext) -> RequeueOrYield:
    """Wait for a slot again, after the leased model is given back if there is one."""
    leased_model = state.remainder.leased_model
    if leased_model:
        return Transition(Yielding(state.remainder), unload_model(context.settings, leased_model))
    return Transition(Waiting(state.remainder.prompt))


def requeue_request(state: Yielding, _: ModelUnloaded | DeviceFailed, __: DecisionContext) -> Transition[Waiting]:
    """Wait for a slot again. Whether the model could be unloaded does not matter to this request."""
    return Transition(Waiting(state.remainder.prompt))


# --- cancelled meanwhile ---


def cancel_recovering(
    state: Recovering, event: Cancelled, _: DecisionContext
) -> Transition[Draining, CloseStream, Abandon]:
    """Close the stream, and wait for the outcomes of what is in flight."""
    report = make_report_without_slot(state.remainder.prompt)
    closing = CloseStream(FINISH[event.reason], report, event.reason)
    return Transition(Draining(state.remainder, state.in_flight, rows_lost=True), closing, Abandon())


def cancel_yielding(state: Yielding, event: Cancelled, _: DecisionContext) -> Transition[Parking, CloseStream]:
    """Close the stream. The effect that gives the model back is in flight already."""
    report = make_report_without_slot(state.remainder.prompt)
    return Transition(Parking(state.remainder), CloseStream(FINISH[event.reason], report, event.reason))
