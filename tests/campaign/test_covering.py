"""A slice of the covering array in every run of the tests; all of it by hand (`python -m tests.campaign.covering`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.campaign.arrangements import OPTIONS, RULES, Arrangement, arrangements, legal, pairs, uncovered
from tests.campaign.covering import Models, RowResult, covering, run, said, shortened
from tests.campaign.mixture import LEAVES, drawn
from tests.pairs import one_in

SEED = 0


@pytest.mark.parametrize("seed", [SEED, pytest.param(1, marks=pytest.mark.long)])
def test_every_pair_of_values_that_is_legal_is_in_the_array(seed: int) -> None:
    found = arrangements(seed)
    assert not uncovered([row.values for row in found])
    assert all(legal(row.values) and row.values.keys() == OPTIONS.keys() for row in found)
    most = max(len(values) for values in OPTIONS.values())
    assert most * 4 <= len(found) <= 60, "few enough for an hour"
    assert [row.values for row in arrangements(seed)] == [row.values for row in found], (
        "a row is found again by its seed"
    )


def test_every_rule_forbids_a_pair_and_every_value_has_a_legal_row() -> None:
    allowed = list(pairs())
    for (one, other), rule in RULES:
        forbidden = [
            pair for first in OPTIONS[one] for second in OPTIONS[other] if not rule(pair := {one: first, other: second})
        ]
        assert forbidden, (one, other)
        assert not [pair for pair in forbidden if pair in allowed]
    for name, values in OPTIONS.items():
        for value in values:
            assert any(pair.get(name) == value for pair in allowed), (name, value)


@cache
def array() -> list[Arrangement]:
    """Return the array, which takes a second to compute: only a process that runs these tests does so."""
    return arrangements(SEED)


# The hybrid has rows and states.
@one_in(2, "wanted", 1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "wanted",
    [
        {"family": ("demo",), "weights": ("as they are", "int8", "int4")},
        {"family": ("demo-hybrid",)},
    ],
    ids=lambda wanted: wanted["family"][0],
)
def test_a_few_requests_in_a_row_of_the_array(wanted: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    """The row is the first one with these values, a pool of pages, and two or four slots."""
    wanted = {**wanted, "pool": ("tight", "wide"), "slots": ("2", "4")}
    row = next(row for row in array() if all(row[name] in values for name, values in wanted.items()))
    models = Models(tmp_path / "models")
    models.folder.mkdir()
    done: RowResult = run(row, models, tmp_path, requests=8, seed=SEED)
    assert not done.trouble
    assert done.answers
    assert (done.differing, done.examples) == (0, [])


def test_requests_are_of_every_kind_and_the_same_for_a_seed() -> None:
    made = [drawn(Random(number), compressing=True) for number in range(300)]
    assert made == [drawn(Random(number), compressing=True) for number in range(300)]
    fields = [one.fields for one in made]
    for name in ("n", "guided_regex", "response_format", "repetition_penalty", "logit_bias", "echo", "cache_salt"):
        assert sum(name in one for one in fields) >= 3, name
    assert 0.5 * LEAVES < sum(one.leaves is not None for one in made) / len(made) < 2 * LEAVES


def test_each_choice_of_an_answer_is_told_apart_by_what_was_served_for_it() -> None:
    """A drafter's process may be killed between two choices of one request: one of them is shortened, one is not."""
    left_out = {"why": None, "spans": [[0, 4], [8, 9]], "kept_tokens": 5, "original_tokens": 9}
    whole = {"why": "drafter_io", "spans": [], "kept_tokens": 9, "original_tokens": 9}
    answer = {
        "choices": [
            {"text": "a", "finish_reason": "length", "logprobs": {"tokens": ["a"], "token_logprobs": [-1.5]}},
            {"finish_reason": "stop", "logprobs": {"content": [{"token": "b", "logprob": -2.5}]}},
        ],
        "rekindle": {"compression": left_out, "jobs": [{"compression": left_out}, {"compression": whole}]},
    }
    assert shortened(answer) == [((0, 4), (8, 9)), None]
    assert said(answer) == [["a", "length", ["a"], [-1.5]], [-2.5]]
    assert shortened({"rekindle": {"compression": None}}) == [None]


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_whole_array() -> None:
    done = list(covering(SEED, None, 48))
    assert [str(one.row) for one in done if one.differing or one.trouble] == []
