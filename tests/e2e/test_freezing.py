"""A conversation over a real server whose aged messages are frozen: it goes on beyond the context, and stays warm.

The demo is its own drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.core.replay import replay_file
from tests.e2e.prepared import serving
from tests.e2e.server import Running

CONTEXT = 1024
LINES = "\n".join(f"Line {at} says {at * 37 % 101}." for at in range(26))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("freezing") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    kept = ("--kv-cache-dir", str(tmp_path_factory.mktemp("kept")), "--kv-cache-budget", "256")
    freezing = ("--disk-prefix-cache-compress", "--prefill-threshold", "600", "--prefill-keep-ratio", "0.1")
    how = ("--prefill-drafter", "demo", "--prefill-compression", "auto", "--kv-cache-min-tokens", "64")
    with serving(*how, *freezing, *kept, "--max-ctx", str(CONTEXT), "--paranoid", "--trace", str(recorded)) as running:
        yield running


def turn(server: Running, messages: list[dict[str, str]], number: int, **fields: Any) -> dict[str, Any]:
    """One more, whose answer joins the messages."""
    messages.append({"role": "user", "content": f"Part {number}:\n{LINES}"})
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."})
    reported: dict[str, Any] = answer["rekindle"]
    return {**reported, "sent": answer["usage"]["prompt_tokens"]}


def test_a_cold_prompt_that_continues_nothing_is_compressed_as_a_whole(server: Running) -> None:
    """With freezing on, it goes through the same gate as without, and the turn behind it is served all the same."""
    messages = [{"role": "system", "content": "You are brief."}]
    always = {"compression": {"mode": "always", "keep_ratio": 0.5}}
    first = turn(server, messages, 0, **always)["compression"]
    assert first["why"] is None
    assert first["kept_tokens"] < first["original_tokens"]
    second = turn(server, messages, 1, **always)["compression"]
    assert second["why"] in {None, "too_few_aged", "nothing_aged"}, "it continues, so messages are what is frozen"


def test_a_conversation_goes_on_beyond_the_context_and_is_found_again(server: Running, recorded: Path) -> None:
    messages = [{"role": "system", "content": "You are a patient listener."}]
    turns = [turn(server, messages, number) for number in range(8)]
    assert turns[-1]["sent"] > 2 * CONTEXT
    whys = [one["compression"]["why"] for one in turns]
    assert whys[:2] == ["below_threshold", "too_few_aged"]
    frozen = [one for one in turns if one["compression"]["time_ms"]]
    assert 1 <= len(frozen) <= 4, "several messages at once, and not in every turn"
    for before, after in pairwise(turns):
        reported = after["compression"]
        assert reported["kept_tokens"] < CONTEXT
        if not reported["time_ms"]:
            grown = before["compression"]["kept_tokens"] - 64
            assert after["restored_tokens"] >= grown, "all that was computed before, in whole blocks"
    assert all(one["compression"]["spans"][0][0] == 0 for one in frozen), "the system prompt stays"
    figures = server.client.get("/props").json()
    assert 4 <= figures["frozen"]["messages"] <= figures["frozen"]["found"]
    assert (figures["frozen"]["damaged"], figures["pflash"]["freeze"], figures["pflash"]["hot_window"]) == (0, True, 2)
    assert server.stop() == 0
    assert replay_file(recorded).is_complete
