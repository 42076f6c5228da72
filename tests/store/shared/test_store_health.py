"""When a store counts as lost, when it is tried again, and what an operation may take."""

from __future__ import annotations

import pytest

from adapters.store.shared.publish_policy import SharedLimits, find_drop_reason, has_room
from adapters.store.shared.store_health import (
    BASE_LIMIT_S,
    FIRST_PAUSE_S,
    LEAST_BYTES_A_S,
    LONGEST_PAUSE_S,
    LONGEST_REFRESH_S,
    REFRESH_S,
    SOUND_S,
    StoreHealth,
    choose_pause,
    compute_limit,
    compute_patient_limit,
    record_failure,
    record_refresh,
)

LIMITS = SharedLimits(max_waiting=100, budget=1000, max_age_s=1.0)


def test_one_failure_takes_the_store_away_and_a_refresh_brings_it_back() -> None:
    health = StoreHealth()
    assert health.is_usable
    lost = record_failure(health, 10.0, "no answer")
    assert (lost.is_usable, lost.trouble) == (False, "no answer")
    assert choose_pause(lost, 10.0, 0.1) == FIRST_PAUSE_S
    assert record_refresh(lost).is_usable


def test_failures_of_the_same_moment_count_once() -> None:
    once = record_failure(StoreHealth(), 10.0, "first")
    assert record_failure(once, 10.1, "second") is once


def test_a_failure_without_words_has_a_reason_all_the_same() -> None:
    assert record_failure(StoreHealth(), 0.0, "").trouble


@pytest.mark.parametrize(
    ("failures", "pause_s"), [(1, 1.0), (2, 2.0), (3, 4.0), (7, LONGEST_PAUSE_S), (40, LONGEST_PAUSE_S)]
)
def test_pauses_grow_to_a_limit_although_small_questions_are_answered(failures: int, pause_s: float) -> None:
    health, now_s = StoreHealth(), 0.0
    for _ in range(failures):
        now_s = health.retry_s + 1
        health = record_failure(record_refresh(health), now_s, "slow")
    assert choose_pause(health, now_s, 0.0) == pause_s


def test_a_store_that_was_sound_for_long_begins_anew() -> None:
    health = record_failure(record_failure(StoreHealth(), 0.0, "one"), 5.0, "two")
    assert health.failures == 2
    later = record_failure(record_refresh(health), 5.0 + SOUND_S + 1, "three")
    assert (later.failures, later.retry_s - later.failed_s) == (1, FIRST_PAUSE_S)


@pytest.mark.parametrize(
    ("took_s", "pause_s"), [(0.0, REFRESH_S), (0.5, REFRESH_S), (2.0, 20.0), (100.0, LONGEST_REFRESH_S)]
)
def test_listing_takes_a_tenth_of_the_time_at_most(took_s: float, pause_s: float) -> None:
    assert choose_pause(StoreHealth(), 0.0, took_s) == pause_s


@pytest.mark.parametrize(("size", "limit_s"), [(0, BASE_LIMIT_S), (LEAST_BYTES_A_S, BASE_LIMIT_S + 1)])
def test_the_limit_of_an_operation_follows_its_bytes(size: int, limit_s: float) -> None:
    assert compute_limit(size) == limit_s
    assert compute_patient_limit(size) > limit_s


@pytest.mark.parametrize(
    ("usable", "waiting", "reason"),
    [(True, 0, ""), (False, 0, "outage"), (True, 90, ""), (True, 91, "queue_full"), (False, 91, "outage")],
)
def test_what_is_queued(usable: bool, waiting: int, reason: str) -> None:
    assert find_drop_reason(LIMITS, 10, waiting, usable=usable) == reason


@pytest.mark.parametrize(("held", "room"), [(0, True), (1090, True), (1091, False)])
def test_servers_exceed_the_budget_a_little_because_they_hear_of_each_other_late(held: int, room: bool) -> None:
    assert has_room(LIMITS, 10, held) == room


def test_a_store_without_a_budget_has_room() -> None:
    assert has_room(SharedLimits(100, 0, 1.0), 10, 1 << 60)
