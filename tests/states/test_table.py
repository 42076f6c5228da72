"""The table as a whole: what the model checker proves of every life of a request, and that it notices mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from effects.all import Effect, Outcome
from effects.decode import Decoded
from effects.ids import Side
from effects.lookup import PrefixFound, ReleasePrefix
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.residency import ModelLoaded, UnloadModel
from effects.restore import BlocksRestored
from effects.stream import CloseStream, EmitTokens, ReportProgress
from states.diagram import WORLD_EFFECTS
from states.events import Cancelled, SlotEmptied
from states.machine import IllegalEvent, Row, Table, Transition, build_table, on, read_arms, step
from states.request_states import (
    Compressing,
    Done,
    Draining,
    LookingUp,
    New,
    Parking,
    Prefilling,
    Recovering,
    Restoring,
    Snapshotting,
    Speculating,
    State,
    UnparkingDraft,
    Waiting,
    Yielding,
)
from states.settings import DecisionContext, Settings
from states.table import TABLE
from tests.states.model import ALL_SETTINGS, BEHIND_THE_CLIENT, LOSING, SETTINGS, Walk, endless, explore

EVERYTHING = tuple(
    one for one in SETTINGS if one.block_size == one.store == one.max_proposals == 1 and one.scorer_max_tokens
)[:1]


@pytest.fixture(
    scope="module", params=[SETTINGS, pytest.param(ALL_SETTINGS, marks=pytest.mark.long)], ids=["half", "all options"]
)
def walk(request: pytest.FixtureRequest) -> Walk:
    return explore(TABLE, request.param)


def test_every_life_keeps_the_rules(walk: Walk) -> None:
    """A row for every question; one effect in flight per lane; leases, draft and stream given back exactly once."""
    assert not walk.faults
    assert len(walk.edges) > 10_000


def test_every_life_ends(walk: Walk) -> None:
    assert not endless(walk)


def test_every_row_and_every_arm_of_it_can_happen(walk: Walk) -> None:
    assert walk.arms == {(row.state, row.event, arm) for row in TABLE.values() for arm in row.arms}


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: f"{row.state.__name__}-{row.event.__name__}")
def test_the_stream_closes_where_the_work_for_the_client_ends_and_nowhere_else(row: Row) -> None:
    for target, *effect_requests in row.arms:
        leaves = row.state not in BEHIND_THE_CLIENT and target in BEHIND_THE_CLIENT
        assert effect_requests.count(CloseStream) == leaves
        if leaves:
            said = effect_requests[effect_requests.index(CloseStream) :]
            assert EmitTokens not in said
            assert ReportProgress not in said
        elif row.state in BEHIND_THE_CLIENT:
            assert not {EmitTokens, ReportProgress, CloseStream} & set(effect_requests)


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: f"{row.state.__name__}-{row.event.__name__}")
def test_an_arm_asks_for_one_awaited_effect_on_a_lane_at_most_and_the_end_for_none(row: Row) -> None:
    for target, *effect_requests in row.arms:
        lanes = [effect_request.side for effect_request in effect_requests if effect_request.outcomes]
        assert len(lanes) == len(set(lanes))
        assert not (target is Done and lanes)


def test_all_states_events_and_effects_are_in_the_table() -> None:
    states = {row.state for row in TABLE.values()} | {arm[0] for row in TABLE.values() for arm in row.arms}
    asked = {
        effect_request
        for row in TABLE.values()
        for _, *effect_requests in row.arms
        for effect_request in effect_requests
    }
    assert {(each,) for each in states} == set(arms_of_union(State))
    assert {row.event for row in TABLE.values()} >= {each for (each,) in arms_of_union(Outcome)}
    assert {(each,) for each in asked | {*WORLD_EFFECTS}} == set(arms_of_union(Effect))


def arms_of_union(union: Any) -> list[tuple[type]]:
    return [(member,) for member in union.__args__]


def test_a_pair_without_a_row_is_a_bug_that_names_both() -> None:
    with pytest.raises(IllegalEvent, match="Parking cannot see Decoded"):
        step(TABLE, Parking(None), Decoded((1,)), None)  # type: ignore[arg-type]


def test_an_arrow_that_does_not_do_what_its_annotation_says_is_caught() -> None:
    def wrong(_: New, __: Cancelled, ___: DecisionContext) -> Transition[Done, CloseStream]:
        return Transition(Done())  # type: ignore[return-value]

    with pytest.raises(AssertionError):
        step(build_table(on(New, Cancelled, wrong)), New(), Cancelled("deadline"), DecisionContext())


def test_a_pair_cannot_appear_twice() -> None:
    row = TABLE[Parking, Cancelled]
    with pytest.raises(AssertionError, match="appears twice"):
        build_table(row, row)


def test_an_annotation_is_read_as_its_arms() -> None:
    annotation = Transition[Speculating, EmitTokens] | Transition[Parking, CloseStream, UnloadModel] | Transition[Done]
    assert list(read_arms(annotation)) == [(Speculating, EmitTokens), (Parking, CloseStream, UnloadModel), (Done,)]


# Mutants: what would go wrong, and that the checker says so.


def changed(
    state: type, event: type, transition: Callable[[Any, Any, Any], Transition[Any, *tuple[Any, ...]]]
) -> Table:
    """The table with one arrow replaced, whatever its annotation says."""
    row = TABLE[state, event]

    def anything(before: object, seen: object, known: object) -> Any:
        then = transition(before, seen, known)
        arms.append((type(then.state), *map(type, then.effects)))
        return then

    arms = list(row.arms)
    return {**TABLE, (state, event): evolve(row, transition=anything, arms=arms)}


def faults(rows: Table) -> set[str]:
    return explore(rows, EVERYTHING).faults


def noticed(rows: Table, fault: str, settings: tuple[Settings, ...] = EVERYTHING) -> bool:
    return fault in explore(rows, settings, until=fault).faults


@pytest.mark.parametrize("pair", list(TABLE)[::8], ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}")
def test_a_deleted_row_is_noticed(pair: tuple[type, type]) -> None:
    rows = {key: row for key, row in TABLE.items() if key != pair}
    recovers = pair[1] is SlotEmptied or pair[0] in {Recovering, Yielding}
    assert noticed(rows, f"{pair[0].__name__}, {pair[1].__name__}: no row", tuple(LOSING) if recovers else EVERYTHING)


LIVE = (LookingUp, Restoring, Compressing, UnparkingDraft, Prefilling, Speculating)


@pytest.mark.parametrize("state", LIVE)
def test_a_cancellation_straight_to_the_end_is_noticed(state: type) -> None:
    cancelled = f"{state.__name__}, Cancelled: "
    rows = changed(
        state, Cancelled, lambda before, *seen: TABLE[Waiting, Cancelled].transition(Waiting(before.prompt), *seen)
    )
    assert noticed(rows, cancelled + "ends with something in flight")


def test_a_forgotten_release_is_noticed() -> None:
    rows = changed(Draining, PrefixFound, lambda before, *_: Transition(Done(before.remainder)))
    assert noticed(rows, "Draining, PrefixFound: forgets a lease")


def test_a_lease_released_twice_is_noticed() -> None:
    def twice(before: Restoring, seen: BlocksRestored, known: DecisionContext) -> Any:
        then = TABLE[Restoring, BlocksRestored].transition(before, seen, known)
        return Transition(then.state, *then.effects, ReleasePrefix(1))  # type: ignore[arg-type]

    found = faults(changed(Restoring, BlocksRestored, twice))
    assert found == {"Restoring, BlocksRestored: uses a lease that it does not have"}


def test_a_draft_that_comes_too_late_and_is_forgotten_is_noticed() -> None:
    rows = changed(Draining, ModelLoaded, lambda before, *_: Transition(Done(before.remainder)))
    assert noticed(rows, "Draining, ModelLoaded: ends with the draft")


def test_a_second_chunk_while_one_runs_is_noticed() -> None:
    def eager(before: Restoring, seen: BlocksRestored, known: DecisionContext) -> Any:
        return TABLE[Restoring, BlocksRestored].transition(evolve(before, computing=False), seen, known)

    rows = changed(Restoring, BlocksRestored, eager)
    assert noticed(rows, "Restoring, BlocksRestored: two effects in flight on one lane")


def test_a_stream_that_closes_behind_the_snapshot_is_noticed() -> None:
    def late(before: Speculating, seen: Decoded, known: DecisionContext) -> Any:
        then = TABLE[Speculating, Decoded].transition(before, seen, known)
        return Transition(then.state, *(effect for effect in then.effects if not isinstance(effect, CloseStream)))

    rows = changed(Speculating, Decoded, late)
    assert noticed(rows, "Speculating, Decoded: the stream is not closed with the last work for the client")


def test_tokens_behind_the_close_are_noticed() -> None:
    def swapped(before: Speculating, seen: Decoded, known: DecisionContext) -> Any:
        then = TABLE[Speculating, Decoded].transition(before, seen, known)
        return Transition(then.state, *sorted(then.effects, key=lambda effect: not isinstance(effect, CloseStream)))

    assert noticed(changed(Speculating, Decoded, swapped), "Speculating, Decoded: speaks after the close")


def test_waiting_for_an_answer_that_was_never_asked_for_is_noticed() -> None:
    rows = changed(Prefilling, PrefillAdvanced, lambda before, *_: Transition(before))
    assert noticed(rows, "Prefilling, PrefillAdvanced: waits for nothing")


def test_a_life_without_an_end_is_noticed() -> None:
    def again(before: Prefilling, seen: PrefillAdvanced, known: DecisionContext) -> Any:
        return Transition(
            before, ReportProgress(0, 0, 0), RunPrefill(before.slot_lease.slot, before.slot_lease.valid_rows, seen.stop)
        )

    stuck = explore(changed(Prefilling, PrefillAdvanced, again), EVERYTHING)
    assert any(isinstance(node.state, Prefilling) for node in endless(stuck))


def test_rows_that_come_in_after_a_loss_and_are_believed_are_noticed() -> None:
    def trusting(before: Draining, seen: PrefillAdvanced, known: DecisionContext) -> Any:
        return TABLE[Draining, PrefillAdvanced].transition(evolve(before, rows_lost=False), seen, known)

    rows = changed(Draining, PrefillAdvanced, trusting)
    assert noticed(rows, "Draining, PrefillAdvanced: leaves rows to a slot that was lost", tuple(LOSING))


def test_a_third_try_is_noticed() -> None:
    def patient(before: Prefilling, seen: SlotEmptied, known: DecisionContext) -> Any:
        prompt = evolve(before.prompt, heard_tokens=None)
        return TABLE[Prefilling, SlotEmptied].transition(evolve(before, prompt=prompt), seen, known)

    rows = changed(Prefilling, SlotEmptied, patient)
    assert noticed(rows, "Waiting, Admitted: is looked up a third time", tuple(LOSING))


def test_a_cancellation_that_cuts_a_snapshot_short_is_noticed() -> None:
    rows = changed(Snapshotting, Cancelled, lambda before, *_: Transition(Done(before.remainder)))
    assert noticed(rows, "Snapshotting, Cancelled: ends with something in flight")


def test_lanes_are_the_two_that_the_checker_counts() -> None:
    assert {effect.side for (effect,) in arms_of_union(Effect) if effect.outcomes} == {Side.DEVICE, Side.STORE}
