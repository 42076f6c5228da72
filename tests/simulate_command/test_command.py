"""`rekindle simulate` as a person runs it: table, JSON, plot, and mistakes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from engine.__main__ import main
from engine.settings.output import plot_style
from engine.tools.simulation.parallel_runs import run_side_by_side
from tests.simulate_command.test_logs import GOLDEN, counts, session, write


@pytest.fixture
def log(tmp_path: Path) -> str:
    turns = [counts(turn * 9, 400 + 80 * turn, list(range(100 + 20 * turn))) for turn in range(6)]
    return str(write(tmp_path / "s.json", session(*turns)))


def test_json_stands_alone_on_standard_output(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", log, "--scope", "off,full,auto:8,300", "--restart-every", "2", "--json", "--min-tokens", "64"]
    assert main(words) == 0
    out = capsys.readouterr()
    found = json.loads(out.out)
    assert out.err == ""
    by_scope = {one["scope"]: one for one in found["scopes"]}
    assert list(by_scope) == ["no cache", "off", "full", "auto:8", "300"]
    assert by_scope["full"]["hit_tokens"] == by_scope["full"]["infinite_hit_tokens"] > 0
    assert by_scope["full"]["written_bytes"] >= by_scope["full"]["unique_bytes"]
    assert by_scope["full"]["restarts"] == 2
    assert by_scope["no cache"]["first_token_ms"][0] > by_scope["full"]["first_token_ms"][0]
    assert found["logs"]["files"] == {"s.json": "claude-code"}
    assert found["costs"]["source"].startswith("the demo")
    assert found["settings"]["budget_bytes"] == 8192 << 20


def test_the_table_says_what_it_rests_on(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", log, str(GOLDEN / "a_full_house.jsonl"), "--scope", "full", "--budget-tokens", "1000"]) == 0
    )
    shown = capsys.readouterr().out
    for said in ("hit tokens", "of an infinite cache", "written", "first token, median", "no cache", "full", "Costs:"):
        assert said in shown
    assert "room for 1,000" in " ".join(shown.split())
    assert "\x1b" not in shown


def test_a_model_with_recurrent_state_is_simulated_with_its_checkpoints(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", log, "--scope", "full", "--restart-every", "2", "--min-tokens", "64"]
    costs = tmp_path / "costs.json"
    costs.write_text('{"state_bytes": 4096}')
    for more in (["--state-bytes", "4096"], ["--costs", str(costs)]):
        assert main([*words, *more, "--state-checkpoints", "3", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["costs"]["state_bytes"], found["settings"]["state_checkpoints"]) == (4096, 3)
        _, full = found["scopes"]
        assert full["written_bytes"] > full["checkpoint_bytes"] >= 6 * 4096
        assert 0 < full["hit_tokens"] <= full["infinite_hit_tokens"]
    assert main([*words, "--state-bytes", "4096"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of that, checkpoints" in shown
    assert "takes 4,096 bytes, and the device has 8 of them." in shown


def test_the_plot_is_a_picture(log: str, tmp_path: Path) -> None:
    words = ["simulate", log, "--scope", "full,auto", "--restart-every", "2", "--min-tokens", "64", "--plot"]
    assert main([*words, str(tmp_path / "p.svg")]) == 0
    text = "".join(ET.parse(tmp_path / "p.svg").getroot().itertext())  # noqa: S314 - our own
    for said in ("full", "auto:30", "no cache", "infinite cache", "restart", "first token", "6 requests of 1 session,"):
        assert said in text
    assert main([*words, str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # newer Pythons say so where pytest has threads
def test_processes_of_their_own_tell_the_same(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "simulate",
        log,
        "--scope",
        "off,full,auto:8,300",
        "--restart-every",
        "2",
        "--min-tokens",
        "64",
        "--json",
        "--quiet",
    ]
    assert main([*words, "--plot", str(tmp_path / "one.svg")]) == 0
    alone = capsys.readouterr()
    monkeypatch.setattr("engine.tools.simulate.LONG", 0)
    monkeypatch.setattr("engine.tools.simulate.count_cores", lambda: 3)
    assert main([*words, "--plot", str(tmp_path / "three.svg")]) == 0
    assert capsys.readouterr() == alone
    assert (tmp_path / "three.svg").read_text() == (tmp_path / "one.svg").read_text()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_results_come_in_order_steps_are_told_and_a_process_that_dies_is_not_waited_for() -> None:
    steps = list[int]()

    def work(number: int, step: Callable[[], None]) -> tuple[int, int]:
        for _ in range(number):
            step()
        return number, os.getpid()

    found = run_side_by_side([partial(work, number) for number in (3, 0, 2, 1)], lambda: steps.append(1), 2)
    assert [number for number, _ in found] == [3, 0, 2, 1]
    assert len(steps) == 6
    assert len({process for _, process in found} | {os.getpid()}) == 5
    with pytest.raises(RuntimeError, match="died; see"):
        run_side_by_side([partial(work, 1), lambda _: os._exit(3)], lambda: None, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "LOG"),
        (["--scope", "auto:0"], '"off", "full", "auto", "auto:N" or N'),
        (["--scope", "full,,off"], "--scope"),
        (["--budget", "-1"], "--budget"),
        (["--slots", "0"], "--slots"),
        (["--plot", "p.jpeg"], "accepted: a name that ends in .svg or .png"),
        (["--plot", "nowhere/p.svg"], "there is no folder nowhere"),
        (["--costs", "none.json"], "none.json: no such file"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    log: str, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = str(write(tmp_path / "t.jsonl", {"timestamp": 0, "input": "Hello"}))
    assert main(["simulate", *([log, texts] if words else []), *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    log: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot_style, "find_spec", lambda _: None)
    assert main(["simulate", log, "--plot", "p.svg"]) == 2
    assert "pip install 'rekindle[plot]'" in capsys.readouterr().err


def test_the_environment_of_serve_is_not_taken_for_this_command(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_SLOTS", "99")
    monkeypatch.setenv("REKINDLE_MODEL", "nowhere")
    assert main(["simulate", log, "--scope", "off", "--json"]) == 0
