"""Tests of costs: measured figures, files of figures, and what is refused as a figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.settings.user_error import UserError
from engine.tools.simulation.recorded_trace import read_recorded
from engine.tools.simulation.simulated_costs import Costs, MeasuredCosts, fit_line, read_costs
from states.rates import estimate_prefill_time

GOLDEN = Path(__file__).parents[1] / "golden"


def test_a_line_goes_through_its_points_and_never_below_zero() -> None:
    assert fit_line([(0, 10), (100, 60)]) == (10, pytest.approx(0.5))
    assert fit_line([(50, 10)]) == (10, 0)
    assert fit_line([(0, 60), (100, 10)]) == (35, 0)
    a, b = fit_line([(100, 1), (200, 100)])
    assert a >= 0
    assert b >= 0


def test_later_tokens_take_longer_and_the_engine_plans_with_the_same_figures() -> None:
    costs = Costs()
    assert costs.chunk_ns(8000, 8256) > costs.chunk_ns(0, 256)
    planned = estimate_prefill_time(costs.build_rates(), 0, 8192)
    spent = sum(costs.chunk_ns(at, at + 256) - costs.launch for at in range(0, 8192, 256))
    assert planned == pytest.approx(spent, rel=0.01)
    assert costs.decode_ns([100, 100]) < 2 * costs.decode_ns([100])


def test_a_step_with_proposals_takes_longer_and_gives_more_tokens() -> None:
    plain, drafted = Costs(), Costs(tokens_per_step=3.0, step_price=1.5)
    assert drafted.decode_ns([100, 200]) == pytest.approx(plain.decode_ns([100, 200]) / 2, abs=1)
    assert drafted.chunk_ns(0, 64) == plain.chunk_ns(0, 64)
    with pytest.raises(ValueError, match="a number from 1"):
        Costs(tokens_per_step=0.5)


def test_what_was_recorded_takes_the_place_of_what_was_assumed() -> None:
    measured = MeasuredCosts(((0.0, 10.0), (100.0, 20.0)), ((5.0, 99.0),), {"disk": (7.0, 9.0, 8.0)}, 64)
    costs = measured.apply_to(Costs(), "recorded")
    assert (costs.prefill, costs.prefill_slope, costs.decode, costs.disk, costs.token_bytes) == (10, 0.1, 99, 8, 64)
    assert costs.host == Costs().host
    assert costs.source.startswith("recorded (decode, decode_slope, disk, prefill")
    assert MeasuredCosts().apply_to(Costs(), "recorded") == Costs()


def test_a_trace_that_told_no_times_says_at_least_how_large_rows_are() -> None:
    measured = read_recorded(GOLDEN / "compressed_restored_and_speculated.jsonl").measured
    assert measured.chunks == measured.decode_steps == ()
    assert measured.token_bytes > 0


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"token_bytes": 1000, "disk": 5}))
    costs = read_costs(path, Costs())
    assert (costs.token_bytes, costs.disk, costs.decode, costs.source) == (
        1000,
        5,
        Costs().decode,
        "mine.json; what it does not name: the demo in bf16 on two cores",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "no JSON"),
        ("[]", "no JSON object"),
        ('{"speed": 3}', "unknown: speed"),
        ('{"disk": -1}', "disk is -1"),
        ('{"disk": "x"}', "disk is x"),
        ('{"disk": NaN}', "disk is nan"),
        ('{"token_bytes": 0}', "token_bytes is 0"),
        ('{"token_bytes": 1.5}', "token_bytes is 1.5"),
    ],
)
def test_what_is_no_cost_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_costs(path, Costs())
