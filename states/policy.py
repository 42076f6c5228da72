"""Decisions that are nobody's state: pure functions, each with a truth table in the tests, each giving its reason."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from attrs import evolve, frozen

from effects.compression import WHOLE
from effects.ids import Span, Tier
from effects.job import Job, aged, freezes, uncompressed
from effects.lookup import PrefixFound
from states import scope
from states import speculation_control as control
from states.rates import ALONE, Rates, faded, load_time, prefill_time
from states.request_states import Prompt, RequestRemainder, SlotLease, usable
from states.sequences import whole_blocks
from states.settings import DecisionContext, Settings

SHORT = 2048  # tokens of a prompt: what it costs at most to have taken a conversation's first turn for a one-off


@frozen
class Decision:
    go: bool
    reason: str  # machine-readable


def one_off(job: Job) -> Decision:
    """Is it a request of its own, such as a title, that nobody will go on from? Agents bring tools, and a conversation
    that goes on has answers in it; what is short can be computed again, should it go on after all.
    """
    if job.one_off is not None:
        return Decision(job.one_off, "told")
    if not job.opens:
        return Decision(False, "continues")
    if len(job.prompt) > SHORT:
        return Decision(False, "long")
    return Decision(True, "short")


def shorten(settings: Settings, prompt: Prompt) -> Decision:
    """May anything but the prompt as it came be served?"""
    never = uncompressed(prompt.job, settings.drafter)
    if never:
        return Decision(False, never)
    if prompt.compressed:
        return Decision(False, "already_tried")
    if prompt.heard:
        return Decision(False, "answer_begun")
    return Decision(True, "allowed")


def compress(known: DecisionContext, prompt: Prompt, missing: int) -> Decision:
    """The PFlash gate: `auto` looks at the tokens that are still missing, and at what they would cost.

    A conversation whose messages can be frozen has a gate of its own. Any other prompt goes through this gate, also
    where freezing is on: it continues nothing, so there is no prefix that compressing it would lose.
    """
    if freezes(prompt.job):
        return freeze(known, prompt, missing)
    allowed, asked = shorten(known.settings, prompt), prompt.job.compression
    if not allowed.go or not fits(known.settings, prompt):
        return Decision(allowed.go, "does_not_fit" if allowed.go else allowed.reason)
    if asked.mode == "always":
        return Decision(True, "always")
    if missing < asked.threshold:
        return Decision(False, "below_threshold")
    pays = quicker(known.rates, prompt, missing)
    return Decision(pays, "long" if pays else "does_not_pay")


def freeze(known: DecisionContext, prompt: Prompt, missing: int) -> Decision:
    """The gate of freezing. What fits is frozen seldom: aged messages have to be worth it together, and between two
    times the prompt only grows, and is found again.
    """
    asked, messages = prompt.job.compression, aged(prompt.job)
    never = {
        "no_drafter": known.settings.drafter == 0,
        "already_tried": prompt.compressed,
        "answer_begun": bool(prompt.heard),
        "nothing_aged": not messages,
    }
    if any(never.values()):
        return Decision(False, next(reason for reason, holds in never.items() if holds))
    if not fits(known.settings, prompt):
        return Decision(True, "does_not_fit")
    count = sum(part.length for part in messages)
    yet = {
        "too_few_aged": count < asked.least,
        "below_threshold": asked.mode == "auto" and count < asked.threshold,
        "does_not_pay": asked.mode == "auto" and not repays(known.rates, prompt, missing),
    }
    not_yet = next((reason for reason, holds in yet.items() if holds), "")
    return Decision(not not_yet, not_yet or "aged")


def repays(rates: Rates, prompt: Prompt, missing: int) -> bool:
    """Is it quicker to score what has aged and to compute all that is served from there on, than to compute what is
    missing? A drafter that was never heard of is taken to be as slow as the model. What later turns gain is not
    counted: how many there are, nobody knows.
    """
    messages, length = aged(prompt.job), len(prompt.tokens)
    count = sum(part.length for part in messages)
    shorter = length - sum(part.length * (WHOLE - part.keep) // WHOLE for part in messages)
    scoring = rates.drafter * count or prefill_time(rates, 0, count)
    start = min(messages[0].start, shorter, prompt.target - missing)
    return scoring + prefill_time(rates, start, shorter) <= prefill_time(rates, prompt.target - missing, prompt.target)


def fits(settings: Settings, prompt: Prompt) -> bool:
    """With the answer, in the context?"""
    return len(prompt.tokens) + prompt.job.max_tokens <= settings.max_context


def kept_tokens(job: Job) -> int:
    """How many tokens of its prompt a compression is to keep."""
    return max(1, len(job.prompt) * job.compression.keep // WHOLE)


def scored_tokens(prompt: Prompt) -> int:
    """That a drafter looks at."""
    return sum(part.length for part in aged(prompt.job)) if freezes(prompt.job) else len(prompt.tokens)


def quicker(rates: Rates, prompt: Prompt, missing: int) -> bool:
    """To score all of it and compute what is kept, than to compute what is missing? Unmeasured, it is tried."""
    scoring = rates.drafter * len(prompt.tokens)
    whole = prefill_time(rates, prompt.target - missing, prompt.target)
    return not scoring or not whole or scoring + prefill_time(rates, 0, kept_tokens(prompt.job)) < whole


def spared(known: DecisionContext, prompt: Prompt) -> Rates:
    """What speaks against compressing is not measured again while nothing is compressed, so it fades."""
    rates = known.rates
    if not rates.drafter or compress(known, prompt, prompt.target).reason != "does_not_pay":
        return rates
    return evolve(rates, drafter=faded(rates.drafter, 1))


def lookup(settings: Settings, seat: SlotLease, prompt: Prompt) -> Decision:
    """Is there anything to gain from asking the stores?"""
    if not settings.store:
        return Decision(False, "no_store")
    if prompt.job.scope.kind == "off":
        return Decision(False, "scope_off")
    if missing(settings, seat, prompt):
        return Decision(True, "ask")
    if window(prompt):
        return Decision(True, "compare")
    return Decision(False, "on_device")


def missing(settings: Settings, seat: SlotLease, prompt: Prompt) -> bool:
    """Are there rows that could be restored?"""
    return seat.valid < whole_blocks(settings, prompt.target)


def window(prompt: Prompt) -> int:
    """How many recent prompts the job's own is compared with, once, before anything else may be served instead."""
    asked = prompt.job.scope
    return asked.count if asked.kind == "auto" and not prompt.compressed and prompt.heard is None else 0


def speculate(known: DecisionContext, job: Job) -> Decision:
    """Is the draft worth being brought in for this request?"""
    if known.settings.block == 0:
        return Decision(False, "no_draft")
    if not job.speculate:
        return Decision(False, "declined")
    if job.max_tokens == 1:
        return Decision(False, "one_token")
    if not control.widths(known.settings):
        return Decision(False, "never_pays")
    return Decision(True, "draft")


def snapshot(settings: Settings, left: RequestRemainder) -> Decision:
    """Are there rows that the stores do not have?"""
    picked = scope.select(settings, left)
    if picked.rows == 0:
        return Decision(False, picked.reason)
    if picked.rows <= left.prompt.stored:
        return Decision(False, "nothing_new")
    return Decision(True, "new_rows")


def there(settings: Settings, seat: SlotLease, prompt: Prompt, found: PrefixFound) -> list[int]:
    """What could be gone on from, beyond what the slot can, were it loaded: the longest rows, or any checkpoint."""
    if settings.stateful:
        return [at for at in found.checkpoints if seat.valid < at <= prompt.target]
    best = usable(settings, prompt, found.length)
    return [best] if seat.valid < best else []


def load(known: DecisionContext, seat: SlotLease, prompt: Prompt, there: Sequence[int], tier: Tier) -> Span | None:
    """Which rows are loaded; None: computing is better. All from the last one on, where nothing is computed meanwhile.

    Positional state cannot be computed for some rows and loaded for the rest, so there it is one checkpoint or another,
    with the rows before it that the slot does not have, and everything behind it is computed.
    """
    settings, rates = known.settings, known.rates
    if not there:
        return None
    if not settings.stateful:
        m = front(settings, rates, seat.valid, there[-1], tier)
        return (m, there[-1]) if m < there[-1] else None
    at = there[-1]
    if load_time(rates, tier) and prefill_time(rates, seat.valid, prompt.target):
        at = min((*reversed(there), seat.valid), key=lambda at: resumed(known, seat, prompt, at, tier))
    return (min(at, seat.rows), at) if at > seat.valid else None


def resumed(known: DecisionContext, seat: SlotLease, prompt: Prompt, at: int, tier: Tier) -> int:
    """When the whole prompt is there, if it is gone on from a checkpoint at `at`, in nanoseconds."""
    tokens = known.settings.state_tokens + max(0, at - seat.rows) if at > seat.valid else 0
    return tokens * load_time(known.rates, tier) + prefill_time(known.rates, at, prompt.target)


def front(settings: Settings, rates: Rates, start: int, stop: int, tier: Tier) -> int:
    """The planner's one number m: compute `[start, m)` while `[m, stop)` is loaded, both to end at once.

    m = start is pure restore, m = stop pure recompute. A time that was never measured means that restoring is trusted.
    Both at once have to be a tenth better than either: two sides cost more to set going than these times tell. Whole
    chunks are computed: part of one takes nearly as long.
    """
    if start == stop or not load_time(rates, tier) or not prefill_time(rates, start, stop):
        return start

    def when(m: int) -> int:
        return ready(rates, start, m, stop, tier)

    pure = min((start, stop), key=when)
    chunks = range(-(-(stop - start) // settings.chunk))
    even = bisect_left(chunks, 0, key=lambda m: lead(rates, start, start + m * settings.chunk, stop, tier))
    mixed = [start + m * settings.chunk for m in (even - 1, even) if 0 < m < len(chunks)]
    best = min(mixed, key=when, default=pure)
    return best if when(best) * 10 <= when(pure) * 9 else pure


def lead(rates: Rates, start: int, m: int, stop: int, tier: Tier) -> int:
    """How much later the computed rows come than the loaded ones, while both sides hold each other up."""
    computed = prefill_time(rates, start, m) * (rates.prefill_beside or ALONE)
    return computed - (stop - m) * load_time(rates, tier) * (rates.load_beside or ALONE)


def ready(rates: Rates, start: int, m: int, stop: int, tier: Tier) -> int:
    """When all rows are there, by what was measured, in thousandths of nanoseconds."""
    load = (stop - m) * load_time(rates, tier)
    if m == start:
        return load * ALONE
    computed = prefill_time(rates, start, m)
    if m == stop:
        return computed * ALONE
    return max(computed * (rates.prefill_beside or ALONE), load * (rates.load_beside or ALONE))
