"""Transitions of UnparkingDraft, Prefilling and Speculating: the work that a client waits for."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import ModelLoaded, UnloadModel
from effects.stream import CloseStream, EmitTokens, ReportProgress
from states import scope, suffix_control
from states.machine import Transition
from states.phases import (
    NOTHING,
    FailRequest,
    FinishStream,
    PrefillOrDecode,
    choose_without_draft,
    fail_request,
    fail_untrusted,
    finish_stream,
    make_decode_step,
    make_prefill_chunk,
    prefill_or_decode,
)
from states.request_states import (
    Done,
    Generated,
    MayPropose,
    Parking,
    Prefilling,
    SlotLease,
    Speculating,
    Speculation,
    UnparkingDraft,
)
from states.restore import make_progress_report
from states.settings import DecisionContext


def start_with_draft(state: UnparkingDraft, _: ModelLoaded, context: DecisionContext) -> PrefillOrDecode:
    """Begin to compute the prompt, now that the draft is loaded and leased to the request."""
    control = suffix_control.make_control(context.settings, context.rates)
    return prefill_or_decode(context.settings, state.slot_lease, state.prompt, MayPropose(control))


def start_without_draft(state: UnparkingDraft, event: DeviceFailed, context: DecisionContext) -> PrefillOrDecode:
    """Go on without the draft, which could not be loaded. The answer is the same, token by token."""
    speculation = choose_without_draft(context, f"unpark_{event.kind}")
    return prefill_or_decode(context.settings, state.slot_lease, state.prompt, speculation)


def continue_prefill(
    state: Prefilling, event: PrefillAdvanced, context: DecisionContext
) -> (
    Transition[Prefilling, ReportProgress]
    | Transition[Prefilling, ReportProgress, RunPrefill]
    | Transition[Speculating, ReportProgress, RunDecode]
):
    """Compute the next rows of the prompt, or begin to decode after the last ones."""
    slot_lease = state.slot_lease.with_computed_rows(event.stop)
    prompt = state.prompt
    speculation = state.speculation
    if event.logprobs:
        prompt = evolve(prompt, logprobs=prompt.logprobs[: state.slot_lease.valid_rows] + event.logprobs)
    progress = make_progress_report(slot_lease, prompt)
    if event.more:
        return Transition(Prefilling(slot_lease, prompt, speculation), progress)
    if event.stop < prompt.prefill_rows:
        chunk = make_prefill_chunk(context.settings, slot_lease, prompt, prompt.prefill_rows)
        return Transition(Prefilling(slot_lease, prompt, speculation), progress, chunk)
    decode_step = make_decode_step(context.settings, slot_lease, prompt, speculation, NOTHING)
    return Transition(Speculating(slot_lease, prompt, speculation, NOTHING), progress, decode_step)


AcceptTokens: TypeAlias = (
    Transition[Speculating, EmitTokens, RunDecode]
    | Transition[Speculating, RunDecode]
    | Transition[Speculating, EmitTokens]
    | FinishStream
    | Transition[Parking, CloseStream, UnloadModel]
    | Transition[Done, CloseStream]
)

ANSWER_DIFFERS = "the rows of its slot were lost, and computed again they gave another answer than the client has heard"


def accept_tokens(state: Speculating, event: Decoded, context: DecisionContext) -> AcceptTokens:
    """Take the tokens that the target picked, up to a stop token or the limit, and go on or finish.

    The executor knows the stop tokens and the limit, and keeps nothing past them. They are applied here once more, so
    that a client never gets more. Tokens that the client had before the slot's rows were lost are compared and not sent
    again. While they are compared, and at the end of the answer, no launch may run unattended.
    """
    prompt = state.prompt
    job = prompt.job
    before = state.answer
    said = len(before.tokens)
    tokens = event.tokens[: job.max_tokens - said]
    stops = [at for at, token in enumerate(tokens) if token in job.stop_tokens]
    if stops:
        tokens = tokens[: stops[0] + 1]
    count = len(tokens)
    lease = state.slot_lease
    slot_lease = SlotLease(lease.slot, lease.valid_rows + count, lease.reused_rows, lease.tier)
    answer = Generated(
        before.tokens + tokens,
        before.decode_steps + event.steps,
        before.proposed + event.proposed,
        before.accepted + min(event.accepted, count),
    )
    speculation = state.speculation
    if event.proposed or event.rows or event.matched or speculation.learns_from_plain_steps:
        speculation = learn_from_proposals(speculation, event, said)  # hardly any outcome of new text comes here
    after = Speculating(slot_lease, prompt, speculation, answer)
    heard = prompt.heard_tokens[said : said + count] if prompt.heard_tokens else ()
    if heard and tokens[: len(heard)] != heard:
        return fail_untrusted(context, after, ANSWER_DIFFERS)
    emit = EmitTokens(tokens[len(heard) :], event.logprobs[len(heard) : count])
    ends = bool(stops) or said + count == job.max_tokens
    assert not (event.more and (ends or heard)), event
    if ends:
        return finish_stream(context, after, emit, "stop" if stops else "length")
    if event.more:
        return Transition(after, emit)
    keeps_state = scope.has_passed_mark(context.settings, prompt, lease.valid_rows, slot_lease.valid_rows)
    decode_step = make_decode_step(context.settings, slot_lease, prompt, speculation, answer, checkpoint=keeps_state)
    return Transition(after, emit, decode_step) if emit.tokens else Transition(after, decode_step)


def learn_from_proposals(speculation: Speculation, event: Decoded, said: int) -> Speculation:
    """Return what a request proposes after one more outcome. said: the tokens of the answer before it."""
    if not isinstance(speculation, MayPropose) or suffix_control.teaches_nothing(speculation.control, event):
        return speculation
    reason = "" if event.copied else speculation.reason
    control = suffix_control.settle(speculation.control, said)
    return MayPropose(suffix_control.update_control(control, event), reason)


def fail_generation(state: Prefilling | Speculating, event: DeviceFailed, context: DecisionContext) -> FailRequest:
    """Close the stream with the failure. What can be trusted of the rows is kept."""
    return fail_request(context, state, event)
