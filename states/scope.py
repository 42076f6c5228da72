"""Scope: how much of a sequence is kept beyond the device, and where checkpoints of positional state go.

Every choice comes with a reason. A job's scope (`effects/scope.py`) limits what is written to host memory and disk.
Positions are whole blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from attrs import frozen

from effects.ids import Tokens
from effects.job import freezes_messages
from effects.scope import Selection
from states.kept_rows import count_resumable_rows
from states.request_states import Prompt, RequestRemainder, SlotLease
from states.sequences import count_common_tokens, round_down_to_block
from states.settings import Settings


def select_rows_to_keep(settings: Settings, left: RequestRemainder) -> Selection:
    """Select the rows that are kept: up to where the scope says, as far as they are valid, in whole blocks.

    Sequences shorter than `min_tokens` are not worth it, so no rows of them are kept.
    """
    prompt = left.prompt
    scope_text = str(prompt.job.scope)
    if not settings.store:
        return Selection(scope_text, "no_store")
    boundary, reason = find_scope_boundary(prompt, len(prompt.tokens) + len(left.answer))
    length = min(boundary, count_resumable_rows(settings, left))
    rows = round_down_to_block(settings, length) if length >= settings.min_tokens else 0
    if boundary and not rows:
        reason = "too_short" if length else "no_rows"
    return Selection(scope_text, reason, prompt.shared_tokens, boundary, rows)


def find_scope_boundary(prompt: Prompt, whole: int) -> tuple[int, str]:
    """Return how many tokens the scope wants to keep, and why this many. Which rows are valid is not looked at here.

    whole: tokens of the prompt and the answer together.
    """
    job = prompt.job
    scope = job.scope
    if scope.kind == "off":
        return 0, "scope_off"
    if scope.kind == "full":
        return whole, "whole"
    if is_rewritten(prompt):
        if not freezes_messages(job):
            return 0, "rewritten"
        limit = prompt.shared_tokens if scope.kind == "auto" else scope.count
        unchanged = count_common_tokens(job.prompt, prompt.tokens)
        return find_last_boundary(job.boundaries, min(limit, unchanged)), "frozen"
    if scope.kind == "auto":
        return find_shared_boundary(prompt)
    return (scope.count, "fixed") if scope.count <= len(prompt.tokens) else (0, "longer_than_prompt")


def find_shared_boundary(prompt: Prompt) -> tuple[int, str]:
    """Return where `auto` stops: the last message boundary in what the most similar recent prompt begins with, too."""
    if prompt.shared_tokens == 0:
        return 0, "nothing_shared"
    if not prompt.job.boundaries:
        return prompt.shared_tokens, "shared"
    boundary = find_last_boundary(prompt.job.boundaries, prompt.shared_tokens)
    return boundary, "boundary" if boundary else "no_boundary"


def is_rewritten(prompt: Prompt) -> bool:
    """Return whether the tokens that are served differ from those that the client sent.

    If they do, scopes `auto` and `fixed` keep nothing, since a later prompt would not find it. A prompt whose messages
    were frozen is an exception: the tokens before its first frozen message are the same in both.
    """
    return prompt.tokens is not prompt.job.prompt and prompt.tokens != prompt.job.prompt


def find_last_boundary(boundaries: Tokens, limit: int) -> int:
    """Return the last boundary up to `limit`, or 0."""
    before = bisect_right(boundaries, limit)
    return boundaries[before - 1] if before else 0


@frozen
class CheckpointMark:
    """A row at which a prefill has to stop, so that the positional state behind that row can be copied and kept."""

    at: int
    beyond_device: bool  # the scope keeps the state in the store; otherwise only a checkpoint on the device keeps it


def find_state_row(settings: Settings, rows: int) -> int:
    """Return the row behind which a slot with this many computed rows has its positional state.

    That is the end of its last block. Where decoded rows are not kept, blocks may be longer than the distance at which
    the model keeps states. There only a prefill that stops at the end of a block has the state of that end, so the
    computed rows themselves are returned.
    """
    return round_down_to_block(settings, rows) if settings.keep_decoded else rows


def find_next_mark(settings: Settings, slot_lease: SlotLease, prompt: Prompt) -> CheckpointMark | None:
    """Return the next mark after the valid rows; None: there is none.

    A prompt whose logprobs are asked for has no marks, because no other request goes on from its rows.
    """
    if not settings.stateful or prompt.job.prompt_logprobs >= 0:
        return None
    beyond_device = {
        round_down_to_block(settings, at)
        for at in list_checkpoint_positions(settings, slot_lease, prompt)
        if at >= settings.min_tokens
    }
    on_device = set[int]()
    if settings.state_checkpoints:
        on_device = {round_down_to_block(settings, find_return_position(settings, prompt)), *prompt.awaited_rows}
    last = round_down_to_block(settings, prompt.prefill_rows)
    at = min((at for at in beyond_device | on_device if slot_lease.valid_rows < at <= last), default=None)
    return None if at is None else CheckpointMark(at, at in beyond_device)


def should_keep_held_state(settings: Settings, slot_lease: SlotLease, prompt: Prompt) -> bool:
    """Return whether the positional state that the slot has now, behind its valid rows, is saved beyond the device.

    It is saved in two cases. First, a prefill of the whole prompt would have saved it at this row. The store may lack
    it all the same: an earlier request with another scope may have computed it, or the store may have evicted it.
    Second, the scope is `full`, and the row is at or behind the position from which the next turn will continue
    (`find_return_position`). A client that sends the same prompt again continues from there.
    """
    before = SlotLease(slot_lease.slot, slot_lease.valid_rows - settings.block_size)
    if before.valid_rows < 0 or slot_lease.valid_rows < settings.min_tokens:
        return False
    mark = find_next_mark(settings, before, prompt)
    if mark is not None and mark.beyond_device and mark.at == slot_lease.valid_rows:
        return True
    keeps_all = settings.stateful and settings.store and prompt.job.scope.kind == "full"
    return_position = round_down_to_block(settings, find_return_position(settings, prompt))
    return keeps_all and prompt.job.prompt_logprobs < 0 and slot_lease.valid_rows >= return_position


def has_passed_mark(settings: Settings, prompt: Prompt, before: int, valid_rows: int) -> bool:
    """Return whether this decode step has passed a row at which scope `full` keeps the positional state.

    The slot still has that state: it is the one behind its last whole block. before: valid rows before the step.
    """
    at = find_row_to_keep(settings, prompt, before)
    return at is not None and at == round_down_to_block(settings, valid_rows)


def find_row_to_keep(settings: Settings, prompt: Prompt, valid_rows: int) -> int | None:
    """Return the next row, behind the valid ones, at which an answer's positional state is kept; None: there is none.

    Scope `full` keeps it in every block that a multiple of `checkpoint_interval` lies in, from `min_tokens` on.
    """
    if not (settings.stateful and settings.store and settings.checkpoint_interval and settings.keep_decoded):
        return None
    if prompt.job.scope.kind != "full":
        return None
    interval = settings.checkpoint_interval
    mark = round_up(interval, max(valid_rows + 1, settings.min_tokens))
    while not valid_rows < (at := round_down_to_block(settings, mark)) >= settings.min_tokens:
        mark += interval
    return at


def list_checkpoint_positions(settings: Settings, slot_lease: SlotLease, prompt: Prompt) -> Iterator[int]:
    """Yield the rows at which checkpoints beyond the device pay, in no order, before they are rounded to whole blocks.

    * For `auto` and `fixed` it is the end of what they keep (`find_scope_boundary`). For `auto` that is 0 as long as no
      other prompt has shared a beginning with this one, and then there is no checkpoint.
    * For `full` it is the row from which the next turn of the conversation goes on, and one in every
      `checkpoint_interval` tokens.
    * For `full` it is also the last message boundary up to `shared_checkpoint_limit`, because new sessions of the same
      agent begin alike. A session that reuses rows itself does not need that one. The boundary that opens the answer
      is left out.
    """
    job = prompt.job
    if not settings.store or job.scope.kind == "off":
        return
    if job.scope.kind != "full":
        yield min(find_scope_boundary(prompt, len(prompt.tokens))[0], prompt.prefill_rows)
        return
    yield find_return_position(settings, prompt)
    if settings.checkpoint_interval:
        next_block = round_down_to_block(settings, slot_lease.valid_rows) + settings.block_size
        yield round_up(settings.checkpoint_interval, max(next_block, settings.min_tokens))
    if not slot_lease.reused_rows:
        limit = settings.shared_checkpoint_limit
        if is_rewritten(prompt):
            limit = min(limit, count_common_tokens(job.prompt, prompt.tokens))
        yield find_last_boundary(job.boundaries[:-1], limit)


def find_return_position(settings: Settings, prompt: Prompt) -> int:
    """Return where the next turn of the conversation will go on from.

    That is the end of prefill, or the boundary that opens the answer if it lies in the last block. Chat templates may
    write what follows that boundary differently the next time: they leave earlier reasoning out.
    """
    opens_answer = find_last_boundary(map_served_boundaries(prompt), prompt.prefill_rows)
    if opens_answer and prompt.prefill_rows - opens_answer < settings.block_size:
        return opens_answer
    return prompt.prefill_rows


def map_served_boundaries(prompt: Prompt) -> Tokens:
    """Return the job's message boundaries as positions in the tokens that are served.

    A prompt that was compressed as a whole has none.
    """
    if not is_rewritten(prompt):
        return prompt.job.boundaries
    if not freezes_messages(prompt.job) or prompt.compression is None:
        return ()
    served_before = 0  # tokens that are served before the current span
    mapped = list[int]()
    spans = iter(prompt.compression.kept)
    start, stop = next(spans, (0, 0))
    for at in prompt.job.boundaries:
        while stop < at and (span := next(spans, None)) is not None:
            served_before += stop - start
            start, stop = span
        if start < at <= stop:
            mapped.append(served_before + at - start)
    return tuple(mapped)


def round_up(step: int, least: int) -> int:
    """Return the smallest multiple of `step` that is not below `least`."""
    return -(-least // step) * step
