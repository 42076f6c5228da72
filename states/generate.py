"""Unparking, Prefilling, Speculating: the work that a client waits for."""

from __future__ import annotations

from attrs import evolve

from effects.decode import Decoded, RunDecode
from effects.draft import DraftUnparked
from effects.ids import DeviceFailed
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.stream import EmitTokens, ReportProgress
from states import pace
from states.life import Prefilling, Speculating, Unparking
from states.machine import Then
from states.onward import Failing, Finished, Work, chunk, fail, finish, next_decode, work
from states.restore import progress


def unparked(state: Unparking, _: DraftUnparked) -> Work:
    hold = state.hold
    return work(evolve(hold, draft=True, pace=pace.fresh(hold.settings, hold.rates)))


def plain(state: Unparking, event: DeviceFailed) -> Work:
    """A failed unpark decodes without a draft: the same answer, token by token."""
    return work(evolve(state.hold, speculation=f"unpark_{event.kind}"))


def prefilled(
    state: Prefilling, event: PrefillAdvanced
) -> Then[Prefilling, ReportProgress, RunPrefill] | Then[Speculating, ReportProgress, RunDecode]:
    hold = evolve(state.hold, valid=event.stop)
    if event.stop < hold.target:
        return Then(Prefilling(hold), progress(hold), chunk(hold, hold.target))
    hold, one = next_decode(hold)
    return Then(Speculating(hold), progress(hold), one)


def accept(state: Speculating, event: Decoded) -> Then[Speculating, EmitTokens, RunDecode] | Finished:
    """Take what the target agreed to, up to a stop token or the limit.

    The executor is told of both and keeps nothing past them; here it is made sure, for what a client gets.
    """
    hold, job = state.hold, state.hold.job
    tokens = event.tokens[: job.max_tokens - len(hold.answer)]
    stops = [at for at, token in enumerate(tokens) if token in job.stop_tokens]
    if stops:
        tokens = tokens[: stops[0] + 1]
    hold = evolve(
        hold,
        valid=hold.valid + len(tokens),
        answer=hold.answer + tokens,
        decode_steps=hold.decode_steps + 1,
        proposed=hold.proposed + event.proposed,
        accepted=hold.accepted + min(event.accepted, len(tokens)),
        pace=hold.pace and pace.after(hold.pace, event.proposed, event.accepted, len(tokens), event.ns),
    )
    emit = EmitTokens(tokens, event.logprobs[: len(tokens)])
    if stops or len(hold.answer) == job.max_tokens:
        return finish(hold, emit, "stop" if stops else "length")
    hold, one = next_decode(hold)
    return Then(Speculating(hold), emit, one)


def broken(state: Prefilling | Speculating, event: DeviceFailed) -> Failing:
    return fail(state.hold, event)
