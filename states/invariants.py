"""Invariants: what is true of every world between two events.

They are asserted in simulation, and in production with `--paranoid`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from effects.decode import RunDecode
from effects.ids import MAIN, PROMPTS, RequestId
from states.followers import is_leading
from states.lane import is_blocking
from states.pacing import (
    Demand,
    choose_step_interval,
    estimate_snapshot_worth,
    has_several_prompts,
    is_awaiting_first_token,
)
from states.pages import can_all_finish, compute_claim, count_pages
from states.request_states import (
    Done,
    Draining,
    New,
    Prefilling,
    Recovering,
    ReleasingState,
    RequestRemainder,
    Restoring,
    Snapshotting,
    State,
    StateWithSlot,
    Waiting,
    Yielding,
    get_remainder,
)
from states.residency import PRESENT
from states.scope import select_rows_to_keep
from states.settings import Settings
from states.slot_admission import is_one_off
from states.slots import count_openings, hurries_snapshots, list_running_jobs
from states.world import World


def check_world(world: World) -> None:
    """Raise AssertionError, with what does not hold."""
    held = {
        request: get_remainder(state) for request, state in world.requests.items() if isinstance(state, StateWithSlot)
    }
    check_slots(world, held)
    check_checkpoints(world)
    check_pages(world)
    check_queue(world)
    check_follows(world)
    check_lanes(world, held)
    check_models(world, held)
    check_pacing(world)
    experts = world.experts.expert_slots
    assert len(set(experts)) == len(experts) == world.settings.expert_slots, "an expert has two slots"
    assert not any(isinstance(state, New | Done) for state in world.requests.values()), "a request outlived its end"


def check_slots(world: World, held: Mapping[RequestId, RequestRemainder]) -> None:
    """Check that slots and requests agree. held: by request that holds a slot, what it would leave behind now."""
    holders = [slot.holder for slot in world.slots.slots if slot.holder is not None]
    assert len(set(holders)) == len(holders), "a request holds two slots"
    assert held.keys() == set(holders), "slots and requests disagree about who holds what"
    for request, left in held.items():
        lease = left.slot_lease
        assert world.slots.slots[lease.slot].holder == request, "a request works in a slot that is not its own"
        assert 0 <= lease.reused_rows <= lease.valid_rows <= len(left.prompt.tokens) + len(left.answer), left
        assert len(left.answer) <= left.prompt.job.max_tokens, "more tokens than asked for"
        assert left.prompt.shared_tokens <= len(left.prompt.job.prompt), "more is shared than there is"
        check_cache(world.requests[request], world.settings)


def check_queue(world: World) -> None:
    """Check that no request waits while a slot is free for it.

    One-offs may wait for the slot of another one, and followers for the rows of their leader.
    """
    waiting = [request for request, state in world.requests.items() if isinstance(state, Waiting)]
    assert sorted(waiting) == sorted(world.slots.waiting), "the queue and the waiting requests disagree"
    free_count = count_openings(world.slots, world.requests, world.settings)
    if free_count <= 0:
        return
    brief_runs = any(slot.is_brief for slot in world.slots.slots)
    one_offs_wait = brief_runs and len(waiting) < world.settings.max_queue
    for request in world.slots.waiting if world.slots.short_of_pages.isdisjoint(waiting) else ():
        follow = world.slots.follows.get(request)
        if follow is not None and not follow.ended:
            free_count -= 1  # a slot stays for the follower
            continue
        may_wait = free_count <= 0 or (one_offs_wait and is_one_off(world.requests[request]))
        assert may_wait, "a request waits although a slot is free"


def check_follows(world: World) -> None:
    """Check that only waiting requests follow, and that their leaders still compute what they wait for."""
    follows = world.slots.follows
    assert follows.keys() <= set(world.slots.waiting), "a request follows that does not wait"
    for request, follow in follows.items():
        assert follow.ended or is_leading(follow, world.requests), "a request waits for rows that no request computes"
        waiting = world.requests[request]
        leader = world.requests.get(follow.leader)
        if not follow.ended and isinstance(waiting, Waiting) and isinstance(leader, Prefilling):
            same = waiting.prompt.tokens[: follow.awaited_rows] == leader.prompt.tokens[: follow.awaited_rows]
            assert same, "a request follows another prompt"
            assert waiting.prompt.job.salt == leader.prompt.job.salt, "a request follows one of another salt"


def check_lanes(world: World, held: Mapping[RequestId, RequestRemainder]) -> None:
    """Check that each request has one device effect at most, and that no lane is idle or blocked without a reason.

    held: as in `check_slots`.
    """
    on_lanes = [
        effect_request.request for lane in world.lanes.values() for effect_request in (*lane.waiting, *lane.running)
    ]
    assert len(set(on_lanes)) == len(on_lanes), "a request has two effects on devices"
    assert set(on_lanes) <= held.keys(), "a lane works for a request without a slot"
    for lane in world.lanes.values():
        stuck = all(
            isinstance(effect_request.effect, RunDecode) and effect_request.request in world.slots.short_of_pages
            for effect_request in lane.waiting
        )
        assert bool(lane.running) or stuck, "a lane idles although something waits"
        assert not is_blocking(lane), "a launch goes on although something waits for its end"


def check_models(world: World, held: Mapping[RequestId, RequestRemainder]) -> None:
    """Check that a leased model is loaded, and that models and requests agree about the leases.

    held: as in `check_slots`.
    """
    for name, model in world.models.items():
        leases = model.leases
        assert len(set(leases)) == len(leases), f"a request leases the {name} twice"
        assert not leases or model.location in PRESENT, f"the {name} is leased and not loaded"
        leasing = {request for request, left in held.items() if left.leased_model == name}
        assert set(leases) == leasing, "leases and states disagree"


def check_pacing(world: World) -> None:
    """Check that the demand is counted right, and that background work does not wait for ever."""
    pacing = world.pacing
    saving = {request for request, state in world.requests.items() if isinstance(state, Snapshotting)}
    assert set(pacing.demand.snapshots) == saving, "a snapshot is forgotten"
    backlog = PROMPTS in world.lanes and has_several_prompts(world.lanes[PROMPTS])
    first_tokens = sum(map(is_awaiting_first_token, world.requests.values()))
    main = world.lanes[MAIN].running
    interval = choose_step_interval(world.settings, world.rates, main) if backlog else 0
    queued = hurries_snapshots(world.slots, world.settings)
    snapshots = pacing.demand.snapshots
    worth = estimate_snapshot_worth(world.requests[snapshots[0]], world.rates) if queued and snapshots else None
    counted = Demand(bool(world.requests), queued, first_tokens, backlog, snapshots, interval, worth)
    assert pacing.demand == counted, "the demand is counted wrong"
    gate = pacing.gate
    assert (gate is None) == (not saving), "there is a gate without a snapshot, or a snapshot without a gate"
    if gate is not None:
        assert gate.request == pacing.demand.snapshots[0], "the gate is not that of the oldest snapshot"
        assert gate.pace.may_copy == (gate.phase == "copying"), "the saver knows another phase"
        waits_for = {"giving_way": gate.patience_timer, "settling": gate.quiet_timer, "copying": 1}
        assert waits_for[gate.phase], "a snapshot waits for nothing"
        assert gate.phase == "copying" or not gate.is_patience_over, "a snapshot waits longer than it may"
        assert max(gate.quiet_timer, gate.patience_timer) <= pacing.last_timer, "a timer that was never started"
    trimming = pacing.trimming
    assert (trimming.phase == "rested") == (trimming.timer == 0), "memory waits for no timer"
    assert trimming.phase != "rested" or not world.requests, "memory is never trimmed"


def check_checkpoints(world: World) -> None:
    """Check that every checkpoint on the device belongs to a row that its slot keeps."""
    filled = [(checkpoint.slot, checkpoint.at) for checkpoint in world.slots.checkpoints if checkpoint.at]
    assert len(set(filled)) == len(filled), "two checkpoints have the same state"
    assert len(world.slots.checkpoints) == world.settings.state_checkpoints, "a checkpoint appeared or went"
    for number, at in filled:
        slot = world.slots.slots[number]
        assert at % world.settings.block_size == 0, "a checkpoint that is at no cache position"
        assert slot.holder is not None or at <= len(slot.tokens), "a checkpoint of rows that are not there"
    for slot in world.slots.slots:
        assert 0 <= slot.state_position <= len(slot.tokens), "a state of rows that are not there"


def check_pages(world: World) -> None:
    """Check that pages are in the pool, that a written page has one owner, and that all running requests can end."""
    settings = world.settings
    slots = world.slots.slots
    holders = Counter(page for slot in slots for page in slot.pages)
    assert all(0 <= page < settings.pages for page in holders), "a page that is not in the pool"
    assert settings.shares_pages or all(count == 1 for count in holders.values()), "two slots have one page"
    jobs = list_running_jobs(world.slots, world.requests)
    claims = [(slots[number].pages, compute_claim(settings, job)) for number, job in jobs.items()]
    assert not settings.pages or can_all_finish(claims, settings.pages), (
        "a request may never get the pages that it claims"
    )
    for number, slot in enumerate(slots) if settings.pages else ():
        assert len(set(slot.pages)) == len(slot.pages), "a slot has a page twice"
        assert slot.holder is not None or len(slot.pages) == count_pages(len(slot.tokens), settings.page), (
            "a page leaks"
        )
        state = world.requests.get(slot.holder) if slot.holder is not None else None
        if state is not None and not isinstance(state, ReleasingState | Waiting):
            rows = get_remainder(state).slot_lease.rows  # type: ignore[arg-type] # it holds a slot
            own = slot.pages[rows // settings.page :]
            assert all(holders[page] == 1 for page in own), "a page is written that another slot reads"
        assert number not in jobs or len(slot.pages) <= compute_claim(settings, jobs[number]), (
            "more pages than it may need"
        )


def check_cache(state: State, settings: Settings) -> None:
    """Check that loaded rows fit computed ones, and that nothing is kept that the scope does not allow."""
    if isinstance(state, Restoring):
        # With positional state, the rows between `valid_rows` and `load_start` are in the slot (`rows_ahead`), and
        # nothing is computed while the rest is loaded. Else they are the front, which is computed meanwhile.
        inside = state.slot_lease.valid_rows <= state.load_start <= state.stop <= state.prompt.prefill_rows
        assert inside, "rows are loaded where they do not belong"
    if isinstance(state, Recovering | Yielding) or (isinstance(state, Draining) and state.rows_lost):
        assert state.remainder.slot_lease.valid_rows == 0, "a slot is trusted that was lost"
    if isinstance(state, Snapshotting):
        left = state.remainder
        prompt = left.prompt
        scope = prompt.job.scope
        rows = select_rows_to_keep(settings, left).rows
        limits = {"full": left.slot_lease.valid_rows, "auto": prompt.shared_tokens, "fixed": scope.count, "off": 0}
        most = limits[scope.kind]
        lost = left.slot_lease.valid_rows == 0
        assert lost or 0 < rows <= min(most, left.slot_lease.valid_rows), "more is kept than the scope allows"
        assert scope.kind == "full" or left.valid_tokens[:rows] == prompt.job.prompt[:rows], (
            "an answer is kept as a prompt"
        )
