"""Tests of where a draft's weights are: the truth table of the policy, moves of weights, and every order of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from attrs import asdict, evolve, frozen

from effects.all import Effect, EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, DeviceFailed, RequestId
from effects.job import Job
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from states import launch_choice, residency
from states.events import Cancelled, EffectOutcome, Event, ForRequest, Submitted
from states.invariants import check_world
from states.lane import Lane
from states.rates import Rates
from states.residency import (
    IDLE_LOCATION,
    Policy,
    Residence,
    ResidencyReport,
    Resolved,
    Use,
    describe_residency,
    make_models,
    resolve_policy,
    resolve_residency,
)
from states.settings import Settings
from states.world import Output, World, make_world
from tests.pairs import usual_where
from tests.states.builders import DRAFT, ONE, PLAIN, SCOPED, THREE, TWO, advance, make_effect_requests

NO, YES = False, True


@pytest.mark.parametrize(
    ("policy", "use", "low_memory", "has_draft", "after"),
    [
        ("persistent", "draft", NO, YES, "keep"),
        ("persistent", "draft", YES, YES, "keep"),
        ("persistent", "scorer", NO, YES, "keep"),
        ("persistent", "scorer", YES, NO, "keep"),
        ("request-scoped", "draft", NO, YES, "park"),
        ("request-scoped", "draft", YES, YES, "park"),
        ("request-scoped", "scorer", NO, NO, "release"),
        ("request-scoped", "scorer", YES, YES, "release"),
        ("auto", "draft", NO, YES, "keep"),
        ("auto", "draft", YES, YES, "park"),
        ("auto", "draft", YES, NO, "keep"),
        ("auto", "scorer", NO, YES, "keep"),
        ("auto", "scorer", NO, NO, "keep"),
        ("auto", "scorer", YES, YES, "release"),
        ("auto", "scorer", YES, NO, "release"),
    ],
)
def test_resolve(policy: Policy, use: Use, low_memory: bool, has_draft: bool, after: str) -> None:
    assert resolve_policy(policy, use, low_memory=low_memory, has_draft=has_draft) == after


@pytest.mark.parametrize(
    ("policy", "has_draft", "has_prompt_scorer", "outcome"),
    [
        ("auto", YES, YES, Resolved("auto", "keep", "keep")),
        ("persistent", YES, NO, Resolved("persistent", "keep", "keep")),
        ("request-scoped", YES, NO, Resolved("request-scoped", "park", "release")),
        ("request-scoped", NO, YES, Resolved("request-scoped", "park", "release")),
    ],
)
def test_a_policy_comes_to_something_for_both_models(
    policy: Policy, has_draft: bool, has_prompt_scorer: bool, outcome: Resolved
) -> None:
    assert resolve_residency(policy, has_draft=has_draft, has_prompt_scorer=has_prompt_scorer) == (outcome, "")


def test_request_scoped_without_a_model_to_send_away_is_auto_and_says_so() -> None:
    short = {"low_memory": True, "scorer_low_memory": True}
    outcome, message = resolve_residency("request-scoped", has_draft=False, has_prompt_scorer=False, **short)
    assert outcome == Resolved("auto", "keep", "keep")
    assert "request-scoped" in message
    assert "auto" in message


def test_a_hint_of_low_memory_parks_the_draft_of_auto() -> None:
    assert resolve_residency("auto", has_draft=True, has_prompt_scorer=False, low_memory=True)[0].draft == "park"
    assert resolve_residency("persistent", has_draft=True, has_prompt_scorer=False, low_memory=True)[0].draft == "keep"


@pytest.mark.parametrize(
    ("short", "outcome"),
    [
        ({"low_memory": True}, Resolved("auto", "park", "keep")),
        ({"scorer_low_memory": True}, Resolved("auto", "keep", "release")),
        ({"low_memory": True, "scorer_low_memory": True}, Resolved("auto", "park", "release")),
    ],
)
def test_auto_sends_away_the_model_whose_own_device_is_short_of_memory(
    short: dict[str, bool], outcome: Resolved
) -> None:
    assert resolve_residency("auto", has_draft=True, has_prompt_scorer=True, **short)[0] == outcome


@pytest.mark.parametrize(("after", "place"), [("keep", "loaded"), ("park", "parked"), ("release", "released")])
def test_at_boot_a_draft_is_where_it_goes_when_nobody_needs_it(after: Any, place: str) -> None:
    assert make_models(evolve(PLAIN, residency=Resolved("auto", after))) == {"draft": Residence(place)}  # type: ignore[arg-type]


def unpark(request: int) -> EffectRequest:
    return EffectRequest(RequestId(request), LoadModel("draft"))


def park(request: int, *, release: bool = False) -> EffectRequest:
    return EffectRequest(RequestId(request), UnloadModel("draft", keep=not release))


def test_the_first_to_need_a_draft_leases_it_once_it_is_there() -> None:
    away = {"draft": Residence("parked", size_bytes=5, moved_bytes=5, parks=1)}
    there = {"draft": Residence("loaded", (ONE,), size_bytes=9, moved_bytes=14, loads=1, parks=1)}
    assert residency.record_move(away, unpark(1), ModelLoaded(9, 3)) == there
    assert residency.answer_without_move(away, unpark(1), SCOPED.residency) == (away, None)


def test_a_move_that_told_no_bytes_leaves_the_size_as_it_was_known() -> None:
    away = {"draft": Residence("parked", size_bytes=5)}
    assert residency.record_move(away, unpark(1), ModelLoaded())["draft"].size_bytes == 5


@pytest.mark.parametrize("place", ["parked", "released"])
def test_a_failed_unpark_leaves_the_previous_state(place: Any) -> None:
    away = {"draft": Residence(place, size_bytes=5)}
    failed = residency.record_move(away, unpark(1), DeviceFailed("out_of_memory", "no room"))
    assert failed == {"draft": Residence(place, size_bytes=5, failures=1, error="out_of_memory: no room")}
    again = residency.record_move(failed, unpark(2), ModelLoaded(5))
    assert (again["draft"].location, again["draft"].leases, again["draft"].loads) == ("loaded", (TWO,), 1)


def test_who_gave_up_its_place_in_the_queue_says_nothing_about_the_draft() -> None:
    away = {"draft": Residence("parked")}
    assert residency.record_move(away, unpark(1), DeviceFailed("abandoned", "")) == away


@pytest.mark.parametrize(("release", "place"), [(False, "parked"), (True, "released")])
def test_the_last_lease_sends_the_draft_where_it_was_asked_to_go(release: bool, place: str) -> None:
    last = {"draft": Residence("loaded", (ONE,), loads=1)}
    gone = residency.record_move(last, park(1, release=release), ModelUnloaded(9))
    assert gone == {"draft": Residence(place, size_bytes=9, moved_bytes=9, loads=1, parks=1)}  # type: ignore[arg-type]


def test_a_failed_parking_leaves_it_loaded_for_the_next_one() -> None:
    last = {"draft": Residence("loaded", (ONE,))}
    left = residency.record_move(last, park(1), DeviceFailed("out_of_memory", "no pinned memory"))
    assert left == {"draft": Residence("loaded", failures=1, error="out_of_memory: no pinned memory")}
    assert residency.answer_without_move(left, unpark(2), SCOPED.residency)[1] == ModelLoaded()


@pytest.mark.parametrize("settings", [DRAFT, SCOPED], ids=["kept", "request-scoped"])
def test_a_draft_that_somebody_else_needs_stays(settings: Settings) -> None:
    shared, left = {"draft": Residence("loaded", (ONE, TWO))}, {"draft": Residence("loaded", (TWO,))}
    assert launch_choice.choose_launch(Lane((park(1),)), shared, settings, {}, Rates()) == (
        Lane(),
        left,
        EffectOutcome(ONE, ModelUnloaded()),
    )


def test_the_last_lease_parks_the_draft_unless_the_policy_keeps_it() -> None:
    last, waiting = {"draft": Residence("loaded", (ONE,))}, Lane((park(1),))
    assert launch_choice.choose_launch(waiting, last, DRAFT, {}, Rates()) == (
        Lane(),
        {"draft": Residence("loaded")},
        EffectOutcome(ONE, ModelUnloaded()),
    )
    assert launch_choice.choose_launch(waiting, last, SCOPED, {}, Rates()) == (
        Lane((), (park(1),), member_count=1),
        last,
        Launch((park(1),)),
    )


def test_other_outcomes_leave_the_residency_alone() -> None:
    models = {"draft": Residence("loaded", (ONE, THREE))}
    (a_decode,) = make_effect_requests(ONE, RunDecode(0, 20, 7))  # type: ignore[arg-type]
    assert residency.record_move(models, a_decode, Decoded((7,))) is models
    assert residency.record_move(models, a_decode, DeviceFailed("broken", "")) is models


def test_what_is_shown_is_what_was_acknowledged_or_what_the_executor_counts() -> None:
    parked = {"draft": Residence("parked", size_bytes=9, moved_bytes=18, loads=1, parks=1, failures=1, error="io: bad")}
    shown = describe_residency(parked, SCOPED)
    assert shown.policy == "request-scoped"
    assert shown.draft is not None
    assert asdict(shown.draft) == {
        "state": "parked",
        "after_use": "park",
        "device_bytes": 0,
        "host_bytes": 9,
        "moved_bytes": 18,
        "leases": 0,
        "loads": 1,
        "parks": 1,
        "failures": 1,
        "last_error": "io: bad",
    }
    counted = describe_residency({"draft": Residence()}, DRAFT, {"draft": (7, 8)}).draft
    assert counted is not None
    assert (counted.state, counted.device_bytes, counted.host_bytes, counted.last_error) == ("loaded", 7, 8, None)
    assert describe_residency({"draft": Residence()}, PLAIN) == ResidencyReport("auto", None, None)


# Every order in which three requests come, draft, leave and fail: the whole fold, walked to its end.

HOUSE = Settings(slots=2, max_context=8, max_queue=1, chunk=1, block_size=1, max_proposals=1)
JOBS = {ONE: Job((1, 1), 2), TWO: Job((2,), 3), THREE: Job((3,), 1)}
TWO_JOBS = {ONE: JOBS[ONE], TWO: JOBS[TWO]}  # enough to share a draft, where anything may fail as well
FAILED = (DeviceFailed("out_of_memory", ""), DeviceFailed("abandoned", ""))


def answers(effect: Effect, failures: tuple[DeviceFailed, ...]) -> Iterator[Any]:
    match effect:
        case RunPrefill(_, _, stop):
            yield PrefillAdvanced(stop)
        case LoadModel():
            yield ModelLoaded()
        case UnloadModel():
            yield ModelUnloaded()
        case RunDecode(propose=propose):
            yield Decoded((7, 8)[: propose + 1], propose)
    yield from failures


@frozen
class Reached:
    world: World
    come: frozenset[RequestId] = frozenset()
    cancelled: frozenset[RequestId] = frozenset()

    def possible(
        self, jobs: Mapping[RequestId, Job], failures: tuple[DeviceFailed, ...]
    ) -> Iterator[tuple[RequestId, Event]]:
        yield from ((request, Submitted(job)) for request, job in jobs.items() if request not in self.come)
        yield from ((request, Cancelled("client_gone")) for request in self.world.requests.keys() - self.cancelled)
        for effect_request in self.world.lanes[MAIN].running:
            yield from ((effect_request.request, outcome) for outcome in answers(effect_request.effect, failures))

    def after(self, request: RequestId, event: Event) -> Reached:
        world, outs = advance(self.world, ForRequest(request, event))
        sound(self.world, world, outs)
        cancelled = self.cancelled | ({request} if isinstance(event, Cancelled) else set())
        return Reached(forgetful(world), self.come | {request}, cancelled & world.requests.keys())


def forgetful(world: World) -> World:
    """Counts and idle sequences do not matter here, and would never come back to a world that was seen."""
    draft = evolve(world.models["draft"], loads=0, parks=0, failures=0, error="")
    slots = tuple(evolve(slot, tokens=(), last_release=0) for slot in world.slots.slots)
    return evolve(world, models={"draft": draft}, slots=evolve(world.slots, slots=slots, release_count=0))


def sound(before: World, world: World, outs: tuple[Output, ...]) -> None:
    check_world(world)
    draft = world.models["draft"]
    for out in outs:
        for effect_request in out.effect_requests if isinstance(out, Launch) else ():
            match effect_request.effect:
                case RunDecode(propose=propose):
                    assert not propose or (draft.location == "loaded" and effect_request.request in draft.leases)
                case LoadModel():
                    assert draft.location != "loaded", "what is there is asked for"
                case UnloadModel(_, keep):
                    assert draft.location == "loaded"
                    assert draft.leases == (effect_request.request,), "sent away although a request needs it"
                    assert IDLE_LOCATION[world.settings.residency.draft] == ("parked" if keep else "released")
    if draft.location != before.models["draft"].location:
        (moved,) = before.lanes[MAIN].running
        assert isinstance(moved.effect, LoadModel | UnloadModel), "weights moved without an acknowledgement"


@usual_where(lambda places: places["jobs"] == places["after"] % 2)
@pytest.mark.parametrize(
    ("jobs", "failures"),
    [(JOBS, ()), (TWO_JOBS, FAILED), pytest.param(JOBS, FAILED, marks=pytest.mark.long)],
    ids=["calm", "failing", "three failing"],
)
@pytest.mark.parametrize(
    ("after", "place"), [("keep", "loaded"), ("keep", "parked"), ("park", "parked"), ("release", "released")]
)
def test_in_every_order_who_drafts_has_a_draft_and_the_last_one_sends_it_away(
    after: Any, place: Any, jobs: Mapping[RequestId, Job], failures: tuple[DeviceFailed, ...]
) -> None:
    start = evolve(make_world(evolve(HOUSE, residency=Resolved("auto", after))), models={"draft": Residence(place)})
    todo, seen, ends = [Reached(start)], set[str](), set[str]()
    while todo:
        node = todo.pop()
        if not node.world.requests and len(node.come) == len(jobs):
            assert not node.world.models["draft"].leases
            ends.add(node.world.models["draft"].location)
        for request, event in node.possible(jobs, failures):
            reached = node.after(request, event)
            if (known := repr(reached)) not in seen:
                seen.add(known)
                todo.append(reached)
    assert len(seen) > 100
    moved = {"loaded"} if after == "keep" or failures else set()
    assert ends == {place} | moved, "only a failed parking leaves a draft that no request leases"
