"""What is true of every world, between any two events. Asserted in simulation, and in production under `--paranoid`."""

from __future__ import annotations

from states.life import Done, Hold, New, Restoring, Snapshotting, State, Waiting
from states.scope import select
from states.slots import hold_of
from states.world import World


def check(world: World) -> None:
    """Raises AssertionError naming what does not hold."""
    holders = [slot.holder for slot in world.slots.slots if slot.holder is not None]
    assert len(set(holders)) == len(holders), "a request holds two slots"
    held = {request: hold for request, state in world.requests.items() if (hold := hold_of(state))}
    assert held.keys() == set(holders), "slots and requests disagree about who holds what"
    for request, hold in held.items():
        assert world.slots.slots[hold.slot].holder == request, "a request works in a slot that is not its own"
        assert 0 <= hold.restored <= hold.valid <= len(hold.prompt) + len(hold.answer), hold
        assert len(hold.answer) <= hold.job.max_tokens, "more tokens than asked for"
        assert hold.shared <= len(hold.job.prompt), "more is shared than there is"
        check_cache(world.requests[request], hold)
    waiting = [request for request, state in world.requests.items() if isinstance(state, Waiting)]
    assert sorted(waiting) == sorted(world.slots.waiting), "the queue and the waiting requests disagree"
    assert not waiting or len(holders) == len(world.slots.slots), "somebody waits although a slot is free"
    assert not any(isinstance(state, New | Done) for state in world.requests.values()), "a request outlived its end"
    on_lane = [ask.request for ask in (*world.lane.waiting, *world.lane.running)]
    assert len(set(on_lane)) == len(on_lane), "a request has two effects on the lane"
    assert set(on_lane) <= held.keys(), "the lane works for a request without a slot"
    assert bool(world.lane.running) or not world.lane.waiting, "the lane idles although something waits"
    draft = world.models.draft
    leases = draft.leases
    assert len(set(leases)) == len(leases), "a request leases the draft twice"
    assert not leases or draft.place == "loaded", "the draft is leased and not loaded"
    leasing = {request for request, hold in held.items() if hold.draft}
    assert set(leases) == leasing, "leases and holds disagree"


def check_cache(state: State, hold: Hold) -> None:
    """What is loaded fits what is computed, and nothing is kept that the scope does not allow."""
    if isinstance(state, Restoring):
        assert hold.valid <= state.front <= state.stop <= hold.target, "rows are loaded where they do not belong"
    if isinstance(state, Snapshotting):
        rows, scope = select(hold).rows, hold.job.scope
        most = {"full": hold.valid, "auto": hold.shared, "fixed": scope.count, "off": 0}[scope.kind]
        assert 0 < rows <= min(most, hold.valid), "more is kept than the scope allows"
        assert scope.kind == "full" or hold.rows[:rows] == hold.job.prompt[:rows], "an answer is kept as a prompt"
