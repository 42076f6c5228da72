"""Tests of servers that are asked in turn: what a round gives, and between what the median lies."""

from __future__ import annotations

import pytest

from benchmarks.never_slower import AGAIN
from benchmarks.texts_in_turn import NAMES, TextTimes, as_turn_of, compare, find_interval, shorten

pytestmark = pytest.mark.timeout(30)


def took(wall, cpu=1.0, tokens=10, digest="same"):
    return TextTimes(wall, cpu, tokens, tokens // 2, digest)


def test_a_gain_is_over_the_mean_of_both_plain_servers():
    rounds = [{"plain": took(3.0, 4.0), "copies": took(1.0, 2.0), AGAIN: took(5.0, 8.0)} for _ in range(3)]
    row = compare("edits", rounds)
    assert (row["x wall"], row["x cpu"]) == (4.0, 3.0)
    assert (row["control wall"], row["control cpu"]) == (0.6, 0.5)
    assert (row["x wall, from"], row["x wall, to"]) == (4.0, 4.0), "rounds that are alike leave no doubt"
    assert (row["tok/step"], row["differing"]) == (2.0, 0)


def test_other_tokens_of_any_server_are_counted():
    same = {"plain": took(1.0), "copies": took(1.0), AGAIN: took(1.0)}
    assert compare("", [same, same | {"copies": took(1.0, digest="other")}])["differing"] == 1


def test_the_interval_holds_the_median_and_narrows_with_more_rounds():
    few, many = [0.9, 1.0, 1.1] * 3, [0.9, 1.0, 1.1, 1.0] * 50
    wide, narrow = find_interval(few), find_interval(many)
    assert wide[0] <= 1.0 <= wide[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]
    assert find_interval(few) == wide, "the same drawings each time"


def test_answers_are_cut_to_the_same_length_for_all_servers():
    batches = [{"salt": "", "jobs": [{"prompt": (1,), "answer": (2, 3, 4), "tokens": 3}]}]
    (job,) = shorten(batches, 2)[0]["jobs"]
    assert (job["answer"], job["tokens"]) == ((2, 3), 2)


def test_one_server_proposes_in_one_turn_of_three_and_no_turn_shares_its_salt():
    batch = {"salt": "new 1", "jobs": [{"prompt": (1,), "answer": (2, 3), "tokens": 2}] * 2}
    turns = {name: as_turn_of(name, batch) for name in NAMES}
    assert len({turn["salt"] for turn in turns.values()}) == len(NAMES)
    speculate = {name: {job["speculate"] for job in turn["jobs"]} for name, turn in turns.items()}
    assert speculate == {"plain": {False}, "copies": {True}, AGAIN: {False}}
    assert "speculate" not in batch["jobs"][0], "the batch itself stays as it is for servers of their own"
