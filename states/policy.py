"""Decisions that no state makes alone: pure functions, each with a truth table in the tests, each giving its reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from attrs import evolve, frozen

from effects.compression import WHOLE
from effects.ids import Span, Tier
from effects.job import Job, explain_no_compression, find_aged_messages, freezes_messages
from effects.lookup import PrefixFound
from states import scope, speculation_control, suffix_control
from states.kept_rows import count_usable_tokens
from states.rates import ALONE, Rates, estimate_prefill_time, fade, get_load_time
from states.request_states import Prompt, RequestRemainder, SlotLease
from states.sequences import round_down_to_block
from states.settings import DecisionContext, Settings

# Tokens of a prompt that may be a one-off: what it costs at most to have taken the first turn of a chat for one.
SHORT_PROMPT = 2048


@frozen
class Decision:
    """A choice between yes (`go`) and no, with the reason for it."""

    go: bool
    reason: str  # machine-readable


def decide_one_off(job: Job) -> Decision:
    """Decide whether the request is a one-off: one that no other request will continue, such as one for a title.

    The client may declare it. Otherwise only the first turn of a conversation without tools, with a short prompt, is
    taken for a one-off: agents offer tools, and later turns have answers in their prompts. If the guess is wrong, a
    short prompt is computed a second time, which costs little.
    """
    if job.one_off is not None:
        return Decision(job.one_off, "declared")
    if not job.opens:
        return Decision(False, "continues")
    if len(job.prompt) > SHORT_PROMPT:
        return Decision(False, "long")
    return Decision(True, "short")


# --- compression ---


def decide_shortening(settings: Settings, prompt: Prompt) -> Decision:
    """Decide whether the prompt may be shortened at all, whatever that would gain."""
    obstacle = explain_no_compression(prompt.job, settings.scorer_max_tokens)
    if obstacle:
        return Decision(False, obstacle)
    if prompt.compression_tried:
        return Decision(False, "already_tried")
    if prompt.heard_tokens:
        return Decision(False, "answer_begun")
    return Decision(True, "allowed")


def decide_compression(context: DecisionContext, prompt: Prompt, missing: int) -> Decision:
    """Decide whether the prompt is compressed (`effects/prompt_compression.py`) before it is served.

    A conversation whose aged messages are frozen one by one is decided by `decide_freezing`. Every other prompt is
    decided here, also where freezing is on: no earlier turn of it is kept, so compressing it as a whole loses no
    prefix. Mode `auto` compresses if many rows are missing and if scoring them is quicker than computing them.

    missing: rows that have to be computed if the prompt is served as it is.
    """
    if freezes_messages(prompt.job):
        return decide_freezing(context, prompt, missing)
    allowed = decide_shortening(context.settings, prompt)
    if not allowed.go or not fits_context(context.settings, prompt):
        return Decision(allowed.go, "does_not_fit" if allowed.go else allowed.reason)
    compression = prompt.job.compression
    if compression.mode == "always":
        return Decision(True, "always")
    if missing < compression.threshold:
        return Decision(False, "below_threshold")
    pays = is_compression_quicker(context.rates, prompt, missing)
    return Decision(pays, "long" if pays else "does_not_pay")


def decide_freezing(context: DecisionContext, prompt: Prompt, missing: int) -> Decision:
    """Decide whether the messages of a conversation that have aged are shortened now.

    Shortening changes the tokens that are served, so the next turn finds fewer kept rows. Therefore it happens seldom:
    when the aged messages have many tokens together, or when the prompt does not fit otherwise. Between two such times
    the prompt only grows, so each turn continues from the rows of the turn before it.

    missing: as in `decide_compression`.
    """
    compression = prompt.job.compression
    messages = find_aged_messages(prompt.job)
    obstacles = {
        "no_drafter": context.settings.scorer_max_tokens == 0,
        "already_tried": prompt.compression_tried,
        "answer_begun": bool(prompt.heard_tokens),
        "nothing_aged": not messages,
    }
    if any(obstacles.values()):
        return Decision(False, next(reason for reason, holds in obstacles.items() if holds))
    if not fits_context(context.settings, prompt):
        return Decision(True, "does_not_fit")
    aged_tokens = sum(part.length for part in messages)
    is_auto = compression.mode == "auto"
    reasons_to_wait = {
        "too_few_aged": aged_tokens < compression.least,
        "below_threshold": is_auto and aged_tokens < compression.threshold,
        "does_not_pay": is_auto and not does_freezing_repay(context.rates, prompt, missing),
    }
    reason = next((reason for reason, holds in reasons_to_wait.items() if holds), "")
    return Decision(not reason, reason or "aged")


def does_freezing_repay(rates: Rates, prompt: Prompt, missing: int) -> bool:
    """Is scoring the aged messages, and computing what is served from the first one on, quicker than the missing rows?

    A prompt scorer that was never timed is taken to be as slow as the model. What later turns gain is not counted,
    because their number is unknown.
    """
    messages = find_aged_messages(prompt.job)
    aged_tokens = sum(part.length for part in messages)
    left_out = sum(part.length * (WHOLE - part.keep) // WHOLE for part in messages)
    shorter = len(prompt.tokens) - left_out
    scoring = rates.scoring * aged_tokens or estimate_prefill_time(rates, 0, aged_tokens)
    valid_rows = prompt.prefill_rows - missing
    start = min(messages[0].start, shorter, valid_rows)
    with_freezing = scoring + estimate_prefill_time(rates, start, shorter)
    return with_freezing <= estimate_prefill_time(rates, valid_rows, prompt.prefill_rows)


def fits_context(settings: Settings, prompt: Prompt) -> bool:
    """Does the prompt fit the context together with the longest answer?"""
    return len(prompt.tokens) + prompt.job.max_tokens <= settings.max_context


def count_kept_tokens(job: Job) -> int:
    """Count the tokens of its prompt that a compression is to keep."""
    return max(1, len(job.prompt) * job.compression.keep // WHOLE)


def count_scored_tokens(prompt: Prompt) -> int:
    """Count the tokens that the prompt scorer looks at."""
    if freezes_messages(prompt.job):
        return sum(part.length for part in find_aged_messages(prompt.job))
    return len(prompt.tokens)


def is_compression_quicker(rates: Rates, prompt: Prompt, missing: int) -> bool:
    """Is scoring all tokens and computing the kept ones quicker than computing the missing rows?

    True where a time is not known, so that it is tried.
    """
    scoring = rates.scoring * len(prompt.tokens)
    whole = estimate_prefill_time(rates, prompt.prefill_rows - missing, prompt.prefill_rows)
    if not scoring or not whole:
        return True
    return scoring + estimate_prefill_time(rates, 0, count_kept_tokens(prompt.job)) < whole


def fade_scorer_time(context: DecisionContext, prompt: Prompt) -> Rates:
    """Return the rates after a prompt was admitted.

    If compression is left out because scoring is known to be slow, that known time is made a little shorter. Otherwise
    one slow measurement would end compression for ever: the time is measured only when something is compressed.
    """
    rates = context.rates
    if not rates.scoring or decide_compression(context, prompt, prompt.prefill_rows).reason != "does_not_pay":
        return rates
    return evolve(rates, scoring=fade(rates.scoring, 1))


# --- lookup, speculation, snapshots ---


def decide_lookup(settings: Settings, slot_lease: SlotLease, prompt: Prompt) -> Decision:
    """Decide whether the stores are asked for more of the prompt.

    That may gain rows that the slot lacks. Where the scope is `auto`, it also compares the prompt with recent ones.
    """
    if not settings.store:
        return Decision(False, "no_store")
    if prompt.job.scope.kind == "off":
        return Decision(False, "scope_off")
    if has_missing_blocks(settings, slot_lease, prompt):
        return Decision(True, "ask")
    if count_prompts_to_compare(prompt):
        return Decision(True, "compare")
    return Decision(False, "on_device")


def has_missing_blocks(settings: Settings, slot_lease: SlotLease, prompt: Prompt) -> bool:
    """Are there rows that could be restored?"""
    return slot_lease.valid_rows < round_down_to_block(settings, prompt.prefill_rows)


def count_prompts_to_compare(prompt: Prompt) -> int:
    """Count the recent prompts that the lookup compares the job's prompt with (`FindPrefix.prompts_to_compare`).

    They are compared once, before other tokens than the job's may be served.
    """
    job_scope = prompt.job.scope
    is_first = not prompt.compression_tried and prompt.heard_tokens is None
    return job_scope.count if job_scope.kind == "auto" and is_first else 0


def decide_speculation(context: DecisionContext, job: Job) -> Decision:
    """Decide whether this request proposes tokens, of a draft or copied from earlier text."""
    if context.settings.max_proposals == 0 and context.settings.max_copied == 0:
        return Decision(False, "no_draft")
    if not job.speculate:
        return Decision(False, "declined")
    if job.max_tokens == 1:
        return Decision(False, "one_token")
    if not (speculation_control.list_widths(context.settings) or suffix_control.list_copy_widths(context.settings)):
        return Decision(False, "never_pays")
    return Decision(True, "draft")


def decide_snapshot(settings: Settings, left: RequestRemainder) -> Decision:
    """Decide whether rows of the ended request are saved: whether its scope selects some that the stores lack."""
    selection = scope.select_rows_to_keep(settings, left)
    if selection.rows == 0:
        return Decision(False, selection.reason)
    if selection.rows <= left.prompt.stored_rows:
        return Decision(False, "nothing_new")
    return Decision(True, "new_rows")


# --- the planner: which rows of a found prefix are loaded, and which are computed ---
#
# `use_found_prefix` (`states/lookup.py`) asks it when the store has found and leased a prefix. The store has named the
# tier that most of the prefix is in.


def list_restore_ends(settings: Settings, slot_lease: SlotLease, prompt: Prompt, found: PrefixFound) -> list[int]:
    """List the rows up to which the found prefix could be restored, beyond those that the slot has.

    That is the longest usable length, or any checkpoint where the model has positional state.
    """
    if settings.stateful:
        return [at for at in found.checkpoints if slot_lease.valid_rows < at <= prompt.prefill_rows]
    longest = count_usable_tokens(settings, prompt, found.length)
    return [longest] if slot_lease.valid_rows < longest else []


def choose_rows_to_load(
    context: DecisionContext, slot_lease: SlotLease, prompt: Prompt, restore_ends: Sequence[int], tier: Tier
) -> Span | None:
    """Choose the rows that are loaded; None: computing all of them is better.

    Without positional state, the last rows are loaded while the first ones are computed (`choose_load_start`).
    Positional state cannot be mixed in this way: a loaded state belongs to one row. There, one of the found checkpoints
    is chosen, the rows before it that the slot lacks are loaded with it, and all rows behind it are computed. If the
    slot lacks none of them, the span is empty, and the state alone is loaded.

    restore_ends: ascending, from `list_restore_ends`.
    """
    settings = context.settings
    rates = context.rates
    if not restore_ends:
        return None
    if not settings.stateful:
        load_start = choose_load_start(settings, rates, slot_lease.valid_rows, restore_ends[-1], tier)
        return (load_start, restore_ends[-1]) if load_start < restore_ends[-1] else None
    at = restore_ends[-1]
    if get_load_time(rates, tier) and estimate_prefill_time(rates, slot_lease.valid_rows, prompt.prefill_rows):
        candidates = (*reversed(restore_ends), slot_lease.valid_rows)
        at = min(candidates, key=lambda at: estimate_resume_time(context, slot_lease, prompt, at, tier))
    return (min(at, slot_lease.rows), at) if at > slot_lease.valid_rows else None


def estimate_resume_time(context: DecisionContext, slot_lease: SlotLease, prompt: Prompt, at: int, tier: Tier) -> int:
    """Return the nanoseconds until the whole prompt is there, if it goes on from a checkpoint at row `at`."""
    tokens = 0
    if at > slot_lease.valid_rows:
        tokens = context.settings.state_tokens + max(0, at - slot_lease.rows)
    return tokens * get_load_time(context.rates, tier) + estimate_prefill_time(context.rates, at, prompt.prefill_rows)


def choose_load_start(settings: Settings, rates: Rates, start: int, stop: int, tier: Tier) -> int:
    """Return the row `load_start` such that `[start, load_start)` is computed while `[load_start, stop)` is loaded.

    Both are to end at the same time. The computed rows are called the front: without one everything is loaded, and if
    it reaches `stop` everything is computed. If a time was never measured, everything is loaded. Doing both has to be a
    tenth quicker than the better single one, because two sides cost more to set going than these times say. Whole
    chunks are computed: part of one takes nearly as long.
    """
    if start == stop or not get_load_time(rates, tier) or not estimate_prefill_time(rates, start, stop):
        return start

    def ready_time(load_start: int) -> int:
        return estimate_ready_time(rates, start, load_start, stop, tier)

    single = min((start, stop), key=ready_time)
    chunks = range(-(-(stop - start) // settings.chunk))
    even = bisect_left(
        chunks, 0, key=lambda count: estimate_lead(rates, start, start + count * settings.chunk, stop, tier)
    )
    mixed = [start + count * settings.chunk for count in (even - 1, even) if 0 < count < len(chunks)]
    best = min(mixed, key=ready_time, default=single)
    return best if ready_time(best) * 10 <= ready_time(single) * 9 else single


def estimate_lead(rates: Rates, start: int, load_start: int, stop: int, tier: Tier) -> int:
    """Return how much later the computed rows are there than the loaded ones, in thousandths of nanoseconds.

    Both sides slow each other down.
    """
    computing = estimate_prefill_time(rates, start, load_start) * (rates.prefill_slowdown or ALONE)
    return computing - (stop - load_start) * get_load_time(rates, tier) * (rates.load_slowdown or ALONE)


def estimate_ready_time(rates: Rates, start: int, load_start: int, stop: int, tier: Tier) -> int:
    """Return when all rows are there, in thousandths of nanoseconds."""
    loading = (stop - load_start) * get_load_time(rates, tier)
    if load_start == start:
        return loading * ALONE
    computing = estimate_prefill_time(rates, start, load_start)
    if load_start == stop:
        return computing * ALONE
    return max(computing * (rates.prefill_slowdown or ALONE), loading * (rates.load_slowdown or ALONE))
