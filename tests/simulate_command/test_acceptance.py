"""Tests of acceptance profiles: what is drawn from them, what steps give, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from effects.scope import Scope
from engine.__main__ import main
from engine.settings.user_error import UserError
from engine.tools.simulation.acceptance_profile import AcceptanceProfile, read_profile
from engine.tools.simulation.logs.logged_requests import make_tokens
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_steps import DecodingRequest, take_steps
from tests.simulate_command import kit

PROFILE = AcceptanceProfile("suffix", 0.5, (0.8, 0.5))
LONG = 1 << 60


def write_profiles(path: Path, *profiles: AcceptanceProfile) -> Path:
    listed = [
        {"draft": one.draft, "proposing_share": one.proposing, "right_by_position": one.right, "steps": 9}
        for one in profiles
    ]
    path.write_text(json.dumps(listed))
    return path


def test_a_position_counts_only_if_all_before_it_are_right() -> None:
    assert PROFILE.survival == pytest.approx((0.4, 0.2))
    assert PROFILE.tokens_per_step == pytest.approx(1.6)
    drawn = [PROFILE.draw_tokens(request, at) for request in range(40) for at in range(250)]
    assert set(drawn) == {1, 2, 3}
    assert mean(drawn) == pytest.approx(1.6, abs=0.03)
    assert mean(count > 2 for count in drawn) == pytest.approx(0.2, abs=0.02)
    assert drawn == [PROFILE.draw_tokens(request, at) for request in range(40) for at in range(250)]


def test_requests_of_one_step_get_different_tokens_and_the_first_to_end_ends_the_event() -> None:
    costs = Costs(acceptance=PROFILE, step_price=1.25)
    members = [DecodingRequest(number, 100, 40) for number in range(4)]
    taken = take_steps(costs, members, LONG, LONG)
    assert max(taken.tokens) == 40
    assert min(taken.tokens) < 40
    assert taken.steps < 40
    single = take_steps(costs, members, 1, LONG)
    assert single.steps == 1
    assert single.ns == round(1.25 * Costs().plain_ns([100] * 4))
    assert take_steps(costs, members, LONG, 0) == single, "one step is always taken"
    certain = Costs(acceptance=AcceptanceProfile("a", 1.0, (1.0, 1.0, 1.0)))
    assert take_steps(certain, [DecodingRequest(1, 0, 10)], LONG, LONG).tokens == (10,)
    assert take_steps(certain, [DecodingRequest(1, 0, 10)], LONG, LONG).steps == 3


def test_steps_without_a_profile_give_every_request_a_token() -> None:
    members = [DecodingRequest(1, 100, 9), DecodingRequest(2, 200, 5)]
    taken = take_steps(Costs(), members, 5, LONG)
    assert (taken.tokens, taken.steps) == ((5, 5), 5)
    assert taken.ns == sum(Costs().decode_ns([100 + at, 200 + at]) for at in range(5))


def test_a_file_has_the_profile_of_each_kind_of_draft(tmp_path: Path) -> None:
    path = write_profiles(tmp_path / "p.json", PROFILE, AcceptanceProfile("DFlash", 1.0, (0.9, 0.8, 0.7)))
    assert read_profile(path, "", 0) == PROFILE
    assert read_profile(path, "DFlash", 2).right == (0.9, 0.8)
    with pytest.raises(UserError, match="'mtp'; it has suffix, DFlash"):
        read_profile(path, "mtp", 0)


def test_a_simulation_with_a_profile_answers_the_same_tokens_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = kit.request(0, make_tokens("prompt", 40), answer=20_000)
    sessions = [kit.Session("a", (kit.Agent((asked,)),))]
    plain = kit.run(sessions, Scope())
    kit.watch(monkeypatch)
    profile = AcceptanceProfile("a", 1.0, (0.9, 0.9))
    monkeypatch.setattr(kit, "COSTS", Costs(token_bytes=16, file=0, acceptance=profile))
    drawn = kit.run(sessions, Scope())
    assert drawn.clock.now < plain.clock.now / 2


def test_the_command_draws_from_the_file_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"timestamp": 0, "input": "a prompt", "output": "an answer of some tokens " * 9, "session_id": "a"}]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(one) + "\n" for one in lines))
    path = write_profiles(tmp_path / "p.json", PROFILE)
    words = ["simulate", str(log), "--scope", "off", "--acceptance", str(path), "--width", "1"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance"] == {"draft": "suffix", "proposing": 0.5, "right": [0.8]}
    assert main(words) == 0
    assert "1.40 tokens a decode step" in " ".join(capsys.readouterr().out.split())
    assert main(["simulate", str(log), "--width", "1"]) == 2
    assert "--acceptance only" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "[1]",
        '[{"draft": "a"}]',
        '[{"draft": "a", "proposing_share": 2, "right_by_position": []}]',
        '[{"draft": "a", "proposing_share": 1, "right_by_position": [NaN]}]',
        '[{"draft": "a", "proposing_share": 1, "right_by_position": "x"}]',
        '[{"draft": "a", "proposing_share": 1, "right_by_position": [' + "1" * 400 + "]}]",
        json.dumps([{"draft": "a", "proposing_share": 1, "right_by_position": [1] * 32}]),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"--acceptance .*p\.json: ") as refused:
        read_profile(path, "", 0)
    assert "\n" not in str(refused.value)
