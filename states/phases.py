"""The phases of a request in order, each skipped where policy says that there is nothing to do.

The transitions of the other modules end in one of these functions. Each returns the next state together with the
effects that begin it. The order of phases is: look up, restore, compress (fetch, score, release the prompt scorer),
bring the draft in, prefill, decode; then, once the stream is closed: snapshot, give the leased model back, done.

The type aliases name what a function may return, because `states/machine.py` reads its table from these annotations.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve

from effects.decode import RunDecode
from effects.ids import CheckpointId, DeviceFailed, ModelName, SlotId, StoreFailed
from effects.lookup import FindPrefix
from effects.prefill import OpenSlot, RunPrefill
from effects.residency import LoadModel, UnloadModel
from effects.snapshot import SaveSnapshot
from effects.stream import CloseStream, EmitTokens, Finish
from states import policy, scope, suffix_control
from states.kept_rows import find_own_state
from states.machine import Transition, prepend_effect
from states.reports import make_report
from states.request_states import (
    AnsweringState,
    Done,
    Generated,
    LoadingScorer,
    LookingUp,
    MayPropose,
    Parking,
    Prefilling,
    Prompt,
    ProposesNothing,
    RequestRemainder,
    SlotLease,
    Snapshotting,
    Speculating,
    Speculation,
    UnparkingDraft,
    get_remainder,
)
from states.residency import make_unload
from states.settings import DecisionContext, Settings

NO_MATCH = "no_match"  # why a request proposes nothing before its text has matched an earlier position

StartDecode: TypeAlias = Transition[Speculating, RunDecode]
PrefillOrDecode: TypeAlias = Transition[Prefilling, RunPrefill] | StartDecode
FetchScorer: TypeAlias = Transition[LoadingScorer, LoadModel]
UnparkOrPrefill: TypeAlias = Transition[UnparkingDraft, LoadModel] | Transition[Prefilling, RunPrefill]
ComputeMissing: TypeAlias = FetchScorer | UnparkOrPrefill
ServePrompt: TypeAlias = Transition[UnparkingDraft, LoadModel] | PrefillOrDecode
ContinueRequest: TypeAlias = FetchScorer | ServePrompt
EndWithoutLease: TypeAlias = Transition[Snapshotting, SaveSnapshot] | Transition[Done]
ReleaseModel: TypeAlias = Transition[Parking, UnloadModel]
EndRequest: TypeAlias = EndWithoutLease | ReleaseModel
FinishStream: TypeAlias = (
    Transition[Snapshotting, EmitTokens, CloseStream, SaveSnapshot]
    | Transition[Parking, EmitTokens, CloseStream, UnloadModel]
    | Transition[Done, EmitTokens, CloseStream]
)
FailWithoutLease: TypeAlias = Transition[Snapshotting, CloseStream, SaveSnapshot] | Transition[Done, CloseStream]
FailRequest: TypeAlias = FailWithoutLease | Transition[Parking, CloseStream, UnloadModel]

NOTHING = Generated()


# --- up to the first token ---


def make_open_slot(
    settings: Settings,
    slot_lease: SlotLease,
    prompt: Prompt,
    source: SlotId | None = None,
    device_checkpoint: CheckpointId | None = None,
) -> OpenSlot:
    """Return the effect that makes the slot serve this prompt. source: whose rows it keeps; None: its own."""
    job = prompt.job
    return OpenSlot(
        slot_lease.slot,
        slot_lease.slot if source is None else source,
        slot_lease.rows,
        # A prompt that is longer than the context is served once it has been shortened.
        prompt.tokens[: settings.max_context],
        job.sampling,
        job.stop_tokens,
        slot_lease.valid_rows if settings.stateful else 0,
        device_checkpoint,
        job.salt,
    )


def look_up_prefix(settings: Settings, slot_lease: SlotLease, prompt: Prompt) -> Transition[LookingUp, FindPrefix]:
    """Search host memory and disk for more of the prompt than the slot has."""
    rows = slot_lease.rows if settings.stateful else 0
    prompts_to_compare = policy.count_prompts_to_compare(prompt)
    lookup = FindPrefix(prompt.tokens, slot_lease.valid_rows, prompts_to_compare, rows, prompt.job.salt)
    return Transition(LookingUp(slot_lease, prompt), lookup)


def continue_request(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> ContinueRequest:
    """Go on after everything that could be restored is in the slot: shorten the prompt, or serve it."""
    if policy.decide_compression(context, prompt, prompt.prefill_rows - slot_lease.valid_rows).go:
        return Transition(LoadingScorer(slot_lease, prompt), LoadModel("scorer"))
    return serve_prompt(context, slot_lease, prompt)


def serve_prompt(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> ServePrompt:
    """Go on after it is certain which tokens are served: bring the draft in, or prefill and decode without one."""
    draft = policy.decide_speculation(context, prompt.job)
    if draft.go and context.settings.max_proposals:
        return Transition(UnparkingDraft(slot_lease, prompt), LoadModel("draft"))
    speculation = choose_without_draft(context, NO_MATCH) if draft.go else ProposesNothing(draft.reason)
    return prefill_or_decode(context.settings, slot_lease, prompt, speculation)


def choose_without_draft(context: DecisionContext, reason: str) -> Speculation:
    """Return what a request proposes that has no draft: copies of earlier text, or nothing for this reason."""
    if not context.settings.max_copied:
        return ProposesNothing(reason)
    control = suffix_control.make_control(context.settings, context.rates)
    return MayPropose(evolve(control, widths=(), gains=()), reason)


def compute_missing_rows(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> ComputeMissing:
    """Go on where rows are certainly missing: shorten the prompt, or compute them."""
    if policy.decide_compression(context, prompt, prompt.prefill_rows - slot_lease.valid_rows).go:
        return Transition(LoadingScorer(slot_lease, prompt), LoadModel("scorer"))
    return serve_verbatim(context, slot_lease, prompt)


def serve_verbatim(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt) -> UnparkOrPrefill:
    """Go on where rows are certainly missing, and it is certain which tokens are served."""
    draft = policy.decide_speculation(context, prompt.job)
    if draft.go and context.settings.max_proposals:
        return Transition(UnparkingDraft(slot_lease, prompt), LoadModel("draft"))
    speculation = choose_without_draft(context, NO_MATCH) if draft.go else ProposesNothing(draft.reason)
    return start_prefill(context.settings, slot_lease, prompt, speculation)


def prefill_or_decode(
    settings: Settings, slot_lease: SlotLease, prompt: Prompt, speculation: Speculation
) -> PrefillOrDecode:
    """Compute the missing rows of the prompt; decode at once if none is missing."""
    if slot_lease.valid_rows < prompt.prefill_rows:
        return start_prefill(settings, slot_lease, prompt, speculation)
    keeps_state = scope.should_keep_held_state(settings, slot_lease, prompt)
    slot_lease = slot_lease.with_computed_rows(slot_lease.valid_rows)
    decode_step = make_decode_step(settings, slot_lease, prompt, speculation, NOTHING, checkpoint=keeps_state)
    return Transition(Speculating(slot_lease, prompt, speculation, NOTHING), decode_step)


def start_prefill(
    settings: Settings, slot_lease: SlotLease, prompt: Prompt, speculation: Speculation
) -> Transition[Prefilling, RunPrefill]:
    """Begin to compute rows. They overwrite whatever follows the valid rows, so `rows_ahead` becomes 0.

    The state that the slot goes on from is kept beyond the device first, where the scope wants it there.
    """
    slot_lease = slot_lease.with_computed_rows(slot_lease.valid_rows)
    chunk = make_prefill_chunk(settings, slot_lease, prompt, prompt.prefill_rows)
    if scope.should_keep_held_state(settings, slot_lease, prompt):
        chunk = evolve(chunk, keeps_state_first=True)
    return Transition(Prefilling(slot_lease, prompt, speculation), chunk)


def make_prefill_chunk(settings: Settings, slot_lease: SlotLease, prompt: Prompt, target: int) -> RunPrefill:
    """Return the effect that computes the next rows of `[valid_rows, target)`.

    It is one chunk, or several at once where the settings allow it. With positional state the first effect of a prefill
    is one chunk: until it is done, requests that come together with this one say which rows they wait for. If the state
    is to be kept at some row on the way (`scope.CheckpointMark`), the effect ends there, or so soon behind it that the
    slot still has that state. A last chunk that would be too narrow for the prompt lane is left to the next effect.

    target: the row before which prefill ends.
    """
    start = slot_lease.valid_rows
    logprobs = prompt.job.prompt_logprobs
    is_single = logprobs >= 0 or (settings.stateful and start == slot_lease.reused_rows)
    row_limit = settings.chunk * (1 if is_single else settings.chunks_per_prefill)
    stop = min(start + row_limit, target)
    mark = scope.find_next_mark(settings, slot_lease, prompt)
    if mark is not None and mark.at <= stop and scope.find_state_row(settings, stop) != mark.at:
        stop = mark.at
    if stop - start > settings.chunk and (stop - start) % settings.chunk <= settings.prompt_lane_min_rows:
        stop -= (stop - start) % settings.chunk
    keeps = mark is not None and mark.beyond_device and mark.at == scope.find_state_row(settings, stop)
    return RunPrefill(slot_lease.slot, start, stop, checkpoint=keeps, logprobs=logprobs)


def make_decode_step(
    settings: Settings,
    slot_lease: SlotLease,
    prompt: Prompt,
    speculation: Speculation,
    answer: Generated,
    *,
    checkpoint: bool = False,
) -> RunDecode:
    """Return the effect that decodes the next token.

    The effect states upper limits for this request: the most proposals it can use, and the most steps it can take
    before the core has to decide something about it. When the effect is launched, `states/launch_choice.py` chooses the
    real numbers for all requests of the launch together.
    """
    last = answer.tokens[-1] if answer.tokens else prompt.tokens[-1]
    widest = max(speculation.control.widths, default=0) if isinstance(speculation, MayPropose) else 0
    propose = min(widest, answer.count_proposable(prompt.job))
    steps = count_unwatched_tokens(settings, slot_lease, prompt, answer)
    return RunDecode(slot_lease.slot, slot_lease.valid_rows, last, propose, checkpoint, steps)


def count_unwatched_tokens(settings: Settings, slot_lease: SlotLease, prompt: Prompt, answer: Generated) -> int:
    """Count the tokens that may be decoded before the core has to decide something about this request.

    The core decides in three cases:

    * at the last token of the answer;
    * at each token that the client has already received from an earlier slot, because the two are compared;
    * at a row at which positional state is kept (`scope.find_row_to_keep`).
    """
    if prompt.heard_tokens and len(answer.tokens) < len(prompt.heard_tokens):
        return 1
    left = answer.count_proposable(prompt.job) + 1
    at = scope.find_row_to_keep(settings, prompt, slot_lease.valid_rows)
    return left if at is None else min(left, at - slot_lease.valid_rows)


# --- after the stream is closed ---


def unload_model(settings: Settings, name: ModelName) -> UnloadModel:
    """Return the effect that gives a leased model back, as the residency policy wants it."""
    return make_unload(settings.residency, name)


def end_request(settings: Settings, left: RequestRemainder) -> EndRequest:
    """Keep what is worth keeping, then give back what is leased."""
    return end_with_lease(settings, left) if left.leased_model else end_without_lease(settings, left)


def end_with_lease(settings: Settings, left: RequestRemainder) -> Transition[Snapshotting, SaveSnapshot] | ReleaseModel:
    """End a request that has leased a model."""
    assert left.leased_model is not None
    return snapshot_new_rows(settings, left) or Transition(Parking(left), unload_model(settings, left.leased_model))


def end_without_lease(settings: Settings, left: RequestRemainder) -> EndWithoutLease:
    """End a request that has leased no model."""
    return snapshot_new_rows(settings, left) or Transition(Done(left))


def snapshot_new_rows(settings: Settings, left: RequestRemainder) -> Transition[Snapshotting, SaveSnapshot] | None:
    """Begin to save the slot's rows; None: there is nothing new that is worth saving."""
    if not policy.decide_snapshot(settings, left).go:
        return None
    rows = scope.select_rows_to_keep(settings, left).rows
    has_state = rows == find_own_state(settings, left)
    return Transition(
        Snapshotting(left), SaveSnapshot(left.slot_lease.slot, left.valid_tokens[:rows], checkpoint=has_state)
    )


def release_model(settings: Settings, left: RequestRemainder) -> ReleaseModel | Transition[Done]:
    """Give the leased model back if there is one. Otherwise the request is done."""
    if left.leased_model:
        return Transition(Parking(left), unload_model(settings, left.leased_model))
    return Transition(Done(left))


def finish_stream(context: DecisionContext, state: Speculating, emit: EmitTokens, why: Finish) -> FinishStream:
    """Send the last tokens, close the stream, and begin what follows the end of a request."""
    closing = CloseStream(why, make_report(context, state))
    return prepend_effect(emit, prepend_effect(closing, end_request(context.settings, get_remainder(state))))


# --- failures ---


def fail_request(context: DecisionContext, state: AnsweringState, event: DeviceFailed) -> FailRequest:
    """Close the stream with a failure, and begin what follows the end of a request."""
    left = keep_trusted_rows(get_remainder(state), event)
    return prepend_effect(make_failure_close(context, state, event), end_request(context.settings, left))


def fail_without_lease(context: DecisionContext, state: AnsweringState, event: DeviceFailed) -> FailWithoutLease:
    """Do as `fail_request` for a request that has leased no model."""
    left = keep_trusted_rows(get_remainder(state), event)
    return prepend_effect(make_failure_close(context, state, event), end_without_lease(context.settings, left))


def fail_untrusted(
    context: DecisionContext, state: Speculating, why: str
) -> Transition[Parking, CloseStream, UnloadModel] | Transition[Done, CloseStream]:
    """Fail a request whose rows cannot be trusted."""
    closing = make_failure_close(context, state, DeviceFailed("broken", why))
    return prepend_effect(closing, release_model(context.settings, forget_all_rows(get_remainder(state))))


def make_failure_close(context: DecisionContext, state: AnsweringState, event: DeviceFailed) -> CloseStream:
    """Close the stream with a report of what was done. Its cache part counts the rows that are still trusted."""
    cache = scope.select_rows_to_keep(context.settings, keep_trusted_rows(get_remainder(state), event))
    why: Finish = event.kind if event.kind in {"dead_end", "lost"} else "failed"
    return CloseStream(why, evolve(make_report(context, state), cache=cache), event.detail)


def keep_trusted_rows(left: RequestRemainder, event: DeviceFailed | StoreFailed) -> RequestRemainder:
    """Return what is left after a failure.

    An effect that was abandoned, ran out of memory or came to a dead end costs only its own work. After any other
    failure the slot keeps no rows, so that no other request goes on from them.
    """
    return left if event.kind in {"abandoned", "out_of_memory", "dead_end"} else forget_all_rows(left)


def keep_rows_after_failed_load(slot_lease: SlotLease, event: StoreFailed) -> SlotLease:
    """Return the lease after loading failed. All rows stay, but positional state may have been overwritten in part."""
    return SlotLease(slot_lease.slot, rows_ahead=slot_lease.rows) if event.kind == "lost" else slot_lease


def forget_all_rows(left: RequestRemainder) -> RequestRemainder:
    """Return what the request leaves behind, without any row: none can be trusted."""
    return evolve(left, slot_lease=SlotLease(left.slot_lease.slot))
