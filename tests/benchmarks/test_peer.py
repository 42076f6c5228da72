"""The servers that are compared: their commands, and the load of agents that all of them get."""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peer, peer_load
from benchmarks.agents_load import AgentsRun, Workload, ask_in_turn, run_agents
from benchmarks.peer_models import DEMO, make_servers, name_subject
from benchmarks.peer_servers import (
    ROOT,
    VLLM_ENVIRONMENT,
    measure_share,
    serve_llama,
    serve_ours,
    serve_vllm,
)
from benchmarks.peer_together import compute_size, list_questions, measure_together
from engine.tools.bench.bench_prompts import LoadPrompt
from engine.tools.bench.load_client import Sample
from tests.e2e.prepared import serving

MODEL = Path("/models/m8b")


def test_vllm_is_started_by_its_own_interpreter_from_its_own_folders() -> None:
    server = serve_vllm(MODEL, "/venv/bin/python", "/vsite:/site", "--max-num-seqs 64")
    words = server.command(16, 32000)
    assert words[:5] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    assert words[words.index("--max-model-len") + 1] == "32000"
    assert "--enable-prompt-tokens-details" in words
    assert words[-2:] == ["--max-num-seqs", "64"]
    environment = server.make_environment(Path("/home"))
    assert environment["PYTHONPATH"] == "/vsite:/site", "our own packages do not come first"
    assert VLLM_ENVIRONMENT.items() <= environment.items()
    assert "VLLM_BATCH_INVARIANT" not in environment
    assert server.version[0] == "/venv/bin/python"


def test_vllm_as_it_is_installed_keeps_its_path_and_has_an_exact_mode() -> None:
    server = serve_vllm(MODEL, "python", "", "", exact=True)
    assert server.make_environment(Path("/home"))["VLLM_BATCH_INVARIANT"] == "1"
    assert server.command(1, 100)[-2:] == ["--attention-backend", "FLASH_ATTN"]
    assert "PYTHONPATH" not in server.environment


def test_ours_and_llama_cpp_get_room_for_what_they_are_asked() -> None:
    ours = serve_ours(MODEL, ROOT, ("--draft", "none"), sized=True)
    assert ours.command(4, 1000)[1:] == [
        *("-m", "engine", "serve", str(MODEL)),
        *("--slots", "4", "--max-ctx", "1000", "--draft", "none"),
    ]
    assert ours.make_environment(Path("/home"))["XDG_CACHE_HOME"] == "/home"
    assert ours.make_environment(Path("/home"))["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert "--slots" not in serve_ours(MODEL, ROOT, (), sized=False).command(4, 1000)
    llama = serve_llama(Path("/llama-server"), Path("/m.gguf"), ("-t", "2"))
    assert llama.command(4, 1000)[-6:] == ["-t", "2", "-np", "4", "-c", "4000"]


def test_experts_of_as_many_layers_are_on_the_cpu_in_both_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "30b-a3b-Q4_K_M.gguf"
    file.touch()
    words = ["--file", str(file), "--shape", "30b-a3b", "--llama", "/llama-server", "--cpu-experts", "24"]
    monkeypatch.setattr(sys, "argv", ["peer", *words])
    given = peer.parse_options()
    commands = {name: server.command(1, 1000) for name, server in make_servers(given, tmp_path).items()}
    ours, theirs = commands["ours"], commands["llama.cpp"]
    assert ours[ours.index("--cpu-experts") + 1] == theirs[theirs.index("--n-cpu-moe") + 1] == "24"
    assert "-t" in theirs
    assert name_subject(given) == "30B-A3B shape in Q4_K_M, experts of 24 layers on the CPU"


def test_a_version_is_one_line_of_what_the_server_says() -> None:
    server = serve_vllm(MODEL, sys.executable, "/nowhere", "")
    assert "\n" not in server.find_version()
    assert server.find_version()
    assert serve_ours(MODEL, ROOT, (), sized=False).find_version() == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "agents,soon"], "soon"),
        (["--vllm", "python", "--file", "m.gguf"], "safetensors"),
        (["--once", "--parts", "streams"], "--once"),
        (["--together", "--parts", "cold,restart"], "--together"),
        (["--packing", "awq"], "--packing"),
        (["--shape", "gpt-oss-20b", "--file", "m.gguf"], "drawn"),
        (["--shape", "30b-a3b"], "--file"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peer", *words])
    with pytest.raises(SystemExit):
        peer.parse_options()
    assert said in capsys.readouterr().err


SMALL = Workload(sessions=3, turns=2, head=200, results=(30, 60), answers=(4, 8))
SMALL_HEAD = Workload(sessions=3, turns=1, head=100, results=(30, 60), answers=(4, 8))


def test_sessions_have_one_head_and_each_turn_goes_on_from_the_one_before() -> None:
    sessions = SMALL.make_sessions(1)
    assert len(sessions) == 3
    heads = {session[0].tokens[:200] for session in sessions}
    assert len(heads) == 1
    assert len({session[0].tokens[200:] for session in sessions}) == 3
    for first, second in sessions:
        assert second.tokens[: len(first.tokens)] == first.tokens
        assert 4 + 30 <= len(second.tokens) - len(first.tokens) <= 8 + 60
        assert len(second.tokens) + second.answer <= SMALL.longest
    repeated = [[prompt.tokens for prompt in session] for session in SMALL.make_sessions(1)]
    assert repeated == [[prompt.tokens for prompt in session] for session in sessions]


def test_agents_and_single_prompts_are_measured_over_http(tmp_path: Path) -> None:
    with serving("--slots", "4", "--kv-cache-dir", str(tmp_path)) as running:
        url = str(running.client.base_url)
        run = run_agents(url, SMALL, 1)
        found = run.compute_figures()
        assert [len(turn) for turn in run.turns] == [3, 3]
        assert all(sample.tokens >= 4 for turn in run.turns for sample in turn)
        assert 0 < found["agents: found, %"] <= found["agents: could be found, %"] < 100
        assert found["agents: whole run, s"] >= found["agents: first token of the first turn p50, s"] > 0
        prompt = LoadPrompt(tuple(range(100, 400)), 4)
        fresh, again = ask_in_turn(url, [prompt, prompt])
        assert not fresh.cached
        assert again.cached
        assert again.cached >= 200


def test_a_few_failures_are_counted_and_many_end_the_run() -> None:
    def sample(error: str = "") -> Sample:
        return Sample(1.0, [] if error else [3.0, 4.0], 5.0, answer=2, error=error)

    run = AgentsRun(10.0, [[sample() for _ in range(19)] + [sample("no text")]], prompt_tokens=100, findable=50)
    found = run.compute_figures()
    assert found["agents: unanswered"] == 1
    assert found["agents: first token of the first turn p50, s"] == 2
    run.turns[0] += [sample("no text")] * 20
    with pytest.raises(SystemExit, match="21 of 40 requests of the agents failed: no text"):
        run.compute_figures()


def test_figures_compare_each_part_that_was_asked_for_with_the_peer() -> None:
    about = {"shape": "8b", "file": None, "packing": ""}
    given = argparse.Namespace(
        parts="agents,restart", lengths="512,2048", sessions=16, turns=6, levels="1", prompts=256, **about
    )
    names = [name for part in ("agents", "restart") for *_, name in peer.ROWS[part](given)]
    figures = {"ours": dict.fromkeys(names, 1.0), "vLLM": dict.fromkeys(names, 2.0)}
    made = peer.make_figures(figures, "8B shape", given)
    assert [figure.promise for figure in made] == ["agents"] * 5 + ["restart"] * 2
    missed = [figure.subject for figure in made if not figure.met]
    assert missed == ["8B shape, prompt tokens found"], "a share is better if it is higher, a time if it is lower"


def test_each_level_has_requests_by_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[str, ...]]()

    def answer(_: str, *words: str) -> list[dict[str, Any]]:
        asked.append(words)
        levels = words[words.index("--concurrency") + 1].split(",")
        return [
            {
                "level": f"{level} streams",
                "requests": 4,
                "answered": 3,
                "tokens_s": 10.0,
                "inter_token_ms": [1, 2, 3],
                "first_token_ms": [5, 6, 7],
            }
            for level in levels
        ]

    monkeypatch.setattr(peer_load, "run_bench_serve", answer)
    given = argparse.Namespace(levels="1,8", prompts=64, answers=8, temperature="0", requests=2)
    found = peer_load.ask_streams("http://server", given)
    assert [words[words.index("--concurrency") + 1] for words in asked] == ["1", "8"]
    assert [words[words.index("--requests") + 1] for words in asked] == ["4", "16"]
    assert found["8: unanswered"] == 1
    assert found["1: first token p50, ms"] == 5
    peer_load.ask_level("http://server", 8, argparse.Namespace(**{**vars(given), "requests": 0}))
    assert "--requests" not in asked[2]


def test_a_file_of_a_shape_is_named_after_its_mix() -> None:
    file = Path("/models/8b-Q4_K_M.gguf")

    def name(shape: str, file: Path | None = None, packing: str = "", layers: int = 0) -> str:
        return name_subject(argparse.Namespace(file=file, shape=shape, packing=packing, layers=layers, cpu_experts=0))

    assert name("8b", file) == "8B shape in Q4_K_M"
    assert name("demo", file) == "8b-Q4_K_M"
    assert name("8b") == "8B shape"
    assert name("8b", packing="awq") == "8B shape in AWQ"
    assert name("gpt-oss-20b") == "gpt-oss-20b shape"
    assert name("gemma4-31b", layers=12) == "gemma4-31b shape, 12 layers"


def test_a_server_that_is_started_once_has_no_second_start() -> None:
    given = argparse.Namespace(levels="1", prompts=64, once=True, together=False)
    assert not any(promise == "start" for promise, *_ in peer.list_stream_rows(given))
    given.once = False
    assert any(promise == "start" for promise, *_ in peer.list_stream_rows(given))


def test_servers_that_run_together_have_no_memory_of_their_own() -> None:
    given = argparse.Namespace(levels="1", prompts=64, once=True, together=True)
    assert not any(promise == "memory" for promise, *_ in peer.list_stream_rows(given))
    given.together = False
    assert any(promise == "memory" for promise, *_ in peer.list_stream_rows(given))


def make_options(**changed: Any) -> argparse.Namespace:
    options = {
        "parts": "cold,streams,agents",
        "levels": "2,1",
        "lengths": "64,32",
        "prompts": 32,
        "answers": 4,
        "requests": 1,
        "temperature": "0",
        "rounds": 2,
        "limit": math.inf,
        "wait_for": None,
        "sessions": 3,
        "turns": 1,
        "head": 100,
        "tool_results": "30-60",
        "agent_answers": "4-8",
    }
    return argparse.Namespace(**{**options, **changed})


# By default agents and single prompts are measured, from one server.
@pytest.mark.long
@pytest.mark.timeout(120)
def test_servers_start_together_and_answer_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers = {name: serve_ours(DEMO, ROOT, ("--draft", "none", "--device", "cpu"), sized=True) for name in "ab"}
    found = measure_together(servers, tmp_path, make_options(parts="streams,cold,agents", levels="1", lengths="64"))
    assert list(found) == ["a", "b"]
    for rounds in found.values():
        assert len(rounds) == 2
        for figures in rounds:
            assert figures["1: tok/s"] > 0
            assert figures["first behind 64, ms"] > 0
            assert figures["agents: whole run, s"] > 0
            assert not figures["1: unanswered"]
    asked = re.findall(r"s, ([ab]) ", capsys.readouterr().out)
    assert asked == ["a", "b"] * 3 + ["b", "a"] * 3, "each question goes to all servers, in rounds of either order"


def test_questions_come_in_the_order_of_the_options() -> None:
    names = [question.name for question in list_questions(make_options())]
    assert names == ["cold prompts of 64", "cold prompts of 32", "2 streams", "1 streams", "3 sessions"]
    assert compute_size(make_options()) == (3, SMALL_HEAD.longest + 256)
    assert compute_size(make_options(parts="cold,streams")) == (2, 64 + 4 + 256)


def test_figures_that_a_limit_left_out_are_not_compared() -> None:
    given = make_options(parts="cold", file=None, packing="", shape="demo")
    found = {"ours": {"first behind 32, ms": 1.0, "first behind 64, ms": 2.0}, "vLLM": {"first behind 32, ms": 3.0}}
    [only] = peer.make_figures(found, "8B shape", given)
    assert (only.at, only.ours, only.peers, only.met) == ("32", 1.0, {"vLLM": 3.0}, True)
    assert peer.take_medians([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(
    ("shape", "length", "most"), [("8b", "32768", 1.03), ("8b", "8192", 1), ("hybrid-27b", "1024", 1.05)]
)
def test_long_prompts_and_hybrids_may_take_somewhat_longer(shape: str, length: str, most: float) -> None:
    assert peer.find_allowed(shape, length) == most


def test_the_memory_of_a_process_that_ended_is_nothing() -> None:
    assert measure_share(os.getpid()) > 1000
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    assert measure_share(ended.pid) == 0
