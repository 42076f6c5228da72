"""Reports: what a client learns of its request when it ends. Every transition that closes a stream makes one."""

from __future__ import annotations

from effects.compression import Compressed
from effects.job import Report
from states import policy, scope
from states.request_states import AnsweringState, Followed, Generated, Prefilling, Prompt, Speculating, get_remainder
from states.settings import DecisionContext


def make_report(context: DecisionContext, state: AnsweringState) -> Report:
    """Return the report that the client gets if the request ends now."""
    slot_lease = state.slot_lease
    prompt = state.prompt
    answer = state.answer if isinstance(state, Speculating) else Generated()
    followed = prompt.followed or Followed(0)
    return Report(
        prompt_tokens=len(prompt.tokens),
        restored_tokens=slot_lease.reused_rows,
        followed_tokens=min(followed.rows, slot_lease.reused_rows),
        follow_wait_ns=followed.waiting_ns,
        follow_compute_ns=followed.computing_ns,
        tier=slot_lease.tier,
        miss=prompt.miss_reason,
        completion_tokens=max(len(answer.tokens), len(prompt.heard_tokens or ())),
        decode_steps=answer.decode_steps,
        proposed=answer.proposed,
        accepted=answer.accepted,
        speculation=explain_no_proposals(context, state),
        compression=report_compression(context, state),
        cache=scope.select_rows_to_keep(context.settings, get_remainder(state)),
        prompt_logprobs=prompt.logprobs,
    )


def report_compression(context: DecisionContext, state: AnsweringState) -> Compressed | None:
    """Return what was left out of the prompt, or why nothing was; None: compression is off."""
    prompt = state.prompt
    job = prompt.job
    if job.compression.mode == "off" or prompt.compression is not None:
        return prompt.compression
    if prompt.compression_tried:
        why_not = "" if len(prompt.tokens) < len(job.prompt) else "not_shorter"
        return Compressed(len(job.prompt), why_not, keep=job.compression.keep)
    decision = policy.decide_compression(context, prompt, prompt.prefill_rows - state.slot_lease.reused_rows)
    return Compressed(len(job.prompt), "not_reached" if decision.go else decision.reason)


def make_report_without_slot(prompt: Prompt) -> Report:
    """Return the report of a request that holds no slot, whose rows could be reported."""
    return Report(len(prompt.tokens), completion_tokens=len(prompt.heard_tokens or ()))


def explain_no_proposals(context: DecisionContext, state: AnsweringState) -> str:
    """Return why nothing, nothing more, or no tree is proposed; "" if all that was asked for is, or may yet be."""
    if isinstance(state, Prefilling | Speculating):
        return state.speculation.reason or ("no_trees" if context.settings.no_trees else "")
    decision = policy.decide_speculation(context, state.prompt.job)
    return "" if decision.go else decision.reason
