"""`rekindle bench serve` over real sockets: our own server with a fake engine, and one that is not ours."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import anyio
import pytest

from engine.__main__ import main
from engine.settings.output import plot_style
from engine.tools.bench.bench_figures import compute_percentiles
from tests.bench_command.foreign import Foreign, foreign
from tests.http.conftest import Site, served
from tests.simulate_command.test_logs import counts, session, write
from tests.text import small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def peer() -> Iterator[Foreign]:
    with foreign() as server:
        yield server


@pytest.fixture
async def ours(tmp_path: Path) -> AsyncIterator[Site]:
    async with served(small.write(tmp_path), door={"slots": 8, "step_s": 0.001}) as site:
        yield site


def bench(*words: str) -> int:
    return main(["bench", "serve", *words])


def read(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def run_bench(site: Site, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run the command on a thread, as a person would run it, while the server's event loop goes on. Return what it
    prints.
    """
    run = partial(bench, "--url", str(site.client.base_url), "--words", "--json", *words)
    assert await anyio.to_thread.run_sync(run) == 0
    return read(capsys)


async def test_our_server_is_measured_at_every_level(ours: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--concurrency", "1,4", "--requests", "6", "--prompt-tokens", "20-40", "--answer-tokens", "5")
    found = await run_bench(ours, capsys, *words)
    one, four = found["levels"]
    assert (one["level"], four["level"]) == ("1 stream", "4 streams")
    for level in (one, four):
        assert level["answered"] == 6
        assert level["answer_tokens"] == 30
        assert level["errors"] == {}
        assert level["first_token_ms"][0] <= level["first_token_ms"][1] <= level["first_token_ms"][2]
        assert 0 < level["inter_token_ms"][0] < 1e3 * level["seconds"]
        assert level["tokens_s"] == pytest.approx(30 / level["seconds"])
        assert level["busy"] > 0
        assert level["late_ms"] is not None
    assert found["model"] == "small"
    assert [len(listed) for listed in found["requests"].values()] == [6, 6]
    assert all(each["answer_tokens"] == 5 and not each["error"] for each in found["requests"]["1 stream"])
    assert len(ours.door.tickets) == 1 + 6 + 4 + 6, "and a warm-up of each stream, which nothing tells of"


async def test_no_cache_flatters_unless_it_is_told_to(ours: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompt-tokens", "60", "--answer-tokens", "2", "--requests", "4")
    found = await run_bench(ours, capsys, *words)
    assert found["levels"][0]["hit_share"] < 0.2, "what a tokenizer puts before every text"
    again = await run_bench(ours, capsys, *words)
    assert again["levels"][0]["hit_share"] < 0.2
    assert again["seed"] != found["seed"]
    repeated = await run_bench(ours, capsys, *words, "--seed", str(found["seed"]))
    assert repeated["levels"][0]["hit_share"] > 0.8
    shared = await run_bench(ours, capsys, *words, "--shared-prefix", "40")
    assert 0.4 < shared["levels"][0]["hit_share"] < 0.8


async def test_arrivals_at_a_rate_wait_for_nobody(ours: Site, capsys: pytest.CaptureFixture[str]) -> None:
    ours.door.go = anyio.Event()
    words = ("--rate", "200", "--requests", "12", "--prompt-tokens", "8", "--answer-tokens", "3", "--seed", "5")
    words = (*words, "--warm-up", "0")
    found: list[dict[str, Any]] = []

    async def run() -> None:
        found.append(await run_bench(ours, capsys, *words))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        while len(ours.door.tickets) < 12:  # noqa: ASYNC110 - all are there before any is answered
            await anyio.sleep(0.005)
        ours.door.go.set()
    first = found[0]["levels"][0]
    assert (first["level"], first["answered"]) == ("200 / s", 12)
    assert len({each["sent_s"] for each in found[0]["requests"]["200 / s"]}) == 12


async def test_a_log_gives_lengths_and_what_prompts_share(
    ours: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(write(tmp_path / "s.json", session(*[counts(n, 64 * n, list(range(n)), out=n) for n in (1, 2, 3, 4)])))
    found = await run_bench(ours, capsys, "--log", log, "--requests", "4", "--warm-up", "0")
    listed = found["requests"]["1 stream"]
    assert [each["answer_tokens"] for each in listed] == [1, 2, 3, 4]
    assert [each["cached_tokens"] > 0 for each in listed] == [False, True, True, True]
    alone = await run_bench(ours, capsys, "--log", log, "--requests", "4", "--warm-up", "0", "--lengths-only")
    assert [each["answer_tokens"] for each in alone["requests"]["1 stream"]] == [1, 2, 3, 4]
    assert alone["levels"][0]["hit_share"] < 0.1


async def test_chat(ours: Site, capsys: pytest.CaptureFixture[str]) -> None:
    found = await run_bench(ours, capsys, "--api", "chat", "--requests", "2", "--answer-tokens", "4")
    assert found["levels"][0]["answer_tokens"] == 8


@pytest.mark.parametrize(
    ("model", "level"),
    [
        ("plain", {"answer_tokens": 8, "cached_tokens": None, "tokens_an_event": 1.0}),  # counted by its events
        ("counts", {"answer_tokens": 12, "cached_tokens": 20, "hit_share": 0.25, "tokens_an_event": 2.0}),
        ("llama", {"answer_tokens": 4, "cached_tokens": 14}),
        ("thinks", {"answer_tokens": 4}),
    ],
)
def test_a_foreign_server(peer: Foreign, model: str, level: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", model, "--requests", "2", "--api-key", "secret", "--json")
    assert bench("--url", f"{peer.url}/v1/", *words) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    (found,) = json.loads(out)["levels"]
    assert {name: found[name] for name in level} == level
    assert found["answered"] == 2
    body = peer.bodies[0]
    assert (body["path"], body["key"], body["ignore_eos"]) == ("/v1/completions", "Bearer secret", True)
    assert (len(body["prompt"]), body["max_tokens"], body["stream"]) == (512, 128, True)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("full", "HTTP 429: no room for this"),
        ("cut", "the server closed the connection within its answer"),
        ("silent", "an answer without text"),
        ("fails", "in the stream: out of memory"),
        ("garbage", "an event that is none: "),
    ],
)
def test_what_fails_is_counted_and_told(
    peer: Foreign, model: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--url", peer.url, "--model", model, "--requests", "3") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "answered 0 of 3" in shown
    assert f"1 stream: 3 failed: {said}" in shown


def test_the_first_model_that_is_listed_is_asked(peer: Foreign, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", peer.url, "--requests", "1", "--body", '{"top_k": 1}') == 0
    assert {body["model"] for body in peer.bodies} == {"counts"}
    assert all("ignore_eos" not in body and body["top_k"] == 1 for body in peer.bodies)
    shown = capsys.readouterr().out
    for said in (f"counts at {peer.url}", "first token p50", "inter-token", "tokens/s together", "25.0 %", "--seed "):
        assert said in shown
    assert "\x1b" not in shown


def test_the_plot_is_a_picture(peer: Foreign, tmp_path: Path) -> None:
    words = ("--url", peer.url, "--requests", "2", "--concurrency", "1,2", "--plot")
    assert bench(*words, str(tmp_path / "p.svg")) == 0
    text = "".join(ET.parse(tmp_path / "p.svg").getroot().itertext())  # noqa: S314 - our own
    for said in ("1 stream", "2 streams", "Tokens a second", "First token", "p99", "counts at"):
        assert said in text
    assert bench("--url", peer.url, "--model", "silent", "--requests", "1", "--plot", str(tmp_path / "p.png")) == 1
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_shows_what_was_measured_so_far(peer: Foreign) -> None:
    words = ["bench", "serve", "--url", peer.url, "--model", "slow", "--warm-up", "0", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "engine", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # where the suite itself runs in a shell's background, Ctrl-C is ignored, and that is inherited
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - nothing else runs in it
    )
    while peer.sent < 15:  # of four hundred in twenty seconds: it has read the first few of them
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(out)
    assert found["interrupted"]
    (level,) = found["levels"]
    assert (level["requests"], level["answered"], level["unfinished"]) == (1, 0, 1)
    assert level["answer_tokens"] > 1
    assert level["inter_token_ms"][0] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "ftp://somewhere"], "Must be like http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:1"], "no server answers there (ConnectError"),
        (["--concurrency", "1,,4"], "Must be a number of streams from 1 to 1024"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rate", "0"], "Must be requests a second"),
        (["--rate", "nan"], "Must be requests a second"),
        (["--rate", "1", "--concurrency", "4"], "use either --concurrency or --rate"),
        (["--prompt-tokens", "9-3"], "the smaller number first"),
        (["--answer-tokens", "ten"], "Must be a number of tokens"),
        (["--shared-prefix", "512"], "accepted: less than --prompt-tokens 512"),
        (["--body", "[]"], "Must be a JSON object"),
        (["--lengths-only"], "--lengths-only needs --log"),
        (["--log", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--plot", "p.jpeg"], "accepted: a name that ends in .svg or .png"),
        (["--api", "messages"], "--api"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_without_matplotlib_a_plot_is_refused_before_anything_is_sent(
    peer: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot_style, "find_spec", lambda _: None)
    assert bench("--url", peer.url, "--plot", "p.svg") == 2
    assert peer.bodies == []


def test_percentiles() -> None:
    assert compute_percentiles([]) is None
    assert compute_percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert compute_percentiles([float(n) for n in range(100, 0, -1)]) == (50.0, 90.0, 99.0)
