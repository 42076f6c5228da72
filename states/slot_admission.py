"""Admission: which waiting request is next, which slot it gets, and which rows it keeps there.

Problem. A prompt often begins like one whose rows are still in some slot: a conversation that goes on, or another one
with the same system prompt. Those rows should be used, but the sequences of other slots should survive, because their
conversations may go on as well.

Idea. The next request gets the rows of the slot that has most in common with its prompt (the source). If that slot is
idle, and loses nothing else that is worth keeping, it becomes the request's slot itself (the target). Otherwise the
rows are copied to the idle slot that has gone unused longest, or shared with it where slots share pages.

A conversation that goes on is not pushed off its slot by one-off requests, such as titles, that no request continues
(`policy.decide_one_off`). One-offs use the slots of one another and wait for one if they have to, and what they leave
behind is overwritten first.

Where rows are in pages that all slots share (`states/pages.py`), a slot is given together with the pages that the whole
prompt takes. Idle slots lose their pages for it, in the order in which slots are taken. What is worth keeping of their
sequences was saved beyond the device when their requests ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import evolve, frozen

from effects.ids import CheckpointId, RequestId, SlotId, Tokens
from effects.job import Job
from effects.prefill import RunPrefill
from states import followers, pages, policy
from states.checkpoints import hand_over, mark_used
from states.events import Admitted
from states.kept_rows import NO_ROWS
from states.pages import Pages
from states.request_states import Followed, State, Waiting
from states.sequences import round_down_to_block
from states.settings import DecisionContext, Settings
from states.slots import (
    Slot,
    Slots,
    can_share_rows,
    count_openings,
    find_row_salt,
    forget_rows,
    get_resident_rows,
    get_resident_tokens,
    is_served_verbatim,
    keeps_conversation,
    leave_queue,
    list_evictable,
    list_running_jobs,
    replace_slot,
)

BRIEF_ANSWER = 1024  # tokens of an answer that a one-off waits for at most; a title or a summary takes fewer

# The slot that the prompt gets (`target`), the slot whose rows it continues (`source`), how many of these, and the slot
# whose checkpoint has the state after these rows, if one has it.
SlotChoice: TypeAlias = tuple[int, int, int, SlotId | None]


def is_queue_full(slots: Slots, requests: Mapping[RequestId, State], settings: Settings) -> bool:
    """Is there no room for one more waiting request?

    Requests that follow another one have a free slot each, as far as there are any, so these do not fill the queue.
    No other slot is ever free while the queue is full, unless the first request that waits is short of pages.
    """
    free_count = count_openings(slots, requests, settings)
    following = sum(not follow.ended for follow in slots.follows.values())
    admits = free_count > following and slots.short_of_pages.isdisjoint(slots.waiting)
    return not admits and len(slots.waiting) - min(free_count, following) >= settings.max_queue


def admit_next(
    slots: Slots,
    requests: Mapping[RequestId, State],
    launched: Mapping[RequestId, RunPrefill],
    context: DecisionContext,
) -> tuple[Slots, tuple[RequestId, Admitted] | None]:
    """Give the next waiting request a slot; None: no request waits, no slot is free, or pages are short.

    Requests that would be next, but do better to follow another one, are noted in `Slots.follows`. launched: the
    prefills that run.
    """
    if not slots.waiting:
        return slots, None
    slots = followers.mark_ended_follows(slots, requests)
    free = [number for number, slot in enumerate(slots.slots) if slot.holder is None]
    while (request := next_to_admit(slots, free, requests, context.settings)) is not None:
        if request in slots.short_of_pages:
            return slots, None
        start = find_best_start(slots, free, request, requests, context.settings)
        follow = followers.choose_leader(slots, request, start.state_rows, requests, context, launched=launched)
        if follow is None:
            return give_slot(slots, start, requests, context.settings)
        slots = evolve(slots, follows={**slots.follows, request: follow})
    return slots, None


@frozen
class BestStart:
    """The rows that a waiting request can continue from now."""

    request: RequestId
    free: list[int]  # slots without a holder
    source: int  # the slot that has most in common with its prompt
    shared: list[int]  # by slot, rows in common with the prompt
    overwritable: list[int]  # free slots that can serve the prompt, without overwriting rows worth keeping
    state_rows: int  # rows from which the request can go on
    device_checkpoint: (
        CheckpointId | None
    )  # that has the state after them; None: the source itself, or the model has none


def find_best_start(
    slots: Slots, free: list[int], request: RequestId, requests: Mapping[RequestId, State], settings: Settings
) -> BestStart:
    """Find the slot whose rows a waiting request goes on from."""
    state = requests[request]
    assert isinstance(state, Waiting)
    job = state.prompt.job
    one_off = is_one_off(state)
    rows = [
        get_resident_rows(slot, requests, settings) if can_share_rows(slot, requests, job) else NO_ROWS
        for slot in slots.slots
    ]
    shared = [slot_rows.count_continuable(settings, state.prompt) for slot_rows in rows]
    starts = [find_start(slots, shared, number, settings) for number in range(len(rows))]
    overwritable = [
        number
        for number in free
        if not would_lose_tail(settings, rows[number].count, shared[number])
        and not (one_off and keeps_conversation(slots, number))
    ]
    most = max((starts[number][0], shared[number]) for number in range(len(rows)))
    best = [number for number in range(len(rows)) if (starts[number][0], shared[number]) == most]
    source = max(best, key=lambda number: (number in overwritable, number in free, -number))
    return BestStart(request, free, source, shared, overwritable, *starts[source])


def give_slot(
    slots: Slots,
    start: BestStart,
    requests: Mapping[RequestId, State],
    settings: Settings,
) -> tuple[Slots, tuple[RequestId, Admitted] | None]:
    """Give a waiting request one of the free slots; None: pages are short."""
    request = start.request
    free = start.free
    state = requests[request]
    assert isinstance(state, Waiting)
    job = state.prompt.job
    one_off = is_one_off(state)
    source = start.source
    shared = start.shared
    state_rows = start.state_rows
    device_checkpoint = start.device_checkpoint
    checkpoint_owner = None if device_checkpoint is None else slots.checkpoints[device_checkpoint].slot
    # With a store, rows beyond the state stay as well: the lookup may find the state after them.
    keep = shared[source] if settings.store else state_rows
    target = source if keep and source in start.overwritable else find_oldest(slots, free, source if keep else None)
    held: Pages = ()
    if settings.pages:
        wanted = (target, source if keep else target, keep, checkpoint_owner)
        placement = find_pages_for(slots, job, wanted, requests, settings)
        if placement is None:
            return slots, None
        slots, (target, source, keep, _), held = placement
        if not keep:
            state_rows = 0
            device_checkpoint = None
    is_brief = one_off and job.max_tokens <= BRIEF_ANSWER
    taken = Slot(
        tokens=(),
        holder=request,
        last_release=slots.slots[target].last_release,
        one_off=one_off,
        is_brief=is_brief,
        pages=held,
    )
    checkpoints = mark_used(slots.checkpoints, device_checkpoint, slots.release_count)
    if checkpoints:
        # Checkpoints within the common rows are right for the new prompt, wherever its rows come from.
        inheritable = list_inheriting_sequences(slots, target, requests, settings)
        checkpoints = hand_over(checkpoints, SlotId(target), shared[target], inheritable)
    state_rows = state_rows if settings.stateful else 0
    follow = slots.follows.get(request)
    followed: Followed | None = None
    # The rows may be those of another slot that has them as well, and only the state the leader's.
    given = {slots.slots[number].holder for number in (source, checkpoint_owner) if number is not None}
    if keep and follow is not None and follow.leader in given:
        followed = Followed(min(keep, follow.awaited_rows), follow.waiting_ns, follow.computing_ns)
    admitted = Admitted(
        SlotId(target), SlotId(source if keep else target), keep, state_rows, device_checkpoint, followed
    )
    slots = replace_slot(leave_queue(slots, request), target, taken)
    return evolve(slots, checkpoints=checkpoints), (request, admitted)


def next_to_admit(
    slots: Slots, free: list[int], requests: Mapping[RequestId, State], settings: Settings
) -> RequestId | None:
    """Return the request that is admitted next; None: no slot is free, or every waiting request prefers to wait.

    Requests are admitted in order of arrival, with one exception. Where every free slot keeps a conversation, and a
    one-off with a short answer is running, a waiting one-off waits for that one's slot and lets others pass. It does so
    only while the queue has room. It does not wait for a long answer, because the first turn of a chat may be taken for
    a one-off. That one must not wait for a long answer to another chat.

    A request that follows another one is passed over, but a free slot stays for it.
    """
    free_count = count_openings(slots, requests, settings)
    if free_count <= 0:
        return None
    brief_runs = any(slot.is_brief for slot in slots.slots)
    queue_has_room = len(slots.waiting) < settings.max_queue
    one_offs_wait = brief_runs and queue_has_room and all(keeps_conversation(slots, number) for number in free)
    for request in slots.waiting:
        follow = slots.follows.get(request)
        if follow is not None and not follow.ended:
            free_count -= 1
        elif not (one_offs_wait and is_one_off(requests[request])):
            return request if free_count > 0 else None
    return None


def is_one_off(state: State) -> bool:
    """Does a request wait whose sequence no other request will continue?"""
    return isinstance(state, Waiting) and policy.decide_one_off(state.prompt.job).go


def find_start(slots: Slots, shared: list[int], source: int, settings: Settings) -> tuple[int, CheckpointId | None]:
    """Return how many rows a prompt keeps that goes on from `source`, and the checkpoint that has the state after them.

    No checkpoint: the source itself has the state, or the model has none. shared: by slot, rows in common with the
    prompt.
    """
    if not settings.stateful:
        return shared[source], None
    own = slots.slots[source].state_position
    best: tuple[int, CheckpointId | None] = (own if own <= shared[source] else 0, None)
    for number, checkpoint in enumerate(slots.checkpoints):
        if checkpoint.slot is not None and best[0] < checkpoint.at <= min(shared[source], shared[checkpoint.slot]):
            best = (checkpoint.at, CheckpointId(number))
    return best


def list_inheriting_sequences(
    slots: Slots, target: int, requests: Mapping[RequestId, State], settings: Settings
) -> list[Tokens]:
    """Return, by slot, the sequence that may take over checkpoints of the slot `target`; () for a slot of another salt.

    A checkpoint must not pass between callers that may not share rows. The target's own sequence is among them, since
    `hand_over` compares the others with it.
    """
    salt = find_row_salt(slots.slots[target], requests)
    return [
        get_resident_tokens(slot, requests, settings) if find_row_salt(slot, requests) == salt else ()
        for slot in slots.slots
    ]


def would_lose_tail(settings: Settings, row_count: int, keep: int) -> bool:
    """Return whether a prompt that keeps `keep` rows of a slot would overwrite more than one whole block behind them.

    Another request could continue from those rows. row_count: rows that the slot has.
    """
    return round_down_to_block(settings, row_count) > keep + settings.block_size


def find_oldest(slots: Slots, free: list[int], source: int | None) -> int:
    """Return the free slot that has gone unused longest.

    Slots that keep no conversation come before those that do, and the source comes last among equals.
    """
    return min(
        free,
        key=lambda number: (
            keeps_conversation(slots, number),
            number == source,
            slots.slots[number].last_release,
            number,
        ),
    )


def find_pages_for(
    slots: Slots, job: Job, wanted: SlotChoice, requests: Mapping[RequestId, State], settings: Settings
) -> tuple[Slots, SlotChoice, Pages] | None:
    """Find pages for the whole prompt, from idle slots where need be; None: not before another request ends.

    The wanted placement is tried first. If there are too few pages for it, the source slot itself is used, which loses
    the rest of its sequence. If that fails too and no request runs that could give pages back, nothing is kept: the
    prompt is computed from its first token.
    """
    target, source, keep, checkpoint_owner = wanted
    placements = [wanted]
    if slots.slots[source].holder is None and source != target:
        placements.append((source, source, keep, checkpoint_owner))
    if all(slot.holder is None for slot in slots.slots):
        placements.append((target, target, 0, None))
    for placement in placements:
        needed = {*placement[:2], placement[3]}
        left = slots
        for evicted in (None, *(number for number in list_evictable(slots) if number not in needed)):
            left = left if evicted is None else forget_rows(left, evicted)
            if (held := choose_pages(left, job, placement, requests, settings)) is not None:
                return left, placement, held
    return None


def choose_pages(
    slots: Slots, job: Job, placement: SlotChoice, requests: Mapping[RequestId, State], settings: Settings
) -> Pages | None:
    """Choose the pages of the target: some of the source's, and new ones for the rest of the prompt.

    None: there are too few, some running request could not be sure of its pages any more, or too many would run for the
    pool. A prompt that may yet be compressed shares no pages, since its rows may be replaced.
    """
    target, source, keep, _ = placement
    others = [slot.pages for number, slot in enumerate(slots.slots) if number != target]
    jobs = list_running_jobs(slots, requests)
    verbatim = all(is_served_verbatim(sharing_job, settings) for sharing_job in (job, jobs.get(source, job)))
    elsewhere = {page for held in others for page in held}
    reused = pages.select_reusable_pages(
        slots.slots[source].pages, keep, settings.page, elsewhere, shared=settings.shares_pages and verbatim
    )
    page_count = pages.count_pages(min(len(job.prompt), settings.max_context), settings.page)
    page_or_new = (*reused, *[None] * (page_count - len(reused)))
    stay = tuple(page for page in reused if page is not None)
    new_pages = pages.find_free_pages((*others, stay), settings.pages, page_or_new.count(None))
    if new_pages is None:
        return None
    unused = iter(new_pages)
    held = tuple(next(unused) if page is None else page for page in page_or_new)
    claims = [
        (slots.slots[number].pages, pages.compute_claim(settings, running_job)) for number, running_job in jobs.items()
    ]
    claims.append((held, pages.compute_claim(settings, job)))
    return held if pages.can_all_finish(claims, settings.pages) and pages.have_room(claims, settings) else None
