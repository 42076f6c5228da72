"""Kept rows: what a slot keeps of a request, and how far another prompt can go on from rows that are there.

All positions at which rows may be reused are multiples of the block size (`round_down_to_block`). The last token of a
prompt is always computed, because its logits pick the first token of the answer.
"""

from __future__ import annotations

from attrs import frozen

from effects.compression import Compressed, select_remaining_spans, select_tokens
from effects.ids import Tokens
from effects.job import Job
from effects.packed_tokens import PACKED_BYTES, unpack_tokens
from states.request_states import Prompt, RequestRemainder, SlotLease
from states.sequences import (
    count_common_blocks,
    count_common_packed_blocks,
    count_continuable_rows,
    round_down_to_block,
)
from states.settings import Settings


def make_prompt(job: Job) -> Prompt:
    """Return what is served of a job at first. Of messages that were frozen earlier, only what is kept is served."""
    spans = select_remaining_spans(job.compression.parts, len(job.prompt))
    if spans == ((0, len(job.prompt)),):
        return Prompt(job, job.prompt)
    compression = Compressed(len(job.prompt), "", spans, keep=job.compression.keep)
    return Prompt(job, select_tokens(job.prompt, spans), compression=compression)


def count_resumable_rows(settings: Settings, left: RequestRemainder) -> int:
    """Count the rows that a later prompt may go on from: decoded ones only where they equal prefilled ones."""
    if settings.keep_decoded:
        return left.slot_lease.valid_rows
    return min(left.slot_lease.valid_rows, left.prompt.prefill_rows)


def get_kept_sequence(settings: Settings, left: RequestRemainder) -> Tokens:
    """Return the tokens whose rows a slot keeps after its request."""
    if left.slot_lease.rows_ahead:
        return left.prompt.tokens[: left.slot_lease.rows]
    return left.valid_tokens[: count_resumable_rows(settings, left)]


@frozen
class ResidentRows:
    """Rows that another prompt may go on from. They stand for the first `count` tokens of `packed_tokens` and `answer`.

    A long prompt is compared as bytes, and without being put together with its answer, since that is done for every
    slot at every admission.
    """

    packed_tokens: bytes  # the prompt, or the whole sequence of an idle slot (`effects.packed_tokens`)
    count: int
    answer: Tokens = ()  # what follows

    def count_continuable(self, settings: Settings, prompt: Prompt) -> int:
        """Count the rows that a prompt can be continued from, as `count_continuable_rows` does."""
        if not self.count:
            return 0
        block_size = settings.block_size
        shared = count_common_packed_blocks(block_size, self.packed_tokens, prompt.packed_tokens)
        packed_count = len(self.packed_tokens) // PACKED_BYTES
        if self.answer and shared == round_down_to_block(settings, packed_count) and shared < self.count:
            rest = unpack_tokens(self.packed_tokens[shared * PACKED_BYTES :]) + self.answer
            shared += count_common_blocks(block_size, rest, prompt.tokens[shared : shared + len(rest)])
        return round_down_to_block(settings, min(shared, self.count, len(prompt.tokens) - 1))


NO_ROWS = ResidentRows(b"", 0)


def get_kept_rows(settings: Settings, left: RequestRemainder) -> ResidentRows:
    """Return the rows that a slot keeps after its request. They stand for the tokens of `get_kept_sequence`."""
    if left.slot_lease.rows_ahead:
        return ResidentRows(left.prompt.packed_tokens, left.slot_lease.rows)
    return ResidentRows(left.prompt.packed_tokens, count_resumable_rows(settings, left), left.answer)


def find_own_state(settings: Settings, left: RequestRemainder) -> int:
    """Return the row behind which the slot itself has a usable positional state; 0: it has none.

    A slot has the state behind its last whole block. If decoded rows are not kept, a block may be longer than the
    distance at which the model keeps states. Then the slot has that state only if its rows end exactly there.
    """
    valid_rows = left.slot_lease.valid_rows
    at = round_down_to_block(settings, valid_rows)
    is_there = at <= count_resumable_rows(settings, left) and (settings.keep_decoded or at == valid_rows)
    return at if settings.stateful and is_there else 0


def count_usable_tokens(settings: Settings, prompt: Prompt, length: int) -> int:
    """Count the tokens, of `length` restorable ones, that are worth restoring: whole blocks before the last token."""
    return round_down_to_block(settings, min(length, prompt.prefill_rows))


def continue_lease(settings: Settings, slot_lease: SlotLease, held: Tokens, tokens: Tokens) -> SlotLease:
    """Return the lease of a slot whose rows stand for `held`, after other tokens are to be served in it.

    Rows stay valid as far as both sequences begin alike, in whole blocks. If the slot's positional state lies behind
    those rows, it is of no use: then no row is valid, though the rows are there (`SlotLease.rows_ahead`).
    """
    rows = count_continuable_rows(settings, held, tokens)
    valid_rows = rows
    if settings.stateful:
        valid_rows = slot_lease.valid_rows if slot_lease.valid_rows <= rows else 0
    tier = slot_lease.tier if valid_rows else "none"
    reused_rows = min(slot_lease.reused_rows, valid_rows)
    return SlotLease(slot_lease.slot, valid_rows, reused_rows, tier, rows - valid_rows)
