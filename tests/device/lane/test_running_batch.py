"""Outcomes of a launch: the last one of a request says so, and is otherwise what it was."""

from __future__ import annotations

from attrs import evolve, fields

from adapters.device.lane.running_batch import as_last_outcome, has_more_to_come, merge_steps
from effects.decode import Decoded
from effects.ids import DeviceFailed, RequestId

# No field but `steps` has its default: one that is forgotten shows.
DECODED = Decoded(
    (5, 6),
    3,
    ((-0.5, ()), (-0.25, ())),
    1000,
    accepted=1,
    steps=2,
    more=True,
    matched=4,
    copied=2,
    rows=8,
    branched=True,
    on_branch=1,
)


def test_the_last_outcome_differs_in_nothing_else() -> None:
    last = as_last_outcome(DECODED)
    assert last == evolve(DECODED, more=False)
    assert has_more_to_come(DECODED)
    assert not has_more_to_come(last)
    assert len(fields(Decoded)) == 12, "a new field has to be in `as_last_outcome`, and in this test"


def test_a_failure_is_the_last_outcome_as_it_is() -> None:
    failure = DeviceFailed("broken", "why")
    assert as_last_outcome(failure) is failure


def test_the_time_of_merged_steps_is_their_mean_and_unknown_where_one_was_not_measured() -> None:
    timed, longer, unknown = ([(RequestId(1), Decoded((7,), ns=ns, accepted=0, more=True))] for ns in (30, 50, 0))
    [(_, mean)] = merge_steps([timed, longer])
    assert (mean.tokens, mean.steps, mean.ns) == ((7, 7), 2, 40)
    [(_, mixed)] = merge_steps([timed, unknown, longer])
    assert (mixed.steps, mixed.ns) == (3, 0)
