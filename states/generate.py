"""Unparking, Prefilling, Speculating: the work that a client waits for."""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import Decoded, RunDecode
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import ModelLoaded, UnloadModel
from effects.stream import CloseStream, EmitTokens, ReportProgress
from states import scope
from states import speculation_control as control
from states.machine import Transition
from states.phases import NOTHING, Failing, Finished, Work, chunk, fail, fail_emptied, finish, next_decode, work
from states.request_states import (
    Done,
    Drafted,
    Generated,
    Parking,
    Prefilling,
    SlotLease,
    Speculating,
    Undrafted,
    Unparking,
)
from states.restore import progress
from states.settings import DecisionContext


def unparked(state: Unparking, _: ModelLoaded, known: DecisionContext) -> Work:
    fresh = control.fresh(known.settings, known.rates)
    return work(known.settings, state.seat, state.prompt, Drafted(fresh))


def plain(state: Unparking, event: DeviceFailed, known: DecisionContext) -> Work:
    """A failed unpark decodes without a draft: the same answer, token by token."""
    return work(known.settings, state.seat, state.prompt, Undrafted(f"unpark_{event.kind}"))


def prefilled(
    state: Prefilling, event: PrefillAdvanced, known: DecisionContext
) -> (
    Transition[Prefilling, ReportProgress]
    | Transition[Prefilling, ReportProgress, RunPrefill]
    | Transition[Speculating, ReportProgress, RunDecode]
):
    seat, prompt, speculation = state.seat.computed(event.stop), state.prompt, state.speculation
    if event.logprobs:
        prompt = evolve(prompt, logprobs=prompt.logprobs[: state.seat.valid] + event.logprobs)
    if event.more:
        return Transition(Prefilling(seat, prompt, speculation), progress(seat, prompt))
    if event.stop < prompt.target:
        following = chunk(known.settings, seat, prompt, prompt.target)
        return Transition(Prefilling(seat, prompt, speculation), progress(seat, prompt), following)
    one = next_decode(known.settings, seat, prompt, speculation, NOTHING)
    return Transition(Speculating(seat, prompt, speculation, NOTHING), progress(seat, prompt), one)


Accepted: TypeAlias = (
    Transition[Speculating, EmitTokens, RunDecode]
    | Transition[Speculating, RunDecode]
    | Transition[Speculating, EmitTokens]
    | Finished
    | Transition[Parking, CloseStream, UnloadModel]
    | Transition[Done, CloseStream]
)

DIFFERS = "the rows of its slot were lost, and computed again they gave another answer than the client has heard"


def accept(state: Speculating, event: Decoded, known: DecisionContext) -> Accepted:
    """Take what the target agreed to, up to a stop token or the limit.

    The executor is told of both and keeps nothing past them; here it is made sure, for what a client gets. What it has
    heard before its slot was lost is not said again. Until then, and at its end, no launch goes on with it alone.
    """
    seat, prompt, speculation, before = state.seat, state.prompt, state.speculation, state.answer
    job, said = prompt.job, before.tokens
    tokens = event.tokens[: job.max_tokens - len(said)]
    stops = [at for at, token in enumerate(tokens) if token in job.stop_tokens]
    if stops:
        tokens = tokens[: stops[0] + 1]
    seat = SlotLease(seat.slot, seat.valid + len(tokens), seat.restored, seat.tier)
    accepted = before.accepted + min(event.accepted, len(tokens))
    decode_steps = before.decode_steps + event.steps
    answer = Generated(said + tokens, decode_steps, before.proposed + event.proposed, accepted)
    if isinstance(speculation, Drafted):
        speculation = Drafted(control.after(speculation.control, event), speculation.reason)
    after = Speculating(seat, prompt, speculation, answer)
    heard = prompt.heard[len(said) : len(said) + len(tokens)] if prompt.heard else ()
    if heard and tokens[: len(heard)] != heard:
        return fail_emptied(known, after, DIFFERS)
    emit = EmitTokens(tokens[len(heard) :], event.logprobs[len(heard) : len(tokens)])
    ends = bool(stops) or len(answer.tokens) == job.max_tokens
    assert not (event.more and (ends or heard)), event
    if ends:
        return finish(known, after, emit, "stop" if stops else "length")
    if event.more:
        return Transition(after, emit)
    mark = scope.passed(known.settings, prompt, state.seat.valid, seat.valid)
    one = next_decode(known.settings, seat, prompt, speculation, answer, checkpoint=mark)
    return Transition(after, emit, one) if emit.tokens else Transition(after, one)


def broken(state: Prefilling | Speculating, event: DeviceFailed, known: DecisionContext) -> Failing:
    return fail(known, state, event)
