"""What is true of every world, between any two events. Asserted in simulation, and in production under `--paranoid`."""

from __future__ import annotations

from collections import Counter

from effects.decode import RunDecode
from states.lane import held_up
from states.pages import claim, needed, safe
from states.request_states import (
    Done,
    Draining,
    Held,
    Leaving,
    New,
    Recovering,
    Restoring,
    Snapshotting,
    State,
    Waiting,
    Yielding,
    remains,
)
from states.residency import PRESENT
from states.scope import select
from states.settings import Settings
from states.slots import one_off, running
from states.world import World


def check(world: World) -> None:
    """Raises AssertionError naming what does not hold."""
    holders = [slot.holder for slot in world.slots.slots if slot.holder is not None]
    assert len(set(holders)) == len(holders), "a request holds two slots"
    held = {request: remains(state) for request, state in world.requests.items() if isinstance(state, Held)}
    assert held.keys() == set(holders), "slots and requests disagree about who holds what"
    for request, left in held.items():
        seat, prompt, answer = left.seat, left.prompt, left.answer
        assert world.slots.slots[seat.slot].holder == request, "a request works in a slot that is not its own"
        assert 0 <= seat.restored <= seat.valid <= len(prompt.tokens) + len(answer), left
        assert len(answer) <= prompt.job.max_tokens, "more tokens than asked for"
        assert prompt.shared <= len(prompt.job.prompt), "more is shared than there is"
        check_cache(world.requests[request], world.settings)
    check_places(world)
    check_pages(world)
    placed = world.experts.places
    assert len(set(placed)) == len(placed) == world.settings.expert_places, "an expert has two places"
    waiting = [request for request, state in world.requests.items() if isinstance(state, Waiting)]
    assert sorted(waiting) == sorted(world.slots.waiting), "the queue and the waiting requests disagree"
    if len(holders) < len(world.slots.slots):
        another = any(slot.brief for slot in world.slots.slots)
        spared = another and len(waiting) < world.settings.max_queue
        for request in waiting if world.slots.short.isdisjoint(waiting) else ():
            let_pass = spared and one_off(world.requests[request])
            assert let_pass, "somebody waits although a slot is free"
    assert not any(isinstance(state, New | Done) for state in world.requests.values()), "a request outlived its end"
    on_lanes = [ask.request for lane in world.lanes.values() for ask in (*lane.waiting, *lane.running)]
    assert len(set(on_lanes)) == len(on_lanes), "a request has two effects on devices"
    assert set(on_lanes) <= held.keys(), "a lane works for a request without a slot"
    for lane in world.lanes.values():
        stuck = all(isinstance(ask.effect, RunDecode) and ask.request in world.slots.short for ask in lane.waiting)
        assert bool(lane.running) or stuck, "a lane idles although something waits"
        assert not held_up(lane), "a launch goes on although something waits"
    for name, model in world.models.items():
        leases = model.leases
        assert len(set(leases)) == len(leases), f"a request leases the {name} twice"
        assert not leases or model.place in PRESENT, f"the {name} is leased and not loaded"
        leasing = {request for request, left in held.items() if left.leased == name}
        assert set(leases) == leasing, "leases and states disagree"


def check_places(world: World) -> None:
    """Every checkpoint on the device is behind a row of what its slot keeps."""
    filled = [(place.slot, place.at) for place in world.slots.places if place.at]
    assert len(set(filled)) == len(filled), "two places have the same state"
    assert len(world.slots.places) == world.settings.state_places, "a place appeared or went"
    for number, at in filled:
        slot = world.slots.slots[number]
        assert at % world.settings.block_size == 0, "a checkpoint that is at no cache position"
        assert slot.holder is not None or at <= len(slot.tokens), "a checkpoint of rows that are not there"
    for slot in world.slots.slots:
        assert 0 <= slot.live <= len(slot.tokens), "a state of rows that are not there"


def check_pages(world: World) -> None:
    """Every page is in the pool, who writes one has it alone, and all that run can come to their ends."""
    settings, slots = world.settings, world.slots.slots
    holders = Counter(page for slot in slots for page in slot.pages)
    assert all(0 <= page < settings.pages for page in holders), "a page that is not in the pool"
    assert settings.shares_pages or all(count == 1 for count in holders.values()), "two slots have one page"
    jobs = running(world.slots, world.requests)
    claims = [(slots[number].pages, claim(settings, job)) for number, job in jobs.items()]
    assert not settings.pages or safe(claims, settings.pages), "somebody may never get the pages that it claims"
    for number, slot in enumerate(slots) if settings.pages else ():
        assert len(set(slot.pages)) == len(slot.pages), "a slot has a page twice"
        assert slot.holder is not None or len(slot.pages) == needed(len(slot.tokens), settings.page), "a page leaks"
        state = world.requests.get(slot.holder) if slot.holder is not None else None
        if state is not None and not isinstance(state, Leaving | Waiting):
            rows = remains(state).seat.rows  # type: ignore[arg-type] # who holds a slot is held
            own = slot.pages[rows // settings.page :]
            assert all(holders[page] == 1 for page in own), "a page is written that somebody else reads"
        assert number not in jobs or len(slot.pages) <= claim(settings, jobs[number]), "more pages than it may need"


def check_cache(state: State, settings: Settings) -> None:
    """What is loaded fits what is computed, and nothing is kept that the scope does not allow."""
    if isinstance(state, Restoring):
        inside = state.seat.valid <= state.front <= state.stop <= state.prompt.target
        assert inside, "rows are loaded where they do not belong"
    if isinstance(state, Recovering | Yielding) or (isinstance(state, Draining) and state.lost):
        assert state.remains.seat.valid == 0, "a slot is trusted that was lost"
    if isinstance(state, Snapshotting):
        left, prompt, scope = state.remains, state.remains.prompt, state.remains.prompt.job.scope
        rows = select(settings, left).rows
        most = {"full": left.seat.valid, "auto": prompt.shared, "fixed": scope.count, "off": 0}[scope.kind]
        lost = left.seat.valid == 0
        assert lost or 0 < rows <= min(most, left.seat.valid), "more is kept than the scope allows"
        assert scope.kind == "full" or left.rows[:rows] == prompt.job.prompt[:rows], "an answer is kept as a prompt"
